# SPDX-License-Identifier: Apache-2.0
"""For all tests: nothing may be left behind, parts of the machine, faults by name.

- Every test fails that leaves a descriptor, thread, process, task, region file or mapping.
  ``@pytest.mark.leaves("why")`` is for a test whose library keeps something for good.
- Tests marked asyncio run on uvloop and on plain asyncio.
- ``needs(part)``: see ``tests/parts.py``.
- ``fault(id)``: ``pytest --fault C26`` runs the tests of that fault.
"""

import contextlib
import functools
import inspect
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kvtier.testing import leaks
from kvtier.testing.loops import (
    pytest_asyncio_loop_factories as pytest_asyncio_loop_factories,
)
from tests import parts
from tests.loops import run as run

_FAULT = re.compile(r"[A-Z]\d{2}")
_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", action="append", default=[], help="run the tests of this fault")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = defaultdict(int)
    # The first loop of a process opens a pipe for signals that libuv keeps for good.
    uvloop.new_event_loop().close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("--fault"))
    selected, deselected = [], []
    for item in items:
        faults = set()
        for mark in item.iter_markers("fault"):
            if not mark.args or not all(_FAULT.fullmatch(fault) for fault in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: fault{mark.args} names no fault")
            faults.update(mark.args)
        for part in _parts_of(item):
            if part not in parts.PARTS:
                raise pytest.UsageError(f"{item.nodeid}: no part {part!r} in tests/parts.py")
        (selected if not wanted or faults & wanted else deselected).append(item)
        _watch_tasks(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


def _parts_of(item: pytest.Item) -> list[str]:
    named = [part for mark in item.iter_markers("needs") for part in mark.args]
    return [*named, "vllm"] if item.get_closest_marker("vllm") else named


def _watch_tasks(item: pytest.Item) -> None:
    """Let a coroutine test fail for tasks it leaves; at its end the loop would cancel them."""
    if not isinstance(item, pytest.Function):
        return
    drawn = getattr(item.obj, "hypothesis", None)
    test = drawn.inner_test if drawn else item.obj
    if not inspect.iscoroutinefunction(test):
        return

    @functools.wraps(test)
    async def watched(*args: object, **kwargs: object) -> None:
        async with leaks.check_tasks():
            await test(*args, **kwargs)

    if drawn:
        drawn.inner_test = watched
    else:
        item.obj = watched


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for part in _parts_of(item):
        reason = parts.missing(part)
        if reason is None:
            continue
        if parts.required(part):
            pytest.fail(f"KVTIER_REQUIRE wants {part}: {reason}", pytrace=False)
        item.config.stash[_LEFT_OUT][f"{part}: {reason}"] += 1
        pytest.skip(f"needs {part}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = terminalreporter.config.stash[_LEFT_OUT]
    for reason, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests, {reason}")


def others_run() -> bool:
    """Whether another run of tests or of kvtier is on this machine: dead files may be its own."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            parents[int(name)] = int(status[1])
            commands[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().decode("latin-1")

    def line(pid: int) -> list[int]:
        found = []
        while pid in parents and pid not in found:
            found.append(pid)
            pid = parents[pid]
        return found

    mine = line(os.getpid())
    # The outermost run that this one is part of: of these checks' tests, or of both side by side.
    root = [pid for pid in mine if re.search(r"pytest|tests\.run", commands[pid])][-1:]
    return any(
        re.search("pytest|kvtier", command)
        for pid, command in commands.items()
        if pid not in mine and not set(root) & set(line(pid))
    )


def _may_be_anothers(leak: str) -> bool:
    # One that this process still holds shows as its descriptor too.
    return leak.startswith("region file") and others_run()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind."""
    before = leaks.take()
    yield
    if request.node.get_closest_marker("leaves"):
        return
    left = leaks.wait_clean(before, allow=_may_be_anothers)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)
