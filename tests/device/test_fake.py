# SPDX-License-Identifier: Apache-2.0
"""The fake device sees what it is there to see, and nothing where all is in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from tests.device.fake import POISON, FakeDevice, Violation, extent

pytestmark = pytest.mark.needs("torch")


class World:
    """Two streams beside the model's, four bytes of the accelerator and of pinned host memory."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.one, self.other = self.device.new_stream(), self.device.new_stream()
        self.there = torch.arange(4, dtype=torch.uint8)
        self.device.own(self.there)
        self.here = self.device.pinned(4)
        self.here.fill_(9)

    def write(self) -> None:
        """The model writes."""
        self.device.queue("write", lambda: self.there.fill_(7), writes=lambda: [extent(self.there)])

    def copy_out(self) -> None:
        with self.device.on(self.one):
            self.device.copy(self.here, self.there)

    def copy_in(self) -> None:
        with self.device.on(self.other):
            self.device.copy(self.there, self.here)

    def follow(self, stream: object, before: object) -> None:
        event = self.device.new_event()
        event.record(before)
        stream.wait_event(event)  # type: ignore[attr-defined]


def test_work_is_done_when_somebody_waits_and_not_before() -> None:
    world = World()
    world.copy_out()
    assert world.here.tolist() == [POISON] * 4
    event = world.device.new_event()
    event.synchronize()  # stands behind nothing
    event.record(world.one)
    assert world.here.tolist() == [POISON] * 4
    world.other.synchronize()
    assert world.here.tolist() == [POISON] * 4
    event.synchronize()
    assert world.here.tolist() == [0, 1, 2, 3]
    assert world.device.violations == []


def test_events_bring_their_streams_with_them() -> None:
    world = World()
    world.write()
    world.follow(world.one, world.device.compute)
    world.copy_out()
    world.follow(world.device.compute, world.one)
    world.write()
    world.one.synchronize()
    world.device.compute.synchronize()
    assert world.here.tolist() == [7] * 4
    world.copy_in()  # the host has waited for all of it
    world.other.synchronize()
    assert world.device.violations == []


def unordered_read(world: World) -> None:
    world.write()
    world.copy_out()
    world.device.compute.synchronize()
    world.one.synchronize()


def block_given_away_too_early(world: World) -> None:
    world.copy_out()
    world.write()
    world.one.synchronize()
    world.device.compute.synchronize()


def unordered_streams(world: World) -> None:
    world.copy_out()
    world.copy_in()
    world.other.synchronize()
    world.one.synchronize()


def event_recorded_too_early(world: World) -> None:
    event = world.device.new_event()
    event.record(world.device.compute)
    world.write()
    world.one.wait_event(event)
    world.copy_out()
    world.device.compute.synchronize()
    world.one.synchronize()


def host_writes_what_is_to_be_read(world: World) -> None:
    world.copy_in()
    world.here[0] = 1
    world.other.synchronize()


def host_writes_where_a_copy_goes(world: World) -> None:
    world.copy_out()
    world.here[0] = 1
    world.one.synchronize()


def pageable_memory(world: World) -> None:
    world.device.copy(world.there, torch.zeros(4, dtype=torch.uint8))


def memory_of_two_registrations(world: World) -> None:
    memory = torch.zeros(4, dtype=torch.uint8)
    world.device.register(memory.data_ptr(), 2)
    world.device.register(memory.data_ptr() + 2, 2)
    world.device.copy(world.there, memory)


def unpinned_under_a_copy(world: World) -> None:
    memory = torch.zeros(4, dtype=torch.uint8)
    world.device.register(memory.data_ptr(), 4)
    world.device.copy(world.there, memory)
    world.device.unregister(memory.data_ptr())


@pytest.mark.parametrize(
    "fault",
    [
        unordered_read,
        block_given_away_too_early,
        unordered_streams,
        event_recorded_too_early,
        host_writes_what_is_to_be_read,
        host_writes_where_a_copy_goes,
        pageable_memory,
        memory_of_two_registrations,
        unpinned_under_a_copy,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_seen(fault: Callable[[World], None]) -> None:
    world = World()
    with pytest.raises(Violation):
        fault(world)
    assert len(world.device.violations) == 1
