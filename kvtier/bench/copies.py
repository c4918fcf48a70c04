# SPDX-License-Identifier: Apache-2.0
"""The stand-in accelerator's copy stream: one thread that moves blocks to and from host memory.

Loads go before stores. Each reloaded block is compared, every byte, before the load counts as
finished. The thread owns its scratch memory and its counters until `close`; the scheduler's thread
hands in jobs, which hold the blocks and pins, and collects them when they are finished.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvtier.bench.accelerator import PagedBuffer
from kvtier.bench.pattern import Comparer, Difference, Pattern, Words

if TYPE_CHECKING:
    from kvtier.bench.drivers import RegionLike

MAX_DIFFERENCES = 20


class Piece(msgspec.Struct, frozen=True):
    """One block's way between the accelerator and its place in a chunk."""

    block: int
    slot: int
    index: int
    """Block number inside the chunk."""
    block_hash: bytes


class CopyJob(msgspec.Struct):
    """Blocks that are moved together. `owner` says whose it is, and comes back untouched."""

    load: bool
    request_id: str
    pieces: list[Piece]
    owner: Any
    error: BaseException | None = None


class CopyCounters(msgspec.Struct):
    """What the copy thread did, and how long each part of it took."""

    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    verified_bytes: int = 0
    verify_seconds: float = 0.0
    differing_blocks: int = 0
    damaged_chunks: int = 0
    differences: list[Difference] = []


Damage = Callable[[Words, int], bool]
"""Called with a chunk just stored, shape (blocks, layers, words of a page), and how many were
stored before; True if it damaged it."""


class CopyStream:
    """One copy thread over one region and one accelerator buffer.

    Parameters
    ----------
    buffer : PagedBuffer
    pattern : Pattern
    region : RegionLike
    damage : callable, optional
        Damages stored chunks on purpose; see `kvtier.bench.inject`.
    skip_store : callable, optional
        Leaves the old content of the slot where it returns True (stale bytes on purpose).
    """

    def __init__(
        self,
        buffer: PagedBuffer,
        pattern: Pattern,
        region: RegionLike,
        damage: Damage | None = None,
        skip_store: Callable[[int], bool] | None = None,
    ) -> None:
        self._buffer = buffer
        self._region = region
        self._comparer = Comparer(pattern)
        self._damage = damage
        self._skip_store = skip_store
        self._chunks_stored = 0
        self._condition = threading.Condition()
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._finished: deque[CopyJob] = deque()
        self._outstanding = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bench-copies")
        self.counters = CopyCounters()

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue `job`; it comes back from `collect` exactly once."""
        with self._condition:
            (self._loads if job.load else self._stores).append(job)
            self._outstanding += 1
            self._condition.notify_all()

    def collect(self) -> list[CopyJob]:
        """Jobs that have ended since the last call."""
        jobs = []
        with self._condition:
            while self._finished:
                jobs.append(self._finished.popleft())
            self._outstanding -= len(jobs)
        return jobs

    @property
    def outstanding(self) -> int:
        """Jobs that were submitted and not collected."""
        return self._outstanding

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until a job has ended; False after `timeout_seconds`."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._finished), timeout_seconds)

    def close(self) -> None:
        """End the thread after the jobs that are queued. Idempotent."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._loads or self._stores or self._stopping)
                if not self._loads and not self._stores:
                    return
                job = (self._loads or self._stores).popleft()
            try:
                if job.load:
                    self._load(job)
                else:
                    self._store(job)
            except Exception as exc:  # noqa: BLE001  the scheduler's thread raises it again
                job.error = exc
            with self._condition:
                self._finished.append(job)
                self._condition.notify_all()

    def _chunk(self, slot: int) -> Words:
        shape = self._buffer.shape
        view = self._region.slot_view(slot, shape.chunk_bytes)
        words: Words = np.frombuffer(view, dtype=np.uint64).reshape(
            shape.blocks_per_chunk, shape.layers, shape.page_bytes // 8
        )
        return words

    def _load(self, job: CopyJob) -> None:
        counters = self.counters
        start = time.perf_counter()
        for piece in job.pieces:
            self._buffer.block(piece.block)[:] = self._chunk(piece.slot)[piece.index]
        copied = time.perf_counter()
        for piece in job.pieces:
            difference = self._comparer.compare(
                self._buffer.block(piece.block), piece.block_hash, job.request_id
            )
            if difference is not None:
                counters.differing_blocks += 1
                if len(counters.differences) < MAX_DIFFERENCES:
                    counters.differences.append(difference)
        size = len(job.pieces) * self._buffer.shape.block_bytes
        counters.load_bytes += size
        counters.load_seconds += copied - start
        counters.verified_bytes += size
        counters.verify_seconds += time.perf_counter() - copied

    def _store(self, job: CopyJob) -> None:
        counters = self.counters
        start = time.perf_counter()
        per_chunk = self._buffer.shape.blocks_per_chunk
        for first in range(0, len(job.pieces), per_chunk):
            chunk = self._chunk(job.pieces[first].slot)
            number = self._chunks_stored
            self._chunks_stored += 1
            if self._skip_store is not None and self._skip_store(number):
                counters.damaged_chunks += 1
                continue
            for piece in job.pieces[first : first + per_chunk]:
                chunk[piece.index] = self._buffer.block(piece.block)
            if self._damage is not None and self._damage(chunk, number):
                counters.damaged_chunks += 1
        counters.store_bytes += len(job.pieces) * self._buffer.shape.block_bytes
        counters.store_seconds += time.perf_counter() - start
