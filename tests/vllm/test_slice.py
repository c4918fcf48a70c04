# SPDX-License-Identifier: Apache-2.0
"""Blocks of a real vLLM engine come back from host memory byte for byte.

The answer is compared with a control whose prefix never left the accelerator, was written by the
same prefill, and has the same number of cached tokens: prefill in one piece and prefill after a
prefix differ in the last digits without any offloading, and so do prefills of different lengths.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.host import region
from tests.vllm.engine import Engine, EngineError, Processes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK_TOKENS = 128
DEVICE_BLOCKS = 28
HOST_BYTES = 20 << 20
PROMPT_TOKENS = 2600
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
"""A multiple of the blocks of a chunk, so that accelerator and host hold the same prefix."""
FILLER_TOKENS = 3200
"""Two prompts of this length push everything else off the accelerator."""


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Random tokens; the model's special ones left out."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(tokens)]


def environment(tp: int) -> dict[str, str]:
    """One rank: everything in one process. Two: vLLM's usual processes, a core for each."""
    if tp == 1:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp))}


class Served:
    """A running engine, its shape, and the control answer to `PROMPT`."""

    def __init__(self, engine: Engine, tp: int, blocks_per_chunk: int) -> None:
        self.engine = engine
        self.tp = tp
        self.blocks_per_chunk = blocks_per_chunk
        self.chunks = FULL_BLOCKS // blocks_per_chunk
        self.prompt = prompt(1)
        self.control: dict[str, Any] = {}

    def run(self, tokens: list[int]) -> dict[str, Any]:
        """One greedy answer."""
        (answer,) = self.engine.call("generate", prompts=[tokens])
        return answer

    def ranks(self, name: str, *arguments: Any) -> list[Any]:
        """A probe on all ranks."""
        return self.engine.call("rpc", name=name, arguments=list(arguments))

    def loaded(self) -> list[int]:
        """Chunks that each rank has loaded from host memory since the start."""
        return [state["loaded_chunks"] for state in self.ranks("kvt_state")]

    def forget_device(self) -> None:
        """Empty the accelerator's prefix cache; host memory stays."""
        assert self.engine.call("reset")

    def push_out(self, *seeds: int) -> None:
        """Fill the accelerator's cache with other prompts."""
        for seed in seeds:
            self.run(prompt(seed, FILLER_TOKENS))

    def take_control(self) -> None:
        """Answer with the prefix in the accelerator's cache."""
        self.run(self.prompt)
        self.control = self.run(self.prompt)
        assert self.control["cached"] == FULL_BLOCKS * BLOCK_TOKENS
        assert self.loaded() == [0] * self.tp
        # The control's blocks would look like those of the first test.
        self.push_out(2, 3)
        assert self.engine.call("reset", connector=True)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two answers are the same to four digits."""
    return left["tokens"] == right["tokens"] and abs(left["logprob"] - right["logprob"]) < 5e-5


@pytest.fixture(
    scope="module", params=[(1, 1), (1, 4), (2, 1), (2, 4)], ids=lambda p: f"tp{p[0]}-bpc{p[1]}"
)
def served(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    shm_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    processes: Processes,
) -> Iterator[Served]:
    tp, blocks_per_chunk = request.param
    log = tmp_path_factory.mktemp("engine") / "log"
    with processes.lend() if tp == 1 else Engine(log, environment(tp)) as engine:
        started = engine.start(
            model=str(checkpoint("full")),
            tp=tp,
            blocks=DEVICE_BLOCKS,
            extra={
                "cpu_bytes_to_use": HOST_BYTES,
                "blocks_per_chunk": blocks_per_chunk,
                "directory": str(shm_directory),
            },
        )
        assert started["block_size"] == BLOCK_TOKENS
        served = Served(engine, tp, blocks_per_chunk)
        served.take_control()
        yield served
    if tp > 1:
        # vLLM kills its workers when they take more than five seconds to end, with or without
        # kvtier. What the last holder could not remove then, every start does first.
        region.sweep(str(shm_directory))
    assert list(shm_directory.iterdir()) == []


def test_workers_make_the_region_before_the_manager_attaches(served: Served) -> None:
    text = served.engine.text()
    order = re.findall(r"kvtier: (rank \d+ of \d+ signed|manager attached)", text)
    signed = {f"rank {rank} of {served.tp} signed" for rank in range(served.tp)}
    assert set(order[:-1]) == signed
    assert len(order) == served.tp + 1
    assert order[-1] == "manager attached"


def test_geometry_is_canonical_whatever_the_ranks(served: Served) -> None:
    # Four layers, K and V, 4 heads of 32 bfloat16 values, 128 tokens.
    block = 4 * 2 * 4 * 32 * 2 * BLOCK_TOKENS
    for state in served.ranks("kvt_state"):
        assert state["block_bytes"] == [block]
        assert state["payload_bytes"] == [block * served.blocks_per_chunk]
        assert state["portable"]
        assert state["windows"] == [None]


def test_copy_threads_are_not_bound_to_the_core_of_the_main_thread(served: Served) -> None:
    for state in served.ranks("kvt_state"):
        assert len(state["copy_cpus"]) == 2
        for cpus in state["copy_cpus"]:
            assert set(cpus) >= set(state["main_cpus"])
            if served.tp == 2:
                assert len(state["main_cpus"]) == 1
                assert len(cpus) > 1


def test_a_prefix_pushed_out_comes_back_exactly(served: Served) -> None:
    before = [set(digests) for digests in served.ranks("kvt_digests", 0)]
    cold = served.run(served.prompt)
    assert cold["cached"] == 0
    # What the run wrote: the full blocks, and the tail with the answer.
    written = [
        set(digests) - old
        for digests, old in zip(served.ranks("kvt_digests", 0), before, strict=True)
    ]
    assert [len(blocks) for blocks in written] == [FULL_BLOCKS + 1] * served.tp

    served.push_out(4, 5)
    pushed_out = served.ranks("kvt_digests", 0)
    for digests, blocks in zip(pushed_out, written, strict=True):
        assert blocks.isdisjoint(digests)

    loaded = served.loaded()
    again = served.run(served.prompt)
    assert again["cached"] == FULL_BLOCKS * BLOCK_TOKENS
    assert [new - old for new, old in zip(served.loaded(), loaded, strict=True)] == [
        served.chunks
    ] * served.tp
    assert same(again, served.control)
    host = served.ranks("kvt_host_digests")
    for rank, digests in enumerate(served.ranks("kvt_digests", 0)):
        back = written[rank].intersection(digests)
        # The full blocks that were reloaded; recomputed ones may differ in the last digits.
        assert len(back.intersection(host[rank])) == FULL_BLOCKS
        assert len(written[rank].intersection(host[rank])) == FULL_BLOCKS


def test_a_load_may_start_inside_a_chunk(served: Served) -> None:
    served.run(served.prompt)
    served.forget_device()
    loaded = served.loaded()
    # Two blocks on the accelerator: from the host where a chunk is a block, else recomputed.
    served.run(served.prompt[: 2 * BLOCK_TOKENS + 10])
    first = 2 if served.blocks_per_chunk == 1 else 0
    assert [new - old for new, old in zip(served.loaded(), loaded, strict=True)] == [
        first
    ] * served.tp
    again = served.run(served.prompt)
    assert again["cached"] == FULL_BLOCKS * BLOCK_TOKENS
    rest = served.chunks - first
    assert [new - old for new, old in zip(served.loaded(), loaded, strict=True)] == [
        first + rest
    ] * served.tp
    host = served.ranks("kvt_host_digests")
    for rank, digests in enumerate(served.ranks("kvt_digests", 0)):
        assert len(set(digests).intersection(host[rank])) >= FULL_BLOCKS - 2


def test_heads_in_each_others_place_change_the_answer(served: Served) -> None:
    """Also where they belong to two ranks; the other kinds of damage are in test_families."""
    served.run(served.prompt)
    served.forget_device()
    assert same(served.run(served.prompt), served.control)
    served.forget_device()
    served.engine.call("rpc", name="kvt_swap_heads", arguments=[4, 0])
    damaged = served.run(served.prompt)
    assert damaged["cached"] == served.control["cached"]
    assert not same(damaged, served.control)
    # It undoes itself, so that nothing but the damage can have made the difference.
    served.engine.call("rpc", name="kvt_swap_heads", arguments=[4, 0])
    served.forget_device()
    assert same(served.run(served.prompt), served.control)


def test_reset_of_the_connector_forgets_host_memory(served: Served) -> None:
    served.run(served.prompt)
    assert served.engine.call("reset", connector=True)
    loaded = served.loaded()
    assert served.run(served.prompt)["cached"] == 0
    assert served.loaded() == loaded
    if served.tp == 1:
        state = served.engine.call("manager")
        assert state["in_flight"] == state["left"] == state["writing"] == state["orphans"] == 0
        assert state["free"] + state["ready"] == state["capacity"]


def test_more_prompts_than_host_memory_holds(served: Served) -> None:
    slots = served.ranks("kvt_state")[0]["num_slots"]
    stored = served.ranks("kvt_state")[0]["stored_chunks"]
    for seed in range(200, 200 + slots // served.chunks + 1):
        served.run(prompt(seed))
    assert served.ranks("kvt_state")[0]["stored_chunks"] - stored > slots
    loaded = served.loaded()
    # The newest is there, the oldest is not.
    served.forget_device()
    assert served.run(prompt(seed))["cached"] == FULL_BLOCKS * BLOCK_TOKENS
    assert served.loaded() != loaded
    served.forget_device()
    assert served.run(prompt(200))["cached"] == 0
    if served.tp == 1:
        state = served.engine.call("manager")
        assert state["evicted"] > 0
        assert state["free"] + state["ready"] == state["capacity"] == slots


@pytest.mark.fault("L01")
def test_a_killed_engine_leaves_nothing_after_the_next_start(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    options = {
        "model": str(checkpoint("full")),
        "blocks": DEVICE_BLOCKS,
        "extra": {"cpu_bytes_to_use": HOST_BYTES, "directory": str(own_shm_directory)},
    }
    with Engine(tmp_path / "first", environment(1)) as engine:
        engine.start(**options)
        engine.call("generate", prompts=[prompt(1)])
        (killed,) = own_shm_directory.iterdir()
        engine.kill()
    assert list(own_shm_directory.iterdir()) == [killed]
    with processes.lend() as engine:
        engine.start(**options)
        (second,) = own_shm_directory.iterdir()
        assert second != killed
        engine.call("generate", prompts=[prompt(1)])
    assert list(own_shm_directory.iterdir()) == []


@pytest.mark.fault("U03")
def test_too_little_host_memory_is_refused_with_the_minimum(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path / "log", environment(1)) as engine,
        pytest.raises(EngineError, match="one takes 262144 bytes"),
    ):
        engine.start(
            model=str(checkpoint("full")),
            blocks=DEVICE_BLOCKS,
            extra={"cpu_bytes_to_use": 4096, "directory": str(own_shm_directory)},
        )
