# SPDX-License-Identifier: Apache-2.0
"""What ends by itself: holds, finds without an answer, the keys a step may ask for.

On a virtual clock, with a carrier that only notes what it is given; the test is the service.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier._core.chunks import ASKED, GONE
from kvtier.config import parse
from kvtier.engine.engine import Engine
from kvtier.engine.loads import HOLD_SECONDS
from kvtier.host.region import Region
from kvtier.runtime import messages as m
from kvtier.runtime.carrier import Carrier
from kvtier.types import GroupGeometry, Lookup, RequestContext, make_geometry
from tests.engine.rig import CHUNK, Rig, key, keys

LOAD_SECONDS = 5.0


class Notes(Carrier):
    """A service that answers what the test puts into `answers`."""

    def __init__(self) -> None:
        self.sent: list[m.ToService] = []
        self.answers: list[m.ToOwner] = []

    def start(self, timeout_seconds: float) -> list[m.ToOwner]:
        return [m.Ready([""], [False], 0)]

    def send(self, messages: Sequence[m.ToService]) -> bool:
        self.sent += messages
        return True

    def receive(self) -> list[m.ToOwner]:
        answers, self.answers = self.answers, []
        return answers

    @property
    def alive(self) -> bool:
        return True

    def restart(self, namespace: dict[str, str]) -> None:
        raise AssertionError("it never dies")

    def on_message(self, wake: Callable[[], None] | None) -> None:
        return None

    def close(self, deadline: float) -> str:
        return ""

    def finds(self) -> list[m.Find]:
        return [message for message in self.sent if isinstance(message, m.Find)]


class Time:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Clocked(Rig):
    """A rig whose time is the test's."""

    def __init__(self, engine: Engine, region: Region, notes: Notes, time: Time) -> None:
        super().__init__(engine, region)
        self.notes = notes
        self.time = time

    def after(self, seconds: float) -> None:
        """A step, that much later."""
        self.time.now += seconds
        self.step()

    def held(self) -> int:
        return self.engine._planner.loads.held


@contextlib.contextmanager
def clocked(
    window: int | None = None, slots: int = 16, chunk: int = CHUNK, **tier: Any
) -> Iterator[Clocked]:
    group = GroupGeometry(
        block_tokens=16, blocks_per_chunk=1, block_bytes=chunk, window_chunks=window
    )
    geometry = make_geometry([group], slots * chunk)
    config = parse(
        {
            "capacity_bytes": slots * chunk,
            "promotion_slots": 2,
            "lookup_timeout_seconds": 2.0,
            "flush_on_shutdown_seconds": 0,
            "tiers": [{"type": "example", "load_timeout_seconds": LOAD_SECONDS} | tier],
        }
    )
    region = Region.create(f"expiry-{os.getpid()}", geometry, {}, ranks=1)
    region.sign(0)
    region.populate(lambda _: None)
    notes = Notes()
    time = Time()
    engine = Engine(config, region, own_region=True, carrier=notes, clock=time)
    engine.open()
    try:
        yield Clocked(engine, region, notes, time)
        engine.check()
    finally:
        engine.close()


def found(job: int, **what: Any) -> m.Found:
    """News of a find; numbers in lists."""
    for name, value in what.items():
        if isinstance(value, list):
            what[name] = (m.packed_words if name == "crcs" else m.packed)(value)
    fields: dict[str, Any] = {
        "absent": b"",
        "present": 0,
        "loaded": b"",
        "slots": b"",
        "crcs": b"",
        "tier": 0,
        "failed": b"",
        "outcomes": b"",
        "unused": b"",
        "final": False,
    }
    return m.Found(job=job, **(fields | what))


def waiting(one: Clocked) -> RequestContext:
    """A request that was told of two chunks in host memory and has to wait for a third."""
    context = one.context()
    assert one.engine.lookup_batch(keys(1, 2, 3), context) == (2, Lookup.RETRY)
    one.engine.end_step()
    return context


def end_finds(one: Clocked) -> None:
    """Nobody has what was asked for."""
    for find in one.notes.finds():
        absent = list(range(len(find.keys)))
        one.notes.answers.append(found(find.job, absent=absent, unused=find.slots, final=True))
    one.after(0.0)


def test_holds_end_when_nobody_comes_back() -> None:
    with clocked() as one:
        one.engine.commit(one.engine.reserve(keys(1, 2), one.context()).keys, one.context())
        context = waiting(one)
        end_finds(one)
        assert one.held() == 2
        one.after(HOLD_SECONDS - 0.1)
        assert one.held() == 2
        one.after(0.2)
        assert one.held() == 0
        one.engine.publish_metrics()
        assert one.engine.registry.value("kvtier_hold_expired_total") == 2
        one.engine.finish_request(context)


def test_holds_beside_a_store_end_too() -> None:
    """Nothing is asked of a tier here: the hold alone says when it ends."""
    with clocked() as one:
        one.engine.commit(one.engine.reserve(keys(1, 2), one.context()).keys, one.context())
        writer, reader = one.context(), one.context()
        one.engine.reserve(keys(3), writer)
        assert one.engine.lookup_batch(keys(1, 2, 3), reader) == (2, Lookup.HIT_PENDING)
        one.engine.end_step()
        assert one.held() == 2
        one.after(HOLD_SECONDS + 0.1)
        assert one.held() == 0
        one.engine.abort(keys(3), writer)
        one.engine.finish_request(writer)
        one.engine.finish_request(reader)


def test_a_hold_that_is_renewed_lasts_longer() -> None:
    with clocked() as one:
        one.engine.commit(one.engine.reserve(keys(1, 2, 4), one.context()).keys, one.context())
        early = waiting(one)
        one.after(1.0)
        late = one.context()
        assert one.engine.lookup_batch(keys(4, 5), late) == (1, Lookup.RETRY)
        one.engine.end_step()
        end_finds(one)
        assert one.held() == 3
        one.after(HOLD_SECONDS - 0.5)
        assert one.held() == 1  # the later request's
        one.after(1.0)
        assert one.held() == 0
        one.engine.finish_request(early)
        one.engine.finish_request(late)


@pytest.mark.fault("H03")
def test_a_find_without_an_end_is_given_up_at_its_deadline() -> None:
    with clocked() as one:
        one.engine.commit(one.engine.reserve(keys(1, 2), one.context()).keys, one.context())
        context = waiting(one)
        (find,) = one.notes.finds()
        request = one.engine._planner.request(context)
        # A tier has it, and nothing more is heard.
        one.notes.answers.append(found(find.job, present=1))
        one.after(0.0)
        assert request.chunks.status(key(3)) == ASKED
        one.after(LOAD_SECONDS - 0.1)
        assert request.chunks.status(key(3)) == ASKED
        one.after(0.2)
        assert request.chunks.status(key(3)) == GONE
        assert one.engine.lookup(key(3), context) is Lookup.MISS
        # News that come too late must not have others wait for its slots.
        one.notes.answers.append(found(find.job, present=1))
        one.after(0.1)
        assert not one.engine._planner.loads.line
        one.notes.answers.append(found(find.job, failed=[0], unused=find.slots, final=True))
        one.after(0.1)
        assert not one.engine._planner.loads.finds
        one.engine.finish_request(context)


def test_each_step_asks_for_one_window() -> None:
    with clocked(window=1) as one:
        context = one.context()
        answers = [one.engine.lookup(name, context) for name in keys(9, 8, 7)]
        assert answers == [Lookup.RETRY, Lookup.RETRY, Lookup.MISS]
        one.engine.end_step()
        answers = [one.engine.lookup(name, context) for name in keys(6, 5, 4)]
        assert answers == [Lookup.RETRY, Lookup.RETRY, Lookup.MISS]
        one.engine.end_step()
        assert [find.keys for find in one.notes.finds()] == [keys(9, 8), keys(6, 5)]
        end_finds(one)
        one.engine.finish_request(context)
