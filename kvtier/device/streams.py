# SPDX-License-Identifier: Apache-2.0
"""The copy engine of accelerators with a memory of their own: staged copies on side streams.

Owns, for each direction, a thread, a stream and staging in two halves; and the registrations of the
region. One thread calls ``store`` and ``load``, which record one event and queue: nothing of a copy
is launched there. Works with any ``Device``.

What was chosen, and why. A page a copy would take (layers x blocks) launches, a fragment a copy far
more, and torch turns a copy between host and accelerator that is not contiguous into one that
blocks. So a batch is gathered into staging, one launch a layer (two where K and V are halves) for
any number of blocks, and leaves it in one copy for each run of neighbouring slots. Where this rank
writes only parts of canonical blocks, a chunk would take a copy a layer, so that staging leaves in
one copy into a pinned buffer, and the copy pool puts the parts into the slots. Slots that could not
be pinned go through that buffer too. Loads take the same way back.

Invariants
----------
* A direction's stream runs a batch after all that the computing stream had queued when the batch
  was submitted: a store reads what the model has written, and a load overwrites nothing that
  queued work still reads.
* Within a direction the stream's order protects staging. The host touches its half of a buffer only
  when the event of the half's last piece has passed.
* A future ends when all that was launched for its batch has ended, also when it fails.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from kvtier._core.layout import CopyPlan
from kvtier.device.base import Buffer, Device, Event, Int64Array, Stream, Uint64Array, View
from kvtier.device.pinning import PIECE_BYTES, PinnedSlots
from kvtier.device.staging import Move, Rows, host_plan, plan_rows
from kvtier.errors import ClosedError, ConfigError
from kvtier.host.region import Region
from kvtier.layout.plan import CopyPool, LayerPage, release_affinity

logger = logging.getLogger(__name__)

HALVES = 2
"""One half is filled while the other one is emptied."""

STAGING_BYTES = 32 << 20
"""Of one half of one direction: large enough that the launches of a piece hide behind its copy."""


class _Batch(NamedTuple):
    """One group's part of a job, on its way."""

    group: int
    block_ids: Int64Array
    addresses: Uint64Array
    page_ids: Int64Array
    submitted: Event
    future: Future[int]


class _Group:
    """What one direction needs of one group: views of pages and rows, and the host's plan."""

    def __init__(
        self,
        device: Device,
        rows: Rows,
        half_rows: int,
        pages: Sequence[LayerPage],
        staging: Buffer,
        plan: CopyPlan,
    ) -> None:
        self.rows = rows
        self.half_rows = half_rows
        self.host_plan = plan
        self.pages: list[View] = []
        self.staged: list[View] = []
        for move in rows.moves:
            page = pages[move.page]
            self.pages.append(
                _view(
                    device,
                    page.owner,
                    move.local_offset,
                    (page.num_blocks, page.block_stride),
                    move,
                    move.local_strides,
                )
            )
            self.staged.append(
                _view(
                    device,
                    staging,
                    move.row_offset,
                    (HALVES * half_rows, rows.row_bytes),
                    move,
                    move.row_strides,
                )
            )


def _view(
    device: Device,
    buffer: Buffer,
    offset: int,
    outer: tuple[int, int],
    move: Move,
    strides: tuple[int, ...],
) -> View:
    return device.strided(
        buffer,
        offset,
        (outer[0], *move.counts, move.fragment_bytes // move.width),
        (outer[1], *strides, move.width),
        move.width,
    )


class _Piece(NamedTuple):
    """As many blocks of a batch as fit into one half."""

    group: _Group
    block_ids: Int64Array
    addresses: Uint64Array
    page_ids: Int64Array
    first_row: int
    direct: bool

    @property
    def row_ids(self) -> Int64Array:
        """Rows of the piece, in the host's buffer and in staging."""
        return np.arange(self.first_row, self.first_row + len(self.block_ids), dtype=np.int64)

    @property
    def row_range(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.block_ids))

    @property
    def byte_range(self) -> slice:
        size = self.group.rows.row_bytes
        return slice(self.row_range.start * size, self.row_range.stop * size)


class _Direction:
    """Thread, stream and staging of all stores, or of all loads."""

    def __init__(
        self, name: str, device: Device, region: Region, slots: PinnedSlots, pool: CopyPool
    ) -> None:
        self._device = device
        self._region = region
        self._slots = slots
        self._pool = pool
        # Bounded by the accelerator's blocks: each batch holds some that no other one has.
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._groups: list[_Group] = []
        self._staging: Buffer = None
        self._bounce: Buffer = None
        # Block ids of a piece: written by the host, read by gathers and scatters.
        self._ids: Buffer = None
        self._host_ids: Buffer = None
        self._ids_array: Any = None
        self._region_buffer: Buffer = None

    def open(
        self,
        groups: Sequence[tuple[Rows, Sequence[LayerPage]]],
        half_bytes: int,
        region_buffer: Buffer,
    ) -> None:
        """Take the buffers and start the thread."""
        device = self._device
        self._stream: Stream = device.new_stream()
        self._region_buffer = region_buffer
        self._base = self._region.base_address
        most_rows = max(half_bytes // rows.row_bytes for rows, _ in groups)
        # On this stream, so that the allocator gives nothing that another one still works on.
        with device.on(self._stream):
            self._staging = device.empty(HALVES * half_bytes)
            self._ids = device.empty(HALVES * most_rows * 8)
        self._bounce = device.pinned(HALVES * half_bytes)
        self._host_ids = device.pinned(HALVES * most_rows * 8)
        self._ids_array = device.array(self._host_ids).view(np.int64)
        geometry = self._region.geometry
        for number, ((rows, pages), group) in enumerate(zip(groups, geometry.groups, strict=True)):
            half_rows = half_bytes // rows.row_bytes
            area = self._region.area(number)
            plan = host_plan(
                rows, group, pages, device.address(self._bounce), HALVES * half_rows, area
            )
            self._groups.append(_Group(device, rows, half_rows, pages, self._staging, plan))
        self._thread.start()

    def submit(self, batch: _Batch) -> None:
        """Queue a batch."""
        self._queue.put(batch)

    def close(self) -> None:
        """End what was submitted, then the thread, then the buffers. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._groups = []
        self._staging = self._ids = self._bounce = self._host_ids = self._ids_array = None
        self._region_buffer = None

    def _run(self) -> None:
        """The direction's thread, with all below."""
        release_affinity()
        with self._device.on(self._stream):
            while (batch := self._queue.get()) is not None:
                future = batch.future
                try:
                    moved = self._move(batch)
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                    self._settle()
                    # Without its frames, which hold the buffers.
                    future.set_exception(error.with_traceback(None))
                else:
                    future.set_result(moved)
                del batch, future

    def _move(self, batch: _Batch) -> int:
        self._stream.wait_event(batch.submitted)
        flying: deque[tuple[_Piece, Event]] = deque()
        moved = 0
        for number, piece in enumerate(self._pieces(batch)):
            if len(flying) == HALVES:
                moved += self._land(*flying.popleft())
            flying.append((piece, self._launch(piece, number % HALVES)))
        while flying:
            moved += self._land(*flying.popleft())
        return moved

    def _pieces(self, batch: _Batch) -> Iterator[_Piece]:
        group = self._groups[batch.group]
        for number, start in enumerate(range(0, len(batch.block_ids), group.half_rows)):
            part = slice(start, start + group.half_rows)
            addresses = batch.addresses[part]
            yield _Piece(
                group,
                batch.block_ids[part],
                addresses,
                batch.page_ids[part],
                number % HALVES * group.half_rows,
                group.rows.whole and self._slots.covers(addresses),
            )

    def _launch(self, piece: _Piece, half: int) -> Event:
        """Queue the copies of a piece; the event behind them."""
        device = self._device
        count = len(piece.block_ids)
        start = half * (len(self._ids_array) // HALVES)
        self._ids_array[start : start + count] = piece.block_ids
        places = slice(8 * start, 8 * (start + count))
        ids = self._ids[places]
        device.copy(ids, self._host_ids[places])
        self._queue_copies(piece, ids)
        landed = device.new_event()
        landed.record(self._stream)
        return landed

    def _queue_copies(self, piece: _Piece, ids: Buffer) -> None:
        raise NotImplementedError

    def _land(self, piece: _Piece, landed: Event) -> int:
        """Wait until the copies of a piece have ended: bytes moved."""
        raise NotImplementedError

    def _direct_parts(self, piece: _Piece) -> Iterator[tuple[Buffer, Buffer]]:
        """Slots and staging of a piece, part by part."""
        size = piece.group.rows.row_bytes
        for first, count in self._slots.spans(piece.addresses, size):
            place = int(piece.addresses[first]) - self._base
            row = (piece.first_row + first) * size
            yield (
                self._region_buffer[place : place + count * size],
                self._staging[row : row + count * size],
            )

    def _settle(self) -> None:
        """After a failure: what was launched still runs, and nobody has its events any more."""
        try:
            self._stream.synchronize()
        except RuntimeError as exc:  # the context has died, and its copies with it
            logger.error("%s cannot be waited for: %s", self._thread.name, str(exc))


class _Stores(_Direction):
    def _queue_copies(self, piece: _Piece, ids: Buffer) -> None:
        device = self._device
        group = piece.group
        for source, staged in zip(group.pages, group.staged, strict=True):
            device.gather(source, ids, staged[piece.row_range])
        if piece.direct:
            for slots, staging in self._direct_parts(piece):
                device.copy(slots, staging)
        else:
            device.copy(self._bounce[piece.byte_range], self._staging[piece.byte_range])

    def _land(self, piece: _Piece, landed: Event) -> int:
        landed.synchronize()
        if piece.direct:
            return len(piece.block_ids) * piece.group.rows.row_bytes
        plan = piece.group.host_plan
        return self._pool.store(plan, piece.row_ids, piece.addresses, piece.page_ids).result()


class _Loads(_Direction):
    def _queue_copies(self, piece: _Piece, ids: Buffer) -> None:
        device = self._device
        group = piece.group
        if piece.direct:
            for slots, staging in self._direct_parts(piece):
                device.copy(staging, slots)
        else:
            self._pool.load(group.host_plan, piece.row_ids, piece.addresses).result()
            device.copy(self._staging[piece.byte_range], self._bounce[piece.byte_range])
        for target, staged in zip(group.pages, group.staged, strict=True):
            device.scatter(target, ids, staged[piece.row_range])

    def _land(self, piece: _Piece, landed: Event) -> int:
        landed.synchronize()
        return len(piece.block_ids) * piece.group.host_plan.local_bytes


class StreamEngine:
    """Copies of one rank, on two side streams.

    Parameters
    ----------
    device : Device
    region : Region
        Stays open as long as this.
    pages : sequence of sequence of LayerPage
        By group; ``owner`` is the layer's tensor, which begins at ``base``.
    plans : sequence of CopyPlan
        Of each group, over the accelerator's addresses: they check batches, and copy nothing.
    staging_bytes, piece_bytes : int
    num_threads : int
        Of the pool that translates on the host.
    """

    def __init__(
        self,
        device: Device,
        region: Region,
        pages: Sequence[Sequence[LayerPage]],
        plans: Sequence[CopyPlan],
        *,
        staging_bytes: int = STAGING_BYTES,
        piece_bytes: int = PIECE_BYTES,
        num_threads: int = 2,
    ) -> None:
        self.plans = tuple(plans)
        self._device = device
        self._region = region
        self._pages = pages
        self._groups = [
            (plan_rows(group, parts), parts)
            for group, parts in zip(region.geometry.groups, pages, strict=True)
        ]
        self._half_bytes = max(staging_bytes, *(rows.row_bytes for rows, _ in self._groups))
        self._pool = CopyPool(num_threads)
        self._slots = PinnedSlots(device, region, piece_bytes)
        self._stores = _Stores("kvtier-store", device, region, self._slots, self._pool)
        self._loads = _Loads("kvtier-load", device, region, self._slots, self._pool)
        self._open = False

    def open(self) -> None:
        """Pin the region, take staging on the accelerator, start the threads.

        Raises
        ------
        ConfigError
            If there is no room for staging.
        """
        self._open = True
        try:
            self._slots.open()
            self._pool.open()
            buffer = self._device.host(self._region.payload)
            for direction in (self._stores, self._loads):
                direction.open(self._groups, self._half_bytes, buffer)
        except RuntimeError as exc:
            self.close()
            raise ConfigError(
                f"kvtier needs {2 * HALVES * self._half_bytes} bytes of accelerator memory, and "
                f"as many of pinned host memory, beside the KV cache: {exc}"
            ) from exc
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Carry out what was submitted, then let go of everything. Idempotent."""
        self._open = False
        self._stores.close()
        self._loads.close()
        self._pool.close()
        # Behind the last copy: the driver unmaps it from the accelerator.
        self._slots.close()

    def store(
        self, group: int, block_ids: Int64Array, addresses: Uint64Array, page_ids: Int64Array
    ) -> Future[int]:
        """As ``CopyEngine.store``."""
        self.plans[group].check(block_ids, addresses, page_ids)
        rows = self._groups[group][0]
        mine = page_ids % rows.num_writers == rows.writer_index
        return self._submit(self._stores, group, block_ids[mine], addresses[mine], page_ids[mine])

    def load(self, group: int, block_ids: Int64Array, addresses: Uint64Array) -> Future[int]:
        """As ``CopyEngine.load``."""
        self.plans[group].check(block_ids, addresses)
        nothing = np.zeros(len(block_ids), dtype=np.int64)
        return self._submit(self._loads, group, block_ids.copy(), addresses.copy(), nothing)

    def _submit(
        self,
        direction: _Direction,
        group: int,
        block_ids: Int64Array,
        addresses: Uint64Array,
        page_ids: Int64Array,
    ) -> Future[int]:
        if not self._open:
            raise ClosedError("the copy engine is closed")
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # a copy cannot be cancelled
        # Now, not when the thread comes to it: what is queued later is none of the batch's affair.
        submitted = self._device.new_event()
        submitted.record(self._device.current_stream())
        direction.submit(_Batch(group, block_ids, addresses, page_ids, submitted, future))
        return future
