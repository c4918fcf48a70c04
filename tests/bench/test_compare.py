# SPDX-License-Identifier: Apache-2.0
"""The comparison of loaded bytes in a real engine, over plain memory and a manager and worker that
do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier._core.runs import Run
from kvtier.bench.copies import CopyCounters
from kvtier.bench.drivers.compare import Comparison
from kvtier.errors import InternalError
from kvtier.layout.pages import PageMapping
from kvtier.layout.plan import LayerPage
from kvtier.types import make_key

BLOCKS, PAGE, STRIDE = 12, 64, 80
"""A page of 64 bytes and 16 of padding."""
LAYERS = 2


class Place:
    """vLLM's object for the places of a job; what the manager makes of some keys."""


class World:
    """Device memory of two groups, and the two objects that are watched."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.memory = rng.integers(0, 256, (2, LAYERS, BLOCKS, STRIDE), dtype=np.uint8)
        self.done: list[int] = []
        self.manager = SimpleNamespace(prepare_store=self._prepare, prepare_load=lambda *_: Place())
        self.worker = SimpleNamespace(
            submit_store=lambda *_: True, submit_load=lambda *_: True, get_finished=self._finished
        )
        mapping = PageMapping(PAGE, PAGE, (Run(0, 0, PAGE, 1, PAGE, PAGE),))
        pages: Any = SimpleNamespace(
            groups=[SimpleNamespace(blocks_per_chunk=2), SimpleNamespace(blocks_per_chunk=1)],
            layer_pages=[
                [
                    LayerPage(f"{layer}", part.ctypes.data, STRIDE, BLOCKS, mapping, part)
                    for layer, part in enumerate(group)
                ]
                for group in self.memory
            ],
        )
        self.comparison = Comparison(self.manager, self.worker, pages)
        self.counters = CopyCounters()
        self.comparison.start(self.counters, keep=False)

    def _prepare(self, keys: list[bytes], _context: object) -> object:
        return SimpleNamespace(store_spec=Place(), keys_to_store=keys)

    def _finished(self) -> list[SimpleNamespace]:
        done, self.done = self.done, []
        return [SimpleNamespace(job_id=job) for job in done]

    def store(self, keys: list[bytes], blocks: SimpleNamespace) -> None:
        self.worker.submit_store(0, blocks, self.manager.prepare_store(keys, None).store_spec)

    def load(self, keys: list[bytes], blocks: SimpleNamespace, job: int = 1) -> tuple[int, int]:
        """(bytes, blocks that differ) of the load, which ends at once."""
        before = self.counters.verified_bytes, self.counters.differing_blocks
        self.worker.submit_load(job, self.manager.prepare_load(keys, None), blocks)
        self.done.append(job)
        self.worker.get_finished()
        return (
            self.counters.verified_bytes - before[0],
            self.counters.differing_blocks - before[1],
        )


def blocks(first: list[int], second: list[int], index: int = 0) -> SimpleNamespace:
    """Blocks of both groups; `index` is that of the first one of the first group."""
    return SimpleNamespace(
        block_ids=np.array(first + second),
        group_sizes=[len(first), len(second)],
        block_indices=[index, 0],
    )


A, B = (make_key(bytes([number]) * 32) for number in (1, 2))
C, D = (make_key(bytes([number]) * 32, 1) for number in (1, 2))
FROM, TO = blocks([0, 1, 2, 3], [0, 1]), blocks([6, 7, 8, 9], [6, 7])


@pytest.fixture
def world() -> World:
    """Two chunks of each group are stored, and their bytes stand in the blocks of a load."""
    one = World()
    one.store([A, B, C, D], FROM)
    one.memory[0][:, 6:10] = one.memory[0][:, 0:4]
    one.memory[1][:, 6:8] = one.memory[1][:, 0:2]
    return one


def test_the_bytes_that_were_stored_are_found_wherever_they_come_to(world: World) -> None:
    world.memory[0][:, :, PAGE:] = 0  # padding belongs to nobody
    assert world.load([A, B, C, D], TO) == (6 * LAYERS * PAGE, 0)
    # From the second block of a chunk on; one group alone.
    assert world.load([A, B], blocks([7, 8, 9], [], index=1)) == (3 * LAYERS * PAGE, 0)
    assert world.comparison.seconds > 0


def _flip(memory: Any) -> None:
    memory[1][1, 7, PAGE - 1] ^= 1


def _layers(memory: Any) -> None:
    memory[0][:, 6] = memory[0][::-1, 6].copy()


def _shift(memory: Any) -> None:
    memory[0][:, 7:10] = memory[0][:, 6:9].copy()


def _chunk(memory: Any) -> None:
    memory[0][:, 6:8] = memory[0][:, 8:10]


@pytest.mark.parametrize(("damage", "differ"), [(_flip, 1), (_layers, 1), (_shift, 3), (_chunk, 2)])
def test_what_differs_is_counted(world: World, damage: Callable[[Any], None], differ: int) -> None:
    damage(world.memory)
    assert world.load([A, B, C, D], TO) == (6 * LAYERS * PAGE, differ)


def test_a_load_is_looked_at_when_it_has_ended(world: World) -> None:
    world.memory[0][:, 6:10] = 0
    world.worker.submit_load(1, world.manager.prepare_load([A, B], None), blocks([6, 7, 8, 9], []))
    world.worker.get_finished()
    assert world.counters.verified_bytes == 0
    world.memory[0][:, 6:10] = world.memory[0][:, 0:4]
    world.done.append(1)
    world.worker.get_finished()
    assert (world.counters.verified_bytes, world.counters.differing_blocks) == (
        4 * LAYERS * PAGE,
        0,
    )


def test_a_chunk_that_was_computed_twice_may_be_either(world: World) -> None:
    world.memory[0][:, 0:4] ^= 1
    world.store([A, B], blocks([0, 1, 2, 3], []))
    assert world.load([A, B], blocks([0, 1, 2, 3], []))[1] == 0
    assert world.load([A, B], blocks([6, 7, 8, 9], []))[1] == 0


def test_what_nobody_stored_in_this_run_differs(world: World) -> None:
    world.comparison.start(world.counters, keep=True)
    assert world.load([A, B, C, D], TO)[1] == 0
    world.comparison.start(world.counters, keep=False)
    assert world.load([A, B, C, D], TO)[1] == 6
    with pytest.raises(InternalError, match="has not prepared"):
        world.worker.submit_load(2, Place(), TO)
