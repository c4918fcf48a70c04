# SPDX-License-Identifier: Apache-2.0
"""What a request knows of its chunks, against dictionaries that say the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier._core.chunks import ASKED, GONE, LOADED, RequestChunks
from kvtier._core.slots import READY, WRITING
from kvtier.errors import InternalError
from kvtier.types import Lookup

from .build import key, keys, make_index, put

CAPACITY = 8


def copy(one: bytes) -> bytes:
    """An equal key that is another object."""
    return bytes(bytearray(one))


KEYS = st.lists(st.integers(0, 12).map(lambda i: copy(key(i))), max_size=8, unique=True)


class ChunksMachine(RuleBasedStateMachine):
    """Every call on both; chunks come and go in host memory meanwhile."""

    @initialize()
    def start(self) -> None:
        self.table, self.index = make_index(CAPACITY, "lru", False)
        self.chunks = RequestChunks(self.index)
        self.forget()
        self.finds: list[tuple[list[bytes], npt.NDArray[np.int64]]] = []

    def forget(self) -> None:
        self.known: list[bytes] = []
        self.status: dict[bytes, int] = {}
        self.seen: dict[bytes, int] = {}
        self.hits: set[bytes] = set()
        self.counted: set[bytes] = set()
        self.held: set[bytes] = set()
        self.unsent: list[bytes] = []
        self.batch: list[bytes] = []
        self.clean = False  # the batch stands, and no state has changed since

    def know(self, names: list[bytes]) -> None:
        self.known += [one for one in names if one not in self.known]

    # Host memory.
    @rule(names=KEYS)
    def write(self, names: list[bytes]) -> None:
        self.index.reserve(names)

    @rule(names=KEYS)
    def commit(self, names: list[bytes]) -> None:
        self.index.commit(names)

    @rule(names=KEYS)
    def drop(self, names: list[bytes]) -> None:
        dropped = self.index.drop(names)
        assert not self.held.intersection(dropped)

    # Questions.
    @rule(names=KEYS)
    def look(self, names: list[bytes]) -> None:
        states = [self.index.lookup(one) for one in names]
        ready, same = self.chunks.look(names)
        assert ready == next((i for i, s in enumerate(states) if s != READY), len(names))
        repeated = bool(names) and names == self.batch and self.clean
        unchanged = all(self.seen.get(n) == s for n, s in zip(names, states, strict=True))
        assert same == (repeated and unchanged)
        self.know(names)
        self.batch = names
        self.clean = True
        self.seen.update(zip(names, states, strict=True))
        assert self.chunks.repeats([copy(one) for one in names])
        assert not self.chunks.repeats([*names, key(99)])
        assert self.chunks.writing == (WRITING in states)

    @rule(names=KEYS)
    def note(self, names: list[bytes]) -> None:
        self.chunks.note(names)
        for one in names:
            state = self.index.lookup(one)
            if self.seen.get(one, 0) != state:
                self.clean = False
            self.seen[one] = state
            if state == READY:
                self.hits.add(one)
        self.know(names)
        if not self.clean:
            self.batch = []

    @rule(waits=st.booleans())
    def answer(self, waits: bool) -> None:
        expected = Lookup.MISS
        holdable = False
        for one in self.batch:
            state, status = self.seen[one], self.status.get(one, 0)
            if state == READY:
                self.hits.add(one)
                holdable = holdable or one not in self.held
            elif waits and state == WRITING and status != GONE:
                expected = expected or Lookup.HIT_PENDING
            elif waits and status == ASKED:
                expected = expected or Lookup.RETRY
            else:
                break
        assert self.chunks.answer(waits) == expected
        assert self.chunks.holdable == holdable

    @rule()
    def hit_all(self) -> None:
        self.chunks.hit_all()
        self.hits.update(one for one in self.batch if self.seen[one] == READY)

    @rule(data=st.data(), single=st.booleans())
    def ask(self, data: st.DataObject, single: bool) -> None:
        if single:
            one = data.draw(st.integers(0, 12).map(key))
            picked = [] if self.status.get(one) else [one]
            self.know([one])
            self.chunks.pick_one(one)
        else:
            picked = []
            for one in self.batch:
                state, status = self.seen[one], self.status.get(one, 0)
                if state == READY or (state == WRITING and status != GONE) or status == ASKED:
                    continue
                if status:
                    break
                picked.append(one)
            assert self.chunks.pick() == picked
        asked = data.draw(st.integers(0, len(picked)))
        gone = data.draw(st.integers(0, len(picked) - asked))
        with pytest.raises(ValueError, match="of"):
            self.chunks.settle(asked, len(picked) - asked + 1)
        self.chunks.settle(asked, gone)
        self.status.update(dict.fromkeys(picked[:asked], ASKED))
        self.status.update(dict.fromkeys(picked[asked : asked + gone], GONE))
        self.unsent += picked[:asked]

    # Answers of the tiers.
    @rule()
    def send(self) -> None:
        names, places = self.chunks.take_unsent()
        assert sorted(names) == sorted(self.unsent)
        self.unsent = []
        if names:
            self.finds.append((names, places))

    @precondition(lambda self: self.finds)
    @rule(data=st.data(), some=st.booleans())
    def gone(self, data: st.DataObject, some: bool) -> None:
        names, places = data.draw(st.sampled_from(self.finds))
        if not some:
            self.chunks.gone(places)
            self.status.update((n, GONE) for n in names if self.status[n] == ASKED)
            return
        chosen = data.draw(st.lists(st.integers(0, len(names) - 1)))
        self.chunks.gone(places, np.array(chosen, np.int64))
        self.status.update((names[i], GONE) for i in chosen)

    @precondition(lambda self: self.finds)
    @rule(data=st.data(), pin=st.booleans())
    def load(self, data: st.DataObject, pin: bool) -> None:
        names, places = data.draw(st.sampled_from(self.finds))
        slots, generations = self.index.lend(len(names))
        names, places = names[: len(slots)], places[: len(slots)]
        new = self.index.adopt(slots, generations, names, pin=pin)
        self.chunks.loaded(places)
        self.status.update(dict.fromkeys(names, LOADED))
        if not pin:
            return
        came = {one for one, is_new in zip(names, new, strict=True) if is_new}
        assert self.chunks.held(places, slots, generations, new) == len(came)
        assert not came & self.held
        others = [one for one in names if one not in came]
        can = {one for one in others if self.index.lookup(one) == READY}
        fresh = {one for one in can if one not in self.held}
        got = self.chunks.hold(len(names), places[~np.array(new, bool)])
        assert got == (len(fresh), len(set(others) - can - self.held))
        self.held |= came | fresh

    # Holds.
    @rule(limit=st.integers(0, 6))
    def hold(self, limit: int) -> None:
        wanted = [one for one in self.known if one in self.hits and one not in self.held]
        # What is told of a chunk is what was seen of it: one that has been another since is not it.
        before = {one: self.index.locate(one) for one in wanted}
        pinned, left = self.chunks.hold(limit)
        assert pinned + left == len(wanted)
        now = [one for one in wanted if self.pins(one) > (one in self.held)]
        assert len(now) == pinned <= limit
        assert all(self.index.lookup(one) == READY for one in now)
        assert before == {one: self.index.locate(one) for one in wanted}
        self.held.update(now)

    def pins(self, one: bytes) -> int:
        place = self.index.locate(one)
        return 0 if place is None else self.table.owner_pins(place[0])

    @rule(names=st.none() | KEYS)
    def unhold(self, names: list[bytes] | None) -> None:
        back = self.held if names is None else self.held.intersection(names)
        assert self.chunks.unhold(names) == len(back)
        self.held = self.held - back

    @rule()
    def count(self) -> None:
        absent = {one for one in self.status if one not in self.counted}
        hits = self.hits - self.counted - absent
        assert self.chunks.count() == (len(hits), len(absent))
        self.counted |= absent | hits
        self.hits = set()

    @rule()
    def clear(self) -> None:
        if self.held:
            with pytest.raises(ValueError, match=f"{len(self.held)} chunks are held"):
                self.chunks.clear()
            return
        self.chunks.clear()
        self.forget()
        self.finds = []

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "chunks"):
            return
        assert self.chunks.num_held == self.chunks.held_slots == len(self.held)
        assert self.chunks.num_unsent == len(self.unsent)
        assert len(self.chunks) == len(self.known)
        for one in self.known:
            assert self.pins(one) == (one in self.held)
            assert self.chunks.status(one) == self.status.get(one, 0)

    def teardown(self) -> None:
        if hasattr(self, "chunks"):
            self.chunks.unhold()
            assert self.table.totals()["owner_pins"] == 0


ChunksMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestChunks = ChunksMachine.TestCase


def test_a_key_that_stands_twice_is_asked_for_held_and_given_back_once() -> None:
    table, index = make_index(CAPACITY, "lru", False)
    chunks = RequestChunks(index)
    one, two = keys(0, 1)
    put(index, [one])
    names = [one, one, two, two]
    assert chunks.look(names) == (2, False)
    assert chunks.pick() == [two]
    chunks.settle(1, 0)
    assert chunks.answer(True) == Lookup.RETRY
    assert chunks.take_unsent()[0] == [two]
    assert chunks.hold(9) == (1, 0)
    assert table.totals()["owner_pins"] == 1
    assert chunks.unhold([one, one]) == 1
    assert table.totals()["owner_pins"] == 0


def test_a_chunk_that_went_and_came_back_is_not_held_by_its_old_slot() -> None:
    table, index = make_index(CAPACITY, "lru", False)
    chunks = RequestChunks(index)
    names = keys(0, 1, 2)
    put(index, names)
    assert chunks.look(names) == (3, False)
    chunks.hit_all()
    assert index.drop(names[1:2]) == names[1:2]
    put(index, [key(77), *names[1:2]])
    assert chunks.hold(9) == (2, 1)
    assert table.totals()["owner_pins"] == 2
    chunks.unhold()


def test_wrong_places_are_refused() -> None:
    _, index = make_index(CAPACITY, "lru", False)
    chunks = RequestChunks(index)
    names = keys(0, 1)
    put(index, names)
    chunks.look(names)
    for places in (np.array([2]), np.array([-1])):
        with pytest.raises(IndexError, match="place"):
            chunks.gone(places)
        with pytest.raises(IndexError, match="place"):
            chunks.hold(1, places)
    with pytest.raises(IndexError, match="position 1 of 1"):
        chunks.gone(np.array([0]), np.array([1]))
    with pytest.raises(TypeError, match="int64"):
        chunks.gone(np.array([0], np.int32))
    with pytest.raises(TypeError, match="bytes"):
        chunks.pick_one("key")  # type: ignore[arg-type]
    slots, generations = index.pin(names[:1])
    places = np.array([0])
    assert chunks.held(places, slots, generations, [True]) == 1
    with pytest.raises(InternalError, match="held twice"):
        chunks.held(places, slots, generations, [True])
    chunks.unhold()


def test_a_touch_counts_once_and_by_position() -> None:
    _, index = make_index(4, "arc", False)
    a, b, c, d = keys(0, 1, 2, 3)
    put(index, [a, b, c, d])
    index.touch([a, b, a, c, d])  # the first one renews only
    assert index.policy_state()["t2"] == 0
    index.touch([b, a, b], {a: 2, b: 1})
    assert index.policy_state()["t2"] == 2
    # By position: the prefix, b, goes last.
    index.touch([c, d], {c: 1})  # not all have one: as given
    got = index.reserve(keys(4, 5, 6, 7))
    assert got.evicted == [a, b, d, c]
