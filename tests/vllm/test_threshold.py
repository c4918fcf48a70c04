# SPDX-License-Identifier: Apache-2.0
"""``store_threshold`` and ``max_tracker_size`` decide as vLLM's own manager of host memory does.

Both managers get the same calls; chunks that each is to store have to be the same, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.vllm.engine import Processes
from tests.vllm.test_slice import BLOCK_TOKENS, FULL_BLOCKS, prompt
from tests.vllm.test_tiers import Served, options
from tests.vllm.test_walks import Rig, key, rig

pytestmark = pytest.mark.vllm

CHUNKS = 6
offers = st.lists(st.integers(0, CHUNKS - 1).map(key), min_size=1, max_size=4, unique=True)
offer = st.tuples(st.just("offer"), offers)
calls = st.one_of(
    offer,
    offer,
    offer,
    st.tuples(st.just("complete"), st.booleans()),
    st.tuples(st.just("reset"), st.none()),
)


class Pair:
    """vLLM's manager of host memory and kvtier's, side by side."""

    def __init__(self, mine: Rig, **options: int) -> None:
        # lazy: vLLM takes seconds, and only these tests need it.
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.mine = mine
        self.stock = CPUOffloadingManager(num_chunks=64, **options)
        self.in_flight: list[tuple[str, list[bytes], range]] = []
        self._requests = 0

    def name(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def offer(self, keys: list[bytes]) -> None:
        name = self.name()
        wanted = self.stock.prepare_store(keys, self.mine.context([], name))
        got = self.mine.manager.prepare_store(keys, self.mine.context([], name))
        assert wanted is not None
        assert got is not None
        assert got.keys_to_store == wanted.keys_to_store
        numbers = range(
            got.store_spec.first_transfer, got.store_spec.first_transfer + len(got.keys_to_store)
        )
        if numbers:
            self.in_flight.append((name, got.keys_to_store, numbers))

    def complete(self, success: bool) -> None:
        if not self.in_flight:
            return
        name, keys, numbers = self.in_flight.pop(0)
        for number in numbers:
            self.mine.region.publish(0, number)
        context = self.mine.context([], name)
        self.stock.complete_store(keys, context, success)
        self.mine.manager.complete_store(set(keys), context, success)

    def reset(self, _: None) -> None:
        self.stock.reset_cache()
        self.mine.manager.reset_cache()
        for _name, _keys, numbers in self.in_flight:
            for number in numbers:
                self.mine.region.publish(0, number)
        self.in_flight.clear()

    def check(self) -> None:
        for one in map(key, range(CHUNKS)):
            context = self.mine.context([], self.name())
            answer = self.mine.manager.lookup(one, context)
            assert answer == self.stock.lookup(one, context)
            self.mine.manager.on_request_finished(context)
        registry = self.mine.manager.engine.registry
        self.mine.manager.engine.publish_metrics()
        skipped = registry.value("kvtier_store_skipped_chunks_total") or 0
        assert skipped == self.stock.stores_skipped_in_current_batch


@pytest.mark.usefixtures("in_process")
@settings(max_examples=40, deadline=None)
@given(
    threshold=st.sampled_from([2, 3, 1, 0]),
    most=st.integers(1, CHUNKS),
    steps=st.lists(calls, min_size=12, max_size=40),
)
def test_the_same_chunks_are_stored(
    threshold: int, most: int, steps: list[tuple[str, Any]]
) -> None:
    with rig(slots=64, store_threshold=threshold, max_tracker_size=most) as mine:
        pair = Pair(mine, store_threshold=threshold, max_tracker_size=most)
        for step, argument in steps:
            getattr(pair, step)(argument)
            pair.check()


def test_what_is_there_is_not_evicted_for_what_was_offered_with_it() -> None:
    with rig(slots=4, store_threshold=2, max_tracker_size=4) as mine:
        old, new = [key(number) for number in range(4)], [key(8), key(9)]
        # The last two offers are all that is counted then.
        for keys in (old, old, [key(10), key(11)], new):
            assert mine.store(keys) == []
        # Of equal age, a prompt's last chunk goes first; offered once more it stays.
        assert mine.store([old[3], *new]) == [old[2], old[1]]


@pytest.mark.slow
def test_a_prompt_is_kept_once_it_has_come_twice(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """In vLLM: until then neither host memory nor files get any of it, nor ever what is beyond the
    chunks that are counted."""
    files, counted = tmp_path / "files", FULL_BLOCKS - 4
    with processes.lend() as engine:
        engine.start(
            **options(
                checkpoint("full"),
                own_shm_directory,
                files,
                store_threshold=2,
                max_tracker_size=counted,
            )
        )
        one = Served(engine)
        cached, ready, stored = [], [], []
        for _ in range(3):
            cached.append(one.run(prompt(1))["cached"] // BLOCK_TOKENS)
            ready.append(one.settle()["ready"])
            stored.append(sum(1 for _ in files.rglob("*.kv")))
            one.forget_device()
    assert cached == [0, 0, counted]
    assert ready == [0, counted, counted]
    assert stored == ready
