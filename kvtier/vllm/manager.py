# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler side: answers lookups, gives out slots, and follows the transfers.

Runs on the scheduler's thread only; every call is a plain function that never waits. Owns the index
and the records of transfers in flight.

Invariants
----------
* A chunk is committed only when all ranks have published its transfer number, and no rank has
  marked it as failed, whatever vLLM says.
* Pins of a load are given back when vLLM completes it or, after a reset, when its number has been
  published. A slot that was being written at a reset is free again no earlier.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier._core.index import Index
from kvtier._core.slots import SlotTable
from kvtier.errors import InternalError
from kvtier.types import key_group
from kvtier.vllm.transfers import SlotTransfer

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext, ScheduleEndContext

    from kvtier.host.region import Region

logger = logging.getLogger("vllm.kvtier.manager")

_ANSWERS = (LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.HIT)

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint32]


class _Write:
    """One chunk that the workers are writing."""

    __slots__ = ("generation", "key", "slot", "transfer")

    def __init__(self, key: bytes, slot: int, generation: int, transfer: int) -> None:
        self.key = key
        self.slot = slot
        self.generation = generation
        self.transfer = transfer


class _Load:
    """One load in flight: pinned slots."""

    __slots__ = ("generations", "slots", "transfer")

    def __init__(self, slots: Slots, generations: Generations, transfer: int) -> None:
        self.slots = slots
        self.generations = generations
        self.transfer = transfer


class KVTierManager(OffloadingManager):
    """Host memory of one engine.

    Parameters
    ----------
    region : Region
        Attached, signed by all ranks. Closed by ``shutdown``.
    policy : {"lru", "arc"}
    """

    def __init__(self, region: Region, policy: str = "lru") -> None:
        geometry = region.geometry
        self.region = region
        self.index = Index(
            SlotTable(region.records, region.table, geometry.num_slots),
            geometry.payload_bytes,
            policy,
        )
        self.committed_chunks = 0
        self.failed_chunks = 0
        self.evicted_chunks = 0
        self._next_transfer = 0
        self._writes: dict[bytes, _Write] = {}
        # Stores that vLLM has completed and some rank has not published yet: an earlier number may
        # still run there, and failures are told in order.
        self._ended: list[_Write] = []
        # Transfers that some rank has failed, until they are settled.
        self._failed: set[int] = set()
        self._loads: dict[str, _Load] = {}
        # What a reset left behind: freed when its number has been published.
        self._left_writes: list[_Write] = []
        self._left_loads: list[_Load] = []
        self._grow()

    # --- lookups ---

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """State of one chunk."""
        if self._ended:
            self._settle()
        return _ANSWERS[self.index.lookup(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Every hit comes from host memory."""
        return CacheHitSource.HOST

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunk by chunk is the only way to store so far."""
        return RequestOffloadingContext()

    # --- stores ---

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Slots for the absent chunks of `keys`, in order, as far as they go.

        What found no slot is not offered again by vLLM once the request has moved on: None would
        make it offer all keys in every step, with a warning each time.
        """
        self._settle()
        reservation = self.index.reserve(list(keys))
        taken = reservation.keys
        first = self._next_transfer
        self._next_transfer += len(taken)
        for offset, key in enumerate(taken):
            self._writes[key] = _Write(
                key,
                int(reservation.slots[offset]),
                int(reservation.generations[offset]),
                first + offset,
            )
        self.evicted_chunks += len(reservation.evicted)
        return PrepareStoreOutput(
            keys_to_store=list(taken),
            store_spec=SlotTransfer(
                reservation.slots, [key_group(key) for key in taken], first, len(taken)
            ),
            evicted_keys=list(reservation.evicted),
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make chunks loadable, as soon as all ranks have published them."""
        for key in keys:
            write = self._writes.pop(key, None)
            if write is None:
                raise InternalError(f"store of {key.hex()} completed, but it was not in flight")
            if not success:
                self._failed.add(write.transfer)
            self._ended.append(write)
        self._settle()

    # --- loads ---

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks that ``lookup`` has found.

        Raises
        ------
        KeyError
            With the first key that is not there.
        """
        wanted = list(keys)
        slots, generations = self.index.pin(wanted)
        number = self._next_transfer
        self._next_transfer += 1
        if req_context.req_id in self._loads:
            raise InternalError(f"request {req_context.req_id} already loads")
        self._loads[req_context.req_id] = _Load(slots, generations, number)
        return SlotTransfer(slots, [key_group(key) for key in wanted], number, 1)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Give the pins of a load back."""
        load = self._loads.pop(req_context.req_id, None)
        if load is None:
            raise InternalError(f"load of request {req_context.req_id} completed twice")
        self.index.unpin(load.slots, load.generations)

    # --- the course of things ---

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Count one access to the chunks of the request.

        vLLM never calls ``touch``; the order comes from the end positions that it notes for the
        request's keys (they have no public list).
        """
        positions = req_context._offload_key_positions
        self.index.touch(sorted(positions, key=positions.__getitem__))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End of a scheduler step."""
        self._grow()
        self._settle()

    def has_pending_work(self) -> bool:
        """Never: what is left over after a reset needs no step of its own."""
        return False

    def reset_cache(self) -> None:
        """Forget every chunk at once. Slots in flight come back when their copies have ended."""
        self.index.clear()
        # vLLM never completes what was in flight: from now on only the ranks' lines count.
        self._left_writes += [*self._ended, *self._writes.values()]
        self._left_loads.extend(self._loads.values())
        self._ended.clear()
        self._writes.clear()
        self._loads.clear()
        self._settle()

    def shutdown(self) -> None:
        """Let go of the region. Idempotent."""
        self.region.close()

    def _grow(self) -> None:
        available = self.region.available_slots
        if available > self.index.capacity:
            self.index.grow(available)

    def _settle(self) -> None:
        """Commit, abort or free everything that all ranks have finished by now."""
        if not (self._ended or self._left_writes or self._left_loads):
            return
        done = self.region.finished_by_all()
        # Asked after the line above, so that no failure up to `done` is missing.
        for rank in range(self.region.ranks):
            self._failed.update(self.region.failures(rank))
        self._settle_stores(done)
        self._settle_leftovers(done)
        if self._failed:
            open_writes = (*self._writes.values(), *self._ended, *self._left_writes)
            self._failed.intersection_update(write.transfer for write in open_writes)

    def _settle_stores(self, done: int) -> None:
        ended = [write for write in self._ended if write.transfer <= done]
        if not ended:
            return
        self._ended = [write for write in self._ended if write.transfer > done]
        good = [write.key for write in ended if write.transfer not in self._failed]
        bad = [write.key for write in ended if write.transfer in self._failed]
        self.committed_chunks += len(self.index.commit(good))
        if bad:
            self.failed_chunks += self.index.abort(bad)

    def _settle_leftovers(self, done: int) -> None:
        writes = [write for write in self._left_writes if write.transfer <= done]
        loads = [load for load in self._left_loads if load.transfer <= done]
        if writes:
            self._left_writes = [write for write in self._left_writes if write.transfer > done]
            self.index.release(
                np.array([write.slot for write in writes], dtype=np.int64),
                np.array([write.generation for write in writes], dtype=np.uint32),
            )
        if loads:
            self._left_loads = [load for load in self._left_loads if load.transfer > done]
            for load in loads:
                self.index.unpin(load.slots, load.generations)
            self.index.reap()
