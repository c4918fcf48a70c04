# SPDX-License-Identifier: Apache-2.0
"""An accelerator whose work is done as late as it may be, and that knows what ordered what.

Nothing that was queued runs before somebody waits for an event behind it, and then only what that
event needs; streams that nobody waits for stay behind, so that copies end out of order. The bytes
are moved by the same torch calls as on a GPU, over host memory.

Every piece of work carries a vector clock: what its stream has queued before, what the events it
waited for stood behind, and what the host had waited for when it queued it. Two accesses to one
byte, one of them a write, must be ordered by their clocks. Host memory that the host itself uses
shows by its bytes: it must not change while a queued copy is to read it; and where a queued copy is
to write, it holds ``POISON`` until then, which a reader that comes too early takes away with it.

What is found goes to ``violations``, and fails the test even if its bytes are right by chance.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from kvtier.device.cuda import TorchMemory

POISON = 0xA5

Range = tuple[int, int]


class Violation(RuntimeError):
    """Accesses that nothing ordered. Also kept in ``violations``: the engine may swallow it."""


class Work:
    """One copy, gather or launch of the model, in the queue of a stream."""

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        reads: Callable[[], list[Range]],
        writes: Callable[[], list[Range]],
    ) -> None:
        self.name = name
        self.run = run
        self.reads = reads
        self.writes = writes
        self.stream: FakeStream
        self.number = 0
        self.clock: dict[int, int] = {}
        self.host: list[tuple[Range, bytes]] = []
        self.touched: list[Range] = []
        self.written: list[Range] = []

    def follows(self, other: Work) -> bool:
        return self.clock.get(other.stream.number, 0) >= other.number


class FakeStream:
    """A queue."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self.device = device
        self.number = number
        self.queued = 0
        self.clock: dict[int, int] = {}
        self.work: deque[Work | Mark] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        with self.device.lock:
            if event.mark is not None:
                merge(self.clock, event.mark.clock)
                self.work.append(event.mark)

    def synchronize(self) -> None:
        self.device.wait_for(Mark(self))


class Mark:
    """What a stream had queued at one moment."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.number = stream.queued
        self.clock = {**stream.clock, stream.number: stream.queued}


class FakeEvent:
    """Before ``record`` it counts as passed, as CUDA's do."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.mark: Mark | None = None

    def record(self, stream: FakeStream) -> None:
        with self.device.lock:
            self.mark = Mark(stream)

    def synchronize(self) -> None:
        if self.mark is not None:
            self.device.wait_for(self.mark)


def merge(into: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


def overlap(one: Sequence[Range], other: Sequence[Range]) -> bool:
    return any(a < d and c < b for a, b in one for c, d in other)


def extent(tensor: torch.Tensor) -> Range:
    """From the first to the last byte of a tensor with positive strides."""
    start = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


class FakeDevice(TorchMemory):
    """See the module.

    Attributes
    ----------
    delay_seconds : float
        Slept by every wait for work that has not been done yet: copies that take their time.
    gate : threading.Event
        While it is clear, such waits do not end.
    gates : dict of int to threading.Event
        The same for single streams, by number.
    fail_copies : set of int
        Copies, counted from 0 over all streams, that are refused when they are queued.
    register_limit : int
        Registrations from this number on are refused.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.compute = self.new_stream()
        self.host_clock: dict[int, int] = {}
        self.done: list[Work] = []
        self.violations: list[str] = []
        self.memory: list[Range] = []
        self.pinned_memory: list[tuple[Range, torch.Tensor]] = []
        self.registered: list[Range] = []
        self.unregistered: list[Range] = []
        self.launches: list[str] = []
        self.copies = 0
        self.fail_copies: set[int] = set()
        self.register_limit = 1 << 30
        self.fail_unregister = False
        self.delay_seconds = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.gates: dict[int, threading.Event] = {}
        self.waiting = threading.Event()
        self._current = threading.local()

    def current_stream(self) -> FakeStream:
        return getattr(self._current, "stream", self.compute)

    def new_stream(self) -> FakeStream:
        with self.lock:
            self.streams.append(FakeStream(self, len(self.streams)))
            return self.streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def empty(self, size: int) -> torch.Tensor:
        """Memory that the current stream has just stopped using, and no other stream may touch
        before it."""
        buffer = torch.full((size,), POISON, dtype=torch.uint8)
        self.own(buffer)
        self.queue("allocation", lambda: None, writes=lambda: [extent(buffer)])
        with self.lock:
            self._run_until(Mark(self.current_stream()))
        return buffer

    def own(self, tensor: torch.Tensor) -> None:
        """`tensor` stands for memory of the accelerator."""
        self.memory.append(extent(tensor))

    def pinned(self, size: int) -> torch.Tensor:
        buffer = torch.full((size,), POISON, dtype=torch.uint8)
        self.pinned_memory.append((extent(buffer), buffer))
        return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.numel() == source.numel() > 0
        assert target.is_contiguous()
        assert source.is_contiguous()
        self.copies += 1
        if self.copies - 1 in self.fail_copies:
            raise RuntimeError(f"copy {self.copies - 1} was refused")
        parent = super()
        work = Work(
            "copy",
            lambda: parent.copy(target, source),
            lambda: [extent(source)],
            lambda: [extent(target)],
        )
        for tensor, is_target in ((target, True), (source, False)):
            if not self._is_accelerator(extent(tensor)):
                self._check_pinned(extent(tensor))
                if is_target:
                    with torch.inference_mode():
                        tensor.fill_(POISON)
                work.host.append((extent(tensor), _bytes(extent(tensor))))
        self._append(work)

    def gather(self, source: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        parent = super()
        self._append(
            Work(
                "gather",
                lambda: parent.gather(source, ids, rows),
                lambda: [extent(ids), *_rows(source, ids)],
                lambda: [extent(row) for row in rows],
            )
        )

    def scatter(self, target: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        parent = super()
        self._append(
            Work(
                "scatter",
                lambda: parent.scatter(target, ids, rows),
                lambda: [extent(ids), *(extent(row) for row in rows)],
                lambda: _rows(target, ids),
            )
        )

    def register(self, address: int, size: int) -> None:
        if len(self.registered) >= self.register_limit:
            raise RuntimeError("cudaHostRegister: cudaErrorMemoryAllocation")
        self.registered.append((address, address + size))

    def unregister(self, address: int) -> None:
        (found,) = (one for one in self.registered if one[0] == address)
        for stream in self.streams:
            for work in stream.work:
                if isinstance(work, Work) and overlap([found], [range_ for range_, _ in work.host]):
                    self._violation("memory is unpinned under a queued copy")
        if self.fail_unregister:
            raise RuntimeError("cudaHostUnregister: cudaErrorUnknown")
        self.registered.remove(found)
        self.unregistered.append(found)

    def queue(
        self,
        name: str,
        run: Callable[[], None],
        reads: Callable[[], list[Range]] = list,
        writes: Callable[[], list[Range]] = list,
    ) -> None:
        """Work of the model on the current stream."""
        self._append(Work(name, run, reads, writes))

    def check(self) -> None:
        """Nothing was found, and nothing is left on the side streams."""
        assert self.violations == []
        for stream in self.streams[1:]:
            assert [work.name for work in stream.work if isinstance(work, Work)] == []

    def wait_for(self, mark: Mark) -> None:
        """What every wait of the host ends in."""
        if mark.stream is not self.compute and self._is_left(mark):
            self.waiting.set()
            if self.delay_seconds:
                time.sleep(self.delay_seconds)
            assert self.gates.get(mark.stream.number, self.gate).wait(30)
        with self.lock:
            self._run_until(mark)
            merge(self.host_clock, mark.clock)

    def _is_left(self, mark: Mark) -> bool:
        with self.lock:
            return any(
                isinstance(work, Work) and work.number <= mark.number for work in mark.stream.work
            )

    def _append(self, work: Work) -> None:
        with self.lock:
            stream = self.current_stream()
            stream.queued += 1
            work.stream, work.number = stream, stream.queued
            merge(stream.clock, self.host_clock)
            stream.clock[stream.number] = stream.queued
            work.clock = dict(stream.clock)
            stream.work.append(work)
            self.launches.append(work.name)

    def _run_until(self, mark: Mark) -> None:
        queue = mark.stream.work
        while queue:
            first = queue[0]
            if isinstance(first, Mark):
                queue.popleft()
                self._run_until(first)
                continue
            if first.number > mark.number:
                return
            queue.popleft()
            self._run(first)

    def _run(self, work: Work) -> None:
        for range_, before in work.host:
            if _bytes(range_) != before:
                self._violation(f"the host used memory under a queued {work.name}")
        reads, writes = work.reads(), work.writes()
        for other in self.done:
            if work.follows(other):
                continue
            if overlap(writes, other.touched) or overlap(reads, other.written):
                self._violation(f"nothing orders {work.name} after {other.name}")
        work.run()
        work.touched, work.written = [*reads, *writes], writes
        self.done.append(work)

    def _is_accelerator(self, range_: Range) -> bool:
        return any(start <= range_[0] and range_[1] <= stop for start, stop in self.memory)

    def _check_pinned(self, range_: Range) -> None:
        pieces = [*self.registered, *(owned for owned, _ in self.pinned_memory)]
        if not any(start <= range_[0] and range_[1] <= stop for start, stop in pieces):
            self._violation("a copy touches host memory that is not pinned in one piece")

    def _violation(self, text: str) -> None:
        self.violations.append(text)
        raise Violation(text)


def _rows(blocks: torch.Tensor, ids: torch.Tensor) -> list[Range]:
    return [extent(blocks[int(index)]) for index in ids.view(torch.int64)]


def _bytes(range_: Range) -> bytes:
    return ctypes.string_at(range_[0], range_[1] - range_[0])
