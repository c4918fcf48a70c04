# SPDX-License-Identifier: Apache-2.0
"""The table of all metrics that kvtier itself has; ``docs/metrics.md`` is made from it.

Owns no state. Names follow Prometheus: base units, ``_total`` on counters and on nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvtier.errors import InternalError

Kind = Literal["counter", "gauge", "histogram"]


class MetricDef(msgspec.Struct, frozen=True):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, rising, without infinity."""


_NAME = re.compile(r"kvtier_[a-z0-9]+(?:_[a-z0-9]+)*")
_LABEL = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_RESERVED_SUFFIXES = ("_bucket", "_count", "_sum", "_created", "_info")


def validate(definitions: Sequence[MetricDef], *, tier: str | None = None) -> None:
    """Check definitions against the rules of the table.

    Parameters
    ----------
    tier : str, optional
        Type of the tier whose own metrics these are: their names start with ``kvtier_<type>_`` and
        their first label is ``tier``.

    Raises
    ------
    InternalError
    """
    seen: set[str] = set()
    for definition in definitions:
        name = definition.name

        def wrong(text: str, name: str = name) -> InternalError:
            return InternalError(f"metric {name}: {text}")

        if name in seen:
            raise wrong("is declared twice")
        seen.add(name)
        if not _NAME.fullmatch(name):
            raise wrong("a name is kvtier_ and lower-case words")
        if definition.kind not in ("counter", "gauge", "histogram"):
            raise wrong(f"there is no kind {definition.kind!r}")
        if name.endswith("_total") != (definition.kind == "counter"):
            raise wrong("counters end in _total, and nothing else does")
        if name.endswith(_RESERVED_SUFFIXES):
            raise wrong("ends in a suffix that Prometheus adds itself")
        if not definition.help:
            raise wrong("has no help text")
        if len(set(definition.labels)) != len(definition.labels) or not all(
            _LABEL.fullmatch(label) and label != "le" for label in definition.labels
        ):
            raise wrong(f"its labels {definition.labels} are no distinct lower-case words")
        if (definition.kind == "histogram") != bool(definition.buckets):
            raise wrong("a histogram has buckets, and nothing else has")
        if any(low >= high for low, high in itertools.pairwise(definition.buckets)):
            raise wrong("its buckets do not rise")
        if tier is not None:
            prefix = f"kvtier_{re.sub('[^a-z0-9]+', '_', tier.lower())}_"
            if not name.startswith(prefix):
                raise wrong(f"a metric of the tier {tier} starts with {prefix}")
            if definition.labels[:1] != ("tier",):
                raise wrong("the first label of a tier's own metric is tier")


CALL_BUCKETS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
"""Plain calls on the scheduler's thread."""
IO_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""Lookups and transfers, in memory or over a network."""

TIER = ("tier",)
DIRECTION = ("tier", "direction")

METRICS: tuple[MetricDef, ...] = (
    # Host memory
    MetricDef("kvtier_host_capacity_bytes", "gauge", "Host memory for chunks, reserved so far."),
    MetricDef(
        "kvtier_host_slots",
        "gauge",
        "Slots of host memory by state: free, writing, ready. With several size classes a slab "
        "without a chunk counts as free slots of the smallest.",
        ("state",),
    ),
    MetricDef("kvtier_host_fill_ratio", "gauge", "Share of host memory that chunks take."),
    MetricDef(
        "kvtier_host_padding_ratio",
        "gauge",
        "Share of the memory that ready chunks take that no payload uses: the rest of their slots, "
        "and their share in the ends of slabs that are too short for a further chunk.",
    ),
    MetricDef("kvtier_evicted_total", "counter", "Chunks evicted from host memory."),
    MetricDef(
        "kvtier_evicted_unsaved_total",
        "counter",
        "Chunks evicted from host memory that no other tier held: they are lost.",
    ),
    MetricDef(
        "kvtier_store_refused_chunks_total",
        "counter",
        "Chunks not taken into host memory, because all slots were pinned or being written.",
    ),
    MetricDef(
        "kvtier_store_skipped_chunks_total",
        "counter",
        "Chunks not taken into host memory, because they had not been offered often enough.",
    ),
    MetricDef(
        "kvtier_verified_chunks_total",
        "counter",
        "Chunks of host memory compared with their CRC-32C before a load, by result: ok, corrupt, "
        "unchecked (the tier service was down).",
        ("result",),
    ),
    # Lookups
    MetricDef(
        "kvtier_lookup_chunks_total",
        "counter",
        "Chunks asked for by tier and result: hit, miss. At host each counts once a request.",
        ("tier", "result"),
    ),
    MetricDef(
        "kvtier_lookup_seconds",
        "histogram",
        "Time from asking a tier for the chunks of a request to its answer.",
        TIER,
        IO_BUCKETS,
    ),
    # Transfers
    MetricDef(
        "kvtier_chunks_total",
        "counter",
        "Chunks by how their operation (store, load) at a tier ended; see the table of outcomes.",
        ("tier", "operation", "outcome"),
    ),
    MetricDef(
        "kvtier_transfer_bytes_total",
        "counter",
        "Payload bytes moved between host memory and a tier; direction store is to the tier.",
        DIRECTION,
    ),
    MetricDef(
        "kvtier_transfer_seconds",
        "histogram",
        "Time of one job of a tier.",
        DIRECTION,
        IO_BUCKETS,
    ),
    MetricDef("kvtier_inflight_bytes", "gauge", "Bytes on their way to a tier (store).", DIRECTION),
    MetricDef(
        "kvtier_backlog_chunks", "gauge", "Chunks put off until the tier has room for them.", TIER
    ),
    MetricDef(
        "kvtier_deferred_chunks_total",
        "counter",
        "Cascades put off because the tier's in-flight bound was reached.",
        TIER,
    ),
    MetricDef(
        "kvtier_dropped_chunks_total",
        "counter",
        "Cascades dropped by reason: bound (no room until host memory had evicted the chunk, or "
        "with backpressure drop at once), breaker, refused (by the tier itself, in the end).",
        ("tier", "reason"),
    ),
    MetricDef(
        "kvtier_corrupt_chunks_total",
        "counter",
        "Chunks whose bytes or metadata differed from what was stored.",
        TIER,
    ),
    MetricDef(
        "kvtier_quarantined_chunks_total",
        "counter",
        "Corrupt chunks that were put where nobody finds them.",
        TIER,
    ),
    # Tiers
    MetricDef("kvtier_tier_up", "gauge", "1 if the tier loads and stores, 0 if not.", TIER),
    MetricDef("kvtier_breaker_state", "gauge", "0 closed, 1 probing, 2 open.", TIER),
    MetricDef("kvtier_breaker_opened_total", "counter", "Times that a breaker opened.", TIER),
    MetricDef("kvtier_tier_capacity_bytes", "gauge", "Bytes that a tier may use.", TIER),
    MetricDef("kvtier_tier_used_bytes", "gauge", "Bytes that a tier uses.", TIER),
    MetricDef("kvtier_tier_chunks", "gauge", "Chunks that a tier holds.", TIER),
    MetricDef("kvtier_tier_evicted_total", "counter", "Chunks that a tier evicted.", TIER),
    # Planner
    MetricDef("kvtier_held_chunks", "gauge", "Chunks held for requests that wait for them."),
    MetricDef("kvtier_held_bytes", "gauge", "Bytes held for waiting requests or lent to loads."),
    MetricDef(
        "kvtier_hold_refused_total", "counter", "Chunks not promoted because of the hold bound."
    ),
    MetricDef(
        "kvtier_hold_expired_total", "counter", "Holds that ended by their deadline, unused."
    ),
    MetricDef("kvtier_resets_total", "counter", "Cache resets by mode.", ("mode",)),
    MetricDef(
        "kvtier_scheduler_seconds",
        "histogram",
        "Time on the scheduler's thread, by call.",
        ("call",),
        CALL_BUCKETS,
    ),
    # Service
    MetricDef("kvtier_service_up", "gauge", "1 if the tier service runs, 0 if it does not."),
    MetricDef("kvtier_service_restarts_total", "counter", "Restarts of the tier service."),
    MetricDef(
        "kvtier_service_overload_total",
        "counter",
        "Messages not sent because the service did not take them in time.",
    ),
    MetricDef(
        "kvtier_service_loop_lag_seconds",
        "histogram",
        "How late the service's loop ran a timer.",
        (),
        IO_BUCKETS,
    ),
    # Events
    MetricDef("kvtier_events_total", "counter", "Events by operation.", ("operation",)),
    MetricDef(
        "kvtier_events_dropped_total",
        "counter",
        "Events that a subscriber, the publisher or the scheduler did not take in time.",
    ),
)
"""Every metric of kvtier. Later parts only add rows."""
