/* SPDX-License-Identifier: Apache-2.0
 *
 * The owner's private lists over slots: order of use, and where unusable slots wait.
 *
 * Used by the owner's thread only. A node of 16 bytes a slot holds links, list, flags and rank.
 *
 * Each policy class (LRU has one, ARC has T1 and T2) of a size class has four lists:
 *   MAIN     every chunk, most recently used first, by rank
 *   USE      met at the LRU end while WRITING, pinned by the owner, or asked for in this call
 *   SERVICE  met there while pinned by the service only, whose unpin the owner does not see
 *   UNSAVED  met there while no secondary tier holds it
 * A slot is moved to one of the last three at most once for each time it was put into MAIN, so
 * eviction stays O(1) a key however many slots are pinned. It comes back by its rank, so pinning
 * never changes the order of use.
 */
#ifndef KVTIER_LISTS_H
#define KVTIER_LISTS_H

#include <stdlib.h>
#include <sys/mman.h>

#include "slots.h"

#define KVT_HUGE_PAGE ((size_t)2 << 20)

/* Zeroed private memory, all pages present: a page fault costs the scheduler's thread more than
 * everything else in a call. NULL without memory; for free(). */
static inline void *kvt_alloc(uint64_t count, size_t size)
{
    size_t bytes = (size_t)count * size;
    int large = bytes >= KVT_HUGE_PAGE / 2;
    size_t unit = large ? KVT_HUGE_PAGE : 64; /* a cache line */
    bytes = (bytes + unit - 1) / unit * unit;
    void *p = aligned_alloc(unit, bytes);
    if (p) {
        if (large)
            madvise(p, bytes, MADV_HUGEPAGE); /* a wish: fewer TLB misses where it is granted */
        memset(p, 0, bytes);
    }
    return p;
}

#define KVT_NIL UINT32_MAX
#define KVT_CLASSES 2
#define KVT_PLACES 4
#define KVT_RANK_STEPS 64 /* how far a slot that comes back looks for its place */

enum { KVT_MAIN = 0, KVT_USE = 1, KVT_SERVICE = 2, KVT_PARKED_UNSAVED = 3 };

/* Numbers of lists; policy lists are 1 + class * KVT_PLACES + place. */
enum {
    KVT_NOWHERE = 0, /* FREE, or not made available yet */
    KVT_LENT = 1 + KVT_CLASSES * KVT_PLACES,
    KVT_ORPHAN_WRITING, /* its writer goes on */
    KVT_ORPHAN_PINNED,  /* its readers go on */
    KVT_NUM_LISTS
};

#define KVT_LIST_MASK 0x0fULL
#define KVT_FRESH 0x10ULL   /* inserted, and not touched since: the first touch is no reuse */
#define KVT_PROTECT 0x20ULL /* asked for in the running call */
#define KVT_RANK_SHIFT 8

typedef struct {
    uint32_t prev; /* towards the MRU end */
    uint32_t next; /* towards the LRU end; of a FREE slot the next free one (with slabs prev too) */
    uint64_t info; /* rank 56 bits, flags, list 4 bits */
} kvt_node;

typedef struct {
    uint32_t head, tail; /* MRU, LRU end */
    uint32_t hint;       /* last slot put in by rank: its neighbours usually follow */
    uint64_t count;
} kvt_list;

typedef struct {
    kvt_node *node; /* owned by Room */
    kvt_list list[KVT_NUM_LISTS];
    uint64_t in_class[KVT_CLASSES + 1]; /* slots of each class, parked or not; the rest */
    uint64_t *rank; /* last one given, by all size classes; owned by Room */
    uint64_t steps; /* list steps so far, for the tests of cost */
} kvt_lists;

static inline unsigned kvt_list_of(const kvt_node *n) { return (unsigned)(n->info & KVT_LIST_MASK); }
static inline uint64_t kvt_rank(const kvt_node *n) { return n->info >> KVT_RANK_SHIFT; }
static inline unsigned kvt_place_list(unsigned cls, unsigned place)
{
    return 1 + cls * KVT_PLACES + place;
}
static inline int kvt_is_placed(unsigned list) { return list >= 1 && list < KVT_LENT; }
static inline unsigned kvt_class(unsigned list) { return (list - 1) / KVT_PLACES; }
static inline unsigned kvt_place(unsigned list) { return (list - 1) % KVT_PLACES; }

/* Which of in_class a list counts in. */
static inline unsigned kvt_counted(unsigned list)
{
    return kvt_is_placed(list) ? kvt_class(list) : KVT_CLASSES;
}

/* |T1| or |T2|: parked chunks count. */
static inline uint64_t kvt_class_count(const kvt_lists *l, unsigned cls) { return l->in_class[cls]; }

static inline void kvt_lists_reset(kvt_lists *l)
{
    for (int i = 0; i < KVT_NUM_LISTS; i++)
        l->list[i] = (kvt_list){KVT_NIL, KVT_NIL, KVT_NIL, 0};
    memset(l->in_class, 0, sizeof(l->in_class));
}

static inline void kvt_unlink(kvt_lists *l, uint32_t s)
{
    kvt_node *n = &l->node[s];
    kvt_list *p = &l->list[kvt_list_of(n)];
    if (n->prev == KVT_NIL) p->head = n->next; else l->node[n->prev].next = n->next;
    if (n->next == KVT_NIL) p->tail = n->prev; else l->node[n->next].prev = n->prev;
    if (p->hint == s) p->hint = n->prev;
    p->count--;
    l->in_class[kvt_counted(kvt_list_of(n))]--;
    n->info &= ~KVT_LIST_MASK;
}

/* Put s before `next` (towards the MRU end); KVT_NIL is the LRU end. */
static inline void kvt_link_before(kvt_lists *l, unsigned list, uint32_t s, uint32_t next)
{
    kvt_node *n = &l->node[s];
    kvt_list *p = &l->list[list];
    n->next = next;
    n->prev = next == KVT_NIL ? p->tail : l->node[next].prev;
    if (n->prev == KVT_NIL) p->head = s; else l->node[n->prev].next = s;
    if (next == KVT_NIL) p->tail = s; else l->node[next].prev = s;
    p->count++;
    l->in_class[kvt_counted(list)]++;
    n->info = (n->info & ~KVT_LIST_MASK) | list;
}

static inline void kvt_push_head(kvt_lists *l, unsigned list, uint32_t s)
{
    kvt_link_before(l, list, s, l->list[list].head);
}

/* New rank, MRU end of the class. */
static inline void kvt_use(kvt_lists *l, unsigned cls, uint32_t s)
{
    kvt_node *n = &l->node[s];
    const unsigned list = kvt_place_list(cls, KVT_MAIN), from = kvt_list_of(n);
    n->info = (n->info & ((1ULL << KVT_RANK_SHIFT) - 1)) | ++*l->rank << KVT_RANK_SHIFT;
    if (from == list && n->prev != KVT_NIL) {
        /* To the front of its own list: no counter changes. */
        kvt_list *p = &l->list[list];
        l->node[n->prev].next = n->next;
        if (n->next == KVT_NIL) p->tail = n->prev; else l->node[n->next].prev = n->prev;
        if (p->hint == s) p->hint = n->prev;
        n->prev = KVT_NIL;
        n->next = p->head;
        l->node[p->head].prev = s;
        p->head = s;
        return;
    }
    if (from)
        kvt_unlink(l, s);
    kvt_push_head(l, list, s);
}

/* By rank, looked for from `at`; after KVT_RANK_STEPS steps wherever it has come to. */
static inline void kvt_link_ranked(kvt_lists *l, unsigned list, uint32_t s, uint32_t at)
{
    const uint64_t rank = kvt_rank(&l->node[s]);
    kvt_list *p = &l->list[list];
    int left = KVT_RANK_STEPS;
    if (p->hint != KVT_NIL)
        at = p->hint;
    /* `at` becomes the slot that will stand behind s, on its LRU side. */
    if (at != KVT_NIL && kvt_rank(&l->node[at]) > rank) {
        while (at != KVT_NIL && kvt_rank(&l->node[at]) > rank && left--) {
            at = l->node[at].next;
            l->steps++;
        }
    } else if (at != KVT_NIL) {
        uint32_t up = l->node[at].prev;
        while (up != KVT_NIL && kvt_rank(&l->node[up]) < rank && left--) {
            at = up;
            up = l->node[up].prev;
            l->steps++;
        }
    }
    kvt_link_before(l, list, s, at);
    p->hint = s;
}

/* Back to the LRU end of MAIN: all of MAIN was younger when s was parked. */
static inline void kvt_unpark(kvt_lists *l, uint32_t s)
{
    unsigned list = kvt_place_list(kvt_class(kvt_list_of(&l->node[s])), KVT_MAIN);
    kvt_unlink(l, s);
    kvt_link_ranked(l, list, s, l->list[list].tail);
}

static inline void kvt_park(kvt_lists *l, uint32_t s, unsigned place)
{
    unsigned list = kvt_place_list(kvt_class(kvt_list_of(&l->node[s])), place);
    kvt_unlink(l, s);
    l->steps++;
    if (place == KVT_PARKED_UNSAVED) {
        /* Their order decides who goes when nothing else is left. */
        l->list[list].hint = KVT_NIL;
        kvt_link_ranked(l, list, s, l->list[list].head);
    } else {
        kvt_push_head(l, list, s);
    }
}

#endif
