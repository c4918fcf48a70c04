# SPDX-License-Identifier: Apache-2.0
"""The derived bytes tell keys, groups, layers, heads and tokens apart, and damage never passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.inject import make_damage, make_skip
from kvtier.bench.pattern import Comparer, Pattern, Shape, Words, make_shape
from kvtier.bench.workload import block_hash
from kvtier.errors import ConfigError
from tests.bench.helpers import SHAPE

WORDS_A_TOKEN = SHAPE.head_bytes // 8


def filled(name: object, group: int = 0) -> Words:
    pattern = Pattern(SHAPE, group)
    out = np.empty_like(pattern.table)
    pattern.fill(out, block_hash(0, name))
    return out


def test_every_place_of_a_block_differs() -> None:
    words = filled("a").reshape(-1, WORDS_A_TOKEN)
    assert words.shape[0] == SHAPE.layers * SHAPE.heads * 2 * SHAPE.block_tokens
    assert len(np.unique(words)) == words.size


@given(st.binary(min_size=8, max_size=16), st.binary(min_size=8, max_size=16))
def test_keys_differ_in_every_word(one: bytes, other: bytes) -> None:
    pattern = Pattern(SHAPE)
    left, right = np.empty_like(pattern.table), np.empty_like(pattern.table)
    pattern.fill(left, one)
    pattern.fill(right, other)
    assert (left != right).all() == (one[:8] != other[:8])


def test_groups_differ_in_every_word() -> None:
    assert (filled("a", 0) != filled("a", 1)).all()


def test_same_key_same_bytes() -> None:
    assert (filled("a") == filled("a")).all()
    assert Comparer(Pattern(SHAPE)).compare(filled("a"), block_hash(0, "a")) is None


@given(st.integers(0, SHAPE.block_bytes * 8 - 1))
def test_any_flipped_bit_is_found_where_it_is(bit: int) -> None:
    words = filled("a")
    words.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << (bit % 8)
    found = Comparer(Pattern(SHAPE)).compare(words, block_hash(0, "a"), "r1")
    assert found is not None
    assert (found.request_id, found.bytes_differing) == ("r1", 1)
    tile = 2 * SHAPE.block_tokens * SHAPE.head_bytes
    layer, rest = divmod(bit // 8, SHAPE.page_bytes)
    head, rest = divmod(rest, tile)
    part, rest = divmod(rest, SHAPE.block_tokens * SHAPE.head_bytes)
    token = rest // SHAPE.head_bytes
    assert (found.layer, found.head, found.part, found.token) == (layer, head, "KV"[part], token)


def swap_tokens(words: Words) -> None:
    rows = words.reshape(-1, WORDS_A_TOKEN)
    rows[[0, 1]] = rows[[1, 0]]


def swap_halves(words: Words) -> None:
    tiles = words.reshape(SHAPE.layers * SHAPE.heads, 2, -1)
    tiles[0, [0, 1]] = tiles[0, [1, 0]]


@pytest.mark.parametrize("swap", [swap_tokens, swap_halves])
def test_swaps_inside_a_head_are_found(swap: object) -> None:
    words = filled("a")
    swap(words)  # type: ignore[operator]
    assert Comparer(Pattern(SHAPE)).compare(words, block_hash(0, "a")) is not None


@pytest.mark.parametrize(
    ("kind", "layer", "differing"),
    [
        ("flip", None, 1),
        ("swap-heads", 0, SHAPE.page_bytes),
        ("swap-layers", 0, 2 * SHAPE.page_bytes),
    ],
)
def test_injected_damage_is_found(kind: str, layer: int | None, differing: int) -> None:
    chunk = np.stack([filled(("a", i)) for i in range(SHAPE.blocks_per_chunk)])
    whole = chunk.copy()
    damage = make_damage(kind, SHAPE)
    assert damage is not None
    assert not damage(chunk, 1)
    assert (chunk == whole).all()
    assert damage(chunk, 0)
    comparer = Comparer(Pattern(SHAPE))
    found = [
        comparer.compare(chunk[i], block_hash(0, ("a", i))) for i in range(SHAPE.blocks_per_chunk)
    ]
    differences = [item for item in found if item is not None]
    assert len(differences) == 1
    # A swapped byte may equal the one it replaces: one in 256 does.
    assert 0.95 * differing <= differences[0].bytes_differing <= differing
    assert layer is None or differences[0].layer == layer


def test_stale_skips_one_store_in_eight() -> None:
    skip = make_skip("stale")
    assert skip is not None
    assert [skip(i) for i in range(9)] == [True, *[False] * 7, True]
    assert make_skip("flip") is None
    assert make_damage("stale", SHAPE) is None


def test_shape_adds_up() -> None:
    shape = make_shape(131072, 128, 128, 4)
    assert shape == Shape()
    assert shape.token_bytes == 1024
    assert shape.chunk_bytes == 512 * 1024
    geometry = shape.geometry(10 << 20)
    assert geometry.num_slots == 20
    group = geometry.groups[0]
    assert group.payload_bytes == shape.chunk_bytes
    assert sum(page.size_bytes for page in group.pages) == group.block_bytes


@pytest.mark.parametrize("scale", [100.0, 1e6])
def test_scale_that_leaves_odd_bytes_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="--scale"):
        make_shape(131072, scale, 128, 4)
