# SPDX-License-Identifier: Apache-2.0
"""A rank without a model server: tensors on a device, a region, jobs; on the fake device or a GPU.

The oracle of a store is the plan for host memory over a copy of the tensors, which has tests of its
own (``tests/layout``).
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvtier.device import jobs as jobs_module
from kvtier.device import streams as streams_module
from kvtier.device.chunks import Chunk, split_load, split_store
from kvtier.device.cuda import CudaDevice
from kvtier.host.region import Region
from kvtier.layout.pages import KVShape, LatentShape, OpaqueShape, group_geometry
from kvtier.layout.plan import LayerPage, compile_plan, expand_slots
from kvtier.types import make_geometry
from tests.device.fake import FakeDevice, extent

BLOCKS = 40
TOKENS = 16
PADDING = 64

Group = Sequence[tuple[str, Any]]


def kv(**changes: Any) -> KVShape:
    fields = {
        "block_tokens": TOKENS,
        "num_kv_heads": 4,
        "head_size": 8,
        "dtype_bytes": 2,
        "order": "NHD",
        "kv": "packed",
    }
    return KVShape(**(fields | changes))


def opaque(page_bytes: int = 4096, ranks: int = 1) -> OpaqueShape:
    return OpaqueShape(page_bytes=page_bytes, ranks=ranks)


def layers(shape: Any, count: int = 2) -> Group:
    return [(f"layer.{index}", shape) for index in range(count)]


class Layout(SimpleNamespace):
    """Groups, parallelism, and what the accelerator should make of them."""

    groups: Sequence[Group]
    tp: int
    rank: int
    whole: tuple[bool, ...]


def layout(*groups: Group, tp: int = 1, rank: int = 0, whole: tuple[bool, ...]) -> Layout:
    return Layout(groups=groups, tp=tp, rank=rank, whole=whole)


LAYOUTS: Mapping[str, Layout] = {
    "opaque": layout(layers(opaque()), whole=(True,)),
    "head-major": layout(layers(kv(order="HND")), whole=(True,)),
    "token-major": layout(layers(kv()), whole=(True,)),
    "halves": layout(layers(kv(kv="split")), whole=(True,)),
    "halves head-major": layout(layers(kv(kv="split", order="HND")), whole=(True,)),
    "apart": layout(layers(kv(kv="apart")), whole=(True,)),
    "odd bytes": layout(layers(kv(head_size=3, dtype_bytes=1, value_head_size=5)), whole=(True,)),
    "odd pages": layout(layers(opaque(4095)), whole=(True,)),
    "part of the heads": layout(layers(kv(kv="split")), tp=2, rank=1, whole=(False,)),
    "part, odd bytes": layout(
        layers(kv(head_size=3, dtype_bytes=1, num_kv_heads=2)), tp=2, rank=1, whole=(False,)
    ),
    "area of a rank": layout(layers(opaque(ranks=2)), tp=2, rank=1, whole=(False,)),
    "in turns": layout(
        layers(LatentShape(block_tokens=TOKENS, row_bytes=72)), tp=2, rank=1, whole=(True,)
    ),
    "groups": layout(
        layers(kv(kv="split"), 3), layers(opaque(), 1), layers(kv(order="HND")), whole=(True,) * 3
    ),
    "groups, in part": layout(
        layers(kv(kv="split"), 3),
        layers(LatentShape(block_tokens=TOKENS, row_bytes=72), 1),
        tp=2,
        rank=0,
        whole=(False, True),
    ),
}


class Rig:
    """One rank's tensors, region and jobs."""

    def __init__(
        self,
        directory: str,
        device: Any,
        layout: Layout,
        *,
        blocks_per_chunk: int = 1,
        slots: int = 12,
        streams: Any = streams_module,
        jobs: Any = jobs_module,
        **settings: Any,
    ) -> None:
        self.device = device
        self.is_fake = isinstance(device, FakeDevice)
        self.layout = layout
        self.blocks_per_chunk = blocks_per_chunk
        rng = np.random.default_rng(7)
        groups, self.pages, self.tensors = [], [], []
        for parts in layout.groups:
            groups.append(group_geometry(parts, TOKENS, blocks_per_chunk))
            pages = []
            for name, shape in parts:
                for part in ("k", "v") if getattr(shape, "kv", "") == "apart" else ("kv",):
                    pages.append(self._page(rng, name, shape, part))
            self.pages.append(pages)
            self.tensors.append([page.owner for page in pages])
        self.groups = groups
        largest = max(group.payload_bytes for group in groups)
        geometry = make_geometry(groups, slots * (-(-largest // 4096) * 4096))
        self.region = Region.create("rig", geometry, {}, layout.tp, directory=directory)
        self.region.sign(layout.rank)
        self.slabs_used = 0
        self.plans = [
            compile_plan(group, pages, region=self.region.area(number), owner=self.region)
            for number, (group, pages) in enumerate(zip(groups, self.pages, strict=True))
        ]
        settings.setdefault("staging_bytes", 1 << 18)
        self.engine = streams.StreamEngine(device, self.region, self.pages, self.plans, **settings)
        self.jobs = jobs.Jobs(self.region, layout.rank, self.plans, self.engine)
        self.published: dict[int, bool] = {}
        self._watch_publishing()
        # Whoever makes a worker may do so on another stream than the one that it computes on.
        with device.on(device.new_stream()):
            self.jobs.open()
        self._job = 0
        self._transfer = 0

    def _page(self, rng: np.random.Generator, name: str, shape: Any, part: str) -> LayerPage:
        tp, rank = self.layout.tp, self.layout.rank
        if isinstance(shape, KVShape):
            mapping = shape.mapping(tp, rank, part)
        else:
            mapping = shape.mapping(tp, rank)
        stride = mapping.local_bytes + PADDING
        values = torch.from_numpy(rng.integers(0, 256, (BLOCKS, stride), dtype=np.uint8))
        if self.is_fake:
            tensor = values
            self.device.own(tensor)
        else:
            tensor = values.to(self.device.device)
        return LayerPage(name, tensor.data_ptr(), stride, BLOCKS, mapping, owner=tensor)

    def _watch_publishing(self) -> None:
        """Remember of every published transfer whether it failed; `on_publish` sees it first."""
        self.on_publish: Callable[[int], None] = lambda number: None
        publish, fail = self.region.publish, self.region.fail

        def published(rank: int, number: int) -> None:
            self.on_publish(number)
            publish(rank, number)
            self.published[number] = True

        def failed(rank: int, number: int) -> None:
            self.on_publish(number)
            fail(rank, number)
            self.published[number] = False

        self.region.publish, self.region.fail = published, failed  # type: ignore[method-assign]

    def close(self) -> None:
        self.jobs.close()
        self.region.close()

    def _numbers(self, count: int) -> tuple[int, int]:
        self._job += 1
        first, self._transfer = self._transfer, self._transfer + count
        return self._job, first

    def store(self, *parts: tuple[int, Sequence[int], Sequence[int]], first: int = 0) -> int:
        """Submit a store of (group, slots, blocks): its job."""
        work = [
            (group, split_store(ints(slots), ints(blocks), first, self.blocks_per_chunk))
            for group, slots, blocks in parts
        ]
        count = sum(len(chunks) for _, chunks in work)
        job, number = self._numbers(count)
        self.jobs.store(job, number, count, work)
        return job

    def load(self, *parts: tuple[int, Sequence[int], Sequence[int]], first: int = 0) -> int:
        """Submit a load of (group, slots, blocks): its job."""
        work: list[tuple[int, list[Chunk]]] = [
            (group, split_load(ints(slots), ints(blocks), first, self.blocks_per_chunk))
            for group, slots, blocks in parts
        ]
        job, number = self._numbers(1)
        self.jobs.load(job, number, 1, work)
        return job

    def wait(self, *jobs: int) -> None:
        """As ``Jobs.wait``, which has no limit: broken code may never end."""
        waiter = threading.Thread(target=self.jobs.wait, args=(set(jobs),), daemon=True)
        waiter.start()
        waiter.join(5)
        assert not waiter.is_alive(), f"jobs {jobs} do not end"

    def finish(self, *jobs: int) -> list[Any]:
        """Wait for jobs, none of which may have met an error."""
        self.wait(*jobs)
        ended = self.jobs.take_finished()
        assert sorted(job.job_id for job in ended) == sorted(jobs)
        assert [job.error or job.broken for job in ended] == [None] * len(jobs)
        return ended

    def local(self, group: int, block: int) -> list[bytes]:
        """Pages of a block, without their padding."""
        return [
            page.owner[block, : page.mapping.local_bytes].cpu().numpy().tobytes()
            for page in self.pages[group]
        ]

    def padding(self) -> bytes:
        """All that stands between the pages."""
        return b"".join(
            page.owner[:, page.mapping.local_bytes :].cpu().numpy().tobytes()
            for pages in self.pages
            for page in pages
        )

    def fresh_slots(self, group: int, count: int) -> list[int]:
        """Slots of chunks of `group` that nobody has been given yet, in slabs of their own."""
        geometry = self.region.geometry
        width = geometry.widths[group]
        room = geometry.slab_slots // width
        slabs = -(-count // room)
        first, self.slabs_used = self.slabs_used, self.slabs_used + slabs
        assert self.slabs_used <= geometry.num_slabs
        return [(first + i // room) * geometry.slab_slots + i % room * width for i in range(count)]

    def slot(self, slot: int, group: int = 0) -> bytes:
        return bytes(self.region.slot_view(slot, self.groups[group].payload_bytes))

    def expected(self, group: int, slot: int, blocks: Sequence[int]) -> bytes:
        """What this rank has to make of `slot`, which it finds as it is now."""
        payload = self.groups[group].payload_bytes
        buffer = np.frombuffer(self.slot(slot, group), dtype=np.uint8).copy()
        pages = []
        for page in self.pages[group]:
            copy = np.ascontiguousarray(page.owner.cpu().numpy())
            pages.append(LayerPage(page.layer, copy.ctypes.data, page.block_stride, BLOCKS,
                                   page.mapping, owner=copy))  # fmt: skip
        plan = compile_plan(self.groups[group], pages)
        addresses, page_ids = expand_slots(
            ints([slot]), self.groups[group], 0, payload, self.region.geometry.widths[group]
        )
        place = buffer.ctypes.data + addresses - addresses[0]
        plan.store(ints(blocks), place.astype(np.uint64), page_ids)
        return buffer.tobytes()

    def model_writes(self, group: int, blocks: Sequence[int], value: int) -> None:
        """Queue, behind work that takes its time, that the model writes `blocks`."""
        tensors = self.tensors[group]
        # Made before the work that takes its time: the copy of a list would wait for it.
        index = torch.tensor(list(blocks), device=tensors[0].device)

        def write() -> None:
            for tensor in tensors:
                tensor.index_fill_(0, index, value)

        if self.is_fake:
            self.device.queue("model writes", write, writes=lambda: self._ranges(group, blocks))
            return
        torch.cuda._sleep(200_000_000)
        write()

    def model_reads(self, group: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Queue that the model reads `blocks`: what it sees, once ``model_ends``."""
        tensors = self.tensors[group]
        index = torch.tensor(list(blocks), device=tensors[0].device)
        seen = [torch.zeros_like(tensor[list(blocks)]) for tensor in tensors]

        def read() -> None:
            for tensor, copy in zip(tensors, seen, strict=True):
                torch.index_select(tensor, 0, index, out=copy)

        if self.is_fake:
            self.device.queue("model reads", read, reads=lambda: self._ranges(group, blocks))
        else:
            torch.cuda._sleep(200_000_000)
            read()
        return seen

    def model_ends(self) -> None:
        """Wait for all that the model has queued."""
        self.device.current_stream().synchronize()

    def _ranges(self, group: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        return [extent(tensor[block]) for tensor in self.tensors[group] for block in blocks]

    def launches(self) -> list[str]:
        """Work queued since the last call; the fake device only."""
        names, self.device.launches = self.device.launches, []
        return names


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class LimitedCuda(CudaDevice):
    """A GPU that refuses registrations, as the fake device does."""

    register_limit = 1 << 30
    count = 0

    def register(self, address: int, size: int) -> None:
        if self.count >= self.register_limit:
            raise RuntimeError("cudaHostRegister: as many as there may be")
        self.count += 1
        super().register(address, size)


class SlowPool:
    """A copy pool whose loads begin only after a while."""

    def __init__(self, pool: Any, seconds: float = 0.02) -> None:
        self._pool = pool
        self._seconds = seconds
        self._timers: list[threading.Timer] = []
        self.store = pool.store

    def load(self, *args: Any) -> Future[int]:
        future: Future[int] = Future()

        def work() -> None:
            future.set_result(self._pool.load(*args).result())

        self._timers.append(threading.Timer(self._seconds, work))
        self._timers[-1].start()
        return future

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        self._pool.close()


def slow_pool(rig: Rig) -> None:
    """Let the pool of a rig's loads take its time."""
    rig.engine._loads._pool = rig.engine._pool = SlowPool(rig.engine._pool)


@contextlib.contextmanager
def make_rig(kind: str, layout: str | Layout = "opaque", **settings: Any) -> Iterator[Rig]:
    """A rig on the device of a kind: "fake" or "cuda"."""
    device: Any = FakeDevice() if kind == "fake" else LimitedCuda(torch.device("cuda", 0))
    device.register_limit = settings.pop("register_limit", device.register_limit)
    with tempfile.TemporaryDirectory(prefix="kvt-test-", dir="/dev/shm") as directory:
        rig = Rig(
            directory, device, LAYOUTS[layout] if isinstance(layout, str) else layout, **settings
        )
        try:
            yield rig
            if rig.is_fake:
                device.gate.set()
            rig.jobs.close()
            if rig.is_fake:
                device.check()
                assert device.registered == []
        finally:
            if rig.is_fake:
                device.gate.set()
            rig.close()
