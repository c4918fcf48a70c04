# SPDX-License-Identifier: Apache-2.0
"""Time that kvtier takes on the scheduler's thread, per scheduler step.

``python -m benchmarks.step [--peer] [--obj]``. A scheduler drives the engine with the stream of
``benchmarks.stream``, a step every 5 ms. Spreads first, one JSON line last. Cases, in turn, round
by round; each value is the median over the rounds:

- *idle*: the file tier is configured and quiet, all chunks come from and stay in host memory;
  against vLLM's tiering manager with its own file tier, just as quiet (``--peer``).
  ``_cpu`` cases are processor time, on which other programs of the machine weigh less.
- *idle_single*: the same, but prompts are asked for key by key, which is how vLLM asks.
- *saturated_process*: the file tier stores and loads as fast as it can, in its process.
- *saturated_thread*: the same in a thread of the scheduler's process.
- *saturated_obj* (``--obj``): the object tier in its process as fast as it can, against the server
  of ``benchmarks.obj_server`` in another one, at the service's priority; 13 GiB of memory in all.
- *same_io*: idle, beside an unrelated process that does the same I/O, on as many threads at the
  same priority: the file tier's own writes and reads of chunks, with their checksums, as many a
  second as the last *saturated_process* did. Both rates are printed.
- *noise*: a loop that does nothing, as long as an idle step, after each step of *idle*. Its own
  spread says what the machine adds; where that is far from 1, so are the others.

A ratio says how many times better than the reference: reference / value.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import Case, machine
from benchmarks.obj_server import served
from benchmarks.stream import CHUNK_BYTES, KVTier, Peer, System, arrivals
from kvtier._core.fileio import Batch, Directory
from kvtier.host.huge import HUGE_BYTES
from kvtier.runtime.child import NICE, POLICY
from kvtier.types import make_key

NOTES = """
*idle* is a step in which three prompts arrive (384, 384 and 32 chunks) and three end, all from and
to host memory. A saturated step asks the tier service for a prompt and takes the answers besides (a
system call and a decoded message each), makes what came READY, and keeps account of what the tier
cannot take.

What is left of the difference is mostly the price of the processors: *same_io*, the same idle step
beside an unrelated process that moved two thirds as many bytes, is 1.13 times idle at the median
and 1.5 to 3.1 times at the 99th percentile by the clock, from run to run: after each pause the
caches are cold, and threads have to make way. kvtier's saturated step is 1.35 to 1.46 and 2.0 to
2.2 times idle. So 1.1 and 1.5 times idle are missed on two processors that move 2 GB/s besides, and
1.1 times the 99th percentile beside the same I/O is met or just missed (0.7 and 1.13 in two runs).
No single call stands out any more: of the 230 us more in the slowest steps, 95 are the question
about a prompt and its message, 90 the answers, and the rest the same calls as in an idle step with
cold caches.

What was done: the service runs under SCHED_BATCH, so that a thread that wakes up does not take the
scheduler's processor (99th percentile of wall time 1.9 to 1.0 ms at the same throughput); a prompt
that waits is not walked again for a part that has come (99th percentile of processor time 1.7 to
1.1 ms), and when it is, all its chunks are compared at once (50 to 14 us for 384); loaded chunks
are pinned in the call that adopts them, and what a tier has is told as a number (118 to 17 us an
answer); cascades of a step go out in one message; a tier of one instance is not asked for what it
cannot have; answers are taken a quarter at a time; no system call is made where there is no news,
and one where there is (median 1.44 to 1.12 times idle, all together); what a request knows of its
chunks stands in an array, in C, instead of five dictionaries and sets of its keys (on one machine,
before and after: idle 460 to 398 us, saturated 585 to 471, its 99th percentile of processor time
2016 to 1121). Without effect: fetching the records of chunks ahead of their unpin (384 in 21 us
instead of 24), and the service bound to the other processor.

With the object tier saturated (`--obj`) a step's median is that of an idle one, and its 99th
percentile 1.6 times it by the clock and 1.4 by processor time: less than with the file tier, which
moves several times as many bytes, and with them the caches. On two processors that are busy
otherwise a prompt of 384 chunks may take longer than the run; then it ends with an error that says
so.
"""

STEP_SECONDS = 0.005
WARMUP_STEPS = 40
CASES = ("idle", "idle_single", "saturated_process", "saturated_thread", "same_io")
SERVER_GIB = 7.0
"""All that is stored before the steps, and some of what they store."""
IO_THREADS = 16
"""Of the other process, in each direction: as many as the tier has."""
IO_BATCH, IO_FIRST = 4, 64
"""Chunks it moves with one call; batches that it writes first, to read them later."""


class Figures(msgspec.Struct, frozen=True):
    """Microseconds of the steps of one run."""

    median: float
    p99: float
    cpu: float
    """Median of the processor time."""
    cpu_p99: float


def figures_of(seconds: list[tuple[float, float]]) -> Figures:
    """Figures of (time, processor time) of each step."""
    times = sorted(1e6 * one for one, _ in seconds)
    cpus = sorted(1e6 * cpu for _, cpu in seconds)
    last = min(len(times) - 1, len(times) * 99 // 100)
    return Figures(statistics.median(times), times[last], statistics.median(cpus), cpus[last])


def drive(system: System, quiet: bool, steps: int, spin: int = 0) -> tuple[Figures, Figures | None]:
    """Paced steps of one system; figures of its calls, and of the idle loop after each."""
    stream = arrivals(quiet)
    taken: list[tuple[float, float]] = []
    spun: list[tuple[float, float]] = []
    gc.collect()
    gc.freeze()
    due = time.perf_counter()
    for number, jobs in enumerate(islice(stream, steps + WARMUP_STEPS)):
        seconds = system.step(jobs)
        if spin:
            begin, used = time.perf_counter(), time.thread_time()
            for _ in range(spin):
                pass
            spun.append((time.perf_counter() - begin, time.thread_time() - used))
        system.between()
        if number >= WARMUP_STEPS:
            taken.append(seconds)
        # A late step does not make the next ones come closer together.
        due = max(due + STEP_SECONDS, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
    gc.unfreeze()
    return figures_of(taken), figures_of(spun[WARMUP_STEPS:]) if spun else None


class Rates(msgspec.Struct, frozen=True):
    """Payload bytes a second."""

    loaded: float
    stored: float

    def __str__(self) -> str:
        return f"{self.loaded / 1e9:.2f} GB/s in, {self.stored / 1e9:.2f} out"


def run(
    case: str, root: Path, steps: int, beside: Rates
) -> tuple[Figures, Figures | None, Rates, str]:
    """One run of one of `CASES`: its figures, those of the idle loop, and what it moved.

    `beside` is what the other process of *same_io* moves.
    """
    quiet = not case.startswith("saturated")
    isolation = "thread" if case == "saturated_thread" else "process"
    spin = 20_000 if case == "idle" else 0
    name = "obj" if case == "saturated_obj" else "fs"
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        io = same_io(folder / "io", beside) if case == "same_io" else contextlib.nullcontext()
        with io as other, tier_of(name, folder) as tier:
            system = KVTier(tier, isolation, quiet, single=case == "idle_single")
            try:
                before = system.engine.stats()
                if other is not None:
                    other()
                begin = time.monotonic()
                figures, noise = drive(system, quiet, steps, spin)
                seconds = time.monotonic() - begin
                did = other() if other is not None else None
                system.engine.audit()
                while system.engine.resources is None:
                    system.engine.poll()
                    time.sleep(0.002)
                after = system.engine.stats()
                loaded = after.loaded_bytes[name] - before.loaded_bytes[name]
                stored = after.stored_bytes[name] - before.stored_bytes[name]
                if quiet and (loaded or stored):
                    raise SystemExit(f"{case}: {loaded} bytes loaded, {stored} stored")
                if not quiet and not (loaded and stored and system.tier_chunks):
                    raise SystemExit(
                        f"{case}: {loaded} bytes loaded, {stored} stored, {system.tier_chunks} "
                        f"chunks of the tier used"
                    )
                rates = Rates(loaded / seconds, stored / seconds)
                moved = f"{rates}, {system.put_off} chunks put off at the end"
            finally:
                system.close()
        if did is not None:
            moved = f"the other process {did}, asked for {beside}"
    finally:
        shutil.rmtree(folder)
    return figures, noise, rates, moved


@contextlib.contextmanager
def tier_of(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Configuration of the tier of a case, and what it needs while the block lasts."""
    if name == "fs":
        yield {"type": "fs", "root_dir": str(folder / "fs"), "private": True}
        return
    with served(SERVER_GIB, background=True) as address:
        yield {
            "type": "obj",
            "bucket": "bench",
            "endpoint_override": f"http://{address}",
            "access_key": "key",
            "secret_key": "secret",
            "sign_payload": "never",
        }


@contextlib.contextmanager
def same_io(folder: Path, rates: Rates) -> Iterator[Callable[[], Rates]]:
    """A process that writes and reads chunks there, as long as the block lasts.

    What it yields tells what the process has moved since the last call.
    """
    folder.mkdir()
    arguments = [str(folder), str(rates.loaded), str(rates.stored)]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.step", "--io", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout

    def moved() -> Rates:
        stdin.write(b"\n")
        return msgspec.json.decode(stdout.readline(), type=Rates)

    try:
        stdout.readline()
        yield moved
    finally:
        stdin.close()
        if child.wait(30):
            raise SystemExit(f"the other process ended with code {child.returncode}")


def do_io(folder: Path, rates: Rates) -> None:
    """The other process: some threads write new files, some read old ones, until stdin ends.

    It uses the file tier's own batches, so that the calls are the same, and no engine.
    """
    os.nice(NICE)
    os.sched_setscheduler(0, POLICY, os.sched_param(0))
    directory = Directory(os.open(folder, os.O_RDONLY), bytes(32), "benchmark", direct=True)
    stop = threading.Event()
    lock = threading.Lock()

    def work_of(count: int) -> tuple[mmap.mmap, list[int], list[int]]:
        """Memory for so many chunks, their addresses and lengths."""
        memory = mmap.mmap(-1, count * CHUNK_BYTES + HUGE_BYTES)
        # As a region has them: direct reads into small pages are half as fast.
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start += -start % HUGE_BYTES
        ctypes.memset(start, 0, count * CHUNK_BYTES)
        return memory, [start + i * CHUNK_BYTES for i in range(count)], [CHUNK_BYTES] * count

    def names(first: int) -> list[bytes]:
        return [make_key(number.to_bytes(32, "big")) for number in range(first, first + IO_BATCH)]

    def move(direction: str, first: int, addresses: list[int], lengths: list[int]) -> None:
        batch = Batch(names(first), addresses, lengths)
        (directory.load if direction == "in" else directory.store)(batch)
        if any(batch.statuses()):
            raise SystemExit(f"{direction}: {batch.statuses()}")

    _first, *places = work_of(IO_BATCH)
    for number in range(IO_FIRST):
        move("out", number * IO_BATCH, *places)
    began = time.monotonic()
    begun = {"in": 0, "out": 0}
    done = {"in": 0, "out": 0}  # batches

    def work(direction: str, rate: float) -> None:
        _memory, *places = work_of(IO_BATCH)
        while True:
            with lock:
                number = begun[direction]
                begun[direction] += 1
            # Each batch has its time; one that is late is made up for.
            due = began + number * IO_BATCH * CHUNK_BYTES / max(1.0, rate)
            if stop.wait(max(0.0, due - time.monotonic())):
                return
            turn = number % IO_FIRST if direction == "in" else IO_FIRST + number
            move(direction, turn * IO_BATCH, *places)
            with lock:
                done[direction] += 1

    threads = [
        threading.Thread(target=work, args=one)
        for one in (("in", rates.loaded), ("out", rates.stored))
        for _ in range(IO_THREADS)
    ]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    before, since = dict(done), began
    for _ in sys.stdin:
        with lock:
            now, until = dict(done), time.monotonic()
        moved = {
            way: (now[way] - before[way]) * IO_BATCH * CHUNK_BYTES / (until - since) for way in now
        }
        before, since = now, until
        print(msgspec.json.encode(Rates(moved["in"], moved["out"])).decode(), flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    directory.close()


class PeerProcess:
    """vLLM's manager in a process of its own, so that its imports burden no other case."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step", "--peer-process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, root: Path, steps: int) -> Figures:
        """One run; the child waits between runs."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([str(root), steps]) + "\n")
        for line in self._child.stdout:
            if line.startswith("{"):
                return msgspec.json.decode(line, type=Figures)
        raise SystemExit(f"vLLM's process ended with code {self._child.wait()}")

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)


def peer_process() -> None:
    """The other side of `PeerProcess`."""
    for line in sys.stdin:
        root, steps = json.loads(line)
        folder = Path(tempfile.mkdtemp(dir=root))
        system = Peer(folder)
        try:
            figures, _ = drive(system, True, steps)
        finally:
            system.close()
            shutil.rmtree(folder)
        print(msgspec.json.encode(figures).decode(), flush=True)


def compare(
    name: str, values: list[float], reference: str, against: list[float], target: float | None
) -> Case:
    """A case from rounds: each round's value beside the same round's reference."""
    ratios = sorted(b / a for a, b in zip(values, against, strict=True))
    cut = len(ratios) // 4
    return Case(
        case=name,
        value=round(statistics.median(values), 1),
        unit="us",
        reference=reference,
        reference_value=round(statistics.median(against), 1),
        ratio=round(statistics.median(ratios), 3),
        spread=(round(ratios[cut], 3), round(ratios[len(ratios) - 1 - cut], 3)),
        target=target,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer", action="store_true", help="also vLLM's tiering manager")
    parser.add_argument("--obj", action="store_true", help="also the object tier")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="of a case in a round")
    parser.add_argument("--directory", type=Path, help="for the files; a temporary one by default")
    parser.add_argument("--io", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--peer-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.io is not None:
        folder, loaded, stored = arguments.io
        do_io(Path(folder), Rates(float(loaded), float(stored)))
        return
    if arguments.peer_process:
        peer_process()
        return
    root = Path(tempfile.mkdtemp(prefix="kvtier-step-", dir=arguments.directory))
    names = [*CASES, *["saturated_obj"] * arguments.obj, *["peer"] * arguments.peer]
    figures: dict[str, list[Figures]] = {name: [] for name in [*names, "noise"]}
    beside = Rates(0.0, 0.0)  # what the last saturated child did
    peer = PeerProcess() if arguments.peer else None
    try:
        for turn in range(arguments.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                moved = ""
                if peer is not None and name == "peer":
                    one = peer.run(root, arguments.steps)
                else:
                    one, noise, rates, moved = run(name, root, arguments.steps, beside)
                    if name == "saturated_process":
                        beside = rates
                    if noise is not None:
                        figures["noise"].append(noise)
                figures[name].append(one)
                print(
                    f"{name}: median {one.median:.0f} us, p99 {one.p99:.0f} us, processor "
                    f"{one.cpu:.0f} us, p99 {one.cpu_p99:.0f} us; {moved}",
                    flush=True,
                )
    finally:
        if peer is not None:
            peer.close()
        shutil.rmtree(root)

    def medians(name: str) -> list[float]:
        return [one.median for one in figures[name]]

    def tails(name: str) -> list[float]:
        return [one.p99 for one in figures[name]]

    def cpus(name: str) -> list[float]:
        return [one.cpu for one in figures[name]]

    def cpu_tails(name: str) -> list[float]:
        return [one.cpu_p99 for one in figures[name]]

    cases = [
        compare("noise_p99", tails("noise"), "its median", medians("noise"), None),
        compare("idle_p99", tails("idle"), "its median", medians("idle"), None),
        compare(
            "saturated_process", medians("saturated_process"), "idle", medians("idle"), 1 / 1.1
        ),
        compare(
            "saturated_process_p99", tails("saturated_process"), "idle p99", tails("idle"), 1 / 1.5
        ),
        compare(
            "saturated_process_p99_same_io",
            tails("saturated_process"),
            "p99 beside the same I/O",
            tails("same_io"),
            1 / 1.1,
        ),
        compare("saturated_thread", medians("saturated_thread"), "idle", medians("idle"), None),
        compare("saturated_thread_p99", tails("saturated_thread"), "idle p99", tails("idle"), None),
        compare(
            "saturated_process_cpu", cpus("saturated_process"), "idle_cpu", cpus("idle"), 1 / 1.1
        ),
        compare(
            "saturated_process_cpu_p99",
            cpu_tails("saturated_process"),
            "idle_cpu p99",
            cpu_tails("idle"),
            1 / 1.5,
        ),
        compare("saturated_thread_cpu", cpus("saturated_thread"), "idle_cpu", cpus("idle"), None),
        compare("same_io", medians("same_io"), "idle", medians("idle"), None),
        compare("same_io_p99", tails("same_io"), "idle p99", tails("idle"), None),
        compare("same_io_cpu", cpus("same_io"), "idle_cpu", cpus("idle"), None),
        compare("same_io_cpu_p99", cpu_tails("same_io"), "idle_cpu p99", cpu_tails("idle"), None),
    ]
    if arguments.obj:
        cases += [
            compare("saturated_obj", medians("saturated_obj"), "idle", medians("idle"), 1 / 1.1),
            compare(
                "saturated_obj_p99", tails("saturated_obj"), "idle p99", tails("idle"), 1 / 1.5
            ),
            compare(
                "saturated_obj",
                medians("saturated_obj"),
                "saturated_process",
                medians("saturated_process"),
                1 / 1.1,
            ),
            compare(
                "saturated_obj_p99",
                tails("saturated_obj"),
                "saturated_process p99",
                tails("saturated_process"),
                1 / 1.1,
            ),
            compare("saturated_obj_cpu", cpus("saturated_obj"), "idle_cpu", cpus("idle"), 1 / 1.1),
            compare(
                "saturated_obj_cpu_p99",
                cpu_tails("saturated_obj"),
                "idle_cpu p99",
                cpu_tails("idle"),
                1 / 1.5,
            ),
        ]
    if peer is not None:
        vllm = "vLLM's tiering manager"
        cases.append(compare("idle", medians("idle"), vllm, medians("peer"), 10.0))
        cases += [
            compare("idle_p99_peer", tails("idle"), f"{vllm}, p99", tails("peer"), None),
            compare("idle_cpu", cpus("idle"), f"{vllm}, processor time", cpus("peer"), 10.0),
            compare("idle_single", medians("idle_single"), vllm, medians("peer"), None),
            compare(
                "idle_single_cpu",
                cpus("idle_single"),
                f"{vllm}, processor time",
                cpus("peer"),
                None,
            ),
        ]
    for one in cases:
        print(
            f"{one.case}: {one.value:g} us, {one.reference} {one.reference_value:g} us, ratio "
            f"{one.ratio:g} ({one.spread[0]:g} to {one.spread[1]:g})"
            + ("" if one.target is None else f", target {one.target:.3g}")
        )
    line = {"benchmark": "step", "cases": msgspec.to_builtins(cases), "machine": machine()}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
