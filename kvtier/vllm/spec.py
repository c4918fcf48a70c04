# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads (``spec_name: KVTierOffloadingSpec``, module ``kvtier.vllm.spec``).

vLLM makes one object in every worker and one more for the scheduler, the workers' first. Only a
worker sees tensors, mappings and vLLM's configuration, so it creates the region and computes its
geometry and namespace; the manager attaches and reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier.config import Config, parse_extra_config
from kvtier.errors import ConfigError
from kvtier.host.region import Region
from kvtier.namespace import merged
from kvtier.tiers.registry import check_options
from kvtier.types import make_geometry
from kvtier.vllm import check_version
from kvtier.vllm.identity import namespace_fields
from kvtier.vllm.leftovers import sweep_at_exit
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.outlets import definitions, metadata
from kvtier.vllm.pages import build_pages
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


def region_name(engine_id: str) -> str:
    """Name of the region of one engine; manager and workers derive it from the same id."""
    return f"kvtier-{engine_id}"


def spec_config(extra: Mapping[str, Any]) -> Config:
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


def window_chunks(vllm_config: VllmConfig, layer_name: str, chunk_tokens: int) -> int | None:
    """Chunks that one request needs of a windowed group; None for full attention."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    spec = layer.get_kv_cache_spec(vllm_config) if layer is not None else None
    if isinstance(spec, SlidingWindowSpec):
        return -(-int(spec.sliding_window) // chunk_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return -(-int(spec.attention_chunk_size) // chunk_tokens)
    if isinstance(spec, MambaSpec):
        return 1
    return None


def keeps_last_state(vllm_config: VllmConfig, layer_name: str) -> bool:
    """Whether vLLM stores and loads one block of a chunk alone, the state at the chunk's end."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    spec = layer.get_kv_cache_spec(vllm_config) if layer is not None else None
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"


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

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Create the region, or join it, and sign with this rank."""
        config = self.config
        vllm_config = get_current_vllm_config()
        windows = tuple(
            window_chunks(
                vllm_config,
                group.layer_names[0],
                group.tokens_per_block * config.cache.blocks_per_chunk,
            )
            for group in config.groups
        )
        last_states = frozenset(
            group.group_id
            for group in config.groups
            if keeps_last_state(vllm_config, group.layer_names[0])
        )
        pages = build_pages(config, kv_caches, windows, last_states=last_states)
        try:
            geometry = make_geometry(pages.groups, self.settings.capacity_bytes)
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
            # The manager sees the slots that have memory by now, and more with each step.
            region.populate(lambda available: None)
        worker = TransferWorker(region, pages, parallel.rank)
        logger.info(
            "kvtier: rank %d of %d signed region %s: %d slots of %d bytes, payload by group %s, %s",
            parallel.rank,
            parallel.world_size,
            self.region_name,
            geometry.num_slots,
            geometry.slot_bytes,
            geometry.payload_bytes,
            "portable" if pages.portable else "bound to this topology",
        )
        return worker

    def get_manager(self) -> OffloadingManager:
        """Attach to the region that the workers made."""
        region = Region.attach(
            self.region_name, directory=self.settings.directory, timeout_seconds=START_SECONDS
        )
        manager = KVTierManager(
            region, self.settings, events=self.kv_events_config.enable_kv_cache_events
        )
        logger.info(
            "kvtier: manager attached to region %s: %d slots, namespace %s",
            self.region_name,
            region.geometry.num_slots,
            dict(region.namespace),
        )
        return manager
