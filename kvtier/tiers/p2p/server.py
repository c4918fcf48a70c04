# SPDX-License-Identifier: Apache-2.0
"""The owner's side of sessions: a ZeroMQ ROUTER that answers peers which want to read.

Runs on the service's loop. Owns the socket, the sessions of others with this instance, and what
they have leased or wait for (through ``Sharing``). Invariants: nothing is told to a peer that has
not proven the token and the namespace; a session that is silent, or says what it must not, ends
with all it has; the number of sessions and the size of a message are bounded.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import zmq
import zmq.asyncio

from kvtier.errors import ConfigError
from kvtier.tiers.p2p import wire
from kvtier.tiers.p2p.sharing import Sharing
from kvtier.tiers.p2p.sockets import Secure, make_socket, send_now
from kvtier.tiers.p2p.transport import Transport
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome, Presence

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
MAX_TASKS = 1024
"""Leases that are being given."""
MAX_PUSHES = 4
"""Of one session under way; of more, none is taken."""
MAX_STRANGERS = 256
"""Handshakes under way."""
HANDSHAKE_SECONDS = 5.0
SILENT_BEATS = 3
"""A session without a message for so many heartbeats has ended."""
SWEEP_SECONDS = 0.25
BIND_SECONDS = 2.0
"""A port that was just given up is free a little later."""
LOG_SECONDS = 10.0
"""One line about refusals in so long."""
ANEW = ("session", "handshake")
"""Refusals that a reader gets that was there before this start, or was silent for too long."""


class Stranger(msgspec.Struct):
    """A peer between ``Hello`` and ``Proof``."""

    hello: wire.Hello
    nonce: bytes
    until: float


class Session(msgspec.Struct):
    """A peer that may read."""

    instance: bytes
    transport: str
    heard_at: float
    pushes: int = 0
    """Under way."""


class Server:
    """Listens.

    Parameters
    ----------
    context : zmq.asyncio.Context
    endpoint : str
        ``tcp://host:port``.
    instance : bytes
        Random, of this start.
    token : bytes
        Empty: none is asked for.
    namespace : mapping of str
    transports : sequence of Transport
    sharing : Sharing
    room : callable
        Chunks that peers may push here.
    on_push : callable
        Takes the instance that pushes, its address and the keys; gives an outcome for each.
    on_doubt : callable
        Takes keys whose bytes a reader found to be others.
    heartbeat_seconds : float
    secure : Secure
    count : callable
        Takes the cause of each refusal, for metrics.
    clock : callable
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        instance: bytes,
        token: bytes,
        namespace: Mapping[str, str],
        transports: Sequence[Transport],
        sharing: Sharing,
        room: Callable[[], int],
        on_push: Callable[[bytes, str, Sequence[bytes]], Awaitable[list[Outcome]]],
        on_doubt: Callable[[Sequence[bytes]], None],
        heartbeat_seconds: float,
        secure: Secure,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._instance = instance
        self._token = token
        self._namespace = dict(namespace)
        self._transports = {transport.name: transport for transport in transports}
        self._sharing = sharing
        self._room = room
        self._on_push = on_push
        self._on_doubt = on_doubt
        self._silence_seconds = SILENT_BEATS * heartbeat_seconds
        self._secure = secure
        self._count = count
        self._clock = clock
        self._tasks = TaskSet("kvtier-p2p-server")
        self._socket: zmq.asyncio.Socket | None = None
        self._strangers: dict[bytes, Stranger] = {}
        self._sessions: dict[bytes, Session] = {}
        self._logged_at = -LOG_SECONDS

    @property
    def sessions(self) -> int:
        """That stand."""
        return len(self._sessions)

    async def open(self) -> None:
        """Listen.

        Raises
        ------
        ConfigError
            The address is not to be had.
        """
        until = self._clock() + BIND_SECONDS
        while True:
            socket = make_socket(self._context, zmq.ROUTER, self._secure)
            try:
                socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                socket.bind(self._endpoint)
            except zmq.ZMQError as exc:
                socket.close(0)
                if exc.errno == zmq.EADDRINUSE and self._clock() < until:
                    await asyncio.sleep(0.05)
                    continue
                what = {
                    zmq.EADDRINUSE: "another process listens there: set another port",
                    zmq.EADDRNOTAVAIL: "it is no address of this host: set host to one, or to "
                    "0.0.0.0 for all",
                    errno.ENODEV: "its name is no address of this host: set host to one",
                }.get(exc.errno or 0, str(exc))
                raise ConfigError(f"p2p: cannot listen on {self._endpoint}: {what}") from exc
            break
        self._socket = socket
        self._tasks.start(self._receive(socket), "receive")
        self._tasks.start(self._sweep(), "sweep")

    async def aclose(self) -> None:
        """Tell all sessions, and end them. Idempotent."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        for identity in list(self._sessions):
            self._send(socket, identity, wire.Bye())
            self._end(identity)
        self._strangers.clear()
        await self._tasks.aclose()
        # A revocation that was cut is nothing that has to end: the transport itself ends next.
        # Farewells are on their way when the loop has had a turn; nobody depends on them.
        await asyncio.sleep(0)
        socket.close(0)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 2:
                self._count("frames")
                continue
            identity, data = frames
            try:
                message = wire.owner_decoder.decode(data)
            except (msgspec.MsgspecError, ValueError):
                self._refuse(socket, identity, "message")
                continue
            try:
                self._take(socket, identity, message)
            except Exception:
                # One peer's message must not end the service of the others.
                log.exception("p2p: a message of a peer failed")
                self._refuse(socket, identity, "internal")

    def _take(self, socket: zmq.asyncio.Socket, identity: bytes, message: wire.ToOwner) -> None:
        match message:
            case wire.Hello():
                self._greet(socket, identity, message)
                return
            case wire.Proof():
                self._admit(socket, identity, message)
                return
            case wire.Bye():
                self._end(identity)
                return
        session = self._sessions.get(identity)
        if session is None:
            self._refuse(socket, identity, "session")
            return
        session.heard_at = self._clock()
        match message:
            case wire.Ask():
                self._answer(socket, identity, message)
            case wire.Unwatch():
                self._sharing.unwatch(identity, message.job)
            case wire.Lend():
                if len(self._tasks) < MAX_TASKS:
                    self._tasks.start(self._lend(socket, identity, message), "lend")
                else:
                    dropped = bytes([Outcome.DROPPED]) * len(message.keys)
                    self._send(socket, identity, wire.Lent(message.job, 0, dropped, b"", b""))
            case wire.Push():
                if session.pushes < MAX_PUSHES:
                    session.pushes += 1
                    self._tasks.start(self._push(socket, identity, session, message), "push")
                else:
                    dropped = bytes([Outcome.DROPPED]) * len(message.keys)
                    self._send(socket, identity, wire.Taken(message.job, dropped))
            case wire.Doubt():
                self._on_doubt(message.keys)
            case wire.Return():
                self._sharing.take_back(identity, message.lease)
            case wire.Ping():
                self._send(socket, identity, wire.Pong(message.number, self._room()))

    # Handshake.
    def _greet(self, socket: zmq.asyncio.Socket, identity: bytes, hello: wire.Hello) -> None:
        self._end(identity)  # it begins anew
        if hello.version != wire.VERSION:
            refused = wire.Refused("version", str(wire.VERSION), str(hello.version))
            self._refuse(socket, identity, "version", refused)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        nonce = os.urandom(wire.NONCE_BYTES)
        self._strangers[identity] = Stranger(hello, nonce, self._clock() + HANDSHAKE_SECONDS)
        mac = wire.mac(self._token, b"owner", hello, nonce, self._instance)
        self._send(socket, identity, wire.Challenge(wire.VERSION, self._instance, nonce, mac))

    def _admit(self, socket: zmq.asyncio.Socket, identity: bytes, proof: wire.Proof) -> None:
        # A nonce is good for one try: what was recorded elsewhere proves nothing here.
        stranger = self._strangers.pop(identity, None)
        if stranger is None or self._clock() >= stranger.until:
            self._refuse(socket, identity, "handshake")
            return
        mac = wire.mac(self._token, b"reader", stranger.hello, stranger.nonce, self._instance)
        if not hmac.compare_digest(mac, proof.mac):
            self._refuse(socket, identity, "token")
            return
        for field in sorted({*self._namespace, *proof.namespace}):
            mine, theirs = self._namespace.get(field), proof.namespace.get(field)
            if mine != theirs:
                self._refuse(socket, identity, "namespace", refusal(field, mine, theirs))
                return
        for name in proof.transports:
            if name in self._transports and self._transports[name].suits(proof.boot):
                break
        else:
            mine, theirs = ", ".join(self._transports), ", ".join(proof.transports)
            self._refuse(socket, identity, "transport", refusal("transport", mine, theirs))
            return
        if len(self._sessions) >= MAX_SESSIONS:
            refused = wire.Refused("sessions", f"at most {MAX_SESSIONS}", "")
            self._refuse(socket, identity, "sessions", refused)
            return
        self._sessions[identity] = Session(stranger.hello.instance, name, self._clock())
        self._send(
            socket,
            identity,
            wire.Welcome(name, self._transports[name].offer(identity), self._room()),
        )

    # Sessions.
    def _answer(self, socket: zmq.asyncio.Socket, identity: bytes, ask: wire.Ask) -> None:
        states = self._sharing.ask(ask.keys, ask.request, ask.windowed)
        if not self._send(socket, identity, wire.Have(ask.job, states)):
            return
        if not ask.watch_ms or Presence.PENDING not in states:
            return
        awaited = {i: ask.keys[i] for i, one in enumerate(states) if one == Presence.PENDING}

        def tell(positions: list[int], news: list[Presence]) -> None:
            packed = wire.packed(positions)
            self._send(socket, identity, wire.News(ask.job, packed, bytes(news)))

        seconds = ask.watch_ms / 1000
        self._sharing.watch(identity, ask.job, awaited, ask.request, seconds, tell)

    async def _lend(self, socket: zmq.asyncio.Socket, identity: bytes, lend: wire.Lend) -> None:
        lease, outcomes = await self._sharing.lend(identity, lend.keys, lend.milliseconds / 1000)
        slots = wire.packed([item.slot for item in lease.items])
        crcs = wire.packed_crcs([item.crc for item in lease.items])
        lent = wire.Lent(lend.job, lease.number, bytes(outcomes), slots, crcs)
        # The session may have ended meanwhile, and what it had with it.
        if identity not in self._sessions or not self._send(socket, identity, lent):
            self._sharing.take_back(identity, lease.number)

    async def _push(
        self, socket: zmq.asyncio.Socket, identity: bytes, session: Session, push: wire.Push
    ) -> None:
        outcomes = [Outcome.INTERNAL] * len(push.keys)
        try:
            outcomes = await self._on_push(session.instance, push.address, push.keys)
        finally:
            session.pushes -= 1
            if identity in self._sessions:
                self._send(socket, identity, wire.Taken(push.job, bytes(outcomes)))

    def _end(self, identity: bytes) -> None:
        """Let go of all that a session has; what is being read stays pinned until its transport is
        through with it."""
        self._strangers.pop(identity, None)
        session = self._sessions.pop(identity, None)
        if session is not None:
            self._sharing.drop(identity)
            self._tasks.start(self._transports[session.transport].revoke(identity), "revoke")

    def _refuse(
        self,
        socket: zmq.asyncio.Socket,
        identity: bytes,
        cause: str,
        refused: wire.Refused | None = None,
    ) -> None:
        """End what there is with that peer, tell it why, and count that."""
        self._count(cause)
        refused = refused or wire.Refused(cause, "", "")
        self._end(identity)
        self._send(socket, identity, refused)
        now = self._clock()
        if refused.field not in ANEW and now >= self._logged_at + LOG_SECONDS:
            self._logged_at = now
            log.warning("p2p: a peer was refused: %s", explanation(refused))

    def _send(self, socket: zmq.asyncio.Socket, identity: bytes, message: wire.ToReader) -> bool:
        """Whether it is on its way."""
        return send_now(socket, [identity, wire.encode(message)])

    async def _sweep(self) -> None:
        """Ends what is over: sessions that are silent, handshakes, leases."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._clock()
            for identity, stranger in list(self._strangers.items()):
                if now >= stranger.until:
                    del self._strangers[identity]
            for identity, session in list(self._sessions.items()):
                if now >= session.heard_at + self._silence_seconds:
                    self._count("silent")
                    self._end(identity)
            for _ in range(self._sharing.expire()):
                self._count("lease")


def refusal(field: str, mine: str | None, theirs: str | None) -> wire.Refused:
    """A field that differs, with both values as far as they fit."""
    return wire.Refused(field[:64], (mine or "none")[:512], (theirs or "none")[:512])


def explanation(refused: wire.Refused) -> str:
    """A refusal as a person reads it."""
    match refused.field:
        case "token":
            return "its token is another one: set the same token on all instances"
        case "version":
            return f"versions differ: the owner has {refused.owner}, the reader {refused.reader}"
        case "transport":
            return (
                f"no transport in common: the owner has {refused.owner}, the reader "
                f"{refused.reader}; set transport: tcp on both"
            )
        case "session" | "handshake":
            return "it has started anew"
        case "sessions" | "message" | "internal":
            return f"{refused.field} {refused.owner}".strip()
    return (
        f"the namespaces differ in {refused.field}: the owner has {refused.owner!r}, the reader "
        f"{refused.reader!r}"
    )
