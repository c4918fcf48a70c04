# SPDX-License-Identifier: Apache-2.0
"""How threads share batches."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest

from kvtier.tiers.fs.pool import End, Pool

SECONDS = 10.0


class Parts:
    """`count` parts; each step takes one and calls `meet` in its thread."""

    def __init__(self, count: int, meet) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._meet = meet
        self.threads: list[str] = []

    def stop(self) -> None:
        with self._lock:
            self._left = 0

    @property
    def exhausted(self) -> bool:
        return self._left == 0

    def step(self) -> None:
        with self._lock:
            if not self._left:
                return
            self._left -= 1
            self.threads.append(threading.current_thread().name)
        self._meet()


async def run(pool: Pool, *works: tuple[Parts, int]) -> list[End]:
    return await asyncio.gather(
        *(pool.run(work, work.step, seconds=SECONDS, width=width) for work, width in works)
    )


@pytest.mark.asyncio
async def test_threads_help_with_a_single_batch() -> None:
    """All four are in a step at the same time, else the barrier breaks."""
    pool = Pool("help", 4)
    pool.open()
    try:
        work = Parts(4, threading.Barrier(4, timeout=SECONDS).wait)
        assert await run(pool, (work, 4)) == [End.COMPLETE]
        assert len(set(work.threads)) == 4
    finally:
        await pool.aclose(SECONDS)


@pytest.mark.asyncio
async def test_no_more_threads_than_the_batch_is_worth() -> None:
    """Width 1 in a pool of four: never two steps at the same time."""
    inside = threading.Semaphore(1)
    overlaps: list[str] = []

    def alone() -> None:
        if not inside.acquire(blocking=False):
            overlaps.append(threading.current_thread().name)
            return
        threading.Event().wait(0.002)  # long enough for another thread to come in
        inside.release()

    pool = Pool("width", 4)
    pool.open()
    try:
        work = Parts(50, alone)
        assert await run(pool, (work, 1)) == [End.COMPLETE]
        assert len(work.threads) == 50
        assert not overlaps
    finally:
        await pool.aclose(SECONDS)


@pytest.mark.asyncio
async def test_each_batch_of_a_burst_gets_a_thread_before_any_gets_two() -> None:
    """Four batches of four parts and four threads: the first four steps are one of each."""
    pool = Pool("burst", 4)
    barrier = threading.Barrier(4, timeout=SECONDS)
    order: list[int] = []

    def meet(number: int) -> None:
        order.append(number)
        barrier.wait()

    works = [Parts(4, functools.partial(meet, number)) for number in range(4)]
    inside, gate = (threading.Barrier(5, timeout=SECONDS) for _ in range(2))

    def hold() -> None:
        inside.wait()
        gate.wait()

    blocker = Parts(4, hold)
    pool.open()
    try:
        first = asyncio.ensure_future(run(pool, (blocker, 4)))
        await asyncio.to_thread(inside.wait)
        burst = asyncio.ensure_future(run(pool, *((work, 4) for work in works)))
        while pool.jobs < 5:
            await asyncio.sleep(0)
        await asyncio.to_thread(gate.wait)
        assert await first == [End.COMPLETE]
        assert await burst == [End.COMPLETE] * 4
        assert sorted(order[:4]) == [0, 1, 2, 3]
    finally:
        await pool.aclose(SECONDS)


@pytest.mark.asyncio
async def test_cancelled_twice_still_waits_for_the_thread() -> None:
    inside, release = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert release.wait(SECONDS)

    pool = Pool("cancel", 2)
    pool.open()
    try:
        work = Parts(3, hang)
        task = asyncio.create_task(pool.run(work, work.step, seconds=SECONDS))
        await asyncio.to_thread(inside.wait, SECONDS)
        for _ in range(2):
            task.cancel()
            done, _ = await asyncio.wait((task,), timeout=0.05)
            assert not done
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(work.threads) == 1
    finally:
        release.set()
        await pool.aclose(SECONDS)
