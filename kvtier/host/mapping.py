# SPDX-License-Identifier: Apache-2.0
"""One mapping of one region file in this process, shared by all its handles.

Owns the descriptor (and with it this process's shared lock) and the mapped memory. Any thread.
Invariants: memory is unmapped only when the last view of it is gone, so a view that outlives its
region reads old bytes and never crashes; a forked child has neither the memory (MADV_DONTFORK) nor
the descriptor, and does not unmap what has since taken the place of the memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

from kvtier._core.words import Words
from kvtier.errors import ClosedError
from kvtier.host import files, huge
from kvtier.host.header import LINE_BYTES, MAX_RANKS, RankLine, read_meta
from kvtier.host.populate import Populator
from kvtier.types import PAGE_BYTES

CREATOR_BYTE = MAX_RANKS
"""Locked by the creator for its life; byte `rank` is locked by the signer of that rank."""
TAKEOVER_BYTE = MAX_RANKS + 1
"""Locked while the name of a region whose creator is dead is taken away."""


def _unmap(address: int, size: int, pid: int) -> None:
    # In a forked child the range is not ours any more: MADV_DONTFORK left a hole there.
    if os.getpid() == pid:
        files.libc().munmap(address, size)


def _map(fd: int, size: int) -> tuple[int, memoryview]:
    """Address and writable view of the whole file.

    The mmap module would keep a descriptor of its own, which a forked child could not close, and
    that would keep the lock of a dead parent.
    """
    libc = files.libc()
    address = huge.map_shared(fd, 0, size)
    if libc.madvise(address, size, mmap.MADV_DONTFORK):
        code = ctypes.get_errno()
        libc.munmap(address, size)
        raise OSError(code, f"MADV_DONTFORK: {os.strerror(code)}")
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, _unmap, address, size, os.getpid()).atexit = False
    return address, memoryview(array).cast("B")


class MappedFile:
    """A mapped region file. Made and counted by ``MappedFiles`` only.

    Parameters
    ----------
    fd : int
        Taken over; holds the shared lock.
    path : str
        Where the file was found.
    is_creator : bool
        Whether `fd` holds the creator's sign of life.
    """

    def __init__(self, fd: int, path: str, *, is_creator: bool) -> None:
        self.meta, self.layout = read_meta(fd, path)
        self.fd = fd
        self.path = path
        self.pid = os.getpid()
        self.forked = False
        """Whether this is a forked child's, which does not have the memory. Set by a hook: to ask
        for the process at each use would be a system call, several in a scheduler step."""
        self.is_creator = is_creator
        self.holders = 0
        self.populator: Populator | None = None
        self.lock = threading.Lock()
        """Guards the lines this process writes."""
        self.signed: set[int] = set()
        """Ranks that signed through this mapping."""
        self.pending: dict[int, dict[int, bool]] = {}
        """By rank: finished transfers above the contiguous ones, and whether they failed."""
        self.address, memory = _map(fd, self.layout.total_bytes)
        self.memory: memoryview | None = memory
        self.words: Words | None = Words(memory[:PAGE_BYTES])
        self.lines: list[RankLine] = [
            RankLine(memory[start : start + LINE_BYTES])
            for start in range(
                self.layout.lines,
                self.layout.lines + self.meta.ranks * LINE_BYTES,
                LINE_BYTES,
            )
        ]

    def view(self, offset: int, length: int) -> memoryview:
        """Writable view of a part of the file."""
        if self.memory is None:
            raise ClosedError(f"the region {self.path} is closed")
        return self.memory[offset : offset + length]

    def signer_lives(self, rank: int) -> bool:
        """Whether a living process has signed for `rank`."""
        if self.lines[rank].signed_by() is None:
            return False
        return rank in self.signed or files.byte_is_locked(self.fd, rank)

    def creator_lives(self) -> bool:
        """Whether the process that made the file still has it open."""
        return self.is_creator or files.byte_is_locked(self.fd, CREATOR_BYTE)

    def lose_name(self) -> None:
        """Take the name from a file that outlived its start; its holders keep their memory.

        The lock makes looking and removing one step against others that do the same; this
        process's shared lock keeps sweepers and leaving holders off.
        """
        if files.lock_byte(self.fd, TAKEOVER_BYTE) and files.stands_at(self.fd, self.path):
            os.unlink(self.path)

    def drop(self) -> None:
        """Let go of lock, descriptor and memory; remove the file if nobody else holds it."""
        if self.populator is not None:
            self.populator.stop()
        self.lines = []
        self.words = None
        self.memory = None
        fd, self.fd = self.fd, -1
        try:
            files.remove_if_last(fd, self.path)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: close the descriptor, which would keep a dead parent's lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedFiles:
    """The mappings of this process by (device, inode)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[tuple[int, int], MappedFile] = {}
        self._watching = False

    def adopt(self, fd: int, path: str, *, is_creator: bool = False) -> MappedFile:
        """The READY file behind `fd`, mapped, one holder more. Takes `fd` over, with its lock."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                try:
                    mapping = MappedFile(fd, path, is_creator=is_creator)
                except BaseException:
                    os.close(fd)
                    raise
                self._mappings[key] = mapping
                if not self._watching:
                    self._watching = True
                    os.register_at_fork(after_in_child=self._after_fork)
            else:
                os.close(fd)
            mapping.holders += 1
            return mapping

    def release(self, mapping: MappedFile) -> None:
        """One holder less; the last one drops the mapping. Nothing in a forked child."""
        if mapping.pid != os.getpid():
            return
        with self._lock:
            mapping.holders -= 1
            if mapping.holders:
                return
            for key, value in list(self._mappings.items()):
                if value is mapping:
                    del self._mappings[key]
        # Outside the lock: this waits for the population thread, which may call anything.
        mapping.drop()

    def count(self) -> int:
        """MappedFiles in use."""
        with self._lock:
            return len(self._mappings)

    def _after_fork(self) -> None:
        # Another thread of the parent may have held the lock; nobody in the child does.
        self._lock = threading.Lock()
        mappings, self._mappings = self._mappings, {}
        for mapping in mappings.values():
            mapping.forked = True
            mapping.forget()


MAPPED_FILES = MappedFiles()
# The one piece of state of a whole process here: two handles that know nothing of each other (a
# worker's and a manager's in one process) must share a mapping, its lock and its pending transfers,
# and a fork must find all descriptors that are to be closed in the child.
