# SPDX-License-Identifier: Apache-2.0
"""C side of the owner's room: `slabs.h` with what it includes, and the object."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvtier._core.slots cimport (
    KVT_OWNER_MASK, KVT_OWNER_ONE, SlotTable, kvt_key, kvt_table, kvt_unpin,
)


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


cdef class Room:
    cdef kvt_index *c  # one for each size class; looking up is the same with any; owned
    cdef kvt_slabs g  # what belongs to which class; its arrays are freed in __dealloc__
    cdef kvt_node *nodes  # of all slots; owned
    cdef uint64_t rank  # last one given
    cdef uint64_t top  # slots with memory behind them
    cdef SlotTable slots  # keeps records and table mapped
    cdef uint32_t *payload  # chunk bytes by group; owned
    cdef uint32_t *size_of  # size class by group; owned
    cdef uint32_t groups
    cdef readonly str policy

    cdef kvt_index *of_group(self, group) except NULL
    cdef uint64_t most_a_slab(self) noexcept
    cdef int changed(self) except -1
    cdef int broken(self, str what) except -1
    cdef int bounds(self, const int64_t *s, Py_ssize_t n, Py_ssize_t m) except -1
    cdef int lent(self, const int64_t *s, const uint32_t *g, Py_ssize_t n) except -1
    cdef int end_lease(self, uint32_t slot) except -1


cdef inline int unpin(Room room, uint32_t slot, uint32_t generation) except -1:
    """Give one owner pin back."""
    cdef uint64_t after = 0
    if not kvt_unpin(
        &room.c.t.rec[slot], generation, KVT_OWNER_ONE, KVT_OWNER_MASK, &after
    ):
        room.broken(f"slot {slot} has no owner pin in generation {generation}")
    if not after & KVT_OWNER_MASK:
        kvt_reconsider(kvt_of_slot(&room.g, slot), slot)
    return 0
