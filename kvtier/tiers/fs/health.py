# SPDX-License-Identifier: Apache-2.0
"""What an errno means, and whether reads or writes are admitted after one.

Pure decisions on the tier's clock. A `Gate` belongs to the loop's thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from kvtier._core import fileio
from kvtier.types import Outcome

_OUTCOMES = {
    0: Outcome.DONE,
    fileio.EXISTS: Outcome.EXISTS,
    fileio.MISSING: Outcome.MISSING,
    # Short: somebody may still be writing it, or a filesystem shows it before its bytes.
    fileio.SHORT: Outcome.MISSING,
    fileio.FOREIGN: Outcome.MISSING,
    fileio.CORRUPT: Outcome.CORRUPT,
    # Never taken: the deadline passed before its turn.
    fileio.WAITING: Outcome.TIMEOUT,
    errno.ENOSPC: Outcome.FULL,
    errno.EDQUOT: Outcome.FULL,
    errno.EROFS: Outcome.READ_ONLY,
    errno.EACCES: Outcome.DENIED,
    errno.EPERM: Outcome.DENIED,
    errno.EMFILE: Outcome.NO_HANDLES,
    errno.ENFILE: Outcome.NO_HANDLES,
    errno.ESTALE: Outcome.STALE,
    errno.ETIMEDOUT: Outcome.TIMEOUT,
    # A store makes its directories: when the name still cannot be made, the root is gone.
    errno.ENOENT: Outcome.LOST,
    errno.ENOTDIR: Outcome.LOST,
    errno.ENODEV: Outcome.LOST,
    errno.ENXIO: Outcome.LOST,
    errno.ENOTCONN: Outcome.LOST,
}


def outcome(status: int) -> Outcome:
    """Outcome of an item's status; an errno that is not named above is an error of the medium."""
    return _OUTCOMES.get(status, Outcome.IO)


class Gate:
    """Admission after an error that the next call would only meet again.

    Closed for a while by `pause`; then one caller at a time is let through to try, and `succeed`
    opens it again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._seconds = 0.0
        self.cause: Outcome | None = None
        """Why it is closed; None is open."""

    @property
    def closed(self) -> bool:
        """Whether the next caller would be refused."""
        return self.cause is not None and self._clock() < self._until

    def admits(self) -> bool:
        """Whether this caller may go on. When the pause is over, the first one is the probe."""
        if self.cause is None:
            return True
        now = self._clock()
        if now < self._until:
            return False
        self._until = now + self._seconds
        return True

    def pause(self, cause: Outcome, seconds: float) -> None:
        self.cause = cause
        self._seconds = seconds
        self._until = self._clock() + seconds

    def succeed(self) -> None:
        self.cause = None

    def retry(self) -> None:
        """What closed it may be over (space was freed): the next caller is a probe."""
        self._until = 0.0
