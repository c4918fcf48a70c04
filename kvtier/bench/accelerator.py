# SPDX-License-Identifier: Apache-2.0
"""The stand-in accelerator: a paged KV buffer of limited size, and the pool that owns its blocks.

The pool keeps a prefix cache as model servers do: a block that nobody uses keeps its content, and
can be found by its hash, until it is handed out again; the one that was freed first goes first.
Owned by the scheduler's thread; the copy thread touches only the bytes of blocks that are in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvtier.bench.pattern import Shape, Words
from kvtier.errors import InternalError


class PagedBuffer:
    """The bytes: for each layer one page a block, as attention kernels want them.

    Parameters
    ----------
    shape : Shape
    num_blocks : int
    """

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.words: Words = np.zeros(
            (shape.layers, num_blocks, shape.page_bytes // 8), dtype=np.uint64
        )
        """uint64, shape (layers, blocks, words of a page)."""
        # Fault all pages in now: the first write would cost twenty times the later ones.
        self.words.fill(0)

    def block(self, block: int) -> Words:
        """View of one block, shape (layers, words of a page)."""
        view: Words = self.words[:, block]
        return view


class BlockPool:
    """Which block is in use, and which block still holds what.

    Every block is either in use (a count of users above 0) or in the free queue; a block with a
    hash can be found in both cases.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a user, with content or without."""
        return len(self._free)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `hashes` that is still here. Takes no use of them."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more user for each block."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def take(self, cached: Sequence[int], count: int) -> list[int] | None:
        """One more user for each of `cached`, and `count` blocks without content; or None and no
        change if there are not enough."""
        idle = sum(1 for block in cached if self._users[block] == 0)
        if count > len(self._free) - idle:
            return None
        self.acquire(cached)
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            old = self._hash_of[block]
            if old is not None:
                del self._by_hash[old]
                self._hash_of[block] = None
            self._users[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, block_hash: bytes) -> None:
        """The block now holds all bytes of `block_hash`; the first holder of a hash is found."""
        if self._users[block] == 0:
            raise InternalError(f"block {block} was given a hash while nobody uses it")
        if block_hash not in self._by_hash and self._hash_of[block] is None:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each block, in order: the first one given is handed out first."""
        for block in blocks:
            if self._users[block] == 0:
                raise InternalError(f"block {block} was released once too often")
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None

    def check(self) -> None:
        """Walk everything; InternalError on the first thing that does not hold (tests, end)."""
        for block in range(self.num_blocks):
            if (self._users[block] == 0) != (block in self._free):
                raise InternalError(
                    f"block {block}: {self._users[block]} users, free queue differs"
                )
            block_hash = self._hash_of[block]
            if block_hash is not None and self._by_hash.get(block_hash) != block:
                raise InternalError(f"block {block} is not found under its hash")
        if len(self._by_hash) != sum(1 for block_hash in self._hash_of if block_hash is not None):
            raise InternalError("hashes without a block")
