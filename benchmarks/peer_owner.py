# SPDX-License-Identifier: Apache-2.0
"""The owner of ``benchmarks.peer``, in a process of its own: memory that a transport serves.

Prints its offer; ends with its standard input. A lease's number is the size of its chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import uvloop

from kvtier.host import huge
from kvtier.tiers.p2p.tcp import TcpTransport
from kvtier.tiers.p2p.transport import Lease, Source, Transport
from kvtier.tiers.p2p.ucx import UcxTransport

SESSION = b"reader"
SEED = 1
UNIT_BYTES = 64 << 10
"""Of a slot as UCX counts: chunks are a number of these."""


class Memory:
    """Host memory.

    Parameters
    ----------
    size : int
    kind : {"kvtier", "vllm", "blank"}
        Shared memory as kvtier's region has it, in huge pages where the kernel gives them, or as
        vLLM's, in small ones. Or as ``ucx_perftest`` has it: in huge pages, and nobody has written
        it, so that what is read there is one page of zeros, in the caches.
    """

    def __init__(self, size: int, kind: str = "kvtier") -> None:
        if kind == "blank":
            self._mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self.array = np.frombuffer(self._mapping, dtype=np.uint8)
        else:
            file = os.memfd_create("kvtier-benchmark")
            os.ftruncate(file, size)
            if kind == "kvtier":
                huge.fill(file, 0, size)
            mapped = (ctypes.c_uint8 * size).from_address(huge.map_shared(file, 0, size))
            os.close(file)
            self.array = np.frombuffer(mapped, dtype=np.uint8)
            self.array[:] = 0
        self.address: int = self.array.ctypes.data
        self.length_bytes = size

    def views(self, size: int) -> list[memoryview]:
        """The memory in chunks of `size`."""
        return [self.array.data[at : at + size] for at in range(0, len(self.array), size)]


def content(size: int) -> np.ndarray:
    """What the owner's memory holds."""
    return np.random.default_rng(SEED).integers(0, 256, size, dtype=np.uint8)


class Always:
    """A lease without an end."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.sources = [Source(view, 0) for view in views]

    def begin(self) -> bool:
        return True

    def end(self) -> None:
        """Nobody counts here."""


def make(transport: str, memory: Any, chunk_sizes: Sequence[int]) -> Transport:
    """The transport over this memory."""
    if transport == "ucx":
        return UcxTransport(memory, UNIT_BYTES, everywhere=True)
    leases: dict[int, Lease] = {one: Always(memory.views(one)) for one in chunk_sizes}
    return TcpTransport("127.0.0.1", 0, lambda session, number: leases.get(number))


async def serve(name: str, size: int, chunk_sizes: Sequence[int], *, blank: bool) -> None:
    memory = Memory(size, "blank" if blank else "kvtier")
    if not blank:
        memory.array[:] = content(size)
    transport = make(name, memory, chunk_sizes)
    await transport.open()
    print(transport.offer(SESSION).hex(), flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True).start()
    await ended.wait()
    await transport.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("transport", choices=("tcp", "ucx"))
    parser.add_argument("size", type=int)
    parser.add_argument("chunk_sizes", type=int, nargs="*")
    parser.add_argument("--blank", action="store_true")
    args = parser.parse_args()
    uvloop.run(serve(args.transport, args.size, args.chunk_sizes, blank=args.blank))


if __name__ == "__main__":
    main()
