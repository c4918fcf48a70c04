# SPDX-License-Identifier: Apache-2.0
"""Copies between accelerator pages and canonical pages, and CRC-32C."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvtier._core.runs import Run

def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, continued from `value`. Releases the GIL above 4 KiB."""

def crc32c_tables(data: Buffer, value: int = 0) -> int:
    """The same by tables: what runs on processors without the instruction."""

CRC32C_HARDWARE: bool
"""Whether ``crc32c`` uses the processor's instruction."""

def crc32c_address(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """CRC-32C of each memory range; GIL released for the whole batch. The caller pins them."""

STREAM_BYTES: int
"""8 MiB, the default of ``CopyPlan.stream_bytes``."""

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
    owner : object, optional
        Whatever keeps the accelerator's memory mapped; held as long as the plan.

    Raises
    ------
    ValueError
        If a fragment leaves its page, if fragments overlap on either side, or if the runs do not
        cover the local page.
    """

    base: int
    block_stride: int
    num_blocks: int
    local_bytes: int
    block_offset: int
    canonical_bytes: int
    runs: tuple[Run, ...]
    num_writers: int
    writer_index: int
    owner: Any

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
        owner: Any = None,
    ) -> None: ...

class CopyPlan:
    """The page plans of one KV cache group, compiled for batches of blocks.

    Every call checks its whole batch, copies the indices it was given, and only then moves bytes
    (GIL released); what it then does cannot fail. No batch may write one target twice.

    Parameters
    ----------
    pages : sequence of PagePlan
        Several may share a canonical page (K and V in tensors of their own), with fragments apart.
    block_bytes : int
        Canonical bytes of one block.
    region : (address of slot 0, slab bytes, number of slabs, bytes between chunks), optional
        Canonical blocks must lie in it, at a multiple of `block_bytes` in their slot. Without it
        the caller answers for the addresses.
    owner : object, optional
        Whatever keeps the region mapped.
    stream_bytes : int
        Batches of this many bytes or more are written past the caches, which they would only
        flush: half as fast again as ``memcpy`` there, while smaller ones are read back from a cache
        by whoever wants them next (both ways are even at about 8 MiB).
    vectors : bool
        False: the portable loops, which run where the processor lacks AVX2 (for tests).

    Raises
    ------
    ValueError
        If canonical pages leave the block or overlap, or layers share accelerator memory.
    """

    block_bytes: int
    local_bytes: int
    """Bytes one block moves on this rank."""
    num_blocks: int
    """Accelerator blocks: the fewest over the layers."""
    stream_bytes: int
    plans: tuple[PagePlan, ...]
    owner: Any
    def __init__(
        self,
        pages: Sequence[PagePlan],
        block_bytes: int,
        region: tuple[int, int, int, int] | None = None,
        owner: Any = None,
        stream_bytes: int = STREAM_BYTES,
        vectors: bool = True,
    ) -> None: ...
    def store(
        self,
        block_ids: npt.NDArray[np.int64],
        canonical: npt.NDArray[np.uint64],
        page_ids: npt.NDArray[np.int64],
        start: int = 0,
        stop: int | None = None,
    ) -> int:
        """Copy blocks into canonical blocks: bytes moved by this rank.

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

        Raises
        ------
        IndexError
            A block id, address or page id out of range; nothing was written.
        ValueError
            Arrays of different lengths or types, or one canonical block twice.
        """
    def load(
        self,
        block_ids: npt.NDArray[np.int64],
        canonical: npt.NDArray[np.uint64],
        start: int = 0,
        stop: int | None = None,
    ) -> int:
        """Copy canonical blocks into accelerator blocks: bytes moved. Raises as ``store``."""
    def zero(self, canonical: npt.NDArray[np.uint64], page_ids: npt.NDArray[np.int64]) -> int:
        """Zero this rank's part of canonical blocks it was not given: bytes zeroed.

        When all ranks have done so, the blocks are zero everywhere. Raises as ``store``.
        """
    def check(
        self,
        block_ids: npt.NDArray[np.int64],
        canonical: npt.NDArray[np.uint64],
        page_ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Raise what ``store`` (with page ids) or ``load`` (without) would, and move nothing."""
