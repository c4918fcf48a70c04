# SPDX-License-Identifier: Apache-2.0
"""Chunks out of peers' memory: a lease, the transfer, the lease back.

Runs on the service's loop. Owns nothing. Invariant: a call returns only when nothing touches its
slots; checksums are compared by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvtier.errors import PeerLostError
from kvtier.tiers.base import Slot
from kvtier.tiers.p2p.client import PeerClient
from kvtier.tiers.p2p.transport import LeaseEndedError, Target
from kvtier.types import Outcome

EARLY_SECONDS = 0.001
"""By so much a timer of uvloop may be early."""
LEND_PAUSE_SECONDS = 0.01
"""Before a peer is asked again that has lent as much as it may."""


class Reader:
    """Reads chunks into slots.

    Parameters
    ----------
    lease_seconds : float
        Longest lease to ask for.
    clock : callable
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock

    async def read(self, client: PeerClient, items: Sequence[Slot], until: float) -> list[Outcome]:
        """What became of each; in parts, where the peer does not lend all of them at once.

        Raises
        ------
        PeerLostError
        """
        outcomes = [Outcome.DROPPED] * len(items)
        left = list(range(len(items)))
        has_answered = False
        while left:
            try:
                read = await self.read_part(client, [items[i] for i in left], until)
            except PeerLostError:
                if has_answered and self._clock() >= until - EARLY_SECONDS:
                    break  # it is well; there was no room for the rest in all that time
                raise
            has_answered = True
            for i, outcome in zip(left, read, strict=True):
                outcomes[i] = outcome
            waiting = [i for i in left if outcomes[i] is Outcome.DROPPED]
            if len(waiting) == len(left):
                if self._clock() + LEND_PAUSE_SECONDS >= until:
                    break
                await asyncio.sleep(LEND_PAUSE_SECONDS)
            left = waiting
        return outcomes

    async def read_part(
        self, client: PeerClient, items: Sequence[Slot], until: float
    ) -> list[Outcome]:
        """Of what the peer lends now; DROPPED is the rest.

        Raises
        ------
        PeerLostError
        """
        seconds = min(self._lease_seconds, max(0.0, until - self._clock()) + 1.0)
        lease = await client.lend([item.key for item in items], seconds, until)
        outcomes = lease.outcomes
        leased = [
            item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.DONE
        ]
        if not leased:
            return outcomes
        targets = [
            Target(slot, item.view, item.address)
            for slot, item in zip(lease.slots, leased, strict=True)
        ]
        try:
            async with asyncio.timeout(until - self._clock()):
                await lease.link.read(lease.number, 0, targets)
        except LeaseEndedError:
            return [Outcome.MISSING if outcome is Outcome.DONE else outcome for outcome in outcomes]
        except TimeoutError:
            raise PeerLostError(f"{client.address}: chunks did not come in time") from None
        except OSError as exc:
            raise await client.fail(lease.link, f"its data connection broke: {exc}") from exc
        finally:
            client.give_back(lease)
        for item, crc in zip(leased, lease.crcs, strict=True):
            item.crc = crc
        return outcomes
