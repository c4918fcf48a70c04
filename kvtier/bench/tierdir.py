# SPDX-License-Identifier: Apache-2.0
"""The directory of the fs tier: what file system it is on, and keeping it out of the page cache.

A tier whose files sit in the page cache measures memory, not a disk. So a memory file system is
refused unless it was asked for, and a sweeper drops the cached pages of all files of the tier, over
and over, while a run goes on; it reports how much it found. Owns one temporary directory and one
thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from kvtier.errors import ConfigError

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
NOT_USED = "not used"
"""In the place of a file system where no strategy has files."""
SWEEP_SECONDS = 1.0

DAMAGE_SECONDS = 0.02
"""Between two looks for new files where they are to be damaged: nothing is measured then."""
SAMPLED_FILES = 16
CHUNK_SUFFIXES = (".kv", ".bin")
"""kvtier's files, and those of vLLM's own tier."""


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """Type of the file system that holds `path` ("ext4", "tmpfs"), from the mount table.

    Parameters
    ----------
    path : Path
        Exists.
    mountinfo : str, optional
        Text of ``/proc/self/mountinfo``, for tests.
    """
    if mountinfo is None:
        mountinfo = Path("/proc/self/mountinfo").read_text()
    parts = path.resolve().parts
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        where = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), words[4])
        mount = Path(where).parts
        # A later mount on the same place hides the earlier one.
        if parts[: len(mount)] == mount and len(mount) >= best:
            best, kind = len(mount), rest.split()[0]
    return kind


def choose_directory(wanted: Path | None, allow_tmpfs: bool) -> tuple[Path, str]:
    """Where tier directories are made, and its file system.

    Without a wish: the first of $TMPDIR or /tmp, /var/tmp and the current directory that is not
    memory.

    Raises
    ------
    ConfigError
        If it does not exist, cannot be written, or is memory and that was not allowed.
    """
    candidates = [wanted] if wanted else [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    refused = []
    for candidate in candidates:
        if not candidate.is_dir():
            refused.append(f"{candidate} is no directory")
            continue
        if not os.access(candidate, os.W_OK | os.X_OK):
            refused.append(f"{candidate} cannot be written")
            continue
        kind = file_system(candidate)
        if kind in MEMORY_FILE_SYSTEMS and not allow_tmpfs:
            refused.append(f"{candidate} is on {kind}, which is memory and not a disk")
            continue
        return candidate, kind
    raise ConfigError(
        f"no place for the fs tier: {'; '.join(refused)}. "
        "Name a directory on a disk with --tier-dir, or pass --allow-tmpfs"
    )


def check_space(directory: Path, wanted_bytes: int) -> None:
    """ConfigError if `directory` has less than `wanted_bytes` free."""
    free = shutil.disk_usage(directory).free
    if free < wanted_bytes:
        raise ConfigError(
            f"{directory} has {free >> 20} MiB free and the run needs about "
            f"{wanted_bytes >> 20} MiB; name another with --tier-dir"
        )


class SweepCounters(msgspec.Struct):
    """What the sweeper saw."""

    sweeps: int = 0
    sampled_pages: int = 0
    resident_pages: int = 0
    files: int = 0
    damaged_files: int = 0

    @property
    def resident_ratio(self) -> float:
        """Share of the sampled pages that were in the page cache, just before they were dropped."""
        return self.resident_pages / self.sampled_pages if self.sampled_pages else 0.0


def _drop(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class TierDirectory:
    """A new directory below `parent`, and the thread that keeps its files out of the page cache.

    Parameters
    ----------
    parent : Path
    damage : callable, optional
        Called once with each new file of the tier that holds a chunk; True if it damaged it.
    """

    def __init__(self, parent: Path, damage: Callable[[Path, int], bool] | None = None) -> None:
        self._parent = parent
        self._damage = damage
        self._seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-page-sweeper")
        self._random = random.Random(0)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.path = parent
        self.counters = SweepCounters()

    def open(self) -> None:
        """Make the directory and start the thread."""
        self.path = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=self._parent))
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the directory."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            shutil.rmtree(self.path)

    def sweep(self) -> None:
        """Drop the cached pages of all chunks, if a sample of them has any.

        A tier that reads and writes past the page cache is left alone: the sample costs little,
        opening thousands of files every second would be work that the tier is charged for.
        Dirty pages are only sent out by the first sweep and go with the next.
        """
        chunks = [
            os.path.join(root, name)
            for root, _, names in os.walk(self.path)
            for name in names
            if name.endswith(CHUNK_SUFFIXES)
        ]
        counters = self.counters
        counters.sweeps += 1
        counters.files = len(chunks)
        before = counters.resident_pages
        for name in self._random.sample(chunks, min(SAMPLED_FILES, len(chunks))):
            self._with_file(name, self._sample)
        if counters.resident_pages > before:
            for name in chunks:
                self._with_file(name, _drop)
        if self._damage is None:
            return
        for name in chunks:
            if name not in self._seen:
                self._seen.add(name)
                counters.damaged_files += self._damage(Path(name), len(self._seen))

    @staticmethod
    def _with_file(name: str, use: Callable[[int], None]) -> None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # an evicted chunk
        try:
            use(fd)
        finally:
            os.close(fd)

    def _run(self) -> None:
        # Damage has to be there before a chunk is read back, also in a point of half a second.
        while not self._stop.wait(SWEEP_SECONDS if self._damage is None else DAMAGE_SECONDS):
            self.sweep()

    def _sample(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if not size:
            return
        pages = -(-size // mmap.PAGESIZE)
        with mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
            vector = (ctypes.c_ubyte * pages)()
            # ctypes wants a writable buffer for an address; numpy does not.
            array = np.frombuffer(mapped, dtype=np.uint8)
            address = ctypes.c_void_p(array.ctypes.data)
            failed = self._libc.mincore(address, ctypes.c_size_t(size), vector)
            del array  # else the mapping cannot be closed
        if not failed:
            self.counters.sampled_pages += pages
            self.counters.resident_pages += sum(byte & 1 for byte in vector)
