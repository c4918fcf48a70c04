# SPDX-License-Identifier: Apache-2.0
"""What lies on disk, oldest use first, and how much of it there is.

Job: bookkeeping for capacity, eviction and (in private directories) presence. Owns about 250 bytes
of memory a file. Any thread; the lock is held for bounded moments, never across a system call.

A file is known by its key in this instance's own namespace, and by its path below the root
elsewhere. Space is counted in units of 4 KiB, from ``st_blocks``.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

Key = bytes
FileId = Key | str
UNIT_BYTES = 4096
_SLICE = 512
"""Files handled under one hold of the lock."""


def units_of(blocks: int) -> int:
    """Units of a file with `blocks` blocks of 512 bytes."""
    return -(-blocks * 512 // UNIT_BYTES)


class Usage:
    """Files by last use, their sizes, and the sum; kept right by the tier, and by walks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[FileId, int] = OrderedDict()
        self._units = 0
        self._others_units = 0
        self._own_units = 0
        self._walk: dict[FileId, int | None] | None = None
        self.complete = False
        """Whether one walk has seen the whole directory."""

    @property
    def bytes(self) -> int:
        """Space in use, as far as this instance knows."""
        with self._lock:
            return max(0, self._units + self._others_units) * UNIT_BYTES

    @property
    def net_units(self) -> int:
        """What this instance has added, less what it removed, since it started."""
        with self._lock:
            return self._own_units

    @property
    def files(self) -> int:
        with self._lock:
            return len(self._files)

    def keys(self) -> list[Key]:
        """Keys of the files of this instance's own namespace."""
        with self._lock:
            files = list(self._files)
        return [file for file in files if isinstance(file, Key)]

    def present(self, keys: Sequence[FileId]) -> list[bool]:
        """Which files are known."""
        with self._lock:
            return [key in self._files for key in keys]

    def add(self, file: FileId, blocks: int) -> None:
        """This instance wrote a file (or another of its size stands in its place)."""
        units = units_of(blocks)
        with self._lock:
            change = units - self._put(file, units)
            self._own_units += change

    def found(self, file: FileId, blocks: int) -> None:
        """A file of this size was seen: it is the newest now, and known if it was not."""
        with self._lock:
            self._put(file, units_of(blocks))

    def renew(self, files: Iterable[FileId]) -> None:
        """Files were used: they are the newest now, those that are known."""
        with self._lock:
            for file in files:
                if file in self._files:
                    self._files.move_to_end(file)
                    if self._walk is not None:
                        self._walk[file] = self._files[file]

    def _put(self, file: FileId, units: int) -> int:
        before = self._files.pop(file, 0)
        self._files[file] = units
        self._units += units - before
        if self._walk is not None:
            self._walk[file] = units
        return before

    def removed(self, file: FileId) -> int:
        """This instance removed a file: the bytes that became free."""
        with self._lock:
            units = self._drop(file)
            self._own_units -= units
            return units * UNIT_BYTES

    def vanished(self, file: FileId) -> None:
        """Somebody else removed a file. If that was another instance, it has announced it: then
        its announcement must not count a second time."""
        with self._lock:
            units = self._drop(file)
            if self._others_units < 0:
                self._others_units = min(0, self._others_units + units)

    def _drop(self, file: FileId) -> int:
        units = self._files.pop(file, 0)
        self._units -= units
        if self._walk is not None:
            self._walk[file] = None
        return units

    def others(self, change_units: int) -> None:
        """Other instances have added (or removed) this much since they last said so."""
        with self._lock:
            self._others_units += change_units

    def victims(self, want_bytes: int) -> list[FileId]:
        """The files used longest ago that together take `want_bytes`."""
        result: list[FileId] = []
        want = -(-want_bytes // UNIT_BYTES)
        with self._lock:
            for file, units in self._files.items():
                if want <= 0 or len(result) >= _SLICE:
                    break
                result.append(file)
                want -= units
        return result

    def begin_walk(self) -> None:
        """A walk over the directory starts; what changes from now on is newer than its answer."""
        with self._lock:
            self._walk = {}
            # The walk will see what the others announced so far.
            self._others_units = 0

    def abandon_walk(self) -> None:
        with self._lock:
            self._walk = None

    def finish_walk(
        self, files: Sequence[FileId], units: array[int], used: array[int], since: int
    ) -> None:
        """Take over what a walk found.

        Files that were known keep their place, unless somebody used them after `since` (seconds,
        the start of the walk before); new ones are put behind them by their last use.
        """
        # The sort releases the GIL, which a sort of a list would hold for the whole time.
        order: list[int] = np.argsort(np.array(used, dtype=np.int64), kind="stable").tolist()
        for start in range(0, len(order), _SLICE):
            with self._lock:
                assert self._walk is not None
                for i in order[start : start + _SLICE]:
                    file = files[i]
                    if file in self._walk:
                        continue
                    before = self._files.get(file)
                    self._files[file] = units[i]
                    self._units += units[i] - (before or 0)
                    if before is not None and used[i] > since:
                        self._files.move_to_end(file)
        seen = set(files)
        with self._lock:
            known = list(self._files)
        for start in range(0, len(known), _SLICE):
            with self._lock:
                assert self._walk is not None
                for file in known[start : start + _SLICE]:
                    if file not in seen and file not in self._walk:
                        self._units -= self._files.pop(file, 0)
        with self._lock:
            assert self._walk is not None
            for file, size in self._walk.items():
                if size is not None and file in self._files:
                    self._files.move_to_end(file)
            self._walk = None
            self.complete = True
