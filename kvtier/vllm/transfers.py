# SPDX-License-Identifier: Apache-2.0
"""What travels from the manager to the workers: which slots a job touches, and its numbers.

Pickled by vLLM with the scheduler's output. Every worker gets the same object.

Transfer numbers are dense and start at 0: a store uses one for each chunk, so that one chunk can
fail alone, and a load uses one in all. A worker publishes each number when its copy has ended;
since a copy cannot be taken back, this is the only proof that it no longer runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LoadStoreSpec


class SlotTransfer(LoadStoreSpec):
    """Slots of one job, ordered by KV cache group and then by chunk.

    Parameters
    ----------
    slots : int64, shape (n,)
    groups : sequence of int
        KV cache group of each slot, ascending as vLLM orders its groups.
    first_transfer : int
        Number of the first chunk.
    num_transfers : int
        `n` for a store, 1 for a load, 0 for a job without slots.
    """

    def __init__(
        self,
        slots: npt.NDArray[np.int64],
        groups: Sequence[int],
        first_transfer: int,
        num_transfers: int,
    ) -> None:
        self.slots = slots
        self.groups = tuple(groups)
        self.first_transfer = first_transfer
        self.num_transfers = num_transfers

    def __repr__(self) -> str:
        return (
            f"SlotTransfer(slots={self.slots.tolist()}, first_transfer={self.first_transfer}, "
            f"num_transfers={self.num_transfers})"
        )
