/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory between size classes: slabs of `slab_slots` slots, each of one class or of none.
 *
 * Owner's thread only. A chunk of a class takes `width` slots, side by side from the start of a
 * slab, and is named by the first; the numbers between, and those at the end of a slab where no
 * chunk fits any more, stay FREE and in no list. A slab without a chunk belongs to nobody; a class
 * that has no slot left gets one of those, and when there is none it may take one from another
 * class, with all its chunks, if these are older than its own.
 *
 * With one class there are no slabs (`slab` is NULL) and nothing here is called.
 */
#ifndef KVTIER_SLABS_H
#define KVTIER_SLABS_H

#include "index.h"

#define KVT_NO_SIZE UINT32_MAX
#define KVT_MAX_SIZES 64
#define KVT_SLAB_STEPS 64   /* chunks of a class that are looked at for a slab */
#define KVT_SLAB_TRIES 8    /* slabs of a class that are looked through for one that can go */
#define KVT_SLAB_LOOKS 1024 /* slots in them, after which no further slab is */
#define KVT_SLAB_PAUSE 16   /* claims without a search after one in vain */
#define KVT_OLDER 4         /* a slab is taken for a chunk older by this part of its age */

typedef struct {
    uint32_t size; /* its class, or KVT_NO_SIZE */
    uint32_t used; /* slots of it that hold a chunk, or will */
    uint32_t next; /* of a slab without class: the next one */
} kvt_slab;

typedef struct kvt_slabs {
    kvt_index *index;        /* of each size class; owned by Room */
    kvt_slab *slab;          /* owned by Room; NULL with one class */
    const uint32_t *size_of; /* class of each KV cache group; owned by Room */
    uint32_t *victim;        /* slots of chunks evicted in one search; owned by Room */
    uint64_t num_victims;
    uint32_t slab_slots;
    uint32_t sizes;
    uint32_t count, bumped; /* slabs with memory; slabs [bumped, count) were never used */
    uint32_t free_head;     /* last in, first out */
    uint64_t num_free;
} kvt_slabs;

static inline kvt_index *kvt_of_slot(const kvt_slabs *g, uint32_t s)
{
    return g->slab ? &g->index[g->slab[s / g->slab_slots].size] : g->index;
}

static inline kvt_index *kvt_of_group(const kvt_slabs *g, uint32_t group)
{
    return g->slab ? &g->index[g->size_of[group]] : g->index;
}

/* Chunks of the class that a slab holds. */
static inline uint32_t kvt_slab_room(const kvt_slabs *g, const kvt_index *x)
{
    return g->slab_slots / x->width;
}

/* Slots that the class can have without an eviction. */
static inline uint64_t kvt_free_for(const kvt_slabs *g, const kvt_index *x)
{
    return x->num_free + (g->slab ? g->num_free * kvt_slab_room(g, x) : 0);
}

static inline void kvt_slab_popped(kvt_slabs *g, uint32_t s) { g->slab[s / g->slab_slots].used++; }

/* A slot of the class has become free; with the last one its slab does. */
static inline void kvt_slab_pushed(kvt_slabs *g, kvt_index *x, uint32_t s)
{
    const uint32_t b = s / g->slab_slots, room = kvt_slab_room(g, x);
    kvt_slab *slab = &g->slab[b];
    if (--slab->used)
        return;
    uint32_t at = b * g->slab_slots;
    for (uint32_t i = 0; i < room; i++, at += x->width) {
        kvt_node *n = &x->l.node[at];
        if (at >= x->bumped && at < x->end)
            break; /* never used since the slab came, and so are those behind */
        if (x->free_head == at) x->free_head = n->next; else x->l.node[n->prev].next = n->next;
        if (n->next != KVT_NIL) x->l.node[n->next].prev = n->prev;
    }
    if (x->bumped < x->end && x->bumped / g->slab_slots == b)
        x->bumped = x->end = 0;
    x->num_free -= room;
    x->capacity -= room;
    KVT_POLICY(x, shrunk, x->state, &x->l, x->capacity);
    slab->size = KVT_NO_SIZE;
    slab->next = g->free_head;
    g->free_head = b;
    g->num_free++;
}

/* A slab of nobody becomes one of the class, which has no free slot; 0 if there is none. */
static inline int kvt_slab_give(kvt_slabs *g, kvt_index *x)
{
    uint32_t b = g->free_head;
    const uint32_t room = kvt_slab_room(g, x);
    if (b != KVT_NIL)
        g->free_head = g->slab[b].next;
    else if (g->bumped < g->count)
        b = g->bumped++;
    else
        return 0;
    g->num_free--;
    g->slab[b] = (kvt_slab){(uint32_t)(x - g->index), 0, KVT_NIL};
    x->bumped = (uint64_t)b * g->slab_slots;
    x->end = x->bumped + (uint64_t)room * x->width;
    x->num_free += room;
    x->capacity += room;
    return 1;
}

/* The oldest chunk of a list that can go now, or KVT_NIL. Those at its end that cannot are parked, as
 * an eviction does. */
static inline uint32_t kvt_settle_tail(kvt_index *x, unsigned cls, unsigned place)
{
    const kvt_list *p = &x->l.list[kvt_place_list(cls, place)];
    int left = KVT_UNSAVED_STEPS;
    while (p->tail != KVT_NIL && left--) {
        const uint32_t s = p->tail;
        const unsigned now = kvt_usable(x, s);
        if (now == place || now == KVT_MAIN)
            return s;
        kvt_park(&x->l, s, now);
    }
    return KVT_NIL;
}

/* Rank of the oldest chunk of the class that could go, one that some tier holds if there is any;
 * UINT64_MAX without. */
static inline uint64_t kvt_oldest(kvt_index *x, int *unsaved)
{
    uint64_t oldest = UINT64_MAX;
    for (*unsaved = 0; *unsaved < 2; ++*unsaved) {
        for (unsigned cls = 0; cls < KVT_CLASSES; cls++) {
            const uint32_t s =
                kvt_settle_tail(x, cls, *unsaved ? KVT_PARKED_UNSAVED : KVT_MAIN);
            if (s != KVT_NIL && kvt_rank(&x->l.node[s]) < oldest)
                oldest = kvt_rank(&x->l.node[s]);
        }
        if (oldest != UINT64_MAX)
            break;
    }
    return oldest;
}

/* Whether every chunk of a slab of class d can go now. */
static inline int kvt_slab_can_go(const kvt_slabs *g, kvt_index *d, uint32_t b, int unsaved,
                                  int *looks)
{
    uint32_t s = b * g->slab_slots;
    for (uint32_t i = kvt_slab_room(g, d); i; i--, s += d->width) {
        const unsigned list = kvt_list_of(&d->l.node[s]);
        ++*looks;
        d->l.steps++;
        if (list == KVT_NOWHERE)
            continue;
        if (!kvt_is_placed(list))
            return 0;
        const unsigned place = kvt_usable(d, s);
        if (place != KVT_MAIN && !(unsaved && place == KVT_PARKED_UNSAVED))
            return 0;
    }
    return 1;
}

/* Evict all chunks of a slab of class d: whether it is nobody's then. */
static inline int kvt_slab_evict(kvt_slabs *g, kvt_index *d, uint32_t b, int *broken)
{
    uint32_t s = b * g->slab_slots;
    kvt_forget_ahead(d); /* what it has looked forward to are other chunks soon */
    for (uint32_t i = kvt_slab_room(g, d); i; i--, s += d->width) {
        if (kvt_list_of(&d->l.node[s]) == KVT_NOWHERE)
            continue;
        if (!kvt_evict(d, s, NULL, broken))
            return 0; /* pinned this very moment */
        g->victim[g->num_victims++] = s;
        kvt_push_free(d, s);
    }
    return g->slab[b].size == KVT_NO_SIZE;
}

/* Whether a search may begin at slot `at` in a list of class d. */
static inline int kvt_still_in(const kvt_slabs *g, const kvt_index *d, uint32_t at, unsigned list)
{
    return at != KVT_NIL && g->slab[at / g->slab_slots].size == (uint32_t)(d - g->index) &&
           kvt_list_of(&d->l.node[at]) == list;
}

/* The slab of the oldest chunk of class d below `limit` whose slab can go as a whole, or KVT_NIL. A
 * search that has come to its bounds is gone on with by the next one, so that slabs with pinned
 * chunks, which are passed over, do not hide those behind them for good. */
static inline uint32_t kvt_slab_search(const kvt_slabs *g, kvt_index *d, uint64_t limit,
                                       int unsaved, int *tries)
{
    const unsigned lists = unsaved ? 2 * KVT_CLASSES : KVT_CLASSES;
    uint32_t at[2 * KVT_CLASSES], last = KVT_NIL;
    int left = KVT_SLAB_STEPS, looks = 0, slabs = 0;
    for (unsigned i = 0; i < lists; i++) {
        const unsigned place = i < KVT_CLASSES ? KVT_MAIN : KVT_PARKED_UNSAVED;
        const unsigned list = kvt_place_list(i % KVT_CLASSES, place);
        at[i] = kvt_still_in(g, d, d->hand[i], list) ? d->hand[i] : d->l.list[list].tail;
        d->hand[i] = KVT_NIL;
    }
    for (;;) {
        unsigned next = lists;
        uint64_t oldest = limit;
        for (unsigned i = 0; i < lists; i++)
            if (at[i] != KVT_NIL && kvt_rank(&d->l.node[at[i]]) < oldest) {
                oldest = kvt_rank(&d->l.node[at[i]]);
                next = i;
            }
        if (next == lists)
            return KVT_NIL;
        if (!left-- || slabs >= KVT_SLAB_TRIES || looks >= KVT_SLAB_LOOKS) {
            memcpy(d->hand, at, lists * sizeof(*at));
            return KVT_NIL;
        }
        const uint32_t b = at[next] / g->slab_slots;
        d->l.steps++;
        at[next] = d->l.node[at[next]].prev;
        if (b == last)
            continue;
        last = b;
        slabs++;
        ++*tries;
        if (kvt_slab_can_go(g, d, b, unsaved, &looks))
            return b;
    }
}

/*
 * Free a slab of another class for x, which has no slot left: 1 if one has become free. The chunks
 * that were evicted for it, perhaps in vain, are in `victim`; their keys still stand in the records.
 *
 * Ranks are of all classes, so ages compare. While x has a chunk of its own that can go, another
 * one's has to be older by a KVT_OLDER-th, or memory would go to and fro; and a chunk that no tier
 * holds goes only where x would lose one of those, too. Not with saved_only. If x has none, every
 * slab will do. The work is bounded; after a search in vain x has its own chunks evicted for a while.
 */
static inline int kvt_slab_take(kvt_slabs *g, kvt_index *x, int saved_only, int *broken)
{
    int mine_unsaved, theirs, tries = 0;
    const uint64_t mine = kvt_oldest(x, &mine_unsaved), now = *x->l.rank;
    uint64_t limit = UINT64_MAX;
    g->num_victims = 0;
    if (mine != UINT64_MAX) {
        if (x->pause) {
            x->pause--;
            return 0;
        }
        const uint64_t age = now - mine + (now - mine) / KVT_OLDER;
        limit = age < now ? now - age : 0;
    }
    for (int unsaved = 0; unsaved < 2; unsaved++) {
        if (unsaved && (saved_only || !mine_unsaved))
            break;
        uint64_t after = 0;
        for (uint32_t turn = 1; turn < g->sizes; turn++) {
            /* The others, the one with the oldest chunk first. */
            kvt_index *d = NULL;
            uint64_t oldest = limit;
            for (uint32_t i = 0; i < g->sizes; i++) {
                const uint64_t rank = kvt_oldest(&g->index[i], &theirs);
                if (&g->index[i] != x && rank >= after && rank < oldest) {
                    oldest = rank;
                    d = &g->index[i];
                }
            }
            if (!d)
                break;
            after = oldest + 1;
            const uint32_t b = kvt_slab_search(g, d, limit, unsaved, &tries);
            if (b != KVT_NIL)
                return kvt_slab_evict(g, d, b, broken);
        }
    }
    if (tries && mine != UINT64_MAX)
        x->pause = KVT_SLAB_PAUSE;
    return 0;
}

#endif
