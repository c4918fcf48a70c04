# SPDX-License-Identifier: Apache-2.0
"""Lines of the ranks: finished and failed transfers, in any order, also when nobody reads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._core.words import Words
from kvtier.errors import ConfigError, InternalError
from kvtier.host import numa, space
from kvtier.host import region as region_module
from kvtier.host.header import LINE_BYTES, RING_ENTRIES, FailureReader, RankLine
from kvtier.host.region import Region
from tests.host.child import geometry


@pytest.fixture
def region(region_dir: str) -> Iterator[Region]:
    with Region.create("r", geometry(), {"model": "m"}, 2, directory=region_dir) as region:
        region.sign(0)
        region.sign(1)
        yield region


def test_finished_is_contiguous(region: Region) -> None:
    for transfer, finished in [(1, -1), (3, -1), (0, 1), (2, 3), (4, 4)]:
        region.publish(0, transfer)
        assert region.finished(0) == finished
    assert region.finished(1) == -1
    assert region.finished_by_all() == -1
    region.publish(1, 0)
    assert region.finished_by_all() == 0


@pytest.mark.parametrize("transfer", [0, 2, -1])
def test_transfer_finishes_once(region: Region, transfer: int) -> None:
    region.publish(0, 0)
    region.fail(0, 2)
    for finish in (region.publish, region.fail):
        with pytest.raises(InternalError, match=f"rank 0 published transfer {transfer} twice"):
            finish(0, transfer)
    assert region.finished(0) == 0
    region.publish(0, 1)
    assert (region.finished(0), region.failures(0)) == (2, [2])


def test_pending_transfers_are_bounded(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "MAX_PENDING", 5)
    for transfer in range(1, 6):
        region.publish(0, transfer)
    with pytest.raises(InternalError, match="rank 0: 5 transfers wait for transfer 0"):
        region.publish(0, 6)
    region.publish(0, 0)
    assert region.finished(0) == 5


def test_only_a_signer_publishes(region_dir: str) -> None:
    with Region.create("r", geometry(), {"model": "m"}, 2, directory=region_dir) as region:
        with pytest.raises(ConfigError, match="rank 1 publishes without having signed"):
            region.publish(1, 0)
        for rank in (-1, 2):
            with pytest.raises(ConfigError, match=f"rank {rank} of a region for 2 ranks"):
                region.sign(rank)
        assert region.unsigned() == [0, 1]


def test_threads_of_a_copy_pool_publish_at_once(region: Region) -> None:
    barrier, count = threading.Barrier(4), 500

    def run(part: int) -> None:
        barrier.wait(10)
        for transfer in range(part, 4 * count, 4):
            (region.fail if transfer % 100 == 7 else region.publish)(0, transfer)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert region.finished(0) == 4 * count - 1
    assert region.failures(0) == list(range(7, 4 * count, 100))


def test_each_reader_is_told_once(region: Region) -> None:
    other = Region.from_fd(region.fileno())
    region.fail(0, 0)
    region.fail(0, 1)
    assert region.failures(0) == [0, 1]
    assert region.failures(0) == []
    region.fail(0, 2)
    assert region.failures(0) == [2]
    assert other.failures(0) == [0, 1, 2]
    assert region.failure_overflows == other.failure_overflows == 0
    other.close()


def test_failure_is_not_told_before_it_counts(region: Region) -> None:
    region.fail(0, 1)
    assert (region.finished(0), region.failures(0)) == (-1, [])
    region.publish(0, 0)
    assert (region.finished(0), region.failures(0)) == (1, [1])


@pytest.mark.parametrize("count", [RING_ENTRIES - 1, RING_ENTRIES, 3 * RING_ENTRIES])
def test_sleeping_reader_loses_no_failure(region: Region, count: int) -> None:
    region.publish(0, 0)
    assert region.failures(0) == []
    # Every second transfer fails.
    for transfer in range(1, 2 * count + 1):
        (region.publish if transfer % 2 else region.fail)(0, transfer)
    told = region.failures(0)
    failed = set(range(2, 2 * count + 1, 2))
    assert failed <= set(told)
    assert told == sorted(set(told))
    assert min(told) >= 1, "what was answered for before is not told again"
    if count < RING_ENTRIES:
        assert set(told) == failed
        assert region.failure_overflows == 0
    else:
        assert region.failure_overflows == 1
        assert len(set(told) - failed) <= count - RING_ENTRIES + 2
    region.fail(0, 2 * count + 1)
    assert region.failures(0) == [2 * count + 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 600),
    window=st.integers(1, 40),
    failing=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    reading=st.sampled_from([0.001, 0.02, 0.3, 1.0]),
)
def test_model(seed: int, count: int, window: int, failing: float, reading: float) -> None:
    """Any order inside a window, reads at any time: failures are told once, none is missed."""
    draw = random.Random(seed)
    line = RankLine(memoryview(bytearray(LINE_BYTES)))
    reader, told, failed, pending = FailureReader(), [], set(), {}
    order = sorted(range(count), key=lambda number: number + draw.randrange(window))
    for transfer in order:
        pending[transfer] = draw.random() < failing
        if pending[transfer]:
            failed.add(transfer)
        while (following := line.finished() + 1) in pending:
            line.advance(following, pending.pop(following))
        if draw.random() < reading or transfer == order[-1]:
            finished = line.finished()
            told.extend(line.failures(reader))
            assert {number for number in failed if number <= finished} <= set(told)
            assert all(number <= finished for number in told)
    assert line.finished() == count - 1
    assert told == sorted(set(told))
    if reader.overflows == 0:
        assert set(told) == failed


def test_reader_beside_a_writer_in_another_process(
    region_dir: str, spawn: Callable[..., Any]
) -> None:
    count, step = 30000, 7
    child = spawn()
    child.ask("create", directory=region_dir)
    child.ask("sign", rank=0)
    region = Region.attach("r", directory=region_dir)
    child.send("hammer", rank=0, count=count, step=step)
    finished, settled, told = -1, 0, set()
    while finished < count - 1:
        finished = region.finished(0)
        told.update(region.failures(0))
        assert all(number in told for number in range(settled, finished + 1) if number % step == 3)
        settled = finished + 1
    assert child.receive() == {}
    expected = set(range(3, count, step))
    assert expected <= told
    if region.failure_overflows == 0:
        assert told == expected
    region.close()


def test_advance_out_of_turn_is_a_bug() -> None:
    line = RankLine(memoryview(bytearray(LINE_BYTES)))
    with pytest.raises(InternalError, match="transfer 1 does not follow -1"):
        line.advance(1, failed=False)


def test_words() -> None:
    memory = bytearray(24)
    words = Words(memory)
    assert len(words) == 3
    for value in (1, -1, 2**63 - 1, -(2**63)):
        words.store(1, value)
        assert words.load(1) == value
        assert memory == bytes(8) + value.to_bytes(8, "little", signed=True) + bytes(8)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"word {index} of 3"):
            words.load(index)
        with pytest.raises(IndexError, match=f"word {index} of 3"):
            words.store(index, 0)
    with pytest.raises(OverflowError):
        words.store(0, 2**63)
    for size in (0, 12):
        with pytest.raises(ValueError, match="positive multiple of 8"):
            Words(bytearray(size))
    with pytest.raises(ValueError, match="aligned to 8"):
        Words(memoryview(memory)[4:20])
    with pytest.raises((ValueError, BufferError)):
        Words(bytes(8))
    with pytest.raises(BufferError):
        memory.extend(b"x")  # the words hold it


@pytest.mark.fault("V08")
@pytest.mark.needs("memory-policy")
def test_memory_of_several_ranks_is_interleaved(
    region_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel keeps those of the named nodes that exist, so two names do on any machine.
    monkeypatch.setattr(numa, "allowed_nodes", lambda: [0, 1])
    policies: list[int | None] = []
    original = space.reserve

    def watched(fd: int, offset: int, length: int) -> None:
        policies.append(numa.policy())
        original(fd, offset, length)

    monkeypatch.setattr(space, "reserve", watched)
    for ranks, expected in ((2, numa.MPOL_INTERLEAVE), (1, numa.MPOL_DEFAULT)):
        options: dict[str, Any] = {"directory": region_dir, "step_bytes": 1 << 16}
        with Region.create("r", geometry(), {"model": "m"}, ranks, **options) as region:
            assert numa.policy() == numa.MPOL_DEFAULT
            region.populate(lambda slots: None)
            assert region._mapped.populator.join(20)
        assert set(policies) == {expected}
        assert len(policies) == 5
        policies.clear()


def test_policy_from_outside_is_kept() -> None:
    with numa.interleaved([0, 1]) as outer:
        before = numa.policy()
        with numa.interleaved([0, 1]) as inner:
            assert not inner or not outer
        assert numa.policy() == before, "the inner one must not put its default in place"
    with numa.interleaved([0]) as alone:
        assert not alone
