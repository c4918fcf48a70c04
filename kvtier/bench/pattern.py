# SPDX-License-Identifier: Apache-2.0
"""The bytes of the stand-in KV cache: derived from (key, group, layer, head, token), and compared.

Owns one table of 64-bit words for the places inside a block. A block's words are that table
exclusive-or one word that its hash gives. So two places of one block, and one place of two blocks,
differ in every word; a word in the wrong place, under the wrong key, or damaged never passes.
Thread: any; the table is read-only, and a `Comparer` (which has scratch memory) belongs to one.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.types import Geometry, GroupGeometry, PageGeometry, make_geometry

Words = npt.NDArray[np.uint64]


class Shape(msgspec.Struct, frozen=True):
    """The stand-in model's KV cache.

    A page (one block of one layer) is head-major: for each head K of all tokens, then V.
    """

    layers: int = 4
    heads: int = 2
    head_bytes: int = 64
    """K (or V) of one token and head."""
    block_tokens: int = 128
    blocks_per_chunk: int = 4

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * 2 * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.heads * 2 * self.block_tokens * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.layers

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_chunk

    def geometry(self, capacity_bytes: int) -> Geometry:
        """Region of `capacity_bytes` for this model's chunks."""
        pages = tuple(
            PageGeometry(f"layer{i}", i * self.page_bytes, self.page_bytes)
            for i in range(self.layers)
        )
        group = GroupGeometry(self.block_tokens, self.blocks_per_chunk, self.block_bytes, pages)
        return make_geometry([group], capacity_bytes)


def make_shape(
    kv_bytes_per_token: int, scale: float, block_tokens: int, blocks_per_chunk: int
) -> Shape:
    """Shape whose token has ``kv_bytes_per_token / scale`` bytes.

    Raises
    ------
    ConfigError
        If that many bytes cannot be shared out over layers and heads in 64-bit words.
    """
    layers, heads = 4, 2
    unit = layers * heads * 2 * 8
    token_bytes = kv_bytes_per_token / scale
    if token_bytes < unit or token_bytes % unit:
        raise ConfigError(
            f"--scale {scale:g} leaves {token_bytes:g} bytes a token of {kv_bytes_per_token}; "
            f"choose one that leaves a multiple of {unit}, "
            f"for example {kv_bytes_per_token // 1024}"
        )
    return Shape(
        layers, heads, int(token_bytes) // (layers * heads * 2), block_tokens, blocks_per_chunk
    )


class Difference(msgspec.Struct, frozen=True):
    """Where a reloaded block first differs from what was computed for it."""

    request_id: str
    block_hash: str
    layer: int
    head: int
    part: str
    """"K" or "V"."""
    token: int
    """Inside the block."""
    expected: str
    found: str
    bytes_differing: int
    """Of the whole block."""


def _mix(words: Words) -> Words:
    """Finaliser of MurmurHash3 (64 bit): a bijection that spreads every bit."""
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xFF51AFD7ED558CCD)
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


class Pattern:
    """Derives the words of blocks.

    Parameters
    ----------
    shape : Shape
    group : int
        KV cache group; other groups get other bytes.
    """

    def __init__(self, shape: Shape, group: int = 0) -> None:
        self.shape = shape
        words = shape.block_bytes // 8
        start = np.uint64((group + 1) << 40)
        self.table: Words = _mix(np.arange(words, dtype=np.uint64) + start).reshape(
            shape.layers, shape.page_bytes // 8
        )
        """uint64, shape (layers, words of a page)."""
        self.table.flags.writeable = False

    def key_word(self, block_hash: bytes) -> np.uint64:
        """The word that belongs to one block's hash (at least 8 bytes)."""
        return np.uint64(int.from_bytes(block_hash[:8], "little"))

    def fill(self, out: Words, block_hash: bytes) -> None:
        """Write the block's words to `out`, shape (layers, words of a page)."""
        np.bitwise_xor(self.table, self.key_word(block_hash), out=out)


class Comparer:
    """Compares every byte of blocks with what was derived for them. One thread."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._scratch = np.empty_like(pattern.table)

    def compare(self, actual: Words, block_hash: bytes, request_id: str = "") -> Difference | None:
        """None if `actual`, shape (layers, words of a page), is right to the last byte."""
        key_word = self._pattern.key_word(block_hash)
        np.bitwise_xor(actual, self._pattern.table, out=self._scratch)
        if bool((self._scratch == key_word).all()):
            return None
        return self._describe(actual, block_hash, request_id)

    def _describe(self, actual: Words, block_hash: bytes, request_id: str) -> Difference:
        shape = self._pattern.shape
        expected = np.empty_like(self._pattern.table)
        self._pattern.fill(expected, block_hash)
        layer, word = (int(i) for i in np.argwhere(expected != actual)[0])
        found = np.ascontiguousarray(actual)
        head, rest = divmod(word * 8, 2 * shape.block_tokens * shape.head_bytes)
        part, rest = divmod(rest, shape.block_tokens * shape.head_bytes)
        return Difference(
            request_id=request_id,
            block_hash=block_hash.hex(),
            layer=layer,
            head=head,
            part="KV"[part],
            token=rest // shape.head_bytes,
            expected=f"{int(expected[layer, word]):016x}",
            found=f"{int(found[layer, word]):016x}",
            bytes_differing=int((expected.view(np.uint8) != found.view(np.uint8)).sum()),
        )
