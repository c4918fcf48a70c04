# SPDX-License-Identifier: Apache-2.0
"""Pins the slots of the region for the accelerator, piece by piece.

Owns the registrations between ``open`` and ``close``; the thread that makes the worker calls both.
At start and not beside the engine: a registration while another thread captures a CUDA graph spoils
that capture, and vLLM captures its graphs right after its workers are made. Pieces end between two
slabs, so that no copy crosses two registrations, and they are pinned from slot 0 on: what could not
be pinned is the end.
"""

from __future__ import annotations

import itertools
import logging
import time

import numpy as np

from kvtier.device.base import Device, Uint64Array
from kvtier.host.region import Region

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
STALL_SECONDS = 10.0
POLL_SECONDS = 0.01


class PinnedSlots:
    """The slots of `region` that copies may use as they are.

    Parameters
    ----------
    device : Device
    region : Region
    piece_bytes : int
        Registered at once, rounded down to slabs; one slab at least.
    stall_seconds : float
        How long to wait for the next piece's memory to be reserved, without progress.
    """

    def __init__(
        self,
        device: Device,
        region: Region,
        piece_bytes: int = PIECE_BYTES,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._device = device
        self._region = region
        geometry = region.geometry
        self._piece_slots = max(1, piece_bytes // geometry.slab_bytes) * geometry.slab_slots
        self._stall_seconds = stall_seconds
        self._pieces: list[int] = []
        self._end = 0

    def open(self) -> None:
        """Pin what there is memory for; one warning for all that could not be pinned."""
        geometry = self._region.geometry
        base = self._region.base_address
        for first in range(0, geometry.num_slots, self._piece_slots):
            count = min(self._piece_slots, geometry.num_slots - first)
            address = base + first * geometry.slot_bytes
            try:
                self._await_memory(first + count)
                self._device.register(address, count * geometry.slot_bytes)
            except RuntimeError as exc:
                logger.warning(
                    "%s: slots from %d of %d on are not pinned, their copies go through a buffer: "
                    "%s",
                    self._region.path,
                    first,
                    geometry.num_slots,
                    str(exc),  # a log that keeps the error would keep the region
                )
                return
            self._pieces.append(address)
            self._end = address + count * geometry.slot_bytes

    def _await_memory(self, slots: int) -> None:
        """Pinning would take the memory itself, past the limits that reserving it respects."""
        known = self._region.available_slots
        deadline = time.monotonic() + self._stall_seconds
        while known < slots:
            time.sleep(POLL_SECONDS)
            available = self._region.available_slots
            if available > known:
                known = available
                deadline = time.monotonic() + self._stall_seconds
            elif time.monotonic() > deadline:
                raise RuntimeError(f"{known} slots have memory")

    def covers(self, addresses: Uint64Array) -> bool:
        """Whether all canonical blocks at `addresses` are pinned."""
        return len(addresses) == 0 or int(addresses.max()) < self._end

    def spans(self, addresses: Uint64Array, block_bytes: int) -> list[tuple[int, int]]:
        """Canonical blocks that follow each other in one piece, as (first index, number)."""
        if not len(addresses):
            return []
        piece_bytes = self._piece_slots * self._region.geometry.slot_bytes
        pieces = (addresses - np.uint64(self._region.base_address)) // np.uint64(piece_bytes)
        follows = addresses[1:] == addresses[:-1] + np.uint64(block_bytes)
        breaks = np.flatnonzero(~(follows & (pieces[1:] == pieces[:-1]))) + 1
        bounds = [0, *breaks.tolist(), len(addresses)]
        return [(first, end - first) for first, end in itertools.pairwise(bounds)]

    def close(self) -> None:
        """Unpin, the last piece first. Idempotent. No copy may be on its way."""
        self._end = 0
        refused = None
        while self._pieces:
            try:
                self._device.unregister(self._pieces.pop())
            except RuntimeError as exc:  # the process is about to end, or the context has died
                refused = str(exc)
        if refused is not None:
            logger.warning("%s: pinned memory was not given back: %s", self._region.path, refused)
