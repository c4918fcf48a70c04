# SPDX-License-Identifier: Apache-2.0
"""The region as the tier service sees it: slots, pins for its own work, checksums.

Runs on the service's loop. Invariant: a pin that was taken here is given back here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier._core.layout import crc32c_address
from kvtier._core.slots import READY, WRITING, SlotTable
from kvtier.host.region import Region
from kvtier.tiers.base import Slot
from kvtier.types import Geometry, Presence, key_group

PRESENCE = bytes.maketrans(bytes((READY, WRITING)), bytes((Presence.PRESENT, Presence.PENDING)))
"""Of states; FREE is ABSENT."""

INLINE_BYTES = 1 << 20
"""Checksums of so much are made on the loop: to a thread and back takes longer."""


class Memory:
    """The region as the service sees it: makes ``Slot`` objects, takes and checks CRCs.

    Owns views of the region's mapping and the checksum threads until ``close``.

    Parameters
    ----------
    region : Region
    """

    def __init__(self, region: Region) -> None:
        self.geometry: Geometry = region.geometry
        self.slots = SlotTable(region.records, region.table, self.geometry.num_slots)
        self.payload = region.payload
        self.address = region.base_address
        self.length_bytes = self.geometry.num_slots * self.geometry.slot_bytes
        self._payload_bytes = self.geometry.payload_bytes
        self.give_back: Callable[[Sequence[int]], None] = lambda slots: None
        """Takes slots that were lent for chunks of others; the service sets it."""
        self.pins = 0
        """Held in the slots' words by the service."""
        # Checksums run beside the loop, with the GIL released; two threads outrun any tier.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="kvtier-crc")

    def length(self, key: bytes) -> int:
        """Payload bytes of the chunk that `key` names."""
        return self._payload_bytes[key_group(key)]

    def slot(self, key: bytes, slot: int, generation: int, crc: int | None = None) -> Slot:
        """Slot `slot` as tiers see it."""
        start = slot * self.geometry.slot_bytes
        length = self.length(key)
        return Slot(
            key,
            slot,
            generation,
            length,
            self.payload[start : start + length],
            self.address + start,
            crc,
        )

    def presence(self, keys: Sequence[bytes]) -> bytes:
        """A ``Presence`` for each key: PRESENT where it is READY, PENDING while it is written."""
        return self.slots.states(keys).translate(PRESENCE)

    def pin(self, key: bytes) -> Slot | None:
        """The chunk, pinned, if it is READY."""
        found = self.slots.find_and_pin_service(key)
        if found is None:
            return None
        self.pins += 1
        return self.slot(key, *found)

    def unpin(self, items: Sequence[Slot]) -> None:
        """Give one pin of each back."""
        for item in items:
            self.slots.unpin_service(item.slot, item.generation)
            self.pins -= 1

    async def take_crcs(self, items: Sequence[Slot]) -> None:
        """Give each item its CRC, from the slot record or from the bytes."""
        missing = []
        for item in items:
            item.crc = self.slots.crc(item.slot)
            if item.crc is None:
                missing.append(item)
        if not missing:
            return
        for item, crc in zip(missing, await self._crcs(missing), strict=True):
            item.crc = crc
            self.slots.set_crc(item.slot, item.generation, crc)

    async def verify(self, items: Sequence[Slot]) -> list[bool]:
        """Whether the bytes of each loaded item are what its tier says they are."""
        unverified = [item for item in items if not item.verified]
        if unverified:
            for item, crc in zip(unverified, await self._crcs(unverified), strict=True):
                item.verified = crc == item.crc
        return [item.verified for item in items]

    async def _crcs(self, items: Sequence[Slot]) -> list[int]:
        addresses = np.array([item.address for item in items], dtype=np.uint64)
        lengths = np.array([item.length for item in items], dtype=np.int64)
        if lengths.sum() <= INLINE_BYTES:
            crcs = crc32c_address(addresses, lengths)
        else:
            loop = asyncio.get_running_loop()
            crcs = await loop.run_in_executor(self._pool, crc32c_address, addresses, lengths)
        return [int(crc) for crc in crcs]

    def close(self) -> None:
        """End the checksum threads."""
        self._pool.shutdown(wait=True)
