/* SPDX-License-Identifier: Apache-2.0 */
/* UCX's C interface as a table of functions, filled by dlsym: nothing is linked.
 *
 * Only what UCX 1.13 and 1.21 both have. Structs that grew since are given with the mask of the
 * fields that are set, so either header serves either library. */
#ifndef KVTIER_UCX_H
#define KVTIER_UCX_H

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ucp/api/ucp.h>

/* What is asked for, whatever the headers' own version: a library warns of a newer one. */
#define KV_UCX_MAJOR 1
#define KV_UCX_MINOR 13

#define KV_UCX_FUNCTIONS(X) \
    X(ucp_get_version) \
    X(ucp_get_version_string) \
    X(ucp_config_read) \
    X(ucp_config_modify) \
    X(ucp_config_release) \
    X(ucp_init_version) \
    X(ucp_cleanup) \
    X(ucp_mem_map) \
    X(ucp_mem_unmap) \
    X(ucp_rkey_pack) \
    X(ucp_rkey_buffer_release) \
    X(ucp_ep_rkey_unpack) \
    X(ucp_rkey_destroy) \
    X(ucp_worker_create) \
    X(ucp_worker_destroy) \
    X(ucp_worker_get_address) \
    X(ucp_worker_release_address) \
    X(ucp_worker_get_efd) \
    X(ucp_worker_arm) \
    X(ucp_worker_progress) \
    X(ucp_ep_create) \
    X(ucp_ep_close_nbx) \
    X(ucp_ep_flush_nbx) \
    X(ucp_get_nbx) \
    X(ucp_put_nbx) \
    X(ucp_request_free) \
    X(ucs_status_string)

struct kv_ucx {
#define X(name) __typeof__(&name) name;
    KV_UCX_FUNCTIONS(X)
#undef X
};

static struct kv_ucx kv_ucx;

/* Fill the table from the library at `path`; its own path goes to `found` (PATH_MAX bytes).
 * 0, or -1 with one line in `error` (`room` bytes). A library is never closed again: it has
 * threads and atexit handlers of its own. */
static int kv_ucx_load(const char *path, char *found, char *error, size_t room) {
    struct kv_ucx table;
    Dl_info info, sibling;
    const char *end;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(error, room, "%s", dlerror());
        return -1;
    }
#define X(name) \
    *(void **)&table.name = dlsym(library, #name); \
    if (table.name == NULL) { \
        snprintf(error, room, "%s has no function " #name, path); \
        return -1; \
    }
    KV_UCX_FUNCTIONS(X)
#undef X
    if (!dladdr(*(void **)&table.ucp_init_version, &info)
        || !dladdr(*(void **)&table.ucs_status_string, &sibling)) {
        snprintf(error, room, "%s: the loader does not know where it is", path);
        return -1;
    }
    /* The loader takes a libucs.so.0 that is there already, whosever it is; parts of two
     * versions crash together. */
    end = strrchr(info.dli_fname, '/');
    if (end == NULL || strncmp(info.dli_fname, sibling.dli_fname, (size_t)(end - info.dli_fname) + 1)
        || strchr(sibling.dli_fname + (end - info.dli_fname) + 1, '/') != NULL) {
        snprintf(error, room, "%s and %s are of two installations; another package loaded the second",
                 info.dli_fname, sibling.dli_fname);
        return -1;
    }
    snprintf(found, PATH_MAX, "%s", info.dli_fname);
    kv_ucx = table;
    return 0;
}

static inline int64_t kv_ucx_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
