# SPDX-License-Identifier: Apache-2.0
"""Bytes of the device cache after each load beside those that were stored under the same key.

vLLM's own tiering has no checksums, and kvtier's end in host memory: what a copy puts into the
wrong block, layer or order is seen by nobody else. A block is known by the CRC-32C of each of its
pages, taken from vLLM's tensors when its store is submitted (vLLM has computed it by then) and
again when its load has ended (nobody has used it by then). Runs on the engine's thread; owns the
checksums of one run. For one rank whose tensors lie in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier._core.layout import crc32c_address
from kvtier.bench.copies import CopyCounters
from kvtier.device.chunks import Chunk, split_load, split_store
from kvtier.errors import InternalError
from kvtier.types import key_group

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from kvtier.vllm.pages import WorkerPages

BlockOf = tuple[bytes, int]
"""Key of a chunk, and number of a block inside it."""


class Comparison:
    """Watches a manager and a worker of one process.

    Parameters
    ----------
    manager : OffloadingManager
    worker : OffloadingWorker
    pages : WorkerPages
        Of the worker.
    """

    def __init__(self, manager: Any, worker: Any, pages: WorkerPages) -> None:
        self._pages = pages
        self._counters = CopyCounters()
        self._computed: dict[BlockOf, set[bytes]] = {}
        # A chunk that was forgotten and computed again may differ in its last digits, and a tier
        # may still have the first one: both are right.
        self._prepared: dict[int, tuple[Any, list[bytes]]] = {}
        # Keys of a job by vLLM's object for its places, which is kept so that its id stays its own.
        self._loading: dict[int, list[tuple[int, BlockOf, int]]] = {}  # by job: group, which, where
        self._watch_manager(manager)
        self._watch_worker(worker)

    @property
    def seconds(self) -> float:
        """Time spent in this run."""
        return self._counters.verify_seconds

    def start(self, counters: CopyCounters, *, keep: bool) -> None:
        """A run begins. What was stored before stays known if it may still be found (`keep`)."""
        self._counters = counters
        self._prepared.clear()
        self._loading.clear()
        if not keep:
            self._computed.clear()

    def _watch_manager(self, manager: Any) -> None:
        prepare_store, prepare_load = manager.prepare_store, manager.prepare_load

        def note_store(keys: Collection[bytes], context: Any) -> Any:
            output = prepare_store(keys, context)
            if output is not None and output.keys_to_store:
                spec = output.store_spec
                self._prepared[id(spec)] = (spec, list(output.keys_to_store))
            return output

        def note_load(keys: Collection[bytes], context: Any) -> Any:
            spec = prepare_load(keys, context)
            self._prepared[id(spec)] = (spec, list(keys))
            return spec

        manager.prepare_store, manager.prepare_load = note_store, note_load

    def _watch_worker(self, worker: Any) -> None:
        submit_store, submit_load = worker.submit_store, worker.submit_load
        get_finished = worker.get_finished

        def note_store(job_id: int, blocks: GPULoadStoreSpec, places: Any) -> Any:
            self._stored(blocks, self._keys_of(places))
            return submit_store(job_id, blocks, places)

        def note_load(job_id: int, places: Any, blocks: GPULoadStoreSpec) -> Any:
            keys = self._keys_of(places)
            answer = submit_load(job_id, places, blocks)
            self._loading[job_id] = list(self._deal(blocks, keys, split_load))
            return answer

        def note_finished() -> Any:
            results = get_finished()
            for result in results:
                if result.job_id in self._loading:
                    self._loaded(self._loading.pop(result.job_id))
            return results

        worker.submit_store, worker.submit_load = note_store, note_load
        worker.get_finished = note_finished

    def _keys_of(self, places: Any) -> list[bytes]:
        try:
            _spec, keys = self._prepared.pop(id(places))
        except KeyError as exc:
            raise InternalError("vLLM sends a job that the manager has not prepared") from exc
        return keys

    def _deal(
        self, blocks: GPULoadStoreSpec, keys: list[bytes], split: Any
    ) -> Iterable[tuple[int, BlockOf, int]]:
        """(group, which block, where it lies) of all blocks of a job."""
        start = 0
        for group, size in enumerate(blocks.group_sizes):
            mine = [key for key in keys if key_group(key) == group]
            part = np.asarray(blocks.block_ids[start : start + size], dtype=np.int64)
            start += size
            if not size and not mine:
                continue
            per_chunk = self._pages.groups[group].blocks_per_chunk
            # The number of a key takes the place of a slot.
            chunks: list[Chunk] = split(
                np.arange(len(mine)), part, blocks.block_indices[group], per_chunk
            )
            for chunk in chunks:
                for i, block in enumerate(chunk.block_ids.tolist()):
                    yield group, (mine[chunk.slot], chunk.first_block + i), block

    def _stored(self, blocks: GPULoadStoreSpec, keys: list[bytes]) -> None:
        begin = time.perf_counter()
        for group, which, block in self._deal(blocks, keys, split_store):
            self._computed.setdefault(which, set()).add(self._checksums(group, block).tobytes())
        self._counters.verify_seconds += time.perf_counter() - begin

    def _loaded(self, blocks: list[tuple[int, BlockOf, int]]) -> None:
        begin = time.perf_counter()
        for group, which, block in blocks:
            self._counters.verified_bytes += int(self._lengths(group).sum())
            if self._checksums(group, block).tobytes() not in self._computed.get(which, ()):
                self._counters.differing_blocks += 1
        self._counters.verify_seconds += time.perf_counter() - begin

    def _lengths(self, group: int) -> npt.NDArray[np.int64]:
        pages = self._pages.layer_pages[group]
        return np.array([page.mapping.local_bytes for page in pages], dtype=np.int64)

    def _checksums(self, group: int, block: int) -> npt.NDArray[np.uint32]:
        pages = self._pages.layer_pages[group]
        places = [page.base + block * page.block_stride for page in pages]
        return crc32c_address(np.array(places, dtype=np.uint64), self._lengths(group))
