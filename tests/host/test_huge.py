# SPDX-License-Identifier: Apache-2.0
"""Huge pages behind a region where the kernel gives them, plain ones where not, never a hole."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.host import files, huge, mapping, space
from kvtier.host.region import Region
from tests.host.child import geometry

MIB = 1 << 20
HUGE = huge.HUGE_BYTES
COLLAPSE = 25


@pytest.fixture
def file() -> Iterator[int]:
    """A file on /dev/shm without a name, empty, of 16 MiB."""
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, 16 * MIB)
    yield fd
    os.close(fd)


class Refusing:
    """The C library, with a kernel that refuses some advice from a certain call on."""

    def __init__(self, advice: int = COLLAPSE, granted: int = 0, code: int = errno.EINVAL) -> None:
        self._libc = files.libc()
        self._advice = advice
        self._granted = granted
        self._code = code
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libc, name)

    def madvise(self, address: int, size: int, advice: int) -> int:
        if advice != self._advice:
            return int(self._libc.madvise(address, size, advice))
        self.calls.append(size)
        if len(self.calls) <= self._granted:
            return 0
        ctypes.set_errno(self._code)
        return -1

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Refusing:
        monkeypatch.setattr(files, "libc", lambda: self)
        return self


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def reservations() -> int:
    """Ranges without access and without a file, as ``map_shared`` makes for a moment."""
    return sum(" ---p 00000000 00:00 0" in line for line in maps())


def shared_ranges() -> list[str]:
    return [line for line in maps() if line.split()[1].endswith("s")]


def huge_bytes(address: int) -> int:
    """Bytes of the mapping at `address` that this process sees through huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] == "ShmemPmdMapped:":
            return int(words[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


def seen_huge(fd: int, size: int) -> int:
    """Bytes of the file that are in huge pages."""
    address = huge.map_shared(fd, 0, size)
    try:
        ctypes.memmove(ctypes.create_string_buffer(size), address, size)  # fault all of it in
        return huge_bytes(address)
    finally:
        files.libc().munmap(address, size)


def unasked() -> int:
    """Bytes of a file of 16 MiB that are in huge pages unasked: none, as /dev/shm is mounted."""
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, 16 * MIB)
        return seen_huge(fd, 16 * MIB)
    finally:
        os.close(fd)


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.needs("huge-pages")
def test_a_whole_range_gets_huge_pages(file: int) -> None:
    assert huge.fill(file, 0, 16 * MIB) == 16 * MIB
    assert allocated(file) == 16 * MIB
    assert seen_huge(file, 16 * MIB) == 16 * MIB


@pytest.mark.needs("huge-pages")
def test_reserved_memory_is_huge_and_whole(file: int) -> None:
    """The ends that no huge page fits have plain pages."""
    space.reserve(file, 4096, 15 * MIB)
    assert allocated(file) == 15 * MIB
    assert seen_huge(file, 16 * MIB) == max(12 * MIB, unasked())


@pytest.mark.needs("huge-pages")
def test_a_region_is_mapped_through_them(region_dir: str) -> None:
    with Region.create("r", geometry(16 * MIB // 4096), {}, 1, directory=region_dir) as region:
        region.sign(0)
        region.populate(lambda _: None)
        if region._mapped.populator is not None:
            assert region._mapped.populator.join(20)
        mapped = region._mapped
        total = mapped.layout.total_bytes
        assert mapped.address % HUGE == 0
        region.payload[::4096]  # a view alone touches nothing
        for slot in range(16 * MIB // 4096):
            region.slot_view(slot, 4096)[:] = bytes([slot % 251]) * 4096
        assert huge_bytes(mapped.address) >= total - 2 * HUGE
        for slot in range(16 * MIB // 4096):
            assert bytes(region.slot_view(slot, 4096)) == bytes([slot % 251]) * 4096


@pytest.mark.parametrize("refused", [False, True])
def test_existing_bytes_stay(file: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if refused:
        Refusing().use(monkeypatch)
    draw = random.Random(1)
    expected = bytearray(16 * MIB)
    # Whole huge pages, single pages, parts of pages, and holes between them.
    for at, length in ((0, HUGE), (3 * MIB + 5, 10), (5 * MIB, 4096), (7 * MIB - 100, 5000)):
        expected[at : at + length] = draw.randbytes(length)
        os.pwrite(file, expected[at : at + length], at)
    space.reserve(file, 0, 16 * MIB)
    assert os.pread(file, 16 * MIB, 0) == expected
    assert allocated(file) == 16 * MIB
    space.reserve(file, 0, 16 * MIB)
    assert os.pread(file, 16 * MIB, 0) == expected


@pytest.mark.parametrize(
    ("offset", "length", "whole"),
    [
        (0, 0, 0),
        (0, 4096, 0),
        (0, HUGE - 1, 0),
        (0, HUGE, HUGE),
        (1, HUGE, 0),
        (4096, HUGE, 0),
        (4096, 2 * HUGE - 4096, HUGE),
        (4096, 2 * HUGE, HUGE),
        (HUGE - 4096, 2 * HUGE + 8192, 2 * HUGE),
        (3 * HUGE, HUGE + 5, HUGE),
        (5 * MIB + 17, 3 * MIB, HUGE),
    ],
)
def test_only_whole_pages_inside_a_range(
    file: int, offset: int, length: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Refusing(granted=100).use(monkeypatch)
    assert huge.fill(file, offset, length) == whole
    assert sum(kernel.calls) == whole
    space.reserve(file, offset, length)
    # Whole pages of 4 KiB that the range touches, and not one more.
    first, last = offset // 4096, -(-(offset + length) // 4096)
    assert allocated(file) == ((last - first) * 4096 if length else 0)
    assert os.fstat(file).st_size == 16 * MIB


def test_one_refusal_ends_the_asking(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "PIECE_BYTES", 4 * MIB)
    kernel = Refusing(granted=1).use(monkeypatch)
    assert huge.fill(file, 0, 15 * MIB) == 4 * MIB
    assert kernel.calls == [4 * MIB] * 2
    # Pieces are as large as they may be, the last one smaller.
    kernel = Refusing(granted=100).use(monkeypatch)
    assert huge.fill(file, HUGE, 13 * MIB) == 12 * MIB
    assert kernel.calls == [4 * MIB] * 3


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EBUSY])
def test_what_is_refused_has_plain_pages(
    file: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Refusing(code=code).use(monkeypatch)
    space.reserve(file, 0, 16 * MIB)  # once, so that what Python itself maps is there
    before = maps()
    descriptors = os.listdir("/proc/self/fd")
    for _ in range(20):
        space.reserve(file, 0, 16 * MIB)
    assert len(maps()) == len(before)
    assert os.listdir("/proc/self/fd") == descriptors
    assert len(kernel.calls) == 21
    assert allocated(file) == 16 * MIB
    assert seen_huge(file, 16 * MIB) == unasked()


def test_a_file_that_cannot_be_mapped_is_reserved_all_the_same(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> int:
        raise OSError(errno.ENOMEM, "no address space")

    monkeypatch.setattr(huge, "map_shared", refuse)
    assert huge.fill(file, 0, 16 * MIB) == 0
    space.reserve(file, 0, 16 * MIB)
    assert allocated(file) == 16 * MIB


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 16 * MIB),
        (0, 4096),
        (0, 100),
        (4096, 4096),
        (4096, HUGE),
        (HUGE, HUGE),
        (HUGE - 4096, 8192),
        (3 * MIB, 5 * MIB + 1),
        (5 * MIB + 4096, 4097),
    ],
)
def test_addresses_fit_the_huge_pages_of_the_file(file: int, offset: int, size: int) -> None:
    os.pwrite(file, os.urandom(16 * MIB), 0)
    expected = os.pread(file, size, offset)
    none = reservations()
    held = []
    for _ in range(5):
        address = huge.map_shared(file, offset, size)
        held.append(address)
        assert address % HUGE == offset % HUGE
        assert ctypes.string_at(address, size) == expected
    inode = str(os.fstat(file).st_ino)
    mine = [line for line in shared_ranges() if line.split()[4] == inode]
    pages = -(-size // 4096) * 4096
    ranges = sorted(tuple(int(x, 16) for x in line.split()[0].split("-")) for line in mine)
    # Neighbours may be shown as one, but not when their offsets differ.
    assert sum(end - start for start, end in ranges) == 5 * pages
    assert reservations() == none
    for address in held:
        files.libc().munmap(address, size)
    assert not [line for line in shared_ranges() if line.split()[4] == inode]
    assert reservations() == none


@pytest.mark.parametrize("how", ["read only", "offset", "closed"])
def test_a_mapping_that_fails_leaves_no_reservation(file: int, how: str) -> None:
    reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    fd = {"read only": reader, "offset": file, "closed": 10_000}[how]
    offset = 100 if how == "offset" else 0
    code = {"read only": errno.EACCES, "offset": errno.EINVAL, "closed": errno.EBADF}[how]
    with pytest.raises(OSError, match="cannot map 8388608 bytes") as caught:
        huge.map_shared(fd, offset, 8 * MIB)
    assert caught.value.errno == code
    before = len(maps())
    for _ in range(5):
        with pytest.raises(OSError, match="cannot map"):
            huge.map_shared(fd, offset, 8 * MIB)
    assert len(maps()) == before
    os.close(reader)


def test_no_address_space(file: int) -> None:
    before = len(maps())
    with pytest.raises(OSError, match="cannot map") as caught:
        huge.map_shared(file, 0, 1 << 50)
    assert caught.value.errno == errno.ENOMEM
    assert len(maps()) == before


def test_a_region_that_may_be_forked_is_not_mapped(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Refusing(advice=mmap.MADV_DONTFORK).use(monkeypatch)
    with pytest.raises(OSError, match="MADV_DONTFORK"):
        mapping._map(file, 16 * MIB)
    before = len(maps())
    with pytest.raises(OSError, match="MADV_DONTFORK"):
        mapping._map(file, 16 * MIB)
    assert len(maps()) == before
    assert kernel.calls == [16 * MIB] * 2


@pytest.mark.fault("E01")
@pytest.mark.needs("mount")
@pytest.mark.parametrize("lacking", [4096, MIB, 8 * MIB, 16 * MIB - 4096])
def test_a_tmpfs_that_is_too_full(small_tmpfs: Callable[[int], str], lacking: int) -> None:
    """An error of the call, and what was written before is there: never a SIGBUS."""
    folder = small_tmpfs(16 * MIB - lacking)
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, 16 * MIB)
        os.pwrite(fd, b"here", 0)
        before = len(maps())
        for _ in range(3):
            with pytest.raises(OSError, match="No space left") as caught:
                space.reserve(fd, 0, 16 * MIB)
            assert caught.value.errno == errno.ENOSPC
        assert os.pread(fd, 4, 0) == b"here"
        assert len(maps()) <= before + 1
    finally:
        os.close(fd)


@pytest.mark.needs("mount")
@pytest.mark.parametrize("spare", [0, 4096, HUGE])
def test_a_tmpfs_that_is_just_large_enough(small_tmpfs: Callable[[int], str], spare: int) -> None:
    """Collapsing must not need more than there is, nor leave a page out."""
    folder = small_tmpfs(16 * MIB + spare)
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, 16 * MIB)
        for at in range(0, 16 * MIB, 3 * MIB):
            os.pwrite(fd, b"here", at)
        space.reserve(fd, 0, 16 * MIB)
        assert allocated(fd) == 16 * MIB
        address = huge.map_shared(fd, 0, 16 * MIB)
        assert all(
            ctypes.string_at(address + at, 4) == b"here" for at in range(0, 16 * MIB, 3 * MIB)
        )
        ctypes.memset(address, 7, 16 * MIB)
        files.libc().munmap(address, 16 * MIB)
    finally:
        os.close(fd)
