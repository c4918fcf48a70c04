# SPDX-License-Identifier: Apache-2.0
"""The engine over real carriers: what is stored is found again, exact, from the right place."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from kvtier.errors import ClosedError, TierLostError
from kvtier.runtime import lane
from kvtier.testing.faults import Script
from kvtier.types import Lookup, TierMatch
from tests.engine.rig import CHUNK, key, keys, rig, scripted

EXAMPLE = {"type": "example"}


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> str:
    return request.param


def test_host_alone() -> None:
    with rig(slots=4) as one:
        assert one.store(keys(1, 2, 3)) == keys(1, 2, 3)
        assert one.load(keys(1, 2, 3, 4)) == 3
        one.store(keys(5, 6))
        # The tail of the first request went first.
        assert one.load(keys(1, 2)) == 2
        assert one.load(keys(3)) == 0


def test_from_a_tier_after_eviction(isolation: str) -> None:
    with rig(slots=8, tiers=[EXAMPLE], isolation=isolation) as one:
        for start in range(0, 24, 4):
            one.store(keys(*range(start, start + 4)))
            one.settle()
        assert one.value("kvtier_evicted_unsaved_total") == 0
        for start in range(0, 24, 4):
            assert one.load(keys(*range(start, start + 4))) == 4
        one.settle()
        hits = one.value("kvtier_lookup_chunks_total", "example", "hit")
        assert hits + one.value("kvtier_lookup_chunks_total", "host", "hit") == 24
        assert hits >= 16


@pytest.mark.fault("M02")
def test_hit_rate_counts_misses() -> None:
    with rig(slots=16) as one:
        one.store(keys(1, 2))
        context = one.context()
        for name in keys(1, 2, 3, 4):
            one.engine.lookup(name, context)
        one.engine.end_step()
        for name in keys(1, 2, 3, 4):  # asked again, counted once
            one.engine.lookup(name, context)
        one.engine.finish_request(context)
        assert one.value("kvtier_lookup_chunks_total", "host", "hit") == 2
        assert one.value("kvtier_lookup_chunks_total", "host", "miss") == 2


@pytest.mark.fault("M03")
def test_idle_counters_are_flat() -> None:
    with rig(slots=8, tiers=[EXAMPLE]) as one:
        one.store(keys(1, 2, 3))
        one.settle()
        before = one.engine.stats()
        renders = set()
        for _ in range(10):
            one.step()
            one.engine.publish_metrics()
            renders.add(
                "\n".join(
                    line
                    for line in one.engine.registry.render().decode().splitlines()
                    if "_total" in line
                )
            )
        assert one.engine.stats() == before
        assert len(renders) == 1


@pytest.mark.fault("U07")
def test_gauges_are_real_after_the_start() -> None:
    with rig(slots=8, tiers=[EXAMPLE]) as one:
        assert one.value("kvtier_host_capacity_bytes") == 8 * CHUNK
        assert one.value("kvtier_host_slots", "free") == 8
        assert one.value("kvtier_tier_up", "example") == 1


@pytest.mark.fault("C01")
def test_a_chunk_is_pending_until_its_bytes_are_there() -> None:
    with rig(slots=8) as one:
        writer, reader = one.context(), one.context()
        reservation = one.engine.reserve(keys(1), writer)
        assert one.engine.lookup(key(1), reader) is Lookup.HIT_PENDING
        with pytest.raises(KeyError):
            one.engine.pin(keys(1), reader)
        one.write(reservation)
        one.engine.commit(keys(1), writer)
        assert one.engine.lookup(key(1), reader) is Lookup.HIT
        one.check(keys(1), reader)
        one.engine.finish_request(writer)
        one.engine.finish_request(reader)


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_first_tier_in_order_serves(order: tuple[str, ...]) -> None:
    scripts = {name: Script(name) for name in order}
    holders = {1: "a", 2: "ab", 3: "abc", 4: "b", 5: "bc", 6: "c", 7: "ac"}
    with rig(slots=16, tiers=[scripted(scripts[name]) for name in order]) as one:
        one.store(keys(*holders))
        one.settle()
        for number, names in holders.items():
            for name in "abc":
                if name not in names:
                    del scripts[name].chunks[key(number)]
        one.engine.reset()  # only the host's memory: the scripts have no namespaces
        one.settle()
        context = one.context()
        ready, _ = one.ask(keys(*holders), context)
        assert ready == len(holders)
        one.check(keys(*holders), context)
        for number, names in holders.items():
            first = next(name for name in order if name in names)
            assert one.engine.source(key(number), context) == first
        one.engine.finish_request(context)
        one.settle()


def test_cascade_reaches_all_tiers_at_once() -> None:
    fast, hung = Script("fast"), Script("hung")
    hung.gates["store"].close()
    tiers = [scripted(hung, store_timeout_seconds=0.3), scripted(fast)]
    with rig(slots=8, tiers=tiers, breaker={"failures": 1}) as one:
        one.store(keys(1, 2, 3))
        one.until(lambda: len(fast.chunks) == 3)
        assert not hung.chunks
        one.settle()  # the hung one ends by its deadline
        assert one.value("kvtier_chunks_total", "hung", "store", "timeout") >= 1
        hung.gates["store"].open()


def test_a_tier_that_comes_up_while_another_opens_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "REOPEN_SECONDS", 0.02)
    early, late = Script("early"), Script("late")
    early.raises["open"] = TierLostError("not yet")
    late.gates["open"].close()

    def come_up() -> None:
        time.sleep(0.2)
        del early.raises["open"]
        time.sleep(0.4)
        late.gates["open"].open()

    thread = threading.Thread(target=come_up)
    thread.start()
    with rig(slots=8, tiers=[scripted(early), scripted(late)]) as one:
        thread.join()
        one.step()
        assert one.value("kvtier_tier_up", "early") == 1
        assert one.value("kvtier_tier_up", "late") == 1


def test_touched_chunks_outlive_others() -> None:
    """What the accelerator has is neither loaded nor stored, and is used all the same."""
    with rig(slots=4, tiers=[]) as one:
        for name in keys(1, 2, 3, 4):
            one.store([name])
        context = one.context()
        one.engine.touch(keys(1, 2), context)
        one.engine.finish_request(context)
        one.store(keys(5, 6))
        assert [one.engine.holds(name) for name in keys(1, 2, 3, 4)] == [True, True, False, False]


def test_two_slow_tiers_overlap() -> None:
    slow = [{"type": "example", "name": f"slow{i}", "delay_seconds": 1.0} for i in range(2)]
    with rig(slots=8, tiers=slow) as one:
        started = time.monotonic()
        one.store(keys(1))
        one.settle()
        assert 1.0 <= time.monotonic() - started < 1.5
        for i in range(2):
            assert one.value("kvtier_chunks_total", f"slow{i}", "store", "done") == 1


@pytest.mark.fault("H13")
@pytest.mark.fault("V05")
def test_load_with_the_host_full_of_pinned_chunks() -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)], lookup_timeout_seconds=0.2, promotion_slots=0) as one:
        one.store(keys(*range(8)))
        one.settle()
        for number in range(100, 104):
            tier.chunks[key(number)] = tier.chunks[key(0)]
        holder, reader = one.context(), one.context()
        assert one.ask(keys(*range(6)), holder)[0] == 6
        slots, generations = one.engine.pin(keys(*range(6)), holder)
        started = time.monotonic()
        ready, _ = one.ask(keys(100, 101, 102, 103), reader)
        assert time.monotonic() - started < 2
        assert ready < 4
        one.engine.unpin(slots, generations)
        one.engine.finish_request(holder)
        one.engine.finish_request(reader)
        one.settle()


def test_only_allowed_tiers_are_asked() -> None:
    disk, memory = Script("disk"), Script("memory")
    with rig(
        slots=8, tiers=[scripted(disk, locality="LOCAL"), scripted(memory, locality="REMOTE")]
    ) as one:
        one.store(keys(1))
        one.settle()
        one.engine.reset()
        one.settle()
        assert one.load(keys(1), one.context(load_tiers=())) == 0
        context = one.context(load_tiers=(TierMatch(locality="REMOTE"),))
        assert one.ask(keys(1), context)[0] == 1
        assert one.engine.source(key(1), context) == "memory"
        assert [call for call in disk.calls if call[0] == "exists"] == []
        one.engine.finish_request(context)


def test_a_prompt_larger_than_the_bound_loads_its_prefix() -> None:
    tier = Script("tier")
    with rig(slots=16, tiers=[scripted(tier)], max_hold_ratio=0.25) as one:
        one.store(keys(*range(8)))
        one.settle()
        one.engine.reset()
        one.settle()
        assert one.load(keys(*range(8))) == 4
        assert one.value("kvtier_hold_refused_total") == 4
        one.settle()


@pytest.mark.fault("E04")
def test_no_promotion_thrash() -> None:
    """Fifty queued prefixes, host memory for five: what is promoted is used."""
    tier = Script("tier")
    with rig(slots=40, tiers=[scripted(tier)], lookup_timeout_seconds=5.0) as one:
        prefixes = [keys(*range(100 * i, 100 * i + 8)) for i in range(50)]
        for prefix in prefixes:
            one.store(prefix)
            one.settle()
        one.engine.reset()
        one.settle()
        waiting = [(prefix, one.context()) for prefix in prefixes]
        used = one.serve_queued(waiting)
        promoted = one.value("kvtier_lookup_chunks_total", "tier", "hit")
        assert used == 400
        assert promoted / used <= 1.05
        one.settle()


def test_back_pressure_puts_off_and_offers_again() -> None:
    tier = Script("tier")
    tier.gates["store"].close()
    with rig(slots=16, tiers=[scripted(tier, max_inflight_bytes=2 * CHUNK)]) as one:
        one.store(keys(*range(8)))
        one.until(lambda: one.value("kvtier_inflight_bytes", "tier", "store") == 2 * CHUNK)
        assert one.value("kvtier_deferred_chunks_total", "tier") == 6
        tier.gates["store"].open()
        one.settle()
        assert len(tier.chunks) == 8
        assert one.value("kvtier_evicted_unsaved_total") == 0


def test_nothing_is_lost_silently_with_a_slow_tier() -> None:
    tier = Script("tier")
    tier.seconds_per_byte = 1e-6  # 1 MB/s
    stored: list[bytes] = []
    with rig(slots=16, tiers=[scripted(tier, max_inflight_bytes=4 * CHUNK)]) as one:
        for start in range(0, 64, 4):
            stored += one.store(keys(*range(start, start + 4)))
            one.step()
        one.settle()
        lost = one.value("kvtier_evicted_unsaved_total")
        found = sum(one.load([name]) for name in stored)
        assert lost > 0
        assert len(stored) - found == lost
        one.settle()


@pytest.mark.fault("C23")
@pytest.mark.fault("C24")
def test_reset_with_transfers_under_way() -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)]) as one:
        one.store(keys(1, 2, 3))
        one.settle()
        one.engine.reset()
        one.settle()
        tier.gates["load"].close()
        tier.stubborn.add("load")
        reader, writer = one.context(), one.context()
        one.engine.lookup_batch(keys(1, 2, 3), reader)
        one.engine.end_step()
        assert tier.gates["load"].waiting.acquire(timeout=5)
        reservation = one.engine.reserve(keys(9), writer)
        slots, generations = one.engine.reset()
        assert slots.tolist() == reservation.slots.tolist()
        assert one.engine.lookup(key(9), one.context()) is not Lookup.HIT
        # The old slots are out of use while anybody may still write into them.
        taken = one.store(keys(*range(20, 28)))
        assert len(taken) < 8
        tier.gates["load"].open()
        assert one.engine.release(slots, generations) == 1
        one.settle()
        assert one.load(taken) == len(taken)
        one.engine.finish_request(reader)
        one.engine.finish_request(writer)
        one.settle()


def test_windowed_group_asks_for_its_window_only() -> None:
    from kvtier.types import GroupGeometry

    groups = [
        GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=CHUNK, window_chunks=2)
    ]
    tier = Script("tier")
    with rig(slots=32, tiers=[scripted(tier)], groups=groups) as one:
        one.store(keys(*range(20)))
        one.settle()
        one.engine.reset()
        one.settle()
        context = one.context()
        names = keys(*range(20))

        def scan() -> list[Lookup]:
            return [one.engine.lookup(name, context) for name in reversed(names)]

        answers = scan()
        assert answers[:3] == [Lookup.RETRY] * 3
        assert set(answers[3:]) == {Lookup.MISS}
        one.engine.end_step()
        one.until(lambda: one.engine.lookup(names[-1], context) is Lookup.HIT)
        one.until(lambda: scan()[:3] == [Lookup.HIT] * 3)
        loaded = {name for call, names_ in tier.calls if call == "load" for name in names_}
        assert loaded == set(names[-3:])
        one.engine.finish_request(context)
        one.settle()


@pytest.mark.fault("L09")
def test_abort_in_every_state_of_a_load() -> None:
    for operation in ("exists", "load"):
        tier = Script("tier")
        with rig(slots=8, tiers=[scripted(tier)]) as one:
            one.store(keys(1, 2))
            one.settle()
            one.engine.reset()
            one.settle()
            tier.gates[operation].close()
            context = one.context()
            one.engine.lookup_batch(keys(1, 2), context)
            one.engine.end_step()
            assert tier.gates[operation].waiting.acquire(timeout=5)
            one.engine.finish_request(context)
            one.settle()
            assert one.value("kvtier_host_slots", "writing") == 0
            tier.gates[operation].open()
            assert one.load(keys(1, 2)) == 2
            one.settle()


def test_closed_engine_says_so() -> None:
    with rig(slots=8, tiers=[EXAMPLE]) as one:
        pass
    with pytest.raises(ClosedError):
        one.engine.poll()
    one.engine.close()


def test_flush_on_shutdown_saves_what_only_the_host_holds() -> None:
    tier = Script("tier")
    with rig(
        slots=16,
        tiers=[scripted(tier, max_inflight_bytes=CHUNK)],
        flush_on_shutdown_seconds=5.0,
    ) as one:
        one.store(keys(*range(8)))
    assert set(tier.chunks) == set(keys(*range(8)))


def test_store_threshold_and_groups(caplog: pytest.LogCaptureFixture) -> None:
    often, other = Script("often"), Script("other")
    tiers = [scripted(often, store_threshold=2), scripted(other, groups=[7])]
    with rig(slots=16, tiers=tiers) as one:
        one.store(keys(1, 2))
        one.settle()
        assert not often.chunks
        one.store(keys(2, 3))
        one.settle()
        assert set(often.chunks) == set(keys(2))
        assert not other.chunks
    assert "tiers[1].groups: 7 is no KV cache group, there are 1" in caplog.text
    assert "tiers[0]" not in caplog.text


@pytest.mark.fault("H25")
def test_idle_engine_has_no_pending_work() -> None:
    tier = Script("tier")
    tier.gates["store"].close()
    with rig(slots=8, tiers=[scripted(tier)]) as one:
        one.store(keys(1, 2))
        assert tier.gates["store"].waiting.acquire(timeout=5)
        assert not one.engine.has_pending_work()
        started = time.perf_counter()
        for _ in range(100):
            one.step()
        assert time.perf_counter() - started < 1.0
        tier.gates["store"].open()
        one.settle()


def test_events_fold_to_the_content(isolation: str) -> None:
    from kvtier.obs.events import fold

    with rig(slots=8, tiers=[EXAMPLE], isolation=isolation) as one:
        subscription = one.engine.events.subscribe()
        for start in range(0, 24, 4):
            one.store(keys(*range(start, start + 4)))
            one.settle()
        assert one.load(keys(0, 1, 2, 3)) == 4
        one.settle()
        folded = fold(subscription.take())
        assert folded["host"] == set(one.engine._index.keys())
        assert folded["example"] == set(keys(*range(24)))
        one.engine.reset()
        one.settle()
        assert not any(fold(subscription.take(), folded).values())


@pytest.mark.fault("H05")
def test_requests_in_the_line_do_not_hold_what_its_first_one_needs() -> None:
    """Many waiting prompts, each partly in host memory: none may sit on slots while it waits."""
    tier = Script("tier")
    with rig(slots=24, tiers=[scripted(tier)], promotion_slots=4) as one:
        prefixes = [keys(*range(100 * i, 100 * i + 12)) for i in range(12)]
        for prefix in prefixes:
            one.store(prefix)
            one.settle()
        # The beginning of each comes back, so that all have something to hold.
        for prefix in prefixes:
            one.load(prefix[:2])
        one.settle()
        waiting = [(prefix, one.context()) for prefix in prefixes]
        started = time.monotonic()
        one.serve_queued(waiting)
        # A third of the load timeout is how long the first in the line would be patient.
        assert time.monotonic() - started < 5
        one.settle()


@pytest.mark.fault("C13")
@pytest.mark.fault("C20")
def test_keys_are_compared_whole() -> None:
    """Adapters, salts and partial blocks are in the content hash; no part of one stands for it."""
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)]) as one:
        name = key(0x0102030405060708)
        one.store([name])
        one.settle()
        others = [bytes([*name[:i], name[i] ^ 1, *name[i + 1 :]]) for i in range(len(name) - 4)]
        others += [name[:cut] + name[-4:] for cut in (4, 8, 16, 24, 31)]
        others += [name[:-4] + b"\0" + name[-4:]]
        for other in others:
            assert one.load([other]) == 0
        assert one.load([name]) == 1
        one.settle()


@pytest.mark.fault("V02")
def test_tiers_in_a_child_leave_no_thread_beside_the_scheduler(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    fs = {"type": "fs", "root_dir": str(tmp_path)}
    with rig(slots=8, tiers=[fs], isolation="process") as one:
        one.store(keys(1, 2, 3))
        one.settle()
        assert {thread.name for thread in threading.enumerate()} == before
        one.engine.audit()
        one.until(lambda: one.engine.resources is not None)
        assert one.engine.resources.threads > 1
    with rig(slots=8, tiers=[fs], isolation="thread") as one:
        # The comparison can fail: here they are.
        assert {thread.name for thread in threading.enumerate()} != before
        one.settle()
