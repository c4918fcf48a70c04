# SPDX-License-Identifier: Apache-2.0
"""A set of keys that answers "not in it" for sure and "in it" perhaps: a blocked Bloom filter.

Owns its bits, two bytes a key of room. One thread at a time. Each key sets six bits of one cache
line, so that a question costs one miss; at its room about one absent key in 800 passes for present.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from kvtier._core.slots cimport kvt_key, load_key

cdef extern from *:
    """
    #include "slots.h"

    /* The line of a key and the bits it has there: 6 times 9 bits of a hash of its hash. */
    static inline uint64_t *kvt_filter_line(
        uint64_t *lines, uint64_t num_lines, const kvt_key *k, uint64_t mask[8])
    {
        uint64_t bits = kvt_mix(k->hash, 0xa24baed4963ee407ULL);
        memset(mask, 0, 8 * sizeof(uint64_t));
        for (int i = 0; i < 6; i++, bits >>= 9)
            mask[bits >> 6 & 7] |= 1ULL << (bits & 63);
        return lines + 8 * (uint64_t)(((unsigned __int128)k->hash * num_lines) >> 64);
    }

    static inline void kvt_filter_add(uint64_t *lines, uint64_t num_lines, const kvt_key *k)
    {
        uint64_t mask[8], *line = kvt_filter_line(lines, num_lines, k, mask);
        for (int i = 0; i < 8; i++)
            line[i] |= mask[i];
    }

    static inline int kvt_filter_has(uint64_t *lines, uint64_t num_lines, const kvt_key *k)
    {
        uint64_t mask[8], lacking = 0, *line = kvt_filter_line(lines, num_lines, k, mask);
        for (int i = 0; i < 8; i++)
            lacking |= mask[i] & ~line[i];
        return !lacking;
    }
    """
    void kvt_filter_add(uint64_t *lines, uint64_t num_lines, const kvt_key *key) nogil
    bint kvt_filter_has(uint64_t *lines, uint64_t num_lines, const kvt_key *key) nogil

cdef enum:
    LINE_KEYS = 32  # of 512 bits, 16 a key


cdef class KeyFilter:
    """Keys added so far, perhaps with a few others."""

    cdef uint64_t *_lines  # num_lines lines of 8 words; owned
    cdef uint64_t _num_lines

    def __cinit__(self, int64_t room):
        if room < 1:
            raise ValueError(f"a filter has room for at least one key, got {room}")
        self._num_lines = (room - 1) // LINE_KEYS + 1
        self._lines = <uint64_t *> calloc(self._num_lines, 64)
        if self._lines is NULL:
            raise MemoryError(f"2 bytes a key for a filter of {room} keys")

    def __dealloc__(self):
        free(self._lines)

    @property
    def nbytes(self):
        return self._num_lines * 64

    def read(self, int64_t offset, int64_t length):
        self._check(offset, length)
        return PyBytes_FromStringAndSize(<char *> self._lines + offset, length)

    def merge(self, int64_t offset, bytes data not None):
        cdef int64_t length = len(data), i
        cdef uint64_t word
        cdef char *source = data
        cdef uint64_t *to
        self._check(offset, length)
        to = self._lines + offset // 8
        for i in range(length // 8):
            memcpy(&word, source + 8 * i, 8)
            to[i] |= word

    cdef int _check(self, int64_t offset, int64_t length) except -1:
        if offset % 8 or length % 8 or offset < 0 or length < 0:
            raise ValueError(f"a part of a filter is whole words, got [{offset}, +{length})")
        if length > <int64_t> (self._num_lines * 64) - offset:
            raise ValueError(f"[{offset}, +{length}) of {self._num_lines * 64} bytes")
        return 0

    def add(self, keys):
        cdef kvt_key k
        for key in keys:
            load_key(&k, key)
            kvt_filter_add(self._lines, self._num_lines, &k)

    def __contains__(self, key):
        cdef kvt_key k
        load_key(&k, key)
        return kvt_filter_has(self._lines, self._num_lines, &k)

    def first_absent(self, list keys not None, Py_ssize_t start=0):
        cdef kvt_key k
        cdef Py_ssize_t n = len(keys)
        if start < 0 or start > n:
            raise IndexError(f"key {start} of {n}")
        while start < n:
            load_key(&k, keys[start])
            if not kvt_filter_has(self._lines, self._num_lines, &k):
                break
            start += 1
        return start
