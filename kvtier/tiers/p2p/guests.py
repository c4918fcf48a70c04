# SPDX-License-Identifier: Apache-2.0
"""Chunks of other instances in this one's host memory: what peers have pushed here.

Runs on the service's loop. Owns the slots that the owner has lent for it, and a least recently used
order of the chunks in them. Invariants: a slot is free, being filled, or holds one chunk; one that
is read or filled does not go back before that has ended; the owner's own chunks never stand here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from kvtier.tiers.base import HostMemory, Slot
from kvtier.types import Presence


class Guests:
    """A cache of other instances' chunks.

    Parameters
    ----------
    host : HostMemory
    on_removed : callable
        Takes a chunk that has gone.
    """

    def __init__(self, host: HostMemory, on_removed: Callable[[Slot], None]) -> None:
        self._host = host
        self._on_removed = on_removed
        self._free: deque[tuple[int, int]] = deque()
        self._chunks: OrderedDict[bytes, Slot] = OrderedDict()
        self._filling: dict[bytes, Slot] = {}
        self._readers: dict[int, int] = {}
        self._leaving: set[int] = set()  # to go back when nobody reads them any more
        self._wanted = 0  # slots to go back as soon as there are any

    @property
    def room(self) -> int:
        """Chunks that could come: those that have not been used for longest would go for them."""
        return 0 if self._wanted else len(self._free) + len(self._chunks) - len(self._readers)

    @property
    def chunks(self) -> int:
        """That are here."""
        return len(self._chunks)

    @property
    def slots(self) -> int:
        """That were lent and have not gone back."""
        return len(self._free) + len(self._chunks) + len(self._filling) + len(self._leaving)

    def add(self, slots: Sequence[tuple[int, int]]) -> None:
        """The owner lends these."""
        self._free.extend(slots)
        self._give_back()

    def reclaim(self, count: int) -> None:
        """The owner wants so many back: empty ones first, then the chunks not used for longest."""
        self._wanted += count
        self._give_back()

    def _give_back(self) -> None:
        back = []
        while self._wanted and (self._free or self._evict()):
            back.append(self._free.pop()[0])
            self._wanted -= 1
        if back:
            self._host.give_back(back)

    def _evict(self) -> bool:
        """Make the slot of the oldest chunk that nobody reads free, if there is one."""
        for key, slot in self._chunks.items():
            if slot.slot not in self._readers:
                del self._chunks[key]
                self._free.append((slot.slot, slot.generation))
                self._on_removed(slot)
                return True
        return False

    def reserve(self, keys: Sequence[bytes]) -> list[Slot]:
        """Slots to fill for those of the keys that are not here, as far as there is room; each ends
        with ``commit`` or ``abort``."""
        items = []
        for key in keys:
            if self._wanted or key in self._chunks or key in self._filling:
                continue
            if not self._free and not self._evict():
                break
            item = self._host.slot(key, *self._free.popleft())
            self._filling[key] = item
            items.append(item)
        return items

    def commit(self, items: Sequence[Slot]) -> None:
        """These have their chunks."""
        for item in items:
            del self._filling[item.key]
            self._chunks[item.key] = item
        self._give_back()

    def abort(self, items: Sequence[Slot]) -> None:
        """These have not, and nothing touches them any more."""
        for item in items:
            del self._filling[item.key]
            self._free.append((item.slot, item.generation))
        self._give_back()

    def presence(self, keys: Sequence[bytes], states: bytes) -> bytes:
        """A ``Presence`` for each key: `states` of host memory, and PRESENT for chunks here."""
        chunks = self._chunks
        if not chunks or not states.count(Presence.ABSENT):
            return states
        return bytes([state or key in chunks for key, state in zip(keys, states, strict=True)])

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def is_coming(self, key: bytes) -> bool:
        """Whether the chunk is just being filled in."""
        return key in self._filling

    def pin(self, key: bytes) -> Slot | None:
        """The chunk, which stays until ``unpin``; it has been used now."""
        slot = self._chunks.get(key)
        if slot is not None:
            self._chunks.move_to_end(key)
            self._readers[slot.slot] = self._readers.get(slot.slot, 0) + 1
        return slot

    def unpin(self, items: Sequence[Slot]) -> None:
        """Nobody reads these any more."""
        for item in items:
            readers = self._readers.pop(item.slot) - 1
            if readers:
                self._readers[item.slot] = readers
            elif item.slot in self._leaving:
                self._leaving.remove(item.slot)
                self._host.give_back([item.slot])
        self._give_back()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Chunks that turned out to be damaged."""
        for key in keys:
            slot = self._chunks.get(key)
            if slot is not None and slot.slot not in self._readers:
                del self._chunks[key]
                self._free.append((slot.slot, slot.generation))
                self._on_removed(slot)
        self._give_back()

    def close(self) -> None:
        """Everything goes back; what is still read, when that ends. Nothing is being filled."""
        back = [slot for slot, _ in self._free]
        for slot in self._chunks.values():
            if slot.slot in self._readers:
                self._leaving.add(slot.slot)
            else:
                back.append(slot.slot)
        self._free.clear()
        self._chunks.clear()
        self._wanted = 0
        if back:
            self._host.give_back(back)
