# SPDX-License-Identifier: Apache-2.0
"""vLLM's calls to a worker whose accelerator has a memory of its own, over the fake device.

The copies themselves are tested without vLLM, in ``tests/device``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.errors import ConfigError, InternalError
from tests.vllm.test_layouts import LAYOUTS, instance
from tests.vllm.test_transfers import BLOCKS, Rig, key, rig

pytestmark = pytest.mark.vllm


@contextlib.contextmanager
def device_rig(ranks: int = 1, **settings: Any) -> Iterator[Rig]:
    from tests.device.fake import FakeDevice  # lazy: torch takes seconds, only these tests need it

    devices = [FakeDevice() for _ in range(ranks)]
    with rig(ranks, devices=devices, **settings) as made:
        made.devices = devices
        try:
            yield made
        finally:
            for device in devices:
                device.gate.set()
        made.close()
        for device in devices:
            device.check()
            assert device.registered == []


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_blocks_come_back_to_other_places(ranks: int, blocks_per_chunk: int) -> None:
    with device_rig(ranks, blocks_per_chunk=blocks_per_chunk) as made:
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


def test_a_chunk_without_its_first_blocks_fails_alone() -> None:
    with device_rig(blocks_per_chunk=4) as made:
        made.store([key(1), key(2)], [3, 4, 5, 6, 7, 8], first=2)
        assert made.states([key(1), key(2)]) == ["MISS", "HIT"]
        made.load([key(2)], [20, 21, 22, 23])
        assert made.content(0, 23) == made.content(0, 8)
        made.check()


def test_what_the_device_refuses_fails_a_store_and_ends_the_engine_of_a_load() -> None:
    with device_rig() as made:
        (device,) = made.devices
        device.fail_copies = {device.copies}
        made.store([key(1)], [1])
        assert made.states([key(1)]) == ["MISS"]
        made.store([key(1)], [1])
        spec = made.manager.prepare_load([key(1)], made.context())
        device.fail_copies = {device.copies}
        made.workers[0].submit_load(50, spec, made.blocks([20]))
        made.workers[0].wait({50})
        with pytest.raises(InternalError, match=r"load 50 failed.*was refused"):
            made.workers[0].get_finished()


def test_a_block_that_is_not_there_is_refused() -> None:
    with device_rig() as made:
        made.store([key(1)], [BLOCKS])
        assert made.states([key(1)]) == ["MISS"]
        made.check()


@pytest.mark.fault("C22")
def test_preempted_blocks_are_given_away_after_their_copies() -> None:
    """vLLM submits the stores of the step before, then waits for those whose blocks it takes."""
    with device_rig() as made:
        (device,) = made.devices
        before = made.content(0, 1)
        device.gate.clear()
        output = made.manager.prepare_store([key(1)], made.context())
        start = time.perf_counter()
        made.workers[0].submit_store(1, made.blocks([1]), output.store_spec)
        assert made.workers[0].get_finished() == []
        assert time.perf_counter() - start < 1
        opener = threading.Timer(0.05, device.gate.set)
        opener.start()
        made.workers[0].wait({1})
        assert device.gate.is_set()
        for tensor in made.tensors[0]:
            device.queue("model writes", lambda tensor=tensor: tensor[1].fill_(9))
        device.current_stream().synchronize()
        opener.join()
        made.finish(1)
        made.manager.complete_store({key(1)}, made.context())
        made.load([key(1)], [20])
        assert made.content(0, 20) == before
        made.check()


@pytest.mark.fault("C23")
def test_a_reset_lends_no_slot_that_is_still_written() -> None:
    with device_rig(slots=1) as made:
        (device,) = made.devices
        device.gate.clear()
        output = made.manager.prepare_store([key(1)], made.context())
        made.workers[0].submit_store(1, made.blocks([1]), output.store_spec)
        made.manager.reset_cache()
        assert made.manager.prepare_store([key(2)], made.context()).keys_to_store == []
        device.gate.set()
        made.workers[0].wait({1})
        made.manager.on_schedule_end(None)
        output = made.manager.prepare_store([key(2)], made.context())
        assert output.keys_to_store == [key(2)]


def test_where_tensors_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # lazy: as above

    from kvtier.vllm.pages import usable_device  # lazy: as above

    host, gpu, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)
    assert usable_device({host}) == host
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="lies on cuda:0: only"):
        usable_device({gpu})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usable_device({gpu}) == gpu
    for devices in ({other}, {host, gpu}, {gpu, torch.device("cuda", 1)}):
        with pytest.raises(ConfigError):
            usable_device(devices)


def test_tensors_of_a_gpu_get_side_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # lazy: as above

    from kvtier.device.streams import StreamEngine  # lazy: as above
    from tests.device.fake import FakeDevice  # lazy: as above

    made: list[Any] = []

    def device(where: torch.device) -> FakeDevice:
        made.append(where)
        return FakeDevice()

    gpu = torch.device("cuda", 3)
    monkeypatch.setattr("kvtier.vllm.pages.usable_device", lambda devices: gpu)
    monkeypatch.setattr("kvtier.vllm.worker.CudaDevice", device)
    with rig() as world:
        assert isinstance(world.workers[0].jobs.engine, StreamEngine)
    assert made == [gpu]


@pytest.mark.fault("R08")
@pytest.mark.usefixtures("in_process")
def test_a_rank_has_its_line_and_its_part_of_a_slot_on_whichever_device_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 on devices 2 and 0 of a permuted machine: the slots are those of ranks in host
    memory, and as many."""
    import torch  # lazy: as above

    from tests.device.fake import FakeDevice  # lazy: as above
    from tests.vllm.ranks import Parallel  # lazy: as above

    made: list[tuple[int | None, FakeDevice]] = []

    def device(where: torch.device) -> FakeDevice:
        made.append((where.index, FakeDevice()))
        return made[-1][1]

    places = iter([torch.device("cuda", 2), torch.device("cuda", 0)])
    layout = LAYOUTS[0]
    with instance(layout, Parallel(1)) as plain:
        slots = plain.made.region.geometry.num_slots
        size = plain.made.region.geometry.slot_bytes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    monkeypatch.setattr("kvtier.vllm.pages.usable_device", lambda devices: next(places))
    monkeypatch.setattr("kvtier.vllm.worker.CudaDevice", device)
    with instance(layout, Parallel(2)) as engine:
        region = engine.made.region
        assert [index for index, _ in made] == [2, 0]
        assert [worker.rank for worker in engine.made.workers] == [0, 1]
        assert region.unsigned() == []
        assert (region.geometry.num_slots, region.geometry.slot_bytes) == (slots, size)
        for rank, (_, fake) in enumerate(made):
            for cache in engine.made.caches[rank].values():
                fake.own(cache)
        written = engine.write()
        for number, slot in enumerate(written):
            chunk = engine.model.chunk(layout, number)
            assert bytes(engine.made.payload(0, slot)) == chunk
        engine.read()
        assert {region.finished(rank) for rank in range(2)} == {len(written)}
    for _, fake in made:
        fake.check()
