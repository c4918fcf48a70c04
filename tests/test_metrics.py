# SPDX-License-Identifier: Apache-2.0
"""Metrics: the numbers that come out are those that went in, whoever counted and however often."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import InternalError
from kvtier.obs.metrics import METRICS, MetricDef, Recorder, Registry, Sample, validate

LOOKUPS = "kvtier_lookup_chunks_total"
SECONDS = "kvtier_lookup_seconds"
EVICTED = "kvtier_evicted_total"


def carried(samples: list[Sample]) -> list[Sample]:
    """As they come out of a message."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(samples), type=list[Sample])


def scraped(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.render().decode())
        for sample in family.samples
    }


def test_the_table_keeps_its_own_rules() -> None:
    validate(METRICS)
    names = {definition.name for definition in METRICS}
    assert {"kvtier_host_fill_ratio", "kvtier_host_padding_ratio", LOOKUPS, EVICTED,
            "kvtier_evicted_unsaved_total", "kvtier_breaker_state",
            "kvtier_service_restarts_total", "kvtier_events_dropped_total"} <= names  # fmt: skip
    for definition in METRICS:
        for unit in ("millis", "_ms", "mib", "percent", "_kb"):
            assert unit not in definition.name, "base units only"
        if definition.kind == "histogram":
            assert definition.name.endswith(("_seconds", "_bytes"))


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (MetricDef("vllm_x", "gauge", "h"), "lower-case"),
        (MetricDef("kvtier_X", "gauge", "h"), "lower-case"),
        (MetricDef("kvtier_x", "counter", "h"), "_total"),
        (MetricDef("kvtier_x_total", "gauge", "h"), "_total"),
        (MetricDef("kvtier_x_count", "gauge", "h"), "suffix"),
        (MetricDef("kvtier_x", "summary", "h"), "no kind"),  # type: ignore[arg-type]
        (MetricDef("kvtier_x", "gauge", ""), "help"),
        (MetricDef("kvtier_x", "gauge", "h", ("a", "a")), "distinct"),
        (MetricDef("kvtier_x", "gauge", "h", ("le",)), "distinct"),
        (MetricDef("kvtier_x", "gauge", "h", ("A-b",)), "distinct"),
        (MetricDef("kvtier_x", "gauge", "h", (), (1.0,)), "has buckets"),
        (MetricDef("kvtier_x", "histogram", "h"), "has buckets"),
        (MetricDef("kvtier_x", "histogram", "h", (), (2.0, 1.0)), "rise"),
    ],
)
def test_wrong_definitions_are_refused(definition: MetricDef, words: str) -> None:
    with pytest.raises(InternalError, match=words):
        validate([definition])
    with pytest.raises(InternalError, match=words):
        Registry([definition])


def test_a_tiers_own_metrics() -> None:
    own = MetricDef("kvtier_my_tier_opens_total", "counter", "Opens.", ("tier",))
    validate([own], tier="My-Tier")
    with pytest.raises(InternalError, match="starts with kvtier_fs_"):
        validate([own], tier="fs")
    with pytest.raises(InternalError, match="first label"):
        validate([MetricDef("kvtier_fs_x", "gauge", "h", ("path", "tier"))], tier="fs")
    registry, recorder = Registry(), Recorder([*METRICS, own])
    recorder.add(own.name, 2.0, ("a",))
    samples = recorder.take()
    with pytest.raises(InternalError, match="not declared"):
        registry.apply(samples)
    registry.declare([own])
    registry.declare([own])
    registry.apply(samples)
    assert scraped(registry)[own.name, (("tier", "a"),)] == 2
    with pytest.raises(InternalError, match="twice, differently"):
        registry.declare([msgspec.structs.replace(own, help="Other.")])


@pytest.mark.parametrize(
    "act",
    [
        lambda r: r.add("kvtier_nothing_total"),
        lambda r: r.set("kvtier_nothing", 1),
        lambda r: r.observe("kvtier_nothing_seconds", 1),
        lambda r: r.add("kvtier_host_fill_ratio"),
        lambda r: r.set(EVICTED, 1),
        lambda r: r.observe(EVICTED, 1),
        lambda r: r.add(EVICTED, 1.0, ("fs",)),
        lambda r: r.add(LOOKUPS, 1.0, ("fs",)),
        lambda r: r.add(LOOKUPS, 1.0, ("fs", 3)),
        lambda r: r.add(EVICTED, -1.0),
        lambda r: r.add(EVICTED, float("nan")),
        lambda r: r.add(EVICTED, float("inf")),
        lambda r: r.observe(SECONDS, -1.0, ("fs",)),
        lambda r: r.observe(SECONDS, float("nan"), ("fs",)),
    ],
)
def test_undeclared_names_and_impossible_values_raise(act) -> None:  # type: ignore[no-untyped-def]
    recorder = Recorder()
    with pytest.raises(InternalError):
        act(recorder)
    assert recorder.take() == []


def test_a_batch_is_applied_whole_or_not_at_all() -> None:
    registry = Registry()
    good = Sample(EVICTED, (), 5.0)
    for bad in (
        Sample("kvtier_nothing_total", (), 1.0),
        Sample(LOOKUPS, ("fs",), 1.0),
        Sample(SECONDS, ("fs",), 1.0),
        Sample(SECONDS, ("fs",), 1.0, (1, 2)),
        Sample(EVICTED, (), 1.0, (1,)),
    ):
        with pytest.raises(InternalError):
            registry.apply([good, bad])
    assert registry.value(EVICTED) == 0
    with pytest.raises(InternalError):
        registry.value("kvtier_nothing_total")
    with pytest.raises(InternalError):
        registry.series("kvtier_nothing_total")


@pytest.mark.fault("M02")
def test_the_hit_rate_is_that_of_what_was_asked() -> None:
    recorder, registry = Recorder(), Registry()
    for index in range(100):
        recorder.add(LOOKUPS, 1.0, ("fs", "hit" if index % 2 else "miss"))
    registry.apply(carried(recorder.take()))
    hits = registry.value(LOOKUPS, ("fs", "hit"))
    misses = registry.value(LOOKUPS, ("fs", "miss"))
    assert hits is not None
    assert misses is not None
    assert hits / (hits + misses) == 0.5


@pytest.mark.fault("M03")
def test_an_idle_engine_stays_flat() -> None:
    recorder, registry = Recorder(), Registry()
    recorder.add(EVICTED, 7)
    recorder.observe(SECONDS, 0.5, ("fs",))
    recorder.set("kvtier_host_fill_ratio", 0.25)
    registry.apply(carried(recorder.take()))
    first = registry.render()
    for _ in range(10):
        samples = recorder.take()
        assert samples == []
        registry.apply(samples)
        assert registry.render() == first
    recorder.set("kvtier_host_fill_ratio", 0.25)
    assert recorder.take() == [], "a gauge that has not moved is no news"


@pytest.mark.fault("M04")
def test_a_restarted_service_leaves_no_ghosts_and_loses_no_counts() -> None:
    registry, owner = Registry(), Recorder()
    owner.set("kvtier_host_capacity_bytes", 4096)
    registry.apply(owner.take(), "owner")
    for life in range(3):
        child = Recorder()
        child.add("kvtier_tier_evicted_total", 2, ("fs",))
        child.set("kvtier_tier_used_bytes", 100 + life, ("fs",))
        child.set("kvtier_tier_used_bytes", 7, (f"only-{life}",))
        registry.apply(carried(child.take()), "service")
        seen = scraped(registry)
        assert seen["kvtier_tier_evicted_total", (("tier", "fs"),)] == 2 * (life + 1)
        tiers = [labels for name, labels in seen if name == "kvtier_tier_used_bytes"]
        assert len(tiers) == 2, "the level of the life before is gone"
        registry.forget("service")
        assert not any(name == "kvtier_tier_used_bytes" for name, _ in scraped(registry))
        assert registry.value("kvtier_host_capacity_bytes") == 4096


@pytest.mark.fault("U07")
def test_a_gauge_is_absent_until_it_is_real() -> None:
    recorder, registry = Recorder(), Registry()
    name = "kvtier_tier_capacity_bytes"
    assert not any(key[0] == name for key in scraped(registry)), "not 0, which would be a lie"
    recorder.set(name, 5 * 2**30, ("fs",))
    registry.apply(recorder.take())
    assert scraped(registry)[name, (("tier", "fs"),)] == 5 * 2**30


def test_counters_without_labels_start_at_zero() -> None:
    seen = scraped(Registry())
    assert seen[EVICTED, ()] == 0
    assert seen["kvtier_service_restarts_total", ()] == 0


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "set", "observe", "take"]),
        st.sampled_from(["a", 'b"\n\\', "é"]),
        st.integers(0, 2000).map(lambda number: number / 8),
    ),
    max_size=60,
)


@given(operations)
def test_whatever_is_taken_when_adds_up(steps: list[tuple[str, str, float]]) -> None:
    recorder, registry = Recorder(), Registry()
    counts: dict[str, float] = {}
    levels: dict[str, float] = {}
    observed: dict[str, list[float]] = {}
    for step, tier, value in steps:
        if step == "add":
            recorder.add_many(LOOKUPS, [((tier, "hit"), value)])
            counts[tier] = counts.get(tier, 0.0) + value
        elif step == "set":
            recorder.set("kvtier_tier_chunks", value, (tier,))
            levels[tier] = value
        elif step == "observe":
            recorder.observe_many(SECONDS, [value, value], (tier,))
            recorder.observe(SECONDS, value, (tier,), count=3)
            observed.setdefault(tier, []).extend([value] * 5)
        else:
            registry.apply(carried(recorder.take()))
    registry.apply(carried(recorder.take()))
    seen = scraped(registry)
    for tier, count in counts.items():
        if count:
            assert seen[LOOKUPS, (("result", "hit"), ("tier", tier))] == count
    for tier, level in levels.items():
        assert seen["kvtier_tier_chunks", (("tier", tier),)] == level
    assert registry.series("kvtier_tier_chunks") == {(tier,): one for tier, one in levels.items()}
    assert registry.series(LOOKUPS) == {(tier, "hit"): one for tier, one in counts.items() if one}
    assert set(registry.series(SECONDS)) == {(tier,) for tier in observed}
    bounds = next(one.buckets for one in METRICS if one.name == SECONDS)
    for tier, values in observed.items():
        assert seen[f"{SECONDS}_count", (("tier", tier),)] == len(values)
        assert seen[f"{SECONDS}_sum", (("tier", tier),)] == pytest.approx(sum(values))
        assert registry.value(SECONDS, (tier,)) == pytest.approx(sum(values))
        for bound in bounds:
            key = (f"{SECONDS}_bucket", (("le", f"{bound:g}"), ("tier", tier)))
            assert seen[key] == sum(value <= bound for value in values)


PROBE = """
import os
from kvtier.obs.metrics import Recorder, Registry
recorder, registry = Recorder(), Registry()
recorder.add("kvtier_evicted_total", 3)
recorder.observe("kvtier_scheduler_seconds", 0.1, ("lookup",))
recorder.set("kvtier_service_up", 1)
registry.apply(recorder.take())
assert b"kvtier_evicted_total 3.0" in registry.render()
print(os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
from prometheus_client import Counter, CollectorRegistry
Counter("control_total", "c", registry=CollectorRegistry())
print(len(os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"])))
"""


@pytest.mark.fault("M04")
def test_the_model_servers_multiprocess_directory_is_left_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    files, control = done.stdout.splitlines()
    assert files == "[]"
    assert int(control) > 0, "the trap is armed: prometheus_client's own counter writes there"


def test_a_scrape_formats_without_the_lock() -> None:
    """The scheduler's thread adds samples while a scrape is half way through."""
    registry = Registry()
    families = registry._families()
    next(families)
    assert registry._lock.acquire(blocking=False)
    registry._lock.release()
    registry.apply([Sample(EVICTED, (), 1.0)])
    assert len(list(families)) == len(METRICS) - 1
