# SPDX-License-Identifier: Apache-2.0
"""Chunks from another process of this machine, beside what moves bytes there at best, and vLLM's.

    python -m benchmarks.peer [--peer] [--rounds N] [--only PART ...] [--sizes SIZE ...]

- *tcp*: one process owns 128 MiB of chunks, another reads them over TCP, in batches of at most
  16 MiB, four at the same time; each round reads all of them four times, and the bytes are compared
  after it. iperf3 moves as many bytes in one stream, in its default blocks, 128 KiB: both its ends
  use the same memory again and again, which stays in the processors' caches. ucx_perftest puts over
  TCP likewise, and the rows named *one chunk* do the same. Checksums are made where a row says so,
  as the service makes them.
- *ucx*: the same through UCX, with UCX_TLS=cma,self,tcp for all. ucx_perftest gets one chunk again
  and again, in huge pages that nobody has written: whatever its size, it reads one page of zeros
  in a cache. The rows named *one chunk* do the same; those named *memory* read 128 MiB of random
  bytes.
- *nixl* (with --peer): vLLM's NixlTransport, which its p2p tier writes with, moves as much in the
  same batches; on one host as UCX chooses, and over TCP.
- *first* (with --peer): time from a request for 16 chunks of 256 KiB that a peer holds to the first
  of them in host memory, of two instances of kvtier and two of vLLM's tiering manager; the reader
  makes a step each millisecond, the owner too (*idle*), or every 50 ms (*in steps*).

Needs iperf3, and ucx_perftest of `pip install libucx-cu12`; --peer needs vLLM and `pip install
nixl-cu12`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import uvloop

from benchmarks import harness
from benchmarks.harness import Case, Pairs, free_port
from benchmarks.peer_owner import UNIT_BYTES, Memory, content, make
from benchmarks.peer_vllm import CHUNKS, IDLE_STEP_SECONDS, Child
from kvtier._core import ucx
from kvtier._core.layout import crc32c_address
from kvtier.tiers.p2p.transport import Link, Target

NOTES = """
*TCP: ways that were tried* (ratio to iperf3 at 64 KiB, 256 KiB, 1 MiB, 8 MiB; interleaved on two
processors under load): plain sockets with many chunks a system call 1.06, 0.87, 0.96, 1.05; the
same with one chunk a call at the reader 0.68, 0.63, 1.08, 0.75; the loop's transports (uvloop's
``asyncio.BufferedProtocol`` and ``transport.write`` of each chunk), slot by slot 0.48, 0.73, 0.91,
0.77, and with a buffer that spans neighbouring slots 0.66, 0.98, 0.77, 0.83.

*Bytes a system call.* Sent and received in pieces of up to 4 MiB the two ends take turns: the owner
waits half of the time. 512 KiB to send and 1 MiB to receive: 1.21, 1.09, 1.14, 1.08; 512 KiB both:
0.94, 0.87, 1.22, 0.92; 256 KiB both: 0.88, 0.75, 0.84, 0.78.

*Sockets.* SO_SNDBUF of 512 KiB, with 512 KiB both, is best on loopback (1.30, 1.50, 1.38, 1.30, and
a quarter less processor time: what passes stays in the caches), but would be the limit of a network
with a longer way; the kernel's own choice is kept. SO_RCVBUF of 512 KiB 0.89, 0.99, 0.97, 0.84.
SO_RCVLOWAT of 128 KiB 0.98, 0.98, 1.03, 1.07: nothing. MSG_ZEROCOPY was not tried: the kernel
copies on loopback all the same, and its notices come as EPOLLERR, at which uvloop stops to poll.

*Connections.* Two or four of one link, with four reads at a time: 0.5 to 0.9, where one has 0.9 to
1.3. One read at a time: 0.6 to 0.7, so there should be two.

*UCX.* What is read again and again comes from the caches; memory that was not just read is bounded
by the copy itself. In pages of 4 KiB, which kvtier's region has where the kernel gives no huge
ones, the same reads moved 3.5 to 4.3 GB/s: the kernel looks each page up. Neighbours on both sides
are one get: 64 KiB each took a third longer. Checksums take the second processor, which is half of
a core here.

*NIXL.* Over TCP three times NIXL is nearly twice iperf3. On one host it copies in pages of 4 KiB,
since vLLM's region has no others.

*The first chunk.* Of 4 ms, a question and its answer are 0.6 to 0.9: six threads are woken for it,
ZeroMQ's own on both sides among them; another 0.5 is half a step of the reader's, and 0.3 the way
from its scheduler to the service. Tried: a first load of 1 MiB in place of 4 (5.2 ms, then 4.5),
its checksums on the loop in place of a thread, its lease asked for together with the question, and
loads before the news to the owner (3.8 to 4.3). vLLM's owner, too, looks once a millisecond here;
as soon as it computes, it looks once a step.
"""

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "8 MiB": 8 << 20}
PARTS = ("tcp", "ucx", "nixl", "first")
PEER_PARTS = ("nixl", "first")
MEMORY_BYTES = 128 << 20
BATCH_BYTES = 16 << 20
AT_ONCE = 4
PASSES = 4
ROUND_BYTES = MEMORY_BYTES * PASSES
SECONDS = 60
PERFTEST_TRIES = 5
UCX_TRANSPORTS = "cma,self,tcp"
TCP_TRANSPORTS = "tcp,self"
IPERF_SHARE = 0.85
PUT_SHARE = 1.0
GET_SHARE = 0.85
VERIFIED_SHARE = 0.6
NIXL_TIMES = 3.0
FIRST_IDLE_TIMES = 2.0
FIRST_STEPS_TIMES = 10.0
STEP_SECONDS = 0.05
REQUESTS = 40
"""Of each system in each state of the owner."""


TCP_NAMES = {
    "read": "tcp read, {}",
    "one": "tcp read, {}, one chunk",
    "iperf3": "iperf3, {}",
    "put": "put, {}",
}


class Reader:
    """Reads everything that the owner has; `one_chunk`: only its first chunk, into one place."""

    def __init__(self, link: Link, memory: Memory, *, one_chunk: bool = False) -> None:
        self._link = link
        self._memory = memory
        self._one_chunk = one_chunk
        self._expected = content(MEMORY_BYTES)
        self._pool = ThreadPoolExecutor(2)  # as the service's

    async def seconds(self, size: int, *, verify: bool = False) -> float:
        """For all passes, with chunks of `size`."""
        views = self._memory.views(size)
        targets = [
            Target(i * (size // UNIT_BYTES), view, self._memory.address + i * size)
            for i, view in enumerate(views)
        ]
        if self._one_chunk:
            targets = targets[:1] * len(targets)
        count = BATCH_BYTES // size
        parts = iter([range(i, i + count) for i in range(0, len(targets), count)] * PASSES)

        async def work() -> None:
            for part in parts:
                batch = targets[part.start : part.stop]
                await self._link.read(size, part.start, batch)
                if verify:
                    await self._checksums(batch)

        if not self._one_chunk:
            self._memory.array[:] = 0
        start = time.perf_counter()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        seconds = time.perf_counter() - start
        if not self._one_chunk and not np.array_equal(self._memory.array, self._expected):
            raise SystemExit("benchmarks.peer: other bytes came")
        return seconds

    async def _checksums(self, batch: Sequence[Target]) -> None:
        addresses = np.array([target.address for target in batch], dtype=np.uint64)
        lengths = np.array([target.view.nbytes for target in batch], dtype=np.int64)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, crc32c_address, addresses, lengths)


@contextlib.contextmanager
def owner(transport: str, *, blank: bool) -> Iterator[bytes]:
    """The other process; gives its offer."""
    command = [sys.executable, "-m", "benchmarks.peer_owner", transport, str(MEMORY_BYTES)]
    command += [str(size) for size in SIZES.values()]
    command += ["--blank"] if blank else []
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield bytes.fromhex(process.stdout.readline())
        process.communicate(timeout=SECONDS)


@contextlib.asynccontextmanager
async def reading(name: str, *, blank: bool = False) -> AsyncIterator[Reader]:
    """A reader over this transport."""
    memory = Memory(MEMORY_BYTES, "blank" if blank else "kvtier")
    with owner(name, blank=blank) as offer:
        transport = make(name, memory, ())
        await transport.open()
        try:
            link = await transport.connect("127.0.0.1", offer, time.monotonic() + 10)
            yield Reader(link, memory, one_chunk=blank)
        finally:
            await transport.aclose()


def iperf3(size: int) -> float:
    """Seconds that iperf3 takes for `size` bytes: a server, a client, one stream."""
    port = str(free_port())
    with subprocess.Popen(
        ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise SystemExit("benchmarks.peer: iperf3's server has ended")
        client = ["iperf3", "--client", "127.0.0.1", "--port", port, "--json", "--bytes", str(size)]
        done = subprocess.run(client, capture_output=True, check=True, timeout=SECONDS)
        server.communicate(timeout=SECONDS)
    received = json.loads(done.stdout)["end"]["sum_received"]
    return size * 8 / float(received["bits_per_second"])


def perftest_program() -> list[str]:
    """``ucx_perftest`` of the wheel, with its libraries: those that kvtier has loaded."""
    wheel = importlib.util.find_spec("libucx")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        if Path(folder, "bin/ucx_perftest").is_file():
            return ["env", f"LD_LIBRARY_PATH={folder}/lib", f"{folder}/bin/ucx_perftest"]
    raise SystemExit("benchmarks.peer: ucx_perftest is missing; pip install libucx-cu12")


def perftest(test: str, chunk: int, transports: str) -> float:
    """Seconds of a round with ``ucx_perftest``, which measures by itself."""
    program, times = perftest_program(), ROUND_BYTES // chunk
    environment = {**os.environ, "UCX_TLS": transports}
    error = ""
    for tries in range(1, PERFTEST_TRIES + 1):
        port = str(free_port())
        server = subprocess.Popen(
            [*program, "-p", port], stdout=subprocess.DEVNULL, env=environment
        )
        try:
            time.sleep(0.2 * tries)  # nothing says that it listens; its first client is its last
            done = subprocess.run(
                [
                    *program,
                    *("127.0.0.1", "-p", port, "-t", test, "-s", str(chunk), "-f"),
                    *("-n", str(times), "-w", str(max(4, times // 20))),
                ],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
                env=environment,
            )
        finally:
            server.kill()
            server.wait()
        if done.returncode == 0:
            # Its last columns: MB/s of MiB, and messages a second.
            return ROUND_BYTES / (float(done.stdout.split()[-3]) * (1 << 20))
        error = done.stderr.strip()
    raise SystemExit(f"benchmarks.peer: ucx_perftest: {error}")


class Turns:
    """Seconds of several things that are measured in turns, each in its own order every second
    round."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._round = -1

    def add(self, round_number: int, name: str, seconds: float) -> None:
        """Round -1 warms up."""
        if round_number >= 0:
            self.times.setdefault(name, []).append(seconds)

    def case(self, name: str, reference: str, label: str, target: float | None) -> Case:
        """A rate beside another one."""
        return harness.rate_case(
            name,
            ROUND_BYTES / 1e9,
            "GB/s",
            label,
            Pairs(tuple(self.times[name]), tuple(self.times[reference])),
            target=target,
        )


def ordered(number: int, *what: object) -> list[object]:
    return list(what if number % 2 else reversed(what))


async def over_tcp(sizes: Sequence[str], rounds: int) -> list[Case]:
    """Beside iperf3 and UCX's put, in turns."""
    turns = Turns()
    async with reading("tcp", blank=True) as one_chunk, reading("tcp") as memory:
        for number in range(-1, rounds):
            for name in sizes:
                # The loop has nothing to do while another program runs.
                for what in ordered(number, "read", "iperf3", "put", "one"):
                    if what == "read":
                        seconds = await memory.seconds(SIZES[name])
                    elif what == "one":
                        seconds = await one_chunk.seconds(SIZES[name])
                    elif what == "iperf3":
                        seconds = iperf3(ROUND_BYTES)
                    else:
                        seconds = perftest("ucp_put_bw", SIZES[name], TCP_TRANSPORTS)
                    turns.add(number, TCP_NAMES[str(what)].format(name), seconds)
    return [
        turns.case(TCP_NAMES[ours].format(name), TCP_NAMES[theirs].format(name), label, target)
        for ours, theirs, label, target in (
            ("read", "iperf3", "iperf3", IPERF_SHARE),
            ("one", "put", "ucx_perftest put over tcp", PUT_SHARE),
        )
        for name in sizes
    ]


async def through_ucx(sizes: Sequence[str], rounds: int) -> list[Case]:
    """Beside ``ucx_perftest``, in turns."""
    turns = Turns()
    async with reading("ucx", blank=True) as one_chunk, reading("ucx") as memory:
        for number in range(-1, rounds):
            for name in sizes:
                size = SIZES[name]
                for what in ordered(number, "get", "one", "one+crc", "memory", "memory+crc"):
                    if what == "get":
                        seconds = perftest("ucp_get", size, UCX_TRANSPORTS)
                    else:
                        kind, _, crc = str(what).partition("+")
                        reader = one_chunk if kind == "one" else memory
                        seconds = await reader.seconds(size, verify=bool(crc))
                    turns.add(number, label_of(str(what), name), seconds)
    targets = {"one": GET_SHARE, "one+crc": VERIFIED_SHARE, "memory": None, "memory+crc": None}
    return [
        turns.case(label_of(what, name), label_of("get", name), "ucx_perftest get", target)
        for what, target in targets.items()
        for name in sizes
    ]


def label_of(what: str, name: str) -> str:
    kind, _, crc = what.partition("+")
    words = {"one": "one chunk", "memory": "memory", "get": "reference"}[kind]
    return f"ucx read, {name}, {words}{' and checksums' if crc else ''}"


class Nixl:
    """Two processes of NIXL's, which are stopped while the others run."""

    def __init__(self, size: int, environment: dict[str, str]) -> None:
        self._ends = [Child([role], environment) for role in ("writer", "target")]
        try:
            said = []
            for end in self._ends:
                end.begin(size, MEMORY_BYTES, BATCH_BYTES, AT_ONCE)
                said.append(end.answer())
            for end, other in zip(self._ends, reversed(said), strict=True):
                end.begin(*other)
            for end in self._ends:
                end.answer()
        except BaseException:
            self.close()
            raise
        self._pause()

    def _pause(self) -> None:
        for end in self._ends:
            end.pause()

    def seconds(self) -> float:
        writer, target = self._ends
        for end in self._ends:
            end.go_on()
        seconds = float(writer.do(PASSES))
        if not target.do(0):
            raise SystemExit("benchmarks.peer: NIXL brought other bytes")
        self._pause()
        return seconds

    def close(self) -> None:
        for end in self._ends:
            end.close()


async def beside_nixl(sizes: Sequence[str], rounds: int) -> list[Case]:
    """vLLM's way, in turns."""
    cases = []
    ways: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("on one host", "ucx", {}),
        ("over tcp", "tcp", {"UCX_TLS": TCP_TRANSPORTS}),
    )
    for way, transport, environment in ways:
        async with reading(transport) as reader:
            for name in sizes:
                turns = Turns()
                ours, theirs = f"read {way}, {name}", f"nixl {way}, {name}"
                verified = f"{ours}, and checksums"
                nixl = Nixl(SIZES[name], environment)
                try:
                    for number in range(-1, rounds):
                        for what in ordered(number, ours, theirs, verified):
                            seconds = (
                                nixl.seconds()
                                if what == theirs
                                else await reader.seconds(SIZES[name], verify=what == verified)
                            )
                            turns.add(number, str(what), seconds)
                finally:
                    nixl.close()
                for mine, target in ((ours, NIXL_TIMES), (verified, None)):
                    cases.append(turns.case(mine, theirs, "vLLM's NIXL WRITE", target))
    return cases


class Two:
    """An owner and a reader of one system, which are stopped while the other system's run."""

    def __init__(self, system: str) -> None:
        self._port = free_port()
        self._owner, self._reader = Child([system]), Child([system])
        self._used = 0
        try:
            self._owner.begin(self._port)
            self._reader.begin(free_port())
            self._owner.answer()
            self._reader.answer()
            self._owner.do("store", (2 * REQUESTS + 2) * CHUNKS)
            self._pause()
        except BaseException:
            self.close()
            raise

    def pace(self, seconds: float) -> None:
        """Of the owner's steps."""
        self._owner.go_on()
        self._owner.do("pace", seconds)
        self._pause()

    def first(self) -> float:
        """Seconds to the first chunk of a new request."""
        begin, self._used = self._used, self._used + CHUNKS
        for child in (self._owner, self._reader):
            child.go_on()
        # At any moment of the owner's step, and a few of them later.
        time.sleep((2.0 + random.random()) * STEP_SECONDS)
        seconds = float(self._reader.do("ask", list(range(begin, self._used)), self._port))
        self._pause()
        return seconds

    def _pause(self) -> None:
        for child in (self._owner, self._reader):
            child.pause()

    def close(self) -> None:
        self._owner.close()
        self._reader.close()


def first_chunks() -> list[Case]:
    """kvtier's instances and vLLM's, in turns."""
    ours, theirs = Two("kvtier"), Two("stock")
    cases = []
    try:
        for state, pace, target in (
            ("idle", IDLE_STEP_SECONDS, FIRST_IDLE_TIMES),
            ("in steps", STEP_SECONDS, FIRST_STEPS_TIMES),
        ):
            times: tuple[list[float], list[float]] = ([], [])
            for two in (ours, theirs):
                two.pace(pace)
                two.first()
            for number in range(REQUESTS):
                for which in (0, 1) if number % 2 else (1, 0):
                    times[which].append((ours, theirs)[which].first())
            cases.append(
                harness.time_case(
                    f"first chunk, owner {state}",
                    1,
                    "ms",
                    "vLLM's p2p tier",
                    Pairs(tuple(times[0]), tuple(times[1])),
                    scale=1e3,
                    target=target,
                )
            )
    finally:
        ours.close()
        theirs.close()
    return cases


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer", action="store_true", help="vLLM's p2p tier too")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=None, help="some parts")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    args = parser.parse_args(argv)
    if shutil.which("iperf3") is None:
        raise SystemExit("benchmarks.peer: iperf3 is not installed; apt-get install iperf3")
    if args.peer and any(importlib.util.find_spec(one) is None for one in ("vllm", "nixl")):
        raise SystemExit("benchmarks.peer: --peer needs vLLM, and `pip install nixl-cu12`")
    parts = args.only or [part for part in PARTS if args.peer or part not in PEER_PARTS]
    os.environ["UCX_TLS"] = UCX_TRANSPORTS
    measures: dict[str, Callable[[], list[Case]]] = {
        "tcp": lambda: uvloop.run(over_tcp(args.sizes, args.rounds)),
        "ucx": lambda: uvloop.run(through_ucx(args.sizes, args.rounds)),
        "nixl": lambda: uvloop.run(beside_nixl(args.sizes, args.rounds)),
        "first": first_chunks,
    }
    cases = [case for part in parts for case in measures[part]()]
    harness.report("peer", cases, load=os.getloadavg()[0], ucx=ucx.load())


if __name__ == "__main__":
    main()
