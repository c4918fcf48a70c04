# SPDX-License-Identifier: Apache-2.0
"""Both event loops for tests of tiers: each test marked asyncio runs on uvloop and on asyncio.

The service runs on uvloop, people who use kvtier as a library run it on either. One line in the
``conftest.py`` at the root of the tests turns it on::

    from kvtier.testing.loops import pytest_asyncio_loop_factories

A test that is for one loop only says ``@pytest.mark.asyncio(loop_factories=["uvloop"])``. Needs
a pytest-asyncio that has this hook (1.5 has).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import uvloop

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
"""Name, as it stands in the test's id, to what makes the loop."""


def pytest_asyncio_loop_factories(
    config: Any, item: Any
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The hook of pytest-asyncio."""
    return LOOPS
