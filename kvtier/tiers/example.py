# SPDX-License-Identifier: Apache-2.0
"""A tier in the memory of the service: the one to copy when writing your own.

Keeps whole chunks as bytes, least recently used first out. It runs on the service's loop alone, so
it needs no lock; a tier that does I/O would hand its calls to threads or sockets and await them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from kvtier.errors import ClosedError
from kvtier.options import Bytes
from kvtier.tiers.base import OptionsType, Slot, Tier, TierContext, TierEnv
from kvtier.types import Outcome, Presence

SLICE = 64
"""Chunks copied before other coroutines get their turn."""


class ExampleOptions(msgspec.Struct, frozen=True):
    """Configuration keys of the example tier."""

    capacity_bytes: Bytes = 1 << 30
    """Bytes it holds at most."""
    delay_seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Pause before each call does its work, to see how the others fare beside a slow tier."""


class ExampleTier(Tier):
    """Chunks in a dictionary."""

    type: ClassVar[str] = "example"
    medium: ClassVar[str] = "CPU"
    options_type: ClassVar[OptionsType] = ExampleOptions

    def __init__(self, name: str, options: ExampleOptions, env: TierEnv) -> None:
        super().__init__(name, options, env)
        self._chunks: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # payload, CRC
        self._used_bytes = 0
        self._is_open = False

    async def open(self) -> None:
        # Memory is taken as chunks come.
        self._is_open = True

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        await self._pause()
        return [Presence.PRESENT if key in self._chunks else Presence.ABSENT for key in keys]

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        await self._pause()
        outcomes = []
        for number, item in enumerate(items):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
                self._check_open()
            outcomes.append(self._store(item))
        return outcomes

    def _store(self, item: Slot) -> Outcome:
        if item.key in self._chunks:
            self._chunks.move_to_end(item.key)
            return Outcome.EXISTS
        if item.length > self.options.capacity_bytes:
            return Outcome.FULL
        while self._used_bytes + item.length > self.options.capacity_bytes:
            key, (payload, _) = self._chunks.popitem(last=False)
            self._used_bytes -= len(payload)
            self.env.recorder.add("kvtier_tier_evicted_total", 1, (self.name,))
            self.tell("removed", key, len(payload))
        assert item.crc is not None
        self._chunks[item.key] = (bytes(item.view), item.crc)
        self._used_bytes += item.length
        self._gauges()
        return Outcome.DONE

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        await self._pause()
        outcomes = []
        for number, item in enumerate(items):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
                self._check_open()
            found = self._chunks.get(item.key)
            if found is None:
                outcomes.append(Outcome.MISSING)
                continue
            payload, item.crc = found
            if len(payload) != item.length:
                outcomes.append(Outcome.CORRUPT)
                continue
            item.view[:] = payload
            self._chunks.move_to_end(item.key)
            outcomes.append(Outcome.DONE)
        return outcomes

    async def contents(self) -> list[bytes]:
        return list(self._chunks)

    async def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            found = self._chunks.pop(key, None)
            if found is not None:
                self._used_bytes -= len(found[0])
                self.tell("removed", key, len(found[0]))
        self._gauges()

    async def aclose(self, deadline: float) -> None:
        self._is_open = False
        self._chunks.clear()
        self._used_bytes = 0

    async def _pause(self) -> None:
        self._check_open()
        if self.options.delay_seconds:
            await asyncio.sleep(self.options.delay_seconds)
            self._check_open()

    def _check_open(self) -> None:
        # After every wait: a call that goes on after ``aclose`` would leave chunks behind.
        if not self._is_open:
            raise ClosedError(f"tier {self.name} is closed")

    def _gauges(self) -> None:
        labels = (self.name,)
        self.env.recorder.set("kvtier_tier_used_bytes", self._used_bytes, labels)
        self.env.recorder.set("kvtier_tier_chunks", len(self._chunks), labels)
        self.env.recorder.set("kvtier_tier_capacity_bytes", self.options.capacity_bytes, labels)
