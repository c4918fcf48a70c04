# SPDX-License-Identifier: Apache-2.0
"""Is there room for a region, and the reservation of its memory.

Owns no state. Any thread. Memory is reserved before it is used, so that a full tmpfs is an error of
one call and never a SIGBUS in a copy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from kvtier.errors import ConfigError
from kvtier.host import huge

STEP_BYTES = 1 << 30
"""Memory reserved at once: about 0.2 s of a system call."""


class SystemFiles(msgspec.Struct, frozen=True):
    """Where the kernel says how much memory there is."""

    cgroup_root: str = "/sys/fs/cgroup"
    process_cgroup: str = "/proc/self/cgroup"
    meminfo: str = "/proc/meminfo"


def describe(size_bytes: int) -> str:
    """`size_bytes` for a person: exact, and in GiB."""
    return f"{size_bytes} bytes ({size_bytes / 2**30:.3g} GiB)"


def memory_limits(system: SystemFiles) -> Iterator[tuple[int, str]]:
    """(bytes, file) of every memory limit of this process's cgroups, versions 1 and 2.

    A container may see only its own subtree at the mount point while ``/proc/self/cgroup`` names
    the whole path; so all its ancestors at the mount point are asked, and missing ones passed over.
    """
    try:
        with open(system.process_cgroup) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [system.cgroup_root, os.path.join(system.cgroup_root, "unified")]
            name = "memory.max"
        elif "memory" in controllers.split(","):
            roots = [os.path.join(system.cgroup_root, "memory")]
            name = "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in roots:
            for depth in range(len(parts), -1, -1):
                file_path = os.path.join(root, *parts[:depth], name)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    with open(file_path) as file:
                        value = file.read().strip()
                    if value != "max":
                        yield int(value), file_path


def available_memory(system: SystemFiles) -> int | None:
    """Bytes the kernel could give without swapping; None where it does not say."""
    with contextlib.suppress(FileNotFoundError), open(system.meminfo) as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def check_space(directory: str, wanted_bytes: int, system: SystemFiles) -> None:
    """Refuse a region that cannot fit.

    Raises
    ------
    ConfigError
        With the wanted bytes, what there is, and the directory or file that says so.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    # tmpfs mounted with size=0 has no limit and reports no blocks.
    if status.f_blocks and free < wanted_bytes:
        raise ConfigError(
            f"the region takes {describe(wanted_bytes)}, but {directory} has only "
            f"{describe(free)} free: give less host memory, or a larger tmpfs (mount -o size=, "
            f"docker --shm-size, an emptyDir of medium Memory)"
        )
    for limit, path in memory_limits(system):
        if limit < wanted_bytes:
            raise ConfigError(
                f"the region takes {describe(wanted_bytes)}, but the cgroup allows "
                f"{describe(limit)} ({path}): give less host memory, or raise the limit"
            )
    available = available_memory(system)
    if available is not None and available < wanted_bytes:
        raise ConfigError(
            f"the region takes {describe(wanted_bytes)}, but the machine has only "
            f"{describe(available)} left ({system.meminfo}): give less host memory"
        )


def reserve(fd: int, offset: int, length: int) -> None:
    """Put memory behind a range of the file, in huge pages where the kernel gives them; existing
    bytes stay. OSError if there is none."""
    if length > 0:
        huge.fill(fd, offset, length)
        os.posix_fallocate(fd, offset, length)
