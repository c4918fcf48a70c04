# SPDX-License-Identifier: Apache-2.0
"""What the engine tells the world: metrics, events, health, and the places where they are read.

Owns the registry, the event bus and, while open, the metrics endpoint and the event publisher.
Called by the owner's thread; ``health`` by the endpoint's, which reads only what is replaced as a
whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvtier._core.index import Index
from kvtier.config import Config
from kvtier.engine.planner import Planner
from kvtier.engine.state import TierState
from kvtier.errors import ConfigError
from kvtier.obs.events import Event, EventBus, Operation
from kvtier.obs.http import HttpEndpoint, HttpThread, TierHealth
from kvtier.obs.metrics import METRICS, Recorder, Registry, Sample
from kvtier.obs.publisher import Publisher
from kvtier.runtime import messages as m
from kvtier.types import Geometry, Outcome, key_group

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


class Outlets:
    """Metrics and events of one engine.

    Parameters
    ----------
    config : Config
    geometry : Geometry
    recorder : Recorder
        Of the owner's thread.
    epoch : str
        Of the namespace.
    replica : int
        See ``Engine``.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        recorder: Recorder,
        epoch: str,
        replica: int = 0,
    ) -> None:
        self.registry = Registry(METRICS)
        self.events = EventBus(epoch=epoch)
        self.tiers: Sequence[TierState] = ()
        """Set once, by the engine, when it knows them."""
        self._config = config
        self._replica = replica
        self._geometry = geometry
        self._size_groups = geometry.size_groups
        self._chunk_bytes = geometry.chunk_bytes
        self._payload_bytes = geometry.payload_bytes
        self._recorder = recorder
        self._http: HttpThread | None = None
        self._publisher: Publisher | None = None
        self._events_dropped = 0

    def open(self) -> None:
        """Open the endpoint and the event stream, where they are asked for."""
        metrics, events = self._config.metrics, self._config.events
        if events.endpoint is not None:
            publisher = Publisher(self.events, events, self._replica)
            publisher.open()
            self._publisher = publisher
        if metrics.port is not None:
            port = metrics.port + self._replica
            if port > 65535:
                raise ConfigError(f"metrics.port: replica {self._replica} would take port {port}")
            http = HttpThread(HttpEndpoint(self.registry.render, self.health, metrics.host, port))
            http.open()
            self._http = http

    def close(self) -> None:
        """Close both. Idempotent."""
        http, self._http = self._http, None
        publisher, self._publisher = self._publisher, None
        if http is not None:
            http.close()
        if publisher is not None:
            publisher.close()

    def health(self) -> list[TierHealth]:
        """State of each tier."""
        states = [TierHealth("host", "up")]
        for tier in self.tiers:
            if tier.readable and tier.writable:
                states.append(TierHealth(tier.name, "up"))
            elif tier.readable or tier.writable:
                states.append(TierHealth(tier.name, "degraded", tier.cause))
            else:
                states.append(TierHealth(tier.name, "down", tier.cause or "the service is down"))
        return states

    def take(self, message: m.Samples | m.Events) -> None:
        """What the service has counted, or what its tiers did by themselves."""
        if isinstance(message, m.Samples):
            self.registry.apply(_samples.decode(message.data), source="service")
        elif self.events.active:
            self.events.emit_many(_events.decode(message.data))

    def emit(
        self,
        operation: Operation,
        keys: Sequence[bytes],
        source: str | None,
        destination: str | None,
    ) -> None:
        """Tell of `keys`; counted, and made into events only if anybody listens."""
        self._recorder.add("kvtier_events_total", len(keys) or 1, (operation,))
        if not self.events.active:
            return
        changed = destination if operation == "stored" else source
        medium: str = "CPU"
        locality: str | None = "LOCAL"
        for tier in self.tiers:
            if tier.name == changed:
                medium, locality = tier.medium, tier.locality
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
                    self._payload_bytes[group],
                )
            )

    def publish(self, index: Index, planner: Planner) -> None:
        """Bring the registry up to date."""
        recorder = self._recorder
        capacity_bytes = index.available * self._geometry.slot_bytes
        recorder.set("kvtier_host_capacity_bytes", capacity_bytes)
        recorder.set("kvtier_host_slots", index.num_free, ("free",))
        recorder.set("kvtier_host_slots", index.num_writing, ("writing",))
        recorder.set("kvtier_host_slots", index.num_ready, ("ready",))
        taken_bytes = sum(index.ready_for(i) * self._chunk_bytes[i] for i in self._size_groups)
        if capacity_bytes:
            recorder.set("kvtier_host_fill_ratio", taken_bytes / capacity_bytes)
        if taken_bytes:
            recorder.set("kvtier_host_padding_ratio", 1 - index.ready_bytes / taken_bytes)
        loads = planner.loads
        recorder.set("kvtier_held_chunks", loads.held)
        recorder.set("kvtier_held_bytes", loads.taken_slots * self._geometry.slot_bytes)
        for tier in self.tiers:
            recorder.set("kvtier_inflight_bytes", tier.inflight_bytes, (tier.name, "store"))
            backlog = len(tier.backlog) + tier.handed_over
            recorder.set("kvtier_backlog_chunks", backlog, (tier.name,))
        if self._publisher is not None:
            dropped = self._publisher.dropped
            recorder.add("kvtier_events_dropped_total", dropped - self._events_dropped)
            self._events_dropped = dropped
        self.registry.apply(recorder.take(), source="owner")

    def stats(self) -> EngineStats:
        """Counters since the start, as of the last ``publish``."""
        value = self.registry.value
        names = [tier.name for tier in self.tiers]
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


def _int(value: float | None) -> int:
    return 0 if value is None or math.isnan(value) else int(value)
