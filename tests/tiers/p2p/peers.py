# SPDX-License-Identifier: Apache-2.0
"""Instances in processes of their own, as tests drive them: started, told, stopped, killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kvtier.host import files
from tests.parts import ROOT
from tests.tiers.p2p.hooked import FORGET, SAMPLE_SECONDS, STATE
from tests.tiers.p2p.peer_child import CHUNK as CHUNK
from tests.tiers.p2p.rig import free_port

START_SECONDS = 30.0
HEARTBEAT_SECONDS = 0.2
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
LEASE_SECONDS = 1.0
LOAD_SECONDS = 3.0
"""In which a load has to have ended, with a second for a machine that has other things to do."""
HEAL_SECONDS = 20.0
BACK_SECONDS = LEASE_SECONDS + SILENCE_SECONDS + 0.4
"""After which nothing is held any more for a peer that has gone; sweeps come every 0.25 s."""
CALL_SECONDS = 0.5
"""Longest call of a scheduler; a wait for a peer or a service would be longer than that."""
CHUNKS = 32
"""Of a load."""


class Peer:
    """One instance.

    Parameters
    ----------
    folder : Path
        For its messages and for what is armed (``hooked.py``).
    name : str
    peers : sequence of str
        Whom it asks.
    numbers : sequence of int
        Chunks that it stores at each start.
    isolation : str
    command : sequence of str
        In front of its own: the namespace that it runs in.
    options : dict
        Of the tier.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        peers: Sequence[str] = (),
        numbers: Sequence[int] = (),
        isolation: str = "thread",
        command: Sequence[str] = (),
        slots: int = 256,
        namespace: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.numbers = list(numbers)
        self.isolation = isolation
        self.slots = slots
        self.namespace = namespace or {"model": "test"}
        self.config = {
            "lookup_timeout_seconds": 2.0,
            "breaker": {"failures": 5, "open_seconds": 0.5},
            **(config or {}),
        }
        self.options = {
            "type": "HookedTier",
            "module_path": "tests.tiers.p2p.hooked",
            "name": "p2p",
            "folder": str(self.folder),
            "peers": list(peers),
            "port": free_port(),
            "transport": "tcp",  # by UCX an owner does nothing while it is read
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "lease_seconds": LEASE_SECONDS,
            "connect_seconds": 0.5,
            "load_timeout_seconds": LOAD_SECONDS,
            **options,
        }
        self._command = [*command, sys.executable, "-m", "tests.tiers.p2p.peer_child"]
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self.starts = 0

    @property
    def address(self) -> str:
        host = self.options.get("advertise_host") or self.options.get("host") or "127.0.0.1"
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def port(self) -> int:
        port: int = self.options["port"]
        return port

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    # Life.
    def launch(self) -> Peer:
        """Begin to start."""
        self.starts += 1
        self._buffer, self._answers = b"", {}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                # Of pytest's.
                env={n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")},
            )
        settings = {
            "slots": self.slots,
            "tier": self.options,
            "isolation": self.isolation,
            "config": self.config,
            "namespace": self.namespace,
            "numbers": self.numbers,
        }
        self._write(settings)
        return self

    def ready(self) -> Peer:
        """Wait until it has started."""
        self.wait(0, START_SECONDS)
        return self

    def start(self) -> Peer:
        return self.launch().ready()

    def signal(self, number: int) -> None:
        """To all of it: the engine's process, and the service's where it has one of its own."""
        for pid in self.services():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.process.send_signal(number)

    def services(self) -> list[int]:
        """Process of its service, if that has one of its own."""
        found: list[int] = []
        if self.process.poll() is not None:
            return found
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
        return found

    def kill(self) -> None:
        """SIGKILL, and its end."""
        services = self.services()
        self.signal(signal.SIGKILL)
        self._reap(5.0)
        # Nobody here is told of the end of its service.
        until(lambda: not any(map(lives, services)), 5.0, f"the end of {self.name}'s service")

    def _reap(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None
        return code

    def close(self) -> dict[str, Any]:
        """End it in good order; what it says of that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        said = self.wait(-1, 20.0)
        code = self._reap(10.0)
        assert code == 0, f"{self.name} ended with {code}: {self.log}"
        return said

    def end(self) -> None:
        """Whatever has happened before: no process is left."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.kill()

    @property
    def log(self) -> str:
        """The last of what it has written."""
        return (self.folder / "log").read_text()[-4000:]

    # Talk.
    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def begin(self, do: str, **more: Any) -> int:
        """Have something done; ``wait`` for its answer by this number."""
        self._number += 1
        self._write({"do": do, "id": self._number, **more})
        return self._number

    def wait(self, number: int, seconds: float) -> dict[str, Any]:
        """The answer to a command."""
        until = time.monotonic() + seconds
        while number not in self._answers:
            left = until - time.monotonic()
            assert left > 0, f"{self.name} said nothing for {seconds:.1f} s: {self.log}"
            self._hear(left)
        return self._answers.pop(number)

    def has_said(self, number: int) -> bool:
        """Whether the answer has come."""
        self._hear(0.0)
        return number in self._answers

    def _hear(self, seconds: float) -> None:
        """Take what it says within `seconds`."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        if select.select([fd], [], [], seconds)[0]:
            data = os.read(fd, 1 << 16)
            assert data, f"{self.name} has ended: {self.log}"
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                self._answers[answer.pop("id")] = answer

    def do(self, do: str, **more: Any) -> dict[str, Any]:
        """Have something done that does not take long."""
        return self.wait(self.begin(do, **more), 10.0)

    def load(self, numbers: Sequence[int], **more: Any) -> dict[str, Any]:
        """Load chunks that this instance does not hold; what came of it, which is judged."""
        self.do("forget")
        return self.loaded(self.begin("load", numbers=list(numbers), **more))

    def loaded(self, number: int, seconds: float = LOAD_SECONDS) -> dict[str, Any]:
        """The end of a load that has `seconds` left: exact bytes, and in time."""
        said = self.wait(number, seconds + 1.0)
        assert not said["wrong"], f"{self.name}: wrong bytes in {said}"
        return said

    def audit(self) -> dict[str, Any]:
        """What it holds."""
        return self.do("audit")

    def state(self) -> dict[str, Any]:
        """Tasks and sessions of its tier, at most a sample old."""
        state: dict[str, Any] = json.loads((self.folder / STATE).read_text())
        return state

    def forget_sessions(self) -> None:
        """Its next question makes its session anew."""
        self.arm(FORGET, "")

    # Faults on cue.
    def arm(self, step: str, action: str) -> None:
        """Have it, or its service, stop or die when it comes to `step`."""
        (self.folder / f"{step}.taken").unlink(missing_ok=True)
        (self.folder / f"{step}.new").write_text(action)
        (self.folder / f"{step}.new").rename(self.folder / step)

    def disarm(self, step: str) -> None:
        (self.folder / step).unlink(missing_ok=True)

    def is_at(self, step: str) -> int:
        """The process that has come to `step`, 0 if none has."""
        path = self.folder / f"{step}.taken"
        return int(path.read_text()) if path.exists() else 0


def state_of(pid: int) -> str:
    """Letter of a process's state, as in /proc: T is stopped, Z and X have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def lives(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    return state_of(pid) not in "ZX"


def reach(victim: Peer, step: str, reader: Peer, **more: Any) -> tuple[int, int]:
    """Have `reader` load until `victim` has come to an armed step: its process, and the load."""
    end = time.monotonic() + HEAL_SECONDS
    while True:
        load = reader.begin("load", **more)
        while not (pid := victim.is_at(step)) and not reader.has_said(load):
            assert time.monotonic() < end, f"{victim.name} never came to {step}: {reader.log}"
            time.sleep(0.005)
        if pid:
            # It has said so before it was: a SIGCONT that comes too early would be lost.
            until(lambda: state_of(pid) in "TZX", 5.0, f"{victim.name} stands at {step}")
            return pid, load
        # It has found no session, on a machine that has other things to do.
        reader.loaded(load)
        reader.do("forget")


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.1f} s: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def running(*peers: Peer) -> Iterator[None]:
    """Start these; at the end none is left."""
    try:
        for one in peers:
            one.launch()
        for one in peers:
            one.ready()
        yield
    finally:
        for one in peers:
            one.end()
        files.sweep()  # as the next start does


CaseT = TypeVar("CaseT")


def side_by_side(work: Callable[[CaseT], None], cases: Sequence[CaseT]) -> None:
    """Do the cases at the same time, which is spent waiting for the most part; raises what the
    first one that failed has met."""
    with ThreadPoolExecutor(len(cases)) as pool:
        futures = [pool.submit(work, case) for case in cases]
    for case, future in zip(cases, futures, strict=True):
        error = future.exception()
        if error is not None:
            error.add_note(f"case: {case}")
            raise error


def healed(
    reader: Peer, numbers: Sequence[int], seconds: float = HEAL_SECONDS, **more: Any
) -> None:
    """Forget and load again until all of it comes at once."""
    _repeat(lambda: reader.load(numbers, **more), reader, numbers, seconds)


def comes(reader: Peer, numbers: Sequence[int], **more: Any) -> None:
    """Load until all of it has come; it keeps what it has."""

    def load() -> dict[str, Any]:
        return reader.loaded(reader.begin("load", numbers=list(numbers), **more))

    _repeat(load, reader, numbers, HEAL_SECONDS)


def _repeat(
    load: Callable[[], dict[str, Any]], reader: Peer, numbers: Sequence[int], seconds: float
) -> None:
    end = time.monotonic() + seconds
    while (said := load())["ready"] < len(numbers):
        assert time.monotonic() < end, f"{reader.name} still gets {said}: {reader.log}"
        time.sleep(0.05)


def quiet(one: Peer, seconds: float) -> dict[str, Any]:
    """Wait until it holds nothing for anybody any more, `seconds` after its service is up."""
    until(lambda: one.audit()["up"], HEAL_SECONDS, f"{one.name} has a service")
    time.sleep(2 * SAMPLE_SECONDS)  # gauges are from the last sample
    end = time.monotonic() + seconds
    while True:
        said = one.audit()
        held = {name: said[name] for name in ("pins", "jobs", "leases", "leased_bytes", "awaited")}
        if said["up"] and said["idle"] and not any(held.values()):
            return said
        assert time.monotonic() < end, f"{one.name} still holds {held}: {one.log}"
        time.sleep(0.02)


def checked(*peers: Peer) -> dict[str, tuple[list[str], int]]:
    """Tasks and descriptors of each, for ``nothing_more``."""
    return {one.name: (one.state()["tasks"], one.audit()["fds"]) for one in peers}


def nothing_more(before: dict[str, tuple[list[str], int]], *peers: Peer) -> None:
    """No tasks or descriptors have come to these, but for a second connection of a link."""
    for one in peers:
        tasks, fds = before[one.name]

        def more(one: Peer = one, tasks: list[str] = tasks, fds: int = fds) -> list[str]:
            found = one.state()["tasks"]
            for name in tasks:
                if name in found:
                    found.remove(name)
            now = one.audit()["fds"]
            return found + ([f"{now} descriptors after {fds}"] if now > fds + 2 else [])

        until(
            lambda more=more: not more(),
            3.0,
            f"{one.name} has more than {before[one.name]}: {one.state()}",
        )


def check_calls(*peers: Peer) -> None:
    """No call of a scheduler has waited."""
    for one in peers:
        seconds, name = one.audit()["slowest"]
        assert seconds < CALL_SECONDS, f"{one.name}: {name} took {seconds:.2f} s"
