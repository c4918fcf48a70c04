# SPDX-License-Identifier: Apache-2.0
"""Which chunk goes: ARC by hand, both policies on a real trace, LRU against vLLM's."""

from __future__ import annotations

import importlib
import json
import random
import warnings
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from kvtier._core.index import Index
from tests.parts import trace_path

from .build import key, keys, make_index, put, ready_prefix


def access(index: Index, number: int) -> list[bytes]:
    """One access as a cache sees it: a hit, or a miss that inserts. What was evicted."""
    if index.lookup(key(number)) == 2:
        index.touch(keys(number))
        return []
    evicted = put(index, keys(number))
    index.touch(keys(number))  # the request's own touch: no reuse
    return evicted


def test_arc_by_hand() -> None:
    """c = 3, worked through Figure 4 of the paper (LRU end first in each list).

    ==== ================= ===================================================== =======
    x    case              T1 / T2 / B1 / B2 afterwards                          p
    ==== ================= ===================================================== =======
    1 2  IV, room          1 2 / / /                                             0
    1    I                 2 / 1 / /                                             0
    3    IV, room          2 3 / 1 / /                                           0
    4    IV (ii), |T1| > p 3 4 / 1 / 2 /                                         0
    2    II, d = 1         4 / 1 2 / 3 /         REPLACE: |T1| = 2 > p = 1       1
    5    IV (ii), |T1| = p 4 5 / 2 / 3 / 1       REPLACE takes from T2           1
    1    III, d = 1        5 / 2 1 / 3 4 /       |T1| = 2 > p = 0                0
    5    I                 / 2 1 5 / 3 4 /                                       0
    3    II, d = 1         / 1 5 3 / 4 / 2       T1 is empty                     1
    4    II, d = 1         / 5 3 4 / / 2 1       T1 is empty                     2
    6    IV (ii)           6 / 3 4 / / 2 1 5     T1 is empty                     2
    7    IV (ii), = 2c     6 7 / 4 / / 1 5 3     2 leaves B2; |T1| = 1 < p       2
    1    III, d = 1        7 / 4 1 / 6 / 5 3     |T1| = 2 > p = 1                1
    5    III, d = 1        / 4 1 5 / 6 7 / 3     |T1| = 1 > p = 0                0
    8    IV (ii), = 2c     8 / 1 5 / 6 7 / 4     3 leaves B2; T1 is empty        0
    9    IV (i), |T1| < c  9 / 1 5 / 7 8 / 4     |L1| = 3: 6 leaves B1           0
    7    II, d = 1         9 / 5 7 / 8 / 4 1     |T1| = p                        1
    8    II, d = 2         9 / 7 8 / / 4 1 5     |B2| / |B1| = 2; |T1| < p       3
    ==== ================= ===================================================== =======
    """
    _, index = make_index(3, "arc")
    table: list[tuple[int, list[int], tuple[int, int, int, int], float]] = [
        (1, [], (1, 0, 0, 0), 0),
        (2, [], (2, 0, 0, 0), 0),
        (1, [], (1, 1, 0, 0), 0),
        (3, [], (2, 1, 0, 0), 0),
        (4, [2], (2, 1, 1, 0), 0),
        (2, [3], (1, 2, 1, 0), 1),
        (5, [1], (2, 1, 1, 1), 1),
        (1, [4], (1, 2, 2, 0), 0),
        (5, [], (0, 3, 2, 0), 0),
        (3, [2], (0, 3, 1, 1), 1),
        (4, [1], (0, 3, 0, 2), 2),
        (6, [5], (1, 2, 0, 3), 2),
        (7, [3], (2, 1, 0, 3), 2),
        (1, [6], (1, 2, 1, 2), 1),
        (5, [7], (0, 3, 2, 1), 0),
        (8, [4], (1, 2, 2, 1), 0),
        (9, [8], (1, 2, 2, 1), 0),
        (7, [1], (1, 2, 1, 2), 1),
        (8, [5], (1, 2, 0, 3), 3),
    ]
    for step, (number, evicted, sizes, p) in enumerate(table):
        assert access(index, number) == keys(*evicted), step
        state = index.policy_state()
        assert (state["t1"], state["t2"], state["b1"], state["b2"]) == sizes, step
        assert state["p"] == p, step
        index.check()


def test_arc_when_t1_fills_the_cache_its_victim_leaves_no_ghost() -> None:
    _, index = make_index(3, "arc")
    for number in (1, 2, 3):
        assert access(index, number) == []
    assert access(index, 4) == keys(1)
    state = index.policy_state()
    assert (state["t1"], state["b1"]) == (3, 0)


def test_arc_takes_the_other_list_when_the_chosen_one_is_pinned() -> None:
    _, index = make_index(3, "arc")
    for number in (1, 1, 2, 3):
        access(index, number)
    held = index.pin(keys(2, 3))  # all of T1, which p = 0 would choose
    assert access(index, 4) == keys(1)
    index.unpin(*held)
    assert access(index, 5) == keys(2)


def test_arc_the_first_touch_is_no_reuse() -> None:
    _, index = make_index(4, "arc")
    put(index, keys(1, 2))
    index.touch(keys(1, 2))
    assert index.policy_state()["t2"] == 0
    index.touch(keys(2))
    assert index.policy_state()["t2"] == 1


def test_touch_lets_the_tail_go_first() -> None:
    for policy in ("lru", "arc"):
        _, index = make_index(4, policy)
        put(index, keys(1, 2, 3, 4))
        index.touch(keys(1, 2, 3, 4))
        assert index.keys() == keys(4, 3, 2, 1)
        assert put(index, keys(5)) == keys(4)


class PlainLru:
    """LRU over one ordered dictionary, for the trace."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, one: int) -> bool:
        return one in self.chunks

    def store(self, wanted: Sequence[int]) -> None:
        keep = set(wanted)
        for one in wanted:
            if one in self.chunks:
                continue
            if len(self.chunks) == self.capacity:
                victim = next((old for old in self.chunks if old not in keep), None)
                if victim is None:
                    return
                del self.chunks[victim]
            self.chunks[one] = None
            keep.add(one)

    def touch(self, wanted: Sequence[int]) -> None:
        for one in reversed(wanted):
            if one in self.chunks:
                self.chunks.move_to_end(one)


class PlainArc:
    """Figure 4 over four ordered dictionaries, for the trace."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t = OrderedDict[int, bool](), OrderedDict[int, bool]()  # value: not touched yet
        self.b = OrderedDict[int, None](), OrderedDict[int, None]()

    def __contains__(self, one: int) -> bool:
        return one in self.t[0] or one in self.t[1]

    def make_room(self, in_b2: bool, keep: set[int]) -> bool:
        size = len(self.t[0])
        first = 0 if size and (size > self.p or (in_b2 and size == self.p)) else 1
        for which in (first, 1 - first):
            for old in self.t[which]:
                if old not in keep:
                    del self.t[which][old]
                    self.b[which][old] = None
                    return True
        return False

    def store(self, wanted: Sequence[int]) -> None:
        keep = set(wanted)
        for one in wanted:
            if one in self:
                continue
            b1, b2 = self.b
            which = 0
            if one in b1:
                self.p = min(self.c, self.p + max(1, len(b2) / len(b1)))
                which = 1
            elif one in b2:
                self.p = max(0, self.p - max(1, len(b1) / len(b2)))
                which = 1
            full = len(self.t[0]) + len(self.t[1]) == self.c
            if full and not self.make_room(one in b2, keep):
                return
            b1.pop(one, None)
            b2.pop(one, None)
            self.t[which][one] = True
            keep.add(one)
            if len(self.t[0]) + len(b1) > self.c:
                b1.popitem(last=False)
            if sum(map(len, (*self.t, *self.b))) > 2 * self.c:
                b2.popitem(last=False)

    def touch(self, wanted: Sequence[int]) -> None:
        for one in reversed(wanted):
            for which in (0, 1):
                if one in self.t[which]:
                    new = self.t[which].pop(one)
                    self.t[which if new else 1][one] = False
                    break


@pytest.mark.needs("trace")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "policy", "published"),
    [
        (5_483, "lru", 0.125),
        (5_483, "arc", 0.132),
        (18_279, "lru", 0.279),
        (18_279, "arc", 0.284),
    ],
)
def test_prefix_hits_of_a_real_trace(capacity: int, policy: str, published: float) -> None:
    """The index has the hits of a plain simulation, and the published ratio to three digits.

    Order of accesses. LRU: a request looks its prefix up, touches what it hits, suffix first, and
    stores what is absent, in prefix order. ARC: it looks its prefix up, stores what is absent, and
    touches all of it, suffix first; where one access comes before the other matters more to ARC,
    whose lists tell a first access from a second.
    """
    plain = (PlainLru if policy == "lru" else PlainArc)(capacity)
    _, index = make_index(capacity, policy, payloads=[1])
    hits = expected = blocks = 0
    with trace_path().open() as lines:
        for line in lines:
            wanted: list[int] = json.loads(line)["hash_ids"]
            names = [key(one) for one in wanted]
            blocks += len(wanted)
            ready = ready_prefix(index, names)
            hits += ready
            ready_plain = next((i for i, o in enumerate(wanted) if o not in plain), len(wanted))
            expected += ready_plain
            if policy == "lru":
                index.touch(names[:ready])
                plain.touch(wanted[:ready_plain])
            index.commit(index.reserve(names).keys)
            plain.store(wanted)
            if policy == "arc":
                index.touch(names)
                plain.touch(wanted)
    assert hits == expected
    assert round(hits / blocks, 3) == published
    index.check()


@pytest.mark.vllm
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("seed", range(4))
def test_lru_decides_as_vllm_does(seed: int) -> None:
    """Loads and stores that overlap, in random order, on a cache where they collide."""
    with warnings.catch_warnings(action="ignore"):
        base = importlib.import_module("vllm.v1.kv_offload.base")
        manager_module = importlib.import_module("vllm.v1.kv_offload.cpu.manager")
    rng = random.Random(seed)
    capacity = 48
    manager = manager_module.CPUOffloadingManager(capacity, "lru")
    table, index = make_index(capacity, "lru")
    loads: list[tuple[object, list[bytes], tuple[object, object]]] = []
    stores: list[tuple[object, list[bytes]]] = []
    evictions = refused = 0

    def end_one() -> None:
        if loads and (not stores or rng.random() < 0.5):
            context, wanted, held = loads.pop(rng.randrange(len(loads)))
            manager.complete_load(wanted, context)
            index.unpin(*held)  # type: ignore[arg-type]  # arrays from pin
        elif stores:
            context, wanted = stores.pop(rng.randrange(len(stores)))
            done = rng.random() < 0.8
            manager.complete_store(wanted, context, done)
            if done:
                index.commit(wanted)
            else:
                index.abort(wanted)

    for request in range(3000):
        family = rng.randrange(12)
        wanted = [key(1000 * family + n) for n in range(rng.randrange(1, 12))]
        context = base.ReqContext(req_id=str(request))
        for n, one in enumerate(wanted):
            context.set_offload_key_position(one, n + 1)
        manager.on_new_request(context)
        hits = 0
        for one in wanted:
            theirs = manager.lookup(one, context)
            assert theirs.name == ("MISS", "HIT_PENDING", "HIT")[index.lookup(one)]
            if theirs.name != "HIT":
                break
            hits += 1
        if hits:
            manager.prepare_load(wanted[:hits], context)
            loads.append((context, wanted[:hits], index.pin(wanted[:hits])))
        rest = wanted[hits:]
        before = {one for one in rest if index.lookup(one)}
        out = manager.prepare_store(rest, context)
        if out is None:
            refused += 1  # vLLM stores all or nothing
        else:
            got = index.reserve(rest)
            assert (got.keys, got.evicted) == (out.keys_to_store, out.evicted_keys)
            assert got.complete
            evictions += len(got.evicted)
            if got.keys:
                stores.append((context, got.keys))
        # What vLLM counts as seen: loaded, stored, or offered while READY.
        state = context.get_state(manager_module._RequestCacheAccess)
        seen = [one for one in wanted if one in state.seen_keys]
        assert before <= set(rest)
        manager.on_request_finished(context)
        index.touch(seen)
        while len(loads) + len(stores) > 7 or (rng.random() < 0.3 and (loads or stores)):
            end_one()
        assert index.num_free == manager._get_num_free_chunks()
    while loads or stores:
        end_one()
    index.check()
    assert table.totals()["owner_pins"] == 0
    assert evictions > 1000
    assert refused > 0
