# SPDX-License-Identifier: Apache-2.0
"""The tier's directory: its file system is named, memory is refused, cached pages go."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from kvtier.bench import tierdir
from kvtier.bench.inject import flip_file
from kvtier.bench.yardstick import disk_speed, memcpy_speed
from kvtier.errors import ConfigError
from tests import parts

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:20 / {tmp} rw - tmpfs tmpfs rw
23 22 0:21 / {tmp}/a\\040disk rw shared:1 - xfs /dev/vdb rw
24 21 0:22 / {tmp}/over rw - ext4 /dev/vdc rw
25 21 0:23 / {tmp}/over rw - tmpfs tmpfs rw
garbage
"""


def test_file_system_by_the_longest_mount(tmp_path: Path) -> None:
    mounts = MOUNTS.format(tmp=tmp_path)
    for name, kind in {"": "tmpfs", "a disk": "xfs", "a disk/deep": "xfs", "over": "tmpfs"}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        assert tierdir.file_system(tmp_path / name, mounts) == kind
    # A name that only begins like a mount is not below it.
    (tmp_path / "overly").mkdir()
    assert tierdir.file_system(tmp_path / "overly", mounts) == "tmpfs"
    assert tierdir.file_system(Path("/"), mounts) == "ext4"


def test_shared_memory_is_refused_unless_allowed() -> None:
    with pytest.raises(ConfigError, match=r"tmpfs, which is memory.*--tier-dir.*--allow-tmpfs"):
        tierdir.choose_directory(Path("/dev/shm"), allow_tmpfs=False)
    assert tierdir.choose_directory(Path("/dev/shm"), allow_tmpfs=True) == (
        Path("/dev/shm"),
        "tmpfs",
    )


def test_next_candidate_when_the_first_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(path: Path, mountinfo: str | None = None) -> str:
        return "tmpfs" if path == tmp_path else "ext4"

    monkeypatch.setattr(tierdir, "file_system", kind)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tierdir.choose_directory(None, allow_tmpfs=False)[0] == Path("/var/tmp")


def test_wrong_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        tierdir.choose_directory(tmp_path / "none", allow_tmpfs=False)
    with pytest.raises(ConfigError, match="MiB free and the run needs about"):
        tierdir.check_space(tmp_path, 1 << 60)


@pytest.mark.needs("disk")
def test_cached_pages_are_seen_and_dropped() -> None:
    place = parts.disk_folder()
    assert place is not None
    directory = tierdir.TierDirectory(place)
    directory.open()
    try:
        path = directory.path / "a.kv"
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        directory.sweep()
        first = directory.counters.resident_pages
        assert first >= 256  # the guard sees a cached file ...
        for _ in range(3):
            directory.sweep()
        assert directory.counters.resident_pages < 2 * first  # ... and it is cached no longer
        assert directory.counters.files == 1
        assert 0 < directory.counters.resident_ratio < 1
    finally:
        directory.close()
    assert not directory.path.exists()


def test_damage_does_not_wait_for_the_sweeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A point of half a second read all its files back before the first one was damaged."""
    monkeypatch.setattr(tierdir, "SWEEP_SECONDS", 3600.0)
    damaged = threading.Event()

    def damage(path: Path, number: int) -> bool:
        damaged.set()
        return True

    directory = tierdir.TierDirectory(tmp_path, damage)
    directory.open()
    try:
        (directory.path / "chunk.kv").write_bytes(b"payload")
        assert damaged.wait(10.0)
    finally:
        directory.close()


def test_each_new_chunk_is_offered_for_damage_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tierdir, "DAMAGE_SECONDS", 3600.0)  # the sweeps are the test's own
    offered: list[tuple[str, int]] = []

    def damage(path: Path, number: int) -> bool:
        offered.append((path.name, number))
        flip_file(path)
        return True

    directory = tierdir.TierDirectory(tmp_path, damage)
    directory.open()
    try:
        path = directory.path / "a.kv"
        path.write_bytes(bytes(4096))
        (directory.path / "a.tmp").write_bytes(bytes(4096))
        directory.sweep()
        directory.sweep()
    finally:
        written = path.read_bytes()
        directory.close()
    assert offered == [("a.kv", 1)]
    assert sum(byte.bit_count() for byte in written) == 1
    assert directory.counters.damaged_files == 1


def test_yardsticks_measure_and_leave_nothing(tmp_path: Path) -> None:
    write, read, _direct = disk_speed(tmp_path, 64 << 10, 1 << 20)
    assert write > 0
    assert read > 0
    assert memcpy_speed(1 << 20) > 0
    assert list(tmp_path.iterdir()) == []
