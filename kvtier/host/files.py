# SPDX-License-Identifier: Apache-2.0
"""Region files: made without a name, owned by a lock, removed only by inode.

Owns no state; descriptors belong to the callers. Any thread. Invariants:

- a file has a name only while its maker holds the exclusive lock, or after it is complete;
- every process that maps a file holds a shared ``flock`` of its own, so a file whose exclusive lock
  can be had belongs to nobody that lives;
- a name is removed only under the exclusive lock, and only while it stands for the locked inode.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import stat
import struct

from kvtier.errors import ConfigError

PREFIX = "kvtier-"
MAX_NAME_BYTES = 255
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_AT_FDCWD = -100
_AT_SYMLINK_FOLLOW = 0x400


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library with errno kept for each thread."""
    library = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.linkat.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
    )
    library.mmap.argtypes = (pointer, size, *(ctypes.c_int,) * 3, ctypes.c_longlong)
    library.mmap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    library.madvise.argtypes = (pointer, size, ctypes.c_int)
    return library


def region_path(directory: str, name: str) -> str:
    """Path of region `name`: short whatever the name, and apart for each user.

    Raises
    ------
    ConfigError
        If the name is empty or longer than 255 bytes.
    """
    size = len(name.encode())
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ConfigError(f"a region's name has 1 to {MAX_NAME_BYTES} bytes, got {size}: {name!r}")
    digest = hashlib.sha256(name.encode()).hexdigest()[:20]
    return os.path.join(directory, f"{PREFIX}{os.getuid()}-{digest}")


def create_nameless(directory: str) -> int:
    """Descriptor of a new file (mode 0600) in `directory` that no name leads to."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        hint = "give a directory on tmpfs, such as /dev/shm"
        raise ConfigError(f"cannot make a region in {directory}: {exc.strerror}; {hint}") from exc
    os.fchmod(fd, 0o600)
    return fd


def link(fd: int, path: str) -> bool:
    """Give the nameless file `fd` its name; False if the name is taken."""
    # os.link goes through /proc/self/fd without following it, which ends in EXDEV.
    source = f"/proc/self/fd/{fd}".encode()
    if libc().linkat(_AT_FDCWD, source, _AT_FDCWD, os.fsencode(path), _AT_SYMLINK_FOLLOW) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, os.strerror(code), path)


def open_existing(path: str) -> int | None:
    """Descriptor of the file at `path`; None if there is none.

    Raises
    ------
    ConfigError
        If what stands there is not a plain file of this user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"cannot use {path}: {exc.strerror}; {_who(path)}") from exc
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(fd)
        raise ConfigError(f"cannot use {path}: {_who(path)}")
    return fd


def _who(path: str) -> str:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return "it is no plain file, remove it"
        return f"it belongs to uid {status.st_uid}, this process runs as uid {os.getuid()}"
    return "it cannot be examined"


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take (or change to) a lock without waiting. A failed change loses the lock it had."""
    operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_linked(fd: int) -> bool:
    """Whether the file still has a name."""
    return os.fstat(fd).st_nlink > 0


def stands_at(fd: int, path: str) -> bool:
    """Whether `path` leads to this very file."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def remove_if_last(fd: int, path: str) -> bool:
    """Give this holder's lock up; remove the file if nobody else holds it.

    Of several holders that leave at the same time at least one finds itself the last.
    """
    if not try_lock(fd, exclusive=True):
        return False
    removed = stands_at(fd, path)
    if removed:
        os.unlink(path)
    fcntl.flock(fd, fcntl.LOCK_UN)
    return removed


def lock_byte(fd: int, index: int) -> bool:
    """Lock one byte for as long as the open file lives: a sign of life that others can ask for.

    Holds across pid namespaces, where a process id says nothing. False if another holds it.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0))
    except BlockingIOError:
        return False
    return True


def byte_is_locked(fd: int, index: int) -> bool:
    """Whether another open file of this inode holds the byte (one's own lock does not count)."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def regions(directory: str) -> list[str]:
    """Paths of this user's region files, whoever holds them."""
    prefix = f"{PREFIX}{os.getuid()}-"
    entries = sorted(os.listdir(directory))
    return [os.path.join(directory, entry) for entry in entries if entry.startswith(prefix)]


def sweep(directory: str = "/dev/shm") -> list[str]:
    """Remove this user's region files that no living process holds.

    Parameters
    ----------
    directory : str
        Where regions are made.

    Returns
    -------
    list of str
        Paths of the removed files. Files of other users are left alone.
    """
    removed = []
    for path in regions(directory):
        try:
            fd = open_existing(path)
        except ConfigError:
            continue  # not ours, whatever its name says
        if fd is None:
            continue
        try:
            if remove_if_last(fd, path):
                removed.append(path)
        finally:
            os.close(fd)
    return removed
