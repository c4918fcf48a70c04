# SPDX-License-Identifier: Apache-2.0
"""The TCP transport: bytes in the right places, whatever the other side does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import msgspec
import pytest

from kvtier.errors import ClosedError, ConfigError
from kvtier.tiers.p2p import tcp
from kvtier.tiers.p2p.tcp import Offer, TcpTransport
from kvtier.tiers.p2p.tcp_link import TcpLink
from kvtier.tiers.p2p.tcp_wire import (
    ANSWER,
    ENDED,
    GRANTED,
    HELLO,
    MAGIC,
    MAX_CHUNKS,
    MAX_REQUESTS,
    REFUSED,
    REQUEST,
    VERSION,
    WELCOME,
)
from kvtier.tiers.p2p.transport import Lease, LeaseEndedError, Source, Target

pytestmark = pytest.mark.asyncio

MARK = 0xA5
SESSION = b"reader"
HERE = "127.0.0.1"
GREETING = WELCOME.pack(MAGIC, VERSION)


class FakeLease:
    """Counts who reads."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self.sources = [Source(memoryview(bytearray(one)), 0) for one in payloads]
        self.has_ended = False
        self.begun = 0
        self.under_way = 0

    def begin(self) -> bool:
        if self.has_ended:
            return False
        self.begun += 1
        self.under_way += 1
        return True

    def end(self) -> None:
        assert self.under_way, "ended more often than begun"
        self.under_way -= 1


class Leases:
    """Of one owner: by session and number."""

    def __init__(self) -> None:
        self.given: dict[tuple[bytes, int], FakeLease] = {}

    def give(self, number: int, payloads: Sequence[bytes], session: bytes = SESSION) -> FakeLease:
        lease = self.given[session, number] = FakeLease(payloads)
        return lease

    def find(self, session: bytes, number: int) -> Lease | None:
        return self.given.get((session, number))

    @property
    def under_way(self) -> int:
        return sum(lease.under_way for lease in self.given.values())


@contextlib.asynccontextmanager
async def opened(
    leases: Leases | None = None, host: str = HERE, **options: float
) -> AsyncIterator[TcpTransport]:
    leases = leases or Leases()
    transport = TcpTransport(host, 0, leases.find, **options)
    await transport.open()
    try:
        yield transport
    finally:
        await transport.aclose()
        assert leases.under_way == 0
        assert not transport._strangers
        assert not transport._links


@contextlib.asynccontextmanager
async def linked(leases: Leases, **options: float) -> AsyncIterator[tuple[TcpTransport, TcpLink]]:
    """An owner, and a link to it from another transport."""
    async with opened(leases, **options) as owner, opened(**options) as reader:
        yield owner, await reader.connect(HERE, owner.offer(SESSION), soon())


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


async def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.002)


def targets(sizes: Sequence[int]) -> list[Target]:
    """Chunks in one memory, a gap around each."""
    memory = memoryview(bytearray([MARK]) * (sum(sizes) + len(sizes) + 1))
    found, at = [], 0
    for slot, size in enumerate(sizes):
        found.append(Target(slot, memory[at + 1 : at + 1 + size], 0))
        at += 1 + size
    return found


def contents(where: Sequence[Target]) -> list[bytes]:
    """Of the chunks; the gaps are as they were."""
    memory, at = where[0].view.obj, 0
    for one in where:
        assert memory[at] == MARK
        at += 1 + len(one.view)
    assert memory[at] == MARK
    return [bytes(one.view) for one in where]


def chunks(size: int, count: int, seed: int = 1) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for _ in range(count)]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 1),
        (1, 1000),
        (1000, 1000),
        (4096, 300),
        (65536, 100),
        (65537, 3),
        (1 << 20, 5),
        (8 << 20, 2),
    ],
)
async def test_bytes_arrive(size: int, count: int) -> None:
    leases = Leases()
    payloads = chunks(size, count)
    lease = leases.give(7, payloads)
    async with linked(leases) as (_, link):
        into = targets([size] * count)
        await link.read(7, 0, into)
        assert contents(into) == payloads
        assert (lease.begun, lease.under_way) == (1, 0)
        part = targets([size])
        await link.read(7, count - 1, part)
        assert contents(part) == payloads[-1:]


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_many_reads_at_once(connections: int, seed: int) -> None:
    """More than may be under way; chunks of many sizes, some without bytes."""
    source = random.Random(seed)
    sizes = [source.choice([0, 1, 15, 16, 17, 4096, 70_000]) for _ in range(100)]
    payloads = [source.randbytes(size) for size in sizes]
    leases = Leases()
    lease = leases.give(1, payloads)
    async with linked(leases, connections=connections) as (owner, link):

        async def one() -> None:
            first = source.randrange(100)
            count = source.randrange(min(30, 101 - first))
            into = targets(sizes[first : first + count])
            await link.read(1, first, into)
            assert contents(into) == payloads[first : first + count] if count else not into

        await asyncio.gather(*(one() for _ in range(4 * MAX_REQUESTS)))
        assert lease.begun > 3 * MAX_REQUESTS
        assert owner.counts == tcp.Counts(admitted=connections)
        assert link.is_usable


async def test_an_empty_chunk() -> None:
    leases = Leases()
    leases.give(1, [b""])
    async with linked(leases) as (_, link):
        await link.read(1, 0, targets([0]))


async def test_an_ended_lease_is_no_broken_link() -> None:
    leases = Leases()
    leases.give(1, [b"abc"]).has_ended = True
    leases.give(2, [b"abc"])
    leases.give(3, [b"abc"], session=b"another")
    async with linked(leases) as (_, link):
        for number in (1, 3, 4, (1 << 64) - 1):
            into = targets([3])
            with pytest.raises(LeaseEndedError):
                await link.read(number, 0, into)
            assert contents(into) == [bytes([MARK]) * 3]
        assert link.is_usable
        into = targets([3])
        await link.read(2, 0, into)
        assert contents(into) == [b"abc"]


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 3), (3, 1), ((1 << 32) - 1, 2)])
async def test_chunks_that_the_lease_has_not(first: int, count: int) -> None:
    leases = Leases()
    lease = leases.give(1, [b"abc"] * 3)
    async with linked(leases) as (owner, link):
        with pytest.raises(OSError, match="no such chunks"):
            await link.read(1, first, targets([3] * count))
        assert not link.is_usable
        assert lease.begun == 0
        await until(lambda: not owner._sessions[SESSION].connections)


async def test_other_sizes_than_the_owner_has() -> None:
    leases = Leases()
    leases.give(1, [b"abc"] * 3)
    async with linked(leases) as (_, link):
        into = targets([3, 4])
        with pytest.raises(OSError, match="6 bytes instead of 7"):
            await link.read(1, 0, into)
        assert contents(into) == [bytes([MARK]) * 3, bytes([MARK]) * 4]
        assert not link.is_usable
        with pytest.raises(OSError, match="broken"):
            await link.read(1, 0, targets([3]))


async def test_too_many_chunks_are_not_even_asked_for() -> None:
    async with linked(Leases()) as (_, link):
        with pytest.raises(ValueError, match="at most"):
            await link.read(1, 0, targets([0]) * (MAX_CHUNKS + 1))
        assert link.is_usable


@pytest.mark.parametrize("seed", range(60))
async def test_cancelled_at_any_moment(seed: int) -> None:
    """Nothing is written after ``read`` has ended, and the link goes on."""
    source = random.Random(seed)
    size = source.choice([1000, 65536, 1 << 20])
    count = (8 << 20) // size if size > 1000 else 50
    leases = Leases()
    payloads = chunks(size, count)
    leases.give(1, payloads)
    async with linked(leases, connections=source.randrange(1, 4)) as (_, link):
        into = [targets([size] * count) for _ in range(4)]
        reads = [asyncio.ensure_future(link.read(1, 0, one)) for one in into]
        if source.random() < 0.3:
            for _ in range(source.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(source.random() * 0.02)
        victim = source.randrange(4)
        reads[victim].cancel()
        was_cancelled = (await asyncio.wait(reads[victim : victim + 1]))[0].pop().cancelled()
        for one in into[victim]:
            one.view[:] = b"\x33" * size
        for read, where in zip(reads, into, strict=True):
            if read is reads[victim]:
                continue
            try:
                await read
            except ConnectionAbortedError:
                assert was_cancelled
                assert link.is_usable
                await link.read(1, 0, where)
            assert contents(where) == payloads
        again = targets([size] * count)
        await link.read(1, 0, again)
        assert contents(again) == payloads
        await asyncio.sleep(0.01)
        assert set(contents(into[victim])) == {b"\x33" * size}
        assert link.is_usable


async def test_a_cancelled_read_that_still_waits_costs_nobody_anything() -> None:
    leases = Leases()
    payloads = chunks(1000, 10)
    leases.give(1, payloads)
    async with linked(leases, connections=1) as (owner, link):
        into = [targets([1000] * 10) for _ in range(2 * MAX_REQUESTS)]
        reads = [asyncio.ensure_future(link.read(1, 0, one)) for one in into]
        await asyncio.sleep(0)
        reads[-1].cancel()
        await asyncio.gather(*reads[:-1])
        assert reads[-1].cancelled()
        assert all(contents(one) == payloads for one in into[:-1])
        assert owner.counts == tcp.Counts(admitted=1)


async def test_others_on_a_cancelled_connection_can_be_tried_again() -> None:
    leases = Leases()
    payloads = chunks(8 << 20, 4)
    leases.give(1, payloads)
    async with linked(leases, connections=1) as (owner, link):
        into = [targets([8 << 20] * 4) for _ in range(3)]
        reads = [asyncio.ensure_future(link.read(1, 0, one)) for one in into]
        await until(lambda: leases.under_way == 3)
        reads[1].cancel()
        ends = await asyncio.gather(*reads, return_exceptions=True)
        kinds = [ConnectionAbortedError, asyncio.CancelledError, ConnectionAbortedError]
        assert [type(end) for end in ends] == kinds
        assert link.is_usable
        await until(lambda: leases.under_way == 0)
        await asyncio.gather(*(link.read(1, 0, one) for one in into))
        assert all(contents(one) == payloads for one in into)
        assert owner.counts.admitted == 2


async def test_a_cancellation_hurts_one_connection() -> None:
    leases = Leases()
    payloads = chunks(8 << 20, 4)
    leases.give(1, payloads)
    async with linked(leases, connections=2) as (owner, link):
        into = [targets([8 << 20] * 4) for _ in range(2)]
        reads = [asyncio.ensure_future(link.read(1, 0, one)) for one in into]
        await until(lambda: leases.under_way == 2)
        reads[0].cancel()
        await reads[1]
        assert contents(into[1]) == payloads
        assert reads[0].cancelled()
        await link.read(1, 0, into[0])
        assert contents(into[0]) == payloads
        assert owner.counts.admitted <= 3


# Other processes.


@contextlib.contextmanager
def child(*args: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.tiers.p2p.tcp_child", *map(str, args)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("when", ["idle", "busy"])
async def test_the_owner_is_killed(when: str) -> None:
    with child("owner", 64, 1 << 20) as process:
        offer = bytes.fromhex(process.stdout.readline().decode())
        async with opened(stall_seconds=30) as reader:
            link = await reader.connect(HERE, offer, soon())
            into = targets([1 << 20] * 64)
            await link.read(1, 0, into)
            assert contents(into) == [bytes([i]) * (1 << 20) for i in range(64)]
            if when == "busy":
                read = asyncio.ensure_future(link.read(1, 0, into))
                await asyncio.sleep(0.005)
                process.kill()
                with pytest.raises(ConnectionError):
                    await asyncio.wait_for(read, 5)
            process.kill()
            await until(lambda: not link.is_usable)
            with pytest.raises(ConnectionError):
                await reader.connect(HERE, offer, soon())


async def test_the_owner_is_stopped() -> None:
    with child("owner", 64, 1 << 20) as process:
        offer = bytes.fromhex(process.stdout.readline().decode())
        async with opened(stall_seconds=0.3) as reader:
            link = await reader.connect(HERE, offer, soon())
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(TimeoutError, match="no byte for"):
                await asyncio.wait_for(link.read(1, 0, targets([1 << 20] * 64)), 5)
            assert 0.29 < time.monotonic() - started < 2
            assert not link.is_usable
            # The kernel takes the connection, and nobody answers.
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                await reader.connect(HERE, offer, soon(0.2))
            assert 0.19 < time.monotonic() - started < 2
            assert not reader._links


@pytest.mark.parametrize("by", ["revoke", "stall", "aclose", "kill"])
async def test_the_reader_is_stopped(by: str) -> None:
    leases = Leases()
    lease = leases.give(1, chunks(8 << 20, 8))
    async with opened(leases, stall_seconds=0.3 if by == "stall" else 30) as owner:
        with child("reader", owner.offer(SESSION).hex(), 8, 8 << 20) as process:
            await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
            await until(lambda: lease.begun > 5)
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
            assert leases.under_way
            if by == "revoke":
                await owner.revoke(SESSION)
                assert leases.under_way == 0
            elif by == "aclose":
                await owner.aclose()
                assert leases.under_way == 0
            elif by == "kill":
                process.kill()
            await until(lambda: leases.under_way == 0)
            assert bool(owner.counts.stalled) == (by == "stall")


# Tickets.


async def dial(owner: TcpTransport) -> socket.socket:
    """A connection of somebody's own."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (HERE, owner.port))
    return sock


async def receive(sock: socket.socket, size: int) -> bytes:
    """What comes, up to `size` bytes; closed in any way is an end."""
    loop, got = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(5):
        while len(got) < size:
            try:
                part = await loop.sock_recv(sock, min(size - len(got), 1 << 20))
            except ConnectionError:
                break
            if not part:
                break
            got += part
    return bytes(got)


def hello(owner: TcpTransport, **other: object) -> bytes:
    ticket = msgspec.msgpack.decode(owner.offer(SESSION), type=Offer)
    said = {
        "magic": MAGIC,
        "version": VERSION,
        "number": ticket.number,
        "secret": ticket.secret,
        **other,
    }
    return HELLO.pack(*said.values())


@pytest.mark.parametrize(
    "other",
    [{"secret": bytes(16)}, {"number": 5, "secret": bytes(16)}, {"number": 0}, {"magic": b"HTTP"},
     {"version": 2}],
    ids=["secret", "zeros", "number", "magic", "version"],
)  # fmt: skip
async def test_a_wrong_ticket(other: dict[str, object]) -> None:
    async with opened() as owner:
        owner.offer(b"another")
        said = hello(owner, **other)
        with await dial(owner) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, said + REQUEST.pack(1, 1, 0, 1))
            assert await receive(sock, 1) == b""
        assert owner.counts == tcp.Counts(wrong_tickets=1)


@pytest.mark.parametrize("length", range(HELLO.size))
async def test_no_ticket(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HELLO_SECONDS", 0.05)
    async with opened() as owner:
        started = time.monotonic()
        with await dial(owner) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, hello(owner)[:length])
            assert await receive(sock, 1) == b""
        assert 0.04 < time.monotonic() - started < 2
        assert owner.counts == tcp.Counts(no_ticket=1)


async def test_a_ticket_in_pieces_and_one_that_goes_away() -> None:
    async with opened() as owner:
        loop = asyncio.get_running_loop()
        with await dial(owner) as sock:
            for i in range(HELLO.size):
                await loop.sock_sendall(sock, hello(owner)[i : i + 1])
                await asyncio.sleep(0.001)
            assert await receive(sock, WELCOME.size) == GREETING
        with await dial(owner) as sock:
            await loop.sock_sendall(sock, hello(owner)[:5])
        await until(lambda: owner.counts == tcp.Counts(admitted=1, no_ticket=1))


async def test_a_ticket_is_gone_with_its_session() -> None:
    leases = Leases()
    leases.give(1, [b"abc"])
    async with opened(leases) as owner, opened() as reader:
        offer = owner.offer(SESSION)
        assert owner.offer(SESSION) == offer
        link = await reader.connect(HERE, offer, soon())
        other = await reader.connect(HERE, owner.offer(b"another"), soon())
        await owner.revoke(SESSION)
        await owner.revoke(b"unknown")
        await until(lambda: not link.is_usable)
        with pytest.raises(ConnectionError):
            await reader.connect(HERE, offer, soon())
        assert owner.offer(SESSION) != offer
        assert owner.counts == tcp.Counts(admitted=2, wrong_tickets=1)
        with pytest.raises(LeaseEndedError):
            await other.read(1, 0, targets([3]))
        link = await reader.connect(HERE, owner.offer(SESSION), soon())
        await link.read(1, 0, targets([3]))


async def test_strangers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_STRANGERS", 4)
    async with opened() as owner, opened() as reader:
        socks = [await dial(owner) for _ in range(9)]
        await until(lambda: owner.counts.crowded_out == 5)
        assert len(owner._strangers) == 4
        assert await receive(socks[0], 1) == b""
        # The newest come in all the same.
        await reader.connect(HERE, owner.offer(SESSION), soon())
        assert owner.counts == tcp.Counts(crowded_out=6, admitted=1)
        for sock in socks:
            sock.close()


async def test_connections_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 2)
    async with opened() as owner, opened() as reader:
        links = [await reader.connect(HERE, owner.offer(SESSION), soon()) for _ in range(3)]
        await reader.connect(HERE, owner.offer(b"another"), soon())
        await until(lambda: not links[0].is_usable)
        assert links[1].is_usable
        assert links[2].is_usable
        assert owner.counts == tcp.Counts(crowded_out=1, admitted=4)


async def test_no_descriptor_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, and the loop does not spin."""
    monkeypatch.setattr(tcp, "ACCEPT_PAUSE_SECONDS", 0.1)
    calls = 0
    on_connection = TcpTransport._on_connection

    def counted(self: TcpTransport) -> None:
        nonlocal calls
        calls += 1
        on_connection(self)

    monkeypatch.setattr(TcpTransport, "_on_connection", counted)
    async with opened() as owner:
        with socket.socket() as sock:
            sock.setblocking(False)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            try:
                with contextlib.suppress(BlockingIOError):
                    sock.connect((HERE, owner.port))
                await asyncio.sleep(0.35)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert not owner._strangers
            assert 2 <= calls <= 5
            await asyncio.get_running_loop().sock_sendall(sock, hello(owner))
            assert await receive(sock, WELCOME.size) == GREETING


async def test_no_descriptor_for_a_link() -> None:
    leases = Leases()
    leases.give(1, [b"abc"])
    async with linked(leases) as (owner, link), opened() as reader:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                await reader.connect(HERE, owner.offer(SESSION), soon())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not reader._links
        await link.read(1, 0, targets([3]))


# What an owner may be sent.


@contextlib.asynccontextmanager
async def admitted(owner: TcpTransport) -> AsyncIterator[socket.socket]:
    with await dial(owner) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, hello(owner))
        assert await receive(sock, WELCOME.size) == GREETING
        yield sock


async def test_positions_on_the_wire() -> None:
    leases = Leases()
    lease = leases.give(1, [b"abc"] * 3)
    loop = asyncio.get_running_loop()
    async with opened(leases) as owner, admitted(owner) as sock:
        most = (1 << 32) - 1
        for first, count in ((0, 0), (0, 4), (3, 1), (most, most), (most, 1), (0, most), (4, 0)):
            await loop.sock_sendall(sock, REQUEST.pack(9, 1, first, count))
            assert await receive(sock, ANSWER.size) == ANSWER.pack(9, REFUSED, 0)
        assert lease.begun == 0
        await loop.sock_sendall(sock, REQUEST.pack(9, 1, 1, 2))
        assert await receive(sock, ANSWER.size + 6) == ANSWER.pack(9, GRANTED, 6) + b"abcabc"


@pytest.mark.parametrize("cut", range(REQUEST.size))
async def test_a_request_that_is_cut(cut: int) -> None:
    leases = Leases()
    lease = leases.give(1, [b"abc"] * 3)
    loop = asyncio.get_running_loop()
    request = REQUEST.pack(1, 1, 0, 3)
    async with opened(leases) as owner:
        async with admitted(owner) as sock:
            await loop.sock_sendall(sock, request + request[:cut])
            await receive(sock, ANSWER.size + 9)
            # The other piece later: it is one request.
            await asyncio.sleep(0.002)
            await loop.sock_sendall(sock, request[cut:] + request[:cut])
            assert await receive(sock, ANSWER.size + 9) == ANSWER.pack(1, 0, 9) + b"abc" * 3
        await until(lambda: not owner._sessions[SESSION].connections)
        assert (lease.begun, lease.under_way) == (2, 0)


def reset(sock: socket.socket) -> None:
    """Close it so that the other side hears of it at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("cut", [0, 1, REQUEST.size])
async def test_a_reset_right_behind_a_request(cut: int) -> None:
    """uvloop tells of it once, when there is something to read first."""
    leases = Leases()
    leases.give(1, [b"abc"] * 3)
    async with opened(leases) as owner:
        async with admitted(owner) as sock:
            sock.send(REQUEST.pack(1, 1, 0, 3)[:cut])
            reset(sock)
            await until(lambda: not owner._sessions[SESSION].connections, 2)
        sock = await dial(owner)
        sock.send(hello(owner)[: cut + 1])
        reset(sock)
        await until(lambda: owner.counts.no_ticket == 1, 1)


async def test_a_reset_right_behind_part_of_the_chunks() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server((HERE, 0)) as listener:
        listener.setblocking(False)
        offer = msgspec.msgpack.encode(Offer(listener.getsockname()[1], 1, bytes(16)))
        async with opened() as reader:
            connecting = asyncio.ensure_future(reader.connect(HERE, offer, soon()))
            sock, _ = await loop.sock_accept(listener)
            await loop.sock_sendall(sock, GREETING)
            link = await connecting
            read = asyncio.ensure_future(link.read(1, 0, targets([32 << 20])))
            await receive(sock, HELLO.size + REQUEST.size)
            sock.send(ANSWER.pack(0, GRANTED, 32 << 20))
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 20))
            reset(sock)
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(read, 2)
            assert not link.is_usable


@pytest.mark.parametrize("seed", range(10))
async def test_garbage_for_the_owner(seed: int) -> None:
    leases = Leases()
    lease = leases.give(1, chunks(100_000, 3))
    loop = asyncio.get_running_loop()
    source = random.Random(seed)
    async with linked(leases) as (owner, link):
        for ticket in (b"", hello(owner)):
            with await dial(owner) as sock, contextlib.suppress(ConnectionError):
                await loop.sock_sendall(sock, ticket + source.randbytes(source.randrange(9000)))
                await asyncio.sleep(0.01)
        await until(lambda: len(owner._sessions[SESSION].connections) == 1)
        assert lease.under_way == 0
        await link.read(1, 0, targets([100_000] * 3))


async def test_more_requests_than_are_allowed() -> None:
    leases = Leases()
    lease = leases.give(1, chunks(1 << 20, 8))
    loop = asyncio.get_running_loop()
    async with opened(leases) as owner, admitted(owner) as sock:
        await loop.sock_sendall(sock, REQUEST.pack(1, 1, 0, 8) * MAX_REQUESTS)
        await until(lambda: lease.begun == MAX_REQUESTS)
        assert lease.under_way
        await loop.sock_sendall(sock, REQUEST.pack(1, 1, 0, 8) * MAX_REQUESTS)
        await until(lambda: owner.counts.protocol_errors == 1)
        assert lease.under_way == 0
        assert lease.begun <= 2 * MAX_REQUESTS


async def test_a_reader_that_takes_nothing_slows_nobody() -> None:
    leases = Leases()
    payloads = chunks(1 << 20, 8)
    lease = leases.give(1, payloads)
    loop = asyncio.get_running_loop()
    async with linked(leases) as (owner, link), admitted(owner) as sock:
        await loop.sock_sendall(sock, REQUEST.pack(1, 1, 0, 8) * 60)
        await until(lambda: lease.begun == 60)
        await asyncio.sleep(0.05)
        began = lease.under_way
        assert began > 30
        for _ in range(5):
            into = targets([1 << 20] * 8)
            await asyncio.wait_for(link.read(1, 0, into), 2)
            assert contents(into) == payloads
        assert lease.under_way == began
        await owner.revoke(SESSION)
        assert lease.under_way == 0


async def test_leases_that_raise() -> None:
    """A fault of ours, for the loop's handler; what was begun is ended, and others are served."""
    leases = Leases()
    lease = leases.give(1, chunks(8 << 20, 8))
    loop = asyncio.get_running_loop()
    met: list[object] = []

    def find(session: bytes, number: int) -> Lease | None:
        if number == 2:
            raise RuntimeError("no table")
        return leases.find(session, number)

    loop.set_exception_handler(lambda loop, context: met.append(context["exception"]))
    async with opened(leases) as owner, opened() as reader:
        owner.find_lease = find
        async with admitted(owner) as sock:
            await loop.sock_sendall(sock, REQUEST.pack(1, 1, 0, 8) + REQUEST.pack(2, 2, 0, 8))
            assert len(await receive(sock, 64 << 20)) < 64 << 20
        assert (lease.begun, lease.under_way) == (1, 0)
        assert [type(one) for one in met] == [RuntimeError]
        link = await reader.connect(HERE, owner.offer(SESSION), soon())
        await link.read(1, 0, targets([8 << 20] * 8))


async def test_a_host_that_vanishes_while_nothing_is_under_way_is_found_out() -> None:
    """By the kernel, at both ends; at most after about twice the time."""
    async with linked(Leases(), stall_seconds=9) as (owner, link):
        for end in (*owner._sessions[SESSION].connections, *link._channels):
            assert end._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            found = [end._sock.getsockopt(socket.IPPROTO_TCP, name) for name in names]
            assert found == [9, 3, 3]


async def test_pins_hold_until_the_kernel_has_everything() -> None:
    class Reused(FakeLease):
        """Memory that serves for something else as soon as nobody reads."""

        def end(self) -> None:
            super().end()
            for source in self.sources:
                source.view[:] = bytes(len(source.view))

    leases = Leases()
    payloads = chunks(1 << 20, 48)
    loop = asyncio.get_running_loop()
    async with opened(leases) as owner, admitted(owner) as sock:
        lease = leases.given[SESSION, 1] = Reused(payloads)
        await loop.sock_sendall(sock, REQUEST.pack(1, 1, 0, 48))
        await asyncio.sleep(0.1)
        assert lease.under_way == 1
        got = await receive(sock, ANSWER.size + (48 << 20))
        assert got[ANSWER.size :] == b"".join(payloads)
        assert lease.under_way == 0


# What a reader may be sent.

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(play: Play, **options: float) -> AsyncIterator[tuple[TcpTransport, bytes]]:
    """A reader, and an offer of an owner that plays `play` after each hello."""

    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        answering.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(HELLO.size)
            await play(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        answering.discard(task)

    server = await asyncio.start_server(answer, HERE, 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with opened(**options) as transport:
            yield transport, msgspec.msgpack.encode(Offer(port, 1, bytes(16)))
        await until(lambda: not answering)
    finally:
        server.close()
        await server.wait_closed()


def says(*parts: bytes) -> Play:
    """Welcomes, takes a request, sends `parts` with pauses, and closes."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readexactly(REQUEST.size)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)

    return play


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n", WELCOME.pack(MAGIC, 2), WELCOME.pack(b"KVTQ", 1), b"", b"KV"],
    ids=["http", "version", "magic", "nothing", "cut"],
)  # fmt: skip
async def test_another_greeting(greeting: bytes) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)

    async with scripted(play) as (transport, offer):
        with pytest.raises(OSError, match=r"another protocol|closed|reset"):
            await transport.connect(HERE, offer, soon())


FINE = ANSWER.pack(0, GRANTED, 9) + b"abcdefghi"


@pytest.mark.parametrize("cut", range(len(FINE)))
async def test_an_answer_that_is_cut(cut: int) -> None:
    async with scripted(says(FINE[:cut], FINE[cut:])) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        into = targets([2, 3, 4])
        await link.read(1, 0, into)
        assert contents(into) == [b"ab", b"cde", b"fghi"]
    async with scripted(says(FINE[:cut])) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        into = targets([2, 3, 4])
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(link.read(1, 0, into), 5)
        contents(into)
        assert not link.is_usable


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ANSWER.pack(1, GRANTED, 9) + b"abcdefghi", "what was not asked"),
        (ANSWER.pack(0, GRANTED, 8) + b"abcdefgh", "8 bytes instead of 9"),
        (ANSWER.pack(0, GRANTED, 10) + b"abcdefghij", "10 bytes instead of 9"),
        (ANSWER.pack(0, GRANTED, (1 << 64) - 1) + bytes(100), "bytes instead of 9"),
        (ANSWER.pack(0, GRANTED, 0), "0 bytes instead of 9"),
        (ANSWER.pack(0, ENDED, 9) + b"abcdefghi", "what was not asked"),
        (ANSWER.pack(0, REFUSED, 0), "no such chunks"),
        (ANSWER.pack(0, 3, 0), "status 3"),
        (bytes([255]) * 100, "what was not asked"),
    ],
    ids=["number", "less", "more", "much", "none", "ended", "refused", "status", "garbage"],
)
async def test_another_answer(answer: bytes, words: str) -> None:
    async with scripted(says(answer)) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        into = targets([2, 3, 4])
        with pytest.raises(OSError, match=words):
            await link.read(1, 0, into)
        assert contents(into) == [bytes([MARK]) * size for size in (2, 3, 4)]
        assert not link.is_usable


@pytest.mark.parametrize("extra", [b"x", FINE, bytes(100_000)], ids=["byte", "twice", "flood"])
@pytest.mark.parametrize("parts", [1, 2])
async def test_more_than_was_asked_for(extra: bytes, parts: int) -> None:
    said = (FINE + extra,) if parts == 1 else (FINE, extra)
    async with scripted(says(*said)) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        into = targets([2, 3, 4])
        await link.read(1, 0, into)
        await until(lambda: not link.is_usable)
        assert contents(into) == [b"ab", b"cde", b"fghi"]


async def test_it_speaks_before_it_is_asked() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + FINE)
        await reader.read()

    async with scripted(play) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        await until(lambda: not link.is_usable)


@pytest.mark.parametrize("seed", range(10))
async def test_garbage_for_the_reader(seed: int) -> None:
    source = random.Random(seed)
    async with scripted(says(source.randbytes(source.randrange(1, 2000)))) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        reads = [link.read(1, 0, targets([1000] * 3)) for _ in range(3)]
        ends = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(end, OSError) for end in ends)
        assert not link.is_usable


async def test_it_stalls_in_the_body_but_not_because_it_was_idle() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        for pause in (0.0, 0.2):
            number = REQUEST.unpack(await reader.readexactly(REQUEST.size))[0]
            await asyncio.sleep(pause)
            writer.write(ANSWER.pack(number, GRANTED, 9) + b"abcdefghi")
        await reader.readexactly(REQUEST.size)
        writer.write(ANSWER.pack(2, GRANTED, 9) + b"abc")
        await reader.read()

    async with scripted(play, stall_seconds=0.4) as (transport, offer):
        link = await transport.connect(HERE, offer, soon())
        await link.read(1, 0, targets([2, 3, 4]))
        await asyncio.sleep(0.3)
        await link.read(1, 0, targets([2, 3, 4]))
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.read(1, 0, targets([2, 3, 4])), 5)
        assert 0.39 < time.monotonic() - started < 2
        assert not link.is_usable


@pytest.mark.parametrize("seed", range(3))
async def test_offers_that_are_none(seed: int) -> None:
    source = random.Random(seed)
    good = msgspec.msgpack.encode(Offer(1, 1, bytes(16)))
    bad = [good[:cut] for cut in range(len(good))]
    bad += [source.randbytes(source.randrange(200)) for _ in range(200)]
    bad += [
        msgspec.msgpack.encode(fields)
        for fields in (
            [0, 1, bytes(16)],
            [65536, 1, bytes(16)],
            [1, -1, bytes(16)],
            [1, 1 << 63, bytes(16)],
            [1, 1, bytes(15)],
            [1, 1, bytes(17)],
            [1, 1, "0123456789abcdef"],
            [1, 1],
            {"port": 1},
            None,
        )
    ]
    bad += [good + bytes(1), bytes(1 << 20), b"\xdd\xff\xff\xff\xff", b"\x91" * 100]
    async with opened() as transport:
        for offer in bad:
            with pytest.raises(OSError, match="an offer"):
                await transport.connect(HERE, offer, soon())


# Opening and closing.


@pytest.mark.parametrize(
    ("listen", "host"),
    [("::1", "::1"), ("::", HERE), ("::", "::1"), ("0.0.0.0", HERE), (HERE, "localhost")],
)
async def test_addresses(listen: str, host: str) -> None:
    leases = Leases()
    leases.give(1, [b"abc"])
    async with opened(leases, host=listen) as owner, opened() as reader:
        link = await reader.connect(host, owner.offer(SESSION), soon())
        into = targets([3])
        await link.read(1, 0, into)
        assert contents(into) == [b"abc"]


async def test_what_the_operator_has_to_change() -> None:
    async with opened() as first:
        with pytest.raises(ConfigError, match=f"port {first.port}"):
            await TcpTransport(HERE, first.port, Leases().find).open()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await TcpTransport("192.0.2.1", 0, Leases().find).open()
    with pytest.raises(ConfigError, match="no host"):
        await TcpTransport("a host..", 0, Leases().find).open()


@pytest.mark.parametrize("host", ["", "..", "a\0b", "\udcff", "x" * 300])
async def test_a_host_that_is_none(host: str) -> None:
    async with opened() as owner, opened() as reader:
        with pytest.raises(OSError, match=r"name|Name|address"):
            await reader.connect(host, owner.offer(SESSION), soon())


async def test_nobody_listens_there() -> None:
    async with opened() as gone:
        offer = gone.offer(SESSION)
    async with opened() as reader:
        with pytest.raises(ConnectionRefusedError):
            await reader.connect(HERE, offer, soon())
        with pytest.raises(TimeoutError):
            await reader.connect(HERE, offer, soon(-1))


@pytest.mark.parametrize("side", ["owner", "reader", "link"])
async def test_closed_while_busy(side: str) -> None:
    leases = Leases()
    leases.give(1, chunks(8 << 20, 4))
    async with opened(leases) as owner, opened() as reader:
        link = await reader.connect(HERE, owner.offer(SESSION), soon())
        into = [targets([8 << 20] * 4) for _ in range(3)]
        reads = [asyncio.ensure_future(link.read(1, 0, one)) for one in into]
        await until(lambda: leases.under_way > 0)
        for _ in range(2):
            await {"owner": owner, "reader": reader, "link": link}[side].aclose()
        assert leases.under_way == 0 or side != "owner"
        ends = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(end, OSError) for end in ends)
        assert not link.is_usable
        await until(lambda: leases.under_way == 0)
        if side != "link":
            with pytest.raises(ClosedError):
                await (owner if side == "owner" else reader).connect(HERE, b"", soon())
            with pytest.raises(ClosedError):
                (owner if side == "owner" else reader).offer(SESSION)


async def test_closed_while_connecting() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(play) as (transport, offer):
        connecting = asyncio.ensure_future(transport.connect(HERE, offer, soon()))
        cancelled = asyncio.ensure_future(transport.connect(HERE, offer, soon()))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        assert len(transport._links) == 1
        await transport.aclose()
        with pytest.raises(OSError, match="closed"):
            await connecting


@pytest.mark.parametrize("end", ["done", "cancelled", "lost", "ended", "waits"])
async def test_no_view_is_kept(end: str) -> None:
    """A region can be closed only when nobody holds a view of it."""
    leases = Leases()
    leases.give(1, chunks(1 << 20, 8))
    memory = bytearray(8 << 20)
    into = [Target(i, memoryview(memory)[i << 20 : (i + 1) << 20], 0) for i in range(8)]
    async with linked(leases, connections=1) as (owner, link):
        reads = [asyncio.ensure_future(link.read(1 + (end == "ended"), 0, into))]
        if end == "waits":
            reads += [asyncio.ensure_future(link.read(1, 0, into)) for _ in range(MAX_REQUESTS)]
        await asyncio.sleep(0.002)
        if end in ("cancelled", "waits"):
            for read in reads:
                read.cancel()
        if end == "lost":
            await owner.revoke(SESSION)
        gc.disable()
        try:
            ends = [type(one) for one in await asyncio.gather(*reads, return_exceptions=True)]
            reads.clear()
            into.clear()
            read = None
            await asyncio.sleep(0)
            memory.append(0)
        finally:
            gc.enable()
        cause = {"done": type(None), "lost": ConnectionResetError, "ended": LeaseEndedError}
        assert set(ends) == {cause.get(end, asyncio.CancelledError)}
