# SPDX-License-Identifier: Apache-2.0
"""Tiers of other people: the four-method ``SecondaryTierManager``, and the adapter that runs one.

Such a class is synchronous: it is told of jobs and asked for finished ones. The adapter runs it on a
thread of its own, where it may block, and makes coroutines of it. Classes written against vLLM
0.32's base class have more methods and another constructor; they run unchanged. Owns that thread.
Invariant: the class is only ever called from its thread.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier._core.layout import crc32c
from kvtier.errors import ConfigError
from kvtier.tiers.base import Slot, Tier, TierContext, TierEnv
from kvtier.types import Outcome, Presence

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.001
MAX_POLL_SECONDS = 0.02

KNOWN_CRCS = 1 << 20
"""Checksums remembered of chunks that went through the adapter (some 100 MB at most)."""

METHODS = ("lookup", "submit_store", "submit_load", "get_finished_jobs")


class LookupResult(enum.Enum):
    """Answer of ``SecondaryTierManager.lookup``."""

    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


@dataclass
class JobMetadata:
    """One transfer that a tier is asked for."""

    job_id: int
    keys: Collection[bytes]
    chunk_ids: npt.NDArray[np.int32]
    """Slot of each key: row ``chunk_ids[i]`` of the view holds or receives ``keys[i]``."""
    is_promotion: bool
    """True: from the tier into host memory."""
    req_context: Any
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    """How a transfer ended."""

    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    """Of a load that succeeded in part: the keys that are there."""
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(abc.ABC):
    """The smallest tier that kvtier runs: four methods, called from one thread.

    Parameters
    ----------
    view : memoryview
        The region itself, shape (slots, slot bytes), writable. Rows of a job may be read (store)
        or written (load) until the job is reported finished, and not after.
    options : dict
        The tier's own configuration keys.
    """

    medium: ClassVar[Any] = None

    def __init__(self, view: memoryview, options: dict[str, Any]) -> None:
        self.view = view
        self.options = options

    @abc.abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY to be asked again."""

    @abc.abstractmethod
    def submit_store(self, job_metadata: Any) -> None:
        """Begin to copy rows out of host memory."""

    @abc.abstractmethod
    def submit_load(self, job_metadata: Any) -> None:
        """Begin to copy chunks into rows of host memory."""

    @abc.abstractmethod
    def get_finished_jobs(self) -> Iterable[Any]:
        """``JobResult`` of each job that has ended since the last call."""


def is_secondary_tier_manager(kind: type) -> bool:
    """Whether a class has the four methods, whatever it derives from."""
    return all(callable(getattr(kind, method, None)) for method in METHODS)


class AdaptedTier(Tier):
    """Runs a ``SecondaryTierManager`` as a ``Tier``.

    Its bytes are checked like those of any tier as far as this process has seen them go out; of a
    chunk that another process stored no checksum is known, and the class is trusted with it.
    """

    type: ClassVar[str] = "adapted"
    options_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, name: str, config: Any, env: TierEnv, kind: type[Any]) -> None:
        super().__init__(name, config.options, env)
        self._config = config
        self._kind = kind
        self._manager: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._job = 0
        self._results: dict[int, Any] = {}
        self._crcs: OrderedDict[bytes, int] = OrderedDict()

    async def open(self) -> None:
        if _overrides_parent_call(self._kind):
            raise ConfigError(
                f"tier {self.name}: {self._kind.__name__} serves requests of other hosts through "
                f"vLLM's ParentManager, which kvtier does not have; use kvtier's own p2p tier"
            )
        view = self.env.region_view
        if view is None:
            raise ConfigError(f"tier {self.name}: runs in the scheduler's process only")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvtier-{self.name}")
        self._manager = await self._run(self._construct, view)

    def _construct(self, view: memoryview) -> Any:
        if issubclass(self._kind, SecondaryTierManager):
            return self._kind(view, dict(self.options))
        parameters = inspect.signature(self._kind).parameters
        if "primary_kv_view" not in parameters:
            raise ConfigError(
                f"tier {self.name}: {self._kind.__name__} takes ({', '.join(parameters)}); kvtier "
                f"calls (view, options), or vLLM's (offloading_spec, primary_kv_view, tier_type)"
            )
        spec = self.env.offloading_spec
        if spec is None:
            spec = SimpleNamespace(extra_config=dict(self.options), config=None)
        return self._kind(
            offloading_spec=spec,
            primary_kv_view=view,
            tier_type=self._config.type,
            **dict(self.options),
        )

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        assert self._thread is not None
        # Shielded: a call into foreign code cannot be cancelled, so its end is waited for.
        future = asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def _context(self, ctx: TierContext) -> Any:
        return SimpleNamespace(req_id=ctx.request_id, kv_transfer_params=None, kv_hints=None)

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        return await self._run(self._lookup, keys, self._context(ctx))

    def _lookup(self, keys: Sequence[bytes], context: Any) -> list[Presence]:
        answers = {
            "HIT": Presence.PRESENT,
            "HIT_PENDING": Presence.PENDING,
            "RETRY": Presence.PENDING,
            "MISS": Presence.ABSENT,
        }
        # By name: the class may use vLLM's enum or kvtier's.
        return [answers[self._manager.lookup(key, context).name] for key in keys]

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        result = await self._transfer(items, ctx, load=False)
        if result.success:
            for item in items:
                assert item.crc is not None
                self._crcs[item.key] = item.crc
            while len(self._crcs) > KNOWN_CRCS:
                self._crcs.popitem(last=False)
        return [Outcome.DONE if result.success else Outcome.IO] * len(items)

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        result = await self._transfer(items, ctx, load=True)
        if result.success:
            good = {item.key for item in items}
        else:
            good = set(result.successful_keys or ())
        outcomes = []
        for item in items:
            item.crc = self._crcs.get(item.key)
            # Without a checksum of ours there is nothing to compare with.
            item.verified = item.crc is None
            if item.verified and item.key in good:
                item.crc = crc32c(item.view)
            outcomes.append(Outcome.DONE if item.key in good else Outcome.IO)
        return outcomes

    async def _transfer(self, items: Sequence[Slot], ctx: TierContext, *, load: bool) -> Any:
        self._job += 1
        job = JobMetadata(
            self._job,
            [item.key for item in items],
            np.array([item.slot for item in items], dtype=np.int32),
            load,
            self._context(ctx),
        )
        submit = self._manager.submit_load if load else self._manager.submit_store
        await self._run(submit, job)
        pause = POLL_SECONDS
        cancelled = False
        while job.job_id not in self._results:
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                # The rows are the class's until it says that the job has ended.
                cancelled = True
            pause = min(2 * pause, MAX_POLL_SECONDS)
            for result in await self._run(self._finished):
                self._results[result.job_id] = result
        result = self._results.pop(job.job_id)
        if cancelled:
            raise asyncio.CancelledError
        return result

    def _finished(self) -> list[Any]:
        return list(self._manager.get_finished_jobs())

    async def aclose(self, deadline: float) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        manager, self._manager = self._manager, None
        if manager is not None:
            for method in ("drain_jobs", "shutdown"):
                call = getattr(manager, method, None)
                if call is not None:
                    await asyncio.get_running_loop().run_in_executor(thread, call)
        thread.shutdown(wait=True)


def _overrides_parent_call(kind: type) -> bool:
    method = getattr(kind, "serve_external_requests", None)
    # vLLM's base has it as a no-op; a class that overrides it needs the ParentManager.
    return method is not None and not method.__module__.startswith(
        "vllm.v1.kv_offload.tiering.base"
    )
