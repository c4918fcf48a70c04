# SPDX-License-Identifier: Apache-2.0
"""FindJob over three scripted tiers: order, falling through, slots that come late or never."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtier._core.layout import crc32c
from kvtier.runtime import finder
from kvtier.runtime import messages as m
from kvtier.runtime.finder import FindJob
from kvtier.runtime.lane import Lane
from kvtier.testing.faults import Script, ScriptedTier
from kvtier.tiers.base import TierContext
from kvtier.types import Outcome, Peer, Presence
from tests.engine.rig import CHUNK, key, keys, payload
from tests.loops import Run
from tests.runtime.conftest import Bench


class Finding:
    """One job, seen from the owner's side: it lends slots and adopts what comes."""

    def __init__(
        self,
        bench: Bench,
        lanes: Sequence[Lane],
        names: list[bytes],
        *,
        slots: int = 0,
        seconds: float = 5.0,
        presence_seconds: float = 0.5,
        windowed: bool = False,
        peer: Peer | None = None,
    ) -> None:
        self.bench = bench
        self.names = names
        self.news: list[m.Found] = []
        self.lent: dict[int, int] = {}
        self.loaded: dict[bytes, tuple[int, int]] = {}
        self.present = 0
        self.absent: set[int] = set()
        self.failed: dict[int, Outcome] = {}
        self.final = False
        self.stop = asyncio.get_running_loop().create_future()
        lend = self.lend_message(slots)
        self.first_slots = lend.slots
        self.job = FindJob(
            m.Find(
                1,
                "r",
                names,
                windowed,
                list(range(len(lanes))),
                lend.slots,
                lend.generations,
                time.monotonic() + seconds,
                peer,
            ),
            bench.memory,
            lanes,
            self.stop,
            self.take,
            presence_seconds,
        )

    def lend_message(self, n: int) -> m.Lend:
        slots, generations = self.bench.index.lend(n)
        assert len(slots) == n
        self.lent.update(zip(slots.tolist(), generations.tolist(), strict=True))
        return m.Lend(1, slots.tobytes(), generations.tobytes())

    def lend(self, n: int) -> None:
        self.job.more(self.lend_message(n))

    def take(self, message: m.ToOwner) -> None:
        assert isinstance(message, m.Found)
        assert not self.final, "news after the final message"
        self.news.append(message)
        self.present += message.present
        self.absent.update(m.numbers(message.absent).tolist())
        failed = m.numbers(message.failed).tolist()
        self.failed.update(zip(failed, map(Outcome, message.outcomes), strict=True))
        names = [self.names[i] for i in m.numbers(message.loaded).tolist()]
        if names:
            slots, crcs = m.numbers(message.slots), m.words(message.crcs)
            generations = [self.lent.pop(slot) for slot in slots.tolist()]
            for name, slot, crc in zip(names, slots.tolist(), crcs.tolist(), strict=True):
                found = bytes(self.bench.region.slot_view(slot, CHUNK))
                assert found == payload(name)
                assert crc == crc32c(found)
                self.loaded[name] = (slot, message.tier)
            assert all(
                self.bench.index.adopt(
                    slots,
                    np.array(generations, dtype=np.uint32),
                    names,
                )
            )
        self.give_back(m.numbers(message.unused).tolist())
        self.final = message.final

    def give_back(self, slots: Sequence[int]) -> None:
        generations = [self.lent.pop(slot) for slot in slots]
        self.bench.index.give_back(
            np.array(slots, dtype=np.int64), np.array(generations, dtype=np.uint32)
        )

    async def run(self) -> None:
        await self.job.run()
        self.ended()

    def ended(self) -> None:
        """Exactly one final message; each key told once; slots back but those of hung calls."""
        assert self.final
        assert [one.final for one in self.news].count(True) == 1
        assert set(self.lent) == set(self.job.held)
        told = [*self.absent, *self.failed, *(self.names.index(name) for name in self.loaded)]
        assert sorted(told) == list(range(len(self.names)))


def fill(script: Script, *numbers: int) -> None:
    for number in numbers:
        script.chunks[key(number)] = (payload(key(number)), crc32c(payload(key(number))))


async def three(bench: Bench, **more: Any) -> tuple[list[Script], list[Lane]]:
    scripts = [Script(name) for name in "abc"]
    lanes = [bench.lane(script, i, **more) for i, script in enumerate(scripts)]
    for lane in lanes:
        assert await lane.open(time.monotonic() + 5) == ""
    return scripts, lanes


async def close(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        await lane.aclose(time.monotonic() + 1)
        assert lane.tasks == 0


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_each_key_from_the_first_tier_that_has_it(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1, 4)
        fill(scripts[1], 1, 2, 5)
        fill(scripts[2], 1, 2, 3, 4, 5)
        find = Finding(bench, lanes, keys(1, 2, 3, 4, 5), slots=5)
        await find.run()
        assert {name: tier for name, (_, tier) in find.loaded.items()} == dict(
            zip(keys(1, 2, 3, 4, 5), [0, 1, 2, 0, 1], strict=True)
        )
        assert not find.absent
        await close(lanes)

    run(main())


def test_a_prompt_that_nobody_has_is_one_message(run: Run, bench: Bench) -> None:
    async def main() -> None:
        _, lanes = await three(bench)
        find = Finding(bench, lanes, keys(1, 2, 3), slots=2)
        await find.run()
        assert find.absent == {0, 1, 2}
        # Slots that nobody needed come back as they went out: then nothing is compared one by one.
        (news,) = find.news
        assert news.unused == find.first_slots
        await close(lanes)

    run(main())


def test_a_gap_ends_the_prefix(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[1], 1, 3)
        find = Finding(bench, lanes, keys(1, 2, 3), slots=3)
        await find.run()
        assert set(find.loaded) == set(keys(1))
        assert find.absent == {1, 2}
        window = Finding(bench, lanes, keys(2, 3), slots=2, windowed=True)
        await window.run()
        assert set(window.loaded) == set(keys(3))
        await close(lanes)

    run(main())


def test_slots_that_come_late(run: Run, bench: Bench) -> None:
    """Presence is told at once, and each key once; loads begin with the slots."""

    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1, 2)
        fill(scripts[2], 3, 4)
        for windowed in (False, True):
            find = Finding(bench, lanes, keys(1, 2, 3, 4), windowed=windowed)
            task = asyncio.ensure_future(find.run())
            await until(lambda find=find: find.present == 4)
            await asyncio.sleep(0.05)
            assert find.present == 4
            find.lend(1)
            await until(lambda find=find: len(find.loaded) == 1)
            assert key(1) in find.loaded
            find.lend(3)
            await task
            assert len(find.loaded) == 4
            assert bench.index.drop(keys(1, 2, 3, 4)) == keys(1, 2, 3, 4)
        await close(lanes)

    run(main())


def test_the_first_batch_is_small(run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tier that wants it so: the first chunks are there before the rest is."""
    monkeypatch.setattr(finder, "LOAD_BATCH_BYTES", 3 * CHUNK)

    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], *range(8))
        for first_bytes, expected in ((CHUNK, [1, 3, 3, 1]), (None, [3, 3, 2])):
            monkeypatch.setattr(ScriptedTier, "first_load_bytes", first_bytes)
            scripts[0].calls.clear()
            find = Finding(bench, lanes, keys(*range(8)), slots=8)
            await find.run()
            loads = [len(names) for operation, names in scripts[0].calls if operation == "load"]
            assert loads == expected
            assert bench.index.drop(keys(*range(8))) == keys(*range(8))
        await close(lanes)

    run(main())


def test_no_more_slots(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1, 2, 3)
        find = Finding(bench, lanes, keys(1, 2, 3), slots=1)
        task = asyncio.ensure_future(find.run())
        await until(lambda: len(find.loaded) == 1)
        assert not task.done()
        find.job.more(m.NoMoreSlots(1))
        await task
        assert set(find.loaded) == set(keys(1))
        assert find.absent == {1, 2}
        await close(lanes)

    run(main())


def test_slots_that_never_come(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1)
        find = Finding(bench, lanes, keys(1), seconds=0.1)
        started = time.monotonic()
        await find.run()
        assert 0.05 < time.monotonic() - started < 1
        assert find.failed == {0: Outcome.TIMEOUT}
        await close(lanes)

    run(main())


@pytest.mark.parametrize("how", ["io", "corrupt", "missing", "raise", "hang", "stubborn"])
def test_a_load_that_fails_falls_through(run: Run, bench: Bench, how: str) -> None:
    """The next tier serves it; a call that hangs keeps its slot until it has ended."""

    async def main() -> None:
        scripts, lanes = await three(bench, timeout_seconds=0.2)
        for script in scripts[:2]:
            fill(script, 1, 2)
        match how:
            case "io":
                scripts[0].always["load"] = Outcome.IO
            case "corrupt":
                scripts[0].damage = b"\xff"
            case "missing":
                scripts[0].always["load"] = Outcome.MISSING
            case "raise":
                scripts[0].raises["load"] = OSError(5, "eio")
            case _:
                scripts[0].gates["load"].close()
                if how == "stubborn":
                    scripts[0].stubborn.add("load")
        find = Finding(bench, lanes, keys(1, 2), slots=2)
        task = asyncio.ensure_future(find.run())
        if how == "stubborn":
            # Two slots hang: the owner hears that two more are wanted, and lends them.
            await until(lambda: find.present == 4)
            find.lend(2)
        await task
        assert {tier for _, tier in find.loaded.values()} == {1}
        assert set(find.loaded) == set(keys(1, 2))
        if how == "corrupt":
            assert not scripts[0].chunks
        assert len(find.job.held) == (2 if how == "stubborn" else 0)
        if how == "stubborn":
            held = dict(find.job.held)
            scripts[0].gates["load"].open()
            await asyncio.wait(set(held.values()), timeout=5)
            assert not find.job.held
            find.give_back(sorted(held))
        await close(lanes)

    run(main())


def test_all_tiers_fail(run: Run, bench: Bench) -> None:
    """A failure is told with its cause; a key that a tier really lacks is absent."""

    async def main() -> None:
        scripts, lanes = await three(bench)
        for script in scripts:
            fill(script, 1)
            script.always["load"] = Outcome.IO
        find = Finding(bench, lanes, keys(1, 2), slots=2)
        await find.run()
        assert find.failed == {0: Outcome.IO}
        assert find.absent == {1}
        await close(lanes)

    run(main())


def test_a_hung_tier_costs_its_presence_time_only(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        scripts[0].gates["exists"].close()
        fill(scripts[1], 1)
        find = Finding(bench, lanes, keys(1), slots=1, presence_seconds=0.1)
        started = time.monotonic()
        await find.run()
        assert time.monotonic() - started < 1
        assert find.loaded[key(1)][1] == 1
        await close(lanes)

    run(main())


@pytest.mark.fault("P06")
def test_pending_keys_are_awaited(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1)
        scripts[0].pending.add(key(2))
        find = Finding(bench, lanes, keys(1, 2), slots=2)
        task = asyncio.ensure_future(find.run())
        await until(lambda: key(1) in find.loaded)  # what is there does not wait for it
        assert not task.done()
        fill(scripts[0], 2)
        scripts[0].pending.clear()
        await task
        assert set(find.loaded) == set(keys(1, 2))
        await close(lanes)

    run(main())


def test_a_pending_key_does_not_hold_up_those_of_other_tiers(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        scripts[0].pending.add(key(2))
        fill(scripts[1], 1)
        find = Finding(bench, lanes, keys(1, 2), slots=2, seconds=1.0)
        task = asyncio.ensure_future(find.run())
        await until(lambda: key(1) in find.loaded)
        assert not task.done()
        calls = len(scripts[0].calls)
        await asyncio.sleep(0.2)
        assert 2 <= len(scripts[0].calls) - calls <= 15  # asked again, but not in a loop
        await task
        assert find.failed == {1: Outcome.TIMEOUT}
        await close(lanes)

    run(main())


class Telling(ScriptedTier):
    """Keeps the way to tell its news; with `early` they come while it still answers."""

    tells_news: ClassVar[bool] = True
    early: Callable[[], None] | None = None
    news: Callable[[], None] | None = None

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        answer = await super().exists(keys, ctx)
        self.news = ctx.news
        if self.early is not None:
            self.early()
            self.early = None
            assert ctx.news is not None
            ctx.news()
        return answer


@pytest.mark.parametrize("early", [False, True])
def test_a_tier_that_tells_is_asked_when_it_has_news(run: Run, bench: Bench, early: bool) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench, kind=Telling)
        tier: Any = lanes[0].tier
        fill(scripts[0], 1)
        scripts[0].pending.add(key(2))

        def come() -> None:
            fill(scripts[0], 2)
            scripts[0].pending.clear()

        if early:
            tier.early = come
        find = Finding(bench, lanes, keys(1, 2), slots=2)
        started = time.monotonic()
        task = asyncio.ensure_future(find.run())
        if not early:
            await until(lambda: key(1) in find.loaded)
            await asyncio.sleep(0.1)
            assert [name for name, _ in scripts[0].calls].count("exists") == 1
            come()
            tier.news()
        await task
        assert time.monotonic() - started < finder.QUIET_SECONDS
        assert set(find.loaded) == set(keys(1, 2))
        await close(lanes)

    run(main())


def test_news_that_got_lost_cost_a_pause(run: Run, bench: Bench) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench, kind=Telling)
        scripts[0].pending.add(key(1))
        find = Finding(bench, lanes, keys(1), slots=1)
        task = asyncio.ensure_future(find.run())
        await until(lambda: bool(scripts[0].calls[1:]))
        fill(scripts[0], 1)
        scripts[0].pending.clear()
        await task
        assert set(find.loaded) == {key(1)}
        await close(lanes)

    run(main())


def test_a_peer_that_computes_has_longer_to_say_what_it_has(run: Run, bench: Bench) -> None:
    """A session is made first, with an instance that is busy."""

    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1)
        gate = scripts[0].gates["exists"]
        gate.close()
        peer = Peer("10.0.0.7:5710", "r", 30.0)
        find = Finding(bench, lanes, keys(1), slots=1, presence_seconds=0.05, peer=peer)
        task = asyncio.ensure_future(find.run())
        await asyncio.sleep(0.3)
        gate.open()
        await task
        assert find.loaded[key(1)][1] == 0
        await close(lanes)

    run(main())


@pytest.mark.parametrize("operation", ["exists", "load", "slots", "pending"])
def test_stop_in_every_state(run: Run, bench: Bench, operation: str) -> None:
    async def main() -> None:
        scripts, lanes = await three(bench)
        fill(scripts[0], 1, 2)
        if operation in scripts[0].gates:
            scripts[0].gates[operation].close()
        elif operation == "pending":
            scripts[0].pending.update(keys(1, 2))
        find = Finding(bench, lanes, keys(1, 2), slots=0 if operation == "slots" else 2)
        task = asyncio.ensure_future(find.run())
        if operation == "slots":
            await until(lambda: find.present == 2)
        elif operation == "pending":
            await until(lambda: len(scripts[0].calls) > 2)
        else:
            gate = scripts[0].gates[operation]
            await until(lambda: gate.waiting.acquire(blocking=False))
        find.stop.set_result(None)
        started = time.monotonic()
        await task
        assert time.monotonic() - started < 1
        assert set(find.failed.values()) == {Outcome.CANCELLED}
        assert bench.index.num_lent == 0
        await close(lanes)

    run(main())
