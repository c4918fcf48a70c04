# SPDX-License-Identifier: Apache-2.0
"""Time that a manager takes on vLLM's scheduler thread for one prompt of 1,024 chunks.

``python -m benchmarks.vllm_manager``. vLLM's own offloading connector drives kvtier's manager and
vLLM's tiering manager, each with one file tier and in a process of its own, through the calls that
vLLM's scheduler makes: real requests, block hashes and scheduler outputs, a step every 5 ms. The
workers' copies are faked: each is done before the next step. A prompt is prefilled 8,192 tokens a
step, answers with one token, and ends. The steps after that, until the tier has nothing left to do,
are far apart: what the tier reports counts, and hardly an empty step.

Counted is the time inside the manager's methods, over the life of the request, less what reading
the clock costs. Cases, in turn, round by round; each value is the median over the rounds:

- *cold*: no tier has anything; the chunks are stored and go to the files.
- *warm*: the same prompt again, all of it in host memory.
- *tier*: the same, after host memory has been reset: all of it in the files.

In ``beside`` of the JSON line stand the number of calls, the connector's own time, and calls and
time of each method in the last round. A ratio is reference / value.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import Case, Pairs, report, time_case

CHUNKS = 1024
BLOCK_TOKENS = 16
CHUNK_BYTES = 16 << 10
SLOTS = 4 * CHUNKS
PREFILL_TOKENS = 8192
STEP_SECONDS = 0.005
SETTLE_SECONDS = 0.1
"""Between the steps after the request's end."""
MAX_STEPS = 2000
"""Of one request: more mean that something never ends."""

CASES = ("cold", "warm", "tier")
SYSTEMS = ("kvtier", "stock")
TARGET = 20.0

NOTES = """A warm prompt is 2,048 calls that only return an answer found before,
about a third of its time, and three steps. A cold one is the question to the tier's process, its
answer, the message for each store, and the steps in which these are sent and taken. About a third
of it is the index's work by key, and no other part a tenth: after a pause of 5 ms a system call
takes 6 us instead of 0.2, 45 KB to a socket 29 instead of 2.4, and each function costs its cache
misses, so that what counts is how many different ones a step calls. Of no use were: method
descriptors for the calls by key (35 ns each instead of 30), a set in place of the dictionary of a
prompt's places, numpy's comparison of the slots that come back (80 us in such a step), and chunks
marked as saved by slot instead of by key (quartiles of a cold prompt 1,754, 1,844 and 2,361 us in
place of 1,769, 1,836 and 2,426). Two thirds of a cold prompt are the ends of its seven steps: a
message of 1,024 keys out, two of 512 keys, and three or four messages back, each 60 to 90 us of
sockets, encoding and cold caches before its content counts.
"""


class Spent(msgspec.Struct, frozen=True):
    """What one request cost, in seconds."""

    manager: float
    connector: float
    """In the connector and outside the manager."""
    steps: int
    methods: dict[str, tuple[int, float]]
    """Calls and time, by method."""

    @property
    def calls(self) -> int:
        """Calls of the manager."""
        return sum(calls for calls, _ in self.methods.values())


class Timed:
    """A manager, as the connector sees it, that notes the time of its calls.

    Parameters
    ----------
    manager : OffloadingManager
    """

    def __init__(self, manager: Any) -> None:
        self.spent: dict[str, list[float]] = {}
        self._clock_seconds = self._cost()
        for name in dir(type(manager)):
            if not name.startswith("_") and callable(getattr(manager, name)):
                setattr(self, name, self._timed(name, getattr(manager, name)))

    @staticmethod
    def _cost() -> float:
        """Seconds between two readings of the clock with nothing between them."""
        clock = time.perf_counter
        pairs = [(clock(), clock()) for _ in range(10_000)]
        return statistics.median(after - before for before, after in pairs)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter
        spent = self.spent[name] = [0, 0.0]

        def drain() -> Any:
            begin = clock()
            result = list(method())  # a generator works when it is read
            end = clock()
            spent[1] += end - begin
            spent[0] += 1
            return result

        def two(key: Any, context: Any) -> Any:
            begin = clock()
            result = method(key, context)
            end = clock()
            spent[1] += end - begin
            spent[0] += 1
            return result

        def some(*args: Any) -> Any:
            begin = clock()
            result = method(*args)
            end = clock()
            spent[1] += end - begin
            spent[0] += 1
            return result

        if name == "take_events":
            return drain
        # Called once a chunk: unpacking arguments would cost as much as the method.
        return two if name in ("lookup", "get_load_source") else some

    def take(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds of each method since the last time."""
        taken = {}
        for name, spent in self.spent.items():
            if spent[0]:
                taken[name] = int(spent[0]), spent[1] - spent[0] * self._clock_seconds
            spent[:] = 0, 0.0
        return taken


class System:
    """One manager under vLLM's connector.

    Parameters
    ----------
    name : {"kvtier", "stock"}
    root : str
        Directory of the file tier.
    """

    def __init__(self, name: str, root: str) -> None:
        # lazy: only the two processes that drive a manager need vLLM
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, scheduler
        from vllm.utils.hashing import sha256  # lazy: as above
        from vllm.v1 import outputs  # lazy: as above
        from vllm.v1 import request as requests  # lazy: as above
        from vllm.v1.core import kv_cache_manager, kv_cache_utils  # lazy: as above
        from vllm.v1.core.sched import output  # lazy: as above

        self._common, self._outputs, self._output = common, outputs, output
        self._requests, self._blocks = requests, kv_cache_manager.KVCacheBlocks
        self._block = kv_cache_utils.KVCacheBlock
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._region, spec = (_kvtier if name == "kvtier" else _stock)(root)
        self._manager = spec.get_manager()
        self._timed = Timed(self._manager)
        spec.get_manager = lambda: self._timed
        self._connector = scheduler.OffloadingConnectorScheduler(spec, *_vllm_configs())
        self._seconds = 0.0
        self._steps = 0
        self._number = 0

    def run(self, case: str, seed: int) -> Spent:
        """One request of `case`; the prompt is that of `seed`."""
        if case == "tier":
            self._connector.reset_cache()
            self._settle()
        gc.collect()
        gc.freeze()
        self._step()  # what is done now and then, since the last request
        self._timed.take()
        self._seconds = 0.0
        self._steps = 0
        loaded = self._life(random.Random(seed))
        gc.unfreeze()
        if loaded != (0 if case == "cold" else CHUNKS):
            raise SystemExit(f"{case}: {loaded} chunks of {CHUNKS} were loaded")
        methods = self._timed.take()
        manager = sum(seconds for _, seconds in methods.values())
        clocks = 2 * self._timed._clock_seconds * sum(calls for calls, _ in methods.values())
        return Spent(manager, self._seconds - manager - clocks, self._steps, methods)

    def _life(self, rng: random.Random) -> int:
        """A request from its arrival until the tier is quiet; chunks that were loaded."""
        self._number += 1
        tokens = [rng.randrange(50_000) for _ in range(CHUNKS * BLOCK_TOKENS + 1)]
        request = self._requests.Request(
            f"r{self._number}", tokens, _sampling(), None, block_hasher=self._hasher
        )
        blocks = self._blocks(([self._block(1 + i) for i in range(CHUNKS + 1)],))
        ids = ([block.block_id for block in blocks.blocks[0]],)
        call, connector = self._call, self._connector
        call(connector.on_new_request, request)
        while (found := call(connector.get_num_new_matched_tokens, request, 0)[0]) is None:
            self._step()
        call(connector.update_state_after_alloc, request, blocks, found)
        if found:
            call(connector.get_external_cache_hit_sources, request, found)
            request.status = self._requests.RequestStatus.WAITING_FOR_REMOTE_KVS
            self._step()  # the load
            request.num_computed_tokens = found
        request.status = self._requests.RequestStatus.RUNNING
        new = self._output.NewRequestData.from_request(request, ids)
        while request.num_computed_tokens < len(tokens):
            count = min(PREFILL_TOKENS, len(tokens) - request.num_computed_tokens)
            self._step(request, count, new)
            request.num_computed_tokens += count
            new = None
        request.append_output_token_ids(rng.randrange(50_000))
        request.status = self._requests.RequestStatus.FINISHED_LENGTH_CAPPED
        call(connector.request_finished, request)
        self._step(finished=request.request_id)
        self._settle()
        return int(found) // BLOCK_TOKENS

    def _settle(self) -> None:
        """Steps until nothing is under way, here or in the tier."""
        while self._connector.has_pending_push_work() or not self._quiet():
            time.sleep(SETTLE_SECONDS)
            self._step()

    def _quiet(self) -> bool:
        return self._region is None or self._manager.engine.idle

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        result = method(*args)
        self._seconds += time.perf_counter() - begin
        return result

    def _step(
        self, request: Any = None, count: int = 0, new: Any = None, finished: str = ""
    ) -> None:
        """The rest of a scheduler step, and the worker's part of it."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SystemExit(f"no end after {MAX_STEPS} steps")
        cached = self._output.CachedRequestData.make_empty()
        if request is not None and new is None:
            cached = self._output.CachedRequestData(
                [request.request_id], set(), [], {}, [None], [request.num_computed_tokens], [0]
            )
        scheduled = self._output.SchedulerOutput(
            scheduled_new_reqs=[new] if new is not None else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: count} if request is not None else {},
            total_num_scheduled_tokens=count,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids={finished} if finished else set(),
            free_encoder_mm_hashes=[],
        )
        meta = self._call(self._connector.build_connector_meta, scheduled)
        done = self._common.OffloadingWorkerMetadata()
        for number, job in (meta.load_jobs | meta.store_jobs).items():
            done.mark_completed(number)
            self._finish(job)
        connector = self._connector
        output = self._outputs.KVConnectorOutput(kv_connector_worker_meta=done)
        self._call(connector.update_connector_output, output)
        self._call(connector.get_stats)
        self._call(lambda: list(connector.take_events()))
        time.sleep(STEP_SECONDS)

    def _finish(self, job: Any) -> None:
        """What kvtier's worker says of a copy; vLLM's has no other word than the job's end."""
        if self._region is not None:
            transfer = next(
                spec for spec in (job.src_spec, job.dst_spec) if hasattr(spec, "first_transfer")
            )
            for offset in range(transfer.num_transfers):
                self._region.publish(0, transfer.first_transfer + offset)

    def close(self) -> None:
        """End the tier; the region's last holder takes its file away."""
        self._connector.shutdown()
        if self._region is not None:
            self._region.close()


def _offloading_config(extra: dict[str, Any]) -> Any:
    from vllm.v1.kv_offload import config  # lazy: see `System`

    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(BLOCK_TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": SLOTS * CHUNK_BYTES, **extra},
        engine_id=f"benchmark-{os.getpid()}-{os.urandom(4).hex()}",
        model=config.OffloadingModelConfig("benchmark", "float16"),
        cache=config.OffloadingCacheConfig(BLOCK_TOKENS, 1),
        parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def _kvtier(root: str) -> tuple[Any, Any]:
    """The region, as a worker makes it, and the spec."""
    # lazy: kvtier's spec imports vLLM
    from kvtier.host.region import Region
    from kvtier.types import GroupGeometry, make_geometry  # lazy: as above
    from kvtier.vllm.spec import KVTierOffloadingSpec, region_name  # lazy: as above

    config = _offloading_config(
        {
            "tiers": [{"type": "fs", "root_dir": root}],
            "on_reset": "keep",  # of host memory only, which is what vLLM's manager does
            "flush_on_shutdown_seconds": 0,
        }
    )
    group = GroupGeometry(block_tokens=BLOCK_TOKENS, blocks_per_chunk=1, block_bytes=CHUNK_BYTES)
    geometry = make_geometry([group], SLOTS * CHUNK_BYTES)
    region = Region.create(region_name(config.engine_id), geometry, {"model": "benchmark"}, 1)
    region.sign(0)
    region.populate(lambda _: None)
    return region, KVTierOffloadingSpec(config)


def _stock(root: str) -> tuple[None, Any]:
    """vLLM's spec of several tiers."""
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # lazy: see `System`

    tiers = [{"type": "fs", "root_dir": root}]
    return None, TieringOffloadingSpec(_offloading_config({"secondary_tiers": tiers}))


def _vllm_configs() -> tuple[Any, Any]:
    """What the connector reads of vLLM's configuration: one group of full attention, one rank."""
    # lazy: see `System`
    from types import SimpleNamespace

    import torch  # lazy: as above
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )
    attention = kv.FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=64, dtype=torch.float16
    )
    return vllm_config, kv.KVCacheConfig(
        CHUNKS + 2, [], [kv.KVCacheGroupSpec(["layer"], attention)]
    )


def _sampling() -> Any:
    from vllm.sampling_params import SamplingParams  # lazy: see `System`

    return SamplingParams(max_tokens=1)


class Child:
    """One system in a process of its own, so that its threads and imports burden no other.

    Parameters
    ----------
    name : {"kvtier", "stock"}
    root : Path
        Directory of its file tier.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_manager", "--serve", name, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
        )

    def run(self, case: str, seed: int) -> Spent:
        """One request; the child waits between them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([case, seed]) + "\n")
        for line in self._process.stdout:
            if line.startswith("{"):
                return msgspec.json.decode(line, type=Spent)
        raise SystemExit(f"the process of {self.name} ended with code {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(60):
            raise SystemExit(f"the process of {self.name} ended with {self._process.returncode}")

    def kill(self) -> None:
        """End it in any case."""
        self._process.kill()
        self._process.wait()


def serve(name: str, root: str) -> None:
    """The other side of `Child`."""
    system = System(name, root)
    try:
        for line in sys.stdin:
            case, seed = json.loads(line)
            print(msgspec.json.encode(system.run(case, seed)).decode(), flush=True)
    finally:
        system.close()


Taken = dict[tuple[str, str], list[Spent]]
"""What was spent, round by round, by system and case."""


def measure(rounds: int, directory: Path | None) -> Taken:
    """Interleaved rounds of both systems, after one that does not count."""
    root = Path(tempfile.mkdtemp(prefix="kvtier-manager-", dir=directory))
    taken: Taken = {(name, case): [] for name in SYSTEMS for case in CASES}
    children: list[Child] = []
    try:
        children += [Child(name, root / name) for name in SYSTEMS]
        for turn in range(rounds + 1):
            for case in CASES:
                for child in children if turn % 2 else reversed(children):
                    spent = child.run(case, turn)
                    if turn:
                        taken[child.name, case].append(spent)
        for child in children:
            child.close()
    finally:
        for child in children:
            child.kill()
        shutil.rmtree(root)
    return taken


class Beside(msgspec.Struct, frozen=True):
    """What stands beside a figure: medians over the rounds, methods of the last one."""

    system: str
    case: str
    calls: float
    """Of the manager."""
    lookups: float
    steps: float
    connector_us: float
    methods: dict[str, tuple[int, int]]
    """Calls and microseconds, the most expensive first."""


def beside(system: str, case: str, spent: list[Spent]) -> Beside:
    """The parts of a figure."""
    methods = sorted(spent[-1].methods.items(), key=lambda item: -item[1][1])
    return Beside(
        system,
        case,
        statistics.median(one.calls for one in spent),
        statistics.median(one.methods["lookup"][0] for one in spent),
        statistics.median(one.steps for one in spent),
        round(1e6 * statistics.median(one.connector for one in spent)),
        {name: (calls, round(1e6 * seconds)) for name, (calls, seconds) in methods},
    )


def _case(case: str, kvtier: list[Spent], stock: list[Spent]) -> Case:
    pairs = Pairs(tuple(one.manager for one in kvtier), tuple(one.manager for one in stock))
    target = None if case == "tier" else TARGET
    return time_case(case, 1, "us", "vLLM's tiering manager", pairs, scale=1e6, target=target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", type=Path, help="for the files; a temporary one by default")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    taken = measure(arguments.rounds, arguments.directory)
    parts = [beside(system, case, spent) for (system, case), spent in taken.items()]
    for one in parts:
        print(one, file=sys.stderr)
    cases = [_case(case, taken["kvtier", case], taken["stock", case]) for case in CASES]
    report("vllm_manager", cases, beside=msgspec.to_builtins(parts))


if __name__ == "__main__":
    main()
