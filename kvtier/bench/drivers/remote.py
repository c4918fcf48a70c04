# SPDX-License-Identifier: Apache-2.0
"""A real engine in a process of its own: what is said to it and back, and the side that asks.

Nothing of an engine can leak into the next run when its process has ended. One line of JSON a
message over a socket pair; what vLLM prints goes to a log file. `EngineProcess` owns the process,
its group and the socket. One thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvtier.bench.copies import CopyCounters
from kvtier.bench.drivers.standin import Finished, StepTimes
from kvtier.bench.results import EngineCounts
from kvtier.bench.settings import Settings
from kvtier.errors import KVTierError

START_SECONDS = 1800.0
"""Weights may come from far, and be compiled."""
SILENCE_SECONDS = 600.0
"""An engine says something after every step; the longest one is taken to be shorter than this."""
CLOSE_SECONDS = 60.0


class EngineLostError(KVTierError):
    """The engine did not start, broke, or went silent."""


class Begin(msgspec.Struct, frozen=True):
    """The first message to the process: what engine to make."""

    settings: Settings
    strategy: str
    tier_directory: str | None = None


class Point(msgspec.Struct, frozen=True):
    """Every later one: a run, which starts with an empty device cache, and empty host memory and
    tiers unless it is to `keep` them."""

    conversations: int
    seed: int
    keep: bool = False


class Facts(msgspec.Struct, frozen=True, tag=True):
    """The engine has started."""

    accelerator_bytes: int
    accelerator_tokens: int
    max_tokens: int
    """Longest context of a request."""
    bytes_compared: bool
    """Whether every loaded block is compared with what was stored; so where nothing is loaded."""
    about: dict[str, str]

    @property
    def token_bytes(self) -> float:
        """KV bytes of one token of context, by vLLM's own estimate of what the cache holds."""
        return self.accelerator_bytes / self.accelerator_tokens


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A run goes on."""

    requests: int
    total: int
    prompt_tokens: int
    seconds: float


class Measured(msgspec.Struct, frozen=True, tag=True):
    """A run has ended."""

    wall_seconds: float
    total: int
    skipped: int
    finished: list[Finished]
    times: StepTimes
    copies: CopyCounters
    engine: EngineCounts
    answers: dict[str, list[int]]
    """First tokens of each answer, by request."""
    cpu_seconds: float
    """Of the engine's process with all its threads; not of the tiers' process."""
    interrupted: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine broke; one line."""

    text: str


Answer = Facts | Progress | Measured | Failed


def encode(message: msgspec.Struct) -> bytes:
    """One line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def decode(line: bytes, kind: Any) -> Any:
    """A message of type `kind`."""
    return msgspec.json.decode(line, type=kind, dec_hook=lambda wanted, value: wanted(value))


class EngineProcess:
    """One engine; a context manager, and `open` before the first run.

    Parameters
    ----------
    begin : Begin
    log : Path
        Of vLLM; written anew.
    """

    def __init__(self, begin: Begin, log: Path) -> None:
        self._begin = begin
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._file: Any = None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def open(self) -> Facts:
        """Start the engine.

        Raises
        ------
        EngineLostError
            If it does not start.
        """
        ours, theirs = socket.socketpair()
        self._socket, self._file = ours, ours.makefile("rwb")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "kvtier.bench.drivers.inprocess", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=_environment(self._begin.settings),
                    # Ctrl-C is for this side, which then tells the other what to do.
                    process_group=0,
                )
        finally:
            theirs.close()
        self._say(self._begin)
        facts = self._hear(START_SECONDS)
        assert isinstance(facts, Facts)
        return facts

    def run(self, point: Point, progress: Callable[[Progress], None] | None = None) -> Measured:
        """One run, to its end or until `stop`."""
        self._say(point)
        while True:
            answer = self._hear(SILENCE_SECONDS)
            if isinstance(answer, Measured):
                return answer
            if progress is not None and isinstance(answer, Progress):
                progress(answer)

    def stop(self) -> None:
        """End the run in progress after its step. Safe in a signal handler."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def close(self) -> None:
        """End the engine in its own way, kill what is left. Idempotent."""
        process, self._process = self._process, None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(CLOSE_SECONDS)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._socket.close()
            self._socket = None

    def _say(self, message: msgspec.Struct) -> None:
        try:
            self._file.write(encode(message))
            self._file.flush()
        except OSError as exc:
            raise EngineLostError(self._lost(f"ended ({exc.strerror})")) from exc

    def _hear(self, seconds: float) -> Answer:
        assert self._socket is not None
        self._socket.settimeout(seconds)
        try:
            line = self._file.readline()
        except TimeoutError as exc:
            raise EngineLostError(self._lost(f"said nothing for {seconds:g} seconds")) from exc
        except OSError as exc:
            raise EngineLostError(self._lost(f"broke off ({exc.strerror})")) from exc
        if not line:
            raise EngineLostError(self._lost("ended without a word"))
        answer: Answer = decode(line, Answer)
        if isinstance(answer, Failed):
            raise EngineLostError(self._lost(f"failed: {answer.text}"))
        return answer

    def _lost(self, how: str) -> str:
        return f"vLLM with strategy {self._begin.strategy} {how}; its log is {self._log}"


def _environment(settings: Settings) -> dict[str, str]:
    """The engine core in the one process, so that what it does can be measured there."""
    env = dict(os.environ) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    if settings.real is not None and settings.real.accelerator_bytes is not None:
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win
    return env
