# SPDX-License-Identifier: Apache-2.0
"""Absence in a tier of this instance alone: known without asking, and never where a key is there.

With the real service, and on a virtual clock where the test is the service.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._core.keyfilter import KeyFilter
from kvtier._core.layout import crc32c
from kvtier.engine import supervisor as supervisor_module
from kvtier.engine.contents import Contents
from kvtier.runtime import lister as lister_module
from kvtier.runtime import messages as m
from kvtier.testing.faults import Script
from kvtier.types import GroupGeometry, Lookup, Outcome, RequestContext, TierMatch
from tests.engine.rig import CHUNK, Rig, key, keys, payload, rig, scripted
from tests.engine.test_expiry import Clocked, clocked, end_finds, found

ROOM = 64


def contents(one: Rig, tier: int = 0) -> Contents:
    return one.engine._planner._tiers[tier].contents


def known(one: Rig, *tiers: int) -> None:
    """Wait until the contents of these tiers are known (all, if none is named)."""
    numbers = tiers or range(len(one.engine.config.tiers))
    one.until(lambda: all(contents(one, i)._filter is not None for i in numbers))


def told(messages: Sequence[m.ToService]) -> list[list[bytes]]:
    return [message.keys for message in messages if isinstance(message, m.Find)]


class Watch:
    """Notes what goes out to the service."""

    def __init__(self, one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[m.ToService] = []
        carrier = one.engine._supervisor.carrier
        send = carrier.send

        def noting(messages: Sequence[m.ToService]) -> bool:
            self.sent += messages
            return send(messages)

        monkeypatch.setattr(carrier, "send", noting)

    @property
    def finds(self) -> list[list[bytes]]:
        return told(self.sent)


def tier_of(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "fs":
        return {"type": "fs", "name": "t", "root_dir": str(folder), "private": True}
    return {"type": "example", "name": "t"}


def evict(one: Rig, slots: int) -> None:
    """Fill host memory with other chunks."""
    one.store(keys(*range(9000, 9000 + slots)))
    one.settle()


KINDS = ["example", "fs"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_cold_prompt_is_a_miss_at_once(
    kind: str, isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tiers=[tier_of(kind, tmp_path)], isolation=isolation) as one:
        known(one)
        watch = Watch(one, monkeypatch)
        batch, single = one.context(), one.context()
        assert one.engine.lookup_batch(keys(*range(100)), batch) == (0, Lookup.MISS)
        assert one.engine.lookup(key(1), single) is Lookup.MISS
        assert one.engine.lookup(key(2), single) is Lookup.MISS
        one.engine.end_step()
        assert one.engine.lookup_batch(keys(*range(100)), batch) == (0, Lookup.MISS)
        assert one.engine.idle
        one.settle()
        assert watch.finds == []
        assert one.value("kvtier_lookup_chunks_total", "t", "miss") == 102
        one.engine.finish_request(batch)
        one.engine.finish_request(single)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_is_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(slots=8, tiers=[tier_of(kind, tmp_path)]) as one:
        known(one)
        one.store(keys(1, 2, 3))
        one.settle()
        evict(one, 8)
        assert not any(one.engine.holds(name) for name in keys(1, 2, 3))
        watch = Watch(one, monkeypatch)
        # What is behind the first that nobody has is not asked for.
        assert one.load(keys(1, 2, 3, 4, 5)) == 3
        assert watch.finds == [keys(1, 2, 3)]
        assert one.value("kvtier_lookup_chunks_total", "t", "hit") == 3
        assert one.value("kvtier_lookup_chunks_total", "t", "miss") == 2
        evict(one, 8)
        context = one.context()
        one.until(lambda: one.engine.lookup(key(2), context) is Lookup.HIT)
        assert one.engine.lookup(key(4), context) is Lookup.MISS
        one.engine.finish_request(context)
        one.settle()
        # A hole ends the prefix, and what is ready in host memory is no hole.
        evict(one, 8)
        one.store(keys(2))
        one.settle()
        assert one.load(keys(1, 2, 3, 7, 1)) == 3


def test_a_restart_finds_what_is_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of("fs", tmp_path)
    with rig(slots=8, tiers=[tier]) as one:
        one.store(keys(1, 2, 3))
        one.settle()
    with rig(slots=8, tiers=[tier]) as one:
        # Before the walk has seen all of it too.
        assert one.load(keys(1, 2)) == 2
        known(one)
        watch = Watch(one, monkeypatch)
        assert one.ask(keys(50, 1), one.context()) == (0, 1)
        assert one.load(keys(3, 2, 60)) == 2
        assert watch.finds == [keys(3)]  # the other is in host memory


@pytest.mark.fault("K08")
def test_after_the_death_of_the_service_everything_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_SECONDS", 0.05)
    with rig(slots=8, tiers=[tier_of("fs", tmp_path)], isolation="process") as one:
        known(one)
        one.store(keys(1, 2, 3))
        one.settle()
        evict(one, 8)
        os.kill(one.engine._supervisor.carrier.pid, signal.SIGKILL)
        one.until(lambda: not one.engine._supervisor.up)
        assert contents(one)._filter is None
        one.until(lambda: one.engine._supervisor.up)
        known(one)
        assert one.ask(keys(50), one.context()) == (0, 1)
        assert one.load(keys(1, 2, 3)) == 3
    caplog.get_records("call").clear()


@pytest.mark.fault("C24")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_reset", ["new_epoch", "keep"])
def test_after_a_reset(kind: str, on_reset: str, tmp_path: Path) -> None:
    with rig(slots=8, tiers=[tier_of(kind, tmp_path)], on_reset=on_reset) as one:
        known(one)
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.until(lambda: not one.engine._planner.reset_pending)
        known(one)
        assert one.ask(keys(50), one.context()) == (0, 1)
        if on_reset == "keep":
            assert one.load(keys(1, 2)) == 2
        else:
            assert one.ask(keys(1, 2), one.context()) == (0, 1)
        one.store(keys(3, 4))
        one.settle()
        evict(one, 8)
        assert one.load(keys(3, 4)) == 2


def test_listed_anew_after_many_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lister_module, "SPARE_KEYS", 8)
    firsts = []
    take = Contents.take

    def counting(self: Contents, message: m.Contents, under_way: Any) -> None:
        firsts.append(message.room) if not message.bits else None
        take(self, message, under_way)

    monkeypatch.setattr(Contents, "take", counting)
    with rig(slots=8, tiers=[tier_of("example", Path())]) as one:
        known(one)
        for start in range(0, 40, 4):
            one.store(keys(*range(start, start + 4)))
            one.settle()
        one.until(lambda: len(firsts) >= 3)
        known(one)
        one.settle()
        # Each has room for what is there and as much again.
        assert firsts[0] == 8
        assert all(later >= 2 * 8 for later in firsts[1:])
        for start in range(0, 40, 4):
            assert one.load(keys(*range(start, start + 4))) == 4


@pytest.mark.parametrize("how", ["raises", "hangs", "hangs for good"])
def test_a_tier_that_cannot_tell_is_asked(how: str, caplog: pytest.LogCaptureFixture) -> None:
    script = Script("tier")
    if how == "raises":
        script.raises["contents"] = OSError("no such luck")
    else:
        script.gates["contents"].close()
    if how == "hangs for good":
        script.stubborn.add("contents")
    with rig(slots=8, tiers=[scripted(script, private=True)]) as one:
        context = one.context()
        assert one.engine.lookup(key(1), context) is Lookup.RETRY
        one.engine.finish_request(context)
        one.settle()
        one.store(keys(1))
        one.settle()
        evict(one, 8)
        assert one.load(keys(1, 2)) == 1
        assert contents(one)._filter is None
        if how == "hangs for good":
            # Once the engine closes, its end is waited for: nothing may touch the region then.
            script.gates["contents"].open()
            one.until(lambda: contents(one)._filter is not None)
        started = time.monotonic()
    assert time.monotonic() - started < 2
    assert ("no such luck" in caplog.text) == (how == "raises")
    caplog.get_records("call").clear()


def chunk(name: bytes) -> tuple[bytes, int]:
    return payload(name), crc32c(payload(name))


def test_chunks_that_take_turns_between_two_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [Script("even"), Script("odd")]
    for number in range(12):
        scripts[number % 2].chunks[key(number)] = chunk(key(number))
    tiers = [scripted(script, private=True) for script in scripts]
    with rig(slots=32, tiers=tiers) as one:
        known(one)
        watch = Watch(one, monkeypatch)
        assert one.load(keys(*range(14))) == 12
        assert watch.finds == [keys(*range(12))]
        for script in scripts:
            assert one.value("kvtier_lookup_chunks_total", script.name, "hit") == 6
        # The other way round, and runs of different lengths.
        assert one.load(keys(11, 9, 7, 0, 2, 5, 4, 90)) == 7


def test_one_that_others_write_too_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Script("shared")
    tiers = [{"type": "example", "name": "own"}, scripted(shared)]
    with rig(slots=8, tiers=tiers) as one:
        known(one, 0)
        watch = Watch(one, monkeypatch)
        shared.chunks[key(2)] = chunk(key(2))
        assert one.load(keys(2, 3)) == 1
        assert watch.finds == [keys(2, 3)]
        context = one.context()
        assert one.engine.lookup(key(4), context) is Lookup.RETRY
        one.engine.finish_request(context)
        one.settle()
        # A request that may load from the private one alone is told at once.
        only = one.context(load_tiers=(TierMatch(medium="CPU"),))
        assert one.engine.lookup_batch(keys(5, 6), only) == (0, Lookup.MISS)
        one.engine.finish_request(only)
        one.settle()
        assert keys(5, 6) not in watch.finds


def test_a_window_in_a_private_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=CHUNK, window_chunks=2)
    ]
    with rig(slots=8, tiers=[tier_of("fs", tmp_path)], groups=groups) as one:
        known(one)
        names = keys(*range(20))
        one.store(names[4:8])
        one.settle()
        evict(one, 8)
        watch = Watch(one, monkeypatch)
        context = one.context()

        def scan() -> list[Lookup]:
            return [one.engine.lookup(name, context) for name in reversed(names)]

        answers = scan()
        # The end is not there, which is known; the window then is asked for, and one more.
        assert answers[:12] == [Lookup.MISS] * 12
        assert answers[12:15] == [Lookup.RETRY] * 3
        assert answers[15:] == [Lookup.MISS] * 5
        one.engine.end_step()
        one.until(lambda: scan()[12:15] == [Lookup.HIT] * 3)
        asked = [names_ for names_ in watch.finds]
        assert asked == [names[7:4:-1]]
        one.check(names[5:8], context)
        one.engine.finish_request(context)
        one.settle()


def parts(tier: int, room: int, held: Sequence[bytes], size: int = 32) -> list[m.Contents]:
    """What a lister sends of these keys."""
    whole = KeyFilter(room)
    whole.add(held)
    messages = [m.Contents(tier, room, 0, b"", False)]
    for offset in range(0, whole.nbytes, size):
        bits = whole.read(offset, size)
        messages.append(m.Contents(tier, room, offset, bits, offset + size == whole.nbytes))
    return messages


def answer(one: Clocked, context: RequestContext | None, name: bytes) -> Lookup:
    """Of a request of its own, unless one is given."""
    own = context or one.context()
    result = one.engine.lookup(name, own)
    if context is None:
        one.engine.finish_request(own)
    return result


def is_absent(one: Clocked, name: bytes) -> bool:
    return contents(one).first_absent([name], 0) == 0


def take(one: Clocked, *messages: m.ToOwner) -> None:
    for message in messages:
        one.notes.answers.append(message)
        one.after(0.0)


def cascade(one: Clocked, *numbers: int) -> m.Cascade:
    """Store chunks: the message that takes them to the tier."""
    one.store(keys(*numbers))
    sent = [message for message in one.notes.sent if isinstance(message, m.Cascade)]
    assert sent[-1].keys == keys(*numbers)
    return sent[-1]


def done(one: Clocked, message: m.Cascade, outcome: Outcome = Outcome.DONE) -> m.Stored:
    """The tier's answer; the service's pins are back with it."""
    slots, generations = m.numbers(message.slots), m.words(message.generations)
    for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
        one.engine._planner.state.slots.unpin_service(slot, generation)
    return m.Stored(message.job, 0, bytes([outcome]) * len(message.keys), True)


def test_unknown_until_the_last_part() -> None:
    with clocked() as one:
        *before, last = parts(0, ROOM, keys(1))
        for message in (None, *before):
            if message is not None:
                take(one, message)
            assert answer(one, None, key(5)) is Lookup.RETRY
        take(one, last)
        assert answer(one, None, key(5)) is Lookup.MISS
        assert answer(one, None, key(1)) is Lookup.RETRY
        end_finds(one)


def test_an_old_filter_answers_while_its_successor_comes() -> None:
    with clocked() as one:
        take(one, *parts(0, ROOM, keys(1)))
        *before, last = parts(0, ROOM, keys(2))
        for message in before:
            take(one, message)
            assert not is_absent(one, key(1))
            assert is_absent(one, key(2))
        take(one, last)
        assert is_absent(one, key(1))
        assert not is_absent(one, key(2))


@pytest.mark.parametrize("when", ["in flight", "before", "between", "answered between", "after"])
def test_stored_beside_a_listing(when: str) -> None:
    """The listing was made without the key."""
    with clocked() as one:
        first, *others, last = parts(0, ROOM, [])
        if when == "before":
            # Stored before the listing, which therefore has it.
            take(one, done(one, cascade(one, 1)))
            first, *others, last = parts(0, ROOM, keys(1))
        message = cascade(one, 1) if when == "in flight" else None
        take(one, first)
        if when == "between":
            message = cascade(one, 1)
        if when == "answered between":
            take(one, others[0], done(one, cascade(one, 1)))
        take(one, *others)
        assert not is_absent(one, key(1))
        take(one, last)
        if when == "after":
            assert is_absent(one, key(1))
            message = cascade(one, 1)
        assert not is_absent(one, key(1))
        if message is not None:
            take(one, done(one, message))
        assert not is_absent(one, key(1))
        assert is_absent(one, key(2))


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize("how", ["ready", "lost"])
def test_a_new_service_makes_everything_unknown(midway: bool, how: str) -> None:
    with clocked() as one:
        take(one, *parts(0, ROOM, keys(1)))
        assert answer(one, None, key(5)) is Lookup.MISS
        first, *others = parts(0, ROOM, keys(2))
        if midway:
            take(one, first, others[0])
        if how == "lost":
            one.engine._planner.service_lost()
            one.engine._planner.clear_pins()
            assert not is_absent(one, key(5))
            assert answer(one, None, key(5)) is Lookup.MISS  # there is nobody to ask
        take(one, m.Ready([""], [False], 0))
        assert answer(one, None, key(5)) is Lookup.RETRY
        # The rest of a filter of which the start was forgotten is no filter.
        if midway:
            take(one, *others)
            assert answer(one, None, key(5)) is Lookup.RETRY
        take(one, *parts(0, ROOM, keys(1)))
        assert answer(one, None, key(5)) is Lookup.MISS
        assert answer(one, None, key(1)) is Lookup.RETRY
        end_finds(one)


def test_a_request_keeps_what_it_was_told() -> None:
    """A prompt whose answer was MISS is being computed; a later filter does not change that."""
    with clocked() as one:
        take(one, *parts(0, ROOM, keys(1)))
        context = one.context()
        assert one.engine.lookup_batch(keys(1, 2, 3), context) == (0, Lookup.RETRY)
        one.engine.end_step()
        (find,) = one.notes.finds()
        assert find.keys == keys(1)
        take(one, *parts(0, ROOM, keys(1, 2, 3)))
        take(one, found(find.job, absent=[0], unused=find.slots, final=True))
        assert one.engine.lookup_batch(keys(1, 2, 3), context) == (0, Lookup.MISS)
        one.engine.finish_request(context)


def test_a_chunk_that_is_being_written_is_no_hole() -> None:
    with clocked() as one:
        take(one, *parts(0, ROOM, keys(1, 3)))
        writer, reader = one.context(), one.context()
        one.engine.reserve(keys(2), writer)
        assert one.engine.lookup_batch(keys(2, 9), reader) == (0, Lookup.HIT_PENDING)
        one.engine.finish_request(reader)
        reader = one.context()
        assert one.engine.lookup_batch(keys(1, 2, 3, 9), reader) == (0, Lookup.RETRY)
        one.engine.end_step()
        assert one.notes.finds()[-1].keys == keys(1, 3)
        end_finds(one)
        one.engine.abort(keys(2), writer)
        one.engine.finish_request(writer)
        one.engine.finish_request(reader)


ACTIONS = ("store", "run", "give up", "end late", "answer", "list", "part", "take", "restart")
ACTIONS_OFTEN = ("store", "run", "part", "part", "take", "take")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS + ACTIONS_OFTEN), min_size=5, max_size=80))
def test_never_a_false_absence(actions: list[str]) -> None:
    """Any order of stores, answers, listings and their parts, with messages that arrive late."""
    log = logging.getLogger("kvtier")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with clocked(slots=64) as one:
            World(one).play(actions)
    finally:
        log.setLevel(level)


class World:
    """A service and its tier: what it was sent, what it has, what it has said."""

    def __init__(self, one: Clocked) -> None:
        self.one = one
        self.number = 0
        self.seen = 0
        self.waiting: deque[m.Cascade] = deque()  # sent, not begun
        self.stored: deque[m.Cascade] = deque()  # in the tier, not answered
        self.hung: deque[m.Cascade] = deque()  # answered as failed, still running
        self.held: set[bytes] = set()
        self.parts: deque[m.Contents] = deque()
        self.said: deque[m.ToOwner] = deque()

    def play(self, actions: Sequence[str]) -> None:
        for action in actions:
            getattr(self, action.replace(" ", "_"))()
            sent = self.one.notes.sent
            self.waiting += [new for new in sent[self.seen :] if isinstance(new, m.Cascade)]
            self.seen = len(sent)
            self.check()
        while self.said or self.parts or self.waiting or self.stored:
            for action in ("run", "answer", "part", "take"):
                getattr(self, action)()
                self.check()

    def check(self) -> None:
        wrong = [name for name in self.held if is_absent(self.one, name)]
        assert not wrong

    def store(self) -> None:
        if self.number < 40:
            self.one.store(keys(self.number, self.number + 1))
            self.number += 2

    def run(self) -> None:
        if self.waiting:
            self.stored.append(self.waiting.popleft())
            self.held.update(self.stored[-1].keys)

    def give_up(self) -> None:
        if self.waiting:
            message = self.waiting.popleft()
            self.hung.append(message)
            self.said.append(done(self.one, message, Outcome.TIMEOUT))

    def end_late(self) -> None:
        if self.hung:
            self.held.update(self.hung.popleft().keys)

    def answer(self) -> None:
        if self.stored:
            self.said.append(done(self.one, self.stored.popleft()))

    def list(self) -> None:
        if not self.parts:
            hung = [name for message in self.hung for name in message.keys]
            first, *others = parts(0, ROOM, [*self.held, *hung])
            self.said.append(first)
            self.parts.extend(others)

    def part(self) -> None:
        if self.parts:
            self.said.append(self.parts.popleft())

    def take(self) -> None:
        if self.said:
            take(self.one, self.said.popleft())

    def restart(self) -> None:
        """With another namespace: all jobs have ended, and the parts of the old lane too."""
        while self.stored:
            self.answer()
        self.parts.clear()
        self.said.append(m.Ready([""], [False], 0))


def damaged(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "no additions":
        monkeypatch.setattr(Contents, "add", lambda self, names: None)
    else:
        real = Contents.take
        monkeypatch.setattr(Contents, "take", lambda self, part, _: real(self, part, []))


@pytest.mark.parametrize("what", ["no additions", "none under way"])
def test_the_world_sees_a_false_absence(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged(monkeypatch, what)
    with clocked(slots=64) as one:
        world = World(one)
        stores = ["store", "run"] if what == "none under way" else []
        whole = ["list", *["part"] * 8, *["take"] * 9]
        with pytest.raises(AssertionError):
            world.play([*stores[:1], *whole, *(stores[1:] or ["store", "run"])])
        monkeypatch.undo()
        for message in world.waiting + world.stored:
            take(one, done(one, message))
