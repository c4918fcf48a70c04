# SPDX-License-Identifier: Apache-2.0
"""Directories for regions, and processes that a test drives line by line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.driven import Child


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Start child processes; they have answered once when they are handed out."""
    with contextlib.ExitStack() as stack:

        def start(count: int = 1, **options: Any) -> Any:
            children = []
            for _ in range(count):
                child = Child("tests.host.child", **options)
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
