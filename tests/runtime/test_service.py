# SPDX-License-Identifier: Apache-2.0
"""TierService behind its carriers: starting, closing, what a broken tier may not break."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier._core.layout import crc32c
from kvtier.config import parse
from kvtier.engine import supervisor as supervisor_module
from kvtier.errors import ConfigError, TierLostError
from kvtier.host.region import Region
from kvtier.obs.events import Event
from kvtier.runtime import lane as lane_module
from kvtier.runtime import messages as m
from kvtier.runtime import service as service_module
from kvtier.runtime.memory import Memory
from kvtier.runtime.thread import ThreadCarrier
from kvtier.testing.faults import Script, ScriptedTier, wait_until
from kvtier.types import GroupGeometry, Outcome, make_geometry
from tests.engine.rig import CHUNK, key, keys, payload, rig, scripted
from tests.loops import LOOPS
from tests.runtime import chatty


class Unmakable(ScriptedTier):
    """Its constructor raises what the script says."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if "make" in self.script.raises:
            raise self.script.raises["make"]


class Uncloseable(ScriptedTier):
    """Its aclose raises, or hangs."""

    hang: ClassVar[bool] = False

    async def aclose(self, deadline: float) -> None:
        if self.hang:
            await asyncio.get_running_loop().create_future()
        raise TierLostError("the last writes are lost")


class Unclosing(Uncloseable):
    """Its aclose hangs."""

    hang: ClassVar[bool] = True


def custom(kind: type, script: Script) -> dict[str, Any]:
    return scripted(script) | {"type": kind.__name__, "module_path": __name__}


@pytest.fixture(autouse=True)
def _logged_frames_go(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Errors in the log hold frames, and these views of the region."""
    yield
    caplog.get_records("call").clear()


def test_a_tier_that_cannot_be_made_ends_the_start_at_once() -> None:
    for error in (ConfigError("key: is wrong"), ZeroDivisionError("a bug")):
        script = Script("tier")
        script.raises["make"] = error
        started = time.monotonic()
        with (
            pytest.raises(ConfigError, match=f"tier tier: {error}"),
            rig(slots=4, tiers=[custom(Unmakable, script)]),
        ):
            raise AssertionError("it started")
        assert time.monotonic() - started < 5
        script.raises.clear()


@pytest.mark.parametrize("kind", [Uncloseable, Unclosing])
def test_what_tiers_met_while_closing_is_told(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others have been closed, and everything has been let go."""
    monkeypatch.setattr(lane_module, "CLOSE_GRACE_SECONDS", 0.05)
    script = Script("tier")

    def work() -> None:
        with rig(slots=4, tiers=[custom(kind, script)], flush_on_shutdown_seconds=0.1) as one:
            one.store(keys(1))
            one.settle()
            close = one.engine.close
            monkeypatch.setattr(one.engine, "close", lambda: close(0.2))

    started = time.monotonic()
    with pytest.raises(TierLostError, match=r"tier: .*(lost|hangs)"):
        work()
    assert time.monotonic() - started < 3


def test_a_service_that_ends_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed at once, not after the whole time that a start may take; and tried again."""
    monkeypatch.setattr(supervisor_module, "RESTART_SECONDS", 0.01)

    def broken(self: Memory, region: Region) -> None:
        raise OSError(12, "no memory")

    init = Memory.__init__
    monkeypatch.setattr(Memory, "__init__", broken)
    script = Script("tier")
    started = time.monotonic()
    with rig(slots=4, tiers=[scripted(script)]) as one:
        assert time.monotonic() - started < 3
        assert one.store(keys(1)) == keys(1)
        assert one.load(keys(1)) == 1
        monkeypatch.setattr(Memory, "__init__", init)
        one.until(lambda: one.engine._supervisor.up and one.value("kvtier_tier_up", "tier") == 1)
        one.settle()


def test_a_crash_loop_of_a_night(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between two starts is bounded, and so is what computes it."""
    script = Script("tier")
    with rig(slots=4, tiers=[scripted(script)]) as one:
        one.engine._supervisor.restarts = 5000
        one.engine._now = time.monotonic()
        carrier = one.engine._supervisor.carrier
        assert isinstance(carrier, ThreadCarrier)
        assert carrier._loop is not None
        carrier._loop.call_soon_threadsafe(carrier._service.deliver, None)
        one.until(lambda: not one.engine._supervisor.up)
        assert one.engine._supervisor.restart_at is not None
        left = one.engine._supervisor.restart_at - time.monotonic()
        assert 25 < left <= supervisor_module.MAX_RESTART_SECONDS
        one.engine._supervisor.restart_at = time.monotonic()
        one.until(lambda: one.engine._supervisor.up)
        one.settle()


class Outside:
    """A service in a thread, with a test in the owner's place."""

    def __init__(self, region: Region, tiers: list[dict[str, Any]], loop: str) -> None:
        self.memory: Memory | None = None
        config = parse({"capacity_bytes": 8 * CHUNK, "tiers": tiers})
        self.carrier = ThreadCarrier(config, {}, lambda: self._memory(region), LOOPS[loop])
        self.news: list[m.ToOwner] = []

    def _memory(self, region: Region) -> Memory:
        self.memory = Memory(region)
        return self.memory

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.news += self.carrier.receive()
            time.sleep(0.002)

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.news if isinstance(one, kind)]


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def region() -> Iterator[Region]:
    groups = [GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=CHUNK)]
    with Region.create(
        f"service-tests-{os.getpid()}", make_geometry(groups, 8 * CHUNK), {}, ranks=1
    ) as one:
        yield one


@pytest.mark.parametrize("broken", ["lane", "crc"])
def test_pins_stay_until_every_tier_has_ended(
    region: Region, loop: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the part of one tier must not take the bytes away from the other one's call; and
    the job ends with one message for each tier, whatever raises."""
    from kvtier._core.index import Index

    slow, bad = Script("slow"), Script("bad")
    outside = Outside(region, [scripted(slow), scripted(bad)], loop)
    real = lane_module.Lane.store

    async def store(self: Any, *args: Any) -> Any:
        if self.tier.name == "bad":
            raise ZeroDivisionError
        return await real(self, *args)

    async def take_crcs(self: Any, items: Any) -> None:
        raise ZeroDivisionError

    if broken == "lane":
        monkeypatch.setattr(lane_module.Lane, "store", store)
    else:
        monkeypatch.setattr(Memory, "take_crcs", take_crcs)
    slow.gates["store"].close()
    outside.carrier.start(10.0)
    assert outside.memory is not None
    slots = outside.memory.slots
    index = Index(slots, region.geometry.payload_bytes, track_unsaved=True)
    index.grow(8)
    reservation = index.reserve(keys(1))
    region.slot_view(int(reservation.slots[0]), CHUNK)[:] = payload(key(1))
    index.commit(keys(1))
    names, places, generations = index.pin_for_service(keys(1))
    slot = int(places[0])
    outside.carrier.send(
        [
            m.Cascade(
                7,
                "r",
                names,
                places.tobytes(),
                generations.tobytes(),
                [0, 1],
                time.monotonic() + 5,
            )
        ]
    )
    outside.until(lambda: any(one.tier == 1 for one in outside.of(m.Stored)))
    if broken == "lane":
        assert slow.gates["store"].waiting.acquire(timeout=5)
        assert slots.service_pins(slot) == 1
        slow.gates["store"].open()
    outside.until(lambda: len(outside.of(m.Stored)) == 2)
    by_tier = {one.tier: Outcome(one.outcomes[0]) for one in outside.of(m.Stored)}
    assert by_tier == {
        0: Outcome.DONE if broken == "lane" else Outcome.INTERNAL,
        1: Outcome.INTERNAL,
    }
    assert [one.final for one in outside.of(m.Stored)] == [False, True]
    outside.until(lambda: slots.service_pins(slot) == 0)
    assert slots.unsaved(slot) == (broken != "lane")
    if broken == "lane":
        assert slow.chunks[key(1)] == (payload(key(1)), crc32c(payload(key(1))))
    assert outside.carrier.close(time.monotonic() + 2) == ""
    outside.memory = None


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_events_to_an_owner_that_sleeps_are_bounded(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not read is dropped and counted, and goes on when it reads again."""
    tier = {"type": "ChattyTier", "module_path": chatty.__name__, "folder": str(tmp_path)}
    with rig(slots=4, tiers=[tier], isolation=isolation) as one:
        got: list[Event] = []
        one.engine.events.subscribe()  # what nobody listens to is not even decoded
        monkeypatch.setattr(one.engine.events, "emit_many", got.extend)

        def burst(number: int) -> None:
            (tmp_path / f"burst.{number}").touch()
            wait_until((tmp_path / f"done.{number}").exists)

        def read(bursts: int) -> None:
            one.until(
                lambda: (
                    len(got) + one.value("kvtier_events_dropped_total")
                    == bursts * chatty.BURST_EVENTS
                )
            )

        for number in range(3):
            burst(number)
            time.sleep(2.5 * service_module.SAMPLES_SECONDS)  # these take the events along
        read(3)
        burst(3)
        read(4)
        # Of the bursts that it slept through the first ones, without a gap; then of the last one.
        part = list(range(service_module.MAX_EVENTS))
        assert [int.from_bytes(one.key, "big") for one in got] == part + part
