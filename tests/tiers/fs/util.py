# SPDX-License-Identifier: Apache-2.0
"""What the tests of the file tier share: a tier with faults, and short forms of its calls."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier._core import fileio
from kvtier.testing.contract import SIZES, Arena, chunk, context, make_env
from kvtier.tiers.base import TierEnv
from kvtier.tiers.fs import FsOptions, FsTier
from kvtier.tiers.fs.naming import chunk_path
from kvtier.tiers.fs.options import Upkeep
from kvtier.types import Outcome, Presence

GROUP = 4
SIZE = SIZES[GROUP]
FILE_BYTES = SIZE + 4096


class Bench:
    """One tier, open, with its arena, faults, events and recorder."""

    def __init__(
        self, tier: FsTier, arena: Arena, faults: fileio.Faults, events: list[Any]
    ) -> None:
        self.tier = tier
        self.arena = arena
        self.faults = faults
        self.events = events

    async def store(self, *numbers: int, seconds: float = 20.0) -> list[Outcome]:
        slots = []
        for i, number in enumerate(numbers):
            key, payload = chunk(number, GROUP, SIZE)
            slots.append(self.arena.slot(i % 64, key, SIZE, payload))
        return await self.tier.store(slots, context(seconds))

    async def load(self, *numbers: int, seconds: float = 20.0, first: int = 0) -> list[Outcome]:
        """Load into slots from `first` on, and check the bytes of what is reported as done."""
        slots = [
            self.arena.slot(i % 64, chunk(number, GROUP, SIZE)[0], SIZE)
            for i, number in enumerate(numbers, first)
        ]
        results = await self.tier.load(slots, context(seconds))
        for slot, number, result in zip(slots, numbers, results, strict=True):
            if result is Outcome.DONE:
                assert bytes(slot.view) == chunk(number, GROUP, SIZE)[1]
                assert slot.verified
        return results

    async def there(self, *numbers: int) -> list[bool]:
        keys = [chunk(number, GROUP, SIZE)[0] for number in numbers]
        return [answer is Presence.PRESENT for answer in await self.tier.exists(keys, context())]

    def file(self, number: int) -> Path:
        return Path(self.tier.path, chunk_path(chunk(number, GROUP, SIZE)[0]))

    def samples(self) -> dict[tuple[str, ...], float]:
        """What the recorder has seen since the last call, by name and labels."""
        taken = self.tier.env.recorder.take()
        return {(sample.name, *sample.labels): sample.value for sample in taken}


@contextlib.asynccontextmanager
async def opened(
    root: Path,
    *,
    arena: Arena | None = None,
    fields: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wait: bool = True,
    upkeep: Mapping[str, float] | None = None,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A tier on `root`; small pools, no free-space guard unless given."""
    events: list[Any] = []
    faults = fileio.Faults()
    env = environment(fields=fields, events=events, clock=clock)
    defaults = {"read_threads": 4, "write_threads": 4, "min_free_bytes": 1}
    times = Upkeep(**{"retry_seconds": 0.2, **(upkeep or {})})
    all_options = FsOptions(root_dir=str(root), **{**defaults, **options})
    tier = FsTier("fs", all_options, env, faults, times)
    memory = arena or Arena(64, -(-SIZE // 4096) * 4096)
    await tier.open()
    try:
        if wait:
            await tier.walked()
        yield Bench(tier, memory, faults, events)
    finally:
        faults.clear()
        await tier.aclose(time.monotonic() + 10)


def environment(**changes: Any) -> TierEnv:
    return make_env(definitions=FsTier.metric_definitions(), **changes)


def temporary_files(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*.tmp"))


def used_bytes(root: Path) -> int:
    """Space of all chunk files, as the filesystem counts it; files may go while it counts."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".kv"):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total
