# SPDX-License-Identifier: Apache-2.0
"""The peer tier: chunks from the host memory of other instances, and this one's for them.

Runs on the service's loop. Owns the server (sessions of others here), one client for each peer that
is asked, the data transports, and what is shared. The flow of a load: ask a peer what it has, get a
lease (the owner pins), read through a transport into the slots, give the lease back; the service
compares the bytes with the checksums of the lease. Invariants: a call returns only when nothing
touches its slots; a peer that fails costs its own requests only, and one deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import zmq.asyncio

from kvtier.errors import ClosedError, ConfigError, PeerLostError, TierLostError
from kvtier.tiers.base import Slot, Takes, Tier, TierContext, TierEnv
from kvtier.tiers.p2p.addresses import LOCAL, LOOPBACK, Address, address
from kvtier.tiers.p2p.client import PeerClient, Self, Watched
from kvtier.tiers.p2p.curve import Curve
from kvtier.tiers.p2p.guests import Guests
from kvtier.tiers.p2p.metrics import METRICS
from kvtier.tiers.p2p.names import Names
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.tiers.p2p.reader import Reader
from kvtier.tiers.p2p.server import MAX_PUSHES, Server
from kvtier.tiers.p2p.sharing import Sharing
from kvtier.tiers.p2p.taker import Taker
from kvtier.tiers.p2p.tcp import TcpTransport
from kvtier.tiers.p2p.transport import Transport
from kvtier.tiers.p2p.ucx import UcxTransport, boot_id
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome, Peer, Presence, key_group

if TYPE_CHECKING:
    from kvtier.obs.metrics import MetricDef

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.5
"""How often metrics are brought up to date, and what is over is let go."""
MARGIN_SECONDS = 0.02
"""By so much a call ends before its deadline: that a peer is slow is said of the peer."""
PUSH_KEYS = 64
"""Chunks of one push."""
BAD_SECONDS = 60.0
"""A chunk that came with wrong bytes is not asked for again for so long."""
IDLE_SECONDS = 600.0
"""A session that nobody has used for so long is given up."""
MAX_PEERS = 256
PLACES = 65536
"""Keys of which it is known who has them."""
RESOLVE_SECONDS = 5.0
"""How often the name of the peers is asked for."""


class P2pTier(Tier):
    """Host memory of other instances. See `P2pOptions` for what can be set.

    Parameters
    ----------
    name : str
    options : P2pOptions
    env : TierEnv
        With `host`: what this instance shares.
    """

    type: ClassVar[str] = "p2p"
    medium: ClassVar[str] = "CPU"
    locality = "REMOTE"
    tells_news: ClassVar[bool] = True
    first_load_bytes: ClassVar[int | None] = 1 << 20  # a peer makes checksums before the first byte
    waits_for_peers: ClassVar[bool] = True
    options_type = P2pOptions
    options: P2pOptions

    def __init__(self, name: str, options: P2pOptions, env: TierEnv) -> None:
        super().__init__(name, options, env)
        self._state = "new"
        self._instance = os.urandom(16)
        self._tasks = TaskSet(f"kvtier-{name}")
        self._context: zmq.asyncio.Context | None = None
        self._curve: Curve | None = None
        self._sharing: Sharing | None = None
        self._server: Server | None = None
        self._transports: list[Transport] = []
        self._clients: OrderedDict[Address, PeerClient] = OrderedDict()
        self._static = [address(text) for text in options.peers]
        self._found: list[Address] = []  # by name
        self._names = Names()
        self._where: OrderedDict[bytes, PeerClient] = OrderedDict()
        self._guests: Guests | None = None
        self._bad: OrderedDict[bytes, float] = OrderedDict()  # not asked for until then
        self._reader = Reader(options.lease_seconds, self._tasks, env.clock)
        self._taker: Taker | None = None
        self._pushing = asyncio.Semaphore(MAX_PUSHES)
        self._watching: dict[tuple[Address, str], list[tuple[Watched, float]]] = {}
        self._served_bytes = 0

    @classmethod
    def metric_definitions(cls) -> Sequence[MetricDef]:
        return METRICS

    @classmethod
    def takes(cls, options: P2pOptions) -> Takes:
        return Takes.PRESSED if options.push and options.knows_peers else Takes.NONE

    @classmethod
    def hosts(cls, options: P2pOptions) -> float:
        return options.guest_ratio

    @classmethod
    def serves(cls, options: P2pOptions, peer: Peer | None) -> bool:
        return peer is not None or options.knows_peers

    # Life.
    async def open(self) -> None:
        """Listen.

        Raises
        ------
        ConfigError
            The address cannot be had, or an option does not fit.
        TierLostError
            The address is not there yet.
        """
        if self._state != "new":
            raise ClosedError(f"{self.name} was opened before")
        if self.env.host is None:
            raise ConfigError(f"{self.name}: the peer tier needs a service with host memory")
        self._state = "opening"
        try:
            await self._open()
        except BaseException:
            await self._shut()
            self._state = "new"
            raise
        self._state = "open"
        self._tasks.start(self._tend(), "tend")
        if self.options.dns is not None:
            self._tasks.start(self._resolve(address(self.options.dns)), "resolve")

    async def _open(self) -> None:
        options, env = self.options, self.env
        assert env.host is not None
        host = options.host or LOOPBACK
        open_to_all = options.token is None and options.curve_secret_key is None
        is_local = host in LOCAL
        if open_to_all and not is_local:
            log.warning(
                "%s: whoever reaches %s may read the KV cache: set token or curve_secret_key, or "
                "see that only the instances reach it",
                self.name,
                host,
            )
        listen = await self._listening(host, options.port + env.replica)
        most = env.geometry.num_slots * env.geometry.slot_bytes // 4
        self._guests = guests = Guests(env.host, self._removed)
        self._taker = Taker(env.host, guests, self._reader, self._client, self._taken, env.clock)
        self._sharing = sharing = Sharing(
            env.host, guests, options.max_lease_bytes or most, env.clock
        )
        self._context = zmq.asyncio.Context()
        if options.curve_secret_key is not None:
            try:
                self._curve = Curve(options.curve_secret_key.reveal())
            except ConfigError as exc:
                raise ConfigError(f"{self.name}: {exc}") from exc
            self._curve.start(self._context)
        data_port = options.data_port + env.replica if options.data_port else 0
        # Whoever has UCX's address of this process is inside it: not for everybody.
        may_use_ucx = is_local or not open_to_all
        if options.transport == "ucx" or (options.transport == "auto" and may_use_ucx):
            await self._open_ucx()
        if options.transport != "ucx":
            tcp = TcpTransport(listen.host, data_port, sharing.find_lease)
            await tcp.open()
            self._transports.append(tcp)
        self._server = Server(
            self._context,
            listen.endpoint,
            self._instance,
            self._token,
            env.namespace,
            self._transports,
            sharing,
            lambda: guests.room,
            self._taker.take,
            self._doubted,
            options.heartbeat_seconds,
            _secure_nothing if self._curve is None else self._curve.secure_server,
            self._refused,
            env.clock,
        )
        await self._server.open()
        log.info("%s: peers find this instance at %s", self.name, self.own_address)

    async def _open_ucx(self) -> None:
        """Where it cannot be had, and nobody insists, bytes go over TCP."""
        options, host = self.options, self.env.host
        assert host is not None
        insists = options.transport == "ucx"
        slot_bytes = self.env.geometry.slot_bytes
        ucx = UcxTransport(host, slot_bytes, everywhere=insists)
        self._transports.append(ucx)
        try:
            await ucx.open()
        except (ConfigError, OSError) as exc:
            self._transports.remove(ucx)
            await ucx.aclose()
            if insists:
                raise ConfigError(f"{self.name}: {exc}") from exc
            log.info("%s: without UCX: %s", self.name, exc)
            return
        log.info("%s: %s", self.name, ucx.version)

    @property
    def own_address(self) -> str:
        """``host:port`` that others dial."""
        host = self.options.advertise_host or self.options.host or LOOPBACK
        return str(Address(host, self.options.port + self.env.replica))

    async def _listening(self, host: str, port: int) -> Address:
        if port > 65535:
            raise ConfigError(f"{self.name}: replica {self.env.replica} would take port {port}")
        try:
            # By number: ZeroMQ takes the names of interfaces for hosts' names.
            found = await self._names.find("0.0.0.0" if host == "*" else host)
        except OSError as exc:
            raise TierLostError(f"{self.name}: {exc}") from exc
        return Address(found[0], port)

    @property
    def _token(self) -> bytes:
        token = self.options.token
        return b"" if token is None else token.reveal().encode()

    async def aclose(self, deadline: float) -> None:
        """End all sessions; readers here and elsewhere fail, and go on without them."""
        if self._state == "closed":
            return
        self._state = "closed"
        await self._shut()

    async def _shut(self) -> None:
        await self._tasks.aclose()
        clients, self._clients = list(self._clients.values()), OrderedDict()
        await asyncio.gather(*(client.aclose() for client in clients))
        self._watching.clear()
        self._where.clear()
        if self._server is not None:
            await self._server.aclose()
        transports, self._transports = self._transports, []
        for transport in transports:
            await transport.aclose()
        if self._sharing is not None:
            self._sharing.close()
        if self._guests is not None:
            self._guests.close()
        if self._curve is not None:
            self._curve.stop()
        if self._context is not None:
            self._context.destroy(0)
        self._server = self._sharing = self._guests = self._taker = None
        self._curve = self._context = None

    def _ready(self) -> None:
        if self._state != "open":
            raise ClosedError(f"the tier {self.name} is not open")

    # Calls.
    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        """What the request's peer has or is about to have; without one, what any peer has.

        Raises
        ------
        PeerLostError
            The peer, or every one of them, does not answer.
        """
        self._ready()
        assert self._guests is not None
        at_hand = [key in self._guests for key in keys]
        elsewhere = [key for key, here in zip(keys, at_hand, strict=True) if not here]
        # What peers have is asked for whatever lacks before it where somebody else may have that.
        rest = iter(await self._ask_peers(elsewhere, ctx, any(at_hand)) if elsewhere else ())
        now = self.env.clock()
        presence = [Presence.PRESENT if here else next(rest) for here in at_hand]
        return [
            Presence.ABSENT if now < self._bad.get(key, 0.0) else one
            for key, one in zip(keys, presence, strict=True)
        ]

    async def _ask_peers(
        self, keys: Sequence[bytes], ctx: TierContext, mixed: bool
    ) -> list[Presence]:
        clients = self._candidates(ctx)
        if not clients:
            return [Presence.ABSENT] * len(keys)
        windowed = ctx.windowed or mixed or len(clients) > 1
        answers = await asyncio.gather(
            *(self._ask(client, keys, ctx, windowed) for client in clients),
            return_exceptions=True,
        )
        told = []
        errors = []
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, PeerLostError):
                errors.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                told.append((client, answer))
        if not told:
            raise errors[0]
        presence = []
        for i, key in enumerate(keys):
            best = Presence.ABSENT
            for client, states in told:
                if states[i] is Presence.PRESENT:
                    best = Presence.PRESENT
                    self._where[key] = client
                    break
                if states[i] is Presence.PENDING:
                    best = Presence.PENDING
            presence.append(best)
        while len(self._where) > PLACES:
            self._where.popitem(last=False)
        return presence

    async def _ask(
        self, client: PeerClient, keys: Sequence[bytes], ctx: TierContext, windowed: bool
    ) -> list[Presence]:
        wait = 0.0 if ctx.peer is None else ctx.peer.wait_seconds
        watching = self._watching.get((client.address, ctx.request_id), [])
        for entry in watching:
            watched = entry[0]
            if all(key in watched.states for key in keys):
                break
        else:
            seconds = wait or max(0.0, ctx.deadline - self.env.clock())
            if ctx.loads and not windowed:
                self._reader.ask_ahead(client, self._first(keys), ctx.deadline - MARGIN_SECONDS)
            watched = await client.ask(
                keys,
                ctx.deadline - MARGIN_SECONDS,
                windowed=windowed,
                request=ctx.peer.request if ctx.peer is not None and wait else "",
                watch=seconds,
            )
            watched.news = ctx.news
            if watched.pending:
                self._watching.setdefault((client.address, ctx.request_id), []).append(
                    (watched, self.env.clock() + seconds)
                )
            return [watched.states[key] for key in keys]
        states = [watched.states[key] for key in keys]
        if watched.lost is not None or not watched.pending:
            self._unwatch(client, ctx.request_id, entry)
            if watched.lost is not None and Presence.PENDING in states:
                raise watched.lost
        return states

    def _first(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """What the first load will be for, if all is there."""
        assert self.first_load_bytes is not None
        left = self.first_load_bytes
        for n, key in enumerate(keys):
            left -= self.env.geometry.payload_bytes[key_group(key)]
            if n and left < 0:
                return keys[:n]
        return keys

    def _unwatch(self, client: PeerClient, request_id: str, entry: tuple[Watched, float]) -> None:
        client.unwatch(entry[0])
        entries = self._watching.get((client.address, request_id), [])
        if entry in entries:
            entries.remove(entry)
            if not entries:
                del self._watching[client.address, request_id]

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Read chunks into their slots, each from the peer that was found to have it.

        Raises
        ------
        PeerLostError
            Of all that were asked for none came, because the peers failed.
        """
        self._ready()
        if self.env.clock() >= ctx.deadline - MARGIN_SECONDS:
            return [Outcome.TIMEOUT] * len(items)
        assert self._taker is not None
        try:
            with self._taker.own_load():
                return await self._load(items, ctx)
        except PeerLostError:
            self._ready()  # closed meanwhile
            raise

    async def _load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        until = ctx.deadline - MARGIN_SECONDS
        parts: dict[PeerClient, list[int]] = {}
        outcomes = [Outcome.MISSING] * len(items)
        fallback = next(iter(self._candidates(ctx)), None)
        now = self.env.clock()
        for i, item in enumerate(items):
            if now < self._bad.get(item.key, 0.0):
                continue
            if self._copy_guest(item):
                outcomes[i] = Outcome.DONE
                continue
            client = self._where.pop(item.key, fallback)
            if client is not None:
                parts.setdefault(client, []).append(i)
        results = await asyncio.gather(
            *(
                self._reader.read(client, [items[i] for i in positions], until)
                for client, positions in parts.items()
            ),
            return_exceptions=True,
        )
        error: BaseException | None = None
        for positions, result in zip(parts.values(), results, strict=True):
            if isinstance(result, PeerLostError):
                error = error or result
                result = [Outcome.LOST] * len(positions)
            elif isinstance(result, BaseException):
                raise result
            for i, outcome in zip(positions, result, strict=True):
                outcomes[i] = outcome
        if error is not None and not any(outcome.ok for outcome in outcomes):
            raise error
        return outcomes

    def _copy_guest(self, item: Slot) -> bool:
        """Whether the chunk was here, pushed by a peer, and is in its slot now."""
        assert self._guests is not None
        guest = self._guests.pin(item.key)
        if guest is None:
            return False
        item.view[:] = guest.view
        item.crc = guest.crc
        self._guests.unpin([guest])
        return True

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Push chunks to the peer that has most room; DROPPED if none has any."""
        self._ready()
        if not items:
            return []
        until = ctx.deadline - MARGIN_SECONDS
        if self.env.clock() >= until:
            return [Outcome.TIMEOUT] * len(items)
        outcomes = [Outcome.DROPPED] * len(items)
        try:
            async with self._pushing:
                client = await self._roomiest(ctx)
                for start in range(0, 0 if client is None else len(items), PUSH_KEYS):
                    keys = [item.key for item in items[start : start + PUSH_KEYS]]
                    assert client is not None
                    outcomes[start : start + len(keys)] = await client.push(
                        self.own_address, keys, until
                    )
        except PeerLostError:
            self._ready()  # closed meanwhile
            raise
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.ok:
                self._bad.pop(item.key, None)
        return outcomes

    async def _roomiest(self, ctx: TierContext) -> PeerClient | None:
        """The peer to push to."""
        clients = self._candidates(TierContext(ctx.deadline))
        fresh = [client for client in clients if not client.is_up]
        if fresh:
            until = min(ctx.deadline, self.env.clock() + self.options.connect_seconds)
            await asyncio.gather(*(one.dial(until) for one in fresh), return_exceptions=True)
        best = max(clients, key=lambda one: one.room if one.is_up else 0, default=None)
        return best if best is not None and best.is_up and best.room > 0 else None

    def _taken(self, slot: Slot) -> None:
        """A chunk of a peer's has come."""
        self.tell("stored", slot.key, slot.length)

    def _removed(self, slot: Slot) -> None:
        """A chunk of a peer's has gone."""
        self.env.recorder.add("kvtier_tier_evicted_total", 1, (self.name,))
        self.tell("removed", slot.key, slot.length)

    def host(self, slots: Sequence[tuple[int, int]]) -> None:
        if self._guests is not None:
            self._guests.add(slots)
        elif self.env.host is not None:
            self.env.host.give_back([slot for slot, _ in slots])

    def reclaim(self, count: int) -> None:
        if self._guests is not None:
            self._guests.reclaim(count)

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Chunks came with wrong bytes: they are not asked for again for a while, and whoever has
        them as guests looks at them."""
        if self._guests is not None:
            self._guests.forget(keys)
        until = self.env.clock() + BAD_SECONDS
        for key in keys:
            self._bad.pop(key, None)
            self._bad[key] = until
        while len(self._bad) > PLACES:
            self._bad.popitem(last=False)
        for client in self._clients.values():
            client.doubt(keys)

    def _doubted(self, keys: Sequence[bytes]) -> None:
        """A reader got other bytes: guests go. What stands in host memory is the owner's, who
        compares it where ``verify_host`` says so."""
        if self._guests is not None:
            self._guests.forget(keys)

    def serve(self, request: str, ended: bool) -> None:
        if self._sharing is not None:
            self._sharing.serve(request, ended)

    # Peers.
    def _candidates(self, ctx: TierContext) -> list[PeerClient]:
        """Whom to ask: the request's peer, or all that are known and do not fail."""
        if ctx.peer is not None:
            try:
                there = address(ctx.peer.address)
            except ValueError as exc:
                raise PeerLostError(f"{ctx.peer.address!r:.80}: {exc}") from exc
            client = self._client(there)
            if client.is_self:
                raise Self(f"{there}: the request names this instance as its own peer")
            return [client]
        clients = [self._client(there) for there in dict.fromkeys((*self._static, *self._found))]
        return [client for client in clients if not client.is_self and not client.is_down]

    def _client(self, there: Address) -> PeerClient:
        client = self._clients.get(there)
        if client is None:
            assert self._context is not None
            client = self._clients[there] = PeerClient(
                self._context,
                there,
                self._instance,
                self._token,
                self.env.namespace,
                self._transports,
                boot_id(),
                self.options.heartbeat_seconds,
                self.options.connect_seconds,
                _secure_nothing if self._curve is None else self._curve.secure_client,
                self._names,
                self._failed,
                self.env.clock,
            )
        self._clients.move_to_end(there)
        return client

    async def _resolve(self, name: Address) -> None:
        """Look the peers up by name, again and again."""
        told = ""
        while True:
            try:
                found = await self._names.find(name.host)
                self._found = sorted(Address(one, name.port) for one in found)
                told = ""
            except OSError as exc:
                # Those that were found last may be there all the same.
                self._failed("dns")
                if str(exc) != told:
                    told = str(exc)
                    log.warning("%s: dns: %s", self.name, exc)
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _tend(self) -> None:
        """Metrics, and what nobody uses any more; ends by cancellation only."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            now = self.env.clock()
            for (there, request_id), entries in list(self._watching.items()):
                for entry in [entry for entry in entries if now >= entry[1]]:
                    self._unwatch(self._clients[there], request_id, entry)
            known = {*self._static, *self._found}
            for there, client in list(self._clients.items()):
                idle_seconds = now - client.used_at
                crowded = len(self._clients) > MAX_PEERS and not client.is_up
                if there not in known and (idle_seconds > IDLE_SECONDS or crowded):
                    await self._drop(there)
            self._reader.expire()
            self._sample()

    async def _drop(self, there: Address) -> None:
        """Nobody uses that peer any more."""
        client = self._clients.pop(there)
        for name in [name for name in self._watching if name[0] == there]:
            del self._watching[name]
        for key in [key for key, one in self._where.items() if one is client]:
            del self._where[key]
        await client.aclose()

    def _sample(self) -> None:
        recorder, tier = self.env.recorder, self.name
        server, sharing = self._server, self._sharing
        if server is None or sharing is None:
            return
        up = sum(client.is_up for client in self._clients.values())
        recorder.set("kvtier_peer_sessions", float(up), (tier, "reader"))
        recorder.set("kvtier_peer_sessions", float(server.sessions), (tier, "owner"))
        recorder.set("kvtier_peer_leases", float(sharing.leases), (tier,))
        recorder.set("kvtier_peer_leased_bytes", float(sharing.pinned_bytes), (tier,))
        if self._guests is not None:
            recorder.set("kvtier_tier_chunks", float(self._guests.chunks), (tier,))
            recorder.set("kvtier_peer_guest_slots", float(self._guests.slots), (tier,))
        recorder.set("kvtier_peer_awaited", float(sharing.watches), (tier,))
        served, self._served_bytes = self._served_bytes, sharing.served_bytes
        if sharing.served_bytes > served:
            recorder.add("kvtier_peer_served_bytes_total", sharing.served_bytes - served, (tier,))

    def _failed(self, cause: str) -> None:
        self.env.recorder.add("kvtier_peer_failures_total", 1, (self.name, cause))

    def _refused(self, cause: str) -> None:
        self.env.recorder.add("kvtier_peer_refused_total", 1, (self.name, cause))


def _secure_nothing(socket: zmq.asyncio.Socket) -> None:
    """Messages go in the clear."""
