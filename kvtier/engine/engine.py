# SPDX-License-Identifier: Apache-2.0
"""The engine as a scheduler sees it: plain calls that take microseconds and never wait.

Belongs to one thread, the owner's. Owns the index of one region, the planner and the carrier of the
tier service. A step is: any calls, the first of which takes the service's answers, then
``end_step``, which sends what the step has decided. ``commit``, ``finish_request`` and ``reset``
send as well, because the last one of a burst may be followed by no step at all.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier._core.index import Reservation
from kvtier.config import Config
from kvtier.engine.planner import Planner, TierState
from kvtier.errors import ClosedError, ConfigError, InternalError, TierLostError
from kvtier.host.cache import HostCache
from kvtier.host.region import Region, sweep
from kvtier.namespace import FORMAT_VERSION, describe_groups, merged, new_epoch, with_epoch
from kvtier.obs.events import Event, EventBus, Operation
from kvtier.obs.http import HttpEndpoint, HttpThread, TierHealth
from kvtier.obs.metrics import METRICS, Recorder, Registry, Sample
from kvtier.obs.publisher import Publisher
from kvtier.runtime import messages as m
from kvtier.runtime.carrier import Carrier
from kvtier.runtime.process import ProcessCarrier
from kvtier.runtime.service import Memory
from kvtier.runtime.thread import ThreadCarrier
from kvtier.tiers.registry import check_options, is_adapted, tier_class
from kvtier.types import Geometry, Lookup, Outcome, RequestContext, key_group

log = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Process start and the tiers' self-tests; the latter have five seconds of it."""

METRICS_SECONDS = 0.5
RESTART_SECONDS = 0.5
MAX_RESTART_SECONDS = 30.0
STABLE_SECONDS = 300.0
"""A service that lived this long starts again without a longer pause."""

READY = 2
_HIT = Lookup.HIT

_samples = msgspec.msgpack.Decoder(list[Sample])
_events = msgspec.msgpack.Decoder(list[Event])


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start; the same numbers as in the metrics."""

    host_hits: int
    host_misses: int
    tier_hits: dict[str, int]
    loaded_bytes: dict[str, int]
    stored_bytes: dict[str, int]
    evicted: int
    evicted_unsaved: int
    failures: dict[str, int]
    """Chunks by cause."""


class Engine:
    """Scheduler-facing side of kvtier.

    Parameters
    ----------
    config : Config
    region : Region
        Created by the workers, or by the caller; closed by ``close`` if `own_region`.
    own_region : bool
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
        clock: Callable[[], float] = time.monotonic,
        carrier: Carrier | None = None,
    ) -> None:
        self.config = config
        self.region = region
        self.geometry: Geometry = region.geometry
        self.namespace = dict(region.namespace)
        self.registry = Registry(METRICS)
        self.events = EventBus(epoch=self.namespace.get("epoch", ""))
        self._own_region = own_region
        self._http: HttpThread | None = None
        self._publisher: Publisher | None = None
        self._clock = clock
        self._recorder = Recorder()
        self.cache = HostCache(
            region.records,
            region.table,
            self.geometry,
            policy=config.policy,
            track_unsaved=bool(config.tiers),
        )
        self._index = self.cache.index
        self._carrier = carrier if carrier is not None else self._make_carrier()
        self._tiers = self._tier_states()
        self._planner = Planner(
            self._index,
            self.cache.slots,
            self.geometry,
            config,
            self._tiers,
            self._recorder,
            self._emit,
        )
        self._lookup = self._index.lookup
        self._verify = config.verify_host != "off"
        self._polled = False
        self._closed = False
        self._now = clock()
        self._metrics_at = 0.0
        self._restarts = 0
        self._started_at = self._now
        self._restart_at: float | None = None
        self._restarter: threading.Thread | None = None
        self._service_up = False
        # A forked child does not have the region's memory: one touch of it would be a SIGSEGV.
        os.register_at_fork(after_in_child=_AfterFork(self))
        self.resources: m.Resources | None = None

    def _make_carrier(self) -> Carrier | None:
        if not self.config.tiers and self.config.verify_host == "off":
            return None
        adapted = [tier.name for tier in self.config.tiers if is_adapted(tier)]
        if self.config.isolation == "process" and adapted:
            # Their classes expect to live beside the scheduler.
            log.info("isolation: thread instead of process, because of %s", ", ".join(adapted))
        elif self.config.isolation == "process":
            return ProcessCarrier(
                self.config,
                self.namespace,
                self.region.fileno(),
                log.getEffectiveLevel(),
            )
        region = self.region

        def memory() -> Memory:
            return Memory(region)

        return ThreadCarrier(self.config, self.namespace, memory)

    def _tier_states(self) -> list[TierState]:
        states = []
        # What is on its way to tiers is pinned: all tiers together may pin half the host's memory.
        region_bytes = self.geometry.num_slots * self.geometry.slot_bytes
        most = region_bytes // (2 * max(1, len(self.config.tiers)))
        for position, tier_config in enumerate(self.config.tiers):
            check_options(tier_config, f"tiers[{position}]")
            kind = tier_class(tier_config)
            self.registry.declare(kind.metric_definitions())
            states.append(
                TierState(
                    tier_config,
                    kind.medium,
                    tier_config.locality or kind.locality,
                    min(tier_config.max_inflight_bytes, most),
                    self.geometry.num_slots,
                )
            )
        return states

    # --- life ---

    def open(self) -> None:
        """Start the tier service and wait for the tiers' self-tests.

        Raises
        ------
        ConfigError
            A tier says that something has to be changed; the service has been ended again.
        """
        self._grow()
        self.publish_metrics()
        try:
            self._open_outlets()
            self._open_service()
        except BaseException:
            self._close_outlets()
            raise
        padding = ", ".join(
            f"group {group}: {ratio:.1%}" for group, ratio in self.region.padding_ratio.items()
        )
        log.info(
            "host memory: %d slots of %d bytes, padding %s; tiers: %s",
            self.geometry.num_slots,
            self.geometry.slot_bytes,
            padding,
            ", ".join(tier.name for tier in self._tiers) or "none",
        )

    def _open_outlets(self) -> None:
        """Metrics endpoint and event stream, where they are asked for."""
        metrics, events = self.config.metrics, self.config.events
        if events.endpoint is not None:
            publisher = Publisher(self.events, events)
            publisher.open()
            self._publisher = publisher
        if metrics.port is not None:
            http = HttpThread(
                HttpEndpoint(self.registry.render, self._health, metrics.host, metrics.port)
            )
            http.open()
            self._http = http

    def _close_outlets(self) -> None:
        http, self._http = self._http, None
        publisher, self._publisher = self._publisher, None
        if http is not None:
            http.close()
        if publisher is not None:
            publisher.close()

    def _health(self) -> list[TierHealth]:
        """For the endpoint's thread: reads only what is replaced as a whole."""
        states = [TierHealth("host", "up")]
        for tier in self._tiers:
            if tier.readable and tier.writable:
                states.append(TierHealth(tier.name, "up"))
            elif tier.readable or tier.writable:
                states.append(TierHealth(tier.name, "degraded", tier.cause))
            else:
                states.append(TierHealth(tier.name, "down", tier.cause or "the service is down"))
        return states

    def _open_service(self) -> None:
        if self._carrier is None:
            return
        try:
            messages = self._carrier.start(START_SECONDS)
        except TierLostError as exc:
            # The model server starts without its tiers rather than not at all.
            log.error("%s; going on with host memory, and trying again", exc)
            self._restart_at = self._clock() + RESTART_SECONDS
            return
        ready = [message for message in messages if isinstance(message, m.Ready)][-1]
        wrong = [
            f"tier {tier.name}: {cause}"
            for tier, cause, fatal in zip(self._tiers, ready.causes, ready.fatal, strict=True)
            if fatal
        ]
        if wrong:
            self._carrier.close(self._clock() + 1.0)
            raise ConfigError("; ".join(wrong))
        for message in messages:
            self._take(message)
        self._service_up = True
        self._recorder.set("kvtier_service_up", 1.0)

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
            error = ""
            if self._restarter is not None:
                self._restarter.join()
            if self._carrier is not None:
                error = self._carrier.close(self._clock() + deadline_seconds)
            if self._own_region:
                self.region.close()
            self._close_outlets()
        if error:
            raise TierLostError(error)

    def _save_unsaved(self) -> None:
        seconds = self.config.flush_on_shutdown_seconds
        if not seconds or not self._tiers:
            return
        deadline = self._clock() + seconds
        came = threading.Event()
        assert self._carrier is not None
        self._carrier.on_message(came.set)
        try:
            while self._service_up and self._clock() < deadline:
                came.clear()
                self.poll()
                self.end_step()
                if not self._planner.cascades and not any(t.backlog for t in self._tiers):
                    break
                came.wait(min(0.2, max(0.0, deadline - self._clock())))
        finally:
            self._carrier.on_message(None)
        left = len(self._index.oldest_unsaved(self.geometry.num_slots))
        if left:
            log.warning("%d chunks were not saved within %g seconds", left, seconds)

    def on_message(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called, from any thread, when ``poll`` has something to take."""
        if self._carrier is not None:
            self._carrier.on_message(wake)

    # --- lookups ---

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
                planner.hit((key,), request)
            return _HIT
        return planner.absent(key, state, request, self._now)

    def lookup_batch(self, keys: Sequence[bytes], context: RequestContext) -> tuple[int, Lookup]:
        """Length of the prefix of `keys` that can be loaded now, and the answer for what follows.

        Keys beyond the first miss are not asked for. MISS also when all are ready.
        """
        if not self._polled:
            self.poll()
        if self._verify:
            return self._lookup_verified(keys, context)
        ready, states = self._index.lookup_batch(keys)
        request = self._planner.request(context)
        if ready:
            self._planner.hit(keys[:ready], request)
        if ready == len(keys):
            return ready, Lookup.MISS
        return ready, self._planner.absent_batch(keys, states, ready, request, self._now)

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
        request = self._planner.requests.get(context.request_id)
        tier = None if request is None else request.sources.get(key)
        return "host" if tier is None else self._tiers[tier].name

    # --- transfers of the accelerator ---

    def make_room(self, n: int) -> int:
        """Evict chunks that a tier holds until `n` slots are free; returns how many are.

        For callers that can wait: what only host memory holds stays.
        """
        shortage = n - self._index.num_free
        if shortage > 0:
            self._planner.evicted(self._index.keep_free(n, limit=shortage), ())
        return self._index.num_free

    def reserve(self, keys: Sequence[bytes], context: RequestContext) -> Reservation:
        """Slots for new chunks, in WRITING; see ``Index.reserve``."""
        if not self._polled:
            self.poll()
        reservation = self._planner.reserve(keys, self._planner.request(context))
        if not reservation.complete:
            self._recorder.add("kvtier_store_refused_chunks_total", 1)
        return reservation

    def commit(self, keys: Sequence[bytes], context: RequestContext) -> list[bytes]:
        """The bytes of these chunks are in host memory. Returns those that became READY now."""
        request = self._planner.requests.get(context.request_id)
        stored = self._planner.commit(keys, request)
        if stored and self._carrier is not None:
            self._flush()
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
        request = self._planner.request(context)
        request.use(keys)
        self._planner.release(request, keys)
        return pinned

    def unpin(
        self,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint32],
        context: RequestContext | None = None,
    ) -> None:
        """The copies out of these slots have ended."""
        self._index.unpin(slots, generations)

    def finish_request(self, context: RequestContext) -> None:
        """The request has ended: its chunks are touched, prefix first; what it waited for is
        let go."""
        self._planner.finish(context)
        if self._tiers:
            self._flush()

    def release(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> int:
        """Slots that were in WRITING at a reset, and whose writer has ended since."""
        return self._index.release(slots, generations)

    # --- the step ---

    def end_step(self) -> None:
        """Once a scheduler step, after its last lookup."""
        if not self._polled:
            self.poll()
        self._flush()
        self._polled = False
        if self._now >= self._metrics_at:
            self._metrics_at = self._now + METRICS_SECONDS
            self.publish_metrics()

    def poll(self) -> None:
        """Take the service's answers. The first call of a step does it by itself."""
        if self._closed:
            raise ClosedError("the engine is closed")
        self._polled = True
        self._now = self._clock()
        self._grow()
        if self._carrier is None:
            return
        if self._service_up:
            for message in self._carrier.receive():
                self._take(message)
            if not self._carrier.alive:
                self._service_lost()
        else:
            self._revive()

    def has_pending_work(self) -> bool:
        """Always False: the service works alone and needs no steps."""
        return False

    def _flush(self) -> None:
        self._now = self._clock()
        planner = self._planner
        planner.flush(self._now)
        if not planner.out:
            return
        out, planner.out = planner.out, []
        if self._carrier is None or not self._service_up:
            planner.undeliverable(out)
        elif not self._carrier.send(out):
            self._recorder.add("kvtier_service_overload_total", 1)
            planner.undeliverable(out)

    def _grow(self) -> None:
        available = self.region.available_slots
        if available > self._index.capacity:
            self._index.grow(available)

    def _take(self, message: m.ToOwner) -> None:
        match message:
            case m.Samples():
                self.registry.apply(_samples.decode(message.data), source="service")
            case m.Events():
                self.events.emit_many(_events.decode(message.data))
            case m.Resources():
                self.resources = message
            case m.Closed():
                log.error("the tier service has ended by itself: %s", message.error or "no error")
            case _:
                self._planner.take(message, self._now)

    # --- the service's life ---

    def _service_lost(self) -> None:
        assert self._carrier is not None
        for message in self._carrier.receive():
            self._take(message)
        self._service_up = False
        if self._now - self._started_at > STABLE_SECONDS:
            self._restarts = 0
        # The exponent is bounded: 2**1024 is no float, and a night has that many restarts.
        pause = min(RESTART_SECONDS * 2 ** min(self._restarts, 30), MAX_RESTART_SECONDS)
        self._restarts += 1
        self._restart_at = self._now + pause
        log.error("the tier service has died; starting another in %.1f seconds", pause)
        self.registry.forget("service")
        self._recorder.set("kvtier_service_up", 0.0)
        self._planner.service_lost()

    def _revive(self) -> None:
        """A dead service: take its pins back, a part a step, then start a new one."""
        assert self._carrier is not None
        if self._restarter is not None:
            if self._restarter.is_alive():
                return
            self._restarter = None
            for message in self._carrier.receive():
                self._take(message)
            self._service_up = self._carrier.alive
            if self._service_up:
                self._started_at = self._now
                self._recorder.set("kvtier_service_up", 1.0)
            else:
                self._restart_at = self._now + MAX_RESTART_SECONDS
            return
        if not self._planner.clear_pins() or self._restart_at is None:
            return
        if self._now < self._restart_at:
            return
        self._restart_at = None
        self._recorder.add("kvtier_service_restarts_total", 1)
        # Starting a process takes milliseconds, which the scheduler's thread does not have.
        self._restarter = threading.Thread(target=self._restart, name="kvtier-restart")
        self._restarter.start()

    def _restart(self) -> None:
        assert self._carrier is not None
        try:
            self._carrier.restart(self.namespace)
        except (OSError, InternalError):
            log.exception("the tier service could not be started again")

    # --- reset ---

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

    # --- metrics and events ---

    def _emit(
        self,
        operation: Operation,
        keys: Sequence[bytes],
        source: str | None,
        destination: str | None,
    ) -> None:
        self._recorder.add("kvtier_events_total", len(keys) or 1, (operation,))
        if not self.events.active:
            return
        changed = destination if operation == "stored" else source
        medium, locality = "CPU", "LOCAL"
        for tier in self._tiers:
            if tier.name == changed:
                medium, locality = tier.medium, tier.locality
        payload_bytes = self.geometry.payload_bytes
        if operation == "cleared":
            self.events.emit(
                Event(operation, source=source or "", medium=medium, locality=locality)
            )
            return
        for key in keys:
            group = key_group(key)
            self.events.emit(
                Event(
                    operation,
                    key,
                    group,
                    source or "",
                    destination or "",
                    locality,
                    medium,
                    payload_bytes[group],
                )
            )

    def publish_metrics(self) -> None:
        """Bring the registry up to date. ``end_step`` does it twice a second."""
        index, recorder = self._index, self._recorder
        slot_bytes = self.geometry.slot_bytes
        recorder.set("kvtier_host_capacity_bytes", index.capacity * slot_bytes)
        recorder.set("kvtier_host_slots", index.num_free, ("free",))
        recorder.set("kvtier_host_slots", index.num_writing, ("writing",))
        recorder.set("kvtier_host_slots", index.num_ready, ("ready",))
        if index.capacity:
            recorder.set("kvtier_host_fill_ratio", index.num_ready / index.capacity)
        ready_bytes = index.num_ready * slot_bytes
        if ready_bytes:
            recorder.set("kvtier_host_padding_ratio", 1 - index.ready_bytes / ready_bytes)
        recorder.set("kvtier_held_chunks", self._planner.held)
        recorder.set("kvtier_held_bytes", (self._planner.held + self._planner.lent) * slot_bytes)
        for tier in self._tiers:
            recorder.set("kvtier_inflight_bytes", tier.inflight_bytes, (tier.name, "store"))
        self.registry.apply(recorder.take(), source="owner")

    def stats(self) -> EngineStats:
        """Counters since the start."""
        self.publish_metrics()
        value = self.registry.value
        names = [tier.name for tier in self._tiers]
        return EngineStats(
            host_hits=_int(value("kvtier_lookup_chunks_total", ("host", "hit"))),
            host_misses=_int(value("kvtier_lookup_chunks_total", ("host", "miss"))),
            tier_hits={
                name: _int(value("kvtier_lookup_chunks_total", (name, "hit"))) for name in names
            },
            loaded_bytes={
                name: _int(value("kvtier_transfer_bytes_total", (name, "load"))) for name in names
            },
            stored_bytes={
                name: _int(value("kvtier_transfer_bytes_total", (name, "store"))) for name in names
            },
            evicted=_int(value("kvtier_evicted_total")),
            evicted_unsaved=_int(value("kvtier_evicted_unsaved_total")),
            failures=self._failures(),
        )

    def _failures(self) -> dict[str, int]:
        causes: dict[str, int] = {}
        for (_, _, outcome), count in self.registry.series("kvtier_chunks_total").items():
            if Outcome[outcome.upper()].failed:
                causes[outcome] = causes.get(outcome, 0) + int(count)
        return causes

    def audit(self) -> None:
        """Ask the service what it holds; `resources` is None until ``poll`` has its answer.

        Its metrics come with it. For leak checks.
        """
        self.resources = None
        if self._carrier is not None and self._service_up:
            self._carrier.send([m.Audit()])

    @property
    def idle(self) -> bool:
        """No job is under way and nothing waits to be sent."""
        planner = self._planner
        return not (
            planner.finds
            or planner.cascades
            or planner.verifier.jobs
            or planner.out
            or planner.reset_pending
            or any(tier.backlog and tier.writable for tier in self._tiers)
        )

    def check(self) -> None:
        """Walk all invariants of section 11 that one process can see; InternalError otherwise."""
        self._index.check()
        self.cache.usage()
        planner = self._planner
        held = sum(len(request.held) for request in planner.requests.values())
        if held != planner.held:
            raise InternalError(f"{held} chunks are held, {planner.held} counted")
        lent = sum(len(find.lent) for find in planner.finds.values() if not find.stale)
        if lent != planner.lent or lent != self._index.num_lent:
            raise InternalError(
                f"{lent} slots are lent, {planner.lent} counted, {self._index.num_lent} indexed"
            )
        for i, tier in enumerate(self._tiers):
            inflight = sum(
                cascade.length_bytes for cascade in planner.cascades.values() if i in cascade.tiers
            )
            if inflight != tier.inflight_bytes:
                raise InternalError(
                    f"{tier.name}: {inflight} bytes are in flight, {tier.inflight_bytes} counted"
                )


class _AfterFork:
    """Takes the forked child's engine out of use; must not keep the engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            forked: Any = _Forked()
            engine._closed = True
            engine._index = engine._planner = forked
            engine._lookup = forked.refuse


class _Forked:
    """Stands for index and planner in a forked child."""

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    def refuse(self, *args: object) -> NoReturn:
        """What every call comes to."""
        raise ClosedError(
            "the engine was opened before this process was forked, and its memory is the parent's: "
            "open one of your own"
        )


def _int(value: float | None) -> int:
    return 0 if value is None or math.isnan(value) else int(value)


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
    sweep(config.directory)
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
