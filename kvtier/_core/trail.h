/* SPDX-License-Identifier: Apache-2.0
 *
 * The keys of the running request: what the last calls found out about them.
 *
 * A request asks for the same keys again and again: lookup one by one, then pin, reserve, commit
 * and touch in batches that are parts of one list. The trail keeps their words, hash and slot in
 * that order, so a key met again costs a comparison and no walk through the table. Nothing in it is
 * believed: a slot counts only after its record has been compared with the key (kvt_still_there),
 * so evictions need not be told to it. Owner's thread only.
 */
#ifndef KVTIER_TRAIL_H
#define KVTIER_TRAIL_H

#include <Python.h>
#include <stdlib.h>

#include "slots.h"

#define KVT_TRAIL_LOOKUPS 4096 /* single lookups kept at most */

typedef struct {
    kvt_key *k;     /* owned */
    int64_t size;   /* keys that fit */
    int64_t filled; /* keys [0, filled) have words and, where `hashed`, a hash */
    int64_t base;   /* first key of the running or last batch */
    int open;       /* single lookups are being collected */
} kvt_trail;

/* Room for n keys; -1 without memory. */
static inline int kvt_trail_room(kvt_trail *t, int64_t n)
{
    if (n <= t->size)
        return 0;
    if (n < 2 * t->size)
        n = 2 * t->size;
    void *more = realloc(t->k, (size_t)n * sizeof(kvt_key));
    if (!more)
        return -1;
    t->k = more;
    t->size = n;
    return 0;
}

static inline int kvt_trail_open(kvt_trail *t)
{
    return kvt_trail_room(t, KVT_TRAIL_LOOKUPS);
}

static inline void kvt_trail_close(kvt_trail *t)
{
    free(t->k);
    t->k = NULL;
}

static inline int kvt_same_words(const kvt_key *k, const void *bytes, unsigned len)
{
    if (len != k->len)
        return 0;
    if (len == 36) {
        uint64_t w[4];
        uint32_t last;
        memcpy(w, bytes, 32);
        memcpy(&last, (const char *)bytes + 32, 4);
        return !((w[0] ^ k->w[0]) | (w[1] ^ k->w[1]) | (w[2] ^ k->w[2]) | (w[3] ^ k->w[3]) |
                 (last ^ k->w[4]));
    }
    return !memcmp(k->w, bytes, len);
}

/* Where the next single lookup puts its key; it counts after kvt_trail_kept. */
static inline kvt_key *kvt_trail_next(kvt_trail *t)
{
    if (!t->open || t->filled >= KVT_TRAIL_LOOKUPS) {
        t->open = 1;
        t->filled = 0;
    }
    return &t->k[t->filled];
}

static inline void kvt_trail_kept(kvt_trail *t) { t->filled++; }

/*
 * A batch whose first key has these bytes: *base is where it starts, so that keys known already
 * are met in place. The likely starts are the request's first key (pin, touch), the last batch's
 * (commit), and the last one looked up, which missed (reserve).
 */
static inline void kvt_trail_batch(kvt_trail *t, const void *bytes, unsigned len)
{
    const int64_t likely[3] = {0, t->base, t->filled - 1};
    t->open = 0;
    for (int i = 0; i < 3; i++)
        if (likely[i] >= 0 && likely[i] < t->filled &&
            kvt_same_words(&t->k[likely[i]], bytes, len)) {
            t->base = likely[i];
            return;
        }
    t->base = t->filled = 0;
}

/* Key `i` of the batch, taken over unless it stands there already. */
static inline kvt_key *kvt_trail_key(kvt_trail *t, int64_t i, const void *bytes, unsigned len)
{
    kvt_key *k = &t->k[t->base + i];
    if (t->base + i < t->filled) {
        if (kvt_same_words(k, bytes, len))
            return k;
    } else {
        t->filled = t->base + i + 1;
    }
    kvt_key_words(k, bytes, len);
    k->hashed = 0;
    k->slot = -1;
    return k;
}

#define KVT_KEYS_AHEAD 4 /* key objects fetched before their turn */

/* Whether `key` can be one: bytes of the right length. */
static inline int kvt_is_key(PyObject *key)
{
    return PyBytes_CheckExact(key) && PyBytes_GET_SIZE(key) >= 5 &&
           PyBytes_GET_SIZE(key) <= KVT_KEY_BYTES;
}

/* Take a list of keys over as a batch, for which there is room. -1, or the first bad key. */
static inline int64_t kvt_trail_load(kvt_trail *t, PyObject *keys, uint32_t groups)
{
    const int64_t n = PyList_GET_SIZE(keys);
    for (int64_t i = 0; i < n; i++) {
        PyObject *key = PyList_GET_ITEM(keys, i); /* borrowed: nothing here runs Python */
        if (i + KVT_KEYS_AHEAD < n)
            __builtin_prefetch((char *)PyList_GET_ITEM(keys, i + KVT_KEYS_AHEAD) +
                               offsetof(PyBytesObject, ob_sval));
        if (!kvt_is_key(key))
            return i;
        const kvt_key *k =
            kvt_trail_key(t, i, PyBytes_AS_STRING(key), (unsigned)PyBytes_GET_SIZE(key));
        if (k->group >= groups)
            return i;
    }
    return -1;
}

#define KVT_SEEN 16 /* words of the filter below */

/* Whether a hash like this one was given to the filter before; it is from now on. */
static inline int kvt_seen(uint64_t *filter, uint64_t hash)
{
    uint64_t *word = &filter[hash % KVT_SEEN], bit = 1ULL << (hash >> 58);
    int before = (*word & bit) != 0;
    *word |= bit;
    return before;
}

#endif
