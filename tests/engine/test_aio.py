# SPDX-License-Identifier: Apache-2.0
"""``kvtier.open`` on both loops, with both isolations: bytes, cancellation, closing, wrong use."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
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
from kvtier.types import RequestContext
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
        with pytest.raises(ConfigError, match="give chunk_bytes"):
            async with kvtier.open(config()):
                raise AssertionError("it opened")
        with pytest.raises(ConfigError, match=r"capacity_bytes: .*give at least"):
            async with kvtier.open({"capacity_bytes": 100}, chunk_bytes=CHUNK):
                raise AssertionError("it opened")
        bad: Any
        for bad in (0, -1, True, 4096.0, "4KiB", b"4", [], [0], [1, "a"], [CHUNK, None]):
            with pytest.raises(ConfigError, match="chunk_bytes is a whole number of at least 1"):
                async with kvtier.open(config(), chunk_bytes=bad):
                    raise AssertionError("it opened")
        with pytest.raises(
            ConfigError, match=r"capacity_bytes: .* chunks: there may be 2147483647"
        ):
            async with kvtier.open({"capacity_bytes": "1PiB"}, chunk_bytes=CHUNK):
                raise AssertionError("it opened")
        for bad in (None, 5, [], b"/kvtier.yaml"):
            with pytest.raises(ConfigError, match="config is a mapping or the path of a YAML"):
                async with kvtier.open(bad, chunk_bytes=CHUNK):
                    raise AssertionError("it opened")
        bad = object()
        with pytest.raises(ConfigError, match=r"geometry is a kvtier\.Geometry, got"):
            async with kvtier.open(config(), geometry=bad):
                raise AssertionError("it opened")
        for bad in ("model", [1], {1: "a"}, {"model": 5}):
            with pytest.raises(ConfigError, match=r"namespace .*is .*text"):
                async with kvtier.open(config(), chunk_bytes=CHUNK, namespace=bad):
                    raise AssertionError("it opened")
        for directory in ("/nowhere", __file__):
            with pytest.raises(ConfigError, match=r"cannot make a region in .*; give a directory"):
                async with kvtier.open(config(directory=directory), chunk_bytes=CHUNK):
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


def test_time_is_up_while_a_chunk_that_was_ready_has_gone(run: Run) -> None:
    """The answer of a load that waits is older than the chunks: its last look is a new one."""

    async def main() -> None:
        script = Script("tier")
        # One slot may be held or lent, and the first load takes it.
        settings = config(3, tiers=[scripted(script)], hold_bytes=CHUNK, lookup_timeout_seconds=9.0)
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            await cache.store(chunks(1))
            assert await cache.flush()
            script.gates["exists"].close()
            first = asyncio.ensure_future(cache.load(keys(2, 3)))
            await asyncio.sleep(0.01)
            second = asyncio.ensure_future(cache.load(keys(1, 4), timeout_seconds=0.03))
            await asyncio.sleep(0.005)
            # Nothing wakes the second before its time is up.
            other = RequestContext("other")
            assert len(cache.engine.reserve(keys(5, 6), other).keys) == 2
            assert not cache.engine.holds(key(1))
            assert await second == []
            cache.engine.abort(keys(5, 6), other)
            cache.engine.finish_request(other)
            script.gates["exists"].open()
            await first
            whole(cache)

    run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_request_id_that_no_message_can_carry_is_refused(run: Run, isolation: str) -> None:
    """It took the messages of the whole step with it: pins that nobody gave back."""

    async def main() -> None:
        settings = config(4, tiers=[{"type": "example"}], isolation=isolation)
        async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
            for bad in ("\udc80", b"bytes", 7):
                name: Any = bad
                with pytest.raises(ConfigError, match="request_id is text"):
                    await cache.store(chunks(1), request_id=name)
                with pytest.raises(ConfigError, match="request_id is text"):
                    await cache.load(keys(2), request_id=name)
            await cache.store(chunks(1), request_id="grüße")
            assert await cache.flush(5.0)
            whole(cache)

    run(main())


def test_the_keys_are_those_of_the_call(run: Run) -> None:
    """A scheduler that uses its list again changes nothing of a load that waits."""

    async def main() -> None:
        script = Script("tier")
        async with kvtier.open(config(4, tiers=[scripted(script)]), chunk_bytes=CHUNK) as cache:
            await cache.store(chunks(1))
            script.gates["exists"].close()
            names = keys(1, 2)
            load = asyncio.ensure_future(cache.load(names))
            await asyncio.sleep(0.01)
            names[:] = keys(3, 4)
            script.gates["exists"].open()
            assert [bytes(view) for view in await load] == list(chunks(1).values())
            assert await cache.load(name for name in keys(1)) != []
            whole(cache)

    run(main())


def test_a_wrong_time_is_refused_and_closes_nothing_by_half(run: Run) -> None:
    async def main() -> None:
        async with kvtier.open(config(tiers=[{"type": "example"}]), chunk_bytes=CHUNK) as cache:
            for bad in ("1", None, float("nan")):
                seconds: Any = bad
                calls = [cache.aclose(seconds), cache.flush(seconds)]
                if bad is not None:
                    calls += [cache.load(keys(9), timeout_seconds=seconds)]
                    calls += [cache.exists(keys(9), timeout_seconds=seconds)]
                for call in calls:
                    with pytest.raises(ConfigError, match=r"_seconds is a number of seconds, got"):
                        await call
            await cache.store(chunks(1))
            whole(cache)

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


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_closed_cache_that_somebody_keeps_keeps_no_memory(run: Run, isolation: str) -> None:
    """``async with ... as cache`` leaves the name behind, and the next one needs the room."""

    async def main() -> None:
        directory = Path("/dev/shm") / f"kvtier-test-{uuid.uuid4().hex}"
        directory.mkdir()
        try:
            settings = config(tiers=[{"type": "example"}], isolation=isolation)
            settings["directory"] = str(directory)
            async with kvtier.open(settings, chunk_bytes=CHUNK) as cache:
                await cache.store(chunks(1, 2))
                assert await cache.load(keys(1))
                assert await cache.flush()
            gc.collect()  # a service in a thread leaves circles behind
            assert str(directory) not in Path("/proc/self/maps").read_text()
            # Its numbers can be read all the same.
            assert cache.stats().host_hits == 1
            assert b'kvtier_host_slots{state="ready"} 2.0' in cache.metrics()
            with pytest.raises(ClosedError):
                cache.engine.holds(key(1))
        finally:
            directory.rmdir()

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
