# SPDX-License-Identifier: Apache-2.0
"""``kvtier.open`` on both loops, with both isolations: bytes, cancellation, closing, wrong use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.engine import aio
from kvtier.engine.aio import Cache
from kvtier.engine.contents import Contents
from kvtier.errors import ClosedError, ConfigError
from kvtier.testing.faults import Script
from tests.engine.rig import key, keys, payload, scripted
from tests.loops import Run

CHUNK = 8192
BIG = 64 << 10


def config(slots: int = 8, chunk: int = CHUNK, **more: Any) -> dict[str, Any]:
    return {"capacity_bytes": slots * chunk, "promotion_slots": 2} | more


def chunks(*numbers: int, length: int = CHUNK) -> dict[bytes, bytes]:
    return {key(number): payload(key(number), length) for number in numbers}


def whole(cache: Cache) -> None:
    """Nothing is pinned, reserved, lent or remembered once no call is under way."""
    engine = cache.engine
    engine.check()
    totals = engine.cache.slots.totals()
    planner = engine._planner
    assert totals["owner_pins"] == planner.loads.held == 0
    assert engine._index.num_writing == 0
    assert not planner.requests
    assert not cache._copies
    assert not cache._waiters


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_store_load_exists_flush_reset(run: Run, isolation: str) -> None:
    async def main() -> None:
        settings = config(tiers=[{"type": "example"}], isolation=isolation)
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            result = await cache.store(chunks(1, 2, 3))
            assert (result.stored, result.present, result.refused) == (keys(1, 2, 3), [], [])
            assert (await cache.store(chunks(2, 4))).present == keys(2)
            assert await cache.flush()
            for start in range(10, 40, 5):  # push them out
                await cache.store(chunks(*range(start, start + 5)))
                assert await cache.flush()
            assert await cache.exists(keys(1, 2, 3, 99)) == 3
            into = [bytearray(CHUNK) for _ in range(4)]
            views = await cache.load(keys(1, 2, 3, 4), into)
            assert [bytes(view) for view in views] == list(chunks(1, 2, 3, 4).values())
            assert [bytes(view) for view in into] == list(chunks(1, 2, 3, 4).values())
            assert await cache.load([]) == []
            assert (await cache.store({})).stored == []
            cache.reset()
            assert await cache.load(keys(1, 2)) == []
            assert await cache.flush()
            whole(cache)

    run(main())


def test_four_times_the_memory_of_the_host(run: Run, tmp_path: Path) -> None:
    """With a file tier nothing is lost: all of it is found again, exact."""

    async def main() -> None:
        tiers = [{"type": "fs", "root_dir": str(tmp_path)}]
        settings = config(16, tiers=tiers, lookup_timeout_seconds=10.0)
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            for start in range(0, 64, 8):
                result = await cache.store(chunks(*range(start, start + 8)))
                assert len(result.stored) == 8
            assert await cache.flush()
            for start in range(0, 64, 4):
                wanted = range(start, start + 4)
                views = await cache.load(keys(*wanted))
                assert [bytes(view) for view in views] == list(chunks(*wanted).values())
            assert cache.stats().evicted_unsaved == 0
            whole(cache)

    run(main())


class Slow:
    """Stands for ``_copy_all``: copies that wait in their thread until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Semaphore(0)
        self.go = threading.Event()
        self._real = aio._copy_all
        monkeypatch.setattr(aio, "INLINE_BYTES", 0)
        monkeypatch.setattr(aio, "_copy_all", self)

    def __call__(self, copies: Any) -> None:
        self.started.release()
        assert self.go.wait(20)
        self._real(copies)

    async def begun(self) -> None:
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, self.started.acquire, True, 20)


@pytest.mark.fault("C17", "C22", "C23")
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("call", ["store", "load"])
def test_a_slot_stays_until_its_copy_has_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: str, times: int
) -> None:
    """However often the call is cancelled: its thread still copies, and the slot is not free."""

    async def main() -> None:
        async with kvtier.open(config(1), chunk_bytes=CHUNK) as cache:
            if call == "load":
                await cache.store(chunks(1))
            slow = Slow(monkeypatch)
            one = asyncio.ensure_future(
                cache.store(chunks(1)) if call == "store" else cache.load(keys(1))
            )
            await slow.begun()
            for _ in range(times):
                one.cancel()
                await asyncio.sleep(0.005)
            early = one.done()
            # Nobody gets the slot.
            reservation = cache.engine.reserve(keys(8), context := cache_context())
            assert reservation.keys == []
            cache.engine.finish_request(context)
            slow.go.set()
            assert not early
            with pytest.raises(asyncio.CancelledError):
                await one
            whole(cache)
            # No partly written chunk is visible, and the slots are free again.
            assert await cache.exists(keys(1)) == (1 if call == "load" else 0)
            assert len((await cache.store(chunks(8))).stored) == 1
            assert [bytes(view) for view in await cache.load(keys(8))] == list(chunks(8).values())

    run(main())


def cache_context() -> Any:
    from kvtier.types import RequestContext

    return RequestContext("other")


@pytest.mark.parametrize("call", ["store", "load", "exists", "flush"])
def test_cancelled_at_every_await(run: Run, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """After each number of turns of the loop; whatever was reached, all comes back."""
    monkeypatch.setattr(aio, "INLINE_BYTES", 0)

    async def main() -> None:
        script = Script("tier")
        settings = config(
            4,
            tiers=[scripted(script, max_inflight_bytes=CHUNK)],
            lookup_timeout_seconds=5.0,
            max_hold_ratio=1.0,
        )
        ended = 0
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            await cache.store(chunks(1, 2, 3))
            assert await cache.flush()
            for turns in range(45):
                script.seconds_per_byte = 0.001 / CHUNK
                await cache.store(chunks(100 + 2 * turns, 101 + 2 * turns))
                calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
                    "store": lambda n=turns: cache.store(
                        chunks(*range(1000 + 4 * n, 1004 + 4 * n))
                    ),
                    "load": lambda: cache.load(keys(1, 2, 3)),
                    "exists": lambda: cache.exists(keys(1, 2, 3)),
                    "flush": cache.flush,
                }
                one = asyncio.ensure_future(calls[call]())
                for _ in range(min(turns, 30)):
                    await asyncio.sleep(0)
                if turns > 30:
                    await asyncio.sleep(0.001 * 1.35 ** (turns - 30))
                one.cancel()
                try:
                    await one
                    ended += 1
                except asyncio.CancelledError:
                    pass
                cache.engine.check()
                totals = cache.engine.cache.slots.totals()
                assert totals["owner_pins"] == 0
                assert cache.engine._index.num_writing == 0
                await cache.flush()
                whole(cache)
            assert ended > 0
            views = await cache.load(keys(1, 2, 3))
            assert [bytes(view) for view in views] == list(chunks(1, 2, 3).values())

    run(main())


def test_many_calls_at_once(run: Run) -> None:
    """Readers and writers of a few keys over fewer slots, some of them cancelled."""

    async def main() -> None:
        settings = config(6, BIG * 8, tiers=[{"type": "example"}], lookup_timeout_seconds=5.0)
        settings["capacity_bytes"] = 6 * BIG * 8
        length = BIG * 8  # copied in threads
        loaded = 0

        async def worker(cache: Cache, number: int) -> None:
            nonlocal loaded
            for turn in range(6):
                names = [(number * 7 + turn * 3 + i) % 10 for i in range(2)]
                for name, view in zip(keys(*names), await cache.load(keys(*names)), strict=False):
                    assert bytes(view) == payload(name, length)
                    loaded += 1
                store = asyncio.ensure_future(cache.store(chunks(*set(names), length=length)))
                if (number + turn) % 3 == 0:
                    await asyncio.sleep(0)
                    store.cancel()
                await asyncio.wait({store})

        async with kvtier.open(settings, chunk_bytes=length) as cache:
            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(worker(cache, number))
            await cache.flush()
            whole(cache)
        assert loaded > 30

    run(main())


def test_wrong_use_says_what_to_type(run: Run) -> None:
    async def main() -> None:
        for nothing in (0, -1, [], [CHUNK, 0]):
            with pytest.raises(ConfigError, match=r"chunk_bytes: .* is no size of a chunk"):
                async with kvtier.open({"capacity_bytes": 100}, chunk_bytes=nothing):
                    pass
        with pytest.raises(ConfigError, match="give chunk_bytes"):
            async with kvtier.open(config()):
                raise AssertionError("it opened")
        with pytest.raises(ConfigError, match=r"capacity_bytes: .*give at least"):
            async with kvtier.open({"capacity_bytes": 100}, chunk_bytes=CHUNK):
                raise AssertionError("it opened")
        async with kvtier.open(config(), chunk_bytes=[CHUNK, 2 * CHUNK]) as cache:
            good = payload(key(1))
            for wrong in ({key(1): good[:-1]}, {key(1): b""}, {key(1, 1): good}):
                with pytest.raises(ConfigError, match=r"has \d+ bytes, got"):
                    await cache.store(wrong)
            for bad in (b"", b"abcd", "text", 7, None, b"x" * 41, key(1, 2)):
                names: Any = [bad]
                for call in (cache.load, cache.exists):
                    with pytest.raises(ConfigError, match="make keys with"):
                        await call(names)
                with pytest.raises(ConfigError, match="make keys with"):
                    await cache.store({bad: good})  # type: ignore[dict-item]  # wrong on purpose
            with pytest.raises(ConfigError, match="contiguous"):
                await cache.store({key(1): np.zeros(2 * CHUNK, np.uint8)[::2]})
            with pytest.raises(ConfigError, match="contiguous"):
                await cache.store({key(1): "text"})  # type: ignore[dict-item]  # wrong on purpose
            await cache.store({key(1): good})
            with pytest.raises(ConfigError, match="1 keys but 2 buffers"):
                await cache.load(keys(1), [bytearray(CHUNK)] * 2)
            with pytest.raises(ConfigError, match="writable"):
                await cache.load(keys(1), [bytes(CHUNK)])
            with pytest.raises(ConfigError, match="has 8192 bytes, got 1"):
                await cache.load(keys(1), [bytearray(1)])
            whole(cache)
            assert bytes((await cache.load(keys(1)))[0]) == good

    run(main())


def test_another_loop_is_refused(run: Run) -> None:
    async def main() -> None:
        async with kvtier.open(config(), chunk_bytes=CHUNK) as cache:
            await cache.store(chunks(1))

            def elsewhere() -> str:
                try:
                    asyncio.run(cache.load(keys(1)))
                except ConfigError as exc:
                    return str(exc)
                return "it went through"

            said = await asyncio.get_running_loop().run_in_executor(None, elsewhere)
            assert "event loop" in said
            whole(cache)

    run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_closing_with_calls_under_way(
    run: Run, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """What waits for tiers ends with ClosedError, what copies ends first; nothing is left."""

    async def main() -> None:
        tiers = [{"type": "example", "delay_seconds": 1.0}]
        settings = config(4, tiers=tiers, isolation=isolation, lookup_timeout_seconds=10.0)
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            await cache.store(chunks(50, 51, 60))
            assert await cache.flush()
            await cache.store(chunks(1, 2, 3, 4))  # now only the tier has the first three
            slow = Slow(monkeypatch)
            # Whatever the tier tells: it is to be asked.
            monkeypatch.setattr(Contents, "first_absent", lambda self, names, start: len(names))
            waiting = [
                asyncio.ensure_future(cache.load(keys(50, 51))),
                asyncio.ensure_future(cache.exists(keys(60))),
                asyncio.ensure_future(cache.flush()),
            ]
            copying = asyncio.ensure_future(cache.load(keys(1, 2)))
            await slow.begun()
            closing = [asyncio.ensure_future(cache.aclose(0.2)) for _ in range(2)]
            await asyncio.wait(waiting)
            assert not any(close.done() for close in closing)
            for one in waiting:
                assert isinstance(one.exception(), ClosedError)
            slow.go.set()
            assert [bytes(view) for view in await copying] == list(chunks(1, 2).values())
            await asyncio.gather(*closing)
            with pytest.raises(ClosedError):
                await cache.load(keys(1))
            await cache.aclose()

    run(main())


def test_closing_that_is_cancelled_closes_all_the_same(run: Run) -> None:
    async def main() -> None:
        script = Script("tier")
        settings = config(4, tiers=[scripted(script)])
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            script.gates["store"].close()
            await cache.store(chunks(1))
            closing = asyncio.ensure_future(cache.aclose(0.2))
            for _ in range(3):
                await asyncio.sleep(0.01)
                closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            with pytest.raises(ClosedError):
                cache.engine.poll()
            script.gates["store"].open()

    run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_opening_that_is_cancelled_leaves_nothing(run: Run, turns: int) -> None:
    async def opened() -> None:
        settings = config(4, tiers=[{"type": "example"}])
        async with kvtier.open(settings, chunk_bytes=CHUNK):
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        one = asyncio.ensure_future(opened())
        for _ in range(turns):
            await asyncio.sleep(0.001)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one

    run(main())
