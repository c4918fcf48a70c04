# SPDX-License-Identifier: Apache-2.0
"""Four-method classes run as tiers, and what they get wrong hurts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from examples import own_tier
from kvtier.config import parse
from kvtier.errors import ClosedError, ConfigError, InternalError, TierLostError
from kvtier.testing.contract import SIZES, Arena, TierContract, chunk, context, make_env
from kvtier.tiers.adapter import METHODS, AdaptedTier
from kvtier.tiers.base import Tier, TierEnv
from kvtier.tiers.registry import check_options, make_tier
from kvtier.types import GroupGeometry, Outcome, Presence, key_group, make_geometry, make_key
from tests.engine.rig import CHUNK, keys, payload, rig
from tests.tiers.managers import Cued

OWN = {"type": "DictionaryTier", "module_path": "examples.own_tier", "name": "own"}
CUED = {"type": "Cued", "module_path": "tests.tiers.managers", "name": "cued"}
VLLM = {"type": "VllmDictionary", "module_path": "tests.tiers.vllm_managers", "name": "theirs"}
SIZE = 4096
GROUP = SIZES.index(SIZE)


def adapted(env: TierEnv, entry: dict[str, Any] = OWN) -> Any:
    config = parse({"capacity_bytes": "1GiB", "tiers": [entry]}).tiers[0]
    return make_tier(config, env)


def rows(arena: Arena) -> memoryview:
    return memoryview(arena._bytes).cast("B", (arena.num_slots, arena.slot_bytes))


@pytest.fixture(autouse=True)
def nothing_made() -> Iterator[None]:
    yield
    Cued.made.clear()
    Cued.persistent.clear()


class TestDictionaryContract(TierContract):
    """The shared contract, for the four-method class in ``examples/``."""

    persistent = False

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        self._arena = Arena(self.num_slots, -(-max(SIZES) // 4096) * 4096)
        yield self._arena
        with contextlib.suppress(BufferError):  # a failed test keeps its slots in the traceback
            self._arena.close()

    def make_tier(self, env: TierEnv, tmp_path: Path) -> Tier:
        arena = getattr(self, "_arena", None)
        view = None if arena is None else rows(arena)
        return adapted(dataclasses.replace(env, region_view=view))

    def raw_get(self, tier: AdaptedTier, key: bytes) -> bytes | None:
        row = tier._manager.chunks.get(tier.name_of(key))
        # The class stores whole rows; what is behind the payload belongs to nobody.
        return None if row is None else row[: SIZES[key_group(key)]]

    def raw_put(self, tier: AdaptedTier, key: bytes, data: bytes) -> None:
        name = tier.name_of(key)
        if len(data) == SIZES[key_group(key)]:
            data += tier._manager.chunks[name][len(data) :]
        tier._manager.chunks[name] = data


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8, SIZE)
    yield arena
    with contextlib.suppress(BufferError):  # a failed test keeps its slots in the traceback
        arena.close()


@contextlib.asynccontextmanager
async def cued(arena: Arena, **env: Any) -> AsyncIterator[tuple[AdaptedTier, Cued]]:
    tier = adapted(dataclasses.replace(make_env(**env), region_view=rows(arena)), CUED)
    await tier.open()
    try:
        yield tier, Cued.made[-1]
    finally:
        await tier.aclose(time.monotonic() + 5)


async def store(tier: AdaptedTier, arena: Arena, number: int) -> bytes:
    key, data = chunk(number, GROUP, SIZE)
    assert await tier.store([arena.slot(0, key, SIZE, data)], context()) == [Outcome.DONE]
    return key


async def load(tier: AdaptedTier, arena: Arena, key: bytes) -> tuple[Outcome, Any]:
    slot = arena.slot(1, key, SIZE)
    (outcome,) = await tier.load([slot], context())
    return outcome, slot


@pytest.mark.asyncio
async def test_the_view_is_the_region_itself(arena: Arena) -> None:
    async with cued(arena) as (_, manager):
        assert manager.view.shape == (8, SIZE)
        assert not manager.view.readonly
        assert np.asarray(manager.view).ctypes.data == arena.address


@pytest.mark.asyncio
async def test_called_from_its_own_thread_only(arena: Arena) -> None:
    async with cued(arena) as (tier, manager):
        key = await store(tier, arena, 1)
        await tier.exists([key], context())
        await load(tier, arena, key)
        assert manager.threads == {"kvtier-cued"}


@pytest.mark.asyncio
@pytest.mark.fault("C24")
@pytest.mark.fault("C10")
async def test_the_class_sees_other_keys_in_another_namespace(arena: Arena) -> None:
    async with cued(arena) as (tier, manager):
        key = await store(tier, arena, 1)
        (name,) = manager.chunks
        assert name != key
        assert (len(name), name[-4:]) == (len(key), key[-4:])
        Cued.persistent.update(manager.chunks)
    async with cued(arena) as (tier, _):
        assert await tier.exists([key], context()) == [Presence.PRESENT]
    async with cued(arena, fields={"model": "another"}) as (tier, _):
        assert await tier.exists([key], context()) == [Presence.ABSENT]
        assert (await load(tier, arena, key))[0] is Outcome.MISSING


@pytest.mark.asyncio
async def test_retry_is_asked_again(arena: Arena) -> None:
    async with cued(arena) as (tier, manager):
        key = await store(tier, arena, 1)
        manager.retries = 3
        assert await tier.exists([key], context()) == [Presence.PRESENT]
        manager.retries = 10**9
        assert await tier.exists([key], context(0.05)) == [Presence.PENDING]


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", [None.__class__, "HIT", True, 1])
async def test_an_answer_that_is_none(arena: Arena, answer: Any) -> None:
    async with cued(arena) as (tier, manager):
        manager.answer = answer
        with pytest.raises(InternalError, match=r"Cued\.lookup returned"):
            await tier.exists([chunk(1, GROUP, 1)[0]], context())


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["lookup", "submit_store", "submit_load"])
@pytest.mark.parametrize("error", [ValueError("no"), OSError(5, "no")])
async def test_what_a_method_raises_comes_out(arena: Arena, method: str, error: Exception) -> None:
    async with cued(arena) as (tier, manager):
        key = await store(tier, arena, 1)
        new, data = chunk(2, GROUP, SIZE)
        manager.raises[method] = error
        calls = {
            "lookup": lambda: tier.exists([key], context()),
            "submit_store": lambda: tier.store([arena.slot(2, new, SIZE, data)], context()),
            "submit_load": lambda: tier.load([arena.slot(2, key, SIZE)], context()),
        }
        with pytest.raises(type(error)):
            await calls[method]()
        assert not tier._jobs
        manager.raises.clear()
        assert (await load(tier, arena, key))[0] is Outcome.DONE


@pytest.mark.asyncio
async def test_a_job_goes_on_when_asking_for_its_end_fails(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of ``get_finished_jobs`` proves no end: the slot stays the class's."""
    async with cued(arena) as (tier, manager):
        manager.raises["get_finished_jobs"] = ValueError("confused")
        key, data = chunk(1, GROUP, SIZE)
        slot = arena.slot(0, key, SIZE, data)
        task = asyncio.create_task(tier.store([slot], context()), name="store")
        await asyncio.to_thread(manager.submitted.acquire, timeout=5)
        done, _ = await asyncio.wait({task}, timeout=0.05)
        assert not done
        manager.raises.clear()
        assert await task == [Outcome.DONE]
    assert "get_finished_jobs raised ValueError('confused')" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("impatience", [1, 3])
async def test_cancellation_waits_for_the_end_of_the_job(arena: Arena, impatience: int) -> None:
    async with cued(arena) as (tier, manager):
        manager.held = True
        key, data = chunk(1, GROUP, SIZE)
        slot = arena.slot(0, key, SIZE, data)
        task = asyncio.create_task(tier.store([slot], context()), name="store")
        await asyncio.to_thread(manager.submitted.acquire, timeout=5)
        for _ in range(impatience):
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=0.03)
            assert not done
        manager.held = False
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
        assert not tier._jobs


@pytest.mark.asyncio
async def test_lies_about_jobs_are_passed_over(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    from kvtier import JobResult  # lazy: its name would hide the wrong ones below

    async with cued(arena) as (tier, manager):
        manager.extra = [
            JobResult(77, success=True),
            JobResult(77, success=True),
            "nonsense",
            JobResult(None, success=True),  # type: ignore[arg-type]  # the lie
        ]
        key = await store(tier, arena, 1)
        manager.extra = [JobResult(1, success=False)]  # ended long ago
        assert (await load(tier, arena, key))[0] is Outcome.DONE
        assert not tier._jobs
    assert caplog.text.count("which is no job of its") == 1


@pytest.mark.asyncio
async def test_a_job_without_an_end_does_not_hold_up_the_close(arena: Arena) -> None:
    async with cued(arena) as (tier, manager):
        manager.held = True
        key, data = chunk(1, GROUP, SIZE)
        task = asyncio.create_task(tier.store([arena.slot(0, key, SIZE, data)], context()))
        await asyncio.to_thread(manager.submitted.acquire, timeout=5)
        started = time.monotonic()
        await tier.aclose(time.monotonic() + 0.1)
        assert time.monotonic() - started < 3
        with pytest.raises(ClosedError, match="closed before job 1 ended"):
            await task


@pytest.mark.asyncio
@pytest.mark.fault("C26")
async def test_a_load_that_wrote_nothing_is_corrupt(arena: Arena) -> None:
    async with cued(arena) as (tier, manager):
        key = await store(tier, arena, 1)
        Cued.persistent.update(manager.chunks)
        manager.writes = False
        outcome, slot = await load(tier, arena, key)
        # This process has stored it, so its checksum is known and the service compares it.
        assert (outcome, slot.verified) == (Outcome.DONE, False)
        assert slot.crc is not None
    async with cued(arena) as (tier, manager):
        # Of this one no checksum is known.
        outcome, slot = await load(tier, arena, key)
        assert (outcome, slot.verified) == (Outcome.DONE, True)
        assert bytes(slot.view) == chunk(1, GROUP, SIZE)[1]
        manager.writes = False
        outcome, slot = await load(tier, arena, key)
        assert (outcome, slot.verified) == (Outcome.CORRUPT, False)
        await tier.forget([key])
        assert await tier.exists([key], context()) == [Presence.ABSENT]


@pytest.mark.asyncio
async def test_opening_fails(arena: Arena) -> None:
    env = dataclasses.replace(make_env(), region_view=rows(arena))
    tier = adapted(env, CUED | {"type": "Unopened"})
    with pytest.raises(ConfigError, match="Unopened cannot be made: RuntimeError: no licence"):
        await tier.open()
    await tier.aclose(time.monotonic() + 1)
    tier = adapted(env, CUED | {"type": "NoDevice"})
    for _ in range(2):  # tried again
        with pytest.raises(TierLostError, match="nobody listens"):
            await tier.open()
    with pytest.raises(ConfigError, match="scheduler's process only"):
        await adapted(make_env()).open()
    slabs = make_geometry([GroupGeometry(16, 1, size) for size in (40960, 4096)], 1 << 20)
    with pytest.raises(ConfigError, match="one for each chunk: make its geometry with"):
        await adapted(dataclasses.replace(env, geometry=slabs)).open()


@pytest.mark.asyncio
async def test_four_methods_are_enough(arena: Arena) -> None:
    env = dataclasses.replace(make_env(), region_view=rows(arena))
    tier = adapted(env, CUED | {"type": "Duck", "capacity_chunks": 1})
    await tier.open()
    first, second = await store(tier, arena, 1), await store(tier, arena, 2)
    found = await tier.exists([first, second], context())
    assert found == [Presence.ABSENT, Presence.PRESENT]
    outcome, slot = await load(tier, arena, second)
    assert outcome is Outcome.DONE
    assert bytes(slot.view) == chunk(2, GROUP, SIZE)[1]
    await tier.aclose(time.monotonic() + 1)


def test_in_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with rig(slots=8, tiers=[OWN], isolation="process") as one:
        assert "isolation: thread instead of process, because of own" in caplog.text
        for start in range(0, 24, 4):
            one.store(keys(*range(start, start + 4)))
            one.settle()
        assert one.load(keys(*range(4))) == 4
        one.settle()
        assert one.value("kvtier_lookup_chunks_total", "own", "hit") == 4


@pytest.mark.asyncio
async def test_chunks_of_several_sizes_have_a_row_each() -> None:
    """The class gets rows, so every chunk has a slot of its own, however little it fills of it."""
    settings = {"capacity_bytes": "1MiB", "tiers": [CUED]}
    sizes = (40960, 4096)
    chunks = {
        key: payload(key, sizes[key_group(key)])
        for key in (make_key(bytes([number + 1]) * 32, number % 2) for number in range(10))
    }
    async with kvtier.open(settings, chunk_bytes=sizes, namespace={"model": "m"}) as cache:
        assert (cache.geometry.slab_slots, cache.geometry.slot_bytes) == (1, 40960)
        await cache.store(chunks)
        assert await cache.flush()
        cache.engine._planner.state.evicted(cache.engine.cache.index.drop(list(chunks)))
        views = await cache.load(list(chunks))
        assert [bytes(view) for view in views] == list(chunks.values())


@pytest.mark.fault("C26")
@pytest.mark.parametrize(
    ("lie", "known"),
    # Of wrong bytes from another process the class's word is all there is.
    [("writes nothing", True), ("writes nothing", False), ("writes others", True)],
)
def test_what_was_not_written_is_never_ready(lie: str, known: bool) -> None:
    names = keys(1, 2, 3)
    with rig(slots=8, tiers=[CUED], on_reset="keep") as one:
        one.store(names)
        one.settle()
        one.engine.reset()  # of host memory alone
        one.settle()
        tier = one.engine._supervisor.carrier._service._lanes[0].tier
        if not known:
            tier._crcs.clear()
        manager = Cued.made[-1]
        manager.writes = lie != "writes nothing"
        manager.damage = b"other" if lie == "writes others" else b""
        context_ = one.context()
        assert one.ask(names, context_)[0] == 0
        one.engine.finish_request(context_)
        one.settle()
        assert one.value("kvtier_corrupt_chunks_total", "cued") >= 2
        # Stored anew it can be had again.
        manager.writes, manager.damage = True, b""
        one.store(names)
        one.settle()
        one.engine.reset()
        one.settle()
        assert one.load(names) == 3


@pytest.mark.fault("H02")
def test_a_job_without_an_end_costs_its_slots_alone() -> None:
    with rig(slots=8, tiers=[CUED | {"timeout_seconds": 0.1}], lookup_timeout_seconds=0.5) as one:
        one.store(keys(1, 2))
        one.settle()
        one.engine.reset()
        one.settle()
        manager = Cued.made[-1]
        one.store(keys(3))
        one.settle()
        manager.held = True
        one.store(keys(4))
        one.until(lambda: one.value("kvtier_chunks_total", "cued", "store", "timeout") >= 1)
        assert one.load(keys(3, 4)) == 2  # from host memory, meanwhile
        manager.held = False
        one.until(lambda: one.engine.cache.slots.totals()["service_pins"] == 0)
        one.settle()


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's imports
def test_a_class_written_for_vllm_runs_unchanged() -> None:
    from tests.tiers.vllm_managers import VllmDictionary  # lazy: needs vLLM

    with rig(slots=8, tiers=[VLLM | {"color": "red"}]) as one:
        manager = VllmDictionary.made[-1]
        assert (manager.tier_type, manager.color, manager.size) == ("VllmDictionary", "red", 3)
        view = manager._primary_kv_view
        assert view.shape == (8, CHUNK)
        assert np.asarray(view).ctypes.data == one.region.base_address
        for start in range(0, 24, 4):
            one.store(keys(*range(start, start + 4)))
            one.settle()
        assert one.load(keys(*range(4))) == 4
        one.settle()
        assert one.value("kvtier_lookup_chunks_total", "theirs", "hit") == 4
        assert payload(keys(0)[0])[:8] in next(iter(manager.chunks.values()))
        assert not manager.known
        del view
    assert manager.calls == ["drain_jobs", "shutdown"]
    VllmDictionary.made.clear()


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's imports
@pytest.mark.parametrize("kind", ["VllmDictionary", "WholeRequests"])
def test_a_class_that_wants_whole_requests_is_told_once_that_it_gets_chunks(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.tiers.vllm_managers import VllmDictionary  # lazy: needs vLLM

    with rig(slots=8, tiers=[VLLM | {"type": kind, "color": "red"}]) as one:
        for number in range(3):
            one.store(keys(number))
            one.settle()
        assert len(VllmDictionary.made[-1].chunks) == 3
    said = [text for text in caplog.messages if "asks for whole requests" in text]
    assert len(said) == (kind == "WholeRequests")
    VllmDictionary.made.clear()


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's imports
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (VLLM | {"type": "NeedsParent", "color": "red"}, "NeedsParent serves requests of other"),
        (VLLM | {"type": "HalfWritten"}, "HalfWritten does not define drain_jobs"),
        (VLLM, r"tiers\[0\]\.color: is missing"),
        (VLLM | {"color": "red", "szie": 1}, r"tiers\[0\]\.szie: .* mean 'size'"),
        (
            {
                "type": "P2PSecondaryTierManager",
                "module_path": "vllm.v1.kv_offload.tiering.p2p.manager",
            },
            "ParentManager",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(entry: dict[str, Any], words: str) -> None:
    config = parse({"capacity_bytes": "1GiB", "tiers": [entry]}).tiers[0]
    with pytest.raises(ConfigError, match=words):
        check_options(config, "tiers[0]")


def test_the_example_is_documented() -> None:
    assert "module_path: examples.own_tier" in (own_tier.__doc__ or "")
    for method in METHODS:
        assert getattr(own_tier.DictionaryTier, method).__doc__
