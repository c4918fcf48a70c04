/* SPDX-License-Identifier: Apache-2.0
 *
 * Least recently used: one class, no state. Ranks do the work.
 */
#ifndef KVTIER_POLICY_LRU_H
#define KVTIER_POLICY_LRU_H

#include "policy.h"

static char kvt_lru_state;

static void *kvt_lru_create(uint64_t slots) { (void)slots; return &kvt_lru_state; }
static void kvt_lru_nothing(void *self) { (void)self; }
static void kvt_lru_prefetch(const void *self, const kvt_key *k) { (void)self; (void)k; }
static void kvt_lru_expect(const void *self, const kvt_lists *l, int n, int from[KVT_CLASSES])
{
    (void)self; (void)l;
    from[0] = n;
    from[1] = 0;
}
static void kvt_lru_missed(void *self, const kvt_lists *l, uint64_t capacity, const kvt_key *k,
                           kvt_miss *m)
{
    (void)self; (void)l; (void)capacity; (void)k;
    m->ghost = 0;
}
static void kvt_lru_refused(void *self, kvt_miss *m) { (void)self; (void)m; }
static unsigned kvt_lru_victim(void *self, const kvt_lists *l, uint64_t capacity, const kvt_miss *m)
{
    (void)self; (void)l; (void)capacity; (void)m;
    return 0;
}
static void kvt_lru_evicted(void *self, const kvt_lists *l, uint64_t capacity, const kvt_key *k,
                            unsigned cls, const kvt_miss *m)
{
    (void)self; (void)l; (void)capacity; (void)k; (void)cls; (void)m;
}
static unsigned kvt_lru_place(void *self, const kvt_miss *m) { (void)self; (void)m; return 0; }
static void kvt_lru_placed(void *self, const kvt_lists *l, uint64_t capacity)
{
    (void)self; (void)l; (void)capacity;
}
static void kvt_lru_shrunk(void *self, const kvt_lists *l, uint64_t capacity)
{
    (void)self; (void)l; (void)capacity;
}
static unsigned kvt_lru_reused(void *self, unsigned cls) { (void)self; (void)cls; return 0; }
static uint64_t kvt_lru_ghosts(const void *self, int which) { (void)self; (void)which; return 0; }
static double kvt_lru_parameter(const void *self) { (void)self; return 0; }
static int kvt_lru_check(const void *self, const kvt_lists *l, uint64_t capacity)
{
    (void)self; (void)capacity;
    return kvt_class_count(l, 1) != 0;
}

static const kvt_policy kvt_lru = {
    "lru", 0, kvt_lru_create, kvt_lru_nothing, kvt_lru_nothing, kvt_lru_prefetch,
    kvt_lru_expect, kvt_lru_missed, kvt_lru_refused, kvt_lru_victim, kvt_lru_evicted,
    kvt_lru_place, kvt_lru_placed, kvt_lru_shrunk, kvt_lru_reused, kvt_lru_ghosts,
    kvt_lru_parameter, kvt_lru_check,
};

#endif
