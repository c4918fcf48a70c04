# SPDX-License-Identifier: Apache-2.0
"""A process that does what a test tells it: one JSON line each way.

``Child`` is the test's side, ``serve`` the process's.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from typing import Any

from kvtier.errors import KVTierError
from tests.parts import ROOT

WAIT_SECONDS = 60


class ChildEnded(AssertionError):
    """It has ended without an answer."""


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def serve(commands: object) -> None:
    """Call the method of `commands` that each line names, and say what it returns."""
    say(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(commands, request.pop("do"))(**request)
        except KVTierError as exc:
            answer = {"error": type(exc).__name__, "message": str(exc)}
        say(**(answer or {}))


class Child:
    """A process running a module that ``serve``\\ s."""

    def __init__(self, module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            pass_fds=pass_fds,
        )
        self._read = b""

    def receive(self) -> dict[str, Any]:
        """The next answer; fails the test if there is none in time. ``ChildEnded``: never."""
        # Not by ``readline``: what it has read beyond the line, no selector knows of.
        while b"\n" not in self._read:
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                assert selector.select(WAIT_SECONDS), "the child does not answer"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise ChildEnded(f"the child ended with {self.process.wait()}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def send(self, do: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def go(self) -> None:
        """Past the point at which the child waits."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.receive()

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end: the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
