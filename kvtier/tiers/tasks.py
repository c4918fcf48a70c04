# SPDX-License-Identifier: Apache-2.0
"""A set of named tasks with one owner.

Unlike ``asyncio.TaskGroup`` it lives as long as its owner, and a failing task does not take its
neighbours with it: it is logged, and counted as a bug.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class TaskSet:
    """Tasks that end with their owner.

    Parameters
    ----------
    name : str
        Prefix of the tasks' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, coroutine: Coroutine[Any, Any, T], what: str, *, judged: bool = False
    ) -> asyncio.Task[T]:
        """Run `coroutine` as a task of this set.

        Parameters
        ----------
        judged : bool
            The caller looks at the task's exception; otherwise one is a bug, and logged.
        """
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._name}:{what}")
        self._tasks.add(task)
        task.add_done_callback(self._ended_judged if judged else self._ended)
        return task

    def _ended_judged(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieved, so that a call given up as late is no warning at exit.
            task.exception()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    def cancel(self) -> None:
        """Cancel what still runs, without waiting."""
        for task in list(self._tasks):
            task.cancel()

    async def wait(self, seconds: float) -> int:
        """Wait up to `seconds` for all to end; how many have not."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
        return len(self._tasks)

    async def aclose(self) -> None:
        """Cancel what still runs and wait for it."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            # Not gather: from Python 3.12 on it lets the loop have no turn when all tasks have
            # ended already, and without one `_ended` never takes them out of the set.
            await asyncio.wait(tasks)
