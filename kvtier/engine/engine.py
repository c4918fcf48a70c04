# SPDX-License-Identifier: Apache-2.0
"""The engine as a scheduler sees it: plain calls that take microseconds and never wait.

Belongs to one thread, the owner's. Owns the index of one region, the planner, the supervisor of the
tier service and the outlets. A step is: any calls, the first of which takes the service's answers,
then ``end_step``, which sends what the step has decided. While there are requests, a step follows.
``commit`` and ``finish_request`` send as well when there is none left, and so does ``reset``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier._core.index import Reservation
from kvtier._core.slots import READY
from kvtier.config import Config
from kvtier.engine.forked import FORKED, OPEN_ENGINES, Gone
from kvtier.engine.outlets import EngineStats, Outlets
from kvtier.engine.planner import Planner
from kvtier.engine.state import tier_states
from kvtier.engine.supervisor import Supervisor, make_carrier
from kvtier.errors import ClosedError, TierLostError
from kvtier.host.cache import HostCache
from kvtier.host.region import Region
from kvtier.namespace import FORMAT_VERSION, describe_groups, merged, new_epoch, with_epoch
from kvtier.obs.metrics import Recorder
from kvtier.runtime import messages as m
from kvtier.runtime.carrier import Carrier
from kvtier.tiers.base import Takes
from kvtier.types import Geometry, Lookup, RequestContext

__all__ = ["Engine", "EngineStats", "open_engine"]

log = logging.getLogger(__name__)

METRICS_SECONDS = 0.5

_HIT = Lookup.HIT


class Engine:
    """Scheduler-facing side of kvtier.

    Parameters
    ----------
    config : Config
    region : Region
        Created by the workers, or by the caller; closed by ``close`` if `own_region`.
    own_region : bool
    replica : int
        Number of this engine among equally configured ones on a host: its endpoints are as many
        ports higher.
    clock : callable
        Monotonic seconds.
    carrier : Carrier, optional
        Instead of the one that the configuration asks for (tests).
    """

    def __init__(
        self,
        config: Config,
        region: Region,
        *,
        own_region: bool = False,
        replica: int = 0,
        clock: Callable[[], float] = time.monotonic,
        carrier: Carrier | None = None,
    ) -> None:
        self.config = config
        self.region = region
        self.geometry: Geometry = region.geometry
        self.namespace = dict(region.namespace)
        self._own_region = own_region
        self._clock = clock
        self._recorder = Recorder()
        self._outlets = Outlets(
            config, self.geometry, self._recorder, self.namespace.get("epoch", ""), replica
        )
        self.registry = self._outlets.registry
        self.events = self._outlets.events
        self._tiers = self._outlets.tiers = tier_states(config, self.geometry, self.registry)
        self.cache = HostCache(
            region.records,
            region.table,
            self.geometry,
            policy=config.policy,
            track_unsaved=any(tier.takes is not Takes.NONE for tier in self._tiers),
        )
        self._index = self.cache.index
        self._planner = Planner(
            self._index,
            self.cache.slots,
            self.geometry,
            config,
            self._tiers,
            self._recorder,
            self._outlets.emit,
        )
        if carrier is None:
            carrier = make_carrier(config, self.namespace, region, replica)
        self._supervisor: Supervisor | None = None
        if carrier is not None:
            self._supervisor = Supervisor(
                carrier, self._planner, self.registry, self._recorder, self._take, clock
            )
        self._lookup = self._index.lookup
        self._verify = config.verify_host != "off"
        self._polled = False
        self._growing = True  # some slots do not have memory yet
        self._closed = False
        self._has_let_go = False
        self._now = clock()
        self._metrics_at = 0.0
        self.resources: m.Resources | None = None
        self._audits = 0

    def open(self) -> None:
        """Start the tier service and wait for the tiers' self-tests.

        Raises
        ------
        ConfigError
            A tier says that something has to be changed; the service has been ended again.
        """
        # A forked child does not have the region's memory: one touch of it would be a SIGSEGV.
        OPEN_ENGINES.add(self)
        self._grow()
        self.publish_metrics()
        try:
            self._outlets.open()
            if self._supervisor is not None:
                self._supervisor.open(self._tiers)
        except BaseException:
            OPEN_ENGINES.discard(self)
            self._outlets.close()
            raise
        geometry = self.geometry
        padding = ", ".join(
            f"group {group}: {ratio:.1%}" for group, ratio in enumerate(geometry.padding_ratio)
        )
        slabs = ""
        if geometry.slab_slots > 1:
            widths = ", ".join(map(str, geometry.widths))
            slabs = f" (slabs of {geometry.slab_slots}; chunks by group take {widths})"
        log.info(
            "host memory: %d slots of %d bytes%s, padding %s; tiers: %s",
            geometry.num_slots,
            geometry.slot_bytes,
            slabs,
            padding,
            ", ".join(tier.name for tier in self._tiers) or "none",
        )

    def disown(self) -> None:
        """In a forked child: every later call raises ClosedError."""
        forked: Any = Gone(FORKED)
        self._closed = True
        self._index = self._planner = forked
        self._lookup = forked.refuse

    def close(self, deadline_seconds: float = 5.0) -> None:
        """Save what only the host holds (``flush_on_shutdown``), end the service, let go.

        Raises
        ------
        TierLostError
            With what the tiers met while they closed. Everything has been let go all the same.
        """
        if self._closed:
            return
        try:
            self._save_unsaved()
        finally:
            self._closed = True
            OPEN_ENGINES.discard(self)
            error = ""
            if self._supervisor is not None:
                error = self._supervisor.close(self._clock() + deadline_seconds)
            if self._own_region:
                self.region.close()
                self._let_go()
            self._outlets.close()
        if error:
            raise TierLostError(error)

    def _let_go(self) -> None:
        """Of the memory: whoever still holds the engine, for its counters, holds no slots."""
        self._outlets.publish(self._index, self._planner)
        gone: Any = Gone("the engine is closed")
        self.cache = self._index = self._planner = gone
        self._lookup = gone.refuse
        self._supervisor = None
        self._has_let_go = True

    def _save_unsaved(self) -> None:
        seconds = self.config.flush_on_shutdown_seconds
        if not seconds or not self._tiers:
            return
        deadline = self._clock() + seconds
        came = threading.Event()
        assert self._supervisor is not None
        self._supervisor.on_message(came.set)
        try:
            while self._supervisor.up and self._clock() < deadline:
                came.clear()
                self.poll()
                self.end_step()
                if not self._planner.stores.cascades and not any(
                    tier.backlog or tier.refused for tier in self._tiers
                ):
                    break
                came.wait(min(0.2, max(0.0, deadline - self._clock())))
        finally:
            self._supervisor.on_message(None)
        left = len(self._index.oldest_unsaved(self.geometry.num_slots))
        if left:
            log.warning("%d chunks were not saved within %g seconds", left, seconds)

    def on_message(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called, from any thread, when ``poll`` has something to take."""
        if self._supervisor is not None:
            self._supervisor.on_message(wake)

    def on_new_request(self, context: RequestContext) -> None:
        """A request has come; optional, the first call that names it does the same."""
        self._planner.request(context)

    def lookup(self, key: bytes, context: RequestContext) -> Lookup:
        """Whether one chunk can be loaded now. O(1), no allocation beyond the request's record."""
        if not self._polled:
            self.poll()
        state = self._lookup(key)
        planner = self._planner
        # One call less for each key of a prompt: model servers ask key by key.
        request = planner.requests.get(context.request_id)
        if request is None:
            request = planner.request(context)
        if state == READY:
            if self._verify and planner.verifier.due(key, request):
                return planner.verify(key, request, self._now)
            if request.hits:
                request.hits.append(key)
            else:
                planner.hit(key, request)
            return _HIT
        return planner.absent(key, state, request, self._now)

    def lookup_batch(self, keys: Sequence[bytes], context: RequestContext) -> tuple[int, Lookup]:
        """Length of the prefix of `keys` that can be loaded now, and the answer for what follows.

        Keys beyond the first miss are not asked for. MISS also when all are ready. While more is to
        come (any other answer) the length is that of the last look, which may be 50 ms old.
        """
        if not self._polled:
            self.poll()
        request = self._planner.request(context)
        if self._now < request.answer_until and request.chunks.repeats(keys):
            # It waits, and there is no news: what it may have is held, so the answer is the same.
            return request.answer
        if self._verify:
            return self._lookup_verified(keys, context)
        return self._planner.look(keys, request, self._now)

    def _lookup_verified(
        self, keys: Sequence[bytes], context: RequestContext
    ) -> tuple[int, Lookup]:
        ready, answer = 0, Lookup.MISS
        for key in keys:
            one = self.lookup(key, context)
            if one is Lookup.MISS:
                break
            if one is Lookup.HIT and answer is Lookup.MISS:
                ready += 1
            elif one is not Lookup.HIT and answer is Lookup.MISS:
                answer = one
        return ready, answer

    def holds(self, key: bytes) -> bool:
        """Whether host memory has the chunk, or is just getting it. Asks no tier."""
        return self._lookup(key) != 0

    def source(self, key: bytes, context: RequestContext) -> str:
        """Name of the tier that a request's chunk came from; "host" if it was there."""
        tier = self.sources(context).get(key)
        return "host" if tier is None else self._tiers[tier].name

    def sources(self, context: RequestContext) -> dict[bytes, int]:
        """The request's chunks that came from a tier, and its position; stays up to date."""
        request = self._planner.requests.get(context.request_id)
        return {} if request is None else request.sources

    def make_room(self, n: int, group: int = 0) -> int:
        """Evict chunks that a tier holds until `n` slots are free for chunks of `group`; returns
        how many are.

        For callers that can wait: what only host memory holds stays.
        """
        shortage = n - self._index.free_for(group)
        if shortage > 0:
            self._planner.state.evicted(self._index.keep_free(n, shortage, group))
        return self._index.free_for(group)

    def reserve(
        self,
        keys: Sequence[bytes],
        context: RequestContext,
        offered: Sequence[bytes] | None = None,
    ) -> Reservation:
        """Slots for new chunks, in WRITING; see ``Index.reserve``.

        Parameters
        ----------
        offered : sequence of bytes, optional
            Where the caller is not to store all that it was offered: all of it, `keys` included.
            It counts for the ``store_threshold`` of tiers.
        """
        if not self._polled:
            self.poll()
        reservation = self._planner.reserve(keys, self._planner.request(context), offered)
        if not reservation.complete:
            self._recorder.add("kvtier_store_refused_chunks_total", 1)
        return reservation

    def commit(self, keys: Sequence[bytes], context: RequestContext) -> list[bytes]:
        """The bytes of these chunks are in host memory. Returns those that became READY now."""
        stored = self._planner.commit(keys, context)
        # While there are requests a step follows, whose end sends the cascades of all its commits.
        if stored and not self._planner.requests:
            self._planner.flush_stores(self._clock())
            self._send()
        return stored

    def abort(self, keys: Sequence[bytes], context: RequestContext) -> int:
        """These chunks will not be written; their slots are free again."""
        return self._index.abort(keys)

    def pin(
        self, keys: Sequence[bytes], context: RequestContext
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Pin chunks that a lookup has answered HIT: slots and generations, in order.

        Raises
        ------
        KeyError
            If one of them is not READY; nothing is pinned then.
        """
        pinned = self._index.pin(keys)
        self._planner.use(keys, context)
        return pinned

    def unpin(
        self,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint32],
        context: RequestContext | None = None,
    ) -> None:
        """The copies out of these slots have ended."""
        self._index.unpin(slots, generations)

    def touch(self, keys: Sequence[bytes], context: RequestContext) -> None:
        """The request uses these chunks, though it neither loads nor stores them: the accelerator
        has them. They count as used when it finishes."""
        self._planner.request(context).use(keys)

    def finish_request(self, context: RequestContext, used: dict[bytes, int] | None = None) -> None:
        """The request has ended: its chunks are touched, suffix before prefix; what it waited
        for is let go.

        Parameters
        ----------
        used : dict of bytes to int, optional
            End positions of all chunks of the request, where the caller knows them, in place of
            those that it loaded, stored or touched.
        """
        self._planner.finish(context, used)
        if not self._planner.requests:
            self._planner.flush_stores(self._clock())
        self._send()

    def release(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> int:
        """Slots that were in WRITING at a reset, and whose writer has ended since."""
        return self._index.release(slots, generations)

    def end_step(self) -> None:
        """Once a scheduler step, after its last lookup."""
        started = time.perf_counter()
        if not self._polled:
            self.poll()
        self._flush()
        self._polled = False
        self._recorder.observe(
            "kvtier_scheduler_seconds", time.perf_counter() - started, ("end_step",)
        )
        if self._now >= self._metrics_at:
            self._metrics_at = self._now + METRICS_SECONDS
            self.publish_metrics()

    def poll(self) -> None:
        """Take the service's answers. The first call of a step does it by itself."""
        if self._closed:
            raise ClosedError("the engine is closed")
        self._polled = True
        self._now = self._clock()
        if self._growing:
            self._grow()
        if self._supervisor is not None:
            self._supervisor.poll(self._now, self.namespace)

    def has_pending_work(self) -> bool:
        """Always False: the service works alone and needs no steps."""
        return False

    def _flush(self) -> None:
        self._now = self._clock()
        self._planner.flush(self._now)
        self._send()

    def _send(self) -> None:
        if self._planner.state.out:
            out = self._planner.take_out()
            assert self._supervisor is not None  # there is something to say only to a service
            self._supervisor.send(out)

    def _grow(self) -> None:
        available = self.region.available_slots
        if available > self._index.available:
            self._index.grow(available)
        self._growing = available < self.geometry.num_slots

    def _take(self, message: m.ToOwner) -> None:
        match message:
            case m.Samples() | m.Events():
                self._outlets.take(message)
            case m.Resources():
                if message.number == self._audits:  # not an answer to an earlier question
                    self.resources = message
            case m.Closed():
                log.error("the tier service has ended by itself: %s", message.error or "no error")
            case _:
                self._planner.take(message, self._now)

    def reset(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Forget every chunk, here and (``on_reset: new_epoch``) in the tiers, without waiting.

        Returns
        -------
        slots, generations
            Slots that a worker still writes: the caller ``release``\\ s each when its transfer has
            ended. Nothing finds them any more.
        """
        if self.config.on_reset == "new_epoch":
            self.namespace = with_epoch(self.namespace, new_epoch())
            self.events.epoch = self.namespace["epoch"]
        self._recorder.add("kvtier_resets_total", 1, (self.config.on_reset,))
        orphans = self._planner.reset(self.namespace)
        self._flush()
        return orphans

    def publish_metrics(self) -> None:
        """Bring the registry up to date. ``end_step`` does it twice a second."""
        if not self._has_let_go:
            self._outlets.publish(self._index, self._planner)

    def stats(self) -> EngineStats:
        """Counters since the start."""
        self.publish_metrics()
        return self._outlets.stats()

    def audit(self) -> None:
        """Ask the service what it holds; `resources` is None until ``poll`` has its answer.

        Its metrics come with it. For leak checks.
        """
        self.resources = None
        self._audits += 1
        if self._supervisor is not None and self._supervisor.up:
            self._supervisor.carrier.send([m.Audit(self._audits)])

    @property
    def idle(self) -> bool:
        """No job is under way and nothing waits to be sent."""
        return self._planner.idle

    def check(self) -> None:
        """Walk all invariants of section 11 that one process can see; InternalError otherwise."""
        self._index.check()
        self.cache.usage()
        self._planner.check()


def open_engine(
    config: Config, geometry: Geometry, namespace: Mapping[str, str] | None = None
) -> tuple[Engine, Region]:
    """Engine with a region of its own, for use without a model server.

    Parameters
    ----------
    namespace : mapping, optional
        What must agree before instances may share bytes: model, weights, dtype, layout (see
        ``kvtier.namespace.library_namespace``). Shape and format are added here.

    Returns
    -------
    engine, region
        The engine closes the region.

    Raises
    ------
    ConfigError
    """
    if not namespace and not config.namespace and config.tiers:
        log.warning(
            "no namespace given: chunks of equal keys and sizes are taken for equal, whichever "
            "model they belong to; give at least namespace={'model': ..., 'kv_dtype': ...}"
        )
    fields = dict(namespace or {"model": "unnamed"})
    fields |= {"groups": describe_groups(geometry), "format_version": FORMAT_VERSION}
    fields = merged(fields, config.namespace)
    region = Region.create(
        f"engine-{os.getpid()}-{os.urandom(8).hex()}",
        geometry,
        fields,
        ranks=1,
        directory=config.directory,
    )
    try:
        region.sign(0)
        region.populate(lambda _: None)
        engine = Engine(config, region, own_region=True)
        engine.open()
    except BaseException:
        region.close()
        raise
    return engine, region
