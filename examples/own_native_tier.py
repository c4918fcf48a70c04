# SPDX-License-Identifier: Apache-2.0
"""A tier on kvtier's own interface, with metrics of its own: chunks compressed in memory.

The native way: coroutines on the service's loop, an outcome for each chunk, and it may run in the
service's process. Name it in the configuration (the module must be importable there too)::

    tiers:
      - type: CompressedTier
        module_path: examples.own_native_tier
        level: 1

Compression takes long, so it runs in threads. A thread cannot be cancelled: the call waits for it
whatever happens, because the slot's memory is the tier's until the call has ended.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar

import msgspec

from kvtier.errors import ClosedError
from kvtier.obs.metrics import MetricDef
from kvtier.tiers.base import OptionsType, Slot, Tier, TierContext, TierEnv
from kvtier.types import Outcome, Presence

PACKED_BYTES = "kvtier_compressed_packed_bytes"
PACK_SECONDS = "kvtier_compressed_pack_seconds"


class CompressedOptions(msgspec.Struct, frozen=True):
    """The tier's keys in the configuration."""

    level: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1
    """zlib's level."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2


class CompressedTier(Tier):
    """Chunks in a dictionary, compressed."""

    type: ClassVar[str] = "compressed"
    medium: ClassVar[str] = "CPU"
    options_type: ClassVar[OptionsType] = CompressedOptions

    @classmethod
    def metric_definitions(cls) -> Sequence[MetricDef]:
        """Names start with ``kvtier_<type>_``, the first label is ``tier``."""
        return (
            MetricDef(PACKED_BYTES, "gauge", "Bytes of all chunks, compressed.", ("tier",)),
            MetricDef(
                PACK_SECONDS,
                "histogram",
                "Time to compress a chunk.",
                ("tier",),
                (0.001, 0.01, 0.1, 1.0),
            ),
        )

    def __init__(self, name: str, options: CompressedOptions, env: TierEnv) -> None:
        super().__init__(name, options, env)
        self.chunks: dict[bytes, tuple[bytes, int]] = {}
        """Compressed payload and CRC of the plain one, by key."""
        self._packed_bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        self._pool = ThreadPoolExecutor(self.options.threads, thread_name_prefix="compressed")

    async def _in_threads(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Results, or the exceptions; returns when no thread touches a slot any more."""
        if self._pool is None:
            raise ClosedError(f"tier {self.name} is not open")
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(self._pool, call, item) for item in items]
        cancelled = False
        while not all(future.done() for future in futures):
            try:
                await asyncio.wait(futures)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return [future.exception() or future.result() for future in futures]

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        return [Presence.PRESENT if key in self.chunks else Presence.ABSENT for key in keys]

    def _pack(self, item: Slot) -> tuple[bytes, float]:
        started = time.monotonic()
        return zlib.compress(item.view, self.options.level), time.monotonic() - started

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        new = [item for item in items if item.key not in self.chunks]
        packed = dict(
            zip((i.key for i in new), await self._in_threads(self._pack, new), strict=True)
        )
        outcomes = []
        for item in items:
            if item.key in self.chunks or item.key not in packed:
                outcomes.append(Outcome.EXISTS)
                continue
            data, seconds = packed[item.key]
            assert item.crc is not None
            self.chunks[item.key] = (data, item.crc)
            self._packed_bytes += len(data)
            self.env.recorder.observe(PACK_SECONDS, seconds, (self.name,))
            outcomes.append(Outcome.DONE)
        self.env.recorder.set(PACKED_BYTES, self._packed_bytes, (self.name,))
        return outcomes

    def _unpack(self, item: Slot) -> Outcome:
        found = self.chunks.get(item.key)
        if found is None:
            return Outcome.MISSING
        data, item.crc = found
        try:
            plain = zlib.decompress(data)
        except zlib.error:
            return Outcome.CORRUPT
        if len(plain) != item.length:
            return Outcome.CORRUPT
        # Whether these are the right bytes the service finds out: it compares the CRC.
        item.view[:] = plain
        return Outcome.DONE

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        return await self._in_threads(self._unpack, items)

    async def contents(self) -> list[bytes]:
        # Nobody else puts chunks here, so what is not among these need not be asked for.
        return list(self.chunks)

    async def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            data, _ = self.chunks.pop(key, (b"", 0))
            self._packed_bytes -= len(data)

    async def aclose(self, deadline: float) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            # Whoever waits for a thread gets its result first; there is no I/O that could hang.
            await asyncio.get_running_loop().run_in_executor(None, pool.shutdown)
        self.chunks.clear()
