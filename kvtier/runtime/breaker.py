# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker of one direction of one tier. Pure: the caller brings the time.

Closed until `failures` calls in a row have failed; then open for a time that doubles with each
failed trial, up to a minute (or the first time, if that is longer); then half-open, in which one
call is let through as the trial.
"""

from __future__ import annotations

MAX_OPEN_SECONDS = 60.0

MAX_DOUBLINGS = 30


class Breaker:
    """Whether calls to a tier make sense at present.

    Parameters
    ----------
    failures : int
        Failed calls in a row that open it.
    open_seconds : float
        How long it stays open the first time.
    """

    __slots__ = ("_failures", "_in_row", "_open_seconds", "_opened", "_trial", "_until", "cause")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._failures = failures
        self._open_seconds = open_seconds
        self._in_row = 0
        self._opened = 0  # times opened since the last success
        self._until: float | None = None  # None: closed
        self._trial = False
        self.cause = ""

    @property
    def closed(self) -> bool:
        """Whether calls pass freely."""
        return self._until is None

    @property
    def in_doubt(self) -> bool:
        """Whether the last call that said anything failed."""
        return self._in_row > 0

    @property
    def state(self) -> int:
        """0 closed, 1 a trial is under way, 2 open: the value of the metric."""
        if self._until is None:
            return 0
        return 1 if self._trial else 2

    @property
    def until(self) -> float | None:
        """When a trial is next allowed; None while closed."""
        return self._until

    def would_allow(self, now: float) -> bool:
        """Whether a call may start now; asking does not start the trial."""
        # Timers fire a little early.
        return self._until is None or now >= self._until - 0.001

    def allow(self, now: float) -> bool:
        """Whether a call may start now; the first one after the open time is the trial."""
        if self._until is None:
            return True
        if now < self._until - 0.001 or self._trial:
            return False
        self._trial = True
        return True

    def success(self) -> bool:
        """A call ended well. True if that closed the breaker."""
        was_open = self._until is not None
        self._in_row = 0
        self._opened = 0
        self._until = None
        self._trial = False
        self.cause = ""
        return was_open

    def failure(self, now: float, cause: str) -> bool:
        """A call failed. True if that opened the breaker (again)."""
        self._in_row += 1
        if self._until is None and self._in_row < self._failures:
            return False
        if self._until is not None and not self._trial:
            # A call from before the opening: it says nothing new.
            return False
        self.cause = cause
        self._trial = False
        # The exponent is bounded: a tier that is down for a day has failed a thousand trials, and
        # 2**1024 is no float.
        doublings = min(self._opened, MAX_DOUBLINGS)
        self._until = now + min(
            self._open_seconds * 2**doublings, max(MAX_OPEN_SECONDS, self._open_seconds)
        )
        self._opened += 1
        return True

    def inconclusive(self) -> None:
        """A call ended without saying anything about the tier (cancelled): allow another trial."""
        self._trial = False
