# SPDX-License-Identifier: Apache-2.0
"""Copies between accelerator pages and canonical pages, and CRC-32C, against memcpy.

``python -m benchmarks.layout [--mib 64] [--pairs 15]``

The accelerator's side is anonymous memory, the region's side a shared mapping, as in use. The
reference, timed in the same run, is libc's ``memcpy`` of the same number of bytes between the same
two mappings, in one call (or one call for each of two threads). Both sides are larger than a core's
share of the last-level cache.

Limits found: one core that streams its stores fills the memory bus of a small machine, so that a
second thread adds nothing there (two threads stay above memcpy on two). Asking for the first lines
of the next page while this one is copied, and prefetch distances other than 2 KiB, changed nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from benchmarks.harness import Case, measure, rate_case, report
from kvtier._core import layout
from kvtier.layout.pages import KVShape, group_geometry
from kvtier.layout.plan import CopyPool, LayerPage, compile_plan, expand_slots

LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
LIBC.memcpy.restype = ctypes.c_void_p


class Side:
    """A mapping of its own, with every page touched."""

    def __init__(self, size: int, shared: bool) -> None:
        if shared:
            fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            self.map = mmap.mmap(fd, size)
            os.close(fd)
        else:
            self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        self.address = self.bytes.ctypes.data


class Bench:
    """Two sides of equal size, and what is measured between them."""

    def __init__(self, mib: int, pairs: int) -> None:
        self.size = mib << 20
        self.pairs = pairs
        self.accelerator = Side(self.size, shared=False)
        self.region = Side(self.size, shared=True)
        self.cases: list[Case] = []

    def plan(self, shape: KVShape, layers: int):  # type: ignore[no-untyped-def]
        """Plan, block ids, canonical addresses and page ids of a batch that fills both sides."""
        names = [f"layer.{i}" for i in range(layers)]
        geometry = group_geometry([(name, shape) for name in names], shape.block_tokens)
        blocks = self.size // geometry.block_bytes
        area = blocks * shape.canonical_bytes
        pages = [
            LayerPage(
                name,
                self.accelerator.address + i * area,
                shape.canonical_bytes,
                blocks,
                shape.mapping(),
            )
            for i, name in enumerate(names)
        ]
        region = (self.region.address, geometry.block_bytes, blocks)
        rng = np.random.default_rng(3)
        slots = rng.permutation(blocks).astype(np.int64)
        addresses, page_ids = expand_slots(slots, geometry, region[0], region[1])
        ids = rng.permutation(blocks).astype(np.int64)
        return compile_plan(geometry, pages, region), ids, addresses, page_ids

    def memcpy(self, store: bool, threads: int = 1) -> Callable[[], None]:
        """The floor: one call of libc for each thread."""
        dst, src = self.region.address, self.accelerator.address
        if not store:
            dst, src = src, dst
        share = self.size // threads

        def run(i: int) -> None:
            LIBC.memcpy(dst + i * share, src + i * share, share)

        def both() -> None:
            others = [threading.Thread(target=run, args=(i,)) for i in range(1, threads)]
            for thread in others:
                thread.start()
            run(0)
            for thread in others:
                thread.join()

        return both if threads > 1 else lambda: run(0)

    def copies(self, name: str, shape: KVShape, layers: int, target: float) -> None:
        """Store and load on one core.

        On the thread's own clock: no call of these waits, so what neighbours on a shared machine
        take from the core counts for neither side.
        """
        plan, ids, addresses, page_ids = self.plan(shape, layers)
        moved = len(ids) * plan.local_bytes
        for store in (True, False):
            subject = (
                (lambda: plan.store(ids, addresses, page_ids))
                if store
                else (lambda: plan.load(ids, addresses))
            )
            pairs = measure(subject, self.memcpy(store), self.pairs, clock=time.thread_time)
            self.cases.append(
                rate_case(
                    f"{name}, {'store' if store else 'load'}",
                    moved / 1e9,
                    "GB/s",
                    "memcpy",
                    pairs,
                    reference_amount=self.size / 1e9,
                    target=target,
                )
            )

    def whole_pages(self, name: str, shape: KVShape, layers: int) -> None:
        """Short pieces against whole pages by the same kernel: what transposing costs."""
        plan, ids, addresses, page_ids = self.plan(shape, layers)
        whole, *other = self.plan(msgspec.structs.replace(shape, order="HND", kv="packed"), layers)
        pairs = measure(
            lambda: plan.store(ids, addresses, page_ids),
            lambda: whole.store(*other),
            self.pairs,
            clock=time.thread_time,
        )
        amount = len(ids) * plan.local_bytes / 1e9
        self.cases.append(rate_case(f"{name}, store", amount, "GB/s", "whole pages", pairs))

    def threads(self, name: str, shape: KVShape, layers: int) -> None:
        """Two threads against one, and against memcpy on two."""
        plan, ids, addresses, page_ids = self.plan(shape, layers)
        moved = len(ids) * plan.local_bytes / 1e9
        with CopyPool(threads=2) as pool:

            def two() -> int:
                return pool.store(plan, ids, addresses, page_ids).result()

            one = measure(two, lambda: plan.store(ids, addresses, page_ids), self.pairs)
            floor = measure(two, self.memcpy(True, 2), self.pairs)
        self.cases += [
            rate_case(f"{name}, store, 2 threads", moved, "GB/s", "one thread", one, target=1.5),
            rate_case(
                f"{name}, store, 2 threads",
                moved,
                "GB/s",
                "memcpy on 2 threads",
                floor,
                reference_amount=self.size / 1e9,
                target=0.9,
            ),
        ]

    def crc(self, name: str, size: int, function: Callable[..., int], target: float | None) -> None:
        """Bytes read by CRC-32C against bytes read by memcpy into a small, cached buffer."""
        data = memoryview(self.region.map)[:size]
        piece = min(size, 128 << 10)
        sink = np.empty(piece, dtype=np.uint8)
        into, start = sink.ctypes.data, self.region.address
        repeats = max(1, (16 << 20) // size)

        def subject() -> None:
            for _ in range(repeats):
                function(data)

        def reference() -> None:
            for _ in range(repeats):
                for offset in range(0, size, piece):
                    LIBC.memcpy(into, start + offset, piece)

        pairs = measure(subject, reference, self.pairs, clock=time.thread_time)
        data.release()
        self.cases.append(
            rate_case(name, size * repeats / 1e9, "GB/s", "memcpy into cache", pairs, target=target)
        )


def main() -> None:
    """Run all cases and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB on each side")
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    bench = Bench(options.mib, options.pairs)

    def shape(tokens: int, order: str, kv: str, heads: int = 8) -> KVShape:
        return KVShape(
            block_tokens=tokens,
            num_kv_heads=heads,
            head_size=128,
            dtype_bytes=2,
            order=order,
            kv=kv,  # type: ignore[arg-type]
        )

    bench.copies("contiguous pages of 64 KiB", shape(16, "HND", "packed"), 8, 0.9)
    bench.copies("contiguous pages of 512 KiB", shape(128, "HND", "packed"), 8, 0.9)
    bench.copies("contiguous rows of 8 KiB", shape(16, "HND", "packed", heads=1), 8, 0.9)
    bench.copies("512 B transposed, 16 tokens", shape(16, "NHD", "packed"), 8, 0.7)
    bench.copies("512 B transposed, 128 tokens", shape(128, "NHD", "packed"), 8, 0.7)
    bench.copies("256 B transposed, K/V split", shape(16, "NHD", "split"), 8, 0.7)
    bench.copies("256 B interleaved, K/V split HND", shape(128, "HND", "split"), 8, 0.7)
    bench.whole_pages("512 B transposed, 16 tokens", shape(16, "NHD", "packed"), 8)
    bench.whole_pages("256 B transposed, K/V split", shape(16, "NHD", "split"), 8)
    cached = Bench(4, options.pairs * 4)
    cached.copies("contiguous 64 KiB, 4 MiB in cache", shape(16, "HND", "packed"), 8, 0.9)
    cached.copies("512 B transposed, 4 MiB in cache", shape(16, "NHD", "packed"), 8, 0.7)
    bench.cases += cached.cases
    bench.threads("contiguous pages of 64 KiB", shape(16, "HND", "packed"), 8)
    bench.threads("512 B transposed, 16 tokens", shape(16, "NHD", "packed"), 8)
    bench.crc("CRC-32C, 64 KiB in cache", 64 << 10, layout.crc32c, None)
    bench.crc("CRC-32C, all of memory", bench.size, layout.crc32c, 0.9)
    bench.crc("CRC-32C by tables, 64 KiB", 64 << 10, layout.crc32c_tables, None)
    report("layout", bench.cases, mib=options.mib, crc32c_hardware=layout.CRC32C_HARDWARE)


if __name__ == "__main__":
    main()
