# SPDX-License-Identifier: Apache-2.0
"""Runs tiers of other people, synchronous classes of four methods, as coroutines.

Such a class is told of jobs and asked for finished ones. It lives on a thread of its own, where it
may block. Classes written against vLLM 0.32's base class have more methods and another constructor;
they run unchanged. Owns that thread. Invariants: the class is called from its thread only; a slot
goes back only when the class has reported the end of its job, or has been shut down.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np

from kvtier._core.layout import crc32c
from kvtier.config import COMMON_KEYS, TierConfig
from kvtier.errors import ClosedError, ConfigError, InternalError, TierLostError
from kvtier.options import decode_options, join, unknown_key
from kvtier.tiers.base import OptionsType, Slot, Tier, TierContext, TierEnv
from kvtier.tiers.caller import Caller, wait_out
from kvtier.tiers.secondary import JobMetadata, JobResult, LookupResult, SecondaryTierManager
from kvtier.types import GROUP_BYTES, Outcome, Presence

__all__ = [
    "AdaptedTier",
    "JobMetadata",
    "JobResult",
    "LookupResult",
    "SecondaryTierManager",
    "adapted_class",
    "check_class",
    "is_secondary_tier_manager",
]

log = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
MAX_POLL_SECONDS = 0.02

RETRY_SECONDS = 1.0
"""How long a RETRY is asked again within one call; then the chunk counts as pending."""

CLOSE_SECONDS = 1.0
"""What ``drain_jobs`` and ``shutdown`` have at least, each."""

KNOWN_CHUNKS = 1 << 20
"""Chunks whose checksum is remembered (some 100 MB at most)."""

MARK_BYTES = 16
PAGE_BYTES = 4096

METHODS = ("lookup", "submit_store", "submit_load", "get_finished_jobs")

PRESENCE: Mapping[str, Presence] = {
    "HIT": Presence.PRESENT,
    "HIT_PENDING": Presence.PENDING,
    "RETRY": Presence.PENDING,
    "MISS": Presence.ABSENT,
}

AnyClass: TypeAlias = type[Any]

VLLM_BASE = "vllm.v1.kv_offload.base"
VLLM_TIERING_BASE = "vllm.v1.kv_offload.tiering.base"
VLLM_ARGUMENTS = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")


class RequestContext:
    """Stands in for vLLM's ``ReqContext`` where vLLM is not loaded."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self.kv_transfer_params: dict[str, Any] | None = None
        self.kv_hints: Any = None
        self._state: dict[type[Any], Any] = {}

    def set_state(self, value: Any) -> None:
        """Keep a value of the tier's own."""
        self._state[type(value)] = value

    def get_state(self, kind: type[Any]) -> Any:
        """The value of that type, or None."""
        return self._state.get(kind)

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Not known here."""
        return None


def is_secondary_tier_manager(kind: type) -> bool:
    """Whether a class has the four methods, whatever it derives from."""
    return all(callable(getattr(kind, method, None)) for method in METHODS)


def adapted_class(kind: type[Any]) -> type[AdaptedTier]:
    """The tier class that runs `kind`."""
    medium = getattr(kind, "medium", None)
    medium = getattr(medium, "value", medium)
    return type(
        kind.__name__,
        (AdaptedTier,),
        {"adapted": kind, "medium": medium if medium in ("CPU", "STORAGE") else "STORAGE"},
    )


def check_class(kind: type[Any], config: TierConfig, path: str) -> None:
    """Find what is wrong with a class or its options before it is made.

    Raises
    ------
    ConfigError
    """
    if _overrides_parent_call(kind):
        raise ConfigError(
            f"tier {config.name}: {kind.__name__} serves requests of other hosts through vLLM's "
            f"ParentManager, which kvtier does not have"
        )
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"tier {config.name}: {kind.__name__} does not define {missing}")
    parameters = _parameters(kind, config)
    if "primary_kv_view" not in parameters:
        if _options_type(kind) is not None:
            decode_options(_options_type(kind), config.options, path, also_known=COMMON_KEYS)
        return
    own = {name: p for name, p in parameters.items() if name not in VLLM_ARGUMENTS}
    open_ended = [name for name, p in own.items() if p.kind is p.VAR_KEYWORD]
    for key in config.options:
        if key not in own and not open_ended:
            raise unknown_key(path, key, {*own, *COMMON_KEYS})
    for name, parameter in own.items():
        required = parameter.default is parameter.empty
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if required and named and name not in config.options and name not in COMMON_KEYS:
            raise ConfigError(f"{join(path, name)}: is missing; {kind.__name__} needs it")


def _parameters(kind: type[Any], config: TierConfig) -> Mapping[str, inspect.Parameter]:
    try:
        signature = inspect.signature(kind)
        if "primary_kv_view" not in signature.parameters:
            signature.bind(None, None)
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"tier {config.name}: {kind.__name__} cannot be made: kvtier calls (view, options), or "
            f"vLLM's (offloading_spec, primary_kv_view, tier_type, ...): {exc}"
        ) from exc
    return signature.parameters


def _options_type(kind: type[Any]) -> Any:
    found = getattr(kind, "options_type", None)
    return found if isinstance(found, type) and issubclass(found, msgspec.Struct) else None


def _overrides_parent_call(kind: type[Any]) -> bool:
    method = getattr(kind, "serve_external_requests", None)
    # vLLM's base has it as a no-op; a class that overrides it needs the ParentManager.
    return method is not None and getattr(method, "__module__", "") != VLLM_TIERING_BASE


class AdaptedTier(Tier):
    """Runs a four-method class as a ``Tier``.

    What this process has stored is checked like the chunks of any tier. Of a chunk that another
    process stored no checksum is known: there the class is trusted with the bytes, but not with
    having written them.
    """

    type: ClassVar[str] = "adapted"
    options_type: ClassVar[OptionsType] = msgspec.Struct
    adapted: ClassVar[AnyClass]

    def __init__(self, name: str, config: TierConfig, env: TierEnv) -> None:
        super().__init__(name, config.options, env)
        self._config = config
        self._manager: Any = None
        self._caller: Caller | None = None
        self._calls = 0
        self._job = 0
        self._jobs: dict[int, Any] = {}  # under way; its result when that has come
        self._no_jobs = asyncio.Event()
        self._closing = False
        self._gone = False  # the class has been shut down and touches nothing
        self._complained: set[str] = set()
        self._crcs: OrderedDict[bytes, int] = OrderedDict()
        self._corrupt: OrderedDict[bytes, None] = OrderedDict()

    async def open(self) -> None:
        check_class(self.adapted, self._config, f"tier {self.name}")
        view = self.env.region_view
        if view is None:
            raise ConfigError(f"tier {self.name}: runs in the scheduler's process only")
        if self.env.geometry.slab_slots > 1:
            raise ConfigError(
                f"tier {self.name}: gets the region as rows, one for each chunk: make its geometry "
                f"with make_geometry(..., one_size=True)"
            )
        caller = Caller(f"kvtier-{self.name}")
        caller.start()
        try:
            self._manager = await caller.run(self._construct, view)
        except BaseException:
            caller.stop()
            await caller.stopped(CLOSE_SECONDS)
            raise
        self._caller = caller

    def _construct(self, view: memoryview) -> Any:
        kind, config = self.adapted, self._config
        parameters = _parameters(kind, config)
        try:
            if "primary_kv_view" not in parameters:
                options: Any = dict(config.options)
                if _options_type(kind) is not None:
                    options = decode_options(_options_type(kind), options, f"tier {self.name}")
                return kind(view, options)
            options = dict(config.options)
            if "locality" in parameters and config.locality is not None:
                options["locality"] = config.locality
            spec = self.env.offloading_spec
            if spec is None:
                events = SimpleNamespace(enable_kv_cache_events=False)
                spec = SimpleNamespace(
                    extra_config=dict(config.options), config=None, kv_events_config=events
                )
            return kind(
                offloading_spec=spec, primary_kv_view=view, tier_type=config.type, **options
            )
        except ConfigError:
            raise
        except OSError as exc:
            raise TierLostError(f"tier {self.name}: {exc}") from exc
        except Exception as exc:
            raise ConfigError(
                f"tier {self.name}: {kind.__name__} cannot be made: {type(exc).__name__}: {exc}"
            ) from exc

    async def aclose(self, deadline: float) -> None:
        if self._closing:
            return
        self._closing = True
        caller = self._caller
        if caller is None:
            return

        def left() -> float:
            return max(0.0, deadline - self.env.clock())

        await self._jobs_end(left())
        errors = []
        for method in ("drain_jobs", "shutdown"):
            function = getattr(self._manager, method, None)
            if function is None:
                continue
            future = caller.call(function)
            await asyncio.wait((future,), timeout=max(CLOSE_SECONDS, left()))
            if not future.done():
                # Its slots stay lent: nobody knows what it still writes.
                errors.append(f"{method} does not return")
                break
            if (error := future.exception()) is not None:
                errors.append(f"{method} raised {type(error).__name__}: {error}")
        else:
            self._gone = True
            await self._jobs_end(CLOSE_SECONDS)
        caller.stop()
        if not await caller.stopped(CLOSE_SECONDS) and not errors:
            errors.append("a call into it does not return")
        if errors:
            raise TierLostError(f"{self.adapted.__name__}: {'; '.join(errors)}")
        self._manager = None

    async def _jobs_end(self, seconds: float) -> None:
        if self._jobs:
            self._no_jobs.clear()
            waiting = asyncio.ensure_future(self._no_jobs.wait())
            await asyncio.wait((waiting,), timeout=seconds)
            waiting.cancel()
            await asyncio.wait((waiting,))

    def _call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        if self._caller is None:
            raise ClosedError(f"tier {self.name} is not open")
        return self._caller.call(function, *args)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._caller is None:
            raise ClosedError(f"tier {self.name} is not open")
        return await self._caller.run(function, *args)

    def _check_open(self) -> None:
        if self._closing or self._caller is None:
            raise ClosedError(f"tier {self.name} is closed")

    def name_of(self, key: bytes) -> bytes:
        """Key of a chunk as the class sees it: of equal length, and different in each namespace.

        The class knows nothing of namespaces; this way it cannot find what another model, or this
        one before its weights changed, has stored.
        """
        digest = hashlib.blake2b(
            key[:-GROUP_BYTES],
            digest_size=len(key) - GROUP_BYTES,
            key=self.env.namespace_digest[:32],
        ).digest()
        return digest + key[-GROUP_BYTES:]

    def _context(self, ctx: TierContext) -> Any:
        """A request of its own for each call, so that no two share what the class remembers."""
        self._calls += 1
        vllm = sys.modules.get(VLLM_BASE)
        kind = RequestContext if vllm is None else vllm.ReqContext
        return kind(req_id=f"{ctx.request_id}/{self._calls}")

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        self._check_open()
        found = await self._lookup([key for key in keys if key not in self._corrupt], ctx)
        return [found.get(key, Presence.ABSENT) for key in keys]

    async def _lookup(self, keys: Sequence[bytes], ctx: TierContext) -> dict[bytes, Presence]:
        answers: dict[bytes, str] = {}
        left = list(keys)
        if not left:
            return {}
        context = self._context(ctx)
        until = min(ctx.deadline, self.env.clock() + RETRY_SECONDS)
        pause = POLL_SECONDS
        await self._run(self._begin, context)
        try:
            while True:
                names = [self.name_of(key) for key in left]
                said = await self._run(self._ask, names, context, ctx.windowed)
                answers.update(zip(left, said, strict=True))
                left = [key for key in left if answers[key] == "RETRY"]
                if not left or self.env.clock() + pause > until:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_POLL_SECONDS)
        finally:
            await self._run(self._optional, "on_request_finished", context)
        return {key: PRESENCE[answer] for key, answer in answers.items()}

    def _begin(self, context: Any) -> None:
        wanted = self._optional("on_new_request", context)
        # By name, as for lookups.
        if getattr(getattr(wanted, "policy", None), "name", "") == "REQUEST_LEVEL":
            self._complain("on_new_request", "asks for whole requests, and gets their new chunks")

    def _ask(self, names: Sequence[bytes], context: Any, windowed: bool) -> list[str]:
        said: list[str] = []
        for name in names:
            answer = self._manager.lookup(name, context)
            # By name: the class may use vLLM's enum or kvtier's.
            word: Any = getattr(answer, "name", None)
            if word not in PRESENCE:
                raise InternalError(
                    f"{self.adapted.__name__}.lookup returned {answer!r}, no LookupResult"
                )
            said.append(word)
            if word == "MISS" and not windowed:
                break
        self._end_of_step()
        return said + ["MISS"] * (len(names) - len(said))

    def _end_of_step(self) -> None:
        """What vLLM's classes expect once a scheduler step: there they send what has gathered."""
        vllm = sys.modules.get(VLLM_BASE)
        kind = SimpleNamespace if vllm is None else vllm.ScheduleEndContext
        self._optional("on_schedule_end", kind(new_req_ids=(), preempted_req_ids=()))

    def _optional(self, method: str, *args: Any) -> Any:
        function = getattr(self._manager, method, None)
        return function(*args) if function is not None else None

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        self._check_open()
        outcomes = [Outcome.EXISTS] * len(items)
        known = [item.key for item in items if item.key in self._crcs]
        windowed = msgspec.structs.replace(ctx, windowed=True)
        there = await self.exists(known, windowed) if known else []
        skip = {key for key, one in zip(known, there, strict=True) if one is Presence.PRESENT}
        wanted = [i for i, item in enumerate(items) if item.key not in skip]
        if not wanted:
            return outcomes
        for i in wanted:
            crc = items[i].crc
            assert crc is not None
            # A chunk has one checksum, whether this store succeeds or not.
            self._remember(self._crcs, items[i].key, crc)
        result = await self._transfer([items[i] for i in wanted], ctx, load=False)
        for i in wanted:
            if result.success:
                self._corrupt.pop(items[i].key, None)
            outcomes[i] = Outcome.DONE if result.success else Outcome.IO
        return outcomes

    @staticmethod
    def _remember(table: OrderedDict[bytes, Any], key: bytes, value: Any) -> None:
        table[key] = value
        table.move_to_end(key)
        if len(table) > KNOWN_CHUNKS:
            table.popitem(last=False)

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        self._check_open()
        outcomes = [Outcome.MISSING] * len(items)
        wanted = [i for i, item in enumerate(items) if item.key not in self._corrupt]
        if not wanted:
            return outcomes
        asked = [items[i] for i in wanted]
        mark = os.urandom(MARK_BYTES)
        for item in asked:
            item.crc = self._crcs.get(item.key)
            if item.crc is None:
                _mark(item, mark)
        result = await self._transfer(asked, ctx, load=True)
        names = {self.name_of(item.key): item.key for item in asked}
        if result.success:
            good = set(names.values())
        else:
            good = {names[name] for name in result.successful_keys or () if name in names}
        failed = [item.key for item in asked if item.key not in good]
        absent = await self._absent(failed, ctx) if failed else set()
        trusted = [item for item in asked if item.crc is None and item.key in good]
        crcs = await self._run(lambda: [crc32c(item.view) for item in trusted]) if trusted else []
        unwritten = {item.key for item in trusted if _is_marked(item, mark)}
        for item, crc in zip(trusted, crcs, strict=True):
            item.crc = crc
            item.verified = item.key not in unwritten
        for i, item in zip(wanted, asked, strict=True):
            if item.key in unwritten:
                outcomes[i] = Outcome.CORRUPT
            elif item.key in good:
                outcomes[i] = Outcome.DONE
            else:
                outcomes[i] = Outcome.MISSING if item.key in absent else Outcome.IO
        return outcomes

    async def _absent(self, failed: Sequence[bytes], ctx: TierContext) -> set[bytes]:
        """Of chunks that did not come, those that the class does not have: a miss, no failure."""
        windowed = msgspec.structs.replace(ctx, windowed=True)
        try:
            found = await self._lookup(failed, windowed)
        except Exception as exc:  # noqa: BLE001 - the load has failed already, and is told so
            self._complain("lookup", f"raised after a failed load: {exc!r}")
            return set()
        return {key for key, one in found.items() if one is Presence.ABSENT}

    async def _transfer(self, items: Sequence[Slot], ctx: TierContext, *, load: bool) -> Any:
        """Result of a job; returns or raises only when the class has ended it."""
        self._job += 1
        job = JobMetadata(
            self._job,
            [self.name_of(item.key) for item in items],
            np.array([item.slot for item in items], dtype=np.int32),
            load,
            self._context(ctx),
        )
        self._jobs[job.job_id] = None
        try:
            return await self._follow(job)
        finally:
            del self._jobs[job.job_id]
            if not self._jobs:
                self._no_jobs.set()

    async def _follow(self, job: JobMetadata) -> Any:
        submit = self._manager.submit_load if job.is_promotion else self._manager.submit_store
        future = self._call(self._submit, submit, job)
        cancelled = await wait_out(future)
        error = future.exception()
        if error is not None:
            drain = getattr(self._manager, "drain_jobs", None)
            if drain is not None:
                # Part of it may have begun before it raised.
                cancelled |= await wait_out(self._call(drain))
        pause = POLL_SECONDS
        while error is None:
            gone = self._gone
            future = self._call(self._finished)
            cancelled |= await wait_out(future)
            self._take(future)
            if self._jobs[job.job_id] is not None:
                break
            if gone:
                error = ClosedError(f"tier {self.name} closed before job {job.job_id} ended")
                break
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                # The rows are the class's until it says that the job has ended.
                cancelled = True
            pause = min(2 * pause, MAX_POLL_SECONDS)
        if cancelled:
            raise asyncio.CancelledError
        if error is not None:
            raise error
        return self._jobs[job.job_id]

    def _submit(self, submit: Callable[[Any], None], job: JobMetadata) -> None:
        self._begin(job.req_context)
        submit(job)
        self._optional("on_request_finished", job.req_context)

    def _finished(self) -> list[Any]:
        self._end_of_step()
        results = list(self._manager.get_finished_jobs())
        events = getattr(self._manager, "take_events", None)
        if events is not None:
            # The planner tells of what is stored; the class's own must not pile up.
            list(events())
        return results

    def _take(self, future: asyncio.Future[Any]) -> None:
        """Results of jobs that are under way; everything else a class may say is its error."""
        error = future.exception()
        if error is not None:
            # The jobs go on: until they end, their slots are not free.
            self._complain("get_finished_jobs", f"raised {error!r}")
            return
        for result in future.result():
            job_id: Any = getattr(result, "job_id", None)
            if not hasattr(result, "success") or self._jobs.get(job_id, result) is not None:
                self._complain("get_finished_jobs", f"reported {result!r}, which is no job of its")
                continue
            self._jobs[job_id] = result

    def _complain(self, method: str, text: str) -> None:
        if method not in self._complained:
            self._complained.add(method)
            log.error("tier %s: %s.%s %s", self.name, self.adapted.__name__, method, text)

    async def forget(self, keys: Sequence[bytes]) -> None:
        # The class cannot remove a chunk; it is not asked for it until it is stored anew.
        for key in keys:
            self._crcs.pop(key, None)
            self._remember(self._corrupt, key, None)


def _marks(item: Slot) -> list[slice]:
    """Places that show whether a load has written them: the start of each page, and the end."""
    starts = [*range(0, item.length, PAGE_BYTES), max(0, item.length - MARK_BYTES)]
    return [slice(start, min(start + MARK_BYTES, item.length)) for start in starts]


def _mark(item: Slot, mark: bytes) -> None:
    for place in _marks(item):
        item.view[place] = mark[: place.stop - place.start]


def _is_marked(item: Slot, mark: bytes) -> bool:
    """Whether a place still is as it was: not for chunks too short to tell by chance."""
    places = [place for place in _marks(item) if place.stop - place.start >= 8]
    # The last two may overlap, and then only the later one was left whole.
    return any(item.view[place] == mark[: place.stop - place.start] for place in places)
