# SPDX-License-Identifier: Apache-2.0
"""What one step may cost: bursts of answers, put-off chunks, waiting prompts; on a virtual clock.

Each budget is held against two things: no step goes beyond it, and nothing waits for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtier.engine import loads, stores
from kvtier.engine.planner import Planner
from kvtier.engine.supervisor import POLL_WORK, Supervisor
from kvtier.engine.transfers import Lent
from kvtier.obs.metrics import Recorder
from kvtier.runtime import messages as m
from kvtier.types import Lookup, Outcome, RequestContext
from tests.engine.rig import keys
from tests.engine.test_expiry import Clocked, Notes, clocked, end_finds, found

HEAVIEST = 128
"""Chunks of the heaviest message that the service sends (``finder.NEWS_CHUNKS``)."""


class _Nothing:
    """Stands for planner and registry, which a service that lives does not need."""

    def listen(self, heard: bool, now: float) -> None:
        """Nobody has asked it anything."""


def supervisor(notes: Notes, take: Callable[[m.ToOwner], None]) -> Supervisor:
    nothing: Any = _Nothing()
    one = Supervisor(notes, nothing, nothing, Recorder(), take, lambda: 0.0)
    one.up = True
    return one


def loaded(job: int, chunks: int) -> m.Found:
    return found(job, loaded=[0] * chunks, slots=[0] * chunks, crcs=[0] * chunks)


@settings(max_examples=60, deadline=None)
@given(
    bursts=st.lists(st.lists(st.integers(0, HEAVIEST), max_size=60), min_size=1, max_size=12),
)
def test_bursts_are_spread_in_order_and_nothing_waits_for_ever(bursts: list[list[int]]) -> None:
    notes, took, woken = Notes(), [], []
    one = supervisor(notes, took.append)
    one.on_message(lambda: woken.append(True))
    sent: list[m.Found] = []
    due: deque[tuple[int, int]] = deque()  # messages sent by then, and the last poll for them
    polls = 0

    def poll() -> None:
        nonlocal polls
        before = len(took)
        waiting = sum(m.work_of(message) for message in sent[before:])
        woken.clear()
        one.poll(0.0, {})
        polls += 1
        work = sum(m.work_of(message) for message in took[before:])
        assert work < max(POLL_WORK, waiting // 4) + m.work_of(loaded(0, HEAVIEST))
        assert len(took) > before or not waiting
        assert bool(woken) == (len(took) < len(sent))  # who sleeps is told that there is more
        while due and due[0][0] <= len(took):
            due.popleft()
        assert not due or polls < due[0][1]

    for burst in bursts:
        news = [loaded(len(sent) + i, chunks) for i, chunks in enumerate(burst)]
        sent += news
        notes.answers += news
        waiting = sum(m.work_of(message) for message in sent[len(took) :])
        # Later ones do not hold up those before them: a quarter a poll, then POLL_WORK a poll.
        quarters = math.ceil(math.log(max(1.0, waiting / (4 * POLL_WORK))) / math.log(4 / 3))
        due.append((len(sent), polls + quarters + 6))
        poll()
    while len(took) < len(sent):
        poll()
    assert took == sent


def test_a_dead_service_has_said_all_of_it() -> None:
    """What it said last is heard before its jobs are ended, however much that is."""
    notes, took = Notes(), []
    one = supervisor(notes, took.append)
    ended: list[int] = []
    planner: Any = one._planner
    planner.service_lost = lambda: ended.append(len(took))
    registry: Any = one._registry
    registry.forget = lambda source: None
    notes.answers += [loaded(i, HEAVIEST) for i in range(20)]
    one.poll(0.0, {})
    assert 0 < len(took) < 20
    type(notes).alive, alive = property(lambda self: False), type(notes).alive  # type: ignore[assignment, method-assign]  # restored below
    try:
        one.poll(1.0, {})
    finally:
        type(notes).alive = alive  # type: ignore[method-assign]  # as it was
    assert ended == [20]


def cascades(one: Clocked) -> list[m.Cascade]:
    return [message for message in one.notes.sent if isinstance(message, m.Cascade)]


def answer_cascades(one: Clocked, outcome: Outcome = Outcome.DONE) -> None:
    """The service ends every store under way, and gives its pins back."""
    for message in cascades(one):
        slots, generations = m.numbers(message.slots), m.words(message.generations)
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            one.engine.cache.slots.unpin_service(slot, generation)
        one.notes.answers.append(
            m.Stored(message.job, 0, bytes([outcome] * len(message.keys)), final=True)
        )
    one.notes.sent = [message for message in one.notes.sent if not isinstance(message, m.Cascade)]


def put_off(one: Clocked, names: Sequence[bytes]) -> None:
    """Chunks that the tier has no room for yet."""
    context = one.context()
    one.engine.commit(one.engine.reserve(list(names), context).keys, context)
    one.engine.finish_request(context)


@settings(max_examples=12, deadline=None)
@given(gone=st.sets(st.integers(0, 1299), max_size=1300), at_once=st.integers(1, 700))
def test_put_off_chunks_go_in_order_a_part_a_step(gone: set[int], at_once: int) -> None:
    chunks = 1300
    with clocked(slots=chunks + 100, max_inflight_bytes=at_once * 8192) as one:
        state = one.engine._tiers[0]
        state.writable = False
        one.engine.on_new_request(one.context())  # without one all would go at once
        names = keys(*range(chunks))
        put_off(one, names)
        one.after(0.0)
        assert len(state.backlog) == chunks
        assert len(one.engine._index.drop([names[i] for i in gone])) == len(gone)
        state.writable = True
        got: list[bytes] = []
        steps = 0
        while state.backlog or state.inflight_bytes:
            before = len(state.backlog)
            one.after(0.01)
            steps += 1
            assert before - len(state.backlog) <= stores.BACKLOG_CHUNKS
            now = [name for message in cascades(one) for name in message.keys]
            assert len(now) <= at_once
            got += now
            answer_cascades(one)
            # Each step sends what there is room for, or clears away a whole part of what is gone.
            assert steps <= chunks / min(at_once, stores.BACKLOG_CHUNKS) + 4
        assert got == [name for i, name in enumerate(names) if i not in gone]
        assert one.engine._index.oldest_unsaved(chunks) == []


def test_refused_chunks_are_offered_again_a_part_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BACKLOG_CHUNKS", 8)
    with clocked(slots=64) as one:
        names = keys(*range(30))
        put_off(one, names)
        answer_cascades(one, Outcome.DROPPED)
        one.after(0.0)
        state = one.engine._tiers[0]
        assert (len(state.refused), len(state.retries), len(state.backlog)) == (30, 30, 0)
        got: list[bytes] = []
        one.time.now += stores.RETRY_SECONDS
        for _ in range(5):
            one.after(0.0)
            now = [name for message in cascades(one) for name in message.keys]
            assert len(now) <= 8
            got += now
            answer_cascades(one)
        one.after(0.0)
        assert got == names
        assert not state.refused
        assert not state.retries


def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time a waiting prompt is walked."""
    walked: list[int] = []
    walk = Planner._walk

    def noted(self: Planner, ready: int, *rest: Any) -> Lookup:
        walked.append(ready)
        return walk(self, ready, *rest)

    monkeypatch.setattr(Planner, "_walk", noted)
    return walked


def waits(one: Clocked) -> RequestContext:
    """Keys 1 and 2 are in host memory and held, 3 and 4 asked for."""
    put_off(one, keys(1, 2))
    context = one.context()
    assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
    one.engine.end_step()
    return context


def test_without_news_a_waiting_prompt_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = scans(monkeypatch)
    with clocked() as one:
        context = waits(one)
        for _ in range(4):
            one.after(0.01)
            assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        assert len(walked) == 1
        # After a while their states are looked at, and nothing more where they are the same.
        one.after(loads.ANSWER_SECONDS)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        assert len(walked) == 1
        # Other keys are another question.
        assert one.engine.lookup_batch(keys(1, 2, 3), context) == (2, Lookup.RETRY)
        assert len(walked) == 2
        one.engine.end_step()
        (find,) = one.notes.finds()
        one.notes.answers.append(
            found(find.job, loaded=[0], slots=find.slots[:8], crcs=[0], present=1)
        )
        one.after(0.001)
        # News of its own count at once.
        answer = one.engine.lookup_batch(keys(1, 2, 3, 4), context)
        assert answer == (3, Lookup.RETRY)
        one.engine.finish_request(context)
        one.notes.answers.append(found(find.job, failed=[1], unused=find.slots[8:], final=True))
        one.after(0.0)


def test_what_others_bring_is_found_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with clocked() as one:
        context = waits(one)
        put_off(one, keys(3))
        one.after(0.001)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        one.after(loads.ANSWER_SECONDS)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (3, Lookup.RETRY)
        one.engine.finish_request(context)
        end_finds(one)


def test_an_answer_that_stands_ends_with_the_request_s_patience() -> None:
    with clocked() as one:
        context = waits(one)
        one.after(1.99)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        one.engine.end_step()
        one.after(0.005)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        one.after(0.006)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.MISS)
        one.engine.finish_request(context)
        end_finds(one)


def test_a_find_that_is_given_up_is_news() -> None:
    with clocked(load_timeout_seconds=0.03) as one:
        context = waits(one)
        one.after(0.031)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.MISS)
        one.engine.finish_request(context)
        end_finds(one)


def test_a_reset_is_news() -> None:
    with clocked() as one:
        context = waits(one)
        one.engine.reset()
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context)[0] == 0
        one.notes.answers.append(m.ResetDone())
        end_finds(one)
        one.engine.finish_request(context)
        one.after(0.0)


def test_what_an_answer_calls_ready_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it could be evicted while the answer stands; what cannot be held is walked."""
    monkeypatch.setattr(loads, "HOLD_CHUNKS", 1)
    walked = scans(monkeypatch)
    with clocked() as one:
        context = waits(one)
        assert one.held() == 1
        one.after(0.001)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        assert len(walked) == 2
        one.engine.end_step()
        assert one.held() == 2
        one.after(0.001)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context) == (2, Lookup.RETRY)
        assert len(walked) == 2
        # Loading a part gives the hold back, and the answer up.
        slots, generations = one.engine.pin(keys(1), context)
        one.engine.unpin(slots, generations, context)
        answer_cascades(one)
        one.after(0.001)
        assert one.engine._index.drop(keys(1)) == keys(1)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context)[0] == 0
        one.engine.finish_request(context)
        end_finds(one)


def test_a_prompt_that_cannot_be_held_gets_the_same_answer_for_the_same_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked = scans(monkeypatch)
    with clocked(slots=8) as one:
        put_off(one, keys(1, 2))
        monkeypatch.setattr(loads.Loads, "hold_limit", property(lambda self: 0))
        context = one.context()
        for _ in range(5):
            answer = one.engine.lookup_batch(keys(1, 2, 3, 4), context)
            assert answer == (2, Lookup.RETRY)
            one.after(0.001)
        assert len(walked) == 1
        assert one.held() == 0
        answer_cascades(one)
        assert one.engine._index.drop(keys(2)) == keys(2)
        one.after(loads.ANSWER_SECONDS)
        assert one.engine.lookup_batch(keys(1, 2, 3, 4), context)[0] == 1
        assert len(walked) == 2
        one.engine.finish_request(context)
        end_finds(one)


def test_lent_slots_are_taken_in_any_order_and_once() -> None:
    lent = Lent()
    lent.add(m.packed([5, 6]), m.packed_words([50, 60]))
    assert (len(lent), list(lent)) == (2, [5, 6])
    assert lent.take(m.packed([5, 6])).tolist() == [50, 60]
    assert (len(lent), list(lent)) == (0, [])
    with pytest.raises(KeyError):
        lent.take(m.packed([5, 6]))
    lent.add(m.packed([5, 6, 7]), m.packed_words([51, 61, 71]))
    lent.add(m.packed([8]), m.packed_words([81]))
    assert (len(lent), sorted(lent)) == (4, [5, 6, 7, 8])
    assert lent.take(m.packed([8, 6])).tolist() == [81, 61]
    assert lent.take(m.packed([7, 5])).tolist() == [71, 51]
    assert not len(lent)
    lent.add(m.packed([9]), m.packed_words([91]))
    with pytest.raises(KeyError):
        lent.take(m.packed([8]))
    assert lent.take(m.packed([9])).tolist() == [91]
