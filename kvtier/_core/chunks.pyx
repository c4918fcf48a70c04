# SPDX-License-Identifier: Apache-2.0
"""What is known of the chunks of one request, by place instead of by key.

A prompt is asked for again and again while it waits, and a step finds the caches cold: a dictionary
of a few hundred keys costs it two or three cache misses a key, an array a few in all. So a key is
hashed once, when it is first asked for, and has a place from then on. Owner's thread only; pins
counted here are the index's business (`Index.hold`), which reads and writes `chunk` itself.
"""

from cpython.bytes cimport PyBytes_CheckExact
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

cimport numpy as cnp

from kvtier._core.slots cimport KVT_READY, KVT_WRITING

cnp.import_array()

cdef enum:
    # What the tiers have: nobody knows yet; not to be had; it came.
    IS_ASKED = 1
    IS_GONE = 2
    IS_LOADED = 3
    # `kvtier.types.Lookup`
    MISS = 0
    HIT_PENDING = 2
    RETRY = 3

ASKED, GONE, LOADED = IS_ASKED, IS_GONE, IS_LOADED


cdef void *grown(void *memory, Py_ssize_t *room, Py_ssize_t wanted, size_t size) except NULL:
    """`memory` with room for `wanted` items, doubled if need be."""
    cdef Py_ssize_t to = max(wanted, 2 * room[0], 8)
    if memory is not NULL and wanted <= room[0]:
        return memory
    memory = realloc(memory, to * size)
    if memory is NULL:
        raise MemoryError
    room[0] = to
    return memory


cdef int64_t *numbers(cnp.ndarray array) except NULL:
    if cnp.PyArray_TYPE(array) != cnp.NPY_INT64 or not cnp.PyArray_ISCARRAY_RO(array):
        raise TypeError("places are a contiguous array of int64")
    return <int64_t *> cnp.PyArray_DATA(array)


cdef class RequestChunks:
    """See the stub."""

    def __cinit__(self):
        self.keys = []
        self.places = {}

    def __dealloc__(self):
        free(self.chunk)
        free(self.batch)
        free(self.picked)

    def __len__(self):
        return PyList_GET_SIZE(self.keys)

    cdef int name(self) except -1:
        """Have a dictionary of the places."""
        cdef Py_ssize_t i
        if self.places is None:
            self.places = dict(zip(self.keys, range(len(self.keys))))
            if len(self.places) != len(self.keys):
                # Some stand twice in the batch: one place counts from now on.
                for i in range(self.num_batch):
                    self.batch[i] = self.places[self.keys[self.batch[i]]]
        return 0

    cdef int64_t place(self, object key) except -1:
        """Place of a key, a new one if it has none."""
        self.name()
        cdef PyObject *known = PyDict_GetItemWithError(self.places, key)
        cdef Py_ssize_t at
        if known is not NULL:
            return <object> known
        if not PyBytes_CheckExact(key):
            raise TypeError(f"a key is bytes, got {type(key).__name__}")
        at = PyList_GET_SIZE(self.keys)
        self.chunk = <kvt_chunk *> grown(self.chunk, &self.room, at + 1, sizeof(kvt_chunk))
        memset(&self.chunk[at], 0, sizeof(kvt_chunk))
        self.places[key] = at
        self.keys.append(key)
        return at

    cdef int64_t known(self, object key, Py_ssize_t guess) except -2:
        """Place of a key, -1 if it has none; most likely `guess`."""
        cdef PyObject *at
        if guess < PyList_GET_SIZE(self.keys) and (
            PyList_GET_ITEM(self.keys, guess) == <PyObject *> key
        ):
            return guess
        self.name()
        at = PyDict_GetItemWithError(self.places, key)
        return -1 if at is NULL else <object> at

    cdef bint is_batch(self, list items):
        """Whether these keys were asked for last."""
        cdef Py_ssize_t n = PyList_GET_SIZE(items), i
        cdef PyObject *mine
        if n != self.num_batch:
            return False
        for i in range(n):
            mine = PyList_GET_ITEM(self.keys, self.batch[i])
            if PyList_GET_ITEM(items, i) != mine and (
                <object> PyList_GET_ITEM(items, i) != <object> mine
            ):
                return False
        return True

    cdef int enter(self, list items) except -1:
        """`batch` has the places of these keys then."""
        cdef Py_ssize_t n = PyList_GET_SIZE(items), i
        self.num_batch = 0
        self.batch = <int64_t *> grown(self.batch, &self.batch_room, n, sizeof(int64_t))
        if not self.keys:
            # The first batch, which for most requests is the only one. A prompt that is there as a
            # whole is never asked for key by key: no dictionary.
            self.chunk = <kvt_chunk *> grown(self.chunk, &self.room, n, sizeof(kvt_chunk))
            memset(self.chunk, 0, n * sizeof(kvt_chunk))
            self.keys, self.places = items[:], None
            for i in range(n):
                self.batch[i] = i
            self.num_batch = n
            return 0
        for i in range(n):
            self.batch[i] = self.place(<object> PyList_GET_ITEM(items, i))
        self.num_batch = n
        return 0

    cdef int check_places(self, const int64_t *at, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        for i in range(n):
            if at[i] < 0 or at[i] >= PyList_GET_SIZE(self.keys):
                raise IndexError(f"place {at[i]} of {PyList_GET_SIZE(self.keys)}")
        return 0

    def repeats(self, keys) -> bool:
        return self.is_batch(keys if type(keys) is list else list(keys))

    def status(self, key) -> int:
        self.name()
        cdef PyObject *at = PyDict_GetItemWithError(self.places, key)
        return 0 if at is NULL else self.chunk[<Py_ssize_t> <object> at].status

    def hit_all(self) -> None:
        cdef Py_ssize_t i
        for i in range(self.num_batch):
            if self.chunk[self.batch[i]].state == KVT_READY:
                self.chunk[self.batch[i]].flags |= KVT_HIT

    def answer(self, bint waits) -> int:
        cdef Py_ssize_t i
        cdef int said = MISS, one
        cdef kvt_chunk *c
        self.holdable = False
        for i in range(self.num_batch):
            c = &self.chunk[self.batch[i]]
            if c.state == KVT_READY:
                c.flags |= KVT_HIT
                if not c.flags & KVT_HELD:
                    self.holdable = True
                continue
            if not waits:
                break
            if c.state == KVT_WRITING and c.status != IS_GONE:
                one = HIT_PENDING
            elif c.status == IS_ASKED:
                one = RETRY
            else:
                break  # GONE, or LOADED and evicted since: loading it once more would be thrash
            if said == MISS:
                said = one
        return said

    def pick(self) -> list:
        cdef Py_ssize_t i
        cdef kvt_chunk *c
        cdef list found = []
        self.name()
        self.picked = <int64_t *> grown(
            self.picked, &self.picked_room, self.num_batch, sizeof(int64_t))
        self.num_picked = 0
        for i in range(self.num_batch):
            c = &self.chunk[self.batch[i]]
            if c.state == KVT_READY or (c.state == KVT_WRITING and c.status != IS_GONE):
                continue
            if c.status == IS_GONE or c.status == IS_LOADED:
                break  # the answer ends there
            if c.status or c.flags & KVT_PICKED:  # asked for already, or twice in the batch
                continue
            c.flags |= KVT_PICKED
            self.picked[self.num_picked] = self.batch[i]
            self.num_picked += 1
            found.append(<object> PyList_GET_ITEM(self.keys, self.batch[i]))
        for i in range(self.num_picked):
            self.chunk[self.picked[i]].flags &= ~KVT_PICKED
        return found

    def pick_one(self, key) -> None:
        cdef int64_t at = self.place(key)
        self.picked = <int64_t *> grown(self.picked, &self.picked_room, 1, sizeof(int64_t))
        self.picked[0] = at
        self.num_picked = 0 if self.chunk[at].status else 1

    def settle(self, Py_ssize_t asked, Py_ssize_t gone) -> None:
        cdef Py_ssize_t i
        cdef kvt_chunk *c
        if asked < 0 or gone < 0 or asked + gone > self.num_picked:
            raise ValueError(f"{asked} asked and {gone} gone of {self.num_picked}")
        for i in range(asked + gone):
            c = &self.chunk[self.picked[i]]
            c.status = IS_ASKED if i < asked else IS_GONE
            if i < asked:
                c.flags |= KVT_UNSENT
                self.num_unsent += 1
        self.num_picked = 0

    def take_unsent(self) -> tuple:
        cdef Py_ssize_t n = PyList_GET_SIZE(self.keys), i, done = 0
        cdef cnp.npy_intp size = self.num_unsent
        cdef cnp.ndarray places = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
        cdef int64_t *out = <int64_t *> cnp.PyArray_DATA(places)
        cdef list keys = []
        for i in range(n):
            if self.chunk[i].flags & KVT_UNSENT:
                self.chunk[i].flags &= ~KVT_UNSENT
                out[done] = i
                done += 1
                keys.append(<object> PyList_GET_ITEM(self.keys, i))
        self.num_unsent = 0
        return keys, places

    def gone(self, cnp.ndarray places not None, list positions=None) -> None:
        cdef int64_t *at = numbers(places)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(places), i
        self.check_places(at, n)
        if positions is None:
            for i in range(n):
                if self.chunk[at[i]].status == IS_ASKED:
                    self.chunk[at[i]].status = IS_GONE
            return
        for one in positions:
            i = one
            if i < 0 or i >= n:
                raise IndexError(f"position {i} of {n}")
            self.chunk[at[i]].status = IS_GONE

    def loaded(self, cnp.ndarray places not None) -> None:
        cdef int64_t *at = numbers(places)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(places), i
        self.check_places(at, n)
        for i in range(n):
            self.chunk[at[i]].status = IS_LOADED

    def count(self) -> tuple:
        cdef Py_ssize_t i, hits = 0, misses = 0
        cdef kvt_chunk *c
        for i in range(PyList_GET_SIZE(self.keys)):
            c = &self.chunk[i]
            if not c.flags & KVT_COUNTED and (c.status or c.flags & KVT_HIT):
                c.flags |= KVT_COUNTED
                # First those that were not there: later they may be, promoted.
                if c.status:
                    misses += 1
                else:
                    hits += 1
            c.flags &= ~KVT_HIT
        return hits, misses

    def clear(self) -> None:
        if self.num_held:
            raise ValueError(f"{self.num_held} chunks are held")
        self.keys, self.places = [], {}
        self.num_batch = self.num_picked = self.num_unsent = 0
        self.writing = self.holdable = False
