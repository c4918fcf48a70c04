# SPDX-License-Identifier: Apache-2.0
"""How many requests may be under way: more while that moves more, half when the store says so.

Runs on the service's loop; reads no clock but the one it is given. Owns the queues of those that
wait, one for each `Rank`; within one, first come first served. Questions go first and stores last:
whoever asks waits for the answer, and behind a few hundred megabytes of chunks it would come too
late; but each fourth place is for the last of them, so that nobody waits for ever. Invariants:
never more than ``most`` hold a place; a place that was taken comes back once.

The rule: a round is as many requests as there are places. A round that was held up by the limit and
moved more a second than the best so far makes the limit a quarter larger (twice as large, until the
first that did not); one that did not, gives back the step that brought nothing, and the next try
waits for some rounds, longer each time. Questions bring no bytes: they make a round only where no
body was moved meanwhile, and rounds of theirs are compared with each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from enum import IntEnum

START = 8
LEAST = 1
BETTER = 1.03
"""A round must be better by so much to count: less is noise."""
PATIENCE_ROUNDS = 2
"""Few: far from the store's limit a round that brought nothing was mostly noise."""
MAX_PATIENCE_ROUNDS = 256
FAIR = 4
"""One place in so many is for those that wait behind all others."""


class Rank(IntEnum):
    """Who goes first."""

    QUESTION = 0
    LOAD = 1
    STORE = 2


class Limit:
    """An adaptive semaphore.

    Parameters
    ----------
    most : int
        Places at most.
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self.most = most
        self.places = min(START, most)
        """Places at present."""
        self.taken = 0
        self._clock = clock
        self._waiters: tuple[deque[asyncio.Future[None]], ...] = tuple(deque() for _ in Rank)
        self._admitted = 0  # of those that had to wait
        self._best_rate = {True: 0.0, False: 0.0}  # of bodies, of questions
        self._before = self.places  # what it was before the last step up
        self._stepped = True  # whether for bodies
        self._is_new = True  # no step has been in vain yet
        self._patience = PATIENCE_ROUNDS
        self._pause = 0  # rounds until the next step up
        self._slowed_at = -math.inf
        self._begin_round()

    def _begin_round(self) -> None:
        self._began_at = self._clock()
        self._ended = 0
        self._answered = 0
        self._work = 0
        self._was_full = False

    async def take(self, rank: Rank) -> None:
        """Wait for a place. On cancellation none is taken."""
        if self.taken < self.places and not any(self._waiters):
            self.taken += 1
            return
        self._was_full = True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[rank].append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._free()  # the place had just been given
            else:
                # Perhaps it was passed over already, when a place came back in the same turn.
                with contextlib.suppress(ValueError):
                    self._waiters[rank].remove(waiter)
            raise

    def give(self, rank: Rank, work: int) -> None:
        """The place is free again; the request moved so much: bytes, or an answer."""
        self._free()
        if rank is Rank.QUESTION:
            self._answered += work
            if not self._ended and self._answered >= self.places:
                self._end_round(bodies=False)
            return
        self._ended += 1
        self._work += work
        if self._ended >= self.places:
            self._end_round(bodies=True)

    def slow_down(self, since: float) -> None:
        """The store asked for less, in answer to a request that began at `since`.

        Answers to what was sent before the limit was halved say nothing new.
        """
        if since < self._slowed_at:
            return
        self._slowed_at = self._clock()
        self.places = max(LEAST, self.places // 2)
        self._before = self.places
        self._is_new = False
        self._best_rate = {True: 0.0, False: 0.0}
        self._pause = self._patience
        self._begin_round()

    def _free(self) -> None:
        self.taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self.taken < self.places:
            waiting = [queue for queue in self._waiters if queue]
            if not waiting:
                return
            last = self._admitted % FAIR == FAIR - 1
            waiter = waiting[-1 if last else 0].popleft()
            if not waiter.done():
                self._admitted += 1
                self.taken += 1
                waiter.set_result(None)

    def _end_round(self, bodies: bool) -> None:
        seconds = self._clock() - self._began_at
        was_full, work = self._was_full, self._work if bodies else self._answered
        self._begin_round()
        if not was_full or seconds <= 0.0:
            return
        rate = work / seconds
        if rate > BETTER * self._best_rate[bodies]:
            self._best_rate[bodies] = rate
            self._patience = PATIENCE_ROUNDS
            self._step_up(bodies)
        elif self.places > self._before and self._stepped is bodies:
            # The last step brought nothing.
            self.places = self._before
            self._is_new = False
            self._pause = self._patience
            self._patience = min(2 * self._patience, MAX_PATIENCE_ROUNDS)
        elif self._pause > 0:
            self._pause -= 1
        else:
            # What was best may have been a good minute of the store's.
            self._best_rate[bodies] = rate
            self._step_up(bodies)

    def _step_up(self, bodies: bool) -> None:
        self._before, self._stepped = self.places, bodies
        step = self.places if self._is_new else max(1, self.places // 4)
        self.places = min(self.most, self.places + step)
        self._admit()
