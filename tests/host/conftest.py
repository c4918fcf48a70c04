# SPDX-License-Identifier: Apache-2.0
"""Directories for regions, and processes that a test drives line by line."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parts import ROOT

WAIT_SECONDS = 60


class Child:
    """A process running ``tests.host.child``."""

    def __init__(self, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.host.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            pass_fds=pass_fds,
        )

    def receive(self) -> dict[str, Any]:
        """The next answer; fails the test if there is none in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(WAIT_SECONDS), "the child does not answer"
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
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


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Start child processes; they have answered once when they are handed out."""
    with contextlib.ExitStack() as stack:

        def start(count: int = 1, **options: Any) -> Any:
            children = []
            for _ in range(count):
                child = Child(**options)
                stack.callback(child.end)
                children.append(child)
            for child in children:
                assert child.receive() == {"ready": True}
            return children[0] if count == 1 else children

        yield start


@pytest.fixture
def region_dir() -> Iterator[str]:
    """A directory on /dev/shm. Whatever a test leaves in it fails the test.

    Name it before ``spawn``, so that the processes have ended when it is looked at.
    """
    folder = tempfile.mkdtemp(prefix="test-regions-", dir="/dev/shm")
    try:
        yield folder
        left = os.listdir(folder)
        assert not left, f"region files left: {left}"
    finally:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _unmount(folder: str) -> None:
    done = subprocess.run(["umount", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        # A holder is left, which is the failure; the mount must go all the same.
        subprocess.run(["umount", "--lazy", folder], check=True)
        pytest.fail(done.stderr, pytrace=False)


@pytest.fixture
def small_tmpfs() -> Iterator[Callable[[int], str]]:
    """Mount tmpfs of a size of its own (mark the test ``needs("mount")``).

    Name it before ``spawn``, as for ``region_dir``.
    """
    with contextlib.ExitStack() as stack:

        def mount(size_bytes: int) -> str:
            folder = tempfile.mkdtemp(prefix="test-regions-")
            stack.callback(os.rmdir, folder)
            options = f"size={size_bytes},mode=1777"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
            stack.callback(_unmount, folder)
            return folder

        yield mount
