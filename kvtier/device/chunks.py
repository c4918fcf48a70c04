# SPDX-License-Identifier: Apache-2.0
"""Deals accelerator blocks to the chunks of a job. Plain functions; own no state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Chunk:
    """The part of one chunk that a job moves: consecutive sub-blocks of one slot.

    `whole` is False where the job has no accelerator block for a part of the chunk.
    """

    __slots__ = ("block_ids", "first_block", "slot", "whole")

    def __init__(
        self, slot: int, first_block: int, block_ids: npt.NDArray[np.int64], whole: bool
    ) -> None:
        self.slot = slot
        self.first_block = first_block
        self.block_ids = block_ids
        self.whole = whole


def split_store(
    slots: npt.NDArray[np.int64],
    block_ids: npt.NDArray[np.int64],
    first_block_index: int,
    blocks_per_chunk: int,
) -> list[Chunk]:
    """Deal the accelerator blocks of one group to the chunks of a store.

    vLLM leaves out blocks that are gone (behind a window) and says where the first one stands, so
    blocks can be dealt only when none but leading blocks of the first chunk are missing. Otherwise
    every chunk of the group comes back empty and not whole: nobody can say which is which.
    """
    missing = first_block_index % blocks_per_chunk
    if len(block_ids) != len(slots) * blocks_per_chunk - missing:
        return [Chunk(int(slot), 0, block_ids[:0], False) for slot in slots]
    return _deal(slots, block_ids, missing, blocks_per_chunk)


def split_load(
    slots: npt.NDArray[np.int64],
    block_ids: npt.NDArray[np.int64],
    first_block_index: int,
    blocks_per_chunk: int,
) -> list[Chunk]:
    """Deal the chunks of a load to the accelerator blocks of one group, which are consecutive.

    Raises
    ------
    ValueError
        If slots and blocks do not span the same chunks; nothing may be guessed then.
    """
    if len(block_ids) == 0:
        if len(slots):
            raise ValueError(f"{len(slots)} slots to load and no block to load them into")
        return []
    first = first_block_index % blocks_per_chunk
    spanned = -(-(first + len(block_ids)) // blocks_per_chunk)
    if spanned != len(slots):
        raise ValueError(
            f"{len(block_ids)} blocks from block {first_block_index} span {spanned} chunks of "
            f"{blocks_per_chunk}, but the job has {len(slots)} slots"
        )
    return _deal(slots, block_ids, first, blocks_per_chunk)


def _deal(
    slots: npt.NDArray[np.int64],
    block_ids: npt.NDArray[np.int64],
    first_block: int,
    blocks_per_chunk: int,
) -> list[Chunk]:
    """Blocks to chunks in order, from `first_block` of the first chunk on."""
    chunks = []
    taken = 0
    for position, slot in enumerate(slots):
        start = first_block if position == 0 else 0
        part = block_ids[taken : taken + blocks_per_chunk - start]
        taken += len(part)
        chunks.append(Chunk(int(slot), start, part, len(part) == blocks_per_chunk))
    return chunks
