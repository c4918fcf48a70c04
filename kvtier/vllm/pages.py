# SPDX-License-Identifier: Apache-2.0
"""Geometry of the chunks and copy plans of a worker, from the tensors that vLLM registers.

Runs in the worker, the only place that has the tensors and their mappings. Every page is either
mapped to a canonical page (all ranks agree on its bytes) or kept as an opaque page for each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier._core.layout import CopyPlan, PagePlan
from kvtier.errors import ConfigError
from kvtier.types import GroupGeometry, PageGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvtier.host.region import Region


class WorkerPages:
    """What one worker knows of the chunks: shapes, its own pages, and portability."""

    def __init__(
        self,
        caches: CanonicalKVCaches,
        groups: tuple[GroupGeometry, ...],
        page_plans: tuple[list[PagePlan], ...],
        portable: bool,
    ) -> None:
        self.caches = caches
        self.groups = groups
        self.portable = portable
        """Whether the bytes of every page are the same under any tensor-parallel size."""
        self._page_plans = page_plans

    def compile(self, region: Region) -> tuple[CopyPlan, ...]:
        """Copy plans of each group; they refuse addresses outside the slots of `region`."""
        geometry = region.geometry
        slots = (region.base_address, geometry.slot_bytes, geometry.num_slots)
        return tuple(
            CopyPlan(pages, group.block_bytes, region=slots, owner=region)
            for pages, group in zip(self._page_plans, self.groups, strict=True)
        )


def _runs(
    ref: CanonicalKVCacheRef, rank: int, world_size: int
) -> tuple[int, list[tuple[int, int, int, int, int, int]], int, int, bool]:
    """Canonical size, runs, writers, writer index, portability of one page."""
    mapping = ref.mapping
    if mapping is None:
        size = ref.page_size_bytes
        whole = (0, rank * size, size, 1, size, size)
        return world_size * size, [whole], 1, 0, world_size == 1
    runs = [
        (
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        )
        for run in mapping.runs
    ]
    return (
        mapping.canonical_page_size_bytes,
        runs,
        mapping.num_writers,
        mapping.writer_index,
        mapping.parallelism_agnostic,
    )


def page_names(layer_names: tuple[str, ...], num_refs: int) -> tuple[str, ...]:
    """Names for the pages of a group: its layers, or a number where layers are packed."""
    if num_refs == len(layer_names):
        return layer_names
    return tuple(f"packed.{index}" for index in range(num_refs))


def build_pages(
    config: OffloadingConfig,
    caches: CanonicalKVCaches,
    windows: tuple[int | None, ...],
) -> WorkerPages:
    """Lay the pages of each group one after the other and compile this worker's copies.

    Parameters
    ----------
    config : OffloadingConfig
    caches : CanonicalKVCaches
        Flat tensors ``(num_blocks, page_bytes)`` with a stride, and the pages of each group.
    windows : sequence of (int or None)
        Window of each group in chunks.

    Raises
    ------
    ConfigError
        If the groups that vLLM offloads are not numbered from 0 on, if a group has no page, or if
        a page leaves its tensor.
    """
    if [group.group_id for group in config.groups] != list(range(len(config.groups))):
        raise ConfigError(
            "kvtier needs all KV cache groups to be offloaded, vLLM offers groups "
            f"{[group.group_id for group in config.groups]} only"
        )
    parallel = config.parallel
    groups = []
    plans = []
    portable = True
    for group, refs, window in zip(config.groups, caches.group_data_refs, windows, strict=True):
        if not refs:
            raise ConfigError(f"KV cache group {group.group_id} has no page to offload")
        offset = 0
        pages = []
        page_plans = []
        for name, ref in zip(page_names(group.layer_names, len(refs)), refs, strict=True):
            tensor = caches.tensors[ref.tensor_idx].tensor
            if tensor.element_size() != 1 or tensor.dim() != 2 or tensor.stride(1) != 1:
                raise ConfigError(f"layer {name}: vLLM's tensor is not flat bytes by block")
            size, runs, writers, index, agnostic = _runs(ref, parallel.rank, parallel.world_size)
            portable = portable and agnostic
            page_plans.append(
                PagePlan(
                    base=tensor.data_ptr(),
                    block_stride=tensor.stride(0),
                    num_blocks=tensor.shape[0],
                    local_bytes=ref.page_size_bytes,
                    block_offset=offset,
                    canonical_bytes=size,
                    runs=runs,
                    num_writers=writers,
                    writer_index=index,
                    owner=tensor,
                )
            )
            pages.append(PageGeometry(layer=name, offset_bytes=offset, size_bytes=size))
            offset += size
        groups.append(
            GroupGeometry(
                block_tokens=group.tokens_per_block,
                blocks_per_chunk=config.cache.blocks_per_chunk,
                block_bytes=offset,
                pages=tuple(pages),
                window_chunks=window,
            )
        )
        plans.append(page_plans)
    return WorkerPages(caches, tuple(groups), tuple(plans), portable)
