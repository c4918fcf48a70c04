# SPDX-License-Identifier: Apache-2.0
"""Events: numbered without gaps, bounded with an exact count of losses, and enough to follow."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import EventsConfig
from kvtier.errors import ConfigError, InternalError
from kvtier.obs.events import Event, EventBus, fold
from kvtier.obs.publisher import END_OF_REPLAY, Publisher, decode_message, offset_endpoint


def stored(key: bytes, tier: str = "host") -> Event:
    return Event("stored", key=key, destination=tier, bytes=10)


def test_events_are_numbered_and_stamped() -> None:
    bus = EventBus(epoch="e1", clock=lambda: 12.5)
    assert not bus.active
    bus.emit(stored(b"lost"))
    subscription = bus.subscribe()
    assert bus.active
    bus.emit_many([stored(b"a"), stored(b"b")])
    bus.epoch = "e2"
    bus.emit(Event("cleared"))
    events = subscription.take()
    assert [event.sequence for event in events] == [2, 3, 4]
    assert [event.epoch for event in events] == ["e1", "e1", "e2"]
    assert {event.time for event in events} == {12.5}
    assert subscription.dropped == 0
    bus.unsubscribe(subscription)
    bus.unsubscribe(subscription)
    bus.emit(stored(b"c"))
    assert len(subscription) == 0


def test_an_event_has_all_fields_and_travels() -> None:
    names = set(Event.__struct_fields__)
    assert names == {
        "time", "sequence", "epoch", "key", "group", "operation", "source", "destination",
        "locality", "medium", "bytes",
    }  # fmt: skip
    event = Event("moved", key=b"k", group=3, source="host", destination="fs", bytes=9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event) == event


@pytest.mark.parametrize(
    "event",
    [
        Event("stored", key=b"k"),
        Event("stored", destination="fs"),
        Event("removed", key=b"k"),
        Event("removed", key=b"k", source="fs", destination="host"),
        Event("moved", key=b"k", source="fs"),
        Event("moved", key=b"k", destination="fs"),
        Event("cleared", key=b"k"),
        Event("cleared", destination="fs"),
        Event("gone", key=b"k", source="fs"),  # type: ignore[arg-type]
    ],
)
def test_events_that_say_nothing_definite_are_refused(event: Event) -> None:
    bus = EventBus()
    with pytest.raises(InternalError):
        bus.emit(event)
    assert bus.sequence == 0


def test_a_slow_reader_loses_the_oldest_and_knows_how_many() -> None:
    bus = EventBus()
    slow, fast = bus.subscribe(capacity=4), bus.subscribe()
    for index in range(10):
        bus.emit(stored(bytes([index])))
    assert [event.sequence for event in slow.take(2)] == [7, 8]
    assert slow.dropped == 6
    assert [event.sequence for event in slow.take()] == [9, 10]
    assert slow.take() == []
    assert len(fast.take()) == 10
    assert (slow.dropped, fast.dropped) == (6, 0)


def test_two_threads_lose_nothing_unseen() -> None:
    bus = EventBus()
    woken = threading.Event()
    subscription = bus.subscribe(capacity=64, wake=woken.set)
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while True:
            finished = done.is_set()
            seen.extend(event.sequence for event in subscription.take(10))
            if finished and not len(subscription):
                return
            if not len(subscription):
                woken.wait(0.05)
                woken.clear()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        bus.emit(stored(b"k"))
    done.set()
    woken.set()
    reader.join(30)
    assert not reader.is_alive()
    assert seen == sorted(set(seen))
    assert len(seen) + subscription.dropped == 20_000


changes = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "moved", "cleared", "cleared all"]),
        st.sampled_from(["host", "fs", "obj"]),
        st.sampled_from(["host", "fs", "obj"]),
        st.binary(min_size=1, max_size=1),
    )
)


@pytest.mark.fault("M14")
@given(changes)
def test_the_folded_stream_is_the_content(steps: list[tuple[str, str, str, bytes]]) -> None:
    bus = EventBus()
    subscription = bus.subscribe()
    content: dict[str, set[bytes]] = {"host": set(), "fs": set(), "obj": set()}
    halfway: dict[str, set[bytes]] = {}
    for index, (step, source, destination, key) in enumerate(steps):
        if step == "stored":
            content[destination] |= {key}
            bus.emit(Event("stored", key=key, destination=destination))
        elif step == "removed":
            content[source] -= {key}
            bus.emit(Event("removed", key=key, source=source))
        elif step == "moved" and source != destination:
            content[source] -= {key}
            content[destination] |= {key}
            bus.emit(Event("moved", key=key, source=source, destination=destination))
        elif step == "cleared":
            content[source] = set()
            bus.emit(Event("cleared", source=source))
        elif step == "cleared all":
            content = {name: set() for name in content}
            bus.emit(Event("cleared"))
        if index == len(steps) // 2:
            fold(subscription.take(), halfway)
    folded = fold(subscription.take(), halfway)
    assert {name: keys for name, keys in folded.items() if keys} == {
        name: keys for name, keys in content.items() if keys
    }


# The publisher.


@contextlib.contextmanager
def context() -> Iterator[Any]:
    """A ZMQ context that must end at once."""
    made = zmq.Context()
    made.linger = 0
    try:
        yield made
    finally:
        made.destroy(linger=0)


def receive(socket: Any, seconds: float = 10.0) -> list[bytes]:
    assert socket.poll(int(seconds * 1000)), "no message"
    frames: list[bytes] = socket.recv_multipart()
    return frames


@pytest.mark.fault("M11")
@pytest.mark.fault("M13")
def test_live_and_replayed_messages_are_the_same_three_frames(tmp_path: Path) -> None:
    bus = EventBus(epoch="e")
    config = EventsConfig(
        endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    publisher = Publisher(bus, config)
    publisher.open()
    try:
        with context() as made:
            live = made.socket(zmq.SUB)
            live.connect(config.endpoint)
            live.subscribe(b"kvtier")
            # A new subscriber misses what is sent before its subscription has arrived.
            for _ in range(200):
                bus.emit(stored(b"early"))
                if live.poll(50):
                    break
            bus.emit_many(stored(bytes([index])) for index in range(5))
            messages = []
            keys: list[bytes] = []
            while b"\x04" not in keys:
                frames = receive(live)
                assert len(frames) == 3
                messages.append(frames)
                keys += [event.key for event in decode_message(frames[2])[1]]
            numbers = [int.from_bytes(frames[1], "big") for frames in messages]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            replay = made.socket(zmq.DEALER)
            replay.connect(config.replay_endpoint)
            for malformed in ([b""], [b"", b"123"], [b"x", bytes(8)], [b"", bytes(8), b""]):
                replay.send_multipart(malformed)
            replay.send_multipart([b"", messages[0][1]])
            for frames in messages:
                assert receive(replay) == [b"", *frames]
            assert receive(replay) == [b"", b"kvtier", END_OF_REPLAY, b""]
            everything = fold(
                event for frames in messages for event in decode_message(frames[2])[1]
            )
            assert everything["host"] >= {bytes([index]) for index in range(5)}
    finally:
        publisher.close()
    assert publisher.dropped == 0


def test_replay_is_bounded_and_closing_sends_what_is_queued(tmp_path: Path) -> None:
    bus = EventBus()
    config = EventsConfig(
        endpoint=f"ipc://{tmp_path}/pub",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_messages=3,
    )
    publisher = Publisher(bus, config)
    publisher.open()
    with context() as made:
        replay = made.socket(zmq.DEALER)
        replay.connect(config.replay_endpoint)
        for _ in range(50):
            bus.emit(stored(b"k"))
            replay.send_multipart([b"", bytes(8)])
            while receive(replay)[2] != END_OF_REPLAY:
                pass
        replay.send_multipart([b"", bytes(8)])
        count = 0
        while receive(replay)[2] != END_OF_REPLAY:
            count += 1
        assert 1 <= count <= 3
        live = made.socket(zmq.SUB)
        live.connect(config.endpoint)
        live.subscribe(b"")
        for _ in range(200):
            bus.emit(stored(b"early"))
            if live.poll(50):
                break
        bus.emit(stored(b"last"))
        publisher.close()
        publisher.close()
        keys: list[bytes] = []
        while b"last" not in keys:
            keys += [event.key for event in decode_message(receive(live)[2])[1]]
    assert not bus.active


@pytest.mark.fault("H17")
def test_closing_leaves_nothing_and_does_not_wait_for_a_stuck_subscriber(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with context() as made:
        bus = EventBus()
        publisher = Publisher(bus, EventsConfig(endpoint=f"ipc://{tmp_path}/pub"))
        publisher.open()
        stuck = made.socket(zmq.SUB)
        stuck.rcvhwm = 1
        stuck.connect(f"ipc://{tmp_path}/pub")
        stuck.subscribe(b"")
        for _ in range(2000):
            bus.emit(Event("stored", key=b"k" * 40, destination="fs"))
        started = time.monotonic()
        publisher.close()
        assert time.monotonic() - started < 2
    assert threading.active_count() == threads
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_failure_of_the_thread_is_raised_when_it_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = EventBus()
    publisher = Publisher(bus, EventsConfig(endpoint=f"ipc://{tmp_path}/pub"))
    publisher.open()
    event = stored(b"k")
    bus.emit(event)
    subscription = publisher._subscription
    assert subscription is not None
    subscription.put(object())  # type: ignore[arg-type]
    bus.emit(event)
    with pytest.raises(InternalError, match="publisher failed"):
        publisher.close()
    assert "no longer published" in caplog.text


@pytest.mark.fault("M13")
def test_ranks_have_endpoints_of_their_own() -> None:
    assert [offset_endpoint("tcp://*:5557", rank) for rank in range(3)] == [
        "tcp://*:5557", "tcp://*:5558", "tcp://*:5559",
    ]  # fmt: skip
    assert offset_endpoint("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert offset_endpoint("ipc:///run/kv", 0) == "ipc:///run/kv"
    assert offset_endpoint("ipc:///run/kv", 2) == "ipc:///run/kv.dp2"
    for wrong in ("localhost:5557", "tcp://localhost", "http://x:1", "tcp://x:65535", "", "ipc://"):
        with pytest.raises(ConfigError, match=r"events\.endpoint"):
            offset_endpoint(wrong, 1)


@pytest.mark.fault("F07")
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(("length", "rank"), [(108, 0), (150, 0), (104, 1)])
def test_a_path_that_is_too_long_for_a_socket_is_refused(
    tmp_path: Path, key: str, length: int, rank: int
) -> None:
    """By name, with the limit, at the start; the ending for a rank counts too."""
    path = f"{tmp_path}/".ljust(length, "x")
    config = EventsConfig(**{"endpoint": f"ipc://{tmp_path}/pub", key: f"ipc://{path}"})
    publisher = Publisher(EventBus(), config, rank)
    with pytest.raises(ConfigError, match=rf"events\.{key}: .* longer than 107 characters"):
        publisher.open()


@pytest.mark.fault("M13")
def test_four_ranks_publish_side_by_side() -> None:
    with contextlib.ExitStack() as stack:
        port = free_ports(4)
        for rank in range(4):
            publisher = Publisher(
                EventBus(), EventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), rank
            )
            publisher.open()
            stack.callback(publisher.close)
        again = Publisher(EventBus(), EventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), 2)
        with pytest.raises(ConfigError, match=rf"events\.endpoint: cannot bind .*:{port + 2}"):
            again.open()
        again.close()


def free_ports(count: int) -> int:
    """First of `count` free ports in a row."""
    for base in range(23_000 + os.getpid() % 5000, 60_000, 10):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    one = stack.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


def test_configuration_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not set"):
        Publisher(EventBus(), EventsConfig())
    publisher = Publisher(EventBus(), EventsConfig(endpoint=f"ipc://{tmp_path}/x"))
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="pip install pyzmq"):
        publisher.open()
    monkeypatch.undo()
    publisher.open()
    with pytest.raises(InternalError, match="open already"):
        publisher.open()
    publisher.close()
