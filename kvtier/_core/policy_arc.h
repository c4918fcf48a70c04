/* SPDX-License-Identifier: Apache-2.0
 *
 * ARC, as published: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
 * FAST 2003, Figure 4. Class 0 is T1 (seen once), class 1 is T2 (seen again); B1 and B2 are the
 * ghosts of what left them, p is the target size of T1, c the capacity.
 *
 * Differences, all from chunks being real memory: REPLACE runs only when no slot is free; ghosts
 * together never exceed c (in the paper that follows from a full cache); when the chosen list has
 * only unusable chunks the other one gives the victim. Bounds are trimmed after the insertion,
 * which leaves the lists as in the figure.
 *
 * A ghost is a fingerprint: 63 bits of its key's hash, and the list it is in. If two keys ever agree
 * in it, the cost is one wrong adaptation. Ghosts have a table of their own, of the same kind as the
 * key table: one cache line a step.
 */
#ifndef KVTIER_POLICY_ARC_H
#define KVTIER_POLICY_ARC_H

#include "policy.h"

typedef struct {
    uint64_t print; /* of the hash, but KVT_GHOST_LIST: 0 in B1, 1 in B2 */
    uint32_t prev, next;
} kvt_ghost;

#define KVT_GHOST_LIST (1ULL << 32) /* not in the tag of a table's entry */

typedef struct {
    kvt_ghost *ghost;  /* slots + 1: one more while a victim's ghost comes and another goes */
    kvt_table t;       /* leads to ghosts instead of slots; its buckets are in front of `ghost` */
    uint64_t slots;
    uint32_t free;     /* chain of unused ghosts through next */
    uint32_t used;     /* ghosts ever used */
    uint32_t head[2], tail[2];
    uint64_t count[2];
    kvt_scout scout[2]; /* `at` is the ghost whose memory is asked for next */
    double p;
} kvt_arc_state;

static void kvt_arc_clear(void *self)
{
    kvt_arc_state *a = self;
    memset(a->t.bucket, 0, a->t.num_buckets * sizeof(*a->t.bucket));
    a->free = a->head[0] = a->head[1] = a->tail[0] = a->tail[1] = KVT_NIL;
    a->used = 0;
    a->count[0] = a->count[1] = 0;
    a->scout[0] = a->scout[1] = (kvt_scout){KVT_NIL, 0};
    a->p = 0;
}

static void kvt_arc_destroy(void *self)
{
    kvt_arc_state *a = self;
    if (a) {
        free(a->t.bucket);
        free(a);
    }
}

static void *kvt_arc_create(uint64_t slots)
{
    kvt_arc_state *a = calloc(1, sizeof(*a));
    if (!a)
        return NULL;
    a->slots = slots;
    a->t.num_slots = slots + 1;
    a->t.num_buckets = slots / 4 + 1;
    /* One piece of memory, so that as much of it as possible is in large pages. */
    uint64_t more = ((slots + 1) * sizeof(kvt_ghost) + sizeof(kvt_bucket) - 1) / sizeof(kvt_bucket);
    a->t.bucket = kvt_alloc(a->t.num_buckets + more, sizeof(kvt_bucket));
    if (!a->t.bucket) {
        kvt_arc_destroy(a);
        return NULL;
    }
    a->ghost = (kvt_ghost *)(a->t.bucket + a->t.num_buckets);
    a->free = a->head[0] = a->head[1] = a->tail[0] = a->tail[1] = KVT_NIL;
    a->scout[0] = a->scout[1] = (kvt_scout){KVT_NIL, 0};
    return a;
}

static inline uint64_t kvt_arc_print(uint64_t hash) { return hash & ~KVT_GHOST_LIST; }

static int64_t kvt_arc_find(const kvt_arc_state *a, uint64_t print)
{
    kvt_walk at;
    int64_t g = kvt_first(&a->t, print, &at);
    for (; g >= 0; g = kvt_more(&a->t, print, &at))
        if (kvt_arc_print(a->ghost[g].print) == print)
            break;
    return g;
}

static void kvt_arc_remove(kvt_arc_state *a, uint32_t g)
{
    kvt_ghost *n = &a->ghost[g];
    int b = (n->print & KVT_GHOST_LIST) != 0;
    if (n->prev == KVT_NIL) a->head[b] = n->next; else a->ghost[n->prev].next = n->next;
    if (n->next == KVT_NIL) a->tail[b] = n->prev; else a->ghost[n->next].prev = n->prev;
    if (a->scout[b].at == g) a->scout[b].at = n->prev;
    a->count[b]--;
    n->next = a->free;
    a->free = g;
    kvt_table_remove(&a->t, kvt_arc_print(n->print), g);
}

static void kvt_arc_add(kvt_arc_state *a, uint64_t print, int b)
{
    uint32_t g = a->free;
    if (g == KVT_NIL)
        g = a->used++;
    else
        a->free = a->ghost[g].next;
    kvt_ghost *n = &a->ghost[g];
    n->print = b ? print | KVT_GHOST_LIST : print;
    n->prev = KVT_NIL;
    n->next = a->head[b];
    if (n->next == KVT_NIL) a->tail[b] = g; else a->ghost[n->next].prev = g;
    a->head[b] = g;
    a->count[b]++;
    kvt_table_add(&a->t, print, g);
}

#define KVT_SCOUT_LEAD 8

/* The oldest ghost goes. Those behind it go soon: a scout that walks in front asks for the memory
 * that their removal will need, one step after it has asked for the ghost itself. */
static void kvt_arc_drop_tail(kvt_arc_state *a, int b)
{
    kvt_scout *c = &a->scout[b];
    kvt_arc_remove(a, a->tail[b]);
    kvt_scout_follow(c, a->tail[b]);
    for (int i = 0; i < 2 && c->lead < KVT_SCOUT_LEAD && c->at != KVT_NIL; i++, c->lead++) {
        const kvt_ghost *n = &a->ghost[c->at];
        __builtin_prefetch(&a->t.bucket[kvt_home(&a->t, kvt_arc_print(n->print))], 1);
        c->at = n->prev;
        if (n->prev != KVT_NIL)
            __builtin_prefetch(&a->ghost[n->prev], 1);
    }
}

/* |T1| + |B1| <= c, all four <= 2c, ghosts <= c; `going` chunks are about to leave T1, T2. */
static void kvt_arc_trim(kvt_arc_state *a, const kvt_lists *l, uint64_t c, const uint64_t going[2])
{
    uint64_t t1 = kvt_class_count(l, 0) - going[0], t2 = kvt_class_count(l, 1) - going[1];
    while (a->count[0] && t1 + a->count[0] > c)
        kvt_arc_drop_tail(a, 0);
    while (a->count[1] && t1 + t2 + a->count[0] + a->count[1] > 2 * c)
        kvt_arc_drop_tail(a, 1);
    while (a->count[0] + a->count[1] > c)
        kvt_arc_drop_tail(a, a->count[1] != 0);
}

static void kvt_arc_prefetch(const void *self, const kvt_key *k)
{
    const kvt_arc_state *a = self;
    __builtin_prefetch(&a->t.bucket[kvt_home(&a->t, kvt_arc_print(k->hash))], 1);
}

/* As REPLACE will choose for keys without ghosts: T2 until |T1| is above p, then T1. */
static void kvt_arc_expect(const void *self, const kvt_lists *l, int n, int from[KVT_CLASSES])
{
    double room = ((const kvt_arc_state *)self)->p + 1 - (double)kvt_class_count(l, 0);
    from[1] = room <= 0 ? 0 : room < n ? (int)room : n;
    from[0] = n - from[1];
}

static void kvt_arc_missed(void *self, const kvt_lists *l, uint64_t c, const kvt_key *k,
                           kvt_miss *m)
{
    kvt_arc_state *a = self;
    (void)l;
    m->print = kvt_arc_print(k->hash);
    m->before = a->p;
    m->ghost = 0;
    int64_t g = kvt_arc_find(a, m->print);
    if (g < 0)
        return;
    int b = (a->ghost[g].print & KVT_GHOST_LIST) != 0;
    double ratio = (double)a->count[!b] / (double)a->count[b];
    double delta = ratio > 1 ? ratio : 1;
    if (b == 0)
        a->p = a->p + delta < (double)c ? a->p + delta : (double)c; /* Case II */
    else
        a->p = a->p - delta > 0 ? a->p - delta : 0; /* Case III */
    m->ghost = b + 1;
    kvt_arc_remove(a, (uint32_t)g);
}

static void kvt_arc_refused(void *self, kvt_miss *m)
{
    kvt_arc_state *a = self;
    a->p = m->before;
    if (m->ghost)
        kvt_arc_add(a, m->print, m->ghost - 1);
}

static unsigned kvt_arc_victim(void *self, const kvt_lists *l, uint64_t c, const kvt_miss *m)
{
    kvt_arc_state *a = self;
    (void)c;
    double t1 = (double)kvt_class_count(l, 0);
    /* REPLACE(x, p) */
    return t1 >= 1 && (t1 > a->p || (m && m->ghost == 2 && t1 == a->p)) ? 0 : 1;
}

static void kvt_arc_evicted(void *self, const kvt_lists *l, uint64_t c, const kvt_key *k,
                            unsigned cls, const kvt_miss *m)
{
    kvt_arc_state *a = self;
    const uint64_t going[2] = {cls == 0, cls == 1};
    /* Case IV (i), |T1| = c: its LRU page leaves without a ghost. */
    if (m && !m->ghost && cls == 0 && kvt_class_count(l, 0) == c)
        return;
    kvt_arc_add(a, kvt_arc_print(k->hash), (int)cls);
    /* In a reserve the insertion that follows trims, as the figure does. */
    if (!m)
        kvt_arc_trim(a, l, c, going);
}

static unsigned kvt_arc_place(void *self, const kvt_miss *m)
{
    (void)self;
    return m->ghost ? 1 : 0;
}

static void kvt_arc_placed(void *self, const kvt_lists *l, uint64_t c)
{
    const uint64_t going[2] = {0, 0};
    kvt_arc_trim(self, l, c, going);
}

static void kvt_arc_shrunk(void *self, const kvt_lists *l, uint64_t c)
{
    kvt_arc_state *a = self;
    if (a->p > (double)c)
        a->p = (double)c;
    kvt_arc_placed(self, l, c);
}

static unsigned kvt_arc_reused(void *self, unsigned cls)
{
    (void)self; (void)cls;
    return 1;
}

static uint64_t kvt_arc_ghosts(const void *self, int which)
{
    return ((const kvt_arc_state *)self)->count[which - 1];
}

static double kvt_arc_parameter(const void *self) { return ((const kvt_arc_state *)self)->p; }

static int kvt_arc_check(const void *self, const kvt_lists *l, uint64_t c)
{
    const kvt_arc_state *a = self;
    uint64_t t1 = kvt_class_count(l, 0), t2 = kvt_class_count(l, 1), seen = 0;
    if (a->p < 0 || a->p > (double)c || a->count[0] + a->count[1] > c ||
        (a->count[0] && t1 + a->count[0] > c) || t1 + t2 + a->count[0] + a->count[1] > 2 * c)
        return 1;
    for (int b = 0; b < 2; b++) {
        uint64_t n = 0;
        for (uint32_t g = a->head[b]; g != KVT_NIL; g = a->ghost[g].next, n++) {
            const uint64_t print = a->ghost[g].print;
            if (((print & KVT_GHOST_LIST) != 0) != b ||
                kvt_arc_find(a, kvt_arc_print(print)) != g || n > c)
                return 2;
        }
        if (n != a->count[b])
            return 3;
    }
    for (uint64_t i = 0; i < a->t.num_buckets; i++)
        for (int e = 0; e < KVT_BUCKET_ENTRIES; e++)
            seen += a->t.bucket[i].entry[e] != 0;
    return seen == a->count[0] + a->count[1] ? 0 : 4;
}

static const kvt_policy kvt_arc = {
    "arc", sizeof(kvt_ghost) + sizeof(kvt_bucket) / 4, kvt_arc_create, kvt_arc_destroy,
    kvt_arc_clear, kvt_arc_prefetch, kvt_arc_expect, kvt_arc_missed, kvt_arc_refused,
    kvt_arc_victim, kvt_arc_evicted,
    kvt_arc_place, kvt_arc_placed, kvt_arc_shrunk, kvt_arc_reused, kvt_arc_ghosts,
    kvt_arc_parameter, kvt_arc_check,
};

#endif
