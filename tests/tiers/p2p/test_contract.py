# SPDX-License-Identifier: Apache-2.0
"""The contract of tiers, where a store is a push to a peer and a load a pull from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.contract import SIZES, Arena, TierContract, make_env
from kvtier.tiers.base import Slot, Tier, TierContext, TierEnv
from kvtier.tiers.p2p.metrics import METRICS
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.tiers.p2p.tier import P2pTier
from kvtier.types import Outcome, Presence, key_group
from tests.tiers.p2p.rig import free_port

SLOTS = 256


class Giver:
    """Host memory that has the chunks which are just being stored."""

    def __init__(self) -> None:
        self.arena = Arena(64, -(-max(SIZES) // 4096) * 4096)
        self.address = self.arena.address
        self.length_bytes = 64 * self.arena.slot_bytes
        self.free = list(range(64))
        self.items: dict[bytes, list[Slot]] = {}

    def add(self, item: Slot) -> None:
        """A store of it begins."""
        mine = self.arena.slot(self.free.pop(), item.key, item.length, bytes(item.view))
        self.items.setdefault(item.key, []).append(mine)

    def remove(self, key: bytes) -> None:
        """A store of it has ended."""
        self.free.append(self.items[key].pop().slot)

    def presence(self, keys: Sequence[bytes]) -> bytes:
        return bytes(Presence.PRESENT if self.items.get(key) else Presence.ABSENT for key in keys)

    def pin(self, key: bytes) -> Slot | None:
        return self.items[key][-1] if self.items.get(key) else None

    def unpin(self, items: Sequence[Slot]) -> None:
        """The service holds them while a store is under way."""

    async def take_crcs(self, items: Sequence[Slot]) -> None:
        """They have theirs."""


class Taker:
    """Host memory of a peer, all of it lent for chunks of others."""

    def __init__(self) -> None:
        self.arena = Arena(SLOTS, -(-max(SIZES) // 4096) * 4096)
        self.address = self.arena.address
        self.length_bytes = SLOTS * self.arena.slot_bytes

    def presence(self, keys: Sequence[bytes]) -> bytes:
        return bytes(len(keys))

    def pin(self, key: bytes) -> Slot | None:
        return None

    def unpin(self, items: Sequence[Slot]) -> None:
        assert not items

    async def take_crcs(self, items: Sequence[Slot]) -> None:
        assert not items

    def slot(self, key: bytes, slot: int, generation: int, crc: int | None = None) -> Slot:
        return self.arena.slot(slot, key, SIZES[key_group(key)])

    async def verify(self, items: Sequence[Slot]) -> list[bool]:
        from kvtier._core.layout import crc32c

        for item in items:
            item.verified = crc32c(item.view) == item.crc
        return [item.verified for item in items]

    def give_back(self, slots: Sequence[int]) -> None:
        """At the end."""


class Pair(P2pTier):
    """A tier that has one peer, which comes and goes with it."""

    def __init__(self, env: TierEnv, transport: str) -> None:
        self.giver = Giver()
        port = free_port()
        there = f"127.0.0.1:{port}"
        super().__init__(
            "p2p",
            P2pOptions(
                port=free_port(), peers=(there,), heartbeat_seconds=0.2, transport=transport
            ),
            replace(env, host=self.giver),
        )
        self.taker = Taker()
        peer_env = replace(
            make_env(num_slots=SLOTS, definitions=METRICS), host=self.taker, clock=env.clock
        )
        self.peer = P2pTier("p2p", P2pOptions(port=port, transport=transport), peer_env)

    async def open(self) -> None:
        await self.peer.open()
        self.peer.host([(slot, 1) for slot in range(SLOTS)])
        await super().open()

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        for item in items:
            self.giver.add(item)
        try:
            return await super().store(items, ctx)
        finally:
            for item in items:
                self.giver.remove(item.key)

    async def aclose(self, deadline: float) -> None:
        await super().aclose(deadline)
        await self.peer.aclose(time.monotonic() + 5)


@pytest.mark.fault("C26")
class TestContractOverTcp(TierContract):
    """See `TierContract`."""

    persistent = False
    transport = "tcp"

    def definitions(self) -> Sequence[Any]:
        return METRICS

    def make_tier(self, env: TierEnv, tmp_path: Path) -> Tier:
        return Pair(env, self.transport)

    def raw_get(self, tier: Tier, key: bytes) -> bytes | None:
        assert isinstance(tier, Pair)
        assert tier.peer._guests is not None
        item = tier.peer._guests._chunks.get(key)
        return None if item is None else bytes(item.view)

    def raw_put(self, tier: Tier, key: bytes, data: bytes) -> None:
        assert isinstance(tier, Pair)
        assert tier.peer._guests is not None
        view = tier.peer._guests._chunks[key].view
        view[:] = data + bytes([0x5A]) * (len(view) - len(data))


@pytest.mark.needs("ucx")
class TestContractOverUcx(TestContractOverTcp):
    """The same."""

    transport = "ucx"


@pytest.mark.needs("ucx")
class TestContractOverUcxOverTcp(TestContractOverTcp):
    """The same, as between hosts that share no memory."""

    transport = "ucx"

    @pytest.fixture(autouse=True)
    def _network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A context reads it when it is made.
        monkeypatch.setenv("UCX_TLS", "tcp,self")
