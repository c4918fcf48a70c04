/* SPDX-License-Identifier: Apache-2.0
 *
 * The owner's index: moves of one slot between FREE, WRITING, READY and the lists, and the search
 * for victims. `room.pyx` and `index.pyx` check arguments and loop over batches. There is one for
 * each size class; what they share, and how memory goes from one to another, is in `slabs.h`.
 *
 * Owner's thread only; other processes change pins and flags meanwhile, so every decision about a
 * slot is made by the compare-and-swap that carries it out.
 */
#ifndef KVTIER_INDEX_H
#define KVTIER_INDEX_H

#include "policy_arc.h"
#include "policy_lru.h"
#include "trail.h"

#define KVT_UNSAVED_STEPS 1024 /* unsaved chunks put aside for one victim; see kvt_take_victim */
#define KVT_SERVICE_CHECKS 2   /* slots with service pins looked at again for one victim */
#define KVT_BLOCK 32           /* keys prefetched together */
#define KVT_AHEAD 8            /* victims fetched together when fewer were expected of a class */
#define KVT_SERVICE_LAST 64    /* the same, before giving up */

/* The victims of one class that the running reserve expects, oldest first. */
typedef struct {
    kvt_key k[KVT_BLOCK];
    int at, end;  /* [at, end) have hashes and are still to go */
    int expected; /* [end, expected) have a slot only */
} kvt_ahead;

typedef struct {
    kvt_table t;
    kvt_lists l;
    const kvt_policy *policy; /* a table of the module that opened this */
    enum { KVT_OTHER, KVT_LRU, KVT_ARC } known; /* a policy that every module has */
    void *state; /* of the policy; owned */
    uint64_t capacity;    /* chunks that there is memory for */
    uint64_t bumped, end; /* slots bumped, bumped + width, ... below end were never used */
    uint32_t width;       /* slots that a chunk takes */
    uint32_t free_head; /* last in, first out: its memory is the warmest */
    uint32_t guess; /* slot of the next single lookup: the next older chunk than the last one */
    uint64_t num_free, num_writing, num_ready, num_lent, num_orphans, ready_bytes;
    kvt_ahead ahead[KVT_CLASSES];
    kvt_scout scout[KVT_CLASSES]; /* its victims */
    int reserving; /* victims will be wanted one after the other */
    struct kvt_slabs *slabs;      /* NULL: all memory is this size class's */
    uint32_t hand[2 * KVT_CLASSES]; /* where the last search for a slab to take here ended */
    int pause;                    /* claims until another size class is searched again */
} kvt_index;

static inline void kvt_slab_popped(struct kvt_slabs *g, uint32_t s);
static inline void kvt_slab_pushed(struct kvt_slabs *g, kvt_index *x, uint32_t s);

/* A call of the policy. Those known here are called by name, so that the compiler can put their few
 * lines in place; any other one goes through its table. */
#define KVT_POLICY(x, f, ...)                                                    \
    ((x)->known == KVT_ARC   ? kvt_arc_##f(__VA_ARGS__)                          \
     : (x)->known == KVT_LRU ? kvt_lru_##f(__VA_ARGS__)                          \
                             : (x)->policy->f(__VA_ARGS__))

/* `node` and `rank` are the caller's; `most` is the largest capacity that will come. */
static inline int kvt_index_open(kvt_index *x, const kvt_table *t, const char *policy,
                                 kvt_node *node, uint64_t *rank, uint64_t most, uint32_t width)
{
    x->t = *t;
    x->known = strcmp(policy, "arc") ? KVT_LRU : KVT_ARC;
    x->policy = x->known == KVT_ARC ? &kvt_arc : &kvt_lru;
    x->width = width;
    x->free_head = x->guess = KVT_NIL;
    for (int i = 0; i < 2 * KVT_CLASSES; i++)
        x->hand[i] = KVT_NIL;
    for (int cls = 0; cls < KVT_CLASSES; cls++)
        x->scout[cls].at = KVT_NIL;
    kvt_lists_reset(&x->l);
    x->l.node = node;
    x->l.rank = rank;
    x->state = x->policy->create(most);
    return x->state ? 0 : -1;
}

static inline void kvt_index_close(kvt_index *x)
{
    if (x->policy && x->state)
        x->policy->destroy(x->state);
    x->state = NULL;
}

static inline void kvt_prefetch_bucket(const kvt_index *x, const kvt_key *k)
{
    __builtin_prefetch(&x->t.bucket[kvt_home(&x->t, k->hash)], 1);
}

/* The next n victims of a class, most likely: nodes and records are on their way. */
static inline void kvt_expect_of(kvt_index *x, unsigned cls, int n)
{
    kvt_ahead *a = &x->ahead[cls];
    uint32_t at = x->l.list[kvt_place_list(cls, KVT_MAIN)].tail;
    a->at = a->end = a->expected = 0;
    for (; a->expected < n && at != KVT_NIL; at = x->l.node[at].prev) {
        __builtin_prefetch(&x->t.rec[at], 1);
        a->k[a->expected++].slot = at;
    }
}

/* What removing them will write. */
static inline void kvt_prefetch_expected(kvt_index *x, unsigned cls)
{
    kvt_ahead *a = &x->ahead[cls];
    for (; a->end < a->expected; a->end++) {
        kvt_key *k = &a->k[a->end];
        const kvt_record *r = &x->t.rec[k->slot];
        if (r->key_len < 5 || r->key_len > KVT_KEY_BYTES)
            break;
        kvt_key_words(k, r->key, r->key_len);
        kvt_key_hash(k);
        kvt_prefetch_bucket(x, k);
        KVT_POLICY(x, prefetch, x->state, k);
    }
    a->expected = a->end;
}

/* n absent keys may come: fetch what evicting for them will read first. */
static inline void kvt_expect(kvt_index *x, int64_t n)
{
    int from[KVT_CLASSES] = {0};
    n -= (int64_t)x->num_free;
    if (n > 0)
        KVT_POLICY(x, expect, x->state, &x->l, n < KVT_BLOCK ? (int)n : KVT_BLOCK, from);
    for (unsigned cls = 0; cls < KVT_CLASSES; cls++)
        kvt_expect_of(x, cls, from[cls]);
}

/* Before a block of keys of a reserve: what the policy will read for those that are absent, and what
 * removing the expected victims will write. The first block is not looked up yet then: while that is
 * done, all of this comes. */
static inline void kvt_prefetch_reserve(kvt_index *x, kvt_key *k, int64_t n)
{
    for (int64_t i = 0; i < n && i < KVT_BLOCK; i++)
        if (k[i].slot == -1) {
            if (!k[i].hashed)
                kvt_key_hash(&k[i]);
            KVT_POLICY(x, prefetch, x->state, &k[i]);
        }
    x->reserving = 1;
    for (unsigned cls = 0; cls < KVT_CLASSES; cls++)
        kvt_prefetch_expected(x, cls);
}

/* End of a reserve: from now on keys may leave their slots by other ways. */
static inline void kvt_forget_ahead(kvt_index *x)
{
    x->reserving = 0;
    for (unsigned cls = 0; cls < KVT_CLASSES; cls++)
        x->ahead[cls].at = x->ahead[cls].end = x->ahead[cls].expected = 0;
}

/* Key and hash of the victim s: as fetched ahead if it was expected, else into *own. */
static inline const kvt_key *kvt_victim_key(kvt_index *x, uint32_t s, unsigned cls, kvt_key *own)
{
    kvt_ahead *a = &x->ahead[cls];
    if (x->reserving && a->at == a->end) {
        kvt_expect_of(x, cls, KVT_AHEAD);
        kvt_prefetch_expected(x, cls);
    }
    while (a->at < a->end) /* those passed over were found unusable, and parked */
        if (a->k[a->at++].slot == s)
            return &a->k[a->at - 1];
    kvt_key_of(own, &x->t.rec[s]);
    return own;
}

/* First slot whose tag fits, unconfirmed: what kvt_find will look at. -1: the key is absent. */
static inline int64_t kvt_prefetch_record(const kvt_index *x, const kvt_key *k)
{
    kvt_walk at;
    int64_t s = kvt_first(&x->t, k->hash, &at);
    if (s >= 0) {
        __builtin_prefetch(&x->t.rec[s], 1);
        __builtin_prefetch(&x->l.node[s], 1);
    }
    return s;
}

static inline void kvt_prefetch_links(const kvt_index *x, int64_t s)
{
    const kvt_node *n = &x->l.node[s];
    if (n->prev != KVT_NIL) __builtin_prefetch(&x->l.node[n->prev], 1);
    if (n->next != KVT_NIL) __builtin_prefetch(&x->l.node[n->next], 1);
}

/* Whether slot s holds k: it is in a list of chunks, so in the table, and its key is the same. */
static inline int kvt_still_there(const kvt_index *x, int64_t s, const kvt_key *k)
{
    return kvt_is_placed(kvt_list_of(&x->l.node[s])) && kvt_same_key(&x->t.rec[s], k);
}

/* Slot of one key, or -1; its word in *word. A run of keys that was touched together stands in that
 * order in its list, so the slot behind the last one is tried before the table. */
static inline int64_t kvt_lookup(kvt_index *x, kvt_key *k, uint64_t *word)
{
    int64_t s = x->guess;
    k->hashed = 0;
    if (s != KVT_NIL && kvt_still_there(x, s, k)) {
        *word = kvt_load(&x->t.rec[s]);
    } else {
        kvt_key_hash(k);
        s = kvt_find(&x->t, k, word);
    }
    k->slot = s;
    x->guess = s < 0 ? KVT_NIL : x->l.node[s].next;
    if (x->guess != KVT_NIL) {
        __builtin_prefetch(&x->t.rec[x->guess], 1);
        __builtin_prefetch(&x->l.node[x->guess], 1);
    }
    return s;
}

/* Slots of n keys, or -1: as remembered if that is still right, else from the table, in blocks, so
 * that many cache misses run at the same time. Every key that is not present has a hash then. */
static inline void kvt_find_all(const kvt_index *x, kvt_key *k, int64_t n)
{
    uint64_t word;
    for (int64_t at = 0; at < n; at += KVT_BLOCK) {
        int64_t stop = at + KVT_BLOCK < n ? at + KVT_BLOCK : n;
        kvt_key *unknown[KVT_BLOCK];
        int m = 0, likely = 0;
        for (int64_t i = at; i < stop; i++) {
            if (k[i].slot >= 0 && kvt_still_there(x, k[i].slot, &k[i]))
                continue;
            if (!k[i].hashed)
                kvt_key_hash(&k[i]);
            kvt_prefetch_bucket(x, &k[i]);
            k[i].slot = -1;
            unknown[m++] = &k[i];
        }
        for (int i = 0; i < m; i++)
            if (kvt_prefetch_record(x, unknown[i]) >= 0)
                unknown[likely++] = unknown[i];
        for (int i = 0; i < likely; i++)
            unknown[i]->slot = kvt_find(&x->t, unknown[i], &word);
    }
}

static inline void kvt_push_free(kvt_index *x, uint32_t s)
{
    x->l.node[s].info = 0;
    x->l.node[s].next = x->free_head;
    if (x->slabs && x->free_head != KVT_NIL)
        x->l.node[x->free_head].prev = s;
    x->free_head = s;
    x->num_free++;
    if (x->slabs)
        kvt_slab_pushed(x->slabs, x, s);
}

/* A FREE slot, or -1; -2 if it is not as it must be. */
static inline int64_t kvt_pop_free(kvt_index *x)
{
    int64_t s;
    if (x->free_head != KVT_NIL) {
        s = x->free_head;
        x->free_head = x->l.node[s].next;
    } else if (x->bumped < x->end) {
        s = (int64_t)x->bumped;
        x->bumped += x->width;
    } else {
        return -1;
    }
    x->num_free--;
    if (x->slabs)
        kvt_slab_popped(x->slabs, (uint32_t)s);
    uint64_t w = kvt_load(&x->t.rec[s]);
    return kvt_state(w) == KVT_FREE && !(w & KVT_PINS_MASK) ? s : -2;
}

/* Bare slot to FREE under the next generation; 0 if a pin or another state stands against it. */
static inline int kvt_set_free(kvt_index *x, uint32_t s, unsigned from)
{
    kvt_record *r = &x->t.rec[s];
    uint64_t w = kvt_load(r);
    do {
        if (kvt_state(w) != from || (w & KVT_PINS_MASK))
            return 0;
    } while (!kvt_cas(r, &w, kvt_word(KVT_FREE, kvt_gen(w) + 1)));
    return 1;
}

/* The owner's change of state; pins stay. 0 if the slot was not in `from`. */
static inline int kvt_set_state(kvt_index *x, uint32_t s, unsigned from, unsigned to)
{
    kvt_record *r = &x->t.rec[s];
    uint64_t w = kvt_load(r);
    do {
        if (kvt_state(w) != from)
            return 0;
    } while (!kvt_cas(r, &w, (w & ~KVT_STATE_MASK) | to));
    return 1;
}

/* Where a slot at the LRU end belongs: KVT_MAIN is "can be evicted now". */
static inline unsigned kvt_usable(const kvt_index *x, uint32_t s)
{
    const kvt_record *r = &x->t.rec[s];
    uint64_t w = kvt_load(r);
    if (kvt_state(w) != KVT_READY || (w & KVT_OWNER_MASK) || (x->l.node[s].info & KVT_PROTECT))
        return KVT_USE;
    if (w & KVT_SERVICE_MASK)
        return KVT_SERVICE;
    return kvt_flags(r) & KVT_UNSAVED ? KVT_PARKED_UNSAVED : KVT_MAIN;
}

/* Something about a slot got better; if it is parked, it goes where it belongs now. */
static inline void kvt_reconsider(kvt_index *x, uint32_t s)
{
    unsigned list = kvt_list_of(&x->l.node[s]), place;
    if (!kvt_is_placed(list) || kvt_place(list) == KVT_MAIN)
        return;
    place = kvt_usable(x, s);
    if (place == KVT_MAIN)
        kvt_unpark(&x->l, s);
    else if (place != kvt_place(list))
        kvt_park(&x->l, s, place);
}

/* Look again at up to n slots that were last seen with service pins, round robin. */
static inline int kvt_check_service(kvt_index *x, int n)
{
    int found = 0;
    for (unsigned cls = 0; cls < KVT_CLASSES; cls++) {
        unsigned list = kvt_place_list(cls, KVT_SERVICE);
        uint64_t most = x->l.list[list].count;
        for (; n && most; n--, most--) {
            uint32_t s = x->l.list[list].tail;
            x->l.steps++;
            if (kvt_usable(x, s) == KVT_SERVICE) {
                kvt_unlink(&x->l, s);
                kvt_push_head(&x->l, list, s);
            } else {
                kvt_reconsider(x, s);
                found++;
            }
        }
    }
    return found;
}

/* Take a READY slot without pins out of everything but the free list. 0 if a pin came first. */
static inline int kvt_detach(kvt_index *x, uint32_t s)
{
    kvt_record *r = &x->t.rec[s];
    if (!kvt_set_free(x, s, KVT_READY))
        return 0;
    x->num_ready--;
    x->ready_bytes -= r->length;
    return 1;
}

/* A victim of the class has gone. One node more is fetched for it: kvt_expect_of will go from node to
 * node without anything else to do meanwhile. */
static inline void kvt_scout_on(kvt_index *x, unsigned cls)
{
    kvt_scout *c = &x->scout[cls];
    kvt_scout_follow(c, x->l.list[kvt_place_list(cls, KVT_MAIN)].tail);
    for (int i = 0; i < 2 && c->lead < 2 * KVT_BLOCK && c->at != KVT_NIL; i++, c->lead++) {
        c->at = x->l.node[c->at].prev;
        if (c->at != KVT_NIL)
            __builtin_prefetch(&x->l.node[c->at], 1);
    }
}

static inline int kvt_evict(kvt_index *x, uint32_t s, const kvt_miss *m, int *broken)
{
    const unsigned cls = kvt_class(kvt_list_of(&x->l.node[s]));
    kvt_key own;
    const kvt_key *k = kvt_victim_key(x, s, cls, &own);
    if (!kvt_detach(x, s))
        return 0;
    *broken |= !kvt_table_remove(&x->t, k->hash, s);
    KVT_POLICY(x, evicted, x->state, &x->l, x->capacity, k, cls, m);
    kvt_unlink(&x->l, s);
    x->l.node[s].info = 0;
    kvt_scout_on(x, cls);
    return 1;
}

/* Next victim of one class from MAIN, or -1. What cannot go is parked on the way. */
static inline int64_t kvt_take_main(kvt_index *x, unsigned cls, const kvt_miss *m, int *more,
                                    int *broken)
{
    kvt_list *p = &x->l.list[kvt_place_list(cls, KVT_MAIN)];
    int left = KVT_UNSAVED_STEPS;
    while (p->tail != KVT_NIL) {
        uint32_t s = p->tail;
        unsigned place = kvt_usable(x, s);
        if (place == KVT_MAIN) {
            if (kvt_evict(x, s, m, broken))
                return s;
            place = KVT_SERVICE; /* pinned this very moment */
        } else if (place == KVT_PARKED_UNSAVED && !left--) {
            *more = 1;
            return -1;
        }
        kvt_park(&x->l, s, place);
    }
    return -1;
}

static inline int64_t kvt_take_unsaved(kvt_index *x, unsigned cls, const kvt_miss *m, int *broken)
{
    kvt_list *p = &x->l.list[kvt_place_list(cls, KVT_PARKED_UNSAVED)];
    while (p->tail != KVT_NIL) {
        uint32_t s = p->tail;
        unsigned place = kvt_usable(x, s);
        if ((place == KVT_MAIN || place == KVT_PARKED_UNSAVED)) {
            if (kvt_evict(x, s, m, broken))
                return s;
            place = KVT_SERVICE;
        }
        kvt_park(&x->l, s, place);
    }
    return -1;
}

/*
 * One slot, evicted: FREE, in no list, its key still in the record. -1 if nothing can go.
 *
 * Saved chunks go before unsaved ones, in the order of the policy. Unsaved chunks met on the way
 * are put aside, at most KVT_UNSAVED_STEPS for one victim: after a long outage of the secondary
 * tiers everything is unsaved, and the scheduler's thread shall not walk over all of it at once.
 * With saved_only they stay.
 */
static inline int64_t kvt_take_victim(kvt_index *x, const kvt_miss *m, int saved_only,
                                      int *broken)
{
    int64_t s;
    int last = 0;
    kvt_check_service(x, KVT_SERVICE_CHECKS);
    for (;;) {
        int more = 0;
        unsigned first = KVT_POLICY(x, victim, x->state, &x->l, x->capacity, m);
        for (unsigned i = 0; i < KVT_CLASSES; i++)
            if ((s = kvt_take_main(x, first ^ i, m, &more, broken)) >= 0)
                return s;
        for (unsigned i = 0; !saved_only && i < KVT_CLASSES; i++)
            if ((s = kvt_take_unsaved(x, first ^ i, m, broken)) >= 0)
                return s;
        if (more && !saved_only)
            continue; /* put-aside ones were all pinned meanwhile: go on behind them */
        if (last++ || !kvt_check_service(x, KVT_SERVICE_LAST))
            return -1;
    }
}

/* First half of a reserve: a FREE slot for k. -1 if there is none, -2 if something is broken.
 * With *evicted a chunk had to go for it, whose key still stands in the record. */
static inline int64_t kvt_claim(kvt_index *x, const kvt_key *k, kvt_miss *m, int *evicted)
{
    int broken = 0;
    *evicted = 0;
    KVT_POLICY(x, missed, x->state, &x->l, x->capacity, k, m);
    int64_t s = kvt_pop_free(x);
    if (s == -1) {
        s = kvt_take_victim(x, m, 0, &broken);
        *evicted = s >= 0;
    }
    if (s < 0 || broken) {
        KVT_POLICY(x, refused, x->state, m);
        return broken ? -2 : s;
    }
    return s;
}

/* A claimed slot goes back unused. */
static inline void kvt_disclaim(kvt_index *x, uint32_t s, kvt_miss *m)
{
    KVT_POLICY(x, refused, x->state, m);
    kvt_push_free(x, s);
}

/* Second half: the slot is k's, in state WRITING. 0, or -2. */
static inline int kvt_settle(kvt_index *x, uint32_t s, const kvt_key *k, const kvt_miss *m,
                             uint32_t length, unsigned flags)
{
    kvt_write_key(&x->t.rec[s], k, length, flags);
    uint64_t w = kvt_load(&x->t.rec[s]);
    if (kvt_state(w) != KVT_FREE || (w & KVT_PINS_MASK))
        return -2;
    /* No compare-and-swap: it would wait for the stores above, and only the owner changes this. */
    __atomic_store_n(&x->t.rec[s].word, w | KVT_WRITING, __ATOMIC_RELEASE);
    x->num_writing++;
    kvt_table_add(&x->t, k->hash, s);
    x->l.node[s].info = KVT_FRESH;
    kvt_use(&x->l, KVT_POLICY(x, place, x->state, m), s);
    KVT_POLICY(x, placed, x->state, &x->l, x->capacity);
    return 0;
}

/* A lent slot gets its key and is READY. 0, or -2. */
static inline int kvt_adopt(kvt_index *x, uint32_t s, const kvt_key *k, uint32_t length,
                            unsigned flags, uint32_t crc)
{
    kvt_miss m;
    KVT_POLICY(x, missed, x->state, &x->l, x->capacity, k, &m);
    x->t.rec[s].crc = crc;
    kvt_write_key(&x->t.rec[s], k, length, flags);
    kvt_unlink(&x->l, s);
    x->num_lent--;
    kvt_table_add(&x->t, k->hash, s);
    x->l.node[s].info = KVT_FRESH;
    kvt_use(&x->l, KVT_POLICY(x, place, x->state, &m), s);
    KVT_POLICY(x, placed, x->state, &x->l, x->capacity);
    if (!kvt_set_state(x, s, KVT_WRITING, KVT_READY))
        return -2;
    x->num_ready++;
    x->ready_bytes += length;
    return 0;
}

static inline void kvt_touch(kvt_index *x, uint32_t s)
{
    kvt_node *n = &x->l.node[s];
    unsigned cls = kvt_class(kvt_list_of(n));
    if (n->info & KVT_FRESH)
        n->info &= ~KVT_FRESH;
    else
        cls = KVT_POLICY(x, reused, x->state, cls);
    kvt_use(&x->l, cls, s);
}

/* Take a chunk with a key away from table and lists; the word has left READY or WRITING already. */
static inline int kvt_forget(kvt_index *x, uint32_t s)
{
    kvt_key k;
    kvt_key_of(&k, &x->t.rec[s]);
    kvt_unlink(&x->l, s);
    return kvt_table_remove(&x->t, k.hash, s);
}

#endif
