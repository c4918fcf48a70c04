# SPDX-License-Identifier: Apache-2.0
"""Matplotlib keeps the font files that it has used open for good: use them before the leak check
of the first test that draws takes stock."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench.report import write
from tests.bench.helpers import make_report


@pytest.fixture(scope="session")
def fonts_open(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report that was drawn once."""
    return write(make_report(), tmp_path_factory.mktemp("fonts"))[0]
