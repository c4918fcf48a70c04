# SPDX-License-Identifier: Apache-2.0
"""Runs every strategy at every point of the sweep, one after the other, and collects the runs.

Owns, for the length of one run, the engine, the copy stream and the tier's directory, and closes
them in reverse order whatever happens. One thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.bench import inject
from kvtier.bench.accelerator import PagedBuffer
from kvtier.bench.clock import RealClock
from kvtier.bench.copies import CopyCounters, CopyStream
from kvtier.bench.drivers import EngineLike
from kvtier.bench.drivers.standin import StandIn
from kvtier.bench.pattern import Pattern
from kvtier.bench.report import run_line
from kvtier.bench.results import EngineCounts, Run, middle, summarise
from kvtier.bench.settings import Settings
from kvtier.bench.strategies import Opener, engine_counts
from kvtier.bench.tierdir import TierDirectory

CLOSE_SECONDS = 10.0
PROGRESS_SECONDS = 2.0
SETTLE_SECONDS = 0.8

Say = Callable[[str], None]


class Runner:
    """One invocation's runs.

    Parameters
    ----------
    settings : Settings
    opener : Opener
    say : callable
        Takes the lines of the progress display.
    """

    def __init__(self, settings: Settings, opener: Opener, say: Say) -> None:
        self._settings = settings
        self._opener = opener
        self._say = say
        self._pattern = Pattern(settings.shape)
        self._current: StandIn | None = None
        self._begin = time.perf_counter()
        self.stopped = False

    def stop(self) -> None:
        """End the run in progress after its step, and start no other. Safe in a signal handler."""
        self.stopped = True
        if self._current is not None:
            self._current.stop()

    def run(self) -> list[Run]:
        """All runs, in the order of the sweep; those finished so far after `stop`."""
        settings = self._settings
        buffer = PagedBuffer(settings.shape, settings.num_blocks)
        runs: list[Run] = []
        points = settings.points()
        for number, conversations in enumerate(points, 1):
            size = settings.working_set_bytes(conversations)
            self._say(
                f"point {number}/{len(points)}: {settings.point_name(conversations)}, "
                f"working set {size / 2**20:.0f} MiB"
            )
            repeats: dict[str, list[Run]] = {strategy: [] for strategy in settings.strategies}
            for _repeat in range(settings.repeats):
                for strategy in settings.strategies:
                    if not self.stopped:
                        repeats[strategy].append(self._one(buffer, strategy, conversations))
                quick = [
                    run.wall_seconds < settings.repeat_below_seconds
                    for done in repeats.values()
                    for run in done
                ]
                # The quickest strategy decides: a ratio is as uncertain as its shorter side.
                if self.stopped or settings.inject or not any(quick):
                    break
                if sum(run.wall_seconds for done in repeats.values() for run in done) > 15:
                    break
            runs += [middle(done) for done in repeats.values() if done]
            if self.stopped:
                break
        return runs

    def _one(self, buffer: PagedBuffer, strategy: str, conversations: int) -> Run:
        settings = self._settings
        source = settings.source(conversations)
        with contextlib.ExitStack() as stack:
            directory = None
            if strategy == "host+fs":
                directory = TierDirectory(settings.tier_parent, self._file_damage())
                directory.open()
                stack.callback(directory.close)
            engine = stream = None
            if strategy != "none":
                geometry = settings.shape.geometry(settings.host_bytes)
                path = directory.path if directory else None
                engine, region = self._opener(strategy, geometry, path)
                stack.callback(engine.close, CLOSE_SECONDS)
                stream = CopyStream(
                    buffer,
                    self._pattern,
                    region,
                    damage=inject.make_damage(settings.inject, settings.shape),
                    skip_store=inject.make_skip(settings.inject),
                )
                stream.open()
                stack.callback(stream.close)
            progress = _Progress(strategy, source.total, self._say, self._begin)
            server = StandIn(
                buffer,
                self._pattern,
                settings.costs,
                settings.limits,
                source,
                RealClock(),
                engine,
                stream,
                on_step=progress.step,
            )
            self._current = server
            if self.stopped:
                server.stop()
            server.run()
            wall = server.wall_seconds
            if server.finished and not server.stopped:
                wall = max(item.end for item in server.finished)
            self._current = None
            server.pool.check()
            if engine is not None and directory is not None:
                _settle(engine)
            run = summarise(
                strategy=strategy,
                point=str(conversations) if conversations else "trace",
                conversations=conversations,
                working_set_bytes=settings.working_set_bytes(conversations),
                wall_seconds=wall,
                wanted=source.total,
                finished=server.finished,
                times=server.times,
                copies=stream.counters if stream else CopyCounters(),
                engine=engine_counts(engine.stats()) if engine else EngineCounts(),
                sweeps=directory.counters if directory else None,
                interrupted=server.stopped,
            )
        progress.end(run)
        return run

    def _file_damage(self) -> Callable[[Path, int], bool] | None:
        if self._settings.inject != "flip-file":
            return None

        def damage(path: Path, number: int) -> bool:
            if number % inject.EVERY:
                return False
            try:
                inject.flip_file(path)
            except FileNotFoundError:
                return False  # evicted in between
            return True

        return damage


def _settle(engine: EngineLike) -> None:
    """Let the counters of the tiers arrive, which are sent twice a second; nothing is measured."""
    deadline = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < deadline:
        time.sleep(SETTLE_SECONDS / 10)
        engine.poll()
        engine.end_step()


class _Progress:
    """A line every two seconds while a run goes on, and one at its end."""

    def __init__(self, strategy: str, total: int, say: Say, begin: float) -> None:
        self._strategy = strategy
        self._total = total
        self._say = say
        self._begin = begin
        self._next = PROGRESS_SECONDS

    def step(self, server: StandIn, seconds: float) -> None:
        if seconds < self._next:
            return
        self._next = seconds + PROGRESS_SECONDS
        done = server.finished
        prompt = sum(item.prompt_tokens for item in done)
        self._line(
            f"{len(done):4d}/{self._total} requests, {prompt / seconds / 1000:5.0f} k tokens/s"
        )

    def end(self, run: Run) -> None:
        differ = run.copies.differing_blocks
        self._line(run_line(run) + (f"; {differ} BLOCKS DIFFER" if differ else ""))

    def _line(self, text: str) -> None:
        self._say(f"  [{time.perf_counter() - self._begin:5.1f} s] {self._strategy:<8s}{text}")
