# SPDX-License-Identifier: Apache-2.0
"""The checks in conftest.py trip: a run of bad tests in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.loops import LOOPS
from tests import conftest
from tests.parts import ROOT

BAD_TESTS = """
import asyncio, os, subprocess, sys, threading
import pytest
from hypothesis import given, settings, strategies as st
from kvtier.host import files

KEEP = []
RELEASE = threading.Event()

def test_descriptor():
    KEEP.append(os.open("/dev/zero", os.O_RDONLY))

def test_thread():
    threading.Thread(target=RELEASE.wait, name="left-thread", daemon=True).start()

def test_process():
    KEEP.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_region_file():
    # Locked before it has a name, like a region: else whoever sweeps beside this run removes it.
    fd = files.create_nameless("/dev/shm")
    files.try_lock(fd, exclusive=False)
    files.link(fd, f"/dev/shm/kvtier-{os.getuid()}-house-{os.getpid()}")
    KEEP.append(fd)
    files.sweep()

@pytest.mark.asyncio
async def test_task():
    KEEP.append(asyncio.create_task(asyncio.sleep(60), name="left-task"))

@pytest.mark.asyncio
@settings(max_examples=1, deadline=None)
@given(st.just(0))
async def test_drawn_task(_):
    KEEP.append(asyncio.create_task(asyncio.sleep(60), name="drawn-task"))

@pytest.mark.asyncio
async def test_clean():
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()

@pytest.mark.leaves("the library keeps it")
def test_allowed():
    KEEP.append(os.open("/dev/zero", os.O_RDONLY))

@pytest.mark.needs("nowhere")
def test_left_out():
    raise AssertionError("ran without its part")

def test_end():
    RELEASE.set()
    process = next(kept for kept in KEEP if isinstance(kept, subprocess.Popen))
    process.communicate()
    path = f"/dev/shm/kvtier-{os.getuid()}-house-{os.getpid()}"
    os.unlink(path)
"""

CONFTEST = """
from tests.conftest import *
from tests import conftest, parts
parts.PARTS["nowhere"] = lambda: "there is no such place"
conftest.others_run = lambda: False
"""


def run(folder: Path, text: str, *args: str, **env: str) -> str:
    """Output of pytest over one file of tests under this house's conftest."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_bad.py").write_text(text)
    (folder / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = strict\nasyncio_default_fixture_loop_scope = function\n"
        "markers =\n  fault(id): fault\n  needs(part): part\n  leaves(why): why\n  vllm: vllm\n"
    )
    command = [sys.executable, "-m", "pytest", "-rA", "--strict-markers", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVTIER_REQUIRE": "", **env}
    done = subprocess.run(
        [*command, *args, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_leaks_fail_their_tests(tmp_path: Path) -> None:
    output = run(tmp_path, BAD_TESTS)
    for name, words in {
        "test_descriptor": r"descriptor \d+: /dev/zero",
        "test_thread": r"thread left-thread",
        "test_process": r"process \d+: \S*python",
        "test_region_file": r"region file /dev/shm/kvtier-\d+-house",
    }.items():
        assert f"ERROR test_bad.py::{name} - Failed: left behind" in output, output
        assert re.search(f"left behind: .*{words}", output), output
    for loop in LOOPS:
        assert f"FAILED test_bad.py::test_task[{loop}] - AssertionError" in output, output
        assert f"FAILED test_bad.py::test_drawn_task[{loop}] - AssertionError" in output, output
    assert "tasks left: left-task" in output
    assert "tasks left: drawn-task" in output
    assert "left out: 1 tests, nowhere: there is no such place" in output
    assert "4 failed, 8 passed, 1 skipped, 4 errors" in output


def test_asyncio_tests_run_on_both_loops(tmp_path: Path) -> None:
    text = (
        "import asyncio, pytest\nKINDS = set()\n"
        "@pytest.mark.asyncio\nasync def test_one():\n"
        "    KINDS.add(type(asyncio.get_running_loop()).__module__)\n"
        "def test_end():\n    assert KINDS == {'uvloop', 'asyncio.unix_events'}\n"
    )
    assert "3 passed" in run(tmp_path, text)


def test_other_runs_are_told_from_this_one() -> None:
    before = conftest.others_run()
    command = [sys.executable, "-c", "print('up', flush=True); input()", "kvtier"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as child:
        child.stdout.readline()
        assert conftest.others_run() == before, "a child of this run is no other run"
        child.communicate(b"\n")


@pytest.mark.parametrize("require", ["all", "fio,nowhere"])
def test_required_part_fails(tmp_path: Path, require: str) -> None:
    text = "import pytest\n@pytest.mark.needs('nowhere')\ndef test_it():\n    pass\n"
    output = run(tmp_path, text, KVTIER_REQUIRE=require)
    assert "KVTIER_REQUIRE wants nowhere: there is no such place" in output
    assert "1 error" in output


def test_faults_select_and_are_checked(tmp_path: Path) -> None:
    text = (
        "import pytest\n@pytest.mark.fault('C26')\ndef test_one():\n    pass\n"
        "def test_other():\n    pass\n"
    )
    assert "1 passed, 1 deselected" in run(tmp_path, text, "--fault", "C26")
    assert "names no fault" in run(tmp_path, text.replace("C26", "leaky"))


SIDE_BY_SIDE = {
    "one/test_first.py": """
import test_last

def test_it():
    test_last.meet("first", "last")
""",
    "test_last.py": """
import os, pathlib, time
import pytest
from kvtier.host import files

REGION = f"/dev/shm/kvtier-{os.getuid()}-house-run"
HERE = pathlib.Path(__file__).parent

def meet(mine, other):
    assert not os.path.exists(REGION)
    fd = files.create_nameless("/dev/shm")
    files.try_lock(fd, exclusive=False)
    files.link(fd, REGION)
    (HERE / mine).touch()
    end = time.monotonic() + 60
    while not (HERE / other).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.unlink(REGION)
    os.close(fd)
    assert mine not in os.environ["BAD"]

def test_it():
    meet("last", "first")

@pytest.mark.timed
def test_speed():
    assert "timed" not in os.environ["BAD"]
""",
}


@pytest.mark.needs("mount")
@pytest.mark.parametrize("bad", ["", "first", "last", "timed"])
def test_two_runs_side_by_side(tmp_path: Path, bad: str) -> None:
    """They meet, neither sees the other's regions, and each one's failure is the failure of all."""
    (tmp_path / "one").mkdir()
    for name, text in SIDE_BY_SIDE.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers =\n  timed: timed\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.run", "--timed", "one", "--", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "BAD": bad},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == bool(bad), done.stdout + done.stderr
    ends = done.stdout.splitlines()[-3:]
    for line, (name, mine) in zip(
        ends, {"one": "first", "all others": "last", "timed": "timed"}.items(), strict=True
    ):
        assert re.match(
            f"{name}: exit {int(mine == bad)}, 1 {'failed' if mine == bad else 'passed'}", line
        ), done.stdout
