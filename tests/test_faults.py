# SPDX-License-Identifier: Apache-2.0
"""The page of faults says what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import faults


def test_the_page_is_current() -> None:
    page = faults.PAGE.read_text()
    assert page == faults.render(faults.collect()), "run `python -m tests.faults`"


def test_the_table_is_whole() -> None:
    assert {fault[0] for fault in faults.FAULTS} == set(faults.AREAS)
    assert set(faults.REASONS) <= set(faults.FAULTS)


SOURCE = """
import pytest
from pytest import mark

pytestmark = pytest.mark.fault("C01")

@pytest.mark.fault("C02", "C04")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fault("C05"))])
async def test_one(x): pass

class TestIt:
    @mark.fault("C06")
    def test_two(self): pass

def default(x): x.setdefault("C07")
"""


def test_marks_are_found_wherever_they_stand() -> None:
    assert sorted(faults.marks(SOURCE)) == [
        ("C01", ""),
        ("C02", "test_one"),
        ("C04", "test_one"),
        ("C05", "test_one"),
        ("C06", "TestIt.test_two"),
    ]
    with pytest.raises(ValueError, match="literal"):
        list(faults.marks("import pytest\n@pytest.mark.fault(NAME)\ndef test(): pass\n"))


def test_unknown_faults_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(SOURCE)
    assert faults.collect(folder)["C01"] == ["tests/test_x.py"]
    assert faults.collect(folder)["C06"] == ["tests/test_x.py::TestIt.test_two"]
    (folder / "test_x.py").write_text(SOURCE.replace("C06", "Z99"))
    with pytest.raises(ValueError, match="Z99 is not in the table"):
        faults.collect(folder)


def test_a_fault_without_a_test_is_seen_on_the_page() -> None:
    page = faults.render({"C01": ["tests/test_x.py::test_one"]})
    assert "| C01 |" in page
    assert "`tests/test_x.py::test_one` |" in page
    assert page.count("not yet") == len(faults.FAULTS) - 1 - len(faults.REASONS)
