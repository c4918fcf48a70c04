# SPDX-License-Identifier: Apache-2.0
"""What a run of one strategy at one point measured, as plain structs (they are the JSON file).

Owns no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvtier.bench.copies import CopyCounters
from kvtier.bench.costs import CostSource
from kvtier.bench.drivers.standin import Finished, StepTimes
from kvtier.bench.pattern import Shape
from kvtier.bench.tierdir import SweepCounters
from kvtier.bench.yardstick import Yardsticks


class Spread(msgspec.Struct, frozen=True):
    """Seconds, over requests."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles; zeros when there is nothing."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (float(x) for x in np.percentile(values, [50, 90, 99]))
    return Spread(float(np.mean(values)), p50, p90, p99)


class EngineCounts(msgspec.Struct, frozen=True):
    """kvtier's own counters at the end of a run."""

    promoted_bytes: dict[str, int] = {}
    stored_bytes: dict[str, int] = {}
    evicted: int = 0
    evicted_unsaved: int = 0
    failures: dict[str, int] = {}


class Run(msgspec.Struct, frozen=True):
    """One strategy at one point of the sweep."""

    strategy: str
    point: str
    """What the report calls the point: a number of conversations, or "trace"."""
    conversations: int
    """0 for a trace."""
    working_set_bytes: int
    wall_seconds: float
    requests: int
    requests_wanted: int
    prompt_tokens: int
    output_tokens: int
    accelerator_tokens: int
    host_tokens: int
    tier_tokens: dict[str, int]
    computed_tokens: int
    first_token: Spread
    times: StepTimes
    copies: CopyCounters
    engine: EngineCounts
    sweeps: SweepCounters | None = None
    interrupted: bool = False
    errors: dict[str, int] = {}
    """Requests that a server did not answer, by cause."""
    throughputs: list[float] = []
    """Of all repeats at this point; the run that stands here is the middle one."""

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens served a second, however they were got."""
        return self.prompt_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens that came through kvtier."""
        return self.host_tokens + sum(self.tier_tokens.values())

    @property
    def overhead_ratio(self) -> float:
        """Share of the wall time that is the generator's own, not compute, kvtier or waiting."""
        own = self.times.scheduling + self.times.overrun
        return own / self.wall_seconds if self.wall_seconds else 0.0

    def tier_bandwidth(self, tier: str) -> float:
        """Bytes a second that came from `tier` while requests waited for it."""
        taken = self.engine.promoted_bytes.get(tier, 0)
        return taken / self.times.pending if taken and self.times.pending else 0.0

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second of the copies from host memory to the accelerator."""
        return self.copies.load_bytes / self.copies.load_seconds if self.copies.load_bytes else 0.0


class Clause(msgspec.Struct, frozen=True):
    """One statement of the verdict. `holds` is None where nothing was measured to judge it by."""

    text: str
    holds: bool | None
    measured: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """All clauses, and what follows."""

    clauses: list[Clause]
    holds: bool
    summary: str


class Report(msgspec.Struct, frozen=True):
    """Everything that a run of the generator leaves behind."""

    workload: str
    arguments: dict[str, Any]
    shape: Shape | None
    """This and `source`: of the stand-in."""
    source: CostSource | None
    scale: float
    prefill_speedup: float
    accelerator_bytes: int
    host_bytes: int
    tier_directory: str
    tier_file_system: str
    yardsticks: Yardsticks
    runs: list[Run]
    verdict: Verdict
    notes: list[str] = []
    interrupted: bool = False
    engine: str = "standin"
    about: dict[str, str] = {}
    """Of a real engine: what is known of it."""


def summarise(
    *,
    strategy: str,
    point: str,
    conversations: int,
    working_set_bytes: int,
    wall_seconds: float,
    wanted: int,
    finished: Sequence[Finished],
    times: StepTimes,
    copies: CopyCounters,
    engine: EngineCounts,
    sweeps: SweepCounters | None = None,
    interrupted: bool = False,
    errors: dict[str, int] | None = None,
) -> Run:
    """`Run` from what the driver, the copy stream and kvtier counted.

    Tokens that were loaded count for the tier that their chunks came from.
    """
    tiers: dict[str, int] = {}
    for item in finished:
        chunks = sum(item.sources.values())
        for name, count in item.sources.items():
            tiers[name] = tiers.get(name, 0) + item.loaded_tokens * count // chunks
    hosted = sum(item.loaded_tokens for item in finished)
    hosted -= sum(tokens for name, tokens in tiers.items() if name != "host")
    tiers.pop("host", None)
    return Run(
        strategy=strategy,
        point=point,
        conversations=conversations,
        working_set_bytes=working_set_bytes,
        wall_seconds=wall_seconds,
        requests=len(finished),
        requests_wanted=wanted,
        prompt_tokens=sum(item.prompt_tokens for item in finished),
        output_tokens=sum(item.output_tokens for item in finished),
        accelerator_tokens=sum(item.accelerator_tokens for item in finished),
        host_tokens=hosted,
        tier_tokens=tiers,
        computed_tokens=sum(item.computed_tokens for item in finished),
        first_token=spread([item.first_token_seconds for item in finished]),
        times=times,
        copies=copies,
        engine=engine,
        sweeps=sweeps,
        interrupted=interrupted,
        errors=errors or {},
    )


def middle(runs: Sequence[Run]) -> Run:
    """The repeat with the middle throughput; differences and damage of all repeats are kept."""
    ordered = sorted(runs, key=lambda run: run.tokens_per_second)
    chosen = ordered[len(ordered) // 2]
    copies = msgspec.structs.replace(
        chosen.copies,
        differing_blocks=sum(run.copies.differing_blocks for run in runs),
        damaged_chunks=sum(run.copies.damaged_chunks for run in runs),
        differences=[item for run in runs for item in run.copies.differences],
    )
    failures: dict[str, int] = {}
    for run in runs:
        for cause, count in run.engine.failures.items():
            failures[cause] = failures.get(cause, 0) + count
    return msgspec.structs.replace(
        chosen,
        copies=copies,
        engine=msgspec.structs.replace(chosen.engine, failures=failures),
        throughputs=[run.tokens_per_second for run in runs],
        sweeps=max(
            (run.sweeps for run in runs if run.sweeps is not None),
            key=lambda sweeps: sweeps.resident_ratio,
            default=None,
        ),
        interrupted=any(run.interrupted for run in runs),
    )
