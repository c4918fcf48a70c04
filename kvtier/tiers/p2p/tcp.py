# SPDX-License-Identifier: Apache-2.0
"""Chunks over TCP: the transport, and the owner's end, from its slots straight to the sockets.

Runs on the service's loop. Owns the listening socket, who may connect (tickets), the connections
that others made, and the links made here (``tcp_link``). The frames are in ``tcp_wire``.

Invariants: ``Lease.begin`` and ``Lease.end`` are in balance when a connection has ended; of a
session at most `MAX_CONNECTIONS`, without a session at most `MAX_STRANGERS` connections are open.
Bytes are neither encrypted nor verified here.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import secrets
import socket
import time
from collections import deque
from typing import Annotated, Any

import msgspec

from kvtier.errors import ClosedError, ConfigError
from kvtier.tiers.p2p.tcp_link import TcpLink
from kvtier.tiers.p2p.tcp_wire import (
    ANSWER,
    ENDED,
    GRANTED,
    HELLO,
    MAGIC,
    MAX_BUFFERS,
    MAX_CHUNKS,
    MAX_REQUESTS,
    REFUSED,
    REQUEST,
    SECRET_BYTES,
    SEND_BYTES,
    VERSION,
    WELCOME,
    Connection,
    Span,
    protocol_error,
)
from kvtier.tiers.p2p.transport import FindLease, Lease, Transport

MAX_OFFER_BYTES = 128
HELLO_SECONDS = 2.0
"""In which a connection has to show its ticket."""
MAX_STRANGERS = 64
"""Connections that have not shown one yet; one more, and the oldest goes."""
MAX_CONNECTIONS = 16
"""Of a session; one more, and the oldest goes, most likely one whose end has not been seen yet."""
BACKLOG = 128
ACCEPT_PAUSE_SECONDS = 1.0
"""When there is no descriptor for another connection."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What ``TcpTransport.offer`` says, as MessagePack."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class Counts(msgspec.Struct):
    """What became of connections that others made here."""

    admitted: int = 0
    wrong_tickets: int = 0
    no_ticket: int = 0
    """Nothing whole within the time, or gone before."""
    crowded_out: int = 0
    """By newer ones."""
    protocol_errors: int = 0
    stalled: int = 0
    """Their reader took no byte for too long."""


class _Answer:
    """What the owner has to send for one request."""

    __slots__ = ("lease", "span")

    def __init__(self, span: Span, lease: Lease | None) -> None:
        self.span = span
        self.lease = lease
        """Begun, not ended."""


class _Session:
    """Who may read, and its connections."""

    __slots__ = ("connections", "identity", "number", "secret")

    def __init__(self, identity: bytes, number: int) -> None:
        self.identity = identity
        self.number = number
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.connections: dict[_Served, None] = {}
        """In the order in which they came."""


class _Served(Connection):
    """The owner's end of a connection."""

    def __init__(self, sock: socket.socket, transport: TcpTransport) -> None:
        super().__init__(sock, transport.stall_seconds)
        self._transport = transport
        self._received = memoryview(bytearray(MAX_REQUESTS * REQUEST.size))
        self._filled = 0
        self._answers: deque[_Answer] = deque()
        self.session: _Session | None = None
        self._hello_timer: asyncio.TimerHandle | None = self._loop.call_later(
            HELLO_SECONDS, self._end_stranger
        )
        self._loop.add_reader(self._fd, self._on_readable)

    def _end_stranger(self) -> None:
        self._transport.counts.no_ticket += 1
        self.abort()

    def _on_readable(self) -> None:
        try:
            count = self._sock.recv_into(self._received[self._filled :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count or self._error() is not None:
            if self.session is None:
                self._transport.counts.no_ticket += 1
            self.abort()
            return
        self._filled += count
        try:
            self._take()
        except BaseException:
            self.abort()  # a fault of the leases; who asks again would be answered twice
            raise
        if self._answers and not self._is_writing:
            self._on_writable()

    def _take(self) -> None:
        """Understand what has come."""
        at = 0
        self._watch()
        if self.session is None:
            if self._filled < HELLO.size:
                return
            self.session = self._transport._admit(self, *HELLO.unpack_from(self._received))
            if self.session is None:
                self.abort()
                return
            assert self._hello_timer is not None
            self._hello_timer.cancel()
            self._hello_timer = None
            welcome = memoryview(WELCOME.pack(MAGIC, VERSION))
            self._answers.append(_Answer(Span([welcome]), None))
            at = HELLO.size
        while self._filled - at >= REQUEST.size:
            if len(self._answers) >= MAX_REQUESTS:
                self._transport.counts.protocol_errors += 1
                self.abort()
                return
            self._answers.append(self._answer(*REQUEST.unpack_from(self._received, at)))
            at += REQUEST.size
        rest = self._filled - at
        self._received[:rest] = self._received[at : self._filled]
        self._filled = rest

    def _answer(self, number: int, lease_number: int, first: int, count: int) -> _Answer:
        assert self.session is not None
        lease = self._transport.find_lease(self.session.identity, lease_number)
        status, views = GRANTED, []
        if lease is None:
            status = ENDED
        elif not 0 < count <= MAX_CHUNKS or first + count > len(lease.sources):
            status, lease = REFUSED, None
        elif not lease.begin():
            status, lease = ENDED, None
        else:
            views = [source.view for source in lease.sources[first : first + count]]
        head = memoryview(ANSWER.pack(number, status, sum(map(len, views))))
        return _Answer(Span([head, *views]), lease)

    def _on_writable(self) -> None:
        """One system call: the kernel takes what it has room for, and has copied it then."""
        buffers: list[memoryview] = []
        room = SEND_BYTES
        for answer in self._answers:
            room = answer.span.add_to(buffers, room)
            if not room or len(buffers) == MAX_BUFFERS:
                break
        try:
            count = self._sock.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            count = 0
        except OSError:
            self.abort()
            return
        if count:
            self._moved = time.monotonic()
        while self._answers:
            answer = self._answers[0]
            part = min(count, answer.span.left)
            answer.span.advance(part)
            count -= part
            if answer.span.left:
                break
            self._answers.popleft()
            if answer.lease is not None:
                answer.lease.end()
        if not self.is_closed:
            self._await_writable(bool(self._answers))

    def _is_busy(self) -> bool:
        return bool(self._answers)

    def _on_stall(self) -> None:
        self._transport.counts.stalled += 1
        self.abort()

    def abort(self) -> None:
        """Let go at once. Idempotent."""
        if self.is_closed:
            return
        self._close()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        self._transport._forget(self)
        answers, self._answers = self._answers, deque()
        for answer in answers:
            if answer.lease is not None:
                answer.lease.end()


class TcpTransport(Transport):
    """See the head of this module.

    Parameters
    ----------
    host : str
        Address or name to listen on; a name's first address. ``::`` takes IPv4 as well.
    port : int
        0: any.
    find_lease : FindLease
    connections : int
        Of a link, at most; 1 to 8.
    stall_seconds : float
        Without a byte for so long while some are expected, a connection is given up.
    """

    name = "tcp"

    def __init__(
        self,
        host: str,
        port: int,
        find_lease: FindLease,
        *,
        connections: int = 1,
        stall_seconds: float = 10.0,
    ) -> None:
        self.find_lease = find_lease
        self.stall_seconds = stall_seconds
        self.counts = Counts()
        self._host = host
        self._port = port
        self._connections = connections
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._numbers = itertools.count()
        self._sessions: dict[bytes, _Session] = {}
        self._tickets: dict[int, _Session] = {}
        self._strangers: dict[_Served, None] = {}
        self._links: set[TcpLink] = set()

    @property
    def port(self) -> int:
        """That it listens on."""
        return self._port

    async def open(self) -> None:
        try:
            found = await _resolve(self._host, self._port)
        except socket.gaierror as exc:
            if exc.errno == socket.EAI_AGAIN:
                raise
            raise ConfigError(f"there is no host {self._host!r} to listen on: {exc}") from exc
        family, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            what = {
                errno.EADDRINUSE: "another process listens there; set another data_port",
                errno.EADDRNOTAVAIL: "it is no address of this host; set host to one, or to "
                "0.0.0.0 for all",
                errno.EACCES: "this process may not; set a data_port above 1023",
            }.get(exc.errno or 0)
            if what is not None:
                where = f"{self._host} port {self._port}" if self._port else self._host
                raise ConfigError(f"cannot listen on {where} for data: {what}") from exc
            raise
        self._listener = listener
        self._port = listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(listener.fileno(), self._on_connection)

    def _on_connection(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # No descriptor or memory for it; it stays in the queue, and the loop would spin.
            loop.remove_reader(self._listener.fileno())
            self._pause = loop.call_later(ACCEPT_PAUSE_SECONDS, self._accept_again)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self.counts.crowded_out += 1
            next(iter(self._strangers)).abort()
        try:
            served = _Served(sock, self)
        except OSError:
            sock.close()  # it has gone already
        else:
            self._strangers[served] = None

    def _accept_again(self) -> None:
        self._pause = None
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._on_connection)

    def _admit(
        self, served: _Served, magic: bytes, version: int, number: int, secret: bytes
    ) -> _Session | None:
        """Session whose ticket this is."""
        session = self._tickets.get(number)
        expected = bytes(SECRET_BYTES) if session is None else session.secret
        is_right = hmac.compare_digest(secret, expected)
        if session is None or not is_right or (magic, version) != (MAGIC, VERSION):
            self.counts.wrong_tickets += 1
            return None
        self.counts.admitted += 1
        del self._strangers[served]
        if len(session.connections) >= MAX_CONNECTIONS:
            self.counts.crowded_out += 1
            next(iter(session.connections)).abort()
        session.connections[served] = None
        return session

    def _forget(self, served: _Served) -> None:
        self._strangers.pop(served, None)
        if served.session is not None:
            served.session.connections.pop(served, None)

    def offer(self, session: bytes) -> bytes:
        """See ``Transport.offer``. The same again for the same session, until it is revoked."""
        if self._listener is None:
            raise ClosedError("the transport is not open")
        known = self._sessions.get(session)
        if known is None:
            known = _Session(session, next(self._numbers))
            self._sessions[session] = self._tickets[known.number] = known
        return msgspec.msgpack.encode(Offer(self._port, known.number, known.secret))

    async def revoke(self, session: bytes) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            del self._tickets[known.number]
            for served in tuple(known.connections):
                served.abort()

    async def connect(self, host: str, offer: bytes, deadline: float) -> TcpLink:
        if self._is_closed:
            raise ClosedError("the transport is closed")
        if len(offer) > MAX_OFFER_BYTES:
            raise protocol_error(f"an offer of {len(offer)} bytes")
        try:
            ticket = msgspec.msgpack.decode(offer, type=Offer)
        except msgspec.MsgspecError as exc:
            raise protocol_error(f"an offer that cannot be read: {exc}") from exc
        async with asyncio.timeout(deadline - time.monotonic()):
            found = await _resolve(host, ticket.port)
        hello = HELLO.pack(MAGIC, VERSION, ticket.number, ticket.secret)
        errors: list[OSError] = []
        for left, (family, address) in zip(range(len(found), 0, -1), found, strict=True):
            if self._is_closed:
                raise ClosedError("the transport is closed")
            link = TcpLink(
                family, address, hello, self._connections, self.stall_seconds, self._links
            )
            try:
                await link.open((deadline - time.monotonic()) / left)
            except OSError as exc:
                errors.append(exc)
            else:
                return link
        raise errors[-1]

    async def aclose(self) -> None:
        self._is_closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            if self._pause is not None:
                self._pause.cancel()
                self._pause = None
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        for identity in tuple(self._sessions):
            await self.revoke(identity)
        for served in tuple(self._strangers):
            served.abort()
        for link in tuple(self._links):
            await link.aclose()


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """Families and socket addresses. socket.gaierror if there is none."""
    kind = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        # An address needs no thread, and takes no time.
        found = socket.getaddrinfo(host, port, flags=numeric, **kind)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, **kind)
    except ValueError as exc:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host") from exc
    return [(family, address) for family, _, _, _, address in found]
