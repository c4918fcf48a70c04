# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, and a private directory for regions."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engine import Processes


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


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """For engines with all in one process."""
    with Processes(tmp_path_factory.mktemp("processes")) as made:
        yield made


@pytest.fixture(scope="session")
def _loaded() -> None:
    """vLLM's configuration and connector, which warn while they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # lazy: seconds, and only for tests that make vLLM's configuration in this process.
        import torch._inductor.config  # noqa: F401 (the first to warn)

        import tests.vllm.ranks  # noqa: F401


@pytest.fixture
def in_process(_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests over ``tests.vllm.ranks``: vLLM in this process, in an engine's environment."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvt-test-", dir="/dev/shm"))
    try:
        yield path
        left = os.listdir(path)
    finally:
        shutil.rmtree(path)
    assert left == []


@pytest.fixture(scope="module")
def shm_directory() -> Iterator[Path]:
    """A directory on tmpfs for the engines of a module; at the end it must be empty."""
    with _directory() as path:
        yield path


@pytest.fixture
def own_shm_directory() -> Iterator[Path]:
    """The same for one test alone."""
    with _directory() as path:
        yield path
