# SPDX-License-Identifier: Apache-2.0
"""The slot table against its pure twin: every word, every pin and every refusal, step by step.

The index is asked only to change states; which slot it takes is its own affair (``test_index``) and
told to the twin, which refuses a slot that is in use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier._core._pure import ORPHAN, OWNER, READY, SERVICE, WRITING, PureSlots
from kvtier.errors import InternalError

from .build import key, make_index

SLOTS = 4
NUMBERS = 6
NAMES = st.integers(0, NUMBERS - 1).map(key)
KEYS = st.lists(NAMES, max_size=4, unique=True)
PLACES = st.integers(0, SLOTS - 1)
AGES = st.sampled_from([0, 0, 0, 0, -1, 1])
"""Generations from the one that the slot has: mostly that, sometimes another."""


def places(
    slots: list[int], generations: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    return np.array(slots, np.int64), np.array(generations, np.uint32)


class SlotMachine(RuleBasedStateMachine):
    """Owner and service, each with its calls, over one table."""

    @initialize(track_unsaved=st.booleans())
    def start(self, track_unsaved: bool) -> None:
        self.table, self.index = make_index(SLOTS, "lru", track_unsaved)
        self.twin = PureSlots(SLOTS)
        self.track_unsaved = track_unsaved
        self.lent: list[int] = []
        self.orphans: list[int] = []
        """Slots that had a writer at the last ``clear``."""

    def generation(self, slot: int, age: int = 0) -> int:
        return (self.twin.slots[slot].generation + age) % 2**32

    @rule(wanted=KEYS)
    def reserve(self, wanted: list[bytes]) -> None:
        got = self.index.reserve(wanted)
        for one in got.evicted:
            self.twin.free(self.twin.find(one), READY)
        for one, slot, generation in zip(
            got.keys, got.slots.tolist(), got.generations.tolist(), strict=True
        ):
            self.twin.write(slot, one, self.track_unsaved)
            assert generation == self.generation(slot)

    @rule(wanted=KEYS | st.just([key(number) for number in range(NUMBERS)]))
    def commit(self, wanted: list[bytes]) -> None:
        written = [one for one in wanted if self.twin.state(one) == WRITING]
        assert self.index.commit(wanted) == written
        for one in written:
            slot = self.twin.find(one)
            self.twin.ready(slot, one, None, self.twin.slots[slot].unsaved)

    @rule(wanted=KEYS)
    def abort(self, wanted: list[bytes]) -> None:
        written = [one for one in wanted if self.twin.state(one) == WRITING]
        assert self.index.abort(wanted) == len(written)
        for one in written:
            self.twin.free(self.twin.find(one), WRITING)

    @rule(wanted=KEYS)
    def drop(self, wanted: list[bytes]) -> None:
        twin = self.twin
        loose = [
            one
            for one in wanted
            if twin.state(one) == READY and twin.slots[twin.find(one)].pins == [0, 0]
        ]
        assert self.index.drop(wanted) == loose
        for one in loose:
            twin.free(twin.find(one), READY)

    @rule(n=st.integers(0, 2))
    def lend(self, n: int) -> None:
        slots, generations = self.index.lend(n)
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            self.twin.write(slot, b"", unsaved=False)
            assert generation == self.generation(slot)
            self.lent.append(slot)

    @precondition(lambda self: self.lent)
    @rule(one=NAMES, saved=st.booleans(), crc=st.none() | st.integers(0, 2**32 - 1))
    def adopt(self, one: bytes, saved: bool, crc: int | None) -> None:
        slot = self.lent.pop()
        crcs = None if crc is None else np.array([crc], np.uint32)
        (new,) = self.index.adopt(*places([slot], [self.generation(slot)]), [one], crcs, saved)
        assert new == (self.twin.find(one) < 0)
        if new:
            self.twin.ready(slot, one, crc, unsaved=not saved)
        else:
            self.twin.free(slot, WRITING)

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self) -> None:
        slot = self.lent.pop()
        self.index.give_back(*places([slot], [self.generation(slot)]))
        self.twin.free(slot, WRITING)

    @rule(one=NAMES)
    def pin(self, one: bytes) -> None:
        slot = self.twin.find(one)
        if self.twin.state(one) != READY:
            with pytest.raises(KeyError):
                self.index.pin([one])
            return
        assert self.twin.pin(slot, self.generation(slot), OWNER, one)
        slots, generations = self.index.pin([one])
        assert (slots.tolist(), generations.tolist()) == ([slot], [self.generation(slot)])

    @rule(slot=PLACES, age=AGES)
    def unpin(self, slot: int, age: int) -> None:
        arguments = places([slot], [self.generation(slot, age)])
        if self.twin.unpin(slot, self.generation(slot, age), OWNER):
            self.index.unpin(*arguments)
        else:
            with pytest.raises(InternalError, match="no owner pin in generation"):
                self.index.unpin(*arguments)

    @rule(slot=PLACES, age=AGES, own=st.booleans(), other=NAMES)
    def pin_service(self, slot: int, age: int, own: bool, other: bytes) -> None:
        one = (self.twin.slots[slot].key if own else b"") or other
        generation = self.generation(slot, age)
        expected = self.twin.pin(slot, generation, SERVICE, one)
        assert self.table.pin_service(slot, generation, one) is expected

    @rule(one=NAMES)
    def find_and_pin_service(self, one: bytes) -> None:
        slot = self.twin.find(one)
        found = self.table.find_and_pin_service(one)
        if self.twin.state(one) == READY:
            assert found == (slot, self.generation(slot))
            assert self.twin.pin(*found, SERVICE, one)
        else:
            assert found is None

    @rule(wanted=KEYS, times=st.sampled_from([1, 20]))
    def states(self, wanted: list[bytes], times: int) -> None:
        wanted = wanted * times  # more than are looked up together
        assert self.table.states(wanted) == self.twin.states(wanted)

    @rule(slot=PLACES, age=AGES)
    def unpin_service(self, slot: int, age: int) -> None:
        generation = self.generation(slot, age)
        if self.twin.unpin(slot, generation, SERVICE):
            self.table.unpin_service(slot, generation)
        else:
            with pytest.raises(InternalError, match="no service pin in generation"):
                self.table.unpin_service(slot, generation)

    @rule(start=PLACES, stop=PLACES)
    def clear_service_pins(self, start: int, stop: int) -> None:
        stop = max(start, stop + 1)
        expected = self.twin.clear_service_pins(start, stop)
        assert self.table.clear_service_pins(start, stop) == expected

    @rule(slot=PLACES, age=AGES, crc=st.integers(0, 2**32 - 1))
    def set_crc(self, slot: int, age: int, crc: int) -> None:
        generation = self.generation(slot, age)
        expected = self.twin.is_ready(slot, generation)
        if expected:
            self.twin.slots[slot].crc = crc
        assert self.table.set_crc(slot, generation, crc) is expected

    @rule(slot=PLACES, age=AGES)
    def mark_saved(self, slot: int, age: int) -> None:
        generation = self.generation(slot, age)
        expected = self.twin.is_ready(slot, generation)
        if expected:
            self.twin.slots[slot].unsaved = False
        assert self.table.mark_saved(slot, generation) is expected

    @rule()
    def clear(self) -> None:
        _, slots, generations = self.index.clear()
        before = {*self.orphans, *(i for i, s in enumerate(self.twin.slots) if s.state == ORPHAN)}
        left = [slot for slot in self.twin.clear() if slot not in before]
        assert sorted(slots.tolist()) == left
        assert generations.tolist() == [self.generation(slot) for slot in slots.tolist()]
        self.orphans += [slot for slot in left if self.twin.slots[slot].state == WRITING]
        self.lent.clear()

    @rule(slot=PLACES, age=AGES)
    def release(self, slot: int, age: int) -> None:
        fits = slot in self.orphans and age == 0
        assert self.index.release(*places([slot], [self.generation(slot, age)])) == fits
        if fits:
            self.orphans.remove(slot)
            self.twin.free(slot, WRITING)

    @rule()
    def reap(self) -> None:
        loose = [
            slot
            for slot, one in enumerate(self.twin.slots)
            if one.state == ORPHAN and one.pins == [0, 0]
        ]
        assert self.index.reap() == len(loose)
        for slot in loose:
            self.twin.free(slot, ORPHAN)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "table"):
            return
        self.index.check()
        table, slots = self.table, self.twin.slots
        for slot, one in enumerate(slots):
            assert table.state(slot) == one.state
            assert table.generation(slot) == one.generation
            assert [table.owner_pins(slot), table.service_pins(slot)] == one.pins
            if one.state:
                assert table.key(slot) == one.key
            if one.state and one.key:  # what is known of the chunk before is not of a lent slot
                assert table.crc(slot) == one.crc
                assert table.unsaved(slot) is one.unsaved
        for number in range(NUMBERS):
            assert table.find(key(number)) == self.twin.find(key(number))
        states = [one.state for one in slots]
        assert list(table.totals().values()) == [
            *(states.count(state) for state in range(4)),
            sum(one.pins[OWNER] for one in slots),
            sum(one.pins[SERVICE] for one in slots),
        ]


SlotMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.fault("C17", "C18")
class TestSlots(SlotMachine.TestCase):  # type: ignore[name-defined, misc]  # made by Hypothesis
    """The state machine."""
