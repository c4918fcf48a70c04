# SPDX-License-Identifier: Apache-2.0
"""Runs every strategy at every point in vLLM, each in a process of its own, one after the other.

Owns, for the length of one run, the engine's process and the tier's directory. One thread.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

from kvtier.bench.drivers.remote import (
    Begin,
    EngineProcess,
    Facts,
    Measured,
    Point,
    Progress,
)
from kvtier.bench.report import run_line
from kvtier.bench.results import Run, summarise
from kvtier.bench.settings import Settings
from kvtier.bench.strategies import STOCK
from kvtier.bench.tierdir import TierDirectory

Say = Callable[[str], None]

WITH_FILES = ("host+fs", STOCK)


class EngineRunner:
    """One invocation's runs.

    Parameters
    ----------
    settings : Settings
    say : callable
        Takes the lines of the progress display.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._begin = time.perf_counter()
        self._current: EngineProcess | None = None
        self._answers: dict[str, dict[str, list[int]]] = {}
        self.stopped = False
        self.accelerator_bytes = 0
        """This and `about`: of the engine that started first."""
        self.about: dict[str, str] = {}
        self.notes: list[str] = []
        self.bytes_compared = True
        """In every engine so far."""

    def stop(self) -> None:
        """End the run in progress after its step, and start no other. Safe in a signal handler."""
        self.stopped = True
        if self._current is not None:
            self._current.stop()

    def run(self) -> list[Run]:
        """All runs, in the order of the sweep; those finished so far after `stop`."""
        runs: list[Run] = []
        points = self._settings.points()
        for number, conversations in enumerate(points, 1):
            name = self._settings.point_name(conversations)
            self._say(f"point {number}/{len(points)}: {name}")
            self._answers = {}
            for strategy in self._settings.strategies:
                if not self.stopped:
                    runs += self._one(strategy, conversations)
            self.notes += compare_answers(name, self._answers)
        return runs

    def _one(self, strategy: str, conversations: int) -> list[Run]:
        """The run, or none if it was stopped before it began."""
        settings = self._settings
        with contextlib.ExitStack() as stack:
            directory = None
            if strategy in WITH_FILES:
                directory = TierDirectory(settings.tier_parent)
                directory.open()
                stack.callback(directory.close)
            path = str(directory.path) if directory else None
            place = f"{strategy}-{conversations}" if conversations else strategy
            log = settings.output / f"vllm-{place}.log"
            engine = EngineProcess(Begin(settings, strategy, path), log)
            stack.enter_context(engine)
            self._line(strategy, "starting vLLM")
            facts = engine.open()
            self.accelerator_bytes = self.accelerator_bytes or facts.accelerator_bytes
            self.about = self.about or facts.about
            self.bytes_compared = self.bytes_compared and facts.bytes_compared
            self._current = engine
            try:
                if self.stopped:
                    return []
                told = functools.partial(self._progress, strategy)
                measured = engine.run(Point(conversations, settings.seed), told)
            finally:
                self._current = None
        self._answers[strategy] = measured.answers
        if measured.skipped and strategy == settings.strategies[0]:
            self.notes.append(
                f"{measured.skipped} requests of the trace were longer than the "
                f"{facts.max_tokens} tokens that the engine takes: left out"
            )
        run = summarise_engine(settings, strategy, conversations, facts, measured, directory)
        self._line(strategy, run_line(run))
        return [run]

    def _progress(self, strategy: str, progress: Progress) -> None:
        speed = progress.prompt_tokens / progress.seconds / 1000
        self._line(
            strategy, f"{progress.requests:4d}/{progress.total} requests, {speed:5.1f} k tokens/s"
        )

    def _line(self, strategy: str, text: str) -> None:
        self._say(f"  [{time.perf_counter() - self._begin:5.1f} s] {strategy:<8s}{text}")


def summarise_engine(
    settings: Settings,
    strategy: str,
    conversations: int,
    facts: Facts,
    measured: Measured,
    directory: TierDirectory | None = None,
) -> Run:
    """`Run` of what one engine measured."""
    return summarise(
        strategy=strategy,
        point=str(conversations) if conversations else "trace",
        conversations=conversations,
        working_set_bytes=int(settings.working_set_tokens(conversations) * facts.token_bytes),
        wall_seconds=measured.wall_seconds,
        wanted=measured.total,
        finished=measured.finished,
        times=measured.times,
        copies=measured.copies,
        engine=measured.engine,
        sweeps=directory.counters if directory else None,
        interrupted=measured.interrupted,
    )


def compare_answers(point: str, answers: dict[str, dict[str, list[int]]]) -> list[str]:
    """How many answers begin as those of `none`; they may differ in their last digits."""
    base = answers.get("none")
    if base is None:
        return []
    found = []
    for strategy, mine in answers.items():
        both = base.keys() & mine.keys()
        if strategy != "none" and both:
            same = sum(base[name] == mine[name] for name in both)
            found.append(f"{point}: {same} of {len(both)} answers of {strategy} begin as none's do")
    return found
