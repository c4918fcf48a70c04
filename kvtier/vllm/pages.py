# SPDX-License-Identifier: Apache-2.0
"""Geometry of the chunks and copy plans of a worker, from the tensors that vLLM registers.

Runs in the worker, the only place that has the tensors and their mappings. Every page is either
mapped to a canonical page (all ranks agree on its bytes) or kept as an opaque page for each rank.
Pipeline stages have other layers each, and vLLM maps none of their pages: a block of a group is
then one page with an area for each rank, as large as what that rank holds of it.
Owns no state but the plans, which hold the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvtier._core.runs import Run
from kvtier.errors import ConfigError
from kvtier.layout.pages import OpaqueShape, PageMapping
from kvtier.layout.plan import LayerPage, compile_plan
from kvtier.types import GroupGeometry, PageGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvtier._core.layout import CopyPlan
    from kvtier.host.region import Region


class WorkerPages:
    """What one worker knows of the chunks: shapes, its own pages, and portability."""

    def __init__(
        self,
        caches: CanonicalKVCaches,
        groups: tuple[GroupGeometry, ...],
        layer_pages: tuple[list[LayerPage], ...],
        device: torch.device,
    ) -> None:
        self.caches = caches
        self.groups = groups
        self.layer_pages = layer_pages
        self.device = device

    @property
    def portable(self) -> bool:
        """Whether the bytes of every page are the same under any tensor-parallel size."""
        return all(page.mapping.portable for pages in self.layer_pages for page in pages)

    def compile(self, region: Region) -> tuple[CopyPlan, ...]:
        """Copy plans of each group; they refuse addresses outside the slots of `region`."""
        return tuple(
            compile_plan(geometry, pages, region=region.area(group), owner=region)
            for group, (geometry, pages) in enumerate(
                zip(self.groups, self.layer_pages, strict=True)
            )
        )


def page_mapping(ref: CanonicalKVCacheRef, rank: int, world_size: int) -> PageMapping:
    """Where a page of `rank` lies in the canonical page; an area of its own if vLLM does not say.

    Raises
    ------
    ConfigError
        If vLLM's mapping does not cover the page, or covers a part of it twice.
    """
    mapping = ref.mapping
    if mapping is None:
        shape = OpaqueShape(page_bytes=ref.page_size_bytes, ranks=world_size)
        return shape.mapping(world_size, rank)
    try:
        return PageMapping(
            local_bytes=mapping.local_page_size_bytes,
            canonical_bytes=mapping.canonical_page_size_bytes,
            runs=tuple(
                Run(
                    run.local_offset,
                    run.canonical_offset,
                    run.fragment_size,
                    run.num_fragments,
                    run.local_stride,
                    run.canonical_stride,
                )
                for run in mapping.runs
            ),
            num_writers=mapping.num_writers,
            writer_index=mapping.writer_index,
            portable=mapping.parallelism_agnostic,
        )
    except ValueError as exc:
        raise ConfigError(f"vLLM's page mapping is not a tiling: {exc}") from exc


class StageArea(NamedTuple):
    """What each rank of one pipeline stage holds of one block of a group."""

    layers: str
    """First and last layer, to tell one division into stages from another."""
    size_bytes: int


def local_areas(config: OffloadingConfig, caches: CanonicalKVCaches) -> tuple[StageArea, ...]:
    """What this rank holds of each group."""
    return tuple(
        StageArea(
            f"{group.layer_names[0]}..{group.layer_names[-1]}" if group.layer_names else "",
            sum(ref.page_size_bytes for ref in refs),
        )
        for group, refs in zip(config.groups, caches.group_data_refs, strict=True)
    )


def rank_areas(
    refs: Sequence[CanonicalKVCacheRef], stages: Sequence[StageArea], rank: int, world_size: int
) -> tuple[str, list[PageMapping]]:
    """Name of a group's one page that holds the areas of all ranks, and where those of `rank` lie.

    Raises
    ------
    ConfigError
        If a stage has no layer of the group.
    """
    per_stage = world_size // len(stages)
    name = " ".join(f"{area.layers}={area.size_bytes}*{per_stage}" for area in stages)
    if not all(area.size_bytes for area in stages):
        raise ConfigError(f"a pipeline stage has no layer of a KV cache group: {name}")
    sizes = [stages[other // per_stage].size_bytes for other in range(world_size)]
    offset = sum(sizes[:rank])
    mappings = []
    for ref in refs:
        size = ref.page_size_bytes
        mappings.append(
            PageMapping(
                local_bytes=size,
                canonical_bytes=sum(sizes),
                runs=(Run(0, offset, size, 1, size, size),),
                portable=False,
            )
        )
        offset += size
    return name, mappings


def page_names(layer_names: tuple[str, ...], num_refs: int) -> tuple[str, ...]:
    """Names for the pages of a group: its layers, or a number where layers are packed."""
    if num_refs == len(layer_names):
        return layer_names
    return tuple(f"packed.{index}" for index in range(num_refs))


def usable_device(devices: set[torch.device]) -> torch.device:
    """The one device of all tensors: host memory, or a GPU that torch can use.

    Raises
    ------
    ConfigError
        If it is another kind, or if there are several.
    """
    if len(devices) != 1:
        raise ConfigError(f"the KV cache of one worker lies on {sorted(map(str, devices))}")
    (device,) = devices
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        return device
    raise ConfigError(f"the KV cache lies on {device}: only CPU memory and CUDA devices work")


def build_pages(
    config: OffloadingConfig,
    caches: CanonicalKVCaches,
    windows: tuple[int | None, ...],
    stages: Sequence[tuple[StageArea, ...]] | None = None,
    *,
    last_states: frozenset[int] = frozenset(),
) -> WorkerPages:
    """Lay the pages of each group one after the other.

    Parameters
    ----------
    config : OffloadingConfig
    caches : CanonicalKVCaches
        Flat tensors ``(num_blocks, page_bytes)`` with a stride, and the pages of each group.
    windows : sequence of (int or None)
        Window of each group in chunks.
    stages : sequence of sequence of StageArea, optional
        ``local_areas`` of each pipeline stage, where there is more than one.
    last_states : frozenset of int
        Groups of whose chunks vLLM moves one block alone, the state at the end. To kvtier that
        block is the whole chunk.

    Raises
    ------
    ConfigError
        If the groups that vLLM offloads are not numbered from 0 on, if a group has no page here or
        on another stage, or if a tensor is not flat bytes, or they lie where kvtier cannot copy
        from.
    """
    if [group.group_id for group in config.groups] != list(range(len(config.groups))):
        raise ConfigError(
            "kvtier needs all KV cache groups to be offloaded, vLLM offers groups "
            f"{[group.group_id for group in config.groups]} only"
        )
    parallel = config.parallel
    groups = []
    layer_pages = []
    devices: set[torch.device] = set()
    for index, (group, refs, window) in enumerate(
        zip(config.groups, caches.group_data_refs, windows, strict=True)
    ):
        if not refs and stages is None:
            raise ConfigError(f"KV cache group {group.group_id} has no page to offload")
        if stages is None:
            names = page_names(group.layer_names, len(refs))
            mappings = [page_mapping(ref, parallel.rank, parallel.world_size) for ref in refs]
        else:
            areas = [stage[index] for stage in stages]
            name, mappings = rank_areas(refs, areas, parallel.rank, parallel.world_size)
            names = (name,) * len(refs)
        places: dict[str, PageGeometry] = {}
        offset = 0
        placed = []
        for name, ref, mapping in zip(names, refs, mappings, strict=True):
            tensor = caches.tensors[ref.tensor_idx].tensor
            if tensor.element_size() != 1 or tensor.dim() != 2 or tensor.stride(1) != 1:
                raise ConfigError(f"layer {name}: vLLM's tensor is not flat bytes by block")
            devices.add(tensor.device)
            if name not in places:
                places[name] = PageGeometry(name, offset, mapping.canonical_bytes)
                offset += mapping.canonical_bytes
            placed.append(
                LayerPage(
                    layer=name,
                    base=tensor.data_ptr(),
                    block_stride=tensor.stride(0),
                    num_blocks=tensor.shape[0],
                    mapping=mapping,
                    owner=tensor,
                )
            )
        per_chunk = config.cache.blocks_per_chunk
        merged = per_chunk if group.group_id in last_states else 1
        groups.append(
            GroupGeometry(
                block_tokens=group.tokens_per_block * merged,
                blocks_per_chunk=per_chunk // merged,
                block_bytes=offset,
                pages=tuple(places.values()),
                window_chunks=window,
            )
        )
        layer_pages.append(placed)
    return WorkerPages(caches, tuple(groups), tuple(layer_pages), usable_device(devices))
