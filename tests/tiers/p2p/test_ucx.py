# SPDX-License-Identifier: Apache-2.0
"""The UCX transport by itself: what it makes of the chunks of a read."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.p2p.ucx import joined

UNIT = 64


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 2)),
        min_size=1,
        max_size=12,
        unique_by=lambda one: one[0],
    )
)
def test_neighbours_are_one_transfer(chunks: list[tuple[int, int, int]]) -> None:
    """Each byte goes where it went, in order; and there is no transfer that could be longer."""
    arrays = [np.array(one, dtype=np.int64) * UNIT for one in zip(*chunks, strict=True)]
    local, remote, lengths = joined(*arrays)

    def moves(*of: np.ndarray) -> list[tuple[int, int]]:
        return [
            (here + i, there + i)
            for here, there, length in zip(*(one.tolist() for one in of), strict=True)
            for i in range(0, length, UNIT)
        ]

    assert moves(local, remote, lengths) == moves(*arrays)
    ends = (local + lengths)[:-1], (remote + lengths)[:-1]
    assert not ((ends[0] == local[1:]) & (ends[1] == remote[1:])).any()
