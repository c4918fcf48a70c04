# SPDX-License-Identifier: Apache-2.0
"""Many requests over few slots: every byte that is loaded, steady hit rates, exact accounting."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.testing.faults import Script
from kvtier.types import Lookup, Outcome, RequestContext
from tests.engine.rig import CHUNK, Rig, key, keys, payload, rig, scripted

LOADS = 10_000
MANY_LOADS = int(os.environ.get("KVTIER_HOT_LOADS", "100000"))


@pytest.fixture(autouse=True)
def _logged_frames_go(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Errors in the log hold frames, and these views of the region."""
    yield
    caplog.get_records("call").clear()


class Task:
    """One request on its way: it looks up, copies in, copies out, ends, and the next one begins."""

    def __init__(self, one: Rig, chance: random.Random, prefixes: int, length: int) -> None:
        self.one = one
        self.chance = chance
        self.prefixes = prefixes
        self.length = length
        self.loads = 0
        self.misses = 0
        self.begin()

    def begin(self) -> None:
        number = self.chance.randrange(self.prefixes)
        self.keys = keys(*range(100 * number, 100 * number + self.length))
        self.context = self.one.context()
        self.turn: Callable[[], None] = self.look

    def look(self) -> None:
        engine = self.one.engine
        ready, answer = engine.lookup_batch(self.keys, self.context)
        if answer is not Lookup.MISS:
            return
        self.missing = self.keys[ready:]
        self.found = self.keys[:ready]
        self.pins = engine.pin(self.found, self.context)
        self.misses += len(self.missing)
        self.turn = self.copy_in

    def copy_in(self) -> None:
        """A step later: what was found is still there."""
        for name, slot in zip(self.found, self.pins[0].tolist(), strict=True):
            assert bytes(self.one.region.slot_view(slot, CHUNK)) == payload(name)
        self.loads += len(self.found)
        self.one.engine.unpin(*self.pins, self.context)
        self.reservation = self.one.engine.reserve(self.missing, self.context)
        # A copy takes its time: half of the bytes now, the rest in a later step.
        for slot in self.reservation.slots.tolist():
            self.one.region.slot_view(slot, CHUNK)[:] = b"\xee" * CHUNK
        self.turn = self.copy_out

    def copy_out(self) -> None:
        if self.chance.random() < 0.3:
            return
        if self.chance.random() < 0.1:
            self.one.engine.abort(self.reservation.keys, self.context)
        else:
            self.one.write(self.reservation)
            self.one.engine.commit(self.reservation.keys, self.context)
        self.one.engine.finish_request(self.context)
        self.begin()

    def end(self) -> None:
        """Whatever it is at."""
        if self.turn == self.copy_in:
            self.one.engine.unpin(*self.pins, self.context)
        elif self.turn == self.copy_out:
            self.one.engine.abort(self.reservation.keys, self.context)
        self.one.engine.finish_request(self.context)


def churn(
    one: Rig, seed: int, loads: int, *, tasks: int = 64, seconds: float = 120.0
) -> list[Task]:
    chance = random.Random(seed)
    crowd = [Task(one, chance, prefixes=20, length=2) for _ in range(tasks)]
    deadline = time.monotonic() + seconds * max(1, loads // 10_000)
    step = 0
    while sum(task.loads for task in crowd) < loads:
        assert time.monotonic() < deadline, "too few loads"
        chance.shuffle(crowd)
        for task in crowd:
            task.turn()
        one.engine.end_step()
        step += 1
        if step % 50 == 0:
            one.engine.check()
        if step % 3 == 0:
            time.sleep(0)
    for task in crowd:
        task.end()
    one.settle()
    totals = one.engine.cache.slots.totals()
    assert (totals["owner_pins"], totals["writing"]) == (0, 0)
    return crowd


@pytest.mark.slow
@pytest.mark.fault("C02", "C18", "H05", "H13")
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_sixty_four_requests_over_eight_slots(policy: str) -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)], policy=policy, lookup_timeout_seconds=0.5) as one:
        churn(one, 1, MANY_LOADS // 2)


@pytest.mark.fault("C02")
def test_the_same_over_a_child_process_and_files(tmp_path: Path) -> None:
    tiers = [
        {"type": "example", "capacity_bytes": 10 * CHUNK},
        {"type": "fs", "root_dir": str(tmp_path)},
    ]
    with rig(slots=8, tiers=tiers, isolation="process", lookup_timeout_seconds=0.5) as one:
        churn(one, 2, LOADS // 10)
        assert one.value("kvtier_lookup_chunks_total", "fs", "hit") > 0
        assert one.value("kvtier_corrupt_chunks_total", "fs") == 0


@pytest.mark.fault("L06", "L07")
def test_hit_rate_does_not_sink() -> None:
    """Over many rounds of the same work with faults in between: rate and accounting stay."""
    tier = Script("tier")
    with rig(
        slots=16,
        tiers=[scripted(tier, timeout_seconds=0.2)],
        lookup_timeout_seconds=0.5,
        breaker={"failures": 50},
    ) as one:
        rates = []
        for number in range(8):
            tier.outcomes["load"] = [Outcome.IO, Outcome.CORRUPT, Outcome.MISSING] * 2
            tier.outcomes["store"] = [Outcome.IO, Outcome.DROPPED] * 2
            crowd = churn(one, number, LOADS // 50, tasks=8)
            loads = sum(task.loads for task in crowd)
            rates.append(loads / (loads + sum(task.misses for task in crowd)))
            index = one.engine._index
            assert index.num_free + index.num_ready == 16
            assert index.ready_bytes == index.num_ready * CHUNK
            assert not one.engine._planner.requests
        assert min(rates[4:]) > 0.6 * max(rates)


@pytest.mark.fault("K10", "H07")
def test_pool_smaller_than_a_request() -> None:
    """A refused store costs that store; every public call returns afterwards."""
    tier = Script("tier")
    with rig(slots=4, tiers=[scripted(tier, namespaced=True)], lookup_timeout_seconds=0.1) as one:
        engine = one.engine
        for taken in range(5):  # allocation fails at each place of the batch
            holder, writer = one.context(), one.context()
            held = engine.reserve(keys(*range(100, 100 + taken)), holder)
            assert len(held.keys) == taken
            asked = keys(*range(4 + (taken == 0)))
            reservation = engine.reserve(asked, writer)
            assert not reservation.complete
            assert reservation.keys == asked[: 4 - taken]
            one.write(reservation)
            assert engine.commit(reservation.keys, writer) == reservation.keys
            assert engine.commit(asked, writer) == []
            assert engine.abort(held.keys, holder) == taken
            reader = one.context()
            assert one.ask(asked, reader)[0] == 4 - taken
            one.check(asked[: 4 - taken], reader)
            assert engine.holds(asked[0]) == (taken < 4)
            assert engine.source(asked[0], reader) == "host"
            engine.make_room(2)
            for context in (holder, writer, reader):
                engine.finish_request(context)
            engine.stats()
            engine.reset()
            one.settle()
        assert one.value("kvtier_store_refused_chunks_total") == 5


@pytest.mark.fault("L13")
def test_a_report_that_never_comes() -> None:
    """The writer is lost: readers miss in time, its slots come back when it is given up, and what
    it says after that is ignored."""
    with rig(slots=4, lookup_timeout_seconds=0.05) as one:
        lost = one.context()
        reservation = one.engine.reserve(keys(1, 2), lost)
        for _ in range(2):
            reader = one.context()
            started = time.monotonic()
            assert one.ask(keys(1, 2), reader)[0] == 0
            assert time.monotonic() - started < 1
            one.engine.finish_request(reader)
        assert one.engine.abort(reservation.keys, lost) == 2
        one.engine.finish_request(lost)
        assert one.store(keys(1, 2, 3)) == keys(1, 2, 3)
        assert one.engine.commit(reservation.keys, lost) == []
        assert one.engine.abort(reservation.keys, lost) == 0
        assert one.load(keys(1, 2, 3)) == 3


@pytest.mark.fault("L13")
def test_a_tier_that_never_answers_gives_its_slots_back_at_the_end() -> None:
    tier = Script("tier")
    with rig(
        slots=8, tiers=[scripted(tier, timeout_seconds=0.1)], lookup_timeout_seconds=0.05
    ) as one:
        one.store(keys(1, 2))
        one.settle()
        for name in keys(1, 2):
            one.engine._index.drop([name])
        tier.stubborn.add("load")
        tier.gates["load"].close()
        assert one.load(keys(1, 2)) == 0
        one.until(lambda: all(find.ended for find in one.engine._planner.loads.finds.values()))
        assert one.engine._planner.loads.lent == 2  # the hung call may still write into them
        tier.gates["load"].open()
        one.until(lambda: one.engine._planner.loads.lent == 0)
        one.settle()
        assert one.load(keys(1, 2)) == 2
        one.settle()


@pytest.mark.fault("E15")
def test_numbers_out_of_range_are_refused() -> None:
    with rig(slots=4) as one:
        one.store(keys(1))
        context = one.context()
        slots, generations = one.engine.pin(keys(1), context)
        for wrong in (-1, 4, 2**40):
            with pytest.raises(IndexError):
                one.engine.unpin(np.array([wrong]), generations)
            with pytest.raises(IndexError):
                one.engine.release(np.array([wrong]), generations)
            with pytest.raises(IndexError):
                one.region.slot_view(wrong, CHUNK)
        one.engine.unpin(slots, generations, context)
        one.engine.finish_request(context)


@pytest.mark.fault("E17")
def test_a_hole_in_the_middle_is_stored_again() -> None:
    """A chunk that was evicted from the middle of a running request's prefix is offered again."""
    with rig(slots=8) as one:
        context = one.context()
        names = keys(1, 2, 3, 4)
        reservation = one.engine.reserve(names, context)
        one.write(reservation)
        one.engine.commit(names, context)
        assert one.engine._index.drop(keys(3)) == keys(3)
        assert one.load(names) == 2
        again = one.engine.reserve(names, context)
        assert again.keys == keys(3)
        one.write(again)
        one.engine.commit(again.keys, context)
        one.engine.finish_request(context)
        assert one.load(names) == 4


@pytest.mark.fault("K09")
def test_every_call_in_every_state_of_a_request() -> None:
    """Abort before it was scheduled, preempted and back, finished twice: no assertion anywhere."""
    tier = Script("tier")

    def never_seen(one: Rig, context: RequestContext) -> None:
        return None

    def new(one: Rig, context: RequestContext) -> None:
        one.engine.on_new_request(context)

    def asked(one: Rig, context: RequestContext) -> None:
        one.engine.lookup_batch(keys(1, 2), context)

    def deferred(one: Rig, context: RequestContext) -> None:
        one.engine.lookup_batch(keys(1, 2), context)
        one.engine.end_step()

    def ready(one: Rig, context: RequestContext) -> None:
        one.ask(keys(1, 2), context)

    def finished(one: Rig, context: RequestContext) -> None:
        one.ask(keys(1), context)
        one.engine.finish_request(context)

    for state in (never_seen, new, asked, deferred, ready, finished):
        with rig(slots=8, tiers=[scripted(tier)], lookup_timeout_seconds=1.0) as one:
            one.store(keys(1, 2))
            one.settle()
            one.engine.reset()
            one.settle()
            for last in ("finish", "twice", "reset", "again", "store"):
                context = one.context()
                state(one, context)
                match last:
                    case "twice":
                        one.engine.finish_request(context)
                    case "reset":
                        one.engine.reset()
                    case "again":  # preempted, it comes back under its name
                        found, _ = one.ask(keys(1, 2), context)
                        one.check(keys(1, 2)[:found], context)
                    case "store":
                        one.write(reservation := one.engine.reserve(keys(1, 2, 3), context))
                        one.engine.commit(reservation.keys, context)
                one.engine.finish_request(context)
                one.engine.end_step()
                one.engine.check()
            one.settle()
            assert not one.engine._planner.requests


@pytest.mark.fault("H05")
def test_requests_that_hold_a_part_each_do_not_wait_for_each_other() -> None:
    """All of what may be held is held by requests that want more: the oldest gets what there is."""
    tier = Script("tier")
    with rig(
        slots=8, tiers=[scripted(tier)], max_hold_ratio=0.5, lookup_timeout_seconds=3.0
    ) as one:
        prompts = [keys(*range(10 * i, 10 * i + 4)) for i in range(4)]
        for prompt in prompts:
            one.store(prompt)
            one.settle()
        for prompt in prompts:
            one.engine._index.drop(prompt[1:])
        for prompt in prompts:
            one.store(prompt[:1])  # the first one of each is in host memory
        one.settle()
        started = time.monotonic()
        loaded = one.serve_queued([(prompt, one.context()) for prompt in prompts])
        assert loaded >= 10
        assert time.monotonic() - started < 1.5
        one.settle()


def test_a_tier_that_refuses_is_not_asked_in_every_step() -> None:
    """Again after a pause that doubles, a bounded number of times; others go on meanwhile."""
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)]) as one:
        tier.always["store"] = Outcome.DROPPED
        one.store(keys(1, 2))
        ends = time.monotonic() + 0.5
        one.until(lambda: time.monotonic() > ends)
        stores = [call for call in tier.calls if call[0] == "store"]
        assert 2 <= len(stores) <= 6
        assert one.engine.idle  # nobody waits for what was refused
        del tier.always["store"]
        one.store(keys(3))
        one.until(lambda: key(3) in tier.chunks)
        one.until(lambda: set(tier.chunks) == set(keys(1, 2, 3)))
        one.settle()
        assert not one.engine._tiers[0].refused


def test_refusals_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.engine import stores

    monkeypatch.setattr(stores, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(stores, "MAX_RETRY_SECONDS", 0.002)
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)]) as one:
        tier.always["store"] = Outcome.DROPPED
        one.store(keys(1))
        one.until(lambda: one.value("kvtier_dropped_chunks_total", "tier", "refused") == 1)
        count = len(tier.calls)
        assert len([call for call in tier.calls if call[0] == "store"]) == stores.MAX_TRIES
        ends = time.monotonic() + 0.05
        one.until(lambda: time.monotonic() > ends)
        assert len(tier.calls) == count
        one.settle()


@pytest.mark.fault("C24", "H27")
def test_reset_beside_a_tier_that_hangs() -> None:
    """It does not hold up the others: their chunks of the new epoch are stored and found."""
    hung, good = Script("hung"), Script("good")
    tiers: list[dict[str, Any]] = [
        scripted(script, namespaced=True, timeout_seconds=0.2) for script in (hung, good)
    ]
    with rig(slots=8, tiers=tiers, lookup_timeout_seconds=0.5) as one:
        one.store(keys(1))
        one.settle()
        hung.stubborn.update(("load", "store"))
        hung.gates["load"].close()
        hung.gates["store"].close()
        one.store(keys(2))
        assert hung.gates["store"].waiting.acquire(timeout=5)
        one.engine.reset()
        one.until(lambda: not one.engine._planner.reset_pending, seconds=4.0)
        assert one.load(keys(1, 2)) == 0  # of the epoch before
        one.store(keys(3))
        one.until(lambda: any(key(3) in chunks for chunks in good.by_namespace.values()))
        hung.gates["load"].open()
        hung.gates["store"].open()
        one.settle()
        assert one.engine.cache.slots.totals()["service_pins"] == 0
