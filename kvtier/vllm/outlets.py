# SPDX-License-Identifier: Apache-2.0
"""kvtier's metrics and events in vLLM's own streams.

Scheduler's thread. Owns what has been counted and has not been taken yet; bounded by the number of
series, and by the ring of the event bus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.config import HOST, Config
from kvtier.obs.metrics import METRICS, MetricDef, Sample
from kvtier.tiers.registry import tier_class

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    from kvtier.engine.engine import Engine
    from kvtier.obs.events import Event


def definitions(config: Config) -> list[MetricDef]:
    """All metrics of an engine with this configuration."""
    found = {definition.name: definition for definition in METRICS}
    for tier in config.tiers:
        found.update((one.name, one) for one in tier_class(tier).metric_definitions())
    return list(found.values())


def metadata(definition: MetricDef) -> OffloadingMetricMetadata:
    """A definition in vLLM's form."""
    if definition.kind == "counter":
        return OffloadingCounterMetadata(definition.help, definition.labels)
    if definition.kind == "gauge":
        return OffloadingGaugeMetadata(definition.help, definition.labels)
    return OffloadingHistogramMetadata(definition.help, definition.labels, definition.buckets)


class StatsOutlet:
    """Increases and levels since vLLM last asked.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self._definitions = {one.name: one for one in definitions(engine.config)}
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], tuple[float, list[int]]] = {}
        engine.registry.listen(self._add)

    def _add(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            key = (sample.name, sample.labels)
            if sample.buckets is not None:
                total, counts = self._histograms.get(key, (0.0, [0] * len(sample.buckets)))
                counts = [one + more for one, more in zip(counts, sample.buckets, strict=True)]
                self._histograms[key] = (total + sample.value, counts)
            elif self._definitions[sample.name].kind == "gauge":
                self._gauges[key] = sample.value
            else:
                self._counters[key] = self._counters.get(key, 0.0) + sample.value

    def take(self) -> OffloadingConnectorStats | None:
        """What has changed since the last call; None for nothing."""
        if not (self._counters or self._gauges or self._histograms):
            return None
        # lazy: takes half of vLLM with it, which is there when vLLM asks
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics

        stats = metrics.OffloadingConnectorStats()
        for (name, labels), value in self._counters.items():
            stats.increase_counter(name, value, labels)
        for (name, labels), value in self._gauges.items():
            stats.set_gauge(name, value, labels)
        for (name, labels), (total, counts) in self._histograms.items():
            for value in observations(self._definitions[name].buckets, counts, total):
                stats.observe_histogram(name, value, labels)
        self._counters.clear()
        self._gauges.clear()
        self._histograms.clear()
        return stats


def observations(bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterator[float]:
    """Values that fall into the same buckets and have the same sum: vLLM takes no buckets.

    Parameters
    ----------
    bounds : sequence of float
        Upper bounds, rising, without infinity.
    counts : sequence of int
        Observations of each bucket, the last one up to infinity.
    total : float
        Their sum.
    """
    lows = [0.0, *bounds]
    highs = [*bounds, max(total, 2 * bounds[-1])]
    least = sum(count * low for count, low in zip(counts, lows, strict=True))
    spread = sum(count * (high - low) for count, low, high in zip(counts, lows, highs, strict=True))
    # Each value as far into its bucket as all others; a bucket does not include its lower bound.
    part = min(1.0, max(1e-9, (total - least) / spread)) if spread else 1.0
    for count, low, high in zip(counts, lows, highs, strict=True):
        for _ in range(count):
            yield low + part * (high - low)


class EventOutlet:
    """kvtier's events as vLLM's: host memory always, a tier where ``enable_kv_events`` is set.

    A chunk that comes from a tier is in host memory before vLLM has been answered, and vLLM knows
    its tokens from that answer on: told earlier, it would be an event without them, of which
    routers make nothing. So it is told with its first load.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self._subscription = engine.events.subscribe()
        self._told = {HOST} | {tier.name for tier in engine.config.tiers if tier.enable_kv_events}
        self._found: list[OffloadingEvent] = []
        self._last: tuple[str, bool] | None = None
        # Came from a tier, and not told of; no more than host memory holds.
        self._promoted: dict[bytes, Event] = {}

    def take(self) -> Iterable[OffloadingEvent]:
        """Events since the last call; neighbours that say the same are one, with all their keys."""
        self._read()
        found, self._found, self._last = self._found, [], None
        return found

    def loaded(self, keys: Iterable[bytes]) -> None:
        """vLLM knows these chunks of host memory."""
        self._read()
        for key in keys:
            event = self._promoted.pop(key, None)
            if event is not None:
                self._add(event, HOST, False)

    def _read(self) -> None:
        for event in self._subscription.take():
            if event.operation == "cleared":
                self._promoted.clear()  # vLLM tells that itself
                continue
            for tier, removed in _changes(event):
                if tier not in self._told:
                    continue
                if tier == HOST and not removed and event.source:
                    self._promoted[event.key] = event
                elif tier == HOST and removed and event.key in self._promoted:
                    del self._promoted[event.key]
                else:
                    self._add(event, tier, removed)

    def _add(self, event: Event, tier: str, removed: bool) -> None:
        if (tier, removed) != self._last:
            self._found.append(_offloading_event(event, tier, removed))
            self._last = tier, removed
        self._found[-1].keys.append(event.key)


def _changes(event: Event) -> Iterator[tuple[str, bool]]:
    """Tiers that an event is of, and whether the chunk left them."""
    if event.operation in ("removed", "moved"):
        yield event.source, True
    if event.operation in ("stored", "moved"):
        yield event.destination, False


def _offloading_event(event: Event, tier: str, removed: bool) -> OffloadingEvent:
    host = tier == HOST
    return OffloadingEvent(
        keys=[],
        medium=Medium(event.medium),
        removed=removed,
        locality=None if host or event.locality is None else Locality(event.locality),
        ownership=None if host else tier,
        # A tier may drop chunks that nobody here hears of (another instance evicts them).
        removal_expected=host,
    )
