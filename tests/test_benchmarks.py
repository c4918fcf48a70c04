# SPDX-License-Identifier: Apache-2.0
"""The page of all benchmarks is made from the lines they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import page


def test_a_page_has_every_case() -> None:
    case = {
        "case": "pages",
        "value": 4.0,
        "unit": "GB/s",
        "reference": "memcpy",
        "reference_value": 5.0,
        "ratio": 0.8,
    }
    results = [
        {"benchmark": "layout", "command": "-m benchmarks.layout", "load": 0.5, "cases": [case]},
        {
            "benchmark": "fs",
            "command": "-m benchmarks.fs",
            "load": 0.5,
            "cases": [
                case | {"spread": [0.7, 0.9], "target": 0.9},
                case | {"case": "good", "spread": [0.7, 0.9], "target": 0.8},
            ],
        },
        {
            "benchmark": "bench",
            "command": "-m kvtier.bench",
            "load": 0.5,
            "summary": "HOLDS",
            "clauses": [{"text": "all alike", "holds": True, "measured": "apart by 1%"}],
            "runs": [
                {
                    "conversations": 2,
                    "strategy": "none",
                    "prompt_tokens": 9000,
                    "output_tokens": 1000,
                    "wall_seconds": 0.5,
                    "first_token": {"p50": 0.0214},
                }
            ],
        },
    ]
    text = page(results)
    assert "| pages | 4 GB/s | memcpy: 5 | 0.8 |  |  |" in text
    assert "| pages | 4 GB/s | memcpy: 5 | 0.8 | 0.7 to 0.9 | 0.9: missed |" in text
    assert "| good | 4 GB/s | memcpy: 5 | 0.8 | 0.7 to 0.9 | 0.8 |" in text
    assert "## layout" in text
    assert "`python -m benchmarks.fs`" in text
    assert "What bounds it" in text  # the notes of that module
    assert "Verdict: HOLDS." in text
    assert "| all alike | yes | apart by 1% |" in text
    assert "| 2 | none | 20 | 21 ms |" in text


@pytest.mark.vllm
def test_vllms_connector_drives_both_managers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.vllm_manager", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert [case["case"] for case in line["cases"]] == ["cold", "warm", "tier"]
    assert "| cold |" in page([line | {"command": "-m benchmarks.vllm_manager", "load": 0.5}])
    beside = {(one["system"], one["case"]): one for one in line["beside"]}
    chunks = {"cold": 0, "warm": 1024, "tier": 1024}
    for case, loaded in chunks.items():
        ours, theirs = beside["kvtier", case], beside["stock", case]
        # One walk that is answered, and two questions for each step that it waited.
        assert loaded <= ours["lookups"] <= loaded + 2 * ours["steps"] + 2
        assert theirs["lookups"] >= max(loaded, 1024)
        assert ours["connector_us"] > 0
    assert list(tmp_path.iterdir()) == []
