# SPDX-License-Identifier: Apache-2.0
"""The owner's host cache: slot table and index over one region, built from its raw memory.

Owns the `Index` (policy lists, private memory) and views of the region's records and table. Owner's
thread only. What is done with chunks stands in `Index`; here is what needs the geometry: where a
slot's payload lies, and whether the accounts add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier._core.index import Index
from kvtier._core.slots import SlotTable
from kvtier.errors import InternalError
from kvtier.types import Geometry

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Usage(msgspec.Struct, frozen=True):
    """Slots of chunks by what they are used for; together they are the capacity."""

    capacity: int
    free: int
    writing: int
    ready: int
    lent: int
    orphans: int
    ready_bytes: int


class HostCache:
    """Slot table and index of one region.

    Parameters
    ----------
    records, table : writable buffers
        As `SlotTable` wants them; they stay exported as long as the cache lives.
    geometry : Geometry
        Of the region.
    policy : {"lru", "arc"}
    track_unsaved : bool
        Whether there are secondary tiers that new chunks have to reach.

    Attributes
    ----------
    slots : SlotTable
    index : Index
    """

    def __init__(
        self,
        records: Buffer,
        table: Buffer,
        geometry: Geometry,
        policy: str = "lru",
        track_unsaved: bool = False,
    ) -> None:
        self.geometry = geometry
        self.slots = SlotTable(records, table, geometry.num_slots)
        self.index = Index(
            self.slots,
            geometry.payload_bytes,
            policy,
            track_unsaved,
            geometry.widths,
            geometry.slab_slots,
        )

    def offsets(self, slots: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Start of each slot's payload, in bytes from the start of the region's payload area.

        Raises
        ------
        IndexError
            For a slot without memory behind it.
        """
        numbers = np.asarray(slots, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.index.available):
            raise IndexError(f"slots are 0 to {self.index.available - 1}, got {slots}")
        return numbers * self.geometry.slot_bytes

    def usage(self) -> Usage:
        """What the slots are used for, O(1).

        Raises
        ------
        InternalError
            If a slot is counted twice or not at all.
        """
        index = self.index
        usage = Usage(
            capacity=index.capacity,
            free=index.num_free,
            writing=index.num_writing,
            ready=index.num_ready,
            lent=index.num_lent,
            orphans=index.num_orphans,
            ready_bytes=index.ready_bytes,
        )
        used = usage.writing + usage.ready + usage.lent + usage.orphans
        if usage.free + used != usage.capacity:
            raise InternalError(f"{usage.free} free and {used} used of {usage.capacity} slots")
        return usage

    def assert_quiet(self) -> None:
        """Walk everything; for the end of a drain and for tests.

        Raises
        ------
        InternalError
            If something is in flight or pinned, or an invariant does not hold.
        """
        self.index.check()
        usage = self.usage()
        totals = self.slots.totals()
        left = {
            "writing": usage.writing,
            "lent": usage.lent,
            "orphans": usage.orphans,
            "owner_pins": totals["owner_pins"],
            "service_pins": totals["service_pins"],
        }
        if any(left.values()):
            raise InternalError(f"still in use: {left}")
