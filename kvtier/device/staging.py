# SPDX-License-Identifier: Apache-2.0
"""How the blocks of one group stand in a staging buffer, one row a block.

Two kinds of row. Where this rank writes whole canonical blocks (one rank, or ranks that take turns)
a row *is* the canonical block: the accelerator translates, and a chunk goes to or from its slot in
one copy. Elsewhere a row holds the rank's pages as they are, and the host translates between rows
and slots with the same plans as for accelerators in host memory. Pure; owns no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvtier._core.layout import CopyPlan, PagePlan
from kvtier._core.runs import Loops, Run, compile_runs
from kvtier.layout.plan import LayerPage
from kvtier.types import GroupGeometry

MAX_WIDTH = 8
"""Bytes of the widest element that gathers and scatters move."""

MAX_LOOPS = 4
"""Launches a page up to which the accelerator translates; all plain layouts need one or two."""


class Move(msgspec.Struct, frozen=True):
    """One gather or scatter: a part of one layer's pages, for any number of blocks."""

    page: int
    """Index of the layer's page in the group."""
    local_offset: int
    row_offset: int
    counts: tuple[int, ...]
    """Of the loops around the fragment, the outer one first; those of one turn are left out."""
    local_strides: tuple[int, ...]
    row_strides: tuple[int, ...]
    fragment_bytes: int
    width: int
    """Bytes of one element, which everything above is a multiple of."""


class Rows(msgspec.Struct, frozen=True):
    """Layout of the rows of one group."""

    row_bytes: int
    whole: bool
    """Whether a row is the canonical block."""
    num_writers: int
    writer_index: int
    """Of all pages, where rows are whole: whose turn a block is."""
    moves: tuple[Move, ...]
    page_offsets: tuple[int, ...]
    """Where each page stands in a row that is not whole."""


def plan_rows(group: GroupGeometry, pages: Sequence[LayerPage]) -> Rows:
    """Rows of the group on this rank; `pages` have been proven by ``compile_plan``."""
    places = {page.layer: page.offset_bytes for page in group.pages}
    loops = [compile_runs(page.mapping.runs) for page in pages]
    writers = {(page.mapping.num_writers, page.mapping.writer_index) for page in pages}
    # No byte has two fragments, so as many bytes as the block has are all of them.
    whole = (
        sum(page.mapping.local_bytes for page in pages) == group.block_bytes
        and len(writers) == 1
        and all(len(parts) <= MAX_LOOPS for parts in loops)
    )
    if whole:
        num_writers, writer_index = writers.pop()
        moves = [
            _move(index, page, loop, places[page.layer], group.block_bytes)
            for index, page in enumerate(pages)
            for loop in loops[index]
        ]
        return Rows(group.block_bytes, True, num_writers, writer_index, tuple(moves), ())
    offsets = []
    end = 0
    for page in pages:
        offsets.append(end)
        end += -(-page.mapping.local_bytes // MAX_WIDTH) * MAX_WIDTH
    moves = [
        _move(index, page, Loops(page.mapping.local_bytes, 0, 0, 1, 0, 0), offsets[index], end)
        for index, page in enumerate(pages)
    ]
    return Rows(end, False, 1, 0, tuple(moves), tuple(offsets))


def _move(index: int, page: LayerPage, loop: Loops, row_start: int, row_bytes: int) -> Move:
    counted = [
        turns
        for turns in (
            (loop.outer, loop.outer_local, loop.outer_canonical),
            (loop.inner, loop.inner_local, loop.inner_canonical),
        )
        if turns[0] > 1
    ]
    counts, local_strides, row_strides = zip(*counted, strict=True) if counted else ((), (), ())
    row_offset = row_start + loop.canonical_offset
    width = math.gcd(
        MAX_WIDTH,
        loop.fragment_bytes,
        loop.local_offset,
        row_offset,
        row_bytes,
        page.base,
        page.block_stride,
        *local_strides,
        *row_strides,
    )
    return Move(
        page=index,
        local_offset=loop.local_offset,
        row_offset=row_offset,
        counts=counts,
        local_strides=local_strides,
        row_strides=row_strides,
        fragment_bytes=loop.fragment_bytes,
        width=width,
    )


def host_plan(
    rows: Rows,
    group: GroupGeometry,
    pages: Sequence[LayerPage],
    base: int,
    num_rows: int,
    region: tuple[int, int, int, int],
) -> CopyPlan:
    """Copies between rows in host memory at `base` and the slots of `region` (``Region.area``)."""
    if rows.whole:
        size = rows.row_bytes
        run = Run(0, 0, size, 1, size, size)
        plans = [PagePlan(base, size, num_rows, size, 0, size, (run,))]
        return CopyPlan(plans, group.block_bytes, region=region)
    places = {page.layer: page.offset_bytes for page in group.pages}
    return CopyPlan(
        [
            PagePlan(
                base + offset,
                rows.row_bytes,
                num_rows,
                page.mapping.local_bytes,
                places[page.layer],
                page.mapping.canonical_bytes,
                page.mapping.runs,
                page.mapping.num_writers,
                page.mapping.writer_index,
            )
            for page, offset in zip(pages, rows.page_offsets, strict=True)
        ],
        group.block_bytes,
        region=region,
    )
