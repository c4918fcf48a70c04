# SPDX-License-Identifier: Apache-2.0
"""The cost model: its arithmetic, its scale, its calibration."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvtier.bench.costs import (
    DEFAULT_SOURCE,
    CostModel,
    Decode,
    Prefill,
    calibrate,
    load_source,
)
from kvtier.errors import ConfigError
from tests.bench.helpers import COSTS, SOURCE


def test_prefill_is_bound_by_arithmetic() -> None:
    # 100 tokens after 50: two operations a weight, and 4 * 2 layers * 64 a pair.
    pairs = 100 * 50 + 100 * 101 / 2
    wanted = (2 * 1e6 * 100 + 4 * 2 * 64 * pairs) / 1e9
    assert COSTS.step_seconds([Prefill(100, 50)], []) == pytest.approx(wanted)


def test_prefill_in_pieces_costs_the_same() -> None:
    whole = COSTS.arithmetic_seconds(1000, 0)
    parts = COSTS.arithmetic_seconds(400, 0) + COSTS.arithmetic_seconds(600, 400)
    assert parts == pytest.approx(whole)


def test_decode_is_bound_by_memory() -> None:
    # The weights once for each of eight tokens, and eight times each context.
    wanted = (8 * 2e6 + 8 * 1000 * 128 + 3 * 500 * 128) / 1e9
    arithmetic = COSTS.arithmetic_seconds(8, 1000) + COSTS.arithmetic_seconds(3, 500)
    assert COSTS.step_seconds([], [Decode(8, 1000), Decode(3, 500)]) == pytest.approx(
        max(wanted, arithmetic)
    )
    slow_memory = CostModel(msgspec.structs.replace(SOURCE, memory_bytes_per_second=1e8), 1.0)
    assert slow_memory.step_seconds([], [Decode(8, 1000), Decode(3, 500)]) == pytest.approx(
        10 * wanted
    )


def test_empty_step_costs_nothing() -> None:
    assert COSTS.step_seconds([], []) == 0.0


def test_scale_divides_time_and_leaves_bytes_a_second() -> None:
    scaled = CostModel(SOURCE, scale=4.0)
    one, other = COSTS.step_seconds([Prefill(64, 0)], []), scaled.step_seconds([Prefill(64, 0)], [])
    assert one == pytest.approx(4 * other)
    # A token has a quarter of the bytes, so the same bytes are computed a second.
    assert 64 * 128 / one == pytest.approx(64 * 128 / 4 / other)


def test_prefill_speedup_spares_decode() -> None:
    fast = CostModel(SOURCE, scale=1.0, prefill_speedup=10.0)
    assert fast.step_seconds([Prefill(1000, 0)], []) == pytest.approx(
        COSTS.step_seconds([Prefill(1000, 0)], []) / 10
    )
    assert fast.step_seconds([], [Decode(8, 10)]) == COSTS.step_seconds([], [Decode(8, 10)])


def test_default_source_is_what_it_says() -> None:
    model = CostModel(DEFAULT_SOURCE, 1.0)
    # One L4 computes some 3,000 prompt tokens a second of an 8B model, and decodes 15.
    assert 2500 < model.prefill_tokens_per_second(tokens=2048) < 3500
    assert 13 < model.decode_tokens_per_second() < 16
    assert DEFAULT_SOURCE.kv_bytes_per_token == 131072


def test_calibration_by_hand_sets_the_speeds() -> None:
    source = calibrate(DEFAULT_SOURCE, 25_000, 110)
    model = CostModel(source, 1.0)
    assert model.decode_tokens_per_second() == pytest.approx(110, rel=0.01)
    # Attention comes on top of what was measured at short context.
    assert 24_000 < model.prefill_tokens_per_second(tokens=512) <= 25_000
    assert "25000" in source.note
    assert calibrate(SOURCE, None, None) == SOURCE


def test_calibration_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(msgspec.to_builtins(SOURCE)))
    assert load_source(path) == SOURCE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "mine.json"),
        ('{"model": "x"}', "hardware"),
        (None, "No such file"),
        ("layers", "layers must be above 0"),
        ("typo", "typo"),
    ],
)
def test_bad_calibration_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "mine.json"
    fields = msgspec.to_builtins(SOURCE)
    if text == "layers":
        text = json.dumps({**fields, "layers": 0})
    elif text == "typo":
        text = json.dumps({**fields, "typo": 1})
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_source(path)
