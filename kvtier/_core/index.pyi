# SPDX-License-Identifier: Apache-2.0
"""The owner's index: key table writer, free list and replacement policy. One thread."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier._core.chunks import RequestChunks
from kvtier._core.slots import SlotTable

class Reservation:
    """Result of ``Index.reserve``."""

    keys: list[bytes]
    """The absent keys that got a slot, in the order asked (a leading part of the absent ones)."""
    slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint32]
    evicted: list[bytes]
    evicted_unsaved: list[bytes]
    """The part of `evicted` that no secondary tier held."""
    complete: bool
    """Whether every absent key got a slot."""

class Index:
    """Which chunk is in which slot, and which goes next.

    All methods are O(1) a key, take no lock, never wait, and are called by the owner's thread only.
    Keys end in the 4-byte big-endian group index; a key whose group is not in `payload_bytes`, or
    that is longer than 40 bytes, raises ValueError before anything changes.

    Parameters
    ----------
    slots : SlotTable
    payload_bytes : sequence of int
        Chunk bytes by group.
    policy : {"lru", "arc"}
    track_unsaved : bool
        Whether new chunks count as unsaved until ``mark_saved`` (there are secondary tiers).
    widths : sequence of int, optional
        Slots that a chunk takes, by group; 1 by default. Groups of equal width are a size class.
    slab_slots : int
        Slots that belong to one class at a time (`Geometry`); 1: there is one class of width 1.
    """

    def __init__(
        self,
        slots: SlotTable,
        payload_bytes: Sequence[int],
        policy: str = "lru",
        track_unsaved: bool = False,
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

    def lookup(self, key: bytes, /) -> int:
        """0 absent, 1 WRITING, 2 READY. No allocation."""
    def lookup_batch(self, keys: Sequence[bytes]) -> tuple[int, bytes]:
        """Length of the READY prefix, and the state (0, 1, 2) of each key as one byte."""
    def look(self, keys: Sequence[bytes], chunks: RequestChunks) -> tuple[int, bool]:
        """Look a prompt up for a request.

        Returns
        -------
        ready : int
            Length of the READY prefix.
        same : bool
            Whether it is the batch that was looked up last, and no state has changed.
        """
    def note(self, keys: Sequence[bytes], chunks: RequestChunks) -> None:
        """Keys that the request looked up one by one and was answered HIT: they count for ``hold``
        if they are READY still."""
    def hold(
        self, chunks: RequestChunks, limit: int, places: npt.NDArray[np.int64] | None = None
    ) -> tuple[int, int]:
        """Pin chunks for a request that waits: those at `places`, or those answered HIT since
        ``RequestChunks.count``, in the order of their first question.

        Returns
        -------
        pinned : int
            At most `limit`.
        left : int
            Those that were not pinned: beyond the limit, or not READY any more.
        """
    def held(
        self,
        chunks: RequestChunks,
        places: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint32],
        pinned: list[bool],
    ) -> int:
        """``adopt`` has pinned these for the request, where `pinned` says so. Returns how many."""
    def unhold(self, chunks: RequestChunks, keys: Sequence[bytes] | None = None) -> int:
        """Give pins of a request back: those of `keys`, or all. Returns how many."""
    def locate(self, key: bytes) -> tuple[int, int] | None:
        """(slot, generation) of a READY or WRITING key."""

    def reserve(self, keys: Sequence[bytes]) -> Reservation:
        """Slots in WRITING for the longest leading part of the absent keys that fits.

        Never evicts a key of the same call, a pinned one, or one in WRITING. Saved chunks go before
        unsaved ones. A key that stands twice in `keys` is taken once. With several size classes the
        chunks of a whole slab of another class may go, if they are older (see `slabs.h`).
        """
    def commit(self, keys: Sequence[bytes]) -> list[bytes]:
        """WRITING to READY; returns the keys for which that happened."""
    def abort(self, keys: Sequence[bytes]) -> int:
        """WRITING back to FREE; keys in other states are left alone. Returns how many."""

    def pin(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Pin READY chunks for the owner: slots and generations, in order.

        Raises
        ------
        KeyError
            With the first key that is not READY; nothing stays pinned.
        """
    def unpin(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> None:
        """Give owner pins back. InternalError on a pin that was not held."""
    def touch(self, keys: Sequence[bytes], positions: dict[bytes, int] | None = None) -> None:
        """One access a request, in prefix order: by `positions`, at least 0, where all keys have
        one, else as given. Applied suffix first, so that the tail goes first. A key that stands
        twice counts once, where it stands first.

        The first touch after a chunk's insertion renews its place; a later one counts as reuse.
        Absent keys are passed over.
        """

    def pin_for_service(
        self, keys: Sequence[bytes]
    ) -> tuple[list[bytes], npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """One service pin on each key that is READY: those keys, their slots and generations."""
    def lend(self, n: int, group: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Up to `n` free slots for chunks of the size class of `group`, WRITING and without a key.
        Evicts nothing."""
    def adopt(
        self,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint32],
        keys: Sequence[bytes],
        crcs: npt.NDArray[np.uint32] | None = None,
        saved: bool = True,
        pin: bool = False,
    ) -> list[bool]:
        """Lent slots become READY under their keys, each with an owner's pin if `pin`; False where
        the key was already there (the slot is then FREE again)."""
    def give_back(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> None:
        """Lent slots become FREE again, unused."""
    def keep_free(
        self, n: int, limit: int = 64, group: int = 0, unsaved: list[bytes] | None = None
    ) -> list[bytes]:
        """Evict saved chunks until `n` slots are free for chunks of `group`, or `limit` more than
        before (or the rest of a slab more); returns the keys.

        With a list for them, unsaved chunks go as well, after the saved ones; it has their keys.
        """
    def oldest_unsaved(self, n: int) -> list[bytes]:
        """Up to `n` unsaved READY keys, the next victims first."""
    def mark_saved(self, keys: Sequence[bytes]) -> None: ...
    def drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Remove READY chunks without pins; returns the keys that went."""
    def clear(self) -> tuple[list[bytes], npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Forget everything at once, without waiting.

        READY slots without pins become FREE. Slots in flight (WRITING, lent or pinned) become
        orphans: no key finds them, and they stay out of use until they are released. Returns the
        keys that were READY, and slots and generations of the orphans.
        """
    def release(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> int:
        """Free orphans in WRITING whose writer has ended. Returns how many."""
    def reap(self) -> int:
        """Free orphans whose pins are all back. Called once a step; O(orphans)."""

    def check(self) -> None:
        """Walk everything; InternalError on the first invariant that does not hold."""
    def keys(self) -> list[bytes]:
        """READY keys, the next victim first (tests, drain)."""
