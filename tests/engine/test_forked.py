# SPDX-License-Identifier: Apache-2.0
"""Which engines a fork would take out of use; ``runtime.test_process`` forks for real."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvtier.engine import engine as engine_module
from kvtier.engine import forked
from tests.engine.rig import rig


@pytest.mark.fault("H20")
def test_engines_share_one_hook_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook cannot be taken back: one an engine would be a leak of a process that opens many."""
    hooks: list[Callable[[], None]] = []
    hook = SimpleNamespace(register_at_fork=lambda after_in_child: hooks.append(after_in_child))
    monkeypatch.setattr(forked, "os", hook)
    engines = forked.OpenEngines()
    monkeypatch.setattr(engine_module, "OPEN_ENGINES", engines)
    with rig() as first:
        assert list(engines._engines) == [first.engine]
    with rig(), rig():
        assert len(engines._engines) == 2
    assert not engines._engines
    assert len(hooks) == 1
