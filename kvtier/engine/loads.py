# SPDX-License-Identifier: Apache-2.0
"""Loads: what is asked of the tiers for a request, and the slots it gets for the answers.

Part of the planner, on the owner's thread. Owns the finds under way, the slots lent to them, the
line of those that want more, and the holds. Invariants: a lent slot is in exactly one
``FindRecord.lent``; a held pin in exactly one ``Request.chunks``; what held and lent chunks take
together, ``taken_slots``, stays within ``hold_limit``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.engine.requests import Request
from kvtier.engine.state import State, TierState
from kvtier.engine.transfers import FindRecord
from kvtier.errors import InternalError
from kvtier.runtime import messages as m
from kvtier.tiers.base import Takes
from kvtier.types import key_group

PATIENCE = 3
"""A request in the line for slots takes what there is after this part of the load timeout."""

HOLD_SECONDS = 10.0
"""How long chunks stay held for a request that does not come back for them."""

HOLD_CHUNKS = 256
"""Chunks held in one step; for the rest, the next lookup of the request counts."""

ANSWER_SECONDS = 0.05
"""How long the answer to a batch stands without news of the request's own: chunks that others
bring into host memory are found after that."""


class Loads:
    """Asks the tiers, lends slots, holds what has come.

    Parameters
    ----------
    state : State
    """

    def __init__(self, state: State) -> None:
        self.finds: dict[int, FindRecord] = {}
        self.held = 0
        """Pins of holds, of all requests."""
        self.lent = 0
        """Chunks that the service has slots for, of all finds that are not stale."""
        self.taken_slots = 0
        """Slots that held and lent chunks take."""
        self.line: list[FindRecord] = []
        """Finds that want slots, those of older requests first."""
        self.asking: dict[str, Request] = {}
        """Requests with fresh keys."""
        self.asked_at = math.inf
        """When the first find went out to which the service has said nothing yet, nor anything
        else since."""
        self._state = state
        self._index = state.index
        self._tiers = state.tiers
        self._lookup_seconds = state.config.lookup_timeout_seconds
        self._load_seconds = max((tier.config.load_seconds for tier in state.tiers), default=1.0)
        self._windows = [group.window_chunks for group in state.geometry.groups]
        self._has_windows = any(window is not None for window in self._windows)
        self._widths = widths = state.geometry.widths
        self._widest = max(widths)
        self._most_slots = state.config.max_hold_bytes // state.geometry.slot_bytes
        # Whose keys are asked for together: slots are lent for chunks of one width.
        kinds = [(w is not None, width) for w, width in zip(self._windows, widths, strict=True)]
        self._kinds = sorted(set(kinds))
        self._kind_of = [self._kinds.index(kind) for kind in kinds]
        self._windowed: list[Request] = []  # requests with a count in ``window_left``
        self._expires_at = math.inf  # nothing that is held or asked for expires before
        self._may_hold = HOLD_CHUNKS  # in this step

    @property
    def hold_limit(self) -> int:
        """Slots that held and lent chunks may take together: at least one chunk's, and one less
        than host memory has."""
        return max(self._widest, min(self._most_slots, self._index.available - self._widest))

    def wait(self, request: Request, now: float) -> None:
        """The request waits: its deadline runs from its first wait."""
        if request.wait_until is None:
            peer = request.context.peer
            # A prefill under way elsewhere takes as long as it takes.
            patience = 0.0 if peer is None else peer.wait_seconds
            request.load_until = now + max(patience, self._load_seconds)
            request.wait_until = now + max(patience, min(self._lookup_seconds, self._load_seconds))

    def progress(self, request: Request, now: float) -> None:
        """The request's answers are under way: its deadline starts anew, up to that of the load."""
        if request.wait_until is not None and now < request.wait_until:
            until = min(now + self._lookup_seconds, request.load_until)
            request.wait_until = max(request.wait_until, until)

    def expire(self, requests: Iterable[Request], now: float) -> None:
        """Let go of what nobody came back for, and give up finds without an end."""
        self._may_hold = HOLD_CHUNKS
        for request in self._windowed:
            request.window_left.clear()
        self._windowed.clear()
        if now < self._expires_at:
            return
        self._expires_at = math.inf
        for request in requests:
            if not request.chunks.num_held:
                continue
            if now < request.hold_until:
                self._expires_at = min(self._expires_at, request.hold_until)
                continue
            self._state.recorder.add("kvtier_hold_expired_total", request.chunks.num_held)
            self.release(request)
        for record in list(self.finds.values()):
            if record.ended or record.stale:
                continue
            if now < record.deadline:
                self._expires_at = min(self._expires_at, record.deadline)
            else:
                self._leave_line(record)
                _give_up(record)

    def ask(self, keys: list[bytes], request: Request) -> bool:
        """Have the tiers asked at the next flush for keys that `request.chunks` has picked, up to
        the first that none can have. Whether that is any."""
        tiers = [self._tiers[i] for i in request.tiers if self._tiers[i].readable]
        if not tiers:
            asked, gone = 0, 1
        elif self._has_windows:
            asked, gone = self._ask_windowed(keys, request, tiers)
        else:
            # All behind the first that is not there are not to be had.
            asked = _first_absent(keys, tiers)
            gone = len(keys) - asked
            self._known_absent(gone, tiers)
        request.chunks.settle(asked, gone)
        if asked:
            self.asking[request.context.request_id] = request
        return asked > 0

    def _ask_windowed(
        self, keys: list[bytes], request: Request, tiers: list[TierState]
    ) -> tuple[int, int]:
        """How many of the keys may be asked for, and how many behind them are not to be had."""
        for asked, key in enumerate(keys):
            if not _first_absent([key], tiers):
                self._known_absent(1, tiers)
                return asked, 1
            if not self._in_window(key, request):
                return asked, 1
        return len(keys), 0

    def _known_absent(self, chunks: int, tiers: list[TierState]) -> None:
        """No tier has these, which was known without asking."""
        if chunks:
            for tier in tiers:
                self._state.recorder.add("kvtier_lookup_chunks_total", chunks, (tier.name, "miss"))

    def _in_window(self, key: bytes, request: Request) -> bool:
        """Whether a windowed group's key is among those that may be asked in this step."""
        group = key_group(key)
        window = self._windows[group]
        if window is None:
            return True
        if not request.window_left:
            self._windowed.append(request)
        left = request.window_left.get(group, window + 1)
        request.window_left[group] = left - 1
        return left > 0

    def could_hold(self, request: Request) -> bool:
        """Whether there is anything to hold more chunks with."""
        if self.hold_limit - self.taken_slots < self._widest or self._may_hold <= 0:
            return False
        if self.line and request.finds and self.line[0].request is not request:
            return all(record.request is not request for record in self.line)
        return True

    def hold_hits(self, request: Request, now: float) -> None:
        """Pin what a deferred request was told it could have, as far as the bound allows.

        Not for a request that stands in the line for slots behind another.
        """
        if not self.could_hold(request):
            return
        before = request.chunks.held_slots
        room = self.hold_limit - self.taken_slots
        pinned, left = request.chunks.hold(self._may_hold, slots=room)
        self._may_hold -= pinned
        self._held(pinned, request.chunks.held_slots - before, request, now)
        if not left:
            self.settle(request, now)

    def settle(self, request: Request, now: float) -> None:
        """All that can be held for the request is held: its answer stands until there is news."""
        if not request.answered or request.wait_until is None:
            return
        # A writer's end is no news to it, the end of what it waits for itself is.
        chunks = request.chunks
        if request.finds or chunks.num_unsent or not chunks.writing:
            request.answer_until = min(now + ANSWER_SECONDS, request.wait_until)

    def _held(self, chunks: int, slots: int, request: Request, now: float) -> None:
        """So many more have been pinned for the request."""
        if chunks:
            self.held += chunks
            self.taken_slots += slots
            request.hold_until = now + HOLD_SECONDS
            self._expires_at = min(self._expires_at, request.hold_until)

    def release(self, request: Request, keys: Sequence[bytes] | None = None) -> None:
        """Give holds of a request back: those of `keys`, or all."""
        if request.chunks.num_held:
            request.news()
            before = request.chunks.held_slots
            self.held -= request.chunks.unhold(keys)
            self.taken_slots -= before - request.chunks.held_slots

    def flush(self, now: float) -> None:
        """Lend slots to those in the line, then ask for what is fresh."""
        if self.line:
            self._flush_wants(now)
        if self.asking:
            self._flush_finds(now)

    def _flush_finds(self, now: float) -> None:
        asking, self.asking = self.asking, {}
        for request in asking.values():
            tiers = [i for i in request.tiers if self._tiers[i].readable]
            for keys, places, windowed in self._parts(*request.chunks.take_unsent()):
                if not tiers:
                    request.chunks.gone(places)
                    request.news()
                    continue
                self._find(request, keys, places, windowed, tiers, now)

    def _parts(
        self, keys: list[bytes], places: npt.NDArray[np.int64]
    ) -> Iterator[tuple[list[bytes], npt.NDArray[np.int64], bool]]:
        """Keys by what is asked for together, each with their places; windowed groups last."""
        if len(self._kinds) == 1:
            if keys:
                yield keys, places, self._kinds[0][0]
            return
        kinds = np.array([self._kind_of[key_group(key)] for key in keys])
        for kind, (windowed, _) in enumerate(self._kinds):
            chosen = np.flatnonzero(kinds == kind)
            if len(chosen):
                yield [keys[i] for i in chosen], places[chosen], windowed

    def _find(
        self,
        request: Request,
        keys: list[bytes],
        places: npt.NDArray[np.int64],
        windowed: bool,
        tiers: list[int],
        now: float,
    ) -> None:
        assert request.wait_until is not None
        job = self._state.next_job()
        record = FindRecord(job, request, keys, places, now, request.load_until)
        self.finds[record.job] = record
        self._expires_at = min(self._expires_at, record.deadline)
        request.finds.add(record.job)
        self.asked_at = min(self.asked_at, now)
        # Slots kept free ahead: loading starts with the presence check. While others wait for
        # slots it is presence only, or many requests would hold a part each and none a whole.
        slots, generations = self._lend(record, 0 if self.line else len(keys))
        self._state.out.append(
            m.Find(
                record.job,
                request.context.request_id,
                keys,
                windowed,
                tiers,
                slots,
                generations,
                record.deadline,
                request.context.peer,
            )
        )

    def _lend(self, record: FindRecord, n: int) -> tuple[m.Numbers, m.Words]:
        width = self._widths[record.group]
        n = max(0, min(n, (self.hold_limit - self.taken_slots) // width))
        lent, words = self._index.lend(n, record.group)
        slots, generations = lent.tobytes(), words.tobytes()
        record.lent.add(slots, generations)
        record.granted += len(lent)
        self.lent += len(lent)
        self.taken_slots += len(lent) * width
        return slots, generations

    def _enter_line(self, record: FindRecord) -> None:
        # By request: one of which a part came back must not wait behind those that wait for what
        # it holds.
        if record not in self.line:
            insort(self.line, record, key=lambda one: (one.request.number, one.job))

    def _leave_line(self, record: FindRecord) -> None:
        if record in self.line:
            self.line.remove(record)

    def _flush_wants(self, now: float) -> None:
        """Lend slots to the finds that know what they need, oldest first."""
        for record in self.line:
            self.progress(record.request, now)
        for record in list(self.line):
            width = self._widths[record.group]
            room = (self.hold_limit - self.taken_slots) // width
            mine = len(record.lent) * width + record.request.chunks.held_slots
            # What others in the line hold does not come back while they wait, perhaps for this one.
            waiting = {one.request for one in self.line if one.request is not record.request}
            stuck = sum(request.chunks.held_slots for request in waiting)
            others = self.taken_slots - mine - stuck
            late = now >= record.wanted_since + self._load_seconds / PATIENCE
            if room < record.wants and others > self.hold_limit // 4 and not late:
                # It waits for those before it rather than take a part of what it needs; the ones
                # behind it wait with it, so that it is not starved.
                return
            n = min(record.wants, room)
            if n > 0:
                shortage = n - self._index.free_for(record.group)
                if shortage > 0:
                    self._make_room(n, shortage, record.group)
                slots, generations = self._lend(record, n)
                if slots:
                    self._state.out.append(m.Lend(record.job, slots, generations))
                record.wants -= len(m.numbers(slots))
            if record.wants > 0:
                # A prompt larger than the bound gets its prefix; the rest is a miss.
                self._state.out.append(m.NoMoreSlots(record.job))
                self._state.recorder.add("kvtier_hold_refused_total", record.wants)
            self.line.remove(record)

    def _make_room(self, n: int, shortage: int, group: int) -> None:
        """Evict for loads that are wanted: saved chunks; while no tier takes all of them, any, as a
        store would. Else a host full of what is not saved would serve no tier's chunk again."""
        unsaved: list[bytes] | None = None
        if not any(tier.writable and tier.takes is Takes.ALL for tier in self._tiers):
            unsaved = []
        evicted = self._index.keep_free(n, shortage, group, unsaved)
        self._state.evicted(evicted, unsaved or ())

    def take(self, message: m.Found, now: float) -> None:
        """News of a find."""
        record = self.finds.get(message.job)
        if record is None:
            raise InternalError(f"news of job {message.job}, which has ended")
        if record.stale:
            self._give_back(record, message.slots + message.unused, ended=message.final)
            return
        request = record.request
        if message.final or message.absent or message.failed:
            request.news()
        elif request.answer_until:
            # More of what it waits for is on its way or there, and held for it; the rest is not:
            # its answer stays what it is, and need not be looked for.
            request.answer_until = min(now + ANSWER_SECONDS, request.wait_until or now)
        alive = not request.ended
        in_time = request.wait_until is not None and now < request.wait_until
        self.progress(request, now)
        record.present += message.present
        if message.loaded:
            self._adopt(record, message, alive and in_time, now)
        if message.absent or message.failed:
            request.chunks.gone(record.places, m.numbers(message.absent + message.failed))
        if message.final:
            self._leave_line(record)
            request.finds.discard(record.job)
        elif alive and message.present and now < record.deadline:
            wants = record.present - record.granted
            if wants > 0:
                record.wants = wants
                if record not in self.line:
                    record.wanted_since = now
                    self._enter_line(record)
                    if self.line[0].request is not request:
                        # Behind others: what it held would keep them, and so itself, waiting.
                        self.release(request)
        self._give_back(record, message.unused, ended=message.final)

    def _adopt(self, record: FindRecord, message: m.Found, alive: bool, now: float) -> None:
        """Loaded chunks become READY and are held for the request that waits for them."""
        request = record.request
        chunks = request.chunks
        loaded, slots = m.numbers(message.loaded), m.numbers(message.slots)
        keys = [record.keys[i] for i in loaded.tolist()]
        generations = record.lent.take(message.slots)
        self._not_lent(record, len(keys))
        new = self._index.adopt(slots, generations, keys, m.words(message.crcs), pin=alive)
        self._state.turnover += len(keys)
        places = record.places[loaded]
        chunks.loaded(places)
        request.sources.update(dict.fromkeys(keys, message.tier))
        if alive:
            before = chunks.held_slots
            pinned = chunks.held(places, slots, generations, new)
            if pinned < len(keys):
                # Where the key had come by another way meanwhile, that slot is held instead.
                others = places[~np.array(new)]
                pinned += chunks.hold(len(others), others)[0]
            self._held(pinned, chunks.held_slots - before, request, now)
        name = self._tiers[message.tier].name
        self._state.recorder.add("kvtier_lookup_chunks_total", len(keys), (name, "hit"))
        self._state.emit("stored", keys, name, "host")

    def _not_lent(self, record: FindRecord, n: int) -> None:
        """So many of the record's chunks are not with the service any more."""
        self.lent -= n
        self.taken_slots -= n * self._widths[record.group]

    def _give_back(self, record: FindRecord, slots: m.Numbers, ended: bool = False) -> None:
        if slots:
            numbers, generations = m.numbers(slots), record.lent.take(slots)
            if record.stale:
                self._index.release(numbers, generations)
            else:
                self._index.give_back(numbers, generations)
                self._not_lent(record, len(numbers))
        record.ended = record.ended or ended
        if record.ended and not record.lent:
            del self.finds[record.job]

    def returned(self, message: m.Returned) -> None:
        """Slots that a hung call had kept."""
        record = self.finds.get(message.job)
        if record is not None:
            self._give_back(record, message.slots)

    def undeliverable(self, message: m.Find | m.Lend | m.NoMoreSlots) -> None:
        """The service did not take it: its slots come back; a find ends as failed, or stands in
        the line again for what it did not get."""
        record = self.finds.get(message.job)
        if record is None:
            return
        if isinstance(message, m.NoMoreSlots):
            self._enter_line(record)
            return
        if isinstance(message, m.Lend):
            slots = len(m.numbers(message.slots))
            record.wants += slots
            record.granted -= slots
            self._enter_line(record)
        if isinstance(message, m.Find):
            record.ended = True
            record.request.finds.discard(record.job)
            self._leave_line(record)
            if not record.stale:
                record.request.chunks.gone(record.places)
            record.request.news()
        self._give_back(record, message.slots)
        if record.ended and not record.lent:
            self.finds.pop(record.job, None)

    def finish(self, request: Request) -> None:
        """The request has ended: nobody waits for its chunks any more."""
        self.release(request)
        self.asking.pop(request.context.request_id, None)
        for job in request.finds:
            self._state.out.append(m.Cancel(job))
            # What it still wanted nobody wants now.
            self._leave_line(self.finds[job])

    def service_lost(self) -> None:
        """The service has ended and touches nothing any more: its finds end as failed."""
        for record in list(self.finds.values()):
            record.ended = True
            if not record.stale:
                record.request.finds.discard(record.job)
                _give_up(record)
            self._give_back(record, m.packed(list(record.lent)))
        self.finds.clear()
        self.line.clear()
        self.asked_at = math.inf

    def reset(self, requests: Iterable[Request]) -> None:
        """Everything is about to be forgotten; finds under way only give their slots back."""
        for request in requests:
            self.release(request)
        self.asking.clear()
        self.line.clear()
        for record in self.finds.values():
            if not record.stale:
                self._not_lent(record, len(record.lent))
                record.stale = True


def _give_up(record: FindRecord) -> None:
    """What a find has not settled is not to be had."""
    record.request.chunks.gone(record.places)
    record.request.news()


def _first_absent(keys: list[bytes], tiers: Sequence[TierState]) -> int:
    """Position of the first key that none of these tiers may hold."""
    before, at = -1, 0
    while before < at < len(keys):
        before = at
        for tier in tiers:
            at = tier.contents.first_absent(keys, at)
    return at
