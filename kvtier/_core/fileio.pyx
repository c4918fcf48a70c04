# SPDX-License-Identifier: Apache-2.0
"""Batches of chunk files: store, load, find, set aside, with the GIL released for the whole batch.

Job: carry items over the boundary once a batch; the system calls are in ``fileio.h``. A `Batch`
owns its items, a `Directory` its descriptor. Several threads may work on one batch at the same
time: each takes the next item from an atomic cursor, so they share the work whatever its shape.
Nothing raises inside a batch; every item has a status of its own.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen

import os

cdef extern from "crc32c.h" nogil:
    void kvtier_crc_init()
    uint32_t kvtier_crc32c(uint32_t value, const void *data, size_t n)
    uint32_t kvtier_crc32c_tables(uint32_t value, const void *data, size_t n)

cdef extern from * nogil:
    """
    static int64_t kv_next(int64_t *cursor) {
        return __atomic_fetch_add(cursor, 1, __ATOMIC_RELAXED);
    }
    static int64_t kv_peek(int64_t *value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
    static void kv_put(int64_t *value, int64_t what) {
        __atomic_store_n(value, what, __ATOMIC_RELEASE);
    }
    static void kv_gate(int32_t *gate, int32_t fd) { __atomic_store_n(gate, fd, __ATOMIC_RELEASE); }
    """
    int64_t kv_next(int64_t *cursor)
    int64_t kv_peek(int64_t *value)
    void kv_put(int64_t *value, int64_t what)
    void kv_gate(int32_t *gate, int32_t fd)

cdef extern from "fileio.h" nogil:
    enum:
        KV_PAGE
        KV_KEY_MAX
        KV_TAG_MAX
        KV_PATH_MAX
        KV_OPS
        KV_WAITING
        KV_EXISTS
        KV_MISSING
        KV_SHORT
        KV_CORRUPT
        KV_FOREIGN
    struct kv_fault:
        int32_t error
        int32_t gate
        int64_t after
        int64_t times
        int64_t limit
        int64_t lost
        int64_t calls
    struct kv_item:
        uint8_t key[40]
        int32_t key_len
        int32_t status
        int32_t has_crc
        uint32_t crc
        int32_t flags
        uint64_t address
        int64_t length
        int64_t blocks
        int64_t replaced
        int64_t atime
        int64_t mtime
    struct kv_dir:
        int32_t fd
        int32_t direct
        int32_t sync
        int32_t preallocate
        uint32_t file_mode
        uint32_t dir_mode
        int64_t touch_seconds
        int64_t counter
        int64_t fallbacks
        uint8_t digest[32]
        char tag[96]
        kv_fault *faults
    struct kv_bounce:
        uint8_t *pages
        uint8_t *large
        int64_t large_bytes
    struct kv_entry:
        char name[256]
        int32_t is_dir
        int64_t size
        int64_t blocks
        int64_t used
        int64_t mtime
    int kv_store(kv_dir *d, kv_item *it, kv_bounce *b)
    int kv_load(kv_dir *d, kv_item *it, kv_bounce *b)
    int kv_find(kv_dir *d, kv_item *it)
    int kv_set_aside(kv_dir *d, kv_item *it)
    int kv_path(const kv_item *it, char *out)
    int kv_list(kv_dir *d, const char *path, kv_entry **out, int64_t *count)
    int kv_unlinkat(kv_dir *d, const char *path)

cdef extern from "errno.h" nogil:
    int errno
    int c_ENOMEM "ENOMEM"

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)

PAGE_BYTES = KV_PAGE
TAG_MAX = KV_TAG_MAX - 1
WAITING = KV_WAITING
EXISTS = KV_EXISTS
MISSING = KV_MISSING
SHORT = KV_SHORT
CORRUPT = KV_CORRUPT
FOREIGN = KV_FOREIGN

cdef enum:
    STORE = 0
    LOAD = 1
    FIND = 2
    SET_ASIDE = 3

OPERATIONS = (
    "open", "read", "write", "rename", "stat", "fsync", "fallocate", "mkdir", "unlink", "close",
)

if len(OPERATIONS) != KV_OPS:
    raise ImportError("fileio.pyx and fileio.h differ: run `python setup.py build_ext --inplace`")

kvtier_crc_init()


def crc32c(data, uint32_t value=0):
    cdef const uint8_t[::1] view = memoryview(data).cast("B")
    if view.shape[0] == 0:
        return value
    with nogil:
        value = kvtier_crc32c(value, &view[0], view.shape[0])
    return value


def crc32c_tables(data, uint32_t value=0):
    cdef const uint8_t[::1] view = memoryview(data).cast("B")
    if view.shape[0] == 0:
        return value
    return kvtier_crc32c_tables(value, &view[0], view.shape[0])


cdef class Faults:
    cdef kv_fault *table  # KV_OPS rows, owned; a Directory that uses it keeps this object alive

    def __cinit__(self):
        self.table = <kv_fault *>calloc(KV_OPS, sizeof(kv_fault))
        if self.table == NULL:
            raise MemoryError
        self.clear()

    def __dealloc__(self):
        free(self.table)

    cdef kv_fault *row(self, str operation) except NULL:
        cdef Py_ssize_t at = OPERATIONS.index(operation)
        return self.table + at

    def set(self, str operation, int error=0, after=0, times=-1, limit=-1, lost=0):
        cdef kv_fault *row = self.row(operation)
        row.after = row.calls + <int64_t>after
        row.times = times
        row.limit = limit
        row.lost = lost
        row.error = error

    def block(self, str operation, int fd):
        kv_gate(&self.row(operation).gate, fd)

    def calls(self, str operation):
        return kv_peek(&self.row(operation).calls)

    def clear(self):
        cdef int i
        for i in range(KV_OPS):
            self.table[i].error = 0
            self.table[i].after = 0
            self.table[i].times = 0
            self.table[i].limit = -1
            self.table[i].lost = 0
            kv_gate(&self.table[i].gate, -1)


cdef class Batch:
    cdef kv_item *items  # `size` of them, owned
    cdef int64_t size
    cdef int64_t cursor  # next item; atomic
    cdef int64_t stopped  # 1: nobody takes another item; atomic
    cdef int64_t absent  # first item that was not found (find with stop_at_absent); atomic
    cdef bint ordered  # find: items behind the first absent one need no call

    def __cinit__(self, keys, addresses=None, lengths=None, crcs=None, *, bint ordered=False):
        cdef int64_t i
        cdef bytes key
        cdef kv_item *it
        self.size = len(keys)
        self.ordered = ordered
        self.absent = self.size
        self.items = <kv_item *>calloc(max(1, self.size), sizeof(kv_item))
        if self.items == NULL:
            raise MemoryError
        for part in (addresses, lengths, crcs):
            if part is not None and len(part) != self.size:
                raise ValueError("keys, addresses, lengths and crcs must have one length")
        for i in range(self.size):
            key = keys[i]
            it = self.items + i
            if not 5 <= len(key) <= KV_KEY_MAX:
                raise ValueError(f"a key has 5 to {KV_KEY_MAX} bytes, got {len(key)}")
            memcpy(it.key, <const char *>key, len(key))
            it.key_len = <int32_t>len(key)
            it.status = KV_WAITING
            it.length = -1
            if lengths is not None:
                it.length = lengths[i]
            if addresses is not None:
                it.address = addresses[i]
                if it.length < 0 or it.address == 0:
                    raise ValueError("a payload needs an address and a length")
            if crcs is not None and crcs[i] is not None:
                it.crc = crcs[i]
                it.has_crc = 1

    def __dealloc__(self):
        free(self.items)

    def __len__(self):
        return self.size

    def stop(self):
        kv_put(&self.stopped, 1)

    @property
    def exhausted(self):
        return kv_peek(&self.stopped) != 0 or kv_peek(&self.cursor) >= self.size

    cdef kv_item *item(self, int64_t i) except NULL:
        if not 0 <= i < self.size:
            raise IndexError(i)
        return self.items + i

    def status(self, int64_t i):
        return self.item(i).status

    def statuses(self):
        cdef int64_t i
        return [self.items[i].status for i in range(self.size)]

    def crc(self, int64_t i):
        return self.item(i).crc if self.item(i).has_crc else None

    def crcs(self):
        cdef int64_t i
        return [
            self.items[i].crc if self.items[i].has_crc else None for i in range(self.size)
        ]

    def blocks(self, int64_t i):
        return self.item(i).blocks

    def replaced(self, int64_t i):
        return self.item(i).replaced

    def mtime(self, int64_t i):
        return self.item(i).mtime

    def flags(self, int64_t i):
        return self.item(i).flags

    def path(self, int64_t i):
        cdef char out[KV_PATH_MAX]
        cdef int n = kv_path(self.item(i), out)
        return out[:n].decode()


cdef class Directory:
    cdef kv_dir d
    cdef readonly Faults faults
    cdef readonly bint closed

    def __cinit__(
        self, int fd, bytes digest, str tag, *, bint direct=False, bint fsync=False,
        bint preallocate=False, int file_mode=0o600, int dir_mode=0o700,
        int64_t touch_seconds=-1, Faults faults=None,
    ):
        cdef bytes encoded = tag.encode("ascii")
        self.closed = True
        if len(digest) != 32:
            raise ValueError("a namespace digest has 32 bytes")
        if not 1 <= len(encoded) < KV_TAG_MAX or b"/" in encoded:
            raise ValueError(f"a tag has 1 to {KV_TAG_MAX - 1} characters and no slash")
        memset(&self.d, 0, sizeof(kv_dir))
        self.d.fd = fd
        self.d.direct = direct
        self.d.sync = fsync
        self.d.preallocate = preallocate
        self.d.file_mode = file_mode
        self.d.dir_mode = dir_mode
        self.d.touch_seconds = touch_seconds
        memcpy(self.d.digest, <const char *>digest, 32)
        memcpy(self.d.tag, <const char *>encoded, len(encoded))
        self.faults = faults
        self.d.faults = NULL if faults is None else faults.table
        self.closed = False

    def __dealloc__(self):
        # A directory that was replaced mid-run goes with the last batch that still uses it.
        if not self.closed:
            os.close(self.d.fd)

    def close(self):
        if not self.closed:
            self.closed = True
            os.close(self.d.fd)

    def fileno(self):
        if self.closed:
            raise ValueError("the directory is closed")
        return self.d.fd

    @property
    def direct(self):
        return bool(self.d.direct)

    @property
    def fallbacks(self):
        return kv_peek(&self.d.fallbacks)

    cdef object work(self, Batch batch, int operation, int64_t limit):
        cdef kv_bounce bounce
        cdef kv_item *it
        cdef void *memory = NULL
        cdef int64_t i, done = 0
        cdef int failed = 0
        if self.closed:
            raise ValueError("the directory is closed")
        if operation <= LOAD and batch.size and batch.items[0].address == 0:
            raise ValueError("the batch has no payload addresses")
        with nogil:
            memset(&bounce, 0, sizeof(kv_bounce))
            if operation <= LOAD:
                failed = posix_memalign(&memory, KV_PAGE, 2 * KV_PAGE)
                bounce.pages = <uint8_t *>memory
            while (limit < 0 or done < limit) and not kv_peek(&batch.stopped):
                i = kv_next(&batch.cursor)
                if i >= batch.size:
                    break
                it = batch.items + i
                done += 1
                if failed:
                    it.status = c_ENOMEM
                elif operation == STORE:
                    it.status = kv_store(&self.d, it, &bounce)
                elif operation == LOAD:
                    it.status = kv_load(&self.d, it, &bounce)
                elif operation == SET_ASIDE:
                    it.status = kv_set_aside(&self.d, it)
                elif batch.ordered and i > kv_peek(&batch.absent):
                    it.status = KV_MISSING
                else:
                    it.status = kv_find(&self.d, it)
                    if it.status != 0 and i < kv_peek(&batch.absent):
                        kv_put(&batch.absent, i)
            free(bounce.pages)
            free(bounce.large)
        return not batch.exhausted

    def store(self, Batch batch, int64_t limit=-1):
        return self.work(batch, STORE, limit)

    def load(self, Batch batch, int64_t limit=-1):
        return self.work(batch, LOAD, limit)

    def find(self, Batch batch, int64_t limit=-1):
        return self.work(batch, FIND, limit)

    def set_aside(self, Batch batch, int64_t limit=-1):
        return self.work(batch, SET_ASIDE, limit)

    def entries(self, str path):
        cdef bytes encoded = os.fsencode(path)
        cdef const char *c_path = encoded
        cdef kv_entry *entries = NULL
        cdef int64_t count = 0, i
        cdef int error
        if self.closed:
            raise ValueError("the directory is closed")
        with nogil:
            error = kv_list(&self.d, c_path, &entries, &count)
        if error:
            raise OSError(error, os.strerror(error), path)
        try:
            return [
                (
                    os.fsdecode(entries[i].name[:strlen(entries[i].name)]),
                    entries[i].is_dir != 0,
                    entries[i].size,
                    entries[i].blocks,
                    entries[i].used,
                    entries[i].mtime,
                )
                for i in range(count)
            ]
        finally:
            free(entries)

    def remove(self, paths):
        cdef bytes encoded
        cdef const char *c_path
        cdef int result
        cdef list statuses = []
        if self.closed:
            raise ValueError("the directory is closed")
        for path in paths:
            encoded = os.fsencode(path)
            c_path = encoded
            with nogil:
                result = 0 if kv_unlinkat(&self.d, c_path) == 0 else errno
            statuses.append(result)
        return statuses
