# SPDX-License-Identifier: Apache-2.0
"""Limits, eviction, free space, and what is known again after a restart."""

import asyncio
import contextlib
import itertools
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._core import fileio
from kvtier.testing.contract import SIZES, Arena, chunk, context
from kvtier.tiers.fs import janitor
from kvtier.tiers.fs.capacity import UNIT_BYTES, Usage
from kvtier.tiers.fs.tier import UNANNOUNCED_PARTS
from kvtier.types import Outcome, Presence
from tests.tiers.fs.util import FILE_BYTES, GROUP, SIZE, opened, used_bytes

FILE_BLOCKS = FILE_BYTES // 512


async def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    limit = 20 * FILE_BYTES
    options = {"capacity_bytes": limit, "high_watermark": 0.9, "low_watermark": 0.5}
    async with opened(tmp_path / "root", **options) as bench:
        assert set(await bench.store(*range(18))) == {Outcome.DONE}
        assert await bench.load(0, 1) == [Outcome.DONE] * 2
        assert await bench.store(18) == [Outcome.DONE]
        await until(lambda: bench.tier.usage.bytes <= 0.5 * limit)
        assert await bench.there(0, 1, 18) == [True] * 3
        # 19 files, at most 10 may stay: 2 to 10 were used longest ago.
        assert await bench.there(*range(2, 18)) == [False] * 9 + [True] * 7
        assert used_bytes(tmp_path) == bench.tier.usage.bytes == 10 * FILE_BYTES
        await until(lambda: bench.events)  # the janitor's report comes at the end of its turn
        assert [event.key for event in bench.events] == [
            chunk(n, GROUP, SIZE)[0] for n in range(2, 11)
        ]
        samples = bench.samples()
        assert samples[("kvtier_tier_evicted_total", "fs")] == 9
        assert samples[("kvtier_tier_used_bytes", "fs")] == 10 * FILE_BYTES
        assert samples[("kvtier_tier_chunks", "fs")] == 10


@pytest.mark.asyncio
async def test_never_above_the_limit(tmp_path: Path) -> None:
    """More at once than fits: the surplus is refused, not written."""
    limit = 10 * FILE_BYTES
    async with opened(tmp_path / "root", capacity_bytes=limit) as bench:
        results = await asyncio.gather(*(bench.store(n) for n in range(30)))
        outcomes = [result for (result,) in results]
        assert outcomes.count(Outcome.DONE) == 10
        assert outcomes.count(Outcome.FULL) == 20
        assert used_bytes(tmp_path) <= limit
        deadline = time.monotonic() + 20
        while await bench.store(40) != [Outcome.DONE]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert used_bytes(tmp_path) <= limit


@pytest.mark.asyncio
@pytest.mark.fault("K02", "K03")
async def test_usage_and_content_after_restart(tmp_path: Path) -> None:
    limit = 20 * FILE_BYTES
    options = {"capacity_bytes": limit, "high_watermark": 0.95, "low_watermark": 0.8}
    async with opened(tmp_path / "root", **options) as bench:
        assert set(await bench.store(*range(18))) == {Outcome.DONE}
    async with opened(tmp_path / "root", **options) as bench:
        assert bench.tier.usage.bytes == 18 * FILE_BYTES == used_bytes(tmp_path)
        assert await bench.there(*range(18)) == [True] * 18
        assert set(await bench.load(*range(18))) == {Outcome.DONE}
        for n in range(100, 110):
            await bench.store(n)
            assert used_bytes(tmp_path) <= limit


@pytest.mark.asyncio
@pytest.mark.fault("K02")
async def test_order_of_use_after_restart(tmp_path: Path) -> None:
    """Access times carry the order over; a load renews an old one."""
    limit = 10 * FILE_BYTES
    async with opened(tmp_path / "root", upkeep={"touch_seconds": 100}) as bench:
        assert set(await bench.store(*range(8))) == {Outcome.DONE}
        now = time.time()
        for n in range(8):
            os.utime(bench.file(n), (now - 5000 + n, now - 5000 + n))
        assert await bench.load(0, 1) == [Outcome.DONE] * 2
        assert all(bench.file(n).stat().st_atime > now - 60 for n in (0, 1))
    options = {"capacity_bytes": limit, "high_watermark": 0.5, "low_watermark": 0.4}
    async with opened(tmp_path / "root", **options) as bench:
        await until(lambda: bench.tier.usage.bytes <= 0.4 * limit)
        assert await bench.there(*range(8)) == [True, True] + [False] * 4 + [True, True]


@pytest.mark.asyncio
@pytest.mark.fault("K04")
async def test_serves_while_it_walks(tmp_path: Path) -> None:
    """The first walk hangs: lookups and loads work; with a limit, writes wait for the sum."""
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1, 2) == [Outcome.DONE] * 2
    from kvtier.tiers.fs import tier as module

    gate, release = os.pipe()
    lists = fileio.Directory.entries
    try:
        seconds, module.FIRST_WALK_SECONDS = module.FIRST_WALK_SECONDS, 0.1
        walk = module.Janitor._walk

        def slow(self, report, since):
            os.read(gate, 1)
            walk(self, report, since)

        module.Janitor._walk = slow
        options = {"capacity_bytes": 1 << 30, "private": True}
        started = time.monotonic()
        async with opened(tmp_path / "root", wait=False, **options) as bench:
            assert time.monotonic() - started < 5
            assert await bench.there(1, 2, 3) == [True, True, False]
            assert await bench.load(1, 2) == [Outcome.DONE] * 2
            assert await bench.store(3) == [Outcome.DROPPED]
            os.close(release)
            await bench.tier.walked()
            assert await bench.store(3) == [Outcome.DONE]
            assert bench.tier.usage.bytes == 3 * FILE_BYTES
    finally:
        module.Janitor._walk = walk
        module.FIRST_WALK_SECONDS = seconds
        os.close(gate)
    assert lists is fileio.Directory.entries


STALL_SECONDS = 0.05
"""A turn of the loop beside a walk takes 15 ms, whatever the walk finds: the thread that walks
gives the GIL back every 5 ms. Tens of thousands of files in one go would be more than this."""
STALL_TRIES = 8


async def walk_beside_the_loop(root: Path, files: int) -> float:
    """Longest turn of the loop while the walk over `files` files goes on, of the best of several
    walks: a busy machine has longer pauses than that, but not in each of them."""
    async with opened(root) as bench:
        base = Path(bench.tier.path)
    for upper in range(256):
        count = files // 256 + (upper < files % 256)
        folder = base / f"{upper:02x}"
        folder.mkdir(parents=True, exist_ok=True)
        for n in range(count):
            os.close(os.open(folder / f"{upper:02x}00{n:060x}_0.kv", os.O_CREAT | os.O_WRONLY))
    best = math.inf
    for _ in range(STALL_TRIES):
        longest = 0.0
        started = time.monotonic()
        async with opened(root, wait=False, private=True) as bench:
            assert time.monotonic() - started < 2  # being ready does not wait for the walk
            waiter = asyncio.create_task(bench.tier.walked(), name="walked")
            before = time.monotonic()
            while not waiter.done():
                await asyncio.sleep(0.001)
                now = time.monotonic()
                longest = max(longest, now - before)
                before = now
            assert bench.tier.usage.files == files
        best = min(best, longest)
        if best < STALL_SECONDS:
            break
    return best


@pytest.mark.asyncio
@pytest.mark.fault("K04")
async def test_walk_does_not_stall_the_loop(tmp_path: Path) -> None:
    assert await walk_beside_the_loop(tmp_path / "root", 10_000) < STALL_SECONDS


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.fault("K04")
async def test_long_walk_does_not_stall_the_loop(tmp_path: Path) -> None:
    try:
        assert await walk_beside_the_loop(tmp_path / "root", 100_000) < STALL_SECONDS
    finally:
        shutil.rmtree(tmp_path / "root")  # pytest would keep them for three runs


def some_files(root: Path, ending: str, count: int) -> list[Path]:
    found = (
        Path(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(ending)
    )
    return list(itertools.islice(found, count))


@pytest.mark.asyncio
@pytest.mark.fault("E13")
async def test_external_deleter(tmp_path: Path) -> None:
    """Somebody else removes files at random while chunks are stored and loaded: only misses."""
    stop = threading.Event()
    removed = 0

    def clean() -> None:
        nonlocal removed
        while not stop.wait(0.002):
            for path in some_files(tmp_path, ".kv", 5) + some_files(tmp_path, ".tmp", 1):
                path.unlink(missing_ok=True)
                removed += 1
            for folder, folders, names in os.walk(tmp_path / "root"):
                if not folders and not names:
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)

    thread = threading.Thread(target=clean, name="cleaner")
    async with opened(tmp_path / "root", capacity_bytes=1 << 30) as bench:
        thread.start()
        try:
            seen = set()
            for turn in range(40):
                numbers = range(turn * 10, turn * 10 + 10)
                stored = await bench.store(*numbers)
                assert set(stored) <= {Outcome.DONE, Outcome.EXISTS, Outcome.LOST, Outcome.DROPPED}
                seen.update(await bench.load(*numbers))
        finally:
            stop.set()
            thread.join()
        assert removed
        assert seen <= {Outcome.DONE, Outcome.MISSING}
        assert Outcome.DONE in seen
        # The count is right again after the next walk.
        bench.tier._janitor.walk()
        await until(lambda: bench.tier.usage.bytes == used_bytes(tmp_path))


@pytest.mark.asyncio
@pytest.mark.fault("E13")
async def test_private_filter_follows_what_is_found(tmp_path: Path) -> None:
    """The filter is exact for what this instance does, and learns of a removal at the next load."""
    async with opened(tmp_path / "root", private=True) as bench:
        assert await bench.store(1, 2) == [Outcome.DONE] * 2
        calls = bench.faults.calls("stat")
        assert await bench.there(1, 2, 3) == [True, True, False]
        assert bench.faults.calls("stat") == calls
        bench.file(1).unlink()
        assert await bench.load(1) == [Outcome.MISSING]
        assert await bench.there(1, 2) == [False, True]
        assert await bench.store(1) == [Outcome.DONE]
        assert await bench.there(1) == [True]


@pytest.mark.asyncio
async def test_free_space_is_left_to_others(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    async with opened(tmp_path / "root", min_free_bytes=free * 2) as bench:
        assert await bench.store(1) == [Outcome.FULL]
        assert not list(tmp_path.rglob("*.kv"))
        key = ("kvtier_fs_refused_total", "fs", "store", "free_space")
        assert bench.samples()[key] == 1
    async with opened(tmp_path / "root", min_free_bytes=1) as bench:
        assert await bench.store(1) == [Outcome.DONE]


WRITER = """
import asyncio, pathlib, sys, time
import tests.tiers.fs.util as util
from kvtier.tiers.fs import janitor
from kvtier.types import Outcome
write_whole = janitor.write_whole
def stalled(*arguments):
    time.sleep(float(sys.argv[4]))
    write_whole(*arguments)
janitor.write_whole = stalled
async def main():
    async with util.opened(pathlib.Path(sys.argv[1]), capacity_bytes=int(sys.argv[2]),
                           high_watermark=0.8, low_watermark=0.6) as bench:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        start = int(sys.argv[3])
        for n in range(start, start + 150):
            while await bench.store(n) == [Outcome.DROPPED]:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
        print("done", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.fault("E10")
@pytest.mark.parametrize("stall_seconds", [0.0, 0.15])
async def test_limit_is_kept_by_all_instances_together(
    tmp_path: Path, stall_seconds: float
) -> None:
    """Four processes write three times the limit of one directory; also where what they tell each
    other takes its time, as on a machine or a filesystem that stalls."""
    limit = 200 * FILE_BYTES
    root = tmp_path / "root"
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WRITER, str(root), str(limit), str(1000 * n)),
            str(stall_seconds),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for n in range(4)
    ]
    ends: list[asyncio.Task[bytes]] = []
    try:
        for process in processes:
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        for process in processes:
            process.stdin.write(b"go\n")
        peak = 0
        ends = [asyncio.create_task(process.stdout.readline()) for process in processes]
        while not all(end.done() for end in ends):
            peak = max(peak, used_bytes(root) if root.exists() else 0)
            await asyncio.sleep(0.05)
        assert [end.result() for end in ends] == [b"done\n"] * 4
        # Nobody writes more than that before it has told the others, and heard them.
        assert peak <= limit * (1 + len(processes) / UNANNOUNCED_PARTS)
        await until(lambda: used_bytes(root) <= 0.8 * limit)
        # One evicts for all: they do not all remove what one should.
        assert used_bytes(root) >= 0.3 * limit
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for process in processes:
            process.stdin.write(b"go\nend\n")
        for process in processes:
            await asyncio.wait_for(process.communicate(), 30)
    assert {process.returncode for process in processes} == {0}


@pytest.mark.asyncio
@pytest.mark.fault("E10")
async def test_an_instance_that_cannot_tell_the_others_writes_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk, where that is more than it may; by itself it writes as much as there is room."""
    heard = threading.Event()
    heard.set()
    write_whole = janitor.write_whole

    def held(path: str, data: bytes, mode: int) -> None:
        assert heard.wait(30)
        write_whole(path, data, mode)

    monkeypatch.setattr(janitor, "write_whole", held)
    options = {"capacity_bytes": 10 * FILE_BYTES}
    async with opened(tmp_path / "root", **options) as one:
        heard.clear()
        try:
            assert await one.store(1, 2) == [Outcome.DONE] * 2
        finally:
            heard.set()
        async with opened(tmp_path / "root", **options):
            one.tier._janitor.wake()
            await until(lambda: one.tier._janitor.shared and not one.tier._unannounced_bytes())
            heard.clear()
            try:
                assert await one.store(3, 4) == [Outcome.DONE, Outcome.DROPPED]
                assert await one.store(4) == [Outcome.DROPPED]
                key = ("kvtier_fs_refused_total", "fs", "store", "capacity")
                assert one.samples()[key] == 2
            finally:
                heard.set()
            await until(lambda: not one.tier._unannounced_bytes())
            assert await one.store(4) == [Outcome.DONE]


@pytest.mark.asyncio
@pytest.mark.fault("E10")
async def test_limit_covers_other_namespaces(tmp_path: Path) -> None:
    """Files of a model that nobody runs any more go before those in use."""
    async with opened(tmp_path / "root", fields={"model": "an/old-one"}) as bench:
        assert set(await bench.store(*range(10))) == {Outcome.DONE}
    limit = 12 * FILE_BYTES
    options = {"capacity_bytes": limit, "high_watermark": 1.0, "low_watermark": 0.5}
    async with opened(tmp_path / "root", **options) as bench:
        assert bench.tier.usage.bytes == 10 * FILE_BYTES
        for n in range(8):
            deadline = time.monotonic() + 10
            while await bench.store(n) != [Outcome.DONE]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert used_bytes(tmp_path) <= limit
        assert await bench.there(*range(8)) == [True] * 8


def test_usage_counts_what_is_there() -> None:
    usage = Usage()
    usage.add(b"a", FILE_BLOCKS)
    usage.add(b"a", FILE_BLOCKS)
    usage.add(b"b", 9)
    assert usage.bytes == FILE_BYTES + 2 * UNIT_BYTES
    assert usage.victims(1) == [b"a"]
    usage.renew([b"a"])
    assert usage.victims(1) == [b"b"]
    assert usage.removed(b"b") == 2 * UNIT_BYTES
    assert usage.removed(b"b") == 0
    usage.vanished(b"a")
    assert (usage.bytes, usage.files) == (0, 0)


def test_removal_by_another_instance_counts_once() -> None:
    usage = Usage()
    usage.add(b"a", 80)
    usage.add(b"b", 80)
    usage.others(-10)
    assert usage.bytes == 10 * UNIT_BYTES
    usage.vanished(b"a")
    assert usage.bytes == 10 * UNIT_BYTES
    usage.vanished(b"b")
    assert usage.bytes == 0


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "removed", "vanished", "renew"]), st.integers(0, 5)),
    max_size=20,
)


@given(before=ACTIONS, during=ACTIONS, disk=st.sets(st.integers(0, 5)))
def test_walk_agrees_with_what_happens_meanwhile(before, during, disk) -> None:
    """After a walk the files are those on disk at its start, changed by what came since."""

    def apply(usage: Usage, model: set[int], actions) -> None:
        for action, n in actions:
            if action == "add":
                usage.add(b"%d" % n, 8)
                model.add(n)
            elif action == "renew":
                usage.renew([b"%d" % n])
            else:
                getattr(usage, action)(b"%d" % n)
                model.discard(n)

    usage = Usage()
    apply(usage, set(), before)
    usage.begin_walk()
    model = set(disk)
    apply(usage, model, during)
    # A file that was used during the walk, though it is not on disk, is kept until the next.
    renewed = {n for action, n in during if action == "renew"}
    files = [b"%d" % n for n in sorted(disk)]
    count = len(files)
    usage.finish_walk(files, array("q", [1] * count), array("q", range(count)), 0)
    present = {n for n in range(6) if usage.present([b"%d" % n])[0]}
    assert present - renewed == model - renewed
    assert present >= model
    assert usage.bytes == usage.files * UNIT_BYTES


@pytest.mark.asyncio
async def test_presence_asks_for_the_size(tmp_path: Path) -> None:
    """A file of another payload size is not this chunk."""
    arena = Arena(2, 528 * 1024)
    async with opened(tmp_path / "root", arena=arena) as bench:
        key, payload = chunk(1, 5, SIZES[5])
        slot = arena.slot(0, key, len(payload) - 4096, payload[:-4096])
        assert await bench.tier.store([slot], context()) == [Outcome.DONE]
        assert await bench.tier.exists([key], context()) == [Presence.ABSENT]
        slot = arena.slot(0, key, len(payload), payload)
        assert await bench.tier.store([slot], context()) == [Outcome.DONE]
        assert await bench.tier.exists([key], context()) == [Presence.PRESENT]
