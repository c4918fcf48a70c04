# SPDX-License-Identifier: Apache-2.0
"""One instance of ``benchmarks.push``, in a process of its own: an engine, its steps, its requests.

The first line on standard input is its settings; it says so when it is ready, works for so many
seconds from the next line on, prints what it measured, and ends with its standard input.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.config import parse
from kvtier.engine.engine import open_engine
from kvtier.types import GroupGeometry, Lookup, RequestContext, make_geometry, make_key

CHUNK_BYTES = 256 << 10
PROMPT_CHUNKS = 16
SLOTS = {"overloaded": 256, "idle": 2048}
STEP_SECONDS = {"overloaded": 0.005, "idle": 0.004}
PROMPTS = 32
"""Of the overloaded one, in use at a time: twice what it has room for."""
NEW_PART = 0.25
"""Of its requests, that come with a new prompt, in the place of another one."""
TURN_STEPS = 8
"""It has a request every so many steps."""
OWN_PROMPTS = 24
"""Of the idle one, which it holds all the time."""
LOAD_STEPS = 5
"""The idle one loads a prompt every so many steps."""
STORE_STEPS = 50
"""It stores a new prompt every so many."""
WARM_PART = 0.25
"""Of the time, in which nothing is counted."""


class Instance:
    """An engine with a peer tier, driven as a scheduler and a worker do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.role: str = settings["role"]
        slots = SLOTS[self.role]
        tier = {
            "type": "p2p",
            "port": settings["port"],
            "peers": [f"127.0.0.1:{settings['peer']}"],
            "push": settings["push"],
            "transport": settings["transport"],
        }
        config = parse(
            {
                "capacity_bytes": slots * CHUNK_BYTES,
                "tiers": [tier],
                "isolation": settings["isolation"],
                "lookup_timeout_seconds": 1.0,
            }
        )
        groups = [GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=CHUNK_BYTES)]
        geometry = make_geometry(groups, slots * CHUNK_BYTES)
        self.engine, self._region = open_engine(config, geometry, {"model": "benchmark"})
        self._random = random.Random(7)
        self._source = np.random.default_rng(1).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
        self._into = np.empty(CHUNK_BYTES, dtype=np.uint8)
        self._number = 0
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.loads: list[float] = []
        self.found = self.asked = 0
        self._step = self._overloaded if self.role == "overloaded" else self._idle
        self._prompts = list(range(PROMPTS))
        self._next = PROMPTS
        self._waiting: tuple[list[bytes], RequestContext] | None = None
        if self.role == "idle":
            for prompt in range(OWN_PROMPTS):
                self._store(self._keys(prompt), self._context())

    def _keys(self, prompt: int) -> list[bytes]:
        first = (1 << 40 if self.role == "idle" else 0) + prompt * PROMPT_CHUNKS
        return [make_key(i.to_bytes(32, "big"), 0) for i in range(first, first + PROMPT_CHUNKS)]

    def _context(self) -> RequestContext:
        self._number += 1
        return RequestContext(f"{self.role}-{self._number}")

    def _store(self, keys: list[bytes], context: RequestContext) -> None:
        """As a worker: bytes into slots. The request ends."""
        reservation = self.engine.reserve(keys, context)
        for slot in reservation.slots.tolist():
            self._region.slot_view(slot, CHUNK_BYTES)[:] = self._source.data
        self.engine.commit(reservation.keys, context)
        self.engine.finish_request(context)

    def _load(self, keys: list[bytes], context: RequestContext) -> None:
        """As a worker: bytes out of slots."""
        slots, generations = self.engine.pin(keys, context)
        for slot in slots.tolist():
            self._into.data[:] = self._region.slot_view(slot, CHUNK_BYTES)
        self.engine.unpin(slots, generations, context)

    def _overloaded(self, number: int, counts: bool) -> None:
        if self._waiting is None and number % TURN_STEPS == 0:
            place = self._random.randrange(PROMPTS)
            if self._random.random() < NEW_PART:
                self._prompts[place] = self._next
                self._next += 1
            self._waiting = self._keys(self._prompts[place]), self._context()
        if self._waiting is not None:
            keys, context = self._waiting
            ready, answer = self.engine.lookup_batch(keys, context)
            if answer is Lookup.MISS:
                self._waiting = None
                self._load(keys[:ready], context)
                self._store(keys[ready:], context)
                if counts:
                    self.found += ready
                    self.asked += len(keys)
        self.engine.end_step()

    def _idle(self, number: int, counts: bool) -> None:
        """Scheduler's calls of a step are timed by themselves, loads of its own prompts as a
        whole."""
        wall, processor = time.perf_counter(), time.thread_time()
        self.engine.poll()
        self.engine.end_step()
        if counts:
            self.wall.append(time.perf_counter() - wall)
            self.processor.append(time.thread_time() - processor)
        if number % LOAD_STEPS == 0:
            keys, context = self._keys(self._random.randrange(OWN_PROMPTS)), self._context()
            began_at = time.perf_counter()
            ready, _ = self.engine.lookup_batch(keys, context)
            if ready != len(keys):
                raise SystemExit("benchmarks.push: the idle instance has lost chunks of its own")
            self._load(keys, context)
            self.engine.finish_request(context)
            if counts:
                self.loads.append(time.perf_counter() - began_at)
        elif number % STORE_STEPS == 1:
            self._store(self._keys(OWN_PROMPTS + number), self._context())

    def work(self, seconds: float) -> None:
        """Steps at a fixed pace; one that is late is not made up for."""
        pace = STEP_SECONDS[self.role]
        start = at = time.monotonic()
        number = 0
        while at < start + seconds:
            self._step(number, at > start + WARM_PART * seconds)
            number += 1
            at = max(at + pace, time.monotonic())
            time.sleep(max(0.0, at - time.monotonic()))

    def value(self, name: str, *labels: str) -> float:
        self.engine.publish_metrics()
        return self.engine.registry.value(name, labels) or 0.0

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 20
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(f"benchmarks.push: not within 20 s: {what}")
            self.engine.poll()
            self.engine.end_step()
            time.sleep(0.002)

    def result(self) -> dict[str, Any]:
        return {
            "wall": self.wall,
            "processor": self.processor,
            "loads": self.loads,
            "hit_ratio": self.found / self.asked if self.asked else 0.0,
            "pushed": self.value("kvtier_chunks_total", "p2p", "store", "done"),
            "hosted": self.value("kvtier_tier_chunks", "p2p"),
        }


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    instance = Instance(settings)
    try:
        instance.until(lambda: instance.engine.idle, "the service is there")
        if instance.role == "idle":
            slots = "kvtier_peer_guest_slots"
            instance.until(lambda: instance.value(slots, "p2p") > 0.0, "slots are lent")
        print("ready", flush=True)
        seconds = float(sys.stdin.readline())
        gc.collect()
        gc.freeze()
        instance.work(seconds)
        print(json.dumps(instance.result()), flush=True)
        sys.stdin.read()
    finally:
        instance.engine.close()


if __name__ == "__main__":
    main()
