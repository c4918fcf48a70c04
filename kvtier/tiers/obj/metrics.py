# SPDX-License-Identifier: Apache-2.0
"""The object tier's own metrics."""

from __future__ import annotations

from kvtier.obs.metrics import MetricDef

METRICS = (
    MetricDef(
        "kvtier_obj_errors_total",
        "counter",
        "Tries that failed, by cause; most are tried again.",
        ("tier", "cause"),
    ),
    MetricDef(
        "kvtier_obj_requests_total",
        "counter",
        "Requests for single objects that ended well, by method.",
        ("tier", "method"),
    ),
    MetricDef(
        "kvtier_obj_concurrency",
        "gauge",
        "Requests that may be under way at present.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_obj_connections",
        "gauge",
        "Connections to the store.",
        ("tier",),
    ),
)
