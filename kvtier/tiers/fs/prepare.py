# SPDX-License-Identifier: Apache-2.0
"""Getting a directory ready: make it, say whose it is, and prove that it works.

Owns no state; plain functions that block, called in a pool's thread. What an operator can change is
a ConfigError that names path and errno; what may pass by itself is a TierLostError.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Mapping

import msgspec

from kvtier import namespace
from kvtier._core import fileio
from kvtier.errors import ConfigError, TierLostError
from kvtier.tiers.fs import naming
from kvtier.tiers.fs.options import FsOptions, Upkeep

logger = logging.getLogger(__name__)

_OPERATOR = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Prepared(msgspec.Struct):
    """A directory that is open and has been tried."""

    directory: fileio.Directory
    identity: tuple[int, int]
    """Device and inode."""
    full: bool
    """The trial write found no space: only reads for now."""
    read_only: bool


def prepare(
    options: FsOptions,
    fields: Mapping[str, str],
    owner: naming.Owner,
    upkeep: Upkeep,
    faults: fileio.Faults | None = None,
) -> Prepared:
    """Make and try the directory of a namespace.

    Raises
    ------
    ConfigError
        Path, permission or option is wrong.
    TierLostError
        The medium does not work at the moment.
    """
    path = os.path.join(options.root_dir, namespace.directory_name(fields))
    full = read_only = False
    try:
        with _failure(path):
            os.makedirs(path, options.directory_mode, exist_ok=True)
    except _Full:
        full = True
    except _ReadOnly:
        read_only = True
    with _failure(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _failure(path):
            _describe(path, fields, options.file_mode)
            direct = _try(path, options, owner)
    except _Full:
        full, direct = True, options.direct != "off"
    except _ReadOnly:
        read_only, direct = True, options.direct != "off"
    except BaseException:
        os.close(fd)
        raise
    stat = os.fstat(fd)
    directory = fileio.Directory(
        fd,
        namespace.namespace_digest(fields),
        str(owner),
        direct=direct,
        fsync=options.fsync,
        preallocate=options.preallocate,
        file_mode=options.file_mode,
        dir_mode=options.directory_mode,
        touch_seconds=upkeep.touch_seconds,
        faults=faults,
    )
    logger.info(
        "fs: %s is ready, %s I/O%s",
        path,
        "direct" if direct else "buffered",
        ", no space for writes" if full else ", read-only" if read_only else "",
    )
    return Prepared(directory, (stat.st_dev, stat.st_ino), full, read_only)


class _Full(Exception):
    pass


class _ReadOnly(Exception):
    pass


@contextlib.contextmanager
def _failure(path: str) -> Iterator[None]:
    """Map an OSError at the tier's edge."""
    try:
        yield
    except OSError as exc:
        name = errno.errorcode.get(exc.errno or 0, str(exc.errno))
        text = f"fs: {exc.filename or path}: {exc.strerror} ({name})"
        if exc.errno in _FULL:
            raise _Full from exc
        if exc.errno == errno.EROFS:
            if not os.path.isdir(path):
                raise ConfigError(f"{text}; give a root that can be written") from exc
            raise _ReadOnly from exc
        if exc.errno in _OPERATOR:
            raise ConfigError(
                f"{text}; user {os.geteuid()} needs to read, write and search it"
            ) from exc
        raise TierLostError(text) from exc


def _describe(path: str, fields: Mapping[str, str], mode: int) -> None:
    """Write ``namespace.json``, or see that the one that is there is ours."""
    file_path = os.path.join(path, naming.NAMESPACE_FILE)
    try:
        with open(file_path, "rb") as file:
            found = namespace.decode_json(file.read())
    except FileNotFoundError:
        pass
    except ConfigError as exc:
        # Torn by a crash: the name of the directory says as much, and each file has its trailer.
        logger.warning("fs: %s is written anew: %s", file_path, exc)
    else:
        if reason := namespace.explain(fields, found):
            raise ConfigError(f"fs: {file_path} is of another namespace ({reason}); move it away")
        return
    write_whole(file_path, namespace.encode_json(fields), mode)


def _try(path: str, options: FsOptions, owner: naming.Owner) -> bool:
    """Write, read, compare and delete a file; whether it worked with O_DIRECT."""
    if options.direct != "off":
        try:
            _round_trip(path, owner, os.O_DIRECT)
            return True
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO):
                raise
            if options.direct == "on":
                name = errno.errorcode.get(exc.errno, str(exc.errno))
                raise ConfigError(
                    f"fs: O_DIRECT does not work in {path} ({name}); say direct: auto or off"
                ) from exc
            logger.info("fs: no O_DIRECT in %s: %s", path, exc.strerror)
    _round_trip(path, owner, 0)
    return False


def _round_trip(path: str, owner: naming.Owner, flag: int) -> None:
    name = os.path.join(path, f"probe.kv.{owner}.{threading.get_ident():x}.tmp")
    size = 2 * fileio.PAGE_BYTES
    with mmap.mmap(-1, size) as out, mmap.mmap(-1, size) as back:
        out[:] = os.urandom(size)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flag, 0o600)
        try:
            try:
                # The first page alone, then the second: filesystems refuse at different calls.
                for at in (0, fileio.PAGE_BYTES):
                    with memoryview(out) as whole, whole[at : at + fileio.PAGE_BYTES] as part:
                        if os.pwrite(fd, part, at) != len(part):
                            raise OSError(errno.EIO, "short write", name)
                if os.preadv(fd, [back], 0) != size or back[:] != out[:]:
                    raise OSError(errno.EIO, "other bytes came back", name)
            finally:
                os.close(fd)
        finally:
            os.unlink(name)


def write_whole(path: str, data: bytes, mode: int) -> None:
    """Replace a small file at once.

    Raises
    ------
    OSError
    """
    temporary = f"{path}.{os.getpid()}.{threading.get_ident():x}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
