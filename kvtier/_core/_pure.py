# SPDX-License-Identifier: Apache-2.0
"""Shortest twins of `slots.pyx` and `index.pyx`: oracles of their tests, never used at run time.

Own plain lists and dictionaries; any thread. `PureSlots` has the words of the slots and is told
which slot the index chose. In `PureIndex` slots have no numbers: what is compared is which keys are
there, in which state, and which go in which order. `PureSizes`, several of them that share slabs,
is told the numbers. Costs are linear on purpose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

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

    def states(self, keys: Sequence[bytes]) -> bytes:
        return bytes(map(self.state, keys))

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
    rank: int = 0
    slot: int = -1


class PureIndex:
    """`Index` with "lru" or "arc" over `capacity` slots; `clock` ranks uses, others' too."""

    def __init__(
        self,
        capacity: int,
        policy: str = "lru",
        track_unsaved: bool = False,
        clock: Iterator[int] | None = None,
    ) -> None:
        self.clock = count(1) if clock is None else clock
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
                    if not self.can_go(key, keep, unsaved):
                        continue
                    if self.arc and not (ghost == 0 and which == 0 and t1 == self.capacity):
                        self.ghosts[which][key] = None
                    del self.classes[which][key]
                    if ghost is None:
                        self.trim()
                    return key, chunk.unsaved
        return None

    def can_go(self, key: bytes, keep: set[bytes], unsaved: bool) -> bool:
        chunk = self.get(key)
        assert chunk is not None
        used = chunk.state != READY or chunk.owner or chunk.service or key in keep
        return not used and (unsaved or not chunk.unsaved)

    def oldest(self, keep: set[bytes]) -> tuple[float, bool]:
        """Rank of the oldest chunk that can go, a saved one if there is any; and if it is none."""
        chunks = {**self.classes[0], **self.classes[1]}
        for unsaved in (False, True):
            ranks = [c.rank for key, c in chunks.items() if self.can_go(key, keep, unsaved)]
            if ranks:
                return min(ranks), unsaved
        return inf, True

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
        chunk.rank = next(self.clock)
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
                    chunk.rank = next(self.clock)
                    self.classes[up][key] = chunk
                    break

    def adopt(self, key: bytes, saved: bool) -> bool:
        self.lent -= 1
        if self.get(key):
            return False
        self.insert(key, self.missed(key), Chunk(READY, not saved))
        return True

    def keep_free(self, n: int, limit: int, saved_only: bool) -> tuple[list[bytes], list[bytes]]:
        """Evicted keys, and those of them that were unsaved."""
        gone: list[tuple[bytes, bool]] = []
        while self.num_free < n and len(gone) < limit:
            victim = self.victim(None, set(), saved_only)
            if victim is None:
                break
            gone.append(victim)
        return [key for key, _ in gone], [key for key, unsaved in gone if unsaved]

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


OLDER = 4
PAUSE = 16


class PureSizes:
    """`Index` with several size classes: a `PureIndex` for each, over slabs that change hands.

    `widths` are those of the groups; `slab_slots` slots make a slab. Everything that takes slots is
    told which ones (`slots` of keys, or of a loan) and checks that they may be.
    """

    def __init__(
        self,
        num_slabs: int,
        slab_slots: int,
        widths: Sequence[int],
        policy: str = "lru",
        track_unsaved: bool = False,
    ) -> None:
        self.num_slabs = num_slabs
        self.slab_slots = slab_slots
        self.track_unsaved = track_unsaved
        self.uses = 0
        self.widths = sorted(set(widths))
        self.size_of = [self.widths.index(width) for width in widths]
        self.sizes = [PureIndex(0, policy, track_unsaved, self.ranks()) for _ in self.widths]
        self.room = [slab_slots // width for width in self.widths]
        self.pause = [0 for _ in self.widths]
        self.slabs: dict[int, int] = {}
        """Size class of each slab that is in use."""
        self.taken: dict[int, bytes] = {}
        """Key of each slot in use; b"" for one without (any more)."""

    def ranks(self) -> Iterator[int]:
        """The clock of all classes."""
        while True:
            self.uses += 1
            yield self.uses

    def of(self, key: bytes) -> int:
        return self.size_of[int.from_bytes(key[-4:], "big")]

    def get(self, key: bytes) -> Chunk | None:
        return self.sizes[self.of(key)].get(key)

    def lookup(self, key: bytes) -> int:
        return self.sizes[self.of(key)].lookup(key)

    def free_slabs(self) -> int:
        return self.num_slabs - sum(
            x.capacity // r for x, r in zip(self.sizes, self.room, strict=True)
        )

    def free_for(self, size: int) -> int:
        return self.sizes[size].num_free + self.free_slabs() * self.room[size]

    def take(self, size: int, slot: int, key: bytes) -> None:
        """A slot is in use from now on; its slab is one of the class, or of nobody so far."""
        slab, inside = divmod(slot, self.slab_slots)
        width = self.widths[size]
        assert slab < self.num_slabs
        assert self.slabs.setdefault(slab, size) == size
        assert inside % width == 0
        assert inside + width <= self.slab_slots
        assert slot not in self.taken, "a slot in use is given away"
        self.taken[slot] = key

    def free(self, slot: int) -> None:
        """A slot is not in use any more; a slab without any is nobody's."""
        del self.taken[slot]
        slab = slot // self.slab_slots
        if all(other // self.slab_slots != slab for other in self.taken):
            size = self.slabs.pop(slab)
            x = self.sizes[size]
            x.capacity -= self.room[size]
            x.p = min(x.p, x.capacity)
            x.trim()

    def slab_can_go(self, slab: int, keep: set[bytes], unsaved: bool) -> bool:
        x = self.sizes[self.slabs[slab]]
        keys = [key for slot, key in self.taken.items() if slot // self.slab_slots == slab]
        return all(key and x.get(key) and x.can_go(key, keep, unsaved) for key in keys)

    def evict_slab(self, slab: int) -> list[tuple[bytes, bool]]:
        x = self.sizes[self.slabs[slab]]
        gone = []
        for slot in sorted(s for s in self.taken if s // self.slab_slots == slab):
            key = self.taken[slot]
            which = 0 if key in x.classes[0] else 1
            gone.append((key, x.classes[which].pop(key).unsaved))
            if x.arc:
                x.ghosts[which][key] = None
                x.trim()
            self.free(slot)
        return gone

    def take_slab(self, size: int, keep: set[bytes], saved_only: bool) -> list[tuple[bytes, bool]]:
        """What goes so that a slab of another class becomes nobody's; nothing if none does."""
        mine, mine_unsaved = self.sizes[size].oldest(keep)
        limit = inf
        if mine < inf:
            if self.pause[size]:
                self.pause[size] -= 1
                return []
            age = self.uses - int(mine)
            limit = max(self.uses - age - age // OLDER, 0)
        others = [x for i, x in enumerate(self.sizes) if i != size and x.oldest(keep)[0] < limit]
        others.sort(key=lambda x: x.oldest(keep)[0])
        tried = False
        for unsaved in (False, True) if mine_unsaved and not saved_only else (False,):
            for x in others:
                chunks = {**x.classes[0], **x.classes[1]}
                old = [
                    (chunk.rank, chunk.slot // self.slab_slots)
                    for key, chunk in chunks.items()
                    if chunk.rank < limit and x.can_go(key, keep, unsaved)
                ]
                for _, slab in sorted(old):
                    tried = True
                    if self.slab_can_go(slab, keep, unsaved):
                        return self.evict_slab(slab)
        if tried and mine < inf:
            self.pause[size] = PAUSE
        return []

    def enlarge(self, size: int, keep: set[bytes], gone: list[tuple[bytes, bool]]) -> bool:
        if not self.free_slabs():
            gone += self.take_slab(size, keep, saved_only=False)
        if self.free_slabs():
            self.sizes[size].capacity += self.room[size]
            return True
        return False

    def reserve(
        self, keys: Sequence[bytes], slots: Mapping[bytes, int]
    ) -> tuple[list[bytes], list[bytes], list[bytes], bool]:
        """(keys that got a slot, evicted, evicted and unsaved, complete)."""
        taken: list[bytes] = []
        gone: list[tuple[bytes, bool]] = []
        keep = {key for key in keys if self.get(key)}
        complete = True
        for key in keys:
            size = self.of(key)
            x = self.sizes[size]
            if x.get(key):
                continue
            if not x.num_free:
                self.enlarge(size, keep, gone)
            before = x.p
            ghost = x.missed(key)
            if not x.num_free:
                victim = self.victim(size, ghost, keep)
                if victim is None:
                    x.p = before
                    if ghost:
                        x.ghosts[ghost - 1][key] = None
                    if not self.enlarge(size, keep, gone):
                        complete = False
                        break
                    ghost = x.missed(key)
                else:
                    gone.append(victim)
            chunk = Chunk(WRITING, self.track_unsaved, slot=slots[key])
            self.take(size, chunk.slot, key)
            x.insert(key, ghost, chunk)
            taken.append(key)
        return taken, [k for k, _ in gone], [k for k, unsaved in gone if unsaved], complete

    def victim(
        self, size: int, ghost: int | None, keep: set[bytes], saved_only: bool = False
    ) -> tuple[bytes, bool] | None:
        """Evict one chunk of the class; its slot is for the next one."""
        victim = self.sizes[size].victim(ghost, keep, saved_only)
        if victim is not None:
            self.taken = {slot: key for slot, key in self.taken.items() if key != victim[0]}
        return victim

    def commit(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if self.sizes[self.of(key)].commit([key])]

    def remove(self, keys: Sequence[bytes], state: int) -> list[bytes]:
        """`abort` (WRITING) and `drop` (READY)."""
        done = []
        for key in reversed(keys):  # as the index does: ARC sees each capacity in turn
            chunk = self.get(key)
            if self.sizes[self.of(key)].remove([key], state):
                assert chunk is not None
                self.free(chunk.slot)
                done.append(key)
        return done[::-1]

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.sizes[self.of(key)].touch([key])

    def lend(self, group: int, slots: Sequence[int]) -> None:
        size = self.size_of[group]
        for slot in slots:
            if not self.sizes[size].num_free:
                self.sizes[size].capacity += self.room[size]
            self.take(size, slot, b"")
            self.sizes[size].lent += 1

    def adopt(self, key: bytes, slot: int, saved: bool) -> bool:
        x = self.sizes[self.of(key)]
        if not x.adopt(key, saved):
            self.free(slot)
            return False
        chunk = x.get(key)
        assert chunk is not None
        chunk.slot = slot
        self.taken[slot] = key
        return True

    def give_back(self, slot: int) -> None:
        self.sizes[self.slabs[slot // self.slab_slots]].lent -= 1
        self.free(slot)

    def keep_free(
        self, n: int, limit: int, group: int, saved_only: bool
    ) -> tuple[list[bytes], list[bytes]]:
        """Evicted keys, and those of them that were unsaved."""
        size = self.size_of[group]
        gone: list[tuple[bytes, bool]] = []
        most = self.free_for(size) + limit
        while self.free_for(size) < min(n, most):
            before = self.free_slabs()
            gone += self.take_slab(size, set(), saved_only)
            if self.free_slabs() > before:
                continue
            slots = {key: slot for slot, key in self.taken.items()}
            victim = self.sizes[size].victim(None, set(), saved_only)
            if victim is None:
                break
            self.free(slots[victim[0]])
            gone.append(victim)
        return [key for key, _ in gone], [key for key, unsaved in gone if unsaved]

    def clear(self) -> list[bytes]:
        """READY keys; what is in flight keeps its slot, without a key."""
        lent = {slot for slot, key in self.taken.items() if not key}
        ready = [key for x in self.sizes for key in x.clear()]
        flying = lent | {chunk.slot for x in self.sizes for chunk in x.orphans}
        for slot in list(self.taken):
            if slot in flying:
                self.taken[slot] = b""
            else:
                self.free(slot)
        return ready

    def end_orphans(self, state: int) -> int:
        """Orphans that were in `state` and have no pin any more are over: how many."""
        done = 0
        for x in self.sizes:
            over = [o for o in x.orphans if o.state == state and not o.owner and not o.service]
            x.orphans = [o for o in x.orphans if o not in over]
            for orphan in over:
                self.free(orphan.slot)
            done += len(over)
        return done
