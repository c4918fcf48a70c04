# SPDX-License-Identifier: Apache-2.0
"""One ``Find`` in the service: ask the tiers in order, load what is there as soon as it is known.

Runs on the service's loop. Owns the slots lent to the job until they are in a ``Found`` or
``Returned`` message. Loads start while later tiers are still being asked. For keys in prefix order
only what extends the known prefix is loaded; a key that no tier has makes all behind it useless.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.runtime import messages as m
from kvtier.runtime.lane import Lane
from kvtier.tiers.base import Slot, TierContext
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome, Presence

if TYPE_CHECKING:
    from kvtier.runtime.memory import Memory

log = logging.getLogger(__name__)

LOAD_BATCH_BYTES = 8 << 20
"""Chunks go to the owner in batches of about this size, so that the first ones are there early."""

NEWS_CHUNKS = 128
"""Loaded chunks in one message: taking it is one piece of work on the scheduler's thread."""

PENDING_SECONDS = 0.02
"""Pause before a tier is asked again for chunks that are being written there."""

QUIET_SECONDS = 1.0
"""The same for a tier that tells when it has news."""

PATIENCE = 0.1
"""Share of the time for which a request waits for its peer that presence may take: a session is to
be made, with an instance that is busy."""

UNKNOWN, PRESENT, ABSENT, LOADING, LOADED, FAILED = range(6)


class FindJob:
    """State machine of one ``Find``.

    Parameters
    ----------
    message : Find
    memory : Memory
    lanes : sequence of Lane
    stop : Future
        Done when nobody waits for the job any more.
    post : callable
        Takes messages for the owner.
    presence_seconds : float
        Time of one tier to say what it has; a hung one must not use up the request's patience.
    """

    def __init__(
        self,
        message: m.Find,
        memory: Memory,
        lanes: Sequence[Lane],
        stop: asyncio.Future[None],
        post: Callable[[m.ToOwner], None],
        presence_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._message = message
        self._memory = memory
        self._lanes = lanes
        self._stop = stop
        self._post = post
        peer = message.peer
        patience = 0.0 if peer is None else PATIENCE * peer.wait_seconds
        self._presence_seconds = max(presence_seconds, patience)
        self._clock = clock
        n = len(message.keys)
        self._state = bytearray(n)
        self._cursor = [0] * n  # position in message.tiers of the tier to ask next
        self._outcome = [Outcome.MISSING] * n  # last failure of each key
        self._ask_at = [0.0] * n  # not before then: a tier is just getting the key
        self._told = bytearray(n)  # whether the owner knows that the key wants a slot
        self._slots: deque[tuple[int, int]] = deque()  # lent and free to load into
        # Every slot that has not gone back yet, in the order in which they came.
        self._lent: dict[int, None] = {}
        self._held: dict[int, asyncio.Future[Any]] = {}  # those that a hung call may still touch
        self._add_slots(message.slots, message.generations)
        self._more_slots = True
        self._absent: list[int] = []  # settled, and not told yet, as are those that failed
        self._failed: list[int] = []
        self._wake = asyncio.Event()
        self._heard = False  # since the last question
        self._tasks = TaskSet(f"kvtier-find-{message.job}")
        self._loads: set[asyncio.Task[None]] = set()
        self._has_loaded = False

    def more(self, message: m.Lend | m.NoMoreSlots) -> None:
        """Slots have come, or none will."""
        if isinstance(message, m.Lend):
            self._add_slots(message.slots, message.generations)
        else:
            self._more_slots = False
        self._wake.set()

    def _add_slots(self, slots: m.Numbers, generations: m.Words) -> None:
        numbers = m.numbers(slots).tolist()
        self._slots.extend(zip(numbers, m.words(generations).tolist(), strict=True))
        self._lent.update(dict.fromkeys(numbers))

    def _hear(self) -> None:
        """A tier knows more of keys that it was just getting: they are asked for now."""
        self._heard = True
        self._ask_at = [0.0] * len(self._ask_at)
        self._wake.set()

    async def run(self) -> None:
        """Work until every key is loaded, absent or failed, or the deadline has passed."""
        try:
            while not self._over():
                self._wake.clear()
                tier = self._next_tier()
                if tier is not None:
                    await self._ask(tier)
                    self._start_loads()  # telling the owner takes as long as asking a peer
                    self._report_present()
                    continue
                self._settle_absent()
                self._start_loads()
                if not self._loads and not self._waiting_for_slots() and self._next_ask() is None:
                    break  # the rest is told with the end
                self._tell_settled()
                await self._wait()
        finally:
            await self._end()

    def _over(self) -> bool:
        return self._stop.done() or self._clock() >= self._message.deadline

    def _next_tier(self) -> int | None:
        """Position of the first tier that some key is still to be asked of."""
        return min((self._cursor[i] for i in self._to_ask(self._clock())), default=None)

    def _to_ask(self, now: float) -> list[int]:
        last = len(self._message.tiers)
        return [
            i
            for i, state in enumerate(self._state)
            if state == UNKNOWN and self._cursor[i] < last and self._ask_at[i] <= now
        ]

    def _next_ask(self) -> float | None:
        """When a key is to be asked for again that a tier is just getting."""
        last = len(self._message.tiers)
        return min(
            (
                self._ask_at[i]
                for i, state in enumerate(self._state)
                if state == UNKNOWN and self._cursor[i] < last
            ),
            default=None,
        )

    def _context(self, seconds: float) -> TierContext:
        return TierContext(
            deadline=min(self._message.deadline, self._clock() + seconds),
            request_id=self._message.request_id,
            peer=self._message.peer,
            windowed=self._message.windowed,
            loads=bool(self._slots),
            news=self._hear,
        )

    async def _ask(self, position: int) -> None:
        lane = self._lanes[self._message.tiers[position]]
        asked = [i for i in self._to_ask(self._clock()) if self._cursor[i] == position]
        self._heard = False
        question = lane.exists(
            [self._message.keys[i] for i in asked],
            self._context(min(lane.config.load_seconds, self._presence_seconds)),
            self._stop,
        )
        if self._waiting_for_slots():
            # What an earlier tier has is loaded when they come, however slow this one is.
            call = self._tasks.start(question, "ask")
            while not call.done():
                self._wake.clear()
                self._start_loads()
                await self._first(call, *self._loads)
            answer = call.result()
        else:
            answer = await question
        if isinstance(answer, Outcome):
            for i in asked:
                self._cursor[i] = position + 1
                self._outcome[i] = answer
            return
        pause = QUIET_SECONDS if lane.tier.tells_news else PENDING_SECONDS
        # News that came before the answer may be in it or not.
        ask_at = 0.0 if self._heard else self._clock() + pause
        for i, presence in zip(asked, answer, strict=True):
            if presence == Presence.PRESENT:
                self._state[i] = PRESENT
            elif presence == Presence.ABSENT:
                self._cursor[i] = position + 1
            else:
                # The others go on meanwhile, to further tiers too.
                self._ask_at[i] = ask_at

    def _report_present(self) -> None:
        """Tell the owner how many more can be loaded, so that it can lend as many slots."""
        count = 0
        for i, state in enumerate(self._state):
            if state in (PRESENT, LOADING) and not self._told[i]:
                self._told[i] = True
                count += 1
            elif state in (UNKNOWN, ABSENT, FAILED) and not self._message.windowed:
                break
        if count:
            self._post(self._news(present=count))

    def _settle_absent(self) -> None:
        """All tiers have been asked: what is still unknown is absent, or failed."""
        last = len(self._message.tiers)
        gap = False
        for i, state in enumerate(self._state):
            if state == UNKNOWN and self._cursor[i] >= last:
                gap = True
                if self._outcome[i].failed:
                    self._state[i] = FAILED
                    self._failed.append(i)
                else:
                    self._state[i] = ABSENT
                    self._absent.append(i)
            elif state in (ABSENT, FAILED):
                gap = True
            elif state == PRESENT and gap and not self._message.windowed:
                # Behind a gap in the prefix: of no use to this request.
                self._state[i] = ABSENT
                self._absent.append(i)
        self._report_present()

    def _tell_settled(self) -> None:
        if self._absent or self._failed:
            self._post(self._news())

    def _loadable(self) -> list[int]:
        ready = []
        for i, state in enumerate(self._state):
            if state == PRESENT:
                ready.append(i)
            elif state in (UNKNOWN, ABSENT, FAILED) and not self._message.windowed:
                break
        return ready

    def _waiting_for_slots(self) -> bool:
        return self._more_slots and not self._slots and bool(self._loadable())

    def _start_loads(self) -> None:
        if not self._slots:
            return
        batch: list[int] = []
        batch_bytes = most_bytes = 0
        cursor = -1
        for i in self._loadable():
            if len(batch) == len(self._slots):
                break
            length = self._memory.length(self._message.keys[i])
            if batch and (self._cursor[i] != cursor or batch_bytes + length > most_bytes):
                self._start_load(batch)
                batch, batch_bytes = [], 0
                if not self._slots:
                    break
            if not batch:
                cursor = self._cursor[i]
                most_bytes = self._most_bytes(cursor)
            batch.append(i)
            batch_bytes += length
        if batch:
            self._start_load(batch)

    def _most_bytes(self, position: int) -> int:
        """Of the next batch, from the tier at that position."""
        tier = self._lanes[self._message.tiers[position]].tier
        return LOAD_BATCH_BYTES if self._has_loaded else tier.first_load_bytes or LOAD_BATCH_BYTES

    def _start_load(self, positions: list[int]) -> None:
        self._has_loaded = True
        items = []
        for i in positions:
            slot, generation = self._slots.popleft()
            items.append(self._memory.slot(self._message.keys[i], slot, generation))
            self._state[i] = LOADING
        self._loads.add(self._tasks.start(self._load(positions, items), "load"))

    async def _load(self, positions: list[int], items: list[Slot]) -> None:
        tier = self._message.tiers[self._cursor[positions[0]]]
        lane = self._lanes[tier]
        outcomes, settled = await lane.load(
            items, self._context(lane.config.load_seconds), self._stop
        )
        if not settled.done():
            for item in items:
                self._held[item.slot] = settled
        good = [
            item for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.DONE
        ]
        await self._memory.verify(good)
        right = [item for item in good if item.verified]
        lane.count_loaded(right, len(good) - len(right))
        loaded, slots, crcs = [], [], []
        for i, item, outcome in zip(positions, items, outcomes, strict=True):
            if outcome is Outcome.DONE and item.verified:
                self._state[i] = LOADED
                loaded.append(i)
                slots.append(item.slot)
                assert item.crc is not None
                crcs.append(item.crc)
                continue
            if outcome is Outcome.DONE:
                outcome = Outcome.CORRUPT
            # Another tier may have it; the slot is free for the next key unless a call hangs on it.
            self._state[i] = UNKNOWN
            self._cursor[i] += 1
            self._outcome[i] = outcome
            if item.slot not in self._held:
                self._slots.append((item.slot, item.generation))
            else:
                self._told[i] = False  # it wants another one
        if loaded:
            for slot in slots:
                del self._lent[slot]
            for start in range(0, len(loaded), NEWS_CHUNKS):
                part = slice(start, start + NEWS_CHUNKS)
                self._post(
                    self._news(loaded=loaded[part], slots=slots[part], crcs=crcs[part], tier=tier)
                )
        corrupt = [
            self._message.keys[i]
            for i in positions
            if self._state[i] == UNKNOWN and self._outcome[i] is Outcome.CORRUPT
        ]
        if corrupt:
            log.warning("tier %s: %d corrupt chunks, not used", lane.tier.name, len(corrupt))
            lane.forget_later(corrupt)

    async def _wait(self) -> None:
        """Until a load ends, slots come, the job is stopped or its deadline passes."""
        until = min(self._message.deadline, self._next_ask() or math.inf)
        await self._first(self._stop, *self._loads, seconds=max(0.0, until - self._clock()))

    async def _first(self, *ends: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Until one of these is done, or slots come."""
        wake = self._tasks.start(self._wake.wait(), "wake")
        try:
            await asyncio.wait({wake, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wake.cancel()
        self._collect()

    def _collect(self) -> None:
        # A load that raised is logged by the task set; its keys are settled at the end.
        self._loads = {task for task in self._loads if not task.done()}

    async def _end(self) -> None:
        # The lanes end their calls at the deadline or on stop, so this is short.
        if self._loads:
            await asyncio.wait(self._loads)
            self._collect()
        await self._tasks.aclose()
        cause = Outcome.CANCELLED if self._stop.done() else Outcome.TIMEOUT
        for i, state in enumerate(self._state):
            if state == LOADING:
                self._outcome[i] = Outcome.INTERNAL  # its load raised
                self._failed.append(i)
            elif state == UNKNOWN and self._cursor[i] >= len(self._message.tiers):
                self._failed.append(i)
            elif state in (UNKNOWN, PRESENT):
                if self._over():
                    self._outcome[i] = cause
                    self._failed.append(i)
                else:
                    self._absent.append(i)  # present, but there is no room for it
        held = self.held
        unused = [slot for slot in self._lent if slot not in held]
        self._lent = {slot: None for slot in self._lent if slot in held}
        self._slots.clear()
        self._post(self._news(unused=unused, final=True))

    @property
    def held(self) -> dict[int, asyncio.Future[Any]]:
        """Slots that hung calls may still touch, each with the end of its call."""
        return {slot: call for slot, call in self._held.items() if not call.done()}

    def _news(
        self,
        present: int = 0,
        loaded: Sequence[int] = (),
        slots: Sequence[int] = (),
        crcs: Sequence[int] = (),
        tier: int = -1,
        unused: Sequence[int] = (),
        final: bool = False,
    ) -> m.Found:
        """With what is settled and was not told yet."""
        absent, failed = self._absent, self._failed
        self._absent, self._failed = [], []
        return m.Found(
            self._message.job,
            m.packed(absent),
            present,
            m.packed(loaded),
            m.packed(slots),
            m.packed_words(crcs),
            tier,
            m.packed(failed),
            bytes(self._outcome[i] for i in failed),
            m.packed(unused),
            final,
        )
