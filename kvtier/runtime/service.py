# SPDX-License-Identifier: Apache-2.0
"""The tier service: runs every secondary tier as coroutines on one loop.

Runs on an asyncio loop of its own, in a thread or in a child process (``runtime.thread``,
``runtime.child``); both hand it the same messages. Owns one lane a tier and one task a job.
Invariants: every ``Find`` and every ``Cascade`` ends with exactly one final message; a slot or a
pin goes back only when no call touches the slot any more.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.namespace import namespace_digest
from kvtier.obs.events import Event
from kvtier.obs.metrics import METRICS, Recorder
from kvtier.runtime import messages as m
from kvtier.runtime.finder import FindJob
from kvtier.runtime.lane import Lane
from kvtier.runtime.memory import Memory
from kvtier.tiers.base import Slot, TierContext, TierEnv
from kvtier.tiers.registry import make_tier, tier_class
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome

log = logging.getLogger(__name__)

OPEN_SECONDS = 5.0
"""The tiers' self-tests have this long before the service starts without them."""

ORPHAN_SECONDS = 1.0
"""For the tiers to close when nobody says how long they may take."""

SAMPLES_SECONDS = 0.5

MAX_EVENTS = 10_000
"""Of the tiers' own events, so many may wait for an owner that does not read; a sleeping scheduler
does not read for hours."""


Chunk = tuple[bytes, int, int]
"""Key, slot and generation."""


def _chunks(message: m.Cascade | m.Verify) -> Iterator[Chunk]:
    """The chunks that a message is of."""
    slots, generations = m.numbers(message.slots), m.words(message.generations)
    return zip(message.keys, slots.tolist(), generations.tolist(), strict=True)


class Job:
    """A message under way: its task, and the future that tells it to stop."""

    __slots__ = ("find", "stop", "task")

    def __init__(self, stop: asyncio.Future[None]) -> None:
        self.stop = stop
        self.find: FindJob | None = None
        self.task: asyncio.Task[None] | None = None


class TierService:
    """Runs the secondary tiers.

    Parameters
    ----------
    config : Config
    namespace : dict of str
        Readable namespace fields.
    memory : Memory
    send : callable
        Hands messages to the owner; never blocks.
    in_scheduler_process : bool
        Whether adapted tiers may run here.
    replica : int
        Number of this instance among equally configured ones on this host.
    """

    def __init__(
        self,
        config: Config,
        namespace: dict[str, str],
        memory: Memory,
        send: Callable[[list[m.ToOwner]], None],
        in_scheduler_process: bool,
        replica: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._memory = memory
        memory.give_back = lambda slots: self._post(m.Left(m.packed(slots)))
        self._send = send
        self._in_scheduler_process = in_scheduler_process
        self._replica = replica
        self._clock = clock
        definitions = list(METRICS)
        for tier in config.tiers:
            definitions += tier_class(tier).metric_definitions()
        self._recorder = Recorder(definitions)
        self._tasks = TaskSet("kvtier-service")
        self._lanes: list[Lane] = []
        self._left: list[Lane] = []  # closed, but a call into their tier hangs
        self._jobs: dict[int, Job] = {}
        self._inbox: asyncio.Queue[m.ToService | None] = asyncio.Queue()
        self._out: list[m.ToOwner] = []
        self._flush_scheduled = False
        self._draining = False
        self._events: list[Event] = []
        self._unread_events = 0  # at most, sent and not sent yet
        self.owner_has_read: Callable[[], bool] = lambda: True
        """False while there is something that the owner has not read: samples wait and add up."""

    def deliver(self, message: m.ToService | None) -> None:
        """A message has come in; None: the owner is gone. On the loop's thread only."""
        self._inbox.put_nowait(message)

    async def run(self) -> None:
        """Open the tiers, work until ``Close`` or the owner's end, close the tiers."""
        error = ""
        deadline = None
        try:
            await self._open()
            self._tasks.start(self._send_samples(), "samples")
            while True:
                message = await self._inbox.get()
                if message is None:
                    break
                if isinstance(message, m.Close):
                    deadline = message.deadline
                    await self._drain(deadline)
                    break
                await self._handle(message)
        finally:
            try:
                if deadline is None:  # the owner is gone, or something failed here
                    deadline = self._clock() + ORPHAN_SECONDS
                error = await self._close(deadline)
            finally:
                self._memory.close()
                self._emit_samples()
                self._post(m.Closed(error))
                self._flush()

    async def _open(self) -> None:
        env = TierEnv(
            geometry=self._memory.geometry,
            namespace=self._namespace,
            namespace_digest=namespace_digest(self._namespace),
            recorder=self._recorder,
            emit=self._emit,
            clock=self._clock,
            host=self._memory,
            replica=self._replica,
            region_view=self._memory.payload.cast("B").cast(
                "B", (self._memory.geometry.num_slots, self._memory.geometry.slot_bytes)
            )
            if self._in_scheduler_process
            else None,
        )
        deadline = self._clock() + OPEN_SECONDS
        causes: list[str] = []
        fatal: list[bool] = []
        self._lanes = []
        for index, tier_config in enumerate(self._config.tiers):
            try:
                tier = make_tier(tier_config, env)
            except Exception as exc:
                # The constructor is anybody's code; without its tier there is nothing to run.
                log.error("tier %s cannot be made", tier_config.name, exc_info=exc)
                count = len(self._config.tiers)
                self._post(
                    m.Ready(
                        [str(exc) if i == index else "not opened" for i in range(count)],
                        [i == index for i in range(count)],
                        os.getpid(),
                    )
                )
                raise
            self._lanes.append(
                Lane(
                    index,
                    tier,
                    tier_config,
                    self._config,
                    self._recorder,
                    self._health,
                    self._post,
                    self._clock,
                )
            )
        results = await asyncio.gather(
            *(lane.open(deadline) for lane in self._lanes), return_exceptions=True
        )
        for lane, result in zip(self._lanes, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, ConfigError):
                    log.error("a tier failed to open", exc_info=result)
                causes.append(str(result) or type(result).__name__)
                fatal.append(True)
            else:
                # While the others opened it may have been tried again, and be up.
                causes.append("" if lane.is_open else result)
                fatal.append(False)
        if not self._in_scheduler_process:
            # What stays for good is not gone through again: with an S3 client that holds up the
            # loop for a tenth of a second, every now and then.
            gc.collect()
            gc.freeze()
        self._post(m.Ready(causes, fatal, os.getpid()))
        for lane in self._lanes:
            lane.tell_contents()

    async def _drain(self, deadline: float) -> None:
        """Wait for what is under way; chunks put off have had their time before."""
        self._draining = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - self._clock()))

    async def _close(self, deadline: float) -> str:
        await self._stop_jobs()
        errors = await self._close_lanes(deadline)
        await self._tasks.aclose()
        # Nothing may touch the region once this service has said that it is closed.
        for lane in self._left:
            await lane.ended()
        return "; ".join(errors)

    async def _close_lanes(self, deadline: float) -> list[str]:
        """Close all lanes at the same time: a tier that hangs costs the others nothing."""
        results = await asyncio.gather(
            *(lane.aclose(deadline) for lane in self._lanes), return_exceptions=True
        )
        errors = []
        self._left = [lane for lane in self._left if lane.tasks]
        for lane, result in zip(self._lanes, results, strict=True):
            if isinstance(result, BaseException):
                log.error("tier %s failed to close", lane.tier.name, exc_info=result)
                errors.append(f"{lane.tier.name}: {result}")
            if lane.tasks:
                self._left.append(lane)
        return errors

    async def _stop_jobs(self) -> None:
        """End every job: its calls are cancelled, its final message goes out."""
        for job in self._jobs.values():
            if not job.stop.done():
                job.stop.set_result(None)
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _handle(self, message: m.ToService) -> None:
        match message:
            case m.Find():
                job = self._start_job(message.job)
                job.find = FindJob(
                    message,
                    self._memory,
                    self._lanes,
                    job.stop,
                    self._post,
                    self._config.lookup_timeout_seconds / 2,
                    self._clock,
                )
                job.task = self._tasks.start(
                    self._run_job(message.job, job.find.run()), f"find-{message.job}"
                )
            case m.Cascade():
                job = self._start_job(message.job)
                if not message.portion_bytes:
                    self._memory.pins += len(message.keys)
                cascade = self._store_backlog if message.portion_bytes else self._cascade
                job.task = self._tasks.start(
                    self._run_job(message.job, cascade(message, job.stop)),
                    f"cascade-{message.job}",
                )
            case m.Verify():
                job = self._start_job(message.job)
                self._memory.pins += len(message.keys)
                job.task = self._tasks.start(
                    self._run_job(message.job, self._verify(message)), f"verify-{message.job}"
                )
            case m.Lend() | m.NoMoreSlots():
                found = self._jobs.get(message.job)
                if found is not None and found.find is not None:
                    found.find.more(message)
                elif isinstance(message, m.Lend) and message.slots:
                    # The job has ended meanwhile: its slots go straight back.
                    self._post(m.Returned(message.job, message.slots))
            case m.Cancel():
                found = self._jobs.get(message.job)
                if found is not None and not found.stop.done():
                    found.stop.set_result(None)
            case m.Serve():
                for lane in self._lanes:
                    lane.tier.serve(message.request, message.ended)
            case m.Host():
                slots, generations = m.numbers(message.slots), m.words(message.generations)
                self._lanes[message.tier].tier.host(
                    list(zip(slots.tolist(), generations.tolist(), strict=True))
                )
            case m.Reclaim():
                self._lanes[message.tier].tier.reclaim(message.count)
            case m.Reset():
                await self._stop_jobs()
                if message.namespace != self._namespace:
                    await self._close_lanes(self._clock() + 1.0)
                    self._namespace = message.namespace
                    await self._open()
                self._post(m.ResetDone())
            case m.Audit():
                self._emit_samples()
                self._post(
                    m.Resources(
                        number=message.number,
                        tasks=len(self._tasks)
                        + sum(lane.tasks for lane in (*self._lanes, *self._left)),
                        threads=threading.active_count(),
                        fds=len(os.listdir("/proc/self/fd")),
                        jobs=len(self._jobs),
                        pins=self._memory.pins,
                    )
                )
            case _:
                log.error("unknown message %r", message)

    def _start_job(self, number: int) -> Job:
        job = Job(asyncio.get_running_loop().create_future())
        self._jobs[number] = job
        return job

    async def _run_job(self, number: int, coroutine: Any) -> None:
        try:
            await coroutine
        finally:
            find = self._jobs.pop(number).find
            if find is not None and find.held:
                self._tasks.start(self._return_later(number, find.held), f"late-{number}")

    async def _verify(self, message: m.Verify) -> None:
        """Compare chunks of host memory with their checksums."""
        items = [
            self._memory.slot(key, slot, generation, self._memory.slots.crc(slot))
            for key, slot, generation in _chunks(message)
        ]
        known = [item for item in items if item.crc is not None]
        bad: list[int] = []
        try:
            await self._memory.verify(known)
            bad = [i for i, item in enumerate(items) if item.crc is not None and not item.verified]
        finally:
            self._memory.unpin(items)
            self._post(m.Verified(message.job, bad))

    async def _cascade(self, message: m.Cascade, stop: asyncio.Future[None]) -> None:
        """Copy chunks to all tiers at once; the pins go back when the last call has settled."""
        slots = self._memory.slots
        items = [
            self._memory.slot(key, slot, generation) for key, slot, generation in _chunks(message)
        ]
        settled: list[asyncio.Future[Any]] = []
        left = set(message.tiers)

        def end(tier: int, outcomes: Sequence[Outcome]) -> None:
            for item, outcome in zip(items, outcomes, strict=True):
                if outcome.ok:
                    slots.mark_saved(item.slot, item.generation)
            left.discard(tier)
            self._post(m.Stored(message.job, tier, bytes(outcomes), final=not left))

        async def one(tier: int) -> None:
            outcomes = [Outcome.INTERNAL] * len(items)
            try:
                lane = self._lanes[tier]
                # Each tier gets slots of its own to look at: one may end long before the other.
                copies = [
                    self._memory.slot(item.key, item.slot, item.generation, item.crc)
                    for item in items
                ]
                ctx = TierContext(
                    deadline=min(message.deadline, self._clock() + lane.config.store_seconds),
                    request_id=message.request_id,
                )
                outcomes, calls = await lane.store(copies, ctx, stop)
                settled.extend(calls)
            finally:
                end(tier, outcomes)

        try:
            await self._memory.take_crcs(items)
            # All of them end before the pins go, also when one raises.
            results = await asyncio.gather(
                *(one(tier) for tier in message.tiers), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    log.error("a store failed inside kvtier", exc_info=result)
        finally:
            for tier in list(left):
                end(tier, [Outcome.INTERNAL] * len(items))
            if not message.tiers:  # it was for the checksums only
                self._post(m.Stored(message.job, -1, b"", final=True))
            self._unpin_settled(message.job, items, settled)

    async def _store_backlog(self, message: m.Cascade, stop: asyncio.Future[None]) -> None:
        """Copy chunks that come without pins to one tier: each portion is pinned in its turn."""
        (tier,) = message.tiers
        lane, length = self._lanes[tier], self._memory.length
        outcomes: list[Outcome] = []
        try:
            chunks = list(_chunks(message))
            async with lane.backlog:
                while len(outcomes) < len(message.keys) and not stop.done() and not self._draining:
                    start = end = len(outcomes)
                    portion_bytes = 0
                    while end < len(message.keys) and (
                        end == start
                        or portion_bytes + length(message.keys[end]) <= message.portion_bytes
                    ):
                        portion_bytes += length(message.keys[end])
                        end += 1
                    outcomes += await self._store_portion(message, chunks[start:end], stop)
                    await asyncio.sleep(0)  # a portion that is gone has not waited for anything
        finally:
            outcomes += [Outcome.CANCELLED] * (len(message.keys) - len(outcomes))
            self._post(m.Stored(message.job, tier, bytes(outcomes), final=True))

    async def _store_portion(
        self, message: m.Cascade, chunks: Sequence[Chunk], stop: asyncio.Future[None]
    ) -> list[Outcome]:
        lane, slots = self._lanes[message.tiers[0]], self._memory.slots
        outcomes = [Outcome.MISSING] * len(chunks)
        pinned: dict[int, Slot] = {}
        for i, (key, slot, generation) in enumerate(chunks):
            if slots.pin_service(slot, generation, key):
                self._memory.pins += 1
                pinned[i] = self._memory.slot(key, slot, generation)
        items = list(pinned.values())
        settled: list[asyncio.Future[Any]] = []
        try:
            await self._memory.take_crcs(items)
            ctx = TierContext(deadline=self._clock() + lane.config.store_seconds, request_id="")
            stored, settled = await lane.store(items, ctx, stop)
            for (i, item), outcome in zip(pinned.items(), stored, strict=True):
                outcomes[i] = outcome
                if outcome.ok:
                    slots.mark_saved(item.slot, item.generation)
        finally:
            self._unpin_settled(message.job, items, settled)
        return outcomes

    async def _return_later(self, number: int, held: dict[int, asyncio.Future[Any]]) -> None:
        await asyncio.wait(set(held.values()))
        self._post(m.Returned(number, m.packed(sorted(held))))

    def _unpin_settled(
        self, number: int, items: Sequence[Slot], settled: Sequence[asyncio.Future[Any]]
    ) -> None:
        """Give pins back, those that a hung call may still need when it ends."""
        pending = {call for call in settled if not call.done()}
        if pending:
            self._tasks.start(self._unpin_later(items, pending), f"late-{number}")
        else:
            self._memory.unpin(items)

    async def _unpin_later(self, items: Sequence[Slot], pending: set[asyncio.Future[Any]]) -> None:
        await asyncio.wait(pending)
        self._memory.unpin(items)

    def _health(self, tier: int, readable: bool, writable: bool, cause: str) -> None:
        self._post(m.Health(tier, readable, writable, cause))

    def _post(self, message: m.ToOwner) -> None:
        # One wake-up of the owner for all that this turn of the loop produces.
        self._out.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _emit(self, event: Event) -> None:
        """An event of a tier: goes out in order with the answers, or not at all."""
        if self._unread_events >= MAX_EVENTS and self.owner_has_read():
            self._unread_events = len(self._events)
        if self._unread_events >= MAX_EVENTS:
            self._recorder.add("kvtier_events_dropped_total", 1)
            return
        self._unread_events += 1
        self._events.append(event)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._events:
            data = msgspec.msgpack.encode(self._events)
            self._events.clear()
            self._out.append(m.Events(data))
        if self._out:
            out, self._out = self._out, []
            self._send(out)

    async def _send_samples(self) -> None:
        while True:
            started = self._clock()
            await asyncio.sleep(SAMPLES_SECONDS)
            lag = max(0.0, self._clock() - started - SAMPLES_SECONDS)
            self._recorder.observe("kvtier_service_loop_lag_seconds", lag)
            if self.owner_has_read():
                self._emit_samples()

    def _emit_samples(self) -> None:
        samples = self._recorder.take()
        if samples:
            self._post(m.Samples(msgspec.msgpack.encode(samples)))
