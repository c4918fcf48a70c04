# SPDX-License-Identifier: Apache-2.0
"""What both ends of a TCP connection share: the frames, and a socket on the loop.

All numbers are little-endian. The reader says HELLO, the owner WELCOME; then any number of
REQUESTs, each answered in order by an ANSWER and, if it was granted, the chunks back to back.

Why plain sockets and the loop's readiness calls, not its transports: one system call takes many
chunks, the kernel's buffers are the only ones, and nobody but this loop's thread ever touches a
chunk. So a closed socket is the proof that its memory is free again, and ending a connection takes
no wait. Owns a socket and a timer a connection.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Sequence

MAGIC = b"KVTP"
VERSION = 1

HELLO = struct.Struct("<4sHQ16s")
"""Magic, version, number of the ticket, its secret."""
WELCOME = struct.Struct("<4sH")
"""Magic, version."""
REQUEST = struct.Struct("<IQII")
"""Number of the request, lease, first chunk, count of chunks."""
ANSWER = struct.Struct("<IIQ")
"""Number of the request, status, bytes that follow."""

GRANTED, ENDED, REFUSED = range(3)
"""Statuses: bytes follow; no such lease (any more); the lease has no such chunks."""

SECRET_BYTES = 16
MAX_REQUESTS = 64
"""Unanswered on a connection; a reader holds the others back, an owner ends who sends more."""
MAX_CHUNKS = 1 << 16
"""Of a request."""
MAX_BUFFERS = 256
"""Chunks a system call; the kernel takes 1,024."""
SEND_BYTES = 512 << 10
RECEIVE_BYTES = 1 << 20
"""At most, a system call: others wait for so long. With more, the two ends take turns instead of
working at the same time, and what passes leaves the processors' caches."""


class Span:
    """The memory of one read, chunk after chunk, and how far it has got."""

    __slots__ = ("_index", "_offset", "_views", "left")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._offset = 0
        self.left = sum(map(len, views))
        """Bytes."""

    def add_to(self, buffers: list[memoryview], room: int) -> int:
        """Put what comes next behind `buffers`, at most `room` bytes. Returns the room left."""
        views, index, offset = self._views, self._index, self._offset
        while room and index < len(views) and len(buffers) < MAX_BUFFERS:
            view = views[index]
            if offset or len(view) > room:
                view = view[offset : offset + room]
                offset = 0
            buffers.append(view)
            room -= len(view)
            index += 1
        return room

    def advance(self, count: int) -> None:
        """`count` bytes have been moved."""
        self.left -= count
        views, index = self._views, self._index
        count += self._offset
        while index < len(views) and count >= len(views[index]):
            count -= len(views[index])
            index += 1
        self._index, self._offset = index, count


class Connection:
    """A socket on the loop, and a timer that ends it when nothing moves.

    Subclasses have the two callbacks; each makes at most a few system calls.
    """

    def __init__(self, sock: socket.socket, stall_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._stall_seconds = stall_seconds
        self._moved = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing = False
        self.is_closed = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Let go at once: what the kernel has not sent is dropped, and the other side hears of it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # While nothing is under way, only this finds out that the other host has vanished.
        seconds = max(1, int(stall_seconds))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def _on_readable(self) -> None:
        raise NotImplementedError

    def _on_writable(self) -> None:
        raise NotImplementedError

    def _error(self) -> OSError | None:
        """What has happened to the connection. To be asked after each event that was answered with
        success: uvloop (libuv) reports a reset socket once and never again, also if there is still
        something to read before the reset shows.
        """
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return OSError(code, os.strerror(code)) if code else None

    def _is_busy(self) -> bool:
        """Whether bytes are expected to move."""
        raise NotImplementedError

    def _on_stall(self) -> None:
        raise NotImplementedError

    def _await_writable(self, wanted: bool) -> None:
        if wanted != self._is_writing:
            self._is_writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._on_writable)
            else:
                self._loop.remove_writer(self._fd)

    def _watch(self) -> None:
        """Called before something gets under way."""
        if not self._is_busy():
            self._moved = time.monotonic()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._is_busy():
            return
        left = self._moved + self._stall_seconds - time.monotonic()
        if left <= 0:
            self._on_stall()
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _close(self) -> None:
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop.remove_reader(self._fd)
        self._await_writable(False)
        self._sock.close()


def again(error: OSError) -> OSError:
    """Another of the same kind, for another coroutine."""
    return type(error)(*error.args)


def protocol_error(message: str) -> OSError:
    return OSError(errno.EPROTO, message)
