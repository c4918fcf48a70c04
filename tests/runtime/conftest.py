# SPDX-License-Identifier: Apache-2.0
"""Both event loops, and the service's parts over a small region."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier._core.index import Index
from kvtier.config import parse
from kvtier.host.region import Region
from kvtier.obs.metrics import METRICS, Recorder, Registry
from kvtier.runtime import messages as m
from kvtier.runtime.lane import Lane
from kvtier.runtime.memory import Memory
from kvtier.testing.faults import Script, ScriptedOptions, ScriptedTier
from kvtier.tiers.base import TierEnv
from kvtier.types import GroupGeometry, make_geometry
from tests.engine.rig import CHUNK, scripted


class Bench:
    """Lanes over scripted tiers, one region, and what they tell the owner."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.memory = Memory(region)
        self.index = Index(self.memory.slots, region.geometry.payload_bytes, track_unsaved=True)
        self.index.grow(region.geometry.num_slots)
        self.registry = Registry(METRICS)
        self.recorder = Recorder(METRICS)
        self.health: list[tuple[int, bool, bool, str]] = []
        self.contents: list[m.Contents] = []

    def lane(self, script: Script, index: int = 0, **more: Any) -> Lane:
        breaker = more.pop("breaker", {"failures": 2, "open_seconds": 0.05})
        kind = more.pop("kind", ScriptedTier)
        lookup_seconds = more.pop("lookup_timeout_seconds", 1.0)
        config = parse(
            {
                "capacity_bytes": 8 * CHUNK,
                "breaker": breaker,
                "lookup_timeout_seconds": lookup_seconds,
                "tiers": [scripted(script, **more)],
            }
        )
        env = TierEnv(
            geometry=self.region.geometry,
            namespace={},
            namespace_digest=b"",
            recorder=self.recorder,
            emit=lambda event: None,
        )
        options = ScriptedOptions(script=script.name, private=more.get("private", False))
        tier = kind(script.name, options, env)
        return Lane(
            index,
            tier,
            config.tiers[0],
            config,
            self.recorder,
            lambda *health: self.health.append(health),
            self.contents.append,
            time.monotonic,
        )

    def value(self, name: str, *labels: str) -> float:
        self.registry.apply(self.recorder.take(), source="service")
        return self.registry.value(name, labels) or 0.0


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture) -> Iterator[Bench]:
    groups = [GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=CHUNK)]
    geometry = make_geometry(groups, 8 * CHUNK)
    with Region.create(f"runtime-tests-{os.getpid()}", geometry, {}, ranks=1) as region:
        one = Bench(region)
        yield one
        one.memory.close()
        caplog.get_records("call").clear()  # tracebacks hold frames, and these the views
        vars(one).clear()  # the test's arguments outlive its fixtures, and views keep the memory
