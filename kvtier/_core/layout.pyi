# SPDX-License-Identifier: Apache-2.0
"""Copies between accelerator pages and canonical pages, and CRC-32C."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, continued from `value`. Releases the GIL above 4 KiB."""

def crc32c_address(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """CRC-32C of each memory range; GIL released for the whole batch. The caller pins them."""

class PagePlan:
    """How one layer's local page maps to its place in a canonical block.

    Parameters
    ----------
    base : int
        Address of block 0 of this layer in the accelerator's memory.
    block_stride : int
        Bytes between two blocks there.
    num_blocks : int
    local_bytes : int
        Bytes of the local page.
    block_offset : int
        Start of the canonical page inside a canonical block.
    canonical_bytes : int
        Size of the canonical page.
    runs : sequence of (local_offset, canonical_offset, fragment_bytes, count, local_stride,
        canonical_stride)
    num_writers, writer_index : int
        Ranks that hold the same bytes take turns: this rank writes canonical page `i` only when
        ``i % num_writers == writer_index``.

    Raises
    ------
    ValueError
        If a fragment leaves its page, if fragments overlap on either side, or if the runs do not
        cover the local page.
    """

    def __init__(
        self,
        base: int,
        block_stride: int,
        num_blocks: int,
        local_bytes: int,
        block_offset: int,
        canonical_bytes: int,
        runs: Sequence[tuple[int, int, int, int, int, int]],
        num_writers: int = 1,
        writer_index: int = 0,
    ) -> None: ...

class CopyPlan:
    """The page plans of one KV cache group, compiled for batches of blocks.

    Parameters
    ----------
    pages : sequence of PagePlan
    block_bytes : int
        Canonical bytes of one block.
    """

    block_bytes: int
    local_bytes: int
    """Bytes one block moves on this rank."""
    def __init__(self, pages: Sequence[PagePlan], block_bytes: int) -> None: ...
    def store(
        self,
        block_ids: npt.NDArray[np.int64],
        canonical: npt.NDArray[np.uint64],
        page_ids: npt.NDArray[np.int64],
        start: int = 0,
        stop: int | None = None,
    ) -> int:
        """Copy blocks into canonical blocks: bytes moved. GIL released, every index checked first.

        Parameters
        ----------
        block_ids : int64, shape (n,)
            Accelerator blocks.
        canonical : uint64, shape (n,)
            Address of each canonical block in the region.
        page_ids : int64, shape (n,)
            Number of each canonical block, the same on all ranks (``slot * blocks_per_chunk + i``).
        start, stop : int
            Part of the batch, so that a pool can share it.
        """
    def load(
        self,
        block_ids: npt.NDArray[np.int64],
        canonical: npt.NDArray[np.uint64],
        start: int = 0,
        stop: int | None = None,
    ) -> int:
        """Copy canonical blocks into accelerator blocks: bytes moved."""
