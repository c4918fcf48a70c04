# SPDX-License-Identifier: Apache-2.0
"""From page mappings to a proven copy plan of a group, and the threads that carry batches out.

``CopyPool`` owns its threads between ``open`` and ``close``; a batch that is on its way keeps the
arrays and the plan alive by itself. Everything else is plain functions. Works on memory that this
process has mapped; importable without torch and vLLM.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier._core.layout import CopyPlan, PagePlan
from kvtier._core.runs import canonical_fragments, refuse_gap, refuse_overlap
from kvtier.errors import ClosedError
from kvtier.layout.pages import PageMapping
from kvtier.types import GroupGeometry

logger = logging.getLogger(__name__)

INLINE_BYTES = 256 << 10
"""Batches below this are copied by the caller: waking a thread takes as long."""

Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]


class LayerPage(msgspec.Struct, frozen=True):
    """Where one layer's pages (or their K or V part) lie on this rank."""

    layer: str
    base: int
    """Address of block 0."""
    block_stride: int
    """Bytes between two blocks, at least the page."""
    num_blocks: int
    mapping: PageMapping
    owner: Any = None
    """Whatever keeps the memory mapped."""


def compile_plan(
    geometry: GroupGeometry,
    pages: Sequence[LayerPage],
    region: tuple[int, int, int, int] | None = None,
    owner: Any = None,
) -> CopyPlan:
    """Proven copy plan of one group on one rank.

    Parameters
    ----------
    geometry : GroupGeometry
    pages : sequence of LayerPage
        One for every layer of the group, or two (K and V in tensors of their own).
    region : tuple of int, optional
        ``Region.area`` of the group: canonical blocks outside it, or not at the start of a block,
        are refused.

    Raises
    ------
    ValueError
        If a layer is missing or unknown, its canonical page has another size than the geometry
        says, or a proof of ``PagePlan`` or ``CopyPlan`` fails.
    """
    places = {page.layer: page for page in geometry.pages}
    missing = places.keys() - {page.layer for page in pages}
    if missing:
        raise ValueError(f"no accelerator pages for layer {min(missing)!r}")
    plans = []
    for page in pages:
        place = places.get(page.layer)
        if place is None:
            raise ValueError(f"layer {page.layer!r} is not in the group")
        mapping = page.mapping
        if mapping.canonical_bytes != place.size_bytes:
            raise ValueError(
                f"layer {page.layer!r}: canonical page of {mapping.canonical_bytes} bytes, "
                f"{place.size_bytes} in the group's geometry"
            )
        plans.append(
            PagePlan(
                page.base,
                page.block_stride,
                page.num_blocks,
                mapping.local_bytes,
                place.offset_bytes,
                mapping.canonical_bytes,
                mapping.runs,
                mapping.num_writers,
                mapping.writer_index,
                owner=page.owner,
            )
        )
    return CopyPlan(plans, geometry.block_bytes, region=region, owner=owner)


def verify_tiling(ranks: Sequence[Sequence[PageMapping]]) -> None:
    """Prove that the ranks together write each byte of a layer's canonical page exactly once.

    Whichever block it is: writer rotation is followed for every turn.

    Parameters
    ----------
    ranks : sequence of sequence of PageMapping
        For each rank the mappings of the layer's page: one, or two where K and V are apart.

    Raises
    ------
    ValueError
        With the bytes that two ranks write, or that none does.
    """
    mappings = [mapping for rank in ranks for mapping in rank]
    if not mappings:
        raise ValueError("no ranks")
    size = mappings[0].canonical_bytes
    if any(mapping.canonical_bytes != size for mapping in mappings):
        sizes = sorted({mapping.canonical_bytes for mapping in mappings})
        raise ValueError(f"ranks differ in the size of the canonical page: {sizes}")
    for turn in range(math.lcm(*(mapping.num_writers for mapping in mappings))):
        runs = [
            run
            for mapping in mappings
            if turn % mapping.num_writers == mapping.writer_index
            for run in mapping.runs
        ]
        where = f"canonical page, blocks {turn} and so on"
        if not runs:
            raise ValueError(f"no rank writes the {where}")
        bounds = canonical_fragments(runs)
        refuse_overlap(bounds, where)
        refuse_gap(bounds, size, where)


def expand_slots(
    slots: Int64Array,
    geometry: GroupGeometry,
    region_base: int,
    slot_bytes: int,
    width: int = 1,
) -> tuple[Uint64Array, Int64Array]:
    """Addresses and page ids of all canonical blocks of the chunks in `slots`, in order.

    A chunk takes `width` slots. Its pages are numbered by its place among chunks, not by its slot:
    ranks that take turns would not, if all numbers were multiples of the width.

    A part of it (``[first : first + n]``) serves a job that begins or ends inside a chunk; the rest
    goes to ``CopyPlan.zero``.
    """
    per_chunk = geometry.blocks_per_chunk
    page_ids = (slots[:, None] // width * per_chunk + np.arange(per_chunk, dtype=np.int64)).ravel()
    inside = np.tile(np.arange(per_chunk, dtype=np.int64) * geometry.block_bytes, len(slots))
    addresses = region_base + np.repeat(slots * slot_bytes, per_chunk) + inside
    return addresses.astype(np.uint64), page_ids


class _Batch:
    """One store or load on its way; the last part to end resolves the future."""

    __slots__ = ("error", "future", "left", "lock", "moved")

    def __init__(self, parts: int) -> None:
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # a copy cannot be cancelled
        self.lock = threading.Lock()
        self.left = parts
        self.moved = 0
        self.error: BaseException | None = None

    def part(self, copy: Callable[[int, int], int], start: int, stop: int) -> Callable[[], None]:
        """Work for one thread: blocks [start, stop) of the batch."""

        def work() -> None:
            try:
                moved = copy(start, stop)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                self._end_part(0, error)
            else:
                self._end_part(moved)

        return work

    def _end_part(self, moved: int, error: BaseException | None = None) -> None:
        with self.lock:
            self.moved += moved
            if self.error is None:
                self.error = error
            self.left -= 1
            last = self.left == 0
        if not last:
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.moved)


class CopyPool:
    """A few threads that carry out copy batches, each batch split among them.

    Threads do not inherit the caller's binding to one core: they take every core that the process
    may use. ``close`` ends them, and waits for what is on its way; so does the end of the process
    where nobody has closed (a model server that gives up while it starts lets go of its workers
    without a word). They are daemons, because the interpreter waits for others before that.

    Parameters
    ----------
    threads : int
    inline_bytes : int
        Batches below it run in the caller before the call returns.
    max_parts : int
        Bound of the queue; at the bound the caller copies by itself (back-pressure).
    """

    def __init__(
        self,
        threads: int = 2,
        inline_bytes: int = INLINE_BYTES,
        max_parts: int = 1024,
        name: str = "kvtier-copy",
    ) -> None:
        if threads < 1 or max_parts < threads:
            raise ValueError(f"{threads} threads, {max_parts} parts")
        self._size = threads
        self._inline_bytes = inline_bytes
        self._name = name
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(max_parts)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open = False

    def open(self) -> None:
        """Start the threads."""
        with self._lock:
            if self._threads:
                raise ClosedError("a copy pool is opened once")
            self._threads = [
                threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
                for i in range(self._size)
            ]
            for thread in self._threads:
                thread.start()
            self._open = True
            self._at_exit = weakref.finalize(self, _end, self._queue, self._threads)

    def close(self) -> None:
        """Carry out what was submitted, then end the threads. Idempotent."""
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._at_exit()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> CopyPool:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def store(
        self, plan: CopyPlan, block_ids: Int64Array, canonical: Uint64Array, page_ids: Int64Array
    ) -> Future[int]:
        """``CopyPlan.store`` of a batch; the future gives the bytes moved by this rank.

        Raises
        ------
        IndexError, ValueError
            As ``CopyPlan.check``: before a byte has moved.
        ClosedError
        """
        plan.check(block_ids, canonical, page_ids)
        return self._submit(
            plan,
            len(block_ids),
            lambda start, stop: plan.store(block_ids, canonical, page_ids, start, stop),
        )

    def load(self, plan: CopyPlan, block_ids: Int64Array, canonical: Uint64Array) -> Future[int]:
        """``CopyPlan.load`` of a batch; raises as ``store``."""
        plan.check(block_ids, canonical)
        return self._submit(
            plan,
            len(block_ids),
            lambda start, stop: plan.load(block_ids, canonical, start, stop),
        )

    def _submit(self, plan: CopyPlan, blocks: int, copy: Callable[[int, int], int]) -> Future[int]:
        total = blocks * plan.local_bytes
        parts = 1 if total < self._inline_bytes else max(1, min(self._size, blocks))
        batch = _Batch(parts)
        mine: list[Callable[[], None]] = []
        with self._lock:
            if not self._open:
                raise ClosedError("the copy pool is closed")
            for i in range(parts):
                work = batch.part(copy, blocks * i // parts, blocks * (i + 1) // parts)
                if total < self._inline_bytes:
                    mine.append(work)
                    continue
                try:
                    self._queue.put_nowait(work)
                except queue.Full:
                    mine.append(work)
        for work in mine:
            work()
        return batch.future

    def _work(self) -> None:
        release_affinity()
        while (work := self._queue.get()) is not None:
            work()


def _end(work: queue.Queue[Callable[[], None] | None], threads: Sequence[threading.Thread]) -> None:
    """Have threads end behind what they still have to do, and wait for it."""
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join()


def release_affinity() -> None:
    """Let this thread run on every core that its control group allows.

    A model server binds a worker's main thread to one core, and threads inherit that.
    """
    try:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    except OSError as error:  # a sandbox may forbid it: slower, not wrong
        logger.warning("copy threads stay on the cores they were started on: %s", error)
