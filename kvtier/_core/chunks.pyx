# SPDX-License-Identifier: Apache-2.0
"""What is known of the chunks of one request, by place instead of by key.

A prompt is asked for again and again while it waits, and a step finds the caches cold: a dictionary
of a few hundred keys costs it two or three cache misses a key, an array a few in all. So a key is
hashed once, when it is first asked for, and has a place from then on. Looks the keys up in the
owner's index and takes pins there for the request. Owner's thread only.
"""

from cpython.bytes cimport PyBytes_CheckExact
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from kvtier._core.arrays cimport int64s, new_int64s, uint32s
from kvtier._core.index cimport Index
from kvtier._core.room cimport kvt_of_slot, unpin
from kvtier._core.slots cimport *

cimport numpy as cnp

from kvtier.errors import InternalError

cnp.import_array()

cdef enum:
    KVT_HIT = 1  # answered HIT since the end of the last step
    KVT_COUNTED = 2  # its hit or miss is in the metrics
    KVT_HELD = 4  # pinned for the request, at `slot` and `generation`
    KVT_UNSENT = 8  # asked for, and no tier has been told yet
    KVT_PICKED = 16  # among `picked`


cdef struct kvt_chunk:
    uint32_t slot
    uint32_t generation
    uint8_t state  # in host memory when it was looked at last
    uint8_t status  # what the tiers have of it
    uint8_t flags


cdef enum:
    # What the tiers have: nobody knows yet; not to be had; it came.
    IS_ASKED = 1
    IS_GONE = 2
    IS_LOADED = 3
    # `kvtier.types.Lookup`
    MISS = 0
    HIT_PENDING = 2
    RETRY = 3

ASKED, GONE, LOADED = IS_ASKED, IS_GONE, IS_LOADED


cdef void *grown(void *memory, Py_ssize_t *room, Py_ssize_t wanted, size_t size) except NULL:
    """`memory` with room for `wanted` items, doubled if need be."""
    cdef Py_ssize_t to = max(wanted, 2 * room[0], 8)
    if memory is not NULL and wanted <= room[0]:
        return memory
    memory = realloc(memory, to * size)
    if memory is NULL:
        raise MemoryError
    room[0] = to
    return memory


cdef bint differ(list keys) noexcept:
    """Whether no key stands twice, for sure. A dictionary would tell as well, for ten times as
    much; these keys have their hashes already."""
    cdef Py_ssize_t n = PyList_GET_SIZE(keys), i, at, mask = 8
    cdef Py_hash_t one
    cdef bint so = True
    while mask < 4 * n:
        mask *= 2
    cdef uint32_t *seen = <uint32_t *> calloc(mask, sizeof(uint32_t))  # positions + 1
    if seen is NULL:
        return False
    mask -= 1
    for i in range(n):
        one = hash(<object> PyList_GET_ITEM(keys, i))
        at = one & mask
        while seen[at] and so:
            so = hash(<object> PyList_GET_ITEM(keys, seen[at] - 1)) != one
            at = (at + 1) & mask
        if not so:
            break
        seen[at] = <uint32_t> (i + 1)
    free(seen)
    return so


cdef class RequestChunks:
    """See the stub."""

    cdef Index index  # where the chunks are, and the pins of those that are held
    cdef list keys  # in the order of the first question
    cdef dict places  # of each key in `keys`; None while nobody has asked for it
    cdef kvt_chunk *chunk  # by place; owned
    cdef int64_t *batch  # places of the keys asked last; owned
    cdef int64_t *picked  # places of the keys that `pick` found; owned
    cdef Py_ssize_t room, batch_room, picked_room
    cdef Py_ssize_t num_batch, num_picked
    cdef readonly Py_ssize_t num_held, held_slots
    cdef readonly Py_ssize_t num_unsent
    cdef readonly bint writing, holdable

    def __cinit__(self, Index index not None):
        self.index = index
        self.keys = []
        self.places = {}

    def __dealloc__(self):
        free(self.chunk)
        free(self.batch)
        free(self.picked)

    def __len__(self):
        return PyList_GET_SIZE(self.keys)

    cdef int name(self) except -1:
        """Have a dictionary of the places."""
        cdef Py_ssize_t i
        if self.places is None:
            self.places = dict(zip(self.keys, range(len(self.keys))))
            if len(self.places) != len(self.keys):
                # Some stand twice in the batch: one place counts from now on.
                for i in range(self.num_batch):
                    self.batch[i] = self.places[self.keys[self.batch[i]]]
        return 0

    cdef int64_t place(self, object key) except -1:
        """Place of a key, a new one if it has none."""
        self.name()
        cdef PyObject *known = PyDict_GetItemWithError(self.places, key)
        cdef Py_ssize_t at
        if known is not NULL:
            return <object> known
        if not PyBytes_CheckExact(key):
            raise TypeError(f"a key is bytes, got {type(key).__name__}")
        at = PyList_GET_SIZE(self.keys)
        self.chunk = <kvt_chunk *> grown(self.chunk, &self.room, at + 1, sizeof(kvt_chunk))
        memset(&self.chunk[at], 0, sizeof(kvt_chunk))
        self.places[key] = at
        self.keys.append(key)
        return at

    cdef int64_t known(self, object key, Py_ssize_t guess) except -2:
        """Place of a key, -1 if it has none; most likely `guess`."""
        cdef PyObject *at
        if guess < PyList_GET_SIZE(self.keys) and (
            PyList_GET_ITEM(self.keys, guess) == <PyObject *> key
        ):
            return guess
        self.name()
        at = PyDict_GetItemWithError(self.places, key)
        return -1 if at is NULL else <object> at

    cdef bint is_batch(self, list items):
        """Whether these keys were asked for last."""
        cdef Py_ssize_t n = PyList_GET_SIZE(items), i
        cdef PyObject *mine
        if n != self.num_batch:
            return False
        for i in range(n):
            mine = PyList_GET_ITEM(self.keys, self.batch[i])
            if PyList_GET_ITEM(items, i) != mine and (
                <object> PyList_GET_ITEM(items, i) != <object> mine
            ):
                return False
        return True

    cdef int enter(self, list items) except -1:
        """`batch` has the places of these keys then."""
        cdef Py_ssize_t n = PyList_GET_SIZE(items), i
        self.num_batch = 0
        self.batch = <int64_t *> grown(self.batch, &self.batch_room, n, sizeof(int64_t))
        if not self.keys:
            # The first batch, which for most requests is the only one. A prompt that is there as a
            # whole is never asked for key by key: no dictionary.
            self.chunk = <kvt_chunk *> grown(self.chunk, &self.room, n, sizeof(kvt_chunk))
            memset(self.chunk, 0, n * sizeof(kvt_chunk))
            self.keys, self.places = items[:], None
            for i in range(n):
                self.batch[i] = i
            self.num_batch = n
            return 0
        for i in range(n):
            self.batch[i] = self.place(<object> PyList_GET_ITEM(items, i))
        self.num_batch = n
        return 0

    cdef int check_places(self, const int64_t *at, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        for i in range(n):
            if at[i] < 0 or at[i] >= PyList_GET_SIZE(self.keys):
                raise IndexError(f"place {at[i]} of {PyList_GET_SIZE(self.keys)}")
        return 0

    def look(self, keys) -> tuple:
        cdef Index index = self.index
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = index.find(items), i, prefix = -1
        cdef bint same = n and self.is_batch(items)
        cdef unsigned state
        if not same:
            self.enter(items)
        self.writing = False
        for i in range(n):
            state = self.see(&self.chunk[self.batch[i]], &index.scratch[i], &same)
            if state == KVT_WRITING:
                self.writing = True
            if prefix < 0 and state != KVT_READY:
                prefix = i
        return (n if prefix < 0 else prefix), bool(same)

    cdef unsigned see(self, kvt_chunk *c, const kvt_key *k, bint *same):
        """Note where a key was found, and its state; *same is cleared if that has changed."""
        cdef uint64_t word
        cdef unsigned state = 0
        if k.slot >= 0:
            word = kvt_load(&self.index.c.t.rec[k.slot])
            state = kvt_state(word)
            c.slot = <uint32_t> k.slot
            c.generation = kvt_gen(word)
        if c.state != state:
            c.state = <uint8_t> state
            same[0] = False
        return state

    def note(self, keys) -> None:
        cdef Index index = self.index
        cdef list items = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t n = index.find(items), i
        cdef bint same = True
        cdef int64_t at
        for i in range(n):
            at = self.place(items[i])
            if self.see(&self.chunk[at], &index.scratch[i], &same) == KVT_READY:
                self.chunk[at].flags |= KVT_HIT
        if not same:
            self.num_batch = 0  # what was said of the batch may be wrong by now

    def repeats(self, keys) -> bool:
        return self.is_batch(keys if type(keys) is list else list(keys))

    def status(self, key) -> int:
        self.name()
        cdef PyObject *at = PyDict_GetItemWithError(self.places, key)
        return 0 if at is NULL else self.chunk[<Py_ssize_t> <object> at].status

    def hit_all(self) -> None:
        cdef Py_ssize_t i
        for i in range(self.num_batch):
            if self.chunk[self.batch[i]].state == KVT_READY:
                self.chunk[self.batch[i]].flags |= KVT_HIT

    def answer(self, bint waits) -> int:
        cdef Py_ssize_t i
        cdef int said = MISS, one
        cdef kvt_chunk *c
        self.holdable = False
        for i in range(self.num_batch):
            c = &self.chunk[self.batch[i]]
            if c.state == KVT_READY:
                c.flags |= KVT_HIT
                if not c.flags & KVT_HELD:
                    self.holdable = True
                continue
            if not waits:
                break
            if c.state == KVT_WRITING and c.status != IS_GONE:
                one = HIT_PENDING
            elif c.status == IS_ASKED:
                one = RETRY
            else:
                break  # GONE, or LOADED and evicted since: loading it once more would be thrash
            if said == MISS:
                said = one
        return said

    def pick(self) -> list:
        cdef Py_ssize_t i
        cdef kvt_chunk *c
        cdef list found = []
        if self.places is None and not differ(self.keys):
            self.name()  # each of those that stand twice has one place then
        self.picked = <int64_t *> grown(
            self.picked, &self.picked_room, self.num_batch, sizeof(int64_t))
        self.num_picked = 0
        for i in range(self.num_batch):
            c = &self.chunk[self.batch[i]]
            if c.state == KVT_READY or (c.state == KVT_WRITING and c.status != IS_GONE):
                continue
            if c.status == IS_GONE or c.status == IS_LOADED:
                break  # the answer ends there
            if c.status or c.flags & KVT_PICKED:  # asked for already, or twice in the batch
                continue
            c.flags |= KVT_PICKED
            self.picked[self.num_picked] = self.batch[i]
            self.num_picked += 1
            found.append(<object> PyList_GET_ITEM(self.keys, self.batch[i]))
        for i in range(self.num_picked):
            self.chunk[self.picked[i]].flags &= ~KVT_PICKED
        return found

    def pick_one(self, key) -> None:
        cdef int64_t at = self.place(key)
        self.picked = <int64_t *> grown(self.picked, &self.picked_room, 1, sizeof(int64_t))
        self.picked[0] = at
        self.num_picked = 0 if self.chunk[at].status else 1

    def settle(self, Py_ssize_t asked, Py_ssize_t gone) -> None:
        cdef Py_ssize_t i
        cdef kvt_chunk *c
        if asked < 0 or gone < 0 or asked + gone > self.num_picked:
            raise ValueError(f"{asked} asked and {gone} gone of {self.num_picked}")
        for i in range(asked + gone):
            c = &self.chunk[self.picked[i]]
            c.status = IS_ASKED if i < asked else IS_GONE
            if i < asked:
                c.flags |= KVT_UNSENT
                self.num_unsent += 1
        self.num_picked = 0

    def take_unsent(self) -> tuple:
        cdef Py_ssize_t n = PyList_GET_SIZE(self.keys), i, done = 0
        cdef int64_t *out
        cdef list keys = []
        places = new_int64s(self.num_unsent, &out)
        for i in range(n):
            if self.chunk[i].flags & KVT_UNSENT:
                self.chunk[i].flags &= ~KVT_UNSENT
                out[done] = i
                done += 1
                keys.append(<object> PyList_GET_ITEM(self.keys, i))
        self.num_unsent = 0
        return keys, places

    def gone(self, places, positions=None) -> None:
        cdef Py_ssize_t n = 0, m = 0, i, j
        cdef int64_t *at = int64s(places, &n)
        cdef int64_t *which
        self.check_places(at, n)
        if positions is None:
            for i in range(n):
                if self.chunk[at[i]].status == IS_ASKED:
                    self.chunk[at[i]].status = IS_GONE
            return
        which = int64s(positions, &m)
        for j in range(m):
            i = which[j]
            if i < 0 or i >= n:
                raise IndexError(f"position {i} of {n}")
            self.chunk[at[i]].status = IS_GONE

    def loaded(self, places) -> None:
        cdef Py_ssize_t n = 0, i
        cdef int64_t *at = int64s(places, &n)
        self.check_places(at, n)
        for i in range(n):
            self.chunk[at[i]].status = IS_LOADED

    def hold(self, limit: int, places=None, slots=None) -> tuple:
        cdef Index index = self.index
        cdef int64_t last = INT64_MAX  # of `held_slots`, at which a widest chunk still fits
        if slots is not None:
            last = self.held_slots + <Py_ssize_t> slots - index.c[index.g.sizes - 1].width
        cdef Py_ssize_t n = PyList_GET_SIZE(self.keys), i, done = 0, left = 0
        cdef Py_ssize_t most = limit
        cdef int64_t *at = NULL
        cdef kvt_chunk *c
        if places is not None:
            at = int64s(places, &n)
            self.check_places(at, n)
            index.find([self.keys[at[i]] for i in range(n)])
        for i in range(n):
            c = &self.chunk[i if at is NULL else at[i]]
            if c.flags & KVT_HELD:
                continue
            if at is NULL:
                if not c.flags & KVT_HIT:
                    continue
            elif index.scratch[i].slot < 0:
                left += 1
                continue
            else:
                c.slot = <uint32_t> index.scratch[i].slot
                c.generation = kvt_gen(kvt_load(&index.c.t.rec[c.slot]))
            # Its generation says that it is the same chunk still.
            if done < most and self.held_slots <= last and kvt_pin(
                &index.c.t.rec[c.slot], c.generation, KVT_OWNER_ONE, KVT_OWNER_MASK
            ) == 1:
                c.flags |= KVT_HELD
                self.held_slots += kvt_of_slot(&index.g, c.slot).width
                done += 1
            else:
                left += 1
        self.num_held += done
        return done, left

    def held(self, places, slots, generations, list pinned not None) -> int:
        cdef Py_ssize_t n = 0, m = 0, k = 0, i, done = 0
        cdef kvt_chunk *c
        cdef int64_t *at = int64s(places, &k)
        cdef int64_t *s = int64s(slots, &n)
        cdef uint32_t *g = uint32s(generations, &m)
        self.index.bounds(s, n, m)
        if k != n or len(pinned) != n:
            raise ValueError(f"{k} places and {len(pinned)} answers for {n} slots")
        self.check_places(at, n)
        for i in range(n):
            if not pinned[i]:
                continue
            c = &self.chunk[at[i]]
            if c.flags & KVT_HELD:
                raise InternalError(f"chunk {at[i]} of the request is held twice")
            c.flags |= KVT_HELD
            c.slot = <uint32_t> s[i]
            c.generation = g[i]
            self.held_slots += kvt_of_slot(&self.index.g, c.slot).width
            done += 1
        self.num_held += done
        return done

    def unhold(self, keys=None) -> int:
        cdef Index index = self.index
        cdef Py_ssize_t n = PyList_GET_SIZE(self.keys), i, done = 0
        cdef int64_t at
        cdef list items = None
        if keys is not None:
            items = keys if type(keys) is list else list(keys)
            n = len(items)
        for i in range(n):
            at = i if items is None else self.known(items[i], i)
            if at < 0 or not self.chunk[at].flags & KVT_HELD:
                continue
            self.chunk[at].flags &= ~KVT_HELD
            self.num_held -= 1
            self.held_slots -= kvt_of_slot(&index.g, self.chunk[at].slot).width
            done += 1
            unpin(index, self.chunk[at].slot, self.chunk[at].generation)
        index.changed()
        return done

    def count(self) -> tuple:
        cdef Py_ssize_t i, hits = 0, misses = 0
        cdef kvt_chunk *c
        for i in range(PyList_GET_SIZE(self.keys)):
            c = &self.chunk[i]
            if not c.flags & KVT_COUNTED and (c.status or c.flags & KVT_HIT):
                c.flags |= KVT_COUNTED
                # First those that were not there: later they may be, promoted.
                if c.status:
                    misses += 1
                else:
                    hits += 1
            c.flags &= ~KVT_HIT
        return hits, misses

    def clear(self) -> None:
        if self.num_held:
            raise ValueError(f"{self.num_held} chunks are held")
        self.keys, self.places = [], {}
        self.num_batch = self.num_picked = self.num_unsent = 0
        self.writing = self.holdable = False
