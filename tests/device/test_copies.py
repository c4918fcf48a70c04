# SPDX-License-Identifier: Apache-2.0
"""Bytes of stores and loads over a device with a memory of its own: fake, and real if there is one.

``benchmarks/cuda_copy.py`` runs these on a GPU, without vLLM.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from tests.device.rig import BLOCKS, LAYOUTS, Rig, make_rig

KINDS = [
    pytest.param("fake", marks=pytest.mark.needs("torch")),
    pytest.param("cuda", marks=[pytest.mark.needs("torch-cuda"), pytest.mark.leaves("CUDA")]),
]

WAYS: dict[str, dict[str, Any]] = {
    "pinned": {},
    "small staging": {"staging_bytes": 1},
    "half pinned": {"piece_bytes": 1, "register_limit": 3},
    "not pinned": {"register_limit": 0},
}
"""Ways for bytes to go: settings of the rig. Staging of one byte has one row."""


def store_some(rig: Rig) -> list[tuple[int, list[int], list[list[int]]]]:
    """Four chunks of each group: (group, slots, blocks of each slot)."""
    parts = []
    for group in range(len(rig.groups)):
        size = rig.blocks_per_chunk
        # Not in order, neither here nor there.
        fresh = rig.fresh_slots(group, 4)
        slots = [fresh[number] for number in (2, 0, 1, 3)]
        blocks = [
            [1 + (7 * (number * size + inside) + group) % (BLOCKS - 1) for inside in range(size)]
            for number in range(len(slots))
        ]
        parts.append((group, slots, blocks))
    return parts


def flat(parts: Any) -> list[tuple[int, list[int], list[int]]]:
    return [(group, slots, list(chain(*blocks))) for group, slots, blocks in parts]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_come_back_to_other_places(kind: str, name: str, way: str) -> None:
    for blocks_per_chunk in (1, 3):
        with make_rig(kind, name, blocks_per_chunk=blocks_per_chunk, **WAYS[way]) as rig:
            assert tuple(rows.whole for rows, _ in rig.engine._groups) == rig.layout.whole
            there_and_back(rig)


def there_and_back(rig: Rig) -> None:
    parts = store_some(rig)
    expected = {
        (group, slot): rig.expected(group, slot, blocks)
        for group, slots, chunks in parts
        for slot, blocks in zip(slots, chunks, strict=True)
    }
    before, between = [rig.local(0, block) for block in range(BLOCKS)], rig.padding()
    seen: dict[tuple[int, int], bytes] = {}
    rig.on_publish = lambda number: seen.update(
        {(group, slot): rig.slot(slot, group) for group, slot in expected}
    )
    (job,) = rig.finish(rig.store(*flat(parts)))
    assert seen == expected  # also when the first of them was published
    assert [rig.local(0, block) for block in range(BLOCKS)] == before
    assert job.bytes == sum(
        page.mapping.local_bytes
        for group, slots, _ in parts
        for page in rig.pages[group]
        for slot in slots
        for inside in range(rig.blocks_per_chunk)
        if (slot // rig.region.geometry.widths[group] * rig.blocks_per_chunk + inside)
        % page.mapping.num_writers
        == page.mapping.writer_index
    )

    rig.on_publish = lambda number: None
    fill_turns(rig, parts)
    wanted = {
        group: [rig.local(group, block) for block in chain(*chunks)] for group, _, chunks in parts
    }
    back = [
        (group, slots, [(block + 11) % (BLOCKS - 1) + 1 for block in blocks])
        for group, slots, blocks in flat(parts)
    ]
    for _, _, blocks in back:
        assert len(set(blocks)) == len(blocks)
    rig.finish(rig.load(*back))
    for group, _, blocks in back:
        assert [rig.local(group, block) for block in blocks] == wanted[group]
    assert rig.padding() == between


def fill_turns(rig: Rig, parts: Any) -> None:
    """Let the other ranks take their turns: blocks that this one has left to them."""
    for group, slots, chunks in parts:
        pages = rig.pages[group]
        if all(page.mapping.num_writers == 1 for page in pages):
            continue
        for slot, blocks in zip(slots, chunks, strict=True):
            whole = b"".join(b"".join(rig.local(group, block)) for block in blocks)
            rig.region.slot_view(slot, len(whole))[:] = whole


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["halves", "part of the heads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_without_its_first_blocks_fails_alone_and_is_zeroed(
    kind: str, name: str, way: str
) -> None:
    with make_rig(kind, name, blocks_per_chunk=4, **WAYS[way]) as rig:
        rig.finish(rig.store((0, [0, 1], range(1, 9))))
        second = rig.expected(0, 1, [11, 12, 13, 14])
        assert any(rig.slot(0))
        # Two blocks of the first chunk are gone, behind a window.
        rig.finish(rig.store((0, [0, 1], [9, 10, 11, 12, 13, 14]), first=2))
        assert rig.published == {0: True, 1: True, 2: False, 3: True}
        assert not any(rig.slot(0))
        assert rig.slot(1) == second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["halves", "part of the heads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_from_inside_a_chunk_touches_nothing_else(kind: str, name: str, way: str) -> None:
    with make_rig(kind, name, blocks_per_chunk=4, **WAYS[way]) as rig:
        rig.finish(rig.store((0, [5, 6], range(1, 9))))
        before = [rig.local(0, block) for block in range(BLOCKS)]
        # From the third block on; the fourth one is a place that nothing reads.
        rig.finish(rig.load((0, [5, 6], [20, 0, 22, 23]), first=2))
        after = [rig.local(0, block) for block in range(BLOCKS)]
        assert [after[block] for block in (20, 22, 23)] == [before[block] for block in (3, 5, 6)]
        for block in (20, 22, 23):
            after[block] = before[block]
        assert after == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_sees_what_the_model_has_queued(kind: str) -> None:
    for name in ("halves", "part of the heads"):
        with make_rig(kind, name) as rig:
            rig.model_writes(0, [1, 2], 77)
            rig.finish(rig.store((0, [0, 1], [1, 2])))
            rig.model_ends()
            assert set(rig.local(0, 1)[0]) == {77}
            assert rig.slot(0) == rig.expected(0, 0, [1])
            assert rig.slot(1) == rig.expected(0, 1, [2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_leaves_blocks_alone_that_queued_work_reads(kind: str) -> None:
    for name in ("halves", "part of the heads"):
        with make_rig(kind, name) as rig:
            rig.finish(rig.store((0, [0, 1], [1, 2])))
            old = [tensor[[20, 21]].clone() for tensor in rig.tensors[0]]
            seen = rig.model_reads(0, [20, 21])
            rig.finish(rig.load((0, [0, 1], [20, 21])))
            rig.model_ends()
            for one, other in zip(old, seen, strict=True):
                assert one.equal(other)
            assert [rig.local(0, 20), rig.local(0, 21)] == [rig.local(0, 1), rig.local(0, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_many_jobs_in_a_row(kind: str) -> None:
    for name in ("halves", "part of the heads"):
        with make_rig(kind, name, staging_bytes=1) as rig:
            wanted = {}
            for turn in range(6):
                slots = [(turn + number) % 4 + 4 * (turn % 3) for number in range(4)]
                blocks = [turn * 4 + number + 1 for number in range(4)]
                wanted |= zip(slots, blocks, strict=True)
                rig.finish(rig.store((0, slots, blocks)))
            stores = [rig.store((0, [0, 1], [30, 31])), rig.store((0, [2, 3], [32, 33]))]
            loads = [rig.load((0, [8, 9], [36, 37])), rig.load((0, [10, 11], [38, 39]))]
            rig.finish(*stores, *loads)
            wanted |= {0: 30, 1: 31, 2: 32, 3: 33}
            for slot, block in wanted.items():
                assert rig.slot(slot) == rig.expected(0, slot, [block])
            for block, slot in ((36, 8), (37, 9), (38, 10), (39, 11)):
                assert rig.local(0, block) == rig.local(0, wanted[slot])


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_may_come_from_inference_mode(kind: str) -> None:
    for name in ("halves", "part of the heads"):
        with contextlib.ExitStack() as stack:
            with torch.inference_mode():
                rig = stack.enter_context(make_rig(kind, name))
            there_and_back(rig)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_without_blocks_ends(kind: str) -> None:
    with make_rig(kind, blocks_per_chunk=2) as rig:
        rig.finish(rig.store((0, [], [])), rig.load((0, [0], [0, 0])))
