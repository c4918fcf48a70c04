# SPDX-License-Identifier: Apache-2.0
"""The charts of the report, drawn with matplotlib. Imported only where that is installed.

Owns no state: figures are made without pyplot's registry.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from kvtier.bench.results import Report, Run

COLOURS = {
    "none": "#8a94a6",
    "host": "#2f6fb3",
    "host+fs": "#d9822b",
    "stock": "#8d5a97",
    "server": "#2f6fb3",
}
SOURCES = {
    "accelerator": "#5b8c6a",
    "host memory": "#2f6fb3",
    "tiers": "#d9822b",
    "computed": "#d5dae2",
}


def draw(report: Report, path: Path) -> None:
    """Write the four charts to `path` (PNG)."""
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    points = list(dict.fromkeys(run.point for run in report.runs))
    strategies = list(dict.fromkeys(run.strategy for run in report.runs))
    _lines(axes[0][0], report, points, strategies, lambda run: run.tokens_per_second / 1000)
    axes[0][0].set_title("Throughput: prompt tokens served")
    axes[0][0].set_ylabel("thousand tokens a second")
    _lines(axes[0][1], report, points, strategies, lambda run: run.first_token.p50 * 1000)
    axes[0][1].set_title("Time to first token, median")
    axes[0][1].set_ylabel("milliseconds")
    _shares(axes[1][0], report)
    _bandwidth(axes[1][1], report)
    figure.suptitle(
        f"kvtier bench, {report.workload}: {report.verdict.summary.split(':')[0]}", fontsize=12
    )
    figure.savefig(path, dpi=110)


def _find(report: Report, point: str, strategy: str) -> Run | None:
    return next((r for r in report.runs if r.point == point and r.strategy == strategy), None)


def _lines(
    axis: Any,
    report: Report,
    points: list[str],
    strategies: list[str],
    value: Callable[[Run], float],
) -> None:
    for number, strategy in enumerate(strategies):
        found = [(i, run) for i, p in enumerate(points) if (run := _find(report, p, strategy))]
        xs = [i for i, _ in found]
        ys = [value(run) for _, run in found]
        colour = COLOURS[strategy]
        if len(points) == 1:
            bars = axis.bar([number], ys, color=colour, label=strategy, width=0.6)
            axis.bar_label(bars, fmt="%.0f", fontsize=9)
        else:
            axis.plot(xs, ys, color=colour, label=strategy, marker="o", linewidth=2)
    axis.set_ylim(bottom=0)
    if len(points) == 1:
        axis.set_xticks(range(len(strategies)), strategies)
    else:
        labels = [_label(report, point) for point in points]
        axis.set_xticks(range(len(points)), labels)
        axis.legend(frameon=False)
        axis.grid(axis="y", color="#e6e9ef")
    axis.spines[["top", "right"]].set_visible(False)


def _label(report: Report, point: str) -> str:
    run = next(run for run in report.runs if run.point == point)
    if not run.conversations:
        return point
    if not run.working_set_bytes:
        return f"{point} conversations"
    return f"{point} conversations\n{run.working_set_bytes / 2**20:.0f} MiB"


def _shares(axis: Any, report: Report) -> None:
    labels = [f"{run.point}, {run.strategy}" for run in report.runs]
    left = [0.0] * len(report.runs)
    for name, colour in SOURCES.items():
        widths = []
        for run in report.runs:
            tokens = {
                "accelerator": run.accelerator_tokens,
                "host memory": run.host_tokens,
                "tiers": sum(run.tier_tokens.values()),
                "computed": run.computed_tokens,
            }[name]
            widths.append(100 * tokens / max(1, run.prompt_tokens))
        axis.barh(labels, widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of prompt tokens")
    axis.set_title("Where prompt tokens came from")
    axis.legend(
        frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.14), fontsize=9
    )
    axis.spines[["top", "right"]].set_visible(False)


def _bandwidth(axis: Any, report: Report) -> None:
    bars: list[tuple[str, float, str]] = []
    peak = report.yardsticks
    for run in report.runs:
        if run.host_bandwidth:
            bars.append((f"{run.point}, {run.strategy}: host", run.host_bandwidth, COLOURS["host"]))
        for name in run.engine.promoted_bytes:
            speed = run.tier_bandwidth(name)
            if speed:
                bars.append((f"{run.point}, {run.strategy}: {name}", speed, COLOURS[run.strategy]))
    bars.append(("one memcpy", peak.memcpy, "#c3cad5"))
    if peak.disk_read:
        bars.append(("raw reads", peak.disk_read, "#c3cad5"))
    drawn = axis.barh(
        [name for name, _, _ in bars],
        [speed / 1e9 for _, speed, _ in bars],
        color=[colour for _, _, colour in bars],
    )
    axis.bar_label(drawn, fmt="%.2f", fontsize=8, padding=3)
    axis.invert_yaxis()
    axis.set_xlabel("GB/s (log)")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.margins(x=0.15)
    axis.set_title("Bandwidth by tier, beside what the machine can do")
    axis.spines[["top", "right"]].set_visible(False)
