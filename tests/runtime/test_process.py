# SPDX-License-Identifier: Apache-2.0
"""The service's process: killed and stopped at named points, orphaned, forked; what comes back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.engine import planner as planner_module
from kvtier.engine import supervisor as supervisor_module
from kvtier.errors import ClosedError, ConfigError
from kvtier.host.region import sweep
from kvtier.runtime import process as process_module
from kvtier.runtime.child import HANGUP_SECONDS, NICE
from kvtier.runtime.process import FRAME, FrameReader, ProcessCarrier
from kvtier.types import Lookup
from tests.engine.rig import CHUNK, Rig, keys, rig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", [1, 3, 4, 7, 100, 1000])
def test_frames_come_out_whole_wherever_the_stream_is_cut(part: int) -> None:
    frames = [bytes([i]) * length for i, length in enumerate([5, 0, 1, 300, 2, 0])]
    stream = b"".join(FRAME.pack(len(frame)) + frame for frame in frames)
    reader = FrameReader()
    got = []
    received = bytearray(part)  # used again for each part, as the carrier's is
    for start in range(0, len(stream), part):
        data = stream[start : start + part]
        received[: len(data)] = data
        got += [bytes(frame) for frame in reader.feed(memoryview(received)[: len(data)])]
    assert got == frames


def gated(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "type": "GatedTier",
        "module_path": "tests.runtime.gated",
        "name": "gated",
        "folder": str(folder),
    } | more


class Gates:
    """The other end of a gated tier's fifos."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self, operation: str) -> None:
        os.mkfifo(self.folder / f"{operation}.gate")

    def reached(self, operation: str) -> bool:
        return (self.folder / f"{operation}.here").exists()

    def remove(self, operation: str) -> None:
        """No further call waits; those that wait go on."""
        path = self.folder / f"{operation}.gate"
        os.rename(path, path.with_suffix(".old"))
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(path.with_suffix(".old"), os.O_WRONLY | os.O_NONBLOCK))

    @property
    def child(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads((self.folder / "child.json").read_text())
        return described


@contextlib.contextmanager
def running(folder: Path, **config: Any) -> Iterator[tuple[Rig, ProcessCarrier]]:
    tier = gated(folder, **config.pop("tier", {}))
    with rig(**{"slots": 8} | config, tiers=[tier], isolation="process") as one:
        carrier = one.engine._supervisor.carrier
        assert isinstance(carrier, ProcessCarrier)
        yield one, carrier


def overloads(one: Rig) -> float:
    """Without asking the service, which does not answer."""
    one.engine.publish_metrics()
    return one.engine.registry.value("kvtier_service_overload_total") or 0.0


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} seconds"
        time.sleep(0.005)


def regions_of(pid: int) -> set[str]:
    """Names of the region files that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    inodes = {line.split()[4] for line in maps if "/dev/shm/" in line}
    return {entry.name for entry in os.scandir("/dev/shm") if str(entry.inode()) in inodes}


def is_running(pid: int) -> bool:
    """Whether a thread of it is alive: while one is, its files are still open and locked."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task").exists()  # one has just ended: ask again
    return any(stat.rsplit(")", 1)[1].split()[0] not in ("Z", "X") for stat in stats)


@pytest.fixture
def gates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Gates]:
    yield Gates(tmp_path)
    # Errors in the log hold frames, and these views of the region.
    caplog.get_records("call").clear()


def test_the_socket_is_asked_when_something_is_announced(gates: Gates) -> None:
    """Each frame is counted before it is sent: as many as were read leave nothing to ask for."""
    asked = 0

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def recv_into(self, buffer: memoryview) -> int:
            nonlocal asked
            asked += 1
            received: int = self.inner.recv_into(buffer)
            return received

    with running(gates.folder) as (one, carrier):
        one.sync()
        wait_for(lambda: carrier.receive() == [] and one.region.service_frames == carrier._frames)
        carrier._socket = Counting(carrier._socket)  # type: ignore[assignment]  # counts
        for _ in range(50):
            one.engine.poll()
        # The service tells of its samples by itself, twice a second at most.
        quiet = asked
        assert quiet <= 6
        one.store(keys(1, 2))
        one.settle()
        assert asked > quiet
        # Announced, and not there yet: it is asked for until it is.
        os.kill(carrier.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: carrier.receive() == [])
            before, frames = asked, one.region.service_frames
            one.region.service_frames = carrier._frames + 1
            assert [carrier.receive(), carrier.receive()] == [[], []]
            assert asked == before + 2
            one.region.service_frames = frames
        finally:
            os.kill(carrier.pid, signal.SIGCONT)


@pytest.mark.fault("K08", "M04", "K07", "H23")
@pytest.mark.parametrize("point", ["idle", "exists", "load", "store", "opening"])
def test_killed_at(point: str, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs end as failed, exactly its pins and slots come back, another one takes over."""
    monkeypatch.setattr(supervisor_module, "RESTART_SECONDS", 0.05)
    with running(gates.folder, lookup_timeout_seconds=5.0) as (one, carrier):
        one.store(keys(1, 2, 3))
        one.settle()
        one.engine.reset()
        one.settle()
        # A pin of the owner's own, on a chunk that the host has: it must survive all of this.
        one.store(keys(20))
        one.settle()
        holder = one.context()
        assert one.ask(keys(20), holder)[0] == 1
        pinned = one.engine.pin(keys(20), holder)
        first, reader = carrier.pid, one.context()
        if point in ("exists", "load"):
            gates.close(point)
            one.engine.lookup_batch(keys(1, 2, 3), reader)
            one.engine.end_step()
        elif point == "store":
            gates.close("store")
            one.store(keys(30, 31))
        if point not in ("idle", "opening"):
            one.until(lambda: gates.reached(point))
        if point == "load":
            assert one.engine._planner.loads.lent == 3
        if point == "store":
            assert one.engine.cache.slots.totals()["service_pins"] == 2
        if point == "opening":  # the second one is killed while it starts
            gates.close("open")
        os.kill(first, signal.SIGKILL)
        started = time.monotonic()
        one.until(lambda: not one.engine._supervisor.up)
        if point in ("exists", "load"):
            assert one.engine.lookup_batch(keys(1, 2, 3), reader) == (0, Lookup.MISS)
        assert time.monotonic() - started < 2
        assert one.value("kvtier_service_up") == 0
        assert one.value("kvtier_tier_up", "gated") == 0
        assert b'kvtier_breaker_state{tier="gated"}' not in one.engine.registry.render()
        one.until(lambda: one.engine._planner.clear_pins())
        totals = one.engine.cache.slots.totals()
        assert (totals["service_pins"], totals["owner_pins"]) == (0, 1)
        assert (totals["writing"], one.engine._index.num_lent) == (0, 0)
        one.engine.check()
        # The host serves on.
        assert one.load(keys(20)) == 1
        assert one.store(keys(40)) == keys(40)
        assert one.load(keys(40)) == 1
        if point == "opening":
            one.until(lambda: gates.reached("open"))
            os.kill(carrier.pid, signal.SIGKILL)
            wait_for(lambda: not carrier.alive)
        for operation in ("exists", "load", "store", "open"):
            if (gates.folder / f"{operation}.gate").exists():
                gates.remove(operation)
        one.until(lambda: one.value("kvtier_tier_up", "gated") == 1)
        one.settle()
        assert carrier.pid != first
        assert one.value("kvtier_service_up") == 1
        restarts = one.value("kvtier_service_restarts_total")
        assert restarts == (2 if point == "opening" else 1)
        one.engine.finish_request(reader)
        one.check(keys(20), holder)
        one.engine.unpin(*pinned, holder)
        one.engine.finish_request(holder)
        # What it was just storing, and what came meanwhile, is offered again.
        wanted = {name.hex() for name in keys(1, 2, 3, 20, 40)}
        wanted |= {name.hex() for name in keys(30, 31)} if point == "store" else set()
        one.until(lambda: wanted <= {path.name for path in gates.folder.iterdir()})
        assert one.load(keys(1, 2, 3)) == 3
        one.settle()
        assert one.engine.cache.slots.totals()["service_pins"] == 0


def test_stopped_and_continued(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups become misses in time, sends overload, calls stay fast; it heals by itself."""
    monkeypatch.setattr(process_module, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(planner_module, "SILENCE_SECONDS", 60.0)  # it would be asked no more
    with running(gates.folder, lookup_timeout_seconds=0.1, on_reset="keep") as (one, carrier):
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.settle()
        os.kill(carrier.pid, signal.SIGSTOP)
        try:
            reader = one.context()
            started = time.monotonic()
            assert one.ask(keys(1, 2), reader)[0] == 0
            assert 0.1 <= time.monotonic() - started < 1
            one.engine.finish_request(reader)
            slowest = 0.0
            number = 100
            while overloads(one) < 3:
                assert number < 1_000_000
                context = one.context()
                begun = time.perf_counter()
                one.engine.lookup_batch(keys(*range(number, number + 500)), context)
                one.engine.end_step()
                one.engine.finish_request(context)
                slowest = max(slowest, time.perf_counter() - begun)
                number += 500
            # Far below what one wait for the stopped process would cost.
            assert slowest < 0.5
            # A reset that it cannot take now is not forgotten.
            one.engine.reset()
            one.step()
            assert one.engine._planner.reset_pending
            one.store(keys(50))
        finally:
            os.kill(carrier.pid, signal.SIGCONT)
        one.until(lambda: not one.engine._planner.reset_pending)
        one.settle()
        one.until(lambda: one.load(keys(1, 2)) == 2)  # a full machine takes longer than 0.1 s
        one.until(lambda: (gates.folder / keys(50)[0].hex()).exists())
        one.settle()


def test_a_stopped_service_costs_a_few_requests_not_each(
    gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again with its first word."""
    with running(gates.folder, lookup_timeout_seconds=0.3, on_reset="keep") as (one, carrier):
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.settle()
        registry, planner = one.engine.registry, one.engine._planner

        def up() -> bool:
            one.engine.publish_metrics()
            return registry.value("kvtier_tier_up", ("gated",)) == 1

        os.kill(carrier.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            seconds = planner_module.SILENCE_SECONDS
            while up():
                assert time.monotonic() - started < seconds + 1
                reader = one.context()
                assert one.ask(keys(1, 2), reader)[0] == 0
                one.engine.finish_request(reader)
            assert time.monotonic() - started >= seconds
            for _ in range(20):
                reader = one.context()
                assert one.ask(keys(1, 2), reader) == (0, 1)  # in the first step
                one.engine.finish_request(reader)
            assert not up()
        finally:
            os.kill(carrier.pid, signal.SIGCONT)
        one.until(up)
        one.settle()
        assert one.load(keys(1, 2)) == 2
        told = [record.message for record in caplog.records if "answer" in record.message]
        assert told == ["tier gated is down: the tier service does not answer"]
        assert math.isinf(planner.loads.asked_at)


@pytest.mark.fault("C24", "K08")
def test_a_reset_that_meets_a_full_socket_is_not_lost(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tiers would serve chunks from before it, and never hear of it."""
    with running(gates.folder) as (one, carrier):
        sent: list[Any] = []
        send = carrier.send
        monkeypatch.setattr(carrier, "send", lambda messages: False)
        one.engine.reset()
        one.step()
        one.step()
        assert one.engine._planner.reset_pending
        monkeypatch.setattr(
            carrier, "send", lambda messages: sent.extend(messages) or send(messages)
        )
        one.settle()
        assert [type(message).__name__ for message in sent].count("Reset") == 1
        assert sent[0].namespace == one.engine.namespace
        # The same while there is no service at all.
        os.kill(carrier.pid, signal.SIGKILL)
        one.until(lambda: not one.engine._supervisor.up)
        one.engine.reset()
        one.until(lambda: one.engine._supervisor.up and not one.engine._planner.reset_pending)
        one.store(keys(1))
        one.settle()


@pytest.mark.fault("H20", "L03")
@pytest.mark.parametrize("hanging", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parent_killed(gates: Gates, hanging: bool) -> None:
    """The child ends by itself, also when its loop hangs, and leaves no region."""
    if hanging:
        (gates.folder / "hang").write_text("x")
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.parent", gates.folder], cwd=ROOT
    )
    try:
        # It starts two interpreters, one of them at low priority.
        wait_for(lambda: (gates.folder / "parent.ready").exists(), 60)
        child = gates.child["pid"]
        assert is_running(child)
        regions = regions_of(child)
        assert regions
    finally:
        parent.kill()
        parent.wait()
    started = time.monotonic()
    wait_for(lambda: not is_running(child), HANGUP_SECONDS + 10)
    if not hanging:
        assert time.monotonic() - started < HANGUP_SECONDS - 1

    def swept() -> bool:
        sweep("/dev/shm")
        return not regions & set(os.listdir("/dev/shm"))

    # Not at once: the leak check of another run locks every dead file for an instant.
    wait_for(swept)


def test_child_outlives_no_parent_whose_fork_keeps_the_socket(gates: Gates) -> None:
    """A process forked by the parent holds the socket too: the parent's end counts all the same."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.engine.rig import rig\n"
        "from tests.runtime.test_process import gated\n"
        "folder = Path(sys.argv[1])\n"
        "with rig(slots=8, tiers=[gated(folder)], isolation='process') as one:\n"
        "    pid = os.fork()\n"
        "    if pid:\n"
        "        (folder / 'fork.pid').write_text(str(pid))\n"
        "        (folder / 'parent.ready').write_text('x')\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, gates.folder], cwd=ROOT)
    try:
        wait_for(lambda: (gates.folder / "parent.ready").exists())
    finally:
        parent.kill()
        parent.wait()
    fork = int((gates.folder / "fork.pid").read_text())
    try:
        assert is_running(fork)
        wait_for(lambda: not is_running(gates.child["pid"]), 8)
    finally:
        os.kill(fork, signal.SIGKILL)


@pytest.mark.fault("V02")
def test_what_the_child_is_given(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("KVTIER_TEST_VARIABLE", "kept")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with running(gates.folder) as (one, carrier):
            child = gates.child
            assert child["pid"] == carrier.pid
            names = set(child["environment"])
            assert "KVTIER_TEST_VARIABLE" in names
            assert not names & {"PROMETHEUS_MULTIPROC_DIR", "LD_PRELOAD"}
            assert not [name for name in names if name.startswith(("OMP_", "KMP_", "GOMP_"))]
            assert child["nice"] == max(NICE, os.getpriority(os.PRIO_PROCESS, 0))
            assert child["policy"] == os.SCHED_BATCH
            assert set(child["affinity"]) == before
            assert child["sigint"]
            assert child["sigterm"]
            assert child["argv"][1:3] == ["-m", "kvtier.runtime.child"]
            assert len(child["argv"]) == 4
            assert child["argv"][3].isdigit()
            # Of the parent's descriptors only the socket; the region's own is its own.
            assert os.getpgid(carrier.pid) == carrier.pid
            os.kill(carrier.pid, signal.SIGINT)
            os.kill(carrier.pid, signal.SIGTERM)
            one.store(keys(1))
            one.settle()
            assert carrier.pid == child["pid"]
            assert carrier.alive
    finally:
        os.sched_setaffinity(0, before)


def test_the_child_of_a_nice_server_stays_as_nice() -> None:
    """Asking for more of the processor would be refused, and the child would not start."""
    program = "import os, kvtier.runtime.child as c; c.main(); print(os.getpriority(0, 0))"
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        done = subprocess.run(
            ["nice", "-n", "15", sys.executable, "-c", program, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == f"{15 + os.getpriority(os.PRIO_PROCESS, 0)}\n", done.stderr


def test_configuration_error_inside_the_child(gates: Gates) -> None:
    (gates.folder / "wrong").write_text("x")
    with (
        pytest.raises(ConfigError, match="tier gated: folder: is wrong; take another one"),
        running(gates.folder),
    ):
        raise AssertionError("it started")


def test_a_process_that_cannot_be_made(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model server starts without its tiers, and gets them when it can."""
    monkeypatch.setattr(supervisor_module, "RESTART_SECONDS", 0.05)
    popen = subprocess.Popen

    def fails(*args: Any, **more: Any) -> Any:
        raise OSError(12, "no memory")

    monkeypatch.setattr(process_module.subprocess, "Popen", fails)
    with running(gates.folder) as (one, _):
        assert one.store(keys(1)) == keys(1)
        assert one.load(keys(1)) == 1
        monkeypatch.setattr(process_module.subprocess, "Popen", popen)
        one.until(lambda: one.engine._supervisor.up)
        one.settle()


@pytest.mark.fault("H20")
def test_forked_child_refuses_use(gates: Gates) -> None:
    """Every call raises there, none touches the memory that it does not have."""
    with running(gates.folder) as (one, _):
        one.store(keys(1))
        context = one.context()
        assert one.engine.lookup(keys(1)[0], context) is Lookup.HIT  # in the middle of a step
        pins = one.engine.pin(keys(1), context)
        engine = one.engine
        calls: list[Callable[[], Any]] = [
            lambda: engine.lookup(keys(1)[0], context),
            lambda: engine.lookup_batch(keys(1), context),
            lambda: engine.holds(keys(1)[0]),
            lambda: engine.reserve(keys(2), context),
            lambda: engine.commit(keys(2), context),
            lambda: engine.abort(keys(2), context),
            lambda: engine.pin(keys(1), context),
            lambda: engine.unpin(*pins),
            lambda: engine.finish_request(context),
            lambda: engine.release(*pins),
            lambda: engine.make_room(1),
            engine.poll,
            engine.end_step,
            engine.reset,
            engine.check,
            engine.publish_metrics,
        ]
        pid = os.fork()
        if pid == 0:  # the child
            refused = 0
            try:
                for call in calls:
                    with contextlib.suppress(ClosedError):
                        call()
                        continue
                    refused += 1
                engine.close()
            finally:
                os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert os.WIFEXITED(status), f"killed by signal {os.WTERMSIG(status)}"
        assert os.WEXITSTATUS(status) == len(calls)
        one.check(keys(1), context)
        engine.unpin(*pins)
        engine.finish_request(context)
        one.store(keys(2, 3))
        one.settle()
        assert one.load(keys(1, 2, 3)) == 3
        assert one.region.slot_view(0, CHUNK)
