# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiers, driven as its scheduler drives them: peers of ``benchmarks.fs`` and ``.obj``.

Imports vLLM when it is asked for. Owns the peer's threads and its host memory until ``close``.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class VllmTier:
    """A SecondaryTierManager of vLLM's over vLLM's own shared region; `rows` has a chunk a row.

    Parameters
    ----------
    count : int
        Chunks of host memory.
    size : int
        Bytes of one.
    make : callable
        ``make(spec, memory)`` gives the manager.
    """

    def __init__(self, count: int, size: int, make: Callable[[Any, memoryview], Any]) -> None:
        # lazy: the benchmark runs without vLLM when no peer is asked for
        from vllm.v1.kv_offload import base, config
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # lazy: too
        from vllm.v1.kv_offload.tiering import base as tiering

        class Spec(base.OffloadingSpec):
            def get_manager(self) -> Any:
                raise NotImplementedError

            def get_worker(self, kv_caches: Any) -> Any:
                raise NotImplementedError

        spec = Spec(
            config.OffloadingConfig(
                groups=(config.OffloadingGroupConfig(16, ("layer",), 0),),
                worker_kv_bytes_per_block=size,
                enable_kv_cache_events=False,
                extra_config={},
                engine_id="benchmark",
                model=config.OffloadingModelConfig("model", "bfloat16"),
                cache=config.OffloadingCacheConfig(16, 1),
                parallel=config.OffloadingParallelConfig(
                    0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True
                ),
            )
        )
        # Without a rank it has all of its memory from the start.
        name = f"benchmark-{os.getpid()}-{time.monotonic_ns()}"
        self._region = SharedOffloadRegion(name, count, None, size, size)
        self.rows = np.frombuffer(self._region.mmap_obj, dtype=np.uint8).reshape(count, size)
        self._job = tiering.TransferJob
        self._request = base.ReqContext
        self._hit = base.LookupResult.HIT
        self._retry = base.LookupResult.RETRY
        self._tier = make(spec, memoryview(self.rows))
        self._jobs = 0
        self._requests = 0

    def store(self, keys: Sequence[bytes], job_chunks: int) -> None:
        """Chunk `i` under ``keys[i]``, in jobs of `job_chunks`."""
        self._transfer(keys, job_chunks, load=False)

    def load(self, keys: Sequence[bytes], job_chunks: int) -> None:
        """The reverse."""
        self._transfer(keys, job_chunks, load=True)

    def _transfer(self, keys: Sequence[bytes], job_chunks: int, *, load: bool) -> None:
        submit = self._tier.submit_load if load else self._tier.submit_store
        context = self._request("transfer")
        open_jobs = 0
        for start in range(0, len(keys), job_chunks):
            part = list(keys[start : start + job_chunks])
            rows = np.arange(start, start + len(part), dtype=np.int32)
            self._jobs += 1
            open_jobs += 1
            submit(self._job(self._jobs, part, rows, load, context))
        while open_jobs:
            for result in self._tier.get_finished_jobs():
                if not result.success:
                    raise RuntimeError(f"vLLM's tier failed: {result}")
                open_jobs -= 1
            # Its completions can only be polled; this is far below the time of a round.
            time.sleep(0.0002)

    def present(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are there, asked as a request would: look up, end the step, again."""
        self._requests += 1
        context = self._request(f"request-{self._requests}")
        while True:
            answers = [self._tier.lookup(key, context) for key in keys]
            if self._retry not in answers:
                self._tier.on_request_finished(context)
                return answers.count(self._hit)
            self._tier.on_schedule_end(None)
            time.sleep(0.0002)

    def close(self) -> None:
        """End its threads and give its memory back."""
        self._tier.shutdown()
        del self._tier, self.rows
        gc.collect()  # its threads' closures hold views of the memory
        self._region.cleanup()


def vllm_fs(root: str, count: int, size: int, threads: int | None = None) -> VllmTier:
    """vLLM's file tier; `threads` read and as many write (all of them do either)."""
    # lazy: as above
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    more = {} if threads is None else {"n_read_threads": threads, "n_write_threads": threads}
    return VllmTier(
        count, size, lambda spec, memory: FileSystemTierManager(spec, memory, "fs", root, **more)
    )


def vllm_obj(address: str, bucket: str, count: int, size: int) -> VllmTier:
    """vLLM's object tier (NIXL) against ``http://<address>``."""
    # lazy: as above; and NIXL has to be there
    from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

    store = {
        "bucket": bucket,
        "endpoint_override": address,
        "scheme": "http",
        "access_key": "key",
        "secret_key": "secret",
        "region": "us-east-1",
    }
    return VllmTier(
        count,
        size,
        lambda spec, memory: ObjectStoreSecondaryTierManager(spec, memory, "obj", store),
    )
