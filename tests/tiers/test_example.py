# SPDX-License-Identifier: Apache-2.0
"""The tiers to copy from: the example tier, and the native one in ``examples/``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.own_native_tier import CompressedOptions, CompressedTier
from kvtier.obs.events import Event
from kvtier.obs.metrics import METRICS, Registry, validate
from kvtier.testing.contract import Arena, TierContract, chunk, context, make_env
from kvtier.tiers.base import Tier, TierEnv
from kvtier.tiers.example import ExampleOptions, ExampleTier
from kvtier.types import Outcome, Presence
from tests.engine.rig import CHUNK, keys, rig


class TestExampleContract(TierContract):
    persistent = False

    def make_tier(self, env: TierEnv, tmp_path: Path) -> Tier:
        return ExampleTier("example", ExampleOptions(), env)

    def raw_get(self, tier: ExampleTier, key: bytes) -> bytes | None:
        found = tier._chunks.get(key)
        return None if found is None else found[0]

    def raw_put(self, tier: ExampleTier, key: bytes, data: bytes) -> None:
        tier._chunks[key] = (data, tier._chunks[key][1])


class TestCompressedContract(TierContract):
    persistent = False

    def definitions(self) -> Sequence[Any]:
        return CompressedTier.metric_definitions()

    def make_tier(self, env: TierEnv, tmp_path: Path) -> Tier:
        return CompressedTier("compressed", CompressedOptions(), env)

    def raw_get(self, tier: CompressedTier, key: bytes) -> bytes | None:
        found = tier.chunks.get(key)
        return None if found is None else zlib.decompress(found[0])

    def raw_put(self, tier: CompressedTier, key: bytes, data: bytes) -> None:
        tier.chunks[key] = (zlib.compress(data, 1), tier.chunks[key][1])


@pytest.mark.asyncio
async def test_least_recently_used_goes_first() -> None:
    events: list[Event] = []
    env = make_env(events=events)
    size = 4096
    tier = ExampleTier("mine", ExampleOptions(capacity_bytes=3 * size), env)
    await tier.open()
    arena = Arena(8, 2 * size)
    chunks = [chunk(n, 2, size) for n in range(5)]

    async def store(n: int) -> Outcome:
        key, payload = chunks[n]
        slot = arena.slot(n, key, size, payload)
        return (await tier.store([slot], context()))[0]

    for n in range(3):
        assert await store(n) is Outcome.DONE
    slot = arena.slot(7, chunks[0][0], size)
    assert await tier.load([slot], context()) == [Outcome.DONE]
    assert bytes(slot.view) == chunks[0][1]
    assert await store(1) is Outcome.EXISTS
    assert await store(3) is Outcome.DONE
    found = await tier.exists([key for key, _ in chunks[:4]], context())
    assert found == [Presence.PRESENT, Presence.PRESENT, Presence.ABSENT, Presence.PRESENT]
    assert [(event.operation, event.key) for event in events] == [("removed", chunks[2][0])]
    registry = Registry(METRICS)
    registry.apply(env.recorder.take())
    assert registry.value("kvtier_tier_used_bytes", ("mine",)) == 3 * size
    assert registry.value("kvtier_tier_evicted_total", ("mine",)) == 1
    del slot
    arena.close()


@pytest.mark.asyncio
async def test_larger_than_the_tier_is_full() -> None:
    tier = ExampleTier("mine", ExampleOptions(capacity_bytes=4095), make_env())
    await tier.open()
    arena = Arena(1, 4096)
    key, payload = chunk(1, 2, 4096)
    slot = arena.slot(0, key, 4096, payload)
    assert await tier.store([slot], context()) == [Outcome.FULL]
    assert await tier.exists([key], context()) == [Presence.ABSENT]
    del slot
    arena.close()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_native_tier_of_ones_own_and_its_metrics(isolation: str) -> None:
    validate(CompressedTier.metric_definitions(), tier=CompressedTier.type)
    tier = {
        "type": "CompressedTier",
        "name": "packed",
        "module_path": "examples.own_native_tier",
        "level": 3,
    }
    with rig(slots=8, tiers=[tier], isolation=isolation) as one:
        for start in range(0, 24, 4):
            one.store(keys(*range(start, start + 4)))
            one.settle()
        assert one.load(keys(*range(4))) == 4
        one.settle()
        assert one.value("kvtier_lookup_chunks_total", "packed", "hit") == 4
        text = one.engine.registry.render().decode()
        assert 'kvtier_compressed_pack_seconds_count{tier="packed"} 24.0' in text
        packed = one.value("kvtier_compressed_packed_bytes", "packed")
        assert 0 < packed < 24 * CHUNK
