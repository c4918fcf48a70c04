# SPDX-License-Identifier: Apache-2.0
"""C side of the owner's index, for `chunks`."""

from kvtier._core.room cimport *
from kvtier._core.slots cimport kvt_key


cdef class Index(Room):
    cdef kvt_trail trail  # keys of the running request; its memory is freed in __dealloc__
    cdef kvt_key *scratch  # keys of the running call, inside `trail`
    cdef bint track_unsaved

    cdef int refuse(self, object key) except -1
    cdef int enlarge(self, kvt_index *x, list evicted, list unsaved) except -1
    cdef int take_slab(self, kvt_index *x, list evicted, list unsaved, bint saved_only) except -1
    cdef Py_ssize_t load(self, list keys) except -1
    cdef Py_ssize_t find(self, list keys) except -1
    cdef int clear_slot(
        self, kvt_index *x, uint64_t s, list gone, list slots, list generations) except -1
