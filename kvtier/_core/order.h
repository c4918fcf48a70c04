/* SPDX-License-Identifier: Apache-2.0
 *
 * Slots in the order in which they would go, without any going.
 *
 * Owner's thread only; changes nothing.
 */
#ifndef KVTIER_ORDER_H
#define KVTIER_ORDER_H

#include "slabs.h"

typedef struct {
    uint64_t rank;
    int64_t slot;
} kvt_ranked;

/* For qsort: those of one rank stay as their slots are. */
static inline int kvt_by_rank(const void *a, const void *b)
{
    const kvt_ranked *x = a, *y = b;
    if (x->rank == y->rank)
        return (x->slot > y->slot) - (x->slot < y->slot);
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* READY slots of a policy class, the least recently used one first: how many. */
static inline uint64_t kvt_ready_of(const kvt_index *x, unsigned cls, kvt_ranked *found)
{
    uint64_t n = 0;
    for (unsigned place = 0; place < KVT_PLACES; place++) {
        uint32_t at = x->l.list[kvt_place_list(cls, place)].tail;
        for (; at != KVT_NIL; at = x->l.node[at].prev)
            if (kvt_state(kvt_load(&x->t.rec[at])) == KVT_READY)
                found[n++] = (kvt_ranked){kvt_rank(&x->l.node[at]), at};
    }
    qsort(found, n, sizeof(*found), kvt_by_rank);
    return n;
}

/* Up to n READY slots that no tier holds, of all size classes, the oldest ones first and those that
 * are parked for it before the others: how many. Chunks in use are left out. Looks at no more than
 * `left` chunks. */
static inline int64_t kvt_oldest_unsaved(const kvt_slabs *g, int64_t n, int64_t left,
                                         uint32_t *found)
{
    static const unsigned places[] = {KVT_PARKED_UNSAVED, KVT_MAIN};
    const kvt_index *x = g->index;
    const uint32_t lists = KVT_CLASSES * g->sizes;
    uint32_t cursor[KVT_CLASSES * KVT_MAX_SIZES];
    int64_t done = 0;
    for (int turn = 0; turn < 2; turn++) {
        for (uint32_t i = 0; i < lists; i++)
            cursor[i] =
                x[i / KVT_CLASSES].l.list[kvt_place_list(i % KVT_CLASSES, places[turn])].tail;
        for (; done < n && left > 0; left--) {
            uint32_t *oldest = NULL;
            for (uint32_t i = 0; i < lists; i++)
                if (cursor[i] != KVT_NIL &&
                    (!oldest ||
                     kvt_rank(&x->l.node[cursor[i]]) < kvt_rank(&x->l.node[*oldest])))
                    oldest = &cursor[i];
            if (!oldest)
                break;
            const kvt_record *r = &x->t.rec[*oldest];
            if (kvt_state(kvt_load(r)) == KVT_READY && (kvt_flags(r) & KVT_UNSAVED))
                found[done++] = *oldest;
            *oldest = x->l.node[*oldest].prev;
        }
    }
    return done;
}

#endif
