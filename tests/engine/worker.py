# SPDX-License-Identifier: Apache-2.0
"""A worker of the engine's model: one rank, in a process of its own, that copies as vLLM's does.

The world says which slots it may fill or read (``tests.driven``); it copies with the jobs of
``kvtier.device`` between them and blocks of its own, and publishes in its rank's line. What it
writes and compares only it knows: bytes that name key, epoch and rank. Before it touches a slot, it
looks whether it may: at the slot's word, in its own mapping.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier._core.layout import CopyPlan
from kvtier._core.slots import ORPHAN, READY, WRITING, SlotTable
from kvtier.device.chunks import split_load, split_store
from kvtier.device.host import HostEngine
from kvtier.device.jobs import Jobs
from kvtier.host.region import Region
from kvtier.layout.pages import OpaqueShape, group_geometry
from kvtier.layout.plan import CopyPool, LayerPage, compile_plan
from kvtier.testing import leaks
from kvtier.types import GroupGeometry, key_group, make_geometry
from tests.driven import serve

RANKS = 2
BLOCKS = 32
TOKENS = 16

Chunks = Sequence[tuple[str, int, int]]
"""Key in hex, slot, generation; those of one group side by side."""


def shape_of(chunk_bytes: int) -> OpaqueShape:
    """Each rank has its own part of every chunk."""
    return OpaqueShape(page_bytes=chunk_bytes // RANKS, ranks=RANKS)


def groups_of(chunk_bytes: Sequence[int]) -> list[GroupGeometry]:
    return [group_geometry([("state", shape_of(size))], TOKENS) for size in chunk_bytes]


def part_of(name: bytes, epoch: int, rank: int, length: int) -> bytes:
    """What a rank has for key `name` in `epoch`."""
    pattern = name + epoch.to_bytes(4, "big") + bytes([rank])
    return (pattern * (length // len(pattern) + 1))[:length]


class Worker:
    """State of one rank between two lines."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._region: Region | None = None
        self._begun: dict[int, tuple[Chunks, int]] = {}
        self._wrong: list[str] = []
        self._kept = contextlib.ExitStack()

    def join(self, name: str, chunk_bytes: list[int], capacity_bytes: int) -> dict[str, Any]:
        """As vLLM's workers: whoever comes first makes the region."""
        before = self._held()
        groups = groups_of(chunk_bytes)
        geometry = make_geometry(groups, capacity_bytes)
        self._region = region = Region.create(name, geometry, {"model": "model"}, RANKS)
        if region.is_creator:
            region.populate(lambda _: None)
        self._slots = SlotTable(region.records, region.table, geometry.num_slots)
        self._blocks = [
            np.zeros((BLOCKS, size // RANKS), dtype=np.uint8) for size in chunk_bytes
        ]  # fmt: skip
        plans = [self._plan(number, group) for number, group in enumerate(groups)]
        engine = HostEngine(plans)
        engine._pool = CopyPool(2, inline_bytes=0)  # on its threads, however small
        self._jobs = Jobs(region, self._rank, plans, engine)
        self._jobs.open()
        region.sign(self._rank)
        return {"before": before, **self.report()}

    def _plan(self, number: int, group: GroupGeometry) -> CopyPlan:
        blocks = self._blocks[number]
        mapping = shape_of(group.payload_bytes).mapping(RANKS, self._rank)
        page = LayerPage(
            "state", blocks.ctypes.data, blocks.shape[1], BLOCKS, mapping, owner=blocks
        )
        area = self._region.area(number)
        return compile_plan(group, [page], region=area, owner=self._region)

    def begin(self, number: int, chunks: Chunks, epoch: int) -> None:
        """Slots to fill. A copy takes its time: some of it is there long before the end."""
        self._begun[number] = (chunks, epoch)
        self._may_write(chunks)
        for name, slot, _ in chunks:
            length = self._blocks[key_group(bytes.fromhex(name))].shape[1]
            start = self._rank * length
            view = self._region.slot_view(slot, start + length)
            view[start:] = b"\xee" * length

    def end(self, number: int, good: bool) -> None:
        """Store what was begun; if it is not `good`, the first group's blocks are gone."""
        chunks, epoch = self._begun.pop(number)
        self._may_write(chunks)
        work = []
        for group, names, slots in _by_group(chunks):
            # Block 0 stands for none.
            blocks = np.arange(1, len(names) + 1, dtype=np.int64)
            length = self._blocks[group].shape[1]
            for block, name in zip(blocks, names, strict=True):
                part = part_of(name, epoch, self._rank, length)
                self._blocks[group][block] = np.frombuffer(part, dtype=np.uint8)
            if not good and not work:
                blocks = blocks[:0]
            work.append((group, split_store(slots, blocks, 0, 1)))
        self._jobs.store(number, number, len(chunks), work)
        # The next one uses the same blocks.
        self._jobs.wait({number})
        self._take_finished()

    def load(self, number: int, chunks: Chunks, epoch: int) -> dict[str, Any]:
        """Load pinned chunks, and compare them: the keys of those that are not as they should."""
        self._may_read(chunks)
        work = []
        for group, names, slots in _by_group(chunks):
            self._blocks[group][:] = 0
            blocks = np.arange(1, len(names) + 1, dtype=np.int64)
            work.append((group, split_load(slots, blocks, 1, 1)))
        self._jobs.load(number, number, 1, work)
        self._jobs.wait({number})
        self._take_finished()
        self._may_read(chunks)
        different = []
        for group, names, _ in _by_group(chunks):
            length = self._blocks[group].shape[1]
            for block, name in enumerate(names, start=1):
                right = part_of(name, epoch, self._rank, length)
                if self._blocks[group][block].tobytes() != right:
                    different.append(name.hex())
        return {"different": different}

    def _take_finished(self) -> None:
        for job in self._jobs.take_finished():
            if job.error is not None or job.broken is not None:
                self._wrong.append(f"job {job.job_id}: {job.error or job.broken!r}")

    def _may_write(self, chunks: Chunks) -> None:
        """A slot is written only by the holder of its WRITING state."""
        for name, slot, generation in chunks:
            word = self._slots.state(slot), self._slots.generation(slot)
            if word != (WRITING, generation):
                self._wrong.append(f"slot {slot} of {name} to write is {word}, not {generation}")

    def _may_read(self, chunks: Chunks) -> None:
        """It is read only under a pin."""
        for name, slot, generation in chunks:
            slots = self._slots
            word = slots.state(slot), slots.generation(slot), slots.owner_pins(slot)
            if word[0] not in (READY, ORPHAN) or word[1] != generation or not word[2]:
                self._wrong.append(f"slot {slot} of {name} to read is {word}, not {generation}")

    def _held(self) -> dict[str, Any]:
        now = leaks.take()
        kinds = sorted(target.partition(":")[0] for target in now.fds.values())
        return {"fds": kinds, "threads": len(now.threads), "mappings": now.mappings}

    def report(self) -> dict[str, Any]:
        """What this process holds now, and what it sees of everybody's."""
        wrong, self._wrong = self._wrong, []
        totals = self._slots.totals()
        return {
            **self._held(),
            "wrong": wrong,
            "jobs": len(self._jobs),
            "begun": sorted(self._begun),
            "seen": {name: totals[name] for name in ("owner_pins", "writing")},
        }

    def leave(self) -> dict[str, Any]:
        """Give everything back; what is begun will not be ended."""
        if self._region is not None:
            self._jobs.close()
            del self._jobs, self._slots
            self._blocks.clear()
            self._begun.clear()
            gc.collect()  # views of the region that a job holds
            self._region.close()
            self._region = None
        return self._held()

    def keep(self, kind: str) -> None:
        """Something that it has no use for, for tests of those who look."""
        match kind:
            case "fds":
                self._kept.callback(os.close, os.open("/dev/null", os.O_RDONLY))
            case "threads":
                stop = threading.Event()
                thread = threading.Thread(target=stop.wait)
                thread.start()
                self._kept.callback(thread.join)
                self._kept.callback(stop.set)
            case "jobs":
                self._jobs.load(0, 0, 0, [])
                self._kept.callback(self._jobs.take_finished)
            case "begun":
                self._begun[-1] = ([], 0)
                self._kept.callback(self._begun.pop, -1)
            case "region":
                self._kept.callback(self._region.payload.release)

    def let_go(self) -> None:
        """What it was told to keep."""
        self._kept.close()


def _by_group(chunks: Chunks) -> list[tuple[int, list[bytes], np.ndarray]]:
    """Keys and slots of each group, in order."""
    groups: dict[int, tuple[list[bytes], list[int]]] = {}
    for hexed, slot, _ in chunks:
        name = bytes.fromhex(hexed)
        names, slots = groups.setdefault(key_group(name), ([], []))
        names.append(name)
        slots.append(slot)
    return [
        (group, names, np.array(slots, dtype=np.int64))
        for group, (names, slots) in groups.items()
    ]  # fmt: skip


if __name__ == "__main__":
    worker = Worker(int(sys.argv[1]))
    serve(worker)
    worker.leave()  # whoever was to say so has gone: threads that copy keep no process alive
