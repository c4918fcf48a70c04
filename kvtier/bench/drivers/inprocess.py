# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine, driven with a workload: the process that `remote.EngineProcess` starts.

Engine core, manager and (with one rank) worker run in this process and on its one thread, in the
loop that vLLM's own engine process turns; so the time inside the manager and the worker can be
taken by a clock around their methods. Owns the engine. SIGUSR1 ends a run after its step.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_offload.base import LookupResult

from kvtier.bench.copies import CopyCounters
from kvtier.bench.drivers.compare import Comparison
from kvtier.bench.drivers.remote import (
    Begin,
    Facts,
    Failed,
    Measured,
    Point,
    Progress,
    decode,
    encode,
)
from kvtier.bench.drivers.standin import Finished, StepTimes
from kvtier.bench.results import EngineCounts
from kvtier.bench.settings import Settings
from kvtier.bench.strategies import connector_config, engine_counts
from kvtier.bench.workload import Request, Source
from kvtier.errors import InternalError

PROGRESS_SECONDS = 2.0
SETTLE_SECONDS = 30.0
ANSWER_TOKENS = 8
"""Of each answer these are kept, to be compared with those of other strategies."""

_SOURCE_NAMES = {"disk": "fs"}
"""vLLM's name of a source to the tier's; the others are the same."""

_ABSENT = (LookupResult.MISS, LookupResult.HIT)


class Meter:
    """Time inside the methods of some objects; of nested calls the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self, target: Any) -> None:
        """Take the time of every public method of `target`."""
        for name in dir(type(target)):
            if not name.startswith("_") and callable(getattr(target, name)):
                setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            begin = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += clock() - begin
                self._inside = False

        return timed


class Live:
    """One request between its start and its end."""

    __slots__ = ("answer", "deferred_at", "deferred_until", "first_token", "request", "sources")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.first_token: float | None = None
        self.answer: list[int] = []
        self.sources: dict[str, int] = {}
        self.deferred_at: float | None = None
        self.deferred_until = 0.0


class Watch:
    """What is noted while the engine works: times, sources of chunks, counters of the tiers.

    Parameters
    ----------
    core : EngineCore
    """

    def __init__(self, core: Any) -> None:
        self.meter = Meter()
        self.live: dict[str, Live] = {}
        self.now: Callable[[], float] = lambda: 0.0
        self.manager: Any = None
        self.worker: Any = None
        self.comparison: Comparison | None = None
        self.waited = False
        """Whether a lookup of this step was answered with "not yet"."""
        self.executed = False
        self.counts: dict[str, dict[str, int]] = {}
        """Of vLLM's own manager, which keeps none itself: bytes and failures by tier."""
        self._core = core
        self._watch_steps()
        connector = getattr(core.scheduler, "connector", None)
        if connector is not None:
            self._watch_connector(connector.connector_scheduler)
            self._watch_worker()

    def _watch_steps(self) -> None:
        step = self._core.step_fn

        def noted() -> Any:
            outputs, self.executed = step()
            return outputs, self.executed

        self._core.step_fn = noted

    def _watch_connector(self, scheduler: Any) -> None:
        self.manager = scheduler.manager
        if hasattr(self.manager, "_metrics"):
            self._watch_jobs(self.manager._metrics)
        self.meter.watch(self.manager)
        lookup, allocated = self.manager.lookup, scheduler.update_state_after_alloc

        def note_lookup(key: Any, context: Any) -> Any:
            answer = lookup(key, context)
            if answer not in _ABSENT:
                self.waited = True
                live = self.live.get(_name(context.req_id))
                if live is not None:
                    live.deferred_until = self.now()
                    if live.deferred_at is None:
                        live.deferred_at = live.deferred_until
            return answer

        def note_allocated(request: Any, blocks: Any, external_tokens: int) -> None:
            allocated(request, blocks, external_tokens)
            live = self.live.get(_name(request.request_id))
            if external_tokens and live is not None:
                found = scheduler.get_external_cache_hit_sources(request, external_tokens)
                live.sources = {
                    _SOURCE_NAMES.get(source.value, source.value): tokens
                    for source, tokens in found.items()
                }

        self.manager.lookup = note_lookup
        scheduler.update_state_after_alloc = note_allocated

    def _watch_jobs(self, metrics: Any) -> None:
        finished = metrics.on_job_finished

        def note(job: Any, result: Any) -> None:
            finished(job, result)
            tier = self.manager.secondary_tiers[job.tier_idx].tier_type
            loads = job.transfer_job.is_promotion
            done = len(job.transfer_job.keys)
            if not result.success:
                self._count("failures", "io")
                done = len(result.successful_keys or ())
            self._count("promoted" if loads else "stored", tier, done * metrics._primary_chunk_size)

        metrics.on_job_finished = note

    def _count(self, what: str, name: str, amount: int = 1) -> None:
        counts = self.counts.setdefault(what, {})
        counts[name] = counts.get(name, 0) + amount

    def _watch_worker(self) -> None:
        # lazy: vLLM has it only where a connector runs
        from vllm.distributed import kv_transfer

        if not kv_transfer.has_kv_transfer_group():
            return  # several ranks: their workers are in processes of their own
        self.worker = kv_transfer.get_kv_transfer_group().connector_worker.worker
        self.meter.watch(self.worker)
        finished = self.worker.get_finished
        self.copies = CopyCounters()

        def note() -> Any:
            results = finished()
            for result in results:
                self._copied(result)
            return results

        submit_load = self.worker.submit_load
        self._loads: set[int] = set()

        def note_load(job_id: int, *specs: Any) -> Any:
            self._loads.add(job_id)
            return submit_load(job_id, *specs)

        self.worker.submit_load = note_load
        self.worker.get_finished = note
        pages = getattr(self.worker, "pages", None)
        if pages is not None and pages.device.type == "cpu":
            # Last, so that its time counts in none of the above.
            self.comparison = Comparison(self.manager, self.worker, pages)

    def _copied(self, result: Any) -> None:
        size, seconds = result.transfer_size or 0, result.transfer_time or 0.0
        if result.job_id in self._loads:
            self._loads.discard(result.job_id)
            self.copies.load_bytes += size
            self.copies.load_seconds += seconds
        else:
            self.copies.store_bytes += size
            self.copies.store_seconds += seconds

    @property
    def aside(self) -> float:
        """Seconds that are not the model's: kvtier's, or vLLM's own tiering's, and comparing."""
        return self.meter.seconds + (self.comparison.seconds if self.comparison else 0.0)

    def start(self, now: Callable[[], float], *, keep: bool) -> None:
        """A run begins: everything from zero."""
        self.meter.seconds = 0.0
        self.live.clear()
        self.now = now
        self.waited = False
        self.counts = {}
        self.copies = CopyCounters()
        if self.comparison is not None:
            self.comparison.start(self.copies, keep=keep)

    def engine_counts(self, before: EngineCounts) -> EngineCounts:
        """Counters since `before`, which an earlier call with nothing gave."""
        if self.manager is None:
            return EngineCounts()
        if hasattr(self.manager, "engine"):
            return _since(engine_counts(self.manager.engine.stats()), before)
        return EngineCounts(
            promoted_bytes=self.counts.get("promoted", {}),
            stored_bytes=self.counts.get("stored", {}),
            failures=self.counts.get("failures", {}),
        )


def _since(after: EngineCounts, before: EngineCounts) -> EngineCounts:
    def less(new: dict[str, int], old: dict[str, int]) -> dict[str, int]:
        return {name: count - old.get(name, 0) for name, count in new.items()}

    return EngineCounts(
        promoted_bytes=less(after.promoted_bytes, before.promoted_bytes),
        stored_bytes=less(after.stored_bytes, before.stored_bytes),
        evicted=after.evicted - before.evicted,
        evicted_unsaved=after.evicted_unsaved - before.evicted_unsaved,
        failures={
            cause: count for cause, count in less(after.failures, before.failures).items() if count
        },
    )


def _name(request_id: str) -> str:
    """Ours; vLLM adds a random part."""
    return request_id.rpartition("-")[0]


class InProcess:
    """One engine and its runs.

    Parameters
    ----------
    begin : Begin
    """

    def __init__(self, begin: Begin) -> None:
        self._settings = begin.settings
        self._llm: Any = LLM(**engine_arguments(begin))
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._watch = Watch(self._core)
        self._stopped = False
        self.facts = self._facts()

    def stop(self) -> None:
        """End the run in progress after its step. Safe in a signal handler."""
        self._stopped = True

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _facts(self) -> Facts:
        config = self._engine.vllm_config
        cache = self._scheduler.kv_cache_config
        size = sum(tensor.size for tensor in cache.kv_cache_tensors)
        longest = config.model_config.max_model_len
        tokens = int(get_max_concurrency_for_kv_cache_config(config, cache) * longest)
        return Facts(
            accelerator_bytes=size,
            accelerator_tokens=tokens,
            max_tokens=longest - 1,
            bytes_compared=self._watch.manager is None or self._watch.comparison is not None,
            about={
                "model": f"{config.model_config.model}, {config.model_config.dtype}",
                "device cache": f"{cache.num_blocks} blocks of {config.cache_config.block_size} "
                f"tokens, {size / 2**20:.0f} MiB; about {tokens} tokens by vLLM's estimate",
                "ranks": str(config.parallel_config.world_size),
            },
        )

    def run(self, point: Point, tell: Callable[[Progress], None]) -> Measured:
        """Serve all requests of one point."""
        settings, watch = self._settings, self._watch
        if not self._engine.reset_prefix_cache(False, not point.keep):
            raise InternalError("the last run has left blocks of the device cache in use")
        before = watch.engine_counts(EngineCounts())
        source = settings.source(point.conversations, self.facts.max_tokens, point.seed)
        times = StepTimes()
        finished: list[Finished] = []
        answers: dict[str, list[int]] = {}
        self._stopped = False
        start, cpu = time.perf_counter(), time.process_time()

        def now() -> float:
            return time.perf_counter() - start

        watch.start(now, keep=point.keep)
        told = PROGRESS_SECONDS
        ended = 0.0
        while not self._stopped and len(finished) < source.total:
            begin = now()
            if begin > told:  # also while the next request of a trace is not due
                told = begin + PROGRESS_SECONDS
                prompt = sum(item.prompt_tokens for item in finished)
                tell(Progress(len(finished), source.total, prompt, begin))
            for request in source.take(begin):
                self._add(request, source)
            handed = now()
            times.scheduling += handed - begin
            if not self._scheduler.has_requests():
                self._idle(source, handed)
                times.idle += now() - handed
                continue
            spent, watch.waited = watch.aside, False
            outputs = self._engine.step()
            stepped = now()
            times.steps += 1
            if watch.executed:
                times.model += stepped - handed - (watch.aside - spent)
            elif self._scheduler.has_requests():
                time.sleep(0.001)  # as vLLM's own loop does
                times.idle += now() - handed - (watch.aside - spent)
            for output in outputs:
                self._note(output, stepped, finished, answers, source)
            if watch.waited:
                times.pending += now() - handed
            if len(finished) > 0:
                ended = finished[-1].end
            times.scheduling += now() - stepped if watch.executed else 0.0
        times.engine = watch.meter.seconds
        times.scheduling += watch.aside - watch.meter.seconds
        wall = now() if self._stopped else ended
        cpu = time.process_time() - cpu
        self._drain()
        return Measured(
            wall_seconds=wall,
            total=source.total,
            skipped=getattr(source, "skipped", 0),
            finished=finished,
            times=times,
            copies=watch.copies if watch.worker is not None else CopyCounters(),
            engine=watch.engine_counts(before),
            answers=answers,
            cpu_seconds=cpu,
            interrupted=self._stopped,
        )

    def _idle(self, source: Source, since: float) -> None:
        due = source.next_start()
        time.sleep(0.001 if due is None else min(0.02, max(0.0, due - since)))

    def _add(self, request: Request, source: Source) -> None:
        self._watch.live[request.request_id] = Live(request)
        self._engine.add_request(
            request.request_id,
            {"prompt_token_ids": source.tokens(request)},
            SamplingParams(
                temperature=0.0,
                max_tokens=max(1, request.output_tokens),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    def _note(
        self,
        output: Any,
        now: float,
        finished: list[Finished],
        answers: dict[str, list[int]],
        source: Source,
    ) -> None:
        live = self._watch.live[output.request_id]
        tokens = list(output.outputs[0].token_ids)
        if tokens and live.first_token is None:
            live.first_token = now
        live.answer += tokens
        if not output.finished:
            return
        request = live.request
        del self._watch.live[output.request_id]
        loaded = sum(live.sources.values())
        cached = output.num_cached_tokens or 0
        deferred = 0.0 if live.deferred_at is None else live.deferred_until - live.deferred_at
        answers[request.request_id] = live.answer[:ANSWER_TOKENS]
        finished.append(
            Finished(
                request_id=request.request_id,
                turn=request.turn,
                intended_start=request.intended_start,
                first_token=now if live.first_token is None else live.first_token,
                end=now,
                prompt_tokens=request.prompt_tokens,
                output_tokens=len(live.answer),
                accelerator_tokens=max(0, cached - loaded),
                loaded_tokens=loaded,
                sources=live.sources,
                computed_tokens=request.prompt_tokens - max(cached, loaded),
                deferred_seconds=deferred,
            )
        )
        source.done(request, now)

    def _drain(self) -> None:
        """Nothing of this run stays under way; what the tiers were given they end."""
        if self._watch.live:
            self._engine.abort_request(list(self._watch.live))
        deadline = time.monotonic() + SETTLE_SECONDS
        kvtier = getattr(self._watch.manager, "engine", None)
        while time.monotonic() < deadline:
            if self._scheduler.has_requests():
                self._engine.step()
            elif kvtier is None or kvtier.idle:
                break
            else:
                kvtier.poll()
                kvtier.end_step()
            time.sleep(0.005)
        if kvtier is not None:
            # The counters of the tiers are sent twice a second.
            for _ in range(4):
                time.sleep(0.2)
                kvtier.poll()
                kvtier.end_step()


def engine_arguments(begin: Begin) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM``."""
    settings, real = begin.settings, begin.settings.real
    assert real is not None
    arguments: dict[str, Any] = {
        "model": real.model,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        "max_model_len": longest_context(settings),
        "max_num_seqs": min(64, settings.max_in_flight),
    }
    if real.accelerator_bytes is not None:
        arguments["kv_cache_memory_bytes"] = real.accelerator_bytes
    if real.block_tokens is not None:
        arguments["block_size"] = real.block_tokens
    transfer = connector_config(begin.strategy, real, settings.host_bytes, begin.tier_directory)
    if transfer is not None:
        arguments["kv_transfer_config"] = transfer
    return arguments | real.engine_args


def longest_context(settings: Settings) -> int:
    """What ``max_model_len`` has to be; -1, as much as fits, for a trace."""
    return settings.final_tokens() + 1 if settings.workload == "multiturn" else -1


def one_line(exc: BaseException) -> str:
    """What went wrong, shortly; the log has the rest."""
    text = " ".join(str(exc).split()) or "no reason given"
    return f"{type(exc).__name__}: {text[:400]}"


def serve(fd: int) -> None:
    """Answer until the other side closes."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)  # the engine's own children must not keep it open
    file = connection.makefile("rwb")

    def say(message: msgspec.Struct) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it asks no more
            file.write(encode(message))
            file.flush()

    engine: InProcess | None = None
    try:
        engine = InProcess(decode(file.readline(), Begin))
        signal.signal(signal.SIGUSR1, lambda _number, _frame: engine.stop())
        say(engine.facts)
        for line in file:
            say(engine.run(decode(line, Point), say))
    except Exception as exc:  # noqa: BLE001  told to the other side, which raises it
        traceback.print_exc()
        say(Failed(one_line(exc)))
    finally:
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
