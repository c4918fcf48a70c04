# SPDX-License-Identifier: Apache-2.0
"""What the staged engine costs its caller, its launches, and how it pins the region."""

from __future__ import annotations

import logging
import tempfile
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from benchmarks import cuda_copy
from kvtier.device.cuda import CudaDevice
from kvtier.device.pinning import PinnedSlots
from kvtier.errors import ConfigError
from kvtier.types import Geometry, GroupGeometry
from tests.device.fake import FakeDevice
from tests.device.rig import LAYOUTS, kv, layers, layout, make_rig

pytestmark = pytest.mark.needs("torch")


def longest(calls: list[float]) -> float:
    """Without the two slowest: the machine has other work."""
    return sorted(calls)[-3]


@pytest.mark.timed
@pytest.mark.parametrize("name", ["halves", "part of the heads"])
def test_copies_of_100_ms_cost_a_step_nothing(name: str) -> None:
    with make_rig("fake", name) as rig:
        rig.finish(rig.store((0, [10, 11], [38, 39])))
        rig.device.delay_seconds = 0.1
        steps = []
        jobs, ended = set(), set()
        deadline = time.monotonic() + 20
        while len(steps) < 10 or jobs != ended:
            start = time.perf_counter()
            number = len(steps)
            if number < 10:
                jobs.add(rig.store((0, [number], [1 + number])))
                jobs.add(rig.load((0, [10 + number % 2], [20 + number])))
            ended |= {job.job_id for job in rig.jobs.take_finished()}
            steps.append(time.perf_counter() - start)
            time.sleep(0.005)
            assert time.monotonic() < deadline
        assert longest(steps) < 0.005


def test_launches_of_a_batch_do_not_grow_with_its_blocks() -> None:
    for name, gathers in (("halves", 4), ("token-major", 2), ("opaque", 2)):
        with make_rig("fake", name, blocks_per_chunk=2) as rig:
            rig.launches()
            rig.finish(rig.store((0, [2, 3, 4, 7], range(1, 9))))
            # Block ids; then two copies, since payload fills its slots here or not.
            neighbours = rig.groups[0].payload_bytes == rig.region.geometry.slot_bytes
            assert rig.launches() == (
                ["copy"] + ["gather"] * gathers + ["copy"] * (2 if neighbours else 4)
            )
            rig.finish(rig.load((0, [2, 3, 4, 7], range(11, 19))))
            assert rig.launches().count("scatter") == gathers
    with make_rig("fake", "part of the heads") as rig:
        rig.launches()
        rig.finish(rig.store((0, range(12), range(1, 13))))
        assert rig.launches() == ["copy", "gather", "gather", "copy"]


def test_elements_are_as_wide_as_everything_allows() -> None:
    def widths(name: str) -> set[int]:
        with make_rig("fake", name) as rig:
            return {move.width for rows, _ in rig.engine._groups for move in rows.moves}

    assert widths("halves") == {8}
    assert widths("odd pages") == {1}
    assert "odd bytes" in LAYOUTS


def test_staging_grows_to_one_block() -> None:
    big = layout(layers(kv(head_size=512), 3), whole=(True,))
    with make_rig("fake", big, slots=3, staging_bytes=1000) as rig:
        wanted = rig.expected(0, 1, [4])
        rig.finish(rig.store((0, [1], [4])))
        assert rig.slot(1) == wanted


@pytest.mark.fault("E16")
def test_the_region_is_pinned_in_pieces_and_given_back_in_reverse() -> None:
    with make_rig("fake", "opaque", piece_bytes=3 * 8192 + 5) as rig:
        base, size = rig.region.base_address, rig.region.geometry.slot_bytes
        assert size == 8192
        pieces = [(base + first * size, base + (first + 3) * size) for first in (0, 3, 6, 9)]
        assert rig.device.registered == pieces
        rig.finish(rig.store((0, range(12), range(1, 13))))  # the fake checks each copy's piece
        rig.jobs.close()
        assert rig.device.unregistered == pieces[::-1]


@pytest.mark.fault("E16")
@pytest.mark.fault("O15")
def test_a_refused_registration_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with make_rig("fake", "opaque", piece_bytes=1, register_limit=3) as rig:
        (record,) = caplog.records
        assert "slots from 3 of 12 on are not pinned" in record.message
        assert "cudaErrorMemoryAllocation" in record.message
        rig.finish(rig.store((0, [0, 5], [1, 2])))
        rig.finish(rig.load((0, [5, 0], [21, 22])))
        assert [rig.local(0, 21), rig.local(0, 22)] == [rig.local(0, 2), rig.local(0, 1)]
        rig.jobs.close()
        rig.jobs.close()
        assert len(rig.device.unregistered) == 3
        assert len(caplog.records) == 1


@pytest.mark.fault("O15")
def test_pinned_memory_that_is_not_given_back_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make_rig("fake", "opaque", piece_bytes=1) as rig:
        rig.device.fail_unregister = True
        rig.jobs.close()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "not given back: cudaHostUnregister" in caplog.records[0].message
        rig.device.registered.clear()


def region(available: list[int], num_slots: int = 10, slab_slots: int = 1) -> Any:
    """Slots, of which as many have memory as the list says from call to call."""

    class Region:
        path = "region"
        base_address = 1 << 20
        geometry = Geometry((GroupGeometry(16, 1, 4096),), num_slots, 4096, slab_slots)

        @property
        def available_slots(self) -> int:
            return available.pop(0) if len(available) > 1 else available[0]

    return Region()


def test_pinning_waits_for_memory_and_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    slots = PinnedSlots(device, region([4, 4, 7, 9, 10]), 4 * 4096, stall_seconds=0.05)
    slots.open()
    assert [stop - start for start, stop in device.registered] == [16384, 16384, 8192]
    assert caplog.records == []
    device = FakeDevice()
    slots = PinnedSlots(device, region([4, 6]), 4 * 4096, stall_seconds=0.05)
    slots.open()
    assert len(device.registered) == 1
    assert "slots from 4 of 10 on are not pinned" in caplog.records[0].message
    assert "6 slots have memory" in caplog.records[0].message


def test_no_piece_ends_inside_a_slab() -> None:
    """A chunk may be as long as one: its copy must not go over two registrations."""
    device = FakeDevice()
    for piece_bytes, pieces in ((7 * 4096, [24576] * 5), (1, [12288] * 10), (1 << 20, [122880])):
        slots = PinnedSlots(device, region([30], 30, 3), piece_bytes)
        slots.open()
        assert [stop - start for start, stop in device.registered] == pieces
        slots.close()


def test_no_room_for_staging_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def refuse(self: FakeDevice, size: int) -> Any:
        calls.append(size)
        if len(calls) == 3:
            raise RuntimeError("CUDA out of memory")
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(FakeDevice, "empty", refuse)
    with pytest.raises(ConfigError, match=r"1048576 bytes of accelerator memory.*out of memory"):
        make_rig("fake", "opaque").__enter__()


class Runtime:
    """``torch.cuda`` as far as registrations go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pending = False
        self.code = code
        monkeypatch.setattr(torch.cuda, "device", lambda device: _Nothing())
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch, "ones", self.launch)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return self.answer("register", address, size, flags)

    def cudaHostUnregister(self, address: int) -> int:
        return self.answer("unregister", address)

    def answer(self, *call: Any) -> int:
        self.calls.append(call)
        self.pending = self.code != 0
        return self.code

    def launch(self, *args: Any, **settings: Any) -> None:
        """Every launch checks what an earlier call of the runtime has left behind."""
        pending, self.pending = self.pending, False
        if pending:
            raise RuntimeError("CUDA error: out of memory")


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


@pytest.mark.fault("E16")
def test_a_refused_registration_leaves_no_error_for_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    runtime = Runtime(monkeypatch, 0)
    device.register(4096, 8192)
    device.unregister(4096)
    assert runtime.calls == [("register", 4096, 8192, 0), ("unregister", 4096)]
    runtime = Runtime(monkeypatch, 2)
    with pytest.raises(RuntimeError, match="cudaHostRegister: 2"):
        device.register(4096, 8192)
    assert not runtime.pending
    with pytest.raises(RuntimeError, match="cudaHostUnregister: 2"):
        device.unregister(4096)
    assert not runtime.pending


def test_the_benchmark_measures_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_copy, "TOTAL_BYTES", 1 << 20)
    for order, tp in (("NHD", 1), ("HND", 1), ("NHD", 2)):
        device = FakeDevice()
        device.device = torch.device("cpu")
        with tempfile.TemporaryDirectory(prefix="kvt-test-", dir="/dev/shm") as directory:
            subject = cuda_copy.Subject(device, 64 << 10, order, tp, directory)
            try:
                for page in subject.engine._pages[0]:
                    page.owner.random_(0, 255)
                before = [page.owner.clone() for page in subject.engine._pages[0]]
                subject.store()
                for page in subject.engine._pages[0]:
                    page.owner.zero_()
                subject.load()
                after = [page.owner for page in subject.engine._pages[0]]
                assert all(map(torch.equal, before, after))
                del after, page
            finally:
                subject.close()
        assert device.violations == []
        assert 0 < subject.longest_submit < 5
        del subject


def test_the_benchmark_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_copy.main() == 2
    assert capsys.readouterr().out == "cuda_copy: nothing to measure, torch finds no GPU\n"
