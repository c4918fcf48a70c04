# SPDX-License-Identifier: Apache-2.0
"""Atomic 64-bit words in shared memory, each with one writer."""

from typing_extensions import Buffer

class Words:
    """Signed 64-bit words of a buffer, for one writer and any readers in other processes.

    Parameters
    ----------
    buffer : writable, contiguous buffer
        Aligned to 8 bytes; its length a multiple of 8. Kept alive by this object.

    Raises
    ------
    ValueError
        If the buffer is not aligned or has a part of a word.
    """

    def __init__(self, buffer: Buffer) -> None: ...
    def __len__(self) -> int: ...
    def load(self, index: int) -> int:
        """Word `index`, acquire: what its writer wrote before it is visible too. IndexError."""
    def store(self, index: int, value: int) -> None:
        """Set word `index`, release: what this thread wrote before it is visible first."""
