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
import numpy.typing as npt

from kvtier._core.layout import CopyPlan, PagePlan
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


def copy_plan(buffer: PagedBuffer) -> CopyPlan:
    """kvtier's plan between the buffer and canonical blocks: the same page order on both sides."""
    shape, page = buffer.shape, buffer.shape.page_bytes
    pages = [
        PagePlan(
            base=buffer.words[layer].ctypes.data,
            block_stride=page,
            num_blocks=buffer.num_blocks,
            local_bytes=page,
            block_offset=layer * page,
            canonical_bytes=page,
            runs=[(0, 0, page, 1, page, page)],
        )
        for layer in range(shape.layers)
    ]
    return CopyPlan(pages, shape.block_bytes)


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
        self._chunks_damaged = 0
        self._plan = copy_plan(buffer)
        self._condition = threading.Condition()
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._finished: deque[CopyJob] = deque()
        self._outstanding = 0
        self._stopping = False
        self._woken = False
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

    def wake(self) -> None:
        """End a ``wait`` at once. Any thread."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    @property
    def outstanding(self) -> int:
        """Jobs that were submitted and not collected."""
        return self._outstanding

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until a job has ended, or for ``wake``; False after `timeout_seconds`."""
        with self._condition:
            ended = self._condition.wait_for(
                lambda: self._woken or bool(self._finished), timeout_seconds
            )
            self._woken = False
            return ended

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
        blocks, canonical = self._addresses(job.pieces)
        self._plan.load(blocks, canonical)
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
        pieces = self._kept(job.pieces)
        blocks, canonical = self._addresses(pieces)
        per_chunk = self._buffer.shape.blocks_per_chunk
        pages = np.array([p.slot * per_chunk + p.index for p in pieces], dtype=np.int64)
        self._plan.store(blocks, canonical, pages)
        counters.store_seconds += time.perf_counter() - start
        counters.store_bytes += len(pieces) * self._buffer.shape.block_bytes
        if self._damage is None:
            return
        for piece in pieces[::per_chunk]:
            if self._damage(self._chunk(piece.slot), self._chunks_damaged):
                counters.damaged_chunks += 1
            self._chunks_damaged += 1

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """`pieces` without the chunks whose slots are to keep stale bytes."""
        if self._skip_store is None:
            return pieces
        kept = []
        per_chunk = self._buffer.shape.blocks_per_chunk
        for first in range(0, len(pieces), per_chunk):
            if self._skip_store(self._chunks_stored):
                self.counters.damaged_chunks += 1
            else:
                kept += pieces[first : first + per_chunk]
            self._chunks_stored += 1
        return kept

    def _addresses(
        self, pieces: list[Piece]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Accelerator blocks, and where each stands in host memory."""
        size = self._buffer.shape.block_bytes
        base = self._region.slot_address
        return (
            np.array([piece.block for piece in pieces], dtype=np.int64),
            np.array([base(p.slot) + p.index * size for p in pieces], dtype=np.uint64),
        )
