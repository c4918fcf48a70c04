# SPDX-License-Identifier: Apache-2.0
"""Which chunks go to which tier, and which leave host memory for others."""

from __future__ import annotations

import asyncio

import pytest

import kvtier
from kvtier.testing.faults import Script
from kvtier.types import Outcome
from tests.engine.rig import CHUNK, Rig, key, keys, payload, rig, scripted


def in_host(one: Rig, *numbers: int) -> int:
    return sum(one.engine.holds(key(number)) for number in numbers)


def test_room_made_ahead_leaves_a_small_host_its_chunks() -> None:
    tier = Script("tier")
    with rig(slots=64, tiers=[scripted(tier)], promotion_slots=64) as one:
        one.store(keys(*range(64)))
        one.settle()
        assert in_host(one, *range(64)) == 62
        assert one.value("kvtier_host_slots", "free") == 2


def test_a_host_full_of_what_cannot_be_saved_still_loads() -> None:
    """A tier that lost its room for writes: what it has is served all the same."""
    tier = Script("tier")
    breaker = {"failures": 1, "open_seconds": 60}
    with rig(slots=16, tiers=[scripted(tier)], breaker=breaker) as one:
        one.store(keys(*range(8)))
        one.settle()
        one.engine.reset()
        one.settle()
        tier.always["store"] = Outcome.READ_ONLY
        one.store(keys(*range(20, 24)))
        one.until(lambda: one.value("kvtier_breaker_opened_total", "tier") == 1)
        one.store(keys(*range(24, 40)))
        one.settle()
        before = one.engine.stats().evicted_unsaved
        assert one.load(keys(*range(8))) == 8
        assert one.engine.stats().evicted_unsaved == before + 8


def test_a_chunk_beyond_its_threshold_is_stored_again_when_it_is_new_again() -> None:
    often = Script("often")
    with rig(slots=16, tiers=[scripted(often, store_threshold=2)]) as one:
        one.store(keys(1))
        one.settle()
        assert not often.chunks
        one.store(keys(1))
        one.settle()
        assert set(often.chunks) == set(keys(1))
        often.chunks.clear()
        one.engine.reset()
        one.settle()
        one.store(keys(1))
        one.settle()
        assert set(often.chunks) == set(keys(1))


def test_a_threshold_of_one_tier_does_not_keep_chunks_from_another() -> None:
    often, always = Script("often"), Script("always")
    with rig(slots=16, tiers=[scripted(often, store_threshold=3), scripted(always)]) as one:
        for round_ in range(4):
            one.store(keys(1))
            one.settle()
            assert set(always.chunks) == set(keys(1))
            assert bool(often.chunks) == (round_ >= 2)
            always.chunks.clear()
            one.engine.reset()
            one.settle()


def test_an_offer_of_what_host_memory_is_not_to_have_counts_for_a_tier() -> None:
    often = Script("often")
    with rig(slots=16, tiers=[scripted(often, store_threshold=2)]) as one:
        context = one.context()
        assert one.engine.reserve([], context, keys(1)).keys == []
        one.engine.finish_request(context)
        one.store(keys(1))
        one.settle()
        assert set(often.chunks) == set(keys(1))
        assert one.value("kvtier_store_skipped_chunks_total") == 1


def test_what_no_tier_wants_is_no_loss() -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier, groups=[5])], promotion_slots=0) as one:
        one.store(keys(*range(8)))
        one.settle()
        one.store(keys(*range(100, 104)))
        one.settle()
        assert not tier.chunks
        assert one.value("kvtier_evicted_total") == 4
        assert one.value("kvtier_evicted_unsaved_total") == 0


def test_misses_are_counted_at_each_tier_that_was_asked() -> None:
    first, second = Script("first"), Script("second")
    with rig(slots=8, tiers=[scripted(first), scripted(second)]) as one:
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.settle()
        first.chunks.clear()
        del second.chunks[key(2)]
        assert one.load(keys(1, 2)) == 1
        one.settle()
        assert one.value("kvtier_lookup_chunks_total", "first", "miss") == 2
        assert one.value("kvtier_lookup_chunks_total", "second", "miss") == 1
        assert one.value("kvtier_lookup_chunks_total", "second", "hit") == 1


def test_host_memory_serves_while_nobody_can_check_it() -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)], verify_host="always") as one:
        one.store(keys(1, 2))
        one.settle()
        one.engine._planner.service_lost()
        one.engine._planner.clear_pins()
        assert one.load(keys(1, 2)) == 2
        assert one.engine.registry.value("kvtier_verified_chunks_total", ("unchecked",)) is None
        one.engine.publish_metrics()
        assert one.engine.registry.value("kvtier_verified_chunks_total", ("unchecked",)) == 2


@pytest.mark.asyncio
async def test_what_was_put_off_goes_out_though_nobody_calls() -> None:
    tier = Script("tier")
    tiers = [scripted(tier, max_inflight_bytes=2 * CHUNK)]
    config = {"capacity_bytes": 32 * CHUNK, "tiers": tiers, "promotion_slots": 0}
    async with kvtier.open(config, chunk_bytes=CHUNK, namespace={"model": "m"}) as cache:
        await cache.store({name: payload(name) for name in keys(*range(16))})
        async with asyncio.timeout(10):
            while len(tier.chunks) < 16:
                await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_storing_what_is_there_evicts_nothing() -> None:
    tier = Script("tier")
    config = {"capacity_bytes": 16 * CHUNK, "tiers": [scripted(tier)], "promotion_slots": 0}
    async with kvtier.open(config, chunk_bytes=CHUNK, namespace={"model": "m"}) as cache:
        chunks = {name: payload(name) for name in keys(*range(16))}
        await cache.store(chunks)
        assert await cache.flush()
        again = await cache.store(chunks)
        assert not again.stored
        assert len(again.present) == 16
        assert cache.stats().evicted == 0
