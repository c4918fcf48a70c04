# SPDX-License-Identifier: Apache-2.0
"""A fixed set of threads that work on batches, and the coroutine side that waits for them.

Job: carry batches of system calls off the loop. Owns its threads. `Pool.run` is called on the loop;
steps run in the threads. Invariants: a call of `run` returns, normally or cancelled, only when no
thread works on its batch any more; a thread that hangs in a system call never holds up work that
another thread could do; a batch goes to the end of the queue whenever a thread has taken a part of
it, so a large one does not hold up a small one. Several threads help with one batch only when the
others in the queue have a thread each: every turn costs a thread the GIL, so a burst of batches is
best served by one thread for each of them, and a single batch by as many as it is worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvtier.errors import ClosedError, InternalError, TierLostError

T = TypeVar("T")

MAX_JOBS = 1024
"""Jobs in a pool at the same time; more are refused."""
STUCK_SECONDS = 1.0
"""A thread counts as stuck when its job was stopped this long ago and it has not come back."""


class Work(Protocol):
    """What threads share: parts are taken one by one until it is exhausted or stopped."""

    def stop(self) -> None:
        """Nobody takes another part."""

    @property
    def exhausted(self) -> bool:
        """No part is left to take."""


class End(enum.Enum):
    """How a job ended."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """Not started: the queue is full, or every thread is stuck."""
    TIMEOUT = "timeout"
    """Its deadline passed; some parts may not have been taken."""


class _Job:
    __slots__ = (
        "active", "done", "end", "error", "future", "queued", "step", "stopped_at", "urgent",
        "waiting", "width", "work",
    )  # fmt: skip

    def __init__(
        self,
        work: Work,
        step: Callable[[], object],
        future: asyncio.Future[None],
        width: int = 1,
        urgent: bool = False,
    ) -> None:
        self.work = work
        self.step = step
        self.future = future
        self.waiting = True
        """Its end has not reached the loop. Belongs to the loop."""
        self.width = width
        self.urgent = urgent
        self.active = 0
        self.queued = False
        self.done = False
        self.end = End.COMPLETE
        self.stopped_at: float | None = None
        self.error: BaseException | None = None


class _OneCall:
    """`Work` of a single plain function."""

    def __init__(self) -> None:
        self._taken = False

    def stop(self) -> None:
        self._taken = True

    @property
    def exhausted(self) -> bool:
        return self._taken

    def take(self) -> bool:
        """Whether the caller is the one to make the call. (Only one thread gets the job.)"""
        taken, self._taken = self._taken, True
        return not taken


class Pool:
    """Threads named ``<name>-<n>``, not bound to single cores.

    Parameters
    ----------
    name : str
    size : int
        Threads.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._lock = threading.Condition(threading.Lock())
        self._queue: deque[_Job] = deque()
        self._busy: dict[int, _Job] = {}
        self._jobs: set[_Job] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._ended = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all_ended: asyncio.Event | None = None

    def open(self) -> None:
        """Start the threads. Called on the loop that will call `run`."""
        self._loop = asyncio.get_running_loop()
        self._all_ended = asyncio.Event()
        for index in range(self.size):
            # Daemon: a call that hangs for good must not keep the process from ending.
            thread = threading.Thread(
                target=self._serve, args=(index,), name=f"{self.name}-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    @property
    def stuck(self) -> int:
        """Threads that are still in a system call of a job that was given up."""
        limit = time.monotonic() - STUCK_SECONDS
        with self._lock:
            return sum(
                job.stopped_at is not None and job.stopped_at <= limit
                for job in self._busy.values()
            )

    @property
    def alive(self) -> int:
        """Threads that have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        with self._lock:
            return len(self._jobs)

    async def run(
        self,
        work: Work,
        step: Callable[[], object],
        *,
        seconds: float,
        width: int = 1,
        urgent: bool = False,
    ) -> End:
        """Work on `work` with at most `width` threads until it is exhausted.

        `step` is called in threads, again and again; it takes parts of the work. When `seconds`
        have passed no more parts are taken, and `run` returns when those under way have ended.
        Cancellation does the same, then raises.

        Raises
        ------
        ClosedError
            The pool is closed.
        InternalError
            `step` raised.
        """
        loop = asyncio.get_running_loop()
        job = _Job(work, step, loop.create_future(), min(width, self.size), urgent)
        if (len(self._busy) == self.size and self.stuck == self.size) or not self._add(job):
            return End.REFUSED
        timer = loop.call_later(max(0.0, seconds), self._stop, job, End.TIMEOUT)
        cancelled: asyncio.CancelledError | None = None
        try:
            while job.waiting:
                try:
                    await job.future
                except asyncio.CancelledError as exc:
                    # The future went with the wait; what the threads do has to be awaited.
                    cancelled = exc
                    job.future = loop.create_future()
                    self._stop(job, End.TIMEOUT)
        finally:
            timer.cancel()
        if cancelled is not None:
            raise cancelled
        if job.error is not None:
            raise InternalError(f"{self.name}: {job.error!r}") from job.error
        return job.end

    async def call(self, function: Callable[[], T], *, seconds: float) -> T:
        """Result of a plain function, called in a thread.

        Unlike `run` this does not wait for a call that hangs: after `seconds`, or when cancelled,
        it is left to itself, so it must use nothing that the caller takes back.

        Raises
        ------
        TimeoutError
            No answer in time.
        TierLostError
            The pool takes no work.
        """
        work = _OneCall()
        results: list[T] = []
        job = _Job(
            work,
            lambda: results.append(function()) if work.take() else None,
            asyncio.get_running_loop().create_future(),
            urgent=True,
        )
        if not self._add(job):
            raise TierLostError(f"{self.name} takes no more work")
        try:
            await asyncio.wait((job.future,), timeout=max(0.0, seconds))
        finally:
            self._stop(job, End.TIMEOUT)
        if job.error is not None:
            raise job.error
        if not results:
            raise TimeoutError(f"{self.name}: no answer within {seconds:g} seconds")
        return results[0]

    def _add(self, job: _Job) -> bool:
        with self._lock:
            if self._closing:
                raise ClosedError(f"{self.name} is closed")
            if len(self._jobs) >= MAX_JOBS:
                return False
            self._jobs.add(job)
            self._enqueue(job, job.urgent)
            self._lock.notify()
        return True

    def _enqueue(self, job: _Job, urgent: bool) -> None:
        """Let (another) thread take parts of a job. Under the lock; the caller wakes a thread."""
        job.queued = True
        if urgent:
            self._queue.appendleft(job)
        else:
            self._queue.append(job)

    def _stop(self, job: _Job, end: End) -> None:
        """Take no more parts of a job. On the loop."""
        with self._lock:
            if job.done:
                return
            if not job.work.exhausted:
                job.end = end
            job.work.stop()
            if job.stopped_at is None:
                job.stopped_at = time.monotonic()
            self._finish_if_idle(job)

    def _finish_if_idle(self, job: _Job) -> None:
        """End a job on which nobody works and of which nothing is left. Under the lock."""
        if job.done or job.active or not job.work.exhausted:
            return
        job.done = True
        self._jobs.discard(job)
        self._tell(_resolve, job)

    def _serve(self, index: int) -> None:
        # New threads inherit the mask of the one that made them, and a model server binds its main
        # thread to one core. The kernel cuts this mask down to the cgroup's set.
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        while True:
            with self._lock:
                while not self._queue and not self._closing:
                    self._lock.wait()
                if not self._queue:
                    break
                job = self._queue.popleft()
                job.queued = False
                if job.work.exhausted:
                    self._finish_if_idle(job)
                    continue
                job.active += 1
                self._busy[index] = job
                if job.active < job.width:
                    # Each thread wakes the next one, so that none waits for a long row of wake-ups.
                    self._enqueue(job, job.urgent)
                    self._lock.notify()
            try:
                job.step()
            except BaseException as exc:  # noqa: BLE001 - handed to the waiter by `run`
                job.error = exc
                job.work.stop()
            with self._lock:
                del self._busy[index]
                job.active -= 1
                if job.work.exhausted:
                    self._finish_if_idle(job)
                elif not job.queued:
                    # This thread takes what is at the head of the queue: nobody to be woken.
                    self._enqueue(job, False)
        with self._lock:
            self._ended += 1
            last = self._ended == self.size
        if last:
            assert self._all_ended is not None
            self._tell(self._all_ended.set)

    def _tell(self, call: Callable[..., object], *what: object) -> None:
        """Call something on the loop. A thread that was left behind may outlive it."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *what)

    async def aclose(self, seconds: float) -> None:
        """Let the jobs finish for `seconds`, then stop them, and end the threads. Idempotent.

        Raises
        ------
        TierLostError
            Threads hang in system calls; they are left behind.
        """
        with self._lock:
            self._closing = True
            waiting = [job.future for job in self._jobs]
            self._lock.notify_all()
        try:
            if waiting:
                await asyncio.wait(waiting, timeout=max(0.0, seconds))
        finally:
            with self._lock:
                left = list(self._jobs)
            for job in left:
                self._stop(job, End.TIMEOUT)
        if not self._threads or self._all_ended is None:
            return
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                await self._all_ended.wait()
        except TimeoutError:
            raise TierLostError(
                f"{self.alive} threads of {self.name} hang in system calls and are left behind"
            ) from None
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def _resolve(job: _Job) -> None:
    job.waiting = False
    if not job.future.done():
        job.future.set_result(None)
