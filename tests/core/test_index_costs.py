# SPDX-License-Identifier: Apache-2.0
"""What the index costs: steps of an eviction, counted, and memory."""

from __future__ import annotations

import collections
import os
import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from .build import key, keys, make_index, put

POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])


@POLICIES
@pytest.mark.fault("E18")
@pytest.mark.slow
@pytest.mark.parametrize("which", ["spread", "oldest"])
def test_eviction_does_not_walk_over_pinned_chunks(policy: str, which: str) -> None:
    """A million chunks, 90 % pinned, 100 evictions: counted in list steps, not in time."""
    count = 1_000_000
    _, index = make_index(count, policy, payloads=[1])
    for first in range(0, count, 10_000):
        put(index, [key(n) for n in range(first, first + 10_000)])
    rng = random.Random(1)
    numbers = rng.sample(range(count), count * 9 // 10) if which == "spread" else range(900_000)
    index.pin([key(n) for n in numbers])
    before = index.list_steps
    victims = index.reserve([key(count + n) for n in range(100)]).evicted
    steps = index.list_steps - before
    assert len(victims) == 100
    if which == "spread":
        assert steps < 100 * 20
    else:
        # The whole pinned block stands in front: it is put aside once, and never again.
        assert steps <= 900_000 + 100
    before = index.list_steps
    assert len(index.reserve([key(2 * count + n) for n in range(100)]).evicted) == 100
    assert index.list_steps - before < 100 * 20


@POLICIES
def test_service_pins_do_not_make_eviction_linear(policy: str) -> None:
    _, index = make_index(2000, policy, payloads=[1])
    put(index, [key(n) for n in range(2000)])
    index.pin_for_service([key(n) for n in range(1800)])
    assert index.reserve([key(9000)]).evicted == [key(1800)]
    before = index.list_steps
    assert len(index.reserve([key(5000 + n) for n in range(100)]).evicted) == 100
    assert index.list_steps - before <= 2 * 100


def test_after_an_outage_one_eviction_does_not_walk_over_everything() -> None:
    _, index = make_index(100_000, track_unsaved=True, payloads=[1])
    put(index, [key(n) for n in range(100_000)])
    before = index.list_steps
    got = index.reserve([key(200_000)])
    assert got.evicted_unsaved == [key(0)]
    assert index.list_steps - before <= 1100


@POLICIES
@pytest.mark.fault("L10")
def test_memory_stays_flat(policy: str) -> None:
    """A million keys come and go, and somebody keeps the first element of what was given out: a
    slice holds the array of its own call alive, never one as large as the index."""
    per_call, slices = 16, 20_000
    _, index = make_index(4096, policy)
    draw = random.Random(1)
    kept: collections.deque[np.ndarray] = collections.deque(maxlen=slices)

    def churn(calls: int) -> int:
        for _ in range(calls):
            wanted = [draw.randbytes(32) + bytes(4) for _ in range(per_call)]
            put(index, wanted)
            slots, generations = index.pin(wanted)
            index.unpin(slots, generations)
            kept.extend((slots[:1], generations[:1]))
        return _rss_bytes()

    empty = churn(2 * 4096 // per_call)
    full = churn(slices // 2)
    assert full - empty < 512 * slices
    assert churn(1_000_000 // per_call) - full < 4 << 20


@POLICIES
def test_calls_allocate_no_more_than_their_keys_need(policy: str) -> None:
    """A lookup of one key allocates nothing; other calls what their keys need, whatever the size
    of the index."""

    def peak_bytes(call: Callable[[], object]) -> int:
        call()
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    _, index = make_index(20_000, policy)
    wanted = keys(*range(20_000))
    put(index, wanted)
    absent = key(30_000)
    some = wanted[100:164]

    def look() -> None:
        for name in some:
            index.lookup(name)
            index.lookup(absent)

    assert peak_bytes(look) < 64
    assert peak_bytes(lambda: index.states(some)) > 64, "the measure sees what there is"
    for call in (
        lambda: index.states(some),
        lambda: index.touch(some),
        lambda: index.unpin(*index.pin(some)),
        lambda: put(index, [key(40_000 + n) for n in range(64)]),
    ):
        assert peak_bytes(call) < 20_000, "for 64 keys of 20,000"


@POLICIES
def test_metadata_stays_under_its_bound(policy: str) -> None:
    for slots in (64, 1000, 100_000):
        _, index = make_index(slots, policy)
        assert 80 < index.metadata_bytes_per_slot <= 160


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
