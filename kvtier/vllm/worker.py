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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.errors import InternalError
from kvtier.layout.plan import CopyPool, expand_slots
from kvtier.vllm.transfers import Chunk, SlotTransfer, split_load, split_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from vllm.v1.kv_offload.base import LoadStoreSpec

    from kvtier.host.region import Region
    from kvtier.vllm.pages import WorkerPages

logger = logging.getLogger("vllm.kvtier.worker")


class _Job:
    """One vLLM job while its copies run."""

    __slots__ = (
        "broken",
        "bytes",
        "error",
        "failed",
        "is_load",
        "job_id",
        "parts",
        "spec",
        "started",
    )

    def __init__(self, job_id: int, is_load: bool, spec: SlotTransfer) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.spec = spec
        self.parts = 0
        self.bytes = 0
        # Numbers of chunks that the job has not all blocks for.
        self.failed: set[int] = set()
        self.error: BaseException | None = None
        # What kept the end of the job from being published: always a bug.
        self.broken: BaseException | None = None
        self.started = time.monotonic()


class WorkerResources(NamedTuple):
    """What a worker holds, for leak checks; descriptors and threads are those of its process."""

    fds: int
    threads: int
    jobs: int
    """Jobs whose copies run, and those that vLLM has not been told of."""


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
        self.region = region
        self.pages = pages
        self.plans = pages.compile(region)
        self.rank = rank
        self.stored_chunks = 0
        self.loaded_chunks = 0
        self.failed_chunks = 0
        self.stored_bytes = 0
        self.loaded_bytes = 0
        self._pool = CopyPool(num_threads)
        self._pool.open()
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
            if job.broken is not None:
                raise InternalError(f"job {job.job_id} cannot be published") from job.broken
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

    def resources(self) -> WorkerResources:
        """What is open and under way now."""
        with self._changed:
            jobs = len(self._running) + len(self._finished)
        return WorkerResources(len(os.listdir("/proc/self/fd")), threading.active_count(), jobs)

    def shutdown(self) -> None:
        """End the copies that run, then let go of the region. Idempotent."""
        self._pool.close()
        self.region.close()

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
        self.plans[group].zero(*self._places(group, [chunk]))

    def _places(
        self, group: int, chunks: Sequence[Chunk]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Addresses and page numbers of all canonical blocks of `chunks`."""
        return expand_slots(
            np.array([chunk.slot for chunk in chunks], dtype=np.int64),
            self.pages.groups[group],
            self.region.base_address,
            self.region.geometry.slot_bytes,
        )

    def _start(self, job: _Job, work: Sequence[tuple[int, list[Chunk]]]) -> None:
        with self._changed:
            self._running[job.job_id] = job
        futures = []
        for group, chunks in work:
            if not chunks:
                continue
            try:
                futures.append(self._copy(group, chunks, job.is_load))
            except (IndexError, ValueError) as exc:  # refused before a byte has moved
                # Without its frames, which hold the region through this job.
                job.error = exc.with_traceback(None)
        job.parts = len(futures)
        if not futures:
            self._part_ended(job, None)
        for future in futures:
            # Runs here if the copy has ended already, else on the pool's thread.
            future.add_done_callback(lambda ended: self._part_ended(job, ended))

    def _copy(self, group: int, chunks: list[Chunk], is_load: bool) -> Future[int]:
        """Start the copies of one group."""
        per_chunk = self._blocks_per_chunk(group)
        addresses, page_ids = self._places(group, chunks)
        given = np.zeros(len(page_ids), dtype=bool)
        for position, chunk in enumerate(chunks):
            first = position * per_chunk + chunk.first_block
            given[first : first + len(chunk.block_ids)] = True
        block_ids = np.concatenate([chunk.block_ids for chunk in chunks])
        addresses, page_ids = addresses[given], page_ids[given]
        plan = self.plans[group]
        if not is_load:
            return self._pool.store(plan, block_ids, addresses, page_ids)
        # Block 0 is vLLM's null block: it stands for a place that nothing reads.
        real = block_ids != 0
        return self._pool.load(plan, block_ids[real], addresses[real])

    def _part_ended(self, job: _Job, future: Future[int] | None) -> None:
        """Any thread: the pool's, or the one that submits."""
        with self._changed:
            if future is not None:
                job.error = job.error or future.exception()
                if future.exception() is None:
                    job.bytes += future.result()
                job.parts -= 1
            if job.parts == 0:
                self._end(job)

    def _end(self, job: _Job) -> None:
        """Publish the job's numbers, then show it to vLLM. Called with the lock held."""
        spec = job.spec
        if job.error is not None:
            logger.error("kvtier: job %d failed: %r", job.job_id, job.error)
        try:
            for number in range(spec.first_transfer, spec.first_transfer + spec.num_transfers):
                if job.error is not None or number in job.failed:
                    self.region.fail(self.rank, number)
                else:
                    self.region.publish(self.rank, number)
        except Exception as exc:  # noqa: BLE001 - raised where vLLM asks for results
            job.broken = exc
        finally:
            # Whatever happened, nobody may wait for this job for ever.
            del self._running[job.job_id]
            self._finished.append(job)
            self._changed.notify_all()
