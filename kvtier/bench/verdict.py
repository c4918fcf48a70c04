# SPDX-License-Identifier: Apache-2.0
"""Whether what was measured is the effect that matters. Pure functions; owns no state."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.bench.results import Clause, Run, Verdict
from kvtier.bench.strategies import STOCK

ALIKE = 1.05
HOST_GAIN = 2.0
TIER_GAIN = 2.0
TIER_OVER_HOST = 1.5
NOT_BELOW = 0.95
"""One run of each decides, as with `ALIKE`."""
NO_GAIN = 1.1
"""Below this ratio to `none` a strategy is said to gain nothing."""

RESIDENT = 0.10
"""Share of the tier's pages found in the page cache, above which reads were not those of a disk."""

FULL = 0.95
"""A memory holds a working set up to this share of its size."""
BEYOND = 1.25
"""A working set is beyond a memory from this multiple of its size."""

BASE, HOST, TIER = "none", "host", "host+fs"


def judge(
    runs: Sequence[Run],
    workload: str,
    accelerator_bytes: int,
    host_bytes: int,
    *,
    tier_in_memory: bool = False,
    bytes_compared: bool = True,
) -> Verdict:
    """The verdict on all runs of a sweep.

    It holds when no clause fails and at least one clause about the effect was measured. A clause
    whose point was not measured neither holds nor fails; nor does that about the page cache where
    the tier lies in memory (`tier_in_memory`), as somebody wanted it to, nor that about bytes where
    nobody could compare them (`bytes_compared`).
    """
    soundness = [*_integrity(runs, bytes_compared), _from_disk(runs, tier_in_memory)]
    if workload == "multiturn":
        effect = _sweep(runs, accelerator_bytes, host_bytes)
    else:
        effect = [_no_harm(runs)]
    clauses = soundness + effect
    failed = [clause for clause in clauses if clause.holds is False]
    measured = [clause for clause in effect if clause.holds is not None]
    holds = not failed and bool(measured)
    return Verdict(clauses, holds, _summary(runs, soundness, failed, measured))


def judge_server(runs: Sequence[Run]) -> Verdict:
    """The verdict on a foreign server: its own configuration decides what it keeps, and there is
    nothing to compare it with but another run."""
    clause = _answered(runs)
    summary = (
        "ANSWERED: all requests; what it gains shows beside a run against another configuration"
        if clause.holds
        else "FAILED: not every request was answered"
    )
    return Verdict([clause], bool(clause.holds), summary)


def _summary(
    runs: Sequence[Run], soundness: Sequence[Clause], failed: list[Clause], measured: list[Clause]
) -> str:
    if any(run.copies.differing_blocks for run in runs):
        return "FAILED: bytes differ from what was computed for them"
    if any(clause.holds is False for clause in soundness):
        return "FAILED: the run itself was not sound (see the clauses)"
    own = [run for run in runs if run.strategy not in (BASE, STOCK)]
    gains = [
        run.tokens_per_second / base.tokens_per_second
        for run in own
        if (base := _find(runs, run.point, BASE))
    ]
    if gains and max(gains) < NO_GAIN:
        if any(run.loaded_tokens for run in own):
            why = "recomputing is as cheap as loading here"
        else:
            why = "nothing that kvtier had kept was asked for again"
        return (
            f"NO GAIN: nothing served more than without kvtier (best {max(gains):.2f} times); {why}"
        )
    if failed:
        return "DOES NOT HOLD: " + "; ".join(clause.text for clause in failed)
    if not measured:
        return "NOT JUDGED: no point of this run shows the effect (see the clauses)"
    best = f", up to {max(gains):.1f} times the throughput of none" if gains else ""
    return f"HOLDS{best}"


def _find(runs: Sequence[Run], point: str, strategy: str) -> Run | None:
    for run in runs:
        if run.point == point and run.strategy == strategy and run.tokens_per_second:
            return run
    return None


def _answered(runs: Sequence[Run]) -> Clause:
    unfinished = sum(run.requests_wanted - run.requests for run in runs)
    causes: dict[str, int] = {}
    for run in runs:
        for cause, count in run.errors.items():
            causes[cause] = causes.get(cause, 0) + count
    why = "".join(f", {cause}: {count}" for cause, count in sorted(causes.items()))
    return Clause("every request was answered", unfinished == 0, f"{unfinished} left{why}")


def _integrity(runs: Sequence[Run], bytes_compared: bool) -> list[Clause]:
    verified = sum(run.copies.verified_bytes for run in runs)
    differing = sum(run.copies.differing_blocks for run in runs)
    loaded = sum(run.copies.load_bytes for run in runs)
    corrupt = sum(run.engine.failures.get("corrupt", 0) for run in runs)
    others = {
        cause: count
        for run in runs
        for cause, count in run.engine.failures.items()
        if cause != "corrupt" and count
    }
    same = None if not loaded or not bytes_compared else differing == 0 and verified == loaded
    return [
        Clause(
            "every reloaded byte is the one that was computed",
            same,
            f"{verified >> 20} MiB compared, {differing} blocks differ"
            if bytes_compared
            else "not compared in this engine",
        ),
        Clause("no tier met a corrupt chunk", corrupt == 0, f"{corrupt} corrupt"),
        Clause(
            "no tier failed otherwise",
            not others,
            ", ".join(f"{cause} {count}" for cause, count in sorted(others.items())) or "none",
        ),
        _answered(runs),
    ]


def _from_disk(runs: Sequence[Run], tier_in_memory: bool) -> Clause:
    text = f"the tier's files were read from the disk (at most {RESIDENT:.0%} were in memory)"
    shares = [
        (run.sweeps.resident_ratio, run.point)
        for run in runs
        if run.sweeps is not None and run.sweeps.sampled_pages
    ]
    if tier_in_memory or not shares:
        return Clause(text, None, "it lies in memory" if tier_in_memory else "not measured")
    share, point = max(shares)
    return Clause(text, share <= RESIDENT, f"{share:.0%} of the sampled pages at {point}")


def _points(runs: Sequence[Run]) -> list[tuple[str, int]]:
    points: dict[str, int] = {}
    for run in runs:
        points.setdefault(run.point, run.working_set_bytes)
    return list(points.items())


def _sweep(runs: Sequence[Run], accelerator_bytes: int, host_bytes: int) -> list[Clause]:
    points = _points(runs)
    inside = [name for name, size in points if size <= FULL * accelerator_bytes]
    hosted = [
        name for name, size in points if BEYOND * accelerator_bytes <= size <= FULL * host_bytes
    ]
    beyond = [
        name
        for name, size in points
        if size >= BEYOND * host_bytes and size >= BEYOND * accelerator_bytes
    ]
    effect = [
        _alike(runs, inside),
        _ratio(runs, hosted, HOST, BASE, HOST_GAIN, "the accelerator no longer holds"),
        _ratio(runs, beyond, TIER, BASE, TIER_GAIN, "host memory no longer holds"),
        _ratio(runs, beyond, TIER, HOST, TIER_OVER_HOST, "host memory no longer holds"),
    ]
    if any(run.strategy == STOCK for run in runs):
        outside = [name for name, size in points if size >= BEYOND * accelerator_bytes]
        where = "the accelerator no longer holds"
        effect.append(_ratio(runs, outside, TIER, STOCK, NOT_BELOW, where))
    return effect


def _alike(runs: Sequence[Run], points: Sequence[str]) -> Clause:
    text = f"all alike (within {ALIKE - 1:.0%}) while the accelerator holds the working set"
    worst = None
    for point in points:
        speeds = [
            run.tokens_per_second for run in runs if run.point == point and run.strategy != STOCK
        ]
        if len(speeds) > 1 and min(speeds) > 0:
            worst = max(worst or 0.0, max(speeds) / min(speeds))
    if worst is None:
        return Clause(text, None, "not measured")
    return Clause(text, worst <= ALIKE, f"apart by {worst - 1:.1%}")


def _ratio(
    runs: Sequence[Run], points: Sequence[str], better: str, base: str, wanted: float, where: str
) -> Clause:
    text = f"{better} at least {wanted:g} times {base} where {where} the working set"
    ratios = []
    for point in points:
        upper, lower = _find(runs, point, better), _find(runs, point, base)
        if upper and lower:
            ratios.append((upper.tokens_per_second / lower.tokens_per_second, point))
    if not ratios:
        return Clause(text, None, "not measured")
    ratio, point = min(ratios)
    return Clause(text, ratio >= wanted, f"{ratio:.2f} times at {point}")


def _no_harm(runs: Sequence[Run]) -> Clause:
    text = f"no strategy is slower to the first token than none (mean, within {ALIKE - 1:.0%})"
    base = next((run for run in runs if run.strategy == BASE and run.requests), None)
    others = [run for run in runs if run.strategy != BASE and run.requests]
    if base is None or not others:
        return Clause(text, None, "not measured")
    ratios = {run.strategy: run.first_token.mean / base.first_token.mean for run in others}
    return Clause(
        text,
        max(ratios.values()) <= ALIKE,
        ", ".join(f"{name} {ratio:.2f} times none's" for name, ratio in ratios.items()),
    )
