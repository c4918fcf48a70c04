# SPDX-License-Identifier: Apache-2.0
"""C side of a request's chunks, for `index`."""

from libc.stdint cimport int64_t, uint8_t, uint32_t


cdef enum:
    KVT_HIT = 1  # answered HIT since the end of the last step
    KVT_COUNTED = 2  # its hit or miss is in the metrics
    KVT_HELD = 4  # pinned for the request, at `slot` and `generation`
    KVT_UNSENT = 8  # asked for, and no tier has been told yet
    KVT_PICKED = 16  # among `picked`


cdef struct kvt_chunk:
    uint32_t slot
    uint32_t generation
    uint8_t state  # in host memory when it was looked at last
    uint8_t status  # what the tiers have of it
    uint8_t flags


cdef class RequestChunks:
    cdef list keys  # in the order of the first question
    cdef dict places  # of each key in `keys`; None while nobody has asked for it
    cdef kvt_chunk *chunk  # by place; owned
    cdef int64_t *batch  # places of the keys asked last; owned
    cdef int64_t *picked  # places of the keys that `pick` found; owned
    cdef Py_ssize_t room, batch_room, picked_room
    cdef Py_ssize_t num_batch, num_picked
    cdef readonly Py_ssize_t num_held
    cdef readonly Py_ssize_t num_unsent
    cdef readonly bint writing, holdable

    cdef int name(self) except -1
    cdef int64_t place(self, object key) except -1
    cdef int64_t known(self, object key, Py_ssize_t guess) except -2
    cdef bint is_batch(self, list items)
    cdef int enter(self, list items) except -1
    cdef int check_places(self, const int64_t *at, Py_ssize_t n) except -1
