# SPDX-License-Identifier: Apache-2.0
"""Jobs of one rank: from chunks to copies, and from the end of the copies to the rank's line.

Owns the job records and this rank's line in the region. One thread calls; the copies end on threads
of the engine, where their numbers are published.

Invariants
----------
* A transfer number is published once every copy of it has ended, and never before.
* A chunk that cannot be stored whole is zeroed and its number marked as failed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from kvtier._core.layout import CopyPlan
from kvtier.device.base import CopyEngine
from kvtier.device.chunks import Chunk
from kvtier.host.region import Region
from kvtier.layout.plan import expand_slots

Work = Sequence[tuple[int, list[Chunk]]]
"""Chunks by group."""


class Job:
    """One job while its copies run, and its result."""

    __slots__ = (
        "broken",
        "bytes",
        "error",
        "failed",
        "first_transfer",
        "is_load",
        "job_id",
        "num_transfers",
        "parts",
        "started",
    )

    def __init__(self, job_id: int, is_load: bool, first_transfer: int, num_transfers: int) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.first_transfer = first_transfer
        self.num_transfers = num_transfers
        self.parts = 0
        self.bytes = 0
        # Numbers of chunks that the job has not all blocks for.
        self.failed: set[int] = set()
        self.error: BaseException | None = None
        # What kept the end of the job from being published: always a bug.
        self.broken: BaseException | None = None
        self.started = time.monotonic()


class Jobs:
    """Jobs in flight.

    Parameters
    ----------
    region : Region
        Stays open as long as this.
    rank : int
        Whose line is written.
    plans : sequence of CopyPlan
        Of each group, to zero parts of slots.
    engine : CopyEngine
        Closed by ``close``.
    """

    def __init__(
        self, region: Region, rank: int, plans: Sequence[CopyPlan], engine: CopyEngine
    ) -> None:
        self.engine = engine
        self._region = region
        self._rank = rank
        self._plans = tuple(plans)
        self._widths = region.geometry.widths
        # Guards everything below; waited on by `wait`.
        self._changed = threading.Condition()
        self._running: dict[int, Job] = {}
        self._finished: deque[Job] = deque()

    def __len__(self) -> int:
        """Jobs whose copies run, and those that have not been taken."""
        with self._changed:
            return len(self._running) + len(self._finished)

    def open(self) -> None:
        """Start the engine."""
        self.engine.open()

    def close(self) -> None:
        """End the copies that run, and publish them. Idempotent."""
        self.engine.close()

    def store(self, job_id: int, first_transfer: int, num_transfers: int, work: Work) -> int:
        """Start copying blocks into slots: chunks that fail. Numbers go by chunk."""
        job = Job(job_id, False, first_transfer, num_transfers)
        number = first_transfer
        whole = []
        for group, chunks in work:
            for chunk in chunks:
                if not chunk.whole:
                    # No old bytes in a slot that this job cannot fill; each rank does its part.
                    self._plans[group].zero(*self._places(group, [chunk]))
                    job.failed.add(number)
                number += 1
            whole.append((group, [chunk for chunk in chunks if chunk.whole]))
        self._start(job, whole)
        return len(job.failed)

    def load(self, job_id: int, first_transfer: int, num_transfers: int, work: Work) -> None:
        """Start copying slots into blocks."""
        self._start(Job(job_id, True, first_transfer, num_transfers), work)

    def take_finished(self) -> list[Job]:
        """Jobs that have ended since the last call, whether well or not; never waits."""
        with self._changed:
            jobs = list(self._finished)
            self._finished.clear()
        return jobs

    def wait(self, job_ids: set[int]) -> None:
        """Block until the copies of `job_ids` have ended: their blocks are about to be reused."""
        with self._changed:
            # Bounded by the copies themselves: memory to memory, nothing that can hang.
            self._changed.wait_for(lambda: self._running.keys().isdisjoint(job_ids))

    def _places(
        self, group: int, chunks: Sequence[Chunk]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Addresses and page numbers of all canonical blocks of `chunks`."""
        geometry = self._region.geometry
        return expand_slots(
            np.array([chunk.slot for chunk in chunks], dtype=np.int64),
            geometry.groups[group],
            self._region.base_address,
            geometry.slot_bytes,
            self._widths[group],
        )

    def _start(self, job: Job, work: Work) -> None:
        with self._changed:
            self._running[job.job_id] = job
        futures = []
        for group, chunks in work:
            if not chunks:
                continue
            try:
                futures.append(self._copy(group, chunks, job.is_load))
            except (IndexError, ValueError, RuntimeError) as exc:  # before a byte has moved
                # Without its frames, which hold the region through this job.
                job.error = exc.with_traceback(None)
        job.parts = len(futures)
        if not futures:
            self._part_ended(job, None)
        for future in futures:
            # Runs here if the copy has ended already, else on the engine's thread.
            future.add_done_callback(lambda ended: self._part_ended(job, ended))

    def _copy(self, group: int, chunks: list[Chunk], is_load: bool) -> Future[int]:
        """Start the copies of one group."""
        per_chunk = self._region.geometry.groups[group].blocks_per_chunk
        addresses, page_ids = self._places(group, chunks)
        given = np.zeros(len(page_ids), dtype=bool)
        for position, chunk in enumerate(chunks):
            first = position * per_chunk + chunk.first_block
            given[first : first + len(chunk.block_ids)] = True
        block_ids = np.concatenate([chunk.block_ids for chunk in chunks])
        addresses, page_ids = addresses[given], page_ids[given]
        if not is_load:
            return self.engine.store(group, block_ids, addresses, page_ids)
        # Block 0 is vLLM's null block: it stands for a place that nothing reads.
        real = block_ids != 0
        return self.engine.load(group, block_ids[real], addresses[real])

    def _part_ended(self, job: Job, future: Future[int] | None) -> None:
        """Any thread: the engine's, or the one that submits."""
        with self._changed:
            if future is not None:
                job.error = job.error or future.exception()
                if future.exception() is None:
                    job.bytes += future.result()
                job.parts -= 1
            if job.parts == 0:
                self._end(job)

    def _end(self, job: Job) -> None:
        """Publish the job's numbers, then show the job. Called with the lock held."""
        try:
            for number in range(job.first_transfer, job.first_transfer + job.num_transfers):
                if job.error is not None or number in job.failed:
                    self._region.fail(self._rank, number)
                else:
                    self._region.publish(self._rank, number)
        except Exception as exc:  # noqa: BLE001 - raised where results are asked for
            job.broken = exc
        finally:
            # Whatever happened, nobody may wait for this job for ever.
            del self._running[job.job_id]
            self._finished.append(job)
            self._changed.notify_all()
