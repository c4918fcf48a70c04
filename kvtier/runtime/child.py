# SPDX-License-Identifier: Apache-2.0
"""Main program of the service's child process: ``python -m kvtier.runtime.child FD``.

Reads its set-up from the socket FD, runs a ``TierService`` over it, ends on EOF. Ignores SIGINT and
SIGTERM, which mean the model server: that one closes the socket when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, cast

import msgspec
import uvloop

from kvtier.host.region import Region
from kvtier.runtime import messages as m
from kvtier.runtime.memory import Memory
from kvtier.runtime.process import FRAME, FrameReader, Setup
from kvtier.runtime.service import TierService

NICE = 10
"""At equal priority the service triples the scheduler's 99th percentile on a full machine."""

POLICY = os.SCHED_BATCH
"""A thread that wakes up waits for a free processor or the next tick, rather than take that of the
scheduler: on a full machine the scheduler's 99th percentile is a third of what it is without."""

HANGUP_SECONDS = 10.0
"""How long after its parent's end a child may still take to end by itself."""


def main() -> None:
    """Run the service until the parent closes the socket."""
    fd = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Of a server that is nicer itself it stays as nice: less would need privileges.
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):  # a wish, refused by some sandboxes
        os.sched_setscheduler(0, POLICY, os.sched_param(0))
    # vLLM pins its processes to single cores; this one may run wherever the cgroup lets it. Some
    # sandboxes refuse the call, which is no reason to go without tiers.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    sock = socket.socket(fileno=fd)
    sock.setblocking(True)
    reader = FrameReader()
    frames: list[memoryview] = []
    while not frames:
        data = sock.recv(1 << 16)
        if not data:
            return
        frames = reader.feed(data)
    setup = msgspec.msgpack.decode(frames[0], type=Setup, dec_hook=_secret)
    logging.basicConfig(
        level=setup.log_level, format="%(levelname)s %(asctime)s [kvtier-service] %(message)s"
    )
    threading.Thread(target=_watchdog, args=(sock,), name="kvtier-watchdog", daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sock, setup, reader, frames[1:]))


def _secret(kind: type, value: Any) -> Any:
    return kind(value)


def _watchdog(sock: socket.socket) -> None:
    """End the process when its parent is gone and the loop hangs."""
    poller = select.poll()
    poller.register(sock.fileno(), 0)  # POLLHUP is always reported
    # A process that the parent has forked holds the other end of the socket as well.
    with contextlib.suppress(OSError):
        poller.register(os.pidfd_open(os.getppid()), select.POLLIN)
    poller.poll()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)  # the loop reads this as the end
    timer = threading.Event()
    timer.wait(HANGUP_SECONDS)
    os._exit(1)


async def _serve(
    sock: socket.socket, setup: Setup, reader: FrameReader, frames: list[memoryview]
) -> None:
    try:
        region = Region.from_fd(setup.region_fd)
    finally:
        # It shares the parent's lock on the file, which must not outlive the parent's descriptor.
        os.close(setup.region_fd)
    try:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        protocol = _Connection(reader, region)
        service = TierService(
            setup.config,
            setup.namespace,
            Memory(region),
            protocol.send,
            in_scheduler_process=False,
            replica=setup.replica,
        )
        protocol.service = service
        # Before the connection: what it reads comes later.
        protocol.start(frames)
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
        service.owner_has_read = lambda: transport.get_write_buffer_size() == 0
        try:
            await service.run()
        finally:
            await protocol.drained()
            transport.close()
    finally:
        region.close()


class _Connection(asyncio.Protocol):
    """The socket to the owner.

    Parameters
    ----------
    reader : FrameReader
        With what came behind the set-up.
    region : Region
        Its header has the count of frames, which is ahead of what is written.
    """

    def __init__(self, reader: FrameReader, region: Region) -> None:
        self._reader = reader
        self._region = region
        self._frames = 0
        self.service: TierService | None = None
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio's, but not their base.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)

    def start(self, frames: list[memoryview]) -> None:
        """Deliver the frames that came with the set-up."""
        for frame in frames:
            self._deliver(frame)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._deliver(frame)

    def _deliver(self, frame: memoryview) -> None:
        assert self.service is not None
        for message in m.service_decoder.decode(frame):
            self.service.deliver(message)

    def eof_received(self) -> bool:
        if self.service is not None:
            self.service.deliver(None)
        return True  # what is left to say may still go out

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._writable.set()
        if self.service is not None:
            self.service.deliver(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def send(self, messages: list[m.ToOwner]) -> None:
        """Frame for the owner; dropped when the owner is gone."""
        if self._lost or self._transport is None:
            return
        data = m.encoder.encode(messages)
        self._frames += 1
        self._region.service_frames = self._frames
        self._transport.write(FRAME.pack(len(data)) + data)

    async def drained(self) -> None:
        """Wait until all is written, at most two seconds."""
        try:
            async with asyncio.timeout(2.0):
                await self._writable.wait()
        except TimeoutError:
            logging.getLogger(__name__).warning("the owner does not read; last messages are lost")


if __name__ == "__main__":
    main()
