# SPDX-License-Identifier: Apache-2.0
"""What becomes of an engine in a forked child, which does not have the region's memory.

Owns nothing. Runs in the child, on the thread that forked.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Protocol

from kvtier.errors import ClosedError


class _Engine(Protocol):
    def disown(self) -> None: ...


class AfterFork:
    """Takes the forked child's engine out of use; must not keep the engine alive."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.disown()


class Forked:
    """Stands for index and planner in a forked child."""

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    def refuse(self, *args: object) -> NoReturn:
        """What every call comes to."""
        raise ClosedError(
            "the engine was opened before this process was forked, and its memory is the parent's: "
            "open one of your own"
        )
