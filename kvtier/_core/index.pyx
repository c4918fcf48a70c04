# SPDX-License-Identifier: Apache-2.0
"""The owner's index: key table writer, free list and replacement policy.

Owns the policy's lists and ghosts and who has which slab (private memory), and writes records and
table of the `SlotTable` it was given. Owner's thread only; nothing here waits or takes a lock. Each
method checks all its arguments before it changes anything, then loops over the C functions of
`index.h` and, with several size classes, `slabs.h`.

Invariant: num_free + num_writing + num_ready + num_lent + num_orphans == capacity.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_GetSlice
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memset

from kvtier._core.chunks cimport (
    KVT_HELD, KVT_HIT, RequestChunks, kvt_chunk,
)
from kvtier._core.slots cimport *

cimport cython
cimport numpy as cnp

import numpy as np

from kvtier.errors import InternalError

cnp.import_array()


cdef extern from *:
    """
    #ifndef KVTIER_CHECKS
    #define KVTIER_CHECKS 0
    #endif
    """
    const bint KVTIER_CHECKS


cdef extern from "slabs.h":
    enum:
        KVT_NIL
        KVT_CLASSES
        KVT_MAIN
        KVT_USE
        KVT_SERVICE
        KVT_PARKED_UNSAVED
        KVT_NOWHERE
        KVT_LENT
        KVT_ORPHAN_WRITING
        KVT_ORPHAN_PINNED
        KVT_NUM_LISTS
        KVT_SERVICE_LAST
    const uint64_t KVT_PROTECT
    const uint64_t KVT_FRESH

    ctypedef struct kvt_node:
        uint32_t prev
        uint32_t next
        uint64_t info

    ctypedef struct kvt_list:
        uint32_t head
        uint32_t tail
        uint32_t hint
        uint64_t count

    ctypedef struct kvt_lists:
        kvt_node *node
        kvt_list list[11]
        uint64_t in_class[3]
        uint64_t *rank
        uint64_t steps

    ctypedef struct kvt_miss:
        pass

    ctypedef struct kvt_trail:
        kvt_key *k
        int64_t base

    ctypedef struct kvt_policy:
        const char *name
        uint64_t bytes_per_slot
        void clear(void *)
        uint64_t ghosts(const void *, int)
        double parameter(const void *)
        int check(const void *, const kvt_lists *, uint64_t)

    ctypedef struct kvt_slab:
        uint32_t size
        uint32_t used
        uint32_t next

    ctypedef struct kvt_index

    ctypedef struct kvt_slabs:
        kvt_index *index
        kvt_slab *slab
        const uint32_t *size_of
        uint32_t *victim
        uint64_t num_victims
        uint32_t slab_slots
        uint32_t sizes
        uint32_t count
        uint32_t bumped
        uint32_t free_head
        uint64_t num_free

    ctypedef struct kvt_index:
        kvt_table t
        kvt_lists l
        const kvt_policy *policy
        void *state
        uint64_t capacity
        uint64_t bumped
        uint64_t end
        uint32_t width
        uint32_t free_head
        kvt_slabs *slabs
        uint64_t num_free
        uint64_t num_writing
        uint64_t num_ready
        uint64_t num_lent
        uint64_t num_orphans
        uint64_t ready_bytes

    int kvt_trail_open(kvt_trail *)
    void kvt_trail_close(kvt_trail *)
    int kvt_trail_room(kvt_trail *, int64_t)
    kvt_key *kvt_trail_next(kvt_trail *)
    void kvt_trail_kept(kvt_trail *)
    void kvt_trail_batch(kvt_trail *, const void *, unsigned)
    int64_t kvt_trail_load(kvt_trail *, object, uint32_t)
    bint kvt_is_key(object)
    void kvt_key_words(kvt_key *, const void *, unsigned)
    int64_t kvt_lookup(kvt_index *, kvt_key *, uint64_t *)
    int kvt_index_open(
        kvt_index *, const kvt_table *, const char *, kvt_node *, uint64_t *, uint64_t, uint32_t)
    void kvt_index_close(kvt_index *)
    void kvt_lists_reset(kvt_lists *)
    unsigned kvt_list_of(const kvt_node *)
    uint64_t kvt_rank(const kvt_node *)
    unsigned kvt_place_list(unsigned, unsigned)
    bint kvt_is_placed(unsigned)
    unsigned kvt_class(unsigned)
    unsigned kvt_place(unsigned)
    uint64_t kvt_class_count(const kvt_lists *, unsigned)
    void kvt_unlink(kvt_lists *, uint32_t)
    void kvt_push_head(kvt_lists *, unsigned, uint32_t)
    void kvt_find_all(const kvt_index *, kvt_key *, int64_t)
    int KVT_BLOCK
    enum:
        KVT_SEEN
    bint kvt_seen(uint64_t *, uint64_t)
    void kvt_prefetch_reserve(kvt_index *, const kvt_key *, int64_t)
    void kvt_expect(kvt_index *, int64_t)
    void kvt_forget_ahead(kvt_index *)
    void kvt_prefetch_links(const kvt_index *, int64_t)
    void kvt_push_free(kvt_index *, uint32_t)
    int64_t kvt_pop_free(kvt_index *)
    bint kvt_set_free(kvt_index *, uint32_t, unsigned)
    bint kvt_set_state(kvt_index *, uint32_t, unsigned, unsigned)
    void kvt_reconsider(kvt_index *, uint32_t)
    int kvt_check_service(kvt_index *, int)
    bint kvt_detach(kvt_index *, uint32_t)
    int64_t kvt_take_victim(kvt_index *, const kvt_miss *, int, int *)
    int64_t kvt_claim(kvt_index *, const kvt_key *, kvt_miss *, int *)
    void kvt_disclaim(kvt_index *, uint32_t, kvt_miss *)
    int kvt_settle(kvt_index *, uint32_t, const kvt_key *, const kvt_miss *, uint32_t, unsigned)
    int kvt_adopt(kvt_index *, uint32_t, const kvt_key *, uint32_t, unsigned, uint32_t)
    void kvt_touch(kvt_index *, uint32_t)
    bint kvt_forget(kvt_index *, uint32_t)
    void *kvt_alloc(uint64_t, size_t)
    uint32_t KVT_NO_SIZE
    int KVT_MAX_SIZES
    kvt_index *kvt_of_slot(const kvt_slabs *, uint32_t)
    kvt_index *kvt_of_group(const kvt_slabs *, uint32_t)
    uint32_t kvt_slab_room(const kvt_slabs *, const kvt_index *)
    uint64_t kvt_free_for(const kvt_slabs *, const kvt_index *)
    bint kvt_slab_give(kvt_slabs *, kvt_index *)
    int kvt_slab_take(kvt_slabs *, kvt_index *, int, int *)


cdef enum:
    SMALL = 4096  # largest capacity that a checked build walks after each change

cdef struct oldest_entry:
    uint64_t rank
    int64_t slot


cdef int by_rank(const void *a, const void *b) noexcept nogil:
    cdef uint64_t x = (<const oldest_entry *> a).rank
    cdef uint64_t y = (<const oldest_entry *> b).rank
    if x == y:
        return ((<const oldest_entry *> a).slot > (<const oldest_entry *> b).slot) - (
            (<const oldest_entry *> a).slot < (<const oldest_entry *> b).slot)
    return (x > y) - (x < y)


cdef bytes key_bytes(const kvt_record *r):
    return PyBytes_FromStringAndSize(<const char *> r.key, r.key_len)


cdef void *view(object array, int size, Py_ssize_t *n, Py_buffer *buffer) except NULL:
    """Contiguous int64 (size 8) or uint32 (4) memory of `array`; the caller releases `buffer`."""
    # Arrays as this module makes them: no export, which costs more than a batch of pins.
    if (
        cnp.PyArray_CheckExact(array)
        and cnp.PyArray_TYPE(array) == <int> (cnp.NPY_INT64 if size == 8 else cnp.NPY_UINT32)
        and cnp.PyArray_ISCARRAY_RO(array)
    ):
        memset(buffer, 0, sizeof(buffer[0]))
        n[0] = cnp.PyArray_SIZE(array)
        return cnp.PyArray_DATA(array)
    PyObject_GetBuffer(array, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    cdef char kind = buffer.format[0] if buffer.format is not NULL else c"B"
    cdef bint fits = kind in (c"l", c"q") if size == 8 else kind in (c"I", c"L")
    if buffer.itemsize != size or not fits:
        PyBuffer_Release(buffer)
        raise TypeError(f"wants a contiguous array of {'int64' if size == 8 else 'uint32'}")
    n[0] = buffer.len // size
    # An empty array may have no memory.
    return buffer.buf if buffer.buf is not NULL else <void *> buffer


cdef object slot_array(Py_ssize_t n, int64_t **data):
    """New int64 array; *data is valid while it lives."""
    cdef cnp.npy_intp size = n
    array = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
    data[0] = <int64_t *> cnp.PyArray_DATA(array)
    return array


cdef object generation_array(Py_ssize_t n, uint32_t **data):
    cdef cnp.npy_intp size = n
    array = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)
    data[0] = <uint32_t *> cnp.PyArray_DATA(array)
    return array


cdef class Reservation:
    """Result of ``Index.reserve``. See `index.pyi`."""

    cdef readonly list keys
    cdef readonly object slots
    cdef readonly object generations
    cdef readonly list evicted
    cdef readonly list evicted_unsaved
    cdef readonly bint complete


cdef class Index:
    """Which chunk is in which slot, and which goes next. See `index.pyi`."""

    cdef kvt_index *c  # one for each size class; looking up is the same with any; owned
    cdef kvt_slabs g  # what belongs to which class; its arrays are freed in __dealloc__
    cdef kvt_node *nodes  # of all slots; owned
    cdef uint64_t rank  # last one given
    cdef uint64_t top  # slots with memory behind them
    cdef SlotTable slots  # keeps records and table mapped
    cdef kvt_trail trail  # keys of the running request; its memory is freed in __dealloc__
    cdef kvt_key *scratch  # keys of the running call, inside `trail`
    cdef uint32_t *payload  # chunk bytes by group; owned
    cdef uint32_t *size_of  # size class by group; owned
    cdef uint32_t groups
    cdef bint track_unsaved
    cdef readonly str policy

    def __cinit__(self):
        memset(&self.g, 0, sizeof(self.g))
        memset(&self.trail, 0, sizeof(self.trail))

    def __init__(
        self, slots: SlotTable, payload_bytes, policy="lru", track_unsaved=False, widths=None,
        slab_slots=1,
    ):
        if self.slots is not None:
            raise RuntimeError("an Index is initialised once")
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
            or kvt_trail_open(&self.trail) < 0
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
        self.track_unsaved = track_unsaved
        self.policy = policy
        self.slots = slots

    def __dealloc__(self):
        cdef uint32_t i
        if self.c is not NULL:
            for i in range(self.g.sizes):
                kvt_index_close(&self.c[i])
        kvt_trail_close(&self.trail)
        free(self.c)
        free(self.g.slab)
        free(self.g.victim)
        free(self.nodes)
        free(self.size_of)
        free(self.payload)

    # Counters.
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

    # Helpers.
    cdef int refuse(self, object key) except -1:
        """Say what is wrong with a key."""
        cdef kvt_key k
        load_key(&k, key)
        raise ValueError(f"key of group {k.group}, there are {self.groups} groups")

    cdef kvt_index *of_group(self, group) except NULL:
        if not 0 <= group < self.groups:
            raise ValueError(f"there is no group {group}, there are {self.groups}")
        return kvt_of_group(&self.g, group)

    cdef uint64_t most_a_slab(self) noexcept:
        """Chunks of the smallest size class in a slab: as what free slabs are counted."""
        return kvt_slab_room(&self.g, self.c)

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

    cdef int changed(self) except -1:
        if KVTIER_CHECKS and self.top <= SMALL:
            self.check()
        return 0

    cdef int broken(self, str what) except -1:
        raise InternalError(what)

    cdef int to_free(self, uint32_t slot, unsigned state) except -1:
        """A slot in no list, in `state` and without pins, becomes FREE."""
        cdef kvt_index *x = kvt_of_slot(&self.g, slot)
        if not kvt_set_free(x, slot, state):
            self.broken(f"slot {slot} cannot become free: state or pins changed under its owner")
        kvt_push_free(x, slot)
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

    def lookup_batch(self, keys) -> tuple:
        """Length of the READY prefix, and the state (0, 1, 2) of each key as one byte."""
        cdef Py_ssize_t n = self.find(keys if type(keys) is list else list(keys)), i
        cdef Py_ssize_t prefix = -1
        cdef bytes states = PyBytes_FromStringAndSize(NULL, n)
        cdef char *out = states
        cdef kvt_key *k = self.scratch
        cdef kvt_record *rec = self.c.t.rec
        cdef int64_t s
        for i in range(n):
            s = k[i].slot
            out[i] = <char> (kvt_state(kvt_load(&rec[s])) if s >= 0 else 0)
            if prefix < 0 and out[i] != KVT_READY:
                prefix = i
        return (n if prefix < 0 else prefix), states

    # For one request.
    def look(self, keys, RequestChunks chunks not None) -> tuple:
        """Look a prompt up for a request; `chunks` has what was found."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = self.find(items), i, prefix = -1
        cdef bint same = n and chunks.is_batch(items)
        cdef unsigned state
        if not same:
            chunks.enter(items)
        chunks.writing = False
        for i in range(n):
            state = self.seen_at(&self.scratch[i], &chunks.chunk[chunks.batch[i]], &same)
            if state == KVT_WRITING:
                chunks.writing = True
            if prefix < 0 and state != KVT_READY:
                prefix = i
        return (n if prefix < 0 else prefix), bool(same)

    cdef unsigned seen_at(self, const kvt_key *k, kvt_chunk *c, bint *same):
        """Note where a key was found, and its state; *same is cleared if that has changed."""
        cdef uint64_t word
        cdef unsigned state = 0
        if k.slot >= 0:
            word = kvt_load(&self.c.t.rec[k.slot])
            state = kvt_state(word)
            c.slot = <uint32_t> k.slot
            c.generation = kvt_gen(word)
        if c.state != state:
            c.state = <uint8_t> state
            same[0] = False
        return state

    def note(self, keys, RequestChunks chunks not None) -> None:
        """Keys of a request that were looked up one by one, and answered HIT."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = self.find(items), i
        cdef bint same = True
        cdef int64_t at
        for i in range(n):
            at = chunks.place(items[i])
            if self.seen_at(&self.scratch[i], &chunks.chunk[at], &same) == KVT_READY:
                chunks.chunk[at].flags |= KVT_HIT
        if not same:
            chunks.num_batch = 0  # what was said of the batch may be wrong by now

    def hold(self, RequestChunks chunks not None, limit: int, places=None) -> tuple:
        """Pin chunks that were answered HIT since the last step, or those at `places`."""
        cdef Py_ssize_t n = len(chunks), i, m, done = 0, left = 0
        cdef Py_ssize_t most = limit
        cdef Py_buffer buffer
        cdef int64_t *at = NULL
        cdef kvt_chunk *c
        if places is not None:
            at = <int64_t *> view(places, 8, &m, &buffer)
            PyBuffer_Release(&buffer)  # `places` keeps the memory
            chunks.check_places(at, m)
            n = m
            self.find([chunks.keys[at[i]] for i in range(n)])
        for i in range(n):
            c = &chunks.chunk[i if at is NULL else at[i]]
            if c.flags & KVT_HELD:
                continue
            if at is NULL:
                if not c.flags & KVT_HIT:
                    continue
            elif self.scratch[i].slot < 0:
                left += 1
                continue
            else:
                c.slot = <uint32_t> self.scratch[i].slot
                c.generation = kvt_gen(kvt_load(&self.c.t.rec[c.slot]))
            # Its generation says that it is the same chunk still.
            if done < most and kvt_pin(&self.c.t.rec[c.slot], c.generation,
                                       KVT_OWNER_ONE, KVT_OWNER_MASK) == 1:
                c.flags |= KVT_HELD
                done += 1
            else:
                left += 1
        chunks.num_held += done
        return done, left

    def held(self, RequestChunks chunks not None, places, slots, generations, pinned) -> int:
        """These were pinned for the request as they were adopted, where `pinned` says so."""
        cdef Py_buffer a, b, c
        cdef Py_ssize_t n, m, k, i, done = 0
        cdef kvt_chunk *one
        cdef list which = pinned
        cdef int64_t *at = <int64_t *> view(places, 8, &k, &a)
        PyBuffer_Release(&a)
        cdef int64_t *s = <int64_t *> view(slots, 8, &n, &b)
        PyBuffer_Release(&b)
        cdef uint32_t *g = <uint32_t *> view(generations, 4, &m, &c)
        PyBuffer_Release(&c)
        self.bounds(s, n, m)
        if k != n or len(which) != n:
            raise ValueError(f"{k} places and {len(which)} answers for {n} slots")
        chunks.check_places(at, n)
        for i in range(n):
            if not which[i]:
                continue
            one = &chunks.chunk[at[i]]
            if one.flags & KVT_HELD:
                self.broken(f"chunk {at[i]} of the request is held twice")
            one.flags |= KVT_HELD
            one.slot = <uint32_t> s[i]
            one.generation = g[i]
            done += 1
        chunks.num_held += done
        return done

    def unhold(self, RequestChunks chunks not None, keys=None) -> int:
        """Give pins of a request back: those of `keys`, or all. Returns how many."""
        cdef Py_ssize_t n = len(chunks), i, done = 0
        cdef int64_t at
        cdef uint64_t after = 0
        cdef kvt_chunk *c
        cdef list items = None
        if keys is not None:
            items = keys if type(keys) is list else list(keys)
            n = len(items)
        for i in range(n):
            at = i if items is None else chunks.known(items[i], i)
            if at < 0 or not chunks.chunk[at].flags & KVT_HELD:
                continue
            c = &chunks.chunk[at]
            c.flags &= ~KVT_HELD
            chunks.num_held -= 1
            done += 1
            if not kvt_unpin(&self.c.t.rec[c.slot], c.generation, KVT_OWNER_ONE, KVT_OWNER_MASK,
                             &after):
                self.broken(f"slot {c.slot} has no owner pin in generation {c.generation}")
            if not after & KVT_OWNER_MASK:
                kvt_reconsider(kvt_of_slot(&self.g, c.slot), c.slot)
        self.changed()
        return done

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
        result.slots = slot_array(taken, &slot)
        result.generations = generation_array(taken, &generation)
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
        slots = slot_array(n, &slot)
        generations = generation_array(n, &generation)
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

    def unpin(self, slots, generations) -> None:
        """Give owner pins back. InternalError on a pin that was not held."""
        cdef Py_buffer a, b
        cdef Py_ssize_t n, m, i
        cdef uint64_t after = 0
        cdef kvt_index *x = self.c
        cdef bint sized = self.g.slab is not NULL
        cdef int64_t *s = <int64_t *> view(slots, 8, &n, &a)
        try:
            g = <uint32_t *> view(generations, 4, &m, &b)
            try:
                self.bounds(s, n, m)
                for i in range(n):
                    if not kvt_unpin(&x.t.rec[s[i]], g[i], KVT_OWNER_ONE, KVT_OWNER_MASK, &after):
                        self.broken(f"slot {s[i]} has no owner pin in generation {g[i]}")
                    if sized:
                        x = kvt_of_slot(&self.g, <uint32_t> s[i])
                    if not after & KVT_OWNER_MASK:
                        kvt_reconsider(x, <uint32_t> s[i])
            finally:
                PyBuffer_Release(&b)
        finally:
            PyBuffer_Release(&a)
        self.changed()

    cdef int bounds(self, const int64_t *s, Py_ssize_t n, Py_ssize_t m) except -1:
        if n != m:
            raise ValueError(f"{n} slots and {m} generations")
        cdef Py_ssize_t i
        for i in range(n):
            if s[i] < 0 or <uint64_t> s[i] >= self.top:
                raise IndexError(f"slot {s[i]} is outside 0..{self.top}")
        return 0

    def touch(self, keys, positions=None) -> None:
        """One access a request; applied suffix first."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef dict order = positions
        cdef kvt_index *x = self.c
        cdef bint sized = self.g.slab is not NULL
        cdef Py_ssize_t n = self.find(items), i
        cdef int64_t s
        cdef oldest_entry *at = <oldest_entry *> malloc(max(n, 1) * sizeof(oldest_entry))
        if at is NULL:
            raise MemoryError
        try:
            self.by_position(items, order, at)
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

    cdef int by_position(self, list items, dict order, oldest_entry *at) except -1:
        """The numbers of `items` in `at`: by position where all have one, else as they are."""
        cdef Py_ssize_t n = len(items), i
        cdef PyObject *position
        cdef bint sorted = True
        for i in range(n):
            at[i].slot = i
            at[i].rank = 0
            if order is None:
                continue
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
            qsort(at, n, sizeof(oldest_entry), by_rank)
        return 0

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
        slots = slot_array(taken, &slot)
        generations = generation_array(taken, &generation)
        for i in range(taken):
            slot[i] = self.scratch[i].slot
            generation[i] = kvt_gen(kvt_load(&self.c.t.rec[slot[i]]))
        return done, slots, generations

    def lend(self, n: int, group: int = 0) -> tuple:
        """Up to `n` slots from the free ones, WRITING and without a key. Evicts nothing."""
        cdef kvt_index *x = self.of_group(group)
        cdef Py_ssize_t free_slots = kvt_free_for(&self.g, x)
        cdef Py_ssize_t most = min(max(<Py_ssize_t> n, 0), free_slots), i
        cdef int64_t *slot
        cdef uint32_t *generation
        slots = slot_array(most, &slot)
        generations = generation_array(most, &generation)
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
        return self.to_free(slot, KVT_WRITING)

    def adopt(self, slots, generations, keys, crcs=None, saved=True, pin=False) -> list:
        """Lent slots become READY under their keys; False where the key was already there."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_buffer a, b, c
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
        cdef int64_t *s = <int64_t *> view(slots, 8, &n, &a)
        try:
            g = <uint32_t *> view(generations, 4, &m, &b)
            try:
                if crcs is not None:
                    crc = <uint32_t *> view(crcs, 4, &num_crcs, &c)
                try:
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
                finally:
                    if crc is not NULL:
                        PyBuffer_Release(&c)
            finally:
                PyBuffer_Release(&b)
        finally:
            PyBuffer_Release(&a)
        self.changed()
        return done

    def give_back(self, slots, generations) -> None:
        """Lent slots become FREE again, unused."""
        cdef Py_buffer a, b
        cdef Py_ssize_t n, m, i
        cdef int64_t *s = <int64_t *> view(slots, 8, &n, &a)
        try:
            g = <uint32_t *> view(generations, 4, &m, &b)
            try:
                self.bounds(s, n, m)
                self.lent(s, g, n)
                for i in range(n - 1, -1, -1):
                    self.lent(&s[i], &g[i], 1)
                    self.end_lease(<uint32_t> s[i])
            finally:
                PyBuffer_Release(&b)
        finally:
            PyBuffer_Release(&a)
        self.changed()

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

    def oldest_unsaved(self, n: int) -> list:
        """Up to `n` unsaved READY keys, the next victims first.

        Chunks in use are left out. Looks at no more than 16 n + 1024 chunks.
        """
        cdef list found = []
        cdef Py_ssize_t wanted = n, left = 16 * max(wanted, 0) + 1024
        cdef uint32_t at
        cdef int place, i, oldest, lists = 2 * self.g.sizes
        cdef uint32_t cursor[128]  # of both lists of each size class
        for place in (KVT_PARKED_UNSAVED, KVT_MAIN):
            for i in range(lists):
                cursor[i] = self.c[i >> 1].l.list[kvt_place_list(i & 1, place)].tail
            while len(found) < wanted and left > 0:
                oldest = -1
                for i in range(lists):
                    if cursor[i] != KVT_NIL and (
                        oldest < 0
                        or kvt_rank(&self.nodes[cursor[i]]) < kvt_rank(&self.nodes[cursor[oldest]])
                    ):
                        oldest = i
                if oldest < 0:
                    break
                at = cursor[oldest]
                cursor[oldest] = self.nodes[at].prev
                left -= 1
                if (
                    kvt_state(kvt_load(&self.c.t.rec[at])) == KVT_READY
                    and kvt_flags(&self.c.t.rec[at]) & KVT_UNSAVED
                ):
                    found.append(key_bytes(&self.c.t.rec[at]))
        return found

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

    def release(self, slots, generations) -> int:
        """Free orphans in WRITING whose writer has ended. Returns how many.

        Slots that are not such an orphan in that generation are passed over, so that two reports of
        the same end free a slot once.
        """
        cdef Py_buffer a, b
        cdef Py_ssize_t n, m, i, done = 0
        cdef int64_t *s = <int64_t *> view(slots, 8, &n, &a)
        try:
            g = <uint32_t *> view(generations, 4, &m, &b)
            try:
                self.bounds(s, n, m)
                for i in range(n):
                    if (
                        kvt_list_of(&self.nodes[s[i]]) == KVT_ORPHAN_WRITING
                        and kvt_gen(kvt_load(&self.c.t.rec[s[i]])) == g[i]
                    ):
                        self.end_lease(<uint32_t> s[i])
                        done += 1
            finally:
                PyBuffer_Release(&b)
        finally:
            PyBuffer_Release(&a)
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

    def keys(self) -> list:
        """READY keys, the next victim first if nothing is pinned or unsaved (tests, drain); one
        size class after the other."""
        cdef list result = []
        for i in range(self.g.sizes):
            self.keys_of(&self.c[i], result)
        return result

    cdef int keys_of(self, kvt_index *x, list result) except -1:
        cdef uint64_t most = x.num_ready + 1
        cdef oldest_entry *found = <oldest_entry *> malloc(2 * most * sizeof(oldest_entry))
        cdef uint64_t count[2]
        cdef uint64_t i, left
        cdef uint32_t at
        cdef int cls, place
        if found is NULL:
            raise MemoryError
        try:
            for cls in range(2):
                count[cls] = 0
                for place in range(4):
                    at = x.l.list[kvt_place_list(cls, place)].tail
                    while at != KVT_NIL:
                        if kvt_state(kvt_load(&x.t.rec[at])) == KVT_READY:
                            found[cls * most + count[cls]].rank = kvt_rank(&x.l.node[at])
                            found[cls * most + count[cls]].slot = at
                            count[cls] += 1
                        at = x.l.node[at].prev
                qsort(&found[cls * most], count[cls], sizeof(oldest_entry), by_rank)
            # T1 down to its target, T2, the rest of T1: REPLACE with a p that stands still.
            i = 0
            left = count[0]
            while left and (not count[1] or left > x.policy.parameter(x.state)):
                result.append(key_bytes(&x.t.rec[found[i].slot]))
                i += 1
                left -= 1
            for at in range(<uint32_t> count[1]):
                result.append(key_bytes(&x.t.rec[found[most + at].slot]))
            while left:
                result.append(key_bytes(&x.t.rec[found[i].slot]))
                i += 1
                left -= 1
        finally:
            free(found)
        return 0

    def check(self) -> None:
        """Walk everything; InternalError on the first invariant that does not hold."""
        cdef uint64_t chunks = 0, slabs = 0
        cdef uint32_t b, i
        for i in range(self.g.sizes):
            chunks += self.check_size(&self.c[i])
        self.check_table(chunks)
        if self.g.slab is NULL:
            return
        for b in range(self.g.count):
            slabs += self.check_slab(b)
        if slabs != self.g.num_free:
            self.broken(f"{self.g.num_free} slabs are free, {slabs} found")
        b = self.g.free_head
        slabs -= self.g.count - self.g.bumped
        while b != KVT_NIL and slabs:
            if self.g.slab[b].size != KVT_NO_SIZE:
                self.broken(f"slab {b} is free and of size class {self.g.slab[b].size}")
            b = self.g.slab[b].next
            slabs -= 1
        if slabs or b != KVT_NIL:
            self.broken(f"the chain of free slabs and their number differ by {slabs}")

    cdef int check_slab(self, uint32_t b) except -1:
        """Whether slab `b` is free. Slots that no chunk can have are FREE and in no list."""
        cdef kvt_slab *slab = &self.g.slab[b]
        cdef bint nobody = slab.size == KVT_NO_SIZE
        cdef uint32_t width = 0 if nobody else self.c[slab.size].width
        cdef uint32_t used = 0, i
        cdef uint64_t s
        for i in range(self.g.slab_slots):
            s = <uint64_t> b * self.g.slab_slots + i
            if not nobody and i % width == 0 and i + width <= self.g.slab_slots:
                used += kvt_list_of(&self.nodes[s]) != KVT_NOWHERE
            elif self.nodes[s].info or kvt_load(&self.c.t.rec[s]) & ((<uint64_t> 1 << 32) - 1):
                self.broken(f"slot {s} is none of slab {b}, its word is "
                            f"{kvt_load(&self.c.t.rec[s]):#x}")
        if not nobody and (not used or used != slab.used):
            self.broken(f"slab {b} counts {slab.used} slots in use, {used} found")
        return nobody

    cdef int64_t check_size(self, kvt_index *x) except -1:
        """Lists, counters and records of one size class; how many chunks it has."""
        cdef uint64_t s, word, linked = 0, in_lists = 0, free_slots = 0
        cdef uint64_t writing = 0, ready = 0, lent = 0, orphans = 0, ready_bytes = 0, n
        cdef uint64_t capacity = 0
        cdef unsigned expected
        cdef uint32_t at, before
        cdef unsigned where, state
        cdef kvt_record *r
        cdef kvt_key k
        cdef int i
        for s in range(self.top):
            if self.g.slab is not NULL:
                if self.g.slab[s // self.g.slab_slots].size != <uint32_t> (x - self.c):
                    continue
                at = s % self.g.slab_slots
                if at % x.width or at + x.width > self.g.slab_slots:
                    continue
            capacity += 1
            r = &x.t.rec[s]
            word = kvt_load(r)
            state = kvt_state(word)
            where = kvt_list_of(&x.l.node[s])
            if x.l.node[s].info & KVT_PROTECT:
                self.broken(f"slot {s} is still protected")
            if where == KVT_NOWHERE:
                free_slots += 1
                if state != KVT_FREE or word & KVT_PINS_MASK:
                    self.broken(f"slot {s} is free here, its word is {word:#x}")
                continue
            linked += 1
            if where == KVT_LENT:
                lent += 1
                if state != KVT_WRITING or word & KVT_PINS_MASK or r.key_len:
                    self.broken(f"slot {s} is lent, its word is {word:#x}")
            elif where >= KVT_LENT:
                orphans += 1
                expected = KVT_WRITING if where == KVT_ORPHAN_WRITING else KVT_ORPHAN
                if state != expected:
                    self.broken(f"slot {s} is an orphan, its word is {word:#x}")
            else:
                if state == KVT_READY:
                    ready += 1
                    ready_bytes += r.length
                elif state == KVT_WRITING and not word & KVT_PINS_MASK:
                    writing += 1
                else:
                    self.broken(f"slot {s} holds a key, its word is {word:#x}")
                load_key(&k, key_bytes(r))
                if kvt_find(&x.t, &k, &word) != <int64_t> s:
                    self.broken(f"the key of slot {s} does not lead to it")
                if r.length != self.payload[k.group] or kvt_of_group(&self.g, k.group) != x:
                    self.broken(f"slot {s} has length {r.length}, its key group {k.group}")
        for i in range(1, KVT_NUM_LISTS):
            n = 0
            before = KVT_NIL
            at = x.l.list[i].head
            while at != KVT_NIL and n <= capacity:
                where = kvt_list_of(&x.l.node[at])
                if x.l.node[at].prev != before or where != <unsigned> i:
                    self.broken(f"list {i} is broken at slot {at}")
                before = at
                at = x.l.node[at].next
                n += 1
            if before != x.l.list[i].tail or n != x.l.list[i].count:
                self.broken(f"list {i} has {n} slots, its counter says {x.l.list[i].count}")
            in_lists += n
        n = 0
        at = x.free_head
        before = KVT_NIL
        while at != KVT_NIL and n <= capacity:
            if kvt_list_of(&x.l.node[at]) != KVT_NOWHERE:
                self.broken(f"slot {at} is in the free list and in another one")
            if n and x.slabs is not NULL and x.l.node[at].prev != before:
                self.broken(f"the free list is broken at slot {at}")
            before = at
            at = x.l.node[at].next
            n += 1
        if n + (x.end - x.bumped) // x.width != x.num_free or free_slots != x.num_free:
            self.broken(f"{x.num_free} free slots counted, {n} chained, {free_slots} found")
        if x.l.in_class[0] + x.l.in_class[1] != ready + writing:
            self.broken(f"classes of {x.l.in_class[0]} and {x.l.in_class[1]} chunks")
        if linked != in_lists:
            self.broken(f"{linked} slots say they are in lists, {in_lists} are")
        if (
            writing != x.num_writing or ready != x.num_ready or lent != x.num_lent
            or orphans != x.num_orphans or ready_bytes != x.ready_bytes
            or capacity != x.capacity
            or free_slots + writing + ready + lent + orphans != capacity
        ):
            self.broken(
                f"counters {x.capacity} {x.num_writing} {x.num_ready} {x.num_lent} "
                f"{x.num_orphans} {x.ready_bytes}, found {capacity} {writing} {ready} {lent} "
                f"{orphans} {ready_bytes}")
        i = x.policy.check(x.state, &x.l, x.capacity)
        if i:
            self.broken(f"policy {self.policy} finds fault {i} in itself")
        return ready + writing

    cdef int check_table(self, uint64_t chunks) except -1:
        """Entries point to their keys, and the overflow counters are what the entries ask for."""
        cdef uint64_t b, a, slot, entries = 0
        cdef int i
        cdef kvt_key k
        cdef list expected = [0] * <Py_ssize_t> self.c.t.num_buckets
        for b in range(self.c.t.num_buckets):
            for i in range(7):
                slot = self.c.t.bucket[b].entry[i] & ((<uint64_t> 1 << 40) - 1)
                if not slot:
                    continue
                entries += 1
                if slot > self.top:
                    self.broken(f"bucket {b} leads to slot {slot - 1}")
                load_key(&k, key_bytes(&self.c.t.rec[slot - 1]))
                a = kvt_home(&self.c.t, k.hash)
                while a != b:
                    expected[a] += 1
                    a = a + 1 if a + 1 < self.c.t.num_buckets else 0
        if entries != chunks:
            self.broken(f"{entries} entries for {chunks} chunks")
        for b in range(self.c.t.num_buckets):
            if expected[b] != self.c.t.bucket[b].passed:
                self.broken(f"bucket {b} counts {self.c.t.bucket[b].passed}, not {expected[b]}")
        return 0
