# SPDX-License-Identifier: Apache-2.0
"""What is known of the chunks of one request, by place instead of by key."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier._core.index import Index

ASKED: int
"""A key that was not in host memory, and of which no tier has said anything yet."""

GONE: int
"""One that is not to be had."""

LOADED: int
"""One that came from a tier."""

Places = npt.NDArray[np.int64]

class RequestChunks:
    """The keys that a request has asked for, and what host memory and the tiers have of each.

    A key has a place from its first question on. The keys of the last question are the *batch*:
    ``look`` sets it, with the states in host memory. Owner's thread only.

    Parameters
    ----------
    index : Index
        Where keys are looked up, and chunks pinned.
    """

    num_held: int
    """Chunks pinned for the request."""
    held_slots: int
    """Slots that they take."""
    num_unsent: int
    """Keys that wait for ``take_unsent``."""
    writing: bool
    """Whether a chunk of the batch was being written by a worker."""
    holdable: bool
    """Whether the last ``answer`` met chunks that are READY and not held."""

    def __init__(self, index: Index) -> None: ...
    def __len__(self) -> int:
        """Keys that have a place."""
    def look(self, keys: Sequence[bytes]) -> tuple[int, bool]:
        """Look a prompt up: its keys are the batch from now on.

        Returns
        -------
        ready : int
            Length of the READY prefix.
        same : bool
            Whether it is the batch that was looked up last, and no state has changed.
        """
    def note(self, keys: Sequence[bytes]) -> None:
        """Keys that the request looked up one by one and was answered HIT: they count for ``hold``
        if they are READY still."""
    def repeats(self, keys: Sequence[bytes]) -> bool:
        """Whether these keys are the batch."""
    def status(self, key: bytes) -> int:
        """ASKED, GONE or LOADED; 0 if nothing was ever asked of the tiers about it."""
    def hit_all(self) -> None:
        """The batch is answered HIT, all of which is READY."""
    def answer(self, waits: bool) -> int:
        """`Lookup` for the batch: that of the first chunk that will come, up to the first that will
        not; 0 if none will. What is READY before that counts as answered HIT.

        `waits` : nothing that is not READY will come if this is false.
        """
    def pick(self) -> list[bytes]:
        """Keys of the batch that the tiers have to be asked for, up to the first that is not to be
        had. ``settle`` says what became of them."""
    def pick_one(self, key: bytes) -> None:
        """The same for a single key, which is not in host memory."""
    def settle(self, asked: int, gone: int) -> None:
        """Of the keys picked the first ones are ASKED and wait for ``take_unsent``, the next ones
        are GONE, and nothing was found out about the rest."""
    def take_unsent(self) -> tuple[list[bytes], Places]:
        """Keys that are ASKED and were not taken yet, and their places."""
    def gone(self, places: Places, positions: Places | None = None) -> None:
        """These are not to be had: those at `positions` of `places`, or of all of them those that
        are still ASKED."""
    def loaded(self, places: Places) -> None:
        """These came from a tier."""
    def hold(
        self, limit: int, places: Places | None = None, slots: int | None = None
    ) -> tuple[int, int]:
        """Pin chunks for a request that waits: those at `places`, or those answered HIT since
        ``count``, in the order of their first question; while a chunk of the largest size would
        still take no more than `slots` slots together with those pinned before it.

        Returns
        -------
        pinned : int
            At most `limit`.
        left : int
            Those that were not pinned: beyond the limits, or not READY any more.
        """
    def held(
        self,
        places: Places,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint32],
        pinned: list[bool],
    ) -> int:
        """``Index.adopt`` has pinned these for the request, where `pinned` says so. Returns how
        many."""
    def unhold(self, keys: Sequence[bytes] | None = None) -> int:
        """Give pins of a request back: those of `keys`, or all. Returns how many."""
    def count(self) -> tuple[int, int]:
        """Hits and misses in host memory since the last call, each key once in a request's life.
        What was answered HIT so far is no candidate for ``hold`` any more."""
    def clear(self) -> None:
        """Forget everything. ValueError if something is held."""
