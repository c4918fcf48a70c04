# SPDX-License-Identifier: Apache-2.0
"""The copy engine of accelerators whose memory is host memory (vLLM's CPU platform).

Owns the pool of copy threads. Any one thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from kvtier._core.layout import CopyPlan
from kvtier.device.base import Int64Array, Uint64Array
from kvtier.layout.plan import CopyPool


class HostEngine:
    """Memory to memory.

    Parameters
    ----------
    plans : sequence of CopyPlan
        Of each group.
    num_threads : int
    """

    def __init__(self, plans: Sequence[CopyPlan], num_threads: int = 2) -> None:
        self.plans = tuple(plans)
        self._pool = CopyPool(num_threads)

    def open(self) -> None:
        """Start the threads."""
        self._pool.open()

    def close(self) -> None:
        """Carry out what was submitted, then end the threads. Idempotent."""
        self._pool.close()

    def store(
        self, group: int, block_ids: Int64Array, addresses: Uint64Array, page_ids: Int64Array
    ) -> Future[int]:
        """As ``CopyEngine.store``."""
        return self._pool.store(self.plans[group], block_ids, addresses, page_ids)

    def load(self, group: int, block_ids: Int64Array, addresses: Uint64Array) -> Future[int]:
        """As ``CopyEngine.load``."""
        return self._pool.load(self.plans[group], block_ids, addresses)
