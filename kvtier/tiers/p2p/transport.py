# SPDX-License-Identifier: Apache-2.0
"""How bytes get from one host's memory into another's: the interface of the data transports.

Everything here runs on the service's loop. A session (ZMQ) has agreed before on who may read what:
a *lease* names pinned chunks, and a transport moves the bytes of a lease, nothing else. Invariant:
when ``Link.read`` has returned or raised, nothing touches the reader's memory any more; when
``Transport.revoke`` has returned, nothing reads the owner's memory for that session any more.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec


class Source(msgspec.Struct, frozen=True):
    """One leased chunk on the owner's side."""

    view: memoryview
    """Its payload, in the region itself."""
    address: int
    """Of ``view[0]`` in this process."""


class Target(msgspec.Struct, frozen=True):
    """One chunk on the reader's side: where it is there, and where it goes here."""

    slot: int
    """In the owner's region."""
    view: memoryview
    """Writable, of exactly the chunk's payload bytes; in the reader's region itself."""
    address: int
    """Of ``view[0]`` in this process."""


class Lease(Protocol):
    """What the owner of memory promised to one session: its chunks stay where they are until the
    lease ends, and while somebody reads."""

    sources: Sequence[Source]

    def begin(self) -> bool:
        """A transport starts to read `sources`: they stay pinned until ``end``, even if the lease
        ends before. False: it has ended already."""

    def end(self) -> None:
        """Nothing of this read touches `sources` any more."""


FindLease = Callable[[bytes, int], Lease | None]
"""Lease of a session (its identity) by number; None if it has ended or was never given."""


class Transport(abc.ABC):
    """One an instance: lets others read what is leased to them, and makes links to them."""

    name: ClassVar[str]
    """In the configuration and in the handshake."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Get ready. ConfigError: what the operator has to change. OSError: not now."""

    def suits(self, boot: bytes) -> bool:
        """Whether it is a good way to the host that has this boot id."""
        return True

    @abc.abstractmethod
    def offer(self, session: bytes) -> bytes:
        """What the other side of an authenticated session needs for ``connect``: opaque, good for
        this session alone."""

    @abc.abstractmethod
    async def revoke(self, session: bytes) -> None:
        """The session is over: its links end, and reads for it. Unknown sessions: nothing to do."""

    @abc.abstractmethod
    async def connect(self, host: str, offer: bytes, deadline: float) -> Link:
        """A link to the instance that has made `offer`.

        Parameters
        ----------
        host : str
            Under which its session was reached.
        offer : bytes
        deadline : float
            Absolute, on CLOCK_MONOTONIC.

        Raises
        ------
        OSError, TimeoutError
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """End everything. Idempotent. Nothing of the transport is left after it."""


class Link(abc.ABC):
    """A way to read the memory of one other instance."""

    @abc.abstractmethod
    async def read(self, lease: int, first: int, targets: Sequence[Target]) -> None:
        """Read chunks ``first`` to ``first + len(targets) - 1`` of a lease into `targets`.

        Several reads may be under way. What arrives is not verified here.

        Raises
        ------
        LeaseEndedError
            The owner does not know the lease (any more). The link goes on.
        OSError
            This read is lost. So is the link if ``is_usable`` is false then; else another read on
            it was cancelled, and this one can be tried again.

        On cancellation the link may be given up, or other reads on it.
        """

    @property
    @abc.abstractmethod
    def is_usable(self) -> bool:
        """Whether another read makes sense."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let go at once; reads under way fail. Idempotent."""


class LeaseEndedError(Exception):
    """The owner does not know the lease (any more)."""
