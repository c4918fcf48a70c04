/* SPDX-License-Identifier: Apache-2.0
 *
 * A walk over everything that the owner's index has, and what is wrong if something is: lists,
 * counters, records, slabs and the key table agree. Linear; for tests and for builds with checks.
 *
 * Owner's thread only. What is found first is said in words, in `what`; each function is 0 then.
 */
#ifndef KVTIER_CHECKS_H
#define KVTIER_CHECKS_H

#include <inttypes.h>
#include <stdio.h>

#include "slabs.h"

#define KVT_WHAT 200 /* bytes of what is said */

/* Always 0: something does not hold. */
#define kvt_broken(what, ...) (snprintf((what), KVT_WHAT, __VA_ARGS__), 0)

/* Key of a slot that must have one. */
static int kvt_check_key(const kvt_index *x, uint64_t s, kvt_key *k, char *what)
{
    const kvt_record *r = &x->t.rec[s];
    if (r->key_len < 5 || r->key_len > KVT_KEY_BYTES)
        return kvt_broken(what, "slot %" PRIu64 " has a key of %d bytes", s, r->key_len);
    kvt_key_of(k, r);
    return 1;
}

/* What the slots of one size class say they are. */
typedef struct {
    uint64_t capacity, free, writing, ready, lent, orphans, ready_bytes;
} kvt_found;

static int kvt_check_slot(const kvt_slabs *g, const kvt_index *x, uint64_t s,
                          const uint32_t *payload, kvt_found *found, char *what)
{
    const kvt_record *r = &x->t.rec[s];
    const unsigned where = kvt_list_of(&x->l.node[s]);
    uint64_t word = kvt_load(r);
    const unsigned state = kvt_state(word);
    kvt_key k;
    found->capacity++;
    if (x->l.node[s].info & KVT_PROTECT)
        return kvt_broken(what, "slot %" PRIu64 " is still protected", s);
    if (where == KVT_NOWHERE) {
        found->free++;
        if (state != KVT_FREE || (word & KVT_PINS_MASK))
            return kvt_broken(what, "slot %" PRIu64 " is free here, its word is 0x%" PRIx64, s, word);
        return 1;
    }
    if (where == KVT_LENT) {
        found->lent++;
        if (state != KVT_WRITING || (word & KVT_PINS_MASK) || r->key_len)
            return kvt_broken(what, "slot %" PRIu64 " is lent, its word is 0x%" PRIx64, s, word);
        return 1;
    }
    if (where > KVT_LENT) {
        found->orphans++;
        if (state != (where == KVT_ORPHAN_WRITING ? KVT_WRITING : KVT_ORPHAN))
            return kvt_broken(what, "slot %" PRIu64 " is an orphan, its word is 0x%" PRIx64, s, word);
        return 1;
    }
    if (state == KVT_READY) {
        found->ready++;
        found->ready_bytes += r->length;
    } else if (state == KVT_WRITING && !(word & KVT_PINS_MASK)) {
        found->writing++;
    } else {
        return kvt_broken(what, "slot %" PRIu64 " holds a key, its word is 0x%" PRIx64, s, word);
    }
    if (!kvt_check_key(x, s, &k, what))
        return 0;
    if (kvt_find(&x->t, &k, &word) != (int64_t)s)
        return kvt_broken(what, "the key of slot %" PRIu64 " does not lead to it", s);
    if (r->length != payload[k.group] || kvt_of_group(g, k.group) != x)
        return kvt_broken(what, "slot %" PRIu64 " has length %u, its key group %u", s, r->length,
                          k.group);
    return 1;
}

static int kvt_check_lists(const kvt_index *x, const kvt_found *found, char *what)
{
    uint64_t n, linked = 0;
    uint32_t at, before;
    for (unsigned i = 1; i < KVT_NUM_LISTS; i++) {
        const kvt_list *p = &x->l.list[i];
        n = 0;
        before = KVT_NIL;
        for (at = p->head; at != KVT_NIL && n <= found->capacity; at = x->l.node[at].next, n++) {
            if (x->l.node[at].prev != before || kvt_list_of(&x->l.node[at]) != i)
                return kvt_broken(what, "list %u is broken at slot %u", i, at);
            before = at;
        }
        if (before != p->tail || n != p->count)
            return kvt_broken(what, "list %u has %" PRIu64 " slots, its counter says %" PRIu64, i, n,
                              p->count);
        linked += n;
    }
    n = 0;
    before = KVT_NIL;
    for (at = x->free_head; at != KVT_NIL && n <= found->capacity; at = x->l.node[at].next, n++) {
        if (kvt_list_of(&x->l.node[at]) != KVT_NOWHERE)
            return kvt_broken(what, "slot %u is in the free list and in another one", at);
        if (n && x->slabs && x->l.node[at].prev != before)
            return kvt_broken(what, "the free list is broken at slot %u", at);
        before = at;
    }
    if (n + (x->end - x->bumped) / x->width != x->num_free || found->free != x->num_free)
        return kvt_broken(what,
                          "%" PRIu64 " free slots counted, %" PRIu64 " chained, %" PRIu64 " found",
                          x->num_free, n, found->free);
    if (x->l.in_class[0] + x->l.in_class[1] != found->ready + found->writing)
        return kvt_broken(what, "classes of %" PRIu64 " and %" PRIu64 " chunks", x->l.in_class[0],
                          x->l.in_class[1]);
    if (linked != found->capacity - found->free)
        return kvt_broken(what, "%" PRIu64 " slots say they are in lists, %" PRIu64 " are",
                          found->capacity - found->free, linked);
    return 1;
}

/* Whether slot s is one that chunks of size class x are named by. */
static inline int kvt_names_chunk(const kvt_slabs *g, const kvt_index *x, uint64_t s)
{
    if (!g->slab)
        return 1;
    const uint32_t at = (uint32_t)(s % g->slab_slots);
    return g->slab[s / g->slab_slots].size == (uint32_t)(x - g->index) && at % x->width == 0 &&
           at + x->width <= g->slab_slots;
}

/* Lists, counters and records of one size class. */
static int kvt_check_size(const kvt_slabs *g, const kvt_index *x, uint64_t top,
                          const uint32_t *payload, char *what)
{
    kvt_found f = {0};
    for (uint64_t s = 0; s < top; s++)
        if (kvt_names_chunk(g, x, s) && !kvt_check_slot(g, x, s, payload, &f, what))
            return 0;
    if (!kvt_check_lists(x, &f, what))
        return 0;
    if (f.writing != x->num_writing || f.ready != x->num_ready || f.lent != x->num_lent ||
        f.orphans != x->num_orphans || f.ready_bytes != x->ready_bytes ||
        f.capacity != x->capacity ||
        f.free + f.writing + f.ready + f.lent + f.orphans != f.capacity)
        return kvt_broken(what,
                          "counters %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64
                          " %" PRIu64 ", found %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64
                          " %" PRIu64 " %" PRIu64,
                          x->capacity, x->num_writing, x->num_ready, x->num_lent, x->num_orphans,
                          x->ready_bytes, f.capacity, f.writing, f.ready, f.lent, f.orphans,
                          f.ready_bytes);
    const int fault = x->policy->check(x->state, &x->l, x->capacity);
    if (fault)
        return kvt_broken(what, "policy %s finds fault %d in itself", x->policy->name, fault);
    return 1;
}

/* Entries point to their keys, and the overflow counters are what the entries ask for. */
static int kvt_check_table(const kvt_slabs *g, uint64_t top, char *what)
{
    const kvt_index *x = g->index;
    const kvt_table *t = &x->t;
    uint64_t entries = 0, chunks = 0;
    uint64_t *passed = calloc(t->num_buckets, sizeof(*passed));
    int fine = passed || kvt_broken(what, "no memory to check the key table");
    for (uint64_t b = 0; fine && b < t->num_buckets; b++)
        for (int i = 0; fine && i < KVT_BUCKET_ENTRIES; i++) {
            const uint64_t slot = t->bucket[b].entry[i] & KVT_SLOT_MASK;
            kvt_key k;
            if (!slot)
                continue;
            entries++;
            if (slot > top) {
                fine = kvt_broken(what, "bucket %" PRIu64 " leads to slot %" PRIu64, b, slot - 1);
            } else if ((fine = kvt_check_key(x, slot - 1, &k, what))) {
                for (uint64_t a = kvt_home(t, k.hash); a != b; a = kvt_next(t, a))
                    passed[a]++;
            }
        }
    for (uint32_t i = 0; i < g->sizes; i++)
        chunks += g->index[i].num_ready + g->index[i].num_writing;
    if (fine && entries != chunks)
        fine = kvt_broken(what, "%" PRIu64 " entries for %" PRIu64 " chunks", entries, chunks);
    for (uint64_t b = 0; fine && b < t->num_buckets; b++)
        if (passed[b] != t->bucket[b].passed)
            fine = kvt_broken(what, "bucket %" PRIu64 " counts %" PRIu64 ", not %" PRIu64, b,
                              t->bucket[b].passed, passed[b]);
    free(passed);
    return fine;
}

/* A slab's count of its slots; those that no chunk can have are FREE and in no list. */
static int kvt_check_slab(const kvt_slabs *g, uint32_t b, char *what)
{
    const kvt_slab *slab = &g->slab[b];
    const kvt_index *x = slab->size == KVT_NO_SIZE ? NULL : &g->index[slab->size];
    const kvt_node *node = g->index->l.node;
    uint32_t used = 0;
    for (uint32_t i = 0; i < g->slab_slots; i++) {
        const uint64_t s = (uint64_t)b * g->slab_slots + i;
        const uint64_t word = kvt_load(&g->index->t.rec[s]);
        if (x && kvt_names_chunk(g, x, s))
            used += kvt_list_of(&node[s]) != KVT_NOWHERE;
        else if (node[s].info || (uint32_t)word)
            return kvt_broken(what, "slot %" PRIu64 " is none of slab %u, its word is 0x%" PRIx64, s,
                              b, word);
    }
    if (x && (!used || used != slab->used))
        return kvt_broken(what, "slab %u counts %u slots in use, %u found", b, slab->used, used);
    return 1;
}

/* Slabs of nobody are counted, and chained if they ever were somebody's. */
static int kvt_check_slabs(const kvt_slabs *g, char *what)
{
    uint64_t nobody = 0;
    for (uint32_t b = 0; b < g->count; b++) {
        if (!kvt_check_slab(g, b, what))
            return 0;
        nobody += g->slab[b].size == KVT_NO_SIZE;
    }
    if (nobody != g->num_free)
        return kvt_broken(what, "%" PRIu64 " slabs are free, %" PRIu64 " found", g->num_free,
                          nobody);
    uint64_t left = nobody - (g->count - g->bumped);
    uint32_t b = g->free_head;
    for (; b != KVT_NIL && left; b = g->slab[b].next, left--)
        if (g->slab[b].size != KVT_NO_SIZE)
            return kvt_broken(what, "slab %u is free and of size class %u", b, g->slab[b].size);
    if (left || b != KVT_NIL)
        return kvt_broken(what, "the chain of free slabs and their number differ by %" PRIu64, left);
    return 1;
}

/* All of it. `payload` are the bytes of a chunk by group, slots below `top` have memory. */
static int kvt_check(const kvt_slabs *g, uint64_t top, const uint32_t *payload, char *what)
{
    for (uint32_t i = 0; i < g->sizes; i++)
        if (!kvt_check_size(g, &g->index[i], top, payload, what))
            return 0;
    return kvt_check_table(g, top, what) && (!g->slab || kvt_check_slabs(g, what));
}

#endif
