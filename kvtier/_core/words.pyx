# SPDX-License-Identifier: Apache-2.0
"""Atomic 64-bit words in shared memory: the lines of a region's header.

Owns a view of the caller's buffer. Any thread. Each word has one writer; a plain Python store would
do on x86, but gives no order to payload bytes on other processors.
"""

from libc.stdint cimport int64_t, uintptr_t

cdef extern from *:
    """
    #include <stdint.h>
    static inline int64_t kvtier_load_acquire(const int64_t *word)
    {
        return __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
    static inline void kvtier_store_release(int64_t *word, int64_t value)
    {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    }
    """
    int64_t kvtier_load_acquire(const int64_t *word) noexcept nogil
    void kvtier_store_release(int64_t *word, int64_t value) noexcept nogil


cdef class Words:
    """Signed 64-bit words of a buffer, for one writer and any readers in other processes."""

    cdef unsigned char[::1] _bytes  # keeps the memory alive
    cdef int64_t *_words  # start of `_bytes`
    cdef Py_ssize_t _count  # words

    def __init__(self, unsigned char[::1] buffer not None):
        cdef Py_ssize_t size = buffer.shape[0]
        if size == 0 or size % 8:
            raise ValueError(f"a buffer of words has a positive multiple of 8 bytes, got {size}")
        if <uintptr_t> &buffer[0] % 8:
            raise ValueError("a buffer of words is aligned to 8 bytes")
        self._bytes = buffer
        self._words = <int64_t *> &buffer[0]
        self._count = size // 8

    def __len__(self):
        return self._count

    def load(self, Py_ssize_t index):
        """Word `index`, acquire."""
        if not 0 <= index < self._count:
            raise IndexError(f"word {index} of {self._count}")
        return kvtier_load_acquire(self._words + index)

    def store(self, Py_ssize_t index, int64_t value):
        """Set word `index`, release."""
        if not 0 <= index < self._count:
            raise IndexError(f"word {index} of {self._count}")
        kvtier_store_release(self._words + index, value)
