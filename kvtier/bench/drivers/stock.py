# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering manager and file tier where vLLM's own worker cannot copy: the rival.

vLLM's worker refuses tensors of its CPU platform. There kvtier's worker copies between them and
vLLM's own shared region; on an accelerator all of it is vLLM's. Manager, region, policy and tier
are vLLM's in both cases. Loaded by vLLM (``spec_module_path``), and only by the strategy ``stock``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.bench.drivers.groups import chunk_groups
from kvtier.errors import ConfigError, InternalError
from kvtier.types import Geometry, GroupGeometry
from kvtier.vllm.pages import build_pages
from kvtier.vllm.transfers import SlotTransfer
from kvtier.vllm.worker import TransferWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        TransferResult,
    )


class StockRegion:
    """vLLM's shared region, as kvtier's worker sees one: a row is a slot.

    Parameters
    ----------
    region : SharedOffloadRegion
        Closed by ``close``.
    geometry : Geometry
    """

    ranks = 1

    def __init__(self, region: Any, geometry: Geometry) -> None:
        self._region = region
        self.geometry = geometry
        self.base_address = int(region.base_tensor.data_ptr())

    def area(self, group: int) -> tuple[int, int, int, int]:
        """Where rows may lie (``Geometry.area``)."""
        return self.geometry.area(group, self.base_address)

    def publish(self, rank: int, transfer: int) -> None:
        """vLLM's manager hears of the end of a copy from vLLM alone."""

    def fail(self, rank: int, transfer: int) -> None:
        """It has no word for a chunk that was not written."""
        raise InternalError(f"transfer {transfer} was not carried out")

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._region.cleanup()


class StockWorker(OffloadingWorker):
    """kvtier's worker, spoken to by vLLM's manager.

    Parameters
    ----------
    worker : TransferWorker
        Over a `StockRegion`.
    """

    def __init__(self, worker: TransferWorker) -> None:
        self._worker = worker
        self.pages = worker.pages
        self._next = 0

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Blocks to rows."""
        return self._worker.submit_store(job_id, src_spec, self._slots(dst_spec, src_spec))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Rows to blocks."""
        return self._worker.submit_load(job_id, self._slots(src_spec, dst_spec), dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call."""
        return self._worker.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Until the copies of these jobs have ended."""
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """End the copies, let go of the region."""
        self._worker.shutdown()

    def _slots(self, rows: Any, blocks: GPULoadStoreSpec) -> SlotTransfer:
        slots = np.asarray(rows.chunk_ids, dtype=np.int64)
        groups = chunk_groups(
            blocks.group_sizes,
            blocks.block_indices,
            [group.blocks_per_chunk for group in self.pages.groups],
        )
        if len(groups) != len(slots):
            raise InternalError(f"{len(slots)} rows for blocks of {len(groups)} chunks")
        first, self._next = self._next, self._next + len(slots)
        return SlotTransfer(slots, groups, first, len(slots))


class StockSpec(TieringOffloadingSpec):
    """vLLM's spec of several tiers, with a worker that takes tensors in host memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's own where it can copy, else kvtier's over vLLM's region."""
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        config = self.config
        if config.parallel.world_size != 1:
            raise ConfigError("strategy stock runs with one rank here")
        pages = build_pages(config, kv_caches, tuple(None for _ in config.groups))
        geometry = self._geometry(pages.groups)
        memory = SharedOffloadRegion(
            engine_id=config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        region: Any = StockRegion(memory, geometry)
        return StockWorker(TransferWorker(region, pages, 0))

    def _geometry(self, groups: tuple[GroupGeometry, ...]) -> Geometry:
        largest = max(group.payload_bytes for group in groups)
        if largest > self.kv_bytes_per_chunk or not self.num_chunks:
            raise ConfigError(
                f"a chunk of {largest} bytes does not fit into vLLM's host memory of "
                f"{self.num_chunks} rows of {self.kv_bytes_per_chunk} bytes"
            )
        return Geometry(groups, self.num_chunks, self.kv_bytes_per_chunk)
