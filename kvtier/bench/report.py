# SPDX-License-Identifier: Apache-2.0
"""The report: a table for the terminal, a JSON file, and a page with charts. Owns no state.

The page is one HTML file that needs nothing else; the charts are drawn with matplotlib, and left
out (the page says so) where that is not installed.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtier.bench.costs import CostModel
from kvtier.bench.results import Clause, Report, Run
from kvtier.bench.settings import Settings
from kvtier.bench.tierdir import MEMORY_FILE_SYSTEMS
from kvtier.errors import ConfigError

OVERHEAD_WARNING = 0.10

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
       color: #1d2430; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #dde2ea; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.verdict { padding: .7rem 1rem; border-left: 6px solid; font-weight: 600; margin: 1rem 0; }
.yes { border-color: #2a7d4f; background: #e9f5ee; }
.no { border-color: #b3372f; background: #fbeceb; }
.unknown { color: #6b7585; } img { width: 100%; height: auto; }
tr.new td { border-top: 2px solid #aab3c0; }
"""


def run_line(run: Run) -> str:
    """One run in one line, for the progress display."""
    share = 100 / max(1, run.prompt_tokens)
    tiers = "".join(f", {name} {n * share:.0f} %" for name, n in run.tier_tokens.items())
    return (
        f"{run.requests:4d}/{run.requests_wanted} requests, {_thousands(run.tokens_per_second)} k "
        f"tokens/s, first token {run.first_token.p50 * 1000:.0f} ms; accelerator "
        f"{run.accelerator_tokens * share:.0f} %, host {run.host_tokens * share:.0f} %{tiers}"
    )


def _thousands(value: float) -> str:
    return f"{value / 1000:.0f}" if value >= 10_000 else f"{value / 1000:.2f}"


def notes(runs: Sequence[Run], settings: Settings, *, bytes_compared: bool = True) -> list[str]:
    """What a reader has to know before believing a figure."""
    found = []
    if not bytes_compared:
        found.append(
            "bytes were not compared in this engine: its workers are processes of their own, or "
            "its KV cache is not in host memory; what came from kvtier's tiers passed its checksum"
        )
    elif settings.engine == "openai":
        found.append(
            "bytes cannot be compared inside a foreign server, and where it found a prompt's "
            "tokens it does not tell: 'tiers' are all that it had cached, wherever"
        )
    worst = max(runs, key=lambda run: run.overhead_ratio)
    if worst.overhead_ratio > OVERHEAD_WARNING:
        found.append(
            f"the generator's own work took {worst.overhead_ratio:.0%} of the time of "
            f"{worst.strategy} at {worst.point}: there it measures itself; a busy machine or too "
            "cheap a model does that"
        )
    if settings.tier_file_system in MEMORY_FILE_SYSTEMS:
        found.append(f"the fs tier lies on {settings.tier_file_system}: it measures memory")
    skipped = 0
    if settings.real is None:
        skipped = getattr(settings.source(settings.points()[0]), "skipped", 0)
    if skipped:
        found.append(f"{skipped} requests of the trace were longer than the accelerator: left out")
    if settings.inject:
        found.append(f"chunks were damaged on purpose ({settings.inject}); this run has to fail")
    return found


_COLUMNS = (
    "point", "strategy", "k tok/s", "vs none", "out tok/s", "TTFT p50", "p90", "accel", "host",
    "tiers", "computed", "engine", "own", "compared",
)  # fmt: skip


def _rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run in report.runs:
        base = next((r for r in report.runs if r.point == run.point and r.strategy == "none"), None)
        ratio = "-"
        if base is not None and base.tokens_per_second:
            ratio = f"{run.tokens_per_second / base.tokens_per_second:.2f}"
        total = max(1, run.prompt_tokens)
        wall = run.wall_seconds or 1.0
        rows.append(
            (
                run.point,
                run.strategy,
                _thousands(run.tokens_per_second),
                ratio,
                f"{run.output_tokens / wall:.0f}",
                f"{run.first_token.p50 * 1000:.0f} ms",
                f"{run.first_token.p90 * 1000:.0f} ms",
                f"{run.accelerator_tokens / total:.0%}",
                f"{run.host_tokens / total:.0%}",
                f"{sum(run.tier_tokens.values()) / total:.0%}",
                f"{run.computed_tokens / total:.0%}",
                f"{run.times.engine / wall:.1%}",
                f"{run.overhead_ratio:.1%}",
                f"{run.copies.verified_bytes / 2**20:.0f} MiB",
            )
        )
    return rows


def _mark(clause: Clause) -> str:
    return {True: "yes", False: "NO", None: "-"}[clause.holds]


def table(report: Report) -> str:
    """The figures and the verdict, for a terminal."""
    rows = [_COLUMNS, *_rows(report)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if number > 1 and row[0] != rows[number - 1][0]:
            lines.append("")
        lines.append("  ".join(cells))
    lines += ["", *_speeds(report), ""]
    for difference in _differences(report)[:5]:
        lines.append("DIFFERS: " + difference)
    for note in report.notes:
        lines.append(f"note: {note}")
    for clause in report.verdict.clauses:
        lines.append(f"  {_mark(clause):>3}  {clause.text}: {clause.measured}")
    lines.append(f"verdict: {report.verdict.summary}")
    return "\n".join(lines)


def _differences(report: Report) -> list[str]:
    return [
        f"{run.strategy} at {run.point}, request {item.request_id}, block {item.block_hash[:12]}: "
        f"layer {item.layer}, head {item.head}, {item.part}, token {item.token}: expected "
        f"{item.expected}, found {item.found}; {item.bytes_differing} bytes of the block differ"
        for run in report.runs
        for item in run.copies.differences
    ]


def _speeds(report: Report) -> list[str]:
    """Bandwidth by tier, beside what the machine can do."""
    peak = report.yardsticks
    lines = []
    hosted = [run for run in report.runs if run.host_bandwidth]
    if hosted:
        best = max(hosted, key=lambda run: run.copies.load_bytes)
        lines.append(
            f"host to accelerator: {best.host_bandwidth / 1e9:.2f} GB/s "
            f"({best.host_bandwidth / peak.memcpy:.0%} of one memcpy, {peak.memcpy / 1e9:.1f} GB/s)"
        )
    names = sorted({name for run in report.runs for name in run.engine.promoted_bytes})
    for name in names:
        counts = [run for run in report.runs if name in run.engine.promoted_bytes]
        best = max(counts, key=lambda run: run.engine.promoted_bytes[name])
        speed = best.tier_bandwidth(name)
        against = ""
        if peak.disk_read:
            against = (
                f" ({speed / peak.disk_read:.0%} of raw {'direct' if peak.direct else 'buffered'} "
                f"reads, {peak.disk_read / 1e9:.2f} GB/s)"
            )
        lines.append(
            f"{name} to host: {speed / 1e9:.2f} GB/s while requests waited for it{against}; "
            f"{best.engine.stored_bytes.get(name, 0) / 2**20:.0f} MiB stored"
        )
    return lines


def _model(report: Report) -> list[tuple[str, str]]:
    source = report.source
    if report.engine == "openai":
        return list(report.about.items())
    if source is None or report.shape is None:
        return [
            *report.about.items(),
            ("host memory", f"{report.host_bytes / 2**20:.0f} MiB"),
            ("tier directory", f"{report.tier_directory} on {report.tier_file_system}"),
        ]
    costs = CostModel(source, report.scale, report.prefill_speedup)
    return [
        ("model", source.model),
        ("hardware", source.hardware),
        ("assumptions", source.note or "none"),
        (
            "real machine, by the model",
            f"{costs.prefill_tokens_per_second() * 1 / report.scale:.0f} prefill tokens/s at no "
            f"context, {costs.prefill_tokens_per_second(32_768) / report.scale:.0f} at 32,768; "
            f"{costs.decode_tokens_per_second() / report.scale:.1f} decoded tokens/s; "
            f"{source.kv_bytes_per_token / 1024:.0f} KiB of KV a token",
        ),
        (
            "scale",
            f"{report.scale:g}: {report.shape.token_bytes} bytes a token, "
            f"{report.scale:g} times the tokens a second, the same bytes a second",
        ),
        (
            "accelerator, host memory",
            f"{report.accelerator_bytes / 2**20:.0f} MiB, {report.host_bytes / 2**20:.0f} MiB in "
            f"chunks of {report.shape.chunk_tokens} tokens, "
            f"{report.shape.chunk_bytes / 1024:.0f} KiB",
        ),
        ("tier directory", f"{report.tier_directory} on {report.tier_file_system}"),
    ]


def prepare(directory: Path) -> None:
    """Make the directory of the report, before there is a run whose report could be lost.

    Raises
    ------
    ConfigError
        If nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as exc:
        raise ConfigError(
            f"--output {directory}: {exc.strerror}; name a directory that can be written to"
        ) from exc


def write(report: Report, directory: Path) -> list[Path]:
    """The files of the report; those written, in the order to look at them."""
    directory.mkdir(parents=True, exist_ok=True)
    picture = directory / "report.png"
    page = directory / "report.html"
    data = directory / "report.json"
    files = [page]
    encoded = None
    if importlib.util.find_spec("matplotlib") is not None:
        # lazy: matplotlib is optional
        from kvtier.bench.charts import draw

        draw(report, picture)
        encoded = base64.b64encode(picture.read_bytes()).decode()
        files.append(picture)
    page.write_text(render(report, encoded), encoding="utf-8")
    data.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return [*files, data]


def render(report: Report, picture: str | None) -> str:
    """The page.

    Parameters
    ----------
    picture : str, optional
        The charts as base64 of a PNG file.
    """
    verdict = report.verdict
    out = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>kvtier bench</title>",
        f"<style>{_STYLE}</style><h1>kvtier bench: {html.escape(report.workload)}</h1>",
        f"<p class='verdict {'yes' if verdict.holds else 'no'}'>{html.escape(verdict.summary)}</p>",
    ]
    if report.interrupted:
        out.append("<p>The run was interrupted; what was measured until then stands here.</p>")
    out += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    if picture is not None:
        out.append(f"<img alt='charts' src='data:image/png;base64,{picture}'>")
    else:
        out.append("<p class='unknown'>No charts: matplotlib is not installed.</p>")
    out.append("<h2>Verdict</h2><table><tr><th>holds</th><th class='text'>statement</th>")
    out.append("<th class='text'>measured</th></tr>")
    for clause in verdict.clauses:
        out.append(
            f"<tr><td>{_mark(clause)}</td><td class='text'>{html.escape(clause.text)}</td>"
            f"<td class='text'>{html.escape(clause.measured)}</td></tr>"
        )
    out.append("</table><h2>Figures</h2><table><tr>")
    out += [f"<th>{html.escape(name)}</th>" for name in _COLUMNS]
    out.append("</tr>")
    last = ""
    for row in _rows(report):
        out.append("<tr class='new'>" if last not in ("", row[0]) else "<tr>")
        out += [f"<td>{html.escape(cell)}</td>" for cell in row]
        out.append("</tr>")
        last = row[0]
    out.append(
        "</table><p>Shares are of prompt tokens. <i>engine</i> is the time inside kvtier's calls "
        "(or those of vLLM's own manager) on the scheduler's thread, <i>own</i> the generator's "
        "own overhead, both of the wall time. "
        "TTFT is the time to the first token from the intended start of the request.</p>"
    )
    out += [f"<p>{html.escape(line)}</p>" for line in _speeds(report)]
    differences = _differences(report)
    if differences:
        out.append("<h2>Bytes that differ</h2><ul>")
        out += [f"<li>{html.escape(line)}</li>" for line in differences]
        out.append("</ul>")
    heading = "The stand-in accelerator" if report.engine == "standin" else "The engine"
    out.append(f"<h2>{heading}</h2><table>")
    for name, value in _model(report):
        out.append(
            f"<tr><td>{html.escape(name)}</td><td class='text'>{html.escape(value)}</td></tr>"
        )
    out.append("</table></html>")
    return "\n".join(out)
