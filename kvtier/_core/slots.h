/* SPDX-License-Identifier: Apache-2.0
 *
 * Slot records and key table: the memory that owner, workers and service share.
 *
 * Owns nothing: works on mapped memory that the caller keeps alive. Any process and thread may call
 * the readers and the pin functions; the functions marked "owner" belong to the one owner thread.
 *
 * Invariants
 * - A word changes by compare-and-swap only, but for the owner's FREE to WRITING: nobody else
 *   changes a FREE word. READY is stored with release order after payload and
 *   record, so whoever reads READY with acquire order sees both.
 * - Key bytes change only while the slot is FREE, or WRITING with key length 0 (a lent slot), and a
 *   slot in which somebody holds a pin is neither.
 * - A slot that becomes FREE takes the next generation in the same compare-and-swap.
 */
#ifndef KVTIER_SLOTS_H
#define KVTIER_SLOTS_H

#include <stdint.h>
#include <string.h>

#define KVT_KEY_BYTES 40
#define KVT_KEY_WORDS 5
#define KVT_BUCKET_ENTRIES 7

enum { KVT_FREE = 0, KVT_WRITING = 1, KVT_READY = 2, KVT_ORPHAN = 3 };
enum { KVT_CRC_VALID = 1, KVT_UNSAVED = 2 };

/* The word: state 2 bits, owner pins 15, service pins 15, generation 32. */
#define KVT_STATE_MASK 3ULL
#define KVT_OWNER_ONE (1ULL << 2)
#define KVT_OWNER_MASK (0x7fffULL << 2)
#define KVT_SERVICE_ONE (1ULL << 17)
#define KVT_SERVICE_MASK (0x7fffULL << 17)
#define KVT_PINS_MASK (KVT_OWNER_MASK | KVT_SERVICE_MASK)

typedef struct {
    uint64_t word;
    uint32_t crc;     /* CRC-32C of the payload, if KVT_CRC_VALID */
    uint32_t length;  /* payload bytes */
    uint8_t flags;    /* changed by atomic or / and: both sides do */
    uint8_t key_len;  /* stored last with release order; 0: no key */
    uint8_t unused[6];
    uint64_t key[KVT_KEY_WORDS]; /* zero-padded */
} kvt_record;

typedef struct {
    uint64_t entry[KVT_BUCKET_ENTRIES]; /* tag 24 bits, slot + 1 40 bits; 0 is empty */
    uint64_t passed; /* keys with their home here or before that were placed behind this bucket */
} kvt_bucket;

_Static_assert(sizeof(kvt_record) == 64, "a record is one cache line");
_Static_assert(sizeof(kvt_bucket) == 64, "a bucket is one cache line");

/* A key taken out of its bytes object, with what was found out about it. One cache line. */
typedef struct {
    uint64_t w[KVT_KEY_WORDS];
    uint64_t hash;
    int64_t slot;
    uint32_t group;
    uint8_t len;
    uint8_t hashed; /* whether `hash` has been computed */
} kvt_key;

typedef struct {
    kvt_record *rec;    /* kept alive by SlotTable's buffer */
    kvt_bucket *bucket; /* likewise */
    uint64_t num_slots;
    uint64_t num_buckets;
} kvt_table;

static inline unsigned kvt_state(uint64_t w) { return (unsigned)(w & KVT_STATE_MASK); }
static inline uint32_t kvt_gen(uint64_t w) { return (uint32_t)(w >> 32); }
static inline unsigned kvt_owner(uint64_t w) { return (unsigned)(w >> 2) & 0x7fff; }
static inline unsigned kvt_service(uint64_t w) { return (unsigned)(w >> 17) & 0x7fff; }

static inline uint64_t kvt_word(unsigned state, uint32_t gen)
{
    return (uint64_t)gen << 32 | state;
}

static inline uint64_t kvt_load(const kvt_record *r)
{
    return __atomic_load_n(&r->word, __ATOMIC_ACQUIRE);
}

static inline int kvt_cas(kvt_record *r, uint64_t *seen, uint64_t to)
{
    return __atomic_compare_exchange_n(&r->word, seen, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline unsigned kvt_flags(const kvt_record *r)
{
    return __atomic_load_n(&r->flags, __ATOMIC_ACQUIRE);
}

/* Folded 64 x 64 multiplication: every input bit reaches every output bit. */
static inline uint64_t kvt_mix(uint64_t a, uint64_t b)
{
    unsigned __int128 p = (unsigned __int128)a * b;
    return (uint64_t)p ^ (uint64_t)(p >> 64);
}

/* 64 bits over the words. */
static inline uint64_t kvt_hash(const uint64_t *w, unsigned len)
{
    uint64_t a = kvt_mix(w[0] ^ 0x9e3779b97f4a7c15ULL, w[1] ^ 0xd6e8feb86659fd93ULL);
    uint64_t b = kvt_mix(w[2] ^ 0xa0761d6478bd642fULL, w[3] ^ 0xe7037ed1a0b428dbULL);
    uint64_t c = kvt_mix(w[4] ^ 0x8ebc6af09c88c6e3ULL, len ^ 0x589965cc75374cc3ULL);
    /* Rotations keep swapped words from giving the same sum. */
    return kvt_mix(a ^ (b << 23 | b >> 41) ^ 0x1d8e4e27c47d124fULL,
                   c ^ (a << 41 | a >> 23) ^ (b << 11 | b >> 53));
}

/* Takes 5 to 40 bytes over; the caller checked the length. The hash is left to kvt_key_hash. */
static inline void kvt_key_words(kvt_key *k, const void *bytes, unsigned len)
{
    const unsigned char *end = (const unsigned char *)bytes + len - 4;
    if (len == 36) { /* vLLM's. Whole words: a word read back was written in one piece. */
        uint32_t last;
        memcpy(k->w, bytes, 32);
        memcpy(&last, end, 4);
        k->w[4] = last; /* the layout of a record is little-endian */
    } else {
        memset(k->w, 0, sizeof(k->w));
        memcpy(k->w, bytes, len);
    }
    k->group = (uint32_t)end[0] << 24 | (uint32_t)end[1] << 16 | (uint32_t)end[2] << 8 | end[3];
    k->len = (uint8_t)len;
}

static inline void kvt_key_hash(kvt_key *k)
{
    k->hash = kvt_hash(k->w, k->len);
    k->hashed = 1;
}

static inline void kvt_key_load(kvt_key *k, const void *bytes, unsigned len)
{
    kvt_key_words(k, bytes, len);
    kvt_key_hash(k);
    k->slot = -1;
}

/* Owner: the key of a slot that has one. */
static inline void kvt_key_of(kvt_key *k, const kvt_record *r)
{
    kvt_key_load(k, r->key, r->key_len);
}

/* Compare under a pin, or on the owner's thread: the bytes cannot change. */
static inline int kvt_same_key(const kvt_record *r, const kvt_key *k)
{
    uint64_t d = __atomic_load_n(&r->key_len, __ATOMIC_ACQUIRE) ^ k->len;
#pragma GCC unroll 5
    for (int i = 0; i < KVT_KEY_WORDS; i++)
        d |= __atomic_load_n(&r->key[i], __ATOMIC_RELAXED) ^ k->w[i];
    return d == 0;
}

/* Compare without a pin: the word must be the same before and after. Returns the word or 0. */
static inline uint64_t kvt_holds(const kvt_record *r, const kvt_key *k)
{
    uint64_t w = kvt_load(r);
    unsigned state = kvt_state(w);
    if ((state != KVT_READY && state != KVT_WRITING) || !kvt_same_key(r, k))
        return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    uint64_t again = __atomic_load_n(&r->word, __ATOMIC_RELAXED);
    /* Pins, and WRITING to READY, may have changed; a reuse shows in the generation. */
    return kvt_gen(again) == kvt_gen(w) ? again : 0;
}

static inline uint64_t kvt_home(const kvt_table *t, uint64_t hash)
{
    return (uint64_t)(((unsigned __int128)hash * t->num_buckets) >> 64);
}

static inline uint64_t kvt_next(const kvt_table *t, uint64_t b)
{
    return b + 1 == t->num_buckets ? 0 : b + 1;
}

#define KVT_SLOT_MASK ((1ULL << 40) - 1)

static inline uint64_t kvt_entry(uint64_t hash, uint64_t slot)
{
    return hash << 40 | (slot + 1);
}

/* Which entries of a bucket have this tag, as bits. No branches: where one stands is not known. */
static inline unsigned kvt_tagged(const kvt_bucket *b, uint64_t tag)
{
    unsigned bits = 0;
#pragma GCC unroll 7
    for (int i = 0; i < KVT_BUCKET_ENTRIES; i++) {
        uint64_t e = __atomic_load_n(&b->entry[i], __ATOMIC_RELAXED);
        bits |= (unsigned)((e ^ tag) <= KVT_SLOT_MASK) << i;
    }
    return bits;
}

/* A walk over the slots that may hold a key: kvt_first, then kvt_more until -1. */
typedef struct {
    uint64_t bucket;
    uint64_t left; /* buckets still allowed: a reader ends whatever a writer does meanwhile */
    unsigned bits; /* entries of the bucket that are still to be looked at */
} kvt_walk;

static inline int64_t kvt_more(const kvt_table *t, uint64_t hash, kvt_walk *at)
{
    const uint64_t tag = hash << 40;
    for (;;) {
        const kvt_bucket *b = &t->bucket[at->bucket];
        for (; at->bits; at->bits &= at->bits - 1) {
            uint64_t e = __atomic_load_n(&b->entry[__builtin_ctz(at->bits)], __ATOMIC_RELAXED);
            uint64_t slot = e & KVT_SLOT_MASK;
            if (slot && (e ^ slot) == tag && slot <= t->num_slots) {
                at->bits &= at->bits - 1;
                return (int64_t)slot - 1;
            }
        }
        if (!__atomic_load_n(&b->passed, __ATOMIC_RELAXED) || !--at->left)
            return -1;
        at->bucket = kvt_next(t, at->bucket);
        at->bits = kvt_tagged(&t->bucket[at->bucket], tag);
    }
}

static inline int64_t kvt_first(const kvt_table *t, uint64_t hash, kvt_walk *at)
{
    at->bucket = kvt_home(t, hash);
    at->left = t->num_buckets;
    at->bits = kvt_tagged(&t->bucket[at->bucket], hash << 40);
    return kvt_more(t, hash, at);
}

/* Slot that holds `k` in READY or WRITING, or -1; its word in *word. */
static inline int64_t kvt_find(const kvt_table *t, const kvt_key *k, uint64_t *word)
{
    kvt_walk at;
    for (int64_t s = kvt_first(t, k->hash, &at); s >= 0; s = kvt_more(t, k->hash, &at))
        if ((*word = kvt_holds(&t->rec[s], k)))
            return s;
    *word = 0;
    return -1;
}

/* Which entries of a bucket are `e`, as bits. No branches here either. */
static inline unsigned kvt_entries(const kvt_bucket *b, uint64_t e)
{
    unsigned bits = 0;
#pragma GCC unroll 7
    for (int i = 0; i < KVT_BUCKET_ENTRIES; i++)
        bits |= (unsigned)(b->entry[i] == e) << i;
    return bits;
}

/* Owner. The table has 1.75 entries a slot, so there is always room. */
static inline void kvt_table_add(kvt_table *t, uint64_t hash, uint64_t slot)
{
    uint64_t b = kvt_home(t, hash);
    for (;; b = kvt_next(t, b)) {
        kvt_bucket *p = &t->bucket[b];
        unsigned empty = kvt_entries(p, 0);
        if (empty) {
            __atomic_store_n(&p->entry[__builtin_ctz(empty)], kvt_entry(hash, slot),
                             __ATOMIC_RELEASE);
            return;
        }
        __atomic_store_n(&p->passed, p->passed + 1, __ATOMIC_RELAXED);
    }
}

/* Owner. 0 if the entry is not there, which is a bug. */
static inline int kvt_table_remove(kvt_table *t, uint64_t hash, uint64_t slot)
{
    const uint64_t home = kvt_home(t, hash), gone = kvt_entry(hash, slot);
    uint64_t b = home, left = t->num_buckets;
    for (;; b = kvt_next(t, b)) {
        kvt_bucket *p = &t->bucket[b];
        unsigned found = kvt_entries(p, gone);
        if (found) {
            __atomic_store_n(&p->entry[__builtin_ctz(found)], 0, __ATOMIC_RELEASE);
            for (uint64_t a = home; a != b; a = kvt_next(t, a))
                __atomic_store_n(&t->bucket[a].passed, t->bucket[a].passed - 1,
                                 __ATOMIC_RELAXED);
            return 1;
        }
        if (!p->passed || !--left)
            return 0;
    }
}

/* One pin on exactly (READY, gen): 1 taken, 0 not that, -1 no more pins fit into the field. */
static inline int kvt_pin(kvt_record *r, uint32_t gen, uint64_t one, uint64_t mask)
{
    uint64_t w = kvt_load(r);
    do {
        if (kvt_state(w) != KVT_READY || kvt_gen(w) != gen)
            return 0;
        if ((w & mask) == mask)
            return -1;
    } while (!kvt_cas(r, &w, w + one));
    return 1;
}

/* 1 given back (the word after it in *after), 0 if there was none to give. */
static inline int kvt_unpin(kvt_record *r, uint32_t gen, uint64_t one, uint64_t mask,
                            uint64_t *after)
{
    uint64_t w = kvt_load(r);
    do {
        if (kvt_gen(w) != gen || !(w & mask))
            return 0;
    } while (!kvt_cas(r, &w, w - one));
    *after = w - one;
    return 1;
}

/* Service pin on the slot that holds `k`, or -1. */
static inline int64_t kvt_find_and_pin(kvt_table *t, const kvt_key *k, uint32_t *gen)
{
    kvt_walk at;
    uint64_t after;
    for (int64_t s = kvt_first(t, k->hash, &at); s >= 0; s = kvt_more(t, k->hash, &at)) {
        kvt_record *r = &t->rec[s];
        uint64_t w = kvt_load(r);
        if (kvt_state(w) != KVT_READY)
            continue;
        if (kvt_pin(r, kvt_gen(w), KVT_SERVICE_ONE, KVT_SERVICE_MASK) != 1)
            continue;
        if (kvt_same_key(r, k)) {
            *gen = kvt_gen(w);
            return s;
        }
        kvt_unpin(r, kvt_gen(w), KVT_SERVICE_ONE, KVT_SERVICE_MASK, &after);
    }
    return -1;
}

/* Owner: key and payload length of a slot that nobody else may look into yet. */
static inline void kvt_write_key(kvt_record *r, const kvt_key *k, uint32_t length, unsigned flags)
{
    /* Orders the FREE word before the bytes: see kvt_holds. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&r->key_len, 0, __ATOMIC_RELAXED);
#pragma GCC unroll 5
    for (int i = 0; i < KVT_KEY_WORDS; i++)
        __atomic_store_n(&r->key[i], k->w[i], __ATOMIC_RELAXED);
    r->length = length;
    __atomic_store_n(&r->flags, (uint8_t)flags, __ATOMIC_RELAXED);
    __atomic_store_n(&r->key_len, k->len, __ATOMIC_RELEASE);
}

#endif
