# SPDX-License-Identifier: Apache-2.0
"""kvtier's spec with one worker that is slow to start, by ``spec_module_path``.

It takes five times as long as anybody of kvtier waits for another process: once before its region,
and once after it has signed, as a worker that pins memory does.
"""

from __future__ import annotations

import time
from typing import Any

from kvtier.vllm import spec

WAIT_SECONDS = 0.6


class SlowSpec(spec.KVTierOffloadingSpec):
    """Rank 1 is slow."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        spec.START_SECONDS = WAIT_SECONDS

    def get_worker(self, kv_caches: Any) -> Any:
        pause = 5 * WAIT_SECONDS if self.config.parallel.rank == 1 else 0.0
        time.sleep(pause)
        worker = super().get_worker(kv_caches)
        time.sleep(pause)
        return worker
