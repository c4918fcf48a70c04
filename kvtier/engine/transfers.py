# SPDX-License-Identifier: Apache-2.0
"""One record a job, from the message that starts it to the one that ends it.

Owned by the planner, on the owner's thread. A record holds all that has to be given back: lent
slots of a ``Find``, in-flight bytes of a ``Cascade``. Stale records belong to the time before a
reset: they only wait for their slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.engine.requests import Request
from kvtier.types import key_group


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
        self.lent: dict[int, int] = {}
        """Slots with the service: slot to generation."""
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
    """A ``Cascade`` under way; without slots, bytes and pins if it is of chunks handed over."""

    __slots__ = ("generations", "job", "keys", "length_bytes", "slots", "stale", "started", "tiers")

    def __init__(
        self,
        job: int,
        keys: list[bytes],
        slots: list[int],
        generations: list[int],
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
