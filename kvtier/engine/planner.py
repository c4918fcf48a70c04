# SPDX-License-Identifier: Apache-2.0
"""The planner: which chunk goes where and when. Decisions only, on the time it is given.

Called by the owner's thread. Owns the requests, the job records and the tiers' budgets; produces
messages in ``out`` and takes the service's answers. Does no I/O, reads no clock, never waits.
Invariants: a lent slot is in exactly one ``FindRecord.lent``; a held pin in exactly one
``Request.held``; held and lent together stay within ``hold_limit``.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier._core.index import Index, Reservation
from kvtier._core.slots import READY, WRITING, SlotTable
from kvtier.config import Config, TierConfig
from kvtier.engine.requests import ASKED, COMING, GONE, LOADED, Request
from kvtier.engine.transfers import CascadeRecord, FindRecord
from kvtier.engine.verifier import Verifier
from kvtier.errors import InternalError
from kvtier.obs.events import Operation
from kvtier.obs.metrics import Recorder
from kvtier.runtime import messages as m
from kvtier.types import Geometry, Lookup, Outcome, RequestContext, TierMatch, key_group

log = logging.getLogger(__name__)

MAX_TRIES = 10
"""How often a tier may refuse a chunk before it is not offered there again."""

RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
"""Pause after the first refusal, doubled with each further one."""

PATIENCE = 3
"""A request in the line for slots takes what there is after this part of the load timeout."""

HOLD_SECONDS = 10.0
"""How long chunks stay held for a request that does not come back for them."""

Emit = Callable[[Operation, Sequence[bytes], str | None, str | None], None]
"""``emit(operation, keys, source, destination)``."""


class TierState:
    """What the owner knows of one tier."""

    __slots__ = (
        "backlog",
        "bound_bytes",
        "cause",
        "config",
        "inflight_bytes",
        "locality",
        "medium",
        "name",
        "readable",
        "refused",
        "retry_at",
        "writable",
    )

    def __init__(
        self, config: TierConfig, medium: str, locality: str, bound_bytes: int, capacity: int
    ) -> None:
        self.config = config
        self.name = config.name
        self.medium = medium
        self.locality = locality
        self.cause = ""
        self.readable = False
        self.writable = False
        self.inflight_bytes = 0
        self.bound_bytes = bound_bytes
        self.backlog: deque[bytes] = deque(maxlen=capacity)
        """Chunks put off at the bound; offered again as it allows."""
        self.refused: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """Chunks the tier did not take: how often, and when it is asked again (then they are in
        the backlog as well). Bounded like the backlog."""
        self.retry_at = math.inf
        """When the first of them is due."""

    @property
    def takes_all(self) -> bool:
        """Whether ``admits`` is True whatever the chunk."""
        return self.config.groups is None and not self.config.min_prefix_tokens

    def admits(self, key: bytes, group: int, request: Request | None) -> bool:
        """Whether the tier wants this chunk, of that KV cache group, at all."""
        groups = self.config.groups
        if groups is not None and group not in groups:
            return False
        if self.config.min_prefix_tokens and request is not None:
            position = request.context.positions.get(key)
            return position is None or position >= self.config.min_prefix_tokens
        return True

    def allowed(self, matches: Sequence[TierMatch] | None) -> bool:
        """Whether a request with this filter may load from it."""
        return matches is None or any(
            (match.medium is None or match.medium == self.medium)
            and (match.locality is None or match.locality == self.locality)
            for match in matches
        )


class Planner:
    """Decides for all requests and tiers of one region.

    Parameters
    ----------
    index : Index
    slots : SlotTable
    geometry : Geometry
    config : Config
    tiers : sequence of TierState
    recorder : Recorder
    emit : callable
        Takes events.
    """

    def __init__(
        self,
        index: Index,
        slots: SlotTable,
        geometry: Geometry,
        config: Config,
        tiers: Sequence[TierState],
        recorder: Recorder,
        emit: Emit,
    ) -> None:
        self.index = index
        self.out: list[m.ToService] = []
        self.tiers = list(tiers)
        self.requests: dict[str, Request] = {}
        self.finds: dict[int, FindRecord] = {}
        self.cascades: dict[int, CascadeRecord] = {}
        self.held = 0
        self.lent = 0
        self.reset_pending = False
        self._slots = slots
        self._geometry = geometry
        self._config = config
        self._recorder = recorder
        self._emit = emit
        self._payload_bytes = geometry.payload_bytes
        self._windows = [group.window_chunks for group in geometry.groups]
        self._has_windows = any(window is not None for window in self._windows)
        self._load_seconds = max((tier.config.load_seconds for tier in tiers), default=1.0)
        self._thresholds = any(tier.config.store_threshold > 1 for tier in tiers)
        self._offers: OrderedDict[bytes, int] = OrderedDict()  # bounded by twice the capacity
        self.verifier = Verifier(config.verify_host, index, slots, recorder)
        # Whether there is anything to say to a service at all.
        self._active = bool(self.tiers) or self.verifier.active
        self._job = 0
        self._request_number = 0
        self._asking: dict[str, Request] = {}  # requests with fresh keys
        self._touched: dict[str, Request] = {}  # requests with hits in this step
        self._line: list[FindRecord] = []  # finds that want slots, those of older requests first
        self._stored: list[tuple[list[bytes], Request | None]] = []
        # A reset that the service could not take: without it, it would go on serving what is void.
        self._unsent_reset: m.Reset | None = None
        self._cleared_to = -1  # position of the clean-up after a dead service; -1: none
        self._windowed: list[Request] = []  # requests with a count in ``window_left``
        self._expires_at = math.inf  # nothing that is held or asked for expires before
        self._takes_all = not self._thresholds and all(tier.takes_all for tier in tiers)

    # --- requests ---

    @property
    def hold_limit(self) -> int:
        """Slots that held and lent ones may take together."""
        limit = self._config.max_hold_bytes // self._geometry.slot_bytes
        return max(1, min(limit, self.index.capacity - 1))

    def request(self, context: RequestContext) -> Request:
        """The record of a request, made on first sight."""
        request = self.requests.get(context.request_id)
        if request is None:
            tiers = [i for i, t in enumerate(self.tiers) if t.allowed(context.load_tiers)]
            self._request_number += 1
            request = self.requests[context.request_id] = Request(
                context, tiers, self._request_number
            )
        return request

    def absent(self, key: bytes, state: int, request: Request, now: float) -> Lookup:
        """Answer for a key that is not READY in host memory (`state` is the index's)."""
        if request.wait_until is not None and now >= request.wait_until:
            return Lookup.MISS
        status = request.status.get(key)
        if status is None:
            if state == 1:
                return self._wait(request, now, Lookup.HIT_PENDING)
            if not self._may_ask(key, request):
                request.status[key] = GONE
                return Lookup.MISS
            request.status[key] = ASKED
            request.fresh.append(key)
            self._asking[request.context.request_id] = request
            return self._wait(request, now, Lookup.RETRY)
        if state == 1 and status != GONE:
            return self._wait(request, now, Lookup.HIT_PENDING)
        if status == ASKED:
            return self._wait(request, now, Lookup.RETRY)
        if status == COMING:
            return self._wait(request, now, Lookup.HIT_PENDING)
        # GONE, or LOADED and evicted since: loading it once more would be thrash.
        return Lookup.MISS

    def absent_batch(
        self, keys: Sequence[bytes], states: bytes, start: int, request: Request, now: float
    ) -> Lookup:
        """Answer for the keys from `start` on, the first of which is not READY: that of the first
        one that will come, MISS if none will or all after it are there."""
        answer = Lookup.MISS
        status = request.status
        waits = request.wait_until is not None and now < request.wait_until
        ready: list[bytes] = []
        for i in range(start, len(keys)):
            key = keys[i]
            state = states[i]
            if state == READY:
                ready.append(key)
                continue
            # The common cases of ``absent``, without a call for each key of a prompt that waits.
            known = status.get(key) if waits else GONE
            if known == ASKED and not state:
                one = Lookup.RETRY
            elif known in (ASKED, COMING):
                one = Lookup.HIT_PENDING
            else:
                one = self.absent(key, state, request, now)
                if one is Lookup.MISS:
                    break
                waits = True
            if answer is Lookup.MISS:
                answer = one
        if ready:
            self.hit(ready, request)
        return answer

    def _may_ask(self, key: bytes, request: Request) -> bool:
        for i in request.tiers:
            if self.tiers[i].readable:
                break
        else:
            return False
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

    def _wait(self, request: Request, now: float, answer: Lookup) -> Lookup:
        """`answer`, with the request's deadline running from its first one of this kind."""
        if request.wait_until is None:
            request.load_until = now + self._load_seconds
            request.wait_until = min(now + self._config.lookup_timeout_seconds, request.load_until)
        return answer

    def _progress(self, request: Request, now: float) -> None:
        """The request's answers are under way: its deadline starts anew, up to that of the load."""
        if request.wait_until is not None and now < request.wait_until:
            request.wait_until = min(now + self._config.lookup_timeout_seconds, request.load_until)

    def verify(self, key: bytes, request: Request, now: float) -> Lookup:
        """Answer for a READY key that has to be compared with its checksum first."""
        if request.wait_until is not None and now >= request.wait_until:
            return Lookup.MISS
        self.verifier.ask(key, request)
        return self._wait(request, now, Lookup.RETRY)

    def hit(self, keys: Sequence[bytes], request: Request) -> None:
        """`keys` were answered HIT."""
        request.hits.extend(keys)
        self._touched[request.context.request_id] = request

    def _hold_hits(self, request: Request, now: float) -> None:
        """Pin what a deferred request was told it could have, as far as the bound allows.

        Not for a request that stands in the line for slots behind another.
        """
        if self._line and request.finds and self._line[0].request is not request:
            for record in self._line:
                if record.request is request:
                    return
        keys = [key for key in dict.fromkeys(request.hits) if key not in request.held]
        room = self.hold_limit - self.held - self.lent
        keys = [key for key in keys[: max(0, room)] if self.index.lookup(key) == 2]
        self._hold(keys, request, now)

    def _hold(self, keys: Sequence[bytes], request: Request, now: float) -> None:
        if not keys:
            return
        slots, generations = self.index.pin(keys)
        for key, slot, generation in zip(keys, slots.tolist(), generations.tolist(), strict=True):
            request.held[key] = (slot, generation)
        self.held += len(keys)
        request.hold_until = now + HOLD_SECONDS
        self._expires_at = min(self._expires_at, request.hold_until)

    def release(self, request: Request, keys: Iterable[bytes] | None = None) -> None:
        """Give holds of a request back: those of `keys`, or all."""
        if not request.held:
            return
        if keys is None:
            pins = list(request.held.values())
            request.held.clear()
        else:
            pins = [request.held.pop(key) for key in keys if key in request.held]
        if pins:
            self.index.unpin(
                np.array([slot for slot, _ in pins], dtype=np.int64),
                np.array([generation for _, generation in pins], dtype=np.uint32),
            )
            self.held -= len(pins)

    def finish(self, context: RequestContext) -> None:
        """The request has ended: touch what it used, prefix first, and forget it."""
        request = self.requests.pop(context.request_id, None)
        if request is None:
            return
        self._count(request)
        self.release(request)
        self._asking.pop(context.request_id, None)
        self._touched.pop(context.request_id, None)
        for job in request.finds:
            self.out.append(m.Cancel(job))
            # What it still wanted nobody wants now.
            self._leave_line(self.finds[job])
        keys = list(request.used)
        positions = context.positions
        if positions and request.used.keys() <= positions.keys():
            keys.sort(key=positions.__getitem__)
        self.index.touch(keys)

    def _count(self, request: Request) -> None:
        """Host hits and misses of the keys looked up in this step, each once a request."""
        counted = request.counted
        before = len(counted)
        # First those that were not there: later they may be, promoted.
        counted.update(request.status)
        misses = len(counted) - before
        counted.update(request.hits)
        hits = len(counted) - before - misses
        request.hits.clear()
        if hits:
            self._recorder.add("kvtier_lookup_chunks_total", hits, ("host", "hit"))
        if misses:
            self._recorder.add("kvtier_lookup_chunks_total", misses, ("host", "miss"))

    # --- storing ---

    def evicted(self, keys: Sequence[bytes], unsaved: Sequence[bytes]) -> None:
        """Chunks have left host memory for others."""
        if not keys:
            return
        self._recorder.add("kvtier_evicted_total", len(keys))
        if unsaved:
            self._recorder.add("kvtier_evicted_unsaved_total", len(unsaved))
        self._emit("removed", keys, "host", None)

    def reserve(self, keys: Sequence[bytes], request: Request) -> Reservation:
        """Slots for new chunks of a request."""
        reservation = self.index.reserve(keys)
        self.evicted(reservation.evicted, reservation.evicted_unsaved)
        request.use(keys)
        if self._thresholds:
            self._offer(keys, request)
        return reservation

    def _offer(self, keys: Sequence[bytes], request: Request) -> None:
        """Count offers; what is in host memory and has now been offered often enough goes out."""
        due = []
        for key in keys:
            offers = self._offers[key] = self._offers.pop(key, 0) + 1
            if any(tier.config.store_threshold == offers > 1 for tier in self.tiers):
                due.append(key)
        while len(self._offers) > 2 * self.index.capacity:
            self._offers.popitem(last=False)
        due = [key for key in due if self.index.lookup(key) == 2]
        if due:
            self._stored.append((due, request))

    def commit(self, keys: Sequence[bytes], request: Request | None) -> list[bytes]:
        """Chunks are in host memory; they go to the tiers at the next flush."""
        stored = self.index.commit(keys)
        if stored:
            self._emit("stored", stored, None, "host")
            if self._active:
                self._stored.append((stored, request))
        return stored

    def _flush_cascades(self, now: float) -> None:
        stored, self._stored = self._stored, []
        for keys, request in stored:
            if self._all_fit(keys):
                self._cascade(keys, list(range(len(self.tiers))), request, now)
                continue
            batches: dict[tuple[int, ...], list[bytes]] = {}
            for key in keys:
                group = key_group(key)
                length = self._payload_bytes[group]
                chosen = []
                for i, tier in enumerate(self.tiers):
                    threshold = tier.config.store_threshold
                    if threshold > 1 and self._offers.get(key, 0) != threshold:
                        # Before: too early. Beyond: it went out when the threshold was reached.
                        continue
                    if threshold == 1 and self._thresholds and self._offers.get(key, 1) > 1:
                        continue
                    if not tier.admits(key, group, request):
                        continue
                    if tier.backlog or not self._fits(tier, length):
                        self._put_off(tier, key)
                        continue
                    tier.inflight_bytes += length
                    chosen.append(i)
                if chosen or (self.verifier.active and self._cleared_to < 0):
                    # Without a tier that takes it: only for its checksum.
                    batches.setdefault(tuple(chosen), []).append(key)
            for tiers, batch in batches.items():
                self._cascade(batch, list(tiers), request, now)
        for i, tier in enumerate(self.tiers):
            if now >= tier.retry_at:
                self._offer_refused(tier, now)
            if not tier.backlog:
                continue
            batch = []
            while tier.backlog and tier.writable:
                key = tier.backlog[0]
                length = self._payload_bytes[key_group(key)]
                if self.index.lookup(key) != 2:
                    # Evicted, reset or dropped meanwhile: this tier never gets it.
                    tier.backlog.popleft()
                    tier.refused.pop(key, None)
                    self._drop(tier, 1, "bound")
                    continue
                if not self._fits(tier, length):
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
        for tier in self.tiers:
            if tier.backlog or not tier.writable:
                return False
            if tier.inflight_bytes + length_bytes > tier.bound_bytes:
                return False
        for tier in self.tiers:
            tier.inflight_bytes += length_bytes
        return True

    def _length_bytes(self, keys: Sequence[bytes]) -> int:
        """Payload bytes of chunks."""
        payload_bytes = self._payload_bytes
        if len(payload_bytes) == 1:
            return payload_bytes[0] * len(keys)
        return sum(payload_bytes[key_group(key)] for key in keys)

    def _fits(self, tier: TierState, length: int) -> bool:
        if not tier.writable or self._cleared_to >= 0:
            return False
        return tier.inflight_bytes == 0 or tier.inflight_bytes + length <= tier.bound_bytes

    def _put_off(self, tier: TierState, key: bytes) -> None:
        if tier.config.backpressure == "drop":
            self._drop(tier, 1, "bound" if tier.writable else "breaker")
            return
        if len(tier.backlog) == tier.backlog.maxlen:
            self._drop(tier, 1, "bound")
        tier.backlog.append(key)
        self._recorder.add("kvtier_deferred_chunks_total", 1, (tier.name,))

    def _offer_refused(self, tier: TierState, now: float) -> None:
        tier.retry_at = math.inf
        for key, (tries, due) in tier.refused.items():
            if now >= due > 0:
                tier.refused[key] = (tries, 0.0)
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
        self._recorder.add("kvtier_dropped_chunks_total", chunks, (tier.name, reason))

    def _cascade(
        self, keys: list[bytes], tiers: list[int], request: Request | None, now: float
    ) -> None:
        """Send chunks whose in-flight bytes have been counted already."""
        pinned, slots, generations = self.index.pin_for_service(keys)
        length_bytes = self._length_bytes(pinned)
        if len(pinned) != len(keys):
            lost_bytes = self._length_bytes(keys) - length_bytes
            for i in tiers:
                self.tiers[i].inflight_bytes -= lost_bytes
        if not pinned:
            return
        self._job += 1
        record = CascadeRecord(
            self._job, pinned, slots.tolist(), generations.tolist(), length_bytes, tiers, now
        )
        self.cascades[record.job] = record
        timeout = max((self.tiers[i].config.store_seconds for i in tiers), default=30.0)
        self.out.append(
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

    # --- loading ---

    def _flush_finds(self, now: float) -> None:
        asking, self._asking = self._asking, {}
        for request in asking.values():
            fresh, request.fresh = request.fresh, []
            tiers = [i for i in request.tiers if self.tiers[i].readable]
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
                    continue
                self._find(request, keys, windowed, tiers, now)

    def _find(
        self, request: Request, keys: list[bytes], windowed: bool, tiers: list[int], now: float
    ) -> None:
        assert request.wait_until is not None
        self._job += 1
        record = FindRecord(self._job, request, keys, now, request.load_until)
        self.finds[record.job] = record
        self._expires_at = min(self._expires_at, record.deadline)
        request.finds.add(record.job)
        slots: list[int] = []
        generations: list[int] = []
        if not self._line:
            # Slots kept free ahead: loading starts with the presence check. While others wait for
            # slots it is presence only, or many requests would hold a part each and none a whole.
            slots, generations = self._lend(record, len(keys))
        self.out.append(
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
        slots, generations = self.index.lend(n)
        pairs = list(zip(slots.tolist(), generations.tolist(), strict=True))
        record.lent.update(pairs)
        record.granted += len(pairs)
        self.lent += len(pairs)
        return [slot for slot, _ in pairs], [generation for _, generation in pairs]

    def _leave_line(self, record: FindRecord) -> None:
        if record in self._line:
            self._line.remove(record)

    def _flush_wants(self, now: float) -> None:
        """Lend slots to the finds that know what they need, oldest first."""
        for record in self._line:
            self._progress(record.request, now)
        for record in list(self._line):
            room = self.hold_limit - self.held - self.lent
            mine = len(record.lent) + len(record.request.held)
            # What others in the line hold does not come back while they wait, perhaps for this one.
            waiting = {one.request for one in self._line if one.request is not record.request}
            stuck = sum(len(request.held) for request in waiting)
            others = self.held + self.lent - mine - stuck
            late = now >= record.wanted_since + self._load_seconds / PATIENCE
            if room < record.wants and others > self.hold_limit // 4 and not late:
                # It waits for those before it rather than take a part of what it needs; the ones
                # behind it wait with it, so that it is not starved.
                return
            n = min(record.wants, room)
            if n > 0:
                shortage = n - self.index.num_free
                if shortage > 0:
                    self.evicted(self.index.keep_free(n, limit=shortage), ())
                slots, generations = self._lend(record, n)
                if slots:
                    self.out.append(m.Lend(record.job, slots, generations))
                record.wants -= len(slots)
            if record.wants > 0:
                # A prompt larger than the bound gets its prefix; the rest is a miss.
                self.out.append(m.NoMoreSlots(record.job))
                self._recorder.add("kvtier_hold_refused_total", record.wants)
            self._line.remove(record)

    # --- answers ---

    def take(self, message: m.ToOwner, now: float) -> None:
        """An answer of the service."""
        match message:
            case m.Found():
                self._found(message, now)
            case m.Stored():
                self._stored_answer(message, now)
            case m.Verified():
                requests, dropped = self.verifier.take(message)
                for request in requests:
                    self._progress(request, now)
                if dropped:
                    self._emit("removed", dropped, "host", None)
            case m.Returned():
                record = self.finds.get(message.job)
                if record is not None:
                    self._give_back(record, message.slots)
            case m.Health():
                self._health(message.tier, message.readable, message.writable, message.cause)
            case m.Ready():
                self.ready(message)
            case m.ResetDone():
                self.reset_pending = self._unsent_reset is not None
            case _:
                raise InternalError(f"the planner got {message!r}")

    def ready(self, message: m.Ready) -> None:
        """The service has opened its tiers."""
        for i, cause in enumerate(message.causes):
            self._health(i, not cause, not cause, cause)

    def _health(self, tier: int, readable: bool, writable: bool, cause: str) -> None:
        state = self.tiers[tier]
        if state.readable and not readable:
            log.warning("tier %s is down: %s", state.name, cause)
        state.readable, state.writable, state.cause = readable, writable, cause
        self._recorder.set("kvtier_tier_up", float(readable), (state.name,))

    def _found(self, message: m.Found, now: float) -> None:
        record = self.finds.get(message.job)
        if record is None:
            raise InternalError(f"news of job {message.job}, which has ended")
        if record.stale:
            self._give_back(record, [*message.slots, *message.unused], ended=message.final)
            return
        request = record.request
        alive = self.requests.get(request.context.request_id) is request
        keys = record.keys
        status = request.status
        in_time = request.wait_until is not None and now < request.wait_until
        self._progress(request, now)
        for i in message.present:
            if status.get(keys[i]) == ASKED:
                status[keys[i]] = COMING
        record.present += len(message.present)
        if message.loaded:
            self._adopt(record, message, alive and in_time, now)
        for i in (*message.absent, *message.failed):
            status[keys[i]] = GONE
        if message.absent:
            for tier in request.tiers:
                self._recorder.add(
                    "kvtier_lookup_chunks_total",
                    len(message.absent),
                    (self.tiers[tier].name, "miss"),
                )
        if message.final:
            self._leave_line(record)
            request.finds.discard(record.job)
        elif alive and message.present:
            wants = record.present - record.granted
            if wants > 0:
                record.wants = wants
                if record not in self._line:
                    record.wanted_since = now
                    # By request: one of which a part came back must not wait behind those that
                    # wait for what it holds.
                    insort(self._line, record, key=lambda one: (one.request.number, one.job))
                    if self._line[0].request is not request:
                        # Behind others: what it held would keep them, and so itself, waiting.
                        self.release(request)
        self._give_back(record, message.unused, ended=message.final)

    def _adopt(self, record: FindRecord, message: m.Found, alive: bool, now: float) -> None:
        """Loaded chunks become READY and are held for the request that waits for them."""
        request = record.request
        keys = [record.keys[i] for i in message.loaded]
        generations = [record.lent.pop(slot) for slot in message.slots]
        self.lent -= len(keys)
        self.index.adopt(
            np.array(message.slots, dtype=np.int64),
            np.array(generations, dtype=np.uint32),
            keys,
            np.array(message.crcs, dtype=np.uint32),
            saved=True,
        )
        for key in keys:
            request.status[key] = LOADED
            request.sources[key] = message.tier
        if alive:
            # Where the key had come by another way meanwhile, that slot is held instead.
            self._hold(
                [key for key in keys if key not in request.held and self.index.lookup(key) == 2],
                request,
                now,
            )
        name = self.tiers[message.tier].name
        self._recorder.add("kvtier_lookup_chunks_total", len(keys), (name, "hit"))
        self._emit("stored", keys, name, "host")

    def _give_back(self, record: FindRecord, slots: Sequence[int], ended: bool = False) -> None:
        if slots:
            generations = np.array([record.lent.pop(slot) for slot in slots], dtype=np.uint32)
            array = np.array(slots, dtype=np.int64)
            if record.stale:
                self.index.release(array, generations)
            else:
                self.index.give_back(array, generations)
                self.lent -= len(slots)
        record.ended = record.ended or ended
        if record.ended and not record.lent:
            del self.finds[record.job]

    def _stored_answer(self, message: m.Stored, now: float) -> None:
        record = self.cascades.get(message.job)
        if record is None:
            raise InternalError(f"news of job {message.job}, which has ended")
        if message.tier < 0:
            del self.cascades[record.job]
            return
        tier = self.tiers[message.tier]
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
            self.index.mark_saved(saved)
            self._emit("stored", saved, "host", tier.name)
        if not record.tiers:
            del self.cascades[record.job]

    # --- the step ---

    def flush(self, now: float) -> None:
        """End of a step: expire, lend, ask, cascade; messages are in ``out`` afterwards."""
        if not self._active:
            for request in self._touched.values():
                self._count(request)
            self._touched.clear()
            self.index.reap()
            return
        for request in list(self._touched.values()):
            if request.wait_until is not None and now < request.wait_until:
                self._hold_hits(request, now)
            self._count(request)
        self._touched.clear()
        self._expire(now)
        if self._unsent_reset is not None:
            self.out.append(self._unsent_reset)
            self._unsent_reset = None
        if self._cleared_to < 0 and not self.reset_pending:
            if self._line:
                self._flush_wants(now)
            if self._asking:
                self._flush_finds(now)
            self._flush_cascades(now)
            self._job += 1
            verify = self.verifier.flush(self._job)
            if verify is not None:
                self.out.append(verify)
        if self.tiers and self._config.promotion_slots:
            self.evicted(self.index.keep_free(self._config.promotion_slots), ())
        self.index.reap()

    def _expire(self, now: float) -> None:
        for request in self._windowed:
            request.window_left.clear()
        self._windowed.clear()
        if now < self._expires_at:
            return
        self._expires_at = math.inf
        for request in self.requests.values():
            if not request.held:
                continue
            if now < request.hold_until:
                self._expires_at = min(self._expires_at, request.hold_until)
                continue
            self._recorder.add("kvtier_hold_expired_total", len(request.held))
            self.release(request)
        for record in list(self.finds.values()):
            if record.ended:
                continue
            self._expires_at = min(self._expires_at, record.deadline)
            if now >= record.deadline:
                self._leave_line(record)
                for key in record.keys:
                    if record.request.status.get(key) in (ASKED, COMING):
                        record.request.status[key] = GONE

    def undeliverable(self, messages: Sequence[m.ToService]) -> None:
        """The service did not take these: undo what they handed over."""
        for message in messages:
            match message:
                case m.Find() | m.Lend():
                    record = self.finds[message.job]
                    if isinstance(message, m.Find):
                        record.ended = True
                        record.request.finds.discard(record.job)
                        self._leave_line(record)
                        record.request.status.update(dict.fromkeys(record.keys, GONE))
                    self._give_back(record, message.slots)
                    if record.ended and not record.lent:
                        self.finds.pop(record.job, None)
                case m.Cascade():
                    record_ = self.cascades.pop(message.job)
                    for slot, generation in zip(record_.slots, record_.generations, strict=True):
                        self._slots.unpin_service(slot, generation)
                    for i in record_.tiers:
                        self.tiers[i].inflight_bytes -= record_.length_bytes
                        for key in record_.keys:
                            self._put_off(self.tiers[i], key)
                case m.Verify():
                    self.verifier.undeliverable(message)
                case m.NoMoreSlots() | m.Cancel():
                    # Its find ends by its deadline all the same.
                    continue
                case m.Reset():
                    self._unsent_reset = message
                case _:
                    log.warning("the service does not take %s", type(message).__name__)

    # --- after the service's end ---

    def service_lost(self) -> None:
        """The service has ended and touches nothing any more: its jobs end as failed."""
        for record in list(self.finds.values()):
            record.ended = True
            if not record.stale:
                record.request.finds.discard(record.job)
                for key in record.keys:
                    if record.request.status.get(key) in (ASKED, COMING):
                        record.request.status[key] = GONE
            self._give_back(record, list(record.lent))
        self.finds.clear()
        self._line.clear()
        for cascade in self.cascades.values():
            for i in cascade.tiers:
                if not cascade.stale:
                    for key in cascade.keys:
                        self._put_off(self.tiers[i], key)
        self.cascades.clear()
        self.verifier.forget()
        for tier in self.tiers:
            tier.inflight_bytes = 0
            tier.readable = tier.writable = False
            self._recorder.set("kvtier_tier_up", 0.0, (tier.name,))
        # What it was told, its successor knows from the start.
        self.reset_pending = self._unsent_reset is not None
        self._cleared_to = 0

    def clear_pins(self, step: int = 65536) -> bool:
        """Take back the dead service's pins, a part a call. True when all are back."""
        if self._cleared_to < 0:
            return True
        stop = min(self._cleared_to + step, self._slots.num_slots)
        self._slots.clear_service_pins(self._cleared_to, stop)
        self._cleared_to = stop
        if stop < self._slots.num_slots:
            return False
        self._cleared_to = -1
        self.index.reap()
        return True

    def reset(
        self, namespace: dict[str, str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Forget everything; the service goes on with another namespace.

        Returns slots and generations that workers still write.
        """
        for request in self.requests.values():
            self.release(request)
            request.status.clear()
            request.fresh.clear()
            request.hits.clear()
            request.finds.clear()
            request.used.clear()
            request.sources.clear()
            request.verified.clear()
        self._asking.clear()
        self._touched.clear()
        self._line.clear()
        self._stored.clear()
        for tier in self.tiers:
            tier.backlog.clear()
            tier.refused.clear()
        for record in self.finds.values():
            if not record.stale:
                self.lent -= len(record.lent)
                record.stale = True
        for cascade in self.cascades.values():
            cascade.stale = True
        _, slots, generations = self.index.clear()
        self._emit("cleared", (), "" if self._config.on_reset == "new_epoch" else "host", None)
        if self._active:
            self.reset_pending = True
            self._unsent_reset = m.Reset(namespace)
        lent = {slot for record in self.finds.values() for slot in record.lent}
        written = [
            i
            for i, slot in enumerate(slots.tolist())
            if slot not in lent and self._slots.state(slot) == WRITING
        ]
        return slots[written], generations[written]
