# SPDX-License-Identifier: Apache-2.0
"""The stand-in server: what it computes, finds, loads and stores, on a virtual clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvtier.bench.accelerator import PagedBuffer
from kvtier.bench.copies import CopyStream
from kvtier.bench.costs import Prefill
from kvtier.bench.drivers import standin
from kvtier.bench.drivers.standin import Limits, StandIn, StuckError
from kvtier.bench.inject import make_damage, make_skip
from kvtier.bench.pattern import Comparer, Pattern
from kvtier.bench.workload import MultiTurn, Source, TraceReplay, TraceRow
from kvtier.types import Lookup
from tests.bench.fake_engine import FakeEngine
from tests.bench.helpers import COSTS, SHAPE, VirtualClock

LIMITS = Limits(step_tokens=64, decode_tokens=4, stuck_seconds=5.0)


@contextlib.contextmanager
def server(
    source: Source,
    blocks: int = 64,
    slots: int | None = None,
    tier: bool = False,
    inject: str | None = None,
    engine_type: type[FakeEngine] = FakeEngine,
) -> Iterator[tuple[StandIn, FakeEngine | None, CopyStream | None]]:
    """A server; with `slots`, kvtier's fake behind it. All is closed and checked at the end."""
    buffer, pattern = PagedBuffer(SHAPE, blocks), Pattern(SHAPE)
    engine = stream = None
    if slots is not None:
        engine = engine_type(SHAPE.geometry(slots * 4096), tier=tier)
        stream = CopyStream(
            buffer,
            pattern,
            engine.region,
            damage=make_damage(inject, SHAPE),
            skip_store=make_skip(inject),
        )
        stream.open()
    try:
        yield (
            StandIn(buffer, pattern, COSTS, LIMITS, source, VirtualClock(), engine, stream),
            engine,
            stream,
        )
    finally:
        if stream is not None:
            stream.close()


def talk(conversations: int = 4, turns: int = 3, limit: int = 64) -> MultiTurn:
    return MultiTurn(conversations, SHAPE, 100, 64, turns, 8, max_in_flight=limit)


def test_slot_holds_one_chunk() -> None:
    assert SHAPE.chunk_bytes == 4096


def test_without_kvtier_every_token_is_found_or_computed() -> None:
    with server(talk(1)) as (standin_server, _, _):
        standin_server.run()
        finished = standin_server.finished
        assert [item.prompt_tokens for item in finished] == [100, 164, 228, 292]
        # All full blocks of the last turn (prompt and answer) are still there.
        assert [item.accelerator_tokens for item in finished] == [0, 96, 160, 224]
        for item in finished:
            assert item.accelerator_tokens + item.computed_tokens == item.prompt_tokens
        standin_server.pool.check()
        assert standin_server.pool.num_free == 64


def test_time_passes_as_modelled() -> None:
    with server(MultiTurn(1, SHAPE, 100, 64, 0, 0)) as (standin_server, _, _):
        standin_server.run()
        (only,) = standin_server.finished
        # A budget of 64 tokens makes two steps.
        wanted = COSTS.step_seconds([Prefill(64, 0)], []) + COSTS.step_seconds(
            [Prefill(36, 64)], []
        )
        assert only.first_token == pytest.approx(wanted)
        assert standin_server.times.model == pytest.approx(wanted)
        assert standin_server.times.overrun == pytest.approx(0.0)


def test_what_the_accelerator_forgot_comes_back() -> None:
    # 24 blocks hold one conversation of 292 tokens, not four.
    with server(talk(), blocks=24) as (standin_server, _, _):
        standin_server.run()
        base = sum(item.computed_tokens for item in standin_server.finished)
    with server(talk(), blocks=24, slots=64) as (standin_server, engine, stream):
        standin_server.run()
        assert engine is not None
        assert stream is not None
        engine.close(1.0)
        computed = sum(item.computed_tokens for item in standin_server.finished)
        loaded = sum(item.loaded_tokens for item in standin_server.finished)
        assert loaded > 0
        assert computed < base / 2
        counters = stream.counters
        assert counters.differing_blocks == 0
        assert counters.verified_bytes == counters.load_bytes == loaded * SHAPE.token_bytes
        assert len(standin_server.finished) == 16
        assert standin_server.pool.num_free == 24
        for item in standin_server.finished:
            parts = item.accelerator_tokens + item.loaded_tokens + item.computed_tokens
            assert parts == item.prompt_tokens
            assert item.computed_tokens >= 1


def test_tier_brings_back_what_host_memory_lost() -> None:
    with server(talk(), blocks=24, slots=12, tier=True) as (standin_server, engine, stream):
        standin_server.run()
        assert engine is not None
        assert stream is not None
        engine.close(1.0)
        assert stream.counters.differing_blocks == 0
        sources = [item.sources for item in standin_server.finished]
        assert any("fs" in source for source in sources)
        assert any(item.deferred_seconds > 0 for item in standin_server.finished)


def test_accelerator_holds_the_bytes_it_claims() -> None:
    with server(talk(2), blocks=64, slots=64) as (standin_server, _, _):
        standin_server.run()
        comparer = Comparer(Pattern(SHAPE))
        pool = standin_server.pool
        assert pool._by_hash
        for block_hash, block in pool._by_hash.items():
            assert comparer.compare(standin_server._buffer.block(block), block_hash) is None


@pytest.mark.parametrize("kind", ["flip", "swap-heads", "swap-layers", "stale"])
def test_injected_damage_arrives_and_is_found(kind: str) -> None:
    with server(talk(), blocks=24, slots=64, inject=kind) as (standin_server, _, stream):
        standin_server.run()
        assert stream is not None
        assert stream.counters.damaged_chunks > 0
        assert stream.counters.differing_blocks > 0
        assert stream.counters.differences


def test_open_loop_latency_counts_from_the_intended_start() -> None:
    rows = [TraceRow(0, 640, 4, [1, 2]), TraceRow(1, 640, 4, [3, 4])]
    with server(TraceReplay(rows, SHAPE, 1.0, 2000), blocks=100) as (standin_server, _, _):
        standin_server.run()
        first, second = standin_server.finished
        assert (first.intended_start, second.intended_start) == (0.0, 0.001)
        # The second was noticed only after the first step; its wait counts.
        assert second.first_token_seconds == pytest.approx(second.first_token - 0.001)
        assert second.first_token >= first.first_token


def test_idle_time_passes_until_the_next_request_is_due() -> None:
    rows = [TraceRow(0, 40, 0, [1]), TraceRow(10_000, 40, 0, [1])]
    with server(TraceReplay(rows, SHAPE, 1.0, 2000)) as (standin_server, _, _):
        standin_server.run()
        assert standin_server.finished[1].first_token == pytest.approx(10.0, abs=0.1)
        assert standin_server.times.idle > 9.8


def test_stop_ends_with_what_was_measured() -> None:
    with server(talk(), blocks=24, slots=64) as (standin_server, engine, stream):
        assert engine is not None
        assert stream is not None

        def stop_early(running: StandIn, _seconds: float) -> None:
            if len(running.finished) >= 3:
                running.stop()

        standin_server._on_step = stop_early
        standin_server.run()
        assert 3 <= len(standin_server.finished) < 16
        assert stream.outstanding == 0
        engine.close(1.0)  # no pin, no write, no request is left


class Silent(FakeEngine):
    """A tier that never answers."""

    def lookup_batch(self, keys, ctx):  # type: ignore[no-untyped-def]
        return 0, Lookup.RETRY


def test_lookup_that_never_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "IDLE_SECONDS", 0.001)
    with server(talk(1), slots=8, engine_type=Silent) as (standin_server, _, _):
        clock = standin_server._clock
        standin_server._on_step = lambda *_: clock.sleep_until(clock.now() + 1.0)
        with pytest.raises(StuckError, match="1 requests waiting"):
            standin_server.run()


class Broken(FakeEngine):
    """Host memory that is gone."""

    def __init__(self, *args: object, **keywords: object) -> None:
        super().__init__(*args, **keywords)  # type: ignore[arg-type]
        self.region.slot_address = lambda slot: 1 // 0  # type: ignore[method-assign]


def test_failed_copy_is_raised() -> None:
    with (
        server(talk(1), slots=8, engine_type=Broken) as (standin_server, _, _),
        pytest.raises(ZeroDivisionError),
    ):
        standin_server.run()
