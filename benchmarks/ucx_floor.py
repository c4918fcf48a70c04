# SPDX-License-Identifier: Apache-2.0
"""Gets between two processes of this machine, beside UCX's own ``ucx_perftest``.

``python -m benchmarks.ucx_floor``. Both read one chunk of the other process again and again, in
memory that nobody has written (so ``ucx_perftest`` has it: whatever its size, what is read is one
page of zeros in a cache). ``region`` reads 64 MiB of a file in /dev/shm in order, as the peer tier
does; its reference is the same, so it has no target. Ours hears of a peer's end, the reference does
not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Case, Pairs, rate_case, report
from kvtier._core import ucx
from tests.core.ucx_peer import Peer, SharedMemory

CHUNK_BYTES = (64 << 10, 1 << 20, 8 << 20)
ROUND_BYTES = 2 << 30
SPREAD_BYTES = 64 << 20
TRANSPORTS = "cma,self,tcp"
TARGET = 0.85
PAIRS = 7
SECONDS = 60


class Reader:
    """This process: reads a peer's memory."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.memory = SharedMemory(SPREAD_BYTES)
        self.memory.bytes[:] = 1
        self.worker = ucx.Worker(ucx.Context())
        self.endpoint = self.worker.connect(peer.worker, print)
        self.key = self.endpoint.unpack(peer.rkey)

    def seconds(self, offsets: np.ndarray, chunk: int, way: str = "get") -> float:
        """Time of one batch with these offsets on both sides."""
        ended: list[str | None] = []
        lengths = np.full(len(offsets), chunk, np.int64)
        start = time.perf_counter()
        getattr(self.endpoint, f"{way}_batch")(
            self.memory.address + offsets, self.peer.address + offsets, lengths, self.key,
            ended.append,
        )  # fmt: skip
        while not ended:
            self.worker.progress()
        took = time.perf_counter() - start
        if ended[0] is not None:
            raise SystemExit(ended[0])
        return took

    def close(self) -> None:
        self.worker.close()
        self.memory.close()


def program() -> list[str]:
    """``ucx_perftest`` of the wheel, with its libraries."""
    wheel = importlib.util.find_spec("libucx")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        if Path(folder, "bin/ucx_perftest").is_file():
            return ["env", f"LD_LIBRARY_PATH={folder}/lib", f"{folder}/bin/ucx_perftest"]
    raise SystemExit("ucx_perftest comes with `pip install libucx-cu12`")


def reference(chunk: int, test: str = "ucp_get") -> float:
    """Seconds of as many bytes with ``ucx_perftest``, which measures by itself."""
    times = ROUND_BYTES // chunk
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen([*program(), "-p", port], stdout=subprocess.DEVNULL)
    try:
        command = [*program(), "127.0.0.1", "-p", port, "-t", test, "-s", str(chunk), "-f", "-q"]
        for _ in range(50):
            time.sleep(0.1)
            done = subprocess.run(
                [*command, "-n", str(times), "-w", str(max(4, times // 20))],
                capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                # Its last columns: MB/s of MiB, and messages a second.
                return chunk * times / (float(done.stdout.split()[-3]) * (1 << 20))
    finally:
        server.kill()
        server.wait()
    raise SystemExit(f"ucx_perftest: {done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--transports", default=TRANSPORTS, help="UCX_TLS of all processes")
    args = parser.parse_args()
    os.environ["UCX_TLS"] = args.transports
    cases: list[Case] = []
    with Peer(SPREAD_BYTES, seed=1) as peer, Peer(SPREAD_BYTES, seed=None) as blank:
        reader, of_blank = Reader(peer), Reader(blank)
        for chunk in CHUNK_BYTES:
            same = np.zeros(ROUND_BYTES // chunk, np.int64)
            region = np.resize(np.arange(0, SPREAD_BYTES, chunk), len(same)).astype(np.int64)
            ours: tuple[list[float], list[float], list[float]] = ([], [], [])
            calls = (
                lambda same=same, chunk=chunk: of_blank.seconds(same, chunk),
                lambda chunk=chunk: reference(chunk),
                lambda region=region, chunk=chunk: reader.seconds(region, chunk),
            )
            reader.seconds(region, chunk)
            for pair in range(args.pairs):
                for which in (0, 1, 2) if pair % 2 == 0 else (2, 1, 0):
                    ours[which].append(calls[which]())
            name = f"get, {chunk >> 10} KiB"
            for case, times in ((name, ours[0]), (f"{name}, region", ours[2])):
                cases.append(
                    rate_case(
                        case, ROUND_BYTES / 1e9, "GB/s", "ucx_perftest",
                        Pairs(tuple(times), tuple(ours[1])),
                        target=TARGET if case == name else None,
                    )
                )  # fmt: skip
        reader.close()
        of_blank.close()
    report("ucx_floor", cases, ucx=ucx.load(), transports=args.transports)


if __name__ == "__main__":
    sys.exit(main())
