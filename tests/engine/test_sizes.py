# SPDX-License-Identifier: Apache-2.0
"""Groups with chunks of different sizes in one host memory: what is padding, and every byte."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier._core.layout import crc32c
from kvtier.engine.engine import Engine
from kvtier.testing.faults import Script
from kvtier.types import GroupGeometry, Lookup, make_geometry
from tests.engine.rig import Rig, key, payload, rig, scripted

KIB = 1 << 10
SETS: dict[str, tuple[int, ...]] = {
    "tenfold": (160 * KIB, 16 * KIB),
    "three": (128 * KIB, 40 * KIB, 12 * KIB),
    # Attention over 384 tokens and three recurrent states; five windowed groups and a full one.
    "linear": (192 * KIB, 262 * KIB, 262 * KIB, 262 * KIB),
    "swa": (32 * KIB,) * 6,
}
CLASSES = {"tenfold": 2, "three": 3, "linear": 2, "swa": 1}
SET = pytest.mark.parametrize("name", SETS)


def groups_of(sizes: Sequence[int]) -> list[GroupGeometry]:
    return [GroupGeometry(16, 1, size) for size in sizes]


def fs(root: Path) -> dict[str, Any]:
    return {"type": "fs", "name": "disk", "root_dir": str(root), "min_free_bytes": 1}


def prompt(number: int, groups: int, length: int = 3) -> list[bytes]:
    """Its chunks: one of each group, `length` times."""
    return [key(100 * number + i, group) for i in range(length) for group in range(groups)]


def chunk(name: bytes, length: int) -> tuple[bytes, int]:
    """What a scripted tier has of a chunk."""
    return payload(name, length), crc32c(payload(name, length))


def is_full_and_little_is_padding(one: Rig) -> None:
    """Of the bytes of the whole region."""
    geometry, index = one.engine.geometry, one.engine.cache.index
    gauge = one.value("kvtier_host_padding_ratio")
    assert 0 <= gauge <= 0.15
    region_bytes = geometry.num_slots * geometry.slot_bytes
    assert one.value("kvtier_host_capacity_bytes") == region_bytes
    fill = one.value("kvtier_host_fill_ratio")
    assert fill == pytest.approx(index.ready_bytes / region_bytes / (1 - gauge))
    # All but what is kept free ahead for loads, and slabs that are just being filled.
    assert fill >= 0.9
    assert index.ready_bytes >= 0.8 * region_bytes


@SET
def test_full_of_them_and_exact_from_everywhere(name: str, tmp_path: Path) -> None:
    """Stores that fill the region three times; then every prompt comes back, from host memory and
    from files, here and after a restart."""
    sizes = SETS[name]
    settings: dict[str, Any] = {
        "slots": 48,
        "groups": groups_of(sizes),
        "tiers": [fs(tmp_path)],
        "lookup_timeout_seconds": 10.0,
    }
    numbers = range(3 * 48 * max(sizes) // (3 * sum(sizes)))
    with rig(**settings) as one:
        assert len(set(one.engine.geometry.widths)) == CLASSES[name]
        for number in numbers:
            names = prompt(number, len(sizes))
            assert one.store(names) == names
            one.settle()
        is_full_and_little_is_padding(one)
        assert one.engine.stats().evicted > len(numbers)
        last = prompt(numbers[-1], len(sizes))
        assert one.load(last) == len(last)
        assert one.engine.stats().tier_hits["disk"] == 0
        for number in numbers:
            names = prompt(number, len(sizes))
            assert one.load(names) == len(names)
            one.settle()
        is_full_and_little_is_padding(one)
        assert one.engine.stats().tier_hits["disk"] > len(numbers)
        assert not one.engine.stats().failures
    with rig(**settings) as one:
        order = list(numbers)
        random.Random(1).shuffle(order)
        for number in order:
            names = prompt(number, len(sizes))
            assert one.load(names) == len(names)
        one.settle()
        assert one.engine.stats().tier_hits["disk"] > len(numbers)
        assert not one.engine.stats().failures


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("by_loads", [False, True], ids=["stored", "loaded"])
def test_memory_follows_the_mix(policy: str, by_loads: bool) -> None:
    """One size only, then the other: it has nearly all of the memory then, both ways; also where
    chunks come from a tier and none is stored."""
    sizes = SETS["tenfold"]
    script = Script("t")
    with rig(
        slots=40,
        groups=groups_of(sizes),
        tiers=[scripted(script)],
        policy=policy,
        lookup_timeout_seconds=10.0,
    ) as one:
        index = one.engine.cache.index
        for group in (1, 0, 1):
            room = (40, 400)[group]
            for start in range(0, 3 * room, 5):
                names = [key(10_000 + start + i, group) for i in range(5)]
                if by_loads:
                    for each in names:
                        script.chunks[each] = chunk(each, sizes[group])
                    assert one.load(names) == 5
                else:
                    assert one.store(names) == names
                    one.settle()
            assert index.capacity_for(group) >= 0.9 * room
            assert index.ready_for(group) >= 0.8 * room
            one.engine.check()


def test_slots_are_lent_for_the_size_that_is_asked_for() -> None:
    """Chunks of three sizes in one prompt: each is loaded into a slot of its own size."""
    sizes = SETS["three"]
    script = Script("t")
    with rig(
        slots=24,
        groups=groups_of(sizes),
        tiers=[scripted(script)],
        promotion_slots=0,
        max_hold_ratio=1.0,
        lookup_timeout_seconds=10.0,
    ) as one:
        for round_ in range(3):
            names = prompt(round_, 3, length=5)
            for each in names:
                script.chunks[each] = chunk(each, sizes[each[-1]])
            assert one.load(names) == 15
            slots = {each: one.engine.cache.index.locate(each) for each in names}
            slab = one.engine.geometry.slab_slots
            by_slab: dict[int, set[int]] = {}
            for each, where in slots.items():
                assert where is not None
                by_slab.setdefault(where[0] // slab, set()).add(each[-1])
            assert all(len(groups) == 1 for groups in by_slab.values())
        one.settle()


@pytest.mark.asyncio
async def test_through_the_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``kvtier.open`` with chunks of several sizes; what it makes of them is in its log."""
    sizes = SETS["three"]
    config = {"capacity_bytes": "4MiB", "tiers": [fs(tmp_path)]}
    names = [name for number in range(10) for name in prompt(number, 3)]
    chunks = {name: payload(name, sizes[name[-1]]) for name in names}
    for again in (False, True):
        with caplog.at_level(logging.INFO):
            async with kvtier.open(
                config, chunk_bytes=sizes, namespace={"model": "m", "kv_dtype": "u8"}
            ) as cache:
                geometry = cache.geometry
                assert geometry == make_geometry(
                    [GroupGeometry(1, 1, size) for size in sizes], 4 << 20
                )
                if not again:
                    stored = await cache.store(chunks)
                    assert (stored.stored, stored.refused) == (names, [])
                assert await cache.flush()
                for number in range(10):
                    wanted = prompt(number, 3)
                    views = await cache.load(wanted)
                    assert [bytes(view) for view in views] == [chunks[name] for name in wanted]
        widths = ", ".join(map(str, geometry.widths))
        slabs = f"slabs of {geometry.slab_slots}; chunks by group take {widths}"
        padding = ", ".join(
            f"group {group}: {ratio:.1%}" for group, ratio in enumerate(geometry.padding_ratio)
        )
        assert f"bytes ({slabs}), padding {padding}" in caplog.text
        caplog.clear()


def test_slots_are_kept_free_ahead_in_each_class() -> None:
    """Loads begin with the lookup, whatever the size; of a small memory a 32nd is kept."""
    sizes = SETS["tenfold"]
    script = Script("t")
    with rig(slots=160, groups=groups_of(sizes), tiers=[scripted(script)]) as one:
        index = one.engine.cache.index
        for number in range(240):
            one.store([key(number, 0), *(key(100 * number + i, 1) for i in range(10))])
            one.settle()
        for group in (0, 1):
            assert index.capacity_for(group) >= 64
            assert index.free_for(group) >= 2
        assert one.engine.make_room(15, 1) >= 15
        assert index.free_for(1) >= 15


@pytest.mark.asyncio
async def test_room_is_made_for_the_size_that_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with chunks of both sizes waits for room for each."""
    asked: list[tuple[int, int]] = []
    original = Engine.make_room

    def make_room(self: Engine, n: int, group: int = 0) -> int:
        asked.append((n, group))
        return original(self, n, group)

    monkeypatch.setattr(Engine, "make_room", make_room)
    sizes = SETS["tenfold"]
    async with kvtier.open({"capacity_bytes": "4MiB"}, chunk_bytes=sizes) as cache:
        names = prompt(1, 2, length=2)
        chunks = {name: payload(name, sizes[name[-1]]) for name in names}
        stored = await cache.store({names[0]: chunks[names[0]]})
        assert stored.stored == names[:1]
        stored = await cache.store(chunks)
    assert (stored.stored, stored.present) == (names[1:], names[:1])
    assert asked == [(1, 0), (1, 0), (2, 1)]


def test_what_waits_holds_as_many_slots_as_the_bound_has() -> None:
    """Chunks of a tenth of the largest size: ten times as many."""
    sizes = SETS["tenfold"]
    script = Script("t")
    wide, small = ([key(number, group) for number in range(60)] for group in (0, 1))
    with rig(
        slots=40,
        groups=groups_of(sizes),
        tiers=[scripted(script)],
        hold_bytes=5 * sizes[0],
        lookup_timeout_seconds=10.0,
    ) as one:
        loads = one.engine._planner.loads
        assert (one.engine.geometry.widths, loads.hold_limit) == ((10, 1), 50)
        one.store(wide[:4])
        one.store(small[:45])
        one.settle()
        # What there is no room to hold one of the largest for is lent to loads.
        for names, ready, held, lent in ((small, 45, 41, 9), (wide[:8], 4, 4, 1)):
            context = one.context()
            assert one.engine.lookup_batch(names, context) == (ready, Lookup.RETRY)
            one.engine.end_step()
            assert (loads.held, loads.lent, loads.taken_slots) == (held, lent, 50)
            one.engine.publish_metrics()
            assert one.engine.registry.value("kvtier_held_bytes") == 50 * sizes[1]
            one.engine.finish_request(context)
            one.settle()
            assert (loads.held, loads.lent, loads.taken_slots) == (0, 0, 0)
    for options, limit in (({"max_hold_ratio": 1.0}, 30), ({"hold_bytes": 1}, 10)):
        with rig(slots=4, groups=groups_of(sizes), **options) as one:
            assert one.engine._planner.loads.hold_limit == limit


def test_a_prompt_of_small_chunks_is_promoted_as_a_whole() -> None:
    sizes = SETS["tenfold"]
    script = Script("t")
    names = [key(number, 1) for number in range(45)]
    script.chunks.update((name, chunk(name, sizes[1])) for name in names)
    with rig(
        slots=40,
        groups=groups_of(sizes),
        tiers=[scripted(script)],
        hold_bytes=5 * sizes[0],
        lookup_timeout_seconds=10.0,
    ) as one:
        assert one.load(names) == 45
        one.settle()
        assert one.engine._planner.loads.taken_slots == 0


def test_no_more_is_evicted_than_the_bound_can_lend() -> None:
    sizes = SETS["tenfold"]
    script = Script("t")
    wide = [key(number) for number in range(8)]
    script.chunks.update((name, chunk(name, sizes[0])) for name in wide)
    with rig(
        slots=12,
        groups=groups_of(sizes),
        tiers=[scripted(script)],
        hold_bytes=5 * sizes[0],
        promotion_slots=0,
        lookup_timeout_seconds=10.0,
    ) as one:
        for start in range(0, 120, 20):
            one.store([key(number, 1) for number in range(start, start + 20)])
            one.settle()
        assert one.engine.stats().evicted == 0
        assert one.load(wide) == 5
        one.settle()
        assert one.engine.stats().evicted == 50
