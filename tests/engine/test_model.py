# SPDX-License-Identifier: Apache-2.0
"""The whole engine against a model: any order of calls and faults, every byte, every pin.

The model knows what bytes each key has in each epoch, and what it has pinned and reserved itself;
the rest it asks the engine for and compares. Every payload that is loaded is compared whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.engine import supervisor as supervisor_module
from kvtier.runtime.thread import ThreadCarrier
from kvtier.testing.faults import Script
from kvtier.types import Lookup, Outcome, RequestContext
from tests.engine.rig import CHUNK, Rig, key, payload, rig, scripted

PREFIXES = 8
LENGTH = 4
SLOTS = 12
FAILURES = (
    Outcome.EXISTS,
    Outcome.MISSING,
    Outcome.DROPPED,
    Outcome.CANCELLED,
    Outcome.TIMEOUT,
    Outcome.CORRUPT,
    Outcome.FULL,
    Outcome.IO,
    Outcome.LOST,
    Outcome.INTERNAL,
)


def prefix(number: int, length: int = LENGTH) -> list[bytes]:
    """Keys of a prompt; odd prompts share their first half with the even one before them."""
    shared = length // 2 if number % 2 else 0
    return [
        key(1000 * (number - 1 if i < shared and number % 2 else number) + i) for i in range(length)
    ]


def bytes_of(name: bytes, epoch: int) -> bytes:
    """What key `name` holds in `epoch`: other weights, other bytes."""
    return payload(name + epoch.to_bytes(4, "big"))


@pytest.fixture(autouse=True)
def _logged_frames_go(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tracebacks in the log hold frames, and these views of the region."""
    yield
    caplog.get_records("call").clear()


class Write:
    """Slots that a worker fills."""

    def __init__(self, context: RequestContext, reservation: Any, epoch: int) -> None:
        self.context = context
        self.keys: list[bytes] = reservation.keys
        self.slots = reservation.slots
        self.generations = reservation.generations
        self.epoch = epoch


class Read:
    """Slots that a worker reads."""

    def __init__(
        self, context: RequestContext, names: list[bytes], slots: Any, generations: Any, epoch: int
    ) -> None:
        self.context = context
        self.keys = names
        self.slots = slots
        self.generations = generations
        self.epoch = epoch


class World:
    """An engine over two scripted tiers, and what must be true of it."""

    def __init__(self, **config: Any) -> None:
        self.scripts = [Script("first"), Script("second")]
        tiers = [
            scripted(
                script,
                namespaced=True,
                timeout_seconds=0.15,
                max_inflight_bytes=3 * CHUNK,
            )
            for script in self.scripts
        ]
        self._exit = contextlib.ExitStack()
        settings: dict[str, Any] = {
            "slots": SLOTS,
            "tiers": tiers,
            "lookup_timeout_seconds": 0.04,
            "breaker": {"failures": 3, "open_seconds": 0.02},
        }
        self._exit.enter_context(mock.patch.object(supervisor_module, "RESTART_SECONDS", 0.005))
        self._exit.enter_context(mock.patch.object(supervisor_module, "MAX_RESTART_SECONDS", 0.02))
        self.one: Rig = self._exit.enter_context(rig(**(settings | config)))
        self.engine = self.one.engine
        self.epoch = 0
        self.open: dict[str, tuple[RequestContext, list[bytes]]] = {}
        self.writes: list[Write] = []
        self.orphans: list[Write] = []
        self.reads: list[Read] = []
        self.loaded_chunks = 0
        self.one.sync()
        assert self.engine.resources is not None
        self.tasks = self.engine.resources.tasks

    # What a scheduler does.

    def reserve(self, number: int, length: int) -> None:
        context = self.one.context()
        names = prefix(number)[:length]
        reservation = self.engine.reserve(names, context)
        assert len(set(reservation.slots.tolist())) == len(reservation.keys)
        busy = {slot for one in (*self.writes, *self.orphans) for slot in one.slots.tolist()}
        busy |= {slot for read in self.reads for slot in read.slots.tolist()}
        assert not busy & set(reservation.slots.tolist()), "a slot in use was given away"
        write = Write(context, reservation, self.epoch)
        if write.keys:
            self.writes.append(write)
        else:
            self.engine.finish_request(context)

    def _fill(self, write: Write) -> None:
        for name, slot in zip(write.keys, write.slots.tolist(), strict=True):
            self.one.region.slot_view(slot, CHUNK)[:] = bytes_of(name, write.epoch)

    def end_write(self, good: bool) -> None:
        if not self.writes:
            return
        write = self.writes.pop(0)
        if good:
            self._fill(write)
            assert self.engine.commit(write.keys, write.context) == write.keys
            assert self.engine.commit(write.keys, write.context) == []
        else:
            assert self.engine.abort(write.keys, write.context) == len(write.keys)
            assert self.engine.abort(write.keys, write.context) == 0
        self.engine.finish_request(write.context)

    def end_orphan(self) -> None:
        """A worker that wrote during a reset has ended; until then it may still write."""
        if not self.orphans:
            return
        write = self.orphans.pop(0)
        for slot in write.slots.tolist():
            self.one.region.slot_view(slot, CHUNK)[:] = b"\xee" * CHUNK
        assert self.engine.release(write.slots, write.generations) == len(write.keys)
        assert self.engine.release(write.slots, write.generations) == 0
        self.engine.finish_request(write.context)

    def ask(self, number: int, length: int) -> None:
        context = self.one.context()
        self.open[context.request_id] = (context, prefix(number)[:length])
        self.look(0)

    def _pick(self, which: int) -> tuple[RequestContext, list[bytes]] | None:
        if not self.open:
            return None
        return list(self.open.values())[which % len(self.open)]

    def look(self, which: int) -> None:
        """A waiting request asks again; what it may have is pinned and read later."""
        picked = self._pick(which)
        if picked is None:
            return
        context, names = picked
        ready, answer = self.engine.lookup_batch(names, context)
        if answer is not Lookup.MISS:
            return
        for name in names[:ready]:
            assert self.engine.lookup(name, context) is Lookup.HIT
        if ready:
            slots, generations = self.engine.pin(names[:ready], context)
            self.reads.append(Read(context, names[:ready], slots, generations, self.epoch))
        # Still open: preempted, it asks again and may get more, or less.

    def end_read(self, finish_first: bool) -> None:
        if not self.reads:
            return
        read = self.reads.pop(0)
        if finish_first:  # the request ends while its copy runs
            self.open.pop(read.context.request_id, None)
            self.engine.finish_request(read.context)
        for name, slot in zip(read.keys, read.slots.tolist(), strict=True):
            found = bytes(self.one.region.slot_view(slot, CHUNK))
            assert found == bytes_of(name, read.epoch), f"wrong bytes for {name.hex()}"
            self.loaded_chunks += 1
        self.engine.unpin(read.slots, read.generations, read.context)

    def finish(self, which: int) -> None:
        picked = self._pick(which)
        if picked is not None:
            self.engine.finish_request(self.open.pop(picked[0].request_id)[0])

    def reset(self) -> None:
        slots, generations = self.engine.reset()
        expected = {
            (slot, generation)
            for write in self.writes
            for slot, generation in zip(
                write.slots.tolist(), write.generations.tolist(), strict=True
            )
        }
        got = set(zip(slots.tolist(), generations.tolist(), strict=True))
        late = {
            (slot, generation)
            for write in self.orphans
            for slot, generation in zip(
                write.slots.tolist(), write.generations.tolist(), strict=True
            )
        }
        assert expected <= got <= expected | late
        self.orphans += self.writes
        self.writes = []
        self.epoch += 1

    def step(self) -> None:
        started = time.perf_counter()
        self.one.step()
        assert time.perf_counter() - started < 2.0

    # What goes wrong.

    def fault(self, which: int, operation: str, kind: str, outcome: Outcome) -> None:
        script = self.scripts[which]
        match kind:
            case "outcome":
                script.outcomes[operation].append(outcome)
            case "always":
                script.always[operation] = outcome
            case "raise":
                script.raises[operation] = OSError(5, "eio")
            case "bug":
                script.raises[operation] = ZeroDivisionError()
            case "hang":
                script.gates[operation].close()
            case "stubborn":
                script.stubborn.add(operation)
                script.gates[operation].close()
            case "damage":
                script.damage = b"\xff\x00\xff"
            case "slow":
                script.seconds_per_byte = 0.002 / CHUNK
            case "pending":
                script.pending.update(prefix(which)[:2])

    def heal(self, which: int) -> None:
        script = self.scripts[which]
        for operation, gate in script.gates.items():
            script.outcomes[operation].clear()
            gate.open()
        script.always.clear()
        script.raises.clear()
        script.stubborn.clear()
        script.pending.clear()
        script.damage = None
        script.seconds_per_byte = 0.0

    def crash(self) -> None:
        """The service ends all by itself."""
        for i in range(len(self.scripts)):
            self.heal(i)  # a thread cannot be killed out of a call that hangs
        carrier = self.engine._supervisor.carrier
        assert isinstance(carrier, ThreadCarrier)
        service, loop = carrier._service, carrier._loop
        if service is not None and loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(service.deliver, None)

    # What must be true.

    def check(self) -> None:
        engine = self.engine
        engine.check()
        index, planner = engine._index, engine._planner
        parts = (
            index.num_free + index.num_writing + index.num_ready + index.num_lent
        ) + index.num_orphans
        assert parts == index.capacity == SLOTS
        totals = engine.cache.slots.totals()
        pinned = sum(len(read.keys) for read in self.reads)
        assert totals["owner_pins"] == pinned + planner.loads.held
        assert index.num_writing == sum(len(write.keys) for write in self.writes)
        assert planner.loads.held + planner.loads.lent <= max(planner.loads.hold_limit, 1)
        for tier in engine._tiers:
            assert len(tier.backlog) <= SLOTS
            assert len(tier.refused) <= SLOTS
            assert tier.inflight_bytes <= 3 * CHUNK
        assert len(planner.requests) <= len(self.open) + len(self.writes) + len(self.orphans) + len(
            self.reads
        )

    def _everything_is_back(self) -> bool:
        # At one moment: a chunk that was refused may go out again at the next.
        engine = self.engine
        index, planner = engine._index, engine._planner
        totals = engine.cache.slots.totals()
        return (
            engine._supervisor.up  # one that is just starting again included
            and engine.idle
            and not (
                planner.requests
                or planner.loads.finds
                or planner.stores.cascades
                or planner.state.out
            )
            and (planner.loads.held, planner.loads.lent, index.num_orphans) == (0, 0, 0)
            and (totals["owner_pins"], totals["service_pins"], totals["writing"]) == (0, 0, 0)
            and index.num_free + index.num_ready == SLOTS
        )

    def close(self) -> None:
        """Everything comes back."""
        try:
            for i in range(len(self.scripts)):
                self.heal(i)
            while self.writes:
                self.end_write(good=True)
            while self.orphans:
                self.end_orphan()
            while self.reads:
                self.end_read(finish_first=False)
            while self.open:
                self.finish(0)
            self.one.until(self._everything_is_back)
            self.check()

            asked_at = 0.0

            def quiet() -> bool:
                nonlocal asked_at
                got = self.engine.resources
                if got is not None and got.jobs == 0 and got.tasks <= self.tasks:
                    return True
                if time.monotonic() > asked_at + 0.05:
                    # Again: a service that is just ending takes the question with it.
                    asked_at = time.monotonic()
                    self.engine.audit()
                return False

            self.one.until(quiet)
        finally:
            self._exit.close()


class Machine(RuleBasedStateMachine):
    """Every order of the above that Hypothesis thinks of."""

    @initialize()
    def start(self) -> None:
        self.world = World()

    @rule(number=st.integers(0, PREFIXES - 1), length=st.integers(1, LENGTH))
    def reserve(self, number: int, length: int) -> None:
        self.world.reserve(number, length)

    @rule(good=st.booleans())
    def end_write(self, good: bool) -> None:
        self.world.end_write(good)

    @rule(number=st.integers(0, PREFIXES - 1), length=st.integers(1, LENGTH))
    def ask(self, number: int, length: int) -> None:
        self.world.ask(number, length)

    @rule(which=st.integers(0, 9))
    def look(self, which: int) -> None:
        self.world.look(which)

    @rule(finish_first=st.booleans())
    def end_read(self, finish_first: bool) -> None:
        self.world.end_read(finish_first)

    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        self.world.finish(which)

    @rule()
    def step(self) -> None:
        self.world.step()

    @rule(seconds=st.sampled_from([0.002, 0.05]))
    def time_passes(self, seconds: float) -> None:
        time.sleep(seconds)
        self.world.step()

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule()
    def end_orphan(self) -> None:
        self.world.end_orphan()

    @rule(
        which=st.integers(0, 1),
        operation=st.sampled_from(["exists", "store", "load", "open"]),
        kind=st.sampled_from(
            ["outcome", "always", "raise", "bug", "hang", "stubborn", "damage", "slow", "pending"]
        ),
        outcome=st.sampled_from(FAILURES),
    )
    def fault(self, which: int, operation: str, kind: str, outcome: Outcome) -> None:
        self.world.fault(which, operation, kind, outcome)

    @rule(which=st.integers(0, 1))
    def heal(self, which: int) -> None:
        self.world.heal(which)

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


Machine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVTIER_MODEL_EXAMPLES", "20")),
    stateful_step_count=50,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink],  # each try takes a while
    derandomize="KVTIER_MODEL_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.fault("C17", "C18", "C22", "C23", "K09", "L07", "H07")
class TestMachine(Machine.TestCase):  # type: ignore[name-defined, misc]  # made by Hypothesis
    """The state machine."""


def drive(world: World, seed: int, steps: int) -> None:
    """A long run of weighted random operations; faults come and go."""
    chance = random.Random(seed)
    operations: list[tuple[int, Callable[[], None]]] = [
        (10, lambda: world.reserve(chance.randrange(PREFIXES), chance.randint(1, LENGTH))),
        (10, lambda: world.end_write(chance.random() < 0.9)),
        (12, lambda: world.ask(chance.randrange(PREFIXES), chance.randint(1, LENGTH))),
        (25, lambda: world.look(chance.randrange(10))),
        (15, lambda: world.end_read(chance.random() < 0.3)),
        (8, lambda: world.finish(chance.randrange(10))),
        (20, world.step),
        (4, lambda: time.sleep(0.002)),
        (1, lambda: time.sleep(0.03)),
        (1, world.reset),
        (1, world.end_orphan),
        (
            3,
            lambda: world.fault(
                chance.randrange(2),
                chance.choice(["exists", "store", "load", "open"]),
                chance.choice(
                    [
                        *("outcome", "outcome", "always", "raise", "bug", "hang"),
                        *("stubborn", "damage", "slow", "pending"),
                    ]
                ),
                chance.choice(FAILURES),
            ),
        ),
        (3, lambda: world.heal(chance.randrange(2))),
    ]
    weights = [weight for weight, _ in operations]
    for number in range(steps):
        chance.choices(operations, weights)[0][1]()
        world.check()
        while len(world.open) > 12:
            world.finish(0)
        if number % 400 == 399:
            world.crash()


@pytest.mark.fault("C17", "C18", "C22", "C23", "C24", "K09", "L06", "L07", "L09")
@pytest.mark.parametrize("seed", range(int(os.environ.get("KVTIER_MODEL_SEEDS", "6"))))
def test_seeded_runs(seed: int) -> None:
    world = World(policy=("lru", "arc")[seed % 2])
    try:
        drive(world, seed, int(os.environ.get("KVTIER_MODEL_STEPS", "3000")))
        assert world.loaded_chunks > 50
    finally:
        world.close()


def test_the_model_sees_wrong_bytes() -> None:
    """The comparison can fail: bytes of another epoch, or of another key."""
    world = World()
    try:
        world.reserve(0, 2)
        world.end_write(good=True)
        world.ask(0, 2)
        assert world.reads
        world.one.region.slot_view(world.reads[0].slots[0], CHUNK)[CHUNK - 1] ^= 1
        with pytest.raises(AssertionError, match="wrong bytes"):
            world.end_read(finish_first=False)
        assert bytes_of(key(1), 0) != bytes_of(key(1), 1)
    finally:
        world.engine._index.unpin(*_slots_of(world, prefix(0)[:2]))
        world.close()


def _slots_of(world: World, names: Sequence[bytes]) -> tuple[Any, Any]:
    places = [world.engine._index.locate(name) for name in names]
    assert None not in places
    return (
        np.array([place[0] for place in places if place], dtype=np.int64),
        np.array([place[1] for place in places if place], dtype=np.uint32),
    )


def test_the_model_sees_a_lost_pin() -> None:
    world = World()
    try:
        world.reserve(0, 1)
        world.end_write(good=True)
        pinned = world.engine._index.pin(prefix(0)[:1])
        with pytest.raises(AssertionError):
            world.check()
        world.engine._index.unpin(*pinned)
        world.check()
    finally:
        world.close()
