# SPDX-License-Identifier: Apache-2.0
"""A scheduler that makes no more steps: what had been put off goes to the tiers all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtier.testing.faults import Script, wait_until
from kvtier.types import Outcome
from tests.engine.rig import CHUNK, Rig, key, keys, rig, scripted
from tests.runtime.test_process import gated


def dropped(one: Rig) -> float:
    return one.value("kvtier_dropped_chunks_total", "tier", "bound")


@pytest.mark.parametrize("last", ["end_step", "finish_request", "commit"])
def test_nothing_put_off_waits_for_a_step(last: str) -> None:
    """Whichever call is the last one."""
    tier = Script("tier")
    with rig(slots=16, tiers=[scripted(tier, max_inflight_bytes=2 * CHUNK)]) as one:
        engine, context = one.engine, one.context()
        reservation = engine.reserve(keys(*range(8)), context)
        one.write(reservation)
        if last == "commit":
            engine.finish_request(context)
        engine.commit(reservation.keys, context)
        if last != "commit":
            engine.finish_request(context)
        if last == "end_step":
            engine.end_step()
        wait_until(lambda: len(tier.chunks) == 8)
        one.settle()
        assert engine._index.oldest_unsaved(16) == []
        assert one.value("kvtier_backlog_chunks", "tier") == 0
        assert dropped(one) == 0


def test_the_same_over_a_child_process(tmp_path: Path) -> None:
    tiers = [gated(tmp_path, max_inflight_bytes=2 * CHUNK)]
    with rig(slots=16, tiers=tiers, isolation="process") as one:
        one.store(keys(*range(8)))
        names = {name.hex() for name in keys(*range(8))}
        wait_until(lambda: names <= {path.name for path in tmp_path.iterdir()})
        one.settle()


def test_a_part_at_a_time_is_pinned_and_the_rest_may_go() -> None:
    tier = Script("tier")
    with rig(slots=64, tiers=[scripted(tier, max_inflight_bytes=8 * CHUNK)]) as one:
        tier.gates["store"].close()
        one.store(keys(*range(40)))
        slots = one.engine.cache.slots
        wait_until(lambda: slots.totals()["service_pins"] == 8 + 2)
        time.sleep(0.05)
        assert slots.totals()["service_pins"] == 8 + 2
        assert one.value("kvtier_backlog_chunks", "tier") == 32
        assert one.engine._index.drop(keys(*range(40))) == keys(*range(10, 40))
        one.store(keys(30))
        tier.gates["store"].open()
        one.settle()
        assert set(tier.chunks) == {*keys(*range(10)), key(30)}
        assert dropped(one) == 30
        assert one.engine._index.oldest_unsaved(64) == []


def test_a_reset_ends_what_was_handed_over() -> None:
    tier = Script("tier")
    tiers = [scripted(tier, max_inflight_bytes=4 * CHUNK, namespaced=True)]
    with rig(slots=64, tiers=tiers) as one:
        tier.gates["store"].close()
        one.store(keys(*range(20)))
        one.engine.reset()
        assert one.store(keys(*range(20))) == keys(*range(20))
        tier.gates["store"].open()
        one.settle()
        *before, after = tier.by_namespace.values()
        assert all(len(chunks) <= 5 for chunks in before)
        assert set(after) == set(keys(*range(20)))


def test_what_the_tier_refuses_then_is_offered_again() -> None:
    tier = Script("tier")
    tiers = [scripted(tier, max_inflight_bytes=2 * CHUNK)]
    with rig(slots=16, tiers=tiers, breaker={"failures": 99}) as one:
        tier.outcomes["store"] = [Outcome.LOST] * 4
        one.store(keys(*range(8)))
        one.until(lambda: len(tier.chunks) == 8)
        one.settle()
        assert one.engine._index.oldest_unsaved(16) == []


@pytest.mark.parametrize("busy", [False, True])
def test_the_flush_at_shutdown_takes_what_was_put_off(busy: bool) -> None:
    """And what a tier has refused and is to be offered again."""
    tier = Script("tier")
    with rig(
        slots=16,
        tiers=[scripted(tier, max_inflight_bytes=CHUNK)],
        flush_on_shutdown_seconds=10,
        breaker={"failures": 99},
    ) as one:
        if busy:
            one.engine.on_new_request(one.context())
        tier.outcomes["store"] = [Outcome.DROPPED] * 2
        one.store(keys(*range(8)))
    assert set(tier.chunks) == set(keys(*range(8)))
