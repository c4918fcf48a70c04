# SPDX-License-Identifier: Apache-2.0
"""kvtier's metrics at vLLM's own endpoint, and its events in vLLM's own stream."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.engine import Engine
from tests.vllm.test_slice import BLOCK_TOKENS, environment, prompt
from tests.vllm.test_tiers import CHUNKS, Served, options

pytestmark = [pytest.mark.vllm]

CHUNK_BYTES = 256 << 10


def series(text: str) -> dict[tuple[str, str, str], float]:
    """(name, tier, other labels in order) to value of kvtier's series."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvtier_"):
                labels = dict(sample.labels)
                assert labels.pop("engine") == "0"
                labels.pop("model_name")
                tier = labels.pop("tier", "")
                found[sample.name, tier, " ".join(labels[key] for key in sorted(labels))] = (
                    sample.value
                )
    return found


@pytest.mark.slow
def test_metrics_and_events_of_a_known_load(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    files = tmp_path / "files"
    with Engine(tmp_path / "log", environment(1)) as engine:
        arguments = options(checkpoint("full"), own_shm_directory, files)
        arguments["extra"]["secondary_tiers"][0]["enable_kv_events"] = True
        arguments["extra"]["secondary_tiers"][0]["name"] = "disk"
        engine.start(
            **arguments,
            disable_log_stats=False,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": endpoint,
            },
        )
        engine.call("listen", endpoint=endpoint)
        one = Served(engine)
        one.run(prompt(50, 100))  # the subscriber is connected by now
        engine.call("events")

        one.run(prompt(1))
        one.settle()
        one.run(prompt(51, 100))  # a step that takes what came after the last one
        before = series(engine.call("metrics"))
        assert before["kvtier_chunks_total", "disk", "store done"] == CHUNKS
        assert before["kvtier_transfer_bytes_total", "disk", "store"] == CHUNKS * CHUNK_BYTES
        assert before["kvtier_host_slots", "", "ready"] == CHUNKS
        assert before["kvtier_transfer_seconds_count", "disk", "store"] > 0
        events = engine.call("events")
        stored = [event for event in events if not event["removed"] and event["medium"] != "GPU"]
        by_place: dict[tuple[str, str | None, str | None], set[str]] = {}
        for event in stored:
            place = (event["medium"], event["locality"], event["ownership"])
            by_place.setdefault(place, set()).update(event["hashes"])
        assert set(by_place) == {("CPU", None, None), ("STORAGE", "LOCAL", "disk")}
        host = by_place["CPU", None, None]
        assert len(host) == CHUNKS
        assert by_place["STORAGE", "LOCAL", "disk"] == host

        one.empty_host()
        one.forget_device()
        assert one.run(prompt(1))["cached"] == CHUNKS * BLOCK_TOKENS
        state = one.settle()
        one.run(prompt(52, 100))
        after = series(engine.call("metrics"))
        assert after["kvtier_lookup_chunks_total", "disk", "hit"] == CHUNKS
        assert after["kvtier_lookup_chunks_total", "disk", "hit"] == state["tier_hits"]["disk"]
        assert after["kvtier_transfer_bytes_total", "disk", "load"] == CHUNKS * CHUNK_BYTES
        assert after["kvtier_evicted_total", "", ""] >= CHUNKS
        removed = {
            one
            for event in engine.call("events")
            if event["removed"] and event["medium"] == "CPU"
            for one in event["hashes"]
        }
        assert removed >= host


@pytest.mark.parametrize("seed", range(20))
def test_observations_fall_into_their_buckets_and_have_their_sum(seed: int) -> None:
    from kvtier.vllm.outlets import observations  # lazy: vLLM takes seconds

    rng = random.Random(seed)
    bounds = sorted({round(rng.expovariate(1.0), 3) + 0.001 for _ in range(8)})
    real = [rng.expovariate(0.5) for _ in range(rng.randrange(1, 50))]
    counts = [0] * (len(bounds) + 1)
    for value in real:
        counts[bisect_left(bounds, value)] += 1
    made = list(observations(bounds, counts, sum(real)))
    again = [0] * (len(bounds) + 1)
    for value in made:
        again[bisect_left(bounds, value)] += 1
    assert again == counts
    assert sum(made) == pytest.approx(sum(real))
