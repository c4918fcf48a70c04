# SPDX-License-Identifier: Apache-2.0
"""Drives a running engine step by step, as vLLM's busy loop does, and watches what it decides.

Runs in the engine's process, where the engine core does too. Owns the requests that it has added
and not seen the end of. Everything it reads of vLLM is read between steps, on the one thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


def end_tiers(engine: Any, seconds: float, state: Callable[[], Any]) -> None:
    """Steps of kvtier's engine until the tiers have ended what they were given, and said so."""
    deadline = time.monotonic() + seconds
    while not engine.idle:
        assert time.monotonic() < deadline, f"the tiers do not come to an end: {state()}"
        engine.end_step()
        time.sleep(0.01)
    engine.audit()
    while engine.resources is None:
        assert time.monotonic() < deadline, "the tier service does not answer"
        engine.end_step()
        time.sleep(0.01)


class Driver:
    """Requests one by one, steps one by one.

    Parameters
    ----------
    llm : LLM
        With its engine core in this process.
    """

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.connector.connector_scheduler.manager
        self.kvtier = self.manager.engine
        self.schedules = 0
        """Calls of the scheduler."""
        self.preemptions = 0
        self.answers: dict[str, list[str]] = defaultdict(list)
        """Names of the manager's answers, in order, by our name of the request."""
        self.found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Each time that it was given blocks for a load: tokens that the device had, and loaded."""
        self.finished: dict[str, dict[str, Any]] = {}
        self.answered: dict[str, float] = {}
        """When each of them ended."""
        self._watch()

    def _watch(self) -> None:
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request
        lookup = self.manager.lookup
        connector = self.scheduler.connector.connector_scheduler
        allocated = connector.update_state_after_alloc

        def note_allocated(request: Any, blocks: Any, loaded: int) -> None:
            allocated(request, blocks, loaded)
            if loaded:
                status = connector._req_status[request.request_id]
                name = request.request_id.rpartition("-")[0]
                self.found[name].append((status.num_locally_computed_tokens, loaded))

        def count_schedule(*args: Any, **kwargs: Any) -> Any:
            self.schedules += 1
            return schedule(*args, **kwargs)

        def count_preempt(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        def note_lookup(key: Any, context: Any) -> Any:
            answer = lookup(key, context)
            # vLLM adds a random part to the name of a request.
            self.answers[context.req_id.rpartition("-")[0]].append(answer.name)
            return answer

        self.scheduler.schedule = count_schedule
        self.scheduler._preempt_request = count_preempt
        self.manager.lookup = note_lookup
        connector.update_state_after_alloc = note_allocated

    def add(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int = 4,
        stop: list[int] | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """A greedy request; `transfer` is what it says to the connector."""
        from vllm import SamplingParams  # lazy: the parent imports this module too

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=1,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=stop,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        self.engine.add_request(request, {"prompt_token_ids": prompt}, parameters)

    def abort(self, request: str) -> None:
        """The client of a request has gone."""
        self.engine.abort_request([request])

    def step(self, steps: int = 1) -> dict[str, dict[str, Any]]:
        """Steps, and the answers that ended in them."""
        ended = {}
        for _ in range(steps):
            for output in self.engine.step():
                if output.finished:
                    (answer,) = output.outputs
                    ended[output.request_id] = {
                        "tokens": list(answer.token_ids),
                        "logprobs": [
                            one[token].logprob
                            for one, token in zip(answer.logprobs, answer.token_ids, strict=True)
                        ],
                        "cached": output.num_cached_tokens,
                    }
        self.finished |= ended
        self.answered |= dict.fromkeys(ended, time.monotonic())
        return ended

    def timed(self, span: float) -> list[tuple[float, int]]:
        """Of the steps in a span of seconds how long each took, and the worker's jobs that were in
        flight after it."""
        # lazy: the parent imports this module too
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()
        jobs = worker.connector_worker.worker.jobs
        found = []
        end = time.perf_counter() + span
        while (begin := time.perf_counter()) < end:
            self.step()
            found.append((time.perf_counter() - begin, len(jobs)))
        return found

    def drain(self, seconds: float = 60.0) -> int:
        """Step as long as vLLM's own loop would; the number of calls of the scheduler."""
        before = self.schedules
        deadline = time.monotonic() + seconds
        while self.has_work():
            assert time.monotonic() < deadline, f"work without end: {self.state()}"
            self.step()
        return self.schedules - before

    def answer(self, request: str, **asked: Any) -> dict[str, Any]:
        """One request alone, to its end."""
        self.add(request, **asked)
        self.drain()
        return self.finished[request]

    def has_work(self) -> bool:
        """What vLLM's busy loop asks before each step."""
        return bool(self.scheduler.has_requests())

    def idle_for(self, span: float) -> dict[str, Any]:
        """Turn vLLM's loop for a while: the scheduler's calls, and what the service was doing."""
        before = self.schedules
        deadline = time.monotonic() + span
        while time.monotonic() < deadline:
            if self.has_work():
                self.step()
            time.sleep(0.001)
        return {"schedules": self.schedules - before, "service_idle": self.kvtier.idle}

    def reset(self, running: bool, connector: bool = True) -> bool:
        """Empty every cache, those of the `connector` included, in the middle of things; requests
        that are `running` are preempted."""
        return bool(self.engine.reset_prefix_cache(running, connector))

    def step_until(
        self, writes: bool = False, file: str | None = None, ended: int = 0, limit: float = 60.0
    ) -> None:
        """Step until copies from the accelerator are in flight, a file is there, or so many
        requests have ended; each as far as it is asked for."""
        deadline = time.monotonic() + limit
        while (
            (writes and not self.manager._stores)
            or (file is not None and not os.path.exists(file))
            or len(self.finished) < ended
        ):
            assert time.monotonic() < deadline, f"it does not come: {self.state()}"
            self.step()

    def state(self) -> dict[str, Any]:
        """What vLLM and the manager hold right now."""
        scheduler, manager = self.scheduler, self.manager
        loads = self.kvtier._planner.loads
        blocks = {
            request_id.rpartition("-")[0]: len(
                scheduler.kv_cache_manager.get_blocks(request_id).get_block_ids()[0]
            )
            for request_id in scheduler.requests
        }
        return {
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "blocks": blocks,
            "writes": len(manager._stores) + len(manager._ended) + len(manager._left_stores),
            "loads": len(manager._loads) + len(manager._left_loads),
            "held": loads.held,
            "lent": loads.lent,
            "finds": len(loads.finds),
            "cascades": len(self.kvtier._planner.stores.cascades),
            "requests": len(self.kvtier._planner.requests),
            "service_idle": self.kvtier.idle,
            "preemptions": self.preemptions,
            "found": dict(self.found),
            "answers": {name: sorted(set(some)) for name, some in self.answers.items()},
            "finished": self.finished,
        }

    def service_fds(self) -> list[str]:
        """What the descriptors of the tier service's process lead to."""
        folder = f"/proc/{self.kvtier._supervisor.carrier.pid}/fd"
        found = []
        for fd in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed just now
                found.append(os.readlink(f"{folder}/{fd}"))
        return sorted(found)

    def close_accounts(self, seconds: float = 30.0) -> dict[str, Any]:
        """Drain engine and tiers, then prove that nothing is in use; what the service holds."""
        self.drain(seconds)
        kvtier = self.kvtier
        end_tiers(kvtier, seconds, self.state)
        # A call that went on after its time has its pins until it ends.
        deadline = time.monotonic() + seconds
        while kvtier.cache.slots.totals()["service_pins"] and time.monotonic() < deadline:
            time.sleep(0.01)
        kvtier.check()
        kvtier.cache.assert_quiet()
        resources = kvtier.resources
        return self.state() | {
            "service": {
                "tasks": resources.tasks,
                "threads": resources.threads,
                "fds": resources.fds,
                "jobs": resources.jobs,
            },
            "fds": len(os.listdir("/proc/self/fd")),
        }
