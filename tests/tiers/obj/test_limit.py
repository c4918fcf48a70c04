# SPDX-License-Identifier: Apache-2.0
"""The adaptive limit, on a virtual clock and against stores of known capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.obj.limit import START, Limit, Rank


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rounds(limit: Limit, clock: Clock, rate_of: Callable[[int], float], n: int) -> list[int]:
    """Places after each of `n` rounds beside a store that moves so much with so many requests."""
    places = []
    for _ in range(n):
        asyncio.run(fill(limit))
        now = limit.places
        clock.now += now / rate_of(now)
        for _ in range(now):
            limit.give(Rank.LOAD, 1)
        places.append(limit.places)
    return places


async def fill(limit: Limit) -> None:
    """Every place is taken, and one request waits in vain."""
    while limit.taken < limit.places:
        await limit.take(Rank.LOAD)
    waits = asyncio.create_task(limit.take(Rank.LOAD), name="waits")
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)


@pytest.mark.parametrize("knee", [8, 20, 50])
def test_it_grows_while_throughput_grows(knee: int) -> None:
    clock = Clock()
    limit = Limit(1000, clock)
    places = rounds(limit, clock, lambda n: 100.0 * min(n, knee), 200)
    # It finds the knee within its first steps, which are doublings, and stays there, a look a
    # quarter beyond now and then aside.
    assert all(one <= 2.5 * knee + 1 for one in places[50:])
    assert all(one >= 0.75 * knee for one in places[50:])
    assert sum(one > 1.6 * knee for one in places[50:]) < 0.2 * len(places[50:])


def test_the_start_is_short_and_a_bad_round_costs_little() -> None:
    clock = Clock()
    assert rounds(Limit(64, clock), clock, lambda n: 100.0 * n, 3) == [16, 32, 64]
    limit = Limit(64, clock)
    assert rounds(limit, clock, lambda n: 100.0 * n, 1) == [16]
    assert rounds(limit, clock, lambda n: 50.0, 1) == [8]
    assert rounds(limit, clock, lambda n: 100.0 * n, 14)[-1] >= 40


def test_no_doubling_after_the_store_asked_for_less() -> None:
    clock = Clock()
    limit = Limit(64, clock)
    assert rounds(limit, clock, lambda n: 100.0 * n, 2) == [16, 32]
    limit.slow_down(clock.now)
    assert rounds(limit, clock, lambda n: 100.0 * n, 3) == [20, 25, 31]


def test_it_ends_at_the_most() -> None:
    clock = Clock()
    limit = Limit(40, clock)
    assert rounds(limit, clock, lambda n: 100.0 * n, 50)[-1] == 40
    assert Limit(3, clock).places == 3


def test_a_store_that_gets_better_is_found_out() -> None:
    clock = Clock()
    limit = Limit(1000, clock)
    rounds(limit, clock, lambda n: 100.0 * min(n, 10), 100)
    assert limit.places < 20
    places = rounds(limit, clock, lambda n: 100.0 * min(n, 100), 600)
    assert places[-1] >= 75


def mixed(limit: Limit, clock: Clock, questions: int, loads: int, knee: int, n: int) -> list[int]:
    """Places after each of `n` rounds of questions and loads of a mebibyte, taken in turns, beside
    a store that answers up to `knee` of either at a time."""
    places = []
    for _ in range(n):
        asyncio.run(fill(limit))
        now = limit.places
        kinds = [Rank.QUESTION] * questions + [Rank.LOAD] * loads
        for i in range(now):
            clock.now += 0.01 / min(now, knee)
            rank = kinds[i % len(kinds)]
            limit.give(rank, 1 if rank is Rank.QUESTION else 1 << 20)
        places.append(limit.places)
    return places


def test_questions_are_compared_with_questions() -> None:
    clock = Clock()
    limit = Limit(64, clock)
    assert max(mixed(limit, clock, 0, 1, 8, 50)[20:]) < 16
    # No number of answers comes up to the bytes of the loads before.
    assert mixed(limit, clock, 1, 0, 64, 12)[-1] >= 32


@pytest.mark.parametrize(("questions", "loads"), [(15, 1), (3, 1), (1, 1), (1, 15)])
def test_questions_between_loads_do_not_make_it_shrink(questions: int, loads: int) -> None:
    clock = Clock()
    limit = Limit(64, clock)
    places = mixed(limit, clock, questions, loads, 32, 400)
    assert all(one >= 24 for one in places[100:])


def test_who_goes_first() -> None:
    """Questions, then loads, then stores; each fourth place is for the last of them."""

    async def main() -> list[str]:
        limit = Limit(1, Clock())
        await limit.take(Rank.STORE)
        order: list[str] = []

        async def one(rank: Rank, name: str) -> None:
            await limit.take(rank)
            order.append(name)
            limit.give(Rank.LOAD, 1)

        waits = [
            *((Rank.STORE, f"store {i}") for i in range(3)),
            *((Rank.LOAD, f"load {i}") for i in range(4)),
            (Rank.QUESTION, "question"),
        ]
        tasks = [asyncio.create_task(one(*wait), name=wait[1]) for wait in waits]
        await asyncio.sleep(0)
        limit.give(Rank.LOAD, 1)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(main()) == [
        *("question", "load 0", "load 1", "store 0"),
        *("load 2", "load 3", "store 1", "store 2"),
    ]


def test_idle_rounds_say_nothing() -> None:
    """Ten requests a second, each alone, need no more places than one."""
    clock = Clock()
    limit = Limit(1000, clock)
    for _ in range(1000):
        asyncio.run(limit.take(Rank.LOAD))
        clock.now += 0.01
        limit.give(Rank.LOAD, 1)
    assert limit.places == START


def test_slow_down_halves_once_for_all_that_was_sent_before() -> None:
    clock = Clock()
    limit = Limit(1000, clock)
    rounds(limit, clock, lambda n: 100.0 * n, 20)
    before = limit.places
    sent = clock.now
    clock.now += 1.0
    for _ in range(10):
        limit.slow_down(sent)
    assert limit.places == before // 2
    clock.now += 1.0
    limit.slow_down(clock.now)
    assert limit.places == before // 4
    for _ in range(20):
        clock.now += 1.0
        limit.slow_down(clock.now)
    assert limit.places == 1
    # Later it grows again.
    assert rounds(limit, clock, lambda n: 100.0 * n, 100)[-1] > before // 4


@given(
    steps=st.lists(
        st.sampled_from(["take", "cancel", "cancel late", "cancel early", "give", "slow"]),
        max_size=200,
    ),
    most=st.integers(1, 20),
)
def test_places_are_never_lost_nor_made(steps: list[str], most: int) -> None:
    async def main() -> None:
        clock = Clock()
        limit = Limit(most, clock)
        tasks: list[asyncio.Task[None]] = []
        held = 0

        async def settle() -> None:
            nonlocal held
            for _ in range(3):
                await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                held += not task.cancelled()

        for number, step in enumerate(steps):
            clock.now += 0.1
            if step == "take":
                take = limit.take(Rank(number % len(Rank)))
                tasks.append(asyncio.create_task(take, name="take"))
            elif step.startswith("cancel") and tasks:
                if step == "cancel late" and held:
                    # A place is given and the one who gets it is cancelled in the same turn.
                    limit.give(Rank.LOAD, 1)
                    held -= 1
                tasks[0].cancel()
                if step == "cancel early" and held:
                    # It is cancelled, and a place comes back before it has heard of that.
                    limit.give(Rank.LOAD, 1)
                    held -= 1
            elif step == "give" and held:
                limit.give(Rank.LOAD, 1)
                held -= 1
            elif step == "slow":
                limit.slow_down(clock.now)
            await settle()
            assert limit.taken == held
            assert 1 <= limit.places <= most
            # Nobody waits beside a free place.
            assert not tasks or limit.taken >= limit.places
        while held or tasks:
            if held:
                limit.give(Rank.LOAD, 1)
                held -= 1
            await settle()
        assert limit.taken == 0

    asyncio.run(main())
