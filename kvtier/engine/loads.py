# SPDX-License-Identifier: Apache-2.0
"""Loads: what is asked of the tiers for a request, and the slots it gets for the answers.

Part of the planner, on the owner's thread. Owns the finds under way, the slots lent to them, the
line of those that want more, and the holds. Invariants: a lent slot is in exactly one
``FindRecord.lent``; a held pin in exactly one ``Request.held``; held and lent together stay within
``hold_limit``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence

import numpy as np

from kvtier._core.slots import READY, WRITING
from kvtier.engine.requests import ASKED, GONE, LOADED, Request
from kvtier.engine.state import State
from kvtier.engine.transfers import FindRecord
from kvtier.errors import InternalError
from kvtier.runtime import messages as m
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
        """Slots with the service, of all finds that are not stale."""
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
        self._windowed: list[Request] = []  # requests with a count in ``window_left``
        self._expires_at = math.inf  # nothing that is held or asked for expires before
        self._may_hold = HOLD_CHUNKS  # in this step

    @property
    def hold_limit(self) -> int:
        """Slots that held and lent ones may take together."""
        limit = self._state.config.max_hold_bytes // self._state.geometry.slot_bytes
        return max(1, min(limit, self._index.capacity - 1))

    def wait(self, request: Request, now: float) -> None:
        """The request waits: its deadline runs from its first wait."""
        if request.wait_until is None:
            request.load_until = now + self._load_seconds
            request.wait_until = min(now + self._lookup_seconds, request.load_until)

    def progress(self, request: Request, now: float) -> None:
        """The request's answers are under way: its deadline starts anew, up to that of the load."""
        if request.wait_until is not None and now < request.wait_until:
            request.wait_until = min(now + self._lookup_seconds, request.load_until)

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
            if not request.held:
                continue
            if now < request.hold_until:
                self._expires_at = min(self._expires_at, request.hold_until)
                continue
            self._state.recorder.add("kvtier_hold_expired_total", len(request.held))
            self.release(request)
        for record in list(self.finds.values()):
            if record.ended:
                continue
            if now < record.deadline:
                self._expires_at = min(self._expires_at, record.deadline)
            else:
                self._leave_line(record)
                _give_up(record)

    def ask(self, key: bytes, request: Request) -> bool:
        """Have the tiers asked for a key at the next flush; False if there is none to ask."""
        if not self._first_absent([key], request):
            self._known_absent([key], request)
            return False
        if not self._in_window(key, request):
            request.status[key] = GONE
            return False
        request.status[key] = ASKED
        request.fresh.append(key)
        self.asking[request.context.request_id] = request
        return True

    def asks_all(self, request: Request) -> bool:
        """Whether ``ask_all`` is for this request: it waits for nothing yet, may ask a tier, and no
        window says how many keys."""
        return (
            not self._has_windows
            and request.wait_until is None
            and any(self._tiers[i].readable for i in request.tiers)
        )

    def ask_all(self, keys: list[bytes], request: Request) -> int:
        """Have the tiers asked for keys at the next flush, up to the first that none can have: how
        many those are. All behind that one are not to be had."""
        asked = self._first_absent(keys, request)
        if asked < len(keys):
            self._known_absent(keys[asked:], request)
            keys = keys[:asked]
        if keys:
            unique = dict.fromkeys(keys, ASKED)
            request.status.update(unique)
            request.fresh.extend(unique)
            self.asking[request.context.request_id] = request
        return asked

    def _first_absent(self, keys: list[bytes], request: Request) -> int:
        """Position of the first key that no tier may hold."""
        tiers = [self._tiers[i] for i in request.tiers if self._tiers[i].readable]
        before, at = -1, 0
        while before < at < len(keys):
            before = at
            for tier in tiers:
                at = tier.contents.first_absent(keys, at)
        return at

    def _known_absent(self, keys: list[bytes], request: Request) -> None:
        """No tier has these, which was known without asking."""
        request.status.update(dict.fromkeys(keys, GONE))
        for i in request.tiers:
            if self._tiers[i].readable:
                self._state.recorder.add(
                    "kvtier_lookup_chunks_total", len(keys), (self._tiers[i].name, "miss")
                )

    def _in_window(self, key: bytes, request: Request) -> bool:
        """Whether a windowed group's key is among those that may be asked in this step."""
        if not self._has_windows:
            return True
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
        if self.held + self.lent >= self.hold_limit or self._may_hold <= 0:
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
        wanted = [key for key in dict.fromkeys(request.hits) if key not in request.held]
        room = min(self.hold_limit - self.held - self.lent, self._may_hold)
        keys = wanted[: max(0, room)]
        ready, states = self._index.lookup_batch(keys)
        if ready != len(keys):
            keys = [key for key, state in zip(keys, states, strict=True) if state == READY]
        self._may_hold -= len(keys)
        self._hold(keys, request, now)
        if len(keys) == len(wanted):
            self.settle(request, now)

    def settle(self, request: Request, now: float) -> None:
        """All that can be held for the request is held: its answer stands until there is news."""
        if request.asked is None or request.wait_until is None:
            return
        # A writer's end is no news to it, the end of what it waits for itself is.
        if request.finds or request.fresh or WRITING not in request.states:
            request.answer_until = min(now + ANSWER_SECONDS, request.wait_until)

    def _hold(self, keys: Sequence[bytes], request: Request, now: float) -> None:
        if not keys:
            return
        slots, generations = self._index.pin(keys)
        self._held(keys, slots.tolist(), generations.tolist(), request, now)

    def _held(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        generations: Sequence[int],
        request: Request,
        now: float,
    ) -> None:
        """`keys` have been pinned for the request."""
        pins = zip(slots, generations, strict=True)
        request.held.update(zip(keys, pins, strict=True))
        self.held += len(keys)
        request.hold_until = now + HOLD_SECONDS
        self._expires_at = min(self._expires_at, request.hold_until)

    def release(self, request: Request, keys: Iterable[bytes] | None = None) -> None:
        """Give holds of a request back: those of `keys`, or all."""
        if not request.held:
            return
        request.news()
        if keys is None:
            pins = list(request.held.values())
            request.held.clear()
        else:
            pins = [request.held.pop(key) for key in keys if key in request.held]
        if pins:
            self._index.unpin(
                np.array([slot for slot, _ in pins], dtype=np.int64),
                np.array([generation for _, generation in pins], dtype=np.uint32),
            )
            self.held -= len(pins)

    def flush(self, now: float) -> None:
        """Lend slots to those in the line, then ask for what is fresh."""
        if self.line:
            self._flush_wants(now)
        if self.asking:
            self._flush_finds(now)

    def _flush_finds(self, now: float) -> None:
        asking, self.asking = self.asking, {}
        for request in asking.values():
            fresh, request.fresh = request.fresh, []
            tiers = [i for i in request.tiers if self._tiers[i].readable]
            for windowed in (False, True) if self._has_windows else (False,):
                keys = fresh
                if self._has_windows:
                    keys = [
                        k for k in fresh if (self._windows[key_group(k)] is not None) == windowed
                    ]
                if not keys:
                    continue
                if not tiers:
                    request.status.update(dict.fromkeys(keys, GONE))
                    request.news()
                    continue
                self._find(request, keys, windowed, tiers, now)

    def _find(
        self, request: Request, keys: list[bytes], windowed: bool, tiers: list[int], now: float
    ) -> None:
        assert request.wait_until is not None
        record = FindRecord(self._state.next_job(), request, keys, now, request.load_until)
        self.finds[record.job] = record
        self._expires_at = min(self._expires_at, record.deadline)
        request.finds.add(record.job)
        self.asked_at = min(self.asked_at, now)
        slots: list[int] = []
        generations: list[int] = []
        if not self.line:
            # Slots kept free ahead: loading starts with the presence check. While others wait for
            # slots it is presence only, or many requests would hold a part each and none a whole.
            slots, generations = self._lend(record, len(keys))
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

    def _lend(self, record: FindRecord, n: int) -> tuple[list[int], list[int]]:
        room = self.hold_limit - self.held - self.lent
        n = min(n, room)
        if n <= 0:
            return [], []
        lent = self._index.lend(n)
        slots, generations = lent[0].tolist(), lent[1].tolist()
        record.lent.update(zip(slots, generations, strict=True))
        record.granted += len(slots)
        self.lent += len(slots)
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
            room = self.hold_limit - self.held - self.lent
            mine = len(record.lent) + len(record.request.held)
            # What others in the line hold does not come back while they wait, perhaps for this one.
            waiting = {one.request for one in self.line if one.request is not record.request}
            stuck = sum(len(request.held) for request in waiting)
            others = self.held + self.lent - mine - stuck
            late = now >= record.wanted_since + self._load_seconds / PATIENCE
            if room < record.wants and others > self.hold_limit // 4 and not late:
                # It waits for those before it rather than take a part of what it needs; the ones
                # behind it wait with it, so that it is not starved.
                return
            n = min(record.wants, room)
            if n > 0:
                shortage = n - self._index.num_free
                if shortage > 0:
                    self._state.evicted(self._index.keep_free(n, limit=shortage))
                slots, generations = self._lend(record, n)
                if slots:
                    self._state.out.append(m.Lend(record.job, slots, generations))
                record.wants -= len(slots)
            if record.wants > 0:
                # A prompt larger than the bound gets its prefix; the rest is a miss.
                self._state.out.append(m.NoMoreSlots(record.job))
                self._state.recorder.add("kvtier_hold_refused_total", record.wants)
            self.line.remove(record)

    def take(self, message: m.Found, now: float) -> None:
        """News of a find."""
        record = self.finds.get(message.job)
        if record is None:
            raise InternalError(f"news of job {message.job}, which has ended")
        if record.stale:
            self._give_back(record, [*message.slots, *message.unused], ended=message.final)
            return
        request = record.request
        if message.final or message.absent or message.failed:
            request.news()
        elif request.answer_until:
            # More of what it waits for is on its way or there, and held for it; the rest is not:
            # its answer stays what it is, and need not be looked for.
            request.answer_until = min(now + ANSWER_SECONDS, request.wait_until or now)
        alive = not request.ended
        keys = record.keys
        status = request.status
        in_time = request.wait_until is not None and now < request.wait_until
        self.progress(request, now)
        record.present += message.present
        if message.loaded:
            self._adopt(record, message, alive and in_time, now)
        gone = [keys[i] for i in (*message.absent, *message.failed)]
        status.update(dict.fromkeys(gone, GONE))
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
        keys = [record.keys[i] for i in message.loaded]
        generations = [record.lent.pop(slot) for slot in message.slots]
        self.lent -= len(keys)
        new = self._index.adopt(
            np.array(message.slots, dtype=np.int64),
            np.array(generations, dtype=np.uint32),
            keys,
            np.array(message.crcs, dtype=np.uint32),
            pin=alive,
        )
        request.status.update(dict.fromkeys(keys, LOADED))
        request.sources.update(dict.fromkeys(keys, message.tier))
        if alive and all(new):
            self._held(keys, message.slots, generations, request, now)
        elif alive:
            mine = [i for i, came in enumerate(new) if came]
            self._held(
                [keys[i] for i in mine],
                [message.slots[i] for i in mine],
                [generations[i] for i in mine],
                request,
                now,
            )
            # Where the key had come by another way meanwhile, that slot is held instead.
            others = [key for key in keys if key not in request.held]
            _, states = self._index.lookup_batch(others)
            there = [key for key, state in zip(others, states, strict=True) if state == READY]
            self._hold(there, request, now)
        name = self._tiers[message.tier].name
        self._state.recorder.add("kvtier_lookup_chunks_total", len(keys), (name, "hit"))
        self._state.emit("stored", keys, name, "host")

    def _give_back(self, record: FindRecord, slots: Sequence[int], ended: bool = False) -> None:
        if slots:
            if len(slots) == len(record.lent) and list(record.lent) == slots:
                # All at once: a prompt that no tier has.
                lent = list(record.lent.values())
                record.lent.clear()
            else:
                lent = [record.lent.pop(slot) for slot in slots]
            generations = np.array(lent, dtype=np.uint32)
            array = np.array(slots, dtype=np.int64)
            if record.stale:
                self._index.release(array, generations)
            else:
                self._index.give_back(array, generations)
                self.lent -= len(slots)
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
            record.wants += len(message.slots)
            record.granted -= len(message.slots)
            self._enter_line(record)
        if isinstance(message, m.Find):
            record.ended = True
            record.request.finds.discard(record.job)
            self._leave_line(record)
            record.request.status.update(dict.fromkeys(record.keys, GONE))
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
            self._give_back(record, list(record.lent))
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
                self.lent -= len(record.lent)
                record.stale = True


def _give_up(record: FindRecord) -> None:
    """What a find has not settled is not to be had."""
    status = record.request.status
    for key in record.keys:
        if status.get(key) == ASKED:
            status[key] = GONE
    record.request.news()
