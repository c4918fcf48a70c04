# SPDX-License-Identifier: Apache-2.0
"""The owner of ``benchmarks.peer``, in a process of its own: memory that a transport serves.

Prints its offer; ends with its standard input. A lease's number is the size of its chunks.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
import threading
from collections.abc import Sequence

import numpy as np
import uvloop

from kvtier.tiers.p2p.tcp import TcpTransport
from kvtier.tiers.p2p.transport import Lease, Source

SESSION = b"reader"
SEED = 1


class Memory:
    """Host memory as a region has it, in huge pages where the kernel gives them."""

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self._mapping, dtype=np.uint8)
        self.array[:] = 0

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


async def serve(size: int, chunk_sizes: Sequence[int]) -> None:
    memory = Memory(size)
    memory.array[:] = content(size)
    leases: dict[int, Lease] = {one: Always(memory.views(one)) for one in chunk_sizes}
    transport = TcpTransport("127.0.0.1", 0, lambda session, number: leases.get(number))
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
    size, *chunk_sizes = map(int, sys.argv[1:])
    uvloop.run(serve(size, chunk_sizes))


if __name__ == "__main__":
    main()
