# SPDX-License-Identifier: Apache-2.0
"""The owner's side of host memory: which chunks are there, leases on them, and what is awaited.

Runs on the service's loop; no scheduler step is needed for any of it, so that an idle engine and a
busy one answer alike. Owns the pins of all leases. Invariants: a chunk is pinned exactly as long as
a lease that has it stands or a transport reads it; what is pinned stays within `max_bytes`; each
lease ends, at its deadline at the latest.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from kvtier.tiers.base import HostMemory, Slot
from kvtier.tiers.p2p.guests import Guests
from kvtier.tiers.p2p.transport import Source
from kvtier.types import Outcome, Presence, key_group

POLL_SECONDS = 0.002
"""How often chunks that are awaited are looked for. It costs a look at shared memory each."""
LOOKED_AT = 16
"""Chunks of a question looked for each time, of each group: they come in order."""
SERVED_REQUESTS = 4096
"""Requests of peers that are remembered."""
GRACE_SECONDS = 1.0
"""After the end of a request, its last chunks may still be on their way into host memory."""
ABSENT, PENDING = bytes([Presence.ABSENT]), bytes([Presence.PENDING])


class Leased:
    """Chunks that stay where they are for one session."""

    def __init__(
        self,
        number: int,
        items: list[Slot],
        own: list[Slot],
        guests: list[Slot],
        until: float,
        free: Callable[[Leased], None],
    ) -> None:
        self.number = number
        self.items = items
        self.own = own
        """Those of `items` that are this instance's chunks."""
        self.guests = guests
        """Those that others have pushed here."""
        self.sources: Sequence[Source] = [Source(item.view, item.address) for item in items]
        self.until = until
        self.ended = False
        self.length_bytes = sum(item.length for item in items)
        self._readers = 0
        self._free = free

    def begin(self) -> bool:
        """A transport starts to read. False: the lease has ended."""
        if self.ended:
            return False
        self._readers += 1
        return True

    def end(self) -> None:
        """Nothing of this read touches the chunks any more."""
        self._readers -= 1
        if self.ended and not self._readers:
            self._free(self)

    def close(self) -> None:
        """The lease has ended; its pins go when nobody reads any more. Idempotent."""
        if not self.ended:
            self.ended = True
            if not self._readers:
                self._free(self)


class Watch:
    """A question of which some chunks were still on their way."""

    def __init__(
        self,
        keys: dict[int, bytes],
        request: str,
        until: float,
        tell: Callable[[list[int], list[Presence]], None],
    ) -> None:
        self.groups: dict[int, dict[int, bytes]] = {}
        """What is awaited, by position; some of a group may never come, which says nothing of
        another."""
        for position, key in keys.items():
            self.groups.setdefault(key_group(key), {})[position] = key
        self.request = request
        self.until = until
        self.tell = tell


class Sharing:
    """What one instance lets its peers have.

    Parameters
    ----------
    host : HostMemory
    guests : Guests
        What others have pushed here is shared as well.
    max_bytes : int
        Most that may be pinned for peers at a time.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        host: HostMemory,
        guests: Guests,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._guests = guests
        self._max_bytes = max_bytes
        self._clock = clock
        self._number = 0
        self._leases: dict[bytes, dict[int, Leased]] = {}
        self._watches: dict[tuple[bytes, int], Watch] = {}
        self._served: OrderedDict[str, float | None] = OrderedDict()
        self._poller: asyncio.TimerHandle | None = None
        self.pinned_bytes = 0
        """Of all leases, ended ones that are still read included."""
        self.served_bytes = 0
        """Leased since the start."""

    @property
    def leases(self) -> int:
        """That stand, for metrics and leak checks."""
        return sum(len(of) for of in self._leases.values())

    @property
    def watches(self) -> int:
        """Questions with chunks that are awaited."""
        return len(self._watches)

    # Presence.
    def serve(self, request: str, ended: bool) -> None:
        """A request that writes chunks for a peer has begun, or has ended."""
        self._served.pop(request, None)
        self._served[request] = self._clock() + GRACE_SECONDS if ended else None
        if len(self._served) > SERVED_REQUESTS:
            self._served.popitem(last=False)

    def _may_come(self, request: str) -> bool:
        """Whether chunks that are not there may be written yet, for a request of a peer. One that
        nobody has heard of may be on its way."""
        if not request:
            return False
        ends = self._served.get(request)
        return ends is None or self._clock() < ends

    def ask(self, keys: Sequence[bytes], request: str, windowed: bool) -> bytes:
        """A ``Presence`` for each key; behind the first that is absent all are, unless
        `windowed`."""
        states = self._states(keys, self._may_come(request))
        if not windowed:
            known, absent, _ = states.partition(ABSENT)
            states = known + absent * (len(keys) - len(known))
        return states

    def _states(self, keys: Sequence[bytes], may_come: bool) -> bytes:
        states = self._guests.presence(keys, self._host.presence(keys))
        return states.replace(ABSENT, PENDING) if may_come else states

    def watch(
        self,
        session: bytes,
        job: int,
        keys: dict[int, bytes],
        request: str,
        seconds: float,
        tell: Callable[[list[int], list[Presence]], None],
    ) -> None:
        """Call `tell` with positions and states when awaited chunks come, or will not come."""
        self._watches[session, job] = Watch(keys, request, self._clock() + seconds, tell)
        self._poll_later()

    def unwatch(self, session: bytes, job: int) -> None:
        """Nobody waits for that question any more."""
        self._watches.pop((session, job), None)

    def _poll_later(self) -> None:
        if self._poller is None and self._watches:
            self._poller = asyncio.get_running_loop().call_later(POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        self._poller = None
        now = self._clock()
        for name, watch in list(self._watches.items()):
            over = now >= watch.until
            may_come = not over and self._may_come(watch.request)
            positions: list[int] = []
            states: list[Presence] = []
            for keys in watch.groups.values():
                looked_at = list(islice(keys.items(), None if over else LOOKED_AT))
                found = self._states([key for _, key in looked_at], may_come)
                for (position, _), state in zip(looked_at, found, strict=True):
                    if state == Presence.PENDING and not over:
                        continue
                    positions.append(position)
                    states.append(Presence.ABSENT if state == Presence.PENDING else Presence(state))
                    del keys[position]
            if not any(watch.groups.values()):
                del self._watches[name]
            if positions:
                watch.tell(positions, states)
        self._poll_later()

    # Leases.
    async def lend(
        self, session: bytes, keys: Sequence[bytes], seconds: float
    ) -> tuple[Leased, list[Outcome]]:
        """A lease of those of the keys that are there, with their checksums, and what became of
        each."""
        outcomes = []
        items = []
        own = []
        guests = []
        for key in keys:
            if self.pinned_bytes >= self._max_bytes:
                outcomes.append(Outcome.DROPPED)
                continue
            if (item := self._host.pin(key)) is not None:
                own.append(item)
            elif (item := self._guests.pin(key)) is not None:
                guests.append(item)
            else:
                outcomes.append(Outcome.MISSING)
                continue
            self.pinned_bytes += item.length
            items.append(item)
            outcomes.append(Outcome.DONE)
        self._number += 1
        lease = Leased(self._number, items, own, guests, self._clock() + seconds, self._free)
        if not items:
            lease.close()
            return lease, outcomes
        self._leases.setdefault(session, {})[lease.number] = lease
        try:
            # Guests have come with theirs.
            await self._host.take_crcs(own)
        except BaseException:
            self.take_back(session, lease.number)
            raise
        self.served_bytes += lease.length_bytes
        return lease, outcomes

    def _free(self, lease: Leased) -> None:
        self._host.unpin(lease.own)
        self._guests.unpin(lease.guests)
        self.pinned_bytes -= lease.length_bytes
        lease.items, lease.own, lease.guests, lease.sources = [], [], [], []

    def find_lease(self, session: bytes, number: int) -> Leased | None:
        """The lease of that session, if it stands."""
        lease = self._leases.get(session, {}).get(number)
        return None if lease is None or lease.ended else lease

    def take_back(self, session: bytes, number: int) -> None:
        """The lease ends; one that has ended may end again."""
        of = self._leases.get(session)
        lease = None if of is None else of.pop(number, None)
        if lease is not None:
            lease.close()
        if of is not None and not of:
            del self._leases[session]

    def expire(self) -> int:
        """End leases whose time is up; how many these were."""
        now = self._clock()
        late = [
            (session, number)
            for session, of in self._leases.items()
            for number, lease in of.items()
            if now >= lease.until
        ]
        for session, number in late:
            self.take_back(session, number)
        return len(late)

    def drop(self, session: bytes) -> None:
        """The session is over: its leases and questions end."""
        for number in list(self._leases.get(session, ())):
            self.take_back(session, number)
        for name in [name for name in self._watches if name[0] == session]:
            del self._watches[name]

    def close(self) -> None:
        """Everything ends."""
        for session in list(self._leases):
            self.drop(session)
        self._watches.clear()
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
