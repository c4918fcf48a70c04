# SPDX-License-Identifier: Apache-2.0
"""Chunks from another process over TCP on loopback, beside iperf3.

    python -m benchmarks.peer [--rounds N] [--only SIZE]

One process owns 128 MiB of chunks, another reads them, in batches of at most 16 MiB, four at the
same time, without checksums; each round reads all of them four times, and the bytes are compared
after it. iperf3 moves as many bytes in one stream, in its default blocks, 128 KiB for TCP: both its
ends use the same memory again and again, which stays in the processors' caches. Needs iperf3.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import uvloop

from benchmarks import harness
from benchmarks.harness import Case, Pairs
from benchmarks.peer_owner import Memory, content
from kvtier.tiers.p2p.tcp import TcpTransport
from kvtier.tiers.p2p.tcp_link import TcpLink
from kvtier.tiers.p2p.transport import Target

NOTES = """
*Ways that were tried* (ratio to iperf3 at 64 KiB, 256 KiB, 1 MiB, 8 MiB; interleaved on two
processors under load): plain sockets with many chunks a system call 1.06, 0.87, 0.96, 1.05; the
same with one chunk a call at the reader 0.68, 0.63, 1.08, 0.75; the loop's transports (uvloop's
``asyncio.BufferedProtocol`` and ``transport.write`` of each chunk), slot by slot 0.48, 0.73, 0.91,
0.77, and with a buffer that spans neighbouring slots 0.66, 0.98, 0.77, 0.83.

*Bytes a system call.* Sent and received in pieces of up to 4 MiB the two ends take turns: the owner
waits half of the time. 512 KiB to send and 1 MiB to receive: 1.21, 1.09, 1.14, 1.08; 512 KiB both:
0.94, 0.87, 1.22, 0.92; 256 KiB both: 0.88, 0.75, 0.84, 0.78.

*Sockets.* SO_SNDBUF of 512 KiB, with 512 KiB both, is best on loopback (1.30, 1.50, 1.38, 1.30, and
a quarter less processor time: what passes stays in the caches), but would be the limit of a network
with a longer way; the kernel's own choice is kept. SO_RCVBUF of 512 KiB 0.89, 0.99, 0.97, 0.84.
SO_RCVLOWAT of 128 KiB 0.98, 0.98, 1.03, 1.07: nothing. MSG_ZEROCOPY was not tried: the kernel
copies on loopback all the same, and its notices come as EPOLLERR, at which uvloop stops to poll.

*Connections.* Two or four of one link, with four reads at a time: 0.5 to 0.9, where one has 0.9 to
1.3. One read at a time: 0.6 to 0.7, so there should be two.
"""

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "8 MiB": 8 << 20}
MEMORY_BYTES = 128 << 20
BATCH_BYTES = 16 << 20
AT_ONCE = 4
PASSES = 4
SECONDS = 60
IPERF_SHARE = 0.85


class Reader:
    """Reads everything that the owner has."""

    def __init__(self, link: TcpLink) -> None:
        self._link = link
        self._memory = Memory(MEMORY_BYTES)
        self._expected = content(MEMORY_BYTES)

    async def seconds(self, size: int) -> float:
        """For all passes, with chunks of `size`."""
        targets = [Target(i, view, 0) for i, view in enumerate(self._memory.views(size))]
        count = BATCH_BYTES // size
        parts = iter([range(i, i + count) for i in range(0, len(targets), count)] * PASSES)

        async def work() -> None:
            for part in parts:
                await self._link.read(size, part.start, targets[part.start : part.stop])

        self._memory.array[:] = 0
        start = time.perf_counter()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        seconds = time.perf_counter() - start
        if not np.array_equal(self._memory.array, self._expected):
            raise SystemExit("benchmarks.peer: other bytes came")
        return seconds


@contextlib.contextmanager
def owner() -> Iterator[bytes]:
    """The other process; gives its offer."""
    command = [sys.executable, "-m", "benchmarks.peer_owner", str(MEMORY_BYTES)]
    command += [str(size) for size in SIZES.values()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield bytes.fromhex(process.stdout.readline())
        process.communicate(timeout=SECONDS)


def iperf3(size: int) -> float:
    """Seconds that iperf3 takes for `size` bytes: a server, a client, one stream."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with subprocess.Popen(
        ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise SystemExit("benchmarks.peer: iperf3's server has ended")
        client = ["iperf3", "--client", "127.0.0.1", "--port", port, "--json", "--bytes", str(size)]
        done = subprocess.run(client, capture_output=True, check=True, timeout=SECONDS)
        server.communicate(timeout=SECONDS)
    received = json.loads(done.stdout)["end"]["sum_received"]
    return size * 8 / float(received["bits_per_second"])


async def transfers(names: Sequence[str], rounds: int) -> list[Case]:
    """All sizes beside iperf3, in turns."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    with owner() as offer:
        transport = TcpTransport("127.0.0.1", 0, lambda session, number: None)
        await transport.open()
        try:
            reader = Reader(await transport.connect("127.0.0.1", offer, time.monotonic() + 10))
            for number in range(-1, rounds):
                for name in names:
                    size = SIZES[name]
                    # The loop has nothing to do while iperf3 runs.
                    if number % 2:
                        theirs = iperf3(MEMORY_BYTES * PASSES)
                        ours = await reader.seconds(size)
                    else:
                        ours = await reader.seconds(size)
                        theirs = iperf3(MEMORY_BYTES * PASSES)
                    if number >= 0:
                        times[name][0].append(ours)
                        times[name][1].append(theirs)
        finally:
            await transport.aclose()
    return [
        harness.rate_case(
            f"tcp read {name}",
            MEMORY_BYTES * PASSES / 1e9,
            "GB/s",
            "iperf3",
            Pairs(tuple(ours), tuple(theirs)),
            target=IPERF_SHARE,
        )
        for name, (ours, theirs) in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=SIZES, default=None, help="one size")
    args = parser.parse_args(argv)
    if shutil.which("iperf3") is None:
        raise SystemExit("benchmarks.peer: iperf3 is not installed; apt-get install iperf3")
    names = list(SIZES) if args.only is None else [args.only]
    cases = uvloop.run(transfers(names, args.rounds))
    harness.report("peer", cases, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
