# SPDX-License-Identifier: Apache-2.0
"""Events: where each chunk is, told as it changes, to whoever subscribes.

The bus belongs to one thread (the owner's): only it emits, and its sequence numbers have no gaps.
A subscription may be drained from another thread; it is bounded, drops its oldest events when
nobody drains it, and counts exactly how many from the gaps.
"""

from __future__ import annotations

import builtins
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from kvtier.errors import InternalError

Operation = Literal["stored", "removed", "moved", "cleared"]

RING_EVENTS = 65_536
"""Events that wait for one subscriber, by default."""


class Event(msgspec.Struct, array_like=True, gc=False):
    """One change of where a chunk is.

    ======= ==================================================================================
    stored  the chunk is now in `destination`; it came from `source`, which still holds it
            ('' is the accelerator)
    removed the chunk is no longer in `source`
    moved   the chunk is now in `destination` and no longer in `source`
    cleared nothing is in `source` any more ('' is every tier); no key
    ======= ==================================================================================

    `medium` and `locality` are those of the tier whose content changes: `source` for removed and
    cleared, else `destination`. A chunk's removal carries the same two as its store.
    """

    operation: Operation
    # `bytes` below would hide the type of that name.
    key: builtins.bytes = b""
    group: int = 0
    source: str = ""
    """Tier."""
    destination: str = ""
    """Tier."""
    locality: str | None = None
    """LOCAL or REMOTE; None where the tier's configuration does not say."""
    medium: str = "STORAGE"
    """CPU or STORAGE."""
    bytes: int = 0
    """Payload."""
    epoch: str = ""
    """Namespace epoch; set by the bus."""
    time: float = 0.0
    """Unix time in seconds; set by the bus."""
    sequence: int = 0
    """From 1, without gaps; set by the bus."""


class Subscription:
    """A bounded queue of events for one reader."""

    def __init__(self, capacity: int, first: int, wake: Callable[[], None] | None) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._next = first
        self._wake = wake
        self.dropped = 0
        """Events that this reader lost; grows when ``take`` sees the gap."""

    def put(self, event: Event) -> None:
        """For the bus: append, dropping the oldest event of a full queue."""
        self._events.append(event)
        # The reader goes on until the queue is empty, so only the first event has to wake it.
        if self._wake is not None and len(self._events) == 1:
            self._wake()

    def take(self, limit: int | None = None) -> list[Event]:
        """Events since the last call, oldest first, at most `limit`."""
        taken: list[Event] = []
        while self._events and (limit is None or len(taken) < limit):
            try:
                event = self._events.popleft()
            except IndexError:  # pragma: no cover - the writer dropped the last one just now
                break
            self.dropped += event.sequence - self._next
            self._next = event.sequence + 1
            taken.append(event)
        return taken

    def __len__(self) -> int:
        return len(self._events)


class EventBus:
    """Numbers events and hands them to the subscribers; for one thread.

    Parameters
    ----------
    epoch : str
        Namespace epoch that the events belong to.
    clock : callable
        Unix time in seconds.
    """

    def __init__(self, epoch: str = "", clock: Callable[[], float] = time.time) -> None:
        self.epoch = epoch
        self._clock = clock
        self._sequence = 0
        # A tuple, replaced as a whole: `emit` iterates over it without a copy.
        self._subscriptions: tuple[Subscription, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anybody listens; without, an event need not be made."""
        return bool(self._subscriptions)

    @property
    def sequence(self) -> int:
        """Number of the last event."""
        return self._sequence

    def emit(self, event: Event) -> None:
        """Stamp `event` and queue it for every subscriber. Never waits, never drops a new one."""
        _check(event)
        self._sequence += 1
        event.sequence = self._sequence
        event.epoch = self.epoch
        event.time = self._clock()
        for subscription in self._subscriptions:
            subscription.put(event)

    def emit_many(self, events: Iterable[Event]) -> None:
        """``emit`` each, in order."""
        for event in events:
            self.emit(event)

    def subscribe(
        self, capacity: int = RING_EVENTS, wake: Callable[[], None] | None = None
    ) -> Subscription:
        """A queue that gets every event from now on.

        Parameters
        ----------
        capacity : int
            Events that wait at most; beyond it the oldest are dropped.
        wake : callable, optional
            Called on the bus's thread when the queue is no longer empty; must not wait or raise.
            Whoever is woken takes until the queue is empty.
        """
        subscription = Subscription(capacity, self._sequence + 1, wake)
        self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop. What is queued stays readable. Idempotent."""
        self._subscriptions = tuple(one for one in self._subscriptions if one is not subscription)


def fold(
    events: Iterable[Event], tiers: dict[str, set[bytes]] | None = None
) -> dict[str, set[bytes]]:
    """Keys in each tier after `events`: what a router that only listens would believe.

    Parameters
    ----------
    tiers : dict, optional
        Content before the first event; changed in place.
    """
    content = {} if tiers is None else tiers
    for event in events:
        if event.operation in ("removed", "moved"):
            content.setdefault(event.source, set()).discard(event.key)
        if event.operation in ("stored", "moved"):
            content.setdefault(event.destination, set()).add(event.key)
        if event.operation == "cleared":
            for name in [event.source] if event.source else list(content):
                content[name] = set()
    return content


def _check(event: Event) -> None:
    operation = event.operation
    if operation == "stored":
        right = bool(event.key and event.destination)
    elif operation == "removed":
        right = bool(event.key and event.source) and not event.destination
    elif operation == "moved":
        right = bool(event.key and event.source and event.destination)
    else:
        right = operation == "cleared" and not event.key and not event.destination
    if not right:
        raise InternalError(f"an event that says nothing definite: {event!r}")
