# SPDX-License-Identifier: Apache-2.0
"""The file tier beside raw direct I/O (fio) and, with ``--peer``, beside vLLM's own file tier.

    python -m benchmarks.fs [--peer] [--dir D]

Stores and loads chunks of 64 KiB, 512 KiB and 2 MiB, checksums on, and asks for the presence of
16,384 keys, half of which are there. Every load is compared byte for byte. Files are synced and
dropped from the page cache before they are read. Needs fio. Not on tmpfs, whose figures say nothing
about a disk, unless ``--tmpfs-ok``.

Both tiers do the same work in each round: new directories, new files, as many and as large, no
fsync, their threads by default, each in host memory as its own product makes it: kvtier's region,
vLLM's shared region. How the pages of that memory lie decides how many pieces a direct transfer
has; kvtier's are huge pages where the kernel gives them (the line with the memory says so). fio
moves as many bytes in requests of the same size on the same filesystem, at the best of three queue
depths. Two of its figures stand beside
a store:

- *fio, new file*: blocks that were never written, in a file that was preallocated. That is what a
  store does, and what its target refers to.
- *fio, same file*: the same blocks over and over. On thin-provisioned disks and in new extents
  this is twice as fast, and out of reach for whoever keeps new data in new files.

Nothing is deleted before the end, and the directories of a run lie apart from those of the last one
where the filesystem can do that: ext4 without a journal passes over inodes that were freed in the
last five minutes one by one, which made creating a file up to ten times slower after a clean-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import Case, Pairs
from kvtier.host.region import Region
from kvtier.testing.contract import context, make_env
from kvtier.tiers.base import Slot
from kvtier.tiers.fs import FsOptions, FsTier
from kvtier.types import Outcome, Presence, make_key

NOTES = """
What bounds it, measured with threads in C that do nothing but open, move and rename, on the same
files (8 to 32 threads, two cores, virtual disk):

- A store of 64 KiB: 0.45 to 0.6 GB/s, 85 to 110 us of kernel time for each file, most of it
  creating, naming and allocating. O_TMPFILE with linkat, no look before, fallocate, and writing
  under the final name all lie within 10 % of each other; only the second level of directories
  costs (20 to 30 %), and a single directory for all (its lock: six times slower).
- Stores of 512 KiB and more: 0.95 to 1.5 GB/s, the same as fio in a new file (0.8 to 1.4); fio
  over the same blocks has 1.6 to 2.4. Preallocation changes nothing: the device takes new blocks
  slower.
- Loads depend on how host memory lies. Plain direct reads of 64 KiB have 1.1 GB/s into scattered
  pages of 4 KiB and 1.9 into huge ones, of 512 KiB 1.3 and 3.2. kvtier's region has huge pages;
  vLLM's has pages of 4 KiB, scattered on a machine that has been up for a while, and in order,
  so that a transfer has few segments all the same, in the first minutes after a boot. Then both
  tiers load 64 KiB at the device's limit, 1.3 to 1.5 times fio's best depth, and neither is faster
  (8, 16 and 32 readers: 1.7, 1.8, 2.0 GB/s; files without a trailer the same).
"""

SIZES = {"64KiB": 64 << 10, "512KiB": 512 << 10, "2MiB": 2 << 20}
JOB_CHUNKS = 16
PRESENCE_KEYS = 16_384
DEPTHS = (8, 16, 32)
FIO = {"new file": "write", "same file": "write", "read": "read"}
"""References, and what fio calls their direction. Reads follow the overwriting of the same file."""


class Subject:
    """The file tier over `count` slots of `size` bytes, each with its own content."""

    def __init__(self, size: int, count: int, threads: dict[str, int]) -> None:
        self.size = size
        self.content = np.random.default_rng(1).integers(0, 256, (count, size), dtype=np.uint8)
        self._env = make_env(
            sizes=(size,), num_slots=count, definitions=FsTier.metric_definitions()
        )
        self._threads = threads
        self._region = Region.create(f"benchmark-{os.getpid()}-{size}", self._env.geometry, {}, 1)
        self.rows = np.frombuffer(self._region.payload, dtype=np.uint8).reshape(count, size)

    @contextlib.asynccontextmanager
    async def opened(self, root: str) -> AsyncIterator[None]:
        """A tier on a directory that is new."""
        options = FsOptions(root_dir=root, min_free_bytes=1, **self._threads)
        self.tier = FsTier("fs", options, self._env)
        await self.tier.open()
        try:
            yield
        finally:
            await self.tier.aclose(time.monotonic() + 10)

    async def move(self, keys: Sequence[bytes], *, load: bool) -> float:
        """Seconds for all keys, in jobs that run at the same time; bytes are checked after."""
        view, address = self._region.slot_view, self._region.slot_address
        slots = [
            Slot(key, i, 1, self.size, view(i, self.size), address(i)) for i, key in enumerate(keys)
        ]
        self.rows[:] = 0 if load else self.content
        call = self.tier.load if load else self.tier.store
        start = time.perf_counter()
        results = await asyncio.gather(
            *(
                call(slots[i : i + JOB_CHUNKS], context(120))
                for i in range(0, len(slots), JOB_CHUNKS)
            )
        )
        seconds = time.perf_counter() - start
        bad = {end for job in results for end in job} - {Outcome.DONE}
        if bad:
            raise SystemExit(f"benchmarks.fs: {'load' if load else 'store'} ended as {bad}")
        if not np.array_equal(self.rows, self.content):
            raise SystemExit("benchmarks.fs: other bytes came back")
        return seconds

    @property
    def huge_bytes(self) -> int:
        """Host memory that this process maps in huge pages."""
        with open("/proc/self/smaps_rollup") as lines:
            sizes = [int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:")]
        return sum(sizes) << 10

    def close(self) -> None:
        """Give the memory back."""
        del self.rows
        self._region.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fs", description=__doc__)
    parser.add_argument("--dir", default=None, help="where to make the files (a real disk)")
    parser.add_argument("--peer", action="store_true", help="also run vLLM's own file tier")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total-mib", type=int, default=128, help="bytes of one round")
    parser.add_argument("--threads", type=int, help="of each pool, the peer's too")
    parser.add_argument("--only", default=None, help="one size, or 'presence'")
    parser.add_argument("--tmpfs-ok", action="store_true")
    args = parser.parse_args(argv)
    if shutil.which("fio") is None:
        raise SystemExit("benchmarks.fs: fio is not installed; apt-get install fio")
    base = args.dir or tempfile.gettempdir()
    if filesystem(base) in ("tmpfs", "ramfs") and not args.tmpfs_ok:
        raise SystemExit(
            f"benchmarks.fs: {base} is {filesystem(base)}, memory and no disk; give --dir, or "
            "--tmpfs-ok if that is what you want to see"
        )
    folder = tempfile.mkdtemp(prefix="kvtier-fs-", dir=base)
    spread(folder)
    cases: list[Case] = []
    try:
        for name, size in SIZES.items():
            if args.only in (None, name):
                cases += asyncio.run(transfers(name, size, folder, args))
        if args.only in (None, "presence"):
            cases += asyncio.run(presence(folder, args))
    finally:
        shutil.rmtree(folder)
    harness.report("fs", cases, filesystem=filesystem(base), threads=args.threads)


async def transfers(name: str, size: int, folder: str, args: argparse.Namespace) -> list[Case]:
    """Store and load of one size beside fio and the peer, in turns."""
    count = max(JOB_CHUNKS, (args.total_mib << 20) // size)
    threads = {}
    if args.threads:
        threads = {"read_threads": args.threads, "write_threads": args.threads}
    subject = Subject(size, count, threads)
    times: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        times.setdefault(what, []).append(seconds)

    depths = {what: best_depth(what, size, count, folder) for what in FIO}

    async def ours(chunk_keys: Sequence[bytes], root: str) -> None:
        async with subject.opened(root):
            note("store", await subject.move(chunk_keys, load=False))
            drop_cache(root)
            note("load", await subject.move(chunk_keys, load=True))

    def theirs(chunk_keys: Sequence[bytes], root: str) -> None:
        from benchmarks.vllm_tiers import vllm_fs  # lazy: needs vLLM

        peer = vllm_fs(root, count, size, args.threads)
        try:
            peer.rows[:] = subject.content
            note("peer store", timed(lambda: peer.store(chunk_keys, JOB_CHUNKS)))
            drop_cache(root)
            peer.rows[:] = 0
            note("peer load", timed(lambda: peer.load(chunk_keys, JOB_CHUNKS)))
            if not np.array_equal(peer.rows, subject.content):
                raise SystemExit("benchmarks.fs: the peer returned other bytes")
        finally:
            peer.close()

    for number in range(args.rounds):
        chunk_keys = keys(count, number)
        if number % 2:
            raw(note, depths, size, count, folder)
        if args.peer and number % 2:
            theirs(chunk_keys, os.path.join(folder, f"peer-{name}-{number}"))
        await ours(chunk_keys, os.path.join(folder, f"kvtier-{name}-{number}"))
        if args.peer and not number % 2:
            theirs(chunk_keys, os.path.join(folder, f"peer-{name}-{number}"))
        if not number % 2:
            raw(note, depths, size, count, folder)
    print(f"{name}: {subject.huge_bytes >> 20} of {size * count >> 20} MiB are in huge pages")
    subject.close()
    gigabytes = size * count / 1e9
    cases = []
    for what, reference in (("store", "new file"), ("store", "same file"), ("load", "read")):
        target = None if size == SIZES["64KiB"] or reference == "same file" else 0.9
        cases.append(
            harness.rate_case(
                f"{what} {name}",
                gigabytes,
                "GB/s",
                f"fio {reference}, depth {depths[reference]}",
                Pairs(tuple(times[what]), tuple(times[reference])),
                target=target,
            )
        )
    for what in ("store", "load"):
        if args.peer:
            target = 1.5 if (size, what) == (SIZES["64KiB"], "load") else 1.0
            cases.append(
                harness.rate_case(
                    f"{what} {name}",
                    gigabytes,
                    "GB/s",
                    "vLLM fs tier",
                    Pairs(tuple(times[what]), tuple(times[f"peer {what}"])),
                    target=target,
                )
            )
    return cases


async def presence(folder: str, args: argparse.Namespace) -> list[Case]:
    """Presence of keys, half of them there, written by another process."""
    root = os.path.join(folder, "kvtier-presence")
    peer_root = os.path.join(folder, "peer-presence")
    asked = keys(PRESENCE_KEYS, 777)
    script = [sys.executable, "-m", "benchmarks.fs_writer", root]
    if args.peer:
        script.append(peer_root)
    write_elsewhere(script, asked[::2])
    env = make_env(sizes=(4096,), definitions=FsTier.metric_definitions())
    tier = FsTier("fs", FsOptions(root_dir=root, min_free_bytes=1), env)
    await tier.open()
    peer = None
    if args.peer:
        from benchmarks.vllm_tiers import vllm_fs  # lazy: needs vLLM

        peer = vllm_fs(peer_root, 1, 4096)
    ours: list[float] = []
    reference: list[float] = []
    try:
        await tier.walked()
        for _ in range(args.rounds):
            start = time.perf_counter()
            found = await tier.exists(asked, context(60, windowed=True))
            ours.append(time.perf_counter() - start)
            if [there is Presence.PRESENT for there in found] != [True, False] * (len(asked) // 2):
                raise SystemExit("benchmarks.fs: wrong presence")
            if peer is not None:
                start = time.perf_counter()
                count = peer.present(asked)
                reference.append(time.perf_counter() - start)
                if count != len(asked) // 2:
                    raise SystemExit("benchmarks.fs: the peer found another number of keys")
            else:
                reference.append(timed(lambda: plain_exists(root, asked)))
    finally:
        await tier.aclose(time.monotonic() + 10)
        if peer is not None:
            peer.close()
    return [
        harness.time_case(
            f"presence of {PRESENCE_KEYS} keys",
            1,
            "ms",
            "os.path.exists of absent names" if peer is None else "vLLM fs tier",
            Pairs(tuple(ours), tuple(reference)),
            scale=1e3,
            target=None if peer is None else 4.0,
        )
    ]


def write_elsewhere(command: Sequence[str], chunk_keys: Sequence[bytes]) -> None:
    """Write chunks in another process, so that nothing is known of them in this one."""
    subprocess.run(command, input=b"".join(chunk_keys), check=True, timeout=600)


def plain_exists(root: str, asked: Sequence[bytes]) -> None:
    """One plain call a key, for a run without a peer."""
    for key in asked:
        os.path.exists(os.path.join(root, key.hex()))


def keys(count: int, seed: int) -> list[bytes]:
    """Random keys of group 0."""
    source = random.Random(seed)
    return [make_key(source.randbytes(32)) for _ in range(count)]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def raw(
    note: Callable[[str, float], None],
    depths: dict[str, int],
    size: int,
    count: int,
    folder: str,
) -> None:
    """One run of fio for each reference."""
    for what, depth in depths.items():
        note(what, fio(what, size, count, folder, depth))


def best_depth(what: str, size: int, count: int, folder: str) -> int:
    """Queue depth at which fio is fastest here, of two runs each."""
    if what != "new file":
        fio("same file", size, count, folder, DEPTHS[0])  # lays the file out
    return min(
        DEPTHS,
        key=lambda depth: min(fio(what, size, count, folder, depth) for _ in range(2)),
    )


def fio(what: str, size: int, count: int, folder: str, depth: int) -> float:
    """Seconds that raw direct I/O takes for the same bytes: one file, `depth` requests at once."""
    name = "raw"
    if what == "new file":
        name = f"raw-{len(os.listdir(folder))}"
    done = subprocess.run(
        [
            "fio",
            "--name=raw",
            f"--filename={folder}/{name}",
            f"--rw={FIO[what]}",
            f"--bs={size}",
            f"--size={size * count}",
            "--direct=1",
            "--ioengine=libaio",
            # Without it each write of a new file extends it, and waits for the one before.
            "--fallocate=native",
            f"--iodepth={depth}",
            "--output-format=json",
        ],
        capture_output=True,
        check=True,
        timeout=120,
    )
    job = json.loads(done.stdout)["jobs"][0][FIO[what]]
    return float(size * count / job["bw_bytes"])


def spread(folder: str) -> None:
    """Have the filesystem place the directories in `folder` far from each other, if it can."""
    get_flags, set_flags, top_of_hierarchy = 0x80086601, 0x40086602, 0x00020000
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(fd, get_flags, bytes(8)))
        fcntl.ioctl(fd, set_flags, struct.pack("l", flags | top_of_hierarchy))
    except OSError as exc:
        print(f"benchmarks.fs: directories stay close together: {exc}", file=sys.stderr)
    finally:
        os.close(fd)


def drop_cache(root: str) -> None:
    """Sync all files below `root` and drop them from the page cache."""
    os.sync()
    for path in Path(root).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def filesystem(path: str) -> str:
    """Type of the filesystem that `path` is on."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return "unknown"


if __name__ == "__main__":
    main()
