# SPDX-License-Identifier: Apache-2.0
"""Instances with host memory of their own, for tests of the peer tier."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from kvtier._core.layout import crc32c
from kvtier.obs.metrics import Sample
from kvtier.testing.contract import Arena, chunk, make_env
from kvtier.tiers.base import Slot, TierContext
from kvtier.tiers.p2p.metrics import METRICS
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.tiers.p2p.tier import P2pTier
from kvtier.types import Outcome, Peer, Presence

SIZE = 65536
TRANSPORT = "tcp"
"""Of instances that say nothing else; see the fixture of that name."""


def free_port() -> int:
    """A port that nobody listens on; not one of those that the kernel gives to others meanwhile."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


class Host:
    """Host memory as a service has it: chunks in slots, with pins that are counted."""

    def __init__(self, num_slots: int = 64, size: int = SIZE) -> None:
        self.arena = Arena(num_slots, size)
        self.address = self.arena.address
        self.length_bytes = num_slots * self.arena.slot_bytes
        self.slots: dict[bytes, Slot] = {}
        self.writing: set[bytes] = set()
        self.pins: Counter[int] = Counter()
        self.delay_seconds = 0.0
        """Of a checksum."""
        self._next = 0
        self.lent: set[int] = set()

    def put(self, number: int, size: int = SIZE, *, crc: int | None = None) -> bytes:
        """Chunk `number` is READY; its key."""
        key, payload = chunk(number, 0, size)
        slot = self.arena.slot(self._next, key, size, payload)
        self._next += 1
        slot.crc = crc32c(slot.view) if crc is None else crc
        self.slots[key] = slot
        self.writing.discard(key)
        return key

    def reuse(self, key: bytes, payload: bytes) -> None:
        """The chunk's slot has another one's bytes now."""
        slot = self.slots.pop(key)
        slot.view[:] = payload

    # What a tier calls.
    def presence(self, keys: Sequence[bytes]) -> bytes:
        return bytes(
            Presence.PRESENT
            if key in self.slots
            else Presence.PENDING
            if key in self.writing
            else Presence.ABSENT
            for key in keys
        )

    def pin(self, key: bytes) -> Slot | None:
        slot = self.slots.get(key)
        if slot is not None:
            self.pins[slot.slot] += 1
        return slot

    def unpin(self, items: Sequence[Slot]) -> None:
        for item in items:
            assert self.pins[item.slot] > 0
            self.pins[item.slot] -= 1

    def slot(self, key: bytes, slot: int, generation: int, crc: int | None = None) -> Slot:
        item = self.arena.slot(slot, key, SIZE)
        item.generation, item.crc = generation, crc
        return item

    async def verify(self, items: Sequence[Slot]) -> list[bool]:
        for item in items:
            item.verified = crc32c(item.view) == item.crc
        return [item.verified for item in items]

    def lend(self, tier: P2pTier, count: int) -> None:
        """Let peers push here."""
        self.lent = {self._next + n for n in range(count)}
        self._next += count
        tier.host([(slot, 1) for slot in sorted(self.lent)])

    def give_back(self, slots: Sequence[int]) -> None:
        assert self.lent.issuperset(slots)
        self.lent.difference_update(slots)

    async def take_crcs(self, items: Sequence[Slot]) -> None:
        await asyncio.sleep(self.delay_seconds)

    @property
    def pinned(self) -> int:
        return self.pins.total()


class Instance:
    """A tier beside its host memory."""

    def __init__(self, tier: P2pTier, host: Host) -> None:
        self.tier = tier
        self.host = host
        self.into = Arena(64, SIZE)

    @property
    def address(self) -> str:
        return self.tier.own_address

    def context(
        self,
        seconds: float = 5.0,
        *,
        peer: str | None = None,
        request: str = "",
        wait: float = 0.0,
        windowed: bool = False,
        request_id: str = "test",
    ) -> TierContext:
        return TierContext(
            time.monotonic() + seconds,
            request_id,
            None if peer is None else Peer(peer, request, wait),
            windowed,
        )

    async def ask(self, keys: Sequence[bytes], ctx: TierContext | None = None) -> str:
        """``+`` for present, ``-`` for absent, ``?`` for pending."""
        answers = await self.tier.exists(keys, ctx or self.context())
        return "".join("-+?"[one] for one in answers)

    async def load(
        self, keys: Sequence[bytes], ctx: TierContext | None = None, size: int = SIZE
    ) -> list[Outcome]:
        """Load chunks; DONE only where the bytes are the chunk's, CORRUPT where they differ from
        the checksum that came with them, as the service would say."""
        slots = [self.into.slot(i, key, size) for i, key in enumerate(keys)]
        outcomes = await self.tier.load(slots, ctx or self.context())
        assert len(outcomes) == len(keys)
        for i, slot in enumerate(slots):
            if outcomes[i] is Outcome.DONE and crc32c(slot.view) != slot.crc:
                outcomes[i] = Outcome.CORRUPT
            if outcomes[i] is Outcome.DONE:
                assert any(bytes(slot.view) == chunk(n, 0, size)[1] for n in range(200))
                assert self.is_of(slot)
        return outcomes

    @staticmethod
    def is_of(slot: Slot) -> bool:
        """Whether the bytes are those of the slot's key."""
        return bytes(slot.view) == random.Random(slot.key).randbytes(slot.length)

    def told(self) -> dict[tuple[str, ...], float]:
        """Counters since the last call, by name and labels."""
        samples: list[Sample] = self.tier.env.recorder.take()
        return {(one.name, *one.labels[1:]): one.value for one in samples}


@contextlib.asynccontextmanager
async def instance(
    memory: Host | None = None, *, fields: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Instance]:
    """An instance that listens."""
    memory = Host() if memory is None else memory
    options.setdefault("port", free_port())
    options.setdefault("transport", TRANSPORT)
    env = replace(
        make_env(sizes=[SIZE], fields=fields, definitions=METRICS, num_slots=64), host=memory
    )
    tier = P2pTier("p2p", P2pOptions(**options), env)
    await tier.open()
    made = Instance(tier, memory)
    try:
        yield made
    finally:
        await tier.aclose(time.monotonic() + 5)
        assert memory.pinned == 0
        assert not memory.lent


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
