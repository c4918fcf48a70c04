# SPDX-License-Identifier: Apache-2.0
"""A network between two instances on one host, which can be slow, silent, or cut.

Listens on an address of its own (127.0.0.2) on the owner's ports, so that sessions and data pass
both, each on its own terms. Runs a loop in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Self

THERE = "127.0.0.1"
HERE = "127.0.0.2"
PART = 64 << 10


class Proxy:
    """See the head of this module.

    Parameters
    ----------
    ports : sequence of int
        The owner's, the same here.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._open: dict[int, asyncio.Event] = {}
        self._seconds = dict.fromkeys(ports, 0.0)
        self._tasks: list[asyncio.Future[None]] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()
        self._end = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    # From the test's thread.
    def hold(self, *ports: int) -> None:
        """Nothing passes any more, and nobody is told: as when a cable is pulled."""
        for port in ports or self._ports:
            self._loop.call_soon_threadsafe(self._open[port].clear)

    def let(self) -> None:
        """Everything passes, what was held included."""
        for port in self._ports:
            self._seconds[port] = 0.0
            self._loop.call_soon_threadsafe(self._open[port].set)

    def slow(self, port: int, seconds: float) -> None:
        """Each part of 64 KiB takes so long."""
        self._seconds[port] = seconds

    def cut(self) -> None:
        """Connections end, on both sides."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    # In the loop.
    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        servers = []
        for port in self._ports:
            self._open[port] = asyncio.Event()
            self._open[port].set()

            # Not a coroutine: a task of the streams' own that is cancelled is an error to them.
            def pass_on(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                self._tasks.append(asyncio.ensure_future(self._pass(reader, writer, port)))

            servers.append(await asyncio.start_server(pass_on, HERE, port, limit=PART))
        self._started.set()
        await self._end.wait()
        for server in servers:
            server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        self._writers.add(writer)
        try:
            # A network that is cut takes no connections either, but one that was on its way comes.
            await self._open[port].wait()
            there, out = await asyncio.open_connection(THERE, port, limit=PART)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(out)
        try:
            await asyncio.gather(self._pump(reader, out, port), self._pump(there, writer, port))
        finally:
            for one in (writer, out):
                one.transport.abort()
                self._writers.discard(one)

    async def _pump(
        self, source: asyncio.StreamReader, into: asyncio.StreamWriter, port: int
    ) -> None:
        try:
            while data := await source.read(PART):
                await self._open[port].wait()
                if self._seconds[port]:
                    await asyncio.sleep(self._seconds[port])
                    await self._open[port].wait()
                into.write(data)
                await into.drain()
        except OSError:
            pass  # one end is gone; the other is told next
        finally:
            if self._open[port].is_set():
                into.transport.abort()
