# SPDX-License-Identifier: Apache-2.0
"""Words, pins and generations of a slot table."""

from __future__ import annotations

import mmap
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from kvtier._core.index import Index
from kvtier._core.slots import (
    FREE,
    READY,
    RECORD_BYTES,
    WRITING,
    SlotTable,
    table_bytes,
)
from kvtier.errors import InternalError

from .build import key, keys, make_index, make_table, put


def test_a_buffer_must_be_large_enough_aligned_and_writable() -> None:
    records, table = bytearray(mmap.mmap(-1, 4096)), mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="records needs 640 bytes, the buffer has 639"):
        SlotTable(memoryview(mmap.mmap(-1, 4096))[:639], table, 10)
    with pytest.raises(ValueError, match="table needs"):
        SlotTable(mmap.mmap(-1, 4096), memoryview(table)[:64], 10)
    with pytest.raises(ValueError, match="aligned to 64"):
        SlotTable(memoryview(mmap.mmap(-1, 4096))[8:], table, 10)
    with pytest.raises((BufferError, TypeError)):
        SlotTable(bytes(records), table, 10)
    with pytest.raises(ValueError, match="num_slots"):
        table_bytes(0)


def test_the_table_keeps_its_mapping_alive() -> None:
    records, table = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    slots = SlotTable(records, table, 10)
    with pytest.raises(BufferError):
        records.close()
    del slots
    records.close()
    table.close()


@pytest.mark.parametrize("slot", [-1, 4, 2**40])
def test_a_slot_out_of_range_is_an_index_error(slot: int) -> None:
    table = make_table(4)
    for call in (table.state, table.generation, table.owner_pins, table.service_pins, table.key):
        with pytest.raises(IndexError):
            call(slot)
    with pytest.raises(IndexError):
        table.unpin_service(slot, 0)
    with pytest.raises(IndexError):
        table.set_crc(slot, 0, 1)
    with pytest.raises(IndexError):
        table.clear_service_pins(0, 5)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"1234", ValueError),
        (b"x" * 41, ValueError),
        ("text5", TypeError),
        (bytearray(9), TypeError),
    ],
)
def test_a_key_has_five_to_forty_bytes(bad: object, error: type[Exception]) -> None:
    table, index = make_index(4)
    for call in (table.find, table.find_and_pin_service, index.lookup, index.locate):
        with pytest.raises(error):
            call(bad)  # type: ignore[operator]  # the wrong type is the point
    with pytest.raises(error):
        table.states([key(1), bad])  # type: ignore[list-item]  # the wrong type is the point
    with pytest.raises(error):
        index.reserve([key(1), bad])  # type: ignore[list-item]  # the wrong type is the point
    assert index.num_free == 4
    index.check()


@pytest.mark.parametrize("length", range(5, 41))
def test_keys_of_every_length_are_kept_whole(length: int) -> None:
    table, index = make_index(4)
    one = bytes(range(1, length - 3)) + bytes(4)
    other = bytes([one[0] ^ 0x80]) + one[1:]
    put(index, [one])
    slot = table.find(one)
    assert table.key(slot) == one
    assert table.find(other) == -1
    assert table.find(one[:-5] + bytes(4)) == -1 if length > 5 else True
    assert index.lookup(one) == 2


def test_one_life_of_a_slot() -> None:
    table, index = make_index(4, track_unsaved=True)
    reservation = index.reserve([key(1, group=1)])
    slot, generation = int(reservation.slots[0]), int(reservation.generations[0])
    assert (table.state(slot), table.length(slot)) == (WRITING, 7)
    assert table.unsaved(slot)
    assert table.crc(slot) is None
    assert not table.pin_service(slot, generation, key(1, group=1))
    assert not table.set_crc(slot, generation, 5)
    index.commit([key(1, group=1)])
    assert table.state(slot) == READY
    assert table.set_crc(slot, generation, 0xDEADBEEF)
    assert table.crc(slot) == 0xDEADBEEF
    assert table.mark_saved(slot, generation)
    assert not table.unsaved(slot)
    assert index.drop([key(1, group=1)]) == [key(1, group=1)]
    assert (table.state(slot), table.generation(slot)) == (FREE, generation + 1)
    # The same slot again starts without the old checksum.
    again = index.reserve([key(2)])
    assert int(again.slots[0]) == slot
    assert table.crc(slot) is None


@pytest.mark.fault("C17")
def test_a_stale_generation_is_refused_everywhere() -> None:
    table, index = make_index(1)
    put(index, [key(1)])
    slots, generations = index.pin([key(1)])
    index.unpin(slots, generations)
    old = int(generations[0])
    assert put(index, [key(2)]) == [key(1)]
    assert table.generation(0) == old + 1
    assert not table.pin_service(0, old, key(1))
    assert not table.pin_service(0, old, key(2))
    assert not table.pin_service(0, old + 1, key(1)), "the right generation with the wrong key"
    assert not table.set_crc(0, old, 1)
    assert not table.mark_saved(0, old)
    with pytest.raises(InternalError, match="no service pin in generation"):
        table.unpin_service(0, old)
    with pytest.raises(InternalError, match="no owner pin in generation"):
        index.unpin(slots, generations)
    assert table.totals()["service_pins"] == table.totals()["owner_pins"] == 0


def test_a_pin_that_was_not_taken_cannot_be_given_back() -> None:
    table, index = make_index(2)
    put(index, [key(1)])
    slot, generation = table.find_and_pin_service(key(1)) or (-1, -1)
    table.unpin_service(slot, generation)
    with pytest.raises(InternalError):
        table.unpin_service(slot, generation)
    slots, generations = index.pin([key(1)])
    index.unpin(slots, generations)
    with pytest.raises(InternalError):
        index.unpin(slots, generations)


def test_pins_are_refused_when_the_field_is_full() -> None:
    table, index = make_index(2)
    put(index, [key(1)])
    slot, generation = index.locate(key(1)) or (-1, -1)
    for _ in range(32767):
        assert table.pin_service(slot, generation, key(1))
    assert not table.pin_service(slot, generation, key(1))
    assert table.find_and_pin_service(key(1)) is None
    assert index.pin_for_service([key(1)])[0] == []
    assert (table.owner_pins(slot), table.service_pins(slot)) == (0, 32767)
    assert table.state(slot) == READY
    pinned = index.pin([key(1)] * 32767)
    with pytest.raises(InternalError, match="all the owner pins"):
        index.pin([key(1)])
    assert (table.owner_pins(slot), table.service_pins(slot)) == (32767, 32767)
    assert table.generation(slot) == generation
    index.unpin(*pinned)
    assert table.clear_service_pins(0, 2) == 32767
    index.check()


def test_a_dead_service_gives_back_its_pins_and_no_others() -> None:
    table, index = make_index(8)
    put(index, keys(*range(6)))
    index.pin_for_service(keys(0, 0, 1, 5))
    held = index.pin(keys(1, 2))
    assert table.clear_service_pins(0, 4) == 3
    assert table.totals() == {
        "free": 2,
        "writing": 0,
        "ready": 6,
        "orphan": 0,
        "owner_pins": 2,
        "service_pins": 1,
    }
    assert table.clear_service_pins(4, 8) == 1
    index.unpin(*held)


def test_a_tag_and_home_in_common_do_not_mix_keys_up() -> None:
    """Thousands of keys in a table of two buckets collide in everything that can."""
    table, index = make_index(7, payloads=[1])
    for number in range(5000):
        put(index, [key(number)])
        assert table.key(table.find(key(number))) == key(number)
        assert table.find(key(number + 1)) == -1
    index.check()


def test_a_torn_table_is_noticed() -> None:
    records, table_memory = mmap.mmap(-1, 8 * RECORD_BYTES), mmap.mmap(-1, table_bytes(8))
    index = Index(SlotTable(records, table_memory, 8), [1])
    index.grow(8)
    put(index, keys(1, 2, 3))
    index.check()
    entries = np.frombuffer(table_memory, np.uint64)
    saved = entries.copy()
    entries[np.flatnonzero(entries)[0]] = 0
    with pytest.raises(InternalError):
        index.check()
    entries[:] = saved
    index.check()
    words = np.frombuffer(records, np.uint64)[:: RECORD_BYTES // 8]
    words[7] += 1
    with pytest.raises(InternalError, match="slot 7 is free here"):
        index.check()


def test_a_missing_extension_names_the_build_command() -> None:
    hidden = """
        import importlib.machinery
        finder = importlib.machinery.PathFinder.find_spec
        def hide(name, path=None, target=None):
            return None if name == "kvtier._core.{name}" else finder(name, path, target)
        importlib.machinery.PathFinder.find_spec = hide
        from kvtier.host.cache import HostCache
    """
    for name in ("slots", "index"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(hidden.format(name=name))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert "ImportError" in done.stderr
        assert "make setup" in done.stderr
