# SPDX-License-Identifier: Apache-2.0
"""The engine over tiers that fail, hang or damage bytes, and over host memory that is damaged."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.faults import Script
from kvtier.types import Lookup, Outcome
from tests.engine.rig import CHUNK, Rig, key, keys, payload, rig, scripted

EXAMPLE = {"type": "example"}


@pytest.mark.fault("H02")
def test_a_store_that_never_ends_becomes_a_miss() -> None:
    with rig(slots=8, lookup_timeout_seconds=0.05) as one:
        writer, reader = one.context(), one.context()
        one.engine.reserve(keys(1), writer)
        assert one.engine.lookup(key(1), reader) is Lookup.HIT_PENDING
        time.sleep(0.06)
        one.engine.end_step()
        assert one.engine.lookup(key(1), reader) is Lookup.MISS
        # The slot is its writer's until that gives it back.
        assert one.engine.abort(keys(1), writer) == 1
        one.engine.finish_request(writer)
        one.engine.finish_request(reader)


@pytest.mark.fault("C26")
@pytest.mark.fault("C15")
def test_damaged_bytes_are_never_ready() -> None:
    bad, good = Script("bad"), Script("good")
    with rig(slots=8, tiers=[scripted(bad), scripted(good)]) as one:
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.settle()
        bad.damage = b"\xff"
        context = one.context()
        assert one.ask(keys(1, 2), context)[0] == 2
        one.check(keys(1, 2), context)
        assert one.engine.source(key(1), context) == "good"
        assert one.value("kvtier_corrupt_chunks_total", "bad") == 2
        for name, outcome, other in (("bad", "corrupt", "done"), ("good", "done", "corrupt")):
            assert one.value("kvtier_chunks_total", name, "load", outcome) == 2
            assert one.value("kvtier_chunks_total", name, "load", other) == 0
        assert one.value("kvtier_transfer_bytes_total", "bad", "load") == 0
        assert one.value("kvtier_transfer_bytes_total", "good", "load") > 0
        assert not bad.chunks  # it was told to forget them
        one.engine.finish_request(context)
        good.damage = b"\xff"
        one.engine.reset()
        one.settle()
        assert one.load(keys(1, 2)) == 0
        one.settle()


@pytest.mark.fault("H27")
def test_a_hung_tier_does_not_hold_up_the_other() -> None:
    hung, good = Script("hung"), Script("good")
    tiers = [scripted(hung, timeout_seconds=1.0), scripted(good)]
    with rig(
        slots=8,
        tiers=tiers,
        lookup_timeout_seconds=5.0,
        breaker={"failures": 1},
        on_reset="keep",
    ) as one:
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.settle()
        hung.gates["exists"].close()
        assert one.load(keys(1, 2)) == 2
        # From now on it is left alone.
        one.engine.reset()
        one.settle()
        calls = len(hung.calls)
        started = time.monotonic()
        assert one.load(keys(1, 2)) == 2
        assert time.monotonic() - started < 0.9
        assert [call for call in hung.calls[calls:] if call[0] == "exists"] == []
        hung.gates["exists"].open()


@pytest.mark.fault("H27")
def test_a_hung_tier_costs_the_first_request_most() -> None:
    """Long before its breaker opens, the next tier is asked soon."""
    hung, good = Script("hung"), Script("good")
    with rig(slots=8, tiers=[scripted(hung), scripted(good)], on_reset="keep") as one:
        one.store(keys(1, 2))
        one.settle()
        hung.gates["exists"].close()
        seconds = []
        for _ in range(3):
            one.engine.reset()
            one.settle()
            started = time.monotonic()
            assert one.load(keys(1, 2)) == 2
            seconds.append(time.monotonic() - started)
        assert seconds[0] > 0.49
        assert max(seconds[1:]) < 0.25
        hung.gates["exists"].open()
        one.engine.reset()
        one.settle()
        # Healthy again, it comes first again.
        one.until(lambda: one.load(keys(3)) == 0 and not hung.running["exists"])
        context = one.context()
        assert one.ask(keys(1, 2), context)[0] == 2
        assert one.engine.source(key(1), context) == "hung"
        one.engine.finish_request(context)


def test_breaker_closes_by_itself() -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)], breaker={"failures": 1, "open_seconds": 0.1}) as one:
        one.store(keys(1))
        one.settle()
        one.engine.reset()
        one.settle()
        tier.always["load"] = Outcome.IO
        assert one.load(keys(1)) == 0
        one.until(lambda: one.value("kvtier_tier_up", "tier") == 0)
        assert one.value("kvtier_breaker_opened_total", "tier") >= 1
        assert one.load(keys(1)) == 0
        del tier.always["load"]
        one.until(lambda: one.value("kvtier_tier_up", "tier") == 1)
        assert one.load(keys(1)) == 1
        one.until(lambda: one.value("kvtier_breaker_state", "tier") == 0)


def test_failure_is_not_a_miss_in_the_metrics() -> None:
    tier = Script("tier")
    with rig(slots=8, tiers=[scripted(tier)], breaker={"failures": 99}) as one:
        one.store(keys(1))
        one.settle()
        one.engine.reset()
        one.settle()
        tier.outcomes["load"] = [Outcome.IO]
        assert one.load(keys(1)) == 0
        one.settle()
        one.until(lambda: one.value("kvtier_chunks_total", "tier", "load", "io") == 1)
        assert one.value("kvtier_lookup_chunks_total", "tier", "miss") == 0
        assert one.engine.stats().failures == {"io": 1}


@pytest.mark.fault("C29")
def test_a_store_that_failed_is_not_taken_for_saved() -> None:
    tier = Script("tier")
    with rig(slots=4, tiers=[scripted(tier)], breaker={"failures": 99}) as one:
        tier.outcomes["store"] = [Outcome.IO]
        one.store(keys(1))
        one.settle()
        one.store(keys(2, 3, 4, 5, 6))
        one.settle()
        assert one.value("kvtier_evicted_unsaved_total") >= 1
        assert one.load(keys(1)) == 0


@pytest.mark.fault("O11")
@pytest.mark.fault("K09")
def test_a_tier_that_is_down_at_the_start_comes_up_later() -> None:
    tier = Script("tier")
    tier.always["open"] = Outcome.LOST
    with rig(slots=8, tiers=[scripted(tier)]) as one:
        assert one.value("kvtier_tier_up", "tier") == 0
        one.store(keys(1))
        assert one.load(keys(1, 2)) == 1
        del tier.always["open"]
        one.until(lambda: one.value("kvtier_tier_up", "tier") == 1)
        one.settle()
        assert set(tier.chunks) == set(keys(1))  # offered again


def test_configuration_error_of_a_tier_ends_the_start() -> None:
    tier = Script("tier")
    tier.raises["open"] = ConfigError("bucket: does not exist; create it")
    with (
        pytest.raises(ConfigError, match="tier tier: bucket: does not exist"),
        rig(slots=8, tiers=[scripted(tier)]),
    ):
        raise AssertionError("it started")


def test_rig_sees_wrong_bytes() -> None:
    """The comparison that all of the above lean on can fail."""
    with rig(slots=4) as one:
        one.store(keys(1))
        slot, _ = one.engine._index.locate(key(1))
        one.region.slot_view(slot, CHUNK)[5] ^= 1
        with pytest.raises(AssertionError):
            one.load(keys(1))
        assert payload(key(1)) != payload(key(2))
        assert isinstance(one, Rig)


@pytest.mark.fault("C26")
@pytest.mark.parametrize("tiers", [[], [EXAMPLE]])
def test_damaged_host_memory_is_not_loaded(tiers: list[dict[str, str]]) -> None:
    with rig(slots=8, tiers=tiers, verify_host="always") as one:
        one.store(keys(1, 2, 3))
        one.settle()
        assert one.load(keys(1, 2, 3)) == 3
        slot, _ = one.engine._index.locate(key(2))
        one.region.slot_view(slot, CHUNK)[77] ^= 4
        # From the tier, where there is one; recomputed otherwise. Never the damaged bytes.
        assert one.load(keys(1, 2, 3)) == (3 if tiers else 1)
        assert one.value("kvtier_verified_chunks_total", "corrupt") == 1
        assert one.value("kvtier_corrupt_chunks_total", "host") == 1
        assert one.value("kvtier_verified_chunks_total", "ok") >= 3
        one.settle()


def test_sampled_check_looks_at_some() -> None:
    with rig(slots=8, verify_host="sampled") as one:
        names = [bytes([first]) + key(first)[1:] for first in (0, 1, 16, 17)]
        one.store(names)
        one.settle()
        assert one.load(names) == 4
        assert one.value("kvtier_verified_chunks_total", "ok") == 2


@pytest.mark.fault("C23", "H27")
def test_a_find_that_outlives_a_reset_ends_without_its_request() -> None:
    """The service stands still while the time of its find passes; the request knows no chunks."""
    with rig(
        slots=8,
        tiers=[EXAMPLE | {"timeout_seconds": 0.1}],
        isolation="process",
        on_reset="keep",
        lookup_timeout_seconds=0.1,
    ) as one:
        one.store(keys(1, 2, 3))
        one.settle()
        one.engine.reset()
        one.settle()
        reader = one.context()
        pid = one.engine._supervisor.carrier.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert one.engine.lookup(key(1), reader) is Lookup.RETRY
            one.engine.end_step()
            assert one.engine._planner.loads.finds
            one.engine.reset()
            time.sleep(0.3)
            one.engine.end_step()
        finally:
            os.kill(pid, signal.SIGCONT)
        one.settle()
        assert one.engine.idle
        one.engine.finish_request(reader)
