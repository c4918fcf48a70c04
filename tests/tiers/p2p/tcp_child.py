# SPDX-License-Identifier: Apache-2.0
"""One end of a TCP transport in a process of its own, to be stopped or killed.

``owner COUNT SIZE`` prints its offer and serves lease 1; ``reader OFFER COUNT SIZE`` reads that
lease of another process again and again, so that a read is always under way, and prints a line
after the first time. Both end with their standard input.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time

from kvtier.tiers.p2p.tcp import TcpTransport
from kvtier.tiers.p2p.transport import Lease, Source, Target

SESSION = b"reader"


class Always:
    """A lease without an end."""

    def __init__(self, count: int, size: int) -> None:
        self.sources = [Source(memoryview(bytes([i & 255]) * size), 0) for i in range(count)]

    def begin(self) -> bool:
        return True

    def end(self) -> None:
        """Nobody counts here."""


async def own(count: int, size: int) -> None:
    lease = Always(count, size)

    def find(session: bytes, number: int) -> Lease | None:
        return lease if (session, number) == (SESSION, 1) else None

    transport = TcpTransport("127.0.0.1", 0, find)
    await transport.open()
    print(transport.offer(SESSION).hex(), flush=True)
    await ended()
    await transport.aclose()


async def read(offer: bytes, count: int, size: int) -> None:
    transport = TcpTransport("127.0.0.1", 0, lambda session, number: None)
    await transport.open()
    link = await transport.connect("127.0.0.1", offer, time.monotonic() + 10)
    targets = [Target(i, memoryview(bytearray(size)), 0) for i in range(count)]
    await link.read(1, 0, targets)
    print("read", flush=True)
    end = asyncio.ensure_future(ended())

    async def again() -> None:
        while not end.done():
            await link.read(1, 0, targets)

    await asyncio.gather(again(), again(), again())
    await transport.aclose()


async def ended() -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=wait, daemon=True).start()
    await done


def main() -> None:
    if sys.argv[1] == "owner":
        asyncio.run(own(int(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(read(bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))


if __name__ == "__main__":
    main()
