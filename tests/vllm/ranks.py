# SPDX-License-Identifier: Apache-2.0
"""All ranks of an engine without the engine: vLLM's own configuration, groups, tensors and page
mappings, and kvtier's spec, workers and manager over them, in one process.

Only the layers are stand-ins, since a real one needs its model: a spec of vLLM's class, the name of
a backend, and the tensor that vLLM cuts for it. From the specs on everything is vLLM's code, in the
order of the engine: groups, configuration of each worker, allocation, canonical mappings, and then
``get_worker`` of the spec. Blocks are read and written through vLLM's views of the layers alone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import SchedulerOffloadConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.worker.utils import allocate_kv_cache

import kvtier.vllm.spec
from kvtier.vllm.pages import local_areas
from kvtier.vllm.spec import KVTierOffloadingSpec
from tests.vllm.models import write_config

MAX_TOKENS = 256
BLOCKS = 256
CAPACITY_BYTES = 4 << 20


class Parallel(msgspec.Struct, frozen=True):
    """Sizes of an engine's parallelism."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    """Tokens that stay together when a context is spread over ranks."""

    @property
    def world(self) -> int:
        """Number of ranks; ranks of a context are among those of the heads."""
        return self.tp * self.pp

    def __str__(self) -> str:
        name = f"tp{self.tp}"
        name += f"-pp{self.pp}" if self.pp > 1 else ""
        return name + (f"-dcp{self.dcp}i{self.interleave}" if self.dcp > 1 else "")


class Backend:
    """Stand-in for the class of an attention backend: only its name counts."""


class Layer:
    """Stand-in for a layer in the static forward context."""

    def __init__(self, spec: KVCacheSpec, backend: type, isa: str | None) -> None:
        self.spec = spec
        self.attn_backend = backend
        self.isa = isa
        self.kv_cache: Any = torch.tensor([])

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        return self.spec


@functools.cache
def model_directory() -> str:
    """One for all engines of this process: its name is the model's."""
    path = Path(tempfile.mkdtemp(prefix="kvt-model-"))
    atexit.register(shutil.rmtree, path)
    write_config("full", path)
    return str(path)


def settings(
    directory: Path,
    parallel: Parallel,
    rank: int,
    *,
    layout: str,
    kv_heads: int,
    block_size: int,
    blocks: int,
    executor: str,
    extra: Mapping[str, Any],
    **engine_args: Any,
) -> Any:
    """vLLM's configuration as a worker sees it."""
    config = EngineArgs(
        model=model_directory(),
        tensor_parallel_size=parallel.tp,
        pipeline_parallel_size=parallel.pp,
        decode_context_parallel_size=parallel.dcp,
        cp_kv_cache_interleave_size=parallel.interleave,
        hf_overrides={"num_key_value_heads": kv_heads},
        block_size=block_size,
        max_model_len=MAX_TOKENS,
        num_gpu_blocks_override=blocks,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": "ranks",
            "kv_connector_extra_config": {
                "spec_name": "KVTierOffloadingSpec",
                "spec_module_path": "kvtier.vllm.spec",
                "cpu_bytes_to_use": CAPACITY_BYTES,
                "directory": str(directory),
                "model_fingerprint": "test",
                **extra,
            },
        },
        **engine_args,
    ).create_engine_config()
    config.parallel_config.rank = rank
    # The CPU platform takes the same one always.
    config.parallel_config.distributed_executor_backend = executor
    config.cache_config.kv_cache_layout = layout
    return config


class Canonical(OffloadingSpec):
    """Takes what vLLM makes of the tensors of a rank."""

    caches: Any = None

    def get_worker(self, kv_caches: Any) -> Any:
        self.caches = kv_caches

    def get_manager(self) -> Any:
        raise NotImplementedError


Layers = Callable[[int], Mapping[str, KVCacheSpec]]
"""Layers of a rank."""


def memory(cache: torch.Tensor) -> np.ndarray[Any, Any]:
    """All bytes behind a tensor; writable."""
    return torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage()).numpy()


class Ranks:
    """Workers and manager of one engine; made by ``ranks``."""

    def __init__(
        self,
        directory: Path,
        layers: Layers,
        parallel: Parallel = Parallel(),  # noqa: B008 (frozen)
        *,
        layout: str = "LBHNC",
        kv_heads: int = 4,
        block_size: int = 16,
        blocks: int = BLOCKS,
        executor: str = "mp",
        backend: type = Backend,
        isa: str | None = None,
        view: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache,
        alter: Callable[[KVCacheConfig], None] = lambda config: None,
        extra: Mapping[str, Any] = {},
        **engine_args: Any,
    ) -> None:
        self.parallel = parallel
        world = parallel.world
        self.configs = [
            settings(
                directory,
                parallel,
                rank,
                layout=layout,
                kv_heads=kv_heads,
                block_size=block_size,
                blocks=blocks,
                executor=executor,
                extra=extra,
                **engine_args,
            )
            for rank in range(world)
        ]
        specs = [dict(layers(rank)) for rank in range(world)]
        self.cache_configs = get_kv_cache_configs(self.configs[0], specs, [1 << 40] * world)
        for cache_config in self.cache_configs:
            alter(cache_config)
        self.caches: list[dict[str, torch.Tensor]] = []
        """By rank, vLLM's view of each layer, ``(blocks, heads, tokens, content)``."""
        self.offloading: list[Any] = []
        self._connectors: list[OffloadingConnectorWorker] = []
        self.manager: Any = None
        self._allocate(specs, backend, isa, view)
        try:
            for rank, config in enumerate(self.configs):
                self._start(rank, config)
            # What the scheduler makes of the same groups, and then its manager.
            self.scheduled = SchedulerOffloadConfig.from_spec(
                KVTierOffloadingSpec(self.offloading[0]),
                self.configs[0],
                generate_scheduler_kv_cache_config(self.cache_configs),
            )
            self.manager = KVTierOffloadingSpec(self.offloading[0]).get_manager()
        except BaseException:
            self.close()
            raise
        self._job = 0

    def _allocate(
        self,
        specs: Sequence[Mapping[str, KVCacheSpec]],
        backend: type,
        isa: str | None,
        view: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        for rank, config in enumerate(self.configs):
            cache_config = self.cache_configs[rank]
            layout = config.cache_config.get_resolved_kv_cache_layout()
            caches = allocate_kv_cache(cache_config, torch.device("cpu"), layout)
            caches = {name: view(cache) for name, cache in caches.items()}
            context = config.compilation_config.static_forward_context
            for name, spec in specs[rank].items():
                context[name] = Layer(spec, backend, isa)
                context[name].kv_cache = caches[name]
            self.caches.append(caches)
            self.offloading.append(build_offloading_config(config, cache_config))

    def _start(self, rank: int, config: Any) -> None:
        """As vLLM starts a worker, but the stages of a pipeline one after the other."""
        spec = KVTierOffloadingSpec(self.offloading[rank])
        connector = OffloadingConnectorWorker(spec, config, self.cache_configs[rank])
        with (
            set_current_vllm_config(config),
            mock.patch.object(kvtier.vllm.spec, "stage_areas", self._stage_areas),
        ):
            connector.register_kv_caches(self.caches[rank])
        self._connectors.append(connector)

    def _stage_areas(self, mine: Any) -> list[Any]:
        """What all stages would say at the same time; `mine` is what one of them does say."""
        areas = []
        for stage in range(self.parallel.pp):
            rank = stage * self.parallel.tp
            seen = Canonical(self.offloading[rank])
            config = self.configs[rank]
            OffloadingConnectorWorker(seen, config, self.cache_configs[rank]).register_kv_caches(
                self.caches[rank]
            )
            areas.append(local_areas(self.offloading[rank], seen.caches))
        assert mine in areas
        return areas

    def close(self) -> None:
        for connector in self._connectors:
            self._worker(connector).shutdown()
        if self.manager is not None:
            self.manager.shutdown()

    @staticmethod
    def _worker(connector: OffloadingConnectorWorker) -> Any:
        return connector.worker

    @property
    def workers(self) -> list[Any]:
        """kvtier's worker of each rank."""
        return [self._worker(connector) for connector in self._connectors]

    @property
    def region(self) -> Any:
        """The region, as rank 0 holds it."""
        return self.workers[0].region

    @property
    def groups(self) -> list[Sequence[str]]:
        """Layers of rank 0 in each group that vLLM offloads."""
        return [group.layer_names for group in self.offloading[0].groups]

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks a chunk."""
        return int(self.offloading[0].cache.blocks_per_chunk)

    def key(self, group: int, number: int) -> bytes:
        """A key as vLLM makes it."""
        return make_offload_key(
            number.to_bytes(32, "big"), self.offloading[0].groups[group].group_id
        )

    def block(self, rank: int, layer: str, block: int) -> np.ndarray[Any, Any]:
        """Bytes of one block of a layer, ``(heads, tokens, bytes)``; a copy."""
        return self._logical(self.caches[rank][layer])[block].numpy().copy()

    def put(self, rank: int, layer: str, block: int, content: np.ndarray[Any, Any]) -> None:
        """Write the bytes of one block of a layer."""
        self._logical(self.caches[rank][layer])[block] = torch.from_numpy(content)

    @staticmethod
    def _logical(cache: torch.Tensor) -> torch.Tensor:
        return cache.view(torch.uint8)

    def wipe(self, value: int = 0) -> None:
        """Overwrite all of every rank's KV memory, padding included."""
        for caches in self.caches:
            for cache in caches.values():
                memory(cache).fill(value)

    def _spec(self, blocks: Sequence[Sequence[int]]) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(
            [block for group in blocks for block in group],
            [len(group) for group in blocks],
            [0] * len(blocks),
        )

    def store(self, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> list[int]:
        """Store the chunks of `keys` from the `blocks` of each group; returns their slots."""
        context = ReqContext(req_id="store")
        output = self.manager.prepare_store(keys, context)
        assert list(output.keys_to_store) == list(keys)
        self._run("submit_store", self._spec(blocks), output.store_spec)
        self.manager.complete_store(set(keys), context)
        return [int(slot) for slot in output.store_spec.slots]

    def load(self, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> None:
        """Load the chunks of `keys` into the `blocks` of each group."""
        context = ReqContext(req_id="load")
        assert [self.manager.lookup(key, context).name for key in keys] == ["HIT"] * len(keys)
        spec = self.manager.prepare_load(keys, context)
        self._run("submit_load", spec, self._spec(blocks))
        self.manager.complete_load(set(keys), context)

    def _run(self, method: str, source: Any, target: Any) -> None:
        self._job += 1
        for worker in self.workers:
            assert getattr(worker, method)(self._job, source, target)
        for worker in self.workers:
            worker.wait({self._job})
            assert [result.job_id for result in worker.get_finished()] == [self._job]

    def payload(self, group: int, slot: int) -> memoryview:
        """Bytes of a chunk in its slot; writable."""
        return self.region.slot_view(slot, self.region.geometry.payload_bytes[group])


@contextlib.contextmanager
def ranks(
    layers: Layers | Mapping[str, KVCacheSpec], *args: Any, **options: Any
) -> Iterator[Ranks]:
    """All ranks of an engine with these layers, the same on all ranks or by rank."""
    by_rank = layers if callable(layers) else lambda rank: layers
    with tempfile.TemporaryDirectory(prefix="kvt-test-", dir="/dev/shm") as directory:
        made = Ranks(Path(directory), by_rank, *args, **options)
        try:
            yield made
        finally:
            made.close()
