# SPDX-License-Identifier: Apache-2.0
"""The command line: its options, its help, and the settings that come out of it. Owns no state."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.bench import costs, inject, tierdir
from kvtier.bench.drivers.standin import Limits
from kvtier.bench.pattern import make_shape
from kvtier.bench.settings import Settings
from kvtier.bench.strategies import STRATEGIES
from kvtier.bench.workload import TraceRow, read_trace
from kvtier.errors import ConfigError

DESCRIPTION = """\
Measures what kvtier gains, on this machine, in real time and with real bytes.

A stand-in accelerator (a paged KV buffer with a prefix cache, and a cost model taken from a named
model and GPU) serves the same requests with each strategy:

  none      the accelerator's own prefix cache only; what it forgot is computed again
  host      kvtier keeps chunks in host memory
  host+fs   kvtier keeps chunks in host memory and in files

kvtier's engine is called as vLLM's scheduler calls it; copies and tiers run while the modelled
compute passes. Every byte that comes back is compared with what was computed.
"""

EPILOG = """\
verdict
  The default run sweeps the number of conversations, so that the working set grows from below the
  accelerator's size to beyond host memory. The verdict holds (exit code 0) if
    - every reloaded byte is right, no tier failed, and every request was answered;
    - all strategies are alike (within 5 %) while the accelerator holds the working set;
    - host serves at least 2 times what none does where the accelerator no longer holds it;
    - host+fs serves at least 2 times none and 1.5 times host where host memory no longer holds it.
  For a trace: no strategy is slower to the first token than none.
  Exit code 1: it does not hold, or bytes differ. 2: wrong use. 130: interrupted (what was measured
  is reported all the same).

examples
  python -m kvtier.bench                              the default, under two minutes on two cores
  python -m kvtier.bench --conversations 7            one point
  python -m kvtier.bench --prefill-speedup 100        recomputing is nearly free: says "no gain"
  python -m kvtier.bench --inject swap-heads --conversations 7
                                                      proves that wrong bytes are found (exit 1)
  python -m kvtier.bench --workload trace --trace mooncake_conversation.jsonl --limit 400
  python -m kvtier.bench --prefill-tokens-per-second 25000 --decode-tokens-per-second 110
                                                      speeds measured on your own GPU, unscaled

docs/bench.md explains the model, its constants and how to read the report.
"""

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_size(text: str) -> int:
    """Bytes of "128MiB", "1.5GB" or "4096"."""
    digits = text.strip().rstrip("bBkKmMgGiI")
    unit = text.strip()[len(digits) :].lower()
    try:
        value = float(digits) * _UNITS[unit]
    except (KeyError, ValueError) as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write for example 128MiB or 1.5GiB"
        ) from exc
    if not 0 < value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return int(value)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from exc
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value

    return parse


def _counts(text: str) -> tuple[int, ...]:
    count = _positive(int)
    return tuple(int(count(part)) for part in text.split(","))


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no strategy; there are {', '.join(STRATEGIES)}"
            )
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError("a strategy stands there twice")
    return names


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    integer, number = _positive(int), _positive(float)
    what = parser.add_argument_group("what is run")
    what.add_argument("--workload", choices=("multiturn", "trace"), default="multiturn")
    what.add_argument(
        "--strategies", type=_strategies, default=STRATEGIES, metavar="A,B", help="default: all"
    )
    what.add_argument(
        "--engine",
        default="standin",
        help="only standin today; vllm and openai are reserved",
    )
    what.add_argument("--seed", type=int, default=0)

    talk = parser.add_argument_group("multiturn: a closed loop of conversations")
    talk.add_argument(
        "--conversations",
        type=_counts,
        default=(2, 7, 20),
        metavar="N,N",
        help="points of the sweep (default 2,7,20: inside the accelerator, inside host memory, "
        "beyond it)",
    )
    talk.add_argument("--first-prompt-tokens", type=integer, default=12_000, metavar="N")
    talk.add_argument("--turn-tokens", type=integer, default=4_000, metavar="N")
    talk.add_argument(
        "--turns", type=integer, default=8, metavar="N", help="after the first prompt (default 8)"
    )
    talk.add_argument("--output-tokens", type=integer, default=32, metavar="N")
    talk.add_argument("--max-in-flight", type=integer, default=64, metavar="N")

    trace = parser.add_argument_group("trace: an open loop, by recorded time stamps")
    trace.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines with timestamp (ms), input_length, output_length and hash_ids of "
        "512-token blocks, as published with Mooncake",
    )
    trace.add_argument(
        "--limit", type=integer, default=400, metavar="N", help="first N requests (default 400)"
    )
    trace.add_argument(
        "--speedup",
        type=number,
        default=6.0,
        metavar="X",
        help="times faster than recorded (default 6; latency counts from the intended start)",
    )

    model = parser.add_argument_group("the stand-in accelerator")
    model.add_argument("--accelerator", type=parse_size, default=128 << 20, metavar="SIZE")
    model.add_argument(
        "--scale",
        type=number,
        default=128.0,
        metavar="F",
        help="a token has 1/F of the real bytes and arithmetic, so F times as many pass a second "
        "(default 128)",
    )
    model.add_argument(
        "--prefill-tokens-per-second",
        type=number,
        metavar="N",
        help="measured on a real GPU, short context, unscaled",
    )
    model.add_argument(
        "--decode-tokens-per-second",
        type=number,
        metavar="N",
        help="one request, measured on a real GPU, unscaled",
    )
    model.add_argument(
        "--calibration", type=Path, metavar="FILE", help="JSON file with all constants of the model"
    )
    model.add_argument(
        "--prefill-speedup",
        type=number,
        default=1.0,
        metavar="X",
        help="make the arithmetic X times cheaper",
    )
    model.add_argument("--step-tokens", type=integer, default=8192, metavar="N")
    model.add_argument("--block-tokens", type=integer, default=128, metavar="N")
    model.add_argument("--blocks-per-chunk", type=integer, default=4, metavar="N")

    tiers = parser.add_argument_group("kvtier")
    tiers.add_argument("--host-memory", type=parse_size, default=384 << 20, metavar="SIZE")
    tiers.add_argument("--policy", choices=("lru", "arc"), default="lru")
    tiers.add_argument("--isolation", choices=("thread", "process"), default="thread")
    tiers.add_argument(
        "--lookup-timeout",
        type=number,
        default=10.0,
        metavar="SECONDS",
        help="a request that waits longer for the tiers recomputes (default 10: in the closed loop "
        "all conversations wait at once, and giving up costs more than waiting)",
    )
    tiers.add_argument(
        "--tier-dir",
        type=Path,
        metavar="DIR",
        help="where the files go, in a new directory that is removed again (default: the first of "
        "the temporary directory, /var/tmp and . that is on a disk)",
    )
    tiers.add_argument(
        "--allow-tmpfs", action="store_true", help="accept a tier directory that is memory"
    )
    tiers.add_argument(
        "--inject",
        choices=inject.KINDS,
        help="damage one stored chunk in eight on purpose; the run must end with exit code 1",
    )

    out = parser.add_argument_group("output")
    out.add_argument(
        "--output",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="report.html, report.png and report.json go here (default bench-results)",
    )
    out.add_argument("--quiet", action="store_true", help="no progress lines")
    return parser


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Checked settings.

    Raises
    ------
    ConfigError
        With what to type instead.
    """
    if arguments.engine != "standin":
        reserved = arguments.engine in ("vllm", "openai")
        raise ConfigError(
            f"--engine {arguments.engine}: "
            + ("reserved, not built yet; " if reserved else "unknown; ")
            + "use standin"
        )
    if arguments.workload == "trace" and arguments.trace is None:
        raise ConfigError("--workload trace needs --trace FILE")
    if arguments.workload == "multiturn" and arguments.trace is not None:
        raise ConfigError("--trace goes with --workload trace")
    source = costs.DEFAULT_SOURCE
    if arguments.calibration is not None:
        source = costs.load_source(arguments.calibration)
    source = costs.calibrate(
        source, arguments.prefill_tokens_per_second, arguments.decode_tokens_per_second
    )
    shape = make_shape(
        source.kv_bytes_per_token,
        arguments.scale,
        arguments.block_tokens,
        arguments.blocks_per_chunk,
    )
    rows: tuple[TraceRow, ...] = ()
    if arguments.trace is not None:
        rows = tuple(read_trace(arguments.trace, arguments.limit))
    parent, kind = Path("."), "not used"
    if "host+fs" in arguments.strategies:
        parent, kind = tierdir.choose_directory(arguments.tier_dir, arguments.allow_tmpfs)
    settings = Settings(
        workload=arguments.workload,
        strategies=arguments.strategies,
        shape=shape,
        costs=costs.CostModel(source, arguments.scale, arguments.prefill_speedup),
        limits=Limits(step_tokens=arguments.step_tokens),
        accelerator_bytes=arguments.accelerator,
        host_bytes=arguments.host_memory,
        conversations=arguments.conversations,
        first_prompt_tokens=arguments.first_prompt_tokens,
        turn_tokens=arguments.turn_tokens,
        turns=arguments.turns,
        output_tokens=arguments.output_tokens,
        max_in_flight=arguments.max_in_flight,
        seed=arguments.seed,
        trace_rows=rows,
        speedup=arguments.speedup,
        inject=arguments.inject,
        tier_parent=parent,
        tier_file_system=kind,
        output=arguments.output,
    )
    settings.check()
    for point in settings.points():
        settings.source(point)  # finds what a source refuses before anything is measured
    if "host+fs" in arguments.strategies:
        largest = max(settings.working_set_bytes(point) for point in settings.points())
        tierdir.check_space(parent, largest + largest // 4)
    return settings


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments as argparse sees them."""
    return make_parser().parse_args(argv)
