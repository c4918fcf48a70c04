# SPDX-License-Identifier: Apache-2.0
"""What the file tier makes of every error that the design names, injected into its system calls."""

import asyncio
import errno
import fcntl
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier._core import fileio
from kvtier.errors import ConfigError, TierLostError
from kvtier.testing.contract import SIZES, Arena, chunk, context
from kvtier.tiers.fs import FsOptions, FsTier
from kvtier.tiers.fs import tier as module
from kvtier.types import Outcome, Presence
from tests.tiers.fs.util import GROUP, SIZE, environment, opened, temporary_files

pytestmark = pytest.mark.asyncio

STORE_ERRORS = [
    ("open", errno.EACCES, Outcome.DENIED),
    ("open", errno.EMFILE, Outcome.NO_HANDLES),
    ("open", errno.ENFILE, Outcome.NO_HANDLES),
    ("open", errno.EROFS, Outcome.READ_ONLY),
    ("open", errno.ENOSPC, Outcome.FULL),
    ("write", errno.ENOSPC, Outcome.FULL),
    ("write", errno.EDQUOT, Outcome.FULL),
    ("write", errno.EIO, Outcome.IO),
    ("write", errno.ESTALE, Outcome.STALE),
    ("close", errno.EDQUOT, Outcome.FULL),
    ("close", errno.EIO, Outcome.IO),
    ("rename", errno.EACCES, Outcome.DENIED),
    ("rename", errno.EIO, Outcome.IO),
    ("rename", errno.ESTALE, Outcome.STALE),
    ("mkdir", errno.ENOSPC, Outcome.FULL),
    ("stat", errno.EIO, Outcome.IO),
    ("stat", errno.ESTALE, Outcome.STALE),
]


@pytest.mark.fault("F04", "E12")
@pytest.mark.parametrize(("operation", "number", "expected"), STORE_ERRORS)
async def test_store_errors(tmp_path: Path, operation: str, number: int, expected: Outcome) -> None:
    """Each has its outcome and metric, leaves no file, and a later store works."""
    async with opened(tmp_path / "root") as bench:
        bench.faults.set(operation, number)
        assert await bench.store(1) == [expected]
        bench.faults.clear()
        assert not await_files(tmp_path)
        assert (
            bench.samples()[("kvtier_fs_errors_total", "fs", "store", expected.name.lower())] == 1
        )
        await until(lambda: not bench.tier._write_gate.closed)
        assert await bench.store(1) == [Outcome.DONE]
        assert await bench.load(1) == [Outcome.DONE]


LOAD_ERRORS = [
    ("open", errno.EACCES, Outcome.DENIED),
    ("open", errno.EMFILE, Outcome.NO_HANDLES),
    ("open", errno.ESTALE, Outcome.STALE),
    ("open", errno.EIO, Outcome.IO),
    ("stat", errno.ESTALE, Outcome.STALE),
    ("read", errno.EIO, Outcome.IO),
    ("read", errno.ESTALE, Outcome.STALE),
    ("read", errno.ETIMEDOUT, Outcome.TIMEOUT),
]


@pytest.mark.parametrize(("operation", "number", "expected"), LOAD_ERRORS)
async def test_load_errors_keep_the_file(
    tmp_path: Path, operation: str, number: int, expected: Outcome
) -> None:
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        bench.faults.set(operation, number)
        assert await bench.load(1) == [expected]
        assert expected.failed
        bench.faults.clear()
        assert bench.file(1).exists()
        await until(lambda: not bench.tier._read_gate.closed)
        assert await bench.load(1) == [Outcome.DONE]


async def test_one_bad_file_does_not_fail_its_batch(tmp_path: Path) -> None:
    async with opened(tmp_path / "root", read_threads=1, write_threads=1) as bench:
        bench.faults.set("write", errno.EIO, after=2, times=1)
        assert await bench.store(1, 2, 3, 4) == [
            Outcome.DONE,
            Outcome.DONE,
            Outcome.IO,
            Outcome.DONE,
        ]
        bench.faults.clear()
        bench.faults.set("read", errno.EIO, after=1, times=1)
        assert await bench.load(1, 2, 3, 4) == [
            Outcome.DONE,
            Outcome.IO,
            Outcome.MISSING,
            Outcome.DONE,
        ]


async def test_failed_lookup_is_no_absence(tmp_path: Path) -> None:
    """When nothing could be asked, that is an error; when a part could, the rest is a miss."""
    async with opened(tmp_path / "root", read_threads=1) as bench:
        assert await bench.store(1, 2) == [Outcome.DONE] * 2
        bench.faults.set("stat", errno.EIO)
        with pytest.raises(TierLostError, match="IO"):
            await bench.there(1, 2)
        bench.faults.set("stat", errno.EIO, times=1)
        assert await bench.there(1, 2) == [False, True]
        assert bench.samples()[("kvtier_fs_errors_total", "fs", "exists", "io")] == 3


@pytest.mark.fault("C29")
@pytest.mark.parametrize("limit", [1, 512, 4096, 5000, 65536])
@pytest.mark.parametrize("direct", ["auto", "off"])
async def test_partial_transfers_are_completed(tmp_path: Path, limit: int, direct: str) -> None:
    """Calls that move less than asked are no error. Under O_DIRECT an odd rest goes without it."""
    async with opened(tmp_path / "root", direct=direct) as bench:
        bench.faults.set("write", limit=limit, times=2)
        bench.faults.set("read", limit=limit, times=2)
        assert await bench.store(1) == [Outcome.DONE]
        assert await bench.load(1) == [Outcome.DONE]
        bench.faults.clear()
        assert await bench.load(1) == [Outcome.DONE]


@pytest.mark.fault("C29")
async def test_write_that_is_lost_silently(tmp_path: Path) -> None:
    """The file's own size decides, not what the call claimed."""
    async with opened(tmp_path / "root") as bench:
        bench.faults.set("write", lost=1)
        assert await bench.store(1) == [Outcome.IO]
        bench.faults.clear()
        assert await bench.there(1) == [False]
        assert not temporary_files(tmp_path)


@pytest.mark.fault("C29", "F15")
@pytest.mark.parametrize("kept", [0, 4096, SIZE])
async def test_young_short_file_is_a_miss_and_stays(tmp_path: Path, kept: int) -> None:
    """Some filesystems show a file of another host before its bytes."""
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        whole = bench.file(1).read_bytes()
        os.truncate(bench.file(1), kept)
        assert await bench.load(1) == [Outcome.MISSING]
        assert await bench.there(1) == [False]
        assert bench.file(1).stat().st_size == kept
        bench.file(1).write_bytes(whole)
        assert await bench.there(1) == [True]
        assert await bench.load(1) == [Outcome.DONE]
        # A store takes its place at once.
        os.truncate(bench.file(1), kept)
        assert await bench.store(1) == [Outcome.DONE]
        assert await bench.load(1) == [Outcome.DONE]


@pytest.mark.fault("F09")
async def test_truncated_while_loading(tmp_path: Path) -> None:
    """The file shrinks between its size and its bytes: a miss, and no signal."""
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        gate, release = os.pipe()
        try:
            bench.faults.block("read", gate)
            before = bench.faults.calls("read")
            task = asyncio.create_task(bench.load(1), name="load")
            await until(lambda: bench.faults.calls("read") > before)
            os.truncate(bench.file(1), 4096)
            os.close(release)
            assert await task == [Outcome.MISSING]
        finally:
            bench.faults.clear()
            os.close(gate)
        assert bench.file(1).exists()


@pytest.mark.fault("C26")
async def test_corruption_is_set_aside_and_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path / "root", upkeep={"max_quarantined": 2}) as bench:
        numbers = range(5)
        assert set(await bench.store(*numbers)) == {Outcome.DONE}
        for number in numbers:
            raw = bytearray(bench.file(number).read_bytes())
            raw[number * 1000] ^= 0x10
            bench.file(number).write_bytes(raw)
        assert set(await bench.load(*numbers)) == {Outcome.CORRUPT}
        assert bench.samples()[("kvtier_quarantined_chunks_total", "fs")] == 5
        assert await bench.there(*numbers) == [False] * 5
        assert len(list(tmp_path.rglob("*.kv.bad"))) == 5
        bench.tier._janitor.walk()
        await until(lambda: len(list(tmp_path.rglob("*.kv.bad"))) == 2)
        assert set(await bench.store(*numbers)) == {Outcome.DONE}


@pytest.mark.fault("C26")
async def test_checksum_is_what_sees_it(tmp_path: Path) -> None:
    """A flipped payload bit with its checksum made to match is served: nothing else would see."""
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        raw = bytearray(bench.file(1).read_bytes())
        raw[7] ^= 1
        trailer = raw[SIZE:]
        trailer[12:16] = fileio.crc32c(bytes(raw[:SIZE])).to_bytes(4, "little")
        trailer[4092:] = fileio.crc32c(bytes(trailer[:4092])).to_bytes(4, "little")
        bench.file(1).write_bytes(bytes(raw[:SIZE]) + bytes(trailer))
        slot = bench.arena.slot(0, chunk(1, GROUP, SIZE)[0], SIZE)
        assert await bench.tier.load([slot], context()) == [Outcome.DONE]
        assert bytes(slot.view) == bytes(raw[:SIZE])


async def test_unknown_version_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        raw = bytearray(bench.file(1).read_bytes())
        trailer = raw[SIZE:]
        trailer[8:12] = (2).to_bytes(4, "little")
        trailer[4092:] = fileio.crc32c(bytes(trailer[:4092])).to_bytes(4, "little")
        bench.file(1).write_bytes(bytes(raw[:SIZE]) + bytes(trailer))
        assert await bench.load(1) == [Outcome.MISSING]
        assert bench.file(1).exists()


@pytest.mark.fault("F02")
@pytest.mark.needs("direct")
@pytest.mark.parametrize("shift", [1, 8, 512, 4095])
@pytest.mark.parametrize("group", range(len(SIZES)))
async def test_odd_addresses_and_lengths(tmp_path: Path, shift: int, group: int) -> None:
    arena = Arena(2, 528 * 1024)
    async with opened(tmp_path / "root", arena=arena) as bench:
        assert bench.tier.direct
        key, payload = chunk(1, group, SIZES[group])
        source = arena.slot(0, key, len(payload), payload, shift=shift)
        assert await bench.tier.store([source], context()) == [Outcome.DONE]
        target = arena.slot(1, key, len(payload), shift=4096 - shift)
        assert await bench.tier.load([target], context()) == [Outcome.DONE]
        assert bytes(target.view) == payload
        # The bounce buffer did it: no call fell back to the page cache.
        assert bench.tier._files.fallbacks == 0


@pytest.mark.fault("F03")
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
async def test_no_fallocate(tmp_path: Path, number: int) -> None:
    async with opened(tmp_path / "root", preallocate=True) as bench:
        bench.faults.set("fallocate", number)
        assert await bench.store(1) == [Outcome.DONE]
        assert bench.faults.calls("fallocate") == 1
        assert await bench.load(1) == [Outcome.DONE]
        bench.faults.set("fallocate", errno.ENOSPC)
        assert await bench.store(2) == [Outcome.FULL]


@pytest.mark.fault("U04")
@pytest.mark.parametrize("direct", ["auto", "off"])
async def test_effective_mode(
    tmp_path: Path, direct: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log, the gauge and the descriptors' own flags say the same."""
    caplog.set_level("INFO", logger="kvtier")
    async with opened(tmp_path / "root", direct=direct) as bench:
        key, payload = chunk(1, GROUP, SIZE)
        slot = bench.arena.slot(0, key, SIZE, payload)
        for operation in ("store", "load"):
            batch = fileio.Batch([key], [slot.address], [SIZE])
            getattr(bench.tier._files, operation)(batch)
            assert batch.status(0) == 0
            assert bool(batch.flags(0) & os.O_DIRECT) == bench.tier.direct
        assert bench.tier.direct or direct == "off" or not _direct_works(tmp_path)
        assert bench.samples()[("kvtier_fs_direct", "fs")] == bench.tier.direct
        mode = "direct" if bench.tier.direct else "buffered"
        assert f"is ready, {mode} I/O" in caplog.text


@pytest.mark.needs("direct")
async def test_direct_refused_late(tmp_path: Path) -> None:
    """A filesystem that passes the trial and then refuses a call goes on without O_DIRECT."""
    async with opened(tmp_path / "root") as bench:
        assert bench.tier.direct
        bench.faults.set("write", errno.EINVAL, times=1)
        assert await bench.store(1) == [Outcome.DONE]
        assert bench.samples()[("kvtier_fs_direct_fallbacks_total", "fs")] == 1
        bench.faults.set("open", errno.EINVAL, times=1)
        assert await bench.load(1) == [Outcome.DONE]


def _direct_works(folder: Path) -> bool:
    try:
        fd = os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    finally:
        os.close(fd)


@pytest.mark.fault("F14")
async def test_read_only_stops_writes_and_recovers(tmp_path: Path) -> None:
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        bench.faults.set("open", errno.EROFS, times=1)
        assert await bench.store(2) == [Outcome.READ_ONLY]
        calls = bench.faults.calls("write")
        assert await bench.store(3) == [Outcome.DROPPED]
        assert bench.faults.calls("write") == calls
        assert await bench.load(1) == [Outcome.DONE]
        assert bench.samples()[("kvtier_fs_writes_paused", "fs", "read_only")] == 1
        await until(lambda: not bench.tier._write_gate.closed)
        assert await bench.store(2) == [Outcome.DONE]
        assert bench.samples()[("kvtier_fs_writes_paused", "fs", "read_only")] == 0
        assert await bench.store(3) == [Outcome.DONE]


@pytest.mark.fault("E12", "E13")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_full_evicts_and_goes_on(tmp_path: Path, number: int) -> None:
    """A quota is full although statvfs shows space: old files go, writes pause, reads go on."""
    async with opened(tmp_path / "root", upkeep={"retry_seconds": 60.0}) as bench:
        assert set(await bench.store(*range(20))) == {Outcome.DONE}
        bench.faults.set("write", number, times=1)
        assert await bench.store(50) == [Outcome.FULL]
        await until(lambda: not bench.file(0).exists())
        # The room that was made ends the pause, long before retry_seconds.
        await until(lambda: not bench.tier._write_gate.closed)
        assert await bench.store(50) == [Outcome.DONE]
        assert await bench.load(50) == [Outcome.DONE]
        removed = [event.key for event in bench.events]
        assert removed[0] == chunk(0, GROUP, SIZE)[0]
        assert {event.operation for event in bench.events} == {"removed"}


@pytest.mark.fault("F04", "U09")
async def test_open_errors_name_path_and_errno(tmp_path: Path) -> None:
    started = time.monotonic()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"file.*\(ENOTDIR\)"):
        async with opened(blocked / "root"):
            pass
    with pytest.raises(ConfigError, match=r"\(ENAMETOOLONG\)"):
        async with opened(tmp_path / ("x" * 300)):
            pass
    assert time.monotonic() - started < 5
    async with opened(tmp_path / "made" / "on" / "demand") as bench:
        assert await bench.store(1) == [Outcome.DONE]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that other users can search, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.fault("F04")
@pytest.mark.needs("root")
async def test_open_denied(folder: Path) -> None:
    """In a process of another user, since the administrator may do everything."""
    locked = folder / "locked"
    locked.mkdir(mode=0o700)
    text = await as_nobody(locked / "root")
    assert "ConfigError" in text
    assert "EACCES" in text
    assert str(locked) in text


async def as_nobody(root: Path) -> str:
    """Output of opening a tier, storing and loading as the user nobody."""
    script = (
        "import asyncio, os, sys, pathlib\n"
        "import kvtier.tiers.fs, tests.tiers.fs.util as util, random, mmap, kvtier.obs.metrics\n"
        "import asyncio.runners, numpy, kvtier._core.layout\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "async def main():\n"
        "    async with util.opened(pathlib.Path(sys.argv[1])) as bench:\n"
        "        print(*[o.name for o in await bench.store(1) + await bench.load(1)])\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except Exception as exc:\n"
        "    print(type(exc).__name__, exc)\n"
    )

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(root), stdout=-1, stderr=-1
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    return out.decode() + errors.decode()


@pytest.mark.fault("F10")
@pytest.mark.needs("root")
async def test_directory_of_another_user(folder: Path) -> None:
    """By default nobody else gets in, and is told why; with access: all both work."""
    async with opened(folder / "own") as bench:
        assert await bench.store(1) == [Outcome.DONE]
    text = await as_nobody(folder / "own")
    assert "ConfigError" in text
    assert "EACCES" in text
    old = os.umask(0)
    try:
        async with opened(folder / "shared", access="all") as bench:
            assert await bench.store(1) == [Outcome.DONE]
            assert await as_nobody(folder / "shared") == "EXISTS DONE\n"
    finally:
        os.umask(old)


@pytest.mark.fault("U09")
async def test_open_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that does not answer costs the trial's time, not the service, and its threads
    once, however often it is tried; when it answers again it is opened."""
    release = threading.Event()
    calls = 0

    def hang(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        release.wait(30)
        raise OSError(errno.EIO, "released")

    monkeypatch.setattr(module, "prepare", hang)
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.2)
    tier = FsTier("fs", FsOptions(root_dir=str(tmp_path / "root")), environment())
    try:
        with pytest.raises(TierLostError):
            await tier.open()
        with pytest.raises(TierLostError, match="hangs since an earlier attempt"):
            await tier.open()
        assert calls == 1
    finally:
        release.set()
    monkeypatch.undo()
    await until(lambda: not any(pool.alive for pool in tier._left))
    await tier.open()
    await tier.walked()
    assert await tier.exists([chunk(1, GROUP, SIZE)[0]], context()) == [Presence.ABSENT]
    await tier.aclose(time.monotonic() + 5)


@pytest.mark.fault("H27")
async def test_stalled_writes_do_not_slow_reads(tmp_path: Path) -> None:
    async with opened(tmp_path / "root") as bench, opened(tmp_path / "other") as other:
        assert await bench.store(1) == [Outcome.DONE]
        gate, release = os.pipe()
        try:
            bench.faults.block("write", gate)
            tasks = [
                asyncio.create_task(bench.store(n, seconds=0.3), name=f"s{n}") for n in range(2, 10)
            ]
            await until(lambda: bench.faults.calls("write") >= 5)
            assert await asyncio.wait_for(bench.load(1), 5) == [Outcome.DONE]
            assert await asyncio.wait_for(bench.there(1), 5) == [True]
            assert await asyncio.wait_for(other.store(1), 5) == [Outcome.DONE]
            # Their deadline passed, but a system call holds the slots: they do not return.
            await until(lambda: bench.tier._writes.stuck == 4)
            held = [task for task in tasks if not task.done()]
            assert len(held) == 4
            # Those that never got a thread were told in time.
            assert [task.result() for task in tasks if task.done()] == [[Outcome.TIMEOUT]] * 4
            # With every thread stuck, new work is refused at once.
            assert await asyncio.wait_for(bench.store(20), 1) == [Outcome.DROPPED]
            assert bench.samples()[("kvtier_fs_refused_total", "fs", "store", "stuck")] == 1
            await until(lambda: ("kvtier_fs_stuck_threads", "fs", "write") in bench.samples())
        finally:
            bench.faults.block("write", -1)
            os.close(release)
        # The call ended well after all: its chunk is stored and says so.
        assert [await task for task in held] == [[Outcome.DONE]] * 4
        os.close(gate)
        assert bench.tier._writes.stuck == 0
        assert await bench.store(20) == [Outcome.DONE]


@pytest.mark.fault("H27")
async def test_stalled_reads_do_not_slow_stores(tmp_path: Path) -> None:
    """Every reader hangs in a read; chunks are stored meanwhile, here and in another directory."""
    async with opened(tmp_path / "root") as bench, opened(tmp_path / "other") as other:
        assert await bench.store(*range(8)) == [Outcome.DONE] * 8
        gate, release = os.pipe()
        try:
            bench.faults.block("read", gate)
            # The slots of the stores below are others: a hanging read still owns its own.
            slots = [bench.arena.slot(20 + n, chunk(n, GROUP, SIZE)[0], SIZE) for n in range(8)]
            tasks = [
                asyncio.create_task(bench.tier.load([slot], context(0.3)), name=f"l{n}")
                for n, slot in enumerate(slots)
            ]
            await until(lambda: bench.tier._reads.stuck == bench.tier._reads.size == 4)
            for n in range(100, 110):
                assert await asyncio.wait_for(bench.store(n), 5) == [Outcome.DONE]
            assert await asyncio.wait_for(other.store(1), 5) == [Outcome.DONE]
            assert bench.tier._reads.stuck == 4
            assert len([task for task in tasks if not task.done()]) == 4
            assert bench.tier._writes.stuck == 0
        finally:
            bench.faults.block("read", -1)
            os.close(release)
            ends = await asyncio.gather(*tasks)
        os.close(gate)
        assert sorted(end.name for (end,) in ends) == ["DONE"] * 4 + ["TIMEOUT"] * 4
        assert await bench.load(*range(8), *range(100, 110)) == [Outcome.DONE] * 18


@pytest.mark.fault("H27")
async def test_stalled_reads_fail_the_tier_not_the_service(tmp_path: Path) -> None:
    async with opened(tmp_path / "root", read_threads=2) as bench:
        assert await bench.store(1, 2, 3) == [Outcome.DONE] * 3
        gate, release = os.pipe()
        try:
            bench.faults.block("open", gate)
            # Each into a slot of its own: both end at the same time.
            tasks = [
                asyncio.create_task(bench.load(n, seconds=0.1, first=n), name=f"l{n}")
                for n in (1, 2)
            ]
            await until(lambda: bench.tier._reads.stuck == 2)
            assert await asyncio.wait_for(bench.load(3), 1) == [Outcome.TIMEOUT]
            with pytest.raises(TierLostError, match="hang"):
                await asyncio.wait_for(bench.there(3), 1)
        finally:
            bench.faults.block("open", -1)
            os.close(release)
        await asyncio.gather(*tasks)
        os.close(gate)
        assert await bench.load(3) == [Outcome.DONE]


async def test_a_capacity_that_holds_no_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"capacity_bytes: {SIZE} holds no chunk, .* at least"):
        async with opened(tmp_path / "root", capacity_bytes=SIZE):
            raise AssertionError("it opened")


@pytest.mark.fault("H27")
async def test_close_with_a_hanging_call(tmp_path: Path) -> None:
    """``aclose`` says that a thread is left behind, in bounded time."""
    gate, release = os.pipe()
    try:
        async with opened(tmp_path / "root", write_threads=1) as bench:
            bench.faults.block("write", gate)
            task = asyncio.create_task(bench.store(1), name="store")
            await until(lambda: bench.faults.calls("write") > 0)
            started = time.monotonic()
            with pytest.raises(TierLostError, match="1 threads of kvtier-fs-write hang"):
                await bench.tier.aclose(time.monotonic() + 0.1)
            assert time.monotonic() - started < 5
            assert not task.done()
            bench.faults.block("write", -1)
            os.close(release)
            assert await task == [Outcome.DONE]
    finally:
        os.close(gate)


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for another thread's effect."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


def await_files(folder: Path) -> list[str]:
    """Chunk and temporary files below a folder."""
    return [*map(str, folder.rglob("*.kv")), *temporary_files(folder)]
