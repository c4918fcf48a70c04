# SPDX-License-Identifier: Apache-2.0
# distutils: include_dirs = kvtier/_core
"""Copies between accelerator pages and canonical pages, and CRC-32C.

Owns the compiled plans, never the memory they point at: whoever makes a plan keeps the mappings of
accelerator and region alive (``owner`` holds a reference). Plans do not change after construction,
so any thread may use them; the kernels run without the GIL and cannot fail, because the runs are
proven when a plan is made and every index is checked before the first byte moves.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, qsort

import numpy as np

from kvtier._core import runs as _runs


cdef extern from "crc32c.h" nogil:
    void kvtier_crc_init()
    int kvtier_crc_has_instruction()
    uint32_t kvtier_crc32c(uint32_t value, const void *data, size_t n)
    uint32_t kvtier_crc32c_tables(uint32_t value, const void *data, size_t n)

cdef extern from "copy.h" nogil:
    ctypedef struct kvtier_run:
        int64_t size, local, canonical
        int64_t inner, inner_local, inner_canonical
        int64_t outer, outer_local, outer_canonical
    ctypedef struct kvtier_page:
        char *base
        int64_t stride, block_offset, num_writers, writer_index
        const kvtier_run *runs
        int64_t num_runs, bytes
    ctypedef struct kvtier_job:
        int64_t block
        char *canonical
        int64_t page_id
    int KVTIER_STORE, KVTIER_LOAD, KVTIER_ZERO
    void kvtier_copy_init()
    int64_t kvtier_copy_blocks(const kvtier_page *pages, int64_t num_pages,
                               const kvtier_job *jobs, int64_t num_jobs, int what, int stream,
                               int vectors)

kvtier_crc_init()
kvtier_copy_init()

cdef Py_ssize_t GIL_BYTES = 4096  # below this, giving the GIL back costs more than the work
cdef int64_t MAX_ADDRESS = _runs.MAX_ADDRESS  # sums below it never overflow
STREAM_BYTES = 8 << 20

CRC32C_HARDWARE = bool(kvtier_crc_has_instruction())


def crc32c(data, uint32_t value=0):
    """CRC-32C (Castagnoli) of `data`, continued from `value`. Releases the GIL above 4 KiB."""
    return _crc_of_buffer(data, value, False)


def crc32c_tables(data, uint32_t value=0):
    """The same by tables: what runs on processors without the instruction."""
    return _crc_of_buffer(data, value, True)


cdef object _crc_of_buffer(object data, uint32_t value, bint tables):
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len <= GIL_BYTES:
            value = _crc(value, view.buf, view.len, tables)
        else:
            with nogil:
                value = _crc(value, view.buf, view.len, tables)
    finally:
        PyBuffer_Release(&view)
    return value


cdef uint32_t _crc(uint32_t value, const void *data, size_t n, bint tables) noexcept nogil:
    return kvtier_crc32c_tables(value, data, n) if tables else kvtier_crc32c(value, data, n)


def crc32c_address(const uint64_t[::1] addresses not None, const int64_t[::1] lengths not None):
    """CRC-32C of each memory range; GIL released for the whole batch. The caller pins them."""
    cdef Py_ssize_t n = addresses.shape[0]
    cdef Py_ssize_t i
    if lengths.shape[0] != n:
        raise ValueError(f"{n} addresses, but {lengths.shape[0]} lengths")
    result = np.empty(n, dtype=np.uint32)
    cdef uint32_t[::1] out = result
    for i in range(n):
        if lengths[i] < 0 or (addresses[i] == 0 and lengths[i]):
            raise ValueError(f"range {i}: {lengths[i]} bytes at address {addresses[i]}")
    with nogil:
        for i in range(n):
            out[i] = kvtier_crc32c(0, <const void *><uintptr_t>addresses[i], <size_t>lengths[i])
    return result


cdef class PagePlan:
    """How one layer's local page maps to its place in a canonical block."""

    cdef kvtier_page page  # its runs point into `compiled`
    cdef kvtier_run *compiled  # owned
    cdef readonly int64_t num_blocks  # accelerator blocks behind the base address
    cdef readonly int64_t local_bytes  # of the local page, without padding
    cdef readonly int64_t canonical_bytes  # of the canonical page
    cdef readonly tuple runs  # as given
    cdef readonly object owner  # keeps the accelerator's memory mapped

    def __cinit__(self):
        self.compiled = NULL

    def __init__(
        self,
        base,
        block_stride,
        num_blocks,
        local_bytes,
        block_offset,
        canonical_bytes,
        runs,
        num_writers=1,
        writer_index=0,
        owner=None,
    ):
        if self.compiled != NULL:
            raise ValueError("a plan is made once")
        runs = tuple(_runs.Run(*run) for run in runs)
        _runs.check_page(base, block_stride, num_blocks, local_bytes, block_offset, canonical_bytes)
        if num_writers < 1 or not 0 <= writer_index < num_writers:
            raise ValueError(f"writer {writer_index} of {num_writers}")
        _runs.prove_runs(runs, local_bytes, canonical_bytes)
        loops = _runs.compile_runs(runs)
        _runs.prove_loops(runs, loops)
        self.compiled = <kvtier_run *>malloc(len(loops) * sizeof(kvtier_run))
        if self.compiled == NULL:
            raise MemoryError
        cdef kvtier_run *run = self.compiled
        for loop in loops:
            run.size, run.local, run.canonical = loop[:3]
            run.inner, run.inner_local, run.inner_canonical = loop[3:6]
            run.outer, run.outer_local, run.outer_canonical = loop[6:]
            run += 1
        self.page.base = <char *><uintptr_t><uint64_t>base
        self.page.stride = block_stride
        self.page.block_offset = block_offset
        self.page.num_writers = num_writers
        self.page.writer_index = writer_index
        self.page.runs = self.compiled
        self.page.num_runs = len(loops)
        self.page.bytes = local_bytes
        self.num_blocks = num_blocks
        self.local_bytes = local_bytes
        self.canonical_bytes = canonical_bytes
        self.runs = runs
        self.owner = owner

    def __dealloc__(self):
        free(self.compiled)

    @property
    def base(self):
        return <uint64_t><uintptr_t>self.page.base

    @property
    def block_stride(self):
        return self.page.stride

    @property
    def block_offset(self):
        return self.page.block_offset

    @property
    def num_writers(self):
        return self.page.num_writers

    @property
    def writer_index(self):
        return self.page.writer_index


cdef class CopyPlan:
    """The page plans of one KV cache group, compiled for batches of blocks."""

    cdef kvtier_page *pages  # owned; their runs are kept by `plans`
    cdef int64_t num_pages
    cdef readonly tuple plans  # keeps the compiled runs alive
    cdef readonly object owner  # keeps the region mapped
    cdef readonly int64_t block_bytes  # canonical bytes of one block
    cdef readonly int64_t local_bytes  # bytes one block moves on this rank
    cdef readonly int64_t num_blocks  # the fewest over the layers
    cdef readonly int64_t stream_bytes  # batches from here on are written past the caches
    cdef bint vectors  # whether the processor's vector instructions may be used
    cdef int64_t region_base, slab_bytes, num_slabs  # addresses that are allowed; 0 slabs: any
    cdef int64_t stride_bytes  # between two chunks in a slab

    def __cinit__(self):
        self.pages = NULL

    def __init__(
        self,
        pages,
        block_bytes,
        region=None,
        owner=None,
        stream_bytes=STREAM_BYTES,
        vectors=True,
    ):
        if self.pages != NULL:
            raise ValueError("a plan is made once")
        self.plans = tuple(pages)
        if not self.plans:
            raise ValueError("no pages")
        for plan in self.plans:
            if not isinstance(plan, PagePlan):
                raise TypeError(f"not a PagePlan: {plan!r}")
        self.block_bytes = block_bytes
        self.owner = owner
        self.stream_bytes = stream_bytes
        self.vectors = vectors
        self._set_region(region)
        _runs.prove_pages(self.plans, block_bytes)
        self.num_blocks = min(plan.num_blocks for plan in self.plans)
        self.local_bytes = sum(plan.local_bytes for plan in self.plans)
        self.num_pages = len(self.plans)
        self.pages = <kvtier_page *>malloc(self.num_pages * sizeof(kvtier_page))
        if self.pages == NULL:
            raise MemoryError
        cdef int64_t i
        for i in range(self.num_pages):
            self.pages[i] = (<PagePlan>self.plans[i]).page

    def __dealloc__(self):
        free(self.pages)

    cdef int _set_region(self, object region) except -1:
        self.region_base = self.slab_bytes = self.num_slabs = self.stride_bytes = 0
        if region is None:
            return 0
        base, slab_bytes, num_slabs, stride_bytes = region
        if num_slabs < 1 or not self.block_bytes <= stride_bytes <= slab_bytes or base < 1:
            raise ValueError(
                f"region of {num_slabs} slabs of {slab_bytes} bytes at {base} for chunks "
                f"{stride_bytes} bytes apart")
        if base + slab_bytes * num_slabs > MAX_ADDRESS:
            raise ValueError("the region leaves the address space")
        self.region_base, self.slab_bytes, self.num_slabs = base, slab_bytes, num_slabs
        self.stride_bytes = stride_bytes
        return 0

    def store(
        self,
        const int64_t[::1] block_ids not None,
        const uint64_t[::1] canonical not None,
        const int64_t[::1] page_ids not None,
        int64_t start=0,
        stop=None,
    ):
        """Copy blocks into canonical blocks: bytes moved by this rank."""
        return self._run(KVTIER_STORE, block_ids, canonical, page_ids, start, stop)

    def load(
        self,
        const int64_t[::1] block_ids not None,
        const uint64_t[::1] canonical not None,
        int64_t start=0,
        stop=None,
    ):
        """Copy canonical blocks into accelerator blocks: bytes moved."""
        return self._run(KVTIER_LOAD, block_ids, canonical, None, start, stop)

    def zero(
        self, const uint64_t[::1] canonical not None, const int64_t[::1] page_ids not None
    ):
        """Zero this rank's part of canonical blocks that it was not given: bytes zeroed."""
        return self._run(KVTIER_ZERO, None, canonical, page_ids, 0, None)

    def check(
        self,
        const int64_t[::1] block_ids not None,
        const uint64_t[::1] canonical not None,
        const int64_t[::1] page_ids=None,
    ):
        """Check a whole batch without moving a byte, as ``store`` and ``load`` do."""
        cdef int what = KVTIER_LOAD if page_ids is None else KVTIER_STORE
        free(self._checked(what, block_ids, canonical, page_ids))

    cdef object _run(
        self,
        int what,
        const int64_t[::1] block_ids,
        const uint64_t[::1] canonical,
        const int64_t[::1] page_ids,
        int64_t first,
        object stop,
    ):
        cdef int64_t n = canonical.shape[0]
        cdef int64_t last = n if stop is None else stop
        if not 0 <= first <= last <= n:
            raise ValueError(f"part [{first}, {last}) of a batch of {n} blocks")
        cdef kvtier_job *jobs = self._checked(what, block_ids, canonical, page_ids)
        cdef int stream = n * self.local_bytes >= self.stream_bytes
        cdef int64_t moved
        with nogil:
            moved = kvtier_copy_blocks(
                self.pages, self.num_pages, jobs + first, last - first, what, stream, self.vectors
            )
            free(jobs)
        return moved

    cdef kvtier_job *_checked(
        self,
        int what,
        const int64_t[::1] blocks,
        const uint64_t[::1] canonical,
        const int64_t[::1] ids,
    ) except NULL:
        """The batch as the kernel reads it: a private copy, so that what was checked stays so."""
        cdef int64_t n = canonical.shape[0]
        if blocks is not None and blocks.shape[0] != n:
            raise ValueError(f"{blocks.shape[0]} block ids for {n} canonical addresses")
        if ids is not None and ids.shape[0] != n:
            raise ValueError(f"{ids.shape[0]} page ids for {n} canonical addresses")
        cdef kvtier_job *jobs = <kvtier_job *>malloc((n + 1) * sizeof(kvtier_job))
        cdef uint64_t *targets = <uint64_t *>malloc((n + 1) * sizeof(uint64_t))
        cdef int64_t i, bad
        try:
            if jobs == NULL or targets == NULL:
                raise MemoryError
            for i in range(n):
                jobs[i].block = 0 if blocks is None else blocks[i]
                jobs[i].canonical = <char *><uintptr_t>canonical[i]
                jobs[i].page_id = 0 if ids is None else ids[i]
                targets[i] = <uint64_t>jobs[i].block if what == KVTIER_LOAD else canonical[i]
            bad = self._first_bad(jobs, n)
            if bad >= 0:
                self._refuse(bad, jobs + bad)
            _refuse_twice(targets, n)
        except BaseException:
            free(jobs)
            raise
        finally:
            free(targets)
        return jobs

    cdef int64_t _first_bad(self, const kvtier_job *jobs, int64_t n) noexcept nogil:
        cdef int64_t i
        for i in range(n):
            if not 0 <= jobs[i].block < self.num_blocks or jobs[i].page_id < 0:
                return i
            if not self._allowed(<uint64_t><uintptr_t>jobs[i].canonical):
                return i
        return -1

    cdef bint _allowed(self, uint64_t address) noexcept nogil:
        """Whether a canonical block may start here: at a multiple of its size in one chunk."""
        cdef uint64_t offset, inside
        if self.num_slabs == 0:
            return 0 < address <= <uint64_t>(MAX_ADDRESS - self.block_bytes)
        if address < <uint64_t>self.region_base:
            return False
        offset = address - <uint64_t>self.region_base
        if offset // <uint64_t>self.slab_bytes >= <uint64_t>self.num_slabs:
            return False
        offset = offset % <uint64_t>self.slab_bytes
        inside = offset % <uint64_t>self.stride_bytes
        return (
            inside % <uint64_t>self.block_bytes == 0
            and inside + <uint64_t>self.block_bytes <= <uint64_t>self.stride_bytes
            and offset - inside + <uint64_t>self.stride_bytes <= <uint64_t>self.slab_bytes
        )

    cdef int _refuse(self, int64_t i, const kvtier_job *job) except -1:
        if not 0 <= job.block < self.num_blocks:
            raise IndexError(f"item {i}: block {job.block} of {self.num_blocks}")
        if job.page_id < 0:
            raise IndexError(f"item {i}: page id {job.page_id}")
        address = <uint64_t><uintptr_t>job.canonical
        if self.num_slabs == 0:
            raise IndexError(f"item {i}: canonical block at address {address}")
        raise IndexError(
            f"item {i}: address {address} is not the start of a block of {self.block_bytes} bytes "
            f"in chunks {self.stride_bytes} bytes apart in {self.num_slabs} slabs of "
            f"{self.slab_bytes} bytes at {self.region_base}"
        )


cdef int _compare(const void *left, const void *right) noexcept nogil:
    cdef uint64_t a = (<const uint64_t *>left)[0]
    cdef uint64_t b = (<const uint64_t *>right)[0]
    return (a > b) - (a < b)


cdef int _refuse_twice(uint64_t *targets, int64_t n) except -1:
    """One batch writes each target once: with two threads the order of two writes is open."""
    cdef int64_t i
    for i in range(1, n):
        if targets[i - 1] >= targets[i]:
            qsort(targets, n, sizeof(uint64_t), _compare)
            break
    for i in range(1, n):
        if targets[i - 1] == targets[i]:
            raise ValueError(f"the batch writes to {targets[i]} twice")
    return 0
