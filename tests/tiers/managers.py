# SPDX-License-Identifier: Apache-2.0
"""Four-method classes that fail and lie on cue.

Tests reach the instance of a class through ``made``, which the fixture in ``test_adapter`` empties.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from examples.own_tier import DictionaryOptions, DictionaryTier
from kvtier import JobResult, LookupResult


class Cued(DictionaryTier):
    """A dictionary that does what its attributes say."""

    made: ClassVar[list[Any]] = []
    persistent: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, view: memoryview, options: DictionaryOptions) -> None:
        super().__init__(view, options)
        self.raises: dict[str, Exception] = {}
        self.extra: list[Any] = []
        """Reported with the next finished jobs."""
        self.held = False
        """Jobs end, but nobody is told before this is False."""
        self.writes = True
        self.damage = b""
        self.retries = 0
        self.answer: Any = None
        self.submitted = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.chunks.update(self.persistent)
        type(self).made.append(self)

    def _enter(self, method: str) -> None:
        self.threads.add(threading.current_thread().name)
        if method in self.raises:
            raise self.raises[method]

    def lookup(self, key: bytes, req_context: Any) -> Any:
        self._enter("lookup")
        if self.answer is not None:
            return self.answer
        if self.retries:
            self.retries -= 1
            return LookupResult.RETRY
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        self._enter("submit_store")
        super().submit_store(job_metadata)
        self.submitted.release()

    def submit_load(self, job_metadata: Any) -> None:
        self._enter("submit_load")
        if not self.writes:
            self._finished.append(JobResult(job_metadata.job_id, success=True))
            return
        super().submit_load(job_metadata)
        for chunk_id in job_metadata.chunk_ids:
            self._row(chunk_id)[: len(self.damage)] = self.damage
        self.submitted.release()

    def get_finished_jobs(self) -> list[Any]:
        self._enter("get_finished_jobs")
        extra, self.extra = self.extra, []
        return extra if self.held else extra + super().get_finished_jobs()


class Unopened(DictionaryTier):
    """Cannot be made."""

    def __init__(self, view: memoryview, options: DictionaryOptions) -> None:
        raise RuntimeError("no licence")


class NoDevice(DictionaryTier):
    """Cannot be made for now."""

    def __init__(self, view: memoryview, options: DictionaryOptions) -> None:
        raise ConnectionRefusedError("nobody listens")


class Duck:
    """Four methods, and no base class."""

    def __init__(self, view: memoryview, options: dict[str, Any]) -> None:
        self.inner = DictionaryTier(view, DictionaryOptions(**options))

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return self.inner.lookup(key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        self.inner.submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        self.inner.submit_load(job_metadata)

    def get_finished_jobs(self) -> Any:
        return self.inner.get_finished_jobs()
