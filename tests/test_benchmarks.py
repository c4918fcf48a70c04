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
        {"benchmark": "one", "command": "-m benchmarks.one", "load": 0.5, "cases": [case]},
        {
            "benchmark": "two",
            "command": "-m benchmarks.two",
            "load": 0.5,
            "cases": [case | {"spread": [0.7, 0.9], "target": 0.9}],
        },
    ]
    text = page(results)
    assert "| pages | 4 GB/s | memcpy: 5 | 0.8 |  |  |" in text
    assert "| pages | 4 GB/s | memcpy: 5 | 0.8 | 0.7 to 0.9 | 0.9 |" in text
    assert "## one" in text
    assert "`python -m benchmarks.two`" in text
