# SPDX-License-Identifier: Apache-2.0
"""Huge pages for a region: where its file is mapped, and what memory stands behind it.

Owns nothing that outlives a call. Any thread. A disk reads into a huge page with one segment
instead of 512, and a copy of it misses the TLB once. tmpfs gives huge pages only where its mount
asks for them, which /dev/shm does not; MADV_COLLAPSE (Linux 6.1) asks for a range. All of it is a
wish: what is not granted has pages of 4 KiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

from kvtier.host import files

HUGE_BYTES = 2 << 20
PIECE_BYTES = 64 << 20
"""Asked for with one call; where memory is too fragmented, only so much is tried in vain."""

_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PAGE_BYTES = 4096


def map_shared(fd: int, offset: int, size: int) -> int:
    """Address of a shared mapping of [offset, offset + size) that huge pages of the file fit.

    Raises
    ------
    OSError
        There is no address space, or the file cannot be mapped.
    """
    libc = files.libc()
    spare = size + HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _checked(libc.mmap(None, spare, _PROT_NONE, flags, -1, 0), spare)
    # Addresses and file offsets of huge pages are multiples of their size alike.
    address = start + (offset - start) % HUGE_BYTES
    both = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        _checked(libc.mmap(address, size, both, mmap.MAP_SHARED | _MAP_FIXED, fd, offset), size)
    except OSError:
        libc.munmap(start, spare)
        raise
    end = address + -(-size // _PAGE_BYTES) * _PAGE_BYTES
    if address > start:
        libc.munmap(start, address - start)
    if start + spare > end:
        libc.munmap(end, start + spare - end)
    return address


def _checked(address: int | None, size: int) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes: {os.strerror(code)}")
    return address


def fill(fd: int, offset: int, length: int) -> int:
    """Put huge pages behind a range of the file, existing bytes stay: bytes that have them now.

    Only whole huge pages inside the range count. Gives up at the first piece that is refused.
    """
    start = -(-offset // HUGE_BYTES) * HUGE_BYTES
    stop = (offset + length) // HUGE_BYTES * HUGE_BYTES
    done = 0
    for at in range(start, stop, PIECE_BYTES):
        size = min(PIECE_BYTES, stop - at)
        if not _fill_piece(fd, at, size):
            break
        done += size
    return done


def _fill_piece(fd: int, offset: int, size: int) -> bool:
    with contextlib.suppress(OSError), _mapped(fd, offset, size) as address:
        for at in range(offset, offset + size, HUGE_BYTES):
            # One page of each, which the kernel makes a whole one of, on that page's NUMA node:
            # the place of the page in the file decides which one that is where they are
            # interleaved.
            number = at // HUGE_BYTES
            os.posix_fallocate(fd, at + number % 512 * _PAGE_BYTES, _PAGE_BYTES)
        return bool(files.libc().madvise(address, size, _MADV_COLLAPSE) == 0)
    return False


@contextlib.contextmanager
def _mapped(fd: int, offset: int, size: int) -> Iterator[int]:
    address = map_shared(fd, offset, size)
    try:
        # A fork meanwhile would keep the memory of a region that is gone.
        files.libc().madvise(address, size, mmap.MADV_DONTFORK)
        yield address
    finally:
        files.libc().munmap(address, size)
