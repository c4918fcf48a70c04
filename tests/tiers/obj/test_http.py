# SPDX-License-Identifier: Apache-2.0
"""One connection: bodies in host memory, whatever the other side does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.http import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    SCRATCH_BYTES,
    Connection,
    Landing,
    Response,
    connect,
)
from tests.tiers.obj.scripted import Peer, Play, answer, playing

pytestmark = pytest.mark.asyncio

PAYLOAD = random.Random(1).randbytes(100_003)
GET = b"GET /a HTTP/1.1\r\nHost: store\r\n\r\n"
MARK = 0xA5


@contextlib.asynccontextmanager
async def connected(play: Play) -> AsyncIterator[Connection]:
    async with playing(play) as port:
        connection = await connect("127.0.0.1", port, None)
        try:
            yield connection
        finally:
            await connection.closed()


def memory(length: int) -> memoryview:
    return memoryview(bytearray([MARK]) * length)


def untouched(view: memoryview) -> bool:
    return bytes(view) == bytes([MARK]) * len(view)


async def get(connection: Connection, into: memoryview, stall: float = 5.0) -> Response:
    return await connection.request(GET, into=Landing(into), stall_seconds=stall)


def once(*parts: bytes, stay: bool = False) -> Play:
    """Answers one request with these segments, then closes, or waits for the other side to."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(*parts)
        if stay:
            await peer.gone()

    return play


@pytest.mark.parametrize("size", [1, 100, SCRATCH_BYTES - 1, SCRATCH_BYTES, len(PAYLOAD)])
async def test_a_body_goes_where_it_is_wanted(size: int) -> None:
    payload = PAYLOAD[:size]

    async def play(peer: Peer) -> None:
        while True:
            line, headers, body = await peer.request()
            assert (line, body, headers["host"]) == ("GET /a HTTP/1.1", b"", "store")
            await peer.send(answer(200, payload, [("ETag", '"x"')]))

    async with connected(play) as connection:
        for number in range(3):
            into = memory(size)
            response = await get(connection, into)
            assert response == Response(
                200, {b"content-length": str(size).encode(), b"etag": b'"x"'}, b"", True
            )
            assert bytes(into) == payload
            assert connection.is_usable
            assert connection.requests == number + 1


async def test_cut_at_any_byte() -> None:
    whole = answer(200, PAYLOAD[:50], [("ETag", '"x"')])

    async def play(peer: Peer) -> None:
        for cut in range(1, len(whole)):
            await peer.request()
            await peer.send(whole[:cut], whole[cut:], pause=0.001)

    async with connected(play) as connection:
        for _ in range(1, len(whole)):
            into = memory(50)
            assert (await get(connection, into)).placed
            assert bytes(into) == PAYLOAD[:50]


@pytest.mark.parametrize("kept", [0, 1, 49])
@pytest.mark.parametrize("head", [True, False])
async def test_a_connection_that_ends_early_is_a_reset(kept: int, head: bool) -> None:
    whole = answer(200, PAYLOAD[:50])
    cut = len(whole) - 50
    part = whole[: cut + kept] if head else whole[: kept % cut]
    async with connected(once(part)) as connection:
        with pytest.raises(StoreError) as caught:
            await get(connection, memory(50))
        assert caught.value.kind is Kind.RESET
        assert not connection.is_usable


@pytest.mark.parametrize(
    "response",
    [
        answer(200, PAYLOAD[:49]),
        answer(200, PAYLOAD[:51]),
        answer(200, PAYLOAD),
        answer(200, b""),
        answer(204, b"", framed=False),
        answer(200, PAYLOAD[:50], [("Content-Encoding", "gzip")]),
        answer(
            200,
            b"32\r\n" + PAYLOAD[:50] + b"\r\n0\r\n\r\n",
            [("Transfer-Encoding", "chunked")],
            framed=False,
        ),
        answer(200, PAYLOAD[:50], framed=False),
        answer(203, PAYLOAD[:50]),
        answer(404, PAYLOAD[:50]),
        answer(500, PAYLOAD[:50]),
    ],
    ids=["short", "long", "longer", "empty", "204", "gzip", "chunked", "eof", "203", "404", "500"],
)
async def test_what_is_not_the_chunk_does_not_get_into_its_memory(response: bytes) -> None:
    async with connected(once(response)) as connection:
        into = memory(50)
        got = await get(connection, into)
        assert not got.placed
        assert untouched(into)


async def test_two_lengths_are_none() -> None:
    """A proxy may believe the other one."""
    body = b"32\r\n" + PAYLOAD[:44]
    response = answer(200, body, [("Transfer-Encoding", "chunked")], length=50)
    async with connected(once(response)) as connection:
        into = memory(50)
        with pytest.raises(StoreError) as caught:
            await get(connection, into)
        assert caught.value.kind is Kind.PROTOCOL
        assert untouched(into)


@pytest.mark.parametrize("kind", ["length", "chunked", "eof"])
async def test_the_body_of_an_error(kind: str) -> None:
    text = b"<Error><Code>SlowDown</Code></Error>"
    response = {
        "length": answer(503, text, [("Retry-After", "3")]),
        "chunked": answer(
            503,
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text),
            [("Transfer-Encoding", "chunked"), ("Retry-After", "3")],
            framed=False,
        ),
        "eof": answer(503, text, [("Retry-After", "3")], framed=False),
    }[kind]
    async with connected(once(response[:-5], response[-5:], stay=kind != "eof")) as connection:
        got = await get(connection, memory(50))
        assert (got.status, got.body, got.headers[b"retry-after"]) == (503, text, b"3")
        assert connection.is_usable == (kind != "eof")


async def test_an_endless_error_is_cut() -> None:
    async with connected(once(answer(500, bytes(1 << 20)))) as connection:
        got = await get(connection, memory(50))
        assert got.status == 500
        assert len(got.body) <= MAX_BODY_BYTES
        assert not connection.is_usable


@pytest.mark.parametrize("line", [b"X-A: b\r\n", b"b", b"\r\n\r\nHTTP/1.1 100 Continue\r\nX-A: "])
async def test_an_endless_head_is_cut(line: bytes) -> None:
    """The parser would keep all of it, and copy it again with each read."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 100 Continue\r\nX-A: ")
        while True:
            await peer.send(line * 1000)

    async with connected(play) as connection:
        with pytest.raises(StoreError) as caught:
            async with asyncio.timeout(5):
                await get(connection, memory(50))
        assert caught.value.kind is Kind.PROTOCOL
        assert connection._received <= MAX_HEAD_BYTES + 8 * SCRATCH_BYTES
        assert not connection.is_usable


async def test_a_head_may_be_long() -> None:
    response = answer(200, PAYLOAD[:50], [("X-A", "b" * (MAX_HEAD_BYTES - SCRATCH_BYTES))])
    async with connected(once(response)) as connection:
        assert (await get(connection, memory(50))).placed
    response = answer(500, bytes(MAX_BODY_BYTES), [("X-A", "b" * SCRATCH_BYTES)])
    async with connected(once(response)) as connection:
        assert len((await get(connection, memory(50))).body) == MAX_BODY_BYTES


async def test_a_head_has_a_length_and_no_body() -> None:
    async def play(peer: Peer) -> None:
        for _ in range(3):
            await peer.request()
            await peer.send(answer(200, b"", length=4096))

    async with connected(play) as connection:
        for _ in range(3):
            got = await connection.request(GET, bodiless=True, stall_seconds=5.0)
            assert (got.status, got.headers[b"content-length"]) == (200, b"4096")
            assert connection.is_usable


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
async def test_a_body_leaves_from_where_it_is(size: int) -> None:
    payload = random.Random(2).randbytes(size)
    head = b"PUT /a HTTP/1.1\r\nHost: store\r\nContent-Length: %d\r\n\r\n" % size
    seen = []

    async def play(peer: Peer) -> None:
        for _ in range(2):
            seen.append((await peer.request())[2])
            await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n", answer(200))

    async with connected(play) as connection:
        for _ in range(2):
            got = await connection.request(head, memoryview(payload), stall_seconds=5.0)
            assert got.status == 200
            assert connection.is_usable
    assert seen == [payload, payload]


async def test_an_answer_before_the_request_was_sent() -> None:
    """A store that has no room says so at once, and reads no further."""
    size = 64 << 20
    head = b"PUT /a HTTP/1.1\r\nHost: store\r\nContent-Length: %d\r\n\r\n" % size

    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(answer(503))
        await peer.gone()

    async with connected(play) as connection:
        got = await connection.request(head, memoryview(bytes(size)), stall_seconds=5.0)
        assert got.status == 503
        assert not connection.is_usable


@pytest.mark.fault("H14")
@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ((), Kind.STALLED_HEAD),
        ((b"HTTP/1.1 200 OK\r\nContent-Le",), Kind.STALLED_HEAD),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), Kind.STALLED_HEAD),
        ((answer(200, b"", length=50),), Kind.STALLED_BODY),
        ((answer(200, PAYLOAD[:49], length=50),), Kind.STALLED_BODY),
        ((answer(500, b"<Err", length=50),), Kind.STALLED_BODY),
    ],
)
async def test_silence_is_a_stall(parts: tuple[bytes, ...], kind: Kind) -> None:
    loop = asyncio.get_running_loop()
    async with connected(once(*parts, stay=True)) as connection:
        started = loop.time()
        with pytest.raises(StoreError) as caught:
            await get(connection, memory(50), stall=0.1)
        assert caught.value.kind is kind
        assert 0.09 < loop.time() - started < 2.0
        assert not connection.is_usable


async def test_a_store_that_does_not_read_stalls() -> None:
    size = 64 << 20
    head = b"PUT /a HTTP/1.1\r\nHost: store\r\nContent-Length: %d\r\n\r\n" % size

    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(30)

    async with connected(play) as connection:
        with pytest.raises(StoreError) as caught:
            await connection.request(head, memoryview(bytes(size)), stall_seconds=0.1)
        assert caught.value.kind is Kind.STALLED_HEAD


async def test_a_trickle_is_no_stall() -> None:
    """It is bounded by the deadline of whoever waits."""
    whole = answer(200, PAYLOAD[:20])

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(*(whole[i : i + 1] for i in range(len(whole))), pause=0.02)

    async with connected(play) as connection:
        into = memory(20)
        assert (await get(connection, into, stall=0.5)).placed
        assert bytes(into) == PAYLOAD[:20]


@pytest.mark.parametrize("after", [0, 1, 30, 60, 5000])
async def test_after_a_cancellation_the_memory_is_left_alone(after: int) -> None:
    """A read that was given up must not write later."""
    whole = answer(200, PAYLOAD)
    go_on = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(whole[:after])
        await go_on.wait()
        await peer.send(whole[after:])

    async with connected(play) as connection:
        into = memory(len(PAYLOAD))
        task = asyncio.create_task(get(connection, into))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        into[:] = bytes([MARK]) * len(into)
        go_on.set()
        await asyncio.sleep(0.05)
        assert untouched(into)
        assert not connection.is_usable


@pytest.mark.parametrize("moment", ["with the answer", "later"])
async def test_bytes_that_nobody_asked_for_end_the_connection(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request would take them for its answer."""
    extra = answer(200, bytes(50))

    async def play(peer: Peer) -> None:
        await peer.request()
        first = answer(200, PAYLOAD[:50])
        await peer.send(*([first + extra] if moment == "with the answer" else [first, extra]))
        await peer.gone()

    async with connected(play) as connection:
        into = memory(50)
        assert (await get(connection, into)).placed
        assert bytes(into) == PAYLOAD[:50]
        await asyncio.sleep(0.05)
        assert not connection.is_usable
    assert caplog.records == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 200\x00OK\r\n\r\n",
        b"220 ftp\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
async def test_what_is_not_http(garbage: bytes) -> None:
    async with connected(once(garbage, stay=True)) as connection:
        with pytest.raises(StoreError) as caught:
            await get(connection, memory(50))
        assert caught.value.kind is Kind.PROTOCOL
        assert not connection.is_usable


async def test_who_speaks_first_is_no_store() -> None:
    """Mail, SSH, FTP: the wrong port."""

    async def play(peer: Peer) -> None:
        await peer.send(b"220 mail ESMTP\r\n")
        await peer.gone()

    async with connected(play) as connection:
        while connection.is_usable:
            await asyncio.sleep(0.001)
        with pytest.raises(StoreError) as caught:
            await get(connection, memory(50))
        assert caught.value.kind is Kind.PROTOCOL


async def test_close_after_the_answer_is_seen() -> None:
    whole = answer(200, PAYLOAD[:50], [("Connection", "close")])
    async with connected(once(whole)) as connection:
        assert (await get(connection, memory(50))).placed
        assert not connection.is_usable
        with pytest.raises(StoreError) as caught:
            await get(connection, memory(50))
        assert caught.value.kind is Kind.RESET
