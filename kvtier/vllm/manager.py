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
* A number that some rank never publishes is waited for as long as the engine lives: its copy may
  still run, so that no ceiling would make the slot safe to reuse. Nobody else waits: readers have
  their lookup deadline, and vLLM ends an engine one rank of which is dead or hangs.
* An answer about a chunk is kept only until the next call that may store, evict or end a step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier._core.prompt import PromptAnswers
from kvtier.engine.engine import Engine
from kvtier.engine.offers import Offers
from kvtier.errors import InternalError, TierLostError
from kvtier.types import GROUP_BYTES, Lookup, RequestContext, TierMatch, key_group
from kvtier.vllm.outlets import EventOutlet, StatsOutlet
from kvtier.vllm.peers import PeerParams
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


class _Store:
    """One store in flight: chunks that the workers are writing, in the order of their numbers."""

    __slots__ = ("context", "first", "generations", "keys", "last", "slots")

    def __init__(
        self,
        keys: list[bytes],
        context: RequestContext,
        slots: Slots,
        generations: Generations,
        first: int,
    ) -> None:
        self.keys = keys
        self.context = context
        self.slots = slots
        self.generations = generations
        self.first = first
        self.last = first + len(keys) - 1

    @property
    def transfers(self) -> range:
        """Its numbers, one a chunk."""
        return range(self.first, self.last + 1)


class _Load:
    """One load in flight: pinned slots."""

    __slots__ = ("generations", "slots", "transfer")

    def __init__(self, slots: Slots, generations: Generations, transfer: int) -> None:
        self.slots = slots
        self.generations = generations
        self.transfer = transfer


class _Walk:
    """Keys that vLLM asks for one after the other; its context keeps them."""

    __slots__ = ("ends", "keys")

    def __init__(self, keys: list[bytes], ends: int) -> None:
        self.keys = keys
        self.ends = ends
        """End positions of the request's keys that were known: more may come."""


class KVTierManager(PromptAnswers, OffloadingManager):
    """Host memory and tiers of one engine.

    Parameters
    ----------
    region : Region
        Attached, signed by all ranks. Closed by ``shutdown``, or here if this fails.
    config : Config
    events : bool
        Whether vLLM takes events.
    replica : int
        Data-parallel rank.
    store_threshold : int
        Offers after which a chunk is stored; from 2 on they are counted.
    max_tracker_size : int
        Chunks whose offers are counted.

    Raises
    ------
    ConfigError
        If a tier says that something has to be changed.
    """

    def __init__(
        self,
        region: Region,
        config: Config,
        *,
        events: bool = False,
        replica: int = 0,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        other = CacheHitSource.EXTERNAL_UNSPECIFIED
        sources = [_SOURCES.get(tier.type, other) for tier in config.tiers]
        PromptAnswers.__init__(self, LookupResult.HIT, CacheHitSource.HOST, sources)
        self.region = region
        self._peers = PeerParams(config.tiers)
        self.engine = Engine(config, region, own_region=True, replica=replica)
        # Before the start: a level that never changes afterwards is told then and not again.
        self._stats = StatsOutlet(self.engine)
        try:
            self.engine.open()
        except BaseException:
            region.close()
            raise
        self._events = EventOutlet(self.engine) if events else None
        self._store_threshold = store_threshold
        self._offers = Offers(max_tracker_size) if store_threshold > 1 else None
        groups = region.geometry.groups
        self._chunk_tokens = [group.block_tokens * group.blocks_per_chunk for group in groups]
        self._windowed = [group.window_chunks is not None for group in groups]
        # What was said of the chunks behind those that are ready, of the prompt looked at last.
        self._following: dict[bytes, LookupResult] = {}
        self.committed_chunks = 0
        self.failed_chunks = 0
        self.evicted_chunks = 0
        self._next_transfer = 0
        self._stores: dict[str, list[_Store]] = {}  # by request
        # Stores that vLLM has completed and some rank has not published yet: an earlier number may
        # still run there, and failures are told in order.
        self._ended: list[_Store] = []
        # Transfers that some rank has failed, until they are settled.
        self._failed: set[int] = set()
        self._loads: dict[str, _Load] = {}
        # What a reset left behind: freed when its number has been published.
        self._left_stores: list[_Store] = []
        self._left_loads: list[_Load] = []

    def _look(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """State of one chunk: HIT only when its bytes are in host memory, compared with their
        checksum if they came from a tier.

        The first question about a prompt is answered for all of it, the others from that answer.
        """
        if req_context is self.prompt:
            if key in self._following:
                return self._following[key]
            if self.again(key):
                return LookupResult.HIT
        if self._ended:
            self._settle()
        context = self._context(req_context)
        keys = self._walk(key, req_context)
        if len(keys) < 2:
            return _ANSWERS[self.engine.lookup(key, context)]
        ready, answer = self.engine.lookup_batch(keys, context)
        if answer is not Lookup.MISS and len(self._windowed) == 1:
            # One key that is to come makes vLLM wait, whatever it is told of those before it. With
            # several groups a miss in another one may leave so few that it need not.
            ready = 0
        self._following = {}
        if ready < len(keys):
            self._following[keys[ready]] = _ANSWERS[answer]
        if answer is not Lookup.MISS and ready + 1 < len(keys):
            # All is asked for already: a miss ends vLLM's walk over the prompt, here and in every
            # step until the answer changes.
            self._following[keys[ready + 1]] = LookupResult.MISS
        self.keep(req_context, keys[:ready])
        return LookupResult.HIT if self.again(key) else self._following[key]

    def _walk(self, key: bytes, req_context: ReqContext) -> list[bytes]:
        """The keys that vLLM asks for one after the other, from this one on; none where that is
        not known. Windows are walked from their end, and no further than is needed."""
        # vLLM goes on filling it; it has no public list of a request's keys.
        ends = req_context._offload_key_positions
        group = key_group(key)
        if key not in ends or self._windowed[group]:
            return []
        params = req_context.kv_transfer_params
        if params and params.get("max_load_tokens") is not None:
            return []  # the rest would be loaded in vain
        walk: _Walk | None = req_context.get_state(_Walk)
        if walk is not None and walk.ends == len(ends) and walk.keys[0] == key:
            return walk.keys  # a prompt that waits is asked for in each step
        tokens = self._chunk_tokens[group]
        keys = list(ends)
        if len(self._windowed) > 1:
            # Ends of partial blocks are not chunks of the walk.
            suffix = key[-GROUP_BYTES:]
            keys = [one for one in keys if one.endswith(suffix) and ends[one] % tokens == 0]
        start = ends[key] // tokens - 1
        if not (0 <= start < len(keys) and keys[start] == key):
            return []
        walk = _Walk(keys[start:], len(ends))
        req_context.set_state(walk)
        return walk.keys

    def _find_sources(self, req_context: ReqContext) -> None:
        self.keep_sources(req_context, self.engine.sources(self._context(req_context)))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """What is computed is stored, chunk by chunk. Where a peer waits, so is what vLLM finds on
        the accelerator: host memory may have lost it."""
        context = self._context(req_context)
        self.engine.on_new_request(context)
        whole = OffloadPolicy.REQUEST_LEVEL if context.serves else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(whole)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Slots for the absent chunks of `keys` that have been offered often enough, in order, as
        far as they go.

        What found no slot is not offered again by vLLM once the request has moved on: None would
        make it offer all keys in every step, with a warning each time.
        """
        self.forget()
        self._settle()
        context = self._context(req_context)
        wanted = offered = list(keys)
        if self._offers is not None and not context.serves:
            wanted = self._often_offered(offered, self._offers)
        reservation = self.engine.reserve(wanted, context, offered)
        taken, slots = reservation.keys, reservation.slots
        first = self._next_transfer
        if taken:
            self._next_transfer += len(taken)
            store = _Store(taken, context, slots, reservation.generations, first)
            self._stores.setdefault(req_context.req_id, []).append(store)
        self.evicted_chunks += len(reservation.evicted)
        return PrepareStoreOutput(
            keys_to_store=taken,
            store_spec=SlotTransfer(slots, self._groups(taken), first, len(taken)),
            evicted_keys=reservation.evicted,
        )

    def _often_offered(self, keys: list[bytes], offers: Offers) -> list[bytes]:
        """Those to store. What is there stays among them, so that it is not evicted for others."""
        offers.add(keys)
        least, holds = self._store_threshold, self.engine.holds
        return [key for key in keys if offers.count(key) >= least or holds(key)]

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the chunks of one ``prepare_store`` loadable, as soon as all ranks have published
        them."""
        self.forget()
        stores = self._stores.get(req_context.req_id, [])
        # No two stores in flight have a chunk in common.
        store = next((one for one in stores if one.keys[0] in keys), None)
        if store is None or len(keys) != len(store.keys):
            raise InternalError(
                f"request {req_context.req_id} completed a store of {len(keys)} chunks that was "
                "not in flight"
            )
        stores.remove(store)
        if not stores:
            del self._stores[req_context.req_id]
        if not success:
            self._failed.update(store.transfers)
        self._ended.append(store)
        self._settle()

    def _groups(self, keys: Sequence[bytes]) -> Sequence[int]:
        """KV cache group of each key."""
        return (0,) * len(keys) if len(self._windowed) == 1 else [key_group(key) for key in keys]

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
        slots, generations = self.engine.pin(wanted, self._context(req_context))
        if self._events is not None:
            self._events.loaded(wanted)
        number = self._next_transfer
        self._next_transfer += 1
        self._loads[req_context.req_id] = _Load(slots, generations, number)
        return SlotTransfer(slots, self._groups(wanted), number, 1)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Give the pins of a load back."""
        load = self._loads.pop(req_context.req_id, None)
        if load is None:
            raise InternalError(f"load of request {req_context.req_id} completed twice")
        self.engine.unpin(load.slots, load.generations, self._context(req_context))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """These chunks count as used when the request finishes."""
        self.engine.touch(list(keys), self._context(req_context))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Count one access to the chunks of the request.

        vLLM never calls ``touch``; the chunks, those on the accelerator included, and their order
        come from the end positions that it notes for the request's keys.
        """
        self.forget()
        self.forget_sources()
        context = self._context(req_context)
        self.engine.finish_request(context, context.positions)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End of a scheduler step."""
        self.forget()
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
        self.forget()
        self.engine.reset()
        # vLLM never completes what was in flight: from now on only the ranks' lines count.
        self._left_stores += [*self._ended, *chain.from_iterable(self._stores.values())]
        self._left_loads.extend(self._loads.values())
        self._ended.clear()
        self._stores.clear()
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
        if not (self._ended or self._left_stores or self._left_loads):
            return
        done = self.region.finished_by_all()
        # Asked after the line above, so that no failure up to `done` is missing.
        for rank in range(self.region.ranks):
            self._failed.update(self.region.failures(rank))
        self._settle_stores(done)
        self._settle_leftovers(done)
        if self._failed:
            stores = chain(*self._stores.values(), self._ended, self._left_stores)
            self._failed.intersection_update(number for one in stores for number in one.transfers)

    def _settle_stores(self, done: int) -> None:
        ended, self._ended = self._ended, []
        for store in ended:
            if store.last > done:
                self._ended.append(store)
                continue
            keys = store.keys
            failed = self._failed.intersection(store.transfers) if self._failed else ()
            if failed:
                bad = dict.fromkeys(keys[number - store.first] for number in sorted(failed))
                keys = [key for key in keys if key not in bad]
                self.failed_chunks += self.engine.abort(list(bad), store.context)
            self.committed_chunks += len(self.engine.commit(keys, store.context))

    def _settle_leftovers(self, done: int) -> None:
        stores = [store for store in self._left_stores if store.last <= done]
        loads = [load for load in self._left_loads if load.transfer <= done]
        if stores:
            self._left_stores = [store for store in self._left_stores if store.last > done]
            for store in stores:
                self.engine.release(store.slots, store.generations)
        if loads:
            self._left_loads = [load for load in self._left_loads if load.transfer > done]
            for load in loads:
                self.engine.unpin(load.slots, load.generations)

    def _context(self, req_context: ReqContext) -> RequestContext:
        """The engine's view of a request; vLLM's keeps it."""
        return req_context.get_state(RequestContext) or self._new_context(req_context)

    def _new_context(self, req_context: ReqContext) -> RequestContext:
        wanted = req_context.load_tier_filter
        peer, serves = self._peers.read(req_context.kv_transfer_params)
        context = RequestContext(
            req_context.req_id,
            load_tiers=None if wanted is TierFilter.ALL else _matches(wanted),
            peer=peer,
            serves=serves,
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
