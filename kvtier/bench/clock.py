# SPDX-License-Identifier: Apache-2.0
"""Time for the stand-in: the real one. Tests put a virtual one in its place. Owns no state."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and waiting for them to pass."""

    def now(self) -> float: ...
    def sleep_until(self, deadline: float) -> None: ...


class RealClock:
    """``time.perf_counter``."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, deadline: float) -> None:
        remaining = deadline - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
