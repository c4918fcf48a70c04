# SPDX-License-Identifier: Apache-2.0
"""The object tier: one object a chunk in an S3-compatible store that all hosts may share.

Job: turn calls of the service into requests, and answers into outcomes. Owns the control client,
the bulk path and what is known of presence. Runs on the service's loop; nothing here blocks it.
Invariants: a call returns only when nothing touches its slots; an object is whole or not there
(the store sees to that), and one whose key, length or checksum differs is never called loaded.

An object is the payload; its metadata has one entry, ``kvtier``: version, key, length, CRC-32C.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier import namespace
from kvtier.errors import ClosedError, TierLostError
from kvtier.tiers.base import Slot, Tier, TierContext, TierEnv
from kvtier.tiers.fs import naming
from kvtier.tiers.obj.bulk import Bulk
from kvtier.tiers.obj.control import Control, Listed
from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.http import Response
from kvtier.tiers.obj.known import Known
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.room import Room, Usage
from kvtier.tiers.obj.trial import (
    NAMESPACE_OBJECT,
    Features,
    advice,
    checksum_header,
    put_headers,
    put_namespace,
    try_bucket,
    write_namespace,
)
from kvtier.types import Outcome, Presence

if TYPE_CHECKING:
    from kvtier.obs.metrics import MetricDef

logger = logging.getLogger(__name__)

OPEN_SECONDS = 4.5
"""Credentials and the trial of a bucket have been had by then."""
FIRST_QUESTIONS = 4
"""Keys of a prefix that are asked for at once; twice as many each time all were there."""
QUESTIONS = 1024
REQUESTS_COUNTED = 4096
"""Requests of the model server whose questions are counted."""
READABLE_SECONDS = 5.0
"""How long the proof holds that reading is permitted; and from one repair of it to the next."""

_META = "x-amz-meta-kvtier"
_META_VALUE = re.compile(rb"1-([0-9a-f]+)-([0-9]{1,15})-([0-9a-f]{8})")


class ObjTier(Tier):
    """Chunks in a bucket. See `ObjOptions` for what can be set.

    Parameters
    ----------
    name : str
    options : ObjOptions
    env : TierEnv
    """

    type: ClassVar[str] = "obj"
    medium: ClassVar[str] = "STORAGE"
    stores_at_once: ClassVar[int] = 8
    options_type = ObjOptions
    options: ObjOptions

    def __init__(self, name: str, options: ObjOptions, env: TierEnv) -> None:
        super().__init__(name, options, env)
        parts = (options.prefix.strip("/"), namespace.directory_name(env.namespace))
        self.prefix = "".join(f"{part}/" for part in parts if part)
        """Of the names of all objects of the namespace."""
        # The same at each attempt: what one has left behind, the next one deletes.
        self._trial = f"{self.prefix}trial-{secrets.token_hex(8)}"
        self._known = Known(options.absent_seconds, env.clock)
        self._control: Control | None = None
        self._bulk: Bulk | None = None
        self._features = Features(conditional=True, checksums=True, hides_missing=False)
        self._readable_until = self._rewrite_at = -math.inf
        self._tasks: set[asyncio.Task[Any]] = set()  # of calls
        self._tending: set[asyncio.Task[Any]] = set()  # of the tier's own
        self._room: Room | None = None
        self._questions: OrderedDict[str, int] = OrderedDict()
        self._always = [("content-type", "application/octet-stream"), *put_headers(options)]
        self._state = "new"

    @classmethod
    def metric_definitions(cls) -> Sequence[MetricDef]:
        return METRICS

    # Life.
    async def open(self) -> None:
        """Find credentials and bucket, and prove them: an object is written, read and deleted.

        May be called again when it has raised.

        Raises
        ------
        ConfigError
            Something the operator has to change: names, region, clock, permission, credentials.
        TierLostError
            The store or the source of credentials fails, or does not answer within `OPEN_SECONDS`.
        """
        if self._state != "new":
            raise ClosedError(f"{self.name} was opened before")
        self._state = "opening"
        control = self._control = Control(self.options, self.env.clock)
        until = self.env.clock() + OPEN_SECONDS
        try:
            await control.open()
            bulk = self._bulk = Bulk(self.options, control, self._failed, self.env.clock)
            async with asyncio.timeout(until - self.env.clock()):
                self._features = await try_bucket(bulk, control, self.options, self._trial, until)
                await write_namespace(bulk, self.options, self.env.namespace, self.prefix, until)
        except BaseException as exc:
            await self._shut()
            self._bulk, self._state = None, "new"
            where = f"bucket {self.options.bucket} at {control.endpoint_url or 'the store'}"
            if isinstance(exc, TimeoutError):
                text = f"obj: {where} does not answer within {OPEN_SECONDS:g} s"
                raise TierLostError(text) from exc
            if isinstance(exc, StoreError):
                raise advice(exc, where) from exc
            raise
        self._state = "open"
        self._report()
        if self.options.warm_up:
            self._tend(self._list_all(), "warm-up")
        capacity_bytes = self.options.capacity_bytes
        if capacity_bytes is not None:
            self._room = Room(
                control,
                self.prefix[: -len(namespace.directory_name(self.env.namespace)) - 1],
                capacity_bytes,
                self.options.low_watermark,
                self._take_deleted,
                self._take_usage,
                self._failed,
            )
            self._tend(self._room.keep(), "room")
        self.env.recorder.set(
            "kvtier_tier_capacity_bytes", float(capacity_bytes or 0), (self.name,)
        )

    async def _list_all(self) -> None:
        """Every chunk of the namespace becomes known."""
        assert self._control is not None
        try:
            async for page in self._control.list(self.prefix):
                self._known.mine(key for one in page if (key := one.key) is not None)
        except StoreError as exc:
            self._failed(exc.kind)
            logger.warning("%s: the listing at the start stopped: %s", self.name, exc)

    async def aclose(self, deadline: float) -> None:
        """Let calls under way finish until `deadline`, then stop them; close all connections."""
        if self._state == "closed":
            return
        self._state = "closed"
        await self._end(self._tending)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, deadline - self.env.clock()))
        await self._shut()

    async def _shut(self) -> None:
        await self._end(self._tending | self._tasks)
        if self._bulk is not None:
            await self._bulk.aclose()
        if self._control is not None:
            await self._control.aclose()

    def _ready(self) -> Bulk:
        if self._state != "open" or self._bulk is None:
            raise ClosedError(f"the tier {self.name} is not open")
        return self._bulk

    def _start(self, coroutine: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine, name=f"kvtier-{self.name}-{what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tend(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        self._tending.add(asyncio.create_task(coroutine, name=f"kvtier-{self.name}-{what}"))

    @staticmethod
    async def _end(tasks: set[asyncio.Task[Any]]) -> None:
        """Cancel tasks, and wait for them however often the caller is cancelled meanwhile. What
        they raise beside what the caller has been told is of no further interest."""
        cancelled = False
        while left := {task for task in tasks if not task.done()}:
            for task in left:
                task.cancel()
            try:
                await asyncio.wait(left)
            except asyncio.CancelledError:
                cancelled = True
        for task in tasks:
            if not task.cancelled():
                task.exception()
        if cancelled:
            raise asyncio.CancelledError

    async def _each(
        self, coroutines: list[Coroutine[Any, Any, Outcome]], deadline: float
    ) -> list[Outcome]:
        """Outcomes of calls that run at the same time and end by `deadline`."""
        tasks = [self._start(one, "call") for one in coroutines]
        left: set[asyncio.Task[Outcome]] = set()
        try:
            _, left = await asyncio.wait(tasks, timeout=max(0.0, deadline - self.env.clock()))
        finally:
            await self._end(set(tasks))
            self._report()
        return [
            (Outcome.TIMEOUT if task in left else Outcome.CANCELLED)
            if task.cancelled()
            else task.result()
            for task in tasks
        ]

    # Calls.
    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Put each chunk, unless it is there."""
        self._ready()
        if not items:
            return []
        return await self._each([self._store(item, ctx) for item in items], ctx.deadline)

    async def _store(self, item: Slot, ctx: TierContext) -> Outcome:
        outcome = await self._outcome(self._put(item, ctx))
        if outcome.ok:
            self._known.mine([item.key])
        if outcome is Outcome.DONE and self._room is not None:
            self._room.stored(item.length)
        return outcome

    async def _put(self, item: Slot, ctx: TierContext) -> None:
        assert item.crc is not None
        if self._known.holds(item.key) and await self._head(item.key, ctx) is Presence.PRESENT:
            raise StoreError(Kind.EXISTS, self.name_of(item.key))
        meta = f"1-{item.key.hex()}-{item.length}-{item.crc:08x}"
        headers = [*self._always, (_META, meta)]
        if self._features.conditional:
            headers.append(("if-none-match", "*"))
        if self._features.checksums:
            headers.append(checksum_header(item.crc))
        await self._ready().request(
            "PUT", self.name_of(item.key), ctx.deadline, headers=headers, body=item.view
        )

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Get each chunk into its slot, where the service compares it with the CRC it was stored
        with."""
        self._ready()
        if not items:
            return []
        return await self._each([self._load(item, ctx) for item in items], ctx.deadline)

    async def _load(self, item: Slot, ctx: TierContext) -> Outcome:
        outcome = await self._outcome(
            self._ready().request(
                "GET",
                self.name_of(item.key),
                ctx.deadline,
                into=item.view,
                check=functools.partial(_check_loaded, item),
            )
        )
        if outcome is Outcome.CORRUPT and not await self._is_damaged(item, ctx):
            # A proxy's page, say. What is corrupt is deleted, for all hosts.
            return Outcome.IO
        if outcome is Outcome.DONE:
            self._known.mine([item.key])
        elif outcome in (Outcome.MISSING, Outcome.CORRUPT):
            self._known.gone(item.key)
        return outcome

    async def _is_damaged(self, item: Slot, ctx: TierContext) -> bool:
        """Whether the object's own head says that it is not the chunk, whatever an answer was."""
        try:
            reply = await self._ready().request("HEAD", self.name_of(item.key), ctx.deadline)
            _check_head(item, reply)
        except StoreError as exc:
            return exc.kind is Kind.CORRUPT
        said = reply.headers.get(b"content-length")
        return said != str(item.length).encode() or b"content-encoding" in reply.headers

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Delete the objects of chunks that were found corrupt."""
        bulk = self._ready()
        until = self.env.clock() + OPEN_SECONDS

        async def delete(key: bytes) -> Outcome:
            self._known.gone(key)
            outcome = await self._outcome(bulk.request("DELETE", self.name_of(key), until))
            if outcome.failed:
                logger.warning("%s: corrupt %s stays: %s", self.name, self.name_of(key), outcome)
            return outcome

        if keys:
            await self._each([delete(key) for key in keys], until)

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        """Presence of each key. In prefix order the questions end at the first that is not there.

        Raises
        ------
        TierLostError, TimeoutError
            The store did not answer for one of them.
        """
        self._ready()
        answers: list[Presence | None] = []
        for key in keys:
            there = self._known.ask(key)
            answers.append(None if there is None else _PRESENCE[there])
            if there is False and not ctx.windowed:
                break
        unknown = [i for i, answer in enumerate(answers) if answer is None]
        most = QUESTIONS if ctx.windowed else FIRST_QUESTIONS
        while wave := unknown[: self._may_ask(min(most, len(unknown)), ctx)]:
            unknown = unknown[len(wave) :]
            for i, presence in zip(
                wave, await self._heads([keys[i] for i in wave], ctx), strict=True
            ):
                answers[i] = presence
            if not ctx.windowed and any(answers[i] is Presence.ABSENT for i in wave):
                break
            most = min(2 * most, QUESTIONS)
        answers += [None] * (len(keys) - len(answers))
        result = [Presence.ABSENT if answer is None else answer for answer in answers]
        if not ctx.windowed and Presence.ABSENT in result:
            first = result.index(Presence.ABSENT)
            result[first:] = [Presence.ABSENT] * (len(result) - first)
        return result

    def _may_ask(self, wanted: int, ctx: TierContext) -> int:
        """How many of the questions the request's budget allows."""
        if not ctx.request_id:
            return wanted
        asked = self._questions.pop(ctx.request_id, 0)
        allowed = min(wanted, self.options.presence_requests - asked)
        self._questions[ctx.request_id] = asked + allowed
        if len(self._questions) > REQUESTS_COUNTED:
            self._questions.popitem(last=False)
        return allowed

    async def _heads(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        tasks = [self._start(self._head(key, ctx), "head") for key in keys]
        try:
            async with asyncio.timeout(ctx.deadline - self.env.clock()):
                # Raises what the first one raises that fails, while others may be under way.
                presences: list[Presence] = await asyncio.gather(*tasks)
            return presences
        except StoreError as exc:
            raise TierLostError(str(exc)) from exc
        finally:
            await self._end(set(tasks))
            self._report()

    async def _head(self, key: bytes, ctx: TierContext) -> Presence:
        bulk = self._ready()
        try:
            reply = await bulk.request("HEAD", self.name_of(key), ctx.deadline)
        except StoreError as exc:
            if exc.kind is not Kind.MISSING and not await self._is_hidden(exc):
                raise
            there = False
        else:
            meta = _meta(reply)
            there = meta is not None and meta[0] == key
        self._known.found(key, there)
        if not there:
            self._known.gone(key)
        return _PRESENCE[there]

    async def _outcome(self, request: Coroutine[Any, Any, Any]) -> Outcome:
        """How a request ended."""
        try:
            await request
        except StoreError as exc:
            if await self._is_hidden(exc):
                return Outcome.MISSING
            return exc.kind.outcome
        return Outcome.DONE

    async def _is_hidden(self, error: StoreError) -> bool:
        """Whether a 403 says that the object is not there, rather than that nothing is permitted:
        then ``namespace.json`` is readable."""
        if error.kind is not Kind.FORBIDDEN or not self._features.hides_missing:
            return False
        now = self.env.clock()
        if now >= self._readable_until:
            try:
                await self._prove_readable(now)
            except StoreError:
                return False
            self._readable_until = now + READABLE_SECONDS
        return True

    async def _prove_readable(self, now: float) -> None:
        """StoreError if ``namespace.json`` cannot be read. A rule of the bucket deletes it with
        what else is old: then it is written again, and as rarely tried where nothing is permitted.
        """
        bulk, until = self._ready(), now + OPEN_SECONDS
        name = f"{self.prefix}{NAMESPACE_OBJECT}"
        try:
            await bulk.request("HEAD", name, until)
        except StoreError as exc:
            if exc.kind is not Kind.FORBIDDEN or now < self._rewrite_at:
                raise
            self._rewrite_at = now + READABLE_SECONDS
            await put_namespace(bulk, self.options, self.env.namespace, self.prefix, until)
            await bulk.request("HEAD", name, until)

    def forget_presence(self) -> None:
        """What is known of presence without a question; for tests and benchmarks."""
        self._known = Known(self.options.absent_seconds, self.env.clock)

    def name_of(self, key: bytes) -> str:
        """Name of a chunk's object: below the prefix as the file tier's files."""
        return self.prefix + naming.chunk_path(key)

    def _take_deleted(self, objects: Sequence[Listed]) -> None:
        """The limit has cost these."""
        self.env.recorder.add("kvtier_tier_evicted_total", len(objects), (self.name,))
        for one in objects:
            if one.key is not None and one.name.startswith(self.prefix):
                self._known.gone(one.key)
                self.tell("removed", one.key, one.size)

    def _take_usage(self, usage: Usage) -> None:
        recorder, tier = self.env.recorder, (self.name,)
        recorder.set("kvtier_tier_used_bytes", float(usage.stored_bytes), tier)
        recorder.set("kvtier_tier_chunks", float(usage.chunks), tier)

    def _report(self) -> None:
        """What the bulk path has done, and may do at present: after each call."""
        if self._bulk is None:
            return
        recorder, tier = self.env.recorder, (self.name,)
        for method, count in self._bulk.take_succeeded().items():
            recorder.add("kvtier_obj_requests_total", count, (self.name, method))
        recorder.set("kvtier_obj_concurrency", float(self._bulk.limit.places), tier)
        recorder.set("kvtier_obj_connections", float(self._bulk.connections), tier)

    def _failed(self, kind: Kind) -> None:
        """A try of a request failed."""
        self.env.recorder.add("kvtier_obj_errors_total", 1, (self.name, kind.value))


_PRESENCE = {True: Presence.PRESENT, False: Presence.ABSENT}


def _meta(response: Response) -> tuple[bytes, int, int] | None:
    """Key, length and CRC of the chunk that an object is; None if it is none."""
    meta = _META_VALUE.fullmatch(response.headers.get(_META.encode(), b""))
    return meta and (bytes.fromhex(meta[1].decode()), int(meta[2]), int(meta[3], 16))


def _check_head(item: Slot, response: Response) -> int:
    """CRC of the chunk, from its metadata; StoreError if they are another's."""
    meta = _meta(response)
    if meta is None:
        raise StoreError(Kind.CORRUPT, "an object without kvtier's metadata")
    key, length, crc = meta
    if key != item.key or length != item.length:
        raise StoreError(Kind.CORRUPT, "an object of another chunk")
    return crc


def _check_loaded(item: Slot, response: Response) -> None:
    """Whether what came is the chunk, as far as head and length tell; gives the slot its CRC."""
    crc = _check_head(item, response)
    if not response.placed:
        said = response.headers.get(b"content-length", b"no length").decode("latin-1")
        raise StoreError(Kind.CORRUPT, f"{said} bytes in place of {item.length}")
    item.crc = crc
