# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best: one memcpy, and raw direct I/O in the tier's directory.

Measured in the same run, because absolute figures of a shared machine say nothing by themselves.
Owns nothing; leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from kvtier.host.huge import HUGE_BYTES

DEPTH = 4


class Yardsticks(msgspec.Struct, frozen=True):
    """Bytes a second."""

    memcpy: float
    disk_write: float | None = None
    disk_read: float | None = None
    direct: bool = False
    """Whether the file was read and written past the page cache."""


def memcpy_speed(size: int = 64 << 20) -> float:
    """Best of three copies of `size` bytes between touched buffers."""
    source = np.ones(size, dtype=np.uint8)
    target = np.zeros(size, dtype=np.uint8)
    target.fill(1)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begin)
    return size / best


def disk_speed(directory: Path, piece: int, size: int = 96 << 20) -> tuple[float, float, bool]:
    """(write, read, direct) of one file in pieces of `piece` bytes, four at a time.

    In memory like the region's: into scattered pages of 4 KiB a disk reads at half the speed, and
    kvtier would seem to be faster than the disk.
    """
    pieces = max(DEPTH, size // piece)
    fd, name = tempfile.mkstemp(prefix="kvtier-bench-raw-", dir=directory)
    os.close(fd)
    direct = True
    try:
        try:
            fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            direct = False
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(-1, DEPTH * piece + HUGE_BYTES, flags=mmap.MAP_PRIVATE)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            view = memoryview(memory)
            buffers = [view[lane * piece : (lane + 1) * piece] for lane in range(DEPTH)]
            for buffer in buffers:
                buffer[:] = os.urandom(4096) * (piece // 4096)

            def write(lane: int) -> None:
                for i in range(lane, pieces, DEPTH):
                    os.pwritev(fd, [buffers[lane]], i * piece)

            def read(lane: int) -> None:
                for i in range(lane, pieces, DEPTH):
                    os.preadv(fd, [buffers[lane]], i * piece)

            with ThreadPoolExecutor(DEPTH) as pool:
                begin = time.perf_counter()
                list(pool.map(write, range(DEPTH)))
                os.fdatasync(fd)
                written = time.perf_counter() - begin
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                list(pool.map(read, range(DEPTH)))
                taken = time.perf_counter() - begin
        finally:
            os.close(fd)
    finally:
        os.unlink(name)
    return pieces * piece / written, pieces * piece / taken, direct
