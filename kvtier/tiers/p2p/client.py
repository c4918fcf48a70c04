# SPDX-License-Identifier: Apache-2.0
"""The reader's side of a session: one DEALER to one peer, its handshake, questions and leases.

Runs on the service's loop. Owns the socket and the link to the peer while the session stands.
Invariants: every call ends by its deadline, with an answer or ``PeerLostError``; when a session
ends, every call on it has ended, and its link is closed; a session fails once, whoever finds out;
a peer that failed is left alone for a while, and then dialled again beside those who ask, who wait
for that only a little.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvtier.errors import PeerLostError
from kvtier.tiers.p2p import wire
from kvtier.tiers.p2p.addresses import Address
from kvtier.tiers.p2p.names import Names
from kvtier.tiers.p2p.server import ANEW, SILENT_BEATS, explanation
from kvtier.tiers.p2p.sockets import Secure, make_socket, send_now
from kvtier.tiers.p2p.transport import Link, Transport
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome, Presence

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", wire.Have, wire.Lent, wire.Taken)

AGAIN_SECONDS = 0.5
"""A peer that failed is dialled again after so long, doubled with each further failure."""
MAX_AGAIN_SECONDS = 5.0
AGAIN_PATIENCE_SECONDS = 0.25
"""So long a call waits for a peer that has failed and is dialled again: a dead one has cost a
deadline before, and one that lives answers in less on most networks."""
REFUSED_AGAIN_SECONDS = 30.0
"""One that refused this instance; its configuration has to change, or this one's."""
CALLS = 10_000
"""Answers that may be awaited at a time."""


class Self(PeerLostError):
    """The peer is this instance."""


class Refusal(PeerLostError):
    """The peer does not want this instance, or is not what it should be."""


class Watched:
    """What a peer has said of keys, and goes on saying of those that it was still to write."""

    def __init__(self) -> None:
        self.states: dict[bytes, Presence] = {}
        self.jobs: dict[int, list[bytes]] = {}
        """Questions, each with its keys."""
        self.lost: PeerLostError | None = None
        """Nothing more will be said."""
        self.news: Callable[[], None] | None = None
        """To call when anything has been said."""

    def take(self, job: int, positions: Sequence[int], states: Sequence[Presence]) -> None:
        """News of the peer's. LookupError, ValueError if they fit no question."""
        keys = self.jobs[job]
        for position, state in zip(positions, states, strict=True):
            if position < 0:
                raise IndexError(position)
            self.states[keys[position]] = state
        self.tell()

    def lose(self, error: PeerLostError) -> None:
        """The session is over."""
        self.lost = self.lost or error
        self.tell()

    def tell(self) -> None:
        """Whoever waits has something to look at."""
        if self.news is not None:
            self.news()

    @property
    def pending(self) -> bool:
        """Whether anything is still awaited."""
        return Presence.PENDING in self.states.values()


class Lease(msgspec.Struct):
    """Chunks that a peer keeps for this instance."""

    number: int
    outcomes: list[Outcome]
    """One for each key asked for: DONE, MISSING, or DROPPED where too much is lent already."""
    slots: list[int]
    crcs: list[int]
    link: Link
    """Of the session that it belongs to: another one may have a lease of the same number."""


class PeerClient:
    """One peer, as seen by a reader.

    Parameters
    ----------
    context : zmq.asyncio.Context
    address : Address
    instance : bytes
        This one's.
    token : bytes
    namespace : mapping of str
    transports : sequence of Transport
        The best one first.
    boot : bytes
        Boot id of this host.
    heartbeat_seconds, connect_seconds : float
    secure : Secure
    names : Names
    count : callable
        Takes the cause of each failure, for metrics.
    clock : callable
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: Address,
        instance: bytes,
        token: bytes,
        namespace: Mapping[str, str],
        transports: Sequence[Transport],
        boot: bytes,
        heartbeat_seconds: float,
        connect_seconds: float,
        secure: Secure,
        names: Names,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.is_self = False
        """It turned out to be this instance."""
        self.room = 0
        """Chunks that it said it would take."""
        self.peer = b""
        """The instance at the other end of the session."""
        self.used_at = clock()
        self._context = context
        self._instance = instance
        self._token = token
        self._namespace = dict(namespace)
        self._transports = {transport.name: transport for transport in transports}
        self._without: set[str] = set()  # transports that lead nowhere
        self._boot = boot
        self._beat_seconds = heartbeat_seconds
        self._connect_seconds = connect_seconds
        self._secure = secure
        self._names = names
        self._count = count
        self._clock = clock
        self._tasks = TaskSet(f"kvtier-p2p-{address}")
        self._socket: zmq.asyncio.Socket | None = None
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._calls: dict[int, tuple[asyncio.Future[Any], type]] = {}
        self._watched: dict[int, Watched] = {}
        self._job = 0
        self._heard_at = 0.0
        self._failure: PeerLostError | None = None
        self._again_at = 0.0
        self._failures = 0
        self._told = ""
        self._closing = False

    @property
    def is_up(self) -> bool:
        """Whether a session stands."""
        return self._link is not None

    @property
    def is_down(self) -> bool:
        """Whether it failed, and is left alone now or is being dialled again."""
        if self._failure is None:
            return False
        return self._connecting is not None or self._clock() < self._again_at

    async def aclose(self) -> None:
        """End the session, and every call. Idempotent."""
        self._closing = True
        if self._socket is not None and self._link is not None:
            self._post(wire.Bye())
            await asyncio.sleep(0)
        await self._end(PeerLostError(f"{self.address}: closed"))
        await self._tasks.aclose()

    # Calls.
    async def ask(
        self, keys: Sequence[bytes], deadline: float, *, windowed: bool, request: str, watch: float
    ) -> Watched:
        """Presence of each key; those that are on their way are told of for `watch` seconds.

        Raises
        ------
        PeerLostError
        """
        await self._ready(deadline)
        watched = Watched()
        try:
            for start in range(0, len(keys), wire.MAX_KEYS):
                part = list(keys[start : start + wire.MAX_KEYS])
                job = self._next_job()
                # Before the answer: news may come right behind it.
                watched.jobs[job] = part
                self._watched[job] = watched
                message = wire.Ask(job, part, windowed, request, int(watch * 1000))
                have = await self._call(job, message, wire.Have, deadline)
                try:
                    for key, state in zip(part, map(Presence, have.states), strict=True):
                        watched.states.setdefault(key, state)
                except ValueError as exc:
                    raise await self._broken(f"an answer that makes no sense ({exc})") from exc
                if not windowed and Presence.ABSENT in watched.states.values():
                    break
            for key in keys:
                watched.states.setdefault(key, Presence.ABSENT)
        except BaseException:
            self.unwatch(watched)
            raise
        if not watched.pending:
            self._forget(watched)
        return watched

    def unwatch(self, watched: Watched) -> None:
        """Nobody waits for these any more."""
        for job in watched.jobs:
            if job in self._watched and self.is_up:
                self._post(wire.Unwatch(job))
        self._forget(watched)

    def _forget(self, watched: Watched) -> None:
        for job in watched.jobs:
            self._watched.pop(job, None)

    async def lend(self, keys: Sequence[bytes], seconds: float, deadline: float) -> Lease:
        """A lease of those that are there; give it back with ``give_back``.

        Raises
        ------
        PeerLostError
        """
        await self._ready(deadline)
        job = self._next_job()
        message = wire.Lend(job, list(keys), int(seconds * 1000))
        lent = await self._call(job, message, wire.Lent, deadline)
        try:
            outcomes = list(map(Outcome, lent.outcomes))
            slots, crcs = wire.positions(lent.slots), wire.crcs(lent.crcs)
            leased = outcomes.count(Outcome.DONE)
            if len(outcomes) != len(keys) or not len(slots) == len(crcs) == leased:
                raise ValueError("a lease of other chunks")
        except ValueError as exc:
            raise await self._broken(f"an answer that makes no sense ({exc})") from exc
        if self._link is None:
            raise self._failure or PeerLostError(f"{self.address}: closed")
        return Lease(lent.lease, outcomes, slots, crcs, self._link)

    def doubt(self, keys: Sequence[bytes]) -> None:
        """Chunks that it has turned out to be damaged."""
        if self.is_up:
            self._post(wire.Doubt(list(keys)[: wire.MAX_KEYS]))

    def give_back(self, lease: Lease) -> None:
        """The lease is not needed any more."""
        if self._link is lease.link:
            self._post(wire.Return(lease.number))

    async def push(self, own_address: str, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        """Have the peer come for chunks of this instance, which is found at `own_address`.

        Raises
        ------
        PeerLostError
        """
        await self._ready(deadline)
        job = self._next_job()
        message = wire.Push(job, own_address, list(keys))
        taken = await self._call(job, message, wire.Taken, deadline)
        try:
            outcomes = list(map(Outcome, taken.outcomes))
            if len(outcomes) != len(keys):
                raise ValueError("outcomes of other chunks")
        except ValueError as exc:
            raise await self._broken(f"an answer that makes no sense ({exc})") from exc
        return outcomes

    async def dial(self, deadline: float) -> None:
        """Have a session. PeerLostError if there is none."""
        await self._ready(deadline)

    async def fail(self, link: Link, cause: str) -> PeerLostError:
        """What the caller met on `link` means that the session is of no use; the error to raise."""
        if self._link is link:
            return await self._broken(cause)
        # Its session has ended already; the one that may stand by now is another.
        return PeerLostError(f"{self.address}: {cause}")

    # Session.
    async def _ready(self, deadline: float) -> None:
        self.used_at = self._clock()
        if self._link is not None and self._link.is_usable:
            return
        if self._link is not None:
            await self._broken("its data connection broke")
        if self._closing:
            raise PeerLostError(f"{self.address}: closed")
        failure, patience = self._failure, max(0.0, deadline - self._clock())
        if failure is not None:
            patience = min(patience, AGAIN_PATIENCE_SECONDS)
        if self._connecting is None:
            if failure is not None and self._clock() < self._again_at:
                raise failure
            self._connecting = self._tasks.start(self._connect(), "connect", judged=True)
        connecting = self._connecting
        # One attempt for all who wait for it; whoever gives up does not end it.
        await asyncio.wait({connecting}, timeout=patience)
        if not connecting.done():
            raise failure or PeerLostError(f"{self.address}: no session yet")
        if connecting.cancelled():
            raise PeerLostError(f"{self.address}: closed")
        error = connecting.exception()
        if error is not None:
            raise error

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._shake_hands()
        except TimeoutError:
            cause = PeerLostError(
                f"{self.address}: no answer within {self._connect_seconds:g} s: nobody listens "
                "there, a firewall is between, or its curve_secret_key is another one"
            )
            raise await self._failed(cause, "connect") from None
        except (OSError, zmq.ZMQError) as exc:
            cause = PeerLostError(f"{self.address}: {exc}")
            raise await self._failed(cause, "connect") from exc
        except PeerLostError as exc:
            raise await self._failed(exc, "refused") from exc
        except BaseException:
            await self._end(PeerLostError(f"{self.address}: closed"))
            raise
        finally:
            self._connecting = None
        if self._failures:
            log.info("p2p: peer %s answers again", self.address)
        self._failures, self._failure, self._told = 0, None, ""

    async def _shake_hands(self) -> None:
        # By number: ZeroMQ would look a name up in the one thread that all sessions share.
        host = (await self._names.find(self.address.host))[0]
        socket = self._socket = make_socket(self._context, zmq.DEALER, self._secure)
        socket.setsockopt(zmq.ROUTING_ID, b"r" + os.urandom(16))
        socket.connect(Address(host, self.address.port).endpoint)
        hello = wire.Hello(wire.VERSION, self._instance, os.urandom(wire.NONCE_BYTES))
        self._post(hello)
        challenge = await self._hear(socket)
        if not isinstance(challenge, wire.Challenge):
            raise Refusal(f"{self.address}: it does not speak this protocol")
        if challenge.version != wire.VERSION:
            refused = wire.Refused("version", str(challenge.version), str(wire.VERSION))
            raise Refusal(f"{self.address}: {explanation(refused)}")
        if challenge.instance == self._instance:
            self.is_self = True
            raise Self(f"{self.address}: it is this instance")
        nonce, instance = challenge.nonce, challenge.instance
        theirs = wire.mac(self._token, b"owner", hello, nonce, instance)
        if not hmac.compare_digest(theirs, challenge.mac):
            raise Refusal(f"{self.address}: {explanation(wire.Refused('token', '', ''))}")
        proof = wire.mac(self._token, b"reader", hello, nonce, instance)
        names = [name for name in self._transports if name not in self._without]
        self._post(wire.Proof(proof, self._namespace, names, self._boot))
        welcome = await self._hear(socket)
        if not isinstance(welcome, wire.Welcome) or welcome.transport not in self._transports:
            raise Refusal(f"{self.address}: it does not speak this protocol")
        until = self._clock() + self._connect_seconds
        transport = self._transports[welcome.transport]
        try:
            self._link = await transport.connect(host, welcome.offer, until)
        except (OSError, TimeoutError):
            if len(names) > 1:
                # Between containers of one host, say: the next session goes another way.
                self._without.add(transport.name)
            raise
        self._heard_at = self._clock()
        self.peer, self.room = instance, welcome.room
        self._tasks.start(self._receive(socket), "receive")
        self._tasks.start(self._beat(socket), "beat")

    async def _hear(self, socket: zmq.asyncio.Socket) -> wire.ToReader:
        """The next message of a handshake."""
        try:
            message = wire.reader_decoder.decode(await socket.recv())
        except (msgspec.MsgspecError, ValueError) as exc:
            raise Refusal(f"{self.address}: it does not speak this protocol ({exc})") from exc
        if isinstance(message, wire.Refused):
            # A peer that starts anew in the middle of it knows nothing of the beginning.
            kind = PeerLostError if message.field in ANEW else Refusal
            raise kind(f"{self.address}: refused: {explanation(message)}")
        return message

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while self._socket is socket:
            data = await socket.recv()
            self._heard_at = self._clock()
            try:
                self._take(wire.reader_decoder.decode(data))
            except (msgspec.MsgspecError, ValueError, LookupError) as exc:
                self._count("message")
                self._fail_later(socket, f"a message that makes no sense ({exc})")
                return
            except PeerLostError as exc:
                self._fail_later(socket, str(exc))
                return

    def _take(self, message: wire.ToReader) -> None:
        match message:
            case wire.Have() | wire.Lent() | wire.Taken():
                call, kind = self._calls.pop(message.job, (None, type(message)))
                if type(message) is not kind:
                    if call is not None:
                        self._calls[message.job] = call, kind
                    raise ValueError(f"{type(message).__name__} in place of {kind.__name__}")
                if call is not None and not call.done():
                    call.set_result(message)
                else:
                    self._unwanted(message)
            case wire.News():
                watched = self._watched.get(message.job)
                if watched is not None:
                    states = list(map(Presence, message.states))
                    watched.take(message.job, wire.positions(message.positions), states)
            case wire.Pong():
                self.room = message.room
            case wire.Refused():
                raise PeerLostError(f"the session has ended: {explanation(message)}")
            case wire.Bye():
                raise PeerLostError("it has ended the session")
            case _:
                raise ValueError(type(message).__name__)

    async def _beat(self, socket: zmq.asyncio.Socket) -> None:
        number = 0
        while True:
            await asyncio.sleep(self._beat_seconds)
            if self._socket is not socket:
                return  # a beat within the next handshake would end that
            if self._link is not None and not self._link.is_usable:
                self._fail_later(socket, "its data connection broke")
                return
            silence = self._clock() - self._heard_at
            if silence > SILENT_BEATS * self._beat_seconds:
                self._fail_later(socket, f"silent for {silence:.1f} s")
                return
            number += 1
            self._post(wire.Ping(number))

    def _next_job(self) -> int:
        self._job += 1
        return self._job

    def _post(self, message: wire.ToOwner) -> bool:
        """Whether it is on its way."""
        return self._socket is not None and send_now(self._socket, [wire.encode(message)])

    async def _call(
        self, job: int, message: wire.ToOwner, kind: type[AnswerT], deadline: float
    ) -> AnswerT:
        """The answer to `message`."""
        if len(self._calls) >= CALLS:
            raise PeerLostError(f"{self.address}: {CALLS} answers are awaited already")
        if not self._post(message):
            raise await self._broken("it does not take messages")
        call: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._calls[job] = call, kind
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await call
        except BaseException as exc:
            self._calls.pop(job, None)
            if call.done() and not call.cancelled() and call.exception() is None:
                # It came in the very turn in which nobody wanted it any more.
                self._unwanted(call.result())
            if isinstance(exc, TimeoutError):
                raise PeerLostError(f"{self.address}: no answer in time") from None
            raise

    def _unwanted(self, message: wire.ToReader) -> None:
        """An answer that nobody waits for."""
        if isinstance(message, wire.Lent):
            self._post(wire.Return(message.lease))

    async def _broken(self, cause: str) -> PeerLostError:
        return await self._failed(PeerLostError(f"{self.address}: {cause}"), "session")

    def _fail_later(self, socket: zmq.asyncio.Socket, cause: str) -> None:
        """From a task of the session with that socket, which ends with it."""
        self._tasks.start(self._broken_quietly(socket, cause), "fail")

    async def _broken_quietly(self, socket: zmq.asyncio.Socket, cause: str) -> None:
        if self._socket is socket:
            await self._broken(cause)

    async def _failed(self, error: PeerLostError, cause: str) -> PeerLostError:
        """The peer failed: it is left alone for a while."""
        if not self._closing:
            if not isinstance(error, Self):
                self._count(cause)
            self._failures += 1
            pause = min(AGAIN_SECONDS * 2 ** min(self._failures - 1, 10), MAX_AGAIN_SECONDS)
            if isinstance(error, Refusal):
                pause = REFUSED_AGAIN_SECONDS
            # A session that stood for a while is made anew at once, a peer that is not there not.
            if cause == "session" and self._failures == 1:
                pause = 0.0
            self._again_at, self._failure = self._clock() + pause, error
            if str(error) != self._told and not isinstance(error, Self):
                self._told = str(error)
                log.warning("p2p: peer %s", error)
        await self._end(error)
        return error

    async def _end(self, error: PeerLostError) -> None:
        """The session is over."""
        socket, self._socket = self._socket, None
        link, self._link = self._link, None
        calls, self._calls = self._calls, {}
        watched, self._watched = self._watched, {}
        if socket is not None:
            socket.close(0)
        for call, _ in calls.values():
            if not call.done():
                call.set_exception(error)
        for one in watched.values():
            one.lose(error)
        if link is not None:
            await link.aclose()
