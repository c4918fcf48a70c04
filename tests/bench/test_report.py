# SPDX-License-Identifier: Apache-2.0
"""The report renders, holds the numbers, and needs nothing beside itself."""

from __future__ import annotations

import importlib.util
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from kvtier.bench import report
from kvtier.bench.results import Report
from tests.bench.helpers import make_report


class Page(HTMLParser):
    """Tags that stay open, text, and addresses that a browser would fetch."""

    VOID = frozenset({"meta", "img", "br"})
    OPTIONAL = frozenset({"html"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.sources: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


@pytest.fixture
def full() -> Report:
    return make_report()


def test_page_holds_the_numbers_and_is_whole(full: Report) -> None:
    page = Page(report.render(full, "QUJD"))
    assert page.open == []
    assert page.sources == ["data:image/png;base64,QUJD"]
    text = " ".join(page.text)
    for run in full.runs:
        assert f"{run.tokens_per_second / 1000:.0f}" in page.cells
    for clause in full.verdict.clauses:
        assert clause.text in page.cells
    for words in (
        full.verdict.summary,
        "a note with <angle> brackets",
        "request c1<t2",
        "layer 1, head 0, K, token 17",
        "NVIDIA L4",
        "/var/tmp on ext4",
    ):
        assert words in text


def test_page_without_charts_says_so(full: Report) -> None:
    page = Page(report.render(full, None))
    assert "matplotlib is not installed" in " ".join(page.text)
    assert page.sources == []


def test_table_has_a_row_for_each_run_and_the_verdict(full: Report) -> None:
    lines = report.table(full).splitlines()
    rows = [line.split() for line in lines]
    for run in full.runs:
        assert any(row[:2] == [run.point, run.strategy] for row in rows)
    assert any(row[:4] == ["7", "host", "800", "2.96"] for row in rows)
    assert lines[-1] == f"verdict: {full.verdict.summary}"
    assert any(line.startswith("DIFFERS: host+fs at 20") for line in lines)


@pytest.mark.usefixtures("fonts_open")
def test_files_are_written_and_json_reads_back(full: Report, tmp_path: Path) -> None:
    files = report.write(full, tmp_path / "new" / "results")
    names = [path.name for path in files]
    assert names[0] == "report.html"
    assert names[-1] == "report.json"
    assert msgspec.json.decode(files[-1].read_bytes(), type=Report) == full
    if importlib.util.find_spec("matplotlib") is not None:
        picture = tmp_path / "new" / "results" / "report.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "data:image/png;base64," in files[0].read_text()
