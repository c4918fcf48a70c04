# SPDX-License-Identifier: Apache-2.0
"""What users install and run first: the wheel in a bare environment, the examples."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.parts import ROOT, newer_python

PROGRAM = """
import kvtier, kvtier.bench, sys
from kvtier._core import fileio, index, layout, slots, ucx, words
from kvtier.engine.engine import Engine
from kvtier.errors import ConfigError
try:
    # Nothing of UCX was installed; a machine with an RDMA device may have its own.
    assert "/usr" in ucx.load()
except ConfigError as exc:
    assert "pip install libucx-cu12" in str(exc), exc
assert "site-packages" in kvtier.__file__, kvtier.__file__
print(kvtier.__version__)
"""


NOT_IN_A_CLONE = (
    *(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__"),
    *("build", "dist", "bench-results", "*.egg-info", "*.so", "*.c"),
)


PARTS_OF_A_NEWER_PYTHON = (
    *("tests/runtime", "tests/core", "tests/tiers/fs/test_errors.py"),
    *("tests/engine/test_aio.py", "tests/engine/test_engine.py"),
)
"""Where a change of asyncio, ctypes or the C interface shows, in about two minutes."""


def run(*command: str, cwd: Path, seconds: float = 400) -> str:
    """Standard output of a command that must succeed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "KVTIER_CHECKS")
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}\n{done.stderr}"
    return done.stdout


PLAIN_BUILD_ONLY = pytest.mark.skipif(
    os.environ.get("KVTIER_CHECKS") == "1", reason="it builds by itself, and what make test builds"
)


@pytest.mark.slow
@PLAIN_BUILD_ONLY
@pytest.mark.needs("registry")
def test_a_wheel_works_in_a_bare_environment(tmp_path: Path) -> None:
    """As a user runs it: ``pip wheel .`` in a clean copy of the tree, with no build tools but those
    that pyproject.toml names, and an environment that has only what this collected."""
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_IN_A_CLONE))
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(wheels), "."),
        cwd=source,
    )
    assert len(list(wheels.glob("kvtier-0.1.0-*.whl"))) == 1
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    python = str(bare / "bin" / "python")
    found = ("--no-index", "--find-links", str(wheels))
    run(python, "-m", "pip", "install", "--quiet", *found, "kvtier", cwd=tmp_path)
    assert run(python, "-W", "error", "-c", PROGRAM, cwd=tmp_path).strip() == "0.1.0"
    assert "--workload" in run(python, "-m", "kvtier.bench", "--help", cwd=tmp_path)


@pytest.mark.slow
@PLAIN_BUILD_ONLY
@pytest.mark.needs("registry", "newer-python")
def test_a_newer_python_builds_and_serves(tmp_path: Path) -> None:
    """Everything else runs on one version: asyncio is not the same in the next ones (gathering
    tasks that have ended gave the loop no turn, and the service spun for ever)."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_IN_A_CLONE))
    newer = newer_python()
    assert newer is not None
    run(newer, "-m", "venv", str(tmp_path / "env"), cwd=tmp_path)
    python = str(tmp_path / "env" / "bin" / "python")
    base = source / "requirements" / "base.txt"
    tools = [
        line
        for line in (source / "requirements" / "dev.txt").read_text().splitlines()
        if line.startswith(("pytest", "hypothesis"))
    ]
    run(python, "-m", "pip", "install", "--quiet", "-r", str(base), *tools, cwd=tmp_path)
    run(python, "setup.py", "--quiet", "build_ext", "--inplace", cwd=source)
    left_out = "--ignore=tests/core/test_ucx.py"  # two minutes of a C library
    chosen = ("-q", "-m", "not slow and not timed and not vllm", left_out, *PARTS_OF_A_NEWER_PYTHON)
    said = run(python, "-m", "pytest", *chosen, cwd=source, seconds=1200)
    assert " passed" in said.splitlines()[-1]


def test_the_library_example_runs(tmp_path: Path) -> None:
    example = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); " + (
        f"runpy.run_path({str(ROOT / 'examples' / 'library.py')!r}, run_name='__main__')"
    )
    output = run(sys.executable, "-c", example, cwd=tmp_path)
    # Four times what host memory holds: all of it was stored and found again.
    assert "loaded_bytes={'fs': 67108864}" in output
    assert "evicted_unsaved=0" in output
    assert list(tmp_path.iterdir()) == []
