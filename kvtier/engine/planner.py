# SPDX-License-Identifier: Apache-2.0
"""The planner: which chunk goes where and when. Decisions only, on the time it is given.

Called by the owner's thread. Owns the requests and the order of a step; what is asked, lent and
held is in ``loads``, what is cascaded in ``stores``, what is compared in ``verifier``. It calls
these, never they it. Produces messages in ``out`` and takes the service's answers. Does no I/O,
reads no clock, never waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvtier._core.chunks import ASKED, GONE
from kvtier._core.index import Index, Reservation
from kvtier._core.slots import WRITING, SlotTable
from kvtier.config import Config
from kvtier.engine.guests import Guests
from kvtier.engine.loads import Loads
from kvtier.engine.requests import Request
from kvtier.engine.state import Emit, State, TierState
from kvtier.engine.stores import Stores
from kvtier.engine.verifier import Verifier
from kvtier.errors import InternalError
from kvtier.obs.metrics import Recorder
from kvtier.runtime import messages as m
from kvtier.runtime.service import SAMPLES_SECONDS
from kvtier.types import Geometry, Lookup, RequestContext

log = logging.getLogger(__name__)

_ANSWERS = tuple(Lookup)
"""By number, without a call."""

SILENCE_SECONDS = 2 * SAMPLES_SECONDS
"""A service that has been asked and is silent for so long hangs: it sends samples if nothing else.
The lookup timeout counts, if that is longer."""


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
        self.state = State(index, slots, geometry, config, tiers, recorder, emit)
        self.verifier = Verifier(config.verify_host, index, slots, recorder)
        self.loads = Loads(self.state)
        self.stores = Stores(self.state, checksums=self.verifier.active)
        self.guests = Guests(self.state)
        self.requests: dict[str, Request] = {}
        self.reset_pending = False
        self._index = index
        self._tiers = self.state.tiers
        self._recorder = recorder
        # Whether there is anything to say to a service at all.
        self._active = bool(tiers) or self.verifier.active
        self._request_number = 0
        self._free_ahead = config.promotion_slots if tiers else 0
        self._size_groups = geometry.size_groups
        self._touched: dict[str, Request] = {}  # requests with hits in this step
        # A reset that the service could not take: without it, it would go on serving what is void.
        self._unsent_reset: m.Reset | None = None
        self._service_up = False
        self._silence_seconds = max(config.lookup_timeout_seconds, SILENCE_SECONDS)
        # What was known of the tiers when the service fell silent; empty while it talks.
        self._before_silence: list[tuple[bool, str]] = []
        self._cleared_to = -1  # position of the clean-up after a dead service; -1: none

    def take_out(self) -> list[m.ToService]:
        """Messages to send now, in order."""
        out, self.state.out = self.state.out, []
        return out

    @property
    def idle(self) -> bool:
        """No job is under way and nothing waits to be sent."""
        return not (
            self.loads.finds
            or self.stores.cascades
            or self.stores.waiting
            or self.verifier.jobs
            or self.state.out
            or self.reset_pending
            or any(tier.backlog and tier.writable for tier in self._tiers)
        )

    def request(self, context: RequestContext) -> Request:
        """The record of a request, made on first sight."""
        request = self.requests.get(context.request_id)
        if request is None:
            tiers = [
                i
                for i, tier in enumerate(self._tiers)
                if tier.allowed(context.load_tiers) and tier.serves(context.peer)
            ]
            self._request_number += 1
            request = self.requests[context.request_id] = Request(
                context, tiers, self._request_number, self._index
            )
            if context.serves and self._tiers:
                self.state.out.append(m.Serve(context.serves, ended=False))
        return request

    def absent(self, key: bytes, state: int, request: Request, now: float) -> Lookup:
        """Answer for a key that is not READY in host memory (`state` is the index's)."""
        if request.wait_until is not None and now >= request.wait_until:
            return Lookup.MISS
        status = request.chunks.status(key)
        if state == WRITING and status != GONE:
            answer = Lookup.HIT_PENDING
        elif not status:
            request.chunks.pick_one(key)
            if not self.loads.ask([key], request):
                return Lookup.MISS
            answer = Lookup.RETRY
        elif status == ASKED:
            answer = Lookup.RETRY
        else:
            # GONE, or LOADED and evicted since: loading it once more would be thrash.
            return Lookup.MISS
        if request.wait_until is None:
            self.loads.wait(request, now)
        return answer

    def look(self, keys: Sequence[bytes], request: Request, now: float) -> tuple[int, Lookup]:
        """Length of the prefix that is READY in host memory, and the answer for what follows: that
        of the first one that will come, MISS if none will or all after it are there."""
        ready, same = request.chunks.look(keys)
        if same and request.answered and self._same_again(request, now):
            return request.answer
        request.answered = False
        self._touched[request.context.request_id] = request
        if ready == len(keys):
            request.chunks.hit_all()
            return ready, Lookup.MISS
        return ready, self._walk(ready, request, now)

    def _walk(self, ready: int, request: Request, now: float) -> Lookup:
        """The answer for what follows the first `ready` keys of the request's batch."""
        chunks = request.chunks
        waits = request.wait_until is None or now < request.wait_until
        if waits:
            unknown = chunks.pick()
            if unknown:
                self.loads.ask(unknown, request)
        answer = _ANSWERS[chunks.answer(waits)]
        if answer is not Lookup.MISS:
            self.loads.wait(request, now)
            request.answered, request.answer = True, (ready, answer)
            if not chunks.holdable or not self.loads.could_hold(request):
                self.loads.settle(request, now)
        return answer

    def _same_again(self, request: Request, now: float) -> bool:
        """Whether the last answer holds, all states being what they were, and nothing more can be
        held."""
        if request.wait_until is None or now >= request.wait_until:
            return False
        if request.answer_until:
            self.loads.settle(request, now)  # all is held already
            return True
        return not self.loads.could_hold(request)

    def verify(self, key: bytes, request: Request, now: float) -> Lookup:
        """Answer for a READY key that has to be compared with its checksum first."""
        if request.wait_until is not None and now >= request.wait_until:
            return Lookup.MISS
        if not self._service_up:
            # Nobody is there to compare it; host memory serves all the same.
            self._recorder.add("kvtier_verified_chunks_total", 1, ("unchecked",))
            request.verified.add(key)
            self.hit(key, request)
            return Lookup.HIT
        self.verifier.ask(key, request)
        self.loads.wait(request, now)
        return Lookup.RETRY

    def hit(self, key: bytes, request: Request) -> None:
        """`key` was answered HIT, asked for by itself."""
        request.hits.append(key)
        self._touched[request.context.request_id] = request

    def use(self, keys: Sequence[bytes], context: RequestContext) -> None:
        """`keys` have been pinned for the request's load: they need no hold any more."""
        request = self.request(context)
        request.use(keys)
        self.loads.release(request, keys)

    def reserve(
        self, keys: Sequence[bytes], request: Request, offered: Sequence[bytes] | None = None
    ) -> Reservation:
        """Slots for new chunks of a request."""
        return self.stores.reserve(keys, request, offered)

    def commit(self, keys: Sequence[bytes], context: RequestContext) -> list[bytes]:
        """Chunks are in host memory; they go to the tiers at the next flush."""
        return self.stores.commit(keys, self.requests.get(context.request_id))

    def finish(self, context: RequestContext, used: dict[bytes, int] | None = None) -> None:
        """The request has ended: touch what it used, suffix before prefix, and forget it."""
        request = self.requests.pop(context.request_id, None)
        if request is None:
            return
        request.ended = True
        self._count(request)
        self._touched.pop(context.request_id, None)
        self.loads.finish(request)
        if context.serves and self._tiers:
            self.state.out.append(m.Serve(context.serves, ended=True))
        if used is None:
            keys, positions = list(chain.from_iterable(request.used)), context.positions
        else:
            keys, positions = list(used), used
        self._index.touch(keys, positions)

    def _count(self, request: Request) -> None:
        """Host hits and misses of the keys looked up in this step, each once a request."""
        self._note_hits(request)
        hits, misses = request.chunks.count()
        if hits:
            self._recorder.add("kvtier_lookup_chunks_total", hits, ("host", "hit"))
        if misses:
            self._recorder.add("kvtier_lookup_chunks_total", misses, ("host", "miss"))

    def _note_hits(self, request: Request) -> None:
        if request.hits:
            request.chunks.note(request.hits)
            request.hits.clear()

    def take(self, message: m.ToOwner, now: float) -> None:
        """An answer of the service."""
        match message:
            case m.Found():
                self.loads.take(message, now)
            case m.Stored():
                self.stores.take(message, now)
            case m.Verified():
                requests, dropped = self.verifier.take(message)
                for request in requests:
                    self.loads.progress(request, now)
                if dropped:
                    self.state.emit("removed", dropped, "host", None)
            case m.Contents():
                contents = self._tiers[message.tier].contents
                contents.take(message, self.stores.under_way(message.tier))
            case m.Returned():
                self.loads.returned(message)
            case m.Left():
                self.guests.take(message)
            case m.Health():
                self._health(message.tier, message.readable, message.writable, message.cause)
            case m.Ready():
                self._service_up = True
                for tier in self._tiers:
                    tier.contents.forget()
                for i, cause in enumerate(message.causes):
                    self._health(i, not cause, not cause, cause)
            case m.ResetDone():
                self.reset_pending = self._unsent_reset is not None
            case _:
                raise InternalError(f"the planner got {message!r}")

    def listen(self, heard: bool, now: float) -> None:
        """Whether the service has said anything at all since the last call. While one that hangs
        says nothing, its tiers are not asked: no further request waits for it."""
        if heard:
            self.loads.asked_at = math.inf
            before, self._before_silence = self._before_silence, []
            if before:
                log.info("the tier service answers again")
            for i, (readable, cause) in enumerate(before):
                self._health(i, readable, self._tiers[i].writable, cause)
        elif now >= self.loads.asked_at + self._silence_seconds and not self._before_silence:
            self._before_silence = [(tier.readable, tier.cause) for tier in self._tiers]
            for i, tier in enumerate(self._tiers):
                self._health(i, False, tier.writable, "the tier service does not answer")

    def _health(self, tier: int, readable: bool, writable: bool, cause: str) -> None:
        state = self._tiers[tier]
        if state.readable and not readable:
            log.warning("tier %s is down: %s", state.name, cause)
        state.readable, state.writable, state.cause = readable, writable, cause
        self._recorder.set("kvtier_tier_up", float(readable and writable), (state.name,))

    def flush(self, now: float) -> None:
        """End of a step: expire, lend, ask, cascade; messages are in ``state.out`` afterwards."""
        if not self._active:
            for request in self._touched.values():
                self._count(request)
            self._touched.clear()
            self._index.reap()
            return
        self.loads.expire(self.requests.values(), now)
        for request in self._touched.values():
            if request.wait_until is not None and now < request.wait_until:
                self._note_hits(request)
                self.loads.hold_hits(request, now)
            self._count(request)
        self._touched.clear()
        if self._unsent_reset is not None:
            self.state.out.append(self._unsent_reset)
            self._unsent_reset = None
        if self._service_takes:
            self.loads.flush(now)
            self.stores.flush(now, not self.requests)
            self.guests.flush()
            if self.verifier.active:
                verify = self.verifier.flush(self.state.next_job())
                if verify is not None:
                    self.state.out.append(verify)
        evicted = self._index.end_step(self._size_groups, self._free_ahead)
        if evicted:
            self.state.evicted(evicted)

    def flush_stores(self, now: float) -> None:
        """Cascade what was just committed, and what there is room for by now; everything else
        waits for the end of the step."""
        if self._active and self._service_takes:
            self.stores.flush(now, not self.requests)

    @property
    def _service_takes(self) -> bool:
        """Not while a dead service's pins are cleared up, nor while a reset is under way."""
        return self._cleared_to < 0 and not self.reset_pending

    def undeliverable(self, messages: Sequence[m.ToService]) -> None:
        """The service did not take these: undo what they handed over."""
        for message in messages:
            match message:
                case m.Find() | m.Lend():
                    self.loads.undeliverable(message)
                case m.Cascade():
                    self.stores.undeliverable(message)
                case m.Verify():
                    self.verifier.undeliverable(message)
                case m.NoMoreSlots():
                    self.loads.undeliverable(message)
                case m.Host() | m.Reclaim():
                    self.guests.undeliverable(message)
                case m.Cancel() | m.Serve():
                    # Its find, or the peer that waits, ends by its deadline all the same.
                    continue
                case m.Reset():
                    self._unsent_reset = message
                case _:
                    log.warning("the service does not take %s", type(message).__name__)

    def service_lost(self) -> None:
        """The service has ended and touches nothing any more: its jobs end as failed."""
        self._service_up = False
        self._before_silence = []
        self.loads.service_lost()
        self.stores.service_lost()
        self.guests.service_lost()
        self.verifier.forget()
        for tier in self._tiers:
            tier.readable = tier.writable = False
            tier.contents.forget()
            self._recorder.set("kvtier_tier_up", 0.0, (tier.name,))
        # What it was told, its successor knows from the start.
        self.reset_pending = self._unsent_reset is not None
        self._cleared_to = 0

    def clear_pins(self, step: int = 65536) -> bool:
        """Take back the dead service's pins, a part a call. True when all are back."""
        if self._cleared_to < 0:
            return True
        slots = self.state.slots
        stop = min(self._cleared_to + step, slots.num_slots)
        slots.clear_service_pins(self._cleared_to, stop)
        self._cleared_to = stop
        if stop < slots.num_slots:
            return False
        self._cleared_to = -1
        self._index.reap()
        return True

    def reset(
        self, namespace: dict[str, str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Forget everything; the service goes on with another namespace.

        Returns slots and generations that workers still write.
        """
        self.loads.reset(self.requests.values())
        self.stores.reset()
        guests = set(self.guests.lent)
        self.guests.reset()
        self.verifier.reset()
        for request in self.requests.values():
            request.forget()
        self._touched.clear()
        _, slots, generations = self._index.clear()
        cleared = "" if self.state.config.on_reset == "new_epoch" else "host"
        self.state.emit("cleared", (), cleared, None)
        if self._active:
            self.reset_pending = True
            self._unsent_reset = m.Reset(namespace)
        lent = {slot for record in self.loads.finds.values() for slot in record.lent} | guests
        written = [
            i
            for i, slot in enumerate(slots.tolist())
            if slot not in lent and self.state.slots.state(slot) == WRITING
        ]
        return slots[written], generations[written]

    def check(self) -> None:
        """Compare the accounts with what they are of; InternalError where they differ."""
        loads = self.loads
        held = sum(request.chunks.num_held for request in self.requests.values())
        if held != loads.held:
            raise InternalError(f"{held} chunks are held, {loads.held} counted")
        lent = sum(len(find.lent) for find in loads.finds.values() if not find.stale)
        guests = len(self.guests.lent)
        if lent != loads.lent or lent + guests != self._index.num_lent:
            raise InternalError(
                f"{lent} slots are lent for loads, {loads.lent} counted; with {guests} for peers "
                f"{self._index.num_lent} indexed"
            )
        taken = sum(request.chunks.held_slots for request in self.requests.values()) + sum(
            len(find.lent) * self.state.geometry.widths[find.group]
            for find in loads.finds.values()
            if not find.stale
        )
        if taken != loads.taken_slots:
            raise InternalError(f"{taken} slots are held or lent, {loads.taken_slots} counted")
        cascades = self.stores.cascades.values()
        for i, tier in enumerate(self._tiers):
            inflight = sum(cascade.length_bytes for cascade in cascades if i in cascade.tiers)
            if inflight != tier.inflight_bytes:
                raise InternalError(
                    f"{tier.name}: {inflight} bytes are in flight, {tier.inflight_bytes} counted"
                )
            handed = sum(len(one.keys) for one in cascades if i in one.tiers and one.handed_over)
            if handed != tier.handed_over:
                raise InternalError(
                    f"{tier.name}: {handed} chunks are handed over, {tier.handed_over} counted"
                )
