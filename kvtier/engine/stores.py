# SPDX-License-Identifier: Apache-2.0
"""Stores: which chunk of host memory goes to which tier, and when.

Part of the planner, on the owner's thread. Owns the cascades under way, each tier's backlog,
refusals and bytes in flight. Invariant: a tier's ``inflight_bytes`` are those of the cascades that
it has not answered yet.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvtier._core.index import Reservation
from kvtier._core.slots import READY
from kvtier.engine.requests import Request
from kvtier.engine.state import State, TierState
from kvtier.engine.transfers import CascadeRecord
from kvtier.errors import InternalError
from kvtier.runtime import messages as m
from kvtier.types import Outcome, key_group

MAX_TRIES = 10
"""How often a tier may refuse a chunk before it is not offered there again."""

RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
"""Pause after the first refusal, doubled with each further one."""


MAX_STORED = 4096
"""Stores that wait for a flush that may cascade them."""


class Stores:
    """Decides what is cascaded.

    Parameters
    ----------
    state : State
    checksums : bool
        Whether a chunk that no tier wants goes to the service all the same, for its checksum.
    """

    def __init__(self, state: State, checksums: bool) -> None:
        self.cascades: dict[int, CascadeRecord] = {}
        self._state = state
        self._index = state.index
        self._tiers = state.tiers
        self._checksums = checksums
        self._active = bool(state.tiers) or checksums
        self._thresholds = any(tier.config.store_threshold > 1 for tier in state.tiers)
        self._takes_all = not self._thresholds and all(tier.takes_all for tier in state.tiers)
        self._offers: OrderedDict[bytes, int] = OrderedDict()  # bounded by twice the capacity
        self._stored: list[tuple[list[bytes], Request | None, bool]] = []

    # --- from the scheduler ---

    def reserve(self, keys: Sequence[bytes], request: Request) -> Reservation:
        """Slots for new chunks of a request."""
        reservation = self._index.reserve(keys)
        self._state.evicted(reservation.evicted, reservation.evicted_unsaved)
        request.use(keys)
        if self._thresholds:
            self._offer(keys, request)
        return reservation

    def _offer(self, keys: Sequence[bytes], request: Request) -> None:
        """Count offers; what is in host memory and has now been offered often enough goes out."""
        due = []
        for key in keys:
            offers = self._offers[key] = self._offers.pop(key, 0) + 1
            if any(tier.config.store_threshold == offers > 1 for tier in self._tiers):
                due.append(key)
        while len(self._offers) > 2 * self._index.capacity:
            self._offers.popitem(last=False)
        due = [key for key in due if self._index.lookup(key) == READY]
        if due:
            self._stored.append((due, request, True))

    def commit(self, keys: Sequence[bytes], request: Request | None) -> list[bytes]:
        """Chunks are in host memory; they go to the tiers at the next flush."""
        stored = self._index.commit(keys)
        if stored:
            self._state.emit("stored", stored, None, "host")
            if self._active and len(self._stored) < MAX_STORED:
                self._stored.append((stored, request, False))
            elif self._active:
                # The service does not answer (a reset is not done): bounded, like all that waits.
                for tier in self._tiers:
                    for key in stored:
                        self._put_off(tier, key)
        return stored

    # --- at the end of a step ---

    def flush(self, now: float) -> None:
        """Cascade what was stored, then what had been put off, as far as the bounds allow."""
        stored, self._stored = self._stored, []
        for keys, request, due in stored:
            if self._all_fit(keys):
                self._cascade(keys, list(range(len(self._tiers))), request, now)
            else:
                self._choose(keys, request, due, now)
        for i, tier in enumerate(self._tiers):
            if now >= tier.retry_at:
                self._offer_refused(tier, now)
            if tier.backlog:
                self._flush_backlog(i, tier, now)

    def _choose(
        self, keys: Sequence[bytes], request: Request | None, due: bool, now: float
    ) -> None:
        """Each chunk to the tiers that want it and have room.

        `due`: it was in host memory, and has only now been offered often enough for some tier.
        """
        unwanted = []
        batches: dict[tuple[int, ...], list[bytes]] = {}
        for key in keys:
            group = key_group(key)
            length = self._state.payload_bytes[group]
            chosen = []
            wanted = False
            offers = self._offers.get(key, 1)
            for i, tier in enumerate(self._tiers):
                threshold = tier.config.store_threshold
                if offers < threshold or (due and offers != threshold):
                    continue
                if not tier.admits(key, group, request):
                    continue
                wanted = True
                if tier.backlog or not _fits(tier, length):
                    self._put_off(tier, key)
                    continue
                tier.inflight_bytes += length
                chosen.append(i)
            if not wanted and not due:
                unwanted.append(key)
            if chosen or self._checksums:
                # Without a tier that takes it: only for its checksum.
                batches.setdefault(tuple(chosen), []).append(key)
        # What no tier is to have is no loss when it goes, and need not outlive what is saved.
        self._index.mark_saved(unwanted)
        for tiers, batch in batches.items():
            self._cascade(batch, list(tiers), request, now)

    def _flush_backlog(self, i: int, tier: TierState, now: float) -> None:
        batch = []
        while tier.backlog and tier.writable:
            key = tier.backlog[0]
            length = self._state.payload_bytes[key_group(key)]
            if self._index.lookup(key) != READY:
                # Evicted, reset or dropped meanwhile: this tier never gets it.
                tier.backlog.popleft()
                tier.refused.pop(key, None)
                self._drop(tier, 1, "bound")
                continue
            if not _fits(tier, length):
                break
            tier.backlog.popleft()
            tier.inflight_bytes += length
            batch.append(key)
        if batch:
            self._cascade(batch, [i], None, now)

    def _all_fit(self, keys: Sequence[bytes]) -> bool:
        """Count `keys` as in flight at every tier, if all of them admit all and have the room."""
        if not self._takes_all:
            return False
        length_bytes = self._length_bytes(keys)
        for tier in self._tiers:
            if tier.backlog or not tier.writable:
                return False
            if tier.inflight_bytes + length_bytes > tier.bound_bytes:
                return False
        for tier in self._tiers:
            tier.inflight_bytes += length_bytes
        return True

    def _length_bytes(self, keys: Sequence[bytes]) -> int:
        """Payload bytes of chunks."""
        payload_bytes = self._state.payload_bytes
        if len(payload_bytes) == 1:
            return payload_bytes[0] * len(keys)
        return sum(payload_bytes[key_group(key)] for key in keys)

    def _put_off(self, tier: TierState, key: bytes) -> None:
        if tier.config.backpressure == "drop":
            self._drop(tier, 1, "bound" if tier.writable else "breaker")
            return
        if len(tier.backlog) == tier.backlog.maxlen:
            self._drop(tier, 1, "bound")
        tier.backlog.append(key)
        self._state.recorder.add("kvtier_deferred_chunks_total", 1, (tier.name,))

    def _offer_refused(self, tier: TierState, now: float) -> None:
        tier.retry_at = math.inf
        for key, (tries, due) in tier.refused.items():
            if now >= due > 0:
                tier.refused[key] = (tries, 0.0)
                if len(tier.backlog) == tier.backlog.maxlen:
                    self._drop(tier, 1, "bound")
                tier.backlog.append(key)
            elif due > now:
                tier.retry_at = min(tier.retry_at, due)

    def _refused(self, tier: TierState, key: bytes, now: float) -> None:
        """The tier did not take a chunk; while host memory has it there may be a next time."""
        tries = tier.refused.pop(key, (0, 0.0))[0] + 1
        if tier.config.backpressure == "drop" or tries >= MAX_TRIES:
            self._drop(tier, 1, "refused")
            return
        if len(tier.refused) == tier.backlog.maxlen:
            tier.refused.popitem(last=False)
            self._drop(tier, 1, "bound")
        pause = min(RETRY_SECONDS * 2 ** (tries - 1), MAX_RETRY_SECONDS)
        tier.refused[key] = (tries, now + pause)
        tier.retry_at = min(tier.retry_at, now + pause)

    def _drop(self, tier: TierState, chunks: int, reason: str) -> None:
        self._state.recorder.add("kvtier_dropped_chunks_total", chunks, (tier.name, reason))

    def _cascade(
        self, keys: list[bytes], tiers: list[int], request: Request | None, now: float
    ) -> None:
        """Send chunks whose in-flight bytes have been counted already."""
        pinned, slots, generations = self._index.pin_for_service(keys)
        length_bytes = self._length_bytes(pinned)
        if len(pinned) != len(keys):
            lost_bytes = self._length_bytes(keys) - length_bytes
            for i in tiers:
                self._tiers[i].inflight_bytes -= lost_bytes
        if not pinned:
            return
        record = CascadeRecord(
            self._state.next_job(),
            pinned,
            slots.tolist(),
            generations.tolist(),
            length_bytes,
            tiers,
            now,
        )
        self.cascades[record.job] = record
        timeout = max((self._tiers[i].config.store_seconds for i in tiers), default=30.0)
        self._state.out.append(
            m.Cascade(
                record.job,
                request.context.request_id if request is not None else "",
                pinned,
                record.slots,
                record.generations,
                tiers,
                now + timeout,
            )
        )

    # --- from the service ---

    def take(self, message: m.Stored, now: float) -> None:
        """One tier has ended its part of a cascade."""
        record = self.cascades.get(message.job)
        if record is None:
            raise InternalError(f"news of job {message.job}, which has ended")
        if message.tier < 0:
            del self.cascades[record.job]
            return
        tier = self._tiers[message.tier]
        record.tiers.discard(message.tier)
        tier.inflight_bytes -= record.length_bytes
        if not record.stale:
            saved: list[bytes] = []
            for key, outcome in zip(record.keys, message.outcomes, strict=True):
                if outcome <= Outcome.EXISTS:
                    saved.append(key)
                    tier.refused.pop(key, None)
                elif outcome in (Outcome.DROPPED, Outcome.LOST, Outcome.TIMEOUT):
                    self._refused(tier, key, now)
            self._index.mark_saved(saved)
            self._state.emit("stored", saved, "host", tier.name)
        if not record.tiers:
            del self.cascades[record.job]

    def undeliverable(self, message: m.Cascade) -> None:
        """The service did not take it: give the pins back, offer the chunks again."""
        record = self.cascades.pop(message.job)
        for slot, generation in zip(record.slots, record.generations, strict=True):
            self._state.slots.unpin_service(slot, generation)
        for i in record.tiers:
            self._tiers[i].inflight_bytes -= record.length_bytes
            for key in record.keys:
                self._put_off(self._tiers[i], key)

    def service_lost(self) -> None:
        """The service is gone, and its pins are taken back elsewhere: offer its chunks again."""
        for cascade in self.cascades.values():
            for i in cascade.tiers:
                if not cascade.stale:
                    for key in cascade.keys:
                        self._put_off(self._tiers[i], key)
        self.cascades.clear()
        for tier in self._tiers:
            tier.inflight_bytes = 0

    def reset(self) -> None:
        """Everything was forgotten; what is under way only gives its bytes in flight back."""
        self._stored.clear()
        for tier in self._tiers:
            tier.backlog.clear()
            tier.refused.clear()
        for cascade in self.cascades.values():
            cascade.stale = True


def _fits(tier: TierState, length: int) -> bool:
    if not tier.writable:
        return False
    return tier.inflight_bytes == 0 or tier.inflight_bytes + length <= tier.bound_bytes
