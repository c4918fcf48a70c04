# SPDX-License-Identifier: Apache-2.0
"""Tiers as people write them for vLLM 0.32; needs vLLM to import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)


class VllmDictionary(SecondaryTierManager):
    """Chunks in a dictionary; lookups are answered after the end of the step, like vLLM's own."""

    medium: ClassVar[Medium] = Medium.CPU
    policy: ClassVar[OffloadPolicy] = OffloadPolicy.CHUNK_LEVEL
    made: ClassVar[list[Any]] = []

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        color: str,
        size: int = 3,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.color = color
        self.size = size
        self.chunks: dict[OffloadKey, bytes] = {}
        self.finished: list[JobResult] = []
        self.known: set[str] = set()
        self.asked: set[tuple[str, OffloadKey]] = set()
        self.answered: set[tuple[str, OffloadKey]] = set()
        self.calls: list[str] = []
        type(self).made.append(self)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        assert isinstance(req_context, ReqContext)
        assert req_context.req_id in self.known
        if (req_context.req_id, key) not in self.answered:
            self.asked.add((req_context.req_id, key))
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        assert job_metadata.req_context.req_id in self.known
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            start = int(row) * self.block_size_bytes
            flat = self._primary_kv_view.cast("B")
            self.chunks[key] = bytes(flat[start : start + self.block_size_bytes])
        self.finished.append(JobResult(job_metadata.job_id, True))

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        assert job_metadata.is_promotion
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            start = int(row) * self.block_size_bytes
            flat = self._primary_kv_view.cast("B")
            flat[start : start + self.block_size_bytes] = self.chunks[key]
        self.finished.append(JobResult(job_metadata.job_id, True))

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self.finished = self.finished, []
        return finished

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.known.add(req_context.req_id)
        return RequestOffloadingContext(self.policy)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self.known.remove(req_context.req_id)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        assert isinstance(context, ScheduleEndContext)
        self.answered |= self.asked
        self.asked.clear()

    @override
    def drain_jobs(self) -> None:
        self.calls.append("drain_jobs")

    @override
    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Breaking(VllmDictionary):
    """Takes `size` chunks; a store beyond them fails, and every load."""

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        if len(self.chunks.keys() | set(job_metadata.keys)) > self.size:
            self.finished.append(JobResult(job_metadata.job_id, False))
        else:
            super().submit_store(job_metadata)

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        self.finished.append(JobResult(job_metadata.job_id, False))


class NeedsParent(VllmDictionary):
    """Serves other hosts."""

    @override
    def serve_external_requests(self, parent: ParentManager) -> None:
        raise AssertionError("kvtier has no ParentManager")


class HalfWritten(SecondaryTierManager):
    """Lacks most methods."""

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS


class WholeRequests(VllmDictionary):
    """Wants every chunk of a request, those that it had before too."""

    policy: ClassVar[OffloadPolicy] = OffloadPolicy.REQUEST_LEVEL
