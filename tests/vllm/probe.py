# SPDX-License-Identifier: Apache-2.0
"""Methods that the tests add to vLLM's worker (``worker_extension_cls``): look at KV, damage slots.

Runs inside the worker process, called through ``collective_rpc``. Its only way to the accelerator's
blocks is the tensor that vLLM registered, never a copy plan, so it can judge the plans.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from tests.vllm.damage import Damage, swap


class Probe(Damage):
    """Mixed into vLLM's worker class; names carry a prefix, since a clash is refused."""

    def kvt_worker(self) -> Any:
        """The kvtier worker of this rank."""
        # lazy: only inside a vLLM worker.
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker

    def kvt_state(self) -> dict[str, Any]:
        """Counters and geometry of this rank."""
        worker = self.kvt_worker()
        geometry = worker.region.geometry
        return {
            "pid": os.getpid(),
            "rank": worker.rank,
            "stored_chunks": worker.stored_chunks,
            "stored_bytes": worker.stored_bytes,
            "loaded_chunks": worker.loaded_chunks,
            "loaded_bytes": worker.loaded_bytes,
            "failed_chunks": worker.failed_chunks,
            "finished": worker.region.finished(worker.rank),
            "num_slots": geometry.num_slots,
            "payload_bytes": list(geometry.payload_bytes),
            "block_bytes": [group.block_bytes for group in geometry.groups],
            "chunk_tokens": [
                group.block_tokens * group.blocks_per_chunk for group in geometry.groups
            ],
            "windows": [group.window_chunks for group in geometry.groups],
            "portable": worker.pages.portable,
            "copy_cpus": [
                sorted(os.sched_getaffinity(thread.native_id or 0))
                for thread in threading.enumerate()
                if thread.name.startswith("kvtier-copy")
            ],
            "main_cpus": sorted(os.sched_getaffinity(0)),
        }

    def kvt_pipeline(self) -> None:
        """Make what a later stage receives into: vLLM does that in a dummy run, which its worker of
        the CPU platform leaves out, and fails at the first step."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def kvt_loads(self) -> list[list[int]]:
        """Chunks and accelerator blocks that each group has loaded since the last call; the first
        one begins to count."""
        worker = self.kvt_worker()
        counts = vars(self).get("kvt_counts")
        if counts is None:
            load = worker.jobs.load

            def note(job_id: int, first: int, number: int, work: Any) -> None:
                for group, chunks in work:
                    entry = vars(self)["kvt_counts"][group]
                    entry[0] += len(chunks)
                    entry[1] += sum(len(chunk.block_ids) for chunk in chunks)
                load(job_id, first, number, work)

            worker.jobs.load = note
        vars(self)["kvt_counts"] = [[0, 0] for _ in worker.region.geometry.groups]
        return counts or []

    def kvt_steps(self) -> list[int]:
        """Steps that brought this rank a job and those that brought none since the last call; the
        first one begins to count."""
        worker = self.kvt_worker()
        counts = vars(self).get("kvt_step_counts")
        if counts is None:
            jobs, get_finished = worker.jobs, worker.get_finished
            store, load = jobs.store, jobs.load
            given = [0]

            def count(submit: Any) -> Any:
                def counted(*args: Any) -> Any:
                    given[0] += 1
                    return submit(*args)

                return counted

            def step() -> Any:
                vars(self)["kvt_step_counts"][0 if given[0] else 1] += 1
                given[0] = 0
                return get_finished()

            jobs.store, jobs.load, worker.get_finished = count(store), count(load), step
        vars(self)["kvt_step_counts"] = [0, 0]
        return counts or []

    def kvt_digests(self, group: int) -> list[str]:
        """Digest of each accelerator block over all layers of `group`."""
        caches = self.kvt_worker().pages.caches
        pages = [
            (caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes)
            for ref in caches.group_data_refs[group]
        ]
        digests = []
        for block in range(pages[0][0].shape[0]):
            digest = hashlib.sha256()
            for tensor, size in pages:
                digest.update(tensor[block, :size].contiguous().numpy().tobytes())
            digests.append(digest.hexdigest())
        return digests

    def kvt_heads(self) -> list[list[str]]:
        """Of each accelerator block, a digest of each head that this rank has: its K and its V over
        all layers. Latent rows count as one head.

        From the tensors of vLLM's attention layers, split as the CPU backend splits them: pages,
        mappings and plans have no part in it.
        """
        import torch  # lazy: as above

        config: Any = self
        layers = config.vllm_config.compilation_config.static_forward_context
        (group,) = self.kvt_worker().region.geometry.groups
        blocks: list[list[Any]] = []
        for page in group.pages:
            cache = layers[page.layer].kv_cache
            if cache.dim() == 4:  # blocks, heads, tokens, K and V
                count, heads, tokens, _ = cache.shape
                parts = cache.view(count, heads, tokens * 2, -1).chunk(2, dim=2)
            else:  # blocks, tokens, latent row
                parts = [cache.unsqueeze(1)]
            blocks = blocks or [[hashlib.sha256() for _ in parts[0][0]] for _ in cache]
            for block, digests in enumerate(blocks):
                for head, digest in enumerate(digests):
                    for part in parts:
                        one = part[block, head].contiguous().view(torch.uint8)
                        digest.update(one.numpy().tobytes())
        return [[digest.hexdigest() for digest in digests] for digests in blocks]

    def kvt_host_digests(self) -> list[str]:
        """Digest, as ``kvt_digests`` takes it, of this rank's heads of each block in host memory.

        Only for one group of full attention whose heads are split evenly over the ranks. Derived
        from the canonical layout's definition alone: a page is head after head, so the heads of a
        rank lie together.
        """
        worker = self.kvt_worker()
        region = worker.region
        (group,) = region.geometry.groups
        digests = []
        for slot in range(region.available_slots):
            payload = region.slot_view(slot, group.payload_bytes)
            for block in range(group.blocks_per_chunk):
                digest = hashlib.sha256()
                for page in group.pages:
                    local = page.size_bytes // region.ranks
                    start = block * group.block_bytes + page.offset_bytes + worker.rank * local
                    digest.update(payload[start : start + local])
                digests.append(digest.hexdigest())
        return digests

    def kvt_break_loads(self) -> None:
        """From now on every copy from host memory fails before it has moved a byte."""

        def fail(*_: Any) -> Any:
            raise RuntimeError("broken by the test")

        self.kvt_worker().jobs.engine.load = fail

    def kvt_slow_copies(self, seconds: float) -> None:
        """From now on every copy begins so much later, on a thread of its own; 0: as before."""
        engine = self.kvt_worker().jobs.engine
        plain = vars(self).setdefault("kvt_plain_copies", (engine.store, engine.load))
        engine.store, engine.load = plain
        if not seconds:
            return

        def slow(copy: Any) -> Any:
            def later(*args: Any) -> Future[int]:
                done: Future[int] = Future()

                def start() -> None:
                    try:
                        done.set_result(copy(*args).result())
                    except Exception as exc:  # noqa: BLE001  told to whoever waits
                        done.set_exception(exc)

                threading.Timer(seconds, start).start()
                return done

            return later

        engine.store, engine.load = slow(engine.store), slow(engine.load)

    def kvt_slow_steps(self, seconds: float) -> None:
        """From now on every step that computes takes so much longer; 0: as before."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        plain = vars(self).setdefault("kvt_plain_step", runner.execute_model)

        def slow(step: Any, *args: Any, **named: Any) -> Any:
            if step.total_num_scheduled_tokens:
                time.sleep(seconds)
            return plain(step, *args, **named)

        runner.execute_model = slow if seconds else plain

    def kvt_wipe(self) -> None:
        """Overwrite every accelerator block, so that only a load can bring old bytes back."""
        for cache in self.kvt_worker().pages.caches.tensors:
            cache.tensor.fill_(17)

    def kvt_flip_everywhere(self, rank: int) -> None:
        """Flip a high bit in every 64 bytes of host memory; a second call undoes it."""
        worker = self.kvt_worker()
        region = worker.region
        if worker.rank == rank:
            for slot in range(region.available_slots):
                view = region.slot_view(slot, region.geometry.slot_bytes)
                np.frombuffer(view, dtype=np.uint8)[33::64] ^= 0x40

    def kvt_swap_heads(self, parts: int, rank: int) -> None:
        """The first two of `parts` equal parts of each page of the region change places, done by
        one rank; a second call undoes it."""
        worker = self.kvt_worker()
        region = worker.region
        if worker.rank != rank:
            return
        (group,) = region.geometry.groups
        for slot in range(region.available_slots):
            payload = np.frombuffer(region.slot_view(slot, group.payload_bytes), dtype=np.uint8)
            for block in range(group.blocks_per_chunk):
                for page in group.pages:
                    start = block * group.block_bytes + page.offset_bytes
                    tile = page.size_bytes // parts
                    swap(payload[start:][:tile], payload[start + tile :][:tile])
