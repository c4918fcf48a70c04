# SPDX-License-Identifier: Apache-2.0
"""The owner's index: which chunk is in which slot, and which goes next.

Writes keys and the key table of the `SlotTable` it was given; what is done by the number of a slot
is in `room.pyx`. Owner's thread only; nothing here waits or takes a lock. Each method checks all
its arguments before it changes anything, then loops over the C functions of `index.h` and, with
several size classes, `slabs.h`.
"""

from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next
from cpython.list cimport PyList_GET_ITEM, PyList_GetSlice
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memset

from kvtier._core.arrays cimport int64s, new_int64s, new_uint32s, uint32s
from kvtier._core.slots cimport *

cimport cython
cimport numpy as cnp

import numpy as np

cnp.import_array()


cdef extern from "order.h":
    ctypedef struct kvt_ranked:
        uint64_t rank
        int64_t slot

    int kvt_by_rank(const void *, const void *) noexcept nogil
    uint64_t kvt_ready_of(const kvt_index *, unsigned, kvt_ranked *)
    int64_t kvt_oldest_unsaved(const kvt_slabs *, int64_t, int64_t, uint32_t *)


cdef bytes key_bytes(const kvt_record *r):
    return PyBytes_FromStringAndSize(<const char *> r.key, r.key_len)


cdef int by_position(list items, dict order, kvt_ranked *at) except -1:
    """The numbers of `items` in `at`: by position where all have one, else as they are."""
    cdef Py_ssize_t n = len(items), i, walk = 0
    cdef PyObject *position
    cdef PyObject *key
    cdef bint sorted = True
    for i in range(n):
        at[i].slot = i
        at[i].rank = 0
        if order is None:
            continue
        # Mostly the items are the keys of `order`, one after the other.
        if not PyDict_Next(order, &walk, &key, &position) or key != PyList_GET_ITEM(items, i):
            position = PyDict_GetItemWithError(order, items[i])
        if position is NULL:
            order = None
            sorted = True  # those with a position too: in the order of their first use
            continue
        at[i].rank = <uint64_t> <int64_t> <object> position
        if i and at[i].rank < at[i - 1].rank:
            sorted = False
    if not sorted:
        # Mostly they are in order already; keys of one position stay as they are.
        qsort(at, n, sizeof(kvt_ranked), kvt_by_rank)
    return 0


cdef class Reservation:
    """Result of ``Index.reserve``. See `index.pyi`."""

    cdef readonly list keys
    cdef readonly object slots
    cdef readonly object generations
    cdef readonly list evicted
    cdef readonly list evicted_unsaved
    cdef readonly bint complete


cdef class Index(Room):
    """See `index.pyi`."""

    def __cinit__(self):
        memset(&self.trail, 0, sizeof(self.trail))

    def __init__(
        self, slots: SlotTable, payload_bytes, policy="lru", track_unsaved=False, widths=None,
        slab_slots=1,
    ):
        Room.__init__(self, slots, payload_bytes, policy, widths, slab_slots)
        self.track_unsaved = track_unsaved
        if kvt_trail_open(&self.trail) < 0:
            raise MemoryError

    def __dealloc__(self):
        kvt_trail_close(&self.trail)

    cdef int refuse(self, object key) except -1:
        """Say what is wrong with a key."""
        cdef kvt_key k
        load_key(&k, key)
        raise ValueError(f"key of group {k.group}, there are {self.groups} groups")

    cdef int enlarge(self, kvt_index *x, list evicted, list unsaved) except -1:
        """A size class without a free slot gets a slab, if there is one or another class has to
        give one up."""
        if not kvt_slab_give(&self.g, x):
            return self.take_slab(x, evicted, unsaved, False) and kvt_slab_give(&self.g, x)
        return 1

    cdef int take_slab(
        self, kvt_index *x, list evicted, list unsaved, bint saved_only
    ) except -1:
        """Another size class gives up a slab that x wants, if it has to; what was evicted for it
        goes to the lists."""
        cdef uint64_t i
        cdef int broken = 0, taken
        cdef uint32_t s
        taken = kvt_slab_take(&self.g, x, saved_only, &broken)
        for i in range(self.g.num_victims):
            s = self.g.victim[i]
            key = key_bytes(&self.c.t.rec[s])
            evicted.append(key)
            if kvt_flags(&self.c.t.rec[s]) & KVT_UNSAVED:
                unsaved.append(key)
        if broken:
            self.broken("a victim was not in the key table")
        return taken

    cdef Py_ssize_t load(self, list keys) except -1:
        """Check all keys; `scratch` has them then, with the slots that are known already."""
        cdef Py_ssize_t n = len(keys), bad
        if not n:
            return 0
        key = keys[0]
        if not kvt_is_key(key):
            self.refuse(key)
        kvt_trail_batch(&self.trail, PyBytes_AS_STRING(key), <unsigned> PyBytes_GET_SIZE(key))
        if kvt_trail_room(&self.trail, self.trail.base + n) < 0:
            raise MemoryError
        bad = kvt_trail_load(&self.trail, keys, self.groups)
        if bad >= 0:
            self.refuse(keys[bad])
        self.scratch = &self.trail.k[self.trail.base]
        return n

    cdef Py_ssize_t find(self, list keys) except -1:
        """Check all keys and look them up; `scratch` has them then."""
        cdef Py_ssize_t n = self.load(keys)
        kvt_find_all(self.c, self.scratch, n)
        return n

    # Lookups.
    @cython.binding(False)  # a plain method descriptor: the interpreter calls it without detours
    def lookup(self, key, /):
        """0 absent, 1 WRITING, 2 READY."""
        cdef uint64_t word
        cdef unsigned state
        if not kvt_is_key(key):
            self.refuse(key)
        cdef kvt_key *k = kvt_trail_next(&self.trail)
        kvt_key_words(k, PyBytes_AS_STRING(key), <unsigned> PyBytes_GET_SIZE(key))
        if k.group >= self.groups:
            self.refuse(key)
        kvt_trail_kept(&self.trail)
        state = kvt_state(word) if kvt_lookup(self.c, k, &word) >= 0 else 0
        # Constants, for which no number has to be made.
        return 2 if state == KVT_READY else 0 if state == 0 else 1

    def states(self, keys) -> bytes:
        """State (0, 1, 2) of each key as one byte."""
        cdef Py_ssize_t n = self.find(keys if type(keys) is list else list(keys)), i
        cdef bytes states = PyBytes_FromStringAndSize(NULL, n)
        cdef char *out = states
        cdef int64_t s
        for i in range(n):
            s = self.scratch[i].slot
            out[i] = <char> (kvt_state(kvt_load(&self.c.t.rec[s])) if s >= 0 else 0)
        return states

    def locate(self, key: bytes):
        """(slot, generation) of a READY or WRITING key."""
        cdef kvt_key k
        cdef uint64_t word
        load_key(&k, key)
        if k.group >= self.groups:
            raise ValueError(f"key of group {k.group}, there are {self.groups} groups")
        cdef int64_t s = kvt_find(&self.c.t, &k, &word)
        return (s, kvt_gen(word)) if s >= 0 else None

    # Storing.
    def reserve(self, keys) -> Reservation:
        """Slots in WRITING for the longest leading part of the absent keys that fits."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef kvt_index *x = self.c
        cdef bint sized = self.g.slab is not NULL
        if not sized:
            kvt_expect(x, len(items))
        cdef Py_ssize_t n = self.load(items), i, taken = 0, at = 0
        cdef kvt_key *k = self.scratch
        cdef kvt_index *likely = x  # whose victims are fetched ahead
        if sized and n:
            likely = kvt_of_group(&self.g, k[0].group)
            kvt_expect(likely, n)
        cdef Reservation result = Reservation.__new__(Reservation)
        cdef int64_t s
        cdef int evicted
        cdef kvt_miss miss
        cdef uint64_t word
        cdef int64_t *slot
        cdef uint32_t *generation
        cdef unsigned flags = KVT_UNSAVED if self.track_unsaved else 0
        cdef list victims = [], unsaved = []
        cdef bytes victim
        cdef Py_ssize_t first = 0, last = 0
        cdef int64_t claimed = -1
        cdef uint64_t seen[KVT_SEEN]
        memset(seen, 0, sizeof(seen))
        result.evicted = victims
        result.evicted_unsaved = unsaved
        result.complete = True
        kvt_prefetch_reserve(likely, k, n)
        kvt_find_all(x, k, n)
        for i in range(n):
            if k[i].slot >= 0:
                x.l.node[k[i].slot].info |= KVT_PROTECT
        try:
            for i in range(n):
                if i and i % KVT_BLOCK == 0:
                    kvt_expect(likely, n - i)
                    kvt_prefetch_reserve(likely, &k[i], n - i)
                if k[i].slot >= 0:
                    continue
                # Looked up again if it may stand twice in this call.
                if kvt_seen(seen, k[i].hash) and kvt_find(&self.c.t, &k[i], &word) >= 0:
                    continue
                if sized:
                    x = kvt_of_group(&self.g, k[i].group)
                    if not x.num_free:
                        self.enlarge(x, victims, unsaved)
                s = kvt_claim(x, &k[i], &miss, &evicted)
                if s == -1 and sized and self.enlarge(x, victims, unsaved):
                    s = kvt_claim(x, &k[i], &miss, &evicted)
                if s == -1:
                    result.complete = False
                    break
                if s >= 0 and evicted:
                    claimed = s
                    victim = key_bytes(&self.c.t.rec[s])
                    victims.append(victim)
                    if kvt_flags(&self.c.t.rec[s]) & KVT_UNSAVED:
                        unsaved.append(victim)
                    claimed = -1
                if s < 0 or kvt_settle(
                    x, <uint32_t> s, &k[i], &miss, self.payload[k[i].group], flags
                ):
                    self.broken("a free slot was not free, or a victim not in the key table")
                # The slot number of a new key is kept as -2 - slot: it is not protected.
                k[i].slot = -2 - s
                if not taken:
                    first = i
                last = i
                taken += 1
        finally:
            kvt_forget_ahead(likely)
            if claimed >= 0:  # no memory for its key: gone in any case, the caller hears of it
                kvt_disclaim(x, <uint32_t> claimed, &miss)
            for i in range(n):
                if k[i].slot >= 0:
                    if sized:
                        x = kvt_of_slot(&self.g, <uint32_t> k[i].slot)
                    x.l.node[k[i].slot].info &= ~KVT_PROTECT
                    kvt_reconsider(x, <uint32_t> k[i].slot)
        result.slots = new_int64s(taken, &slot)
        result.generations = new_uint32s(taken, &generation)
        # All of them as a rule: one slice, and no list grown key by key.
        cdef bint gaps = taken and last - first + 1 != taken
        result.keys = [] if gaps or not taken else PyList_GetSlice(items, first, last + 1)
        for i in range(first, last + 1 if taken else 0):
            if k[i].slot <= -2:
                k[i].slot = -2 - k[i].slot
                slot[at] = k[i].slot
                generation[at] = kvt_gen(x.t.rec[slot[at]].word)
                at += 1
                if gaps:
                    result.keys.append(items[i])
        self.changed()
        return result

    def commit(self, keys) -> list:
        """WRITING to READY; returns the keys for which that happened."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = self.find(items), i
        cdef Py_ssize_t prefix = 0
        cdef list done = None
        cdef int64_t s
        cdef kvt_key *k = self.scratch
        cdef kvt_index *x = self.c
        cdef bint sized = self.g.slab is not NULL
        for i in range(n):
            s = k[i].slot
            if s < 0 or not kvt_set_state(x, s, KVT_WRITING, KVT_READY):
                continue
            if sized:
                x = kvt_of_slot(&self.g, <uint32_t> s)
            x.num_writing -= 1
            x.num_ready += 1
            x.ready_bytes += x.t.rec[s].length
            kvt_reconsider(x, s)
            if done is None:
                if prefix == i:
                    prefix += 1  # all of them as a rule: one slice at the end
                    continue
                done = items[:prefix]
            done.append(items[i])
        self.changed()
        return items[:prefix] if done is None else done

    def abort(self, keys) -> int:
        """WRITING back to FREE; keys in other states are left alone. Returns how many."""
        cdef Py_ssize_t n = self.find(keys if type(keys) is list else list(keys)), i
        cdef int64_t s
        cdef kvt_index *x
        cdef Py_ssize_t done = 0
        # Last first, so that the free list hands them out in ascending order again.
        for i in range(n - 1, -1, -1):
            s = self.scratch[i].slot
            if s < 0 or not kvt_set_free(self.c, s, KVT_WRITING):
                continue
            x = kvt_of_slot(&self.g, <uint32_t> s)
            if not kvt_forget(x, s):
                self.broken(f"slot {s} is not in the key table")
            kvt_push_free(x, s)
            x.num_writing -= 1
            done += 1
        self.changed()
        return done

    # Reading.
    def pin(self, keys) -> tuple:
        """Pin READY chunks for the owner: slots and generations, in order."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = self.find(items), i, j
        cdef kvt_key *k = self.scratch
        cdef kvt_record *rec = self.c.t.rec
        cdef int64_t *slot
        cdef uint32_t *generation
        cdef uint64_t after
        cdef int got
        slots = new_int64s(n, &slot)
        generations = new_uint32s(n, &generation)
        for i in range(n):
            slot[i] = k[i].slot
            got = 0
            if slot[i] >= 0:
                generation[i] = kvt_gen(kvt_load(&rec[slot[i]]))
                got = kvt_pin(&rec[slot[i]], generation[i], KVT_OWNER_ONE, KVT_OWNER_MASK)
            if got != 1:
                for j in range(i):
                    kvt_unpin(&rec[slot[j]], generation[j], KVT_OWNER_ONE, KVT_OWNER_MASK, &after)
                if got < 0:
                    self.broken("a chunk has all the owner pins that fit")
                raise KeyError(items[i])
        return slots, generations

    def touch(self, keys, positions=None) -> None:
        """One access a request; applied suffix first."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef dict order = positions
        cdef kvt_index *x = self.c
        cdef bint sized = self.g.slab is not NULL
        cdef Py_ssize_t n = self.find(items), i
        cdef int64_t s
        cdef kvt_ranked *at = <kvt_ranked *> malloc(max(n, 1) * sizeof(kvt_ranked))
        if at is NULL:
            raise MemoryError
        try:
            by_position(items, order, at)
            for i in range(n):
                s = at[i].slot = self.scratch[at[i].slot].slot
                if s < 0:
                    continue
                if x.l.node[s].info & KVT_PROTECT:
                    at[i].slot = -1  # it stands twice in this call: one access
                    continue
                x.l.node[s].info |= KVT_PROTECT
                kvt_prefetch_links(x, s)
            for i in range(n - 1, -1, -1):
                if at[i].slot >= 0:
                    if sized:
                        x = kvt_of_slot(&self.g, <uint32_t> at[i].slot)
                    x.l.node[at[i].slot].info &= ~KVT_PROTECT
                    kvt_touch(x, <uint32_t> at[i].slot)
        finally:
            free(at)
        self.changed()

    # Secondary tiers.
    def pin_for_service(self, keys) -> tuple:
        """One service pin on each key that is READY: those keys, their slots and generations."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = self.find(items), i, taken = 0
        cdef int64_t s
        cdef uint32_t g
        cdef int64_t *slot
        cdef uint32_t *generation
        cdef list done = []
        for i in range(n):
            s = self.scratch[i].slot
            if s < 0:
                continue
            g = kvt_gen(kvt_load(&self.c.t.rec[s]))
            if kvt_pin(&self.c.t.rec[s], g, KVT_SERVICE_ONE, KVT_SERVICE_MASK) == 1:
                done.append(items[i])
                self.scratch[taken].slot = s
                taken += 1
        slots = new_int64s(taken, &slot)
        generations = new_uint32s(taken, &generation)
        for i in range(taken):
            slot[i] = self.scratch[i].slot
            generation[i] = kvt_gen(kvt_load(&self.c.t.rec[slot[i]]))
        return done, slots, generations

    def adopt(self, slots, generations, keys, crcs=None, saved=True, pin=False) -> list:
        """Lent slots become READY under their keys; False where the key was already there."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n, m, i, num_crcs = len(items)
        cdef uint64_t word
        cdef unsigned flags = 0 if saved else KVT_UNSAVED
        cdef bint pinned = pin
        cdef uint32_t *crc = NULL
        cdef uint32_t slot
        cdef kvt_index *x
        cdef list done = []
        if crcs is not None:
            flags |= KVT_CRC_VALID
        cdef int64_t *s = int64s(slots, &n)
        cdef uint32_t *g = uint32s(generations, &m)
        if crcs is not None:
            crc = uint32s(crcs, &num_crcs)
        self.bounds(s, n, m)
        if len(items) != n or num_crcs != n:
            raise ValueError(f"{n} slots, {len(items)} keys and {num_crcs} checksums")
        self.lent(s, g, n)
        self.find(items)
        for i in range(n if self.g.slab is not NULL else 0):
            slot = <uint32_t> s[i]
            x = kvt_of_slot(&self.g, slot)
            if x != kvt_of_group(&self.g, self.scratch[i].group):
                raise ValueError(
                    f"slot {slot} is not of the size class of group "
                    f"{self.scratch[i].group}")
        for i in range(n):
            slot = <uint32_t> s[i]
            x = kvt_of_slot(&self.g, slot)
            # Checked again: a slot may stand twice in this call.
            self.lent(&s[i], &g[i], 1)
            if (
                kvt_list_of(&self.nodes[slot]) == KVT_ORPHAN_WRITING
                or self.scratch[i].slot >= 0
                or kvt_find(&self.c.t, &self.scratch[i], &word) >= 0
            ):
                self.end_lease(slot)
                done.append(False)
                continue
            if kvt_adopt(x, slot, &self.scratch[i],
                         self.payload[self.scratch[i].group], flags,
                         crc[i] if crc is not NULL else 0):
                self.broken(f"lent slot {slot} was not in WRITING")
            if pinned and kvt_pin(&self.c.t.rec[slot], g[i],
                                  KVT_OWNER_ONE, KVT_OWNER_MASK) != 1:
                self.broken(f"slot {slot} cannot be pinned")
            done.append(True)
        self.changed()
        return done

    def keep_free(self, n: int, limit: int = 64, group: int = 0, unsaved=None) -> list:
        """Evict saved chunks until `n` slots are free for chunks of `group`, or `limit` more than
        before (or the rest of a slab more); returns the keys.

        Room made ahead of demand never costs a chunk that only host memory holds.
        """
        cdef bint saved_only = unsaved is None
        cdef list lost = [] if unsaved is None else unsaved
        cdef kvt_index *x = self.of_group(group)
        cdef uint64_t wanted = max(n, 0), most = kvt_free_for(&self.g, x) + <uint64_t> max(limit, 0)
        cdef int broken = 0
        cdef int64_t s
        cdef list evicted = []
        while kvt_free_for(&self.g, x) < min(wanted, most):
            if self.g.slab is not NULL and self.take_slab(x, evicted, lost, saved_only):
                continue
            s = kvt_take_victim(x, NULL, saved_only, &broken)
            if broken:
                self.broken("a victim was not in the key table")
            if s < 0:
                break
            kvt_push_free(x, <uint32_t> s)
            key = key_bytes(&x.t.rec[s])
            evicted.append(key)
            if kvt_flags(&x.t.rec[s]) & KVT_UNSAVED:
                lost.append(key)
        self.changed()
        return evicted

    def oldest_unsaved(self, n: int, within: int | None = None) -> list:
        """Up to `n` unsaved READY keys, the next victims first.

        Chunks in use are left out. Looks at no more than `within` chunks, 16 n + 1024 if nobody
        says.
        """
        cdef uint32_t *slot
        cdef int64_t i, count = min(max(<int64_t> n, 0), <int64_t> self.top)
        _memory = new_uint32s(count, &slot)
        cdef int64_t most = 16 * count + 1024 if within is None else within
        count = kvt_oldest_unsaved(&self.g, count, most, slot)
        return [key_bytes(&self.c.t.rec[slot[i]]) for i in range(count)]

    def mark_saved(self, keys) -> None:
        """A secondary tier holds them."""
        cdef Py_ssize_t n = self.find(keys if type(keys) is list else list(keys)), i
        cdef int64_t s
        for i in range(n):
            s = self.scratch[i].slot
            if s >= 0:
                kvt_clear_flags(&self.c.t.rec[s].flags, 0xff ^ KVT_UNSAVED, KVT_ACQ_REL)
                kvt_reconsider(kvt_of_slot(&self.g, <uint32_t> s), <uint32_t> s)
        self.changed()

    # Removal.
    def drop(self, keys) -> list:
        """Remove READY chunks without pins; returns the keys that went."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = self.find(items), i
        cdef int64_t s
        cdef kvt_index *x
        cdef list gone = []
        for i in range(n - 1, -1, -1):
            s = self.scratch[i].slot
            if s < 0:
                continue
            x = kvt_of_slot(&self.g, <uint32_t> s)
            if kvt_detach(x, <uint32_t> s):
                if not kvt_forget(x, <uint32_t> s):
                    self.broken(f"slot {s} is not in the key table")
                kvt_push_free(x, <uint32_t> s)
                gone.append(items[i])
        gone.reverse()
        self.changed()
        return gone

    def clear(self) -> tuple:
        """Forget everything at once, without waiting. Linear in the room for chunks."""
        cdef uint64_t s
        cdef uint32_t b, i
        cdef kvt_index *x
        cdef list gone = [], slots = [], generations = []
        for i in range(self.g.sizes):
            self.c[i].policy.clear(self.c[i].state)
        if self.g.slab is NULL:
            for s in range(self.c.bumped):
                self.clear_slot(self.c, s, gone, slots, generations)
        for b in range(self.g.bumped):
            if self.g.slab[b].size == KVT_NO_SIZE:
                continue
            x = &self.c[self.g.slab[b].size]
            s = <uint64_t> b * self.g.slab_slots
            for i in range(kvt_slab_room(&self.g, x)):
                self.clear_slot(x, s + <uint64_t> i * x.width, gone, slots, generations)
        self.changed()
        return gone, np.array(slots, np.int64), np.array(generations, np.uint32)

    cdef int clear_slot(
        self, kvt_index *x, uint64_t s, list gone, list slots, list generations
    ) except -1:
        """Forget what is in a slot, or note it as in flight."""
        cdef unsigned where = kvt_list_of(&x.l.node[s])
        cdef kvt_record *r = &x.t.rec[s]
        if where == KVT_NOWHERE or where > KVT_LENT:
            return 0
        if kvt_state(kvt_load(r)) == KVT_READY:
            gone.append(key_bytes(r))
            x.num_ready -= 1
            x.ready_bytes -= r.length
        elif where == KVT_LENT:
            x.num_lent -= 1
        else:
            x.num_writing -= 1
        if where != KVT_LENT and not kvt_forget(x, <uint32_t> s):
            self.broken(f"slot {s} is not in the key table")
        elif where == KVT_LENT:
            kvt_unlink(&x.l, <uint32_t> s)
        x.l.node[s].info = 0
        if kvt_set_free(x, <uint32_t> s, KVT_READY):
            kvt_push_free(x, <uint32_t> s)
            return 0
        # In flight. ORPHAN can be pinned by nobody any more; a writer's slot stays WRITING.
        if kvt_set_state(x, <uint32_t> s, KVT_READY, KVT_ORPHAN):
            kvt_push_head(&x.l, KVT_ORPHAN_PINNED, <uint32_t> s)
        else:
            kvt_push_head(&x.l, KVT_ORPHAN_WRITING, <uint32_t> s)
        x.num_orphans += 1
        slots.append(s)
        generations.append(kvt_gen(kvt_load(r)))
        return 0

    def end_step(self, groups, ahead: int) -> list:
        """``keep_free`` for the next step, then ``reap``; returns the keys that were evicted."""
        cdef list evicted = []
        cdef uint64_t most = ahead, wanted
        cdef kvt_index *x
        for group in groups:
            x = self.of_group(group)
            wanted = min(most, x.capacity // 32)  # what is kept free holds nothing
            if kvt_free_for(&self.g, x) < wanted:
                evicted += self.keep_free(wanted, group=group)
        self.reap()
        return evicted

    def keys(self) -> list:
        """READY keys, the next victim first if nothing is pinned or unsaved (tests, drain); one
        size class after the other."""
        cdef list result = []
        cdef kvt_index *x
        cdef uint64_t first, once, more
        cdef kvt_ranked *found = <kvt_ranked *> malloc((self.top + 1) * sizeof(kvt_ranked))
        if found is NULL:
            raise MemoryError
        try:
            for i in range(self.g.sizes):
                x = &self.c[i]
                once = kvt_ready_of(x, 0, found)
                more = kvt_ready_of(x, 1, &found[once])
                # T1 down to its target, T2, the rest of T1: REPLACE with a p that stands still.
                first = once - min(once, <uint64_t> x.policy.parameter(x.state)) if more else once
                one = [key_bytes(&x.t.rec[found[at].slot]) for at in range(once + more)]
                result += one[:first] + one[once:] + one[first:once]
        finally:
            free(found)
        return result
