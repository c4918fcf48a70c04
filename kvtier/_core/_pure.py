# SPDX-License-Identifier: Apache-2.0
"""Shortest twins of `slots.pyx` and `index.pyx`: oracles of their tests, never used at run time.

Own plain lists and dictionaries; any thread. `PureSlots` has the words of the slots and is told
which slot the index chose. In `PureIndex` slots have no numbers: what is compared is which keys are
there, in which state, and which go in which order. Costs are linear on purpose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

FREE, WRITING, READY, ORPHAN = range(4)
OWNER, SERVICE = 0, 1


@dataclass
class PureSlot:
    """One record; `pins` has the fields of OWNER and SERVICE."""

    state: int = FREE
    generation: int = 0
    key: bytes = b""
    crc: int | None = None
    unsaved: bool = False
    pins: list[int] = field(default_factory=lambda: [0, 0])


class PureSlots:
    """`SlotTable` over `num_slots` slots, with the changes of words that `Index` makes in it."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [PureSlot() for _ in range(num_slots)]
        self.table: dict[bytes, int] = {}

    def find(self, key: bytes) -> int:
        return self.table.get(key, -1)

    def state(self, key: bytes) -> int:
        """Of a key: FREE where the table does not have it."""
        return self.slots[self.table[key]].state if key in self.table else FREE

    def write(self, slot: int, key: bytes, unsaved: bool) -> None:
        """FREE to WRITING; a slot that is lent has no key (b"") until it is READY."""
        one = self.slots[slot]
        assert one.state == FREE, "a slot in use is given away"
        one.state, one.key, one.crc, one.unsaved = WRITING, key, None, unsaved
        if key:
            self.table[key] = slot

    def ready(self, slot: int, key: bytes, crc: int | None, unsaved: bool) -> None:
        one = self.slots[slot]
        assert one.state == WRITING
        one.state, one.key, one.crc, one.unsaved = READY, key, crc, unsaved
        self.table[key] = slot

    def free(self, slot: int, state: int) -> None:
        """From `state`, and only without pins, to FREE in the next generation."""
        one = self.slots[slot]
        assert (one.state, one.pins) == (state, [0, 0]), "a slot in use is freed"
        one.state, one.generation = FREE, (one.generation + 1) % 2**32
        if self.table.get(one.key) == slot:
            del self.table[one.key]

    def clear(self) -> list[int]:
        """Slots in flight; a pinned chunk becomes an ORPHAN, a writer's slot stays WRITING."""
        self.table.clear()
        for slot, one in enumerate(self.slots):
            if one.state == READY and one.pins == [0, 0]:
                self.free(slot, READY)
            elif one.state == READY:
                one.state = ORPHAN
        return [slot for slot, one in enumerate(self.slots) if one.state != FREE]

    def pin(self, slot: int, generation: int, side: int, key: bytes) -> bool:
        one = self.slots[slot]
        fits = (one.state, one.generation, one.key) == (READY, generation, key)
        one.pins[side] += fits
        return fits

    def unpin(self, slot: int, generation: int, side: int) -> bool:
        one = self.slots[slot]
        held = one.generation == generation and one.pins[side] > 0
        one.pins[side] -= held
        return held

    def is_ready(self, slot: int, generation: int) -> bool:
        """Whether a note of the service (checksum, saved) still means this chunk."""
        one = self.slots[slot]
        return (one.state, one.generation) == (READY, generation)

    def clear_service_pins(self, start: int, stop: int) -> int:
        taken = sum(one.pins[SERVICE] for one in self.slots[start:stop])
        for one in self.slots[start:stop]:
            one.pins[SERVICE] = 0
        return taken


@dataclass
class Chunk:
    """What a key stands for."""

    state: int
    unsaved: bool
    fresh: bool = True
    owner: int = 0
    service: int = 0


class PureIndex:
    """`Index` with "lru" or "arc" over `capacity` slots."""

    def __init__(self, capacity: int, policy: str = "lru", track_unsaved: bool = False) -> None:
        self.capacity = capacity
        self.arc = policy == "arc"
        self.track_unsaved = track_unsaved
        self.lent = 0
        self.orphans: list[Chunk] = []
        self.forget()

    def forget(self) -> None:
        """Empty classes (T1 and T2, oldest first) and ghosts (B1 and B2, oldest first)."""
        self.classes: list[OrderedDict[bytes, Chunk]] = [OrderedDict(), OrderedDict()]
        self.ghosts: list[OrderedDict[bytes, None]] = [OrderedDict(), OrderedDict()]
        self.p = 0.0

    def get(self, key: bytes) -> Chunk | None:
        return self.classes[0].get(key) or self.classes[1].get(key)

    def lookup(self, key: bytes) -> int:
        chunk = self.get(key)
        return chunk.state if chunk else 0

    @property
    def num_free(self) -> int:
        used = len(self.classes[0]) + len(self.classes[1]) + self.lent + len(self.orphans)
        return self.capacity - used

    def missed(self, key: bytes) -> int:
        """Adapt p to an absent key: 0, or which ghost list it was in (Figure 4, cases II, III)."""
        b1, b2 = self.ghosts
        if key in b1:
            self.p = min(self.p + max(len(b2) / len(b1), 1), self.capacity)
            del b1[key]
            return 1
        if key in b2:
            self.p = max(self.p - max(len(b1) / len(b2), 1), 0)
            del b2[key]
            return 2
        return 0

    def victim(
        self, ghost: int | None, keep: set[bytes], saved_only: bool = False
    ) -> tuple[bytes, bool] | None:
        """Evict one chunk: its key, and whether it was unsaved. REPLACE(x, p) of the figure."""
        t1 = len(self.classes[0])
        first = 0
        if self.arc and not (t1 >= 1 and (t1 > self.p or (ghost == 2 and t1 == self.p))):
            first = 1
        for unsaved in (False,) if saved_only else (False, True):
            for which in (first, 1 - first):
                for key, chunk in self.classes[which].items():
                    if chunk.state != READY or chunk.owner or chunk.service or key in keep:
                        continue
                    if chunk.unsaved and not unsaved:
                        continue
                    if self.arc and not (ghost == 0 and which == 0 and t1 == self.capacity):
                        self.ghosts[which][key] = None
                    del self.classes[which][key]
                    if ghost is None:
                        self.trim()
                    return key, chunk.unsaved
        return None

    def trim(self) -> None:
        """|T1| + |B1| <= c, all four <= 2c (case IV), ghosts <= c."""
        (t1, t2), (b1, b2), c = self.classes, self.ghosts, self.capacity
        while b1 and len(t1) + len(b1) > c:
            b1.popitem(last=False)
        while b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * c:
            b2.popitem(last=False)
        while len(b1) + len(b2) > c:
            (b2 or b1).popitem(last=False)

    def insert(self, key: bytes, ghost: int, chunk: Chunk) -> None:
        self.classes[1 if ghost else 0][key] = chunk
        self.trim()

    def reserve(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes], list[bytes], bool]:
        """(keys that got a slot, evicted, evicted and unsaved, complete)."""
        taken: list[bytes] = []
        evicted: list[tuple[bytes, bool]] = []
        keep = {key for key in keys if self.get(key)}
        complete = True
        for key in keys:
            if self.get(key):
                continue
            before = self.p
            ghost = self.missed(key)
            if not self.num_free:
                victim = self.victim(ghost, keep)
                if victim is None:
                    self.p = before
                    if ghost:
                        self.ghosts[ghost - 1][key] = None
                    complete = False
                    break
                evicted.append(victim)
            self.insert(key, ghost, Chunk(WRITING, self.track_unsaved))
            taken.append(key)
        return taken, [k for k, _ in evicted], [k for k, unsaved in evicted if unsaved], complete

    def commit(self, keys: Sequence[bytes]) -> list[bytes]:
        done = []
        for key in keys:
            chunk = self.get(key)
            if chunk and chunk.state == WRITING:
                chunk.state = READY
                done.append(key)
        return done

    def remove(self, keys: Sequence[bytes], state: int) -> list[bytes]:
        """`abort` (WRITING) and `drop` (READY)."""
        done = []
        for key in keys:
            chunk = self.get(key)
            if chunk and chunk.state == state and not chunk.owner and not chunk.service:
                for one in self.classes:
                    one.pop(key, None)
                done.append(key)
        return done

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(dict.fromkeys(keys)):
            for which, one in enumerate(self.classes):
                chunk = one.pop(key, None)
                if chunk:
                    up = 1 if self.arc and not chunk.fresh else which
                    chunk.fresh = False
                    self.classes[up][key] = chunk
                    break

    def adopt(self, key: bytes, saved: bool) -> bool:
        self.lent -= 1
        if self.get(key):
            return False
        self.insert(key, self.missed(key), Chunk(READY, not saved))
        return True

    def keep_free(self, n: int, limit: int) -> list[bytes]:
        evicted: list[bytes] = []
        while self.num_free < n and len(evicted) < limit:
            victim = self.victim(None, set(), saved_only=True)
            if victim is None:
                break
            evicted.append(victim[0])
        return evicted

    def clear(self) -> list[bytes]:
        """READY keys; what is in flight (lent slots stay in `lent`) becomes an orphan."""
        chunks = {**self.classes[0], **self.classes[1]}
        for chunk in chunks.values():
            if chunk.state == WRITING or chunk.owner or chunk.service:
                self.orphans.append(chunk)
        self.forget()
        return [key for key, chunk in chunks.items() if chunk.state == READY]

    def keys(self) -> list[bytes]:
        """READY keys, the next victim first, if p stands still."""
        t1, t2 = ([k for k, c in one.items() if c.state == READY] for one in self.classes)
        ahead = 0
        while ahead < len(t1) and (not t2 or len(t1) - ahead > self.p):
            ahead += 1
        return t1[:ahead] + t2 + t1[ahead:]
