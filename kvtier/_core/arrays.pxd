# SPDX-License-Identifier: Apache-2.0
"""Numbers of slots and generations in numpy's arrays: those that callers give, and new ones.

Not by the buffer protocol: an export costs more than a batch of pins. Whoever cimports this calls
``import_array``; an array that was given to a call keeps its memory as long as the call.
"""

from libc.stdint cimport int64_t, uint32_t

cimport numpy as cnp


cdef inline void *numbers(object array, int kind, Py_ssize_t *n) except? NULL:
    """Memory of an array of NPY_INT64 or NPY_UINT32 that is contiguous, and how many it has."""
    if (
        not cnp.PyArray_Check(array)
        or cnp.PyArray_TYPE(array) != kind
        or not cnp.PyArray_ISCARRAY_RO(array)
    ):
        raise TypeError(
            f"wants a contiguous array of {'int64' if kind == cnp.NPY_INT64 else 'uint32'}")
    n[0] = cnp.PyArray_SIZE(array)
    return cnp.PyArray_DATA(array)


cdef inline int64_t *int64s(object array, Py_ssize_t *n) except? NULL:
    return <int64_t *> numbers(array, cnp.NPY_INT64, n)


cdef inline uint32_t *uint32s(object array, Py_ssize_t *n) except? NULL:
    return <uint32_t *> numbers(array, cnp.NPY_UINT32, n)


cdef inline object new_int64s(Py_ssize_t n, int64_t **data):
    """*data is valid while the array lives."""
    cdef cnp.npy_intp size = n
    array = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
    data[0] = <int64_t *> cnp.PyArray_DATA(array)
    return array


cdef inline object new_uint32s(Py_ssize_t n, uint32_t **data):
    cdef cnp.npy_intp size = n
    array = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)
    data[0] = <uint32_t *> cnp.PyArray_DATA(array)
    return array
