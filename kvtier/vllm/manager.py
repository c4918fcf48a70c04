# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler side: vLLM's names for the engine's calls, and the course of the transfers.

Runs on the scheduler's thread only; every call is a plain function that never waits. Owns the
engine and the records of transfers in flight.

Invariants
----------
* A chunk is committed only when all ranks have published its transfer number, and no rank has
  marked it as failed, whatever vLLM says.
* Pins of a load are given back when vLLM completes it or, after a reset, when its number has been
  published. A slot that was being written at a reset is free again no earlier.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.engine.engine import Engine
from kvtier.errors import InternalError, TierLostError
from kvtier.types import RequestContext, TierMatch, key_group
from kvtier.vllm.outlets import EventOutlet, StatsOutlet
from kvtier.vllm.transfers import SlotTransfer

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        LoadStoreSpec,
        OffloadingEvent,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )

    from kvtier.config import Config
    from kvtier.host.region import Region

logger = logging.getLogger("vllm.kvtier.manager")

_ANSWERS = (
    LookupResult.MISS,
    LookupResult.HIT,
    LookupResult.HIT_PENDING,
    LookupResult.RETRY,
)
"""By the engine's own `Lookup`."""

_SOURCES = {"fs": CacheHitSource.DISK, "p2p": CacheHitSource.P2P}
"""By type of tier; vLLM has no word for the others."""

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint32]


class _Write:
    """One chunk that the workers are writing."""

    __slots__ = ("context", "generation", "key", "slot", "transfer")

    def __init__(
        self, key: bytes, context: RequestContext, slot: int, generation: int, transfer: int
    ) -> None:
        self.key = key
        self.context = context
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
    """Host memory and tiers of one engine.

    Parameters
    ----------
    region : Region
        Attached, signed by all ranks. Closed by ``shutdown``, or here if this fails.
    config : Config
    events : bool
        Whether vLLM takes events.

    Raises
    ------
    ConfigError
        If a tier says that something has to be changed.
    """

    def __init__(self, region: Region, config: Config, *, events: bool = False) -> None:
        self.region = region
        self.engine = Engine(config, region, own_region=True)
        # Before the start: a level that never changes afterwards is told then and not again.
        self._stats = StatsOutlet(self.engine)
        try:
            self.engine.open()
        except BaseException:
            region.close()
            raise
        self._events = EventOutlet(self.engine) if events else None
        self._sources = {tier.name: tier.type for tier in config.tiers}
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

    # --- lookups ---

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """State of one chunk: HIT only when its bytes are in host memory, compared with their
        checksum if they came from a tier."""
        if self._ended:
            self._settle()
        context = req_context.get_state(RequestContext) or _new_context(req_context)
        return _ANSWERS[self.engine.lookup(key, context)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a chunk that was answered HIT came from."""
        name = self.engine.source(key, _context(req_context))
        if name not in self._sources:
            return CacheHitSource.HOST
        return _SOURCES.get(self._sources[name], CacheHitSource.EXTERNAL_UNSPECIFIED)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunk by chunk is how everything is stored; no tier here needs whole requests."""
        self.engine.on_new_request(_context(req_context))
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
        context = _context(req_context)
        reservation = self.engine.reserve(list(keys), context)
        taken = reservation.keys
        first = self._next_transfer
        self._next_transfer += len(taken)
        for offset, key in enumerate(taken):
            self._writes[key] = _Write(
                key,
                context,
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
        if req_context.req_id in self._loads:
            raise InternalError(f"request {req_context.req_id} already loads")
        wanted = list(keys)
        slots, generations = self.engine.pin(wanted, _context(req_context))
        number = self._next_transfer
        self._next_transfer += 1
        self._loads[req_context.req_id] = _Load(slots, generations, number)
        return SlotTransfer(slots, [key_group(key) for key in wanted], number, 1)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Give the pins of a load back."""
        load = self._loads.pop(req_context.req_id, None)
        if load is None:
            raise InternalError(f"load of request {req_context.req_id} completed twice")
        self.engine.unpin(load.slots, load.generations, _context(req_context))

    # --- the course of things ---

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """These chunks count as used when the request finishes."""
        self.engine.touch(list(keys), _context(req_context))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Count one access to the chunks of the request.

        vLLM never calls ``touch``; the chunks, those on the accelerator included, and their order
        come from the end positions that it notes for the request's keys.
        """
        context = _context(req_context)
        self.engine.touch(list(context.positions), context)
        self.engine.finish_request(context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End of a scheduler step."""
        self._settle()
        self.engine.end_step()

    def has_pending_work(self) -> bool:
        """Never: the tiers work alone, and what a reset has left over needs no step of its own."""
        return self.engine.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What has changed in host memory and in the tiers since the last call."""
        return self._events.take() if self._events is not None else ()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What kvtier's metrics have done since the last call; None for nothing."""
        return self._stats.take()

    def reset_cache(self) -> None:
        """Forget every chunk at once. Slots in flight come back when their copies have ended."""
        self.engine.reset()
        # vLLM never completes what was in flight: from now on only the ranks' lines count.
        self._left_writes += [*self._ended, *self._writes.values()]
        self._left_loads.extend(self._loads.values())
        self._ended.clear()
        self._writes.clear()
        self._loads.clear()
        self._settle()

    def shutdown(self) -> None:
        """Save what the configuration wants saved, end the tiers, let go. Idempotent."""
        try:
            self.engine.close()
        except TierLostError as exc:
            logger.warning("kvtier: while closing: %s", exc)

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
        by_request: dict[str, list[_Write]] = {}
        for write in ended:
            by_request.setdefault(write.context.request_id, []).append(write)
        for writes in by_request.values():
            context = writes[0].context
            good = [write.key for write in writes if write.transfer not in self._failed]
            bad = [write.key for write in writes if write.transfer in self._failed]
            self.committed_chunks += len(self.engine.commit(good, context))
            if bad:
                self.failed_chunks += self.engine.abort(bad, context)

    def _settle_leftovers(self, done: int) -> None:
        writes = [write for write in self._left_writes if write.transfer <= done]
        loads = [load for load in self._left_loads if load.transfer <= done]
        if writes:
            self._left_writes = [write for write in self._left_writes if write.transfer > done]
            self.engine.release(
                np.array([write.slot for write in writes], dtype=np.int64),
                np.array([write.generation for write in writes], dtype=np.uint32),
            )
        if loads:
            self._left_loads = [load for load in self._left_loads if load.transfer > done]
            for load in loads:
                self.engine.unpin(load.slots, load.generations)


def _context(req_context: ReqContext) -> RequestContext:
    """The engine's view of a request; vLLM's keeps it."""
    return req_context.get_state(RequestContext) or _new_context(req_context)


def _new_context(req_context: ReqContext) -> RequestContext:
    wanted = req_context.load_tier_filter
    context = RequestContext(
        req_context.req_id,
        load_tiers=None if wanted is TierFilter.ALL else _matches(wanted),
        # vLLM goes on filling it; it has no public list of a request's keys.
        positions=req_context._offload_key_positions,
    )
    req_context.set_state(context)
    return context


def _matches(wanted: TierFilter) -> tuple[TierMatch, ...]:
    return tuple(
        TierMatch(
            matcher.medium.value if matcher.medium is not None else None,
            matcher.locality.value if matcher.locality is not None else None,
        )
        for matcher in wanted.matchers
    )
