# SPDX-License-Identifier: Apache-2.0
"""Spread the pages of a region over the NUMA nodes while they are reserved.

Owns the memory policy of the calling thread for the length of a call. Pages of a tmpfs file come
from the node of the thread that first asks for them, so one thread would fill one node; memory that
ranks on several nodes share is interleaved instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

from kvtier.host import files

MPOL_DEFAULT = 0
MPOL_INTERLEAVE = 3
_MAX_NODES = 1024
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy


def allowed_nodes(status: str = "/proc/self/status") -> list[int]:
    """Nodes that this process may take memory from."""
    with open(status) as file:
        for line in file:
            if line.startswith("Mems_allowed:"):
                mask = int(line.split()[1].replace(",", ""), 16)
                return [node for node in range(mask.bit_length()) if mask >> node & 1]
    return []


def nodes_for(ranks: int) -> list[int]:
    """Nodes to interleave a region over; none for one rank, whose own node is the best place."""
    return allowed_nodes() if ranks > 1 else []


def policy() -> int | None:
    """Memory policy of this thread; None where the kernel does not tell."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return None
    mode = ctypes.c_int(-1)
    nothing = ctypes.c_void_p(None)
    result = files.libc().syscall(
        ctypes.c_long(numbers[1]),
        ctypes.byref(mode),
        nothing,
        ctypes.c_ulong(0),
        nothing,
        ctypes.c_ulong(0),
    )
    return mode.value if result == 0 else None


def _set_policy(mode: int, nodes: list[int]) -> bool:
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    numbers = _CALLS[platform.machine()]
    size = ctypes.c_ulong(_MAX_NODES if nodes else 0)
    mask = ctypes.byref(words) if nodes else ctypes.c_void_p(None)
    result = files.libc().syscall(ctypes.c_long(numbers[0]), ctypes.c_long(mode), mask, size)
    return bool(result == 0)


@contextlib.contextmanager
def interleaved(nodes: list[int]) -> Iterator[bool]:
    """Interleave what this thread allocates in the body over `nodes`: whether that is so.

    Nothing changes if a policy was chosen from outside (numactl), if there are no two nodes, or if
    the container forbids the call.
    """
    if len(nodes) < 2 or policy() != MPOL_DEFAULT or not _set_policy(MPOL_INTERLEAVE, nodes):
        yield False
        return
    try:
        yield True
    finally:
        _set_policy(MPOL_DEFAULT, [])
