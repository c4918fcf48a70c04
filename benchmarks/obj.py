# SPDX-License-Identifier: Apache-2.0
"""The object tier against plain aiobotocore and vLLM's own object tier (NIXL).

``python -m benchmarks.obj [--peer]``; needs NIXL for ``--peer``. The server is the one of
``benchmarks.obj_server``, on loopback: it takes any signature, so that no side hashes its bodies.
Chunks of three sizes are stored and loaded, in rounds in which the sides take turns; what was
loaded is compared. kvtier's side is the tier in a lane of the service, with the service's
checksums in its threads: taken before a store, compared after a load, both within the time.
``_cpu`` cases are the client's processor time a gigabyte, of all its threads.

*raw sockets* is the floor: two threads that send requests on blocking sockets and take bodies into
place, without signature, checksum or error handling.

*presence* asks for 16,384 keys of a windowed group, half of which are not there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import mmap
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import botocore
import numpy as np
import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from benchmarks.harness import Case, Pairs, rate_case, report, time_case
from benchmarks.obj_server import served
from kvtier.config import parse
from kvtier.host.region import Region
from kvtier.runtime.finder import LOAD_BATCH_BYTES
from kvtier.runtime.lane import Lane
from kvtier.runtime.memory import Memory
from kvtier.testing.contract import context, make_env
from kvtier.tiers.base import Slot
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.tier import ObjTier
from kvtier.tiers.registry import make_tier
from kvtier.types import Outcome, Presence, make_key

NOTES = """
*Where the time goes.* A body is copied twice by the kernel: the client's half is the floor, *raw
sockets* (two threads, blocking sockets, nothing else: 0.16 to 0.25 s/GB), and the server's is as
much again. kvtier adds the checksum (0.07 to 0.1 s/GB: memory is read once more, in the service's
threads; before a store too, which nobody else computes) and 75 to 100 us a request, half of it
Python: 0.3 s/GB at 256 KiB, 0.08 at 1 MiB, 0.02 at 4 MiB. Warm, a request costs 55 us; between two
bodies the caches are cold.

*The server.* nginx, which wrote bodies into files of a tmpfs, took 0.6 processor seconds a gigabyte
for a store of 1 or 4 MiB, three times its sender, and was the limit. benchmarks.obj_server takes
0.2 to 0.27 in all cases, less than any client but raw sockets, and one server serves all of them.

*What is missed.* Six times aiobotocore: at 1 and 4 MiB that is more than raw sockets move (1.1 to
1.9 times it for loads, 1.7 to 2.9 for stores); at 256 KiB the 75 us a request are the rest. Half
of NIXL's processor time for loads of 1 and 4 MiB: NIXL needs 0.47 to 0.64 s/GB and computes no
checksum; without kvtier's the ratio would be 1.6 to 2. 1.5 times NIXL's throughput for these loads:
all bodies of kvtier pass through one thread, NIXL's through five alike; at 4 MiB both are within a
quarter of raw sockets. On two processors that others use as well the one thread gets less of them:
beside a load average of 4 to 9 the same cases had 0.8 and 1.0 times NIXL's throughput.

Tried for that, processor seconds a gigabyte (load of 4 MiB, without the checksum where it is not
named): 2, 4, 8, 16, 32, 64 requests at a time (0.28, 0.26, 0.26, 0.24, 0.22, 0.22); SO_RCVBUF of
512 KiB (0.30 where the kernel's own choice has 0.21) and of 2 MiB (0.23); SO_RCVLOWAT of 128 and
512 KiB (0.22, 0.22); SO_SNDBUF for stores (0.20 to 0.23 in all); with the checksum in the threads
for 8 MiB at a time (0.30), for each chunk (0.32), on the loop for 8 MiB at a time (0.28, but then
one thread does everything: best rate 1.2 GB/s instead of 1.6); garbage collected less often
(nothing). Of use were a signature and a head in fewer steps (9 us a request instead of 14), and a
limit of requests that doubles at the start.
"""

SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
ROUND_BYTES = 128 << 20
SERVER_GIB = 1.0
AT_ONCE = 64
"""Requests of aiobotocore at the same time; kvtier's limit is the same."""
JOB_CHUNKS = 16
"""Of vLLM's jobs, and of what kvtier's scheduler sends to be stored at a time."""
RAW_SOCKETS = 2
KEYS = 16_384
BUCKET = "bench"
FASTER_THAN_BOTO, FASTER_THAN_VLLM, CPU_OF_VLLM, FASTER_PRESENCE = 6.0, 1.5, 2.0, 3.0


class Side:
    """One client: stores and loads a round of chunks; what it loaded is compared."""

    async def store(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        raise NotImplementedError

    async def load(self, keys: Sequence[bytes]) -> None:
        raise NotImplementedError

    def compare(self, payloads: Sequence[bytes]) -> bool:
        raise NotImplementedError

    def fill(self, payloads: Sequence[bytes]) -> None:
        """Before a store: chunks are in host memory."""

    def clear(self) -> None:
        """Before a load: they are not."""

    def close(self) -> None:
        """After the last round."""


class Ours(Side):
    """kvtier's tier as the service has it: in a lane, its chunks in a region, checksums in the
    service's threads."""

    def __init__(self, lane: Lane, region: Region, size: int, count: int) -> None:
        self._lane = lane
        self._memory = Memory(region)
        self._size = size
        self._count = count
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def tier(self) -> ObjTier:
        tier = self._lane.tier
        assert isinstance(tier, ObjTier)
        return tier

    def _slots(self, keys: Sequence[bytes], part_chunks: int) -> list[list[Slot]]:
        slots = [self._memory.slot(key, i, 0) for i, key in enumerate(keys)]
        return [slots[i : i + part_chunks] for i in range(0, len(slots), part_chunks)]

    def _views(self) -> list[memoryview]:
        return [self._memory.slot(make_key(bytes(32), 0), i, 0).view for i in range(self._count)]

    def fill(self, payloads: Sequence[bytes]) -> None:
        for view, payload in zip(self._views(), payloads, strict=True):
            view[:] = payload

    async def store(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        async def cascade(items: list[Slot]) -> None:
            await self._memory.take_crcs(items)
            outcomes, _ = await self._lane.store(items, context(120.0), self._stop)
            assert set(outcomes) == {Outcome.DONE}, outcomes

        await asyncio.gather(*map(cascade, self._slots(keys, JOB_CHUNKS)))

    def clear(self) -> None:
        self.fill([bytes(self._size)] * self._count)

    async def load(self, keys: Sequence[bytes]) -> None:
        async def part(items: list[Slot]) -> None:
            outcomes, _ = await self._lane.load(items, context(120.0), self._stop)
            assert set(outcomes) == {Outcome.DONE}, outcomes
            assert all(await self._memory.verify(items))

        await asyncio.gather(*map(part, self._slots(keys, max(1, LOAD_BATCH_BYTES // self._size))))

    def compare(self, payloads: Sequence[bytes]) -> bool:
        return self._views() == list(payloads)

    def close(self) -> None:
        self._memory.close()


class Raw(Side):
    """The floor: blocking sockets, as many as it takes to keep the server busy, no checks at all.

    Each has a thread; a thread sends a request, and takes the answer into place.
    """

    def __init__(self, address: str, size: int, count: int) -> None:
        host, _, port = address.partition(":")
        self._size = size
        self._memory = mmap.mmap(-1, size * count)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._sockets = [socket.create_connection((host, int(port))) for _ in range(RAW_SOCKETS)]
        for one in self._sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pool = ThreadPoolExecutor(RAW_SOCKETS)

    def fill(self, payloads: Sequence[bytes]) -> None:
        for i, payload in enumerate(payloads):
            self._memory[i * self._size : (i + 1) * self._size] = payload

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def compare(self, payloads: Sequence[bytes]) -> bool:
        return self._memory[:] == b"".join(payloads)

    async def store(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        def put(one: socket.socket, name: str, view: memoryview) -> None:
            head = f"PUT {name} HTTP/1.1\r\ncontent-length: {self._size}\r\n\r\n"
            one.sendall(head.encode())
            one.sendall(view)
            assert one.recv(4096).endswith(b"\r\n\r\n")

        await self._each(put, keys)

    async def load(self, keys: Sequence[bytes]) -> None:
        def get(one: socket.socket, name: str, view: memoryview) -> None:
            one.sendall(f"GET {name} HTTP/1.1\r\n\r\n".encode())
            _, end, body = one.recv(4096).partition(b"\r\n\r\n")
            assert end
            view[: len(body)] = body
            filled = len(body)
            while filled < self._size:
                filled += one.recv_into(view[filled:])

        await self._each(get, keys)

    async def _each(
        self, call: Callable[[socket.socket, str, memoryview], None], keys: Sequence[bytes]
    ) -> None:
        memory = memoryview(self._memory)

        def work(number: int) -> None:
            for i in range(number, len(keys), RAW_SOCKETS):
                view = memory[i * self._size : (i + 1) * self._size]
                call(self._sockets[number], f"/{BUCKET}/raw/{keys[i].hex()}", view)

        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.run_in_executor(self._pool, work, i) for i in range(RAW_SOCKETS))
        )

    def close(self) -> None:
        self._pool.shutdown()
        for one in self._sockets:
            one.close()


class Boto(Side):
    """Plain aiobotocore."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._loaded: list[bytes] = []

    async def store(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        async def put(key: bytes, body: bytes) -> None:
            async with self._limit:
                await self._client.put_object(Bucket=BUCKET, Key=f"b/{key.hex()}", Body=body)

        await asyncio.gather(*map(put, keys, payloads))

    async def load(self, keys: Sequence[bytes]) -> None:
        async def get(key: bytes) -> bytes:
            async with self._limit:
                found = await self._client.get_object(Bucket=BUCKET, Key=f"b/{key.hex()}")
                body: bytes = await found["Body"].read()
                return body

        self._loaded = await asyncio.gather(*map(get, keys))

    def compare(self, payloads: Sequence[bytes]) -> bool:
        return self._loaded == list(payloads)

    async def present(self, names: Sequence[str]) -> int:
        async def head(name: str) -> bool:
            async with self._limit:
                try:
                    await self._client.head_object(Bucket=BUCKET, Key=name)
                except self._client.exceptions.ClientError:
                    return False
                return True

        return sum(await asyncio.gather(*map(head, names)))


class Vllm(Side):
    """vLLM's object tier; its calls block, so that they have the process to themselves."""

    def __init__(self, address: str, size: int, count: int) -> None:
        from benchmarks.vllm_tiers import vllm_obj  # lazy: needs vLLM and NIXL

        self._peer = vllm_obj(address, BUCKET, count, size)

    def fill(self, payloads: Sequence[bytes]) -> None:
        for row, payload in zip(self._peer.rows, payloads, strict=True):
            row[:] = np.frombuffer(payload, dtype=np.uint8)

    async def store(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        self._peer.store(keys, JOB_CHUNKS)

    def clear(self) -> None:
        self._peer.rows[:] = 0

    async def load(self, keys: Sequence[bytes]) -> None:
        self._peer.load(keys, JOB_CHUNKS)

    def compare(self, payloads: Sequence[bytes]) -> bool:
        return [row.tobytes() for row in self._peer.rows] == list(payloads)

    def close(self) -> None:
        self._peer.close()


class Times:
    """Seconds and processor seconds of each side's calls, round by round."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, list[float]] = defaultdict(list)
        self.cpu: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        begin, used = time.perf_counter(), time.process_time()
        yield
        self.wall[name].append(time.perf_counter() - begin)
        self.cpu[name].append(time.process_time() - used)

    def pairs(self, subject: str, reference: str, *, cpu: bool = False) -> Pairs:
        times = self.cpu if cpu else self.wall
        return Pairs(tuple(times[subject]), tuple(times[reference]))


@contextlib.asynccontextmanager
async def opened(address: str, size: int, count: int) -> AsyncIterator[Ours]:
    """kvtier's tier, with host memory for `count` chunks."""
    config = parse(
        {
            "capacity_bytes": size * count,
            "tiers": [
                {
                    "type": "obj",
                    "bucket": BUCKET,
                    "endpoint_override": f"http://{address}",
                    "access_key": "key",
                    "secret_key": "secret",
                    "sign_payload": "never",
                    "concurrency": AT_ONCE,
                    "presence_requests": 1 << 20,
                }
            ],
        }
    )
    env = make_env(sizes=[size], num_slots=count, definitions=METRICS)
    lane = Lane(
        0,
        make_tier(config.tiers[0], env),
        config.tiers[0],
        config,
        env.recorder,
        lambda *health: None,
        lambda contents: None,
    )
    with Region.create(f"benchmark-{os.getpid()}", env.geometry, env.namespace, 1) as region:
        region.populate(lambda slots: None)
        cause = await lane.open(time.monotonic() + 5)
        if cause:
            raise SystemExit(cause)
        ours = Ours(lane, region, size, count)
        try:
            yield ours
        finally:
            await lane.aclose(time.monotonic() + 5)
            ours.close()


@contextlib.asynccontextmanager
async def boto(address: str) -> AsyncIterator[Boto]:
    """aiobotocore's client, which signs nothing."""
    config = AioConfig(
        max_pool_connections=AT_ONCE,
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=botocore.UNSIGNED,
    )
    async with get_session().create_client(
        "s3", region_name="us-east-1", endpoint_url=f"http://{address}", config=config
    ) as client:
        yield Boto(client)


async def transfers(name: str, size: int, address: str, rounds: int, peer: bool) -> list[Case]:
    """Cases of one size."""
    count = ROUND_BYTES // size
    rng = np.random.default_rng(size)
    payloads = [rng.bytes(size) for _ in range(count)]
    times = Times()
    async with opened(address, size, count) as ours, boto(address) as theirs:
        raw = Raw(address, size, count)
        sides: dict[str, Side] = {"ours": ours, "raw sockets": raw, "aiobotocore": theirs}
        if peer:
            sides["vllm"] = Vllm(address, size, count)
        # As the service does once its tiers are open.
        gc.collect()
        gc.freeze()
        for turn in range(rounds + 1):
            keys = [make_key(rng.bytes(32), 0) for _ in range(count)]
            order = list(sides.items())[:: 1 if turn % 2 else -1]
            for side in sides.values():
                side.fill(payloads)
            for who, side in order:
                with times.of(f"store {who}"):
                    await side.store(keys, payloads)
            for side in sides.values():
                side.clear()
            for who, side in order:
                with times.of(f"load {who}"):
                    await side.load(keys)
                if not side.compare(payloads):
                    raise SystemExit(f"{who}: what came back is something else")
            if turn == 0:
                times = Times()  # it has filled pools, and found the limit
        assert ours.tier._bulk is not None
        print(f"{name}: {ours.tier._bulk.limit.places} requests at a time", file=sys.stderr)
        gc.unfreeze()
        for side in sides.values():
            side.close()
    gigabytes = count * size / 1e9
    cases = []
    for what in ("store", "load"):
        mine = f"{what} ours"

        def rate(reference: str, target: float | None, what: str = what, mine: str = mine) -> Case:
            pairs = times.pairs(mine, f"{what} {reference}")
            return rate_case(f"{what} {name}", gigabytes, "GB/s", reference, pairs, target=target)

        def cpu(reference: str, target: float | None, what: str = what, mine: str = mine) -> Case:
            pairs = times.pairs(mine, f"{what} {reference}", cpu=True)
            return time_case(
                f"{what} {name}_cpu",
                gigabytes,
                "s/GB",
                f"{reference}-cpu-seconds",
                pairs,
                target=target,
            )

        cases += [rate("raw sockets", None), cpu("raw sockets", None)]
        cases += [rate("aiobotocore", FASTER_THAN_BOTO), cpu("aiobotocore", None)]
        if peer:
            cases += [rate("vllm", FASTER_THAN_VLLM), cpu("vllm", CPU_OF_VLLM)]
    return cases


async def presence(address: str, rounds: int) -> Case:
    """16,384 questions, half of them in vain."""
    rng = np.random.default_rng(7)
    keys = [make_key(rng.bytes(32), 0) for _ in range(KEYS)]
    times = Times()
    async with opened(address, 4096, KEYS // 2) as ours, boto(address) as theirs:
        tier = ours.tier
        await ours.store(keys[: KEYS // 2], [])
        asked = [
            key for pair in zip(keys[: KEYS // 2], keys[KEYS // 2 :], strict=True) for key in pair
        ]
        names = [tier.name_of(key) for key in asked]
        for turn in range(rounds):
            tier.forget_presence()

            async def mine() -> None:
                with times.of("ours"):
                    answers = await tier.exists(asked, context(120.0, windowed=True))
                assert answers.count(Presence.PRESENT) == KEYS // 2

            async def other() -> None:
                with times.of("aiobotocore"):
                    assert await theirs.present(names) == KEYS // 2

            order: list[Callable[[], Any]] = [mine, other]
            for side in order if turn % 2 else order[::-1]:
                await side()
    return rate_case(
        "presence of 16384 keys",
        KEYS / 1000,
        "k/s",
        "aiobotocore",
        times.pairs("ours", "aiobotocore"),
        target=FASTER_PRESENCE,
    )


async def measure(arguments: argparse.Namespace, address: str) -> list[Case]:
    cases = []
    for name, size in SIZES.items():
        cases += await transfers(name, size, address, arguments.rounds, arguments.peer)
    return [*cases, await presence(address, max(2, arguments.rounds // 2))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer", action="store_true", help="also vLLM's object tier (NIXL)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    # NIXL's SDK would send bodies in pieces with a checksum behind, which the server takes for the
    # object; and vLLM's tier asks for telemetry that NIXL keeps on demand only.
    os.environ |= {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "NIXL_TELEMETRY_ENABLE": "y",
    }
    with (
        served(SERVER_GIB) as address,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        cases = runner.run(measure(arguments, address))
    report("obj", cases)


if __name__ == "__main__":
    main()
