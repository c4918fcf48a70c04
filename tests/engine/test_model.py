# SPDX-License-Identifier: Apache-2.0
"""The whole engine against a model: any order of calls and faults, every byte, every pin.

Over both carriers; a child process is killed and stopped at random moments. ``world`` has what is
done and what must be true, here stands in which order.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.types import Outcome
from tests.engine.process_world import ProcessWorld
from tests.engine.rig import CHUNK, key
from tests.engine.world import (
    AUDIT_EVERY,
    FAILURES,
    LENGTH,
    PREFIXES,
    SizedWorld,
    World,
    bytes_of,
    prefix,
)


@pytest.fixture(autouse=True)
def _logged_frames_go(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tracebacks in the log hold frames, and these views of the region."""
    yield
    caplog.get_records("call").clear()


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

    @rule()
    def reopen(self) -> None:
        self.world.reopen()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.watch()

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


class SizedMachine(Machine):
    """The same with chunks of three sizes."""

    @initialize()
    def start(self) -> None:
        self.world = SizedWorld()


SizedMachine.TestCase.settings = Machine.TestCase.settings


class TestSizedMachine(SizedMachine.TestCase):  # type: ignore[name-defined, misc]  # made by Hypothesis
    """The state machine over slabs."""


@pytest.mark.fault("C17", "C18", "C22", "C23", "K09", "L07", "H07")
class TestMachine(Machine.TestCase):  # type: ignore[name-defined, misc]  # made by Hypothesis
    """The state machine."""


class ProcessMachine(Machine):
    """The same over a child process."""

    world: ProcessWorld

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvtier-model-")
        self.world = ProcessWorld(Path(self.folder.name), random.Random(0))

    @rule()
    def stall(self) -> None:
        self.world.stall()

    @rule()
    def overload(self) -> None:
        self.world.overload()

    @rule()
    def wait_ready(self) -> None:
        self.world.wait_ready()

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


ProcessMachine.TestCase.settings = settings(
    Machine.TestCase.settings,
    max_examples=int(os.environ.get("KVTIER_MODEL_PROCESS_EXAMPLES", "12")),
)


@pytest.mark.fault("C17", "C18", "C22", "C23", "K08", "L07")
class TestProcessMachine(ProcessMachine.TestCase):  # type: ignore[name-defined, misc]  # the same
    """The state machine over a child process."""


def drive(
    world: World,
    chance: random.Random,
    go_on: Callable[[int], bool],
    more: Sequence[tuple[float, Callable[[], None]]] = (),
) -> None:
    """A long run of weighted random operations, and of `more`; faults come and go."""
    operations: list[tuple[float, Callable[[], None]]] = [
        (10, lambda: world.reserve(chance.randrange(PREFIXES), chance.randint(1, LENGTH))),
        (10, lambda: world.end_write(chance.random() < 0.9)),
        (12, lambda: world.ask(chance.randrange(PREFIXES), chance.randint(1, LENGTH))),
        (25, lambda: world.look(chance.randrange(10))),
        (15, lambda: world.end_read(chance.random() < 0.3)),
        (8, lambda: world.finish(chance.randrange(10))),
        (20, world.step),
        (4, lambda: time.sleep(0.002)),
        (1, lambda: time.sleep(0.03)),
        # Seldom, or nothing would ever come back from a tier.
        (0.2, world.reset),
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
        (6, lambda: world.heal(chance.randrange(2))),
        # Without pauses the owner would be through before the service has its turn.
        (4, lambda: world.rest(0.02)),
        *more,
    ]
    weights = [weight for weight, _ in operations]
    for number in itertools.count():
        if not go_on(number):
            break
        chance.choices(operations, weights)[0][1]()
        world.watch()
        while len(world.open) > 6:
            world.finish(0)
        while len(world.reads) > 3:  # or all of host memory is pinned, and nothing is evicted
            world.end_read(finish_first=False)


@pytest.mark.fault("C17", "C18", "C22", "C23", "C24", "K09", "L06", "L07", "L09")
@pytest.mark.parametrize("seed", range(int(os.environ.get("KVTIER_MODEL_SEEDS", "6"))))
def test_seeded_runs(seed: int) -> None:
    world = (World, SizedWorld)[seed // 2 % 2](policy=("lru", "arc")[seed % 2])
    steps = int(os.environ.get("KVTIER_MODEL_STEPS", "3000"))
    try:
        more = [(0.3, world.crash), (0.02, world.reopen)]
        drive(world, random.Random(seed), lambda number: number < steps, more)
        assert world.loaded_chunks > 50
        assert world.promoted_chunks > 5
        assert world.audits > steps // (4 * AUDIT_EVERY)
        assert world.pin_audits > 5
        if len(world.sizes) > 1:
            assert world.engine.geometry.slab_slots > 1
    finally:
        world.close()


@pytest.mark.slow
@pytest.mark.fault("C17", "C18", "C22", "C23", "C24", "K08", "K09", "L06", "L07", "L09")
@pytest.mark.parametrize("seed", range(int(os.environ.get("KVTIER_MODEL_PROCESS_SEEDS", "4"))))
def test_seeded_runs_over_a_child_process(tmp_path: Path, seed: int) -> None:
    """Its process is killed, stopped and started again all the time, the engine too; it is counted
    by time, because what takes longest here is the start of processes. On a machine that has much
    else to do it goes on until it has met what it is for."""
    chance = random.Random(seed)
    seconds = float(os.environ.get("KVTIER_MODEL_PROCESS_SECONDS", "12"))
    end = time.monotonic() + seconds
    world = ProcessWorld(
        tmp_path,
        chance,
        policy=("lru", "arc")[seed % 2],
        on_reset=("new_epoch", "keep")[seed // 2 % 2],
        verify_host=("off", "always")[(seed + 1) // 2 % 2],
    )
    more = [
        (0.1, world.crash),
        (0.15, world.stall),
        (0.15, world.overload),
        (0.05, world.reopen),
        (0.3, world.wait_ready),
    ]
    try:
        while time.monotonic() < end or (not world.kills and time.monotonic() < end + 4 * seconds):
            drive(world, chance, lambda number: number < 1000, more)
            # What leaks goes with a process that is killed: the same without, then it is counted.
            world.end_killers()
            drive(world, chance, lambda number: number < 300)
            world.reset()
            world.end_all()
        assert world.kills
        assert world.loaded_chunks > 50
        assert world.promoted_chunks > 10
        assert world.pin_audits > 5
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


def test_the_model_sees_a_pin_that_the_service_knows_nothing_of() -> None:
    world = World()
    try:
        world.audit()
        world.reserve(0, 1)
        world.end_write(good=True)
        world.one.settle()
        keys, slots, generations = world.engine._index.pin_for_service(prefix(0)[:1])
        world.check()  # the owner cannot see it
        with pytest.raises(AssertionError, match=r"pins=0\), 1 pins before it and 1 after"):
            world.audit()
        assert keys == prefix(0)[:1]
        world.engine.cache.slots.unpin_service(int(slots[0]), int(generations[0]))
        world.audit()
    finally:
        world.close()
