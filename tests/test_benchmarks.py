# SPDX-License-Identifier: Apache-2.0
"""The page of all benchmarks is made from the lines they print."""

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
