# SPDX-License-Identifier: Apache-2.0
"""kvtier's metrics at vLLM's own endpoint, and its events in vLLM's own stream."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.engine import Engine, Processes, series
from tests.vllm.test_slice import BLOCK_TOKENS, prompt
from tests.vllm.test_tiers import CHUNK_BYTES, CHUNKS, FILLERS, Served, options

pytestmark = [pytest.mark.vllm]


@pytest.mark.fault("M14")
@pytest.mark.slow
def test_metrics_and_events_of_a_known_load(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    files = tmp_path / "files"
    with processes.lend() as engine:
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
        assert set(by_place) == {("CPU", None, None), ("STORAGE", None, "disk")}
        host = by_place["CPU", None, None]
        assert len(host) == CHUNKS
        assert by_place["STORAGE", None, "disk"] == host

        one.empty_host()
        one.forget_device()
        assert one.run(prompt(1))["cached"] == CHUNKS * BLOCK_TOKENS
        state = one.settle()
        one.run(prompt(52, 100))
        after = series(engine.call("metrics"))
        assert after["kvtier_lookup_chunks_total", "disk", "hit"] == CHUNKS
        assert after["kvtier_lookup_chunks_total", "disk", "hit"] == state["tier_hits"]["disk"]
        assert after["kvtier_transfer_bytes_total", "disk", "load"] == CHUNKS * CHUNK_BYTES
        events += engine.call("events")
        held: set[str] = set()
        removed = []
        for event in events:
            for chunk in event["hashes"] if event["medium"] == "CPU" else ():
                assert (chunk in held) == event["removed"]  # told once, and gone once
                if event["removed"]:
                    held.remove(chunk)
                    removed.append(chunk)
                else:
                    held.add(chunk)
        assert host <= set(removed)
        assert host <= held
        assert len(held) == after["kvtier_host_slots", "", "ready"]
        # The prompt, computed and then from the files, and those that pushed it out in between.
        assert len(removed) == (2 + FILLERS) * CHUNKS - len(held)
        assert after["kvtier_evicted_total", "", ""] == len(removed)


@pytest.mark.slow
def test_what_a_tier_evicts_is_told_to_be_gone(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """With the medium, locality and owner that its store was told with; the rest is there."""
    endpoint, files, prompts = f"ipc://{tmp_path}/events", tmp_path / "files", 6
    with processes.lend() as engine:
        arguments = options(checkpoint("full"), own_shm_directory, files)
        arguments["extra"]["secondary_tiers"][0] |= {
            "enable_kv_events": True,
            "name": "disk",
            "locality": "REMOTE",
            "capacity_bytes": 3 * CHUNKS * CHUNK_BYTES,
        }
        engine.start(
            **arguments,
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
        for seed in range(prompts):
            one.run(prompt(seed))
            one.settle()
        told: dict[bool, set[str]] = {True: set(), False: set()}
        deadline = time.monotonic() + 30.0
        while True:
            one.run(prompt(51, 100))  # a step that takes what came after the last one
            for event in engine.call("events"):
                if event["medium"] == "STORAGE":
                    assert (event["locality"], event["ownership"]) == ("REMOTE", "disk")
                    told[event["removed"]].update(event["hashes"])
            left = len(told[False] - told[True])
            if told[True] and left == len(list(files.rglob("*.kv"))):
                break
            assert time.monotonic() < deadline, (left, len(told[True]))
        # Some were refused, while the directory was full.
        assert len(told[False]) == one.settle()["operations"]["disk store done"] > 3 * CHUNKS
        assert told[True] < told[False]
        assert left <= 3 * CHUNKS


class Router:
    """What a router does with KV events: a tree of blocks, and on which media each of them is.

    As the indexers of llm-d and dynamo, it has no use for an event that lacks its parent, tokens or
    block size, or is of a medium that it does not know.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._blocks: dict[tuple[str | None, tuple[int, ...]], str] = {}
        self._media: dict[str, set[str]] = {}

    def take(self, events: list[dict[str, Any]]) -> None:
        """The next events, in order."""
        for event in events:
            medium = event["medium"]
            if medium not in ("GPU", "CPU", "STORAGE"):
                self.dropped += 1
            elif event["removed"]:
                for one in event["hashes"]:
                    self._media.get(one, set()).discard(medium)
            else:
                self._stored(event)

    def _stored(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent"]
        whole = size * len(event["hashes"]) == len(event["tokens"]) > 0
        if not whole or (parent is not None and parent not in self._media):
            self.dropped += 1
            return
        for number, one in enumerate(event["hashes"]):
            tokens = event["tokens"][number * size : (number + 1) * size]
            self._blocks[parent, tuple(tokens)] = one
            self._media.setdefault(one, set()).add(event["medium"])
            parent = one

    def prefix(self, tokens: list[int], medium: str) -> int:
        """Leading blocks of a prompt that are on a medium."""
        parent: str | None = None
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            one = self._blocks.get((parent, tuple(tokens[start : start + BLOCK_TOKENS])))
            if one is None or medium not in self._media[one]:
                return start // BLOCK_TOKENS
            parent = one
        return len(tokens) // BLOCK_TOKENS

    def media(self, tokens: list[int]) -> dict[str, int]:
        """``prefix`` for all of them."""
        return {one: self.prefix(tokens, one) for one in ("GPU", "CPU", "STORAGE")}


class Told(Served):
    """An engine with chunks of four blocks, and a router that listens to it."""

    def __init__(
        self, engine: Engine, arguments: dict[str, Any], endpoint: str, metrics: bool
    ) -> None:
        super().__init__(engine)
        engine.start(
            **arguments,
            disable_log_stats=not metrics,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": endpoint,
            },
        )
        engine.call("listen", endpoint=endpoint)
        self.router = Router()
        self.run(prompt(50, 100))  # the subscriber is connected by now
        self.news()

    def news(self) -> list[dict[str, Any]]:
        """What has been told since the last call, once all of it has happened."""
        self.settle()
        self.run(prompt(51, 100))  # a step that takes what came after the last one
        events = self.engine.call("events")
        self.router.take(events)
        return events

    def counts(self) -> tuple[float, float, float, float]:
        """kvtier's chunks asked and found in host memory; vLLM's tokens of the same."""
        self.settle()
        self.run(prompt(52, 100))  # as in `news`
        text = self.engine.call("metrics")
        found = series(text)
        hits = found.get(("kvtier_lookup_chunks_total", "host", "hit"), 0)
        asked = hits + found.get(("kvtier_lookup_chunks_total", "host", "miss"), 0)
        total = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return (
            asked,
            hits,
            total["vllm:external_prefix_cache_queries_total"],
            total["vllm:external_prefix_cache_hits_total"],
        )


@pytest.mark.fault("M06", "M07", "M08", "M10")
@pytest.mark.slow
def test_what_a_router_learns_of_chunks_of_four_blocks(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    arguments = options(checkpoint("full"), own_shm_directory, tmp_path / "files")
    extra = arguments["extra"] | {"blocks_per_chunk": 4, "self_describing_kv_events": True}
    extra["secondary_tiers"][0]["enable_kv_events"] = True
    with processes.lend() as engine:
        one = Told(engine, arguments | {"extra": extra}, f"ipc://{tmp_path}/first", True)
        queries_count_what_was_asked(one)
        events_name_the_medium_and_all_that_a_router_needs(one)
        engine.call("stop")
        extra |= {"self_describing_kv_events": False}
        extra["secondary_tiers"][0]["root_dir"] = str(tmp_path / "others")
        events_name_what_can_be_had(
            # vLLM's metrics can be registered once in a process.
            Told(engine, arguments | {"extra": extra}, f"ipc://{tmp_path}/second", False)
        )


def queries_count_what_was_asked(one: Told) -> None:
    """Two chunks are on the accelerator, one more in host memory, two nowhere."""
    tokens = prompt(7)
    chunk = 4 * BLOCK_TOKENS
    one.run(tokens[: 3 * chunk + 9])
    one.forget_device()
    assert one.run(tokens[: 2 * chunk + 9])["cached"] == 2 * chunk
    before = one.counts()
    assert one.run(tokens)["cached"] == 3 * chunk
    asked, hits, queried, hit = (now - then for now, then in zip(one.counts(), before, strict=True))
    assert (asked, hits) == (3, 1)
    # vLLM's own count has the small prompt of `counts` too.
    assert (queried, hit) == (len(tokens) - 2 * chunk + 100, chunk)


def events_name_the_medium_and_all_that_a_router_needs(one: Told) -> None:
    tokens = prompt(8, 23 * BLOCK_TOKENS + 9)
    router = one.router
    one.run(tokens)
    one.news()
    assert router.media(tokens) == {"GPU": 23, "CPU": 20, "STORAGE": 20}
    for seed in (60, 61):  # off the accelerator
        one.run(prompt(seed, 3200))
    one.news()
    assert router.media(tokens) == {"GPU": 0, "CPU": 20, "STORAGE": 20}
    for seed in range(62, 66):  # out of host memory
        one.run(prompt(seed, 3200))
    one.news()
    assert router.media(tokens) == {"GPU": 0, "CPU": 0, "STORAGE": 20}
    assert one.run(tokens)["cached"] == 20 * BLOCK_TOKENS
    one.news()
    assert router.media(tokens) == {"GPU": 23, "CPU": 20, "STORAGE": 20}
    assert router.dropped == 0


def events_name_what_can_be_had(one: Told) -> None:
    """In vLLM's plain form an event of host memory or a tier names chunks, by their last blocks."""
    tokens = prompt(9, 23 * BLOCK_TOKENS + 9)
    one.run(tokens)
    told: dict[str, list[str]] = {}
    for event in one.news():
        told.setdefault(event["medium"], []).extend(event["hashes"])
    assert len(told["GPU"]) == 23
    assert told["CPU"] == told["GPU"][3::4]
    assert sorted(told["STORAGE"]) == sorted(told["CPU"])
    for blocks in (3, 4, 7, 8, 19, 20, 22):
        one.forget_device()
        named = blocks // 4 * 4
        assert one.run(tokens[: blocks * BLOCK_TOKENS + 9])["cached"] == named * BLOCK_TOKENS


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
