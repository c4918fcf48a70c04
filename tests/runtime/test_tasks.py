# SPDX-License-Identifier: Apache-2.0
"""A set of tasks and its end."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType

from kvtier.tiers.tasks import TaskSet
from tests.loops import Run


def test_closing_beside_a_task_that_has_just_ended(run: Run) -> None:
    """It has ended, and the loop has not told the set yet: the set must let it."""

    def hangs(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("the loop has no turn")

    async def nothing() -> None:
        pass

    async def main() -> None:
        tasks = TaskSet("set")
        task = tasks.start(nothing(), "nothing")
        # Runs in the same turn of the loop, after it.
        closing = asyncio.get_running_loop().create_task(tasks.aclose())
        await closing
        assert task.done()
        assert not len(tasks)

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    try:
        run(main())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
