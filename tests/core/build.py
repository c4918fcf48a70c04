# SPDX-License-Identifier: Apache-2.0
"""Indexes over plain memory, and keys, for the tests of the core."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from kvtier._core.index import Index
from kvtier._core.slots import READY, RECORD_BYTES, SlotTable, table_bytes
from kvtier.types import make_key

PAYLOADS = (100, 7)


def make_table(num_slots: int) -> SlotTable:
    records = mmap.mmap(-1, num_slots * RECORD_BYTES)
    return SlotTable(records, mmap.mmap(-1, table_bytes(num_slots)), num_slots)


def make_index(
    num_slots: int,
    policy: str = "lru",
    track_unsaved: bool = False,
    payloads: Sequence[int] = PAYLOADS,
) -> tuple[SlotTable, Index]:
    table = make_table(num_slots)
    index = Index(table, payloads, policy, track_unsaved)
    index.grow(num_slots)
    return table, index


def key(number: int, group: int = 0) -> bytes:
    return make_key(number.to_bytes(32, "little"), group)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def put(index: Index, wanted: Sequence[bytes]) -> list[bytes]:
    """Reserve and commit: what was evicted."""
    evicted = index.reserve(wanted).evicted
    index.commit(wanted)
    return evicted


def ready_prefix(index: Index, wanted: Sequence[bytes]) -> int:
    states = index.states(wanted)
    return len(states) - len(states.lstrip(bytes([READY])))


def assert_quiet(table: SlotTable, index: Index) -> None:
    """No pins, nothing in flight, all slots accounted for."""
    index.check()
    totals = table.totals()
    assert totals["owner_pins"] == totals["service_pins"] == 0
    assert index.num_writing == index.num_lent == index.num_orphans == 0
    assert index.num_free + index.num_ready == index.capacity
    assert totals["ready"] == index.num_ready
