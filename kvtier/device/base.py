# SPDX-License-Identifier: Apache-2.0
"""What the copy engines ask of an accelerator, and what the worker asks of a copy engine.

Interfaces only. ``kvtier.device.cuda`` implements ``Device`` with torch; the tests have one whose
copies run as late as they may and that reports every access that nothing ordered.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]
Buffer = Any
"""Flat bytes on either side; ``buffer[a:b]`` is a part of it."""
View = Any
"""Strided elements of a buffer; ``view[a:b]`` takes rows."""


class Stream(Protocol):
    """Work that the accelerator carries out in order."""

    def wait_event(self, event: Any) -> None:
        """What is queued from here on runs after `event`; the caller does not wait."""

    def synchronize(self) -> None:
        """Wait until all that is queued has ended."""


class Event(Protocol):
    """A point in a stream. Before ``record`` it counts as passed."""

    def record(self, stream: Any) -> None:
        """Stand behind what `stream` has queued so far."""

    def synchronize(self) -> None:
        """Wait until the accelerator has passed it. Raises what its work met."""


class Device(Protocol):
    """An accelerator. Copies, gathers and scatters go to the stream of ``on`` and return at once.

    Host memory that takes part in a copy must be pinned (``pinned``, or registered): a copy of
    pageable memory would wait for the stream.
    """

    def current_stream(self) -> Stream:
        """The stream that the calling thread computes on."""

    def new_stream(self) -> Stream:
        """A stream that waits for no other one by itself."""

    def new_event(self) -> Event:
        """An event whose waiter sleeps."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """The calling thread queues on `stream`."""

    def empty(self, size: int) -> Buffer:
        """Accelerator memory that belongs to the current stream: no other one may still use it."""

    def pinned(self, size: int) -> Buffer:
        """Pinned host memory."""

    def host(self, memory: memoryview) -> Buffer:
        """Host memory that is there already, as a buffer."""

    def array(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        """Host memory as an array."""

    def address(self, buffer: Buffer) -> int:
        """Address of the first byte."""

    def strided(
        self,
        buffer: Buffer,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        width: int,
    ) -> View:
        """Elements of `width` bytes; `offset` in bytes from the start of `buffer`, `strides` in
        bytes, the last dimension in elements that follow each other."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Queue a copy of contiguous bytes of equal number."""

    def gather(self, source: View, ids: Buffer, rows: View) -> None:
        """Queue ``rows[i] = source[ids[i]]``; `ids` are the bytes of int64."""

    def scatter(self, target: View, ids: Buffer, rows: View) -> None:
        """Queue ``target[ids[i]] = rows[i]``."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory. RuntimeError if that is refused; nothing is left pinned then."""

    def unregister(self, address: int) -> None:
        """Undo it. RuntimeError if that is refused."""


class CopyEngine(Protocol):
    """Copies batches between accelerator blocks and canonical blocks, beside the caller.

    The future of a batch ends when its copies have ended, also when it fails. Its result is the
    bytes that this rank moved.
    """

    def open(self) -> None:
        """Start threads, take buffers."""

    def close(self) -> None:
        """Carry out what was submitted, then let go of everything. Idempotent."""

    def store(
        self, group: int, block_ids: Int64Array, addresses: Uint64Array, page_ids: Int64Array
    ) -> Future[int]:
        """Copy blocks into canonical blocks.

        Raises
        ------
        IndexError, ValueError
            As ``CopyPlan.check``: before a byte has moved.
        ClosedError
        """

    def load(self, group: int, block_ids: Int64Array, addresses: Uint64Array) -> Future[int]:
        """Copy canonical blocks into blocks. Raises as ``store``."""
