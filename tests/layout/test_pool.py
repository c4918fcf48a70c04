# SPDX-License-Identifier: Apache-2.0
"""The copy pool: splitting, small batches, failures, back-pressure, closing."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvtier._core.layout import CopyPlan, PagePlan
from kvtier.errors import ClosedError
from kvtier.layout.plan import CopyPool, release_affinity
from tests.layout.oracle import Memory

BLOCK = 4096
RUN = [(0, 0, BLOCK, 1, BLOCK, BLOCK)]


class Setup:
    """256 blocks of 4 KiB on each side."""

    def __init__(self, blocks=256):
        self.accelerator, self.region = Memory(blocks * BLOCK), Memory(blocks * BLOCK, fill=0xAA)
        rng = np.random.default_rng(0)
        self.accelerator.bytes[:] = rng.integers(0, 256, blocks * BLOCK, dtype=np.uint8)
        self.plan = CopyPlan(
            [PagePlan(self.accelerator.address, BLOCK, blocks, BLOCK, 0, BLOCK, RUN)],
            BLOCK,
            region=(self.region.address, BLOCK, blocks, BLOCK),
        )
        self.ids = np.arange(blocks, dtype=np.int64)
        self.addresses = self.region.address + np.arange(blocks, dtype=np.uint64) * BLOCK

    def batch(self, n):
        return self.ids[:n], self.addresses[:n], self.ids[:n]


class WatchedPlan:
    """A plan that notes which thread copied which part, and can be held or made to fail."""

    def __init__(self, plan):
        self.plan = plan
        self.local_bytes = plan.local_bytes
        self.parts = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at = None

    def check(self, *args):
        self.plan.check(*args)

    def store(self, *args):
        assert self.gate.wait(30)
        self.parts.append((threading.current_thread().name, *args[3:]))
        if args[3] == self.fail_at:
            raise RuntimeError("broken on purpose")
        return self.plan.store(*args)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-copy")]


def test_large_batches_are_split_and_small_ones_inline():
    setup = Setup()
    watched = WatchedPlan(setup.plan)
    with CopyPool(threads=2) as pool:
        assert pool.store(watched, *setup.batch(256)).result(30) == 256 * BLOCK
        assert sorted(part[1:] for part in watched.parts) == [(0, 128), (128, 256)]
        assert {part[0][:-2] for part in watched.parts} == {"kvtier-copy"}
        assert (setup.region.bytes == setup.accelerator.bytes).all()
        watched.parts.clear()
        small = pool.store(watched, *setup.batch(8))
        assert small.done()
        assert small.result() == 8 * BLOCK
        assert watched.parts == [(threading.current_thread().name, 0, 8)]
    assert threads() == []


def test_loads_are_split_too():
    setup = Setup()
    setup.region.bytes[:] = setup.accelerator.bytes[::-1]
    with CopyPool(threads=3) as pool:
        assert pool.load(setup.plan, setup.ids, setup.addresses).result(30) == 256 * BLOCK
    assert (setup.accelerator.bytes == setup.region.bytes).all()
    assert setup.accelerator.guards_intact()


@pytest.mark.parametrize("n", [0, 1])
def test_tiny_batches(n):
    setup = Setup()
    with CopyPool(threads=2, inline_bytes=0) as pool:
        assert pool.store(setup.plan, *setup.batch(n)).result(30) == n * BLOCK


@pytest.mark.fault("E15")
def test_a_bad_index_is_refused_before_any_part_starts():
    setup = Setup()
    ids, addresses, page_ids = setup.batch(256)
    ids = ids.copy()
    ids[255] = 256
    with CopyPool(threads=2) as pool:
        with pytest.raises(IndexError, match="item 255: block 256 of 256"):
            pool.store(setup.plan, ids, addresses, page_ids)
        with pytest.raises(IndexError, match="item 255"):
            pool.load(setup.plan, ids, addresses)
    assert (setup.region.bytes == 0xAA).all()


def test_a_failed_part_fails_the_batch_once_all_have_ended():
    setup = Setup()
    watched = WatchedPlan(setup.plan)
    watched.fail_at = 0
    with CopyPool(threads=2) as pool:
        future = pool.store(watched, *setup.batch(256))
        with pytest.raises(RuntimeError, match="on purpose"):
            future.result(30)
        assert len(watched.parts) == 2
        watched.fail_at = None
        assert pool.store(watched, *setup.batch(256)).result(30) == 256 * BLOCK


def test_a_batch_cannot_be_cancelled():
    """Whoever stops waiting must not believe that the bytes stopped moving."""
    setup = Setup()
    watched = WatchedPlan(setup.plan)
    watched.gate.clear()
    with CopyPool(threads=1) as pool:
        future = pool.store(watched, *setup.batch(256))
        assert not future.cancel()
        watched.gate.set()
        assert future.result(30) == 256 * BLOCK


def test_a_full_queue_makes_the_caller_copy():
    setup = Setup()
    held = WatchedPlan(setup.plan)
    held.gate.clear()
    free = WatchedPlan(setup.plan)
    with CopyPool(threads=1, max_parts=1) as pool:
        pool.store(held, *setup.batch(256))  # taken by the thread, or still in the queue
        pool_full = [pool.store(free, *setup.batch(256)) for _ in range(3)]
        assert sum(future.done() for future in pool_full) >= 2
        assert threading.current_thread().name in {part[0] for part in free.parts}
        held.gate.set()
        for future in pool_full:
            assert future.result(30) == 256 * BLOCK


def test_close_carries_out_what_was_submitted():
    setup = Setup()
    watched = WatchedPlan(setup.plan)
    watched.gate.clear()
    pool = CopyPool(threads=2)
    pool.open()
    futures = [pool.store(watched, *setup.batch(256)) for _ in range(4)]
    closer = threading.Thread(target=pool.close)
    closer.start()
    watched.gate.set()
    closer.join(30)
    assert not closer.is_alive()
    assert [future.result(0) for future in futures] == [256 * BLOCK] * 4
    assert threads() == []
    pool.close()  # idempotent
    with pytest.raises(ClosedError, match="closed"):
        pool.store(setup.plan, *setup.batch(1))
    with pytest.raises(ClosedError, match="once"):
        pool.open()


def test_not_open_yet():
    setup = Setup()
    pool = CopyPool()
    with pytest.raises(ClosedError):
        pool.store(setup.plan, *setup.batch(1))
    pool.close()
    assert threads() == []


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (4, 2)])
def test_sizes_are_checked(count, parts):
    with pytest.raises(ValueError, match="threads"):
        CopyPool(threads=count, max_parts=parts)


@pytest.mark.needs("cores")
def test_threads_leave_the_core_their_caller_is_bound_to():
    """A worker's main thread is bound to one core; its copy threads are not."""
    allowed = os.sched_getaffinity(0)
    seen = []

    class Looking(WatchedPlan):
        def store(self, *args):
            seen.append(os.sched_getaffinity(0))
            return super().store(*args)

    setup = Setup()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with CopyPool(threads=2) as pool:
            pool.store(Looking(setup.plan), *setup.batch(256)).result(30)
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
    assert len(seen) == 2
    assert all(cores >= allowed for cores in seen)


def test_forbidden_affinity_is_no_failure(monkeypatch, caplog):
    def forbidden(pid, cores):
        raise PermissionError("not allowed here")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    release_affinity()
    assert "not allowed here" in caplog.text


PROGRAM = """
import time
from kvtier.layout.plan import CopyPool
pool = CopyPool(2)
pool.open()
pool._queue.put(lambda: (time.sleep(0.3), print("copied", flush=True)))
raise SystemExit(%d)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_ends_whose_pool_nobody_closed(code):
    """With what was on its way."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM % code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "copied\n", "")
