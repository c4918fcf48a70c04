# SPDX-License-Identifier: Apache-2.0
"""What every micro-benchmark shares: interleaved pairs, medians, spread, and the closing JSON line.

A figure is a ratio to a floor or a peer measured in the same run, in pairs: subject, reference,
subject, reference, each pair in the opposite order of the one before, so that a busy neighbour
hits both. Absolute values from a shared machine are not results. Owns no state.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class Case(msgspec.Struct, frozen=True):
    """One line of a report."""

    case: str
    value: float
    unit: str
    reference: str
    """Name of the floor or peer."""
    reference_value: float
    ratio: float
    """Median over the pairs: how many times better the value is (a rate: value / reference, a time:
    reference / value)."""
    spread: tuple[float, float]
    """Lowest and highest ratio of the middle half of the pairs."""
    target: float | None = None
    """What the ratio is meant to reach at least."""


class Pairs(msgspec.Struct, frozen=True):
    """Seconds of subject and reference, pair by pair."""

    subject: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def subject_seconds(self) -> float:
        """Median of the subject."""
        return statistics.median(self.subject)

    @property
    def reference_seconds(self) -> float:
        """Median of the reference."""
        return statistics.median(self.reference)

    def speedups(self) -> list[float]:
        """reference / subject of each pair, sorted: how much faster the subject is."""
        return sorted(r / s for s, r in zip(self.subject, self.reference, strict=True))


def measure(
    subject: Callable[[], object],
    reference: Callable[[], object],
    pairs: int = 15,
    warmup: int = 2,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Pairs:
    """Time both `pairs` times, in alternating order; `before` runs untimed ahead of each.

    `clock` may be ``time.thread_time`` for work that one thread does without waiting: what other
    processes take from this core then counts for neither side.
    """
    for _ in range(warmup):
        subject()
        reference()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            if before is not None:
                before()
            call = (subject, reference)[which]
            start = clock()
            call()
            times[which].append(clock() - start)
    return Pairs(tuple(times[0]), tuple(times[1]))


def _middle_half(values: Sequence[float]) -> tuple[float, float]:
    cut = len(values) // 4
    return values[cut], values[len(values) - 1 - cut]


def rate_case(
    case: str,
    amount: float,
    unit: str,
    reference: str,
    pairs: Pairs,
    *,
    reference_amount: float | None = None,
    target: float | None = None,
) -> Case:
    """A rate (more is better): `amount` units of work a call, in `unit` ("GB/s" with GB, ...)."""
    other = amount if reference_amount is None else reference_amount
    ratios = [speedup * amount / other for speedup in pairs.speedups()]
    low, high = _middle_half(ratios)
    return Case(
        case=case,
        value=_short(amount / pairs.subject_seconds),
        unit=unit,
        reference=reference,
        reference_value=_short(other / pairs.reference_seconds),
        ratio=_short(statistics.median(ratios)),
        spread=(_short(low), _short(high)),
        target=target,
    )


def time_case(
    case: str,
    per_call: float,
    unit: str,
    reference: str,
    pairs: Pairs,
    *,
    scale: float = 1.0,
    target: float | None = None,
) -> Case:
    """A time (less is better): seconds times `scale` for each of `per_call` operations a call."""
    ratios = pairs.speedups()
    low, high = _middle_half(ratios)
    return Case(
        case=case,
        value=_short(pairs.subject_seconds * scale / per_call),
        unit=unit,
        reference=reference,
        reference_value=_short(pairs.reference_seconds * scale / per_call),
        ratio=_short(statistics.median(ratios)),
        spread=(_short(low), _short(high)),
        target=target,
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            model = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass  # other architectures name it otherwise; the machine's name stands in for it
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def report(benchmark: str, cases: Sequence[Case], **extra: Any) -> None:
    """A readable table on stderr, then the JSON line, the last one on stdout."""
    for case in cases:
        target = "" if case.target is None else f"  target {case.target:g}"
        print(
            f"{case.case:44} {case.value:10g} {case.unit:6} {case.ratio:6.2f} x {case.reference}"
            f" ({case.spread[0]:.2f}..{case.spread[1]:.2f}){target}",
            file=sys.stderr,
        )
    line = {
        "benchmark": benchmark,
        "cases": [msgspec.to_builtins(case) for case in cases],
        "machine": machine(),
        **extra,
    }
    print(json.dumps(line), flush=True)
