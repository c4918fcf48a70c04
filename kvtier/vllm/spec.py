# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads (``spec_name: KVTierOffloadingSpec``, module ``kvtier.vllm.spec``).

vLLM makes one object in every worker and one more for the scheduler, the workers' first. Only a
worker sees tensors, mappings and vLLM's configuration, so it creates the region and computes its
geometry and namespace; the manager attaches and reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier.config import VLLMConfig, parse_extra_config
from kvtier.errors import ConfigError
from kvtier.host.region import Region
from kvtier.namespace import merged
from kvtier.tiers.registry import check_options, wants_rows
from kvtier.types import make_geometry
from kvtier.vllm import check_version
from kvtier.vllm.identity import namespace_fields
from kvtier.vllm.leftovers import sweep_at_exit
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.outlets import definitions, metadata
from kvtier.vllm.pages import StageArea, build_pages, local_areas
from kvtier.vllm.worker import TransferWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger("vllm.kvtier.spec")

START_SECONDS = 30.0

_KINDS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
"""What vLLM offloads. KV of an encoder does not follow from the tokens that a key is made of."""


def region_name(engine_id: str) -> str:
    """Name of the region of one engine; manager and workers derive it from the same id."""
    return f"kvtier-{engine_id}"


def spec_config(extra: Mapping[str, Any]) -> VLLMConfig:
    """Configuration from ``kv_connector_extra_config``, the tiers' own options included.

    Raises
    ------
    ConfigError
        If it does not fit.
    """
    config = parse_extra_config(extra)
    typed = "secondary_tiers" if "secondary_tiers" in extra else "tiers"
    for position, tier in enumerate(config.tiers):
        check_options(tier, f"kv_connector_extra_config: {typed}[{position}]")
    return config


def window_chunks(
    vllm_config: VllmConfig, layer_names: Sequence[str], chunk_tokens: int
) -> int | None:
    """Chunks that one request needs of a windowed group; None for full attention.

    vLLM's own answer for the layers. Where they differ it keeps all of them as full attention (one
    group for everything, without its hybrid manager).

    Raises
    ------
    ConfigError
        If the KV of a layer is of a kind that does not follow from the tokens before it.
    """
    windows = {_layer_window(vllm_config, name, chunk_tokens) for name in layer_names}
    return windows.pop() if len(windows) == 1 else None


def _layer_spec(vllm_config: VllmConfig, name: str) -> KVCacheSpec | None:
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    return layer.get_kv_cache_spec(vllm_config) if layer is not None else None


def _layer_window(vllm_config: VllmConfig, name: str, chunk_tokens: int) -> int | None:
    spec = _layer_spec(vllm_config, name)
    if spec is None:
        return None
    if not isinstance(spec, _KINDS):
        raise ConfigError(
            f"layer {name}: kvtier cannot offload KV of class {type(spec).__name__}, only of "
            f"{', '.join(kind.__name__ for kind in _KINDS)} and classes derived from them"
        )
    # lazy: takes half of vLLM with it, which is there when a worker asks
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        get_sliding_window_size_in_chunks,
    )

    if isinstance(spec, SlidingWindowSpec):
        # As vLLM does once it has the specs of all layers.
        extra = max(0, vllm_config.num_prefill_lookahead_tokens - 1)
        spec = replace(spec, extra_retained_tokens=extra)
    window: int | None = get_sliding_window_size_in_chunks(spec, chunk_tokens)
    return window


def stage_areas(mine: tuple[StageArea, ...]) -> list[tuple[StageArea, ...]]:
    """What each pipeline stage holds of the groups, in order; all of them ask at the same time."""
    group = get_pp_group()
    areas: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(areas, mine, group=group.cpu_group)
    return areas


def warn_of_policy(vllm_config: VllmConfig) -> None:
    """Say so where vLLM would fail a request over a load that it is told has failed."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kvtier: kv_load_failure_policy is %r, so that vLLM fails a request whose load is "
            'reported as failed; set "kv_load_failure_policy": "recompute" beside kv_connector to '
            "have it computed",
            transfer.kv_load_failure_policy,
        )


def warn_of_chunks(vllm_config: VllmConfig, config: OffloadingConfig) -> None:
    """Say so where a chunk is so much longer than its window that vLLM may give its first blocks
    away before its last ones are computed; nobody can store it then."""
    for group in config.groups:
        specs = [_layer_spec(vllm_config, name) for name in group.layer_names]
        windows = [one.sliding_window for one in specs if isinstance(one, SlidingWindowSpec)]
        block, per_chunk = group.tokens_per_block, config.cache.blocks_per_chunk
        if windows and block * per_chunk >= min(windows) + block:
            logger.warning(
                "kvtier: chunks of %d tokens are longer than the sliding window of %d: where a "
                "prefill step ends inside a chunk, vLLM may reuse the chunk's first blocks before "
                "it is whole, and then it is not stored; blocks_per_chunk up to %d avoids that",
                block * per_chunk,
                min(windows),
                -(-min(windows) // block),
            )
            return


def keeps_last_state(vllm_config: VllmConfig, layer_names: Sequence[str]) -> bool:
    """Whether vLLM stores and loads one block of a chunk alone, the state at the chunk's end."""
    specs = (_layer_spec(vllm_config, name) for name in layer_names)
    return any(isinstance(one, MambaSpec) and one.mamba_cache_mode == "align" for one in specs)


class KVTierOffloadingSpec(OffloadingSpec):
    """Entry point of kvtier in vLLM's ``OffloadingConnector``.

    Parameters
    ----------
    config : OffloadingConfig
        ``extra_config`` holds ``cpu_bytes_to_use``, the host memory of this engine, all ranks
        together, and the other keys of the configuration.

    Raises
    ------
    ConfigError
        As ``spec_config`` does, before anything is made; in the workers and in the scheduler.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """kvtier's metrics, those of the configured tiers included, for vLLM's endpoint.

        vLLM asks in the process of the server, the only one that it does not kill at its end.
        """
        config = spec_config(extra_config)
        sweep_at_exit(config.directory)
        return {one.name: metadata(one) for one in definitions(config)}

    def __init__(self, config: OffloadingConfig) -> None:
        check_version()
        super().__init__(config)
        self.settings = spec_config(config.extra_config)
        self.region_name = region_name(config.engine_id)
        self._registered = False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Create the region, or join it, and sign with this rank.

        Raises
        ------
        ConfigError
            If this rank cannot take part, or has tensors already.
        """
        if self._registered:
            # The connector of the first engine would copy from and to the tensors of the second.
            raise ConfigError(
                "this process has made an engine with offloading before, which still runs or did "
                "not start, and vLLM keeps one connector for a whole process: end that engine "
                "first, or give each a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1, "
                "vLLM's default)"
            )
        config = self.config
        vllm_config = get_current_vllm_config()
        areas = None
        if config.parallel.pp_size > 1:
            # First: a stage that finds something to refuse must not leave the others waiting.
            areas = stage_areas(local_areas(config, kv_caches))
        windows = tuple(
            window_chunks(
                vllm_config,
                group.layer_names,
                group.tokens_per_block * config.cache.blocks_per_chunk,
            )
            for group in config.groups
        )
        last_states = frozenset(
            group.group_id
            for group in config.groups
            if keeps_last_state(vllm_config, group.layer_names)
        )
        pages = build_pages(config, kv_caches, windows, areas, last_states=last_states)
        try:
            one_size = wants_rows(self.settings.tiers)
            geometry = make_geometry(pages.groups, self.settings.capacity_bytes, one_size=one_size)
        except ValueError as exc:
            raise ConfigError(f"cpu_bytes_to_use is too small: {exc}") from exc
        fields = merged(
            namespace_fields(
                config,
                vllm_config,
                pages,
                config.engine_id,
                fingerprint=self.settings.model_fingerprint,
            ),
            self.settings.namespace,
        )
        parallel = config.parallel
        region = Region.create(
            self.region_name,
            geometry,
            fields,
            parallel.world_size,
            directory=self.settings.directory,
            timeout_seconds=START_SECONDS,
        )
        region.sign(parallel.rank)
        if region.is_creator:
            warn_of_policy(vllm_config)
            warn_of_chunks(vllm_config, config)
            # The manager sees the slots that have memory by now, and more with each step.
            region.populate(lambda available: None)
        worker = TransferWorker(region, pages, parallel.rank)
        self._registered = True
        logger.info(
            "kvtier: rank %d of %d signed region %s: %d slots of %d bytes, payload by group %s, "
            "slots a chunk by group %s, %s",
            parallel.rank,
            parallel.world_size,
            self.region_name,
            geometry.num_slots,
            geometry.slot_bytes,
            geometry.payload_bytes,
            geometry.widths,
            "portable" if pages.portable else "bound to this topology",
        )
        return worker

    def get_manager(self) -> OffloadingManager:
        """Attach to the region that the workers made."""
        # vLLM sets the level of its own loggers alone; the tier service takes that of kvtier's.
        ours = logging.getLogger("kvtier")
        if ours.level == logging.NOTSET:
            ours.setLevel(logger.getEffectiveLevel())
        region = Region.attach(
            self.region_name, directory=self.settings.directory, timeout_seconds=START_SECONDS
        )
        manager = KVTierManager(
            region,
            self.settings,
            events=self.kv_events_config.enable_kv_cache_events,
            replica=self.config.parallel.data_parallel_index,
            store_threshold=self.settings.store_threshold,
            max_tracker_size=self.settings.max_tracker_size,
        )
        logger.info(
            "kvtier: manager attached to region %s: %d slots, namespace %s",
            self.region_name,
            region.geometry.num_slots,
            dict(region.namespace),
        )
        return manager
