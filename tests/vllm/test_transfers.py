# SPDX-License-Identifier: Apache-2.0
"""Manager and workers against a region of their own, over plain tensors instead of an engine.

Every block of the fake accelerator holds bytes of its own, so that a block in a wrong place, an old
one or another rank's shows.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.config import parse
from kvtier.errors import InternalError
from kvtier.types import GroupGeometry, PageGeometry, make_geometry, make_key

pytestmark = pytest.mark.vllm

PAGE = 4096
BLOCKS = 32
LAYERS = ("a", "b")


def key(number: int, group: int = 0) -> bytes:
    """A key like vLLM's: 32 bytes of hash and the group."""
    return make_key(number.to_bytes(32, "big"), group)


class Rig:
    """`ranks` workers and a manager; pages are opaque, an area for each rank."""

    def __init__(
        self,
        directory: str,
        ranks: int,
        blocks_per_chunk: int,
        slots: int,
        devices: Sequence[Any],
        **config: Any,
    ) -> None:
        # lazy: vLLM and torch take seconds, and only these tests need them.
        import torch
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )

        from kvtier.host.region import Region
        from kvtier.vllm.manager import KVTierManager
        from kvtier.vllm.pages import build_pages
        from kvtier.vllm.worker import TransferWorker

        self.blocks_per_chunk = blocks_per_chunk
        self.tensors: list[list[Any]] = []
        self.workers: list[TransferWorker] = []
        for rank in range(ranks):
            rng = np.random.default_rng(rank)
            tensors = [
                torch.from_numpy(rng.integers(-128, 128, (BLOCKS, PAGE), dtype=np.int8))
                for _ in LAYERS
            ]
            offloading = SimpleNamespace(
                groups=[SimpleNamespace(group_id=0, layer_names=LAYERS, tokens_per_block=16)],
                parallel=SimpleNamespace(rank=rank, world_size=ranks),
                cache=SimpleNamespace(blocks_per_chunk=blocks_per_chunk),
            )
            caches = CanonicalKVCaches(
                [CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors],
                [[CanonicalKVCacheRef(index, PAGE) for index in range(len(LAYERS))]],
            )
            pages = build_pages(offloading, caches, (None,))
            capacity = slots * pages.groups[0].payload_bytes
            region = Region.create(
                "rig", make_geometry(pages.groups, capacity), {}, ranks, directory=directory
            )
            region.sign(rank)
            self.tensors.append(tensors)
            device = devices[rank] if devices else None
            if device is not None:
                for tensor in tensors:
                    device.own(tensor)
            self.workers.append(TransferWorker(region, pages, rank, device=device))
        self.manager = KVTierManager(
            Region.attach("rig", directory=directory), parse({"capacity_bytes": capacity} | config)
        )
        self._job = 0
        self.base = [worker.resources() for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()

    def context(self, name: str = "r") -> Any:
        """A request."""
        from vllm.v1.kv_offload.base import ReqContext  # lazy: as above

        return ReqContext(req_id=name)

    def blocks(self, ids: Sequence[int], first: int = 0) -> Any:
        """Accelerator blocks of one group."""
        from vllm.v1.kv_offload.base import GPULoadStoreSpec  # lazy: as above

        return GPULoadStoreSpec(list(ids), [len(ids)], [first])

    def job(self) -> int:
        self._job += 1
        return self._job

    def finish(self, job: int, ranks: Sequence[int] | None = None) -> None:
        """Wait for a job's copies as vLLM does."""
        for rank in ranks if ranks is not None else range(len(self.workers)):
            self.workers[rank].wait({job})
            assert [result.job_id for result in self.workers[rank].get_finished()] == [job]

    def store(self, keys: Sequence[bytes], ids: Sequence[int], first: int = 0) -> None:
        """A store from end to end."""
        output = self.manager.prepare_store(keys, self.context())
        assert output is not None
        job = self.job()
        for worker in self.workers:
            assert worker.submit_store(job, self.blocks(ids, first), output.store_spec)
        self.finish(job)
        self.manager.complete_store(set(output.keys_to_store), self.context())

    def load(self, keys: Sequence[bytes], ids: Sequence[int], first: int = 0) -> None:
        """A load from end to end."""
        spec = self.manager.prepare_load(keys, self.context())
        job = self.job()
        for worker in self.workers:
            assert worker.submit_load(job, spec, self.blocks(ids, first))
        self.finish(job)
        self.manager.complete_load(set(keys), self.context())

    def states(self, keys: Sequence[bytes]) -> list[str]:
        return [self.manager.lookup(each, self.context()).name for each in keys]

    def content(self, rank: int, block: int) -> bytes:
        return b"".join(tensor[block].numpy().tobytes() for tensor in self.tensors[rank])

    def check(self) -> None:
        """Nothing in flight, nothing lost."""
        index = self.manager.engine.cache.index
        index.check()
        assert index.num_writing == index.num_orphans == 0
        assert index.num_free + index.num_ready == index.capacity
        assert self.manager.engine.cache.slots.totals()["owner_pins"] == 0
        # Every rank says the same of descriptors and threads: they share this process.
        assert [worker.resources() for worker in self.workers] == self.base


@contextlib.contextmanager
def rig(
    ranks: int = 1,
    blocks_per_chunk: int = 1,
    slots: int = 8,
    devices: Sequence[Any] = (),
    **config: Any,
) -> Iterator[Rig]:
    """`devices`: one of each rank, where the accelerator has a memory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvt-test-", dir="/dev/shm") as directory:
        made = Rig(directory, ranks, blocks_per_chunk, slots, devices, **config)
        try:
            yield made
        finally:
            made.close()


class Gate:
    """Holds a worker's store copies until it is opened."""

    def __init__(self, worker: Any) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        engine = worker.jobs.engine
        (self._plan,) = engine.plans
        engine.plans = (self,)
        self.local_bytes = 1 << 30  # never inline

    def check(self, *args: Any) -> None:
        self._plan.check(*args)

    def store(self, *args: Any) -> int:
        self.entered.set()
        assert self.open.wait(30)
        return self._plan.store(*args)

    def load(self, *args: Any) -> int:
        self.entered.set()
        assert self.open.wait(30)
        return self._plan.load(*args)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_blocks_come_back_to_other_places(ranks: int, blocks_per_chunk: int) -> None:
    with rig(ranks, blocks_per_chunk) as made:
        keys = [key(number) for number in range(2)]
        ids = list(range(1, 1 + 2 * blocks_per_chunk))
        expected = [[made.content(rank, block) for block in ids] for rank in range(ranks)]
        made.store(keys, ids)
        assert made.states(keys) == ["HIT", "HIT"]
        for tensors in made.tensors:
            for tensor in tensors:
                tensor[1 : 1 + len(ids)] = 0
        back = list(range(20, 20 + len(ids)))
        made.load(keys, back)
        assert expected == [[made.content(rank, block) for block in back] for rank in range(ranks)]
        made.check()


def test_a_load_from_inside_a_chunk_touches_nothing_else() -> None:
    with rig(blocks_per_chunk=4) as made:
        made.store([key(1), key(2)], range(1, 9))
        before = [made.content(0, block) for block in range(BLOCKS)]
        made.load([key(1), key(2)], [20, 21, 22], first=2)
        after = [made.content(0, block) for block in range(BLOCKS)]
        assert after[20:23] == before[3:6]
        assert after[:20] + after[23:] == before[:20] + before[23:]
        made.check()


def test_a_chunk_without_its_first_blocks_fails_alone() -> None:
    with rig(blocks_per_chunk=4) as made:
        # The first two blocks of the first chunk are gone, behind a window.
        made.store([key(1), key(2)], [3, 4, 5, 6, 7, 8], first=2)
        assert made.states([key(1), key(2)]) == ["MISS", "HIT"]
        made.load([key(2)], [20, 21, 22, 23])
        assert [made.content(0, block) for block in (20, 21, 22, 23)] == [
            made.content(0, block) for block in (5, 6, 7, 8)
        ]
        assert made.manager.failed_chunks == 1
        made.check()


def test_blocks_that_cannot_be_told_apart_are_not_stored() -> None:
    with rig(blocks_per_chunk=4) as made:
        # Two chunks, one block missing, and not the first: nobody knows which.
        made.store([key(1), key(2)], [1, 2, 3, 5, 6, 7, 8])
        assert made.states([key(1), key(2)]) == ["MISS", "MISS"]
        made.check()


def test_a_slot_that_cannot_be_filled_keeps_no_old_bytes() -> None:
    with rig(ranks=2, blocks_per_chunk=4, slots=1) as made:
        made.store([key(1)], [1, 2, 3, 4])
        made.store([key(2)], [5, 6, 7], first=1)
        region = made.workers[0].region
        assert not any(region.slot_view(0, region.geometry.payload_bytes[0]))
        made.check()


def test_a_load_that_does_not_fit_its_blocks_is_refused() -> None:
    with rig(blocks_per_chunk=4) as made:
        made.store([key(1)], [1, 2, 3, 4])
        spec = made.manager.prepare_load([key(1)], made.context())
        with pytest.raises(ValueError, match="span 2 chunks"):
            made.workers[0].submit_load(9, spec, made.blocks([20, 21, 22, 23], first=1))


@pytest.mark.fault("C01")
def test_a_chunk_is_no_hit_before_all_ranks_have_written_it() -> None:
    with rig(ranks=2) as made:
        gate = Gate(made.workers[1])
        output = made.manager.prepare_store([key(1)], made.context())
        for worker in made.workers:
            worker.submit_store(1, made.blocks([1]), output.store_spec)
        assert gate.entered.wait(30)
        made.finish(1, [0])
        assert [worker.resources().jobs for worker in made.workers] == [0, 1]
        # vLLM is wrong here: one rank has not finished.
        made.manager.complete_store({key(1)}, made.context())
        assert made.states([key(1)]) == ["HIT_PENDING"]
        gate.open.set()
        made.finish(1, [1])
        assert made.states([key(1)]) == ["HIT"]
        made.check()


@pytest.mark.fault("C22")
def test_a_preempted_request_gives_no_block_away_before_its_store_has_read_it() -> None:
    """What vLLM does at a preemption: wait for the stores of the blocks, then hand them on."""
    with rig() as made:
        before = made.content(0, 1)
        worker = made.workers[0]
        gate = Gate(worker)
        output = made.manager.prepare_store([key(1)], made.context())
        job = made.job()
        worker.submit_store(job, made.blocks([1]), output.store_spec)
        assert gate.entered.wait(30)
        given_away = threading.Event()

        def preempt() -> None:
            worker.wait({job})
            given_away.set()
            for tensor in made.tensors[0]:
                tensor[1] = 77

        scheduler = threading.Thread(target=preempt)
        scheduler.start()
        try:
            # It has to wait: with a `wait` that returns, the event comes at once.
            assert not given_away.wait(0.3)
            assert worker.resources().jobs == 1
        finally:
            gate.open.set()
            scheduler.join(30)
        assert given_away.is_set()
        assert made.content(0, 1) != before
        made.finish(job)
        made.manager.complete_store({key(1)}, made.context())
        made.load([key(1)], [20])
        assert made.content(0, 20) == before
        made.check()


@pytest.mark.fault("L13")
@pytest.mark.parametrize("completed", [False, True], ids=["open", "completed"])
@pytest.mark.parametrize("reset", [False, True], ids=["", "reset"])
def test_a_rank_that_does_not_report_costs_its_slot_and_no_reader(
    completed: bool, reset: bool
) -> None:
    """One of four ranks keeps its part of a store to itself, whatever vLLM says of the job."""
    with rig(ranks=4, slots=2, lookup_timeout_seconds=0.3) as made:
        manager = made.manager
        gate = Gate(made.workers[3])
        output = manager.prepare_store([key(1)], made.context("writer"))
        (slot,) = output.store_spec.slots.tolist()
        job = made.job()
        for worker in made.workers:
            worker.submit_store(job, made.blocks([1]), output.store_spec)
        assert gate.entered.wait(30)
        made.finish(job, [0, 1, 2])
        if completed:
            manager.complete_store({key(1)}, made.context("writer"))

        reader = made.context("reader")
        started = time.monotonic()
        answers = {manager.lookup(key(1), reader).name}
        while "MISS" not in answers:
            assert time.monotonic() < started + 5, "far beyond the lookup's deadline"
            time.sleep(0.01)
            manager.on_schedule_end(None)
            answers.add(manager.lookup(key(1), reader).name)
        assert answers == {"HIT_PENDING", "MISS"}

        if reset:
            manager.reset_cache()
        # There are two slots, and one of them may still be written.
        more = manager.prepare_store([key(2), key(3)], made.context("other"))
        assert more.keys_to_store == [key(2)]
        assert more.store_spec.slots.tolist() != [slot]

        gate.open.set()
        made.finish(job, [3])
        if not (completed or reset):
            manager.complete_store({key(1)}, made.context("writer"))
        manager.on_schedule_end(None)
        other = made.job()
        for worker in made.workers:
            worker.submit_store(other, made.blocks([2]), more.store_spec)
        made.finish(other)
        manager.complete_store({key(2)}, made.context("other"))
        assert made.states([key(1), key(2)]) == ["MISS" if reset else "HIT", "HIT"]
        if not reset:
            made.load([key(1)], [20])
            assert [made.content(rank, 20) for rank in range(4)] == [
                made.content(rank, 1) for rank in range(4)
            ]
        made.check()


@pytest.mark.fault("H10")
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_what_a_rank_finds_out_alone_is_no_decision_of_its_own(blocks_per_chunk: int) -> None:
    """Each of four ranks cannot store another chunk, and only it knows. All of them go on with the
    same jobs and numbers; the manager alone, which hears of every rank, says what is stored."""
    ranks, count = 4, 6
    with rig(ranks=ranks, blocks_per_chunk=blocks_per_chunk) as made:
        manager = made.manager
        keys = [key(number) for number in range(count)]
        ids = list(range(1, 1 + count * blocks_per_chunk))
        stores = []
        for one in keys:  # a job a chunk, so that a rank can fail one and not the others
            output = manager.prepare_store([one], made.context())
            stores.append((made.job(), output.store_spec))
        for number, (job, store) in enumerate(stores):
            mine = ids[number * blocks_per_chunk : (number + 1) * blocks_per_chunk]
            for rank, worker in enumerate(made.workers):
                bad = [BLOCKS] * blocks_per_chunk  # blocks that this rank does not have
                assert worker.submit_store(job, made.blocks(bad if rank == number else mine), store)
            made.finish(job)
            # Failed on one of them or not, its number is published on all.
            assert {worker.region.finished(rank) for rank, worker in enumerate(made.workers)} == {
                number
            }
            manager.complete_store({keys[number]}, made.context())
        assert made.states(keys) == ["MISS"] * ranks + ["HIT"] * (count - ranks)

        expected = [[made.content(rank, block) for block in ids] for rank in range(ranks)]
        left = ids[ranks * blocks_per_chunk :]
        for tensors in made.tensors:
            for tensor in tensors:
                tensor[left[0] : left[-1] + 1] = 0
        made.load(keys[ranks:], left)
        for rank in range(ranks):
            there = [made.content(rank, block) for block in left]
            assert there == expected[rank][ranks * blocks_per_chunk :]
        assert {worker.region.finished(rank) for rank, worker in enumerate(made.workers)} == {count}
        made.check()


def test_a_failure_of_one_rank_fails_the_chunk_and_vllm_hears_of_success() -> None:
    with rig(ranks=2) as made:
        output = made.manager.prepare_store([key(1), key(2)], made.context())
        made.workers[0].submit_store(1, made.blocks([1, 2]), output.store_spec)
        # A block that the accelerator does not have.
        made.workers[1].submit_store(1, made.blocks([1, BLOCKS]), output.store_spec)
        for worker in made.workers:
            worker.wait({1})
            assert [result.success for result in worker.get_finished()] == [True]
        made.manager.complete_store({key(1), key(2)}, made.context())
        assert made.states([key(1), key(2)]) == ["MISS", "MISS"]
        made.check()


def test_a_load_that_fails_ends_the_engine() -> None:
    with rig() as made:
        made.store([key(1)], [1])
        spec = made.manager.prepare_load([key(1)], made.context())
        made.workers[0].submit_load(5, spec, made.blocks([BLOCKS]))
        made.workers[0].wait({5})
        with pytest.raises(InternalError, match="load 5 failed"):
            made.workers[0].get_finished()


@pytest.mark.fault("C23")
@pytest.mark.fault("C18")
def test_a_reset_lends_no_slot_that_is_still_written_or_read() -> None:
    with rig(slots=2) as made:
        made.store([key(1)], [1])
        gate = Gate(made.workers[0])
        load = made.manager.prepare_load([key(1)], made.context("reader"))
        made.workers[0].submit_load(7, load, made.blocks([20]))
        store = made.manager.prepare_store([key(2)], made.context("writer"))
        made.workers[0].submit_store(8, made.blocks([2]), store.store_spec)
        assert gate.entered.wait(30)
        made.manager.reset_cache()
        assert made.states([key(1), key(2)]) == ["MISS", "MISS"]
        output = made.manager.prepare_store([key(3)], made.context())
        assert output.keys_to_store == []
        gate.open.set()
        made.workers[0].wait({7, 8})
        # vLLM never completes the two jobs; the region's lines are enough, at the end of a step.
        made.manager.on_schedule_end(None)
        output = made.manager.prepare_store([key(3), key(4)], made.context())
        assert output.keys_to_store == [key(3), key(4)]
        assert made.content(0, 20) == made.content(0, 1)


def test_a_completion_that_nobody_waits_for_is_a_bug() -> None:
    with rig() as made:
        with pytest.raises(InternalError, match="not in flight"):
            made.manager.complete_store({key(1)}, made.context())
        with pytest.raises(InternalError, match="completed twice"):
            made.manager.complete_load({key(1)}, made.context())


def test_an_access_at_the_end_of_a_request_keeps_its_prefix_longest() -> None:
    with rig(slots=4) as made:
        keys = [key(number) for number in range(4)]
        made.store(keys, [1, 2, 3, 4])
        context = made.context()
        # Told out of order, as for windowed groups.
        for number in (1, 0):
            context.set_offload_key_position(keys[number], 16 * (number + 1))
        made.manager.on_request_finished(context)
        assert made.manager.engine.cache.index.keys()[-2:] == [keys[1], keys[0]]


def test_geometry_of_the_rig_is_what_the_tests_think() -> None:
    with rig(ranks=3, blocks_per_chunk=4) as made:
        assert made.workers[2].region.geometry.groups == (
            GroupGeometry(
                block_tokens=16,
                blocks_per_chunk=4,
                block_bytes=2 * 3 * PAGE,
                pages=(PageGeometry("a", 0, 3 * PAGE), PageGeometry("b", 3 * PAGE, 3 * PAGE)),
            ),
        )
