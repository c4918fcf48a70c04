# SPDX-License-Identifier: Apache-2.0
"""Small pieces that the generator's tests share: a tiny model, a virtual clock, canned runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvtier.bench.copies import CopyCounters
from kvtier.bench.costs import DEFAULT_SOURCE, CostModel, CostSource
from kvtier.bench.drivers.standin import StepTimes
from kvtier.bench.pattern import Difference, Shape
from kvtier.bench.results import EngineCounts, Report, Run, Spread
from kvtier.bench.verdict import judge
from kvtier.bench.yardstick import Yardsticks
from kvtier.types import Geometry
from tests.bench.fake_engine import FakeEngine, FakeRegion

SHAPE = Shape(layers=2, heads=2, head_bytes=16, block_tokens=16, blocks_per_chunk=2)

SOURCE = CostSource(
    model="tiny",
    hardware="none",
    parameters=1e6,
    layers=2,
    hidden_size=64,
    kv_bytes_per_token=128,
    weight_bytes=2e6,
    flops_per_second=1e9,
    memory_bytes_per_second=1e9,
)
COSTS = CostModel(SOURCE, scale=1.0)


class VirtualClock:
    """Time passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, deadline: float) -> None:
        self.time = max(self.time, deadline)


class FakeOpener:
    """Opens fakes and remembers them."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []

    def __call__(
        self, strategy: str, geometry: Geometry, tier_directory: Path | None
    ) -> tuple[FakeEngine, FakeRegion]:
        assert (tier_directory is not None) == (strategy == "host+fs")
        engine = FakeEngine(geometry, tier=strategy == "host+fs")
        self.engines.append(engine)
        return engine, engine.region


def make_run(strategy: str, point: str, megabytes: int, speed: float, **changes: object) -> Run:
    """A canned run that served 1,000,000 prompt tokens at `speed` thousand tokens a second."""
    seconds = 1000 / speed
    run = Run(
        strategy=strategy,
        point=point,
        conversations=int(point) if point.isdigit() else 0,
        working_set_bytes=megabytes << 20,
        wall_seconds=seconds,
        requests=10,
        requests_wanted=10,
        prompt_tokens=1_000_000,
        output_tokens=1000,
        accelerator_tokens=100_000,
        host_tokens=200_000,
        tier_tokens={"fs": 300_000},
        computed_tokens=400_000,
        first_token=Spread(seconds / 2, seconds / 3, seconds, seconds * 1.5),
        times=StepTimes(model=seconds * 0.9, engine=seconds * 0.01),
        copies=CopyCounters(
            load_bytes=1 << 20, load_seconds=0.001, verified_bytes=1 << 20, verify_seconds=0.001
        ),
        engine=EngineCounts(promoted_bytes={"fs": 1 << 20}, stored_bytes={"fs": 1 << 20}),
    )
    return msgspec.structs.replace(run, **changes)


ACCELERATOR, HOST = 128 << 20, 384 << 20

GOOD: Mapping[tuple[str, str], float] = {
    ("2", "none"): 700,
    ("2", "host"): 690,
    ("2", "host+fs"): 680,
    ("7", "none"): 270,
    ("7", "host"): 800,
    ("7", "host+fs"): 780,
    ("20", "none"): 230,
    ("20", "host"): 280,
    ("20", "host+fs"): 600,
}
SIZES = {"2": 88, "7": 308, "20": 880}


def runs(**changed: float) -> list[Run]:
    speeds = dict(GOOD)
    for key, speed in changed.items():
        strategy, point = key.rsplit("_", 1)
        speeds[(point, strategy.replace("_", "+"))] = speed
    return [make_run(name, point, SIZES[point], speed) for (point, name), speed in speeds.items()]


def change(found: list[Run], **changes: object) -> list[Run]:
    return [*found[:-1], msgspec.structs.replace(found[-1], **changes)]


def make_report() -> Report:
    """A whole report with one block that differs."""
    found = change(
        runs(),
        copies=CopyCounters(
            load_bytes=1 << 20,
            load_seconds=0.001,
            verified_bytes=1 << 20,
            differing_blocks=1,
            differences=[Difference("c1<t2", "ab" * 16, 1, 0, "K", 17, "00ff", "00fe", 3)],
        ),
    )
    return Report(
        workload="multiturn",
        arguments={"seed": 0},
        shape=Shape(),
        source=DEFAULT_SOURCE,
        scale=128.0,
        prefill_speedup=1.0,
        accelerator_bytes=ACCELERATOR,
        host_bytes=HOST,
        tier_directory="/var/tmp",
        tier_file_system="ext4",
        yardsticks=Yardsticks(10e9, 1e9, 2e9, True),
        runs=found,
        verdict=judge(found, "multiturn", ACCELERATOR, HOST),
        notes=["a note with <angle> brackets"],
    )
