# SPDX-License-Identifier: Apache-2.0
"""The owner's room for chunks: slots by number, free, lent, in use or waiting for their end."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier._core.slots import SlotTable

class Room:
    """Slots, and which size class and list each belongs to. `Index` is made, not this.

    Parameters as of `Index`. All methods are O(1) a slot, and called by the owner's thread only.
    """

    def __init__(
        self,
        slots: SlotTable,
        payload_bytes: Sequence[int],
        policy: str = "lru",
        widths: Sequence[int] | None = None,
        slab_slots: int = 1,
    ) -> None: ...

    available: int
    """Slots that have memory behind them (``grow``)."""
    capacity: int
    """Chunks that there is room for, as the memory is divided now; slabs without a chunk count as
    of the smallest class. `num_free` and the three below it add up to it with `num_ready`."""
    num_free: int
    num_writing: int
    num_ready: int
    num_lent: int
    num_orphans: int
    ready_bytes: int
    """Payload bytes of READY slots."""

    policy: str
    list_steps: int
    """List steps taken by evictions so far (tests of cost)."""
    def free_for(self, group: int) -> int:
        """Slots that chunks of `group` can have without an eviction."""
    def capacity_for(self, group: int) -> int:
        """Chunks that the memory of the size class of `group` has room for now."""
    def ready_for(self, group: int) -> int:
        """READY chunks of the size class of `group`."""
    metadata_bytes_per_slot: float
    """Memory a slot costs besides its payload: record, table, lists, ghosts; at most 160."""
    def policy_state(self, group: int = 0) -> dict[str, float]:
        """Sizes of the policy's lists for the size class of `group` (``t1``, ``t2``, ghosts ``b1``,
        ``b2``) and ARC's ``p``."""

    def grow(self, num_slots: int) -> None:
        """Slots [available, num_slots) have memory behind them now and become FREE; whole slabs."""

    def lend(self, n: int, group: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Up to `n` free slots for chunks of the size class of `group`, WRITING and without a key.
        Evicts nothing."""
    def give_back(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> None:
        """Lent slots become FREE again, unused."""
    def unpin(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> None:
        """Give owner pins back. InternalError on a pin that was not held."""
    def release(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> int:
        """Free orphans in WRITING whose writer has ended. Returns how many."""
    def reap(self) -> int:
        """Free orphans whose pins are all back. Called once a step; O(orphans)."""

    def check(self) -> None:
        """Walk everything; InternalError on the first invariant that does not hold."""
