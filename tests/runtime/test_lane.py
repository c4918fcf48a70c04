# SPDX-License-Identifier: Apache-2.0
"""Lane: deadlines, breakers, priorities, outcomes, and calls that end when they like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvtier.errors import ConfigError, TierLostError
from kvtier.runtime import lane as lane_module
from kvtier.runtime.lane import Lane
from kvtier.testing.faults import Gate, Script, ScriptedTier
from kvtier.tiers.base import Slot, TierContext
from kvtier.types import Outcome, Presence
from tests.engine.rig import key, keys, payload
from tests.loops import Run
from tests.runtime.conftest import Bench


def context(seconds: float = 5.0) -> TierContext:
    return TierContext(deadline=time.monotonic() + seconds)


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def items(bench: Bench, *numbers: int) -> list[Slot]:
    """Slots that hold the payloads of these keys, with their CRCs."""
    slots = []
    for position, number in enumerate(numbers):
        slot = bench.memory.slot(key(number), position, 0)
        slot.view[:] = payload(key(number))
        slots.append(slot)
    for slot, crc in zip(slots, await bench.memory._crcs(slots), strict=True):
        slot.crc = crc
    return slots


async def opened(lane: Lane) -> Lane:
    assert await lane.open(time.monotonic() + 5) == ""
    return lane


async def closed(lane: Lane) -> None:
    await lane.aclose(time.monotonic() + 1)
    assert lane.tasks == 0


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def waiting(script: Script, operation: str) -> None:
    await until(lambda: script.gates[operation].waiting.acquire(blocking=False))


def test_round_trip(run: Run, bench: Bench) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script))
        stored = await items(bench, 1, 2)
        outcomes, settled = await lane.store(stored, context(), never())
        assert outcomes == [Outcome.DONE] * 2
        assert all(call.done() for call in settled)
        assert await lane.exists(keys(1, 3), context(), never()) == [
            Presence.PRESENT,
            Presence.ABSENT,
        ]
        for item in stored:
            item.view[:] = bytes(item.length)
        targets = [bench.memory.slot(name, i, 0) for i, name in enumerate(keys(1, 3, 2))]
        got, call = await lane.load(targets, context(), never())
        assert got == [Outcome.DONE, Outcome.MISSING, Outcome.DONE]
        assert call.done()
        assert await bench.memory.verify([targets[0], targets[2]]) == [True, True]
        assert bytes(targets[0].view) == payload(key(1))
        assert bytes(targets[2].view) == payload(key(2))
        await closed(lane)

    run(main())


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("operation", ["exists", "load", "store"])
def test_deadline(run: Run, bench: Bench, operation: str, stubborn: bool) -> None:
    """A call ends by its deadline; its slots are settled when it has really ended."""
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script))
        script.gates[operation].close()
        if stubborn:
            script.stubborn.add(operation)
        slots = await items(bench, 1)
        started = time.monotonic()
        settled: list[asyncio.Future[Any]] = []
        if operation == "exists":
            assert await lane.exists(keys(1), context(0.1), never()) is Outcome.TIMEOUT
        elif operation == "load":
            outcomes, call = await lane.load(slots, context(0.1), never())
            assert outcomes == [Outcome.TIMEOUT]
            settled = [call]
        else:
            outcomes, settled = await lane.store(slots, context(0.1), never())
            assert outcomes == [Outcome.TIMEOUT]
        assert 0.09 <= time.monotonic() - started < 1.0  # timers fire a little early
        assert all(call.done() for call in settled) != (stubborn and operation != "exists")
        assert bool(lane.tasks) == stubborn
        script.gates[operation].open()
        if settled:
            await asyncio.wait(settled, timeout=5)
            assert all(call.done() for call in settled)
        await until(lambda: lane.tasks == 0)
        assert bench.value("kvtier_chunks_total", "tier", operation, "timeout") == 1
        await closed(lane)

    run(main())


@pytest.mark.parametrize("operation", ["exists", "load", "store"])
def test_stop_ends_a_call_without_blame(run: Run, bench: Bench, operation: str) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, breaker={"failures": 1}))
        script.gates[operation].close()
        stop = never()
        slots = await items(bench, 1)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "exists": lambda: lane.exists(keys(1), context(), stop),
            "load": lambda: lane.load(slots, context(), stop),
            "store": lambda: lane.store(slots, context(), stop),
        }
        task = asyncio.ensure_future(calls[operation]())
        await waiting(script, operation)
        stop.set_result(None)
        answer = await task
        assert Outcome.CANCELLED in (answer, *(answer[0] if isinstance(answer, tuple) else ()))
        script.gates[operation].open()
        stop = never()
        answer = await calls[operation]()  # the breaker did not open
        assert answer != Outcome.DROPPED
        assert bench.health == []
        await closed(lane)

    run(main())


@pytest.mark.parametrize("operation", ["exists", "load"])
def test_a_call_that_its_request_waited_for_in_vain_has_failed(
    run: Run, bench: Bench, operation: str
) -> None:
    """Requests give a tier that hangs up long before the deadline of its calls."""
    script = Script("tier")

    async def main() -> None:
        lane = bench.lane(script, breaker={"failures": 1}, lookup_timeout_seconds=0.05)
        await opened(lane)
        script.gates[operation].close()
        stop = never()
        slots = await items(bench, 1)
        if operation == "exists":
            task = asyncio.ensure_future(lane.exists(keys(1), context(), stop))
        else:
            task = asyncio.ensure_future(lane.load(slots, context(), stop))
        await waiting(script, operation)
        await asyncio.sleep(0.06)
        stop.set_result(None)
        answer: Any = await task
        assert answer is Outcome.TIMEOUT or answer[0] == [Outcome.TIMEOUT]
        assert bench.value("kvtier_chunks_total", "tier", operation, "timeout") == 1
        assert bench.health[-1][1] is False
        script.gates[operation].open()
        await closed(lane)

    run(main())


@pytest.mark.parametrize("end", ["stop", "deadline"])
@pytest.mark.parametrize("operation", ["exists", "load", "store"])
def test_a_tier_is_not_blamed_for_a_peer_that_hangs(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch, operation: str, end: str
) -> None:
    """Nobody else is served meanwhile: all that there are wait for that peer."""
    monkeypatch.setattr(ScriptedTier, "waits_for_peers", True)
    script = Script("tier")

    async def main() -> None:
        lane = bench.lane(script, breaker={"failures": 1}, lookup_timeout_seconds=0.05)
        await opened(lane)
        slots = await items(bench, 1)
        script.gates[operation].close()
        stop = never()
        limits = context(5.0 if end == "stop" else 0.1)
        subject = keys(1) if operation == "exists" else slots
        hangs = asyncio.ensure_future(getattr(lane, operation)(subject, limits, stop))
        await waiting(script, operation)
        await asyncio.sleep(0.06)
        if end == "stop":
            stop.set_result(None)
        answer: Any = await hangs
        expected = Outcome.CANCELLED if end == "stop" else Outcome.TIMEOUT
        assert answer is expected or answer[0] == [expected]
        script.gates[operation].open()
        assert bench.health == []
        await closed(lane)

    run(main())


@pytest.mark.parametrize("end", ["stop", "deadline"])
@pytest.mark.parametrize("operation", ["exists", "load", "store"])
def test_a_tier_that_serves_others_meanwhile_is_busy_and_does_not_hang(
    run: Run, bench: Bench, operation: str, end: str
) -> None:
    """Calls wait in the tier's own queue as well, and many of them end together."""
    script = Script("tier")

    async def main() -> None:
        lane = bench.lane(script, breaker={"failures": 1}, lookup_timeout_seconds=0.05)
        await opened(lane)
        slots = await items(bench, 1)
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.DONE]

        def call(seconds: float, stop: asyncio.Future[None]) -> Awaitable[Any]:
            if operation == "exists":
                return lane.exists(keys(1), context(seconds), stop)
            return getattr(lane, operation)(slots, context(seconds), stop)

        async def late(served: bool) -> Any:
            """Answer to a call that hangs; whether another one is served meanwhile."""
            stop = never()
            gate = script.gates[operation]
            gate.close()
            hangs = asyncio.ensure_future(call(5.0 if end == "stop" else 0.1, stop))
            await waiting(script, operation)
            script.gates[operation] = Gate()
            if served:
                await call(5.0, never())
            await asyncio.sleep(0.06)
            if end == "stop":
                stop.set_result(None)
            answer = await hangs
            gate.open()
            return answer

        answer = await late(served=True)
        expected = Outcome.CANCELLED if end == "stop" else Outcome.TIMEOUT
        assert answer is expected or answer[0] == [expected]
        assert bench.health == []
        await late(served=False)
        blamed = operation != "store" or end == "deadline"
        assert [health[1:3] for health in bench.health] == (
            [(operation == "store", operation != "store")] if blamed else []
        )
        await closed(lane)

    run(main())


@pytest.mark.parametrize("raises", [OSError, None])
def test_presence_does_not_hide_that_every_load_fails(
    run: Run, bench: Bench, raises: type[Exception] | None
) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = bench.lane(script, breaker={"failures": 3, "open_seconds": 0.05})
        await opened(lane)
        slots = await items(bench, 1)
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.DONE]
        if raises is not None:
            script.raises["load"] = raises("gone")
        else:
            script.always["load"] = Outcome.IO
        for _ in range(3):
            assert bench.health == []
            assert await lane.exists(keys(1), context(), never()) == [Presence.PRESENT]
            assert (await lane.load(slots, context(), never()))[0] == [Outcome.IO]
        assert bench.health[-1][:3] == (0, False, True)
        assert await lane.exists(keys(1), context(), never()) is Outcome.DROPPED
        # The load is the trial, however often presence is told before.
        script.raises.clear()
        script.always.clear()
        await until(lambda: bench.health[-1][:3] == (0, True, True))
        for _ in range(2):
            assert await lane.exists(keys(1), context(), never()) == [Presence.PRESENT]
            assert bench.value("kvtier_breaker_state", "tier") == 2
        assert (await lane.load(slots, context(), never()))[0] == [Outcome.DONE]
        assert bench.value("kvtier_breaker_state", "tier") == 0
        # Loads are well again: presence alone proves something once more.
        for _ in range(2):
            script.raises["exists"] = OSError("now and then")
            for _ in range(2):
                assert await lane.exists(keys(1), context(), never()) is Outcome.IO
            script.raises.clear()
            assert await lane.exists(keys(1), context(), never()) == [Presence.PRESENT]
        assert bench.value("kvtier_breaker_state", "tier") == 0
        await closed(lane)

    run(main())


@pytest.mark.parametrize("operation", ["exists", "load", "store"])
def test_cancelled_caller_leaves_nothing(run: Run, bench: Bench, operation: str) -> None:
    """Whoever waits for a call may be cancelled: the call ends with the lane at the latest."""
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script))
        slots = await items(bench, 1)
        script.gates[operation].close()
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "exists": lambda: lane.exists(keys(1), context(), never()),
            "load": lambda: lane.load(slots, context(), never()),
            "store": lambda: lane.store(slots, context(), never()),
        }
        task = asyncio.ensure_future(calls[operation]())
        await waiting(script, operation)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed(lane)
        assert script.running[operation] == 0

    run(main())


def test_after_a_failure_a_tier_is_waited_for_only_a_little(run: Run, bench: Bench) -> None:
    """Its call goes on to its deadline and counts; one that answers in time answers as ever."""
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, breaker={"failures": 3, "open_seconds": 60}))

        async def ask() -> tuple[Any, float]:
            started = time.monotonic()
            answer = await lane.exists(keys(1), context(1.0), never())
            return answer, time.monotonic() - started

        script.gates["exists"].close()
        answer, seconds = await ask()
        assert answer is Outcome.TIMEOUT
        assert seconds > 0.99
        for _ in range(2):
            answer, seconds = await ask()
            assert answer is Outcome.TIMEOUT
            assert 0.09 < seconds < 0.8
        assert bench.health == []
        await until(lambda: bench.health == [(0, False, True, "no answer before the deadline")])
        assert bench.value("kvtier_chunks_total", "tier", "exists", "timeout") == 3
        await closed(lane)

        script.gates["exists"].open()
        lane = await opened(bench.lane(script))
        script.always["exists"] = Outcome.LOST
        assert (await ask())[0] is Outcome.LOST
        del script.always["exists"]
        assert (await ask())[0] == [Presence.ABSENT]
        # All is well again, so it is waited for again.
        script.gates["exists"].close()
        assert (await ask())[1] > 0.49
        script.gates["exists"].open()
        await closed(lane)

    run(main())


def test_breakers_of_reads_and_writes_are_apart(run: Run, bench: Bench) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script))
        slots = await items(bench, 1)
        script.always["store"] = Outcome.FULL
        for _ in range(2):
            assert (await lane.store(slots, context(), never()))[0] == [Outcome.FULL]
        assert bench.health[-1] == (0, True, False, "full")
        calls = len(script.calls)
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.DROPPED]
        assert len(script.calls) == calls  # it was not asked
        assert await lane.exists(keys(1), context(), never()) == [Presence.ABSENT]
        del script.always["store"]
        await until(lambda: bench.health[-1] == (0, True, True, "full"))
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.DONE]
        assert bench.health[-1] == (0, True, True, "")
        assert bench.value("kvtier_breaker_opened_total", "tier") == 1
        assert bench.value("kvtier_breaker_state", "tier") == 0
        await closed(lane)

    run(main())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TierLostError, Outcome.LOST),
        (ConnectionResetError, Outcome.LOST),
        (OSError, Outcome.IO),
        (ZeroDivisionError, Outcome.INTERNAL),
    ],
)
def test_what_raises_is_a_failure_never_a_miss(
    run: Run, bench: Bench, error: type[Exception], outcome: Outcome
) -> None:
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, breaker={"failures": 99}))
        slots = await items(bench, 1)
        for operation in ("exists", "load", "store"):
            script.raises[operation] = error("gone")
        assert await lane.exists(keys(1), context(), never()) is outcome
        assert (await lane.load(slots, context(), never()))[0] == [outcome]
        assert (await lane.store(slots, context(), never()))[0] == [outcome]
        await closed(lane)

    run(main())


@pytest.mark.parametrize(
    "answer", [None, 7, [], [Outcome.DONE] * 3, ["done"], [99], [None], [Outcome.DONE]]
)
def test_a_tier_that_answers_nonsense(run: Run, bench: Bench, answer: Any) -> None:
    """Out-of-tree code: whatever it returns is a failure of that tier, no exception above it.

    The last one says DONE, but leaves the checksum out.
    """

    class Nonsense(ScriptedTier):
        async def exists(self, names: Any, ctx: Any) -> Any:
            return answer if answer != [Outcome.DONE] else [99]

        async def load(self, items: Any, ctx: Any) -> Any:
            return answer

        async def store(self, items: Any, ctx: Any) -> Any:
            return answer if answer != [Outcome.DONE] else None

    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, kind=Nonsense, breaker={"failures": 99}))
        target = bench.memory.slot(key(1), 0, 0)
        assert await lane.exists(keys(1), context(), never()) is Outcome.INTERNAL
        assert (await lane.load([target], context(), never()))[0] == [Outcome.INTERNAL]
        assert (await lane.store([target], context(), never()))[0] == [Outcome.INTERNAL]
        await closed(lane)

    run(main())


def test_a_tier_whose_methods_lack_their_async(run: Run, bench: Bench) -> None:
    """What they raise or return at once is a failure of that tier, counted like any other."""

    class Sync(ScriptedTier):
        def exists(self, names: Any, ctx: Any) -> Any:
            return [Presence.PRESENT] * len(names)

        def load(self, items: Any, ctx: Any) -> Any:
            raise ZeroDivisionError

        def store(self, items: Any, ctx: Any) -> Any:
            return [Outcome.DONE] * len(items)

        def forget(self, names: Any) -> Any:
            return None

    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, kind=Sync, breaker={"failures": 2}))
        target = bench.memory.slot(key(1), 0, 0)
        assert await lane.exists(keys(1), context(), never()) is Outcome.INTERNAL
        assert (await lane.load([target], context(), never()))[0] == [Outcome.INTERNAL]
        assert (await lane.load([target], context(), never()))[0] == [Outcome.DROPPED]
        assert (await lane.store([target], context(), never()))[0] == [Outcome.INTERNAL]
        await lane.forget(keys(1))
        assert bench.value("kvtier_chunks_total", "tier", "store", "internal") == 1
        await closed(lane)

    run(main())


def test_plain_integers_are_outcomes(run: Run, bench: Bench) -> None:
    class Plain(ScriptedTier):
        async def exists(self, names: Any, ctx: Any) -> Any:
            return [True, 0]

        async def store(self, items: Any, ctx: Any) -> Any:
            return [0, 12]

    async def main() -> None:
        lane = await opened(bench.lane(script, kind=Plain))
        answer = await lane.exists(keys(1, 2), context(), never())
        assert answer == [Presence.PRESENT, Presence.ABSENT]
        slots = await items(bench, 1, 2)
        outcomes, _ = await lane.store(slots, context(), never())
        assert outcomes == [Outcome.DONE, Outcome.IO]
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)
        await closed(lane)

    script = Script("tier")
    run(main())


def test_a_tier_that_is_down_comes_up(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when an attempt to open it hangs: that one ends by a deadline of its own."""
    monkeypatch.setattr(lane_module, "REOPEN_SECONDS", 0.01)
    monkeypatch.setattr(lane_module, "REOPEN_TIMEOUT_SECONDS", 0.1)
    script = Script("tier")

    async def main() -> None:
        lane = bench.lane(script)
        script.always["open"] = Outcome.LOST
        assert await lane.open(time.monotonic() + 5) == "LOST"
        slots = await items(bench, 1)
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.LOST]
        assert await lane.exists(keys(1), context(), never()) is Outcome.LOST
        script.gates["open"].close()
        await waiting(script, "open")
        await waiting(script, "open")  # the hung one was given up
        assert script.peak["open"] == 1  # never two of them
        del script.always["open"]
        script.gates["open"].open()
        await until(lambda: bench.health == [(0, True, True, "")])
        assert (await lane.store(slots, context(), never()))[0] == [Outcome.DONE]
        await closed(lane)

    run(main())


def test_open_says_why(run: Run, bench: Bench) -> None:
    async def main() -> None:
        script = Script("tier")
        lane = bench.lane(script)
        script.raises["open"] = ConfigError("bucket: does not exist")
        with pytest.raises(ConfigError, match="bucket"):
            await lane.open(time.monotonic() + 5)
        await closed(lane)
        slow = Script("slow")
        slow.gates["open"].close()
        lane = bench.lane(slow)
        assert "in time" in await lane.open(time.monotonic() + 0.05)
        await closed(lane)
        assert slow.running["open"] == 0

    run(main())


def test_close_with_a_hung_call_is_bounded(run: Run, bench: Bench) -> None:
    script = Script("tier")
    script.stubborn.add("load")

    async def main() -> None:
        lane = await opened(bench.lane(script))
        script.gates["load"].close()
        outcomes, call = await lane.load(await items(bench, 1), context(0.05), never())
        assert outcomes == [Outcome.TIMEOUT]
        started = time.monotonic()
        with pytest.raises(TierLostError, match="hangs"):
            await lane.aclose(time.monotonic() + 0.1)
        assert time.monotonic() - started < 2
        assert lane.tasks == 1
        assert not call.done()
        script.gates["load"].open()
        await lane.ended()
        assert call.done()
        assert lane.tasks == 0

    run(main())


def test_close_that_hangs_is_bounded(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "CLOSE_GRACE_SECONDS", 0.1)

    class Sticky(ScriptedTier):
        async def aclose(self, deadline: float) -> None:
            await asyncio.get_running_loop().create_future()

    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, kind=Sticky))
        with pytest.raises(TierLostError):
            await lane.aclose(time.monotonic())
        assert lane.tasks == 0

    run(main())


def test_a_closed_lane_says_nothing_more(run: Run, bench: Bench) -> None:
    """Its breaker's timer would tell the owner about a tier that has a new lane by now."""
    script = Script("tier")

    async def main() -> None:
        lane = await opened(bench.lane(script, breaker={"failures": 1, "open_seconds": 0.05}))
        script.always["store"] = Outcome.IO
        await lane.store(await items(bench, 1), context(), never())
        said = list(bench.health)
        assert said == [(0, True, False, "io")]
        await closed(lane)
        await asyncio.sleep(0.1)
        assert bench.health == said

    run(main())


def test_a_configuration_error_after_a_reset_may_be_mended(
    run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "REOPEN_SECONDS", 0.01)
    script = Script("tier")

    async def main() -> None:
        lane = bench.lane(script)
        script.raises["open"] = ConfigError("bucket: does not exist")
        with pytest.raises(ConfigError, match="bucket"):
            await lane.open(time.monotonic() + 5)
        script.raises.clear()
        await until(lambda: bench.health == [(0, True, True, "")])
        await closed(lane)

    run(main())
