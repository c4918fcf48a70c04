# SPDX-License-Identifier: Apache-2.0
"""Copies between a GPU and the region: first the tests of ``tests/device`` on it, then speeds.

``python -m benchmarks.cuda_copy``; needs torch with CUDA and pytest, and no vLLM. A figure is a
store or a load of many chunks, against one plain copy of as many bytes between the GPU and pinned
memory (``cudaMemcpyAsync``) in the same run. Ends with exit code 2 where there is no GPU, and with
1 if a test fails.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Case, measure, rate_case, report
from kvtier.host.region import Region
from kvtier.layout.pages import KVShape, group_geometry
from kvtier.layout.plan import LayerPage, compile_plan, expand_slots
from kvtier.types import make_geometry

LAYERS = 8
TOKENS = 16
TOTAL_BYTES = 512 << 20
CHUNK_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
TEST_SECONDS = 600


def missing() -> str | None:
    """Why there is nothing to measure here."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch  # lazy: seconds, and not everywhere

    return None if torch.cuda.is_available() else "torch finds no GPU"


def run_tests() -> str:
    """The last line of the tests, on the real device too. SystemExit if they fail."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/device"],
        cwd=root,
        env=os.environ | {"KVTIER_REQUIRE": "torch-cuda"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TEST_SECONDS,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(1)
    return done.stdout.strip().splitlines()[-1]


class Subject:
    """An engine with `TOTAL_BYTES` of blocks, and as many chunks in a region."""

    def __init__(self, device: Any, chunk_bytes: int, order: Any, tp: int, directory: str) -> None:
        import torch  # lazy: as above

        from kvtier.device.streams import StreamEngine  # lazy: as above

        page_bytes = chunk_bytes // LAYERS
        shape = KVShape(
            block_tokens=TOKENS,
            num_kv_heads=8 * tp,
            head_size=page_bytes // (TOKENS * 8 * 2 * 2),
            dtype_bytes=2,
            order=order,
            kv="split",
        )
        parts = [(f"layer.{index}", shape) for index in range(LAYERS)]
        group = group_geometry(parts, TOKENS)
        self.chunks = TOTAL_BYTES // chunk_bytes
        pages = []
        for name, _ in parts:
            tensor = torch.zeros((self.chunks, page_bytes), dtype=torch.uint8, device=device.device)
            pages.append(
                LayerPage(
                    name,
                    tensor.data_ptr(),
                    page_bytes,
                    self.chunks,
                    shape.mapping(tp, 0),
                    owner=tensor,
                )
            )
        geometry = make_geometry([group], self.chunks * group.payload_bytes)
        self.region = Region.create("bench", geometry, {}, tp, directory=directory)
        self.region.populate(lambda available: None)
        plan = compile_plan(group, pages, region=self.region.area(0), owner=self.region)
        self.engine = StreamEngine(device, self.region, [pages], [plan])
        self.engine.open()
        rng = np.random.default_rng(0)
        self._blocks = rng.permutation(self.chunks).astype(np.int64)
        slots = rng.permutation(self.chunks).astype(np.int64)
        self._addresses, self._page_ids = expand_slots(
            slots, group, self.region.base_address, geometry.slot_bytes
        )
        self.longest_submit = 0.0

    def store(self) -> None:
        """All blocks to all slots."""
        start = time.perf_counter()
        future = self.engine.store(0, self._blocks, self._addresses, self._page_ids)
        self.longest_submit = max(self.longest_submit, time.perf_counter() - start)
        future.result()

    def load(self) -> None:
        """All slots to all blocks."""
        start = time.perf_counter()
        future = self.engine.load(0, self._blocks, self._addresses)
        self.longest_submit = max(self.longest_submit, time.perf_counter() - start)
        future.result()

    def close(self) -> None:
        """Engine and region."""
        self.engine.close()
        self.region.close()


def plain_copy(target: Any, source: Any) -> Callable[[], None]:
    """One copy from end to end."""
    import torch  # lazy: as above

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return copy


def cases(chunk_bytes: int, order: str, tp: int, directory: str) -> Sequence[Case]:
    """Store and load of chunks of `chunk_bytes` of this rank."""
    import torch  # lazy: as above

    from kvtier.device.cuda import CudaDevice  # lazy: as above

    device = CudaDevice(torch.device("cuda", 0))
    flat = torch.zeros(TOTAL_BYTES, dtype=torch.uint8, device=device.device)
    pinned = torch.zeros(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    subject = Subject(device, chunk_bytes, order, tp, directory)
    try:
        stores = measure(subject.store, plain_copy(pinned, flat))
        loads = measure(subject.load, plain_copy(flat, pinned))
    finally:
        subject.close()
    print(
        f"submit of {subject.chunks} chunks: {subject.longest_submit * 1e3:.2f} ms at most",
        file=sys.stderr,
    )
    name = f"{chunk_bytes >> 10} KiB, {order}, tp {tp}"
    amount = TOTAL_BYTES / 1e9
    return [
        rate_case(f"store {name}", amount, "GB/s", "memcpy", stores),
        rate_case(f"load {name}", amount, "GB/s", "memcpy", loads),
    ]


def main() -> int:
    """Exit code."""
    reason = missing()
    if reason is not None:
        print(f"cuda_copy: nothing to measure, {reason}")
        return 2
    import torch  # lazy: as above

    tests = run_tests()
    found: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir="/dev/shm") as directory:
        for chunk_bytes in CHUNK_BYTES:
            found += cases(chunk_bytes, "NHD", 1, directory)
        found += cases(CHUNK_BYTES[-1], "HND", 1, directory)
        found += cases(CHUNK_BYTES[-1], "NHD", 2, directory)
    report(
        "cuda_copy",
        found,
        tests=tests,
        gpu=torch.cuda.get_device_name(0),
        torch=torch.__version__,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
