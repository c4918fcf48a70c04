# SPDX-License-Identifier: Apache-2.0
"""TEMPORARY: smallest things with the interfaces of Region, SlotTable, Index and CopyPlan.

Goes as soon as the real ones are merged.
"""

import ctypes
import json
import mmap
import os

import msgspec
import numpy as np

from kvtier.types import Geometry, key_group


class Region:
    HEADER = 65536

    @classmethod
    def create(cls, name, geometry, namespace, ranks, directory="/dev/shm", timeout_seconds=30.0):
        self = cls()
        self.path = os.path.join(directory, name)
        size = cls.HEADER + geometry.num_slots * geometry.slot_bytes
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(fd, size)
        self.map = mmap.mmap(fd, size)
        os.close(fd)
        self.geometry = geometry
        self.namespace = dict(namespace)
        head = json.dumps(
            {"g": msgspec.json.encode(geometry).decode(), "n": self.namespace, "r": ranks}
        ).encode()
        self.map[4096 : 4096 + len(head) + 1] = head + b"\0"
        self.ranks = ranks
        self._open()
        return self

    @classmethod
    def attach(cls, name, directory="/dev/shm", timeout_seconds=30.0):
        self = cls()
        self.path = os.path.join(directory, name)
        fd = os.open(self.path, os.O_RDWR)
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        raw = self.map[4096 : cls.HEADER]
        head = json.loads(raw[: raw.index(b"\0")])
        self.geometry = msgspec.json.decode(head["g"].encode(), type=Geometry)
        self.namespace = head["n"]
        self.ranks = head["r"]
        self._open()
        return self

    def _open(self):
        self.lines = np.frombuffer(self.map, np.int64, 256)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self.map, self.HEADER))
        self.records = self.table = None
        self.available_slots = self.geometry.num_slots

    def slot_address(self, slot):
        return self.base_address + slot * self.geometry.slot_bytes

    def slot_view(self, slot, length):
        start = self.HEADER + slot * self.geometry.slot_bytes
        return memoryview(self.map)[start : start + length]

    def sign(self, rank): ...
    def publish(self, rank, transfer):
        self.lines[rank * 2] = transfer

    def fail(self, rank, transfer):
        self.failed_set = getattr(self, "failed_set", set()) | {transfer}

    def finished(self, rank):
        return int(self.lines[rank * 2])

    def finished_by_all(self):
        return min(self.finished(r) for r in range(self.ranks))

    def populate(self, on_available):
        on_available(self.available_slots)

    def close(self):
        if os.path.exists(self.path):
            os.unlink(self.path)


class SlotTable:
    def __init__(self, records, table, num_slots):
        self.num_slots = num_slots


class Index:
    def __init__(self, slots, payload_bytes, policy="lru", track_unsaved=False):
        self.d = {}
        self.free = []
        self.capacity = 0

    def grow(self, n):
        self.free.extend(range(self.capacity, n))
        self.capacity = n

    def lookup(self, key):
        e = self.d.get(key)
        return 0 if e is None else e[1]

    def reserve(self, keys):
        r = type("R", (), {})()
        r.keys, s = [], []
        r.evicted = []
        want = set(keys)
        r.complete = True
        for k in keys:
            if k in self.d:
                continue
            if not self.free:
                v = next(
                    (k2 for k2, e in self.d.items() if e[1] == 2 and not e[2] and k2 not in want),
                    None,
                )
                if v is None:
                    r.complete = False
                    break
                self.free.append(self.d.pop(v)[0])
                r.evicted.append(v)
            slot = self.free.pop()
            self.d[k] = [slot, 1, 0]
            r.keys.append(k)
            s.append(slot)
        r.slots = np.array(s, np.int64)
        r.generations = np.zeros(len(s), np.uint32)
        return r

    def commit(self, keys):
        for k in keys:
            self.d[k][1] = 2
        return list(keys)

    def abort(self, keys):
        for k in keys:
            self.free.append(self.d.pop(k)[0])
        return len(keys)

    def pin(self, keys):
        for k in keys:
            self.d[k][2] += 1
        s = np.array([self.d[k][0] for k in keys], np.int64)
        return s, np.zeros(len(s), np.uint32)

    def unpin(self, slots, generations):
        by = {e[0]: e for e in self.d.values()}
        for s in slots:
            by[int(s)][2] -= 1

    def touch(self, keys):
        for k in reversed(keys):
            if k in self.d:
                self.d[k] = self.d.pop(k)

    def clear(self):
        raise NotImplementedError

    def reap(self):
        return 0


def _mem(address, n):
    return np.frombuffer((ctypes.c_uint8 * n).from_address(address), np.uint8)


class PagePlan:
    def __init__(self, base, block_stride, num_blocks, local_bytes, block_offset, canonical_bytes,
                 runs, num_writers=1, writer_index=0):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class CopyPlan:
    def __init__(self, pages, block_bytes):
        self.pages, self.block_bytes = pages, block_bytes
        self.local_bytes = sum(p.local_bytes for p in pages)

    def _copy(self, block_ids, canonical, page_ids, start, stop, load):
        n = 0
        for i in range(start, len(block_ids) if stop is None else stop):
            for p in self.pages:
                if not load and page_ids[i] % p.num_writers != p.writer_index:
                    continue
                a = p.base + int(block_ids[i]) * p.block_stride
                b = int(canonical[i]) + p.block_offset
                for lo, co, fb, cnt, ls, cs in p.runs:
                    for f in range(cnt):
                        x, y = _mem(a + lo + f * ls, fb), _mem(b + co + f * cs, fb)
                        (x if load else y)[:] = y if load else x
                        n += fb
        return n

    def store(self, block_ids, canonical, page_ids, start=0, stop=None):
        return self._copy(block_ids, canonical, page_ids, start, stop, False)

    def load(self, block_ids, canonical, start=0, stop=None):
        return self._copy(block_ids, canonical, None, start, stop, True)


_ = key_group


Region.has_failed = lambda self, transfer: transfer in getattr(self, "failed_set", ())
