# SPDX-License-Identifier: Apache-2.0
"""The engine for people who use kvtier as a library: ``async with kvtier.open(config) as cache``.

The loop that opens a ``Cache`` is the owner: all its calls run there. Owns the engine, its region
and one future a waiting call. Bytes are copied in threads when they are many, so that the loop
stays responsive; a slot stays pinned, or in WRITING, until its copy has really ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import numbers
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from kvtier.config import Config, load, parse
from kvtier.engine.engine import Engine, EngineStats, open_engine
from kvtier.errors import ClosedError, ConfigError
from kvtier.host.region import Region
from kvtier.tiers.registry import wants_rows
from kvtier.types import (
    GROUP_BYTES,
    MAX_KEY_BYTES,
    Geometry,
    GroupGeometry,
    Lookup,
    Peer,
    RequestContext,
    key_group,
    make_geometry,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

log = logging.getLogger(__name__)

AUDIT_TURNS = 20
"""Waits of 50 ms, at most, for the service's latest numbers."""

INLINE_BYTES = 256 << 10
"""Copies up to this size run on the loop: a thread costs more than they do."""


class StoreResult(msgspec.Struct, frozen=True):
    """What became of a ``Cache.store``."""

    stored: list[bytes]
    """Keys that are in host memory through this call."""
    present: list[bytes]
    """Keys that were there already, or that somebody else is just storing."""
    refused: list[bytes]
    """Keys for which host memory had no slot: all others were in use."""


class Cache:
    """Chunks by key, in host memory and the tiers behind it. Made by ``kvtier.open``.

    All methods belong to the loop that opened the cache. A cancelled ``store`` leaves no partly
    written chunk; a cancelled ``load`` gives its pins back when its copy has ended.
    """

    def __init__(self, engine: Engine, region: Region) -> None:
        self._engine = engine
        self._region = region
        self._loop = asyncio.get_running_loop()
        self._payload_bytes = engine.geometry.payload_bytes
        self._store_seconds = max((tier.store_seconds for tier in engine.config.tiers), default=0.0)
        self._waiters: set[asyncio.Future[None]] = set()
        self._copies: set[asyncio.Future[Any]] = set()
        self._calls = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        self._closed: asyncio.Future[None] | None = None
        self._requests = itertools.count()
        self._closing = False

    @property
    def geometry(self) -> Geometry:
        """Shape of the region."""
        return self._engine.geometry

    @property
    def engine(self) -> Engine:
        """The scheduler-facing side of the same cache."""
        return self._engine

    async def store(
        self, chunks: Mapping[bytes, Buffer], *, request_id: str | None = None
    ) -> StoreResult:
        """Copy chunks into host memory; from there they go to the tiers in the background.

        Parameters
        ----------
        chunks : mapping of key to buffer
            Keys in prefix order (see ``make_key``); each buffer has its group's payload bytes.
        request_id : str, optional
            Names the request in logs and to peers.

        Raises
        ------
        ConfigError
            If a buffer has not the size of its group's chunks. Nothing has been stored then.
        """
        self._check_open()
        views = {}
        for key, buffer in chunks.items():
            self._check_key(key)
            views[key] = self._view(key, buffer)
        keys = list(views)
        stored: list[bytes] = []
        with self._call(request_id) as context:
            # In portions, so that the first ones may leave for the tiers while the rest comes.
            widths = self._engine.geometry.widths
            portion = max(1, self._engine.geometry.num_slots // (4 * max(widths)))
            deadline = self._loop.time() + self._store_seconds
            for start in range(0, len(keys), portion):
                part = keys[start : start + portion]
                for width in dict.fromkeys(widths):
                    of_width = [key for key in part if widths[key_group(key)] == width]
                    if of_width:
                        stored += await self._store(of_width, views, context, deadline)
        taken = set(stored)
        rest = [key for key in keys if key not in taken]
        # What is neither ours nor anybody else's found no slot.
        present = [key for key in rest if self._engine.holds(key)]
        known = set(present)
        return StoreResult(
            [key for key in keys if key in taken],
            present,
            [key for key in rest if key not in known],
        )

    async def _store(
        self,
        keys: list[bytes],
        views: Mapping[bytes, memoryview],
        context: RequestContext,
        deadline: float,
    ) -> list[bytes]:
        """Store chunks of one size class."""
        absent = sum(not self._engine.holds(key) for key in keys)
        group = key_group(keys[0])
        while self._engine.make_room(absent, group) < absent and self._loop.time() < deadline:
            # Chunks that no tier has yet would have to go. The tiers are at it: wait for them.
            self._step()
            if self._engine.idle:
                break
            await self._news()
        reservation = self._engine.reserve(keys, context)
        reserved = reservation.keys
        done = False
        try:
            await self._copy(
                [
                    (self._region.slot_view(slot, len(views[key])), views[key])
                    for key, slot in zip(reserved, reservation.slots.tolist(), strict=True)
                ]
            )
            done = True
        finally:
            if done:
                self._engine.commit(reserved, context)
            else:
                self._engine.abort(reserved, context)
        return reserved

    async def load(
        self,
        keys: Iterable[bytes],
        into: Sequence[Buffer] | None = None,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        peer: Peer | None = None,
    ) -> list[memoryview]:
        """Load the longest prefix of `keys` that can be had.

        Parameters
        ----------
        keys : iterable of bytes
            In prefix order.
        into : sequence of writable buffers, optional
            Where to; new memory by default.
        timeout_seconds : float, optional
            Return what is there by then. By default the configuration's lookup and load timeouts
            decide.
        peer : Peer, optional
            The instance whose host memory to look into, where a peer tier is configured.

        Returns
        -------
        list of memoryview
            One for each key of the prefix that was found; shorter than `keys` where one is missing.
            Verified against the checksum that was taken when the chunk left host memory, if it has.
        """
        self._check_open()
        keys = self._checked(keys)
        targets = None
        if into is not None:
            if len(into) != len(keys):
                raise ConfigError(f"{len(keys)} keys but {len(into)} buffers to load into")
            targets = [
                self._view(key, buffer, writable=True)
                for key, buffer in zip(keys, into, strict=True)
            ]
        with self._call(request_id, peer) as context:
            ready = await self._await_ready(keys, context, timeout_seconds)
            found = keys[:ready]
            slots, generations = self._engine.pin(found, context)
            try:
                lengths = [self._payload_bytes[key_group(key)] for key in found]
                if targets is None:
                    targets = [memoryview(bytearray(length)) for length in lengths]
                copies = [
                    (target, self._region.slot_view(slot, length))
                    for target, slot, length in zip(
                        targets[:ready], slots.tolist(), lengths, strict=True
                    )
                ]
                await self._copy(copies)
            finally:
                self._engine.unpin(slots, generations, context)
            return targets[:ready]

    async def exists(
        self,
        keys: Iterable[bytes],
        *,
        timeout_seconds: float | None = None,
        peer: Peer | None = None,
    ) -> int:
        """Length of the prefix of `keys` that can be loaded; brings it into host memory."""
        self._check_open()
        keys = self._checked(keys)
        with self._call(None, peer) as context:
            return await self._await_ready(keys, context, timeout_seconds)

    async def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything that was on its way to the tiers has arrived or failed.

        Brings ``stats`` up to date with the tiers, too. False if the time was too short.
        """
        self._check_open()
        _check_seconds("timeout_seconds", timeout_seconds)
        with self._call(None), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self._engine.idle:
                    await self._news()
                if self._engine.config.tiers:
                    self._engine.audit()
                    for _ in range(AUDIT_TURNS):  # a dead service does not answer
                        if self._engine.resources is not None:
                            break
                        await self._news()
        return self._engine.idle

    def reset(self) -> None:
        """Forget every chunk; see ``on_reset`` for those in the tiers.

        Raises
        ------
        ConfigError
            If a store is under way: its slots could not be told from new ones of the same keys.
        """
        self._check_open()
        if self._copies:
            raise ConfigError("reset while stores or loads are under way: await them first")
        self._engine.reset()
        self._step()

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self._engine.stats()

    def metrics(self) -> bytes:
        """All series in Prometheus' text format."""
        self._engine.publish_metrics()
        return self._engine.registry.render()

    @contextlib.contextmanager
    def _call(self, request_id: str | None, peer: Peer | None = None) -> Iterator[RequestContext]:
        """A call under way: ``aclose`` waits for its end before it takes the engine away."""
        # Messages to a tier service in a process are UTF-8: one that cannot be written would take
        # those of all other calls in the same step with it.
        if request_id is not None and not (isinstance(request_id, str) and _is_utf8(request_id)):
            raise ConfigError(f"request_id is text, got {request_id!r:.80}")
        if peer is not None and not isinstance(peer, Peer):
            raise ConfigError(f"peer is a kvtier.Peer('host:port'), got {peer!r:.80}")
        # A number makes it unique: two calls may name the same request.
        context = RequestContext(f"{request_id or 'call'}#{next(self._requests)}", peer=peer)
        self._calls += 1
        self._no_calls.clear()
        try:
            yield context
        finally:
            self._calls -= 1
            if not self._calls:
                self._no_calls.set()
            self._engine.finish_request(context)
            self._step()

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the cache is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError("a cache belongs to the event loop that opened it")

    def _checked(self, keys: Iterable[bytes]) -> list[bytes]:
        """`keys` in a list of our own, which the caller cannot change while we wait."""
        keys = list(keys)
        for key in keys:
            self._check_key(key)
        return keys

    def _check_key(self, key: object) -> None:
        if not isinstance(key, bytes) or not GROUP_BYTES < len(key) <= MAX_KEY_BYTES:
            raise ConfigError(f"no key: {key!r:.80}; make keys with kvtier.make_key(hash, group)")
        group = key_group(key)
        if group >= len(self._payload_bytes):
            raise ConfigError(
                f"key of group {group}, but the geometry has {len(self._payload_bytes)}; "
                f"make keys with kvtier.make_key(hash, group)"
            )

    def _view(self, key: bytes, buffer: Buffer, *, writable: bool = False) -> memoryview:
        """The bytes of a buffer for the chunk `key`; ConfigError if it cannot be one."""
        try:
            view = memoryview(buffer).cast("B")
        except TypeError as exc:
            raise ConfigError(
                f"a chunk is a contiguous buffer of bytes, got {type(buffer).__name__}: {exc}"
            ) from exc
        group = key_group(key)
        if len(view) != self._payload_bytes[group]:
            raise ConfigError(
                f"a chunk of group {group} has {self._payload_bytes[group]} bytes, got {len(view)}"
            )
        if writable and view.readonly:
            raise ConfigError(
                f"a chunk is loaded into writable memory, such as a bytearray, "
                f"not into {type(buffer).__name__}"
            )
        return view

    async def _await_ready(
        self, keys: list[bytes], context: RequestContext, timeout_seconds: float | None
    ) -> int:
        if timeout_seconds is not None:
            _check_seconds("timeout_seconds", timeout_seconds)
        ready, answer = 0, Lookup.RETRY
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while True:
                    ready, answer = self._engine.lookup_batch(keys, context)
                    if answer is Lookup.MISS:
                        break
                    self._step()
                    await self._news()
        if answer is not Lookup.MISS:
            # Its time is up. The batch's answer may be 50 ms old: what it calls ready and could not
            # hold may have been evicted since. One by one all are looked at anew.
            ready = 0
            while ready < len(keys) and self._engine.lookup(keys[ready], context) is Lookup.HIT:
                ready += 1
        return ready

    def _step(self) -> None:
        self._engine.end_step()

    async def _news(self) -> None:
        """Until the service has said something, 50 ms at most: deadlines pass without a word."""
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        timer = self._loop.call_later(0.05, self._settle, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)
        if self._closing:
            raise ClosedError("the cache was closed during this call")
        self._engine.poll()
        self._step()

    @staticmethod
    def _settle(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake(self) -> None:
        """The service has said something; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        if not self._closing and not self._waiters:
            # Nobody waits, but what had been put off may go to the tiers now.
            self._engine.poll()
            self._step()
        for waiter in self._waiters:
            self._settle(waiter)

    async def _copy(self, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Copy each second view into the first; returns, also when cancelled, when it is done."""
        if sum(len(target) for target, _ in copies) <= INLINE_BYTES:
            _copy_all(copies)
            return
        future = self._loop.run_in_executor(None, _copy_all, copies)
        self._copies.add(future)
        try:
            await _to_the_end(future)
        finally:
            self._copies.discard(future)

    async def aclose(self, deadline_seconds: float = 5.0) -> None:
        """Save what only the host holds (``flush_on_shutdown_seconds``), then let go of it all.

        Calls under way end with ``ClosedError``, those that are just copying when they have done
        so. Once begun it goes on to its end, also when cancelled: the bytes have to stay until
        nobody uses them. Another call waits for the same end.
        """
        if self._closed is None:
            # Before anything is closed: an end that fails would leave service and file behind.
            _check_seconds("deadline_seconds", deadline_seconds)
            self._closing = True
            self._closed = self._loop.create_task(
                self._close(deadline_seconds), name="kvtier-close"
            )
        await _to_the_end(self._closed)

    async def _close(self, deadline_seconds: float) -> None:
        self._on_wake()
        # Copies in threads are the longest that a call does without looking up.
        await self._no_calls.wait()
        self._engine.on_message(None)
        # Closing waits for the service, so it does not do so on the loop.
        await self._loop.run_in_executor(None, self._engine.close, deadline_seconds)


def _check_seconds(name: str, seconds: object) -> None:
    if not isinstance(seconds, numbers.Real) or math.isnan(seconds):
        raise ConfigError(f"{name} is a number of seconds, got {seconds!r:.80}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _to_the_end(future: asyncio.Future[T]) -> T:
    """Result of `future`, which is waited for whatever happens; a cancellation comes after it."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        if not future.cancelled() and future.exception() is not None:
            log.error("failed after it had been cancelled", exc_info=future.exception())
        raise cancelled
    return future.result()


def _copy_all(copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    for target, source in copies:
        # numpy releases the GIL while it copies, slicing a memoryview does not.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _plain_geometry(
    chunk_bytes: int | Sequence[int] | None, capacity_bytes: int, *, one_size: bool
) -> Geometry:
    """One block a chunk, and nothing known of what is in it."""
    if chunk_bytes is None:
        raise ConfigError("give chunk_bytes (bytes of one chunk) or geometry")
    sizes: list[Any] = [chunk_bytes]
    if isinstance(chunk_bytes, Sequence) and not isinstance(chunk_bytes, str | bytes):
        sizes = list(chunk_bytes)
    for size in sizes or [None]:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"chunk_bytes is a whole number of at least 1, or one for each group, "
                f"got {chunk_bytes!r:.80}"
            )
    groups = [GroupGeometry(block_tokens=1, blocks_per_chunk=1, block_bytes=size) for size in sizes]
    try:
        return make_geometry(groups, capacity_bytes, one_size=one_size)
    except ValueError as exc:
        raise ConfigError(f"capacity_bytes: {exc}") from exc


async def open_cache(config: Config, geometry: Geometry, namespace: Mapping[str, str]) -> Cache:
    """Open an engine without blocking the loop, and the cache over it."""
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, open_engine, config, geometry, namespace)
    try:
        engine, region = await _to_the_end(opening)
    except asyncio.CancelledError:
        if opening.exception() is None:
            # It has opened all the same, and nobody else knows of it.
            await _to_the_end(loop.run_in_executor(None, opening.result()[0].close, 1.0))
        raise
    cache = Cache(engine, region)
    engine.on_message(cache.wake)
    return cache


@contextlib.asynccontextmanager
async def open(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    *,
    chunk_bytes: int | Sequence[int] | None = None,
    geometry: Geometry | None = None,
    namespace: Mapping[str, str] | None = None,
) -> AsyncIterator[Cache]:
    """A cache for the running event loop.

    Parameters
    ----------
    config : Config, mapping or path of a YAML file
    chunk_bytes : int or sequence of int
        Bytes of a chunk, or of a chunk of each group; or give `geometry`.
    namespace : mapping, optional
        What must agree before instances may share bytes: model, weights, dtype, layout.

    Raises
    ------
    ConfigError
        With what to type instead.

    Examples
    --------
    >>> async with kvtier.open({"capacity_bytes": "1GiB"}, chunk_bytes=1 << 20) as cache:
    ...     await cache.store({key: payload})
    ...     [view] = await cache.load([key])
    """
    if isinstance(config, Mapping):
        config = parse(config)
    elif isinstance(config, str | os.PathLike):
        config = load(Path(config))
    elif not isinstance(config, Config):
        raise ConfigError(f"config is a mapping or the path of a YAML file, got {config!r:.80}")
    if geometry is None:
        one_size = wants_rows(config.tiers)
        geometry = _plain_geometry(chunk_bytes, config.capacity_bytes, one_size=one_size)
    elif not isinstance(geometry, Geometry):
        raise ConfigError(f"geometry is a kvtier.Geometry, got {geometry!r:.80}")
    if not isinstance(namespace, Mapping | None):
        raise ConfigError(f"namespace is a mapping of text to text, got {namespace!r:.80}")
    cache = await open_cache(config, geometry, namespace or {})
    try:
        yield cache
    finally:
        await cache.aclose()
