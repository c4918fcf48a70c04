# SPDX-License-Identifier: Apache-2.0
"""The queue of operations of each connection, in C: part of `ucx`, which includes it.

No GIL and no Python object is needed here: UCX's callbacks end here, and keep counts.
"""

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
