# SPDX-License-Identifier: Apache-2.0
"""Make a region's file, or join the one that is there.

Owns nothing that outlives a call but what it returns. Any thread. The creator holds the exclusive
lock from before the file has a name until it is READY; everybody else tries for the shared lock,
and then looks whether the file still has its name and is complete.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from kvtier.errors import ConfigError, InternalError
from kvtier.host import files, header, numa, space
from kvtier.host.mapping import CREATOR_BYTE, MAPPED_FILES, MappedFile

POLL_SECONDS = 0.01
"""Between two looks at what another process does; a process that dies sends no event."""


def pause(deadline: float, message: str) -> None:
    """Wait a little for another process; ConfigError with `message` at the deadline."""
    if time.monotonic() >= deadline:
        raise ConfigError(message)
    time.sleep(POLL_SECONDS)


def sweep_or_refuse(directory: str) -> None:
    """Sweep; a directory that cannot be used is a ConfigError."""
    try:
        files.sweep(directory)
    except OSError as exc:
        hint = "give a directory on tmpfs, such as /dev/shm"
        raise ConfigError(f"cannot make a region in {directory}: {exc.strerror}; {hint}") from exc


def build(
    meta: header.Meta, directory: str, path: str, step_bytes: int, system: space.SystemFiles
) -> MappedFile | None:
    """Make the file; None if another creator was faster, or a sweeper took it between two locks.

    Raises
    ------
    ConfigError
        If it does not fit. Those who wait for the file get the same message.
    """
    encoded = header.encode(meta)
    layout = header.make_layout(meta, len(encoded))
    space.check_space(directory, layout.head_bytes + layout.payload_bytes, system)
    fd = files.create_nameless(directory)
    try:
        ready = _fill(fd, path, meta, encoded, layout, step_bytes)
    except BaseException as exc:
        if isinstance(exc, ConfigError):
            with contextlib.suppress(OSError):  # no page even for that: they find out alone
                header.write_failure(fd, str(exc))
        files.remove_if_last(fd, path)
        os.close(fd)
        raise
    if ready:
        return MAPPED_FILES.adopt(fd, path, is_creator=True)
    os.close(fd)
    return None


def _fill(
    fd: int, path: str, meta: header.Meta, encoded: bytes, layout: header.Layout, step_bytes: int
) -> bool:
    if not files.try_lock(fd, exclusive=True) or not files.lock_byte(fd, CREATOR_BYTE):
        raise InternalError("a file without a name was locked by somebody else")
    try:
        os.ftruncate(fd, layout.total_bytes)
    except OSError as exc:
        raise ConfigError(
            f"no file in {os.path.dirname(path)} may have the {space.describe(layout.total_bytes)} "
            f"of the region: {exc.strerror}; give less host memory, or raise the limit of file "
            "sizes (ulimit -f)"
        ) from exc
    if not files.link(fd, path):
        return False
    first = min(step_bytes, layout.payload_bytes)
    try:
        # Only now, so that of many ranks that start at once a single one takes memory.
        with numa.interleaved(numa.nodes_for(meta.ranks)):
            space.reserve(fd, 0, layout.head_bytes)
            header.write_header(fd, encoded)
            space.reserve(fd, layout.payload, first)
    except OSError as exc:
        raise ConfigError(
            f"no memory for the first {space.describe(layout.head_bytes + first)} of the region "
            f"{path}, which takes {space.describe(layout.head_bytes + layout.payload_bytes)}: "
            f"{exc.strerror}"
        ) from exc
    header.write_available(fd, meta.geometry.slots_in(first))
    header.write_state(fd, header.READY)
    # The change of a lock has a gap in which a sweeper may find the file free and remove it.
    return files.try_lock(fd, exclusive=False) and files.is_linked(fd)


def join(
    fd: int,
    path: str,
    deadline: float,
    *,
    named: bool = True,
    takeover_at: float = math.inf,
) -> tuple[MappedFile | None, str]:
    """Lock and map an existing file (takes `fd`): the mapped file, or None and why not.

    Waits until `deadline` for a creator that is at work. From `takeover_at` on, a file of an
    earlier start loses its name, so that a new one can be made while its last holders end.

    Raises
    ------
    ConfigError
        If the creator has failed, or the file is of another version.
    """
    try:
        why = _lock_ready(fd, path, deadline, named)
    except BaseException:
        os.close(fd)
        raise
    if why is not None:
        os.close(fd)
        return None, why
    mapped = MAPPED_FILES.adopt(fd, path)
    why = _outlived(mapped) if named else None
    if why is not None:
        if time.monotonic() >= takeover_at:
            mapped.lose_name()
        MAPPED_FILES.release(mapped)
        return None, f"{why} has died, while other processes still hold it (fuser {path}): end them"
    return mapped, ""


def _lock_ready(fd: int, path: str, deadline: float, named: bool) -> str | None:
    while not files.try_lock(fd, exclusive=False):
        if time.monotonic() >= deadline:
            return "another rank is still building it"
        time.sleep(POLL_SECONDS)
    state = header.read_state(fd)
    if state == header.FAILED:
        raise ConfigError(f"another rank could not make the region: {header.read_failure(fd)}")
    if named and not files.is_linked(fd):
        return "it has just been removed"
    if state != header.READY:
        # Neither locked nor READY: its creator died in the middle.
        files.remove_if_last(fd, path)
        return "its creator died while building it"
    return None


def _outlived(mapped: MappedFile) -> str | None:
    """Who of the start that this file belongs to is dead; None if all live."""
    if not mapped.creator_lives():
        return "it belongs to an earlier start whose creator"
    for rank, line in enumerate(mapped.lines):
        if line.signed_by() is not None and not mapped.signer_lives(rank):
            return f"it belongs to an earlier start whose rank {rank}"
    return None
