# SPDX-License-Identifier: Apache-2.0
"""What becomes of the engines of a process in a forked child, which does not have their memory.

Owns one hook a process, from its first open engine on. It runs in the child, on the thread that
forked; ``add`` and ``discard`` are called by any thread.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, Protocol

from kvtier.errors import ClosedError


class _Engine(Protocol):
    def disown(self) -> None: ...


class OpenEngines:
    """The open engines of this process; keeps none of them alive."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[_Engine] = weakref.WeakSet()
        self._watching = False

    def add(self, engine: _Engine) -> None:
        """From now on a forked child finds `engine` out of use."""
        self._engines.add(engine)
        if not self._watching:
            self._watching = True
            os.register_at_fork(after_in_child=self._after_fork)

    def discard(self, engine: _Engine) -> None:
        """It is closed."""
        self._engines.discard(engine)

    def _after_fork(self) -> None:
        engines, self._engines = list(self._engines), weakref.WeakSet()
        for engine in engines:
            engine.disown()


OPEN_ENGINES = OpenEngines()
# State of a whole process: a hook cannot be taken back, so that one for each engine would pile up.


FORKED = (
    "the engine was opened before this process was forked, and its memory is the parent's: "
    "open one of your own"
)


class Gone:
    """Stands for index and planner of an engine that has no memory any more.

    Parameters
    ----------
    why : str
        What every call comes to.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    def refuse(self, *args: object) -> NoReturn:
        """ClosedError."""
        raise ClosedError(self._why)
