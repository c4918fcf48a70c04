# SPDX-License-Identifier: Apache-2.0
"""A long cable: what is sent comes late, and some of it not at all.

Two TAP devices of the kernel, each of which is moved to one host, and a thread that carries frames
from one to the other; so it needs no module of the kernel's own for bad networks.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from typing import Self

from tests.tiers.p2p.networks import Network, ip

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
FRAME_BYTES = 1 << 16


class FarNetwork(Network):
    """Two hosts far from each other.

    Parameters
    ----------
    delay_seconds, jitter_seconds : float
        Each way; frames overtake each other by the jitter.
    loss : float
        Part of the frames that is lost.
    """

    def __init__(self, delay_seconds: float, jitter_seconds: float, loss: float) -> None:
        super().__init__()
        self._delay_seconds = delay_seconds
        self._jitter_seconds = jitter_seconds
        self._loss = loss
        self._ends: list[int] = []
        self._wake, self._bell = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="cable")
        self.is_bad = False
        """Whether frames come late and get lost, from now on."""
        self.carried = 0
        self.lost = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._thread.start()
        return self

    def _connect(self) -> None:
        for host in self.hosts:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._ends.append(end)
            request = struct.pack("16sH22x", b"kvtier%d", IFF_TAP | IFF_NO_PI)
            name = fcntl.ioctl(end, TUNSETIFF, request)[:16].rstrip(b"\0").decode()
            ip("link", "set", name, "netns", host.name, "name", host.device)

    def _carry(self) -> None:
        chance = random.Random(1)
        late: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while True:
            now = time.monotonic()
            while late and late[0][0] <= now:
                _, _, end, frame = heapq.heappop(late)
                self._put(end, frame)
            pause = late[0][0] - now if late else None
            readable, _, _ = select.select([*self._ends, self._wake], [], [], pause)
            if self._wake in readable:
                return
            for end in readable:
                other = self._ends[end == self._ends[0]]
                try:
                    frame = os.read(end, FRAME_BYTES)
                except BlockingIOError:
                    continue
                self.carried += 1
                if not self.is_bad:
                    self._put(other, frame)
                elif chance.random() < self._loss:
                    self.lost += 1
                else:
                    jitter = self._jitter_seconds * chance.uniform(-1.0, 1.0)
                    at = time.monotonic() + self._delay_seconds + jitter
                    heapq.heappush(late, (at, next(numbers), other, frame))

    @staticmethod
    def _put(end: int, frame: bytes) -> None:
        try:
            os.write(end, frame)
        except OSError:
            return  # a device that is down, or full: as on a cable, nobody is told

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            os.write(self._bell, b"\0")
            self._thread.join()
        for fd in (*self._ends, self._wake, self._bell):
            os.close(fd)
        self._ends.clear()
        super().__exit__(*exc)
