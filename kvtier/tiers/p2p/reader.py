# SPDX-License-Identifier: Apache-2.0
"""Chunks out of peers' memory: a lease, the transfer, the lease back.

Runs on the service's loop. Owns the leases that were asked for ahead, until somebody reads them or
`AHEAD_SECONDS` have passed. Invariant: a call returns only when nothing touches its slots;
checksums are compared by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from kvtier.errors import PeerLostError
from kvtier.tiers.base import Slot
from kvtier.tiers.p2p.client import Lease, PeerClient
from kvtier.tiers.p2p.transport import LeaseEndedError, Target
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome

EARLY_SECONDS = 0.001
"""By so much a timer of uvloop may be early."""
AHEAD_SECONDS = 1.0
"""A lease that was asked for ahead is kept for so long."""
LEND_PAUSE_SECONDS = 0.01
"""Before a peer is asked again that has lent as much as it may."""


class Ahead(msgspec.Struct, frozen=True):
    """A lease that is on its way, or here, before it is wanted."""

    keys: Sequence[bytes]
    lease: asyncio.Task[Lease | None]
    """None: there is none."""
    until: float

    @property
    def given(self) -> Lease | None:
        """The lease, if it is here."""
        done = self.lease.done() and not self.lease.cancelled()
        return self.lease.result() if done else None

    async def answer(self, seconds: float) -> Lease | None:
        """The lease, if it comes within that time."""
        await asyncio.wait({self.lease}, timeout=max(0.0, seconds))
        return self.given


class Reader:
    """Reads chunks into slots.

    Parameters
    ----------
    lease_seconds : float
        Longest lease to ask for.
    tasks : TaskSet
        Of the tier.
    clock : callable
    """

    def __init__(self, lease_seconds: float, tasks: TaskSet, clock: Callable[[], float]) -> None:
        self._lease_seconds = lease_seconds
        self._tasks = tasks
        self._clock = clock
        self._ahead: dict[tuple[PeerClient, bytes], Ahead] = {}

    def ask_ahead(self, client: PeerClient, keys: Sequence[bytes], until: float) -> None:
        """Ask for a lease before it is known whether the peer has the chunks: the way there and
        back is made once for both questions. For a read that begins with the first of `keys`."""
        if (client, keys[0]) in self._ahead:
            return

        async def lend() -> Lease | None:
            try:
                return await client.lend(keys, self._lease_seconds, until)
            except PeerLostError:
                return None  # the question itself meets the same

        task = self._tasks.start(lend(), "lend-ahead")
        kept = Ahead(keys, task, self._clock() + AHEAD_SECONDS)
        self._ahead[client, keys[0]] = kept

    def expire(self) -> None:
        """Leases that nobody came for go back."""
        now = self._clock()
        for name, ahead in list(self._ahead.items()):
            if now >= ahead.until:
                del self._ahead[name]
                self._give_up(name[0], ahead)

    def _give_up(self, client: PeerClient, ahead: Ahead) -> None:
        if (lease := ahead.given) is not None:
            client.give_back(lease)
        else:
            ahead.lease.cancel()  # the client gives back what comes all the same

    async def _lease(self, client: PeerClient, keys: list[bytes], until: float) -> Lease:
        """Of these chunks, and perhaps of some behind them."""
        ahead = self._ahead.pop((client, keys[0]), None) if keys else None
        if ahead is not None:
            lease = None
            try:
                if list(ahead.keys[: len(keys)]) == keys:
                    lease = await ahead.answer(until - self._clock())
            except BaseException:
                self._give_up(client, ahead)
                raise
            if (
                lease is not None
                and lease.link.is_usable
                and lease.outcomes[: len(keys)].count(Outcome.DONE) == len(keys)
            ):
                return lease
            self._give_up(client, ahead)
        seconds = min(self._lease_seconds, max(0.0, until - self._clock()) + 1.0)
        return await client.lend(keys, seconds, until)

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
        lease = await self._lease(client, [item.key for item in items], until)
        outcomes = lease.outcomes[: len(items)]
        leased = [
            item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.DONE
        ]
        if not leased:
            return outcomes
        targets = [
            Target(slot, item.view, item.address)
            for slot, item in zip(lease.slots, leased, strict=False)
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
        for item, crc in zip(leased, lease.crcs, strict=False):
            item.crc = crc
        return outcomes
