# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker side: copies blocks between the accelerator and the slots of the region.

Runs in every vLLM worker. vLLM calls it on the worker's main thread only; the copies run on a small
pool of threads of its own. Owns the pool, the job records and this rank's line in the region.

Invariants
----------
* A transfer number is published once every copy of it has ended.
* vLLM never hears of a failed store (it asserts success): the number is marked as failed in the
  region instead, and the manager gives the slot back.
* A load that cannot be done exactly ends the engine. There is no way to tell vLLM, and wrong KV is
  worse than a restart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.errors import ConfigError, InternalError
from kvtier.vllm.transfers import Chunk, SlotTransfer, split_load, split_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.kv_offload.base import LoadStoreSpec

    from kvtier.host.region import Region
    from kvtier.vllm.pages import WorkerPages

logger = logging.getLogger("vllm.kvtier.worker")

PART_BYTES = 4 << 20
"""A copy is cut for the pool's threads into parts of at least this size."""


def cpu_set() -> set[int]:
    """The CPUs this container may use, whatever the calling thread is bound to."""
    try:
        with open("/sys/fs/cgroup/cpuset.cpus.effective", encoding="ascii") as file:
            text = file.read().strip()
    except FileNotFoundError:
        text = ""
    if not text:
        # No cgroup v2 cpuset here. The kernel cuts the set down to what is allowed.
        return set(range(os.cpu_count() or 1))
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _unbind() -> None:
    # A new thread inherits the affinity of vLLM's main thread: one core, the busiest of all.
    os.sched_setaffinity(0, cpu_set())


class _Job:
    """One vLLM job while its copies run."""

    __slots__ = ("bytes", "error", "failed", "is_load", "job_id", "parts", "spec", "started")

    def __init__(self, job_id: int, is_load: bool, spec: SlotTransfer) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.spec = spec
        self.parts = 0
        self.bytes = 0
        # Numbers of chunks that the job has not all blocks for.
        self.failed: set[int] = set()
        self.error: BaseException | None = None
        self.started = time.monotonic()


class TransferWorker(OffloadingWorker):
    """Copies of one rank.

    Parameters
    ----------
    region : Region
        Closed by ``shutdown``.
    pages : WorkerPages
    rank : int
        This worker's line in the region.
    num_threads : int
        Copy threads.
    """

    def __init__(self, region: Region, pages: WorkerPages, rank: int, num_threads: int = 2) -> None:
        for tensor in pages.caches.tensors:
            if tensor.tensor.device.type != "cpu":
                raise ConfigError(
                    f"the KV cache lies on {tensor.tensor.device}; only CPU memory is supported"
                )
        self.region = region
        self.pages = pages
        self.plans = pages.compile(region)
        self.rank = rank
        self.stored_chunks = 0
        self.loaded_chunks = 0
        self.failed_chunks = 0
        self.stored_bytes = 0
        self.loaded_bytes = 0
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(
            num_threads, thread_name_prefix="kvtier-copy", initializer=_unbind
        )
        # Guards everything below; waited on by `wait`.
        self._changed = threading.Condition()
        self._running: dict[int, _Job] = {}
        self._finished: deque[_Job] = deque()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying accelerator blocks into slots; returns at once."""
        assert isinstance(dst_spec, SlotTransfer)
        job = _Job(job_id, False, dst_spec)
        work = []
        number = dst_spec.first_transfer
        for group, slots, block_ids, first in self._by_group(src_spec, dst_spec):
            chunks = split_store(slots, block_ids, first, self._blocks_per_chunk(group))
            for chunk in chunks:
                if not chunk.whole:
                    self._zero(group, chunk)
                    job.failed.add(number)
                number += 1
            work.append((group, [chunk for chunk in chunks if chunk.whole]))
        self.stored_chunks += len(dst_spec.slots) - len(job.failed)
        self.failed_chunks += len(job.failed)
        self._start(job, work)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start copying slots into accelerator blocks; returns at once."""
        assert isinstance(src_spec, SlotTransfer)
        job = _Job(job_id, True, src_spec)
        work = [
            (group, split_load(slots, block_ids, first, self._blocks_per_chunk(group)))
            for group, slots, block_ids, first in self._by_group(dst_spec, src_spec)
        ]
        self.loaded_chunks += len(src_spec.slots)
        self._start(job, work)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call.

        Raises
        ------
        InternalError
            If a load could not be done.
        """
        results = []
        with self._changed:
            jobs = list(self._finished)
            self._finished.clear()
        for job in jobs:
            if job.error is not None and job.is_load:
                raise InternalError(f"load {job.job_id} failed: {job.error!r}") from job.error
            if job.is_load:
                self.loaded_bytes += job.bytes
            else:
                self.stored_bytes += job.bytes
            results.append(
                TransferResult(
                    job_id=job.job_id,
                    success=True,
                    transfer_size=job.bytes,
                    transfer_time=time.monotonic() - job.started,
                )
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until the copies of `job_ids` have ended (vLLM is about to reuse their blocks)."""
        with self._changed:
            # Bounded by the copies themselves: memory to memory, nothing that can hang.
            self._changed.wait_for(lambda: self._running.keys().isdisjoint(job_ids))

    def shutdown(self) -> None:
        """End the copies that run, then let go of the region. Idempotent."""
        self._pool.shutdown(wait=True)
        self.region.close()

    # --- main thread ---

    def _blocks_per_chunk(self, group: int) -> int:
        return self.pages.groups[group].blocks_per_chunk

    def _by_group(
        self, blocks: GPULoadStoreSpec, spec: SlotTransfer
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], int]]:
        """Per group that takes part: its number, slots, blocks, and index of the first block."""
        groups = np.asarray(spec.groups, dtype=np.int64)
        all_blocks = blocks.block_ids.astype(np.int64)
        start = 0
        for group, size in enumerate(blocks.group_sizes):
            slots = spec.slots[groups == group]
            part = all_blocks[start : start + size]
            start += size
            if size or len(slots):
                yield group, slots, part, blocks.block_indices[group]

    def _zero(self, group: int, chunk: Chunk) -> None:
        """Leave no old bytes in a slot that this job cannot fill; each rank does its own part."""
        geometry = self.pages.groups[group]
        blocks = np.arange(geometry.blocks_per_chunk, dtype=np.int64)
        start = self.region.slot_address(chunk.slot)
        addresses = np.uint64(start) + blocks.astype(np.uint64) * np.uint64(geometry.block_bytes)
        self.plans[group].zero(addresses, chunk.slot * geometry.blocks_per_chunk + blocks)

    def _start(self, job: _Job, work: Sequence[tuple[int, list[Chunk]]]) -> None:
        parts = []
        for group, chunks in work:
            parts += self._parts(group, chunks, job.is_load)
        with self._changed:
            self._running[job.job_id] = job
            job.parts = len(parts)
            if not parts:
                self._end(job)
        for part in parts:
            self._pool.submit(self._copy, job, *part)

    def _parts(
        self, group: int, chunks: list[Chunk], is_load: bool
    ) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]]:
        """Copies of one group, cut for the pool: group, blocks, addresses, page numbers."""
        if not chunks:
            return []
        geometry = self.pages.groups[group]
        block_ids = np.concatenate([chunk.block_ids for chunk in chunks])
        sub_blocks = np.concatenate(
            [
                np.arange(chunk.first_block, chunk.first_block + len(chunk.block_ids))
                for chunk in chunks
            ]
        )
        slots = np.repeat([chunk.slot for chunk in chunks], [len(c.block_ids) for c in chunks])
        canonical = (
            np.uint64(self.region.slot_address(0))
            + slots.astype(np.uint64) * np.uint64(self.region.geometry.slot_bytes)
            + sub_blocks.astype(np.uint64) * np.uint64(geometry.block_bytes)
        )
        page_ids = slots * geometry.blocks_per_chunk + sub_blocks
        if is_load:
            # Block 0 is vLLM's null block: it stands for a place that nothing reads.
            real = block_ids != 0
            block_ids, canonical, page_ids = block_ids[real], canonical[real], page_ids[real]
        per_part = max(1, PART_BYTES // self.plans[group].local_bytes)
        per_part = max(per_part, -(-len(block_ids) // self._num_threads))
        return [
            (
                group,
                block_ids[start : start + per_part],
                canonical[start : start + per_part],
                page_ids[start : start + per_part],
            )
            for start in range(0, len(block_ids), per_part)
        ]

    # --- copy threads ---

    def _copy(
        self,
        job: _Job,
        group: int,
        block_ids: npt.NDArray[np.int64],
        canonical: npt.NDArray[np.uint64],
        page_ids: npt.NDArray[np.int64],
    ) -> None:
        moved = 0
        error: BaseException | None = None
        plan = self.plans[group]
        try:
            if job.is_load:
                moved = plan.load(block_ids, canonical)
            else:
                moved = plan.store(block_ids, canonical, page_ids)
        except Exception as exc:  # noqa: BLE001 - reported to the thread that asks for results
            error = exc
        with self._changed:
            job.bytes += moved
            job.error = job.error or error
            job.parts -= 1
            if not job.parts:
                self._end(job)

    def _end(self, job: _Job) -> None:
        """Publish the job's numbers, then show it to vLLM. Called with the lock held."""
        spec = job.spec
        if job.error is not None:
            logger.error("kvtier: job %d failed: %r", job.job_id, job.error)
        for number in range(spec.first_transfer, spec.first_transfer + spec.num_transfers):
            if job.error is not None or number in job.failed:
                self.region.fail(self.rank, number)
            else:
                self.region.publish(self.rank, number)
        del self._running[job.job_id]
        self._finished.append(job)
        self._changed.notify_all()
