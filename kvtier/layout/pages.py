# SPDX-License-Identifier: Apache-2.0
"""Which byte of a rank's page is which byte of the canonical page, from the shape of the KV cache.

A canonical page is one block of one layer with the KV heads of all ranks, head tile after head
tile. A head tile is one head of one block, K and V of its tokens. Two kinds of tile:

``plain``
    For kernels that keep K and V as rows of one token and head. The tile is token-major: the K row
    and then the V row of token 0, then those of token 1, and so on. Every plain local layout (NHD
    or HND, packed, split or in tensors of its own) is translated to this one order, so that they
    share; for packed HND pages that is a copy of whole pages.
``opaque``
    The kernel permutes a tile's inside (transposed K, packing for matrix units). Its bytes are
    kept as they are, so the local layout must be HND, where a tile is contiguous (packed) or its K
    and V halves are (split); only backends of one tile format may share.

Owns no state; importable without torch and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvtier._core.runs import Run, prove_runs
from kvtier.errors import ConfigError
from kvtier.types import GroupGeometry, PageGeometry

PLAIN_TILE = "plain"
"""Tile format, for the namespace, of every plain layout."""

Part = Literal["kv", "k", "v"]


class PageMapping(msgspec.Struct, frozen=True):
    """How one rank's page (or the K or V part of it) maps to the canonical page."""

    local_bytes: int
    """Bytes of the local page that hold KV; padding stands behind them."""
    canonical_bytes: int
    runs: tuple[Run, ...]
    num_writers: int = 1
    """Ranks that hold the same bytes and take turns by block."""
    writer_index: int = 0
    portable: bool = True
    """Whether the canonical page is the same at every number of ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.writer_index < self.num_writers:
            raise ValueError(f"writer {self.writer_index} of {self.num_writers}")
        prove_runs(self.runs, self.local_bytes, self.canonical_bytes)


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one layer's KV for attention with heads."""

    block_tokens: int
    num_kv_heads: int
    """Of the whole model, not of one rank."""
    head_size: int
    """Elements of one K row."""
    dtype_bytes: int
    value_head_size: int | None = None
    """Elements of one V row, where it differs from K."""
    order: Literal["NHD", "HND"]
    """Local order of tokens (N) and heads (H)."""
    kv: Literal["packed", "split", "apart"]
    """packed: K and V rows side by side, ``(N, H, K+V)`` or ``(H, N, K+V)``. split: K half, then V
    half of a page, ``(2, N, H, D)`` or ``(2, H, N, D)``. apart: K and V in tensors of their own,
    with a mapping for each."""
    tile: Literal["plain", "opaque"] = "plain"

    def __post_init__(self) -> None:
        for name in ("block_tokens", "num_kv_heads", "head_size", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.value_head_size is not None and self.value_head_size < 1:
            raise ConfigError(f"value_head_size is {self.value_head_size}")
        if self.tile == "opaque" and self.order == "NHD":
            raise ConfigError(
                "an opaque tile needs head-major pages (HND): in NHD the rows of a head are "
                "not together, and only a plain tile can be put together from rows"
            )

    @property
    def key_bytes(self) -> int:
        """One K row: one token of one head."""
        return self.head_size * self.dtype_bytes

    @property
    def value_bytes(self) -> int:
        """One V row."""
        return (self.value_head_size or self.head_size) * self.dtype_bytes

    @property
    def tile_bytes(self) -> int:
        """One head of one block, K and V."""
        return self.block_tokens * (self.key_bytes + self.value_bytes)

    @property
    def canonical_bytes(self) -> int:
        """One block of the layer with all heads."""
        return self.num_kv_heads * self.tile_bytes

    def local_heads(self, tp_size: int) -> int:
        """Heads that each of `tp_size` ranks holds.

        Raises
        ------
        ConfigError
            If heads cannot be spread evenly, or replicated evenly where there are fewer than ranks.
        """
        if tp_size < 1 or max(self.num_kv_heads, tp_size) % min(self.num_kv_heads, tp_size):
            raise ConfigError(f"{self.num_kv_heads} KV heads cannot be spread over {tp_size} ranks")
        return max(1, self.num_kv_heads // tp_size)

    def mapping(self, tp_size: int = 1, tp_rank: int = 0, part: Part = "kv") -> PageMapping:
        """Mapping of one rank's page; `part` is "k" or "v" for shapes that keep them apart."""
        _check_rank(tp_size, tp_rank)
        if (part == "kv") == (self.kv == "apart"):
            raise ConfigError(f'part "{part}" of a shape with kv "{self.kv}"')
        heads = self.local_heads(tp_size)
        replicas = max(1, tp_size // self.num_kv_heads)
        first_head = tp_rank // replicas * heads
        if self.kv == "packed":
            runs = self._packed(first_head, heads)
        else:
            runs = [
                self._rows(name, head, first_head + head, heads, part)
                for name in (("k", "v") if part == "kv" else (part,))
                for head in range(heads)
            ]
        row_bytes = {"kv": self.key_bytes + self.value_bytes, "k": self.key_bytes}.get(
            part, self.value_bytes
        )
        return PageMapping(
            local_bytes=heads * self.block_tokens * row_bytes,
            canonical_bytes=self.canonical_bytes,
            runs=tuple(runs),
            num_writers=replicas,
            writer_index=tp_rank % replicas,
        )

    def _packed(self, first_head: int, heads: int) -> list[Run]:
        """K and V rows side by side: pairs of rows move together."""
        pair = self.key_bytes + self.value_bytes
        if self.order == "HND":
            size = heads * self.tile_bytes
            return [Run(0, first_head * self.tile_bytes, size, 1, size, size)]
        return [
            Run(
                local_offset=head * pair,
                canonical_offset=(first_head + head) * self.tile_bytes,
                fragment_bytes=pair,
                fragments=self.block_tokens,
                local_stride=heads * pair,
                canonical_stride=pair,
            )
            for head in range(heads)
        ]

    def _rows(self, name: str, head: int, canonical_head: int, heads: int, part: Part) -> Run:
        """The K or the V rows of one head, where K and V of a page are not side by side."""
        row = self.key_bytes if name == "k" else self.value_bytes
        half = heads * self.block_tokens * self.key_bytes if (part, name) == ("kv", "v") else 0
        tile = canonical_head * self.tile_bytes
        if self.tile == "opaque":  # K half, then V half
            size = self.block_tokens * row
            inside = self.block_tokens * self.key_bytes if name == "v" else 0
            return Run(half + head * size, tile + inside, size, 1, size, size)
        token_major = self.order == "NHD"
        return Run(
            local_offset=half + head * row * (1 if token_major else self.block_tokens),
            canonical_offset=tile + (self.key_bytes if name == "v" else 0),
            fragment_bytes=row,
            fragments=self.block_tokens,
            local_stride=heads * row if token_major else row,
            canonical_stride=self.key_bytes + self.value_bytes,
        )


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one layer's latent rows (MLA): the same on all ranks, stored once."""

    block_tokens: int
    row_bytes: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.row_bytes < 1:
            raise ConfigError(f"{self.block_tokens} latent rows of {self.row_bytes} bytes")

    @property
    def canonical_bytes(self) -> int:
        """One block of the layer."""
        return self.block_tokens * self.row_bytes

    def mapping(self, tp_size: int = 1, tp_rank: int = 0) -> PageMapping:
        """Mapping of one rank's page: all of it, in turns by block."""
        _check_rank(tp_size, tp_rank)
        size = self.canonical_bytes
        return PageMapping(
            local_bytes=size,
            canonical_bytes=size,
            runs=(Run(0, 0, size, 1, size, size),),
            num_writers=tp_size,
            writer_index=tp_rank,
        )


class OpaqueShape(msgspec.Struct, frozen=True, kw_only=True):
    """State that nothing is known of (recurrent state, packed layouts): placed by rank."""

    page_bytes: int
    """Of one rank; all ranks alike."""
    ranks: int

    def __post_init__(self) -> None:
        if self.page_bytes < 1 or self.ranks < 1:
            raise ConfigError(f"opaque pages of {self.page_bytes} bytes on {self.ranks} ranks")

    @property
    def canonical_bytes(self) -> int:
        """The pages of all ranks, one after the other."""
        return self.page_bytes * self.ranks

    def mapping(self, tp_size: int = 1, tp_rank: int = 0) -> PageMapping:
        """Mapping of one rank's page: an area of its own. Not portable."""
        _check_rank(tp_size, tp_rank)
        if tp_size != self.ranks:
            raise ConfigError(f"opaque pages of {self.ranks} ranks, used with {tp_size}")
        size = self.page_bytes
        return PageMapping(
            local_bytes=size,
            canonical_bytes=self.canonical_bytes,
            runs=(Run(0, tp_rank * size, size, 1, size, size),),
            portable=False,
        )


Shape = KVShape | LatentShape | OpaqueShape


def _check_rank(tp_size: int, tp_rank: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(f"rank {tp_rank} of {tp_size}")


def group_geometry(
    layers: Sequence[tuple[str, Shape]],
    block_tokens: int,
    blocks_per_chunk: int = 1,
    window_chunks: int | None = None,
) -> GroupGeometry:
    """Geometry of one KV cache group: its layers' canonical pages, one after the other.

    The same on every rank and at every number of ranks (as long as no shape is opaque).

    Raises
    ------
    ConfigError
        If there is no layer, a layer stands twice, or a shape has other block tokens.
    """
    if not layers:
        raise ConfigError("a group needs at least one layer")
    if blocks_per_chunk < 1:
        raise ConfigError(f"blocks_per_chunk is {blocks_per_chunk}, it must be at least 1")
    pages: list[PageGeometry] = []
    offset = 0
    seen: set[str] = set()
    for name, shape in layers:
        if name in seen:
            raise ConfigError(f'layer "{name}" stands twice in its group')
        seen.add(name)
        if not isinstance(shape, OpaqueShape) and shape.block_tokens != block_tokens:
            raise ConfigError(
                f'layer "{name}" has blocks of {shape.block_tokens} tokens in a group of '
                f"{block_tokens}"
            )
        pages.append(PageGeometry(name, offset, shape.canonical_bytes))
        offset += shape.canonical_bytes
    return GroupGeometry(
        block_tokens=block_tokens,
        blocks_per_chunk=blocks_per_chunk,
        block_bytes=offset,
        pages=tuple(pages),
        window_chunks=window_chunks,
    )
