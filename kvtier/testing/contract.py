# SPDX-License-Identifier: Apache-2.0
"""What every tier must do: a pytest mixin, and the memory and environment its tests run on.

A tier ships when a short subclass passes::

    class TestMyTier(TierContract):
        def make_tier(self, env, tmp_path):
            return MyTier("mine", MyOptions(...), env)

        def raw_get(self, tier, key): ...        # stored bytes, None if there are none
        def raw_put(self, tier, key, data): ...  # put them there behind the tier's back

Needs pytest and pytest-asyncio; with the hook of `kvtier.testing.loops` in their ``conftest.py``
the tests run on both event loops. `Arena` owns anonymous memory until it is closed.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import inspect
import mmap
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtier._core.layout import crc32c
from kvtier.errors import ClosedError
from kvtier.namespace import namespace_digest
from kvtier.obs.events import Event
from kvtier.obs.metrics import METRICS, Recorder
from kvtier.tiers.base import Slot, Tier, TierContext, TierEnv
from kvtier.types import (
    GroupGeometry,
    Outcome,
    Presence,
    make_geometry,
    make_key,
)

SIZES = (1, 4095, 4096, 4097, 65536, 512 * 1024 + 5)
"""Payload bytes of groups 0 to 5: below, at and above a page, and not a multiple of anything."""


class Arena:
    """Page-aligned anonymous memory cut into slots, as a region would give them.

    Parameters
    ----------
    num_slots : int
    slot_bytes : int
        A multiple of 4096.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(-1, num_slots * slot_bytes)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data

    def slot(
        self, index: int, key: bytes, length: int, payload: bytes | None = None, *, shift: int = 0
    ) -> Slot:
        """Slot `index` for one chunk, filled with `payload` (zeros without one).

        `shift` moves it off its page boundary, for tests of odd addresses.
        """
        start = index * self.slot_bytes + shift
        if not 0 <= index < self.num_slots or start + length > len(self._bytes):
            raise IndexError(index)
        part = self._bytes[start : start + length]
        part[:] = 0 if payload is None else np.frombuffer(payload, dtype=np.uint8)
        view = part.data
        # As from the service: a store has its checksum, a load gets it.
        crc = None if payload is None else crc32c(view)
        return Slot(key, index, 1, length, view, self.address + start, crc)

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All of the memory, one slot a row."""
        return self._bytes.reshape(self.num_slots, self.slot_bytes)

    def close(self) -> None:
        """Give the memory back; slots must be gone."""
        del self._bytes
        self._map.close()


def make_env(
    *,
    sizes: Sequence[int] = SIZES,
    num_slots: int = 64,
    fields: Mapping[str, str] | None = None,
    definitions: Sequence[Any] = (),
    clock: Callable[[], float] = time.monotonic,
    events: list[Event] | None = None,
) -> TierEnv:
    """Environment of a tier whose group `i` has chunks of ``sizes[i]`` bytes."""
    groups = tuple(
        GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=size) for size in sizes
    )
    slot_bytes = -(-max(sizes) // 4096) * 4096
    namespace = {"model": "org/model"} if fields is None else fields
    return TierEnv(
        geometry=make_geometry(groups, num_slots * slot_bytes, one_size=True),
        namespace=namespace,
        namespace_digest=namespace_digest(namespace),
        recorder=Recorder((*METRICS, *definitions)),
        emit=(lambda event: None) if events is None else events.append,
        clock=clock,
    )


def context(
    seconds: float = 30.0, clock: Callable[[], float] = time.monotonic, *, windowed: bool = True
) -> TierContext:
    """Context of a call with `seconds` to go."""
    return TierContext(deadline=clock() + seconds, request_id="test", windowed=windowed)


def chunk(number: int, group: int, size: int) -> tuple[bytes, bytes]:
    """Key and payload number `number`: the payload depends on key and offset, so that a foreign or
    old byte shows."""
    key = make_key(random.Random(number).randbytes(32), group)
    return key, random.Random(key).randbytes(size)


class TierContract(abc.ABC):
    """Tests that hold for every tier. See the head of this module."""

    persistent: ClassVar[bool] = True
    """Whether chunks are there again after ``aclose`` and ``open``."""
    num_slots: ClassVar[int] = 64

    @abc.abstractmethod
    def make_tier(self, env: TierEnv, tmp_path: Path) -> Tier:
        """A tier that was not opened; two of one `tmp_path` share their data."""

    @abc.abstractmethod
    def raw_get(self, tier: Tier, key: bytes) -> Any:
        """Stored bytes of `key`, the payload first; None if there are none. May be awaitable."""

    @abc.abstractmethod
    def raw_put(self, tier: Tier, key: bytes, data: bytes) -> Any:
        """Put bytes in the place of `key`, behind the tier's back. May be awaitable."""

    def definitions(self) -> Sequence[Any]:
        """The tier's own metrics."""
        return ()

    def env(self) -> TierEnv:
        """Environment for `make_tier`."""
        return make_env(num_slots=self.num_slots, definitions=self.definitions())

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        arena = Arena(self.num_slots, -(-max(SIZES) // 4096) * 4096)
        yield arena
        with contextlib.suppress(BufferError):  # a failed test keeps its slots in the traceback
            arena.close()

    @contextlib.asynccontextmanager
    async def opened(self, tmp_path: Path) -> AsyncIterator[Tier]:
        """A tier that is open inside the block."""
        tier = self.make_tier(self.env(), tmp_path)
        await tier.open()
        try:
            yield tier
        finally:
            await tier.aclose(time.monotonic() + 10)

    @staticmethod
    async def put(tier: Tier, arena: Arena, number: int, group: int = 4) -> tuple[bytes, bytes]:
        """Store chunk `number`; its key and payload."""
        key, payload = chunk(number, group, SIZES[group])
        assert await tier.store([arena.slot(0, key, len(payload), payload)], context()) == [
            Outcome.DONE
        ]
        return key, payload

    @staticmethod
    async def get(tier: Tier, arena: Arena, key: bytes, size: int) -> tuple[Outcome, bytes]:
        """Load a chunk as the service does; outcome and what is in the slot."""
        slot = arena.slot(1, key, size)
        (result,) = await tier.load([slot], context())
        if result is Outcome.DONE and not slot.verified and crc32c(slot.view) != slot.crc:
            # The service compares what the tier did not.
            result = Outcome.CORRUPT
        if result is Outcome.CORRUPT:
            await tier.forget([key])
        return result, bytes(slot.view)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("group", range(len(SIZES)))
    async def test_round_trip(self, tmp_path: Path, arena: Arena, group: int) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = chunk(1, group, SIZES[group])
            source = arena.slot(0, key, len(payload), payload)
            assert await tier.store([source], context()) == [Outcome.DONE]
            assert bytes(source.view) == payload
            raw = await _maybe(self.raw_get(tier, key))
            assert raw is not None
            assert raw[: len(payload)] == payload
            target = arena.slot(1, key, len(payload))
            assert await tier.load([target], context()) == [Outcome.DONE]
            assert bytes(target.view) == payload
            assert target.crc == source.crc
            assert target.crc is not None

    @pytest.mark.asyncio
    async def test_presence(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            keys = [(await self.put(tier, arena, n))[0] for n in range(3)]
            absent = chunk(99, 4, 1)[0]
            asked = [keys[0], absent, keys[1], keys[2]]
            there, gone = Presence.PRESENT, Presence.ABSENT
            assert await tier.exists(asked, context()) == [there, gone, there, there]
            prefix = await tier.exists(asked, context(windowed=False))
            assert prefix[:2] == [there, gone]
            assert len(prefix) == 4
            assert await tier.exists([], context()) == []

    @pytest.mark.asyncio
    async def test_missing_is_a_miss(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            result, _ = await self.get(tier, arena, chunk(5, 4, 1)[0], SIZES[4])
            assert result is Outcome.MISSING
            assert not result.failed

    @pytest.mark.asyncio
    async def test_second_store_exists(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
            slot = arena.slot(0, key, len(payload), payload)
            assert await tier.store([slot], context()) == [Outcome.EXISTS]
            assert await self.get(tier, arena, key, len(payload)) == (Outcome.DONE, payload)

    @pytest.mark.asyncio
    @pytest.mark.fault("K13")
    async def test_racing_stores_of_one_key(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = chunk(1, 5, SIZES[5])
            slots = [arena.slot(i, key, len(payload), payload) for i in range(8)]
            results = await asyncio.gather(*(tier.store([slot], context()) for slot in slots))
            outcomes = [result for (result,) in results]
            assert Outcome.DONE in outcomes
            assert all(result.ok for result in outcomes)
            assert await self.get(tier, arena, key, len(payload)) == (Outcome.DONE, payload)

    @pytest.mark.asyncio
    async def test_many_items_in_one_call(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            chunks = [chunk(n, n % len(SIZES), SIZES[n % len(SIZES)]) for n in range(60)]
            slots = [
                arena.slot(i, key, len(payload), payload) for i, (key, payload) in enumerate(chunks)
            ]
            assert set(await tier.store(slots, context())) == {Outcome.DONE}
            order = list(reversed(range(60)))
            slots = [arena.slot(i, chunks[n][0], len(chunks[n][1])) for i, n in enumerate(order)]
            # One that is not there must not disturb the others.
            slots.insert(30, arena.slot(60, chunk(999, 4, 1)[0], SIZES[4]))
            results = await tier.load(slots, context())
            assert results[30] is Outcome.MISSING
            del results[30], slots[30]
            assert set(results) == {Outcome.DONE}
            assert all(
                bytes(slot.view) == chunks[n][1] for slot, n in zip(slots, order, strict=True)
            )

    @pytest.mark.asyncio
    @pytest.mark.fault("C26")
    @pytest.mark.parametrize("place", ["first", "middle", "last", "end"])
    async def test_corrupt_bytes_are_not_served(
        self, tmp_path: Path, arena: Arena, place: str
    ) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
            raw = bytearray(await _maybe(self.raw_get(tier, key)))
            size = len(payload)
            at = {"first": 0, "middle": size // 2, "last": size - 1, "end": len(raw) - 1}[place]
            raw[at] ^= 1
            await _maybe(self.raw_put(tier, key, bytes(raw)))
            slot = arena.slot(1, key, size)
            (result,) = await tier.load([slot], context())
            if result is Outcome.DONE and not slot.verified:
                # The service compares what the tier did not.
                assert crc32c(slot.view) != slot.crc
            else:
                assert result is Outcome.CORRUPT
            await tier.forget([key])
            assert await tier.exists([key], context()) == [Presence.ABSENT]
            assert (await self.get(tier, arena, key, size))[0] is Outcome.MISSING
            # The place is free again.
            assert await self.put(tier, arena, 1) == (key, payload)
            assert await self.get(tier, arena, key, size) == (Outcome.DONE, payload)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kept", [0, 1, 4096, 65535, 65536])
    async def test_short_bytes_are_not_served(
        self, tmp_path: Path, arena: Arena, kept: int
    ) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
            raw = await _maybe(self.raw_get(tier, key))
            await _maybe(self.raw_put(tier, key, raw[: min(kept, len(raw) - 1)]))
            result, _ = await self.get(tier, arena, key, len(payload))
            assert result in (Outcome.MISSING, Outcome.CORRUPT)
            assert (await tier.store([arena.slot(0, key, len(payload), payload)], context()))[0].ok
            assert await self.get(tier, arena, key, len(payload)) == (Outcome.DONE, payload)

    @pytest.mark.asyncio
    async def test_bytes_of_another_key_are_not_served(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
            other, _ = await self.put(tier, arena, 2)
            await _maybe(self.raw_put(tier, key, await _maybe(self.raw_get(tier, other))))
            result, found = await self.get(tier, arena, key, len(payload))
            assert result is Outcome.CORRUPT or found == payload

    @pytest.mark.asyncio
    async def test_forget(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
            kept, _ = await self.put(tier, arena, 2)
            await tier.forget([key, chunk(77, 4, 1)[0]])
            assert await tier.exists([key, kept], context()) == [
                Presence.ABSENT,
                Presence.PRESENT,
            ]
            assert (await self.get(tier, arena, key, len(payload)))[0] is Outcome.MISSING
            await self.put(tier, arena, 1)

    @pytest.mark.asyncio
    async def test_contents(self, tmp_path: Path, arena: Arena) -> None:
        """Nothing that can be found is missing from them; what was never stored is not in them."""
        async with self.opened(tmp_path) as tier:
            first = await tier.contents()
            if first is None:
                pytest.skip("others may write here too")
            assert list(first) == []
            stored = [(await self.put(tier, arena, number))[0] for number in range(5)]
            assert set(stored) == set(await tier.contents() or ())
            await tier.forget(stored[:1])
            assert set(stored[1:]) <= set(await tier.contents() or ())
        async with self.opened(tmp_path) as tier:
            again = await tier.contents() or ()
            there = await tier.exists(stored, context())
            assert {k for k, p in zip(stored, there, strict=True) if p is Presence.PRESENT} <= set(
                again
            )

    @pytest.mark.asyncio
    async def test_reopen(self, tmp_path: Path, arena: Arena) -> None:
        if not self.persistent:
            pytest.skip("the tier keeps nothing")
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
        async with self.opened(tmp_path) as tier:
            assert await tier.exists([key], context()) == [Presence.PRESENT]
            assert await self.get(tier, arena, key, len(payload)) == (Outcome.DONE, payload)

    @pytest.mark.asyncio
    async def test_deadline_passed(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1)
            new, other = chunk(2, 4, SIZES[4])
            started = time.monotonic()
            late = context(-1.0)
            (stored,) = await tier.store([arena.slot(2, new, len(other), other)], late)
            (loaded,) = await tier.load([arena.slot(3, key, len(payload))], late)
            assert time.monotonic() - started < 5
            late_ends = {Outcome.TIMEOUT, Outcome.CANCELLED, Outcome.DROPPED, Outcome.DONE}
            assert {stored, loaded} <= late_ends
            assert await self.get(tier, arena, key, len(payload)) == (Outcome.DONE, payload)

    @pytest.mark.asyncio
    async def test_cancelled_store(self, tmp_path: Path, arena: Arena) -> None:
        """After a cancelled store its slot may change: what is stored is whole, or not there."""
        async with self.opened(tmp_path) as tier:

            def attempt(n: int) -> tuple[Any, Slot]:
                key, payload = chunk(1000 + n, 5, SIZES[5])
                slot = arena.slot(0, key, len(payload), payload)
                return tier.store([slot], context()), slot

            async def check(n: int, slot: Slot) -> None:
                key, payload = chunk(1000 + n, 5, SIZES[5])
                slot.view[:] = bytes(len(payload))
                result, found = await self.get(tier, arena, key, len(payload))
                assert result is Outcome.MISSING or (result, found) == (Outcome.DONE, payload)

            await _cancel_everywhere(attempt, check)

    @pytest.mark.asyncio
    async def test_cancelled_load(self, tmp_path: Path, arena: Arena) -> None:
        """After a cancelled load nobody writes into its slot any more."""
        async with self.opened(tmp_path) as tier:
            key, payload = await self.put(tier, arena, 1, group=5)
            marker = bytes([0xA5]) * len(payload)

            def attempt(n: int) -> tuple[Any, Slot]:
                slot = arena.slot(2, key, len(payload))
                return tier.load([slot], context()), slot

            async def check(n: int, slot: Slot) -> None:
                slot.view[:] = marker
                assert await self.get(tier, arena, key, len(payload)) == (Outcome.DONE, payload)
                assert bytes(slot.view) == marker

            await _cancel_everywhere(attempt, check)

    @pytest.mark.asyncio
    async def test_cancelled_exists(self, tmp_path: Path, arena: Arena) -> None:
        async with self.opened(tmp_path) as tier:
            key, _ = await self.put(tier, arena, 1)

            def attempt(n: int) -> tuple[Any, None]:
                return tier.exists([key] * 600, context()), None

            async def check(n: int, slot: None) -> None:
                assert await tier.exists([key], context()) == [Presence.PRESENT]

            await _cancel_everywhere(attempt, check)

    @pytest.mark.asyncio
    async def test_close_with_work_under_way(self, tmp_path: Path, arena: Arena) -> None:
        """``aclose`` drains: what was started ends, each call with one outcome a chunk."""
        tier = self.make_tier(self.env(), tmp_path)
        await tier.open()
        tasks = []
        for n in range(32):
            key, payload = chunk(n, 5, SIZES[5])
            slot = arena.slot(n, key, len(payload), payload)
            tasks.append(asyncio.create_task(tier.store([slot], context()), name=f"store-{n}"))
        await asyncio.sleep(0)
        await tier.aclose(time.monotonic() + 10)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ClosedError) or len(end) == 1 for end in ends)  # type: ignore[arg-type]  # an exception of another kind has no length and fails here
        await tier.aclose(time.monotonic() + 10)
        with pytest.raises(ClosedError):
            await tier.store([arena.slot(0, *_sized(0))], context())
        with pytest.raises(ClosedError):
            await tier.load([arena.slot(0, *_sized(0))], context())

    @pytest.mark.asyncio
    async def test_close_without_time(self, tmp_path: Path, arena: Arena) -> None:
        """``aclose`` with a deadline that has passed stops the work, and still leaves nothing."""
        tier = self.make_tier(self.env(), tmp_path)
        await tier.open()
        chunks = [chunk(n, 5, SIZES[5]) for n in range(32)]
        slots = [arena.slot(n, key, len(data), data) for n, (key, data) in enumerate(chunks)]
        task = asyncio.create_task(tier.store(slots, context()), name="store")
        await asyncio.sleep(0)
        await tier.aclose(time.monotonic() - 1)
        end = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(end, ClosedError) or len(end) == 32  # type: ignore[arg-type]  # as above
        for slot in slots:
            slot.view[:] = bytes(slot.length)
        if not self.persistent:
            return
        async with self.opened(tmp_path) as tier:
            for key, data in chunks:
                result, found = await self.get(tier, arena, key, len(data))
                assert result is Outcome.MISSING or (result, found) == (Outcome.DONE, data)

    @pytest.mark.asyncio
    async def test_close_unopened(self, tmp_path: Path) -> None:
        tier = self.make_tier(self.env(), tmp_path)
        await tier.aclose(time.monotonic() + 1)


CANCEL_POINTS = 40


async def _cancel_everywhere(attempt: Callable[[int], tuple[Any, Any]], check: Any) -> None:
    """Cancel a call after 0, 1, 2, ... turns of the loop, until it ends before its cancellation.

    A turn that waits for a thread is any number of turns, so the later points also wait.
    """
    completed = 0
    for n in range(CANCEL_POINTS):
        coroutine, subject = attempt(n)
        task = asyncio.create_task(coroutine, name=f"cancelled-{n}")
        for _ in range(min(n, 8)):
            await asyncio.sleep(0)
        if n > 8:
            await asyncio.wait((task,), timeout=0.0002 * (n - 8))
        ended = task.done()
        task.cancel()
        if n % 2:
            await asyncio.sleep(0)
            task.cancel()  # an impatient caller
        await asyncio.wait((task,), timeout=20)
        assert task.done(), f"cancelled after {n} turns, it did not end"
        if not task.cancelled():
            task.result()
        await check(n, subject)
        completed += ended
        if completed >= 3:
            return


def _sized(number: int) -> tuple[bytes, int]:
    key, payload = chunk(number, 4, SIZES[4])
    return key, len(payload)


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
