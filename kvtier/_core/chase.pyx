# SPDX-License-Identifier: Apache-2.0
"""Dependent random reads: the floor that `benchmarks/index.py` compares the index with.

Owns nothing. Each read's address comes out of the one before, so no two cache misses overlap.
"""

from libc.stdint cimport int64_t, uint64_t


def chase(const uint64_t[::1] lines, reads: int, start: int) -> int:
    """Follow `lines` (64 bytes each, the first word leads on) for `reads` reads: the last index."""
    cdef uint64_t at = start
    cdef int64_t left = reads
    cdef uint64_t size = lines.shape[0] // 8
    if at >= size:
        raise IndexError(f"line {at} is outside 0..{size}")
    with nogil:
        while left > 0:
            at = lines[at * 8]
            if at >= size:  # no division here: it would be part of the floor
                break
            left -= 1
    return at
