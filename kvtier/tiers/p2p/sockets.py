# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ sockets as both sides of a session want them: bounded, and never waiting to send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import zmq
import zmq.asyncio

from kvtier.tiers.p2p import wire

SENT_AHEAD = 1000
"""Messages that may wait for one peer; it is gone if they are more."""

Secure = Callable[[zmq.asyncio.Socket], None]
"""Prepares a socket for encryption."""


def make_socket(context: zmq.asyncio.Context, kind: int, secure: Secure) -> zmq.asyncio.Socket:
    """A ROUTER or DEALER, not bound or connected yet."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES),
        (zmq.SNDHWM, SENT_AHEAD),
        (zmq.RCVHWM, SENT_AHEAD),
        (zmq.RECONNECT_IVL, 100),
    ):
        socket.setsockopt(option, value)
    secure(socket)
    return socket


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send without waiting; whether it is on its way. A peer that is gone, or does not read, costs
    nothing but that."""
    if socket.closed:
        return False
    # With NOBLOCK the future is done at once, one way or the other.
    sent = cast("asyncio.Future[None]", socket.send_multipart(frames, flags=zmq.NOBLOCK))
    return sent.done() and sent.exception() is None
