# SPDX-License-Identifier: Apache-2.0
"""Conversations in vLLM's real engine: without kvtier, with it, and with vLLM's own tiers.

``python -m benchmarks.vllm_load``. Four engines, each in a process of its own, wait while one of
them serves: none, kvtier's host memory, kvtier's host memory and files, and stock (vLLM's tiering
manager and file tier; kvtier's worker copies for it, because vLLM's refuses tensors of its CPU
platform). A closed loop of conversations, two in flight, the same prompts for all; every run starts
with empty caches. The model is a small Llama of random weights, computed by one thread: recomputing
a prompt takes over ten times as long as loading it (the line says both), as it does on a GPU.

- *inside* the device cache: ten pairs of host+fs and none, in turn. The interval is that of 95 % of
  the mean ratio. kvtier's own time is that inside its manager and its worker, by the clock.
- *beyond* the device cache, all of it in host memory; and beyond host memory. That host+fs is not
  below stock means that the interval of their ratio includes 1 or lies above it.

A ratio is one of throughputs, prompt tokens a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Pairs, rate_case, report
from kvtier.bench.costs import DEFAULT_SOURCE, CostModel
from kvtier.bench.drivers.remote import Begin, EngineProcess, Facts, Measured, Point
from kvtier.bench.drivers.standin import Limits
from kvtier.bench.pattern import Shape
from kvtier.bench.settings import RealEngine, Settings
from kvtier.bench.tierdir import TierDirectory

MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""What is larger than in the tests' model of the family "full". 6 KiB of KV a token."""

BLOCK_TOKENS = 128
FIRST, TURN, TURNS, OUTPUT = 12 * BLOCK_TOKENS + 8, BLOCK_TOKENS, 6, 4
"""A prompt is whole blocks and eight tokens."""
CONTEXT_BYTES = 19 * BLOCK_TOKENS * 6144
"""Of a whole conversation."""

DEVICE_BYTES = CONTEXT_BYTES * 5 // 2
HOST_BYTES = CONTEXT_BYTES * 9 // 2
INSIDE, BEYOND_DEVICE, BEYOND_HOST = 2, 4, 8
"""Conversations of each case."""

STRATEGIES = ("none", "host", "host+fs", "stock")
PAIRS = 10
SLOW_ROUNDS = 2
"""In which those take part that are several times slower than kvtier."""
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of 95 %, two-sided, for two to ten pairs."""

FASTER, SMALL_LOSS, OWN_SHARE, GAIN, OVER_HOST = 10.0, 0.97, 0.02, 2.0, 1.5

NOTES = """Inside the device cache all that kvtier does is overhead: it copies every chunk out and
none comes back. Beyond host memory, host memory alone keeps nothing that comes back in time:
conversations take turns, the worst case of LRU. What is found there all the same (shares, in
the line) hangs on single slots: kvtier keeps two of the 85 free for the next promotion.
"""


def settings(model: Path) -> Settings:
    """What the engines are told."""
    return Settings(
        workload="multiturn",
        strategies=STRATEGIES,
        shape=Shape(),
        costs=CostModel(DEFAULT_SOURCE, 1.0),
        limits=Limits(),
        accelerator_bytes=DEVICE_BYTES,
        host_bytes=HOST_BYTES,
        conversations=(INSIDE, BEYOND_DEVICE, BEYOND_HOST),
        first_prompt_tokens=FIRST,
        turn_tokens=TURN,
        turns=TURNS,
        output_tokens=OUTPUT,
        max_in_flight=2,
        seed=0,
        engine="vllm",
        real=RealEngine(
            model=str(model),
            accelerator_bytes=DEVICE_BYTES,
            block_tokens=BLOCK_TOKENS,
            engine_args={"enforce_eager": True},
        ),
    )


class Load:
    """The engines and the runs that they have made.

    Parameters
    ----------
    engines : dict of str to EngineProcess
        By strategy; open.
    """

    def __init__(self, engines: dict[str, EngineProcess]) -> None:
        self._engines = engines
        self._seed = 0

    def round(self, strategies: tuple[str, ...], conversations: int) -> dict[str, Measured]:
        """One run of each strategy with the same prompts, which no earlier round had."""
        self._seed += 1
        order = strategies if self._seed % 2 else tuple(reversed(strategies))
        return {name: self.run(name, conversations, self._seed) for name in order}

    def run(self, strategy: str, conversations: int, seed: int, *, keep: bool = False) -> Measured:
        """One run, checked: nothing failed, all was answered, and every loaded byte is right."""
        measured = self._engines[strategy].run(Point(conversations, seed, keep))
        if len(measured.finished) < measured.total or measured.engine.failures:
            raise SystemExit(
                f"{strategy}: {len(measured.finished)} of {measured.total} answered, failures "
                f"{measured.engine.failures}"
            )
        copies = measured.copies
        if copies.differing_blocks or copies.verified_bytes != copies.load_bytes:
            raise SystemExit(
                f"{strategy}: {copies.differing_blocks} loaded blocks differ, "
                f"{copies.verified_bytes} of {copies.load_bytes} bytes were compared"
            )
        print(
            f"{strategy:8} {conversations} conversations: {measured.wall_seconds:6.2f} s, "
            f"{rate(measured):6.0f} tokens/s, own time {own_share(measured):.2%}",
            file=sys.stderr,
            flush=True,
        )
        return measured


def rate(measured: Measured) -> float:
    """Prompt tokens a second."""
    return sum(one.prompt_tokens for one in measured.finished) / measured.wall_seconds


def own_share(measured: Measured) -> float:
    """Time inside manager and worker, of all of it."""
    return measured.times.engine / measured.wall_seconds


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of 95 %, of the geometric mean of two to ten ratios."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    half = STUDENT[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)


def not_below(pairs: Pairs, reference: str, least: float) -> Case:
    """That the interval of the ratio includes `least` or lies above it: its upper end."""
    low, high = interval(pairs.speedups())
    name = "the same, upper end of the 95 % interval"
    low, high = short(low), short(high)
    return Case(name, high, "ratio", reference, 1.0, high, (low, high), least)


def single(case: str, value: float, unit: str, reference: str, other: float, target: float) -> Case:
    """A case of one value: other / value is the ratio."""
    ratio = short(other / value)
    return Case(case, short(value), unit, reference, short(other), ratio, (ratio, ratio), target)


def short(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


@contextlib.contextmanager
def opened(model: Path, directory: Path, log: Path) -> Iterator[tuple[Load, Facts]]:
    """All engines, started."""
    with contextlib.ExitStack() as stack:
        engines = {}
        facts = None
        for name in STRATEGIES:
            folder = None
            if name in ("host+fs", "stock"):
                folder = TierDirectory(directory)
                folder.open()
                stack.callback(folder.close)
            begin = Begin(settings(model), name, str(folder.path) if folder else None)
            engine = stack.enter_context(EngineProcess(begin, log / f"{name}.log"))
            facts = engine.open()
            engines[name] = engine
        assert facts is not None
        yield Load(engines), facts


def probe(load: Load) -> tuple[float, float]:
    """Seconds to the first token of one prompt: computed, and loaded from host memory."""
    computed, loaded = [], []
    for seed in range(1000, 1005):
        load.run("host", 1, seed)
        again = load.run("host", 1, seed, keep=True).finished[0]
        if again.computed_tokens >= BLOCK_TOKENS:
            raise SystemExit(f"{again.computed_tokens} tokens of the probe were computed again")
        loaded.append(again.first_token_seconds)
        computed.append(load.run("none", 1, seed).finished[0].first_token_seconds)
    return statistics.median(computed[1:]), statistics.median(loaded[1:])


def beyond(load: Load, conversations: int, rounds: int) -> list[dict[str, Measured]]:
    """Rounds of host+fs and stock; none and host take part in the first ones."""
    return [
        load.round(STRATEGIES if number < SLOW_ROUNDS else ("host+fs", "stock"), conversations)
        for number in range(rounds)
    ]


def pairs_of(rounds: list[dict[str, Measured]], subject: str, reference: str) -> Pairs:
    """Walls of two strategies, round by round, where both took part."""
    both = [one for one in rounds if subject in one and reference in one]
    return Pairs(
        tuple(one[subject].wall_seconds for one in both),
        tuple(one[reference].wall_seconds for one in both),
    )


def measure(load: Load, rounds: int) -> tuple[list[Case], dict[str, Any]]:
    """All cases, and what stands beside them."""
    computed, loaded = probe(load)
    print(f"a prompt of {FIRST}: computed {computed:.3f} s, loaded {loaded:.3f} s", file=sys.stderr)
    inside = [load.round(("host+fs", "none"), INSIDE) for _ in range(PAIRS)]
    device = beyond(load, BEYOND_DEVICE, rounds)
    host = beyond(load, BEYOND_HOST, rounds)
    own = statistics.median(own_share(one["host+fs"]) for one in inside)
    tokens = {
        name: sum(one.prompt_tokens for one in rounds_[0]["none"].finished)
        for name, rounds_ in (("inside", inside), ("device", device), ("host", host))
    }

    def case(where: str, name: str, taken: list[dict[str, Measured]], *what: Any) -> Case:
        subject, reference, target = what
        return rate_case(
            f"{where}, {subject}",
            tokens[name],
            "tok/s",
            reference,
            pairs_of(taken, subject, reference),
            target=target,
        )

    prompt = "a prompt: loading it"
    own_time = "the same, kvtier's own time"
    cases = [
        single(prompt, 1000 * loaded, "ms", "computing it", 1000 * computed, FASTER),
        case("inside the device cache", "inside", inside, "host+fs", "none", None),
        not_below(pairs_of(inside, "host+fs", "none"), "none", SMALL_LOSS),
        single(own_time, 100 * own, "% run", "allowed", 100 * OWN_SHARE, 1.0),
        case("beyond the device cache", "device", device, "host", "none", GAIN),
        case("beyond the device cache", "device", device, "host+fs", "none", GAIN),
        case("beyond the device cache", "device", device, "host+fs", "stock", None),
        not_below(pairs_of(device, "host+fs", "stock"), "stock", 1.0),
        case("beyond host memory", "host", host, "host+fs", "none", GAIN),
        case("beyond host memory", "host", host, "host+fs", "host", OVER_HOST),
        case("beyond host memory", "host", host, "host+fs", "stock", None),
        not_below(pairs_of(host, "host+fs", "stock"), "stock", 1.0),
    ]
    beside = {
        "prompt_tokens": FIRST,
        "computed_seconds": computed,
        "loaded_seconds": loaded,
        "own_share": own,
        "cpu_seconds": {
            name: {
                strategy: round(
                    statistics.median(
                        one[strategy].cpu_seconds for one in taken if strategy in one
                    ),
                    3,
                )
                for strategy in taken[0]
            }
            for name, taken in (("inside", inside), ("device", device), ("host", host))
        },
        "shares": {
            name: {strategy: shares(one) for strategy, one in taken[0].items()}
            for name, taken in (("inside", inside), ("device", device), ("host", host))
        },
    }
    return cases, beside


def shares(measured: Measured) -> dict[str, float]:
    """Where prompt tokens came from, and own time."""
    total = sum(one.prompt_tokens for one in measured.finished)
    found: dict[str, float] = {
        "device": sum(one.accelerator_tokens for one in measured.finished) / total,
        "computed": sum(one.computed_tokens for one in measured.finished) / total,
        "own_time": own_share(measured),
        "waited": measured.times.pending / measured.wall_seconds,
    }
    for one in measured.finished:
        for name, tokens in one.sources.items():
            found[name] = found.get(name, 0.0) + tokens / total
    return {name: round(value, 4) for name, value in found.items()}


def build_model(folder: Path) -> Path:
    """The checkpoint, written in a process of its own."""
    path = folder / "model"
    command = [sys.executable, "-m", "tests.vllm.models", "full", str(path), json.dumps(MODEL)]
    subprocess.run(
        command,
        check=True,
        timeout=240,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--rounds",
        type=int,
        choices=range(2, 11),
        default=5,
        metavar="N",
        help="beyond the device cache, 2 to 10",
    )
    parser.add_argument("--directory", type=Path, help="for the files; a temporary one by default")
    arguments = parser.parse_args()
    # One thread computes: copies and tiers find a core as they do beside a GPU, and a busy machine
    # does not stop one thread of a team while the others wait for it.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory(prefix="kvtier-load-", dir=arguments.directory) as name:
        folder = Path(name)
        with opened(build_model(folder), folder, folder) as (load, facts):
            cases, beside = measure(load, arguments.rounds)
    report("vllm_load", cases, engine=facts.about, beside=beside)


if __name__ == "__main__":
    main()
