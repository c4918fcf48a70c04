# SPDX-License-Identifier: Apache-2.0
"""Metrics: one table of definitions, a recorder for hot paths, a registry that renders.

A ``Recorder`` belongs to one thread (or one loop) and only adds numbers; ``take`` gives what has
changed as plain samples, which may cross threads and processes. One ``Registry`` adds the samples
of all recorders up; it may be used from any thread and does no I/O under its lock. It renders
through ``prometheus_client`` but uses none of its value classes: with PROMETHEUS_MULTIPROC_DIR set
those write into the model server's directory, whichever registry they belong to.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvtier.errors import InternalError
from kvtier.obs.table import METRICS, MetricDef, validate

__all__ = ["METRICS", "MetricDef", "Recorder", "Registry", "Sample", "validate"]

Labels = tuple[str, ...]

_INFINITY = math.inf


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """What one series has done since the last ``take``."""

    name: str
    labels: Labels
    value: float
    """Counter: increase. Gauge: value. Histogram: increase of the sum."""
    buckets: tuple[int, ...] | None = None
    """Histogram: increase of each bucket (not cumulative), the last one up to infinity."""


class Recorder:
    """Adds numbers up until they are taken; for one thread.

    A call is a dictionary update. The series stay known after ``take``, so their number is bounded
    by the labels that are really used: never label by request, key or path.
    """

    __slots__ = ("_changed_gauges", "_counters", "_definitions", "_gauges", "_histograms")

    def __init__(self, definitions: Iterable[MetricDef] = METRICS) -> None:
        self._definitions = {definition.name: definition for definition in definitions}
        self._counters: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._changed_gauges: set[tuple[str, Labels]] = set()
        self._histograms: dict[tuple[str, Labels], _Buckets] = {}

    def add(self, name: str, value: float = 1.0, labels: Labels = ()) -> None:
        """Increase a counter.

        Raises
        ------
        InternalError
            If there is no such counter, the labels do not fit, or `value` is below zero.
        """
        key = (name, labels)
        if not 0.0 <= value < _INFINITY:
            raise InternalError(f"{name}: a counter cannot grow by {value!r}")
        try:
            self._counters[key] += value
        except KeyError:
            self._check("counter", key)
            self._counters[key] = float(value)

    def add_many(self, name: str, values: Iterable[tuple[Labels, float]]) -> None:
        """Increase several series of one counter."""
        for labels, value in values:
            self.add(name, value, labels)

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        """Set a gauge. InternalError if there is no such gauge or the labels do not fit."""
        key = (name, labels)
        if self._gauges.get(key) != value:
            if key not in self._gauges:
                self._check("gauge", key)
            self._gauges[key] = float(value)
            self._changed_gauges.add(key)

    def observe(self, name: str, value: float, labels: Labels = (), count: int = 1) -> None:
        """Note `count` observations of `value` in a histogram.

        Raises
        ------
        InternalError
            If there is no such histogram, the labels do not fit, or `value` is negative or NaN.
        """
        if not 0.0 <= value < _INFINITY:
            raise InternalError(f"{name}: cannot observe {value!r}")
        key = (name, labels)
        series = self._histograms.get(key)
        if series is None:
            series = self._histograms[key] = _Buckets(self._check("histogram", key).buckets)
        series.total += value * count
        series.counts[bisect_left(series.bounds, value)] += count
        series.changed = True

    def observe_many(self, name: str, values: Iterable[float], labels: Labels = ()) -> None:
        """Note several observations of one series."""
        for value in values:
            self.observe(name, value, labels)

    def take(self) -> list[Sample]:
        """What has changed since the last call; empty when nothing has."""
        samples = []
        for key, value in self._counters.items():
            if value:
                samples.append(Sample(*key, value))
                self._counters[key] = 0.0
        for key in self._changed_gauges:
            samples.append(Sample(*key, self._gauges[key]))
        self._changed_gauges.clear()
        for key, series in self._histograms.items():
            if series.changed:
                samples.append(Sample(*key, series.total, tuple(series.counts)))
                series.reset()
        return samples

    def _check(self, kind: str, key: tuple[str, Labels]) -> MetricDef:
        return _definition(self._definitions, kind, *key)


class Registry:
    """All series of an engine, added up from the samples of its recorders.

    Counters and histograms only grow, whoever counted; gauges belong to a source and go with it,
    so that a service that has died leaves no old levels behind.
    """

    def __init__(self, definitions: Sequence[MetricDef] = METRICS) -> None:
        validate(definitions)
        self._definitions = {definition.name: definition for definition in definitions}
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, dict[Labels, tuple[str, float]]] = {}
        self._histograms: dict[str, dict[Labels, _Buckets]] = {}
        self._listener: Callable[[Sequence[Sample]], None] | None = None
        self._collectors = CollectorRegistry(auto_describe=False)
        self._collectors.register(_Collector(self))
        for definition in definitions:
            # A series that nobody has touched yet is 0, not absent, where its labels are known.
            if definition.kind == "counter" and not definition.labels:
                self._counters[definition.name] = {(): 0.0}

    def declare(self, definitions: Sequence[MetricDef]) -> None:
        """Add definitions, such as those of a tier; the same ones twice are one.

        Raises
        ------
        InternalError
            If a name is declared already, differently.
        """
        validate(definitions)
        with self._lock:
            for definition in definitions:
                known = self._definitions.setdefault(definition.name, definition)
                if known != definition:
                    raise InternalError(f"metric {definition.name} is declared twice, differently")

    def listen(self, listener: Callable[[Sequence[Sample]], None]) -> None:
        """Have `listener` called with all samples from now on, on the thread that applies them."""
        self._listener = listener

    def apply(self, samples: Iterable[Sample], source: str = "owner") -> None:
        """Add samples. All of them, or none if one does not fit.

        Parameters
        ----------
        source : str
            Who took them; ``forget`` drops the gauges of a source.

        Raises
        ------
        InternalError
            If a name was not declared, or labels, kind or buckets do not fit.
        """
        with self._lock:
            checked = [(self._checked(sample), sample) for sample in samples]
            for definition, sample in checked:
                name, labels, value = sample.name, sample.labels, sample.value
                if definition.kind == "counter":
                    series = self._counters.setdefault(name, {})
                    series[labels] = series.get(labels, 0.0) + value
                elif definition.kind == "gauge":
                    self._gauges.setdefault(name, {})[labels] = (source, value)
                else:
                    histograms = self._histograms.setdefault(name, {})
                    if labels not in histograms:
                        histograms[labels] = _Buckets(definition.buckets)
                    histograms[labels].add(value, sample.buckets or ())
        if self._listener is not None:
            self._listener([sample for _, sample in checked])

    def forget(self, source: str) -> None:
        """Drop the gauges that `source` has set; call it when its process has ended."""
        with self._lock:
            for name, series in self._gauges.items():
                self._gauges[name] = {
                    labels: owned for labels, owned in series.items() if owned[0] != source
                }

    def value(self, name: str, labels: Labels = ()) -> float | None:
        """A counter's or gauge's value, a histogram's sum; None if it has none."""
        with self._lock:
            if name not in self._definitions:
                raise InternalError(f"metric {name} is not declared")
            if name in self._gauges and labels in self._gauges[name]:
                return self._gauges[name][labels][1]
            if name in self._histograms and labels in self._histograms[name]:
                return self._histograms[name][labels].total
            return self._counters.get(name, {}).get(labels)

    def series(self, name: str) -> dict[Labels, float]:
        """Labels to value of all series of one metric, as ``value`` gives them."""
        with self._lock:
            if name not in self._definitions:
                raise InternalError(f"metric {name} is not declared")
            found = dict(self._counters.get(name, {}))
            found.update((key, owned[1]) for key, owned in self._gauges.get(name, {}).items())
            found.update((key, one.total) for key, one in self._histograms.get(name, {}).items())
            return found

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._collectors)

    def _checked(self, sample: Sample) -> MetricDef:
        definition = self._definitions.get(sample.name)
        kind = definition.kind if definition is not None else ""
        definition = _definition(self._definitions, kind, sample.name, sample.labels)
        expected = len(definition.buckets) + 1 if kind == "histogram" else None
        if (len(sample.buckets) if sample.buckets is not None else None) != expected:
            raise InternalError(f"metric {sample.name}: its buckets are not those of its table")
        return definition

    def _families(self) -> Iterator[Metric]:
        """All series, copied under the lock and formatted without it.

        The scheduler's thread takes the lock to add its samples: a scrape must not hold it for the
        millisecond that formatting takes.
        """
        with self._lock:
            definitions = list(self._definitions.values())
            counters = {name: list(series.items()) for name, series in self._counters.items()}
            gauges = {name: list(series.items()) for name, series in self._gauges.items()}
            histograms = {
                name: [(labels, one.total, tuple(one.counts)) for labels, one in series.items()]
                for name, series in self._histograms.items()
            }
        for definition in definitions:
            name, labels, text = definition.name, definition.labels, definition.help
            if definition.kind == "counter":
                counter = CounterMetricFamily(name, text, labels=labels)
                for values, value in counters.get(name, ()):
                    counter.add_metric(values, value)
                yield counter
            elif definition.kind == "gauge":
                gauge = GaugeMetricFamily(name, text, labels=labels)
                for values, (_, value) in gauges.get(name, ()):
                    gauge.add_metric(values, value)
                yield gauge
            else:
                histogram = HistogramMetricFamily(name, text, labels=labels)
                for values, total, counts in histograms.get(name, ()):
                    histogram.add_metric(values, _cumulative(definition.buckets, counts), total)
                yield histogram


class _Collector(Collector):
    """What ``prometheus_client`` asks for the series at each scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        return self._registry._families()


class _Buckets:
    """One histogram series."""

    __slots__ = ("bounds", "changed", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.changed = False
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, total: float, counts: Sequence[int]) -> None:
        self.total += total
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]

    def reset(self) -> None:
        self.changed = False
        self.total = 0.0
        self.counts = [0] * len(self.counts)


def _cumulative(bounds: tuple[float, ...], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Rows of a histogram as Prometheus has them: observations up to each bound."""
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return [
        (name, float(count))
        for name, count in zip(names, itertools.accumulate(counts), strict=True)
    ]


def _definition(
    definitions: dict[str, MetricDef], kind: str, name: str, labels: Labels
) -> MetricDef:
    definition = definitions.get(name)
    if definition is None:
        raise InternalError(f"metric {name} is not declared")
    if definition.kind != kind:
        raise InternalError(f"metric {name} is a {definition.kind}, not a {kind}")
    if len(labels) != len(definition.labels) or not all(isinstance(v, str) for v in labels):
        raise InternalError(f"metric {name} has the labels {definition.labels}, got {labels!r}")
    return definition
