# SPDX-License-Identifier: Apache-2.0
"""The file tier: one file a chunk, in a directory that many instances may share.

Job: turn calls of the service into batches for two thread pools, and statuses into outcomes. Owns
the namespace's directory descriptor, the pools and the janitor. Runs on the service's loop; nothing
here blocks it. Invariants: a call returns only when no thread touches its slots; a name always
means a whole file; only proven corruption takes a file away from its name, everything else that
goes wrong leaves it where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvtier import namespace
from kvtier._core import fileio
from kvtier.errors import ClosedError, ConfigError, TierLostError
from kvtier.tiers.base import Slot, Tier, TierContext, TierEnv
from kvtier.tiers.fs import naming
from kvtier.tiers.fs.capacity import UNIT_BYTES, Usage
from kvtier.tiers.fs.health import Gate, outcome
from kvtier.tiers.fs.janitor import Janitor, Report
from kvtier.tiers.fs.metrics import METRICS
from kvtier.tiers.fs.options import FsOptions, Upkeep
from kvtier.tiers.fs.pool import STUCK_SECONDS, End, Pool
from kvtier.tiers.fs.prepare import Prepared, prepare
from kvtier.tiers.fs.signals import Signals
from kvtier.types import Outcome, Presence, key_group

if TYPE_CHECKING:
    from kvtier.obs.metrics import MetricDef

logger = logging.getLogger(__name__)

OPEN_SECONDS = 4.5
"""The trial of a directory ends by then."""
FIRST_WALK_SECONDS = 2.0
"""How long `FsTier.open` waits for the space in use, when there is a limit to keep."""
STEP_BYTES = 8 << 20
"""A thread moves about this much of a batch before another batch has its turn."""
THREAD_BYTES = 128 << 10
"""A thread is woken for each this much of a batch."""
STEP_LOOKUPS = 512
LOOKUP_THREADS = 4
HANDLES_SECONDS = 0.25
"""Pause after the process ran out of descriptors."""
ANNOUNCE_PARTS = 64
"""Instances tell each other when they have written this part of their common limit."""
UNANNOUNCED_PARTS = 32
"""An instance writes at most this part of the common limit before it has told the others."""
EVICT_FOR_ERROR_BYTES = 1 << 30
EVICT_FOR_ERROR_PART = 0.05
"""Room made after "disk full": this part of what is there, at most so many bytes."""


class FsTier(Tier):
    """Chunks in files. See `FsOptions` for what can be set.

    Parameters
    ----------
    name : str
    options : FsOptions
    env : TierEnv
    faults : fileio.Faults, optional
        Tests only: errors, short transfers and hanging calls, by system call.
    upkeep : Upkeep, optional
        Tests only: shorter times.
    """

    type: ClassVar[str] = "fs"
    medium: ClassVar[str] = "STORAGE"
    options_type = FsOptions
    options: FsOptions

    def __init__(
        self,
        name: str,
        options: FsOptions,
        env: TierEnv,
        faults: fileio.Faults | None = None,
        upkeep: Upkeep = Upkeep(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(name, options, env)
        self._faults = faults
        self._upkeep = upkeep
        self._owner = naming.this_owner()
        self._directory_name = namespace.directory_name(env.namespace)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._storing_bytes = 0
        self._fallbacks = 0
        self._warned_of_mount = False
        self._signals = Signals(name, env.recorder, env.clock)
        self._left: list[Pool | Janitor] = []
        """Of attempts to open that failed: threads that hung in a system call."""
        self._renew()

    def _renew(self) -> None:
        """What one attempt to open uses up: threads end for good."""
        self.usage = Usage()
        self._files: fileio.Directory | None = None
        self._reads = Pool(f"kvtier-{self.name}-read", self.options.read_threads)
        self._writes = Pool(f"kvtier-{self.name}-write", self.options.write_threads)
        self._write_gate = Gate(self.env.clock)
        self._read_gate = Gate(self.env.clock)
        self._janitor: Janitor | None = None
        self._walked = asyncio.Event()
        self._janitor_ended = asyncio.Event()
        self._reopening: asyncio.Task[None] | None = None
        self._state = "new"

    @classmethod
    def metric_definitions(cls) -> Sequence[MetricDef]:
        return METRICS

    @property
    def direct(self) -> bool:
        """Whether files are opened with O_DIRECT."""
        return self._files is not None and self._files.direct

    @property
    def path(self) -> str:
        """The namespace's directory."""
        return os.path.join(self.options.root_dir, self._directory_name)

    async def open(self) -> None:
        """Make and try the directory, start the threads; the walk over it goes on behind.

        May be called again when it has raised.

        Raises
        ------
        ConfigError
            Path, permission or option is wrong; names path and errno.
        TierLostError
            The medium fails or does not answer within `OPEN_SECONDS`.
        """
        if self._state != "new":
            raise ClosedError(f"{self.name} was opened before")
        chunk_bytes = _file_bytes(max(self.env.geometry.payload_bytes))
        if chunk_bytes > (self.options.capacity_bytes or math.inf):
            raise ConfigError(
                f"fs: capacity_bytes: {self.options.capacity_bytes} holds no chunk, "
                f"give at least {chunk_bytes}"
            )
        self._left = [threads for threads in self._left if threads.alive]
        if self._left:
            # Else a medium that hangs would cost some threads with each attempt.
            raise TierLostError(f"fs: {self.path} hangs since an earlier attempt")
        self._state = "opening"
        self._loop = asyncio.get_running_loop()
        try:
            self._reads.open()
            self._writes.open()
            prepared = await self._prepare()
            self._files = prepared.directory
            if prepared.read_only:
                self._pause(Outcome.READ_ONLY)
            self._janitor = Janitor(
                f"kvtier-{self.name}-janitor",
                self.options,
                self._directory_name,
                self.env.namespace_digest,
                self._owner,
                self.usage,
                functools.partial(_hand_over, self._loop, self._take_report),
                functools.partial(_hand_over, self._loop, self._janitor_ended.set),
                self._upkeep,
                self._faults,
            )
            self._janitor.start(prepared.identity)
            if prepared.full:
                self._pause(Outcome.FULL)
            self._state = "open"
            if self.options.capacity_bytes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FIRST_WALK_SECONDS):
                        await self._walked.wait()
        except BaseException:
            used: list[Pool | Janitor] = [self._reads, self._writes]
            if self._janitor is not None:
                used.append(self._janitor)
            try:
                await self._shut(0.0)
            finally:
                self._left = used
                self._renew()
            raise
        recorder, tier = self.env.recorder, (self.name,)
        recorder.set("kvtier_fs_direct", float(self.direct), tier)
        recorder.set("kvtier_tier_capacity_bytes", float(self.options.capacity_bytes or 0), tier)

    async def _prepare(self) -> Prepared:
        call = functools.partial(
            prepare,
            self.options,
            self.env.namespace,
            self._owner,
            self._upkeep,
            self._faults,
        )
        try:
            return await self._reads.call(call, seconds=OPEN_SECONDS)
        except TimeoutError as exc:
            raise TierLostError(f"fs: {self.path} does not answer: {exc}") from exc

    async def walked(self) -> None:
        """Wait for the first walk over the directory: usage and absence are known then."""
        await self._walked.wait()

    async def contents(self) -> list[bytes] | None:
        """Keys of a private directory, once the first walk has seen all of it."""
        if not self.options.private:
            return None
        await self._walked.wait()
        return self.usage.keys()

    def _ready(self) -> fileio.Directory:
        if self._state != "open" or self._files is None:
            raise ClosedError(f"the tier {self.name} is not open")
        return self._files

    def _size(self, key: bytes) -> int:
        sizes = self.env.geometry.payload_bytes
        group = key_group(key)
        return sizes[group] if group < len(sizes) else -1

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        """Presence of each key; a file of the wrong size is absent.

        Raises
        ------
        TierLostError
            No key could be asked for.
        """
        files = self._ready()
        if not keys:
            return []
        if self.options.private and self.usage.complete:
            return [
                Presence.PRESENT if there else Presence.ABSENT for there in self.usage.present(keys)
            ]
        batch = fileio.Batch(
            keys, lengths=[self._size(key) for key in keys], ordered=not ctx.windowed
        )
        end = await self._reads.run(
            batch,
            functools.partial(files.find, batch, STEP_LOOKUPS),
            seconds=ctx.remaining(self.env.clock),
            width=min(LOOKUP_THREADS, -(-len(keys) // STEP_LOOKUPS)),
            urgent=True,
        )
        if end is End.REFUSED:
            self._signals.refused("exists", "stuck", len(keys))
            raise TierLostError(f"{self.name}: all {self._reads.size} readers hang")
        return self._presences(batch, ctx)

    def _presences(self, batch: fileio.Batch, ctx: TierContext) -> list[Presence]:
        statuses = batch.statuses()
        result = [Presence.PRESENT if status == 0 else Presence.ABSENT for status in statuses]
        failed = [outcome(status) for status in statuses if _is_failure(status)]
        if failed:
            self._signals.failed("exists", failed)
            self._signals.tell("exists", batch)
            self._look_at(failed)
            if len(failed) == len(statuses):
                raise TierLostError(f"{self.name}: {failed[0].name} for every key asked")
        if not ctx.windowed and Presence.ABSENT in result:
            first = result.index(Presence.ABSENT)
            result[first:] = [Presence.ABSENT] * (len(result) - first)
        return result

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Write each chunk under a temporary name and rename it; what is there already stays."""
        files = self._ready()
        outcomes = [Outcome.DROPPED] * len(items)
        admitted = self._admit(items, outcomes)
        if not admitted:
            return outcomes
        chosen = [items[i] for i in admitted]
        batch = fileio.Batch(
            [item.key for item in chosen],
            [item.address for item in chosen],
            [item.length for item in chosen],
            [item.crc for item in chosen],
        )
        held = sum(_file_bytes(item.length) for item in chosen)
        self._storing_bytes += held
        try:
            end = await self._writes.run(
                batch,
                functools.partial(files.store, batch, _step_items(chosen)),
                seconds=ctx.remaining(self.env.clock),
                width=_width(chosen),
            )
        finally:
            self._storing_bytes -= held
            self._note_stored(batch, chosen)
        if end is End.REFUSED:
            self._signals.refused("store", "stuck", len(chosen))
            return outcomes
        for i, status in zip(admitted, batch.statuses(), strict=True):
            outcomes[i] = outcome(status)
        self._signals.tell("store", batch)
        self._after_store(files, [outcomes[i] for i in admitted], held)
        return outcomes

    def _admit(self, items: Sequence[Slot], outcomes: list[Outcome]) -> list[int]:
        """Which items may be written now; the outcomes of the others are set."""
        if not items:
            return []
        if not self._write_gate.admits():
            self._signals.refused("store", "paused", len(items))
            return []
        capacity = self.options.capacity_bytes or 0
        if capacity and not self.usage.complete:
            # What lies there is not known yet: nothing that could break the limit.
            self._signals.refused("store", "capacity", len(items))
            return []
        assert self._janitor is not None
        room = capacity - self.usage.bytes - self._storing_bytes if capacity else None
        free = self._janitor.budget_bytes
        if free is not None:
            free -= self._storing_bytes
        # However long the janitor is held up, what others do not know of stays a small part.
        unknown = -math.inf
        if capacity and self._janitor.shared:
            unknown = max(0, self._unannounced_bytes()) + self._storing_bytes
        admitted = []
        for i, item in enumerate(items):
            size = _file_bytes(item.length)
            if unknown > 0 and (unknown + size) * UNANNOUNCED_PARTS > capacity:
                self._signals.refused("store", "capacity", len(items) - i)
                self._janitor.wake()
                break
            if room is not None and size > room:
                reason = "capacity"
            elif free is not None and size > free:
                reason = "free_space"
                self._janitor.want(size)
            else:
                admitted.append(i)
                room = None if room is None else room - size
                free = None if free is None else free - size
                unknown += size
                continue
            outcomes[i] = Outcome.FULL
            self._signals.refused("store", reason, 1)
        if Outcome.FULL in outcomes:
            self._janitor.crowd()
        elif capacity and self.usage.bytes > self.options.high_watermark * capacity:
            self._janitor.wake()
        return admitted

    def _note_stored(self, batch: fileio.Batch, items: Sequence[Slot]) -> None:
        assert self._janitor is not None
        for i, item in enumerate(items):
            status = batch.status(i)
            if status == 0:
                self.usage.add(item.key, batch.blocks(i))
                if self._janitor.budget_bytes is not None:
                    self._janitor.budget_bytes -= batch.blocks(i) * 512
            elif status == fileio.EXISTS:
                self.usage.found(item.key, batch.blocks(i))
            if item.crc is None:
                item.crc = batch.crc(i)
        if self._unannounced_bytes() * ANNOUNCE_PARTS > (self.options.capacity_bytes or math.inf):
            # Other instances under the same limit should not learn of much at a time.
            self._janitor.wake()

    def _unannounced_bytes(self) -> int:
        """What this instance has added and other instances do not know of."""
        assert self._janitor is not None
        return (self.usage.net_units - self._janitor.announced_units) * UNIT_BYTES

    def _after_store(
        self, files: fileio.Directory, outcomes: Sequence[Outcome], tried_bytes: int
    ) -> None:
        failed = [end for end in outcomes if end.failed]
        self._signals.failed("store", failed)
        self._look_at(failed)
        assert self._janitor is not None
        if Outcome.FULL in failed:
            self._pause(Outcome.FULL)
            part = int(self.usage.bytes * EVICT_FOR_ERROR_PART)
            self._janitor.want(max(2 * tried_bytes, min(part, EVICT_FOR_ERROR_BYTES)))
        elif Outcome.READ_ONLY in failed:
            self._pause(Outcome.READ_ONLY)
        elif Outcome.NO_HANDLES in failed:
            self._pause(Outcome.NO_HANDLES)
        elif Outcome.LOST in failed:
            self._pause(Outcome.LOST)
        elif Outcome.DONE in outcomes and self._write_gate.cause is not None:
            self._resume()
        if files is self._files and files.fallbacks != self._fallbacks:
            self._signals.add("kvtier_fs_direct_fallbacks_total", files.fallbacks - self._fallbacks)
            self._fallbacks = files.fallbacks

    def _pause(self, cause: Outcome) -> None:
        if self._write_gate.cause is not cause:
            logger.warning("%s: writes pause: %s", self.name, cause.name)
            self._resume()
            self._signals.paused(cause, True)
        self._write_gate.pause(
            cause, HANDLES_SECONDS if cause is Outcome.NO_HANDLES else self._upkeep.retry_seconds
        )

    def _resume(self) -> None:
        if self._write_gate.cause is not None:
            self._signals.paused(self._write_gate.cause, False)
            self._write_gate.succeed()

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Read each chunk into its slot and verify it there; corrupt files are set aside."""
        files = self._ready()
        if not items:
            return []
        if not self._read_gate.admits():
            self._signals.refused("load", "paused", len(items))
            return [Outcome.NO_HANDLES] * len(items)
        batch_keys = [item.key for item in items]
        batch = fileio.Batch(
            batch_keys, [item.address for item in items], [item.length for item in items]
        )
        end = await self._reads.run(
            batch,
            functools.partial(files.load, batch, _step_items(items)),
            seconds=ctx.remaining(self.env.clock),
            width=_width(items),
        )
        if end is End.REFUSED:
            self._signals.refused("load", "stuck", len(items))
            return [Outcome.TIMEOUT] * len(items)
        statuses = batch.statuses()
        for item, status, crc in zip(items, statuses, batch.crcs(), strict=True):
            if status == 0:
                item.crc = crc
                item.verified = True
        if not any(statuses):
            self.usage.renew(batch_keys)
            self._read_gate.succeed()
            return [Outcome.DONE] * len(items)
        self._signals.tell("load", batch)
        return await self._after_load(items, statuses, ctx)

    async def _after_load(
        self, items: Sequence[Slot], statuses: Sequence[int], ctx: TierContext
    ) -> list[Outcome]:
        """Outcomes of a batch of which not everything was read; corrupt files are set aside."""
        outcomes = [outcome(status) for status in statuses]
        self.usage.renew(
            item.key for item, status in zip(items, statuses, strict=True) if status == 0
        )
        corrupt = []
        for item, status in zip(items, statuses, strict=True):
            if status == fileio.MISSING:
                self.usage.vanished(item.key)
            elif status == fileio.CORRUPT:
                corrupt.append(item.key)
        failed = [result for result in outcomes if result.failed]
        self._signals.failed("load", failed)
        self._look_at(failed)
        if Outcome.NO_HANDLES in failed:
            self._read_gate.pause(Outcome.NO_HANDLES, HANDLES_SECONDS)
        elif Outcome.DONE in outcomes:
            self._read_gate.succeed()
        if corrupt:
            await self._set_aside(corrupt, ctx.remaining(self.env.clock))
        return outcomes

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Set the files of chunks that others found corrupt aside."""
        self._ready()
        if keys:
            await self._set_aside(keys, OPEN_SECONDS)

    async def _set_aside(self, keys: Sequence[bytes], seconds: float) -> None:
        files = self._ready()
        batch = fileio.Batch(keys)
        await self._reads.run(
            batch,
            functools.partial(files.set_aside, batch, STEP_LOOKUPS),
            seconds=seconds,
            urgent=True,
        )
        moved = 0
        for i, key in enumerate(keys):
            if batch.status(i) == 0:
                moved += 1
                self.usage.removed(key)
            elif batch.status(i) == fileio.MISSING:
                self.usage.vanished(key)
            else:
                logger.warning(
                    "%s: corrupt %s stays: %s", self.name, batch.path(i), outcome(batch.status(i))
                )
        if moved:
            logger.warning("%s: %d corrupt files set aside below %s", self.name, moved, self.path)
            self._signals.add("kvtier_quarantined_chunks_total", moved)

    def _look_at(self, failed: Sequence[Outcome]) -> None:
        """After errors that a root which went away gives: see whether it did."""
        if self._janitor is not None and (Outcome.LOST in failed or Outcome.STALE in failed):
            self._janitor.wake()

    def _take_report(self, report: Report) -> None:
        """What the janitor did in one turn. On the loop."""
        if self._state not in ("open", "opening"):
            return
        if report.walked:
            self._walked.set()
        if report.made_room and self._write_gate.cause is Outcome.FULL:
            self._write_gate.retry()
        if report.swept:
            self._signals.add("kvtier_fs_swept_total", report.swept)
        if report.evicted_files:
            self._signals.add("kvtier_tier_evicted_total", report.evicted_files)
        for key in report.evicted:
            self.tell("removed", key, max(0, self._size(key)))
        if report.root_lost:
            self._lose_root()
        elif report.root_lost is False and self._write_gate.cause is Outcome.LOST:
            self._write_gate.retry()
        recorder, tier = self.env.recorder, (self.name,)
        recorder.set("kvtier_tier_used_bytes", float(self.usage.bytes), tier)
        recorder.set("kvtier_tier_chunks", float(self.usage.files), tier)
        for label, pool in (("read", self._reads), ("write", self._writes)):
            recorder.set("kvtier_fs_stuck_threads", float(pool.stuck), (self.name, label))

    def _lose_root(self) -> None:
        """The path leads elsewhere: no writes into what nobody can see; try to get it back."""
        self._pause(Outcome.LOST)
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.get_running_loop().create_task(
                self._reopen(), name=f"kvtier-{self.name}-reopen"
            )

    async def _reopen(self) -> None:
        assert self._janitor is not None
        try:
            if not await self._reads.call(self._janitor.can_remake, seconds=OPEN_SECONDS):
                if not self._warned_of_mount:
                    self._warned_of_mount = True
                    logger.warning(
                        "%s: the filesystem of %s is not mounted any more, and nothing is written "
                        "behind it: mount it again, or make that directory to go on with another",
                        self.name,
                        self.path,
                    )
                return
            prepared = await self._prepare()
        except (ConfigError, TierLostError, TimeoutError, ClosedError) as exc:
            logger.warning("%s: the root is not back: %s", self.name, exc)
            return
        if self._state != "open":
            prepared.directory.close()
            return
        # Batches under way hold the old directory until they end; it closes itself then.
        self._files = prepared.directory
        self._fallbacks = 0
        self._warned_of_mount = False
        self._janitor.adopt(prepared.identity)
        self._janitor.walk()
        if prepared.read_only:
            self._pause(Outcome.READ_ONLY)
        else:
            self._resume()
            logger.info("%s: the root is back", self.name)

    async def aclose(self, deadline: float) -> None:
        """Let calls under way finish until `deadline`, then stop them; end all threads.

        Raises
        ------
        TierLostError
            A thread hangs in a system call; it is left behind, with the directory's descriptor.
        """
        if self._state == "closed":
            return
        await self._shut(max(0.0, deadline - self.env.clock()))

    async def _shut(self, seconds: float) -> None:
        self._state = "closed"
        hung: list[str] = []
        if self._janitor is not None:
            self._janitor.stop()
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait((self._reopening,))
        results = await asyncio.gather(
            self._reads.aclose(seconds), self._writes.aclose(seconds), return_exceptions=True
        )
        for result in results:
            if isinstance(result, TierLostError):
                hung.append(str(result))
            elif isinstance(result, BaseException):
                raise result
        if self._janitor is not None:
            try:
                async with asyncio.timeout(STUCK_SECONDS):
                    await self._janitor_ended.wait()
                self._janitor.join()
            except TimeoutError:
                hung.append(f"{self._janitor.name} hangs in a system call and is left behind")
        if hung:
            # A thread may still use the descriptor; it goes with that thread.
            self._files = None
            raise TierLostError(f"{self.name}: {'; '.join(hung)}")
        if self._files is not None:
            self._files.close()
            self._files = None


def _hand_over(loop: asyncio.AbstractEventLoop, take: Callable[..., None], *what: Report) -> None:
    # The loop of a tier that was not closed may be gone before its thread.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(take, *what)


def _file_bytes(length: int) -> int:
    """Space of the file of a payload."""
    return -(-length // fileio.PAGE_BYTES) * fileio.PAGE_BYTES + fileio.PAGE_BYTES


def _width(items: Sequence[Slot]) -> int:
    """Threads that share a batch: waking one must be worth it."""
    return min(len(items), -(-sum(item.length for item in items) // THREAD_BYTES) or 1)


def _step_items(items: Sequence[Slot]) -> int:
    return max(1, STEP_BYTES // max(1, items[0].length))


def _is_failure(status: int) -> bool:
    return status > 0 or status == fileio.WAITING
