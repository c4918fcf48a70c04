# SPDX-License-Identifier: Apache-2.0
"""How a region is divided among chunks of different sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.types import MAX_PADDING, Geometry, GroupGeometry, make_geometry

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def divide(sizes: Sequence[int], capacity_bytes: int, *, one_size: bool = False) -> Geometry:
    return make_geometry(
        [GroupGeometry(16, 1, size) for size in sizes], capacity_bytes, one_size=one_size
    )


@pytest.mark.parametrize(
    "sizes",
    [(40960,), (40960,) * 6, (100 * KIB, 90 * KIB), (1, 2, 4096), (10_000_000, 9_000_000)],
    ids=["one group", "equal groups", "nearly equal", "below a page", "large"],
)
def test_one_slot_a_chunk_where_that_wastes_little(sizes: tuple[int, ...]) -> None:
    """As if there were no size classes: the largest chunk, rounded up to pages."""
    made = divide(sizes, GIB)
    stride = -(-max(sizes) // 4096) * 4096
    assert made == Geometry(made.groups, GIB // stride, stride)
    assert (made.slab_slots, set(made.widths), made.num_slabs) == (1, {1}, made.num_slots)


@pytest.mark.parametrize(
    ("sizes", "widths", "slot_bytes", "slab_slots"),
    [
        ((400 * KIB, 40 * KIB), (10, 1), 40 * KIB, 10),
        ((40 * KIB, 400 * KIB, 40 * KIB), (1, 10, 1), 40 * KIB, 10),
        # A group with a hidden state of one layer beside groups of ten.
        ((160 * KIB, 160 * KIB, 16 * KIB), (10, 10, 1), 16 * KIB, 10),
        # Attention over 384 tokens beside three recurrent states.
        ((192 * KIB, 262 * KIB, 262 * KIB, 262 * KIB), (8, 11, 11, 11), 24 * KIB, 33),
        ((96 * KIB, 128 * KIB, 160 * KIB), (3, 4, 5), 32 * KIB, 25),
    ],
    ids=["tenfold", "shared", "hidden", "linear", "steps"],
)
def test_slabs_by_hand(
    sizes: tuple[int, ...], widths: tuple[int, ...], slot_bytes: int, slab_slots: int
) -> None:
    made = divide(sizes, 64 * MIB)
    assert (made.widths, made.slot_bytes, made.slab_slots) == (widths, slot_bytes, slab_slots)
    assert made.num_slots % slab_slots == 0
    assert made.num_slots * slot_bytes <= 64 * MIB


@given(
    st.lists(st.integers(28 * KIB, 16 * MIB), min_size=1, max_size=6),
    st.integers(2 * GIB, 200 * GIB),
)
def test_little_is_padding_whatever_the_sizes(sizes: list[int], capacity_bytes: int) -> None:
    """From 28 KiB on, the least at which the rounding to whole pages is no large part."""
    made = divide(sizes, capacity_bytes)
    assert max(made.padding_ratio) <= MAX_PADDING
    assert made.num_slots % made.slab_slots == 0
    assert capacity_bytes - made.num_slots * made.slot_bytes < made.slab_bytes <= capacity_bytes / 8
    for width, size, stride in zip(made.widths, sizes, made.stride_bytes, strict=True):
        assert stride - made.slot_bytes < size <= stride == width * made.slot_bytes
        assert width <= made.slab_slots


@given(st.lists(st.integers(1, MIB), min_size=1, max_size=4), st.integers(1, 40))
def test_a_small_region_holds_as_many_chunks_as_with_slots_of_one_size(
    sizes: list[int], chunks: int
) -> None:
    """Of every size, and as many slabs as there would be slots."""
    capacity_bytes = chunks * -(-max(sizes) // 4096) * 4096
    made = divide(sizes, capacity_bytes)
    assert made.num_slots * made.slot_bytes <= capacity_bytes
    plain = divide(sizes, capacity_bytes, one_size=True)
    assert plain.slab_slots == 1
    for width in made.widths:
        assert made.num_slabs * (made.slab_slots // width) >= 0.75 * plain.num_slots


def test_one_size_can_be_asked_for() -> None:
    made = divide((400 * KIB, 40 * KIB), GIB, one_size=True)
    assert (made.slab_slots, made.slot_bytes, made.widths) == (1, 400 * KIB, (1, 1))
    assert made.padding_ratio == (0.0, 0.9)


def test_what_a_chunk_costs() -> None:
    """Its stride, and its share of what is left over at the end of a slab."""
    groups = tuple(GroupGeometry(16, 1, size) for size in (16000, 4096, 8192))
    made = Geometry(groups, num_slots=30, slot_bytes=4096, slab_slots=6)
    assert made.widths == (4, 1, 2)
    assert made.stride_bytes == (16384, 4096, 8192)
    assert made.chunk_bytes == (6 * 4096, 4096, 8192)
    assert made.padding_ratio == (1 - 16000 / (6 * 4096), 0, 0)
    assert made.size_groups == (1, 2, 0)
    assert [made.slots_in(size) for size in (0, 24575, 24576, 60000)] == [0, 0, 6, 12]


def test_too_small_for_one_chunk() -> None:
    with pytest.raises(ValueError, match="one takes 409600 bytes, give at least that much"):
        divide((400 * KIB, 40 * KIB), 399 * KIB)
    assert divide((400 * KIB, 40 * KIB), 400 * KIB).num_slabs == 1
