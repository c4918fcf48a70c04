# SPDX-License-Identifier: Apache-2.0
"""Stores: which chunk of host memory goes to which tier, and when.

Part of the planner, on the owner's thread. Owns the cascades under way, each tier's backlog,
refusals and bytes in flight. Invariant: a tier's ``inflight_bytes`` are those of the cascades that
it has not answered yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from kvtier._core.index import Reservation
from kvtier._core.slots import READY
from kvtier.engine.offers import Offers
from kvtier.engine.requests import Request
from kvtier.engine.state import State, TierState
from kvtier.engine.transfers import CascadeRecord
from kvtier.errors import InternalError
from kvtier.runtime import messages as m
from kvtier.tiers.base import Takes
from kvtier.types import Outcome, key_group

MAX_TRIES = 10
"""How often a tier may refuse a chunk before it is not offered there again."""

RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
"""Pause after the first refusal, doubled with each further one."""


_SAVED = bytes((Outcome.DONE, Outcome.EXISTS))

MAX_STORED = 4096
"""Stores that wait for a flush that may cascade them."""

BACKLOG_CHUNKS = 512
"""Chunks put off that are looked at in one step, for each tier."""

HAND_OVER_CHUNKS = 1 << 15
"""Chunks put off that the service has at most, for each tier: a few milliseconds to hand over."""

HAND_OVER_PORTION_BYTES = 8 << 20
"""What the service may pin of them at a time, beside what is in flight; at most a quarter of
that."""

PUSH_AHEAD = 0.125
"""Part of host memory, its oldest chunks, that is kept free or pushed to peers while nobody else
has them."""
PUSH_PORTION = 1 / 8
"""When so much of that part has moved on, it is looked through again for what is to be pushed."""
PUSH_CHUNKS = 256
"""Pushed in one step, at most."""
PUSH_PAUSE_SECONDS = 1.0
"""After peers had no room."""

PORTION_CHUNKS = 64
"""So many of them at a time: where there is room for few, few are looked at."""


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
        self._by_group = self._tiers_by_group()
        self._least_bytes = min(state.payload_bytes)
        self._pushes = next(
            (i for i, tier in enumerate(self._tiers) if tier.takes is Takes.PRESSED), None
        )
        self._push_at = 0.0
        self._push_turnover = 0  # when the oldest chunks are to be looked through again
        self._offers = Offers(2 * state.geometry.num_slots)
        self._stored: list[tuple[list[bytes], Request | None, bool]] = []

    def _tiers_by_group(self) -> list[tuple[int, ...]] | None:
        """The tiers that want the chunks of each group; None where more than that decides."""
        if self._thresholds or any(tier.config.min_prefix_tokens for tier in self._tiers):
            return None
        return [
            tuple(i for i, tier in enumerate(self._tiers) if tier.admits(b"", group, None))
            for group in range(len(self._state.payload_bytes))
        ]

    @property
    def waiting(self) -> bool:
        """Whether there are new chunks that have been offered to no tier yet."""
        return bool(self._stored)

    def reserve(
        self, keys: Sequence[bytes], request: Request, offered: Sequence[bytes] | None = None
    ) -> Reservation:
        """Slots for new chunks of a request, which were `offered` with others that it is not to
        store yet."""
        if offered is not None and len(offered) > len(keys):
            skipped = len(offered) - len(keys)
            self._state.recorder.add("kvtier_store_skipped_chunks_total", skipped)
        reservation = self._index.reserve(keys)
        self._state.evicted(reservation.evicted, reservation.evicted_unsaved)
        request.use(keys)
        if self._thresholds:
            self._offer(keys if offered is None else offered, request)
        return reservation

    def _offer(self, keys: Sequence[bytes], request: Request) -> None:
        """Count offers; what is in host memory and has now been offered often enough goes out."""
        self._offers.add(keys)
        thresholds = {tier.config.store_threshold for tier in self._tiers} - {1}
        due = [key for key in keys if self._offers.count(key) in thresholds]
        due = [key for key in due if self._index.lookup(key) == READY]
        if due:
            self._stored.append((due, request, True))

    def commit(self, keys: Sequence[bytes], request: Request | None) -> list[bytes]:
        """Chunks are in host memory; they go to the tiers at the next flush."""
        stored = self._index.commit(keys)
        if stored:
            self._state.turnover += len(stored)
            self._state.emit("stored", stored, None, "host")
            if self._active and len(self._stored) < MAX_STORED:
                self._stored.append((stored, request, False))
            elif self._active:
                # The service does not answer (a reset is not done): bounded, like all that waits.
                for tier in self._tiers:
                    if tier.takes is Takes.ALL:
                        self._put_off(tier, stored)
        return stored

    def flush(self, now: float, idle: bool) -> None:
        """Cascade what was stored, then what had been put off, as far as the bounds allow.

        `idle`: there are no requests, so perhaps no further step; the service gets the rest.
        """
        stored, self._stored = self._stored, []
        for keys, request, due in stored:
            if not self._send_all(keys, request, now):
                self._choose(keys, request, due, now)
        for i, tier in enumerate(self._tiers):
            if tier.retries and now >= tier.retries[0][0]:
                self._offer_refused(tier, now)
            if tier.backlog:
                self._flush_backlog(i, tier, now)
            if idle and tier.backlog and tier.writable:
                self._hand_over(i, tier, now)
        if self._pushes is not None and self._state.turnover >= self._push_turnover:
            self._push(self._pushes, now)

    def _push(self, i: int, now: float) -> None:
        """Send to peers what host memory would drop next, so that it can be had from there.

        The oldest part of host memory is as much as is evicted in some steps; with so much room
        left, and while another tier takes the chunks, nothing is pushed.
        """
        tier = self._tiers[i]
        if now < self._push_at or not tier.writable:
            return
        if any(one.takes is Takes.ALL and one.writable for one in self._tiers):
            return
        ahead = max(1, int(PUSH_AHEAD * self._index.available))
        within = ahead - self._index.free_for(0) - tier.inflight_bytes // self._least_bytes
        room = (tier.bound_bytes - tier.inflight_bytes) // max(self._state.payload_bytes)
        n = min(within, room, PUSH_CHUNKS)
        keys = self._index.oldest_unsaved(n, within) if n > 0 else []
        if len(keys) < n or within <= 0:
            # With room left, later: it has to be taken first.
            portion = max(1, int(PUSH_PORTION * ahead), -within // 4)
            self._push_turnover = self._state.turnover + portion
        if keys:
            tier.inflight_bytes += self._length_bytes(keys)
            self._cascade(keys, [i], None, now)

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
            offers = self._offers.count(key) or 1
            for i, tier in enumerate(self._tiers):
                threshold = tier.config.store_threshold
                if offers < threshold or (due and offers != threshold):
                    continue
                if not tier.admits(key, group, request):
                    continue
                wanted = True
                if tier.backlog or not _fits(tier, length):
                    self._put_off(tier, [key])
                    continue
                tier.inflight_bytes += length
                chosen.append(i)
            if not wanted and not due:
                unwanted.append(key)
            if chosen or self._checksums:
                # Without a tier that takes it: only for its checksum.
                batches.setdefault(tuple(chosen), []).append(key)
        if self._pushes is None:
            # What no tier is to have is no loss when it goes, and need not outlive what is saved.
            self._index.mark_saved(unwanted)
        for tiers, batch in batches.items():
            self._cascade(batch, list(tiers), request, now)

    def _flush_backlog(self, i: int, tier: TierState, now: float) -> None:
        """Send what had been put off, the oldest first, as far as the tier has room."""
        batch: list[bytes] = []
        left = BACKLOG_CHUNKS
        while left > 0 and tier.backlog and _fits(tier, self._least_bytes):
            portion = list(islice(tier.backlog, min(left, PORTION_CHUNKS)))
            taken = self._take_backlog(tier, portion, batch)
            for _ in range(taken):
                tier.backlog.popleft()
            left = left - taken if taken == len(portion) else 0
        if batch:
            self._cascade(batch, [i], None, now)

    def _take_backlog(self, tier: TierState, portion: list[bytes], batch: list[bytes]) -> int:
        """Move what fits to `batch`; how many of `portion` are done with, stale ones included."""
        states = self._index.states(portion)
        payload_bytes = self._state.payload_bytes
        stale = 0
        done = 0
        for key, state in zip(portion, states, strict=True):
            if state == READY:
                length = payload_bytes[key_group(key)]
                if not _fits(tier, length):
                    break
                tier.inflight_bytes += length
                batch.append(key)
            else:
                # Evicted, reset or dropped meanwhile: this tier never gets it.
                tier.refused.pop(key, None)
                stale += 1
            done += 1
        if stale:
            self._drop(tier, stale, "bound")
        return done

    def _hand_over(self, i: int, tier: TierState, now: float) -> None:
        """Have the service store what had been put off, in its own time. No pins go with it: until
        its turn comes a chunk may be evicted like any other."""
        keys: list[bytes] = []
        slots: list[int] = []
        generations: list[int] = []
        batch = list(islice(tier.backlog, HAND_OVER_CHUNKS - tier.handed_over))
        for key in batch:
            tier.backlog.popleft()
            place = self._index.locate(key) if self._index.lookup(key) == READY else None
            if place is not None:
                keys.append(key)
                slots.append(place[0])
                generations.append(place[1])
        gone = len(batch) - len(keys)
        if gone:
            self._drop(tier, gone, "bound")
        if not keys:
            return
        job = self._state.next_job()
        none = m.numbers(b""), m.words(b"")
        self.cascades[job] = CascadeRecord(job, keys, *none, 0, [i], now)
        tier.handed_over += len(keys)
        tier.contents.add(keys)
        portion_bytes = max(1, min(HAND_OVER_PORTION_BYTES, tier.bound_bytes // 4))
        deadline = now + tier.config.store_seconds
        self._state.out.append(
            m.Cascade(
                job,
                "",
                keys,
                m.packed(slots),
                m.packed_words(generations),
                [i],
                deadline,
                portion_bytes,
            )
        )

    def _send_all(self, keys: Sequence[bytes], request: Request | None, now: float) -> bool:
        """Send `keys`, or put them off, as a whole. False where that does not go: the tiers want
        different ones of them, or have room for a part."""
        wanting = self._wanting(keys)
        if wanting is None:
            return False
        if not wanting and self._pushes is None:
            # No loss when they go, and they need not outlive what is saved.
            self._index.mark_saved(keys)
        length_bytes = self._length_bytes(keys)
        fit = []
        for i in wanting:
            tier = self._tiers[i]
            if tier.backlog or not tier.writable:
                continue
            if tier.inflight_bytes + length_bytes <= tier.bound_bytes:
                fit.append(i)
            elif _fits(tier, self._state.payload_bytes[key_group(keys[0])]):
                return False
        for i in wanting:
            if i not in fit:
                self._put_off(self._tiers[i], keys)
        for i in fit:
            self._tiers[i].inflight_bytes += length_bytes
        if fit or self._checksums:
            # Without a tier that takes them: only for their checksums.
            self._cascade(list(keys), fit, request, now)
        return True

    def _wanting(self, keys: Sequence[bytes]) -> tuple[int, ...] | None:
        """Tiers that want all of `keys`, where no other one wants any; None: ask key by key."""
        if self._by_group is None:
            return None
        if len(self._by_group) == 1:
            return self._by_group[0]
        groups = set(map(key_group, keys))
        wanting = {self._by_group[group] for group in groups}
        # Chunks of several groups have several lengths.
        return wanting.pop() if len(wanting) == 1 else None

    def _length_bytes(self, keys: Sequence[bytes]) -> int:
        """Payload bytes of chunks."""
        payload_bytes = self._state.payload_bytes
        if len(payload_bytes) == 1:
            return payload_bytes[0] * len(keys)
        return sum(payload_bytes[key_group(key)] for key in keys)

    def _put_off(self, tier: TierState, keys: Sequence[bytes]) -> None:
        if tier.takes is Takes.PRESSED:
            self._push_turnover = 0  # they are chosen anew
            return
        if tier.config.backpressure == "drop":
            self._drop(tier, len(keys), "bound" if tier.writable else "breaker")
            return
        backlog = tier.backlog
        assert backlog.maxlen is not None
        beyond = len(backlog) + len(keys) - backlog.maxlen
        if beyond > 0:
            self._drop(tier, beyond, "bound")
        backlog.extend(keys)
        self._state.recorder.add("kvtier_deferred_chunks_total", len(keys), (tier.name,))

    def _offer_refused(self, tier: TierState, now: float) -> None:
        """What is due again goes into the backlog, a part a step."""
        retries = tier.retries
        for _ in range(BACKLOG_CHUNKS):
            if not retries or retries[0][0] > now:
                break
            due, key = heappop(retries)
            tries, valid = tier.refused.get(key, (0, 0.0))
            if valid != due:
                continue  # forgotten, or refused anew
            tier.refused[key] = (tries, 0.0)
            if len(tier.backlog) == tier.backlog.maxlen:
                self._drop(tier, 1, "bound")
            tier.backlog.append(key)

    def _refused(self, tier: TierState, key: bytes, now: float) -> None:
        """The tier did not take a chunk; while host memory has it there may be a next time."""
        if tier.takes is Takes.PRESSED:
            self._push_at = now + PUSH_PAUSE_SECONDS
            self._push_turnover = 0
            self._drop(tier, 1, "refused")
            return
        tries = tier.refused.pop(key, (0, 0.0))[0] + 1
        if tier.config.backpressure == "drop" or tries >= MAX_TRIES:
            self._drop(tier, 1, "refused")
            return
        most = tier.backlog.maxlen
        assert most is not None
        if len(tier.refused) == most:
            tier.refused.popitem(last=False)
            self._drop(tier, 1, "bound")
        due = now + min(RETRY_SECONDS * 2 ** (tries - 1), MAX_RETRY_SECONDS)
        tier.refused[key] = (tries, due)
        heappush(tier.retries, (due, key))
        if len(tier.retries) > 2 * most:
            # Mostly of what was forgotten meanwhile.
            tier.retries = [(due, key) for key, (_, due) in tier.refused.items() if due]
            heapify(tier.retries)

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
            slots,
            generations,
            length_bytes,
            tiers,
            now,
        )
        self.cascades[record.job] = record
        for i in tiers:
            self._tiers[i].contents.add(pinned)
        timeout = max((self._tiers[i].config.store_seconds for i in tiers), default=30.0)
        self._state.out.append(
            m.Cascade(
                record.job,
                request.context.request_id if request is not None else "",
                pinned,
                slots.tobytes(),
                generations.tobytes(),
                tiers,
                now + timeout,
            )
        )

    def under_way(self, tier: int) -> Iterator[list[bytes]]:
        """Chunks that were sent to a tier which has not answered yet."""
        return (record.keys for record in self.cascades.values() if tier in record.tiers)

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
        if record.handed_over:
            tier.handed_over -= len(record.keys)
        if not record.stale:
            saved = record.keys
            if len(message.outcomes) != len(saved):
                raise InternalError(f"{len(message.outcomes)} outcomes for {len(saved)} chunks")
            if message.outcomes.strip(_SAVED) or tier.refused:
                saved = []
                for key, outcome in zip(record.keys, message.outcomes, strict=True):
                    if outcome <= Outcome.EXISTS:
                        saved.append(key)
                        tier.refused.pop(key, None)
                    elif outcome in (Outcome.DROPPED, Outcome.LOST, Outcome.TIMEOUT):
                        self._refused(tier, key, now)
                    elif outcome == Outcome.MISSING:
                        # Evicted before the service could pin it.
                        tier.refused.pop(key, None)
                        self._drop(tier, 1, "bound")
            self._index.mark_saved(saved)
            self._state.emit("stored", saved, "host", tier.name)
        if not record.tiers:
            del self.cascades[record.job]

    def undeliverable(self, message: m.Cascade) -> None:
        """The service did not take it: give the pins back, offer the chunks again."""
        record = self.cascades.pop(message.job)
        pins = zip(record.slots.tolist(), record.generations.tolist(), strict=True)
        for slot, generation in pins:
            self._state.slots.unpin_service(slot, generation)
        for i in record.tiers:
            self._tiers[i].inflight_bytes -= record.length_bytes
            if record.handed_over:
                self._tiers[i].handed_over -= len(record.keys)
            self._put_off(self._tiers[i], record.keys)

    def service_lost(self) -> None:
        """The service is gone, and its pins are taken back elsewhere: offer its chunks again."""
        for cascade in self.cascades.values():
            for i in cascade.tiers:
                if not cascade.stale:
                    self._put_off(self._tiers[i], cascade.keys)
        self.cascades.clear()
        for tier in self._tiers:
            tier.inflight_bytes = 0
            tier.handed_over = 0

    def reset(self) -> None:
        """Everything was forgotten; what is under way only gives its bytes in flight back."""
        self._push_turnover = 0
        self._stored.clear()
        for tier in self._tiers:
            tier.backlog.clear()
            tier.refused.clear()
            tier.retries.clear()
        for cascade in self.cascades.values():
            cascade.stale = True


def _fits(tier: TierState, length: int) -> bool:
    if not tier.writable:
        return False
    return tier.inflight_bytes == 0 or tier.inflight_bytes + length <= tier.bound_bytes
