# SPDX-License-Identifier: Apache-2.0
"""Copies against numpy over drawn shapes, and round-trips between numbers of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._core.layout import CopyPlan
from kvtier.layout.pages import KVShape, LatentShape, group_geometry
from kvtier.layout.plan import compile_plan, expand_slots, verify_tiling
from tests.layout.oracle import Memory, Rank, canonical_page, truth

KINDS = [
    (order, kv, tile)
    for order in ("NHD", "HND")
    for kv in ("packed", "split", "apart")
    for tile in ("plain", "opaque")
    if (order, tile) != ("NHD", "opaque")
]


@st.composite
def shapes(draw, block_tokens, tile=None):
    if draw(st.integers(0, 5)) == 0:
        return LatentShape(block_tokens=block_tokens, row_bytes=draw(st.sampled_from([2, 72, 576])))
    order, kv, kind = draw(st.sampled_from(KINDS))
    return KVShape(
        block_tokens=block_tokens,
        num_kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        head_size=draw(st.sampled_from([1, 3, 16, 32, 64])),
        dtype_bytes=draw(st.sampled_from([1, 2])),
        value_head_size=draw(st.sampled_from([None, None, 5, 32])),
        order=order,
        kv=kv,
        tile=kind,
    )


@st.composite
def groups(draw):
    block_tokens = draw(st.sampled_from([1, 3, 16]))
    layers = draw(st.lists(shapes(block_tokens), min_size=1, max_size=3))
    return [(f"layer.{i}", shape) for i, shape in enumerate(layers)], block_tokens


class World:
    """A region and the ranks that share it."""

    def __init__(self, layers, block_tokens, blocks_per_chunk=1, num_slots=5, slot_padding=64):
        self.layers = layers
        self.geometry = group_geometry(layers, block_tokens, blocks_per_chunk)
        self.slot_bytes = self.geometry.payload_bytes + slot_padding
        self.num_slots = num_slots
        self.region = Memory(self.slot_bytes * num_slots)

    def plan(self, rank):
        return compile_plan(
            self.geometry,
            rank.pages,
            region=(self.region.address, self.slot_bytes, self.num_slots, self.slot_bytes),
            owner=self.region,
        )

    def expand(self, slots):
        return expand_slots(
            np.asarray(slots, dtype=np.int64), self.geometry, self.region.address, self.slot_bytes
        )

    def block(self, address):
        start = int(address) - self.region.address
        return self.region.bytes[start : start + self.geometry.block_bytes]


def blocks_of(rng, num_blocks, n):
    return rng.permutation(num_blocks)[:n].astype(np.int64)


@settings(max_examples=120, deadline=None)
@given(
    group=groups(),
    writers=st.sampled_from([1, 2, 4, 8]),
    readers=st.sampled_from([1, 2, 4, 8]),
    blocks_per_chunk=st.sampled_from([1, 4]),
    padding=st.sampled_from([0, 7, 64]),
    shift=st.sampled_from([0, 1, 32]),
    data=st.data(),
)
@pytest.mark.fault("P07")
@pytest.mark.fault("C04")
@pytest.mark.fault("C09")
def test_any_shape_any_ranks(group, writers, readers, blocks_per_chunk, padding, shift, data):
    """Written by some ranks, the canonical blocks are what numpy says; read by other numbers of
    ranks, every head's bytes are exact, and nothing else has changed."""
    layers, block_tokens = group
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    world = World(layers, block_tokens, blocks_per_chunk)
    addresses, page_ids = world.expand([3, 0, 4])
    first = data.draw(st.integers(0, blocks_per_chunk - 1), label="first block in its chunk")
    last = data.draw(st.integers(first + 1, len(addresses)), label="end")
    part = slice(first, last)
    n = last - first
    values = {name: truth(shape, n, rng) for name, shape in layers}
    for rank_index in range(writers):
        rank = Rank(layers, 16, writers, rank_index, padding, shift)
        block_ids = blocks_of(rng, 16, n)
        rank.fill(values, block_ids)
        plan = world.plan(rank)
        plan.store(block_ids, addresses[part], page_ids[part])
        rank.expect(values, block_ids)  # a store leaves its source alone
    written = np.zeros(len(world.region.bytes), dtype=bool)
    for i, address in enumerate(addresses[part]):
        block = world.block(address)
        for page, (name, shape) in zip(world.geometry.pages, layers, strict=True):
            found = block[page.offset_bytes : page.offset_bytes + page.size_bytes]
            np.testing.assert_array_equal(found, canonical_page(shape, values[name])[i])
        start = int(address) - world.region.address
        written[start : start + world.geometry.block_bytes] = True
    assert (world.region.bytes[~written] == 0xEE).all()
    assert world.region.guards_intact()
    for rank_index in range(readers):
        rank = Rank(layers, 16, readers, rank_index, padding, shift)
        block_ids = blocks_of(rng, 16, n)
        moved = world.plan(rank).load(block_ids, addresses[part])
        assert moved == n * sum(page.mapping.local_bytes for page in rank.pages)
        rank.expect(values, block_ids)


PLAIN = [(order, kv) for order in ("NHD", "HND") for kv in ("packed", "split", "apart")]


@pytest.mark.fault("C04")
@pytest.mark.parametrize(("order_b", "kv_b"), PLAIN)
@pytest.mark.parametrize(("order_a", "kv_a"), PLAIN)
def test_plain_layouts_share_one_tile(order_a, kv_a, order_b, kv_b):
    """Written as one plain layout, read as another: exact."""
    rng = np.random.default_rng(5)
    common = {"block_tokens": 8, "num_kv_heads": 4, "head_size": 32, "dtype_bytes": 2}
    one = [("layer", KVShape(**common, order=order_a, kv=kv_a))]
    other = [("layer", KVShape(**common, order=order_b, kv=kv_b))]
    world = World(one, 8)
    addresses, page_ids = world.expand([1, 2])
    values = {"layer": truth(one[0][1], 2, rng)}
    ids = np.array([4, 0], dtype=np.int64)
    for rank_index in range(2):
        writer = Rank(one, 6, 2, rank_index)
        writer.fill(values, ids)
        world.plan(writer).store(ids, addresses, page_ids)
    reader = Rank(other, 6, 1, 0)
    world.plan(reader).load(ids, addresses)
    reader.expect(values, ids)


@pytest.mark.parametrize("fragment", [64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 100])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("stream_bytes", [0, 1 << 40])
def test_every_fragment_size_cached_and_streamed(fragment, stream_bytes, vectors):
    """The fixed-size kernels, the general and the portable one, and stores past the caches."""
    blocks = 4
    rng = np.random.default_rng(fragment)
    shape = KVShape(
        block_tokens=max(1, 32768 // fragment // 4),
        num_kv_heads=4,
        head_size=fragment // 2,
        dtype_bytes=1,
        order="NHD",
        kv="packed",
    )
    layers = [("layer", shape)]
    for shift in (0, 32, 3):
        world = World(layers, shape.block_tokens, num_slots=blocks)
        addresses, page_ids = world.expand(rng.permutation(blocks))
        values = {"layer": truth(shape, blocks, rng)}
        rank = Rank(layers, blocks, 1, 0, shift=shift)
        ids = blocks_of(rng, blocks, blocks)
        rank.fill(values, ids)
        plan = CopyPlan(
            world.plan(rank).plans,
            world.geometry.block_bytes,
            stream_bytes=stream_bytes,
            vectors=vectors,
        )
        assert plan.store(ids, addresses, page_ids) == blocks * shape.canonical_bytes
        expected = canonical_page(shape, values["layer"])
        for i, address in enumerate(addresses):
            np.testing.assert_array_equal(world.block(address), expected[i])
        back = Rank(layers, blocks, 1, 0, shift=shift)
        plan = CopyPlan(
            world.plan(back).plans,
            world.geometry.block_bytes,
            stream_bytes=stream_bytes,
            vectors=vectors,
        )
        plan.load(ids, addresses)
        back.expect(values, ids)
        assert world.region.guards_intact()


@pytest.mark.parametrize("damage", ["heads", "layers", "tokens", "kv"])
@pytest.mark.fault("C09")
def test_a_damaged_plan_is_seen(damage):
    """Two heads, layers, tokens or K and V exchanged: every proof of tiling still passes, and the
    comparison of bytes must find it."""
    rng = np.random.default_rng(1)
    shape = KVShape(
        block_tokens=4, num_kv_heads=2, head_size=8, dtype_bytes=2, order="NHD", kv="split"
    )
    layers = [("a", shape), ("b", shape)]
    world = World(layers, 4)
    rank = Rank(layers, 4, 1, 0)
    values = {name: truth(shape, 2, rng) for name, _ in layers}
    ids = np.array([1, 3], dtype=np.int64)
    addresses, page_ids = world.expand([0, 1])
    rank.fill(values, ids)
    row, tile = shape.key_bytes, shape.tile_bytes

    def broken(run):
        canonical = run.canonical_offset
        if damage == "heads":
            canonical = (canonical + tile) % (2 * tile)
        elif damage == "kv":
            canonical = canonical - row if canonical % (2 * row) else canonical + row
        elif damage == "tokens":  # last token first
            last = canonical + (run.fragments - 1) * run.canonical_stride
            return run._replace(canonical_offset=last, canonical_stride=-run.canonical_stride)
        return run._replace(canonical_offset=canonical)

    pages = [
        type(page)(
            page.layer if damage != "layers" else {"a": "b", "b": "a"}[page.layer],
            page.base,
            page.block_stride,
            page.num_blocks,
            type(page.mapping)(
                page.mapping.local_bytes,
                page.mapping.canonical_bytes,
                tuple(broken(run) if damage != "layers" else run for run in page.mapping.runs),
            ),
        )
        for page in rank.pages
    ]
    verify_tiling([[pages[0].mapping]])
    plan = compile_plan(world.geometry, pages)
    plan.store(ids, addresses, page_ids)
    expected = canonical_page(shape, values["a"])
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(
            world.block(addresses[0])[: shape.canonical_bytes], expected[0]
        )
    back = Rank(layers, 4, 1, 0)
    world.plan(back).load(ids, addresses)
    with pytest.raises(AssertionError):
        back.expect(values, ids)


@pytest.mark.fault("R11")
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("kind", ["latent", "heads"])
def test_replicas_take_turns(kind, tp):
    """Each replicated block is written by exactly one rank, whichever it is, and rotation spreads
    the work. The ranks' bytes are equal before they are merged (padding left out)."""
    rng = np.random.default_rng(2)
    shape = (
        LatentShape(block_tokens=4, row_bytes=24)
        if kind == "latent"
        else KVShape(
            block_tokens=4, num_kv_heads=1, head_size=6, dtype_bytes=2, order="NHD", kv="split"
        )
    )
    layers = [("layer", shape)]
    world = World(layers, 4, num_slots=16)
    addresses, page_ids = world.expand(np.arange(16))
    values = {"layer": truth(shape, 16, rng)}
    ids = np.arange(16, dtype=np.int64)
    written_by = np.full(16, -1)
    pages = []
    for rank_index in range(tp):
        rank = Rank(layers, 16, tp, rank_index, padding=rank_index)
        rank.fill(values, ids)
        pages.append(next(iter(rank.views().values())).copy())
        before = world.region.bytes.copy()
        world.region.bytes[:] = 0x11  # so that a block shows that it was written
        moved = world.plan(rank).store(ids, addresses, page_ids)
        for i, address in enumerate(addresses):
            start = int(address) - world.region.address
            mine = slice(start, start + shape.canonical_bytes)
            if (world.region.bytes[mine] != 0x11).any():
                assert written_by[i] == -1
                written_by[i] = rank_index
            else:
                world.region.bytes[mine] = before[mine]
        assert moved == (written_by == rank_index).sum() * shape.canonical_bytes
    assert sorted(np.bincount(written_by)) == [16 // tp] * tp
    for page in pages[1:]:
        np.testing.assert_array_equal(page, pages[0])
    for i, address in enumerate(addresses):
        np.testing.assert_array_equal(
            world.block(address), canonical_page(shape, values["layer"])[i]
        )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_zero_fills_what_no_rank_was_given(tp):
    """Ranks together zero exactly the sub-blocks named, and no rank touches another's part."""
    shape = KVShape(
        block_tokens=3, num_kv_heads=4, head_size=5, dtype_bytes=2, order="NHD", kv="split"
    )
    layers = [("a", shape), ("b", LatentShape(block_tokens=3, row_bytes=9))]
    world = World(layers, 3, blocks_per_chunk=4)
    addresses, page_ids = world.expand([1, 2])
    holes = slice(5, 8)
    total = 0
    for rank_index in range(tp):
        plan = world.plan(Rank(layers, 4, tp, rank_index))
        total += plan.zero(addresses[holes], page_ids[holes])
    assert total == 3 * world.geometry.block_bytes
    zeroed = np.zeros(len(world.region.bytes), dtype=bool)
    for address in addresses[holes]:
        start = int(address) - world.region.address
        zeroed[start : start + world.geometry.block_bytes] = True
    assert (world.region.bytes[zeroed] == 0).all()
    assert (world.region.bytes[~zeroed] == 0xEE).all()
