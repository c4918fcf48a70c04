# SPDX-License-Identifier: Apache-2.0
"""Slot records and key table of a region: what owner, workers and service share."""

from collections.abc import Sequence

from typing_extensions import Buffer

RECORD_BYTES: int
"""64: one cache line a slot."""

FREE: int
WRITING: int
READY: int
ORPHAN: int
"""Forgotten by ``Index.clear`` while pinned: nobody can pin it again, and it is not FREE yet."""
MAX_SLOTS: int

def table_bytes(num_slots: int) -> int:
    """Bytes of the key table for `num_slots` slots (buckets of one cache line)."""

class SlotTable:
    """View of the slot records and the key table inside a mapped region.

    Any process may read and pin through it; only the owner writes keys (through ``Index``).
    Methods raise IndexError for a slot that is out of range.
    Every change of a slot's word is a compare-and-swap. Readers of the key table are lock-free:
    they may miss a key that is being moved, never find a wrong one.

    Parameters
    ----------
    records : writable buffer of ``num_slots * RECORD_BYTES`` bytes, aligned to 64
    table : writable buffer of ``table_bytes(num_slots)`` bytes, aligned to 64
    num_slots : int

    Raises
    ------
    ValueError
        If a buffer is too small or not aligned.
    """

    num_slots: int
    def __init__(self, records: Buffer, table: Buffer, num_slots: int) -> None: ...
    def find(self, key: bytes) -> int:
        """Slot of `key` in state READY or WRITING, or -1."""
    def states(self, keys: Sequence[bytes]) -> bytes:
        """State of each key as one byte: READY, WRITING, or FREE where the table has none."""
    def state(self, slot: int) -> int: ...
    def generation(self, slot: int) -> int: ...
    def owner_pins(self, slot: int) -> int: ...
    def service_pins(self, slot: int) -> int: ...
    def key(self, slot: int) -> bytes: ...
    def length(self, slot: int) -> int:
        """Payload bytes of the chunk in `slot`."""
    def crc(self, slot: int) -> int | None:
        """CRC-32C of the payload, or None while nobody has taken it."""
    def unsaved(self, slot: int) -> bool:
        """Whether no secondary tier holds the chunk yet."""

    def pin_service(self, slot: int, generation: int, key: bytes) -> bool:
        """Pin `slot` for the service if it is READY with `generation` and holds `key`."""
    def unpin_service(self, slot: int, generation: int) -> None:
        """Give one service pin back. InternalError if there is none."""
    def find_and_pin_service(self, key: bytes) -> tuple[int, int] | None:
        """(slot, generation), pinned for the service, if `key` is READY; else None."""
    def set_crc(self, slot: int, generation: int, crc: int) -> bool: ...
    def mark_saved(self, slot: int, generation: int) -> bool:
        """Note that a secondary tier holds the chunk; False if the slot has moved on."""
    def clear_service_pins(self, start: int, stop: int) -> int:
        """Take back all service pins in [start, stop). Only after the service is dead."""
    def totals(self) -> dict[str, int]:
        """Linear walk for tests and diagnosis: slots by state, owner and service pins."""
