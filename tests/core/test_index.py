# SPDX-License-Identifier: Apache-2.0
"""The index against its pure twin, step by step, and single rules of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvtier._core._pure import READY, WRITING, Chunk, PureIndex
from kvtier.errors import InternalError

from .build import assert_quiet, key, keys, make_index, put, ready_prefix
from .machine import machine

POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])
CAPACITY = 8
KEYS = st.lists(st.integers(0, 24).map(key), max_size=6, unique=True)


class IndexMachine(machine(st.integers(0, 24).map(key), KEYS)):
    """Every call on both, with another side that pins through the table."""

    policy = "lru"

    @initialize(track_unsaved=st.booleans())
    def start(self, track_unsaved: bool) -> None:
        self.table, self.index = make_index(CAPACITY, self.policy, track_unsaved)
        self.pure = PureIndex(CAPACITY, self.policy, track_unsaved)
        self.pinned: list[tuple[Chunk, int, int]] = []
        self.serviced: list[tuple[Chunk, int, int]] = []
        self.lent: list[tuple[int, int]] = []
        self.orphans: tuple[list[int], list[int]] = ([], [])
        self.lost_leases = 0

    @rule(wanted=KEYS)
    def reserve(self, wanted: list[bytes]) -> None:
        got = self.index.reserve(wanted)
        expected = self.pure.reserve(wanted)
        assert (got.keys, got.evicted, got.evicted_unsaved, got.complete) == expected
        assert len(set(got.slots.tolist())) == len(got.keys)
        for one, slot, generation in zip(got.keys, got.slots, got.generations, strict=True):
            assert self.index.locate(one) == (slot, generation)
            assert self.table.key(int(slot)) == one

    @rule(wanted=KEYS)
    def pin(self, wanted: list[bytes]) -> None:
        absent = [one for one in wanted if self.pure.lookup(one) != READY]
        if absent:
            before = self.table.totals()
            with pytest.raises(KeyError) as caught:
                self.index.pin(wanted)
            assert caught.value.args == (absent[0],)
            assert self.table.totals() == before
            return
        slots, generations = self.index.pin(wanted)
        for one, slot, generation in zip(wanted, slots, generations, strict=True):
            self.chunk(one).owner += 1
            self.pinned.append((self.chunk(one), int(slot), int(generation)))

    @rule(wanted=KEYS)
    def pin_for_service(self, wanted: list[bytes]) -> None:
        done, slots, generations = self.index.pin_for_service(wanted)
        assert done == [one for one in wanted if self.pure.lookup(one) == READY]
        for one, slot, generation in zip(done, slots, generations, strict=True):
            self.chunk(one).service += 1
            self.serviced.append((self.chunk(one), int(slot), int(generation)))

    def reap(self) -> None:
        over = [o for o in self.pure.orphans if o.state == READY and not o.owner and not o.service]
        assert self.index.reap() == len(over)
        self.pure.orphans = [o for o in self.pure.orphans if o not in over]

    @rule(n=st.integers(0, 4))
    def lend(self, n: int) -> None:
        slots, generations = self.index.lend(n)
        assert len(slots) == min(n, self.pure.num_free)
        self.pure.lent += len(slots)
        self.lent += zip(slots.tolist(), generations.tolist(), strict=True)

    @precondition(lambda self: self.lent)
    @rule(
        one=st.integers(0, 24).map(key), saved=st.booleans(), crc=st.booleans(), pin=st.booleans()
    )
    def adopt(self, one: bytes, saved: bool, crc: bool, pin: bool) -> None:
        slot, generation = self.lent.pop()
        arrays = np.array([slot]), np.array([generation], np.uint32)
        crcs = np.array([slot + 7], np.uint32) if crc else None
        got = self.index.adopt(*arrays, [one], crcs, saved, pin)
        assert got == [self.pure.adopt(one, saved)]
        if got[0] and pin:
            self.chunk(one).owner += 1
            self.pinned.append((self.chunk(one), slot, generation))
        if got[0]:
            assert self.table.crc(slot) == (slot + 7 if crc else None)
            assert self.table.unsaved(slot) is not saved
        with pytest.raises(InternalError, match="is not lent"):
            self.index.adopt(*arrays, [one])

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self) -> None:
        slot, generation = self.lent.pop()
        self.index.give_back(np.array([slot]), np.array([generation], np.uint32))
        self.pure.lent -= 1
        with pytest.raises(InternalError, match="is not lent"):
            self.index.give_back(np.array([slot]), np.array([generation], np.uint32))

    @rule(n=st.integers(0, CAPACITY), limit=st.integers(0, 3), saved_only=st.booleans())
    def keep_free(self, n: int, limit: int, saved_only: bool) -> None:
        unsaved: list[bytes] = []
        got = self.index.keep_free(n, limit, 0, None if saved_only else unsaved)
        assert (got, unsaved) == self.pure.keep_free(n, limit, saved_only)

    @rule(wanted=KEYS, other_side=st.booleans())
    def mark_saved(self, wanted: list[bytes], other_side: bool) -> None:
        for one in wanted:
            chunk = self.pure.get(one)
            if chunk and (not other_side or chunk.state == READY):
                chunk.unsaved = False
            where = self.index.locate(one)
            if other_side and where:
                assert self.table.mark_saved(*where) == (self.pure.lookup(one) == READY)
        # The service marks what it stored; its message makes the owner do so as well.
        self.index.mark_saved([o for o in wanted if not other_side or self.pure.lookup(o) == READY])

    @rule()
    def clear(self) -> None:
        gone, slots, generations = self.index.clear()
        assert sorted(gone) == sorted(self.pure.clear())
        self.orphans[0].extend(slots.tolist())
        self.orphans[1].extend(generations.tolist())
        self.lost_leases += len(self.lent)
        self.lent.clear()
        assert all(self.index.lookup(key(n)) == 0 for n in range(25))

    @rule()
    def release(self) -> None:
        arrays = np.array(self.orphans[0], np.int64), np.array(self.orphans[1], np.uint32)
        writing = [o for o in self.pure.orphans if o.state == WRITING]
        assert self.index.release(*arrays) == len(writing) + self.lost_leases
        assert self.index.release(*arrays) == 0
        self.pure.orphans = [o for o in self.pure.orphans if o.state != WRITING]
        self.pure.lent -= self.lost_leases
        self.lost_leases = 0
        self.reap()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "index"):
            return
        index, pure = self.index, self.pure
        index.check()
        chunks = {**pure.classes[0], **pure.classes[1]}
        ready = [c for c in chunks.values() if c.state == READY]
        assert index.keys() == pure.keys()
        assert index.num_free == pure.num_free
        assert index.num_ready == len(ready)
        assert index.num_writing == len(chunks) - len(ready)
        assert index.ready_bytes == 100 * len(ready)
        assert index.num_lent == pure.lent - self.lost_leases
        assert index.num_orphans == len(pure.orphans) + self.lost_leases
        totals = self.table.totals()
        assert totals["owner_pins"] == len(self.pinned)
        assert totals["service_pins"] == len(self.serviced)
        states = bytes(pure.lookup(key(n)) for n in range(25))
        assert index.states([key(n) for n in range(25)]) == states
        assert bytes(index.lookup(key(n)) for n in range(25)) == states
        unsaved = {k for k, c in chunks.items() if c.unsaved and c.state == READY}
        free = {k for k in unsaved if not chunks[k].owner and not chunks[k].service}
        assert free <= set(index.oldest_unsaved(25)) <= unsaved
        state = index.policy_state()
        assert (state["t1"], state["t2"]) == tuple(map(len, pure.classes))
        assert (state["b1"], state["b2"]) == tuple(map(len, pure.ghosts))
        assert state["p"] == pure.p


class ArcMachine(IndexMachine):
    policy = "arc"


MACHINE = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLru = IndexMachine.TestCase
TestArc = ArcMachine.TestCase
TestLru.settings = TestArc.settings = MACHINE


@POLICIES
@pytest.mark.fault("C17")
@pytest.mark.parametrize("order", ["abort first", "commit first", "clear between"])
def test_no_order_of_ends_frees_a_slot_twice(policy: str, order: str) -> None:
    table, index = make_index(2, policy)
    first = index.reserve(keys(1))
    if order == "abort first":
        assert index.abort(keys(1)) == 1
        assert index.commit(keys(1)) == []
    elif order == "commit first":
        assert index.commit(keys(1)) == keys(1)
        assert index.abort(keys(1)) == 0
    else:
        _, slots, generations = index.clear()
        assert index.release(slots, generations) == 1
        assert index.release(slots, generations) == 0
        assert index.abort(keys(1)) == 0
    owners = index.reserve(keys(2, 3))
    assert len(set(owners.slots.tolist())) == 2
    stale = first.slots, first.generations
    assert index.release(*stale) == 0
    with pytest.raises(InternalError):
        index.give_back(*stale)
    with pytest.raises(InternalError):
        index.adopt(*stale, keys(4))
    index.commit(keys(2, 3))
    assert_quiet(table, index)


def test_a_second_free_trips_the_check() -> None:
    """The checker sees what the API refuses: a slot that is free and in use."""
    table, index = make_index(4)
    put(index, keys(1, 2))
    slot = table.find(key(1))
    assert index.drop(keys(1)) == keys(1)
    assert table.state(slot) == 0
    lent = index.lend(1)
    assert int(lent[0][0]) == slot
    with pytest.raises(InternalError):
        index.give_back(np.array([slot, slot]), np.array([lent[1][0]] * 2, np.uint32))


@POLICIES
def test_the_end_of_a_step_keeps_little_of_a_small_memory_free_and_frees_orphans(
    policy: str,
) -> None:
    table, index = make_index(64, policy)
    names = keys(*range(64))
    put(index, names)
    assert index.end_step([0], 8) == names[:2]  # a 32nd
    assert index.end_step([0], 8) == []
    assert index.end_step([0], 1) == []
    put(index, keys(64))
    assert index.end_step([0], 1) == []
    assert index.end_step([0], 2) == names[2:3]
    slots, generations = index.pin(names[3:4])
    index.clear()
    index.unpin(slots, generations)
    assert index.num_orphans == 1
    assert index.end_step([0], 0) == []
    assert index.num_orphans == 0
    assert_quiet(table, index)


@POLICIES
@pytest.mark.fault("C18")
def test_slots_in_flight_are_no_candidates(policy: str) -> None:
    table, index = make_index(4, policy)
    writing = index.reserve(keys(1))
    put(index, keys(2, 3))
    lent = index.lend(1)
    pinned = index.pin(keys(2))
    serviced = table.find_and_pin_service(key(3))
    assert serviced is not None
    got = index.reserve(keys(4, 5))
    assert (got.keys, got.evicted, got.complete) == ([], [], False)
    assert index.keep_free(4) == []
    assert index.drop(keys(1, 2, 3)) == []
    assert table.key(int(writing.slots[0])) == key(1)
    index.commit(keys(1))
    assert index.reserve(keys(4)).evicted == keys(1)
    index.unpin(*pinned)
    table.unpin_service(*serviced)
    index.give_back(*lent)
    index.commit(keys(4))
    assert_quiet(table, index)


@POLICIES
@pytest.mark.fault("E09")
def test_a_new_chunk_is_not_the_first_victim(policy: str) -> None:
    _, index = make_index(4, policy)
    put(index, keys(1, 2, 3, 4))
    assert put(index, keys(5)) == keys(1)
    assert put(index, keys(6)) == keys(2)


@pytest.mark.fault("E06")
def test_ghosts_are_bounded_by_capacity() -> None:
    _, index = make_index(4, "arc")
    rng = random.Random(1)
    most = 0
    for n in range(100_000):
        put(index, [key(n)])
        if rng.random() < 0.3:
            index.touch([key(n)])
            index.touch([key(n)])
        state = index.policy_state()
        assert state["t1"] + state["t2"] <= 4
        assert state["b1"] + state["b2"] <= 4
        assert state["t1"] + state["b1"] <= 4
        most = max(most, int(state["b1"] + state["b2"]))
    assert most == 4
    index.check()


@POLICIES
def test_unsaved_chunks_go_last_and_are_reported(policy: str) -> None:
    table, index = make_index(4, policy, track_unsaved=True)
    put(index, keys(1, 2, 3, 4))
    assert index.oldest_unsaved(2) == keys(1, 2)
    assert index.oldest_unsaved(4, within=3) == keys(1, 2, 3)
    index.mark_saved(keys(3))
    assert index.oldest_unsaved(4, within=3) == keys(1, 2)
    got = index.reserve(keys(5))
    assert (got.evicted, got.evicted_unsaved) == (keys(3), [])
    assert index.keep_free(1) == []
    got = index.reserve(keys(6))
    assert (got.evicted, got.evicted_unsaved) == (keys(1), keys(1))
    assert index.oldest_unsaved(9) == keys(2, 4)
    index.mark_saved(keys(4))
    assert index.reserve(keys(7)).evicted == keys(4)
    index.commit(keys(5, 6, 7))
    assert_quiet(table, index)


@POLICIES
@pytest.mark.fault("K10")
def test_a_pool_smaller_than_one_request_stores_its_prefix(policy: str) -> None:
    table, index = make_index(4, policy)
    put(index, keys(91, 92))
    got = index.reserve(keys(*range(10)))
    assert (got.keys, got.complete) == (keys(0, 1, 2, 3), False)
    index.commit(keys(*range(10)))
    assert ready_prefix(index, keys(*range(10))) == 4
    index.touch(keys(*range(10)))
    assert_quiet(table, index)


@POLICIES
@pytest.mark.fault("K12")
def test_a_hole_ends_the_prefix_and_raises_nothing(policy: str) -> None:
    _, index = make_index(8, policy)
    put(index, keys(1, 2, 3, 4))
    index.drop(keys(2))
    assert index.states(keys(1, 2, 3, 4)) == bytes([2, 0, 2, 2])
    index.touch(keys(1, 2, 3, 4))
    assert index.commit(keys(2)) == []
    assert index.abort(keys(2)) == 0


@POLICIES
@pytest.mark.fault("K13")
def test_the_second_writer_of_a_key_sees_that_it_is_there(policy: str) -> None:
    table, index = make_index(4, policy)
    assert index.reserve(keys(1, 1)).keys == keys(1)
    assert index.reserve(keys(1)).keys == []
    lent = index.lend(2)
    assert index.commit(keys(1)) == keys(1)
    assert index.commit(keys(1)) == []
    assert index.adopt(*lent, keys(1, 2)) == [False, True]
    assert_quiet(table, index)


@POLICIES
@pytest.mark.fault("H23")
def test_a_writer_that_dies_leaves_the_key_writable(policy: str) -> None:
    table, index = make_index(2, policy)
    dead = index.reserve(keys(1))
    assert index.lookup(key(1)) == 1
    assert index.abort(keys(1)) == 1
    again = index.reserve(keys(1))
    assert again.keys == keys(1)
    assert int(again.generations[0]) > int(dead.generations[0])
    index.commit(keys(1))
    lent = index.lend(1)
    _, slots, generations = index.clear()
    assert slots.tolist() == lent[0].tolist()
    assert index.release(slots, generations) == 1
    assert index.num_free == 2
    assert_quiet(table, index)


@POLICIES
@pytest.mark.fault("L07")
def test_every_path_leaves_the_pins_as_they_were(policy: str) -> None:
    table, index = make_index(8, policy, track_unsaved=True)
    put(index, keys(1, 2, 3))
    before = table.totals()
    with pytest.raises(KeyError):
        index.pin(keys(1, 2, 9))
    index.unpin(*index.pin(keys(1, 2, 3)))
    done, slots, generations = index.pin_for_service(keys(1, 9, 3))
    for one, slot, generation in zip(done, slots, generations, strict=True):
        assert table.key(int(slot)) == one
        table.unpin_service(int(slot), int(generation))
    index.touch(keys(1, 2, 3, 9))
    index.mark_saved(keys(1, 9))
    index.states(keys(1, 2, 9))
    assert table.set_crc(*(index.locate(key(1)) or (0, 0)), 1)
    index.abort(index.reserve(keys(4)).keys)
    index.give_back(*index.lend(3))
    with pytest.raises(ValueError, match="group"):
        index.pin([key(1), key(2, group=2)])
    assert table.totals() == before


@POLICIES
@pytest.mark.fault("L06")
def test_hit_rate_and_accounts_stay_over_a_long_run(policy: str) -> None:
    table, index = make_index(512, policy)
    rng = random.Random(5)
    shares = []
    for _ in range(10):
        hits = asked = 0
        for _ in range(1500):
            first = min(int(rng.expovariate(1 / 12)), 400) * 8
            wanted = [key(first + n) for n in range(8)]
            prefix = ready_prefix(index, wanted)
            held = index.pin(wanted[:prefix])
            got = index.reserve(wanted)
            index.unpin(*held)
            if rng.random() < 0.1:
                index.abort(got.keys)
            else:
                index.commit(got.keys)
            index.touch(wanted)
            hits, asked = hits + prefix, asked + 8
        shares.append(hits / asked)
        assert_quiet(table, index)
    assert max(shares[1:]) - min(shares[1:]) < 0.05
    assert min(shares[1:]) > 0.5


def test_slots_of_a_run_are_neighbours() -> None:
    _, index = make_index(64)
    assert index.reserve(keys(*range(32))).slots.tolist() == list(range(32))
    index.abort(keys(*range(8, 24)))
    assert index.reserve(keys(*range(100, 116))).slots.tolist() == list(range(8, 24))


def test_grow_adds_slots_and_checks_its_bounds() -> None:
    table, index = make_index(8)
    with pytest.raises(ValueError, match="grow goes from 8"):
        index.grow(7)
    with pytest.raises(ValueError, match="at most 8"):
        index.grow(9)
    assert table.num_slots == index.capacity == 8


def test_arguments_are_checked_before_anything_changes() -> None:
    table, index = make_index(4)
    put(index, keys(1, 2))
    slots, generations = index.pin(keys(1, 2))
    with pytest.raises(TypeError, match="int64"):
        index.unpin(slots.astype(np.int32), generations)
    with pytest.raises(TypeError, match="uint32"):
        index.unpin(slots, generations.astype(np.uint64))
    with pytest.raises((TypeError, BufferError, ValueError)):
        index.unpin(np.repeat(slots, 2)[::2], generations)
    with pytest.raises(ValueError, match="2 slots and 1 generations"):
        index.unpin(slots, generations[:1])
    with pytest.raises(IndexError):
        index.unpin(np.array([0, 4]), generations)
    lent = index.lend(2)
    with pytest.raises(ValueError, match="keys"):
        index.adopt(*lent, keys(5))
    with pytest.raises(ValueError, match="group"):
        index.adopt(*lent, [key(5), key(6, group=3)])
    assert (table.totals()["owner_pins"], index.num_lent) == (2, 2)
    index.unpin(slots, generations)
    index.give_back(*lent)
    assert_quiet(table, index)


@POLICIES
def test_a_remembered_key_is_believed_only_while_its_slot_holds_it(policy: str) -> None:
    """Eviction, reuse and `clear` come between two calls with the same keys."""
    table, index = make_index(4, policy)
    old = keys(1, 2, 3, 4)
    put(index, old)
    assert [index.lookup(one) for one in old] == [2, 2, 2, 2]
    put(index, keys(5, 6))  # in the slots of two of them
    present = [one for one in old if index.locate(one)]
    assert len(present) == 2
    assert index.states(old) == bytes(2 * (one in present) for one in old)
    assert index.commit(old) == []
    with pytest.raises(KeyError):
        index.pin(old)
    assert table.totals()["owner_pins"] == 0
    # The record of an orphan keeps its key, and still nobody finds it.
    slots, generations = index.pin(present)
    index.clear()
    assert [index.lookup(one) for one in present] == [0, 0]
    assert index.states(present) == b"\0\0"
    got = index.reserve(present)
    assert got.keys == present
    assert not set(got.slots.tolist()) & set(slots.tolist())
    index.unpin(slots, generations)
    assert index.reap() == 2
    index.commit(present)
    assert_quiet(table, index)


@POLICIES
def test_lookups_follow_no_list_into_another_key(policy: str) -> None:
    """The slot behind the last one is a guess; keys asked for in any order get their own answer."""
    _, index = make_index(300, policy)
    count = 300
    put(index, [key(n) for n in range(count)])
    index.touch([key(n) for n in range(count)])
    order = random.Random(5)
    for _ in range(3 * count):
        number = order.randrange(2 * count)
        for one in range(number, min(number + order.randrange(1, 5), 2 * count)):
            assert index.lookup(key(one)) == (2 if one < count else 0)


@POLICIES
def test_a_refused_reserve_leaves_no_expectation_behind(policy: str) -> None:
    """Victims are looked for before the keys are checked; a bad key must not leave them around."""
    _, index = make_index(4, policy)
    put(index, keys(1, 2, 3, 4))
    with pytest.raises(ValueError, match="group"):
        index.reserve([*keys(5, 6), key(7, 9)])
    assert len(index.keep_free(2)) == 2
    assert put(index, keys(5, 6)) == []
    assert len(put(index, keys(7))) == 1
    index.check()


@POLICIES
def test_a_key_twice_in_a_long_reserve_is_taken_once(policy: str) -> None:
    table, index = make_index(400, policy)
    put(index, [key(n) for n in range(1000, 1400)])
    wanted = [key(n) for n in range(150)]
    got = index.reserve(wanted + wanted[::-1] + [key(150)])
    assert got.keys == [*wanted, key(150)]
    assert len(set(got.slots.tolist())) == len(got.evicted) == 151
    assert [table.key(int(slot)) for slot in got.slots] == got.keys
    index.commit(got.keys)
    assert_quiet(table, index)
