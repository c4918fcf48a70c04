# SPDX-License-Identifier: Apache-2.0
"""The peer tier's own metrics."""

from __future__ import annotations

from kvtier.obs.metrics import MetricDef

METRICS = (
    MetricDef(
        "kvtier_peer_failures_total",
        "counter",
        "Sessions with peers that failed or were refused, by cause.",
        ("tier", "cause"),
    ),
    MetricDef(
        "kvtier_peer_refused_total",
        "counter",
        "Messages and sessions of peers that this instance refused or ended, by cause.",
        ("tier", "cause"),
    ),
    MetricDef(
        "kvtier_peer_sessions",
        "gauge",
        "Sessions that stand, by the side that this instance has in them.",
        ("tier", "side"),
    ),
    MetricDef(
        "kvtier_peer_leases",
        "gauge",
        "Leases of peers on chunks of this instance.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_peer_leased_bytes",
        "gauge",
        "Host memory pinned for peers.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_peer_served_bytes_total",
        "counter",
        "Bytes of chunks leased to peers.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_peer_guest_slots",
        "gauge",
        "Slots of host memory that peers may push chunks to.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_peer_awaited",
        "gauge",
        "Questions of peers with chunks that are still to be written here.",
        ("tier",),
    ),
)
