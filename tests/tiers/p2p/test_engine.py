# SPDX-License-Identifier: Apache-2.0
"""Engines with peer tiers: memory lent to peers and taken back, chunks pushed ahead of eviction,
tiers of one request side by side. Sizes are small, decisions the same."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.tiers.p2p import tier as tier_module
from kvtier.types import Peer
from tests.engine.rig import CHUNK, Rig, keys, payload, rig
from tests.tiers.p2p.rig import free_port


def p2p(port: int, *peers: int, **more: Any) -> dict[str, Any]:
    """Configuration of a peer tier."""
    return {
        "type": "p2p",
        "port": port,
        "peers": [f"127.0.0.1:{peer}" for peer in peers],
        "heartbeat_seconds": 0.2,
        **more,
    }


@contextmanager
def pair(
    isolation: str = "thread", *, slots: Sequence[int] = (64, 256), **more: Any
) -> Iterator[tuple[Rig, Rig]]:
    """An instance with little memory that knows one with much, and the other way round."""
    ports = free_port(), free_port()
    with ExitStack() as stack:
        small, large = (
            stack.enter_context(
                rig(
                    slots=count,
                    isolation=isolation,
                    tiers=[p2p(mine, other, **more)],
                    namespace={"test": "pair"},
                    on_reset="keep",
                )
            )
            for count, mine, other in zip(slots, ports, reversed(ports), strict=True)
        )
        yield small, large


def guests(one: Rig) -> int:
    """Slots that the engine has lent to peers."""
    return one.engine._planner.guests.slots


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_chunks_come_from_another_engine(isolation: str) -> None:
    with pair(isolation) as (one, other):
        names = keys(*range(30))
        other.store(names)
        other.settle()
        assert one.load([*names, *keys(99)]) == 30
        assert one.value("kvtier_transfer_bytes_total", "p2p", "load") == 30 * CHUNK
        # Both ways.
        mine = keys(*range(200, 220))
        one.store(mine)
        assert other.load(mine) == 20
        one.settle()
        other.settle()


def test_an_idle_owner_serves() -> None:
    """Not one call of the owning engine: its service does it all."""
    with pair(push=False) as (one, other):
        names = keys(*range(30))
        other.store(names)
        served = other.engine.resources
        assert one.load(names) == 30
        assert other.engine.resources is served


def test_free_memory_is_lent_and_taken_back_before_own_chunks_have_to_go() -> None:
    with pair(slots=(64, 256)) as (_, large):
        large.until(lambda: guests(large) == 128)  # half of all
        large.settle()
        for start in range(0, 240, 8):
            large.store(keys(*range(start, start + 8)))
            large.step()
            time.sleep(0.005)
        large.until(lambda: guests(large) == 0)
        large.settle()
        # It got all of its memory for its own.
        assert large.value("kvtier_evicted_total") == 0
        assert large.load(keys(*range(240))) == 240


def test_what_a_burst_lacks_is_asked_back_at_once() -> None:
    with pair(slots=(64, 256)) as (_, large):
        large.until(lambda: guests(large) == 128)
        large.settle()
        large.store(keys(*range(120)))
        deadline = time.monotonic() + 10
        while guests(large) > 128 - (64 - 8):  # a quarter is free again, with no further step
            assert time.monotonic() < deadline
            time.sleep(0.001)
            large.engine.poll()
        large.store(keys(*range(120, 176)))
        large.settle()
        assert large.value("kvtier_evicted_total") == 0


def test_a_host_memory_of_a_few_slots_pushes_too() -> None:
    with pair(slots=(6, 512)) as (small, large):
        large.until(lambda: guests(large) == 256)
        for number in range(12):
            small.store(keys(number))
            for _ in range(30):
                small.step()
                time.sleep(0.002)
        small.settle()
        assert small.value("kvtier_chunks_total", "p2p", "store", "done") >= 6
        assert small.value("kvtier_evicted_unsaved_total") <= 2


def test_a_reset_and_a_dead_service_bring_lent_slots_back() -> None:
    with pair("process", slots=(64, 128)) as (_, large):
        large.until(lambda: guests(large) == 64)
        before = large.engine._index.num_free
        large.engine.reset()
        large.until(lambda: not large.engine._planner.reset_pending)
        large.until(lambda: guests(large) == 64)
        large.settle()
        assert large.engine._index.num_free == before
        large.engine._supervisor.carrier._process.kill()
        large.until(lambda: not large.engine._supervisor.up)
        large.until(lambda: guests(large) == 0)
        large.until(lambda: large.engine._supervisor.up and guests(large) == 64, 20)
        large.settle()
        assert large.engine._index.num_free == before


def test_lent_slots_from_before_a_reset_come_back_when_they_are_needed() -> None:
    """The service keeps its namespace, and so what peers have pushed."""
    with pair(slots=(64, 128)) as (_, large):
        for _ in range(3):
            large.until(lambda: guests(large) == 64)
            large.settle()
            assert guests(large) == 64  # and no more
            large.engine.reset()
            large.until(lambda: not large.engine._planner.reset_pending)
        large.settle()
        for stored in range(0, 112, 8):
            # There is room for these, and for the few that are kept free.
            large.until(lambda most=112 - stored: guests(large) <= most)
            large.store(keys(*range(stored, stored + 8)))
        large.until(lambda: guests(large) == 0)
        large.settle()
        assert large.load(keys(*range(112))) == 112


def test_what_would_be_dropped_is_pushed_and_comes_back() -> None:
    with pair(slots=(64, 512)) as (small, large):
        large.until(lambda: guests(large) == 256)
        for start in range(0, 192, 8):
            small.store(keys(*range(start, start + 8)))
            for _ in range(20):
                small.step()
                time.sleep(0.002)
        small.settle()
        pushed = small.value("kvtier_chunks_total", "p2p", "store", "done")
        assert 100 <= pushed <= 192
        assert small.value("kvtier_evicted_unsaved_total") <= 16
        assert small.load(keys(*range(30))) == 30
        # The one that has them has them for itself, too.
        assert large.load(keys(*range(48))) == 48
        large.settle()


def test_pushes_go_on_after_resets() -> None:
    with pair(slots=(64, 512)) as (small, large):
        large.until(lambda: guests(large) == 256)
        before = 0.0
        for turn in range(4):
            for start in range(0, 96, 8):
                small.store(keys(*range(96 * turn + start, 96 * turn + start + 8)))
                for _ in range(20):
                    small.step()
                    time.sleep(0.002)
            small.settle()
            pushed = small.value("kvtier_chunks_total", "p2p", "store", "done")
            # All but what there is room for, and some more ahead.
            assert pushed - before >= 24
            before = pushed
            small.engine.reset()
            small.until(lambda: not small.engine._planner.reset_pending)
        large.settle()


def test_where_another_tier_has_the_chunks_nothing_is_pushed(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    fs = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    with (
        rig(slots=256, tiers=[p2p(ports[1])], namespace={"n": "1"}) as large,
        rig(slots=64, tiers=[fs, p2p(*ports)], namespace={"n": "1"}) as small,
    ):
        large.until(lambda: guests(large) == 128)
        for start in range(0, 160, 8):
            small.store(keys(*range(start, start + 8)))
            small.until(lambda: small.engine.idle)
        small.settle()
        assert small.value("kvtier_chunks_total", "p2p", "store", "done") == 0


def test_one_request_from_host_memory_files_and_a_peer(tmp_path: Path) -> None:
    port = free_port()
    fs = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    with (
        rig(slots=64, tiers=[p2p(port)], namespace={"n": "1"}) as peer,
        rig(slots=64, tiers=[fs, p2p(free_port(), port)], namespace={"n": "1"}) as one,
    ):
        names = keys(*range(24))
        peer.store(names[16:])
        one.store(names[8:16])
        one.settle()
        one.store(keys(*range(100, 164)))  # host memory has none of these any more
        one.settle()
        one.store(names[:8])
        one.settle()
        context = one.context()
        before = one.value("kvtier_lookup_chunks_total", "host", "hit")
        assert one.load(names, context) == 24
        assert one.value("kvtier_lookup_chunks_total", "host", "hit") - before >= 8
        assert one.value("kvtier_transfer_bytes_total", "fs", "load") == 8 * CHUNK
        assert one.value("kvtier_transfer_bytes_total", "p2p", "load") == 8 * CHUNK


def test_the_peer_of_a_request() -> None:
    """Without a list of peers; a request that names none asks nobody."""
    port = free_port()
    with (
        rig(slots=64, tiers=[p2p(port)], namespace={"n": "1"}) as owner,
        rig(slots=64, tiers=[p2p(free_port())], namespace={"n": "1"}) as reader,
    ):
        names = keys(*range(10))
        owner.store(names)
        assert reader.load(names) == 0
        context = reader.context(peer=Peer(f"127.0.0.1:{port}"))
        assert reader.load(names, context) == 10


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_prefill_elsewhere_is_awaited_while_it_writes(isolation: str) -> None:
    """The reader's request comes first."""
    port = free_port()
    shared: dict[str, Any] = {"isolation": isolation, "namespace": {"n": "1"}}
    with (
        rig(slots=64, tiers=[p2p(port)], **shared) as writer,
        rig(slots=64, tiers=[p2p(free_port())], **shared) as reader,
    ):
        names = keys(*range(12))
        decode = reader.context(peer=Peer(f"127.0.0.1:{port}", "r-1", 20.0))
        prefill = writer.context(serves="r-1")
        ready = 0

        def look() -> int:
            nonlocal ready
            reader.engine.poll()
            ready, _ = reader.engine.lookup_batch(names, decode)
            reader.engine.end_step()
            return ready

        def loaded() -> float:
            return reader.value("kvtier_transfer_bytes_total", "p2p", "load") / CHUNK

        look()
        for number, name in enumerate(names, 1):
            reservation = writer.engine.reserve([name], prefill)
            writer.write(reservation)
            writer.engine.commit([name], prefill)
            writer.engine.end_step()
            # Each comes before the next one is written.
            until = time.monotonic() + 10
            while loaded() < number:
                assert time.monotonic() < until, f"chunk {number} has not come"
                look()
                time.sleep(0.002)
        writer.engine.finish_request(prefill)
        writer.engine.end_step()
        assert reader.load(names, decode) == 12


def test_a_prefill_that_ends_early_is_not_awaited_longer() -> None:
    port = free_port()
    with (
        rig(slots=64, tiers=[p2p(port)], namespace={"n": "1"}) as writer,
        rig(slots=64, tiers=[p2p(free_port())], namespace={"n": "1"}) as reader,
    ):
        names = keys(*range(12))
        prefill = writer.context(serves="r-1")
        writer.store(names[:5], prefill)
        started = time.monotonic()
        decode = reader.context(peer=Peer(f"127.0.0.1:{port}", "r-1", 60.0))
        assert reader.load(names, decode) == 5
        assert time.monotonic() - started < 10


def hit_ratio(*, push: bool) -> float:
    """Of an instance with twice as many chunks in use as it has room for, beside an idle one."""
    draw = random.Random(7)
    found = asked = 0
    with pair(slots=(64, 512), push=push) as (small, large):
        large.until(lambda: guests(large) == 256)
        for turn in range(160):
            first = 8 * draw.randrange(16)
            names = keys(*range(first, first + 8))
            context = small.context()
            ready, _ = small.ask(names, context)
            small.check(names[:ready], context)
            if turn >= 40:
                found += ready
                asked += 8
            if ready < 8:
                reservation = small.engine.reserve(names[ready:], context)
                small.write(reservation)
                small.engine.commit(reservation.keys, context)
            small.engine.finish_request(context)
            for _ in range(3):
                small.step()
                time.sleep(0.003)
        small.settle()
        large.settle()
    return found / asked


def test_push_makes_more_hits() -> None:
    without, with_push = hit_ratio(push=False), hit_ratio(push=True)
    assert 0.2 < without < 0.65
    assert with_push >= 1.5 * without


@pytest.mark.asyncio
async def test_as_a_library() -> None:
    port = free_port()
    settings = {"capacity_bytes": 64 * CHUNK, "hold_bytes": 48 * CHUNK}
    shared: dict[str, Any] = {"chunk_bytes": CHUNK, "namespace": {"model": "m"}}
    async with (
        kvtier.open({**settings, "tiers": [p2p(port)]}, **shared) as owner,
        kvtier.open({**settings, "tiers": [p2p(free_port())]}, **shared) as reader,
    ):
        chunks = {name: payload(name) for name in keys(*range(20))}
        await owner.store(chunks)
        assert await reader.load(chunks) == []
        there = kvtier.Peer(f"127.0.0.1:{port}")
        assert await reader.exists(list(chunks)[:5], peer=there) == 5
        loaded = await reader.load(chunks, peer=there)
        assert [bytes(view) for view in loaded] == list(chunks.values())
        with pytest.raises(kvtier.ConfigError, match=r"kvtier\.Peer\('host:port'\)"):
            await reader.load(chunks, peer="127.0.0.1:5710")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_peer_that_hangs_does_not_keep_requests_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many requests wait for it on a busy loop, so that their calls end late."""
    monkeypatch.setattr(tier_module, "MARGIN_SECONDS", -5.0)
    config = {
        "capacity_bytes": "1MiB",
        "lookup_timeout_seconds": 0.3,
        "breaker": {"failures": 2},
    }
    port = free_port()
    names = keys(1, 2)
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        silent = Peer(f"127.0.0.1:{hangs.getsockname()[1]}")
        async with (
            kvtier.open({**config, "tiers": [p2p(port)]}, chunk_bytes=CHUNK) as other,
            kvtier.open({**config, "tiers": [p2p(free_port())]}, chunk_bytes=CHUNK) as one,
        ):
            await other.store({name: payload(name) for name in names})
            loads = [one.load(keys(number), peer=silent) for number in range(100, 110)]
            assert await asyncio.gather(*loads) == [[]] * 10
            got = await one.load(names, peer=Peer(f"127.0.0.1:{port}"))
            assert [bytes(chunk) for chunk in got] == [payload(name) for name in names]
