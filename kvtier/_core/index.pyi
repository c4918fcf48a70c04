# SPDX-License-Identifier: Apache-2.0
"""The owner's index: which chunk is in which slot, and which goes next. One thread."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier._core.room import Room
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

class Index(Room):
    """Which chunk is in which slot, and which goes next; what needs no key is in `Room`.

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
    def lookup(self, key: bytes, /) -> int:
        """0 absent, 1 WRITING, 2 READY. No allocation."""
    def states(self, keys: Sequence[bytes]) -> bytes:
        """The same of each key, as one byte."""
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
    def keep_free(
        self, n: int, limit: int = 64, group: int = 0, unsaved: list[bytes] | None = None
    ) -> list[bytes]:
        """Evict saved chunks until `n` slots are free for chunks of `group`, or `limit` more than
        before (or the rest of a slab more); returns the keys.

        With a list for them, unsaved chunks go as well, after the saved ones; it has their keys.
        """
    def oldest_unsaved(self, n: int, within: int | None = None) -> list[bytes]:
        """Up to `n` unsaved READY keys, the next victims first, among the `within` oldest chunks;
        None: among 16 n + 1024."""
    def mark_saved(self, keys: Sequence[bytes]) -> None: ...
    def drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Remove READY chunks without pins; returns the keys that went."""
    def clear(self) -> tuple[list[bytes], npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Forget everything at once, without waiting.

        READY slots without pins become FREE. Slots in flight (WRITING, lent or pinned) become
        orphans: no key finds them, and they stay out of use until they are released. Returns the
        keys that were READY, and slots and generations of the orphans.
        """
    def end_step(self, groups: Sequence[int], ahead: int) -> list[bytes]:
        """Once a step: ``keep_free`` `ahead` slots, but no more than a 32nd of what there is, for
        each of `groups`, one a size class; then ``reap``. Returns the keys that were evicted."""
    def keys(self) -> list[bytes]:
        """READY keys, the next victim first (tests, drain)."""
