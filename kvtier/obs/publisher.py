# SPDX-License-Identifier: Apache-2.0
"""Publishes the event bus over ZMQ: PUB for the stream, ROUTER for replay.

Owns one thread, which owns the context, the sockets and the messages kept for replay; the bus's
thread only appends to a bounded queue and writes to an eventfd. Nothing here can make it wait.

A message has three frames: topic, number (8 bytes, big-endian, from 0 without gaps), and msgpack
of ``[time, [event, ...]]`` with events as arrays in the order of ``Event``'s fields. A replay
request is one frame with the first wanted number (8 bytes), after an empty delimiter; the answers
are the messages as they were sent, each after the delimiter, and last one with the number -1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from kvtier.config import EventsConfig
from kvtier.errors import ConfigError, InternalError
from kvtier.obs.events import Event, EventBus, Subscription

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

BATCH_EVENTS = 256
"""Events in one message at most."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Frames = tuple[bytes, bytes, bytes]


def offset_endpoint(endpoint: str, rank: int) -> str:
    """Endpoint of a data-parallel rank: the port plus the rank, or the path with ``.dp<rank>``.

    Raises
    ------
    ConfigError
        If it is no ZMQ endpoint, or the port runs over 65535.
    """
    match = re.fullmatch(r"(tcp://.+):(\d{1,5})", endpoint)
    if match is not None:
        port = int(match.group(2)) + rank
        if port > 65535:
            raise ConfigError(f"events.endpoint: rank {rank} would take port {port} of {endpoint}")
        return f"{match.group(1)}:{port}"
    if re.match(r"(ipc|inproc)://.", endpoint):
        return f"{endpoint}.dp{rank}" if rank else endpoint
    raise ConfigError(
        f"events.endpoint: {endpoint!r} is no endpoint; write tcp://ADDRESS:PORT or ipc://PATH"
    )


def decode_message(payload: bytes) -> tuple[float, list[Event]]:
    """Time of sending (Unix, seconds) and events of the third frame."""
    return msgspec.msgpack.decode(payload, type=tuple[float, list[Event]])


class Publisher:
    """Sends what the bus emits from ``open`` on.

    Parameters
    ----------
    bus : EventBus
    config : EventsConfig
        With an endpoint.
    rank : int
        Data-parallel rank; each has endpoints of its own.
    """

    def __init__(self, bus: EventBus, config: EventsConfig, rank: int = 0) -> None:
        if config.endpoint is None:
            raise ConfigError("events.endpoint: is not set; give an address to bind")
        self._bus = bus
        self._endpoint = offset_endpoint(config.endpoint, rank)
        self._replay_endpoint = (
            None
            if config.replay_endpoint is None
            else offset_endpoint(config.replay_endpoint, rank)
        )
        self._topic = config.topic.encode()
        self._limit = config.buffer_messages
        self._kept: deque[Frames] = deque(maxlen=config.buffer_messages)
        self._next = 0
        self._subscription: Subscription | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def dropped(self) -> int:
        """Events lost because the thread did not keep up."""
        return self._subscription.dropped if self._subscription is not None else 0

    def open(self) -> None:
        """Bind and start.

        Raises
        ------
        ConfigError
            If pyzmq is missing or an address cannot be bound; nothing is left then.
        """
        if self._thread is not None:
            raise InternalError("the publisher is open already")
        try:
            import zmq  # lazy: optional, and only for those who set an endpoint
        except ImportError as exc:
            raise ConfigError("events.endpoint: needs pyzmq; pip install pyzmq") from exc
        context = zmq.Context()
        sockets: list[zmq.Socket[bytes]] = []
        try:
            for kind, endpoint, key in (
                (zmq.PUB, self._endpoint, "endpoint"),
                (zmq.ROUTER, self._replay_endpoint, "replay_endpoint"),
            ):
                if endpoint is None:
                    continue
                socket = context.socket(kind)
                sockets.append(socket)
                # Unsent messages must not hold up the end of the process.
                socket.linger = 0
                # Twice a whole replay: ZMQ gives room back only after half of the mark was read,
                # and a ROUTER without room drops in silence, here the end of the next replay.
                socket.sndhwm = 2 * (self._limit + 2)
                socket.ipv6 = "[" in endpoint
                try:
                    socket.bind(endpoint)
                except zmq.ZMQError as exc:
                    raise ConfigError(f"events.{key}: cannot bind {endpoint}: {exc}") from exc
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            for socket in sockets:
                socket.close()
            context.term()
            raise
        self._stopping = False
        self._subscription = self._bus.subscribe(wake=self._wake)
        self._thread = threading.Thread(
            target=self._run, args=(context, sockets), name="kvtier-events", daemon=True
        )
        self._thread.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Send what is queued, then stop. Idempotent; raises what the thread met.

        Raises
        ------
        InternalError
            If the thread does not end in time, or had failed.
        """
        thread = self._thread
        if thread is None or self._subscription is None:
            return
        self._bus.unsubscribe(self._subscription)
        self._stopping = True
        self._wake()
        thread.join(timeout_seconds)
        if thread.is_alive():
            raise InternalError(f"the event publisher did not end within {timeout_seconds:g} s")
        self._thread = None
        os.close(self._wake_fd)
        self._wake_fd = -1
        if self._failure is not None:
            raise InternalError("the event publisher failed") from self._failure

    def _wake(self) -> None:
        # EAGAIN: the counter is full, so the thread is awake already.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def _run(self, context: zmq.Context[Any], sockets: list[zmq.Socket[bytes]]) -> None:
        import zmq  # lazy: see `open`

        try:
            poller = zmq.Poller()
            poller.register(self._wake_fd, zmq.POLLIN)
            for socket in sockets[1:]:
                poller.register(socket, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                # Read before the queue: what was queued before the flag is still sent.
                stopping = self._stopping
                self._send(sockets[0])
                if stopping:
                    break
                for socket in sockets[1:]:
                    if socket in ready:
                        self._replay(socket)
        except BaseException as exc:
            self._failure = exc
            logger.exception("the event publisher failed; events are no longer published")
        finally:
            for socket in sockets:
                socket.close()
            context.term()

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        subscription = self._subscription
        if subscription is None:
            raise InternalError("the publisher has no subscription")
        while events := subscription.take(BATCH_EVENTS):
            payload = msgspec.msgpack.encode((time.time(), events))
            frames = (self._topic, self._next.to_bytes(8, "big"), payload)
            self._next += 1
            self._kept.append(frames)
            # PUB never blocks: a subscriber that does not keep up loses messages, sees the gap in
            # the numbers, and asks for a replay.
            socket.send_multipart(frames)

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        request = socket.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.debug("a replay request of another form was ignored")
            return
        first = int.from_bytes(request[2], "big")
        envelope = request[:2]
        for frames in self._kept:
            if int.from_bytes(frames[1], "big") >= first:
                socket.send_multipart([*envelope, *frames])
        socket.send_multipart([*envelope, self._topic, END_OF_REPLAY, b""])
