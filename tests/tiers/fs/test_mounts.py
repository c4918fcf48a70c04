# SPDX-License-Identifier: Apache-2.0
"""The file tier on small filesystems of its own: really full, really read-only, really gone."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.types import Outcome
from tests.tiers.fs.util import FILE_BYTES, opened, used_bytes

pytestmark = [pytest.mark.asyncio, pytest.mark.needs("mount")]

SIZE_BYTES = 16 << 20


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)


@pytest.fixture(params=["tmpfs", pytest.param("ext4", marks=pytest.mark.needs("loop"))])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "tmpfs":
        mount("-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder))
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-N", "4096", str(image)], check=True, timeout=30)
        mount("-o", "loop", str(image), str(folder))
    yield folder
    subprocess.run(["umount", str(folder)], timeout=30)


@pytest.mark.fault("E13", "F14")
async def test_really_full(disk: Path) -> None:
    """An unlimited tier on a small disk: evicts or pauses, and always serves."""
    async with opened(disk / "root", upkeep={"retry_seconds": 0.1}) as bench:
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + 20
        # More than twice what the disk holds goes in.
        while outcomes.count(Outcome.DONE) * FILE_BYTES < 2 * SIZE_BYTES:
            assert time.monotonic() < deadline
            start = len(outcomes)
            outcomes += await bench.store(*range(start, start + 10))
            await asyncio.sleep(0.001)
        assert Outcome.FULL in outcomes
        assert set(outcomes) <= {Outcome.DONE, Outcome.FULL, Outcome.DROPPED}
        kept = [n for n, there in enumerate(await bench.there(*range(len(outcomes)))) if there]
        assert len(kept) > 50
        assert set(await bench.load(*kept[:64])) == {Outcome.DONE}
        deadline = time.monotonic() + 10
        while await bench.store(len(outcomes)) != [Outcome.DONE]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.mark.fault("E12")
async def test_free_space_guard(disk: Path) -> None:
    """The guard keeps the disk from getting full at all."""
    async with opened(disk / "root", min_free_bytes=4 << 20) as bench:
        outcomes = []
        for start in range(0, 400, 4):
            outcomes += await bench.store(*range(start, start + 4))
            space = os.statvfs(disk)
            assert space.f_bavail * space.f_frsize >= 3 << 20
        assert outcomes.count(Outcome.DONE) > 50
        # It was never met, only kept away from.
        samples = bench.samples()
        assert samples[("kvtier_fs_refused_total", "fs", "store", "free_space")] > 0
        assert ("kvtier_fs_errors_total", "fs", "store", "full") not in samples


@pytest.mark.fault("F14")
async def test_remounted_read_only(disk: Path) -> None:
    async with opened(disk / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        bench.tier._janitor.stop()  # its write of a moment ago would make the remount busy
        await bench.tier._janitor_ended.wait()
        mount("-o", "remount,ro", str(disk))
        try:
            assert await bench.store(2) == [Outcome.READ_ONLY]
            assert await bench.store(3) == [Outcome.DROPPED]
            assert await bench.load(1) == [Outcome.DONE]
            assert await bench.there(1, 2) == [True, False]
        finally:
            mount("-o", "remount,rw", str(disk))
        deadline = time.monotonic() + 10
        while await bench.store(2) != [Outcome.DONE]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.mark.fault("F14")
async def test_opened_read_only(disk: Path) -> None:
    """A directory that can only be read serves; one that has to be made is refused."""
    async with opened(disk / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
    mount("-o", "remount,ro", str(disk))
    try:
        async with opened(disk / "root") as bench:
            assert await bench.load(1) == [Outcome.DONE]
            assert await bench.store(2) == [Outcome.DROPPED]
        with pytest.raises(ConfigError, match="EROFS"):
            async with opened(disk / "other"):
                pass
    finally:
        mount("-o", "remount,rw", str(disk))


@pytest.mark.fault("F14")
async def test_unmounted_and_back(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written behind an unmounted disk; when it is back, everything is."""
    async with opened(disk / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        mount("--bind", str(disk), str(elsewhere))
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=30)
        try:
            bench.tier._janitor.wake()
            deadline = time.monotonic() + 10
            while ("kvtier_fs_writes_paused", "fs", "lost") not in bench.samples():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert await bench.store(2) == [Outcome.DROPPED]
            # The open descriptor still serves what was there.
            assert await bench.load(1) == [Outcome.DONE]
            assert not (disk / "root").exists()
            told = [text for text in caplog.messages if "is not mounted any more" in text]
            assert len(told) == 1
            assert str(bench.tier.path) in told[0]
        finally:
            mount("--bind", str(elsewhere), str(disk))
            subprocess.run(["umount", "--lazy", str(elsewhere)], check=True, timeout=30)
        bench.tier._janitor.wake()
        deadline = time.monotonic() + 10
        while await bench.store(2) != [Outcome.DONE]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert bench.file(2).exists()
        assert await bench.load(1, 2) == [Outcome.DONE] * 2
        assert used_bytes(disk) == 2 * FILE_BYTES
