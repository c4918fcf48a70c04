# SPDX-License-Identifier: Apache-2.0
"""Small pieces that the generator's tests share: a tiny model, a virtual clock, canned runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtier.bench.copies import CopyCounters
from kvtier.bench.costs import CostModel, CostSource
from kvtier.bench.drivers.standin import StepTimes
from kvtier.bench.pattern import Shape
from kvtier.bench.results import EngineCounts, Run, Spread
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
