# SPDX-License-Identifier: Apache-2.0
"""What a tier holds is told in parts, again when much has come, and never with a key missing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.engine.contents import Contents
from kvtier.errors import TierLostError
from kvtier.runtime import lane as lane_module
from kvtier.runtime import lister as lister_module
from kvtier.runtime import messages as m
from kvtier.runtime.lane import Lane
from kvtier.testing.faults import Script, ScriptedTier
from kvtier.tiers.base import Slot, TierContext
from kvtier.types import Outcome
from tests.engine.rig import key, keys
from tests.loops import Run
from tests.runtime.conftest import Bench
from tests.runtime.test_lane import closed, context, items, never, opened, until, waiting

SPARE = 8


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, and turns of the loop between them, for few keys."""
    monkeypatch.setattr(lister_module, "SPARE_KEYS", SPARE)
    monkeypatch.setattr(lister_module, "PART_BYTES", 64)
    monkeypatch.setattr(lister_module, "SLICE_KEYS", 3)


def filled(count: int) -> Script:
    script = Script("tier")
    script.chunks.update(dict.fromkeys(keys(*range(count)), (b"", 0)))
    return script


async def started(bench: Bench, script: Script, **more: Any) -> Lane:
    lane = await opened(bench.lane(script, private=True, **more))
    lane.tell_contents()
    return lane


def listings(bench: Bench, finals: bool = True) -> int:
    return sum(part.final if finals else not part.bits for part in bench.contents)


async def listed(bench: Bench, count: int = 1) -> None:
    await until(lambda: listings(bench) == count)


def absent(parts: Sequence[m.Contents], names: Sequence[bytes]) -> list[bytes]:
    """Those of the keys that an owner who was told this knows to be absent."""
    contents = Contents()
    for part in parts:
        contents.take(part, [])
    return [name for name in names if not contents.first_absent([name], 0)]


@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_parts_of_a_filter(run: Run, bench: Bench, count: int) -> None:
    script = filled(count)

    async def main() -> None:
        lane = await started(bench, script, index=3)
        await listed(bench)
        first, *parts = bench.contents
        room = count + max(SPARE, count)
        assert first == m.Contents(3, room, 0, b"", False)
        assert [part.offset for part in parts] == list(range(0, 64 * len(parts), 64))
        assert {(part.tier, part.room, len(part.bits)) for part in parts} == {(3, room, 64)}
        assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
        assert absent(bench.contents, keys(*range(count))) == []
        assert len(absent(bench.contents, keys(*range(1000, 1100)))) > 90
        # Until the last part has come nothing is known, and so nothing absent.
        for number in range(len(bench.contents)):
            assert absent(bench.contents[:number], keys(5000)) == []
        await closed(lane)

    run(main())


def test_a_tier_that_others_write_too_tells_nothing(run: Run, bench: Bench) -> None:
    script = filled(5)

    async def main() -> None:
        lane = await opened(bench.lane(script))
        lane.tell_contents()
        await lane.store(await items(bench, *range(8)), context(), never())
        await lane.store(await items(bench, *range(8)), context(), never())
        await asyncio.sleep(0.02)
        assert bench.contents == []
        await closed(lane)

    run(main())


def test_nothing_is_told_before_the_owner_knows_of_the_start(run: Run, bench: Bench) -> None:
    """It would be forgotten with the news of the start."""

    script = filled(5)

    async def main() -> None:
        lane = await opened(bench.lane(script, private=True))
        await asyncio.sleep(0.02)
        assert bench.contents == []
        lane.tell_contents()
        await listed(bench)
        await closed(lane)

    run(main())


def test_a_tier_that_comes_up_late_is_listed_then(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "REOPEN_SECONDS", 0.01)
    script = filled(5)

    async def main() -> None:
        script.always["open"] = Outcome.LOST
        lane = bench.lane(script, private=True)
        assert await lane.open(time.monotonic() + 5) == "LOST"
        lane.tell_contents()
        await asyncio.sleep(0.02)
        assert bench.contents == []
        del script.always["open"]
        await listed(bench)
        assert absent(bench.contents, keys(*range(5))) == []
        await closed(lane)

    run(main())


def test_a_tier_that_comes_up_before_the_others_waits_for_them(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "REOPEN_SECONDS", 0.01)
    script = filled(5)

    async def main() -> None:
        script.always["open"] = Outcome.LOST
        lane = bench.lane(script, private=True)
        assert await lane.open(time.monotonic() + 5) == "LOST"
        del script.always["open"]
        await until(lambda: bench.health == [(0, True, True, "")])
        await asyncio.sleep(0.02)
        assert bench.contents == []
        lane.tell_contents()
        await listed(bench)
        await closed(lane)

    run(main())


def test_listed_again_when_more_has_come_than_there_is_room_for(run: Run, bench: Bench) -> None:
    script = filled(0)

    async def main() -> None:
        lane = await started(bench, script)
        await listed(bench)
        await lane.store(await items(bench, *range(SPARE)), context(), never())
        await asyncio.sleep(0.02)
        assert listings(bench) == 1
        await lane.store(await items(bench, 100), context(), never())
        await listed(bench, 2)
        again = [i for i, part in enumerate(bench.contents) if not part.bits][1]
        there = keys(*range(SPARE))
        assert absent(bench.contents[again:], there) == []
        # As much again goes in before the next one.
        await lane.store(await items(bench, *range(200, 200 + SPARE - 1)), context(), never())
        await asyncio.sleep(0.02)
        assert listings(bench) == 2
        await closed(lane)

    run(main())


def test_room_grows_with_what_is_there(run: Run, bench: Bench) -> None:
    script = filled(20)

    async def main() -> None:
        lane = await started(bench, script)
        await listed(bench)
        for start in (100, 200):
            await lane.store(await items(bench, *range(start, start + 8)), context(), never())
        await asyncio.sleep(0.02)
        assert listings(bench) == 1  # sixteen
        await lane.store(await items(bench, *range(300, 305)), context(), never())
        await listed(bench, 2)
        await closed(lane)

    run(main())


def test_one_listing_at_a_time(run: Run, bench: Bench) -> None:
    script = filled(0)

    async def main() -> None:
        lane = await started(bench, script)
        await listed(bench)
        script.gates["contents"].close()
        for start in (100, 200, 300):
            await lane.store(await items(bench, *range(start, start + 8)), context(), never())
        await waiting(script, "contents")
        assert script.peak["contents"] == 1
        script.gates["contents"].open()
        await listed(bench, 2)
        start_of_second = [i for i, part in enumerate(bench.contents) if not part.bits][1]
        assert absent(bench.contents[start_of_second:], sorted(script.chunks)) == []
        await closed(lane)

    run(main())


def test_stored_before_the_first_part_is_in_the_filter(run: Run, bench: Bench) -> None:
    """While the tier still looks what it has, stores go on."""
    script = filled(3)
    script.gates["contents"].close()

    async def main() -> None:
        lane = await started(bench, script)
        await waiting(script, "contents")
        await lane.store(await items(bench, 50, 51), context(), never())
        assert bench.contents == []
        script.gates["contents"].open()
        await listed(bench)
        assert absent(bench.contents, keys(0, 1, 2, 50, 51)) == []
        await closed(lane)

    run(main())


class Unstoppable(ScriptedTier):
    """Its stores go on to their end, like those of a thread."""

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        task = asyncio.ensure_future(super().store(items, ctx))
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(task)
        return task.result()


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_store_that_was_given_up_may_end_well(run: Run, bench: Bench, ends: str) -> None:
    """The owner was told that it failed, and does not add it to what comes."""
    script = filled(1)

    async def main() -> None:
        lane = await opened(bench.lane(script, private=True, kind=Unstoppable))
        script.gates["store"].close()
        slots = await items(bench, 50, 51)
        outcomes, (call,) = await lane.store(slots, context(0.02), never())
        assert outcomes == [Outcome.TIMEOUT] * 2
        assert not call.done()
        if ends == "after":
            lane.tell_contents()
            await listed(bench)
        script.gates["store"].open()
        await asyncio.wait({call})
        assert key(50) in script.chunks
        if ends == "before":
            lane.tell_contents()
            await listed(bench)
        assert absent(bench.contents, keys(0, 50, 51)) == []
        assert not lane._lister._hung
        await closed(lane)

    run(main())


def test_a_tier_that_cannot_tell_is_asked(
    run: Run, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    script = filled(3)
    script.raises["contents"] = OSError("no such luck")

    async def main() -> None:
        lane = await started(bench, script)
        await until(lambda: "list-tier failed" in caplog.text)
        await lane.store(await items(bench, *range(8)), context(), never())
        await lane.store(await items(bench, *range(8)), context(), never())
        assert bench.contents == []
        await closed(lane)

    run(main())
    assert len(caplog.records) == 1


def test_one_that_fails_later_is_not_tried_at_every_store(
    run: Run, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    script = filled(0)

    async def main() -> None:
        lane = await started(bench, script)
        await listed(bench)
        script.raises["contents"] = OSError("no such luck")
        await lane.store(await items(bench, *range(8)), context(), never())
        for number in range(6):
            await lane.store(await items(bench, 100 + number), context(), never())
            await asyncio.sleep(0.005)
        assert [call for call, _ in script.calls].count("contents") == 2
        script.raises.clear()
        await lane.store(await items(bench, *range(200, 208)), context(), never())
        await listed(bench, 2)
        await closed(lane)

    run(main())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("wrong", [5, ["text"], [b"shrt"], [None]])
def test_a_tier_that_tells_nonsense_is_asked(
    run: Run, bench: Bench, caplog: pytest.LogCaptureFixture, wrong: Any
) -> None:
    class Wrong(ScriptedTier):
        async def contents(self) -> Any:
            return wrong

    script = filled(1)

    async def main() -> None:
        lane = await started(bench, script, kind=Wrong)
        await until(lambda: "list-tier failed" in caplog.text)
        assert listings(bench) == 0
        assert absent(bench.contents, keys(0, 1)) == []
        await closed(lane)

    run(main())


@pytest.mark.parametrize("stubborn", [False, True])
def test_close_beside_a_listing_that_hangs(run: Run, bench: Bench, stubborn: bool) -> None:
    """It is bounded, and what comes after it is no news of the lane that follows."""
    script = filled(3)
    script.gates["contents"].close()
    if stubborn:
        script.stubborn.add("contents")

    async def main() -> None:
        lane = await started(bench, script)
        await waiting(script, "contents")
        begun = time.monotonic()
        if stubborn:
            with pytest.raises(TierLostError, match="hangs"):
                await lane.aclose(time.monotonic() + 0.1)
        else:
            await closed(lane)
        assert time.monotonic() - begun < 1
        script.gates["contents"].open()
        await lane.ended()
        assert lane.tasks == 0
        assert bench.contents == []

    run(main())


def test_close_heedless_of_cancellation(run: Run, bench: Bench) -> None:
    """A tier that takes the cancellation for an answer speaks for nobody."""

    class Heedless(ScriptedTier):
        async def contents(self) -> list[bytes]:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                return []
            raise AssertionError("nothing else ends the wait")

    script = filled(3)

    async def main() -> None:
        lane = await started(bench, script, kind=Heedless)
        await asyncio.sleep(0)
        await lane.aclose(time.monotonic() + 0.1)
        assert lane.tasks == 0
        assert bench.contents == []

    run(main())


def test_close_in_the_middle_of_the_parts(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister_module, "PAUSE_SECONDS", 3600.0)

    script = filled(300)

    async def main() -> None:
        lane = await started(bench, script)
        await until(lambda: len(bench.contents) == 2)
        await closed(lane)
        assert listings(bench) == 0
        assert absent(bench.contents, keys(5000)) == []

    run(main())
