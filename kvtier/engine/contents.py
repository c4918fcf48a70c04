# SPDX-License-Identifier: Apache-2.0
"""What a tier that only this instance writes may hold: absence is known without asking.

Part of the planner, on the owner's thread. Owns up to two filters a tier: the one that answers, and
its successor while that comes in. Invariant: every key that the service was asked to store is in
both. A tier of which nothing is known may hold everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier._core.keyfilter import KeyFilter
from kvtier.runtime import messages as m


class Contents:
    """Keys that one tier may hold."""

    __slots__ = ("_filter", "_next")

    def __init__(self) -> None:
        self._filter: KeyFilter | None = None
        self._next: KeyFilter | None = None

    def forget(self) -> None:
        """Nothing is known of the tier any more."""
        self._filter = self._next = None

    def add(self, keys: list[bytes]) -> None:
        """These are being sent there."""
        if self._filter is not None:
            self._filter.add(keys)
        if self._next is not None:
            self._next.add(keys)

    def take(self, message: m.Contents, under_way: Iterable[list[bytes]]) -> None:
        """A part of a filter; `under_way` are the chunks sent and not answered yet."""
        if not message.bits:
            self._next = KeyFilter(message.room)
            for keys in under_way:
                self._next.add(keys)
        elif self._next is not None:
            self._next.merge(message.offset, message.bits)
        if message.final:
            self._filter, self._next = self._next, None

    def first_absent(self, keys: list[bytes], start: int) -> int:
        """Position of the first key from `start` on that is not there; ``len(keys)`` if none."""
        return len(keys) if self._filter is None else self._filter.first_absent(keys, start)
