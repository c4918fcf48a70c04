# SPDX-License-Identifier: Apache-2.0
"""A tier in four methods: chunks in a dictionary, least recently used first out.

The simplest way to write a tier of your own: a synchronous class, told of jobs and asked for the
finished ones. kvtier runs it on a thread of its own in the model server's process. Name it in the
configuration (the module must be importable)::

    tiers:
      - type: DictionaryTier
        module_path: examples.own_tier
        capacity_chunks: 1000

This one copies within ``submit_store`` and ``submit_load``, so each job is finished when the call
returns. A tier that talks to a disk or a network would start the copy there, note the job, and
report it from ``get_finished_jobs`` when the copy has ended; until then the rows are its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any, ClassVar

import msgspec

from kvtier import JobMetadata, JobResult, LookupResult, SecondaryTierManager


class DictionaryOptions(msgspec.Struct, frozen=True):
    """The tier's keys in the configuration. Others, and values out of range, are errors."""

    capacity_chunks: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Chunks it holds at most."""


class DictionaryTier(SecondaryTierManager):
    """Chunks in a dictionary."""

    medium: ClassVar[str] = "CPU"
    options_type: ClassVar[type[msgspec.Struct]] = DictionaryOptions

    def __init__(self, view: memoryview, options: DictionaryOptions) -> None:
        super().__init__(view, options)
        self.chunks: OrderedDict[bytes, bytes] = OrderedDict()
        self._finished: list[JobResult] = []
        # One flat view of the region: rows of it are slices, which costs no copy.
        self._bytes = view.cast("B")
        self._row_bytes = view.nbytes // len(view)

    def _row(self, chunk_id: int) -> memoryview:
        start = int(chunk_id) * self._row_bytes
        return self._bytes[start : start + self._row_bytes]

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether the chunk is here. A tier that has to ask elsewhere would answer RETRY first."""
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Copy rows out of host memory."""
        for key, chunk_id in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            while len(self.chunks) >= self.options.capacity_chunks and key not in self.chunks:
                self.chunks.popitem(last=False)
            self.chunks[key] = bytes(self._row(chunk_id))
        self._finished.append(JobResult(job_metadata.job_id, success=True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Copy chunks into rows of host memory; what is not here is left out of the result."""
        loaded = []
        for key, chunk_id in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            payload = self.chunks.get(key)
            if payload is None or len(payload) != self._row_bytes:
                self.chunks.pop(key, None)
                continue
            self._row(chunk_id)[:] = payload
            self.chunks.move_to_end(key)
            loaded.append(key)
        everything = len(loaded) == len(job_metadata.keys)
        self._finished.append(JobResult(job_metadata.job_id, everything, loaded))

    def get_finished_jobs(self) -> list[JobResult]:
        """Jobs that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def shutdown(self) -> None:
        """Let go of the region; optional, like ``drain_jobs``."""
        self.chunks.clear()
        self._bytes.release()
