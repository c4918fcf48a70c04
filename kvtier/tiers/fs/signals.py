# SPDX-License-Identifier: Apache-2.0
"""What the file tier says of itself: errors, refusals and pauses, in metrics and in the log.

Owns when each error was logged last. On the service's loop.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtier.types import Outcome

if TYPE_CHECKING:
    from kvtier._core import fileio
    from kvtier.obs.metrics import Recorder

logger = logging.getLogger(__name__)

TELL_SECONDS = 60.0
"""The same errno of the same operation is logged once in this time."""


class Signals:
    """Counts and logs for one tier.

    Parameters
    ----------
    name : str
        Of the tier.
    recorder : Recorder
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, name: str, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._name = name
        self._recorder = recorder
        self._clock = clock
        self._told: dict[tuple[str, int], float] = {}  # (operation, errno): when it was logged

    def add(self, metric: str, count: int) -> None:
        """Increase a counter of the tier."""
        self._recorder.add(metric, float(count), (self._name,))

    def failed(self, operation: str, failed: Sequence[Outcome]) -> None:
        """Count failures by their cause."""
        for cause in set(failed):
            self._recorder.add(
                "kvtier_fs_errors_total",
                float(failed.count(cause)),
                (self._name, operation, cause.name.lower()),
            )

    def tell(self, operation: str, batch: fileio.Batch) -> None:
        """Log what the system said; outcomes and metrics know causes only."""
        statuses = batch.statuses()
        now = self._clock()
        for code in {status for status in statuses if status > 0}:
            if now - self._told.get((operation, code), -math.inf) < TELL_SECONDS:
                continue
            self._told[operation, code] = now
            logger.warning(
                "%s: %s fails for %d of %d chunks: %s (%s): %s",
                self._name,
                operation,
                statuses.count(code),
                len(statuses),
                os.strerror(code),
                errno.errorcode.get(code, code),
                batch.path(statuses.index(code)),
            )

    def refused(self, operation: str, reason: str, count: int) -> None:
        """Count chunks that were not even tried."""
        labels = (self._name, operation, reason)
        self._recorder.add("kvtier_fs_refused_total", float(count), labels)

    def paused(self, cause: Outcome, pauses: bool) -> None:
        """Whether writes pause for this cause."""
        labels = (self._name, cause.name.lower())
        self._recorder.set("kvtier_fs_writes_paused", float(pauses), labels)
