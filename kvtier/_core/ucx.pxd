# SPDX-License-Identifier: Apache-2.0
"""UCX's C interface as far as `ucx` uses it, and what its operations, connections and workers are
in C."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t

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
