# SPDX-License-Identifier: Apache-2.0
"""One record a job, from the message that starts it to the one that ends it.

Owned by the planner, on the owner's thread. A record holds all that has to be given back: lent
slots of a ``Find``, in-flight bytes of a ``Cascade``. Stale records belong to the time before a
reset: they only wait for their slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.engine.requests import Request
from kvtier.runtime import messages as m
from kvtier.types import key_group


class Lent:
    """Slots with the service, and their generations, both as they travel.

    Most go out at once and come back at once, in the same order, and nobody has to look at them one
    by one.
    """

    __slots__ = ("_generations", "_one_by_one", "_slots")

    def __init__(self) -> None:
        self._slots: m.Numbers = b""
        self._generations: m.Words = b""
        self._one_by_one: dict[int, int] = {}

    def __len__(self) -> int:
        return len(m.numbers(self._slots)) + len(self._one_by_one)

    def __iter__(self) -> Iterator[int]:
        yield from self._one_by_one
        yield from m.numbers(self._slots).tolist()

    def add(self, slots: m.Numbers, generations: m.Words) -> None:
        """These go to the service."""
        if self._slots:
            self._split()
        self._slots, self._generations = slots, generations

    def take(self, slots: m.Numbers) -> npt.NDArray[np.uint32]:
        """Generations of slots that have come back. KeyError if one was not there."""
        if slots == self._slots:
            generations, self._slots, self._generations = self._generations, b"", b""
            return m.words(generations)
        self._split()
        pop = self._one_by_one.pop
        return np.array([pop(slot) for slot in m.numbers(slots).tolist()], dtype=np.uint32)

    def _split(self) -> None:
        slots, generations = m.numbers(self._slots), m.words(self._generations)
        self._one_by_one.update(zip(slots.tolist(), generations.tolist(), strict=True))
        self._slots = self._generations = b""


class FindRecord:
    """A ``Find`` under way."""

    __slots__ = (
        "deadline",
        "ended",
        "granted",
        "group",
        "job",
        "keys",
        "lent",
        "places",
        "present",
        "request",
        "stale",
        "started",
        "wanted_since",
        "wants",
    )

    def __init__(
        self,
        job: int,
        request: Request,
        keys: list[bytes],
        places: npt.NDArray[np.int64],
        started: float,
        deadline: float,
    ) -> None:
        self.job = job
        self.request = request
        self.keys = keys
        self.places = places
        """Of the keys among the request's chunks."""
        self.group = key_group(keys[0])
        """A KV cache group of its keys; they are all of one size class."""
        self.started = started
        self.deadline = deadline
        self.lent = Lent()
        """Slots with the service."""
        self.granted = 0
        """Slots lent so far, whatever became of them."""
        self.present = 0
        """Keys known to be in a tier."""
        self.wants = 0
        """Slots it still needs."""
        self.wanted_since = started
        self.stale = False
        self.ended = False
        """Its final message has come; what is lent still belongs to a hung call."""


class CascadeRecord:
    """A ``Cascade`` under way; without bytes and pins if it is of chunks handed over."""

    __slots__ = ("generations", "job", "keys", "length_bytes", "slots", "stale", "started", "tiers")

    def __init__(
        self,
        job: int,
        keys: list[bytes],
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint32],
        length_bytes: int,
        tiers: list[int],
        started: float,
    ) -> None:
        self.job = job
        self.keys = keys
        self.slots = slots
        self.generations = generations
        self.length_bytes = length_bytes
        """Payload bytes of all chunks: what counts as in flight at each tier."""
        self.tiers = set(tiers)
        """Tiers that have not ended yet."""
        self.started = started
        self.stale = False

    @property
    def handed_over(self) -> bool:
        """Whether it is of chunks put off, which the service pins by itself."""
        return not len(self.slots)
