# SPDX-License-Identifier: Apache-2.0
"""Batches of chunk files: store, load, find, set aside, the GIL released for the whole batch."""

from collections.abc import Sequence

from typing_extensions import Buffer

PAGE_BYTES: int
TAG_MAX: int

WAITING: int
"""Status of an item that nobody has taken. 0 is done, a positive status is an errno."""
EXISTS: int
"""Store: a whole file is there already (found before or after writing)."""
MISSING: int
SHORT: int
"""Shorter than it should be: a miss, since somebody may still be writing."""
CORRUPT: int
"""A whole file that does not hold what was stored under this key."""
FOREIGN: int
"""A whole file of a format that this version does not know."""

OPERATIONS: tuple[str, ...]
"""Names of the calls that `Faults` can reach."""

def crc32c(data: Buffer, value: int = 0) -> int: ...
def crc32c_tables(data: Buffer, value: int = 0) -> int:
    """The way without the instruction, for tests."""

class Faults:
    """What a test wants the system calls to do. Inert until `set` or `block`."""

    def set(
        self,
        operation: str,
        error: int = 0,
        after: int = 0,
        times: int = -1,
        limit: int = -1,
        lost: int = 0,
    ) -> None:
        """The next `times` calls after `after` more fail with errno `error`, or move at most
        `limit` bytes, or (`lost` not 0) claim to have moved everything and move nothing."""
    def block(self, operation: str, fd: int) -> None:
        """Each call first reads one byte of `fd`; -1 ends that for later calls."""
    def calls(self, operation: str) -> int: ...
    def clear(self) -> None: ...

class Batch:
    """Chunks of one call, shared by the threads that work on it.

    Parameters
    ----------
    keys : sequence of bytes
        5 to 40 bytes each.
    addresses : sequence of int, optional
        Where each payload is or goes. The caller keeps that memory until no thread works on it.
    lengths : sequence of int, optional
        Payload bytes; for `Directory.find` the expected ones, -1 where unknown.
    crcs : sequence of int or None, optional
        CRC-32C of each payload where it is known; a store computes the others.
    ordered : bool
        The keys are a prefix: after an absent one, `Directory.find` need not ask for the rest.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        addresses: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        crcs: Sequence[int | None] | None = None,
        *,
        ordered: bool = False,
    ) -> None: ...
    def __len__(self) -> int: ...
    def stop(self) -> None:
        """Nobody takes another item; calls under way end by themselves. Any thread."""
    @property
    def exhausted(self) -> bool:
        """No item is left to take."""
    def status(self, i: int) -> int: ...
    def statuses(self) -> list[int]: ...
    def crc(self, i: int) -> int | None: ...
    def crcs(self) -> list[int | None]:
        """CRC of each item, None where it is not known."""

    def blocks(self, i: int) -> int:
        """``st_blocks`` (512 bytes each) of the file, as far as a call has seen it."""
    def replaced(self, i: int) -> int:
        """``st_blocks`` of an unusable file that the store replaced."""
    def mtime(self, i: int) -> int: ...
    def flags(self, i: int) -> int:
        """``F_GETFL`` of the descriptor that moved the payload."""
    def path(self, i: int) -> str:
        """Path below the directory."""

class Directory:
    """A namespace's directory; owns the descriptor `fd`.

    `store`, `load`, `find` and `set_aside` work on at most `limit` items of the batch (all by
    default), GIL released, and say whether items are left to take.
    """

    closed: bool
    faults: Faults | None
    def __init__(
        self,
        fd: int,
        digest: bytes,
        tag: str,
        *,
        direct: bool = False,
        fsync: bool = False,
        preallocate: bool = False,
        file_mode: int = 0o600,
        dir_mode: int = 0o700,
        touch_seconds: int = -1,
        faults: Faults | None = None,
    ) -> None: ...
    def close(self) -> None:
        """Only when no thread works here any more."""
    def fileno(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def fallbacks(self) -> int:
        """Calls that had to go on without O_DIRECT."""
    def store(self, batch: Batch, limit: int = -1) -> bool: ...
    def load(self, batch: Batch, limit: int = -1) -> bool: ...
    def find(self, batch: Batch, limit: int = -1) -> bool: ...
    def set_aside(self, batch: Batch, limit: int = -1) -> bool: ...
    def entries(self, path: str) -> list[tuple[str, bool, int, int, int, int]]:
        """Entries below `path`: name, is a directory, size, 512-byte blocks, last use, mtime.

        Raises
        ------
        OSError
        """
    def remove(self, paths: Sequence[str]) -> list[int]:
        """Unlink files: 0 or an errno each."""
