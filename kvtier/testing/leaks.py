# SPDX-License-Identifier: Apache-2.0
"""See what a test left behind: descriptors, threads, processes, tasks, region files, mappings.

Owns no state: take a ``Snapshot`` before and after, and compare. Any thread; ``check_tasks`` runs
on the loop that it looks at. Reads /proc, so Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from kvtier.errors import ConfigError
from kvtier.host import files

ALLOWED_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that Python itself starts once and keeps."""


# A shared mapping of a region, by its name or by that of a file made without one.
_REGION_MAP = re.compile(rf"^\S+ ..[^ ]s .*/({files.PREFIX}|#\d+ \(deleted\))")


class Snapshot(msgspec.Struct, frozen=True):
    """What this process holds at one moment."""

    fds: dict[int, str]
    """Descriptor to what it stands for, as in /proc/self/fd."""
    threads: dict[int, str]
    """Python threads: identifier to name."""
    children: dict[int, str]
    """Child processes, dead ones that nobody has waited for included: pid to command line."""
    regions: frozenset[str]
    """Region files that this process or a child holds, or nobody that lives."""
    mappings: int
    """Region files mapped into this process."""


def take(directory: str = "/dev/shm") -> Snapshot:
    """Snapshot of now; regions are looked for in `directory`."""
    children = _children()
    return Snapshot(
        fds=_fds(),
        threads={thread.ident or 0: thread.name for thread in threading.enumerate()},
        children=children,
        regions=_regions(directory, ("self", *map(str, children))),
        mappings=_mappings(),
    )


def compare(before: Snapshot, after: Snapshot) -> list[str]:
    """What `after` holds that `before` did not, one line each; empty if nothing."""
    leaks = []
    for fd, target in after.fds.items():
        if before.fds.get(fd) != target:
            leaks.append(f"descriptor {fd}: {target}")
    for ident, name in after.threads.items():
        if ident not in before.threads:
            leaks.append(f"thread {name}")
    for pid, command in after.children.items():
        if pid not in before.children and not any(word in command for word in ALLOWED_COMMANDS):
            leaks.append(f"process {pid}: {command}")
    leaks.extend(f"region file {path}" for path in sorted(after.regions - before.regions))
    if after.mappings > before.mappings:
        leaks.append(f"{after.mappings - before.mappings} mapped regions")
    return leaks


def wait_clean(
    before: Snapshot,
    directory: str = "/dev/shm",
    grace_seconds: float = 2.0,
    allow: Callable[[str], bool] = lambda leak: False,
) -> list[str]:
    """Leaks since `before` that are still there after a collection and a short grace.

    Parameters
    ----------
    before : Snapshot
    directory : str
        Where regions are looked for.
    grace_seconds : float
        Time for threads and processes that are just ending. Nothing is waited for when nothing
        leaks.
    allow : callable
        Leaks (as ``compare`` words them) that do not count.
    """
    deadline = time.monotonic() + grace_seconds
    collected = False
    while True:
        leaks = [leak for leak in compare(before, take(directory)) if not allow(leak)]
        if not leaks or time.monotonic() >= deadline:
            return leaks
        if collected:
            time.sleep(0.02)
        else:
            gc.collect()
            collected = True


@contextlib.asynccontextmanager
async def check_tasks() -> AsyncIterator[None]:
    """Fail if the body leaves tasks on the running loop that have not ended.

    Raises
    ------
    AssertionError
        With the names of the tasks. Not when the body itself raises.
    """
    before = asyncio.all_tasks()
    yield
    for _ in range(3):  # a task that has been cancelled needs a turn to end
        await asyncio.sleep(0)
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    if left:
        raise AssertionError(f"tasks left: {', '.join(left)}")


def _fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _children() -> dict[int, str]:
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            for pid in map(int, file.read().split()):
                found[pid] = _command(pid)
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip() or "ended"
    except OSError:
        return "ended"


def _regions(directory: str, processes: tuple[str, ...]) -> frozenset[str]:
    """Region files of this user, less those that only foreign processes hold."""
    prefix = f"{files.PREFIX}{os.getuid()}-"
    paths = [
        os.path.join(directory, name) for name in os.listdir(directory) if name.startswith(prefix)
    ]
    if not paths:
        return frozenset()
    held = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{process}/fd"):
                # By inode: a file made without a name goes by "#123 (deleted)" in /proc.
                with contextlib.suppress(OSError):
                    held.add(_inode(f"/proc/{process}/fd/{fd}"))
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            if _inode(path) in held or _is_dead(path):
                found.add(path)
    return frozenset(found)


def _inode(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_dead(path: str) -> bool:
    try:
        fd = files.open_existing(path)
    except ConfigError:
        return False  # another user's
    if fd is None:
        return False
    try:
        # Held for an instant; whoever wants to join meanwhile tries again.
        return files.try_lock(fd, exclusive=True)
    finally:
        os.close(fd)


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(_REGION_MAP.search(line) is not None for line in file)
