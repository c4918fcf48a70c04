# SPDX-License-Identifier: Apache-2.0
"""Lane: stores in batches, behind loads, and some of them at a time."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import pytest

from kvtier.runtime import lane as lane_module
from kvtier.testing.faults import Script, ScriptedTier
from kvtier.types import Outcome
from tests.engine.rig import key
from tests.loops import Run
from tests.runtime.conftest import Bench
from tests.runtime.test_lane import closed, context, items, never, opened, until, waiting


@pytest.fixture
def one_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is a batch of its own."""
    monkeypatch.setattr(lane_module, "STORE_BATCH_BYTES", 1)


@pytest.mark.usefixtures("one_a_batch")
def test_loads_go_before_stores(run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long store yields to a load between its batches, but is not starved by it."""
    script = Script("tier")
    monkeypatch.setattr(lane_module, "STORE_PAUSE_SECONDS", 0.3)

    async def main() -> None:
        lane = await opened(bench.lane(script))
        stored = await items(bench, 1, 2, 3)
        target = bench.memory.slot(key(1), 5, 0)
        script.gates["store"].close()
        store = asyncio.ensure_future(lane.store(stored, context(), never()))
        await waiting(script, "store")
        script.gates["load"].close()
        load = asyncio.ensure_future(lane.load([target], context(), never()))
        await waiting(script, "load")
        script.gates["store"].open()
        await until(lambda: key(1) in script.chunks)
        await asyncio.sleep(0.05)
        assert set(script.chunks) == {key(1)}  # the second batch lets the load go first
        script.gates["load"].open()
        assert (await load)[0] == [Outcome.DONE]
        assert (await store)[0] == [Outcome.DONE] * 3
        # A load that takes long holds it up no longer than the pause, for each batch.
        script.gates["load"].close()
        load = asyncio.ensure_future(lane.load([target], context(), never()))
        await waiting(script, "load")
        script.chunks.clear()
        started = time.monotonic()
        await lane.store(stored[:2], context(), never())
        assert 0.5 < time.monotonic() - started < 3
        assert not load.done()
        script.gates["load"].open()
        await load
        await closed(lane)

    run(main())


def test_a_trial_that_is_cancelled_allows_another(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script("tier")
    monkeypatch.setattr(lane_module, "STORE_PAUSE_SECONDS", 10.0)

    async def main() -> None:
        lane = await opened(bench.lane(script, breaker={"failures": 1, "open_seconds": 0.02}))
        slots = await items(bench, 1)
        script.outcomes["store"] = [Outcome.IO]
        await lane.store(slots, context(), never())
        await until(lambda: bench.health[-1][2])
        script.gates["load"].close()
        load = asyncio.ensure_future(lane.load(slots, context(), never()))
        await waiting(script, "load")
        trial = asyncio.ensure_future(lane.store(slots, context(), never()))
        await asyncio.sleep(0.02)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        script.gates["load"].open()
        await load
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.DONE]
        await closed(lane)

    run(main())


class Several(ScriptedTier):
    stores_at_once: ClassVar[int] = 3


@pytest.mark.usefixtures("one_a_batch")
@pytest.mark.parametrize(("kind", "at_once"), [(ScriptedTier, 1), (Several, 3)])
def test_as_many_batches_at_a_time_as_the_tier_likes(
    run: Run, bench: Bench, kind: Any, at_once: int
) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, kind=kind))
        script.outcomes["store"] = [Outcome.DONE, Outcome.FULL, Outcome.DONE, Outcome.EXISTS]
        script.gates["store"].close()
        store = asyncio.ensure_future(
            lane.store(await items(bench, 1, 2, 3, 4), context(), never())
        )
        for _ in range(at_once):
            await waiting(script, "store")
        script.gates["store"].open()
        outcomes, calls = await store
        if at_once == 1:
            assert outcomes == [Outcome.DONE, Outcome.FULL, Outcome.DONE, Outcome.EXISTS]
        else:  # the script's answers go to calls that end in any order
            assert sorted(outcomes) == [Outcome.DONE, Outcome.DONE, Outcome.EXISTS, Outcome.FULL]
        assert [call.done() for call in calls] == [True] * 4
        assert script.peak["store"] == at_once
        assert await lane.store([], context(), never()) == ([], [])
        await closed(lane)

    run(main())


@pytest.mark.usefixtures("one_a_batch")
def test_behind_an_open_breaker_one_batch_tries_for_all(run: Run, bench: Bench) -> None:
    script = Script("tier")

    async def main() -> None:
        breaker = {"failures": 1, "open_seconds": 0.02}
        lane = await opened(bench.lane(script, kind=Several, breaker=breaker))
        stored = await items(bench, 1, 2, 3, 4)
        script.outcomes["store"] = [Outcome.IO]
        await lane.store(stored[:1], context(), never())
        await asyncio.sleep(0.05)
        assert (await lane.store(stored, context(), never()))[0] == [Outcome.DONE] * 4
        await closed(lane)

    run(main())


@pytest.mark.usefixtures("one_a_batch")
def test_a_store_that_is_cancelled_ends_all_its_batches(run: Run, bench: Bench) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, kind=Several))
        script.gates["store"].close()
        stop = never()
        store = asyncio.ensure_future(lane.store(await items(bench, 1, 2, 3, 4), context(), stop))
        for _ in range(3):
            await waiting(script, "store")
        stop.set_result(None)
        assert (await store)[0] == [Outcome.CANCELLED] * 4
        assert script.running["store"] == 0
        script.gates["store"].open()
        await closed(lane)

    run(main())
