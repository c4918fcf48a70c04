# SPDX-License-Identifier: Apache-2.0
"""Proofs about runs, and their compilation to the nested loops that the copy kernel executes.

Owns no state. Used when a plan is made, never per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

MAX_FRAGMENTS = 1 << 24
"""Fragments of one page; above it the runs are surely wrong, and their proof would eat the host."""

MAX_ADDRESS = 1 << 56
"""No process maps memory above it; sums of addresses and offsets below it never overflow."""


class Run(NamedTuple):
    """Fragments of equal size, at one stride on each side; all in bytes."""

    local_offset: int
    canonical_offset: int
    fragment_bytes: int
    fragments: int
    local_stride: int
    canonical_stride: int


class Loops(NamedTuple):
    """One fragment size under two nested loops: what the kernel executes."""

    fragment_bytes: int
    local_offset: int
    canonical_offset: int
    inner: int
    inner_local: int
    inner_canonical: int
    outer: int = 1
    outer_local: int = 0
    outer_canonical: int = 0


class Page(Protocol):
    """The part of ``PagePlan`` that the proof of a whole block reads."""

    base: int
    block_stride: int
    num_blocks: int
    local_bytes: int
    block_offset: int
    canonical_bytes: int
    runs: Sequence[Run]


Bounds = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def local_fragments(runs: Iterable[Run]) -> Bounds:
    """Starts and ends of all fragments in the local page, sorted by start."""
    return _sorted_bounds(
        [(r.local_offset, r.local_stride, r.fragments, r.fragment_bytes) for r in runs]
    )


def canonical_fragments(runs: Iterable[Run]) -> Bounds:
    """Starts and ends of all fragments in the canonical page, sorted by start."""
    return _sorted_bounds(
        [(r.canonical_offset, r.canonical_stride, r.fragments, r.fragment_bytes) for r in runs]
    )


def _sorted_bounds(parts: Sequence[tuple[int, int, int, int]]) -> Bounds:
    start = np.concatenate(
        [offset + np.arange(count, dtype=np.int64) * stride for offset, stride, count, _ in parts]
    )
    size = np.concatenate([np.full(count, size, dtype=np.int64) for _, _, count, size in parts])
    order = np.argsort(start, kind="stable")
    return start[order], (start + size)[order]


def refuse_overlap(bounds: Bounds, where: str) -> None:
    """ValueError if two fragments share a byte."""
    start, end = bounds
    touching = np.flatnonzero(end[:-1] > start[1:])
    if touching.size:
        i = int(touching[0])
        raise ValueError(
            f"fragments overlap in the {where}: [{start[i]}, {end[i]}) and "
            f"[{start[i + 1]}, {end[i + 1]})"
        )


def refuse_gap(bounds: Bounds, size: int, where: str) -> None:
    """ValueError if fragments that do not overlap leave a byte of [0, `size`) out."""
    start, end = bounds
    before = np.concatenate([[0], end])
    after = np.concatenate([start, [size]])
    gaps = np.flatnonzero(before != after)
    if gaps.size:
        i = int(gaps[0])
        raise ValueError(f"no fragment covers [{before[i]}, {after[i]}) of the {where}")


def check_page(
    base: int,
    block_stride: int,
    num_blocks: int,
    local_bytes: int,
    block_offset: int,
    canonical_bytes: int,
) -> None:
    """ValueError if the numbers of a page cannot be right, whatever its runs are."""
    if local_bytes < 1 or canonical_bytes < 1:
        raise ValueError(f"empty page: {local_bytes} local, {canonical_bytes} canonical bytes")
    if block_offset < 0:
        raise ValueError(f"canonical page at offset {block_offset} of its block")
    if num_blocks < 1:
        raise ValueError(f"{num_blocks} accelerator blocks")
    if block_stride < local_bytes:
        raise ValueError(f"block stride {block_stride} is less than the page, {local_bytes} bytes")
    if base < 1 or base + num_blocks * block_stride > MAX_ADDRESS:
        raise ValueError(f"{num_blocks} blocks at address {base} leave the address space")


def prove_runs(runs: Sequence[Run], local_bytes: int, canonical_bytes: int) -> None:
    """ValueError unless fragments lie in their pages, overlap on neither side, and cover the local
    page."""
    if not runs:
        raise ValueError("no runs")
    if sum(run.fragments for run in runs) > MAX_FRAGMENTS:
        raise ValueError(f"more than {MAX_FRAGMENTS} fragments")
    for run in runs:
        if run.fragment_bytes < 1 or run.fragments < 1:
            raise ValueError(f"empty run {tuple(run)}")
        for name, offset, stride, limit in (
            ("local", run.local_offset, run.local_stride, local_bytes),
            ("canonical", run.canonical_offset, run.canonical_stride, canonical_bytes),
        ):
            last = offset + (run.fragments - 1) * stride
            if min(offset, last) < 0 or max(offset, last) + run.fragment_bytes > limit:
                raise ValueError(f"run {tuple(run)} leaves the {name} page of {limit} bytes")
    local = local_fragments(runs)
    refuse_overlap(local, "local page")
    refuse_gap(local, local_bytes, "local page")
    refuse_overlap(canonical_fragments(runs), "canonical page")


def prove_pages(pages: Sequence[Page], block_bytes: int) -> None:
    """ValueError unless pages lie in the block and no byte on either side has two pages."""
    places: dict[tuple[int, int], list[Page]] = {}
    for page in pages:
        end = page.block_offset + page.canonical_bytes
        if end > block_bytes:
            raise ValueError(
                f"canonical page [{page.block_offset}, {end}) leaves the block of "
                f"{block_bytes} bytes"
            )
        places.setdefault((page.block_offset, end), []).append(page)
    before = 0
    for (start, end), parts in sorted(places.items(), key=lambda place: place[0]):
        if start < before:
            raise ValueError(f"the canonical page [{start}, {end}) overlaps the one before it")
        before = end
        if len(parts) > 1:  # K and V in tensors of their own fill one canonical page together
            runs = [run for page in parts for run in page.runs]
            refuse_overlap(canonical_fragments(runs), "canonical page")
    _prove_local_apart(pages)


def _prove_local_apart(pages: Sequence[Page]) -> None:
    """Accelerator pages are apart, or interleave block by block with one stride."""
    clusters: list[tuple[int, list[Page]]] = []
    for page in sorted(pages, key=lambda page: page.base):
        end = page.base + (page.num_blocks - 1) * page.block_stride + page.local_bytes
        if clusters and page.base < clusters[-1][0]:
            last_end, members = clusters[-1]
            clusters[-1] = (max(last_end, end), [*members, page])
        else:
            clusters.append((end, [page]))
    for _, members in clusters:
        stride = members[0].block_stride
        if len(members) > 1 and any(page.block_stride != stride for page in members):
            raise ValueError("pages with different block strides overlap in accelerator memory")
        ring = sorted((page.base % stride, page.local_bytes) for page in members)
        nexts = [start for start, _ in ring[1:]] + [ring[0][0] + stride]
        for (start, size), following in zip(ring, nexts, strict=True):
            if start + size > following:
                raise ValueError("two pages share bytes of accelerator memory")


def compile_runs(runs: Sequence[Run]) -> list[Loops]:
    """Few nested loops that copy what `runs` say: neighbours joined, equal runs made a loop."""
    return _nest(_join(runs))


def _join(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        if run.fragments > 1 and run.local_stride == run.fragment_bytes == run.canonical_stride:
            run = run._replace(fragment_bytes=run.fragment_bytes * run.fragments, fragments=1)
        if run.fragments == 1:
            run = run._replace(local_stride=0, canonical_stride=0)
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.fragments == 1
                and last.local_offset + last.fragment_bytes == run.local_offset
                and last.canonical_offset + last.fragment_bytes == run.canonical_offset
            ):
                joined[-1] = last._replace(fragment_bytes=last.fragment_bytes + run.fragment_bytes)
                continue
        joined.append(run)
    return joined


def _nest(runs: Sequence[Run]) -> list[Loops]:
    nested: list[Loops] = []
    last: Any = None
    for run in runs:
        if nested and run[2:] == last[2:]:
            step = (
                run.local_offset - last.local_offset,
                run.canonical_offset - last.canonical_offset,
            )
            top = nested[-1]
            if top.outer == 1 or (top.outer_local, top.outer_canonical) == step:
                nested[-1] = top._replace(
                    outer=top.outer + 1, outer_local=step[0], outer_canonical=step[1]
                )
                last = run
                continue
        nested.append(
            Loops(
                run.fragment_bytes,
                run.local_offset,
                run.canonical_offset,
                run.fragments,
                run.local_stride,
                run.canonical_stride,
            )
        )
        last = run
    return nested


def prove_loops(runs: Sequence[Run], loops: Sequence[Loops]) -> None:
    """ValueError unless `loops` move every byte to where `runs` say: guards the compilation."""
    given = _pieces(
        [
            Loops(
                r.fragment_bytes,
                r.local_offset,
                r.canonical_offset,
                r.fragments,
                r.local_stride,
                r.canonical_stride,
            )
            for r in runs
        ]
    )
    compiled = _pieces(loops)
    if not np.array_equal(given, compiled):
        raise ValueError("compiled loops move other bytes than the runs")


def _pieces(loops: Sequence[Loops]) -> npt.NDArray[np.int64]:
    """(local, canonical, bytes) rows in local order, neighbours on both sides joined."""
    rows = []
    for size, local, canonical, inner, inner_l, inner_c, outer, outer_l, outer_c in loops:
        j = np.arange(outer, dtype=np.int64)[:, None]
        i = np.arange(inner, dtype=np.int64)[None, :]
        piece = np.empty((outer * inner, 3), dtype=np.int64)
        piece[:, 0] = (local + j * outer_l + i * inner_l).ravel()
        piece[:, 1] = (canonical + j * outer_c + i * inner_c).ravel()
        piece[:, 2] = size
        rows.append(piece)
    table = np.concatenate(rows)
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = table[:-1, :2] + table[:-1, 2:]
    first = np.flatnonzero(np.concatenate([[True], (ends != table[1:, :2]).any(axis=1)]))
    joined = table[first]
    joined[:, 2] = np.add.reduceat(table[:, 2], first)
    return joined
