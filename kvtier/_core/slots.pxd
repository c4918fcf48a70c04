# SPDX-License-Identifier: Apache-2.0
"""C side of the slot records and the key table, for `index`."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "slots.h" nogil:
    int KVT_KEY_BYTES
    enum:
        KVT_FREE
        KVT_WRITING
        KVT_READY
        KVT_ORPHAN
        KVT_CRC_VALID
        KVT_UNSAVED
    const uint64_t KVT_OWNER_ONE
    const uint64_t KVT_OWNER_MASK
    const uint64_t KVT_SERVICE_ONE
    const uint64_t KVT_SERVICE_MASK
    const uint64_t KVT_PINS_MASK

    ctypedef struct kvt_record:
        uint64_t word
        uint32_t crc
        uint32_t length
        uint8_t flags
        uint8_t key_len
        uint64_t key[5]

    ctypedef struct kvt_bucket:
        uint64_t entry[7]
        uint64_t passed

    ctypedef struct kvt_key:
        uint64_t w[5]
        uint64_t hash
        int64_t slot
        uint32_t group
        uint8_t len
        uint8_t hashed

    ctypedef struct kvt_table:
        kvt_record *rec
        kvt_bucket *bucket
        uint64_t num_slots
        uint64_t num_buckets

    unsigned kvt_state(uint64_t word)
    uint32_t kvt_gen(uint64_t word)
    unsigned kvt_owner(uint64_t word)
    unsigned kvt_service(uint64_t word)
    uint64_t kvt_word(unsigned state, uint32_t generation)
    uint64_t kvt_load(const kvt_record *record)
    bint kvt_cas(kvt_record *record, uint64_t *seen, uint64_t to)
    unsigned kvt_flags(const kvt_record *record)
    void kvt_key_load(kvt_key *key, const void *data, unsigned length)
    bint kvt_same_key(const kvt_record *record, const kvt_key *key)
    uint64_t kvt_holds(const kvt_record *record, const kvt_key *key)
    uint64_t kvt_home(const kvt_table *table, uint64_t hash)
    int64_t kvt_find(const kvt_table *table, const kvt_key *key, uint64_t *word)
    int64_t kvt_find_and_pin(kvt_table *table, const kvt_key *key, uint32_t *generation)
    int kvt_pin(kvt_record *record, uint32_t generation, uint64_t one, uint64_t mask)
    bint kvt_unpin(
        kvt_record *record, uint32_t generation, uint64_t one, uint64_t mask, uint64_t *after)
    uint8_t kvt_set_flags "__atomic_fetch_or"(uint8_t *flags, int bits, int order)
    uint8_t kvt_clear_flags "__atomic_fetch_and"(uint8_t *flags, int bits, int order)
    uint32_t kvt_load_u32 "__atomic_load_n"(const uint32_t *value, int order)
    void kvt_store_u32 "__atomic_store_n"(uint32_t *value, uint32_t to, int order)
    int KVT_ACQ_REL "__ATOMIC_ACQ_REL"
    int KVT_ACQUIRE "__ATOMIC_ACQUIRE"
    int KVT_RELAXED "__ATOMIC_RELAXED"


cdef class SlotTable:
    cdef kvt_table c  # points into the two buffers below, which keep the mapping alive
    cdef object _records  # memoryview: holds the export, so the mapping cannot be closed under us
    cdef object _table  # likewise

    cdef kvt_record *record(self, int64_t slot) except NULL
    cdef int give_back(self, kvt_record *r, uint32_t generation) except -1


cdef inline int load_key(kvt_key *to, object key) except -1:
    """Check one key and take its bytes over."""
    if not PyBytes_CheckExact(key):
        raise TypeError(f"a key is bytes, got {type(key).__name__}")
    cdef Py_ssize_t length = PyBytes_GET_SIZE(key)
    if length < 5 or length > KVT_KEY_BYTES:
        raise ValueError(f"a key has 5 to {KVT_KEY_BYTES} bytes, got {length}")
    kvt_key_load(to, PyBytes_AS_STRING(key), <unsigned> length)
    return 0
