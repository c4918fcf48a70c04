# SPDX-License-Identifier: Apache-2.0
"""Both event loops: the fixture that runs a test's coroutine on each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvtier.testing import leaks
from kvtier.testing.loops import LOOPS

Run = Callable[[Coroutine[Any, Any, Any]], Any]
SECONDS = 30


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a coroutine on the loop of this case; fails on tasks left and after `SECONDS`."""
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:

        async def watched(coroutine: Coroutine[Any, Any, Any]) -> Any:
            async with leaks.check_tasks(), asyncio.timeout(SECONDS):
                return await coroutine

        yield lambda coroutine: runner.run(watched(coroutine))
