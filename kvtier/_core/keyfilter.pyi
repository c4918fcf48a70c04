# SPDX-License-Identifier: Apache-2.0
"""A set of keys that answers "not in it" for sure and "in it" perhaps: a blocked Bloom filter."""

from collections.abc import Iterable

class KeyFilter:
    """Keys added so far, perhaps with a few others. One thread at a time; nothing is removed.

    Parameters
    ----------
    room : int
        Keys it is made for, at 2 bytes each. With so many in it about one absent key in 800 passes
        for present, with twice as many one in 40.

    Raises
    ------
    ValueError
        `room` is below one.
    MemoryError
        There is not so much.
    """

    def __init__(self, room: int) -> None: ...
    @property
    def nbytes(self) -> int:
        """Memory of its bits."""
    def read(self, offset: int, length: int) -> bytes:
        """Some of its bits, as `merge` takes them: whole words of 8 bytes. ValueError if not."""
    def merge(self, offset: int, data: bytes) -> None:
        """Add what is in the same part of another filter of the same room. ValueError."""
    def add(self, keys: Iterable[bytes]) -> None:
        """From now on these are in it. TypeError, ValueError: not keys of 5 to 40 bytes."""
    def __contains__(self, key: bytes) -> bool:
        """False: was never added. True: was, or only looks like it."""
    def first_absent(self, keys: list[bytes], start: int = 0) -> int:
        """Position of the first key from `start` on that is not in it; ``len(keys)`` if none.

        IndexError: `start` is no position in `keys`, nor its end.
        """
