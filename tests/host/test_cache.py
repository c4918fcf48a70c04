# SPDX-License-Identifier: Apache-2.0
"""The host cache: index and table over one region's memory."""

from __future__ import annotations

import mmap

import pytest

from kvtier._core.slots import RECORD_BYTES, table_bytes
from kvtier.errors import InternalError
from kvtier.host.cache import HostCache
from kvtier.types import Geometry, GroupGeometry, make_key


def make_cache(policy: str = "lru") -> HostCache:
    groups = (GroupGeometry(16, 1, 5000), GroupGeometry(16, 2, 100))
    geometry = Geometry(groups=groups, num_slots=8, slot_bytes=8192)
    records = mmap.mmap(-1, 8 * RECORD_BYTES)
    return HostCache(records, mmap.mmap(-1, table_bytes(8)), geometry, policy)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_usage_adds_up(policy: str) -> None:
    cache = make_cache(policy)
    assert cache.usage().capacity == 0
    cache.index.grow(6)
    wanted = [make_key(b"a", 0), make_key(b"b", 1), make_key(b"c", 0)]
    cache.index.reserve(wanted)
    cache.index.commit(wanted[:2])
    cache.index.lend(1)
    usage = cache.usage()
    assert (usage.free, usage.writing, usage.ready, usage.lent) == (2, 1, 2, 1)
    assert usage.ready_bytes == 5000 + 200


def test_offsets_stay_inside_what_has_memory() -> None:
    cache = make_cache()
    cache.index.grow(6)
    assert cache.offsets([0, 5]).tolist() == [0, 5 * 8192]
    assert cache.offsets([]).tolist() == []
    for bad in ([6], [-1]):
        with pytest.raises(IndexError):
            cache.offsets(bad)


def test_quiet_means_nothing_in_flight() -> None:
    cache = make_cache()
    cache.index.grow(8)
    cache.assert_quiet()
    one = [make_key(b"a")]
    cache.index.reserve(one)
    with pytest.raises(InternalError, match="'writing': 1"):
        cache.assert_quiet()
    cache.index.commit(one)
    held = cache.index.pin(one)
    with pytest.raises(InternalError, match="'owner_pins': 1"):
        cache.assert_quiet()
    cache.index.unpin(*held)
    cache.assert_quiet()
