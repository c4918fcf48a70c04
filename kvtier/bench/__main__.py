# SPDX-License-Identifier: Apache-2.0
"""``python -m kvtier.bench``: measure, report, and end with the verdict as exit code.

Owns the handler of SIGINT while it runs. One thread.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bench import report, verdict, yardstick
from kvtier.bench.cli import make_settings, parse_arguments
from kvtier.bench.drivers.openai import ServerRunner
from kvtier.bench.engines import EngineRunner
from kvtier.bench.results import Report
from kvtier.bench.runner import Runner
from kvtier.bench.strategies import KVTierOpener, Opener
from kvtier.bench.tierdir import MEMORY_FILE_SYSTEMS, NOT_USED
from kvtier.errors import ConfigError, KVTierError

EXIT_HOLDS, EXIT_FAILS, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None, opener: Opener | None = None) -> int:
    """Exit code of one invocation.

    Parameters
    ----------
    argv : sequence of str, optional
    opener : Opener, optional
        Opens kvtier; tests pass one of a fake.
    """
    arguments = parse_arguments(argv)
    try:
        settings = make_settings(arguments)
        report.prepare(settings.output)
    except ConfigError as exc:
        print(f"python -m kvtier.bench: {exc}", file=sys.stderr)
        return EXIT_USAGE

    def say(line: str) -> None:
        if not arguments.quiet:
            print(line, flush=True)

    runner: Runner | EngineRunner | ServerRunner
    if settings.engine == "vllm":
        runner = EngineRunner(settings, say)
    elif settings.engine == "openai":
        runner = ServerRunner(settings, say)
    else:
        if opener is None:
            opener = KVTierOpener(arguments.policy, arguments.isolation, arguments.lookup_timeout)
        runner = Runner(settings, opener, say)

    def interrupt(_number: int, _frame: Any) -> None:
        say("interrupted: ending with what was measured (once more to end at once)")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runner.stop()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        speeds = yardstick.Yardsticks(memcpy=yardstick.memcpy_speed())
        if settings.tier_file_system != NOT_USED:
            write, read, direct = yardstick.disk_speed(
                settings.tier_parent, settings.shape.chunk_bytes
            )
            speeds = yardstick.Yardsticks(speeds.memcpy, write, read, direct)
            say(
                f"tier directory: {settings.tier_parent} on {settings.tier_file_system}, raw "
                f"{'direct' if direct else 'buffered'} I/O {write / 1e9:.2f} GB/s write, "
                f"{read / 1e9:.2f} read"
            )
        runs = runner.run()
    except KVTierError as exc:
        print(f"python -m kvtier.bench: {exc}", file=sys.stderr)
        return EXIT_USAGE if isinstance(exc, ConfigError) else EXIT_FAILS
    finally:
        signal.signal(signal.SIGINT, previous)
    if not runs:
        return EXIT_INTERRUPTED
    accelerator_bytes, about = settings.accelerator_bytes, {}
    bytes_compared = runner.bytes_compared if isinstance(runner, EngineRunner) else True
    notes = report.notes(runs, settings, bytes_compared=bytes_compared)
    if not isinstance(runner, Runner):
        about = runner.about
        notes += runner.notes
    if isinstance(runner, EngineRunner):
        accelerator_bytes = runner.accelerator_bytes
    if settings.engine == "openai":
        judged = verdict.judge_server(runs)
    else:
        judged = verdict.judge(
            runs,
            settings.workload,
            accelerator_bytes,
            settings.host_bytes,
            tier_in_memory=settings.tier_file_system in MEMORY_FILE_SYSTEMS,
            bytes_compared=bytes_compared,
        )
    result = Report(
        workload=settings.workload,
        arguments={
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(arguments).items()
        },
        shape=settings.shape if settings.real is None else None,
        source=settings.costs.source if settings.real is None else None,
        scale=settings.costs.scale,
        prefill_speedup=settings.costs.prefill_speedup,
        accelerator_bytes=accelerator_bytes,
        host_bytes=settings.host_bytes,
        tier_directory=str(settings.tier_parent),
        tier_file_system=settings.tier_file_system,
        yardsticks=speeds,
        runs=runs,
        verdict=judged,
        notes=notes,
        interrupted=runner.stopped,
        engine=settings.engine,
        about=about,
    )
    files = report.write(result, settings.output)
    print(report.table(result))
    print("report: " + ", ".join(str(path) for path in files))
    if runner.stopped:
        return EXIT_INTERRUPTED
    return EXIT_HOLDS if judged.holds else EXIT_FAILS


if __name__ == "__main__":
    sys.exit(main())
