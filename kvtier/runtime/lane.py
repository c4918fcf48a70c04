# SPDX-License-Identifier: Apache-2.0
"""One tier under the service's care: deadlines, breakers, priorities, outcomes, metrics.

Runs on the service's loop. Owns the tier, its two breakers (reading and writing) and the tasks of
calls that did not end when they were told to. Invariant: ``Call.settled`` is done only when nothing
started for the call touches its slots any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar

from kvtier.config import Config, TierConfig
from kvtier.errors import ClosedError, ConfigError, PeerLostError, TierLostError
from kvtier.obs.metrics import Recorder
from kvtier.runtime import messages as m
from kvtier.runtime.breaker import Breaker
from kvtier.runtime.lister import Lister
from kvtier.tiers.base import Slot, Tier, TierContext
from kvtier.tiers.tasks import TaskSet
from kvtier.types import Outcome, Presence

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_SECONDS = 0.05
"""How long a cancelled call may take to clean up before its job ends without it."""

STORE_PAUSE_SECONDS = 0.02
"""How long a store lets loads of the same tier go first, at most, before each of its batches."""

STORE_BATCH_BYTES = 8 << 20

PATIENCE = 0.1
"""Share of its time to say what it has that a tier is waited for after a failure."""

REOPEN_SECONDS = 1.0

REOPEN_TIMEOUT_SECONDS = 30.0

CLOSE_GRACE_SECONDS = 1.0
"""How much longer than its deadline a tier may take to close before it is left alone."""


def _batches(items: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
    """Parts of at most `STORE_BATCH_BYTES`, or of one chunk."""
    start, batch_bytes = 0, 0
    for end, item in enumerate(items):
        if end > start and batch_bytes + item.length > STORE_BATCH_BYTES:
            yield items[start:end]
            start, batch_bytes = end, 0
        batch_bytes += item.length
    if items:
        yield items[start:]


class Lane:
    """Calls into one tier.

    Parameters
    ----------
    index : int
        Position of the tier in the configuration.
    tier : Tier
    tier_config : TierConfig
    config : Config
    recorder : Recorder
    on_health : callable
        ``on_health(index, readable, writable, cause)`` when calls start or stop making sense.
    on_contents : callable
        Takes what the tier may hold, if it tells.
    clock : callable
    """

    def __init__(
        self,
        index: int,
        tier: Tier,
        tier_config: TierConfig,
        config: Config,
        recorder: Recorder,
        on_health: Callable[[int, bool, bool, str], None],
        on_contents: Callable[[m.Contents], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.tier = tier
        self.config = tier_config
        self._recorder = recorder
        self._on_health = on_health
        self._clock = clock
        self.backlog = asyncio.Lock()
        """Of the job that stores chunks put off: one at a time."""
        self._tasks = TaskSet(f"kvtier-{tier.name}")
        self._on_contents = on_contents
        self._lister = Lister(index, tier, self._tasks, self._post_contents)
        self._read = Breaker(config.breaker.failures, config.breaker.open_seconds)
        self._write = Breaker(config.breaker.failures, config.breaker.open_seconds)
        self._load_failed = False
        """The last of the reads that failed was a load: presence alone proves nothing then."""
        self._served_at = dict.fromkeys(("exists", "load", "store"), -math.inf)
        """When a call last ended well."""
        self._lookup_seconds = config.lookup_timeout_seconds
        self._loads = 0
        self._loads_done = asyncio.Event()
        self._loads_done.set()
        self._is_open = False
        self._closing = False
        self._may_list = False
        self._reopener: asyncio.Task[None] | None = None
        self._timers: dict[Breaker, asyncio.TimerHandle] = {}

    async def open(self, deadline: float) -> str:
        """Open the tier: an empty string, or why it is down for now.

        Raises
        ------
        ConfigError
            The operator has to change something.
        """
        call = await self._call(_awaited(self.tier.open), deadline)
        if call.error is None and not call.late:
            self._is_open = True
            return ""
        if isinstance(call.error, ConfigError):
            # At the first start this ends the service; after a reset the operator may mend it.
            self._reopener = self._tasks.start(
                self._reopen(call.settled), f"reopen-{self.tier.name}"
            )
            raise call.error
        if call.late:
            cause = "its self-test did not end in time"
        else:
            cause = str(call.error) or type(call.error).__name__
            if not isinstance(call.error, TierLostError | OSError):
                log.error("tier %s failed to open", self.tier.name, exc_info=call.error)
        self._reopener = self._tasks.start(self._reopen(call.settled), f"reopen-{self.tier.name}")
        return cause

    def tell_contents(self) -> None:
        """The owner has been told that the service starts anew, at which it forgets what it knew of
        the tier: from now on it may hear what that holds."""
        self._may_list = True
        self._list()

    def _list(self) -> None:
        if self._may_list and self._is_open:
            self._lister.start()

    async def _reopen(self, settled: asyncio.Future[Any]) -> None:
        pause = REOPEN_SECONDS
        while not self._closing:
            # Never two of them at once: an attempt that hangs is waited for.
            await asyncio.wait({settled})
            await asyncio.sleep(pause)
            pause = min(2 * pause, 30.0)
            call = await self._call(
                _awaited(self.tier.open), self._clock() + REOPEN_TIMEOUT_SECONDS
            )
            settled = call.settled
            if call.error is not None or call.late:
                cause = "its self-test did not end in time" if call.late else str(call.error)
                log.warning("tier %s is still down: %s", self.tier.name, cause)
                continue
            self._is_open = True
            log.info("tier %s is up", self.tier.name)
            self._tell()
            self._list()
            return

    async def aclose(self, deadline: float) -> None:
        """Close the tier and end every task of the lane.

        Raises
        ------
        TierLostError
            A call of the tier hangs, or its ``aclose`` does, a little beyond `deadline`. What hangs
            goes on without the lane; its slots come back when it ends.
        """
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._reopener is not None:
            # Not opened while it is being closed.
            self._reopener.cancel()
            await asyncio.wait({self._reopener}, timeout=GRACE_SECONDS)
        call = await self._call(
            _awaited(self.tier.aclose, deadline), deadline + CLOSE_GRACE_SECONDS
        )
        self._tasks.cancel()
        left = await self._tasks.wait(GRACE_SECONDS)
        if call.late or left:
            raise TierLostError("a call hangs, and was left alone")
        if call.error is not None:
            raise call.error

    async def ended(self) -> None:
        """Wait until what hung when the lane was closed has ended too."""
        await self._tasks.aclose()

    @property
    def tasks(self) -> int:
        """Tasks alive, for leak checks."""
        return len(self._tasks)

    @property
    def is_open(self) -> bool:
        """Whether the tier has been opened, and not closed."""
        return self._is_open and not self._closing

    async def exists(
        self, keys: Sequence[bytes], ctx: TierContext, stop: asyncio.Future[None]
    ) -> list[Presence] | Outcome:
        """Presence of each key, or why the tier could not say.

        After a failure it is waited for only a little, so that a tier that hangs does not keep
        every request from the next one. The call goes on: its end says how the tier is.
        """
        if not self._read.in_doubt:
            return await self._exists(keys, ctx, stop)
        patience = PATIENCE * (ctx.deadline - self._clock())
        task = self._tasks.start(self._exists(keys, ctx, stop), f"exists-{self.tier.name}")
        await asyncio.wait({task}, timeout=max(0.0, patience))
        return task.result() if task.done() else Outcome.TIMEOUT

    async def _exists(
        self, keys: Sequence[bytes], ctx: TierContext, stop: asyncio.Future[None]
    ) -> list[Presence] | Outcome:
        refused = self._refuse(self._read)
        if refused is not None:
            return refused
        started = self._clock()
        call = await self._call(_awaited(self.tier.exists, keys, ctx), ctx.deadline, stop)
        outcome = self._judge(call, "exists", stop, started)
        self._recorder.observe("kvtier_lookup_seconds", self._clock() - started, (self.tier.name,))
        if outcome is not Outcome.DONE:
            self._count("exists", outcome, len(keys))
            return outcome
        try:
            result = [Presence(presence) for presence in call.result]
        except (TypeError, ValueError) as exc:
            log.error("tier %s answered with something else: %s", self.tier.name, exc)
            result = []
        if len(result) != len(keys):
            log.error("tier %s answered %d of %d keys", self.tier.name, len(result), len(keys))
            self._count("exists", Outcome.INTERNAL, len(keys))
            return Outcome.INTERNAL
        absent = result.count(Presence.ABSENT)
        if absent:
            self._recorder.add("kvtier_lookup_chunks_total", absent, (self.tier.name, "miss"))
        return result

    async def load(
        self, items: Sequence[Slot], ctx: TierContext, stop: asyncio.Future[None]
    ) -> tuple[list[Outcome], asyncio.Future[Any]]:
        """Outcomes, and a future that is done when nothing touches the slots any more. What is done
        counts with ``count_loaded``."""
        refused = self._refuse(self._read)
        if refused is not None:
            return [refused] * len(items), _done()
        self._loads += 1
        self._loads_done.clear()
        started = self._clock()
        try:
            call = await self._call(_awaited(self.tier.load, items, ctx), ctx.deadline, stop)
        finally:
            self._loads -= 1
            if not self._loads:
                self._loads_done.set()
        outcomes = self._outcomes(call, items, "load", started, stop)
        return outcomes, call.settled

    async def store(
        self, items: Sequence[Slot], ctx: TierContext, stop: asyncio.Future[None]
    ) -> tuple[list[Outcome], list[asyncio.Future[Any]]]:
        """Like ``load``; in batches, so that loads of the same tier get in between, as many at a
        time as the tier likes."""
        batches = list(_batches(items))
        left = iter(enumerate(batches))
        outcomes: list[list[Outcome]] = [[] for _ in batches]
        settled: list[asyncio.Future[Any]] = []

        async def work() -> None:
            for number, batch in left:
                outcomes[number] = await self._store(batch, ctx, stop, settled)

        # Behind an open breaker one of them tries, and its end counts for the others.
        at_once = self.tier.stores_at_once if self._write.closed else 1
        if at_once == 1 or len(batches) < 2:
            await work()
        else:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(at_once, len(batches))):
                    workers.create_task(work(), name=f"store-{self.tier.name}")
        return [outcome for batch in outcomes for outcome in batch], settled

    async def _store(
        self,
        batch: Sequence[Slot],
        ctx: TierContext,
        stop: asyncio.Future[None],
        settled: list[asyncio.Future[Any]],
    ) -> list[Outcome]:
        """Outcomes of one batch; `settled` gets the future of its call."""
        refused = self._refuse(self._write)
        if refused is None and (stop.done() or self._clock() >= ctx.deadline):
            refused = Outcome.CANCELLED if stop.done() else Outcome.TIMEOUT
            self._write.inconclusive()
        if refused is not None:
            self._count("store", refused, len(batch))
            return [refused] * len(batch)
        if not self._loads_done.is_set():
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STORE_PAUSE_SECONDS):
                        await self._loads_done.wait()
            except BaseException:
                self._write.inconclusive()
                raise
        self._lister.stored(len(batch))
        started = self._clock()
        call = await self._call(_awaited(self.tier.store, batch, ctx), ctx.deadline, stop)
        if not call.settled.done():
            self._lister.hangs([item.key for item in batch], call.settled)
        settled.append(call.settled)
        return self._outcomes(call, batch, "store", started, stop)

    def count_loaded(self, right: Sequence[Slot], wrong: int) -> None:
        """Chunks that a load has called done, now that their bytes have been compared."""
        name = self.tier.name
        if right:
            self._count("load", Outcome.DONE, len(right))
            moved_bytes = sum(item.length for item in right)
            self._recorder.add("kvtier_transfer_bytes_total", moved_bytes, (name, "load"))
        if wrong:
            self._count("load", Outcome.CORRUPT, wrong)
            self._count_corrupt(wrong)

    def _count_corrupt(self, chunks: int) -> None:
        """Loaded chunks whose bytes turned out wrong after the tier had called them good."""
        self._recorder.add("kvtier_corrupt_chunks_total", chunks, (self.tier.name,))

    def forget_later(self, keys: Sequence[bytes]) -> None:
        """``forget`` as a task of the lane: whoever met the corruption need not wait for it."""
        self._tasks.start(self.forget(keys), f"forget-{self.tier.name}")

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Tell the tier that its copies of `keys` are corrupt."""
        call = await self._call(_awaited(self.tier.forget, keys), self._clock() + 5.0)
        if call.error is not None:
            log.warning("tier %s could not forget corrupt chunks: %s", self.tier.name, call.error)

    def _refuse(self, breaker: Breaker) -> Outcome | None:
        if not self.is_open:
            return Outcome.LOST
        return None if breaker.allow(self._clock()) else Outcome.DROPPED

    async def _call(
        self,
        coroutine: Coroutine[Any, Any, T],
        deadline: float,
        stop: asyncio.Future[None] | None = None,
    ) -> Call[T]:
        task = self._tasks.start(coroutine, f"call-{self.tier.name}", judged=True)
        waits: set[asyncio.Future[Any]] = {task}
        if stop is not None:
            waits.add(stop)
        await asyncio.wait(
            waits,
            timeout=max(0.0, deadline - self._clock()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_SECONDS)
            return Call(task, late=True)
        return Call(task, late=False)

    def _judge(
        self, call: Call[Any], operation: str, stop: asyncio.Future[None], started: float
    ) -> Outcome:
        """Outcome of a call as a whole, told to the breaker."""
        breaker = self._breaker(operation)
        if call.late:
            gave_up = stop.done()
            # Others have been served since: it is busy, it does not hang.
            busy = self._served_at[operation] >= started
            blameless = busy or self.tier.waits_for_peers
            if blameless or (gave_up and not self._in_vain(operation, started)):
                breaker.inconclusive()
                return Outcome.CANCELLED if gave_up else Outcome.TIMEOUT
            when = "its request gave up" if gave_up else "the deadline"
            self._failed(operation, f"no answer before {when}")
            return Outcome.TIMEOUT
        if call.error is None:
            self._succeeded(operation)
            return Outcome.DONE
        if isinstance(call.error, asyncio.CancelledError):
            breaker.inconclusive()
            return Outcome.CANCELLED
        if isinstance(call.error, PeerLostError):
            breaker.inconclusive()  # its other peers may be well
            return Outcome.LOST
        self._failed(operation, str(call.error) or type(call.error).__name__)
        if isinstance(call.error, TierLostError | ClosedError | ConnectionError):
            return Outcome.LOST
        if isinstance(call.error, OSError):
            return Outcome.IO
        log.error("tier %s raised", self.tier.name, exc_info=call.error)
        return Outcome.INTERNAL

    def _in_vain(self, operation: str, started: float) -> bool:
        """Whether a read that was stopped had all the time for which a lookup waits.

        Most requests end a call that hangs long before its own deadline.
        """
        return operation != "store" and self._clock() - started >= self._lookup_seconds

    def _outcomes(
        self,
        call: Call[list[Outcome]],
        items: Sequence[Slot],
        operation: str,
        started: float,
        stop: asyncio.Future[None],
    ) -> list[Outcome]:
        seconds = self._clock() - started
        if call.late or call.error is not None:
            outcome = self._judge(call, operation, stop, started)
            self._count(operation, outcome, len(items))
            return [outcome] * len(items)
        try:
            # A tier may be anybody's: plain integers are well meant, anything else is its bug.
            outcomes = [Outcome(outcome) for outcome in call.result]
            bad = [
                item.key
                for item, outcome in zip(items, outcomes, strict=True)
                if operation == "load" and outcome is Outcome.DONE and item.crc is None
            ]
            if bad:
                raise ValueError(f"it loaded {len(bad)} chunks without their checksum")
        except (TypeError, ValueError) as exc:
            log.error("tier %s: %s of %d chunks: %s", self.tier.name, operation, len(items), exc)
            self._failed(operation, "it returned something else than an outcome for each chunk")
            self._count(operation, Outcome.INTERNAL, len(items))
            return [Outcome.INTERNAL] * len(items)
        moved_bytes = 0
        failure: Outcome | None = None
        succeeded = False
        for item, outcome in zip(items, outcomes, strict=True):
            if operation != "load" or outcome is not Outcome.DONE:
                self._count(operation, outcome, 1)
            if outcome is Outcome.DONE and operation == "store":
                moved_bytes += item.length
            elif outcome is Outcome.CORRUPT:
                self._count_corrupt(1)
            if outcome.failed and outcome is not Outcome.CORRUPT:
                failure = outcome
            elif outcome.ok or outcome is Outcome.MISSING:
                succeeded = True
        name = self.tier.name
        self._recorder.observe("kvtier_transfer_seconds", seconds, (name, operation))
        if moved_bytes:
            self._recorder.add("kvtier_transfer_bytes_total", moved_bytes, (name, operation))
        if succeeded:
            self._succeeded(operation)
        elif failure is not None:
            self._failed(operation, failure.name.lower())
        else:
            self._breaker(operation).inconclusive()
        return outcomes

    def _count(self, operation: str, outcome: Outcome, chunks: int) -> None:
        self._recorder.add(
            "kvtier_chunks_total", chunks, (self.tier.name, operation, outcome.name.lower())
        )

    def _breaker(self, operation: str) -> Breaker:
        return self._write if operation == "store" else self._read

    def _succeeded(self, operation: str) -> None:
        breaker = self._breaker(operation)
        self._served_at[operation] = self._clock()
        if operation == "load":
            self._load_failed = False
            self._served_at["exists"] = self._served_at["load"]
        elif operation == "exists" and self._load_failed:
            # A disk whose directories can be read while its files cannot: whether it is well again
            # only the next load tells.
            breaker.inconclusive()
            return
        if breaker.success():
            log.info("tier %s works again", self.tier.name)
            self._tell()

    def _failed(self, operation: str, cause: str) -> None:
        breaker = self._breaker(operation)
        self._load_failed |= operation == "load"
        if not breaker.failure(self._clock(), cause):
            return
        direction = "reads" if breaker is self._read else "writes"
        log.warning("tier %s: breaker for %s opens: %s", self.tier.name, direction, cause)
        self._recorder.add("kvtier_breaker_opened_total", 1, (self.tier.name,))
        self._tell()
        until = breaker.until
        assert until is not None
        # The owner sends something again only when told; the trial is the next real call.
        # Kept, because a lane that has been closed must not speak for the next one.
        self._timers[breaker] = asyncio.get_running_loop().call_later(
            until - self._clock(), self._tell
        )

    def _tell(self) -> None:
        """Tell the owner which directions it may use."""
        if self._closing:
            return  # the next lane of this tier speaks now
        now = self._clock()
        self._gauge()
        self._on_health(
            self.index,
            self._is_open and self._read.would_allow(now),
            self._is_open and self._write.would_allow(now),
            self._read.cause or self._write.cause,
        )

    def _post_contents(self, message: m.Contents) -> None:
        if not self._closing:  # as above
            self._on_contents(message)

    def _gauge(self) -> None:
        worst = max(breaker.state for breaker in (self._read, self._write))
        self._recorder.set("kvtier_breaker_state", float(worst), (self.tier.name,))


class Call(Generic[T]):
    """How a call into a tier ended, or that it was given up (``late``) and may still run."""

    __slots__ = ("_task", "error", "late", "settled")

    def __init__(self, task: asyncio.Task[T], late: bool) -> None:
        self._task = task
        self.late = late
        self.settled: asyncio.Future[Any] = task if not task.done() else _done()
        self.error: BaseException | None = None
        if task.done():
            # A late call may still have ended well within its grace; it is late all the same.
            self.error = asyncio.CancelledError() if task.cancelled() else task.exception()

    @property
    def result(self) -> T:
        """What the call returned; only without `error`."""
        return self._task.result()


async def _awaited(method: Callable[..., Awaitable[T]], *args: Any) -> T:
    """A tier may be anybody's: a method that lacks its ``async``, and so raises or returns before
    there is anything to wait for, fails like any other call."""
    return await method(*args)


def _done() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
