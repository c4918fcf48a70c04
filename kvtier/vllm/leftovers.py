# SPDX-License-Identifier: Apache-2.0
"""What a killed engine leaves in shared memory, removed by the server that outlives it.

vLLM's server kills its engine, workers and tier service included, when it is told to stop (unless
it has a ``--shutdown-timeout``). None of them can clean up then, and the region, most of the
machine's memory perhaps, would stay until the next start. The server itself ends in its own way.

Owns one exit handler a directory in processes that hold no region themselves; main thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time

from kvtier.errors import ConfigError
from kvtier.host import files
from kvtier.host.mapping import MAPPED_FILES

EXIT_SECONDS = 2.0
"""How long the killed may take to let go of a large mapping. A region of another living engine
costs a server's end these two seconds: nothing tells the dying from the living."""

POLL_SECONDS = 0.02


@functools.cache  # one handler, however often vLLM asks
def sweep_at_exit(directory: str) -> None:
    """Have the region files in `directory` that nobody holds removed when this process ends."""
    atexit.register(_sweep, directory, os.getpid())


def _sweep(directory: str, pid: int) -> None:
    if os.getpid() != pid or MAPPED_FILES.count():
        return  # a forked child, or the engine runs here and removes its region itself
    deadline = time.monotonic() + EXIT_SECONDS
    # An interpreter that ends has nobody to tell; the next start sweeps and says what is wrong.
    with contextlib.suppress(OSError, ConfigError):
        while not files.sweep(directory) and files.regions(directory):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
