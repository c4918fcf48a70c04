# SPDX-License-Identifier: Apache-2.0
"""What is known of the store's objects without asking it again.

Owned by the tier, on the service's loop. Bounded: what does not fit is asked for. An object that
this instance wrote, loaded or saw in a listing is known until it turns out to be gone; one that a
question found, for the next question only, because the store's lifecycle rules tell nobody; one
that was not there, for a second or so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

MAX_MINE = 1 << 20
MAX_ASKED = 1 << 16
ASKED_SECONDS = 30.0
"""How long the answer to a question is good for at most."""


class Known:
    """See the head of this module.

    Parameters
    ----------
    absent_seconds : float
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, absent_seconds: float, clock: Callable[[], float]) -> None:
        self._absent_seconds = absent_seconds
        self._clock = clock
        self._mine: OrderedDict[bytes, None] = OrderedDict()
        self._present: OrderedDict[bytes, float] = OrderedDict()  # until
        self._absent: OrderedDict[bytes, float] = OrderedDict()

    def mine(self, keys: Iterable[bytes]) -> None:
        """These are there: stored, loaded or listed just now."""
        for key in keys:
            self._absent.pop(key, None)
            self._mine[key] = None
            self._mine.move_to_end(key)
        while len(self._mine) > MAX_MINE:
            self._mine.popitem(last=False)

    def found(self, key: bytes, there: bool) -> None:
        """The answer to a question."""
        table, other = self._present, self._absent
        seconds = ASKED_SECONDS
        if not there:
            table, other = other, table
            seconds = self._absent_seconds
        other.pop(key, None)
        table[key] = self._clock() + seconds
        table.move_to_end(key)
        if len(table) > MAX_ASKED:
            table.popitem(last=False)

    def gone(self, key: bytes) -> None:
        """It was expected, and is not there, or is not to be used."""
        self._mine.pop(key, None)
        self._present.pop(key, None)

    def ask(self, key: bytes) -> bool | None:
        """Whether it is there, without a question to the store; None: nobody knows."""
        if key in self._mine:
            return True
        now = self._clock()
        until = self._present.pop(key, None)
        if until is not None and now < until:
            return True
        until = self._absent.get(key)
        if until is not None:
            if now < until:
                return False
            del self._absent[key]
        return None

    def holds(self, key: bytes) -> bool:
        """Whether `key` was there when it was last heard of; uses nothing up."""
        return key in self._mine or key in self._present
