# SPDX-License-Identifier: Apache-2.0
"""The block pool against a model of a few lines."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.bench.accelerator import BlockPool, PagedBuffer
from kvtier.errors import InternalError
from tests.bench.helpers import SHAPE

BLOCKS = 8


def name(number: int) -> bytes:
    return bytes([number]) * 16


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of free blocks in the order they go, users, and contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.free = list(range(BLOCKS))
        self.users = [0] * BLOCKS
        self.content: dict[int, bytes] = {}
        self.held: list[list[int]] = []

    @rule(start=st.integers(0, 5), length=st.integers(1, 4), more=st.integers(0, 4))
    def admit(self, start: int, length: int, more: int) -> None:
        hashes = [name(start + i) for i in range(length)]
        by_hash = {content: block for block, content in self.content.items()}
        expected = []
        for block_hash in hashes:
            if block_hash not in by_hash:
                break
            expected.append(by_hash[block_hash])
        cached = self.pool.match(hashes)
        assert cached == expected
        left = [block for block in self.free if block not in cached]
        taken = self.pool.take(cached, more)
        if more > len(left):
            assert taken is None
            return
        assert taken == left[:more]
        for block in cached:
            self.users[block] += 1
        for block in taken:
            self.users[block] = 1
            self.content.pop(block, None)
        self.free = left[more:]
        self.held.append(cached + taken)
        for i, block in enumerate(taken, len(cached)):
            block_hash = name(start + i)
            self.pool.register(block, block_hash)
            if block_hash not in self.content.values():
                self.content[block] = block_hash

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if not self.held:
            return
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        order = list(reversed(blocks))
        self.pool.release(order)
        for block in order:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_wrong_use_trips() -> None:
    pool = BlockPool(2)
    with pytest.raises(InternalError, match="once too often"):
        pool.release([0])
    with pytest.raises(InternalError, match="nobody uses"):
        pool.register(0, name(1))
    blocks = pool.take([], 1)
    assert blocks is not None
    pool.register(blocks[0], name(1))
    pool._by_hash.clear()
    with pytest.raises(InternalError, match="not found under its hash"):
        pool.check()


def test_blocks_of_the_buffer_do_not_overlap() -> None:
    buffer = PagedBuffer(SHAPE, 3)
    buffer.block(1)[:] = 5
    assert not buffer.block(0).any()
    assert not buffer.block(2).any()
    assert buffer.words.nbytes == 3 * SHAPE.block_bytes
