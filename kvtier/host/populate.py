# SPDX-License-Identifier: Apache-2.0
"""Reserve the memory of a region's slots in steps, beside whoever already uses the first ones.

Owns one thread, in the creator's process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtier.host import numa, space

logger = logging.getLogger(__name__)


class Populator:
    """Thread that reserves [start, stop) of a file step by step.

    Parameters
    ----------
    fd : int
        Stays open until ``stop`` has returned.
    offset : int
        File offset of slot 0.
    start, stop : int
        Bytes of slots, relative to slot 0.
    step_bytes : int
    nodes : list of int
        NUMA nodes to interleave over.
    on_reserved : callable
        Called on this thread with the bytes reserved so far, after each step.
    where : str
        Path for the warning.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        start: int,
        stop: int,
        step_bytes: int,
        nodes: list[int],
        on_reserved: Callable[[int], None],
        where: str,
    ) -> None:
        self._fd = fd
        self._offset = offset
        self._start = start
        self._stop = stop
        self._step_bytes = step_bytes
        self._nodes = nodes
        self._on_reserved = on_reserved
        self._where = where
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-populate", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel, and wait for the step in progress (about 0.2 s for 1 GiB)."""
        self._cancelled.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all is reserved or given up: False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        done = self._start
        while done < self._stop and not self._cancelled.is_set():
            step = min(self._step_bytes, self._stop - done)
            try:
                with numa.interleaved(self._nodes):
                    space.reserve(self._fd, self._offset + done, step)
            except OSError as exc:
                logger.warning(
                    "%s: no memory for more than %s of %s (%s); going on with what there is",
                    self._where,
                    space.describe(done),
                    space.describe(self._stop),
                    exc.strerror,
                )
                return
            done += step
            self._on_reserved(done)
