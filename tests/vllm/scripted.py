# SPDX-License-Identifier: Apache-2.0
"""Tiers that fail or wait on cue inside a real engine, by ``module_path``.

They run wherever the service does, in a process of its own by default, so the test reaches them
through files and options, never through objects. Made on ``kvtier.testing.faults``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from kvtier.testing.faults import OPERATIONS, Gate, Script, ScriptedOptions, ScriptedTier
from kvtier.tiers.base import Slot, TierContext, TierEnv
from kvtier.types import Outcome, Presence


class FileGate(Gate):
    """Closed while a file ``close-OPERATION`` exists; ``came-OPERATION`` says that a call waits."""

    def __init__(self, folder: Path, operation: str) -> None:
        super().__init__()
        self._closed = folder / f"close-{operation}"
        self._came = folder / f"came-{operation}"

    async def passed(self) -> None:
        if self._closed.exists():
            self._came.touch()
            while self._closed.exists():
                await asyncio.sleep(0.005)


class GatedOptions(ScriptedOptions, frozen=True):
    """Configuration keys of the gated tier."""

    folder: str = ""
    """Where its gates' files are."""


class GatedTier(ScriptedTier):
    """Chunks in memory; each kind of call waits while its gate's file exists."""

    type: ClassVar[str] = "gated"
    options_type: ClassVar[type[msgspec.Struct]] = GatedOptions

    def __init__(self, name: str, options: Any, env: TierEnv) -> None:
        super().__init__(name, options, env)
        self._script = Script(options.script)
        folder = Path(options.folder)
        self._script.gates = {one: FileGate(folder, one) for one in OPERATIONS}


class FaultyOptions(ScriptedOptions, frozen=True):
    """Configuration keys of the faulty tier."""

    seed: int = 0
    slow_seconds: float = 0.05
    """A call takes up to twice as long."""
    failing: float = 0.1
    """Share of the calls that raise, and of those that report a failure."""
    corrupting: float = 0.1
    """Share of the loads that bring wrong bytes."""


class FaultyTier(ScriptedTier):
    """Chunks in memory; slow, failing and corrupting at random, from a fixed seed."""

    type: ClassVar[str] = "faulty"
    options_type: ClassVar[type[msgspec.Struct]] = FaultyOptions

    def __init__(self, name: str, options: Any, env: TierEnv) -> None:
        super().__init__(name, options, env)
        self._script = Script(options.script)
        self._random = random.Random(options.seed)

    async def _trouble(self) -> Outcome | None:
        options, rng = self.options, self._random
        await asyncio.sleep(rng.uniform(0.0, 2 * options.slow_seconds))
        if rng.random() < options.failing:
            raise OSError(5, "made to fail")
        return Outcome.IO if rng.random() < options.failing else None

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        await self._trouble()
        return await super().exists(keys, ctx)

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        outcome = await self._trouble()
        if outcome is not None:
            return [outcome] * len(items)
        return await super().store(items, ctx)

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        outcome = await self._trouble()
        if outcome is not None:
            for item in items:
                item.view[:] = b"\xee" * item.length  # half-done loads leave anything behind
            return [outcome] * len(items)
        outcomes = await super().load(items, ctx)
        if self._random.random() < self.options.corrupting:
            item = self._random.choice(items)
            if self._random.random() < 0.5:
                item.view[self._random.randrange(item.length)] ^= 1 << self._random.randrange(8)
            else:  # whole layers change places
                half = item.length // 2
                item.view[:] = bytes(item.view[half:]) + bytes(item.view[:half])
        return outcomes
