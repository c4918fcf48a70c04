# SPDX-License-Identifier: Apache-2.0
"""The reader's end of TCP: from the sockets straight into the reader's slots.

Runs on the service's loop. Owns the connections of a link. Invariant: when a read has returned or
raised, its memory is nobody's any more; a connection that might still write there is closed.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.tiers.p2p.tcp_wire import (
    ANSWER,
    ENDED,
    GRANTED,
    MAGIC,
    MAX_CHUNKS,
    MAX_REQUESTS,
    RECEIVE_BYTES,
    REFUSED,
    REQUEST,
    VERSION,
    WELCOME,
    Connection,
    Span,
    again,
    protocol_error,
)
from kvtier.tiers.p2p.transport import LeaseEndedError, Link, Target

SILENT_SECONDS = 1.0
"""A connection that has not moved for so long when a read on it is given up is the owner's fault:
without this each read in turn would wait for an owner whose data does not get through."""


class _Read:
    """One read on the reader's end."""

    __slots__ = ("number", "request", "span", "waiter")

    def __init__(
        self, number: int, request: bytes, span: Span, waiter: asyncio.Future[None]
    ) -> None:
        self.number = number
        self.request = request
        self.span = span
        self.waiter = waiter


class Channel(Connection):
    """The reader's end of a connection."""

    def __init__(
        self,
        family: int,
        address: Any,
        hello: bytes,
        stall_seconds: float,
        on_end: Callable[[Channel, bool], None],
    ) -> None:
        super().__init__(socket.socket(family, socket.SOCK_STREAM), stall_seconds)
        self._on_end = on_end
        self._to_send = bytearray(hello)
        self._numbers = itertools.count()
        self._head = memoryview(bytearray(ANSWER.size))
        self._head_filled = 0
        self._body: _Read | None = None
        """Whose chunks are coming."""
        self._sent: deque[_Read] = deque()
        self._waiting: deque[_Read] = deque()
        self._is_welcome = False
        self._is_connected = False
        self._cause: OSError | None = None
        self.welcome: asyncio.Future[None] = self._loop.create_future()
        """Done when the owner has taken the ticket."""
        self.pending_bytes = 0
        code = self._sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._break(OSError(code, os.strerror(code)))
            return
        self._moved = time.monotonic()
        self._watch()
        self._await_writable(True)

    @property
    def is_idle(self) -> bool:
        return not self._sent and not self._waiting

    async def read(self, lease: int, first: int, views: Sequence[memoryview]) -> None:
        """See ``Link.read``. On cancellation the connection is given up if the owner knows of this
        read."""
        if self._cause is not None:
            raise again(self._cause)
        number = next(self._numbers) & 0xFFFFFFFF
        read = _Read(
            number,
            REQUEST.pack(number, lease, first, len(views)),
            Span(views),
            self._loop.create_future(),
        )
        size = read.span.left
        self.pending_bytes += size
        self._watch()
        self._waiting.append(read)
        self._pump()
        try:
            await read.waiter
        except BaseException:
            is_left = read in self._waiting or read in self._sent
            if is_left and time.monotonic() - self._moved > SILENT_SECONDS:
                # Whoever gave up had waited long enough to say that the owner is not reached.
                self._break(TimeoutError(errno.ETIMEDOUT, "no byte until its reader gave up"))
            elif read in self._waiting:
                self._waiting.remove(read)
            elif read in self._sent:
                self.abort(ConnectionAbortedError("another read on this connection was cancelled"))
            raise
        finally:
            self.pending_bytes -= size
            # Its waiter has the exception, and the traceback this frame: a circle with the memory.
            del read

    def _pump(self) -> None:
        """Send the requests that may be under way."""
        if not self._is_welcome or self.is_closed:
            return
        while self._waiting and len(self._sent) < MAX_REQUESTS:
            read = self._waiting.popleft()
            self._to_send += read.request
            self._sent.append(read)
        if self._to_send and not self._is_writing:
            self._on_writable()

    def _on_writable(self) -> None:
        if not self._is_connected:
            error = self._error()
            if error is not None:
                self._break(error)
                return
            self._is_connected = True
            self._loop.add_reader(self._fd, self._on_readable)
        try:
            del self._to_send[: self._sock.send(self._to_send)]
        except (BlockingIOError, InterruptedError):
            pass  # the loop calls again when there is room
        except OSError as exc:
            self._break(exc)
            return
        self._await_writable(bool(self._to_send))

    def _on_readable(self) -> None:
        buffers: list[memoryview] = []
        room = RECEIVE_BYTES
        body = self._body
        if body is not None:
            room = body.span.add_to(buffers, room)
        in_body = RECEIVE_BYTES - room
        if body is None or in_body == body.span.left:
            # The next head in the same call.
            size = ANSWER.size if self._is_welcome else WELCOME.size
            buffers.append(self._head[self._head_filled : size])
        try:
            count = self._sock.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._break(exc)
            return
        if not count:
            self._break(ConnectionResetError(errno.ECONNRESET, "the owner closed the connection"))
            return
        self._moved = time.monotonic()
        if body is not None:
            part = min(count, in_body)
            count -= part
            body.span.advance(part)
            if not body.span.left:
                self._body = None
                self._finish(body)
        self._head_filled += count
        if count:
            self._take_head()
        error = None if self.is_closed else self._error()
        if error is not None:
            self._break(error)

    def _take_head(self) -> None:
        if not self._is_welcome:
            if self._head_filled < WELCOME.size:
                return
            self._head_filled = 0
            if WELCOME.unpack_from(self._head) != (MAGIC, VERSION):
                self._break(protocol_error("it speaks another protocol"))
                return
            self._is_welcome = True
            if not self.welcome.done():
                self.welcome.set_result(None)
            self._pump()
            return
        if not self._sent:
            self._break(protocol_error("it sends what nobody asked for"))
            return
        if self._head_filled < ANSWER.size:
            return
        self._head_filled = 0
        number, status, size = ANSWER.unpack_from(self._head)
        read = self._sent[0]
        if number != read.number or (status and size):
            self._break(protocol_error("it answers what was not asked"))
        elif status == ENDED:
            self._finish(read, LeaseEndedError("the lease has ended"))
        elif status == GRANTED and size == read.span.left:
            if size:
                self._body = read
            else:
                self._finish(read)
        elif status == GRANTED:
            self._break(protocol_error(f"{size} bytes instead of {read.span.left}"))
        elif status == REFUSED:
            self._break(protocol_error("the lease has no such chunks"))
        else:
            self._break(protocol_error(f"status {status}"))

    def _finish(self, read: _Read, error: Exception | None = None) -> None:
        self._sent.popleft()
        if not read.waiter.done():
            if error is None:
                read.waiter.set_result(None)
            else:
                read.waiter.set_exception(error)
        self._pump()

    def _is_busy(self) -> bool:
        return not self._is_welcome or not self.is_idle

    def _on_stall(self) -> None:
        self._break(TimeoutError(errno.ETIMEDOUT, f"no byte for {self._stall_seconds:g} s"))

    def _break(self, error: OSError) -> None:
        self._end(error, by_peer=True)

    def abort(self, error: OSError) -> None:
        """Let go at once; reads under way fail with `error`. Idempotent."""
        self._end(error, by_peer=False)

    def _end(self, error: OSError, *, by_peer: bool) -> None:
        if self.is_closed:
            return
        self._close()
        self._cause = again(error)  # without its traceback, and the memory that stands there
        reads = [*self._sent, *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        self._body = None
        for waiter in (self.welcome, *(read.waiter for read in reads)):
            if not waiter.done():
                waiter.set_exception(again(error))
        if self.welcome.done() and not self.welcome.cancelled():
            self.welcome.exception()  # whoever waits for it gets it; perhaps nobody does
        self._on_end(self, by_peer)


class TcpLink(Link):
    """Up to `connections` connections to one owner, made when reads want them.

    A cancelled read costs its connection, and the other reads on it; the next read makes another.
    If it had waited in vain, that ends the link, as does whatever else ends a connection: it is the
    owner's end.
    """

    def __init__(
        self,
        family: int,
        address: Any,
        hello: bytes,
        connections: int,
        stall_seconds: float,
        links: set[TcpLink],
    ) -> None:
        self._links = links
        self._family = family
        self._address = address
        self._hello = hello
        self._connections = connections
        self._stall_seconds = stall_seconds
        self._channels: list[Channel] = []
        self._is_broken = False

    def _add(self) -> Channel:
        channel = Channel(
            self._family, self._address, self._hello, self._stall_seconds, self._ended
        )
        if not channel.is_closed:
            self._channels.append(channel)
        return channel

    async def open(self, seconds: float) -> None:
        """Make the first connection. OSError, TimeoutError."""
        self._links.add(self)
        try:
            channel = self._add()
            async with asyncio.timeout(seconds):
                await channel.welcome
        except BaseException:
            self.abort()
            raise

    async def read(self, lease: int, first: int, targets: Sequence[Target]) -> None:
        if len(targets) > MAX_CHUNKS:
            raise ValueError(f"{len(targets)} chunks in a read; at most {MAX_CHUNKS}")
        if self._is_broken:
            raise ConnectionResetError(errno.ECONNRESET, "the link is broken")
        if not targets:
            return
        channel = min(self._channels, key=lambda one: one.pending_bytes, default=None)
        if channel is None or (not channel.is_idle and len(self._channels) < self._connections):
            channel = self._add()
        await channel.read(lease, first, [target.view for target in targets])

    def _ended(self, channel: Channel, by_peer: bool) -> None:
        if channel in self._channels:
            self._channels.remove(channel)
        if by_peer:
            self.abort()

    @property
    def is_usable(self) -> bool:
        return not self._is_broken

    def abort(self) -> None:
        """``aclose`` without a wait."""
        self._is_broken = True
        self._links.discard(self)
        for channel in tuple(self._channels):
            channel.abort(ConnectionAbortedError(errno.ECONNABORTED, "the link was closed"))

    async def aclose(self) -> None:
        self.abort()
