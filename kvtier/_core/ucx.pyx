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

cdef extern from "unistd.h" nogil:
    int getpid()

cdef extern from "limits.h" nogil:
    enum:
        PATH_MAX

cdef extern from "ucx.h" nogil:
    enum:
        KV_UCX_MAJOR
        KV_UCX_MINOR
        UCP_FEATURE_RMA
        UCP_FEATURE_WAKEUP
        UCP_PARAM_FIELD_FEATURES
        UCP_PARAM_FIELD_MT_WORKERS_SHARED
        UCP_WORKER_PARAM_FIELD_THREAD_MODE
        UCS_THREAD_MODE_SINGLE
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS
        UCP_MEM_MAP_PARAM_FIELD_LENGTH
        UCP_MEM_MAP_PARAM_FIELD_PROT
        UCP_MEM_MAP_PROT_LOCAL_READ
        UCP_MEM_MAP_PROT_LOCAL_WRITE
        UCP_MEM_MAP_PROT_REMOTE_READ
        UCP_MEM_MAP_PROT_REMOTE_WRITE
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
        UCP_EP_PARAM_FIELD_ERR_HANDLER
        UCP_ERR_HANDLING_MODE_PEER
        UCP_OP_ATTR_FIELD_CALLBACK
        UCP_OP_ATTR_FIELD_USER_DATA
        UCP_OP_ATTR_FIELD_FLAGS
        UCP_EP_CLOSE_FLAG_FORCE
    ctypedef int ucs_status_t
    enum:
        UCS_OK
        UCS_ERR_CANCELED
        UCS_ERR_BUSY
    ctypedef void *ucp_context_h
    ctypedef void *ucp_worker_h
    ctypedef void *ucp_ep_h
    ctypedef void *ucp_mem_h
    ctypedef void *ucp_rkey_h
    ctypedef void ucp_config_t
    ctypedef void ucp_address_t
    ctypedef struct ucp_params_t:
        uint64_t field_mask
        uint64_t features
        int mt_workers_shared
    ctypedef struct ucp_worker_params_t:
        uint64_t field_mask
        int thread_mode
    ctypedef struct ucp_mem_map_params_t:
        uint64_t field_mask
        void *address
        size_t length
        unsigned int prot
    ctypedef void (*ucp_err_handler_cb_t)(
        void *arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil
    ctypedef struct ucp_err_handler_t:
        ucp_err_handler_cb_t cb
        void *arg
    ctypedef struct ucp_ep_params_t:
        uint64_t field_mask
        const ucp_address_t *address
        int err_mode
        ucp_err_handler_t err_handler
    ctypedef void (*ucp_send_nbx_callback_t)(
        void *request, ucs_status_t status, void *user_data) noexcept nogil
    ctypedef struct ucp_request_cb_t "__typeof__(((ucp_request_param_t *)0)->cb)":
        ucp_send_nbx_callback_t send
    ctypedef struct ucp_request_param_t:
        unsigned int op_attr_mask
        unsigned int flags
        ucp_request_cb_t cb
        void *user_data

    int kv_ucx_load(const char *path, char *found, char *error, size_t room)
    int64_t kv_ucx_now()
    bint UCS_PTR_IS_ERR(void *pointer)
    ucs_status_t UCS_PTR_STATUS(void *pointer)

    const char *ucs_status_string "kv_ucx.ucs_status_string" (ucs_status_t status)
    const char *ucp_get_version_string "kv_ucx.ucp_get_version_string" ()
    ucs_status_t ucp_config_read "kv_ucx.ucp_config_read" (
        const char *prefix, const char *file, ucp_config_t **config)
    ucs_status_t ucp_config_modify "kv_ucx.ucp_config_modify" (
        ucp_config_t *config, const char *name, const char *value)
    void ucp_config_release "kv_ucx.ucp_config_release" (ucp_config_t *config)
    ucs_status_t ucp_init_version "kv_ucx.ucp_init_version" (
        unsigned int major, unsigned int minor, const ucp_params_t *params,
        const ucp_config_t *config, ucp_context_h *context)
    void ucp_cleanup "kv_ucx.ucp_cleanup" (ucp_context_h context)
    ucs_status_t ucp_mem_map "kv_ucx.ucp_mem_map" (
        ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memory)
    ucs_status_t ucp_mem_unmap "kv_ucx.ucp_mem_unmap" (ucp_context_h context, ucp_mem_h memory)
    ucs_status_t ucp_rkey_pack "kv_ucx.ucp_rkey_pack" (
        ucp_context_h context, ucp_mem_h memory, void **buffer, size_t *size)
    void ucp_rkey_buffer_release "kv_ucx.ucp_rkey_buffer_release" (void *buffer)
    ucs_status_t ucp_ep_rkey_unpack "kv_ucx.ucp_ep_rkey_unpack" (
        ucp_ep_h ep, const void *buffer, ucp_rkey_h *key)
    void ucp_rkey_destroy "kv_ucx.ucp_rkey_destroy" (ucp_rkey_h key)
    ucs_status_t ucp_worker_create "kv_ucx.ucp_worker_create" (
        ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker)
    void ucp_worker_destroy "kv_ucx.ucp_worker_destroy" (ucp_worker_h worker)
    ucs_status_t ucp_worker_get_address "kv_ucx.ucp_worker_get_address" (
        ucp_worker_h worker, ucp_address_t **address, size_t *size)
    void ucp_worker_release_address "kv_ucx.ucp_worker_release_address" (
        ucp_worker_h worker, ucp_address_t *address)
    ucs_status_t ucp_worker_get_efd "kv_ucx.ucp_worker_get_efd" (ucp_worker_h worker, int *fd)
    ucs_status_t ucp_worker_arm "kv_ucx.ucp_worker_arm" (ucp_worker_h worker)
    unsigned int ucp_worker_progress "kv_ucx.ucp_worker_progress" (ucp_worker_h worker)
    ucs_status_t ucp_ep_create "kv_ucx.ucp_ep_create" (
        ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep)
    void *ucp_ep_close_nbx "kv_ucx.ucp_ep_close_nbx" (
        ucp_ep_h ep, const ucp_request_param_t *param)
    void *ucp_ep_flush_nbx "kv_ucx.ucp_ep_flush_nbx" (
        ucp_ep_h ep, const ucp_request_param_t *param)
    void *ucp_get_nbx "kv_ucx.ucp_get_nbx" (
        ucp_ep_h ep, void *local, size_t length, uint64_t remote, ucp_rkey_h key,
        const ucp_request_param_t *param)
    void *ucp_put_nbx "kv_ucx.ucp_put_nbx" (
        ucp_ep_h ep, const void *local, size_t length, uint64_t remote, ucp_rkey_h key,
        const ucp_request_param_t *param)
    void ucp_request_free "kv_ucx.ucp_request_free" (void *request)

cdef enum:
    GET = 0
    PUT = 1
    FLUSH = 2
    CLOSE = 3
    IN_FLIGHT = 32
    TURN_NS = 200_000
    CLOSE_NS = 2_000_000_000
    ERROR_BYTES = 8192

WINDOW = IN_FLIGHT
TURN_SECONDS = TURN_NS / 1e9
KINDS = ("get", "put", "flush", "close")

# What UCX needs to be told apart from bytes that merely came in: see `seal`.
_ADDRESS = b"KVTa"
_KEY = b"KVTk"
_SEAL = struct.Struct("<4sI8s")  # magic, CRC-32 of all that follows it, context
_RANGE = struct.Struct("<QQ?")  # address, bytes, whether writable

_serials = itertools.count(1)
_loaded = []

cdef struct ep_t
cdef struct worker_t

cdef struct op_t:
    ep_t *ep  # outlives the operation
    op_t *next  # in the queue, closers or ended list that it is in
    PyObject *request  # borrowed, NULL when it is gone; a Worker keeps those under way
    ucp_rkey_h key  # the endpoint's
    int64_t *numbers  # n local addresses, n remote ones, n lengths in bytes; owned
    int64_t n  # chunks
    int64_t posted  # chunks handed to UCX
    int64_t waiting  # calls of UCX that have not ended
    int kind
    bint flushed  # nothing left to post behind the chunks
    bint queued  # in the endpoint's queue
    ucs_status_t status  # first error

cdef struct ep_t:
    worker_t *worker
    ep_t *next  # in the worker's list, which owns it
    ucp_ep_h handle  # NULL from the begin of closing
    PyObject *endpoint  # borrowed, NULL when it is gone
    op_t *head  # operations that are not wholly posted, in order
    op_t *tail
    op_t *closers  # close operations, which end when nothing is under way
    int64_t waiting  # calls of UCX that have not ended
    ucp_rkey_h *keys  # unpacked for this endpoint; owned
    int64_t num_keys
    bint closed  # UCX has let go of it
    bint settled  # closed, and nothing is under way
    bint untold  # the user has not heard of `status`
    ucs_status_t status  # why the connection broke

cdef struct worker_t:
    ucp_worker_h handle  # NULL when closed
    ep_t *eps
    op_t *ended  # operations whose callback is to be called
    op_t *last
    int64_t untold  # endpoints with news of an error


cdef void end(op_t *op) noexcept nogil:
    cdef worker_t *worker = op.ep.worker
    op.next = NULL
    if worker.ended == NULL:
        worker.ended = op
    else:
        worker.last.next = op
    worker.last = op


cdef void one_less(op_t *op, ucs_status_t status) noexcept nogil:
    op.waiting -= 1
    op.ep.waiting -= 1
    if status != UCS_OK and op.status == UCS_OK:
        op.status = status
    if op.waiting == 0 and not op.queued and op.kind != CLOSE:
        end(op)


cdef void on_sent(void *request, ucs_status_t status, void *user_data) noexcept nogil:
    ucp_request_free(request)
    one_less(<op_t *>user_data, status)


cdef void on_closed(void *request, ucs_status_t status, void *user_data) noexcept nogil:
    # Whatever the status, UCX has let go of the endpoint.
    ucp_request_free(request)
    (<ep_t *>user_data).closed = True


cdef void on_broken(void *arg, ucp_ep_h handle, ucs_status_t status) noexcept nogil:
    cdef ep_t *ep = <ep_t *>arg
    if ep.status == UCS_OK and ep.handle != NULL:
        ep.status = status
        ep.untold = True
        ep.worker.untold += 1


cdef void post_one(ep_t *ep, op_t *op) noexcept nogil:
    """Hand the operation's next chunk, or the flush behind them, to UCX."""
    cdef ucp_request_param_t param
    cdef void *request
    cdef int64_t i = op.posted
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
    param.cb.send = on_sent
    param.user_data = op
    op.waiting += 1
    ep.waiting += 1
    if i == op.n:
        op.flushed = True
        request = ucp_ep_flush_nbx(ep.handle, &param)
    else:
        op.posted += 1
        if op.kind == GET:
            request = ucp_get_nbx(
                ep.handle, <void *><uintptr_t>op.numbers[i], <size_t>op.numbers[2 * op.n + i],
                <uint64_t>op.numbers[op.n + i], op.key, &param)
        else:
            request = ucp_put_nbx(
                ep.handle, <void *><uintptr_t>op.numbers[i], <size_t>op.numbers[2 * op.n + i],
                <uint64_t>op.numbers[op.n + i], op.key, &param)
    if request == NULL:
        one_less(op, UCS_OK)
    elif UCS_PTR_IS_ERR(request):
        one_less(op, UCS_PTR_STATUS(request))


cdef void begin_close(ep_t *ep) noexcept nogil:
    """Let UCX break the connection; all that is under way ends, and what is queued never begins."""
    cdef ucp_request_param_t param
    cdef ucp_ep_h handle = ep.handle
    cdef op_t *op
    cdef void *request
    ep.handle = NULL
    if ep.untold:
        ep.untold = False
        ep.worker.untold -= 1
    while ep.head != NULL:
        op = ep.head
        ep.head = op.next
        op.queued = False
        if op.kind == CLOSE:
            op.next = ep.closers
            ep.closers = op
            continue
        if op.status == UCS_OK:
            op.status = UCS_ERR_CANCELED
        if op.waiting == 0:
            end(op)
    param.op_attr_mask = (
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS)
    param.flags = UCP_EP_CLOSE_FLAG_FORCE
    param.cb.send = on_closed
    param.user_data = ep
    request = ucp_ep_close_nbx(handle, &param)
    if request == NULL or UCS_PTR_IS_ERR(request):
        ep.closed = True


cdef void settle(ep_t *ep) noexcept nogil:
    """Nothing of a closed endpoint is under way: its keys go, and whoever closed it hears."""
    cdef op_t *op
    cdef int64_t i
    ep.settled = True
    for i in range(ep.num_keys):
        ucp_rkey_destroy(ep.keys[i])
    ep.num_keys = 0
    while ep.closers != NULL:
        op = ep.closers
        ep.closers = op.next
        op.status = UCS_OK
        end(op)


cdef int64_t post_ep(ep_t *ep, int64_t until) noexcept nogil:
    """Start what an endpoint has queued and room for. How many steps were made."""
    cdef int64_t steps = 0
    cdef op_t *op
    while ep.head != NULL and ep.waiting < IN_FLIGHT:
        op = ep.head
        if op.status == UCS_OK:
            op.status = ep.status
        if op.status != UCS_OK:
            op.posted = op.n
            op.flushed = True
        if op.posted < op.n or not op.flushed:
            post_one(ep, op)
        elif op.kind == CLOSE:
            if op.waiting != 0:
                break
            begin_close(ep)
        else:
            ep.head = op.next
            op.queued = False
            if op.waiting == 0:
                end(op)
        steps += 1
        if kv_ucx_now() >= until:
            break
    return steps


cdef int64_t post(worker_t *worker, int64_t until) noexcept nogil:
    cdef int64_t steps = 0
    cdef ep_t *ep = worker.eps
    cdef ep_t **place = &worker.eps
    while ep != NULL:
        if ep.handle != NULL and ep.endpoint == NULL:
            begin_close(ep)
            steps += 1
        if ep.handle != NULL:
            steps += post_ep(ep, until)
        if ep.closed and ep.waiting == 0 and not ep.settled:
            settle(ep)
            steps += 1
        if ep.settled and ep.endpoint == NULL:
            place[0] = ep.next
            free(ep.keys)
            free(ep)
        else:
            place = &ep.next
        ep = place[0]
    return steps


cdef int64_t drive(worker_t *worker, int64_t until) noexcept nogil:
    """Post and progress until nothing happens or the time is over. How much happened."""
    cdef int64_t steps = 0, now
    while True:
        now = post(worker, until) + ucp_worker_progress(worker.handle)
        steps += now
        if now == 0 or kv_ucx_now() >= until:
            return steps


cdef void shut(worker_t *worker) noexcept nogil:
    """Close all endpoints by force, then the worker, which ends what would not end until then."""
    cdef ep_t *ep = worker.eps
    cdef int64_t until = kv_ucx_now() + CLOSE_NS
    cdef bint settled = False
    while ep != NULL:
        if ep.handle != NULL:
            begin_close(ep)
        ep = ep.next
    while not settled and kv_ucx_now() < until:
        drive(worker, kv_ucx_now() + TURN_NS)
        settled = True
        ep = worker.eps
        while ep != NULL:
            settled = settled and ep.settled
            ep = ep.next
    ep = worker.eps
    while ep != NULL:
        if not ep.settled:
            settle(ep)
        ep = ep.next
    ucp_worker_destroy(worker.handle)
    worker.handle = NULL


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
    return bool(glob.glob("/sys/class/infiniband/*"))


def _candidates():
    """Paths of libucp.so.0, the best first."""
    found = []
    # The wheel knows no such device.
    if has_rdma():
        found.append("libucp.so.0")
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
    # UCX would take SIGHUP for itself, and with its default action that ends a process.
    quiet = "UCX_DEBUG_SIGNO" not in os.environ
    if quiet:
        os.environ["UCX_DEBUG_SIGNO"] = "0"
    try:
        for candidate in _candidates():
            encoded = os.fsencode(candidate)
            if kv_ucx_load(encoded, path, error, ERROR_BYTES) == 0:
                _loaded.append(
                    f"UCX {ucp_get_version_string().decode()} from {os.fsdecode(<bytes>path)}")
                return _loaded[0]
            errors.append(error.decode(errors="replace"))
    finally:
        if quiet:
            del os.environ["UCX_DEBUG_SIGNO"]
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
