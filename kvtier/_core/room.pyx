# SPDX-License-Identifier: Apache-2.0
"""The owner's room for chunks: slots by number, free, lent, in use or waiting for their end.

Owns lists, ghosts and who has which slab (private memory), and changes the records of the
`SlotTable` it was given. What is done by key is in `index.pyx`. Owner's thread only; nothing here
waits or takes a lock. Each method checks all its arguments before it changes anything, then loops
over the C functions of `index.h` and, with several size classes, `slabs.h`.

Invariant: num_free + num_writing + num_ready + num_lent + num_orphans == capacity.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from kvtier._core.arrays cimport int64s, new_int64s, new_uint32s, uint32s
from kvtier._core.slots cimport *

cimport numpy as cnp

from kvtier.errors import InternalError

cnp.import_array()


cdef extern from *:
    """
    #ifndef KVTIER_CHECKS
    #define KVTIER_CHECKS 0
    #endif
    """
    const bint KVTIER_CHECKS


cdef extern from "checks.h":
    enum:
        KVT_WHAT
    bint kvt_check(const kvt_slabs *, uint64_t, const uint32_t *, char *)


cdef enum:
    SMALL = 4096  # largest capacity that a checked build walks after each change


cdef class Room:
    """Slots, and which size class and list each belongs to. See `room.pyi`."""

    def __cinit__(self):
        memset(&self.g, 0, sizeof(self.g))

    def __init__(
        self, slots: SlotTable, payload_bytes, policy="lru", widths=None, slab_slots=1,
    ):
        if self.slots is not None:
            raise RuntimeError("a Room is initialised once")
        if policy not in ("lru", "arc"):
            raise ValueError(f"policy is 'lru' or 'arc', got {policy!r}")
        cdef list sizes = list(payload_bytes)
        if not sizes or min(sizes) < 1 or max(sizes) >= 2**32:
            raise ValueError(f"payload_bytes are 1 to 2**32 - 1, got {sizes}")
        if not slots.num_slots:
            raise ValueError("the slot table is not open")
        cdef list wide = [1] * len(sizes) if widths is None else list(widths)
        if len(wide) != len(sizes) or min(wide) < 1 or not max(wide) <= slab_slots < 2**31:
            raise ValueError(f"widths {wide} of {len(sizes)} groups in slabs of {slab_slots} slots")
        cdef list classes = sorted(set(wide))
        if len(classes) > KVT_MAX_SIZES:
            raise ValueError(f"there are at most {KVT_MAX_SIZES} size classes, got {len(classes)}")
        self.groups = len(sizes)
        self.payload = <uint32_t *> malloc(len(sizes) * sizeof(uint32_t))
        self.size_of = <uint32_t *> malloc(len(sizes) * sizeof(uint32_t))
        self.c = <kvt_index *> calloc(len(classes), sizeof(kvt_index))
        self.nodes = <kvt_node *> kvt_alloc(slots.num_slots, sizeof(kvt_node))
        if (
            self.payload is NULL or self.size_of is NULL or self.c is NULL or self.nodes is NULL
        ):
            raise MemoryError
        self.g.index = self.c
        self.g.sizes = len(classes)
        self.g.size_of = self.size_of
        self.g.slab_slots = slab_slots
        self.g.free_head = KVT_NIL
        for i in range(len(sizes)):
            self.payload[i] = sizes[i]
            self.size_of[i] = classes.index(wide[i])
        cdef uint64_t slabs = slots.num_slots // self.g.slab_slots
        if self.g.slab_slots > 1:
            self.g.slab = <kvt_slab *> calloc(slabs, sizeof(kvt_slab))
            self.g.victim = <uint32_t *> malloc(self.g.slab_slots * sizeof(uint32_t))
            if self.g.slab is NULL or self.g.victim is NULL:
                raise MemoryError
            for s in range(slabs):
                self.g.slab[s].size = KVT_NO_SIZE
        name = policy.encode()
        for i in range(len(classes)):
            if kvt_index_open(
                &self.c[i], &slots.c, name, self.nodes, &self.rank,
                slabs * (self.g.slab_slots // <uint32_t> classes[i]), classes[i],
            ) < 0:
                raise MemoryError
            if self.g.slab is not NULL:
                self.c[i].slabs = &self.g
        self.policy = policy
        self.slots = slots

    def __dealloc__(self):
        cdef uint32_t i
        if self.c is not NULL:
            for i in range(self.g.sizes):
                kvt_index_close(&self.c[i])
        free(self.c)
        free(self.g.slab)
        free(self.g.victim)
        free(self.nodes)
        free(self.size_of)
        free(self.payload)

    @property
    def available(self) -> int:
        return self.top

    @property
    def capacity(self) -> int:
        cdef uint64_t total = self.g.num_free * self.most_a_slab()
        for i in range(self.g.sizes):
            total += self.c[i].capacity
        return total

    @property
    def num_free(self) -> int:
        cdef uint64_t total = self.g.num_free * self.most_a_slab()
        for i in range(self.g.sizes):
            total += self.c[i].num_free
        return total

    @property
    def num_writing(self) -> int:
        return sum([self.c[i].num_writing for i in range(self.g.sizes)])

    @property
    def num_ready(self) -> int:
        return sum([self.c[i].num_ready for i in range(self.g.sizes)])

    @property
    def num_lent(self) -> int:
        return sum([self.c[i].num_lent for i in range(self.g.sizes)])

    @property
    def num_orphans(self) -> int:
        return sum([self.c[i].num_orphans for i in range(self.g.sizes)])

    @property
    def ready_bytes(self) -> int:
        return sum([self.c[i].ready_bytes for i in range(self.g.sizes)])

    @property
    def list_steps(self) -> int:
        """List steps taken by evictions so far (tests of cost)."""
        return sum([self.c[i].l.steps for i in range(self.g.sizes)])

    @property
    def metadata_bytes_per_slot(self) -> float:
        """Memory a slot costs besides its payload: record, table, lists, ghosts."""
        cdef double total = self.g.slab_slots > 1 and <double> sizeof(kvt_slab) / self.g.slab_slots
        total += sizeof(kvt_record) + sizeof(kvt_node)
        for i in range(self.g.sizes):
            total += <double> self.c[i].policy.bytes_per_slot / self.c[i].width
        return total + <double> self.c.t.num_buckets * sizeof(kvt_bucket) / self.c.t.num_slots

    def free_for(self, group: int) -> int:
        """Slots that chunks of `group` can have without an eviction."""
        return kvt_free_for(&self.g, self.of_group(group))

    def capacity_for(self, group: int) -> int:
        """Chunks that the memory of the size class of `group` has room for now."""
        return self.of_group(group).capacity

    def ready_for(self, group: int) -> int:
        """READY chunks of the size class of `group`."""
        return self.of_group(group).num_ready

    def policy_state(self, group: int = 0) -> dict:
        """Sizes of the policy's lists and its parameter p, for tests and metrics."""
        cdef kvt_index *x = self.of_group(group)
        return {
            "t1": kvt_class_count(&x.l, 0),
            "t2": kvt_class_count(&x.l, 1),
            "b1": x.policy.ghosts(x.state, 1),
            "b2": x.policy.ghosts(x.state, 2),
            "p": x.policy.parameter(x.state),
        }

    cdef kvt_index *of_group(self, group) except NULL:
        if not 0 <= group < self.groups:
            raise ValueError(f"there is no group {group}, there are {self.groups}")
        return kvt_of_group(&self.g, group)

    cdef uint64_t most_a_slab(self) noexcept:
        """Chunks of the smallest size class in a slab: as what free slabs are counted."""
        return kvt_slab_room(&self.g, self.c)

    cdef int changed(self) except -1:
        if KVTIER_CHECKS and self.top <= SMALL:
            self.check()
        return 0

    cdef int broken(self, str what) except -1:
        raise InternalError(what)

    cdef int bounds(self, const int64_t *s, Py_ssize_t n, Py_ssize_t m) except -1:
        if n != m:
            raise ValueError(f"{n} slots and {m} generations")
        cdef Py_ssize_t i
        for i in range(n):
            if s[i] < 0 or <uint64_t> s[i] >= self.top:
                raise IndexError(f"slot {s[i]} is outside 0..{self.top}")
        return 0

    def grow(self, num_slots: int) -> None:
        """Slots [available, num_slots) have memory behind them now and become FREE."""
        cdef uint64_t to = num_slots
        if to < self.top or to > self.c.t.num_slots or to % self.g.slab_slots:
            raise ValueError(
                f"grow goes from {self.top} to at most {self.c.t.num_slots}, in whole slabs of "
                f"{self.g.slab_slots}, got {to}")
        if self.g.slab is NULL:
            self.c.num_free += to - self.top
            self.c.capacity = self.c.end = to
        else:
            self.g.num_free += to // self.g.slab_slots - self.g.count
            self.g.count = to // self.g.slab_slots
        self.top = to
        self.changed()

    def lend(self, n: int, group: int = 0) -> tuple:
        """Up to `n` slots from the free ones, WRITING and without a key. Evicts nothing."""
        cdef kvt_index *x = self.of_group(group)
        cdef Py_ssize_t free_slots = kvt_free_for(&self.g, x)
        cdef Py_ssize_t most = min(max(<Py_ssize_t> n, 0), free_slots), i
        cdef int64_t *slot
        cdef uint32_t *generation
        slots = new_int64s(most, &slot)
        generations = new_uint32s(most, &generation)
        for i in range(most):
            if not x.num_free:
                kvt_slab_give(&self.g, x)
            slot[i] = kvt_pop_free(x)
            if slot[i] < 0:
                self.broken("a free slot was not free")
            x.t.rec[slot[i]].key_len = 0
            kvt_set_state(x, slot[i], KVT_FREE, KVT_WRITING)
            generation[i] = kvt_gen(x.t.rec[slot[i]].word)
            kvt_push_head(&x.l, KVT_LENT, slot[i])
            x.num_lent += 1
        self.changed()
        return slots, generations

    cdef int lent(self, const int64_t *s, const uint32_t *g, Py_ssize_t n) except -1:
        """All of them are lent, or were when `clear` came."""
        cdef Py_ssize_t i
        cdef unsigned where
        for i in range(n):
            where = kvt_list_of(&self.nodes[s[i]])
            if (where != KVT_LENT and where != KVT_ORPHAN_WRITING) or (
                kvt_gen(kvt_load(&self.c.t.rec[s[i]])) != g[i]
            ):
                self.broken(f"slot {s[i]} is not lent in generation {g[i]}")
        return 0

    cdef int end_lease(self, uint32_t slot) except -1:
        """A lent slot, or an orphan whose writer has ended, becomes FREE."""
        cdef kvt_index *x = kvt_of_slot(&self.g, slot)
        if kvt_list_of(&self.nodes[slot]) == KVT_LENT:
            x.num_lent -= 1
        else:
            x.num_orphans -= 1
        kvt_unlink(&x.l, slot)
        if not kvt_set_free(x, slot, KVT_WRITING):
            self.broken(f"slot {slot} cannot become free: state or pins changed under its owner")
        kvt_push_free(x, slot)
        return 0

    def give_back(self, slots, generations) -> None:
        """Lent slots become FREE again, unused."""
        cdef Py_ssize_t n, m, i
        cdef int64_t *s = int64s(slots, &n)
        cdef uint32_t *g = uint32s(generations, &m)
        self.bounds(s, n, m)
        self.lent(s, g, n)
        for i in range(n - 1, -1, -1):
            self.lent(&s[i], &g[i], 1)
            self.end_lease(<uint32_t> s[i])
        self.changed()

    def unpin(self, slots, generations) -> None:
        """Give owner pins back. InternalError on a pin that was not held."""
        cdef Py_ssize_t n = 0, m = 0, i
        cdef int64_t *s = int64s(slots, &n)
        cdef uint32_t *g = uint32s(generations, &m)
        self.bounds(s, n, m)
        for i in range(n):
            unpin(self, <uint32_t> s[i], g[i])
        self.changed()

    def release(self, slots, generations) -> int:
        """Free orphans in WRITING whose writer has ended. Returns how many.

        Slots that are not such an orphan in that generation are passed over, so that two reports of
        the same end free a slot once.
        """
        cdef Py_ssize_t n, m, i, done = 0
        cdef int64_t *s = int64s(slots, &n)
        cdef uint32_t *g = uint32s(generations, &m)
        self.bounds(s, n, m)
        for i in range(n):
            if (
                kvt_list_of(&self.nodes[s[i]]) == KVT_ORPHAN_WRITING
                and kvt_gen(kvt_load(&self.c.t.rec[s[i]])) == g[i]
            ):
                self.end_lease(<uint32_t> s[i])
                done += 1
        self.changed()
        return done

    def reap(self) -> int:
        """Free orphans whose pins are all back. Called once a step; O(orphans).

        Looks also, for the same reason, at up to 64 chunks that eviction met pinned by the service.
        """
        cdef uint32_t at, following
        cdef Py_ssize_t done = 0
        cdef kvt_index *x
        for i in range(self.g.sizes):
            x = &self.c[i]
            at = x.l.list[KVT_ORPHAN_PINNED].tail
            while at != KVT_NIL:
                following = x.l.node[at].prev
                if kvt_set_free(x, at, KVT_ORPHAN):
                    kvt_unlink(&x.l, at)
                    kvt_push_free(x, at)
                    x.num_orphans -= 1
                    done += 1
                at = following
            kvt_check_service(x, KVT_SERVICE_LAST)
        self.changed()
        return done

    def check(self) -> None:
        """Walk everything; InternalError on the first invariant that does not hold."""
        cdef char what[KVT_WHAT]
        if not kvt_check(&self.g, self.top, self.payload, what):
            self.broken(what.decode())
