# SPDX-License-Identifier: Apache-2.0
"""A small in-memory engine with kvtier's scheduler-facing interface, for tests of the generator.

Host memory is an LRU of `slots`; an optional second dictionary stands for a tier that holds
everything: a lookup there answers RETRY once, then HIT_PENDING once, then the chunk is in host
memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from kvtier.types import Geometry, Lookup, RequestContext

FREE, WRITING, READY = 0, 1, 2


class FakeRegion:
    def __init__(self, geometry: Geometry) -> None:
        self.memory = np.zeros(geometry.num_slots * geometry.slot_bytes, dtype=np.uint8)
        self.slot_bytes = geometry.slot_bytes

    def slot_view(self, slot: int, length: int) -> memoryview:
        start = slot * self.slot_bytes
        return memoryview(self.memory)[start : start + length]

    def slot_address(self, slot: int) -> int:
        return self.memory.ctypes.data + slot * self.slot_bytes


class FakeEngine:
    def __init__(self, geometry: Geometry, tier: bool = False) -> None:
        self.region = FakeRegion(geometry)
        self.length = geometry.payload_bytes[0]
        self.free = list(range(geometry.num_slots))
        self.entries: OrderedDict[bytes, list[int]] = OrderedDict()  # key -> [slot, state, pins]
        self.tier: dict[bytes, bytes] | None = {} if tier else None
        self.asked: dict[bytes, int] = {}
        self.live: set[str] = set()
        self.counts = SimpleNamespace(
            host_hits=0,
            tier_hits={},
            host_misses=0,
            loaded_bytes={},
            stored_bytes={},
            evicted=0,
            evicted_unsaved=0,
            failures={},
        )
        self.closed = False
        self.held: set[bytes] = set()
        self.promoted: set[bytes] = set()

    def on_new_request(self, ctx: RequestContext) -> None:
        assert ctx.request_id not in self.live
        self.live.add(ctx.request_id)

    def lookup_batch(self, keys: Sequence[bytes], ctx: RequestContext) -> tuple[int, Lookup]:
        assert ctx.request_id in self.live
        ready = 0
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and entry[1] == READY:
                ready += 1
                self.held.add(key)
                continue
            if self.tier is not None and key in self.tier:
                self.asked.setdefault(key, 0)
                if self._slot() is None:
                    return ready, Lookup.MISS
                return ready, Lookup.RETRY if self.asked[key] == 0 else Lookup.HIT_PENDING
            return ready, Lookup.MISS
        return ready, Lookup.MISS

    def _slot(self, evict: bool = False) -> int | None:
        if self.free:
            return self.free.pop() if evict else self.free[-1]
        for key, (slot, state, pins) in self.entries.items():
            if state == READY and not pins and key not in self.held:
                if evict:
                    del self.entries[key]
                    self.counts.evicted += 1
                return slot
        return None

    def poll(self) -> None:
        for key, count in list(self.asked.items()):
            self.asked[key] = count + 1
            if count >= 1:
                del self.asked[key]
                slot = self._slot(evict=True)
                if slot is not None and key not in self.entries:
                    assert self.tier is not None
                    self.region.slot_view(slot, self.length)[:] = self.tier[key]
                    self.entries[key] = [slot, READY, 0]
                    self.held.add(key)
                    self.promoted.add(key)
                    promoted = self.counts.loaded_bytes
                    promoted["fs"] = promoted.get("fs", 0) + self.length
        self.held_age()

    def held_age(self) -> None:
        if len(self.held) > 64:
            self.held.clear()

    def reserve(self, keys: Sequence[bytes], ctx: RequestContext) -> SimpleNamespace:
        assert ctx.request_id in self.live
        taken, slots = [], []
        for key in keys:
            if key in self.entries:
                continue
            slot = self._slot(evict=True)
            if slot is None:
                break
            self.entries[key] = [slot, WRITING, 0]
            taken.append(key)
            slots.append(slot)
        return SimpleNamespace(keys=taken, slots=np.array(slots, dtype=np.int64))

    def commit(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        assert ctx.request_id in self.live
        for key in keys:
            entry = self.entries[key]
            assert entry[1] == WRITING
            entry[1] = READY
            if self.tier is not None:
                self.tier[key] = bytes(self.region.slot_view(entry[0], self.length))

    def pin(self, keys: Sequence[bytes], ctx: RequestContext) -> tuple[np.ndarray, np.ndarray]:
        for key in keys:
            assert self.entries[key][1] == READY
            self.entries[key][2] += 1
        slots = np.array([self.entries[key][0] for key in keys], dtype=np.int64)
        return slots, np.zeros(len(keys), dtype=np.uint32)

    def unpin(self, slots: np.ndarray, generations: np.ndarray, ctx: RequestContext) -> None:
        by_slot = {entry[0]: entry for entry in self.entries.values()}
        for slot in slots.tolist():
            by_slot[slot][2] -= 1
            assert by_slot[slot][2] >= 0

    def finish_request(self, ctx: RequestContext) -> None:
        self.live.remove(ctx.request_id)
        for key in reversed(list(ctx.positions)):
            if key in self.entries:
                self.entries.move_to_end(key)
            self.held.discard(key)

    def end_step(self) -> None:
        return None

    def source(self, key: bytes, ctx: RequestContext) -> str:
        return "fs" if key in self.promoted else "host"

    def on_message(self, wake: object) -> None:
        return None

    def stats(self) -> SimpleNamespace:
        return self.counts

    def close(self, deadline_seconds: float) -> None:
        assert not self.live, f"requests never finished: {self.live}"
        assert not any(entry[2] for entry in self.entries.values()), "pins left"
        assert not any(entry[1] == WRITING for entry in self.entries.values()), "writes left"
        self.closed = True
