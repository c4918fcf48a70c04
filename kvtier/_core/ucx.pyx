# SPDX-License-Identifier: Apache-2.0
"""Memory of other processes and hosts through UCX: register it, get from it, put into it.

Job: carry batches of one-sided transfers over the boundary once. `Context` owns UCX's context,
`Memory` a registration, `Worker` the transports with their threads and descriptors, `Endpoint` a
connection. The library is loaded at run time (``ucx.h``); no transport is named here.

One thread: the service's loop. Nothing here is thread safe, but objects may be dropped anywhere.
Invariants:

- UCX calls back into C only, which keeps counts; Python's callbacks run in `Worker.progress` and
  `Worker.close`, outside UCX and with the GIL, so they may call anything here.
- An operation ends when no chunk of it is with UCX any more, and ends once.
- Operations of an endpoint are handed to UCX in the order in which they were started, at most
  `WINDOW` chunks at a time: the rest of a cancelled batch is never begun.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

cimport cython
cimport numpy as cnp

from kvtier._core.arrays cimport int64s

import glob
import importlib.util
import itertools
import os
import struct
import zlib

from kvtier.errors import ClosedError, ConfigError, TierLostError

cnp.import_array()

WINDOW = IN_FLIGHT
TURN_SECONDS = TURN_NS / 1e9
KINDS = ("get", "put", "flush", "close")

# What UCX needs to be told apart from bytes that merely came in: see `seal`.
_ADDRESS = b"KVTa"
_KEY = b"KVTk"
_SEAL = struct.Struct("<4sI8s")  # magic, CRC-32 of all that follows it, context
_RANGE = struct.Struct("<QQ?")  # address, bytes, whether writable

_serials = itertools.count(1)
_SYSTEM = "libucp.so.0"  # whatever the loader finds by this name
# UCX would take SIGHUP for itself, and with its default action that ends a process; its log would
# go where a program's own output goes.
_QUIET = {"UCX_DEBUG_SIGNO": "0", "UCX_LOG_FILE": "stderr"}
_loaded = []  # what to say of the library, and what it was found as

include "ucx_queue.pxi"


cdef str words(ucs_status_t status):
    return ucs_status_string(status).decode()


cdef int check(ucs_status_t status, str what) except -1:
    if status != UCS_OK:
        raise TierLostError(f"UCX: {what}: {words(status)}")
    return 0


def seal(bytes magic, bytes context, bytes body):
    """Bytes for another process, which `unseal` tells from garbage; UCX itself would crash."""
    return _SEAL.pack(magic, zlib.crc32(context + body), context) + body


def unseal(bytes magic, bytes data):
    """Context and body of what `seal` made. TierLostError for anything else."""
    if len(data) > _SEAL.size:
        found, crc, context = _SEAL.unpack_from(data)
        if found == magic and crc == zlib.crc32(data[8:]):
            return context, data[_SEAL.size:]
    what = "address" if magic == _ADDRESS else "remote key"
    raise TierLostError(f"the peer's {what} ({len(data)} bytes) is not one that kvtier made")


def has_rdma():
    # The wheel knows no such device.
    return bool(glob.glob("/sys/class/infiniband/*")) and _loaded[1:] in ([], [_SYSTEM])


def _candidates():
    """Paths of libucp.so.0, the best first."""
    found = []
    if has_rdma():
        found.append(_SYSTEM)
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None:
        for folder in wheel.submodule_search_locations or []:
            found.append(os.path.join(folder, "lib", "libucp.so.0"))
    return found


def load():
    cdef char path[PATH_MAX]
    cdef char error[ERROR_BYTES]
    cdef bytes encoded
    if _loaded:
        return _loaded[0]
    errors = []
    quiet = _QUIET.keys() - os.environ.keys()
    os.environ.update({name: _QUIET[name] for name in quiet})
    try:
        for candidate in _candidates():
            encoded = os.fsencode(candidate)
            if kv_ucx_load(encoded, path, error, ERROR_BYTES) == 0:
                _loaded.append(
                    f"UCX {ucp_get_version_string().decode()} from {os.fsdecode(<bytes>path)}")
                _loaded.append(candidate)
                return _loaded[0]
            errors.append(error.decode(errors="replace"))
    finally:
        for name in quiet:
            del os.environ[name]
    why = "; ".join(errors) or "it is not installed"
    raise ConfigError(
        f"UCX cannot be loaded ({why}): `pip install libucx-cu12`, or set `transport: tcp`")


@cython.no_gc_clear
cdef class Context:
    cdef ucp_context_h handle  # owned
    cdef readonly bytes id
    cdef int pid  # a forked child must not touch what it shares

    def __cinit__(self):
        cdef ucp_params_t params
        cdef ucp_config_t *config = NULL
        cdef ucs_status_t status
        load()
        self.pid = getpid()
        self.id = os.urandom(8)
        check(ucp_config_read(NULL, NULL, &config), "its configuration (UCX_* variables)")
        # With error handling UCX takes for a rendezvous only transports that can take memory back
        # from a peer, and asks the same of get and put, which know no rendezvous: without this a
        # get between two processes of one host goes through a socket, at a tenth of the speed.
        status = ucp_config_modify(config, b"RNDV_THRESH", b"inf")
        params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED
        params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP
        # A registration may be dropped by another thread's garbage collection.
        params.mt_workers_shared = 1
        with nogil:
            if status == UCS_OK:
                status = ucp_init_version(
                    KV_UCX_MAJOR, KV_UCX_MINOR, &params, config, &self.handle)
        ucp_config_release(config)
        check(status, "cannot start (UCX_TLS leaves no usable transport?)")

    def __dealloc__(self):
        # Registrations and workers hold their context, so they are gone.
        if self.handle != NULL and self.pid == getpid():
            with nogil:
                ucp_cleanup(self.handle)

    def register(self, address, length, *, bint writable):
        return Memory(self, address, length, writable)


@cython.no_gc_clear
cdef class Memory:
    cdef Context context  # outlives it
    cdef ucp_mem_h handle  # owned; NULL when closed
    cdef readonly bytes rkey

    def __cinit__(self, Context context not None, uint64_t address, uint64_t length, bint writable):
        cdef ucp_mem_map_params_t params
        cdef ucs_status_t status
        cdef void *packed = NULL
        cdef size_t size = 0
        if address == 0 or length == 0:
            raise ValueError(f"cannot register {length} bytes at address {address}")
        self.context = context
        params.field_mask = (
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH
            | UCP_MEM_MAP_PARAM_FIELD_PROT)
        params.address = <void *><uintptr_t>address
        params.length = length
        params.prot = (
            UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE
            | UCP_MEM_MAP_PROT_REMOTE_READ)
        if writable:
            params.prot |= UCP_MEM_MAP_PROT_REMOTE_WRITE
        # The GIL is released wherever UCX may call the kernel: a registration takes seconds where
        # pages are pinned.
        with nogil:
            status = ucp_mem_map(context.handle, &params, &self.handle)
        check(
            status,
            f"cannot register {length} bytes (a limit of locked memory? see `ulimit -l`)")
        check(
            ucp_rkey_pack(context.handle, self.handle, &packed, &size),
            f"no remote key of {length} bytes")
        try:
            body = _RANGE.pack(address, length, writable) + (<const char *>packed)[:size]
        finally:
            ucp_rkey_buffer_release(packed)
        self.rkey = seal(_KEY, context.id, body)

    def __dealloc__(self):
        self.let_go()

    cdef void let_go(self):
        cdef ucp_mem_h handle = self.handle
        self.handle = NULL
        if handle != NULL and self.context.pid == getpid():
            with nogil:
                ucp_mem_unmap(self.context.handle, handle)

    def close(self):
        self.let_go()


@cython.no_gc_clear
cdef class Worker:
    cdef Context context  # outlives it
    cdef worker_t c
    cdef readonly bytes address
    cdef int fd  # UCX's own
    cdef set requests  # operations under way

    def __cinit__(self, Context context not None):
        cdef ucp_worker_params_t params
        cdef ucs_status_t status
        cdef ucp_address_t *address = NULL
        cdef size_t size = 0
        memset(&self.c, 0, sizeof(worker_t))
        self.context = context
        self.requests = set()
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE
        params.thread_mode = UCS_THREAD_MODE_SINGLE
        with nogil:
            status = ucp_worker_create(context.handle, &params, &self.c.handle)
        check(status, "no worker")
        check(ucp_worker_get_efd(self.c.handle, &self.fd), "no event descriptor")
        check(ucp_worker_get_address(self.c.handle, &address, &size), "no address")
        try:
            self.address = seal(_ADDRESS, context.id, (<const char *>address)[:size])
        finally:
            ucp_worker_release_address(self.c.handle, address)

    def __dealloc__(self):
        cdef ep_t *ep
        cdef op_t *op
        if self.context is None or self.context.pid != getpid():
            return
        # Endpoints and requests hold their worker, so they are gone, and nobody hears of an end.
        self.let_go()
        while self.c.ended != NULL:
            op = self.c.ended
            self.c.ended = op.next
            free(op.numbers)
            free(op)
        while self.c.eps != NULL:
            ep = self.c.eps
            self.c.eps = ep.next
            free(ep.keys)
            free(ep)

    cdef void let_go(self):
        """Close all endpoints, then the worker."""
        if self.c.handle != NULL:
            with nogil:
                shut(&self.c)

    cdef int alive(self) except -1:
        if self.c.handle == NULL:
            raise ClosedError("the UCX worker is closed")
        return 0

    @property
    def closed(self):
        return self.c.handle == NULL

    def fileno(self):
        self.alive()
        return self.fd

    def arm(self):
        cdef ucs_status_t status = UCS_ERR_BUSY
        self.alive()
        with nogil:
            if self.c.ended == NULL and not self.c.untold and not post(&self.c, kv_ucx_now()):
                status = ucp_worker_arm(self.c.handle)
        if status == UCS_ERR_BUSY:
            return False
        check(status, "cannot wait for events")
        return True

    def progress(self):
        cdef int64_t steps
        self.alive()
        with nogil:
            steps = drive(&self.c, kv_ucx_now() + TURN_NS)
        self.tell()
        return steps

    cdef int tell(self) except -1:
        """Call the callbacks of what has ended. These may start, cancel and close anything."""
        cdef op_t *op
        cdef ep_t *ep
        cdef Request request
        while self.c.ended != NULL:
            op = self.c.ended
            self.c.ended = op.next
            if op.request != NULL:
                request = <Request>op.request
                request.op = NULL
                self.requests.discard(request)
                report(request.callback, None if op.status == UCS_OK else (
                    f"{KINDS[op.kind]}: {words(op.status)}"))
                request.callback = None
            free(op.numbers)
            free(op)
        while self.c.untold:
            ep = self.c.eps
            while not ep.untold:
                ep = ep.next
            ep.untold = False
            self.c.untold -= 1
            if ep.endpoint != NULL:
                report((<Endpoint>ep.endpoint).on_error, words(ep.status))
        return 0

    def connect(self, bytes address not None, on_error):
        return Endpoint(self, address, on_error)

    def close(self):
        cdef op_t *op
        self.let_go()
        # What did not end in time has ended with the worker; nobody will tell but this.
        for request in list(self.requests):
            op = (<Request>request).op
            if op != NULL and op.waiting:
                op.waiting = 0
                op.status = UCS_ERR_CANCELED
                end(op)
        self.tell()


cdef void report(callback, error) noexcept:
    """What a callback raises is unraisable: it must not keep others from theirs."""
    callback(error)


@cython.no_gc_clear
cdef class RemoteKey:
    cdef ucp_rkey_h handle  # the endpoint's, which `serial` names
    cdef readonly int64_t serial
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly bint writable


@cython.no_gc_clear
cdef class Request:
    cdef op_t *op  # NULL when ended
    cdef Endpoint endpoint  # its connection stays as long as this is under way
    cdef object callback

    def __dealloc__(self):
        if self.op != NULL:
            self.op.request = NULL

    @property
    def ended(self):
        return self.op == NULL


@cython.no_gc_clear
cdef class Endpoint:
    cdef Worker worker  # outlives it
    cdef ep_t *c  # the worker's
    cdef object on_error
    cdef bytes context_id
    cdef int64_t serial  # names it among all that ever were
    cdef bint closing  # takes no more operations

    def __cinit__(self, Worker worker not None, bytes address not None, on_error):
        cdef ucp_ep_params_t params
        cdef bytes body
        cdef ep_t *ep
        cdef ucs_status_t status
        worker.alive()
        self.worker = worker
        self.on_error = on_error
        self.serial = next(_serials)
        self.context_id, body = unseal(_ADDRESS, address)
        ep = <ep_t *>calloc(1, sizeof(ep_t))
        if ep == NULL:
            raise MemoryError
        ep.worker = &worker.c
        ep.endpoint = <PyObject *>self
        params.field_mask = (
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | UCP_EP_PARAM_FIELD_ERR_HANDLER)
        params.address = <const ucp_address_t *><const char *>body
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER
        params.err_handler.cb = on_broken
        params.err_handler.arg = ep
        with nogil:
            status = ucp_ep_create(worker.c.handle, &params, &ep.handle)
        if status != UCS_OK:
            free(ep)
            check(status, "no connection to this address")
        ep.next = worker.c.eps
        worker.c.eps = ep
        self.c = ep

    def __dealloc__(self):
        # Possibly on another thread: the worker's next progress closes and frees it.
        if self.c != NULL:
            self.c.endpoint = NULL

    cdef int alive(self) except -1:
        self.worker.alive()
        if self.closing or self.c.handle == NULL:
            raise ClosedError("the UCX endpoint is closed")
        return 0

    def unpack(self, bytes rkey not None):
        cdef RemoteKey key = RemoteKey.__new__(RemoteKey)
        cdef ucp_rkey_h *keys
        cdef bytes context, body, packed
        self.alive()
        context, body = unseal(_KEY, rkey)
        if context != self.context_id:
            raise TierLostError("the remote key is not of the process that this endpoint reaches")
        key.address, key.length, key.writable = _RANGE.unpack_from(body)
        key.serial = self.serial
        packed = body[_RANGE.size:]
        keys = <ucp_rkey_h *>realloc(self.c.keys, (self.c.num_keys + 1) * sizeof(ucp_rkey_h))
        if keys == NULL:
            raise MemoryError
        self.c.keys = keys
        check(
            ucp_ep_rkey_unpack(self.c.handle, <const char *>packed, &key.handle),
            "the remote key")
        keys[self.c.num_keys] = key.handle
        self.c.num_keys += 1
        return key

    cdef Request start(
        self, int kind, int64_t n, const int64_t *local, const int64_t *remote,
        const int64_t *lengths, RemoteKey key, callback,
    ):
        cdef Request request
        cdef op_t *op
        cdef int64_t i, start
        if n:
            if key is None or key.serial != self.serial:
                raise ValueError("the remote key was not unpacked for this endpoint")
            if kind == PUT and not key.writable:
                raise ValueError("the peer's memory is registered for reading only")
            for i in range(n):
                start = remote[i] - <int64_t>key.address
                if local[i] <= 0 or lengths[i] <= 0 or start < 0 or (
                    lengths[i] > <int64_t>key.length - start
                ):
                    raise ValueError(
                        f"chunk {i}: {lengths[i]} bytes at {remote[i]} are not inside the peer's "
                        f"{key.length} at {key.address}, or the local address {local[i]} is wrong")
        request = Request()
        op = <op_t *>calloc(1, sizeof(op_t))
        if op == NULL:
            raise MemoryError
        if n:
            op.numbers = <int64_t *>malloc(3 * n * sizeof(int64_t))
            if op.numbers == NULL:
                free(op)
                raise MemoryError
            memcpy(op.numbers, local, n * sizeof(int64_t))
            memcpy(op.numbers + n, remote, n * sizeof(int64_t))
            memcpy(op.numbers + 2 * n, lengths, n * sizeof(int64_t))
            op.key = key.handle
        op.ep = self.c
        op.request = <PyObject *>request
        op.n = n
        op.kind = kind
        op.flushed = kind == GET
        request.op = op
        request.endpoint = self
        request.callback = callback
        self.worker.requests.add(request)
        return request

    cdef void queue(self, op_t *op) noexcept:
        op.queued = True
        if self.c.head == NULL:
            self.c.head = op
        else:
            self.c.tail.next = op
        self.c.tail = op

    cdef Request batch(self, int kind, local, remote, lengths, RemoteKey key, callback):
        cdef Py_ssize_t n = 0, num_remote = 0, num_lengths = 0
        cdef int64_t *locals_ = int64s(local, &n)
        cdef int64_t *remotes = int64s(remote, &num_remote)
        cdef int64_t *sizes = int64s(lengths, &num_lengths)
        cdef Request request
        self.alive()
        if n == 0 or num_remote != n or num_lengths != n:
            raise ValueError(
                f"{n} local and {num_remote} remote addresses, but {num_lengths} lengths")
        request = self.start(kind, n, locals_, remotes, sizes, key, callback)
        self.queue(request.op)
        return request

    cdef Request single(
        self, int kind, int64_t local, int64_t length, int64_t remote, RemoteKey key, callback,
    ):
        cdef Request request
        self.alive()
        request = self.start(kind, 1, &local, &remote, &length, key, callback)
        self.queue(request.op)
        return request

    def get(self, local_address, length, remote_address, remote_key, callback):
        return self.single(GET, local_address, length, remote_address, remote_key, callback)

    def put(self, local_address, length, remote_address, remote_key, callback):
        return self.single(PUT, local_address, length, remote_address, remote_key, callback)

    def get_batch(self, local, remote, lengths, remote_key, callback):
        return self.batch(GET, local, remote, lengths, remote_key, callback)

    def put_batch(self, local, remote, lengths, remote_key, callback):
        return self.batch(PUT, local, remote, lengths, remote_key, callback)

    def flush(self, callback):
        cdef Request request
        self.alive()
        request = self.start(FLUSH, 0, NULL, NULL, NULL, None, callback)
        self.queue(request.op)
        return request

    def cancel(self, Request request not None):
        if request.endpoint is not self:
            raise ValueError("the request is not one of this endpoint")
        if request.op != NULL and request.op.kind != CLOSE and request.op.status == UCS_OK:
            request.op.status = UCS_ERR_CANCELED

    def close(self, *, bint force, callback):
        cdef Request request
        cdef op_t *op
        if self.worker.c.handle == NULL:
            raise ClosedError("the UCX worker is closed")
        request = self.start(CLOSE, 0, NULL, NULL, NULL, None, callback)
        op = request.op
        self.closing = True
        if self.c.handle != NULL and not force:
            self.queue(op)
            return request
        if self.c.handle != NULL:
            with nogil:
                begin_close(self.c)
        if self.c.settled:
            end(op)
        else:
            op.next = self.c.closers
            self.c.closers = op
        return request
