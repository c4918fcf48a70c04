# SPDX-License-Identifier: Apache-2.0
"""Specs whose loads go wrong in a way that nothing in the engine sees: controls for the load
generator's comparison. vLLM loads them by ``spec_module_path``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier.bench.drivers.stock import StockSpec
from kvtier.vllm.spec import KVTierOffloadingSpec
from kvtier.vllm.transfers import SlotTransfer


class WrongStockSpec(StockSpec):
    """The rows of each load come in reverse."""

    def get_worker(self, kv_caches: Any) -> Any:
        def reverse(rows: Any) -> Any:
            return CPULoadStoreSpec(rows.chunk_ids[::-1].tolist())

        return changing(super().get_worker(kv_caches), reverse)


class WrongSpec(KVTierOffloadingSpec):
    """The slots of each load come in reverse."""

    def get_worker(self, kv_caches: Any) -> Any:
        def reverse(one: SlotTransfer) -> SlotTransfer:
            slots = one.slots[::-1].copy()
            return SlotTransfer(slots, one.groups, one.first_transfer, one.num_transfers)

        return changing(super().get_worker(kv_caches), reverse)


def changing(worker: Any, change: Callable[[Any], Any]) -> Any:
    """`worker`, with another source of each load."""
    submit_load = worker.submit_load

    def submit(job_id: int, source: Any, blocks: Any) -> Any:
        return submit_load(job_id, change(source), blocks)

    worker.submit_load = submit
    return worker
