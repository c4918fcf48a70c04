# SPDX-License-Identifier: Apache-2.0
"""Conversations and traces: shapes, determinism, bounds, intended starts, errors with lines."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.pattern import Shape
from kvtier.bench.workload import MultiTurn, Request, TraceReplay, read_trace
from kvtier.errors import ConfigError
from tests.bench.helpers import SHAPE


def drain(source: MultiTurn) -> list[Request]:
    """All requests, each answered as soon as it was sent."""
    sent = []
    now = 0.0
    while batch := source.take(now):
        sent += batch
        for request in batch:
            now += 1.0
            source.done(request, now)
    return sent


def test_turns_grow_and_share_their_prefix() -> None:
    requests = drain(MultiTurn(3, Shape()))
    assert len(requests) == 27
    mine = [request for request in requests if request.conversation == 1]
    assert [request.prompt_tokens for request in mine] == [
        12_000 + turn * 4_000 for turn in range(9)
    ]
    for before, after in itertools.pairwise(mine):
        assert after.block_hashes[: len(before.block_hashes)] == before.block_hashes
        assert len(after.block_hashes) == (after.prompt_tokens + 32) // 128
    first = {request.block_hashes[0] for request in requests}
    assert len(first) == 3


def test_same_seed_same_requests_other_seed_other_keys() -> None:
    assert drain(MultiTurn(2, SHAPE, turns=2)) == drain(MultiTurn(2, SHAPE, turns=2))
    other = drain(MultiTurn(2, SHAPE, turns=2, seed=1))
    assert other[0].block_hashes[0] != drain(MultiTurn(2, SHAPE, turns=2))[0].block_hashes[0]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_closed_loop_bounds(conversations: int, limit: int, turns: int, random: object) -> None:
    source = MultiTurn(conversations, SHAPE, 100, 40, turns, 8, max_in_flight=limit)
    running: list[Request] = []
    seen: list[str] = []
    now = 0.0
    while True:
        batch = source.take(now)
        running += batch
        seen += [request.request_id for request in batch]
        assert len(running) <= limit
        # One request of a conversation at a time.
        assert len({request.conversation for request in running}) == len(running)
        if not running:
            break
        now += 1.0
        request = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
        source.done(request, now)
        assert all(item.intended_start <= now for item in running)
    assert len(seen) == len(set(seen)) == source.total


def test_a_turn_is_meant_to_start_when_its_place_is_free() -> None:
    source = MultiTurn(2, SHAPE, 100, 40, 1, 8, max_in_flight=1)
    (first,) = source.take(0.0)
    assert first.intended_start == 0.0
    assert source.take(5.0) == []
    source.done(first, 7.0)
    (second,) = source.take(9.0)
    assert (second.conversation, second.intended_start) == (1, 7.0)


def test_answer_longer_than_a_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output-tokens"):
        MultiTurn(1, SHAPE, turn_tokens=10, output_tokens=11)


def row(timestamp: float = 0, length: int = 1000, output: int = 20, ids: object = (1, 2)) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": length,
            "output_length": output,
            "hash_ids": list(ids),  # type: ignore[call-overload]
        }
    )


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ('{"timestamp": 0}', "input_length"),
        (row(length=0, ids=()), "at least 1"),
        (row(output=-1), "at least 0"),
        (row(length=1025), "3 blocks"),
        (row(timestamp=5), "before the last one"),
        (row(ids=("a", "b")), "int"),
    ],
)
def test_trace_errors_name_the_line(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "trace.jsonl", row(timestamp=10), "", line)
    with pytest.raises(ConfigError, match=f"line 3.*{words}"):
        read_trace(path)


def test_trace_without_requests_and_without_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_limit_stops_before_bad_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", row(), row(timestamp=3), "{")
    assert len(read_trace(path, 2)) == 2


def test_open_loop_starts_when_recorded(tmp_path: Path) -> None:
    path = write(tmp_path / "t", row(1000), row(3000, ids=(1, 3)), row(3000), row(9000))
    source = TraceReplay(read_trace(path), SHAPE, speedup=2.0, max_tokens=10_000)
    assert source.total == 4
    assert [request.intended_start for request in source.take(0.0)] == [0.0]
    assert source.next_start() == 1.0
    # Asked late, and nothing was answered: the intended start stays the recorded one.
    late = source.take(3.9)
    assert [request.intended_start for request in late] == [1.0, 1.0]
    assert source.next_start() == 4.0
    assert len(source.take(4.0)) == 1
    assert source.next_start() is None


def test_trace_blocks_share_as_their_ids_do(tmp_path: Path) -> None:
    path = write(tmp_path / "t", row(ids=(7, 8)), row(ids=(7, 9)), row(ids=(7, 8)))
    one, other, again = TraceReplay(read_trace(path), Shape(), 1.0, 10_000).take(0.0)
    assert one.block_hashes[:4] == other.block_hashes[:4]
    assert one.block_hashes[4] != other.block_hashes[4]
    # 1,000 tokens are seven full blocks of 128; the answer's is nobody else's.
    assert one.block_hashes[:7] == again.block_hashes[:7]
    assert len(one.block_hashes) == (1000 + 20) // 128
    long = write(tmp_path / "l", row(output=100), row(output=100))
    first, second = TraceReplay(read_trace(long), Shape(), 1.0, 10_000).take(0.0)
    assert first.block_hashes[:7] == second.block_hashes[:7]
    assert first.block_hashes[7] != second.block_hashes[7]


def test_trace_skips_what_does_not_fit(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path / "t", row(length=1000), row(length=600)))
    source = TraceReplay(rows, SHAPE, 1.0, max_tokens=700)
    assert (source.total, source.skipped) == (1, 1)
    with pytest.raises(ConfigError, match="--accelerator"):
        TraceReplay(rows, SHAPE, 1.0, max_tokens=100)
    with pytest.raises(ConfigError, match="--block-tokens"):
        TraceReplay(rows, Shape(block_tokens=96), 1.0, max_tokens=10_000)


def test_token_ids_of_a_turn_begin_with_the_last_turns() -> None:
    sent: dict[tuple[int, int], list[int]] = {}
    for seed in (0, 0, 1):
        source = MultiTurn(2, Shape(), 300, 100, 2, 8, seed=seed)
        requests = drain(source)
        found = {(one.conversation, one.turn): source.tokens(one) for one in requests}
        for (conversation, turn), ids in found.items():
            assert len(ids) == 300 + turn * 100
            assert ids[:300] == found[conversation, 0]
            assert set(ids) <= set(range(10, 1000))
        assert found[0, 0] != found[1, 0]
        assert (found == sent) == (seed == 0) or not sent
        sent = found


def test_token_ids_of_a_trace_are_equal_as_far_as_its_hash_ids_are(tmp_path: Path) -> None:
    lines = [row(0, 1000, 8, (1, 2)), row(1, 1500, 8, (1, 2, 3)), row(2, 600, 8, (4, 2))]
    rows = read_trace(write(tmp_path / "trace", *lines))
    source = TraceReplay(rows, Shape(), 1.0, 10_000)
    one, two, other = (source.tokens(request) for request in source.take(1.0))
    assert [len(one), len(two), len(other)] == [1000, 1500, 600]
    assert two[:1000] == one
    assert other[:512] != one[:512]
    assert other[512:] == one[512:600]
