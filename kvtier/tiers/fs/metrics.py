# SPDX-License-Identifier: Apache-2.0
"""The file tier's own metrics."""

from __future__ import annotations

from kvtier.obs.metrics import MetricDef

METRICS = (
    MetricDef(
        "kvtier_fs_errors_total",
        "counter",
        "Chunks whose file operation (store, load, exists) failed, by cause.",
        ("tier", "operation", "cause"),
    ),
    MetricDef(
        "kvtier_fs_refused_total",
        "counter",
        "Chunks not tried, by operation and reason: paused, capacity, free_space, stuck.",
        ("tier", "operation", "reason"),
    ),
    MetricDef(
        "kvtier_fs_stuck_threads",
        "gauge",
        "Threads in a system call of a job that was given up, by pool: read, write.",
        ("tier", "pool"),
    ),
    MetricDef(
        "kvtier_fs_direct",
        "gauge",
        "1 if files are opened with O_DIRECT, 0 if through the page cache.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_fs_direct_fallbacks_total",
        "counter",
        "Calls that the filesystem refused with O_DIRECT and that went on without.",
        ("tier",),
    ),
    MetricDef(
        "kvtier_fs_writes_paused",
        "gauge",
        "1 while writes pause after an error, by cause: full, read_only, no_handles, lost.",
        ("tier", "cause"),
    ),
    MetricDef(
        "kvtier_fs_swept_total",
        "counter",
        "Temporary files of dead writers that were removed.",
        ("tier",),
    ),
)
