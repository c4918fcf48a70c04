# SPDX-License-Identifier: Apache-2.0
"""UCX through the binding: between two real processes, over shared memory and over TCP."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ClosedError, ConfigError, TierLostError
from tests.parts import ROOT, missing

pytestmark = pytest.mark.needs("ucx")

if missing("ucx") is None:
    from kvtier._core import ucx
    from kvtier.tiers.p2p.ucx_loop import CANCEL_SECONDS, UcxLoop
    from tests.core.ucx_peer import Peer, SharedMemory, pattern

MIB = 1 << 20
SECONDS = 20.0
"""What any operation here may take."""

TRANSPORTS = {"chosen": None, "tcp": "tcp,self"}
"""What UCX chooses on one host, and a network."""


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both processes use it: a context reads the variable when it is made."""
    name: str = request.param
    if TRANSPORTS[name] is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", TRANSPORTS[name])
    return name


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the peer's process has to move to serve an operation."""
    monkeypatch.setenv("UCX_TLS", TRANSPORTS["tcp"])


class Side:
    """This process: memory, a worker and what was called back."""

    def __init__(self, size: int, *, writable: bool = True) -> None:
        self.memory = SharedMemory(size)
        self.context = ucx.Context()
        self.registered = self.context.register(self.memory.address, size, writable=writable)
        self.worker = ucx.Worker(self.context)
        self.errors: list[str] = []

    def connect(self, peer: Peer) -> tuple[ucx.Endpoint, ucx.RemoteKey]:
        endpoint = self.worker.connect(peer.worker, self.errors.append)
        return endpoint, endpoint.unpack(peer.rkey)

    def until(self, done: Callable[[], object], seconds: float = SECONDS) -> bool:
        """Drive the worker. Whether it came in time."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            if not self.worker.progress():
                time.sleep(0.0002)
        return True

    def end(self, start: Callable[[Callable[[str | None], None]], object]) -> str | None:
        """Start an operation and see it end, once."""
        ended: list[str | None] = []
        start(ended.append)
        assert ended == []
        assert self.until(lambda: ended)
        assert len(ended) == 1
        return ended[0]

    def close(self, endpoint: ucx.Endpoint, *, force: bool = True) -> None:
        assert self.end(lambda ended: endpoint.close(force=force, callback=ended)) is None

    def leave(self) -> None:
        self.worker.close()
        self.registered.close()
        self.memory.close()


@pytest.fixture
def side() -> Iterator[Side]:
    """Made when the test's variables stand."""
    made: list[Side] = []

    class Lazy:
        def __call__(self, size: int, *, writable: bool = True) -> Side:
            made.append(Side(size, writable=writable))
            return made[-1]

    yield Lazy()  # type: ignore[misc]
    for one in made:
        one.leave()
    made.clear()
    gc.collect()


MakeSide = Callable[..., Side]


def int64s(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


def scattered(size: int, chunk: int, count: int, seed: int) -> np.ndarray:
    """Offsets of chunks that do not overlap, in any order, most of them not aligned."""
    room = size // count
    assert room >= chunk
    random = np.random.default_rng(seed)
    spare = random.integers(0, room - chunk + 1, count)
    return int64s(random.permutation(np.arange(count) * room + spare))


SHAPES = [(1, 1), (1000, 1), (333, 4097), (1000, 65536), (64, MIB), (9, 8 * MIB), (1, 60 * MIB)]


@pytest.mark.parametrize(("count", "chunk"), SHAPES)
def test_batches_arrive_and_touch_nothing_else(
    transport: str, side: MakeSide, count: int, chunk: int
) -> None:
    size = min(100 * MIB, max(MIB, 2 * count * chunk))
    ours = side(size)
    with Peer(size, seed=1, writable=True) as peer:
        theirs = pattern(size, 1)
        endpoint, key = ours.connect(peer)
        ours.memory.bytes[:] = 7
        expected = np.full(size, 7, np.uint8)
        local, remote = scattered(size, chunk, count, 2), scattered(size, chunk, count, 3)
        lengths = int64s(np.full(count, chunk))
        here, there = ours.memory.address, peer.address
        for at, start in zip(local, remote, strict=True):
            expected[at : at + chunk] = theirs[start : start + chunk]
        got = ours.end(
            lambda ended: endpoint.get_batch(here + local, there + remote, lengths, key, ended)
        )
        assert got is None
        assert np.array_equal(ours.memory.bytes, expected)

        ours.memory.bytes[:] = pattern(size, 4)
        for at, start in zip(local, remote, strict=True):
            theirs[start : start + chunk] = ours.memory.bytes[at : at + chunk]
        put = ours.end(
            lambda ended: endpoint.put_batch(here + local, there + remote, lengths, key, ended)
        )
        assert put is None
        assert peer.ask("crc")["crc"] == zlib.crc32(theirs)
        assert np.array_equal(ours.memory.bytes, pattern(size, 4))
        ours.close(endpoint, force=False)
    assert ours.errors == []


def test_single_chunks_and_a_process_to_itself(transport: str, side: MakeSide) -> None:
    ours = side(2 * MIB)
    ours.memory.bytes[:] = pattern(2 * MIB, 5)
    first, second = ours.memory.address, ours.memory.address + MIB
    endpoint = ours.worker.connect(ours.worker.address, ours.errors.append)
    key = endpoint.unpack(ours.registered.rkey)
    assert (key.address, key.length, key.writable) == (first, 2 * MIB, True)
    assert ours.end(lambda ended: endpoint.get(first, 1000, second, key, ended)) is None
    assert np.array_equal(ours.memory.bytes[:1000], ours.memory.bytes[MIB : MIB + 1000])
    assert ours.end(lambda ended: endpoint.put(first, MIB, second, key, ended)) is None
    assert np.array_equal(ours.memory.bytes[:MIB], ours.memory.bytes[MIB:])
    assert ours.end(endpoint.flush) is None


@pytest.mark.usefixtures("tcp")
def test_a_put_ends_when_it_is_seen_at_the_target(
    side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where UCX sends messages for want of remote access, it is done with a put when a few bytes
    are in a socket's buffer."""
    monkeypatch.setenv("UCX_MAX_RMA_LANES", "0")
    ours = side(MIB)
    with Peer(MIB, seed=1, writable=True) as peer:
        endpoint, key = ours.connect(peer)
        at = ours.memory.address
        # The connection stands when an answer has come; a flush of nothing does not wait for it.
        assert ours.end(lambda e: endpoint.get(at, 1, peer.address, key, e)) is None
        ours.memory.bytes[:] = 9
        expected = pattern(MIB, 1)
        expected[:8] = 9
        peer.stop()
        ended: list[str | None] = []
        endpoint.put(at, 8, peer.address, key, ended.append)
        assert not ours.until(lambda: ended, 0.5)
        peer.process.send_signal(18)
        assert ours.until(lambda: ended)
        assert ended == [None]
        assert peer.ask("crc")["crc"] == zlib.crc32(expected)


@pytest.mark.needs("peek")
def test_a_get_on_one_host_needs_nothing_of_the_peer(
    side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX would take a socket, at a tenth of the speed, if it were not told that no rendezvous is
    to come."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    ours = side(8 * MIB)
    with Peer(8 * MIB, seed=1) as peer:
        endpoint, key = ours.connect(peer)
        assert ours.end(endpoint.flush) is None
        peer.stop()
        assert ours.end(lambda e: endpoint.get_batch(*batch(ours, peer, MIB), key, e)) is None
        assert np.array_equal(ours.memory.bytes, pattern(8 * MIB, 1))


def test_operations_end_in_the_order_of_a_flush(transport: str, side: MakeSide) -> None:
    """A flush waits for what was started before it, also for what UCX has not got yet."""
    ours = side(8 * MIB)
    with Peer(8 * MIB, writable=True) as peer:
        endpoint, key = ours.connect(peer)
        order: list[tuple[str, str | None]] = []
        offsets = int64s(np.arange(512) * 16384)
        lengths = int64s(np.full(512, 16384))
        at = ours.memory.address
        for name in ("first", "second"):
            endpoint.put_batch(
                at + offsets, peer.address + offsets, lengths, key,
                lambda error, name=name: order.append((name, error)),
            )  # fmt: skip
        endpoint.flush(lambda error: order.append(("flush", error)))
        endpoint.close(force=False, callback=lambda error: order.append(("close", error)))
        assert order == []
        assert ours.until(lambda: len(order) == 4)
        assert order[2:] == [("flush", None), ("close", None)]
        assert sorted(order[:2]) == [("first", None), ("second", None)]
        assert peer.ask("crc")["crc"] == zlib.crc32(ours.memory.bytes)


def batch(ours: Side, peer: Peer, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Local, remote and lengths of all of a peer's memory."""
    offsets = int64s(np.arange(peer.size // chunk) * chunk)
    lengths = int64s(np.full(len(offsets), chunk))
    return ours.memory.address + offsets, peer.address + offsets, lengths


@pytest.mark.parametrize("way", ["get", "put"])
@pytest.mark.parametrize("chunk", [65536, 8 * MIB])
def test_a_peer_killed_in_the_middle(transport: str, side: MakeSide, way: str, chunk: int) -> None:
    ours = side(64 * MIB)
    with Peer(64 * MIB, seed=1, writable=True) as peer:
        endpoint, key = ours.connect(peer)
        assert ours.end(endpoint.flush) is None
        ended: list[str | None] = []
        start = getattr(endpoint, f"{way}_batch")
        start(*batch(ours, peer, chunk), key, ended.append)
        ours.worker.progress()
        assert ended == []
        peer.kill()
        assert ours.until(lambda: ended, 5)
        assert ended[0] is not None
        assert ended[0].startswith(f"{way}: ")
        # And whatever is started now.
        assert ours.until(lambda: ours.errors, 5)
        assert ours.end(
            lambda ended: endpoint.get(ours.memory.address, 1, peer.address, key, ended)
        )
        ours.close(endpoint)
        assert len(ours.errors) == 1
        ours.memory.bytes[:] = 7
        ours.until(lambda: False, 0.3)
        assert (ours.memory.bytes == 7).all()


@pytest.mark.usefixtures("tcp")
@pytest.mark.fault("L14")
@pytest.mark.parametrize("chunk", [65536, 8 * MIB])
def test_a_peer_stopped_in_the_middle(side: MakeSide, chunk: int) -> None:
    """UCX waits for as long as it likes; a close by force does not, and then memory is ours."""
    ours = side(64 * MIB)
    with Peer(64 * MIB, seed=1) as peer:
        endpoint, key = ours.connect(peer)
        assert ours.end(endpoint.flush) is None
        ended: list[str | None] = []
        request = endpoint.get_batch(*batch(ours, peer, chunk), key, ended.append)
        ours.worker.progress()
        peer.stop()
        assert not ours.until(lambda: ended, 0.5)
        endpoint.cancel(request)
        assert not ours.until(lambda: ended, 0.2)
        graceful: list[str | None] = []
        endpoint.close(force=False, callback=graceful.append)
        assert not ours.until(lambda: graceful, 0.2)
        began = time.monotonic()
        ours.close(endpoint)
        assert time.monotonic() - began < 1
        assert ended == ["get: Request canceled"]
        assert graceful == [None]
        assert request.ended
        # The peer answers what it had been asked; nobody listens any more.
        ours.memory.bytes[:] = 7
        peer.process.send_signal(18)
        ours.until(lambda: False, 0.5)
        assert (ours.memory.bytes == 7).all()
        # The same worker still reaches the same peer.
        endpoint, key = ours.connect(peer)
        ended.clear()
        assert ours.end(lambda e: endpoint.get_batch(*batch(ours, peer, chunk), key, e)) is None
        assert np.array_equal(ours.memory.bytes, pattern(64 * MIB, 1))


def test_a_cancelled_batch_begins_no_further_chunk(transport: str, side: MakeSide) -> None:
    ours = side(64 * MIB)
    with Peer(64 * MIB, seed=1) as peer:
        endpoint, key = ours.connect(peer)
        ended: list[str | None] = []
        request = endpoint.get_batch(*batch(ours, peer, 65536), key, ended.append)
        while not ours.memory.bytes[0] and not ended:
            ours.worker.progress()
        endpoint.cancel(request)
        assert ours.until(lambda: ended)
        assert ended == ["get: Request canceled"]
        written = np.array_equal(ours.memory.bytes, pattern(64 * MIB, 1))
        assert not written
        ours.memory.bytes[:] = 7
        ours.until(lambda: False, 0.2)
        assert (ours.memory.bytes == 7).all()
        endpoint.cancel(request)
        assert ours.end(endpoint.flush) is None


def test_closing_a_worker_ends_everything_once(transport: str, side: MakeSide) -> None:
    ours = side(64 * MIB)
    with Peer(64 * MIB, writable=True) as peer:
        endpoint, key = ours.connect(peer)
        ended: list[str | None] = []
        for _ in range(3):
            endpoint.put_batch(*batch(ours, peer, 65536), key, ended.append)
        ours.worker.progress()
        ours.worker.close()
        assert ended == ["put: Request canceled"] * 3
        ours.worker.close()
        for call in (
            lambda: endpoint.get(ours.memory.address, 1, peer.address, key, ended.append),
            lambda: endpoint.flush(ended.append),
            lambda: endpoint.unpack(peer.rkey),
            lambda: endpoint.close(force=True, callback=ended.append),
            lambda: ours.worker.connect(peer.worker, ended.append),
            ours.worker.progress,
            ours.worker.arm,
            ours.worker.fileno,
        ):
            with pytest.raises(ClosedError):
                call()
        assert len(ended) == 3


def test_an_endpoint_is_closed_once_and_says_so(transport: str, side: MakeSide) -> None:
    ours = side(MIB)
    with Peer(MIB) as peer:
        endpoint, key = ours.connect(peer)
        ended: list[str | None] = []
        endpoint.close(force=False, callback=ended.append)
        with pytest.raises(ClosedError):
            endpoint.get(ours.memory.address, 1, peer.address, key, ended.append)
        with pytest.raises(ClosedError):
            endpoint.unpack(peer.rkey)
        endpoint.close(force=True, callback=ended.append)
        assert ours.until(lambda: len(ended) == 2)
        endpoint.close(force=True, callback=ended.append)
        assert len(ended) == 2
        assert ours.until(lambda: len(ended) == 3)
        assert ended == [None] * 3


def test_callbacks_may_do_anything(side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = side(MIB)
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: raised.append(what.exc_value))
    endpoint = ours.worker.connect(ours.worker.address, ours.errors.append)
    key = endpoint.unpack(ours.registered.rkey)
    at = ours.memory.address
    seen: list[str] = []

    def first(error: str | None) -> None:
        seen.append("first")
        endpoint.get(at, 10, at + 100, key, second)
        raise RuntimeError("of a callback")

    def second(error: str | None) -> None:
        seen.append("second")
        endpoint.get(at, 10, at + 100, key, third)
        ours.worker.close()
        seen.append("closed")

    def third(error: str | None) -> None:
        seen.append(f"third {error}")

    endpoint.get(at, 10, at + 100, key, first)
    assert ours.until(lambda: ours.worker.closed or len(seen) > 3)
    assert seen == ["first", "second", "third get: Request canceled", "closed"]
    assert [str(error) for error in raised] == ["of a callback"]


def test_what_is_not_inside_the_peers_memory_is_refused(side: MakeSide) -> None:
    ours = side(MIB, writable=False)
    endpoint = ours.worker.connect(ours.worker.address, ours.errors.append)
    key = endpoint.unpack(ours.registered.rkey)
    at, end = ours.memory.address, ours.memory.address + MIB
    never: list[Any] = []
    for local, length, remote in (
        (at, 1, at - 1), (at, 1, end), (at, MIB + 1, at), (at, 2, end - 1),
        (at, 0, at), (at, -1, at), (0, 1, at), (at, 1 << 62, at), (at, 1, 1 << 62),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="are not inside"):
            endpoint.get(local, length, remote, key, never.append)
    with pytest.raises(ValueError, match="for reading only"):
        endpoint.put(at, 1, at, key, never.append)
    one = int64s([at])
    for arrays in (
        (one, one, int64s([1, 2])), (one, int64s([]), one), (int64s([]),) * 3,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="addresses"):
            endpoint.get_batch(*arrays, key, never.append)
    with pytest.raises(TypeError):
        endpoint.get_batch(one.astype(np.int32), one, one, key, never.append)
    other = ours.worker.connect(ours.worker.address, ours.errors.append)
    with pytest.raises(ValueError, match="not unpacked for this endpoint"):
        other.get(at, 1, at, key, never.append)
    ours.until(lambda: False, 0.05)
    assert never == []


def forged(rkey: bytes, *, address: int | None = None) -> bytes:
    """As a peer that lies, or that has no checks, would make it: writable, and of any range."""
    context, body = ucx.unseal(b"KVTk", rkey)
    found, length, _ = struct.unpack_from("<QQ?", body)
    head = struct.pack("<QQ?", address or found, length, True)
    return ucx.seal(b"KVTk", context, head + body[17:])


def test_rights_are_not_kept_by_shared_memory_and_tcp(transport: str, side: MakeSide) -> None:
    """What the stub says of trust. With a network card the puts would fail."""
    ours = side(MIB)
    with Peer(MIB, seed=1, writable=False) as peer:
        endpoint = ours.worker.connect(peer.worker, ours.errors.append)
        key = endpoint.unpack(forged(peer.rkey))
        ours.memory.bytes[:] = 9
        at = ours.memory.address
        assert ours.end(lambda e: endpoint.put(at, 4096, peer.address, key, e)) is None
        assert peer.ask("crc")["crc"] == zlib.crc32(
            np.concatenate([ours.memory.bytes[:4096], pattern(MIB, 1)[4096:]])
        )
        # Nor does an end of the registration end them.
        peer.ask("unregister")
        assert ours.end(lambda e: endpoint.put(at, MIB, peer.address, key, e)) is None
        assert peer.ask("crc")["crc"] == zlib.crc32(ours.memory.bytes)


def test_a_wrong_address_is_an_error_or_ends_the_target(transport: str, side: MakeSide) -> None:
    """Why the ranges of keys are checked where an operation starts."""
    ours = side(MIB)
    with Peer(MIB) as peer:
        endpoint = ours.worker.connect(peer.worker, ours.errors.append)
        key = endpoint.unpack(forged(peer.rkey, address=4096))
        assert ours.end(lambda e: endpoint.get(ours.memory.address, 100, 4096, key, e))
        if transport == "tcp":
            assert peer.process.wait(SECONDS) == -11
        else:
            assert peer.ask("crc")
        ours.close(endpoint)


@pytest.mark.fault("P09")
def test_garbage_is_an_error(side: MakeSide) -> None:
    ours, other = side(MIB), side(MIB)
    endpoint = ours.worker.connect(ours.worker.address, ours.errors.append)
    address, rkey = ours.worker.address, ours.registered.rkey
    random = np.random.default_rng(0)
    for good, take in (
        (address, lambda data: ours.worker.connect(data, ours.errors.append)),
        (rkey, endpoint.unpack),
    ):
        bad = [b"", good[:15], good[:16], good[:-1], good + b"\0", bytes(len(good))]
        bad += [bytes([good[i] ^ 1 if i == at else good[i] for i in range(len(good))])
                for at in range(len(good))]  # fmt: skip
        bad += [random.bytes(n) for n in (1, 44, 200, 5000)]
        bad += [address if good is rkey else rkey]
        for data in bad:
            with pytest.raises(TierLostError, match="is not one that kvtier made"):
                take(data)
        assert take(good)
    with pytest.raises(TierLostError, match="not of the process"):
        endpoint.unpack(other.registered.rkey)
    with pytest.raises(ValueError, match="cannot register"):
        ours.context.register(ours.memory.address, 0, writable=False)


def held() -> tuple[int, int, int]:
    """Descriptors, threads and resident KiB of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def cycle(ours: Side, peer: Peer) -> None:
    endpoint, key = ours.connect(peer)
    assert ours.end(lambda e: endpoint.get(ours.memory.address, 4096, peer.address, key, e)) is None
    ours.close(endpoint)


@pytest.mark.slow
@pytest.mark.fault("L04")
def test_cycles_leave_nothing(
    transport: str, side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What UCX keeps at the peer for its answers, and the sockets of that here, go with this.
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "0.5s")
    ours = side(MIB)
    rounds = {
        "endpoints": (200 if transport == "tcp" else 1000, lambda: cycle(ours, peer)),
        "registrations": (
            2000,
            lambda: ours.context.register(ours.memory.address, MIB, writable=True).close(),
        ),
        "workers": (100, lambda: ucx.Worker(ours.context).close()),
        "contexts": (30, lambda: ucx.Worker(ucx.Context()).close()),
    }
    with Peer(MIB) as peer:
        for name, (times, once) in rounds.items():
            for _ in range(times // 10):
                once()
            before = held()
            for _ in range(times):
                once()
            ours.until(lambda: held()[:2] <= before[:2], 60)  # noqa: B023
            after = held()
            assert after[:2] <= before[:2], name
            assert after[2] - before[2] < 4096, name


@pytest.mark.fault("H15")
def test_dropped_objects_go_in_any_order(transport: str) -> None:
    def use(peer: Peer, *, under_way: bool) -> weakref.ref[Any]:
        memory = SharedMemory(8 * MIB)
        context = ucx.Context()
        worker = ucx.Worker(context)
        registered = context.register(memory.address, memory.size, writable=True)
        endpoint = worker.connect(peer.worker, print)
        key = endpoint.unpack(peer.rkey)

        class Holder:
            """In a cycle with what holds its method."""

            def __init__(self) -> None:
                self.all = (endpoint, key, registered, worker, context)

            def ended(self, error: str | None) -> None:
                raise AssertionError("nobody is there to hear")

        holder = Holder()
        if under_way:
            at = int64s(memory.address + np.arange(128) * 65536)
            there = int64s(peer.address + np.arange(128) * 65536)
            endpoint.get_batch(at, there, int64s(np.full(128, 65536)), key, holder.ended)
            peer.stop()
            # Not progress: callbacks come from there.
            worker.arm()
        # The memory outlives the worker, as its user must see to.
        weakref.finalize(holder, memory.close)
        return weakref.ref(holder)

    before = held()[:2]
    for under_way in (False, True):
        with Peer(8 * MIB) as peer:
            gone = use(peer, under_way=under_way)
            gc.collect()
            assert gone() is None
            assert held()[:2] == (before[0] + 2, before[1])  # the peer's two pipes


@pytest.mark.fault("H08")
def test_the_interpreter_runs_while_a_connection_is_closed(transport: str, side: MakeSide) -> None:
    """Another thread's heartbeat while the peer is gone or does not answer."""
    ours = side(64 * MIB)
    beats: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.002):
            beats.append(time.monotonic())

    with Peer(64 * MIB) as peer:
        endpoint, key = ours.connect(peer)
        assert ours.end(endpoint.flush) is None
        endpoint.get_batch(*batch(ours, peer, 65536), key, lambda _: None)
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            ours.worker.progress()
            peer.stop()
            ours.until(lambda: False, 0.2)
            ours.worker.close()
        finally:
            stop.set()
            thread.join()
    gaps = np.diff(beats)
    assert len(beats) > 10
    assert gaps.max() < 0.1


def test_a_forked_child_leaves_the_parents_worker_alone(transport: str, side: MakeSide) -> None:
    ours = side(MIB)
    with Peer(MIB) as peer:
        cycle(ours, peer)
        code = 1
        child = os.fork()
        if child == 0:
            try:
                del ours.worker, ours.registered, ours.context
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        cycle(ours, peer)


@pytest.mark.asyncio
async def test_coroutines(transport: str, side: MakeSide) -> None:
    ours = side(8 * MIB)
    loop = UcxLoop(ours.worker)
    loop.open()
    try:
        with Peer(8 * MIB, seed=1, writable=True) as peer:
            endpoint = loop.connect(peer.worker, ours.errors.append)
            key = endpoint.unpack(peer.rkey)
            arrays = batch(ours, peer, 65536)
            async with asyncio.timeout(SECONDS):
                await loop.get_batch(endpoint, *arrays, key)
                assert np.array_equal(ours.memory.bytes, pattern(8 * MIB, 1))
                ours.memory.bytes[:] = pattern(8 * MIB, 2)
                await asyncio.gather(
                    *(loop.put_batch(endpoint, *(part[i::4] + 0 for part in arrays), key)
                      for i in range(4)),
                    loop.flush(endpoint),
                )  # fmt: skip
                crc = await asyncio.to_thread(peer.ask, "crc")
                assert crc["crc"] == zlib.crc32(ours.memory.bytes)
                await loop.close_endpoint(endpoint)
                await loop.close_endpoint(endpoint)
                with pytest.raises(ClosedError):
                    await loop.flush(endpoint)
    finally:
        loop.close()
    loop.close()
    await loop.close_endpoint(endpoint)
    with pytest.raises(ClosedError):
        await loop.flush(endpoint)


@pytest.mark.asyncio
@pytest.mark.usefixtures("tcp")
@pytest.mark.fault("H03")
@pytest.mark.parametrize("again", [False, True])
async def test_cancelling_waits_until_memory_is_left_alone(side: MakeSide, again: bool) -> None:
    ours = side(64 * MIB)
    loop = UcxLoop(ours.worker)
    loop.open()
    try:
        with Peer(64 * MIB, seed=1) as peer:
            endpoint = loop.connect(peer.worker, ours.errors.append)
            key = endpoint.unpack(peer.rkey)
            await loop.flush(endpoint)
            arrays = batch(ours, peer, 65536)
            task = asyncio.create_task(loop.get_batch(endpoint, *arrays, key))
            while not ours.memory.bytes[0]:
                await asyncio.sleep(0)
            # Against a peer that lives: what is under way ends by itself, and the endpoint stays.
            task.cancel()
            began = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < CANCEL_SECONDS
            ours.memory.bytes[:] = 7
            await asyncio.sleep(0.2)
            assert (ours.memory.bytes == 7).all()
            await loop.flush(endpoint)

            task = asyncio.create_task(loop.get_batch(endpoint, *arrays, key))
            await asyncio.sleep(0)
            peer.stop()
            await asyncio.sleep(0.1)
            task.cancel()
            if again:
                await asyncio.sleep(0.1)
                task.cancel()
            began = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert CANCEL_SECONDS - 0.2 < time.monotonic() - began < CANCEL_SECONDS + 1
            ours.memory.bytes[:] = 7
            peer.process.send_signal(18)
            await asyncio.sleep(0.3)
            assert (ours.memory.bytes == 7).all()
            with pytest.raises(ClosedError):
                await loop.get_batch(endpoint, *arrays, key)
    finally:
        loop.close()


@pytest.mark.asyncio
async def test_a_lost_peer_is_an_error_of_the_tier(transport: str, side: MakeSide) -> None:
    ours = side(64 * MIB)
    loop = UcxLoop(ours.worker)
    loop.open()
    try:
        with Peer(64 * MIB) as peer:
            endpoint = loop.connect(peer.worker, ours.errors.append)
            key = endpoint.unpack(peer.rkey)
            await loop.flush(endpoint)
            task = asyncio.create_task(loop.get_batch(endpoint, *batch(ours, peer, 65536), key))
            await asyncio.sleep(0)
            peer.kill()
            with pytest.raises(TierLostError, match="UCX: get: "):
                async with asyncio.timeout(5):
                    await task
            await loop.close_endpoint(endpoint)
    finally:
        loop.close()


@pytest.mark.asyncio
@pytest.mark.fault("H16")
async def test_an_idle_loop_costs_nothing_and_still_hears(transport: str, side: MakeSide) -> None:
    ours = side(MIB)
    loop = UcxLoop(ours.worker)
    loop.open()
    turns = 0
    turn = loop._turn

    def counted() -> None:
        nonlocal turns
        turns += 1
        turn()

    loop._turn = counted  # type: ignore[method-assign]
    try:
        with Peer(MIB, writable=True) as peer:
            endpoint = loop.connect(peer.worker, ours.errors.append)
            key = endpoint.unpack(peer.rkey)
            await loop.get_batch(endpoint, *batch(ours, peer, 65536), key)
            await asyncio.sleep(0.2)
            turns, cpu = 0, time.thread_time()
            await asyncio.sleep(1)
            assert turns < 10
            assert time.thread_time() - cpu < 0.05
            # What others want is served, by the descriptor alone.
            said = await asyncio.to_thread(
                lambda: (
                    peer.ask("connect", worker=ours.worker.address.hex(),
                             rkey=ours.registered.rkey.hex()),
                    peer.ask("put", at=ours.memory.address, size=65536, times=50),
                )[1]
            )  # fmt: skip
            assert said == {"done": 50, "error": None}
            if transport == "tcp":
                assert turns > 50
            await asyncio.sleep(0.1)
            turns = 0
            await asyncio.sleep(0.5)
            assert turns < 10
    finally:
        loop.close()


@pytest.mark.asyncio
@pytest.mark.timed
@pytest.mark.fault("V02")
async def test_the_loop_turns_while_a_transfer_runs(transport: str, side: MakeSide) -> None:
    ours = side(64 * MIB)
    loop = UcxLoop(ours.worker)
    loop.open()
    try:
        with Peer(64 * MIB) as peer:
            endpoint = loop.connect(peer.worker, ours.errors.append)
            key = endpoint.unpack(peer.rkey)

            async def transfer() -> None:
                for _ in range(8):
                    await loop.get_batch(endpoint, *batch(ours, peer, 8 * MIB), key)

            task = asyncio.create_task(transfer())
            lags = []
            while not task.done():
                began = time.perf_counter()
                await asyncio.sleep(0)
                lags.append(time.perf_counter() - began)
            await task
        assert len(lags) > 50
        assert float(np.median(lags)) < 0.002
    finally:
        loop.close()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_loading_says_what_and_from_where() -> None:
    said = ucx.load()
    assert said.startswith("UCX 1.")
    assert said.endswith("libucp.so.0")
    assert ucx.load() == said


def test_without_a_library_the_error_says_what_to_do() -> None:
    code = (
        "from kvtier._core import ucx\n"
        "ucx._candidates = lambda: PATHS\n"
        "try:\n    ucx.Context()\n"
        "except Exception as exc:\n    print(type(exc).__name__, exc)\n"
    )
    for paths, why in (("[]", "it is not installed"), ("['/nowhere/libucp.so.0']", "cannot open")):
        said = run(code.replace("PATHS", paths)).stdout
        assert said.startswith(ConfigError.__name__), said
        assert why in said
        assert "`pip install libucx-cu12`, or set `transport: tcp`" in said
        assert said.count("\n") == 1


def test_the_system_is_asked_first_where_it_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import glob; glob.glob = lambda _: FOUND\nfrom kvtier._core import ucx\n"
    code += "print(*map(str, ucx._candidates()), sep='\\n')"
    with_device = run(code.replace("FOUND", "['mlx5_0']")).stdout.splitlines()
    without = run(code.replace("FOUND", "[]")).stdout.splitlines()
    assert with_device == ["libucp.so.0", *without]


def test_a_card_that_the_wheel_does_not_know_is_none() -> None:
    """Bytes between hosts would go the slow way."""
    code = "import glob; glob.glob = lambda _: ['mlx5_0']\nfrom kvtier._core import ucx\n"
    code += "system, wheel = ucx._candidates()\nprint(ucx.has_rdma())\n"
    code += "ucx._candidates = lambda: [wheel]\nucx.load()\nprint(ucx.has_rdma())\n"
    # The system's, as far as anybody can tell here.
    code += "ucx._loaded[1] = system\nprint(ucx.has_rdma())\n"
    assert run(code).stdout.split() == ["True", "False", "True"]


def test_parts_of_two_installations_are_refused(tmp_path: Path) -> None:
    """The loader would take what another package loaded for what belongs to ours."""
    path = Path(ucx.load().rpartition(" from ")[2])
    (tmp_path / path.name).write_bytes(path.read_bytes())
    code = (
        f"import ctypes; ctypes.CDLL({str(path)!r})\n"
        "from kvtier._core import ucx\n"
        f"ucx._candidates = lambda: [{str(tmp_path / path.name)!r}]\n"
        "ucx.load()"
    )
    done = run(code)
    assert "are of two installations" in done.stderr, done.stderr


def test_its_log_is_no_output_of_the_programs() -> None:
    code = "import os\nfrom kvtier._core import ucx\nucx.Worker(ucx.Context())\n"
    code += "print('UCX_LOG_FILE' in os.environ)"
    done = run(code, UCX_LOG_LEVEL="info")
    assert done.stdout == "False\n"
    assert " INFO " in done.stderr
    assert " INFO " in run(code, UCX_LOG_LEVEL="info", UCX_LOG_FILE="stdout").stdout


def test_signals_stay_as_they_were() -> None:
    """UCX takes SIGHUP, by default; a server that is told to end by it would not."""
    code = "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += "from kvtier._core import ucx\nucx.load()\n"
    code += "os.kill(os.getpid(), signal.SIGHUP)\nprint('lives')"
    done = run(code)
    assert done.returncode == -1
    assert done.stdout == ""
    assert run(code, UCX_DEBUG_SIGNO="SIGHUP").stdout == "lives\n"
