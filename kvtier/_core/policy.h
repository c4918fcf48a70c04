/* SPDX-License-Identifier: Apache-2.0
 *
 * What a replacement policy is: which class a chunk belongs to, and which class gives the next
 * victim. The index does the rest (order inside a class, pins, unsaved chunks, free slots), so a
 * policy is one file with one `kvt_policy` table; owner's thread only.
 */
#ifndef KVTIER_POLICY_H
#define KVTIER_POLICY_H

#include "lists.h"

/* How far the memory of a list has been fetched from its oldest end on. A wish and no more: places
 * move, and where it has come to may be anywhere. */
typedef struct {
    uint32_t at;
    int lead; /* places that go before `at` does, at most */
} kvt_scout;

/* The oldest one has gone; `tail` is the oldest now. */
static inline void kvt_scout_follow(kvt_scout *c, uint32_t tail)
{
    if (c->at == KVT_NIL || c->lead <= 0)
        *c = (kvt_scout){tail, 0};
    else
        c->lead--;
}

/* What a policy knows of an absent key between its miss and its insertion. */
typedef struct {
    uint64_t print; /* the policy's fingerprint of the key */
    int ghost;      /* 0 unknown, else which ghost list had it */
    double before;  /* the policy's parameter before this access */
} kvt_miss;

typedef struct {
    const char *name;
    uint64_t bytes_per_slot; /* of its own state */
    /* NULL without memory. `slots` is the most that `capacity` will ever be. */
    void *(*create)(uint64_t slots);
    void (*destroy)(void *self);
    void (*clear)(void *self);
    /* Prefetch what `missed` and `evicted` will read for k. */
    void (*prefetch)(const void *self, const kvt_key *k);
    /* Guess how many of the next n victims each class will give. */
    void (*expect)(const void *self, const kvt_lists *l, int n, int from[KVT_CLASSES]);
    /* An absent key is asked for. */
    void (*missed)(void *self, const kvt_lists *l, uint64_t capacity, const kvt_key *k, kvt_miss *m);
    /* It got no slot. */
    void (*refused)(void *self, kvt_miss *m);
    /* Class whose LRU end goes first; the other one is the fallback. m may be NULL. */
    unsigned (*victim)(void *self, const kvt_lists *l, uint64_t capacity, const kvt_miss *m);
    /* Chunk k left class cls by eviction; called before the count of cls goes down. */
    void (*evicted)(void *self, const kvt_lists *l, uint64_t capacity, const kvt_key *k,
                    unsigned cls, const kvt_miss *m);
    /* Class of a new chunk. */
    unsigned (*place)(void *self, const kvt_miss *m);
    /* After the new chunk stands in its class. */
    void (*placed)(void *self, const kvt_lists *l, uint64_t capacity);
    /* The capacity has become smaller; the chunks that it had room for have gone before. */
    void (*shrunk)(void *self, const kvt_lists *l, uint64_t capacity);
    /* Class after a reuse. */
    unsigned (*reused)(void *self, unsigned cls);
    /* Ghosts in list `which` (1, 2), and the parameter. */
    uint64_t (*ghosts)(const void *self, int which);
    double (*parameter)(const void *self);
    /* 0 if its own state is consistent. */
    int (*check)(const void *self, const kvt_lists *l, uint64_t capacity);
} kvt_policy;

#endif
