# SPDX-License-Identifier: Apache-2.0
"""The transports that tests of the peer tier run over."""

from __future__ import annotations

import pytest

from tests.tiers.p2p import rig

UCX = pytest.param("ucx", marks=pytest.mark.needs("ucx"))


@pytest.fixture(params=["tcp", UCX])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the instances of the test move bytes."""
    monkeypatch.setattr(rig, "TRANSPORT", request.param)
    chosen: str = request.param
    return chosen
