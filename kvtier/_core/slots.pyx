# SPDX-License-Identifier: Apache-2.0
"""Slot records and key table of a region: what owner, workers and service share.

Owns no memory: it views buffers of a mapping and keeps them exported. Every method may be called by
any thread of any process that maps the region, because every change is a compare-and-swap on the
slot's word (`slots.h` has the order of loads and stores). Keys are written by `Index` alone.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from kvtier.errors import InternalError

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void *at) nogil

cdef enum:
    BLOCK = 32  # keys whose cache misses run at the same time

RECORD_BYTES = sizeof(kvt_record)
FREE = KVT_FREE
WRITING = KVT_WRITING
READY = KVT_READY
ORPHAN = KVT_ORPHAN

MAX_SLOTS = 2**31 - 1
"""The owner's lists use 32-bit slot numbers."""


def table_bytes(num_slots: int) -> int:
    """Bytes of the key table for `num_slots` slots: a bucket of one cache line for every four."""
    if num_slots < 1 or num_slots > MAX_SLOTS:
        raise ValueError(f"num_slots is 1 to {MAX_SLOTS}, got {num_slots}")
    return (num_slots + 3) // 4 * sizeof(kvt_bucket)


cdef void *address(object buffer, Py_ssize_t needed, str what) except NULL:
    """Start of `buffer`; the caller keeps it exported."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    cdef void *start = view.buf
    cdef Py_ssize_t size = view.len
    PyBuffer_Release(&view)
    if size < needed:
        raise ValueError(f"{what} needs {needed} bytes, the buffer has {size}")
    if <size_t> start % 64:
        raise ValueError(f"{what} must be aligned to 64 bytes")
    return start


cdef class SlotTable:
    """View of the slot records and the key table inside a mapped region. See `slots.pyi`."""

    def __init__(self, records, table, num_slots: int):
        cdef Py_ssize_t wanted = table_bytes(num_slots)
        self._records = memoryview(records)
        self._table = memoryview(table)
        self.c.rec = <kvt_record *> address(
            self._records, num_slots * <Py_ssize_t> sizeof(kvt_record), "records")
        self.c.bucket = <kvt_bucket *> address(self._table, wanted, "table")
        self.c.num_slots = num_slots
        self.c.num_buckets = wanted // <Py_ssize_t> sizeof(kvt_bucket)

    @property
    def num_slots(self) -> int:
        return self.c.num_slots

    cdef kvt_record *record(self, int64_t slot) except NULL:
        # Also refuses a table whose __init__ failed: it has no slots.
        if slot < 0 or <uint64_t> slot >= self.c.num_slots:
            raise IndexError(f"slot {slot} is outside 0..{self.c.num_slots}")
        return &self.c.rec[slot]

    def find(self, key: bytes) -> int:
        """Slot of `key` in state READY or WRITING, or -1."""
        cdef kvt_key k
        cdef uint64_t word
        load_key(&k, key)
        return kvt_find(&self.c, &k, &word) if self.c.num_slots else -1

    def states(self, keys) -> bytes:
        """State of each key as one byte: READY, WRITING, or FREE where the table has none."""
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = len(items), at, i, m
        cdef bytes states = PyBytes_FromStringAndSize(NULL, n)
        cdef char *out = states
        cdef kvt_key block[BLOCK]
        cdef uint64_t word
        if self.c.num_slots == 0:
            return bytes(n)
        for at in range(0, n, BLOCK):
            m = min(n - at, <Py_ssize_t> BLOCK)
            for i in range(m):
                load_key(&block[i], items[at + i])
                prefetch(&self.c.bucket[kvt_home(&self.c, block[i].hash)])
            for i in range(m):
                kvt_find(&self.c, &block[i], &word)
                out[at + i] = <char> kvt_state(word)
        return states

    def state(self, slot: int) -> int:
        return kvt_state(kvt_load(self.record(slot)))

    def generation(self, slot: int) -> int:
        return kvt_gen(kvt_load(self.record(slot)))

    def owner_pins(self, slot: int) -> int:
        return kvt_owner(kvt_load(self.record(slot)))

    def service_pins(self, slot: int) -> int:
        return kvt_service(kvt_load(self.record(slot)))

    def key(self, slot: int) -> bytes:
        """Key of `slot`, b"" if it has none. Meaningful under a pin or on the owner's thread."""
        cdef kvt_record *r = self.record(slot)
        return PyBytes_FromStringAndSize(<const char *> r.key, min(<int> r.key_len, KVT_KEY_BYTES))

    def length(self, slot: int) -> int:
        """Payload bytes of the chunk in `slot`."""
        return self.record(slot).length

    def crc(self, slot: int) -> int | None:
        """CRC-32C of the payload, or None while nobody has taken it."""
        cdef kvt_record *r = self.record(slot)
        if not kvt_flags(r) & KVT_CRC_VALID:
            return None
        return kvt_load_u32(&r.crc, KVT_ACQUIRE)

    def unsaved(self, slot: int) -> bool:
        """Whether no secondary tier holds the chunk yet."""
        return (kvt_flags(self.record(slot)) & KVT_UNSAVED) != 0

    def pin_service(self, slot: int, generation: int, key: bytes) -> bool:
        """Pin `slot` for the service if it is READY with `generation` and holds `key`.

        Also False when the slot has all 32,767 service pins that fit.
        """
        cdef kvt_record *r = self.record(slot)
        cdef kvt_key k
        cdef uint32_t g = generation
        load_key(&k, key)
        if kvt_pin(r, g, KVT_SERVICE_ONE, KVT_SERVICE_MASK) != 1:
            return False
        if kvt_same_key(r, &k):
            return True
        self.give_back(r, g)
        return False

    cdef int give_back(self, kvt_record *r, uint32_t generation) except -1:
        cdef uint64_t after
        if not kvt_unpin(r, generation, KVT_SERVICE_ONE, KVT_SERVICE_MASK, &after):
            raise InternalError(
                f"slot {r - self.c.rec} has no service pin in generation {generation}")
        return 0

    def unpin_service(self, slot: int, generation: int) -> None:
        """Give one service pin back. InternalError if there is none."""
        self.give_back(self.record(slot), generation)

    def find_and_pin_service(self, key: bytes) -> tuple[int, int] | None:
        """(slot, generation), pinned for the service, if `key` is READY; else None."""
        cdef kvt_key k
        cdef uint32_t g = 0
        load_key(&k, key)
        cdef int64_t slot = kvt_find_and_pin(&self.c, &k, &g) if self.c.num_slots else -1
        return None if slot < 0 else (slot, g)

    def set_crc(self, slot: int, generation: int, crc: int) -> bool:
        """Note the checksum of a READY slot; False if the slot has moved on."""
        cdef kvt_record *r = self.record(slot)
        cdef uint32_t value = crc
        # The short pin keeps the slot from being reused between the check and the store.
        if kvt_pin(r, generation, KVT_SERVICE_ONE, KVT_SERVICE_MASK) != 1:
            return False
        kvt_store_u32(&r.crc, value, KVT_RELAXED)
        kvt_set_flags(&r.flags, KVT_CRC_VALID, KVT_ACQ_REL)
        self.give_back(r, generation)
        return True

    def mark_saved(self, slot: int, generation: int) -> bool:
        """Note that a secondary tier holds the chunk; False if the slot has moved on."""
        cdef kvt_record *r = self.record(slot)
        if kvt_pin(r, generation, KVT_SERVICE_ONE, KVT_SERVICE_MASK) != 1:
            return False
        kvt_clear_flags(&r.flags, 0xff ^ KVT_UNSAVED, KVT_ACQ_REL)
        self.give_back(r, generation)
        return True

    def clear_service_pins(self, start: int, stop: int) -> int:
        """Take back all service pins in [start, stop). Only after the service is dead."""
        cdef int64_t first = start
        cdef int64_t last = stop
        cdef int64_t slot
        cdef int64_t taken = 0
        if first < 0 or last < first or <uint64_t> last > self.c.num_slots:
            raise IndexError(f"slots {start}..{stop} are outside 0..{self.c.num_slots}")
        with nogil:
            for slot in range(first, last):
                taken += take_back(&self.c.rec[slot])
        return taken

    def totals(self) -> dict[str, int]:
        """Linear walk for tests and diagnosis: slots by state, owner and service pins."""
        cdef int64_t states[4]
        cdef int64_t owner = 0, service = 0
        cdef uint64_t slot, word
        states[0] = states[1] = states[2] = states[3] = 0
        for slot in range(self.c.num_slots):
            word = kvt_load(&self.c.rec[slot])
            states[kvt_state(word)] += 1
            owner += kvt_owner(word)
            service += kvt_service(word)
        return {
            "free": states[0], "writing": states[1], "ready": states[2], "orphan": states[3],
            "owner_pins": owner, "service_pins": service,
        }


cdef int64_t take_back(kvt_record *r) noexcept nogil:
    cdef uint64_t word = kvt_load(r)
    while word & KVT_SERVICE_MASK:
        if kvt_cas(r, &word, word & ~KVT_SERVICE_MASK):
            return kvt_service(word)
    return 0
