# SPDX-License-Identifier: Apache-2.0
"""An object tier beside a store in memory, with memory for chunks."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

from kvtier.options import Secret
from kvtier.testing.contract import Arena, chunk, context, make_env
from kvtier.tiers.base import TierContext
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.tier import ObjTier
from kvtier.types import Outcome, Presence
from tests.tiers.obj.memory_store import MemoryStore
from tests.tiers.obj.scripted import playing

SIZE = 4096


class Bench:
    """A tier beside a store, and memory for chunks."""

    def __init__(self, tier: ObjTier, store: MemoryStore, arena: Arena) -> None:
        self.tier = tier
        self.store = store
        self.arena = arena

    async def put(self, *numbers: int) -> list[Outcome]:
        slots = []
        for number in numbers:
            key, payload = chunk(number, 0, SIZE)
            slots.append(self.arena.slot(number % self.arena.num_slots, key, SIZE, payload))
        return await self.tier.store(slots, context())

    async def get(self, number: int) -> tuple[Outcome, bool]:
        """Outcome, and whether the slot has the chunk and its checksum."""
        key, payload = chunk(number, 0, SIZE)
        slot = self.arena.slot(0, key, SIZE)
        (outcome,) = await self.tier.load([slot], context())
        return outcome, bytes(slot.view) == payload and slot.crc is not None

    async def ask(self, *numbers: int, windowed: bool = False, request: str = "") -> str:
        """``+`` for present, ``-`` for absent."""
        ctx = TierContext(time.monotonic() + 10, request_id=request, windowed=windowed)
        answers = await self.tier.exists([chunk(n, 0, SIZE)[0] for n in numbers], ctx)
        return "".join("+" if one is Presence.PRESENT else "-" for one in answers)

    def path(self, number: int) -> str:
        return f"/bucket/{self.tier.name_of(chunk(number, 0, SIZE)[0])}"


def options(port: int, **more: Any) -> ObjOptions:
    settings = {
        "bucket": "bucket",
        "endpoint_override": f"http://127.0.0.1:{port}",
        "access_key": Secret("AKID"),
        "secret_key": Secret("hush-hush"),
        "stall_seconds": 0.2,
    }
    return ObjOptions(**(settings | more))


@contextlib.asynccontextmanager
async def bench(
    store: MemoryStore | None = None, tls: ssl.SSLContext | None = None, **more: Any
) -> AsyncIterator[Bench]:
    store = MemoryStore() if store is None else store
    async with playing(store, tls) as port:
        tier = ObjTier("obj", options(port, **more), make_env(sizes=[SIZE], definitions=METRICS))
        await tier.open()
        store.requests.clear()
        arena = Arena(64, SIZE)
        try:
            yield Bench(tier, store, arena)
        finally:
            await tier.aclose(time.monotonic() + 5)
            with contextlib.suppress(BufferError):
                arena.close()
