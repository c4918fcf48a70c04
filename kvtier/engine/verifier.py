# SPDX-License-Identifier: Apache-2.0
"""Chunks of host memory compared with their checksum before a request loads them.

Part of the planner, on the owner's thread; the service does the reading, under its own pins. A
chunk without a checksum yet (its cascade has not begun) cannot be compared and passes. One that
differs is dropped: the tiers are asked for it, or it is recomputed.
"""

from __future__ import annotations

import logging

from kvtier._core.index import Index
from kvtier._core.slots import SlotTable
from kvtier.engine.requests import Request
from kvtier.errors import InternalError
from kvtier.obs.metrics import Recorder
from kvtier.runtime import messages as m

log = logging.getLogger(__name__)

SAMPLE = 16
"""With ``sampled``, one chunk in this many, chosen by its key."""


class Verifier:
    """Which chunks have to be compared, and which have been.

    Parameters
    ----------
    mode : {"off", "sampled", "always"}
    index : Index
    slots : SlotTable
    recorder : Recorder
    """

    def __init__(self, mode: str, index: Index, slots: SlotTable, recorder: Recorder) -> None:
        self.active = mode != "off"
        self.jobs: dict[int, tuple[list[bytes], list[int], list[int]]] = {}
        """Keys, slots and generations that the service holds pins on."""
        self._sampled = mode == "sampled"
        self._index = index
        self._slots = slots
        self._recorder = recorder
        self._asked: dict[bytes, list[Request]] = {}
        self._sent: set[bytes] = set()
        self._stale: set[int] = set()  # jobs from before a reset

    def due(self, key: bytes, request: Request) -> bool:
        """Whether this request may not have the chunk before it has been compared."""
        if self._sampled and key[0] % SAMPLE:
            return False
        return key not in request.verified

    def ask(self, key: bytes, request: Request) -> None:
        """Have a chunk compared for a request."""
        waiting = self._asked.setdefault(key, [])
        if request not in waiting:
            waiting.append(request)

    def flush(self, job: int) -> m.Verify | None:
        """The message for what was asked since the last call, if anything, under this number."""
        for key, requests in list(self._asked.items()):
            if all(request.ended for request in requests):
                del self._asked[key]
        keys = [key for key in self._asked if key not in self._sent]
        if not keys:
            return None
        pinned, slots, generations = self._index.pin_for_service(keys)
        for key in set(keys).difference(pinned):
            # Gone meanwhile: the request's next lookup finds that out.
            del self._asked[key]
        if not pinned:
            return None
        self._sent.update(pinned)
        self.jobs[job] = (pinned, slots.tolist(), generations.tolist())
        return m.Verify(job, pinned, slots.tobytes(), generations.tobytes())

    def take(self, message: m.Verified) -> tuple[list[Request], list[bytes]]:
        """The service has compared: requests with news, and the keys that were dropped."""
        if message.job not in self.jobs:
            raise InternalError(f"news of job {message.job}, which has ended")
        keys, _, _ = self.jobs.pop(message.job)
        if message.job in self._stale:
            self._stale.discard(message.job)
            return [], []
        bad = [keys[i] for i in message.bad]
        requests = []
        for key in keys:
            self._sent.discard(key)
            for request in self._asked.pop(key, ()):
                requests.append(request)
                request.verified.add(key)
        self._recorder.add("kvtier_verified_chunks_total", len(keys) - len(bad), ("ok",))
        if bad:
            log.error("%d chunks in host memory were damaged; they are not used", len(bad))
            self._recorder.add("kvtier_verified_chunks_total", len(bad), ("corrupt",))
            self._recorder.add("kvtier_corrupt_chunks_total", len(bad), ("host",))
            for key in bad:
                for request in requests:
                    request.verified.discard(key)
        return requests, self._index.drop(bad)

    def undeliverable(self, message: m.Verify) -> None:
        """The service did not take it: give the pins back, ask again."""
        keys, slots, generations = self.jobs.pop(message.job)
        for slot, generation in zip(slots, generations, strict=True):
            self._slots.unpin_service(slot, generation)
        self._sent.difference_update(keys)

    def reset(self) -> None:
        """Everything was forgotten: what is under way is about chunks that are no more."""
        self._stale.update(self.jobs)
        self._asked.clear()
        self._sent.clear()

    def forget(self) -> None:
        """The service is gone, or everything was reset: nothing is under way any more."""
        self.jobs.clear()
        self._stale.clear()
        self._asked.clear()
        self._sent.clear()
