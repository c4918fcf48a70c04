# SPDX-License-Identifier: Apache-2.0
"""Which KV cache group each chunk of a job of vLLM belongs to. Owns no state."""

from __future__ import annotations

from collections.abc import Sequence


def chunk_groups(
    sizes: Sequence[int], firsts: Sequence[int], blocks_per_chunk: Sequence[int]
) -> list[int]:
    """Group of each chunk that the blocks of a job span.

    Parameters
    ----------
    sizes, firsts : sequence of int
        Of each group: its blocks, and the index of the first one.
    blocks_per_chunk : sequence of int
    """
    groups = []
    for group, (size, first, per_chunk) in enumerate(
        zip(sizes, firsts, blocks_per_chunk, strict=True)
    ):
        if size:
            groups += [group] * -(-(first % per_chunk + size) // per_chunk)
    return groups
