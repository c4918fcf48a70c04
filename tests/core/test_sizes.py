# SPDX-License-Identifier: Apache-2.0
"""Several size classes in one index: against the twin step by step, and single rules of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvtier._core._pure import READY, WRITING, Chunk, PureIndex, PureSizes
from kvtier._core.chunks import RequestChunks
from kvtier._core.index import Index
from kvtier._core.slots import SlotTable
from kvtier.errors import InternalError

from .build import assert_quiet, key, make_table, put
from .machine import machine

POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])
SLAB = 6
WIDTHS = (4, 1, 2, 1)
"""A slab has room for one, six or three chunks; two slots of it are of no use to the first."""
PAYLOADS = (40, 7, 20, 9)
SLABS = 5


def make_sizes(
    num_slabs: int = SLABS,
    policy: str = "lru",
    track_unsaved: bool = False,
    widths: Sequence[int] = WIDTHS,
    slab: int = SLAB,
) -> tuple[SlotTable, Index]:
    table = make_table(num_slabs * slab)
    payloads = PAYLOADS if widths is WIDTHS else [10 * width for width in widths]
    index = Index(table, payloads, policy, track_unsaved, widths, slab)
    index.grow(num_slabs * slab)
    return table, index


def wide(*numbers: int) -> list[bytes]:
    """Keys of the group whose chunks take four slots."""
    return [key(number, 0) for number in numbers]


def small(*numbers: int) -> list[bytes]:
    """Keys of a group whose chunks take one slot."""
    return [key(number, 1) for number in numbers]


NAMES = [key(number, group) for group in range(len(WIDTHS)) for number in range(10)]
KEY = st.sampled_from(NAMES)
KEYS = st.lists(KEY, max_size=6, unique=True)


class SizesMachine(machine(KEY, KEYS)):
    """Every call on both, with another side that pins through the table."""

    policy = "lru"

    @initialize(track_unsaved=st.booleans(), late=st.integers(0, 2))
    def start(self, track_unsaved: bool, late: int) -> None:
        self.table = make_table(SLABS * SLAB)
        self.index = Index(self.table, PAYLOADS, self.policy, track_unsaved, WIDTHS, SLAB)
        self.pure = PureSizes(SLABS - late, SLAB, WIDTHS, self.policy, track_unsaved)
        self.index.grow((SLABS - late) * SLAB)
        self.pinned: list[tuple[Chunk, int, int]] = []
        self.serviced: list[tuple[Chunk, int, int]] = []
        self.lent: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int]] = []
        """Lent slots of before a ``clear``."""
        self.orphans: tuple[list[int], list[int]] = ([], [])

    @rule(wanted=KEYS)
    def reserve(self, wanted: list[bytes]) -> None:
        got = self.index.reserve(wanted)
        slots = dict(zip(got.keys, got.slots.tolist(), strict=True))
        expected = self.pure.reserve(wanted, slots)
        assert (got.keys, got.evicted, got.evicted_unsaved, got.complete) == expected
        for one, slot, generation in zip(got.keys, got.slots, got.generations, strict=True):
            assert self.index.locate(one) == (slot, generation)

    @rule(wanted=KEYS)
    def store(self, wanted: list[bytes]) -> None:
        """Most chunks do not stay in WRITING, and are used."""
        self.reserve(wanted)
        self.commit(wanted)
        self.touch(wanted)

    @rule(wanted=KEYS)
    def pin(self, wanted: list[bytes]) -> None:
        wanted = [one for one in wanted if self.pure.lookup(one) == READY]
        slots, generations = self.index.pin(wanted)
        for one, slot, generation in zip(wanted, slots, generations, strict=True):
            self.chunk(one).owner += 1
            self.pinned.append((self.chunk(one), int(slot), int(generation)))

    def reap(self) -> None:
        assert self.index.reap() == self.pure.end_orphans(READY)

    @rule(n=st.integers(0, 7), group=st.integers(0, 3))
    def lend(self, n: int, group: int) -> None:
        slots, generations = self.index.lend(n, group)
        assert len(slots) == min(n, self.pure.free_for(self.pure.size_of[group]))
        self.pure.lend(group, slots.tolist())
        self.lent += zip(slots.tolist(), generations.tolist(), strict=True)

    @precondition(lambda self: self.lent)
    @rule(one=KEY, saved=st.booleans(), pin=st.booleans())
    def adopt(self, one: bytes, saved: bool, pin: bool) -> None:
        slot, generation = self.lent[-1]
        arrays = np.array([slot]), np.array([generation], np.uint32)
        if self.pure.slabs[slot // SLAB] != self.pure.of(one):
            with pytest.raises(ValueError, match="not of the size class"):
                self.index.adopt(*arrays, [one])
            return
        self.lent.pop()
        got = self.index.adopt(*arrays, [one], None, saved, pin)
        assert got == [self.pure.adopt(one, slot, saved)]
        if got[0] and pin:
            self.chunk(one).owner += 1
            self.pinned.append((self.chunk(one), slot, generation))

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self) -> None:
        slot, generation = self.lent.pop()
        self.index.give_back(np.array([slot]), np.array([generation], np.uint32))
        self.pure.give_back(slot)
        with pytest.raises(InternalError, match="is not lent"):
            self.index.give_back(np.array([slot]), np.array([generation], np.uint32))

    @rule(
        n=st.integers(0, 12),
        limit=st.integers(0, 5),
        group=st.integers(0, 3),
        saved_only=st.booleans(),
    )
    def keep_free(self, n: int, limit: int, group: int, saved_only: bool) -> None:
        unsaved: list[bytes] = []
        got = self.index.keep_free(n, limit, group, None if saved_only else unsaved)
        assert (got, unsaved) == self.pure.keep_free(n, limit, group, saved_only)

    @rule(wanted=KEYS)
    def mark_saved(self, wanted: list[bytes]) -> None:
        for one in wanted:
            if chunk := self.pure.get(one):
                chunk.unsaved = False
        self.index.mark_saved(wanted)

    @rule()
    def clear(self) -> None:
        gone, slots, generations = self.index.clear()
        assert sorted(gone) == sorted(self.pure.clear())
        self.orphans[0].extend(slots.tolist())
        self.orphans[1].extend(generations.tolist())
        self.lost += self.lent
        self.lent.clear()
        assert not any(self.index.lookup(one) for one in NAMES)

    @rule()
    def release(self) -> None:
        arrays = np.array(self.orphans[0], np.int64), np.array(self.orphans[1], np.uint32)
        count = self.index.release(*arrays)
        assert count == self.pure.end_orphans(WRITING) + len(self.lost)
        for slot, _ in self.lost:
            self.pure.give_back(slot)
        self.lost.clear()
        assert self.index.release(*arrays) == 0
        self.reap()

    @precondition(lambda self: self.pure.num_slabs < SLABS)
    @rule()
    def grow(self) -> None:
        self.pure.num_slabs += 1
        self.index.grow(self.pure.num_slabs * SLAB)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "index"):
            return
        index, pure = self.index, self.pure
        index.check()
        in_order = list(chain.from_iterable(map(PureIndex.keys, pure.sizes)))
        assert index.keys() == in_order
        chunks = {k: c for x in pure.sizes for one in x.classes for k, c in one.items()}
        ready = [one for one, c in chunks.items() if c.state == READY]
        assert index.num_ready == len(ready)
        assert index.num_writing == len(chunks) - len(ready)
        assert index.ready_bytes == sum(PAYLOADS[one[-1]] for one in ready)
        assert index.num_lent == len(self.lent)
        assert index.num_orphans == sum(len(x.orphans) for x in pure.sizes) + len(self.lost)
        for one, chunk in chunks.items():
            where = index.locate(one)
            assert where is not None
            assert where[0] == chunk.slot
        for group, size in enumerate(pure.size_of):
            assert index.free_for(group) == pure.free_for(size)
            assert index.capacity_for(group) == pure.sizes[size].capacity
            state, x = index.policy_state(group), pure.sizes[size]
            assert (state["t1"], state["t2"]) == tuple(map(len, x.classes))
            assert (state["b1"], state["b2"]) == tuple(map(len, x.ghosts))
            assert state["p"] == x.p
        used = index.num_writing + index.num_ready + index.num_lent + index.num_orphans
        assert index.num_free + used == index.capacity
        states = bytes(pure.lookup(one) for one in NAMES)
        assert index.states(NAMES) == states
        assert bytes(map(index.lookup, NAMES)) == states


class ArcSizesMachine(SizesMachine):
    policy = "arc"


MACHINE = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLruSizes = SizesMachine.TestCase
TestArcSizes = ArcSizesMachine.TestCase
TestLruSizes.settings = TestArcSizes.settings = MACHINE


def use(index: Index, wanted: list[bytes]) -> list[bytes]:
    """One request that stores chunks: what was evicted."""
    evicted = put(index, wanted)
    index.touch(wanted)
    return evicted


def tenfold(num_slabs: int, policy: str) -> tuple[SlotTable, Index]:
    """Slabs of one wide chunk (group 0) or ten small ones (group 1)."""
    return make_sizes(num_slabs, policy, widths=(10, 1), slab=10)


@POLICIES
def test_memory_goes_where_it_is_used(policy: str) -> None:
    """Only small chunks, then only wide ones, then small ones again: nearly all of it each time."""
    table, index = tenfold(60, policy)
    number = 0
    for group in (1, 0, 1):
        room = (60, 600)[group]
        for _ in range(3 * room):
            number += 1
            use(index, [key(number, group)])
        assert index.capacity_for(group) >= 0.95 * room
        assert index.ready_for(group) == index.capacity_for(group) - index.free_for(group)
    assert_quiet(table, index)


@POLICIES
@pytest.mark.parametrize("wide_part", [0.1, 0.5])
def test_classes_that_are_used_together_share_by_age(policy: str, wide_part: float) -> None:
    """The oldest chunks of both are of about the same age, and memory does not go to and fro."""
    _, index = tenfold(100, policy)
    rng = random.Random(5)
    ages: dict[bytes, int] = {}
    lives: tuple[list[int], list[int]] = ([], [])
    moves, before, steps = 0, 0, 12_000
    for number in range(steps):
        name = key(number, 0 if rng.random() < wide_part else 1)
        ages[name] = number
        for gone in use(index, [name]):
            lives[gone[-1]].append(number - ages.pop(gone))
        if number > steps // 2:
            moves += abs(index.capacity_for(0) - before)
        else:
            lives[0].clear()
            lives[1].clear()
        before = index.capacity_for(0)
    # Chunks of a slab that was taken go before their time: the longest lives count.
    oldest = [max(one) for one in lives]
    assert 0.7 < oldest[0] / oldest[1] < 1.4
    assert moves < steps // 100


@POLICIES
def test_an_older_chunk_of_another_class_goes_only_if_it_is_clearly_older(policy: str) -> None:
    """A quarter of the age of the own victim decides."""
    _, index = tenfold(4, policy)
    put(index, small(*range(10)))  # a slab, ranks 1 to 10
    put(index, wide(1, 2, 3))  # 11 to 13: all is taken
    # Age of the own victim: 13 - 11. The other's is 13 - 1.
    assert set(put(index, wide(4))) == set(small(*range(10)))
    put(index, wide(5))
    index.touch(wide(1, 3, 2))
    # Nothing but wide chunks now, so one of them makes room for small ones.
    (gone,) = put(index, small(20))
    assert gone == wide(4)[0]
    # The small ones are the youngest: wide chunks make room for themselves.
    assert put(index, wide(6)) == wide(5)
    assert index.capacity_for(1) == 10


@POLICIES
def test_a_slab_in_use_is_not_taken(policy: str) -> None:
    """Pinned, being written or lent: one chunk is enough. Then the reservation is incomplete, and
    complete when it has ended."""
    table, index = tenfold(3, policy)
    put(index, small(*range(9)))
    lent = index.lend(1, 1)
    put(index, small(*range(10, 20)))
    pinned = index.pin(small(13))
    writing = index.reserve(small(*range(20, 30)))
    assert len(writing.keys) == 10
    assert index.num_free == 0
    got = index.reserve(wide(1))
    assert (got.keys, got.evicted, got.complete) == ([], [], False)
    for end, gone in (
        (lambda: index.unpin(*pinned), small(*range(10, 20))),
        (lambda: index.give_back(*lent), small(*range(9))),
        (lambda: index.commit(writing.keys), small(*range(20, 30))),
    ):
        end()
        got = index.reserve(wide(gone[0][0]))
        assert got.complete
        assert sorted(got.evicted) == sorted(gone)
        index.check()
    index.commit(wide(0, 10, 20))
    assert_quiet(table, index)


@POLICIES
def test_slabs_that_cannot_go_do_not_hide_those_that_can(policy: str) -> None:
    """A search is bounded, and goes on where the last one ended."""
    _, index = tenfold(200, policy)
    held = []
    for slab in range(200):
        names = small(*range(10 * slab, 10 * slab + 10))
        put(index, names)
        if slab != 170:
            held.append(index.pin(names[9:]))
    tries = 0
    while not (got := index.reserve(wide(1))).complete:
        assert (got.keys, got.evicted) == ([], [])
        tries += 1
        assert tries < 60
    assert tries > 1
    assert sorted(got.evicted) == sorted(small(*range(1700, 1710)))


@POLICIES
def test_the_work_of_a_search_in_vain_does_not_grow(policy: str) -> None:
    """Chunks and slots looked at by a reserve that finds nothing to take; ten times the slabs."""
    steps = []
    for slabs in (50, 500):
        _, index = tenfold(slabs, policy)
        for slab in range(slabs):
            names = small(*range(10 * slab, 10 * slab + 10))
            put(index, names)
            index.pin(names[9:])
        before = index.list_steps
        assert not index.reserve(wide(1)).complete
        steps.append(index.list_steps - before)
    assert 0 < steps[1] <= steps[0] + 8 < 1000


@POLICIES
def test_chunks_that_no_tier_holds_go_last(policy: str) -> None:
    """A class loses unsaved chunks to another one only where that would lose some of its own."""
    _, index = make_sizes(4, policy, True, (10, 1), 10)
    put(index, small(*range(10)))
    put(index, wide(1, 2, 3))
    index.mark_saved(wide(1, 2, 3))
    # Older, but lost for good: a saved chunk of its own goes.
    got = index.reserve(wide(4))
    assert (got.evicted, got.evicted_unsaved) == (wide(1), [])
    index.commit(wide(4))
    assert index.keep_free(2, 10, group=0) == wide(2, 3)
    assert index.keep_free(3, 10, group=0) == []
    put(index, wide(5, 6))
    got = index.reserve(wide(7))
    assert sorted(got.evicted_unsaved) == sorted(small(*range(10)))


def test_room_ahead_is_taken_from_an_older_class() -> None:
    """``keep_free`` for loads is a class's way to grow if nothing is stored."""
    _, index = tenfold(10, "lru")
    put(index, small(*range(90)))
    put(index, wide(1))
    assert index.keep_free(3, 100, group=0) == small(*range(30))
    assert (index.free_for(0), index.capacity_for(0)) == (3, 1)
    slots, _ = index.lend(9, 0)
    assert len(slots) == 3
    assert index.capacity_for(0) == 4


def test_a_slab_is_nobodys_when_its_last_chunk_goes() -> None:
    _, index = tenfold(3, "arc")
    put(index, small(*range(25)))
    put(index, [])
    index.drop(small(*range(10, 25)))
    assert index.capacity_for(1) == 10
    assert (index.free_for(0), index.free_for(1)) == (2, 20)
    assert (index.capacity, index.num_free) == (30, 20)
    index.check()
    assert index.reserve(wide(1, 2)).evicted == []
    assert (index.capacity, index.num_free) == (12, 0)


def test_only_whole_slabs_come() -> None:
    table = make_table(30)
    index = Index(table, (100, 10), "lru", False, (10, 1), 10)
    with pytest.raises(ValueError, match="whole slabs of 10, got 15"):
        index.grow(15)
    index.grow(10)
    assert not index.reserve(wide(1, 2)).complete
    index.grow(30)
    assert index.reserve(wide(2, 3)).complete


@pytest.mark.parametrize(("widths", "slab"), [((1,), 2), ((1, 3), 2), ((0, 1), 2), ((1, 2, 1), 4)])
def test_widths_fit_their_slabs(widths: tuple[int, ...], slab: int) -> None:
    with pytest.raises(ValueError, match="widths"):
        Index(make_table(8), (10, 20), "lru", False, widths, slab)


@POLICIES
def test_metadata_stays_small(policy: str) -> None:
    _, index = make_sizes(1000, policy, widths=(10, 1), slab=10)
    assert index.metadata_bytes_per_slot <= 160


@POLICIES
@pytest.mark.parametrize("sizes", [(10, 1), (86, 25, 6)])
def test_full_of_all_sizes_little_is_padding(policy: str, sizes: tuple[int, ...]) -> None:
    """Every slot of every slab that a chunk can have is had, whatever the mix was before."""
    slab = max(sizes) * 3
    table, index = make_sizes(40, policy, widths=sizes, slab=slab)
    rng = random.Random(3)
    for number in range(20 * len(sizes) * index.free_for(len(sizes) - 1) // 10):
        use(index, [key(number, rng.randrange(len(sizes)))])
    taken = sum(
        index.ready_for(group) * slab / (slab // width) for group, width in enumerate(sizes)
    )
    assert taken >= 0.95 * 40 * slab
    assert_quiet(table, index)


def test_holds_are_counted_in_slots() -> None:
    _, index = make_sizes()
    names = [*wide(0), *small(0, 1, 2)]
    put(index, names)
    for slots, held, taken in ((3, 0, 0), (4, 1, 4), (7, 1, 4), (8, 2, 5), (9, 3, 6), (None, 4, 7)):
        chunks = RequestChunks(index)
        chunks.look(names)
        chunks.hit_all()
        assert chunks.hold(9, slots=slots) == (held, 4 - held)
        assert (chunks.num_held, chunks.held_slots) == (held, taken)
        assert chunks.unhold(wide(0)) == min(held, 1)
        assert chunks.held_slots == max(taken - 4, 0)
        chunks.unhold()
        assert chunks.held_slots == 0
    slots, generations = index.lend(1, 0)
    chunks = RequestChunks(index)
    chunks.look(wide(1))
    assert index.adopt(slots, generations, wide(1), pin=True) == [True]
    assert chunks.held(np.array([0]), slots, generations, [True]) == 1
    assert chunks.held_slots == 4
    chunks.unhold()
