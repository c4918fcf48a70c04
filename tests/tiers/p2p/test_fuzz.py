# SPDX-License-Identifier: Apache-2.0
"""Peers that say what they must not: garbage, replays, other versions, owners that lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import PeerLostError
from kvtier.options import Secret
from kvtier.tiers.p2p import server as server_module
from kvtier.tiers.p2p import wire
from kvtier.types import Outcome
from tests.tiers.p2p.rig import SIZE, Instance, free_port, instance, until
from tests.tiers.p2p.test_tier import key, until_answered

pytestmark = pytest.mark.asyncio

HELLO = wire.Hello(wire.VERSION, bytes(16), bytes(range(16)))


class Stranger:
    """A bare socket to an instance."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket

    async def say(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def hear(self, seconds: float = 3.0) -> Any:
        async with asyncio.timeout(seconds):
            return wire.reader_decoder.decode(await self.socket.recv())

    async def challenge(self, hello: wire.Hello = HELLO) -> wire.Challenge:
        await self.say(wire.encode(hello))
        challenge = await self.hear()
        assert isinstance(challenge, wire.Challenge)
        return challenge

    async def admitted(self, fields: dict[str, str], token: bytes = b"") -> Any:
        challenge = await self.challenge()
        await self.say(wire.encode(proof(challenge, fields, token)))
        return await self.hear()


def proof(
    challenge: wire.Challenge, fields: dict[str, str], token: bytes = b"", hello: wire.Hello = HELLO
) -> wire.Proof:
    mac = wire.mac(token, b"reader", hello, challenge.nonce, challenge.instance)
    return wire.Proof(mac, fields, ["tcp"], b"")


@contextlib.asynccontextmanager
async def stranger(to: Instance) -> AsyncIterator[Stranger]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://{to.address}")
    try:
        yield Stranger(socket)
    finally:
        context.destroy(0)


async def works(owner: Instance) -> None:
    """Whether the instance still serves those who behave."""
    there = owner.host.put(150)
    async with instance(peers=(owner.address,)) as reader:
        await until_answered(reader, there)
        assert await reader.load([there]) == [Outcome.DONE]


@pytest.mark.fault("P14")
async def test_garbage_is_refused_and_counted() -> None:
    async with instance() as owner, stranger(owner) as bad:
        randomly = random.Random(1)
        whole = wire.encode(wire.Ask(1, [key(1)], False, "", 0))
        for data in (
            b"",
            b"\x00",
            b"\xc1" * 100,
            whole[:-3],
            whole + b"x",
            *(randomly.randbytes(randomly.randrange(200)) for _ in range(200)),
        ):
            await bad.say(data)
            refused = await bad.hear()
            assert isinstance(refused, wire.Refused)
            assert refused.field in ("message", "session")
        await bad.say(b"a", b"b", b"c")  # more frames than there are
        owner.told()
        await bad.say(b"\x80" + bytes(wire.MAX_FRAME_BYTES))
        await asyncio.sleep(0.1)
        assert owner.tier._server.sessions == 0
        await works(owner)


class Bomb:
    """Shows that it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.fault("P14")
async def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """By an owner, as a message and in place of one's field, and by a reader."""
    bomb = tmp_path / "bomb"
    pickles = [pickle.dumps(Bomb(bomb), protocol) for protocol in range(6)]
    async with instance() as owner, stranger(owner) as bad:
        for data in pickles:
            await bad.say(data)
            assert (await bad.hear()).field == "message"
            ask = [6, 1, [data], False, "", 0]
            await bad.say(msgspec.msgpack.encode(ask))
            assert (await bad.hear()).field == "message"
        await works(owner)
    for data in pickles:
        async with (
            owner_that(lambda m, data=data: [data], honest=False) as there,
            instance(peers=(there,), connect_seconds=0.5) as reader,
        ):
            with pytest.raises(PeerLostError, match="does not speak this protocol"):
                await reader.ask([key(1)])
    assert not bomb.exists()
    pickle.loads(pickles[0])
    assert bomb.exists()


FIELDS = [
    lambda: [6, -1, [], False, "", 0],
    lambda: [6, 1, [b""], False, "", 0],
    lambda: [6, 1, [b"x" * 41], False, "", 0],
    lambda: [6, 1, ["text"], False, "", 0],
    lambda: [6, 1, [b"k" * 36] * (wire.MAX_KEYS + 1), False, "", 0],
    lambda: [6, 1, [], False, "r" * 513, 0],
    lambda: [6, 1, [], False, "", -5],
    lambda: [6, 1, [], False, "", 10**9],
    lambda: [10, 2**64 - 1, [b"k" * 36], 1],
    lambda: [12, -1],
    lambda: [3, b"short", {}, [], b""],
    lambda: [3, bytes(32), {"a" * 65: "b"}, [], b""],
    lambda: [3, bytes(32), {"a": "b" * 2049}, [], b""],
    lambda: [3, bytes(32), {str(i): "" for i in range(257)}, [], b""],
    lambda: [99],
    lambda: [6],
    lambda: {"a": 1},
]


@pytest.mark.parametrize("number", range(len(FIELDS)))
async def test_fields_out_of_bounds_end_the_session(number: int) -> None:
    async with instance() as owner, stranger(owner) as bad:
        keys = [owner.host.put(1)]
        assert isinstance(await bad.admitted({"model": "org/model"}), wire.Welcome)
        await bad.say(wire.encode(wire.Lend(1, keys, 60_000)))
        assert isinstance(await bad.hear(), wire.Lent)
        assert owner.host.pinned == 1
        await bad.say(msgspec.msgpack.encode(FIELDS[number]()))
        assert (await bad.hear()).field == "message"
        await until(lambda: owner.host.pinned == 0)
        assert owner.told()["kvtier_peer_refused_total", "message"] == 1
        await works(owner)


async def test_nothing_is_said_to_who_has_not_proven_the_token() -> None:
    async with instance(token=Secret("hush")) as owner, stranger(owner) as bad:
        there = owner.host.put(1)
        for message in (
            wire.Ask(1, [there], False, "", 0),
            wire.Lend(1, [there], 1000),
            wire.Return(1),
            wire.Ping(1),
            wire.Unwatch(1),
        ):
            await bad.say(wire.encode(message))
            assert await bad.hear() == wire.Refused("session", "", "")
        # Not within a handshake either.
        await bad.challenge()
        await bad.say(wire.encode(wire.Ask(1, [there], False, "", 0)))
        assert await bad.hear() == wire.Refused("session", "", "")
        assert (await bad.admitted({"model": "org/model"}, b"other")).field == "token"
        assert owner.host.pinned == 0
        assert isinstance(await bad.admitted({"model": "org/model"}, b"hush"), wire.Welcome)


@pytest.mark.fault("P14")
async def test_a_recorded_handshake_proves_nothing() -> None:
    async with instance(token=Secret("hush")) as owner:
        async with stranger(owner) as good:
            challenge = await good.challenge()
            recorded = wire.encode(proof(challenge, {"model": "org/model"}, b"hush"))
            await good.say(recorded)
            assert isinstance(await good.hear(), wire.Welcome)
            await good.say(recorded)
            assert (await good.hear()).field == "handshake"
        async with stranger(owner) as bad:
            await bad.say(recorded)
            assert (await bad.hear()).field == "handshake"
            await bad.challenge()  # with the same nonce of the reader's
            await bad.say(recorded)
            assert (await bad.hear()).field == "token"
            # A challenge is good for one try.
            challenge = await bad.challenge()
            await bad.say(wire.encode(proof(challenge, {"model": "x"}, b"hush")))
            assert (await bad.hear()).field == "model"
            await bad.say(wire.encode(proof(challenge, {"model": "org/model"}, b"hush")))
            assert (await bad.hear()).field == "handshake"


async def test_an_owners_own_proof_is_not_a_readers() -> None:
    """Who has no token may not have the owner's proof thrown back at it."""
    async with instance(token=Secret("hush")) as owner, stranger(owner) as bad:
        challenge = await bad.challenge()
        await bad.say(wire.encode(wire.Proof(challenge.mac, {"model": "org/model"}, ["tcp"], b"")))
        assert (await bad.hear()).field == "token"


@pytest.mark.fault("P09")
@pytest.mark.parametrize("version", [0, wire.VERSION + 1, 10**6])
async def test_other_versions_are_refused_with_both(version: int) -> None:
    async with instance() as owner, stranger(owner) as other:
        await other.say(wire.encode(wire.Hello(version, bytes(16), bytes(16))))
        assert await other.hear() == wire.Refused("version", str(wire.VERSION), str(version))
        # One that has more to say in it, too.
        longer = [1, version, bytes(16), bytes(16), "more", {"x": 1}]
        await other.say(msgspec.msgpack.encode(longer))
        assert await other.hear() == wire.Refused("version", str(wire.VERSION), str(version))
        assert owner.told()["kvtier_peer_refused_total", "version"] == 2
        await works(owner)


async def test_handshakes_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 8)
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.3)
    async with instance() as owner, contextlib.AsyncExitStack() as stack:
        for _ in range(30):
            one = await stack.enter_async_context(stranger(owner))
            await one.challenge()
            assert len(owner.tier._server._strangers) <= 8
        await works(owner)
        await until(lambda: not owner.tier._server._strangers)


async def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_SESSIONS", 2)
    async with instance() as owner, contextlib.AsyncExitStack() as stack:
        for number in range(4):
            one = await stack.enter_async_context(stranger(owner))
            answer = await one.admitted({"model": "org/model"})
            assert isinstance(answer, wire.Welcome) == (number < 2)
        assert answer.field == "sessions"


@given(st.lists(st.binary(max_size=64), max_size=8), st.randoms())
@settings(max_examples=60, deadline=None)
async def test_any_order_of_messages(garbage: list[bytes], randomly: random.Random) -> None:
    async with instance() as owner, stranger(owner) as bad:
        keys = [owner.host.put(number) for number in range(3)]
        challenge = await bad.challenge()
        messages: list[wire.ToOwner] = [
            HELLO,
            proof(challenge, {"model": "org/model"}),
            wire.Ask(1, keys, True, "r", 1000),
            wire.Unwatch(1),
            wire.Lend(2, keys, 1000),
            wire.Return(1),
            wire.Ping(3),
            wire.Bye(),
        ]
        frames = [wire.encode(message) for message in messages * 2] + garbage
        randomly.shuffle(frames)
        for frame in frames:
            await bad.say(frame)
        await bad.say(wire.encode(wire.Bye()))
        await until(lambda: owner.tier._server.sessions == 0 and owner.host.pinned == 0)


# Owners that lie.
Answers = Callable[[bytes], list[wire.ToReader | bytes]]


@contextlib.asynccontextmanager
async def owner_that(
    answers: Callable[[Any], list[Any]], *, honest: bool = True
) -> AsyncIterator[str]:
    """A ROUTER that answers each message so; the handshake is right where `honest`."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    port = free_port()
    socket.bind(f"tcp://127.0.0.1:{port}")
    hello: list[wire.Hello] = []
    nonce, me = os.urandom(16), os.urandom(16)

    async def serve() -> None:
        while True:
            identity, data = await socket.recv_multipart()
            message = wire.owner_decoder.decode(data)
            if honest and isinstance(message, wire.Hello):
                hello[:] = [message]
                mac = wire.mac(b"", b"owner", message, nonce, me)
                replies: list[Any] = [wire.Challenge(wire.VERSION, me, nonce, mac)]
            else:
                replies = answers(message)
            for reply in replies:
                frame = reply if isinstance(reply, bytes) else wire.encode(reply)
                await socket.send_multipart([identity, frame])

    task = asyncio.create_task(serve(), name="lies")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.wait({task})
        context.destroy(0)


HANDSHAKES: dict[str, tuple[Callable[[Any], list[Any]], str]] = {
    "garbage": (lambda m: [b"\xc1\xc1"], "does not speak this protocol"),
    "empty": (lambda m: [b""], "does not speak this protocol"),
    "out of order": (lambda m: [wire.Pong(1, 0)], "does not speak this protocol"),
    "other version": (
        lambda m: [wire.Challenge(7, bytes(16), bytes(16), bytes(32))],
        "versions differ: the owner has 7, the reader 1",
    ),
    "no token": (
        lambda m: [wire.Challenge(wire.VERSION, bytes(16), bytes(16), bytes(32))],
        "token is another one",
    ),
    "silent": (lambda m: [], "no answer within"),
    "refuses": (lambda m: [wire.Refused("model", "a", "b")], "namespaces differ in model"),
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_an_owner_that_does_not_know_how(name: str) -> None:
    answers, said = HANDSHAKES[name]
    async with (
        owner_that(answers, honest=False) as there,
        instance(peers=(there,), connect_seconds=0.5) as reader,
    ):
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=said):
            await reader.ask([key(1)])
        assert time.monotonic() - started < 2.0


WELCOMES: dict[str, Callable[[Any], list[Any]]] = {
    "garbage": lambda m: [b"\xc1"],
    "a transport that nobody has": lambda m: [wire.Welcome("pigeon", b"", 0)],
    "an offer that is none": lambda m: [wire.Welcome("tcp", b"\x01\x02", 0)],
    "an offer of a port where nobody listens": lambda m: [
        wire.Welcome("tcp", msgspec.msgpack.encode([1, 1, bytes(16)]), 0)
    ],
}


@pytest.mark.parametrize("name", WELCOMES)
async def test_an_owner_whose_welcome_is_worth_nothing(name: str) -> None:
    async with (
        owner_that(WELCOMES[name]) as there,
        instance(peers=(there,), connect_seconds=0.5) as reader,
    ):
        started = time.monotonic()
        with pytest.raises(PeerLostError):
            await reader.ask([key(1)])
        assert time.monotonic() - started < 3.0


LIES: dict[str, Callable[[Any], list[Any]]] = {
    "fewer states": lambda m: [wire.Have(m.job, b"\x01")],
    "states that are none": lambda m: [wire.Have(m.job, b"\x09" * len(m.keys))],
    "garbage": lambda m: [b"\xc1"],
    "another answer": lambda m: [wire.Lent(m.job, 1, b"", b"", b"")],
    "news of nothing": lambda m: [
        wire.News(m.job, wire.packed([99]), b"\x01"),
        wire.Have(m.job, b"\x01" * len(m.keys)),
    ],
    "news that do not fit": lambda m: [
        wire.News(m.job, b"\x01\x02\x03", b"\x01"),
        wire.Have(m.job, b"\x01" * len(m.keys)),
    ],
    "the end": lambda m: [wire.Bye()],
}


@pytest.mark.parametrize("name", LIES)
async def test_an_owner_that_answers_nonsense(name: str) -> None:
    """Into a session that stands: the real transport's, with another control side."""
    async with instance() as real:

        def answers(message: Any) -> list[Any]:
            if isinstance(message, wire.Proof):
                real.tier._server._sessions[b"liar"] = server_module.Session(b"", "tcp", 1e9)
                return [wire.Welcome("tcp", real.tier._transports[0].offer(b"liar"), 0)]
            return LIES[name](message) if isinstance(message, wire.Ask) else []

        async with (
            owner_that(answers) as there,
            instance(peers=(there,), connect_seconds=0.5) as reader,
        ):
            started = time.monotonic()
            with pytest.raises(PeerLostError):
                await reader.ask([key(1), key(2)], reader.context(0.8))
            assert time.monotonic() - started < 2.0


LEASES: dict[str, Callable[[Any], list[Any]]] = {
    "fewer outcomes": lambda m: [wire.Lent(m.job, 1, b"\x00", wire.packed([1]), bytes(4))],
    "fewer slots": lambda m: [wire.Lent(m.job, 1, b"\x00\x00", wire.packed([1]), bytes(8))],
    "fewer checksums": lambda m: [wire.Lent(m.job, 1, b"\x00\x00", wire.packed([1, 2]), bytes(4))],
    "slots that are none": lambda m: [wire.Lent(m.job, 1, b"\x00\x00", b"123", bytes(8))],
    "a lease that nobody gave": lambda m: [
        wire.Lent(m.job, 77, b"\x00\x00", wire.packed([1, 2]), bytes(8))
    ],
    "outcomes that are none": lambda m: [wire.Lent(m.job, 1, b"\x63\x64", b"", b"")],
}


@pytest.mark.parametrize("name", LEASES)
async def test_an_owner_that_leases_nonsense(name: str) -> None:
    async with instance() as real:

        def answers(message: Any) -> list[Any]:
            if isinstance(message, wire.Proof):
                return [wire.Welcome("tcp", real.tier._transports[0].offer(b"liar"), 0)]
            if isinstance(message, wire.Ask):
                return [wire.Have(message.job, b"\x01" * len(message.keys))]
            return LEASES[name](message) if isinstance(message, wire.Lend) else []

        async with (
            owner_that(answers) as there,
            instance(peers=(there,), connect_seconds=0.5) as reader,
        ):
            keys = [key(1), key(2)]
            assert await reader.ask(keys) == "++"
            slots = [reader.into.slot(i, one, SIZE) for i, one in enumerate(keys)]
            try:
                outcomes = await reader.tier.load(slots, reader.context(0.8))
            except PeerLostError:
                return
            assert Outcome.DONE not in outcomes
