# SPDX-License-Identifier: Apache-2.0
"""What plans refuse, at construction and before the first byte of a batch."""

import threading

import numpy as np
import pytest

from kvtier._core.layout import CopyPlan, PagePlan
from kvtier._core.runs import MAX_FRAGMENTS, Loops, Run, compile_runs, prove_loops
from kvtier.errors import ConfigError
from kvtier.layout.pages import KVShape, LatentShape, OpaqueShape, PageMapping, group_geometry
from kvtier.layout.plan import LayerPage, compile_plan, expand_slots, verify_tiling
from kvtier.types import GroupGeometry
from tests.layout.oracle import Memory

BASE = 1 << 20


def page(
    runs=((0, 0, 16, 1, 16, 16),),
    base=BASE,
    stride=16,
    blocks=4,
    local=16,
    at=0,
    canonical=16,
    **more,
):
    return PagePlan(base, stride, blocks, local, at, canonical, runs, **more)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no runs"),
        ([(0, 0, 0, 1, 0, 0)], "empty run"),
        ([(0, 0, 4, 0, 4, 4)], "empty run"),
        ([(0, 0, -4, 1, 4, 4)], "empty run"),
        ([(0, 0, 17, 1, 17, 17)], "leaves the local page of 16 bytes"),
        ([(-1, 0, 16, 1, 16, 16)], "leaves the local page"),
        ([(0, 1, 16, 1, 16, 16)], "leaves the canonical page of 16 bytes"),
        ([(0, -1, 16, 1, 16, 16)], "leaves the canonical page"),
        ([(0, 0, 4, 5, 4, 0)], "leaves the local page"),
        ([(0, 0, 4, 4, 4, 5)], "leaves the canonical page"),
        ([(12, 0, 4, 5, -4, 4)], "leaves the local page"),
        ([(0, 0, 2**62, 4, 2**62, 2**62)], "leaves the local page"),
        ([(0, 0, 1, MAX_FRAGMENTS + 1, 0, 0)], "more than 16777216 fragments"),
        ([(0, 0, 8, 1, 8, 8), (4, 8, 8, 1, 8, 8)], r"overlap in the local page: \[0, 8\) and"),
        ([(0, 0, 8, 1, 8, 8), (8, 4, 8, 1, 8, 8)], "overlap in the canonical page"),
        ([(0, 0, 4, 4, 4, 3)], "overlap in the canonical page"),
        ([(0, 0, 4, 4, 0, 4)], "overlap in the local page"),
        ([(0, 0, 8, 1, 8, 8)], r"no fragment covers \[8, 16\) of the local page"),
        ([(8, 8, 8, 1, 8, 8)], r"no fragment covers \[0, 8\)"),
        ([(0, 0, 4, 2, 12, 4), (8, 8, 4, 1, 4, 4)], r"no fragment covers \[4, 8\)"),
    ],
)
def test_runs_are_proven(runs, message):
    with pytest.raises(ValueError, match=message):
        page(runs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": 0}, "address 0"),
        ({"base": 2**56}, "leave the address space"),
        ({"blocks": 2**60}, "leave the address space"),
        ({"blocks": 0}, "0 accelerator blocks"),
        ({"stride": 15}, "less than the page"),
        ({"local": 0}, "empty page"),
        ({"canonical": 0}, "empty page"),
        ({"at": -1}, "offset -1"),
        ({"num_writers": 0}, "writer 0 of 0"),
        ({"num_writers": 2, "writer_index": 2}, "writer 2 of 2"),
    ],
)
def test_numbers_of_a_page(change, message):
    with pytest.raises(ValueError, match=message):
        page(**change)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([], "no pages"),
        ([{}, {"at": 16, "canonical": 17}], "leaves the block of 32 bytes"),
        ([{"at": 0}, {"at": 8, "base": BASE + 64}], "overlaps the one before"),
        ([{}, {"base": BASE + 64}], "overlap in the canonical page"),
        ([{}, {"at": 16}], "share bytes of accelerator memory"),
        ([{}, {"at": 16, "base": BASE + 8}], "share bytes of accelerator memory"),
        ([{"stride": 32}, {"at": 16, "base": BASE + 24, "stride": 32}], "share bytes"),
        ([{"stride": 32}, {"at": 16, "base": BASE + 16, "stride": 48}], "different block strides"),
    ],
)
def test_pages_of_a_group_stay_apart(pages, message):
    with pytest.raises(ValueError, match=message):
        CopyPlan([page(**change) for change in pages], 32)


def test_pages_may_interleave_block_by_block():
    one = page(stride=32)
    other = page(stride=32, base=BASE + 16, at=16)
    assert CopyPlan([one, other], 32).local_bytes == 32


def test_a_group_takes_page_plans_only():
    with pytest.raises(TypeError, match="not a PagePlan"):
        CopyPlan([object()], 32)


def test_loops_are_few():
    """A transposition is one nested loop, and neighbouring runs are one copy."""
    nhd = KVShape(
        block_tokens=16, num_kv_heads=8, head_size=128, dtype_bytes=2, order="NHD", kv="packed"
    )
    (loops,) = compile_runs(nhd.mapping().runs)
    assert (loops.fragment_bytes, loops.inner, loops.outer) == (512, 16, 8)
    tiles = [Run(i * 64, i * 64, 4, 16, 4, 4) for i in range(8)]
    (whole,) = compile_runs(tiles)
    assert (whole.fragment_bytes, whole.inner, whole.outer) == (512, 1, 1)


@pytest.mark.parametrize("field", range(9))
def test_the_compilation_is_proven(field):
    """Any number of the compiled loops changed: the proof trips."""
    shape = KVShape(
        block_tokens=3, num_kv_heads=2, head_size=4, dtype_bytes=2, order="NHD", kv="split"
    )
    runs = shape.mapping().runs
    loops = compile_runs(runs)
    prove_loops(runs, loops)
    for i, loop in enumerate(loops):
        broken = list(loops)
        broken[i] = Loops(*(n + (j == field) for j, n in enumerate(loop)))
        with pytest.raises(ValueError, match="move other bytes"):
            prove_loops(runs, broken)
    with pytest.raises(ValueError, match="move other bytes"):
        prove_loops(runs, loops[:-1])


class Setup:
    """Four accelerator blocks of two layers, the second with fewer of them, and three slots."""

    def __init__(self, bound=True):
        self.accelerator = [Memory(4 * 16), Memory(3 * 16)]
        self.region = Memory(3 * 80, fill=0xAA)
        self.plan = CopyPlan(
            [
                page(base=self.accelerator[0].address),
                page(base=self.accelerator[1].address, at=16, blocks=3),
            ],
            32,
            region=(self.region.address, 80, 3, 80) if bound else None,
            owner=self.region,
        )

    def addresses(self, *offsets):
        return np.array([self.region.address + offset for offset in offsets], dtype=np.uint64)

    def untouched(self):
        return (self.region.raw == 0xAA).all() and all(
            (memory.raw == 0xEE).all() for memory in self.accelerator
        )


def i64(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.fault("E15")
@pytest.mark.parametrize(
    ("blocks", "offsets", "error", "message"),
    [
        ((0, 3), (0, 80), IndexError, "item 1: block 3 of 3"),
        ((0, -1), (0, 80), IndexError, "item 1: block -1"),
        ((2**62, 1), (0, 80), IndexError, "item 0: block"),
        ((0, 1), (0, 240), IndexError, "item 1: address"),
        ((0, 1), (-80, 0), IndexError, "item 0: address"),
        ((0, 1), (0, 8), IndexError, "not the start of a block of 32 bytes"),
        ((0, 1), (0, 64), IndexError, "not the start of a block"),
        ((0, 1, 2), (0, 32), ValueError, "3 block ids for 2"),
    ],
)
def test_nothing_is_written_out_of_range(blocks, offsets, error, message):
    """One bad index anywhere: neither side has changed, whichever part was asked for."""
    setup = Setup()
    addresses = setup.addresses(*offsets)
    ids = i64(*range(len(offsets)))
    with pytest.raises(error, match=message):
        setup.plan.store(i64(*blocks), addresses, ids)
    with pytest.raises(error, match=message):
        setup.plan.load(i64(*blocks), addresses)
    with pytest.raises(error, match=message):
        setup.plan.check(i64(*blocks), addresses, ids)
    for part in ((0, 1), (1, 2), (0, 0)):
        with pytest.raises(error, match=message):
            setup.plan.store(i64(*blocks), addresses, ids, *part)
    assert setup.untouched()


def test_each_target_once():
    setup = Setup()
    with pytest.raises(ValueError, match="twice"):
        setup.plan.load(i64(1, 0, 1), setup.addresses(0, 32, 80))
    with pytest.raises(ValueError, match="twice"):
        setup.plan.store(i64(1, 0, 2), setup.addresses(32, 0, 32), i64(0, 1, 2))
    with pytest.raises(ValueError, match="twice"):
        setup.plan.zero(setup.addresses(32, 32), i64(0, 1))
    assert setup.untouched()
    # One source may be read twice.
    assert setup.plan.store(i64(1, 1), setup.addresses(32, 0), i64(0, 1)) == 64


def test_page_ids_are_checked():
    setup = Setup()
    with pytest.raises(IndexError, match="page id -1"):
        setup.plan.store(i64(0), setup.addresses(0), i64(-1))
    with pytest.raises(ValueError, match="1 page ids for 2"):
        setup.plan.zero(setup.addresses(0, 32), i64(1))
    with pytest.raises(IndexError, match="not the start"):
        setup.plan.zero(setup.addresses(1), i64(1))
    assert setup.untouched()


@pytest.mark.parametrize("part", [(-1, 1), (1, 0), (0, 3), (3, 3)])
def test_parts_lie_in_the_batch(part):
    setup = Setup()
    with pytest.raises(ValueError, match="of a batch of 2 blocks"):
        setup.plan.store(i64(0, 1), setup.addresses(0, 32), i64(0, 1), *part)
    assert setup.untouched()


def test_a_part_moves_only_itself():
    setup = Setup()
    assert setup.plan.store(i64(0, 1, 2), setup.addresses(0, 32, 80), i64(0, 1, 2), 1, 2) == 32
    assert (setup.region.bytes[32:64] == 0xEE).all()
    rest = np.delete(setup.region.bytes, np.s_[32:64])
    assert (rest == 0xAA).all()


def test_wrong_types_are_refused():
    setup = Setup()
    with pytest.raises(ValueError, match="dtype"):
        setup.plan.store(np.array([0], dtype=np.int32), setup.addresses(0), i64(0))
    with pytest.raises(ValueError, match="dtype"):
        setup.plan.load(i64(0), setup.addresses(0).astype(np.int64))
    with pytest.raises(ValueError, match="contiguous"):
        setup.plan.load(i64(0, 1, 2, 0)[::2], setup.addresses(0, 32))
    for nothing in ((None, setup.addresses()), (i64(), None)):
        with pytest.raises(TypeError):
            setup.plan.load(*nothing)
        with pytest.raises(TypeError):
            setup.plan.store(*nothing, i64())
    with pytest.raises(TypeError):
        setup.plan.zero(setup.addresses(), None)
    assert setup.untouched()


def test_an_empty_batch_is_fine():
    setup = Setup()
    assert setup.plan.store(i64(), setup.addresses(), i64()) == 0
    assert setup.plan.load(i64(), setup.addresses()) == 0


def test_without_a_region_null_is_still_refused():
    setup = Setup(bound=False)
    for address in (0, 2**63, 2**64 - 1):
        with pytest.raises(IndexError, match="canonical block at address"):
            setup.plan.load(i64(0), np.array([address], dtype=np.uint64))
    assert setup.plan.load(i64(0), setup.addresses(7)) == 32  # the caller answers for it


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ((0, 80, 3, 80), "region of 3 slabs"),
        ((BASE, 80, 3, 31), "chunks 31 bytes apart"),
        ((BASE, 80, 3, 81), "slabs of 80 bytes at .* for chunks 81 bytes apart"),
        ((BASE, 80, 0, 80), "region of 0 slabs"),
        ((BASE, 80, 2**55, 80), "leaves the address space"),
    ],
)
def test_regions_are_checked(region, message):
    with pytest.raises(ValueError, match=message):
        CopyPlan([page()], 32, region=region)


def test_plans_keep_the_memory():
    setup = Setup()
    assert setup.plan.owner is setup.region
    assert page(owner=setup).owner is setup


def test_the_kernel_runs_without_the_gil():
    """Two threads in one plan at the same time, and both results are right."""
    accelerator, region = Memory(512 * 4096), Memory(512 * 4096)
    accelerator.bytes[:] = np.random.default_rng(0).integers(0, 256, 512 * 4096, dtype=np.uint8)
    run = [(0, 0, 4096, 1, 4096, 4096)]
    plan = CopyPlan([PagePlan(accelerator.address, 4096, 512, 4096, 0, 4096, run)], 4096)
    ids = np.arange(512, dtype=np.int64)
    addresses = region.address + np.arange(512, dtype=np.uint64) * 4096
    halves = [
        threading.Thread(target=plan.store, args=(ids, addresses, ids, start, start + 256))
        for start in (0, 256)
    ]
    for thread in halves:
        thread.start()
    for thread in halves:
        thread.join()
    assert (region.bytes == accelerator.bytes).all()


SHAPE = KVShape(block_tokens=4, num_kv_heads=4, head_size=8, dtype_bytes=2, order="NHD", kv="split")


def test_geometry_is_the_same_at_every_number_of_ranks():
    latent = LatentShape(block_tokens=4, row_bytes=10)
    geometry = group_geometry([("a", SHAPE), ("b", latent)], 4, 2, window_chunks=3)
    assert [(p.layer, p.offset_bytes, p.size_bytes) for p in geometry.pages] == [
        ("a", 0, 512),
        ("b", 512, 40),
    ]
    assert (geometry.block_bytes, geometry.payload_bytes) == (552, 1104)
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            assert SHAPE.mapping(tp, rank).canonical_bytes == 512
            assert latent.mapping(tp, rank).canonical_bytes == 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SHAPE.mapping(3, 0), "4 KV heads cannot be spread over 3 ranks"),
        (lambda: SHAPE.mapping(6, 0), "over 6 ranks"),
        (lambda: SHAPE.mapping(2, 2), "rank 2 of 2"),
        (lambda: SHAPE.mapping(0, 0), "rank 0 of 0"),
        (lambda: SHAPE.mapping(part="k"), 'part "k" of a shape with kv "split"'),
        (
            lambda: KVShape(
                block_tokens=4, num_kv_heads=1, head_size=1, dtype_bytes=1, order="NHD",
                kv="split", tile="opaque",
            ),
            "needs head-major pages",
        ),
        (
            lambda: KVShape(
                block_tokens=0, num_kv_heads=1, head_size=1, dtype_bytes=1, order="NHD", kv="split"
            ),
            "block_tokens is 0",
        ),
        (lambda: LatentShape(block_tokens=4, row_bytes=0), "latent rows of 0 bytes"),
        (lambda: OpaqueShape(page_bytes=8, ranks=2).mapping(4, 0), "2 ranks, used with 4"),
        (lambda: group_geometry([], 4), "at least one layer"),
        (lambda: group_geometry([("a", SHAPE), ("a", SHAPE)], 4), '"a" stands twice'),
        (lambda: group_geometry([("a", SHAPE)], 8), "blocks of 4 tokens in a group of 8"),
        (lambda: group_geometry([("a", SHAPE)], 4, 0), "blocks_per_chunk is 0"),
    ],
)  # fmt: skip
def test_shapes_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_together_tile_the_page(heads, tp):
    for order, kv in (("NHD", "split"), ("HND", "packed"), ("HND", "split"), ("NHD", "apart")):
        shape = KVShape(
            block_tokens=3, num_kv_heads=heads, head_size=4, dtype_bytes=2, order=order, kv=kv
        )
        parts = ("k", "v") if kv == "apart" else ("kv",)
        ranks = [[shape.mapping(tp, rank, part) for part in parts] for rank in range(tp)]
        verify_tiling(ranks)
        if tp > 1:
            with pytest.raises(ValueError, match=r"no fragment covers|no rank writes"):
                verify_tiling(ranks[:-1])
            with pytest.raises(ValueError, match="overlap"):
                verify_tiling([*ranks, ranks[0]])


def test_tiling_needs_one_size():
    other = LatentShape(block_tokens=4, row_bytes=3).mapping()
    with pytest.raises(ValueError, match="differ in the size of the canonical page"):
        verify_tiling([[SHAPE.mapping()], [other]])
    with pytest.raises(ValueError, match="no ranks"):
        verify_tiling([])


def test_two_ranks_with_one_turn():
    """Replicas that do not take turns would write the same bytes at the same time."""
    run = (Run(0, 0, 8, 1, 8, 8),)
    with pytest.raises(ValueError, match="overlap"):
        verify_tiling([[PageMapping(8, 8, run)], [PageMapping(8, 8, run)]])
    with pytest.raises(ValueError, match="no rank writes"):
        verify_tiling([[PageMapping(8, 8, run, 2, 0)]])


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (["a"], "no accelerator pages for layer 'b'"),
        (["a", "b", "c"], "layer 'c' is not in the group"),
    ],
)
def test_layers_match_the_geometry(pages, message):
    geometry = group_geometry([("a", SHAPE), ("b", SHAPE)], 4)
    given = [
        LayerPage(name, BASE + i * 8192, 512, 4, SHAPE.mapping()) for i, name in enumerate(pages)
    ]
    with pytest.raises(ValueError, match=message):
        compile_plan(geometry, given)


def test_page_sizes_match_the_geometry():
    geometry = group_geometry([("a", SHAPE)], 4)
    wrong = LatentShape(block_tokens=4, row_bytes=3).mapping()
    with pytest.raises(ValueError, match="canonical page of 12 bytes, 512 in the group"):
        compile_plan(geometry, [LayerPage("a", BASE, 512, 4, wrong)])


def test_expanded_slots():
    geometry = group_geometry([("a", SHAPE)], 4, blocks_per_chunk=3)
    addresses, ids = expand_slots(i64(5, 0), geometry, 10_000, 4096)
    assert ids.tolist() == [15, 16, 17, 0, 1, 2]
    assert addresses.tolist() == [30480, 30992, 31504, 10000, 10512, 11024]
    assert addresses.dtype == np.uint64


@pytest.mark.parametrize(
    ("offset", "allowed"),
    [
        (0, True),
        (32, True),  # the second block of the first chunk
        (64, False),  # behind its blocks
        (80, True),
        (112, True),
        (160, False),  # where a third chunk would leave the slab
        (192, False),
        (200, True),  # the next slab
        (280, True),
        (360, False),
        (400, False),  # behind the region
    ],
)
def test_chunks_stand_side_by_side_in_their_slab(offset, allowed):
    """Two chunks of 80 bytes, of two blocks each, in a slab of 200."""
    accelerator, region = Memory(4 * 16), Memory(400, fill=0xAA)
    plan = CopyPlan(
        [page(base=accelerator.address)], 32, region=(region.address, 200, 2, 80), owner=region
    )
    addresses = np.array([region.address + offset], dtype=np.uint64)
    if allowed:
        plan.store(i64(0), addresses, i64(0))
        assert (region.bytes[offset : offset + 16] == 0xEE).all()
    else:
        with pytest.raises(IndexError, match="chunks 80 bytes apart in 2 slabs of 200 bytes"):
            plan.store(i64(0), addresses, i64(0))
        assert (region.raw == 0xAA).all()


def test_pages_are_numbered_by_chunk():
    """Ranks that take turns would never come to their turn where all slots are even."""
    group = GroupGeometry(16, 1, 8192)
    addresses, ids = expand_slots(i64(0, 2, 4, 10), group, 1 << 20, 4096, width=2)
    assert ids.tolist() == [0, 1, 2, 5]
    assert (addresses - (1 << 20)).tolist() == [0, 8192, 16384, 40960]
    group = GroupGeometry(16, 2, 4096)
    addresses, ids = expand_slots(i64(0, 2, 4), group, 1 << 20, 4096, width=2)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert (addresses - (1 << 20)).tolist() == [0, 4096, 8192, 12288, 16384, 20480]
