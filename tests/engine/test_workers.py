# SPDX-License-Identifier: Apache-2.0
"""The whole engine against its model, with the workers in processes of their own.

They make and join the region, write the bytes of reserved slots and compare those of loaded ones
there, and say what they hold and see; one is killed now and then. See ``workers``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.rig import CHUNK
from tests.engine.test_model import drive
from tests.engine.worker import RANKS
from tests.engine.workers import CHECKS_WITHOUT, ProcessWorkers, SizedWorkers, Workers
from tests.engine.world import AUDIT_EVERY


@pytest.fixture(autouse=True)
def _logged_frames_go(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tracebacks in the log hold frames, and these views of the region."""
    yield
    caplog.get_records("call").clear()


@pytest.mark.slow
@pytest.mark.fault("C17", "C18", "C22", "C23", "C24", "K08", "K09", "L06", "L07", "L09", "L13")
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("KVTIER_MODEL_WORKER_SEEDS", "1"))))
def test_seeded_runs_with_workers(tmp_path: Path, isolation: str, seed: int) -> None:
    """Counted by time, as starts of processes are; on a machine that has much else to do it goes on
    until it has met what it is for."""
    chance = random.Random(seed)
    seconds = float(os.environ.get("KVTIER_MODEL_WORKER_SECONDS", "8"))
    world: Workers = (
        ProcessWorkers(tmp_path, chance, policy="arc")
        if isolation == "process"
        else SizedWorkers(policy="lru")
    )
    more = [
        (0.2, world.crash),
        (0.02, world.reopen),
        (0.2, lambda: world.kill_worker(chance.randrange(RANKS))),
    ]
    end = time.monotonic() + seconds

    def goes_on(number: int) -> bool:
        now = time.monotonic()
        met = world.given_up and world.failed_chunks and world.promoted_chunks > 10
        return now < end or (not met and now < end + 4 * seconds)

    try:
        drive(world, chance, goes_on, more)
        assert world.deaths
        assert world.given_up
        assert world.failed_chunks
        assert world.loaded_chunks > 50
        assert world.promoted_chunks > 10
        assert world.pin_audits > 5
        assert world.worker_audits > 5
    finally:
        world.close()


@pytest.fixture
def world() -> Iterator[Workers]:
    one = SizedWorkers()
    try:
        yield one
    finally:
        one.close()


def test_a_chunk_that_one_rank_has_not_written_is_never_ready(world: Workers) -> None:
    """Nor one whose other rank was killed over it, whatever its part says."""
    world.reserve(0, 2)
    (write,) = world.writes
    last = world.workers[RANKS - 1]
    for rank in range(RANKS - 1):
        world.workers[rank].ask("end", number=write.first, good=True)
    write.told = True
    for _ in range(AUDIT_EVERY):
        world.collect()
        world.check()
    world.kill_worker(last.rank)
    assert world.one.region.unsigned() == [last.rank]
    for _ in range(AUDIT_EVERY):
        world.collect()
        world.check()
    names = list(write.keys)
    context = world.one.context()
    assert world.one.ask(names, context)[0] == 0
    world.engine.finish_request(context)
    for _ in range(CHECKS_WITHOUT):
        world.watch()
    # Another start, with another worker; what was not finished is nowhere.
    assert world.dead is None
    assert world.given_up == 2
    assert sorted(world.workers) == list(range(RANKS))
    assert not any(world.engine.holds(name) for name in names)
    world.reserve(0, 2)
    world.end_all()
    assert all(world.engine.holds(name) for name in names)


def test_a_chunk_that_all_had_finished_outlives_its_worker(world: Workers) -> None:
    world.reserve(0, 2)
    (write,) = world.writes
    for worker in world.workers.values():
        worker.ask("end", number=write.first, good=True)
    write.told = True
    world.kill_worker(0)
    world.collect()
    world.ask(0, 2)
    assert len(world.reads[0].keys) == 2
    world.end_read(finish_first=True)  # by those that are left
    assert world.loaded_chunks == 2


def test_a_chunk_whose_blocks_are_gone_fails_alone(world: Workers) -> None:
    world.reserve(0, 3)  # one chunk of each of three groups
    (write,) = world.writes
    world.end_write(good=False)
    world.end_all()
    assert world.failed_chunks == 1
    assert [world.engine.holds(name) for name in write.keys] == [False, True, True]


def test_the_model_sees_wrong_bytes_and_reads_without_a_pin_in_a_worker(world: Workers) -> None:
    world.reserve(0, 1)
    world.end_all()
    world.ask(0, 1)
    (read,) = world.reads
    view = world.one.region.slot_view(int(read.slots[0]), world.sizes[0] * CHUNK)
    view[-1] ^= 1
    with pytest.raises(AssertionError, match=r"wrong bytes for .* on rank 1"):
        world.compare(read)
    view[-1] ^= 1
    world.compare(read)
    world.audit_workers()
    world.engine.unpin(read.slots, read.generations, read.context)
    world.compare(read)
    with pytest.raises(AssertionError, match=r"to read is \(2, \d+, 0\)"):
        world.audit_workers()
    world.reads.clear()
    world.workers[1].ask("report")


def test_the_model_sees_a_write_without_the_right_to_it(world: Workers) -> None:
    world.reserve(0, 1)
    (write,) = world.writes
    assert world.engine.abort(write.keys, write.context) == 1
    world.workers[0].ask("end", number=write.first, good=True)
    with pytest.raises(AssertionError, match=r"to write is \(0, "):
        world.audit_workers()
    world.writes.clear()
    world.engine.finish_request(write.context)
    world.workers[1].ask("end", number=write.first, good=True)
    assert world.workers[1].ask("report")["wrong"]


def test_the_model_sees_what_a_worker_keeps(world: Workers) -> None:
    worker = world.workers[1]
    for kind in ("fds", "threads", "jobs", "begun"):
        world.audit_workers()
        worker.ask("keep", kind=kind)
        with pytest.raises(AssertionError, match=f"{kind} of rank 1"):
            world.audit_workers()
        worker.ask("let_go")
    world.reserve(0, 1)
    world.end_all()
    # Each looks at the slots through its own mapping.
    pinned = world.engine._index.pin(world.names(0)[:1])
    seen = [one.ask("report")["seen"] for one in world.workers.values()]
    assert seen == [{"owner_pins": 1, "writing": 0}] * RANKS
    world.engine._index.unpin(*pinned)
    world.audit_workers()


def test_the_model_sees_a_region_that_a_worker_keeps() -> None:
    world = SizedWorkers()
    world.workers[1].ask("keep", kind="region")
    with pytest.raises(AssertionError, match=r"rank 1 keeps .*'mappings': 1"):
        world.close()
