# SPDX-License-Identifier: Apache-2.0
"""Processes of ``benchmarks.peer`` that have to do with vLLM; each is told what to do line by line.

``python -m benchmarks.peer_vllm writer|target`` holds one end of vLLM's NixlTransport.
``python -m benchmarks.peer_vllm kvtier|stock`` is an instance with host memory and a peer tier, in
the steps that vLLM's engine makes: one every millisecond when it has nothing to compute.
"""

from __future__ import annotations

import abc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peer_owner import Memory, content

CHUNK_BYTES = 256 << 10
CHUNKS = 16
"""Of one request."""
SLOTS = 1536
IDLE_STEP_SECONDS = 0.001
SECONDS = 60.0


# Both kinds: a process that is told what to do.
class Child:
    """One such process, and its answers.

    Parameters
    ----------
    arguments : sequence of str
    environment : dict, optional
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer_vllm", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **(environment or {})},
        )

    def begin(self, *command: Any) -> None:
        """Have something done."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")

    def answer(self) -> Any:
        """What came of it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["answer"]
        raise SystemExit(f"benchmarks.peer: a process ended with code {self._process.wait()}")

    def do(self, *command: Any) -> Any:
        """Both."""
        self.begin(*command)
        return self.answer()

    def pause(self) -> None:
        """It takes no processor time; NIXL's threads always do."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate()


def say(answer: Any) -> None:
    """To the parent."""
    print(json.dumps({"answer": answer}), flush=True)


# NIXL, as vLLM's peer tier uses it.
def nixl(role: str) -> None:
    """One end: ``[size, bytes]`` first, then what the other end says, then writes."""
    # lazy: only these processes need vLLM and NIXL
    from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport

    chunk, total, batch, at_once = json.loads(sys.stdin.readline())
    memory = Memory(total, "vllm")
    expected = content(total)
    if role == "writer":
        memory.array[:] = expected
    count = total // chunk
    transport = NixlTransport(role, memoryview(memory.array.reshape(count, chunk)))
    say([transport.get_agent_metadata().hex(), transport.base_addr])
    metadata, address = json.loads(sys.stdin.readline())
    transport.add_remote_peer("peer", bytes.fromhex(metadata), address, count, chunk)
    say("ready")
    for line in sys.stdin:
        (passes,) = json.loads(line)
        if role == "target":
            # The bytes of the last writes; the next ones have to bring them again.
            say(bool((memory.array == expected).all()))
            memory.array[:] = 0
            continue
        step = batch // chunk
        parts = iter([list(range(i, i + step)) for i in range(0, count, step)] * passes)
        begin = time.perf_counter()
        under_way = 0
        left = True
        while left or under_way:
            while left and under_way < at_once:
                part = next(parts, None)
                if part is None:
                    left = False
                elif transport.write_blocks("peer", part, part) is None:
                    raise SystemExit("NIXL does not write")
                else:
                    under_way += 1
            polled = transport.poll("peer")
            if polled.failed:
                raise SystemExit("a write of NIXL's failed")
            under_way -= len(polled.done)
        say(time.perf_counter() - begin)


# Two instances.
class Instance(abc.ABC):
    """Host memory and a peer tier under a scheduler's calls."""

    @abc.abstractmethod
    def store(self, numbers: Sequence[int]) -> None:
        """Put chunks into host memory."""

    @abc.abstractmethod
    def begin(self, numbers: Sequence[int], port: int) -> None:
        """A request for chunks that the peer at `port` has."""

    @abc.abstractmethod
    def has_first(self) -> bool:
        """Ask for the whole prompt, as a scheduler does; whether its first chunk is there."""

    @abc.abstractmethod
    def finish(self) -> int:
        """The request ends; how many of its chunks have other bytes than they should."""

    @abc.abstractmethod
    def step(self) -> None:
        """The end of a scheduler's step."""

    @abc.abstractmethod
    def has_all(self) -> bool:
        """Whether all chunks are there."""


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload(number: int) -> bytes:
    return (number.to_bytes(8, "big") * (CHUNK_BYTES // 8))[:CHUNK_BYTES]


class Kvtier(Instance):
    def __init__(self, port: int) -> None:
        # lazy: vLLM's processes do not need it
        from kvtier.config import parse
        from kvtier.engine.engine import open_engine  # lazy: as above
        from kvtier.types import GroupGeometry, make_geometry  # lazy: as above

        group = GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=CHUNK_BYTES)
        size = SLOTS * CHUNK_BYTES
        config = parse(
            {"capacity_bytes": size, "tiers": [{"type": "p2p", "port": port}], "on_reset": "keep"}
        )
        self._engine, self._region = open_engine(
            config, make_geometry([group], size), {"model": "benchmark"}
        )
        self._requests = 0

    def _keys(self, numbers: Sequence[int]) -> list[bytes]:
        from kvtier.types import make_key  # lazy: as above

        return [make_key(key_of(number), 0) for number in numbers]

    def _context(self, **more: Any) -> Any:
        from kvtier.types import RequestContext  # lazy: as above

        self._requests += 1
        return RequestContext(f"r{os.getpid()}-{self._requests}", **more)

    def store(self, numbers: Sequence[int]) -> None:
        context = self._context()
        reservation = self._engine.reserve(self._keys(numbers), context)
        for number, slot in zip(numbers, reservation.slots.tolist(), strict=True):
            self._region.slot_view(slot, CHUNK_BYTES)[:] = payload(number)
        self._engine.commit(reservation.keys, context)
        self._engine.finish_request(context)

    def begin(self, numbers: Sequence[int], port: int) -> None:
        from kvtier.types import Peer  # lazy: as above

        self._numbers, self._names = numbers, self._keys(numbers)
        self._request = self._context(peer=Peer(f"127.0.0.1:{port}", "", 0.0))
        self._engine.on_new_request(self._request)
        self._engine.lookup_batch(self._names, self._request)

    def has_first(self) -> bool:
        # What a batch says of a prompt that waits is that of its last news.
        first = self._engine.lookup(self._names[0], self._request)
        if first.name == "MISS":
            raise SystemExit("benchmarks.peer: the peer has nothing")
        return first.name == "HIT"

    def has_all(self) -> bool:
        return self._engine.lookup_batch(self._names, self._request)[0] == len(self._names)

    def finish(self) -> int:
        slots, generations = self._engine.pin(self._names, self._request)
        wrong = sum(
            bytes(self._region.slot_view(slot, CHUNK_BYTES)) != payload(number)
            for number, slot in zip(self._numbers, slots.tolist(), strict=True)
        )
        self._engine.unpin(slots, generations, self._request)
        self._engine.finish_request(self._request)
        return wrong

    def step(self) -> None:
        self._engine.end_step()


class Stock(Instance):
    def __init__(self, port: int) -> None:
        # lazy: kvtier's processes do not need vLLM
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils  # lazy: as above
        from vllm.v1.kv_offload import base, config  # lazy: as above
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # lazy: as above

        kv_cache_utils.init_none_hash(sha256)
        self._base = base
        tier = {"type": "p2p", "host": "127.0.0.1", "port": port}
        spec = TieringOffloadingSpec(
            config.OffloadingConfig(
                groups=(config.OffloadingGroupConfig(16, ("layer",), 0),),
                worker_kv_bytes_per_block=CHUNK_BYTES,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": SLOTS * CHUNK_BYTES, "secondary_tiers": [tier]},
                engine_id=f"benchmark-{os.getpid()}",
                model=config.OffloadingModelConfig("benchmark", "float16"),
                cache=config.OffloadingCacheConfig(16, 1),
                parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
            )
        )
        self._manager = spec.get_manager()
        view = self._manager.primary_tier.get_kv_memoryview()
        self._memory = np.asarray(view).view(np.uint8)
        self._requests = 0

    def _keys(self, numbers: Sequence[int]) -> list[Any]:
        return [self._base.make_offload_key(key_of(number), 0) for number in numbers]

    def _context(self, params: dict[str, Any] | None = None) -> Any:
        self._requests += 1
        name = f"r{os.getpid()}-{self._requests}"
        return self._base.ReqContext(req_id=name, kv_transfer_params=params)

    def store(self, numbers: Sequence[int]) -> None:
        context = self._context()
        self._manager.on_new_request(context)
        keys = self._keys(numbers)
        output = self._manager.prepare_store(keys, context)
        for number, row in zip(numbers, output.store_spec.chunk_ids, strict=True):
            self._memory[row] = np.frombuffer(payload(number), np.uint8)
        self._manager.complete_store(keys, context)
        self._manager.on_request_finished(context)

    def begin(self, numbers: Sequence[int], port: int) -> None:
        self._numbers, self._names = numbers, self._keys(numbers)
        source = {
            "kv_request_id": f"{os.getpid()}-{self._requests}",
            "remote_host": "127.0.0.1",
            "remote_port": port,
        }
        self._request = self._context({"remote_kv_source": source})
        self._manager.on_new_request(self._request)

    def _answers(self) -> list[Any]:
        return [self._manager.lookup(name, self._request) for name in self._names]

    def has_first(self) -> bool:
        first = self._answers()[0]
        if first is self._base.LookupResult.MISS:
            raise SystemExit("benchmarks.peer: vLLM's peer has nothing")
        return bool(first is self._base.LookupResult.HIT)

    def has_all(self) -> bool:
        return all(one is self._base.LookupResult.HIT for one in self._answers())

    def finish(self) -> int:
        loaded = self._manager.prepare_load(self._names, self._request)
        wrong = sum(
            self._memory[row].tobytes() != payload(number)
            for number, row in zip(self._numbers, loaded.chunk_ids, strict=True)
        )
        self._manager.complete_load(self._names, self._request)
        self._manager.on_request_finished(self._request)
        return wrong

    def step(self) -> None:
        self._manager.on_schedule_end(self._base.ScheduleEndContext((), ()))


def instance(system: str) -> None:
    """Steps, and what the parent wants in between."""
    (port,) = json.loads(sys.stdin.readline())
    one: Instance = Kvtier(port) if system == "kvtier" else Stock(port)
    say("ready")
    step_seconds = IDLE_STEP_SECONDS
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            command, *more = json.loads(line)
            if command == "store":
                for first in range(0, more[0], CHUNKS):
                    one.store(range(first, first + CHUNKS))
                    one.step()
                    time.sleep(IDLE_STEP_SECONDS)
                say("stored")
            elif command == "pace":
                step_seconds = more[0]
                say("paced")
            else:
                say(ask(one, *more))
        one.step()
        time.sleep(step_seconds)


def ask(one: Instance, numbers: Sequence[int], port: int) -> float:
    """Seconds from a request to its first chunk; the other ones are waited for, and compared."""
    until = time.monotonic() + SECONDS
    begin = time.perf_counter()
    one.begin(numbers, port)
    while not one.has_first():
        one.step()
        time.sleep(IDLE_STEP_SECONDS)
        if time.monotonic() > until:
            raise SystemExit("benchmarks.peer: no chunk has come")
    seconds = time.perf_counter() - begin
    while not one.has_all():
        one.step()
        time.sleep(IDLE_STEP_SECONDS)
    if one.finish():
        raise SystemExit("benchmarks.peer: other bytes came")
    return seconds


def main() -> None:
    role = sys.argv[1]
    if role in ("writer", "target"):
        nixl(role)
    else:
        instance(role)


if __name__ == "__main__":
    main()
