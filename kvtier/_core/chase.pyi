# SPDX-License-Identifier: Apache-2.0
"""Dependent random reads: the floor that `benchmarks/index.py` compares the index with."""

import numpy as np
import numpy.typing as npt

def chase(lines: npt.NDArray[np.uint64], reads: int, start: int) -> int:
    """Follow `lines` (64 bytes each, the first word leads on) for `reads` reads: the last index."""
