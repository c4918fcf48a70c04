# SPDX-License-Identifier: Apache-2.0
"""Engines that differ in what the bytes depend on share nothing, and ``namespace.json`` says why.

One process starts one real engine after the other over the same directory of files. What vLLM says
of a load that fails is asked here too: it depends on the configuration alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.namespace import decode_json, difference
from tests.vllm.engine import Engine, EngineError, Processes
from tests.vllm.test_slice import BLOCK_TOKENS, DEVICE_BLOCKS, prompt, same
from tests.vllm.test_tiers import CHUNKS, Served, options, other_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MINE = prompt(1)
ADVICE = 'set "kv_load_failure_policy": "recompute"'
"""In the warning at the start."""


class Bench:
    """A process with an engine, the files that it shares with those before it, and a model."""

    def __init__(self, engine: Engine, model: Path, shm: Path, files: Path) -> None:
        self.engine = engine
        self.model = model
        self.arguments = options(model, shm, files)
        self.files = files
        self.control: dict[str, Any] = {}
        self.home = ""
        self._running = False

    def start(self, extra: dict[str, Any] | None = None, **more: Any) -> Served:
        """The next engine; `extra` goes to kvtier, the rest to vLLM."""
        if self._running:
            self.engine.call("stop")
        arguments = self.arguments | more
        self.engine.start(**arguments | {"extra": arguments["extra"] | (extra or {})})
        self._running = True
        return Served(self.engine)

    def directories(self) -> set[str]:
        """Namespaces among the files."""
        return {path.parent.name for path in self.files.glob("*/namespace.json")}

    def fields(self, directory: str) -> dict[str, str]:
        """What ``namespace.json`` says of one."""
        return decode_json((self.files / directory / "namespace.json").read_bytes())

    def chunks(self, directory: str) -> list[Path]:
        """Files of one."""
        return sorted((self.files / directory).rglob("*.kv"))


@pytest.fixture(scope="module")
def bench(
    checkpoint: Callable[[str], Path],
    shm_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    processes: Processes,
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("identity")
    model = shutil.copytree(checkpoint("full"), folder / "model")
    with processes.lend() as engine:
        bench = Bench(engine, model, shm_directory, folder / "files")
        first = bench.start()
        first.run(MINE)
        bench.control = first.run(MINE)
        first.settle()
        (bench.home,) = bench.directories()
        assert len(bench.chunks(bench.home)) == CHUNKS
        yield bench


@pytest.mark.fault("C06", "C07", "C11")
@pytest.mark.parametrize(
    ("extra", "more", "fields"),
    [
        ({}, {"dtype": "float16"}, {"kv_dtype"}),
        ({}, {"dtype": "float32"}, {"kv_dtype", "groups"}),
        ({}, {"kv_cache_dtype": "fp8"}, {"kv_dtype", "groups"}),
        (
            {},
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}},
            {"rope"},
        ),
        ({"model_fingerprint": "second"}, {}, {"model_fingerprint"}),
        ({}, {"block_size": 64, "blocks": 2 * DEVICE_BLOCKS}, {"groups", "tokens_per_hash"}),
        ({"blocks_per_chunk": 2}, {}, {"groups"}),
    ],
    ids=["dtype", "wider", "fp8", "rope", "revision", "block", "chunk"],
)
def test_what_differs_is_not_found_and_named(
    bench: Bench, extra: dict[str, Any], more: dict[str, Any], fields: set[str]
) -> None:
    before = bench.directories()
    one = bench.start(extra, **more)
    cold = one.run(MINE)
    state = one.settle()
    assert cold["cached"] == 0
    assert state["tier_hits"]["fs"] == 0
    (other,) = bench.directories() - before
    assert set(difference(bench.fields(bench.home), bench.fields(other))) == fields
    assert bench.chunks(other)
    assert len(bench.chunks(bench.home)) == CHUNKS
    # With its own it is as the first was: also with KV of eight bits a reload is exact.
    control = one.run(MINE)
    assert control["cached"] == CHUNKS * BLOCK_TOKENS
    one.forget_device()
    again = one.run(MINE)
    assert again["cached"] == CHUNKS * BLOCK_TOKENS
    assert same(again, control)


@pytest.mark.fault("C10")
def test_another_checkpoint_under_the_same_name(bench: Bench) -> None:
    """One page of the weights is another; with it back, all is found again, and exactly."""
    (weights,) = bench.model.glob("*.safetensors")
    content = weights.read_bytes()
    before = bench.directories()
    weights.write_bytes(other_weights(content))
    try:
        one = bench.start()
    finally:
        weights.write_bytes(content)
    assert one.run(MINE)["cached"] == 0
    assert one.settle()["tier_hits"]["fs"] == 0
    (other,) = bench.directories() - before
    differs = difference(bench.fields(bench.home), bench.fields(other))
    assert differs == ["model_fingerprint"]

    one = bench.start()
    again = one.run(MINE)
    assert again["cached"] == CHUNKS * BLOCK_TOKENS
    assert one.settle()["tier_hits"]["fs"] == CHUNKS
    assert same(again, bench.control)


def test_lost_and_damaged_files_are_no_failed_loads(bench: Bench) -> None:
    """Under vLLM's own policy, which fails a request whose load has failed."""
    one = bench.start(policy="fail")
    files = bench.chunks(bench.home)
    assert len(files) == CHUNKS
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x40
        if number % 3 == 0:
            path.unlink()
        else:
            path.write_bytes(content if number % 3 == 1 else content[: len(content) // 2])
    answer = one.run(MINE)
    state = one.settle()
    assert answer["cached"] == 0
    assert answer["tokens"] == bench.control["tokens"]
    assert state["tier_hits"]["fs"] == 0
    assert state["corrupt"]["fs"] > 0
    # What was recomputed is in host memory again.
    one.forget_device()
    assert one.run(MINE)["cached"] == CHUNKS * BLOCK_TOKENS


def test_the_policy_for_failed_loads_is_asked_for_at_the_start(bench: Bench) -> None:
    def told() -> int:
        return bench.engine.text().count(ADVICE)

    before = told()
    bench.start()
    assert told() == before + 1
    one = bench.start(policy="recompute")
    assert told() == before + 1
    # A copy from host memory that fails ends the engine under this policy too: vLLM 0.32 has no
    # way for a spec to report it.
    one.run(MINE)
    one.forget_device()
    bench.engine.call("rpc", name="kvt_break_loads")
    with pytest.raises(EngineError, match=r"load \d+ failed"):
        one.run(MINE)
