# SPDX-License-Identifier: Apache-2.0
"""The receiving side of push: chunks that peers offer are read into slots lent for them.

Runs on the service's loop, in the tasks of the peers' sessions. Owns nothing but the order: one
push at a time, and none while this instance loads for itself. Invariants: a slot that was reserved
ends as a guest or free, whatever happens; bytes are compared before a guest stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from kvtier.errors import PeerLostError
from kvtier.tiers.base import HostMemory, Slot
from kvtier.tiers.p2p.addresses import Address, address
from kvtier.tiers.p2p.client import PeerClient
from kvtier.tiers.p2p.guests import Guests
from kvtier.tiers.p2p.reader import Reader
from kvtier.types import Outcome, Presence

log = logging.getLogger(__name__)

TAKE_SECONDS = 5.0
"""For a push to be taken."""


class Taker:
    """Takes what peers push.

    Parameters
    ----------
    host : HostMemory
    guests : Guests
    reader : Reader
    client : callable
        Takes an address, gives the session with the peer there.
    on_taken : callable
        Takes a chunk that has come.
    clock : callable
    """

    def __init__(
        self,
        host: HostMemory,
        guests: Guests,
        reader: Reader,
        client: Callable[[Address], PeerClient],
        on_taken: Callable[[Slot], None],
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._guests = guests
        self._reader = reader
        self._client = client
        self._on_taken = on_taken
        self._clock = clock
        self._turn = asyncio.Lock()  # one push at a time
        self._loads = 0  # of this instance's own, under way
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_busy(self) -> bool:
        """Whether a push is being taken."""
        return self._turn.locked()

    @contextlib.contextmanager
    def own_load(self) -> Iterator[None]:
        """This instance loads for itself: pushes wait."""
        self._loads += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._loads -= 1
            if not self._loads:
                self._idle.set()

    async def take(self, instance: bytes, there: str, keys: Sequence[bytes]) -> list[Outcome]:
        """What became of each chunk that `instance`, found at the address `there`, has to spare."""
        outcomes = dict.fromkeys(keys, Outcome.DROPPED)
        try:
            client = self._client(address(there))
        except ValueError:
            return list(outcomes.values())
        until = self._clock() + TAKE_SECONDS
        async with self._turn:
            # What this instance loads itself goes first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TAKE_SECONDS / 2):
                    await self._idle.wait()
            wanted = []
            for key, state in zip(keys, self._host.presence(keys), strict=True):
                if key in self._guests or state != Presence.ABSENT:
                    outcomes[key] = Outcome.EXISTS
                else:
                    wanted.append(key)
            items = self._guests.reserve(wanted)
            good: list[Slot] = []
            try:
                await client.dial(until)
                # Whoever pushes is to be found where it says.
                if client.peer == instance:
                    read = await self._reader.read_part(client, items, until)
                    there_now = [
                        item
                        for item, outcome in zip(items, read, strict=True)
                        if outcome is Outcome.DONE
                    ]
                    await self._host.verify(there_now)
                    good = [item for item in there_now if item.verified]
            except PeerLostError as exc:
                log.debug("p2p: a push from %s: %s", there, exc)
            finally:
                self._guests.abort([item for item in items if item not in good])
                self._guests.commit(good)
            for item in good:
                outcomes[item.key] = Outcome.DONE
                self._on_taken(item)
        return list(outcomes.values())
