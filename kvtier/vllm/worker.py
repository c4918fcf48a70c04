# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker side: copies blocks between the accelerator and the slots of the region.

Runs in every vLLM worker. vLLM calls it on the worker's main thread only; the copies run on threads
of the engine, which is that of host memory or that of side streams, as the tensors lie. Owns the
jobs, and through them the engine and this rank's line in the region.

Invariants
----------
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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.device.chunks import split_load, split_store
from kvtier.device.cuda import CudaDevice
from kvtier.device.host import HostEngine
from kvtier.device.jobs import Jobs
from kvtier.device.streams import StreamEngine
from kvtier.errors import InternalError
from kvtier.vllm.transfers import SlotTransfer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.kv_offload.base import LoadStoreSpec

    from kvtier.device.base import Device
    from kvtier.host.region import Region
    from kvtier.vllm.pages import WorkerPages

logger = logging.getLogger("vllm.kvtier.worker")


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
    device : Device, optional
        Where the tensors lie; told by themselves otherwise.
    """

    def __init__(
        self,
        region: Region,
        pages: WorkerPages,
        rank: int,
        num_threads: int = 2,
        device: Device | None = None,
    ) -> None:
        self.region = region
        self.pages = pages
        self.rank = rank
        self.stored_chunks = 0
        self.loaded_chunks = 0
        self.failed_chunks = 0
        self.stored_bytes = 0
        self.loaded_bytes = 0
        plans = pages.compile(region)
        if device is None and pages.device.type == "cuda":
            device = CudaDevice(pages.device)
        engine = (
            HostEngine(plans, num_threads)
            if device is None
            else StreamEngine(device, region, pages.layer_pages, plans, num_threads=num_threads)
        )
        self.jobs = Jobs(region, rank, plans, engine)
        self.jobs.open()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying accelerator blocks into slots; returns at once."""
        assert isinstance(dst_spec, SlotTransfer)
        work = [
            (group, split_store(slots, block_ids, first, self._blocks_per_chunk(group)))
            for group, slots, block_ids, first in self._by_group(src_spec, dst_spec)
        ]
        failed = self.jobs.store(job_id, dst_spec.first_transfer, dst_spec.num_transfers, work)
        self.stored_chunks += len(dst_spec.slots) - failed
        self.failed_chunks += failed
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start copying slots into accelerator blocks; returns at once."""
        assert isinstance(src_spec, SlotTransfer)
        work = [
            (group, split_load(slots, block_ids, first, self._blocks_per_chunk(group)))
            for group, slots, block_ids, first in self._by_group(dst_spec, src_spec)
        ]
        self.jobs.load(job_id, src_spec.first_transfer, src_spec.num_transfers, work)
        self.loaded_chunks += len(src_spec.slots)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call.

        Raises
        ------
        InternalError
            If a load could not be done.
        """
        results = []
        for job in self.jobs.take_finished():
            if job.error is not None:
                logger.error("kvtier: job %d failed: %r", job.job_id, job.error)
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
        self.jobs.wait(job_ids)

    def resources(self) -> WorkerResources:
        """What is open and under way now."""
        fds = len(os.listdir("/proc/self/fd"))
        return WorkerResources(fds, threading.active_count(), len(self.jobs))

    def shutdown(self) -> None:
        """End the copies that run, then let go of the region. Idempotent."""
        self.jobs.close()
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
