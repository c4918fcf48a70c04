# SPDX-License-Identifier: Apache-2.0
"""A scheduler's stream of requests, and the two systems it can drive step by step.

The stream is the same for both: in every step one long prompt arrives whose prefix is in host
memory, one whose chunks a file tier holds (in a quiet run: host memory), and one that nobody has.
Each runs for eight steps and stores a few chunks of its answer half-way through. `KVTier` and
`Peer` own what they drive until ``close``. Only the calls of the system are timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.config import parse
from kvtier.engine.engine import open_engine
from kvtier.types import GroupGeometry, Lookup, RequestContext, make_geometry, make_key

CHUNK_BYTES = 2 << 20
"""16 tokens of a model with 32 layers and 8 heads of 128 numbers of 16 bits, keys and values."""
SLOTS = 3072
LIFE_STEPS = 8
HOT_PREFIXES, HOT_CHUNKS = 2, 384
TIER_PREFIXES, TIER_CHUNKS = 8, 384
COLD_CHUNKS = 32
"""With the answers 88 MB a step, more than a disk takes in 5 ms."""
ANSWER_CHUNKS = 4
MAX_WAITING = 4
"""Requests of a kind that may wait for the file tier at a time; no further one arrives then."""
BLOCK_TOKENS = 16


def keys(first: int, count: int) -> list[bytes]:
    """Keys number `first` and up, which look like hashes."""
    random = np.random.default_rng(first)
    return [
        make_key(number.to_bytes(8, "big") + random.bytes(24), 0)
        for number in range(first, first + count)
    ]


HOT = [keys(1_000_000 * (i + 1), HOT_CHUNKS) for i in range(HOT_PREFIXES)]
STORED = [keys(100_000_000 + 1_000_000 * i, TIER_CHUNKS) for i in range(TIER_PREFIXES)]


class Job:
    """One request."""

    __slots__ = ("answer", "context", "kind", "left", "pinned", "prompt", "writing")

    def __init__(self, kind: str, prompt: list[bytes], answer: list[bytes]) -> None:
        self.kind = kind
        self.prompt = prompt
        self.answer = answer
        self.left = LIFE_STEPS
        self.context: Any = None
        self.pinned: Any = None
        self.writing: list[bytes] = []


def arrivals(quiet: bool) -> Iterator[list[Job]]:
    """Jobs of each step, without end."""
    number = 1_000_000_000
    step = 0
    while True:
        answers = keys(number, 3 * ANSWER_CHUNKS + COLD_CHUNKS)
        number += len(answers)
        parts = [answers[i * ANSWER_CHUNKS : (i + 1) * ANSWER_CHUNKS] for i in range(3)]
        # A quiet run finds in host memory what a busy one gets from the files.
        stored = STORED[0] if quiet else STORED[step % TIER_PREFIXES]
        yield [
            Job("host", HOT[step % HOT_PREFIXES], parts[0]),
            Job("tier", stored, parts[1]),
            Job("cold", answers[3 * ANSWER_CHUNKS :], parts[2]),
        ]
        step += 1


class System:
    """What a run needs of one system."""

    def context(self, number: int, job: Job) -> Any:
        """The request's context, with the end position of each key; not timed."""
        raise NotImplementedError

    def step(self, new: list[Job]) -> tuple[float, float]:
        """One scheduler step; seconds spent in it, by the clock and of processor time."""
        raise NotImplementedError

    def between(self) -> None:
        """What a worker does after the step: bytes are written and compared; not timed."""

    def close(self) -> None:
        """Let everything go."""


class KVTier(System):
    """The engine.

    Parameters
    ----------
    tier : dict
        Configuration of the tier.
    isolation : {"thread", "process"}
    quiet : bool
        Whether the tier is configured but gets nothing to do.
    single : bool
        Ask key by key, as vLLM does, instead of a prompt at a time.
    """

    def __init__(
        self, tier: dict[str, Any], isolation: str, quiet: bool, single: bool = False
    ) -> None:
        self.quiet = quiet
        self.single = single
        if quiet:
            # It wants chunks of a group that there is none of.
            tier = {**tier, "groups": [1]}
        config = parse(
            {
                "capacity_bytes": SLOTS * CHUNK_BYTES,
                "isolation": isolation,
                "tiers": [tier],
                "flush_on_shutdown_seconds": 0,
            }
        )
        group = GroupGeometry(
            block_tokens=BLOCK_TOKENS, blocks_per_chunk=1, block_bytes=CHUNK_BYTES
        )
        self.engine, self.region = open_engine(config, make_geometry([group], SLOTS * CHUNK_BYTES))
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.reserved: list[Any] = []
        self.loaded: list[tuple[list[bytes], Any]] = []
        self.tier_chunks = 0
        self.number = 0
        self._fill()

    def _fill(self) -> None:
        prefixes = [STORED[0], *HOT] if self.quiet else [*STORED, *HOT]
        for prompt in prefixes:
            job = Job("host", prompt, [])
            job.context = self.context(0, job)
            reservation = self.engine.reserve(prompt, job.context)
            self.reserved.append(reservation)
            self.between()
            self.engine.commit(reservation.keys, job.context)
            self.engine.finish_request(job.context)
            self.engine.end_step()
            deadline = time.monotonic() + 60
            while not self.engine.idle and time.monotonic() < deadline:
                self.engine.poll()
                self.engine.end_step()
                time.sleep(0.002)

    def context(self, number: int, job: Job) -> RequestContext:
        every = job.prompt + job.answer
        return RequestContext(
            f"r{number}",
            load_tiers=() if self.quiet else None,
            positions={key: BLOCK_TOKENS * (i + 1) for i, key in enumerate(every)},
        )

    def step(self, new: list[Job]) -> tuple[float, float]:
        for job in new:
            if sum(job.kind == other.kind for other in self.waiting) >= MAX_WAITING:
                continue
            self.number += 1
            job.context = self.context(self.number, job)
            self.waiting.append(job)
        engine = self.engine
        lookup = self._lookup_single if self.single else engine.lookup_batch
        running: list[Job] = []
        waiting: list[Job] = []
        begin, used = time.perf_counter(), time.thread_time()
        engine.poll()
        for job in self.running:
            if job.pinned is not None:
                engine.unpin(*job.pinned, job.context)
                job.pinned = None
            if job.writing:
                engine.commit(job.writing, job.context)
                job.writing = []
            if job.left:
                running.append(job)
            else:
                engine.finish_request(job.context)
        for job in self.waiting:
            prompt = job.prompt
            ready, answer = lookup(prompt, job.context)
            if answer is not Lookup.MISS:
                waiting.append(job)
                continue
            if ready:
                job.pinned = engine.pin(prompt[:ready], job.context)
                self.loaded.append((prompt[:ready], job.pinned[0]))
            if ready < len(prompt):
                reservation = engine.reserve(prompt[ready:], job.context)
                job.writing = reservation.keys
                self.reserved.append(reservation)
            if job.kind == "tier":
                self.tier_chunks += ready
            running.append(job)
        for job in running:
            job.left -= 1
            if job.left == LIFE_STEPS // 2:
                reservation = engine.reserve(job.answer, job.context)
                job.writing = job.writing + reservation.keys
                self.reserved.append(reservation)
        engine.end_step()
        seconds = time.perf_counter() - begin, time.thread_time() - used
        self.running, self.waiting = running, waiting
        return seconds

    def _lookup_single(self, prompt: list[bytes], context: RequestContext) -> tuple[int, Lookup]:
        lookup = self.engine.lookup
        for ready, key in enumerate(prompt):
            answer = lookup(key, context)
            if answer is not Lookup.HIT:
                return ready, answer
        return len(prompt), Lookup.MISS

    def between(self) -> None:
        for reservation in self.reserved:
            for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
                view = self.region.slot_view(slot, CHUNK_BYTES)
                view[: len(key)] = key
                view[-len(key) :] = key
        self.reserved.clear()
        for names, slots in self.loaded:
            for key, slot in zip(names, slots.tolist(), strict=True):
                view = self.region.slot_view(slot, CHUNK_BYTES)
                if view[: len(key)] != key or view[-len(key) :] != key:
                    raise SystemExit(f"slot {slot} holds other bytes than those of its key")
        self.loaded.clear()

    @property
    def put_off(self) -> int:
        """Chunks that wait until the file tier takes more."""
        return sum(len(tier.backlog) + tier.handed_over for tier in self.engine._tiers)

    def drain(self) -> None:
        """End every request."""
        for job in self.running:
            if job.pinned is not None:
                self.engine.unpin(*job.pinned, job.context)
            if job.writing:
                self.engine.abort(job.writing, job.context)
            self.engine.finish_request(job.context)
        for job in self.waiting:
            self.engine.finish_request(job.context)
        self.engine.end_step()

    def close(self) -> None:
        self.drain()
        self.engine.close()


class Peer(System):
    """vLLM's tiering manager with its file tier, quiet."""

    def __init__(self, root: Path) -> None:
        # lazy: only with --peer, and only in a process of its own
        from vllm.v1.kv_offload.base import (
            LookupResult,
            ReqContext,
            ScheduleEndContext,
            TierFilter,
        )
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
        from vllm.v1.kv_offload.tiering.manager import (
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("layer",), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="benchmark",
            model=OffloadingModelConfig("benchmark", "float16"),
            cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        # The file tier reads no more of the spec than this.
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1, extra_config={})
        region = SharedOffloadRegion(
            f"benchmark-{os.getpid()}", SLOTS, None, CHUNK_BYTES, CHUNK_BYTES
        )
        primary = CPUPrimaryTierOffloadingManager(SLOTS, region)
        tier = FileSystemTierManager(spec, primary.get_kv_memoryview(), "fs", str(root))
        # Nothing goes to the files: its own switch for a tier that cannot take more.
        detector: Any = SimpleNamespace(
            should_store=lambda count: False,
            stats={},
            policy=SimpleNamespace(pop_stores_dropped=lambda: (0, 0)),
        )
        tier._bp_detector = detector
        self.manager = TieringOffloadingManager(primary, [tier])
        self.hit = LookupResult.HIT
        self.make_context = ReqContext
        self.end = ScheduleEndContext
        # A filter that allows nothing keeps the lookups of cold prompts from the files.
        self.filter = TierFilter(())
        self.running: list[Job] = []
        self.number = 0
        for prompt in (STORED[0], *HOT):
            job = Job("host", prompt, [])
            job.context = self.context(0, job)
            self.manager.on_new_request(job.context)
            stored = self.manager.prepare_store(prompt, job.context)
            self.manager.complete_store(stored.keys_to_store, job.context)
            self.manager.on_request_finished(job.context)

    def context(self, number: int, job: Job) -> Any:
        context = self.make_context(req_id=f"r{number}", load_tier_filter=self.filter)
        for i, key in enumerate(job.prompt + job.answer):
            context.set_offload_key_position(key, BLOCK_TOKENS * (i + 1))
        return context

    def step(self, new: list[Job]) -> tuple[float, float]:
        for job in new:
            self.number += 1
            job.context = self.context(self.number, job)
        manager, hit = self.manager, self.hit
        running: list[Job] = []
        begin, used = time.perf_counter(), time.thread_time()
        for job in self.running:
            if job.pinned is not None:
                manager.complete_load(job.pinned, job.context)
                job.pinned = None
            # One call for each prepare_store, as its connector makes them.
            for stored in job.writing:
                manager.complete_store(stored, job.context)
            job.writing = []
            if job.left:
                running.append(job)
            else:
                manager.on_request_finished(job.context)
        for job in new:
            manager.on_new_request(job.context)
            ready = 0
            for key in job.prompt:
                if manager.lookup(key, job.context) is not hit:
                    break
                ready += 1
            if ready != len(job.prompt) and job.kind != "cold":
                raise SystemExit("vLLM's host memory lost a prefix that is used all the time")
            if ready:
                job.pinned = job.prompt[:ready]
                manager.prepare_load(job.pinned, job.context)
            if ready < len(job.prompt):
                output = manager.prepare_store(job.prompt[ready:], job.context)
                if output is not None:
                    job.writing.append(output.keys_to_store)
            running.append(job)
        for job in running:
            job.left -= 1
            if job.left == LIFE_STEPS // 2:
                output = manager.prepare_store(job.answer, job.context)
                if output is not None:
                    job.writing.append(output.keys_to_store)
        manager.on_schedule_end(self.end([job.context.req_id for job in new], ()))
        seconds = time.perf_counter() - begin, time.thread_time() - used
        self.running = running
        return seconds

    def between(self) -> None:
        # Its connector takes them in every step; left alone they would pile up.
        self.manager.get_stats()

    def close(self) -> None:
        for job in self.running:
            if job.pinned is not None:
                self.manager.complete_load(job.pinned, job.context)
            for stored in job.writing:
                self.manager.complete_store(stored, job.context)
            self.manager.on_request_finished(job.context)
        self.manager.shutdown()
