# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in a child process, driven by requests over a socket pair.

The child holds vLLM, torch and all their threads, so pytest's own process stays clean, and one
engine can serve many cases. One JSON line a request, one a reply; vLLM's log goes to a file.
Every request has a time limit, after which the whole process group is killed and the log's tail
stands in the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.vllm.driver import end_tiers

START_SECONDS = 480.0
CALL_SECONDS = 240.0
TAIL_BYTES = 6000

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""A rank computes on one thread, on whichever core is free: several wait for each other in loops, a
multiple of what these models cost. Without this vLLM has a thread on each core, bound to it."""


class EngineError(Exception):
    """The engine answered with an error, died or took too long."""


class Engine:
    """One running engine; a context manager."""

    def __init__(self, log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self.since = 0
        """Where in the log it begins what ``text`` gives."""
        ours, theirs = socket.socketpair()
        ours.settimeout(CALL_SECONDS)
        env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
        env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_COLOR": "0",
        }
        env |= ONE_THREAD | (environment or {})
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=env,
                process_group=0,
                cwd=Path(__file__).parents[2],
            )
        theirs.close()
        self._socket = ours
        self._file = ours.makefile("rwb")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, **options: Any) -> dict[str, Any]:
        """Make the engine; see ``Host.start``."""
        return self.call("start", START_SECONDS, **options)

    def call(self, method: str, seconds: float = CALL_SECONDS, **arguments: Any) -> Any:
        """Run one method of ``Host`` in the child.

        Raises
        ------
        EngineError
            With the end of vLLM's log.
        """
        self._socket.settimeout(seconds)
        try:
            self._file.write(json.dumps([method, arguments]).encode() + b"\n")
            self._file.flush()
            line = self._file.readline()
        except OSError as exc:
            self.kill()
            raise EngineError(f"{method}: {exc!r}\n{self.tail()}") from exc
        if not line:
            code = self.process.wait(timeout=30)
            raise EngineError(f"{method}: engine ended with {code}\n{self.tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{method}: {reply['error']}\n{self.tail()}")
        return reply["result"]

    def text(self) -> str:
        """vLLM's log since the process was lent."""
        return self.log.read_bytes()[self.since :].decode(errors="replace")

    def tail(self) -> str:
        """The end of vLLM's log."""
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the engine and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def close(self) -> None:
        """End the engine in its own way; kill it if it takes too long."""
        try:
            if self.process.poll() is None:
                self.call("stop", 60.0)
                self._socket.shutdown(socket.SHUT_WR)
                self.process.wait(timeout=60)
        finally:
            self.kill()
            with contextlib.suppress(OSError):  # a request that the dead engine never read
                self._file.close()
            self._socket.close()


class Processes:
    """Two processes that have loaded vLLM, lent to one test after the other.

    Most of an engine's start is loading vLLM, which a process does once; each test has an engine
    of its own in it. Where a test failed the process is not lent again. Then, and while both are
    lent, each caller gets a process of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._idle: list[Engine] = []

    def __enter__(self) -> Processes:
        # Not when the first test asks: what is made during a test has to end with it.
        self._idle = [self._make(), self._make()]
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in self._idle:
            engine.close()

    def _make(self) -> Engine:
        self._made += 1
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return Engine(self._folder / f"log-{self._made}", environment)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Engine]:
        """A process without an engine; one that it has at the end is ended."""
        if not self._idle:
            with self._make() as engine:
                yield engine
            return
        engine = self._idle.pop()
        engine.since = engine.log.stat().st_size
        try:
            yield engine
            engine.call("stop", 60.0)
        except BaseException:
            engine.close()
            raise
        self._idle.append(engine)


class Host:
    """The child's side: one vLLM engine and the methods that tests call."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.driver: Any = None
        self.subscriber: Any = None
        self.contexts: list[Any] = []
        """Of the requests in order, once ``note_requests`` was called."""
        self.noted: dict[str, list[Any]] = {}

    def start(
        self,
        model: str,
        tp: int = 1,
        blocks: int = 64,
        extra: dict[str, Any] | None = None,
        block_size: int | None = None,
        engine_id: str | None = None,
        policy: str | None = None,
        device_cache: bool = False,
        **engine_args: Any,
    ) -> dict[str, Any]:
        """Start vLLM; `extra` is ``kv_connector_extra_config``, None leaves offloading out.

        With all in one process it may be started again after ``stop``, which saves the imports.
        `device_cache` turns vLLM's own prefix cache on also where its CPU platform turns it off,
        for latent attention: a control needs one, and the model runs with it.
        """
        # lazy: the parent imports this module too, and must not load vLLM.
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": model,
            "tensor_parallel_size": tp,
            "num_gpu_blocks_override": blocks,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 3456,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8192,
            "seed": 0,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "worker_extension_cls": "tests.vllm.probe.Probe",
        }
        if block_size is not None:
            arguments["block_size"] = block_size
        if extra is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KVTierOffloadingSpec",
                    "spec_module_path": "kvtier.vllm.spec",
                    **extra,
                },
            }
            given = {"engine_id": engine_id, "kv_load_failure_policy": policy}
            arguments["kv_transfer_config"] |= {key: one for key, one in given.items() if one}
        with keep_device_cache() if device_cache else contextlib.nullcontext():
            self.llm = LLM(**(arguments | engine_args))
        config = self.llm.llm_engine.vllm_config
        return {
            "block_size": config.cache_config.block_size,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "pid": os.getpid(),
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, salt: str | None = None
    ) -> list[dict[str, Any]]:
        """Run prompts together, greedily; `salt` is vLLM's ``cache_salt``."""
        from vllm import SamplingParams  # lazy: see start

        salted = {"cache_salt": salt} if salt else {}
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt, **salted} for prompt in prompts],
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                logprobs=1,
                detokenize=False,
                ignore_eos=True,
            ),
            use_tqdm=False,
        )
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprob": output.outputs[0].cumulative_logprob,
                "logprobs": [
                    one[token].logprob
                    for one, token in zip(
                        output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
                    )
                ],
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def note_requests(self) -> None:
        """Keep what the manager is told of each request from now on, for ``chunks``."""
        manager = self._manager()
        on_new_request = manager.on_new_request

        def note(context: Any) -> Any:
            self.contexts.append(context)
            return on_new_request(context)

        manager.on_new_request = note

    def chunks(self) -> list[list[str]]:
        """Keys of the last request's chunks in host memory, by group, as the prompt has them."""
        manager = self._manager()
        ends = self.contexts[-1]._offload_key_positions
        found: list[list[str]] = [[] for _ in manager.region.geometry.groups]
        ready = set(manager.engine.cache.index.keys())
        for key in sorted(ends, key=ends.__getitem__):
            if key in ready:
                found[int.from_bytes(key[-4:], "big")].append(key.hex())
        return found

    def note_times(self) -> None:
        """From now on keep when chunks become ready here, and what a request that a peer waits for
        has left when it ends; see ``times``."""
        engine = self._manager().engine
        commit, finish = engine.commit, engine.finish_request
        loads = engine._planner.loads
        adopt = loads._adopt
        self.noted = noted = {"computed": [], "loaded": [], "ends": []}

        def note_commit(keys: Any, context: Any) -> Any:
            ready = commit(keys, context)
            noted["computed"] += [time.monotonic()] * len(ready)
            return ready

        def note_adopt(record: Any, message: Any, *args: Any) -> None:
            adopt(record, message, *args)
            noted["loaded"] += [time.monotonic()] * len(message.slots[::8])

        def note_finish(context: Any, *args: Any) -> None:
            if context.serves:
                held = [engine._lookup(key) for key in context.positions]
                noted["ends"].append({"missing": held.count(0), "writing": held.count(1)})
            finish(context, *args)

        engine.commit, engine.finish_request = note_commit, note_finish
        loads._adopt = note_adopt

    def times(self) -> dict[str, Any]:
        """When each chunk was computed or loaded, when requests ended (all on CLOCK_MONOTONIC), and
        how many chunks were missing, or still being written, as vLLM told the end of one."""
        return self.noted | {"answered": self.driver.answered}

    def drop(self, keys: list[str]) -> int:
        """Take chunks out of host memory, as an eviction does; how many went."""
        # vLLM tells of the end of a request, which holds its chunks, in the step after it.
        while self.llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
            self.llm.llm_engine.step()
        return len(self._manager().engine.cache.index.drop([bytes.fromhex(key) for key in keys]))

    def _manager(self) -> Any:
        """kvtier's manager; only where the engine core runs in this process."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector.connector_scheduler.manager

    def drive(self, name: str, **arguments: Any) -> Any:
        """A method of ``Driver``, which is made at the first call."""
        from tests.vllm.driver import Driver  # lazy: only where steps are counted

        if self.driver is None:
            self.driver = Driver(self.llm)
        return getattr(self.driver, name)(**arguments)

    def soak(self, **arguments: Any) -> dict[str, Any]:
        """See ``tests.vllm.soak``."""
        from tests.vllm.driver import Driver  # lazy: see drive
        from tests.vllm.soak import soak

        self.driver = self.driver or Driver(self.llm)
        return soak(self.driver, **arguments)

    def judge(self, answers: list[dict[str, Any]]) -> list[float]:
        """How far answers are from those of this engine, each run cold by itself: up to the first
        token that differs by their probabilities, and there by how much less likely it is here."""
        from vllm import SamplingParams  # lazy: see start

        runs: dict[str, Any] = {}
        far = []
        for answer in answers:
            asked = json.dumps([answer["prompt"], answer["max_tokens"], answer["stop"]])
            if asked not in runs:
                assert self.reset()
                (output,) = self.llm.generate(
                    {"prompt_token_ids": answer["prompt"]},
                    SamplingParams(
                        temperature=0.0,
                        max_tokens=answer["max_tokens"],
                        logprobs=20,
                        detokenize=False,
                        ignore_eos=True,
                        stop_token_ids=answer["stop"],
                    ),
                    use_tqdm=False,
                )
                assert output.num_cached_tokens == 0
                runs[asked] = output.outputs[0]
            cold = runs[asked]
            worst = 0.0
            for place, mine in enumerate(cold.token_ids):
                likely = cold.logprobs[place]
                token = answer["tokens"][place]
                if token != mine:
                    here = likely[token].logprob if token in likely else float("-inf")
                    worst = max(worst, min(100.0, likely[mine].logprob - here))
                    break
                worst = max(worst, abs(likely[mine].logprob - answer["logprobs"][place]))
            else:
                assert len(answer["tokens"]) == len(cold.token_ids)
            far.append(worst)
        return far

    def damaged(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same questions, answered over host memory in which every chunk is damaged."""
        again = []
        for answer in answers:
            asked = {key: answer[key] for key in ("prompt", "max_tokens", "stop")}
            name = f"damaged{len(again)}"
            self.driver.add(f"{name}a", **asked)
            self.driver.close_accounts()
            assert self.reset()
            self.rpc("kvt_swap_heads", [4, 0])
            again.append(asked | self.driver.answer(name, **asked))
            self.driver.close_accounts()
            assert self.reset(connector=True)
        return again

    def reset(self, connector: bool = False) -> bool:
        """Empty the device's prefix cache, and kvtier's with `connector`."""
        return bool(self.llm.llm_engine.reset_prefix_cache(False, connector))

    def rpc(self, name: str, arguments: list[Any] | None = None) -> list[Any]:
        """A method of the probe on every rank."""
        return list(self.llm.collective_rpc(name, timeout=60, args=tuple(arguments or ())))

    def manager(self) -> dict[str, Any]:
        """Counters of the manager; only where the engine core runs in this process."""
        manager = self._manager()
        index = manager.engine.cache.index
        stats = manager.engine.stats()
        value = manager.engine.registry.value
        return {
            "tier_hits": stats.tier_hits,
            "stored_bytes": stats.stored_bytes,
            "loaded_bytes": stats.loaded_bytes,
            "failures": stats.failures,
            "operations": {
                " ".join(labels): count
                for labels, count in manager.engine.registry.series("kvtier_chunks_total").items()
            },
            "corrupt": {
                labels[0]: count
                for labels, count in manager.engine.registry.series(
                    "kvtier_corrupt_chunks_total"
                ).items()
            },
            "idle": manager.engine.idle,
            "requests": len(manager.engine._planner.requests),
            "committed": manager.committed_chunks,
            "failed": manager.failed_chunks,
            "evicted": manager.evicted_chunks,
            "in_flight": len(manager._stores) + len(manager._loads),
            "left": len(manager._left_stores) + len(manager._left_loads),
            "ready": index.num_ready,
            "free": index.num_free,
            "writing": index.num_writing,
            "orphans": index.num_orphans,
            "capacity": index.capacity,
            "widths": list(manager.region.geometry.widths),
            "fill": value("kvtier_host_fill_ratio"),
            "padding": value("kvtier_host_padding_ratio"),
        }

    def counters(self, name: str) -> dict[str, float]:
        """Series of one of kvtier's metrics, by the values of their labels, as of now."""
        engine = self._manager().engine
        engine.end_step()
        return {" ".join(labels): one for labels, one in engine.registry.series(name).items()}

    def service(self) -> int:
        """Process of the tier service; 0 without one."""
        return int(self._manager().engine._supervisor.carrier.pid)

    def threads(self) -> list[str]:
        """Names of this process's threads."""
        return [thread.name for thread in threading.enumerate()]

    def metrics(self) -> str:
        """What vLLM's ``/metrics`` would say, in Prometheus' text format."""
        from prometheus_client import REGISTRY, generate_latest  # lazy: vLLM's own registry

        return generate_latest(REGISTRY).decode()

    def listen(self, endpoint: str) -> None:
        """Subscribe to vLLM's KV events, as a router does."""
        import zmq  # lazy: only where events are asked for

        self.subscriber = zmq.Context.instance().socket(zmq.SUB)
        self.subscriber.setsockopt(zmq.LINGER, 0)
        self.subscriber.subscribe(b"")
        self.subscriber.connect(endpoint)

    def events(self) -> list[dict[str, Any]]:
        """KV events that have come since the last call."""
        import msgspec  # lazy: as above
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        found: list[dict[str, Any]] = []
        while self.subscriber.poll(500):
            _, _, payload = self.subscriber.recv_multipart()
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored | BlockRemoved):
                    told = {
                        "removed": isinstance(event, BlockRemoved),
                        "hashes": [str(one) for one in event.block_hashes],
                        "medium": event.medium,
                        "locality": event.locality,
                        "ownership": event.ownership,
                    }
                    if isinstance(event, BlockStored):
                        parent = event.parent_block_hash
                        told |= {
                            "parent": None if parent is None else str(parent),
                            "tokens": event.token_ids,
                            "block_size": event.block_size,
                        }
                    found.append(told)
        return found

    def settle(self, seconds: float = 30.0) -> dict[str, Any]:
        """``manager`` when the tiers have ended what they were given and said so."""
        end_tiers(self._manager().engine, seconds, self.manager)
        return self.manager()

    def stop(self) -> None:
        """Shut vLLM down as a program does that has finished with it."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = self.driver = None
            self.contexts.clear()
        if self.subscriber is not None:
            self.subscriber.close()
            self.subscriber = None
        from prometheus_client import REGISTRY  # lazy: vLLM's own registry

        # Before the next engine vLLM takes out its own, and knows nothing of these.
        for collector in set(REGISTRY._names_to_collectors.values()):
            if getattr(collector, "_name", "").startswith("kvtier_"):
                REGISTRY.unregister(collector)


def series(text: str) -> dict[tuple[str, str, str], float]:
    """(name, tier, other labels in order) to value of kvtier's series."""
    # lazy: the child has no use for it
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvtier_"):
                labels = dict(sample.labels)
                assert labels.pop("engine") == "0"
                labels.pop("model_name")
                tier = labels.pop("tier", "")
                found[sample.name, tier, " ".join(labels[key] for key in sorted(labels))] = (
                    sample.value
                )
    return found


@contextlib.contextmanager
def keep_device_cache() -> Iterator[None]:
    """vLLM's CPU platform leaves prefix caching as it was asked for."""
    # lazy: see Host.start
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        asked = config.cache_config.enable_prefix_caching
        check(config)
        config.cache_config.enable_prefix_caching = asked

    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(keep)):
        yield


def serve(fd: int) -> None:
    """Answer requests until the parent closes its end."""
    connection = socket.socket(fileno=fd)
    # vLLM's workers must not keep the parent's socket open.
    connection.set_inheritable(False)
    file = connection.makefile("rwb")
    host = Host()
    for line in file:
        method, arguments = json.loads(line)
        try:
            reply = {"result": getattr(host, method)(**arguments)}
        except Exception as exc:  # noqa: BLE001 - carried to the test, which raises it
            import traceback

            traceback.print_exc()
            reply = {"error": repr(exc)}
        file.write(json.dumps(reply).encode() + b"\n")
        file.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
