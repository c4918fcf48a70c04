# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, and a private directory for regions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None

if not HAS_VLLM:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Path of the checkpoint of a family; built once a session, in a process of its own."""
    root = tmp_path_factory.mktemp("checkpoints")

    def build(family: str) -> Path:
        path = root / family
        if not path.exists():
            subprocess.run(
                [sys.executable, "-m", "tests.vllm.models", family, str(path)],
                check=True,
                timeout=240,
                cwd=Path(__file__).parents[2],
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
            )
        return path

    yield build
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def shm_directory() -> Iterator[Path]:
    """A directory on tmpfs of this module's own; at the end it must be empty."""
    path = Path(tempfile.mkdtemp(prefix="kvt-test-", dir="/dev/shm"))
    yield path
    left = os.listdir(path)
    shutil.rmtree(path)
    assert left == []
