# SPDX-License-Identifier: Apache-2.0
"""What people see of a file tier that fails inside the engine."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier._core import fileio
from kvtier.runtime import lane as lane_module
from kvtier.tiers.fs import FsTier
from tests.engine.rig import keys, rig


class FaultyTier(FsTier):
    """The file tier with system calls that fail on cue."""

    faults: ClassVar[fileio.Faults] = fileio.Faults()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, faults=self.faults)


@pytest.mark.fault("F04", "U08")
@pytest.mark.parametrize("operation", ["open", "rename"])
def test_every_store_denied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    """The log has the errno and the path, once; the tier is down, and up again when it works."""
    tier = {
        "type": "FaultyTier",
        "module_path": __name__,
        "name": "disk",
        "root_dir": str(tmp_path / "root"),
        "min_free_bytes": 1,
    }
    breaker = {"failures": 2, "open_seconds": 1.0}
    try:
        with rig(slots=16, tiers=[tier], breaker=breaker) as one:
            assert one.value("kvtier_tier_up", "disk") == 1
            FaultyTier.faults.set(operation, errno.EACCES)
            with caplog.at_level(logging.WARNING):
                for number in range(4):
                    one.store(keys(number))
                    one.settle()
                one.until(lambda: one.value("kvtier_tier_up", "disk") == 0)
            told = [r.getMessage() for r in caplog.records if "EACCES" in r.getMessage()]
            assert len(told) == 1
            assert told[0].startswith("disk: store fails for 1 of 1 chunks: Permission denied (EAC")
            assert told[0].endswith(".kv")
            assert "breaker for writes opens: denied" in caplog.text
            assert one.value("kvtier_breaker_opened_total", "disk") == 1
            assert one.load(keys(*range(4))) == 4
            FaultyTier.faults.clear()
            one.until(lambda: one.value("kvtier_tier_up", "disk") == 1)
            one.store(keys(10))
            one.settle()
            assert len(list(tmp_path.rglob("*.kv"))) >= 1
    finally:
        FaultyTier.faults.clear()


@pytest.mark.fault("U09")
def test_a_medium_that_is_not_there_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says so with the cause, host memory serves, and the tier comes up with its medium."""
    monkeypatch.setattr(lane_module, "REOPEN_SECONDS", 0.01)
    root = tmp_path / "root"
    root.symlink_to(tmp_path / "mount")
    tier = {"type": "fs", "name": "disk", "root_dir": str(root), "min_free_bytes": 1}
    with caplog.at_level(logging.WARNING), rig(slots=16, tiers=[tier]) as one:
        assert "tier disk is down, and is tried again: fs: " in caplog.text
        assert one.value("kvtier_tier_up", "disk") == 0
        one.store(keys(1))
        assert one.load(keys(1)) == 1
        one.until(lambda: "tier disk is still down" in caplog.text)
        assert caplog.text.count("ENOENT") >= 2, "the cause of the last attempt, not of the first"
        (tmp_path / "mount").mkdir()
        one.until(lambda: one.value("kvtier_tier_up", "disk") == 1)
        one.store(keys(2))
        one.settle()
        assert len(list(tmp_path.rglob("*.kv"))) >= 1
