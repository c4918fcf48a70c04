# SPDX-License-Identifier: Apache-2.0
"""Blocks of a real vLLM engine come back from the file tier byte for byte, and from nowhere else.

The source of every reload is proven by counters: the accelerator's cache is reset, host memory is
empty, and so many chunks came from the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine
from tests.vllm.test_slice import (
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    FULL_BLOCKS,
    HOST_BYTES,
    environment,
    prompt,
    same,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = FULL_BLOCKS


class Served:
    """An engine with a file tier; one process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, tokens: list[int]) -> dict[str, Any]:
        (answer,) = self.engine.call("generate", prompts=[tokens])
        return answer

    def state(self) -> dict[str, Any]:
        return self.engine.call("manager")

    def settle(self) -> dict[str, Any]:
        """The manager's state when the tiers have done what they were given."""
        return self.engine.call("settle")

    def forget_device(self) -> None:
        assert self.engine.call("reset")

    def empty_host(self) -> None:
        """Host memory is full of other prompts, all of which the files have."""
        for seed in range(900, 900 + HOST_BYTES // (256 << 10) // CHUNKS + 2):
            self.run(prompt(seed))
        self.settle()


def options(model: Path, shm: Path, files: Path, **more: Any) -> dict[str, Any]:
    """Arguments of ``Engine.start``."""
    tier = {"type": "fs", "root_dir": str(files), "capacity_bytes": "1GiB"}
    extra = {
        "cpu_bytes_to_use": HOST_BYTES,
        "directory": str(shm),
        "secondary_tiers": [tier],
        "flush_on_shutdown_seconds": 20,
    }
    return {"model": str(model), "blocks": DEVICE_BLOCKS, "extra": extra | more}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("files")
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("full")


def test_reload_from_files(
    model: Path, own_shm_directory: Path, files: Path, tmp_path: Path
) -> None:
    """In one engine, after a restart, and without the file the chunk is recomputed."""
    mine = prompt(1)
    with Engine(tmp_path / "first", environment(1)) as engine:
        engine.start(**options(model, own_shm_directory, files))
        one = Served(engine)
        cold = one.run(mine)
        control = one.run(mine)
        assert control["cached"] == CHUNKS * BLOCK_TOKENS
        stored = one.settle()
        assert stored["stored_bytes"]["fs"] >= CHUNKS * (256 << 10)
        one.empty_host()
        one.forget_device()
        before = one.settle()
        again = one.run(mine)
        after = one.settle()
        assert again["cached"] == CHUNKS * BLOCK_TOKENS
        assert after["tier_hits"]["fs"] - before["tier_hits"]["fs"] == CHUNKS
        assert same(again, control)
        assert after["requests"] == 1  # vLLM tells of an end in the step after it
        assert cold["tokens"]
    with Engine(tmp_path / "second", environment(1)) as engine:
        engine.start(**options(model, own_shm_directory, files))
        one = Served(engine)
        again = one.run(mine)
        assert again["cached"] == CHUNKS * BLOCK_TOKENS
        assert one.settle()["tier_hits"]["fs"] == CHUNKS
        assert same(again, control)
        for path in files.rglob("*.kv"):
            path.unlink()
        assert engine.call("reset", connector=False)
        one.forget_device()
    with Engine(tmp_path / "third", environment(1)) as engine:
        engine.start(**options(model, own_shm_directory, files))
        one = Served(engine)
        assert one.run(mine)["cached"] == 0
        assert one.settle()["tier_hits"]["fs"] == 0


@pytest.mark.fault("C15")
@pytest.mark.parametrize(
    ("tier", "exact"),
    [
        ({"type": "DictionaryTier", "module_path": "examples.own_tier"}, True),
        (
            {
                "type": "VllmDictionary",
                "module_path": "tests.tiers.vllm_managers",
                "color": "red",
            },
            True,
        ),
        (
            {
                "type": "ExampleSecondaryTierManager",
                "module_path": "vllm.v1.kv_offload.tiering.example.manager",
            },
            False,
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_tiers_of_other_people(
    model: Path, own_shm_directory: Path, tmp_path: Path, tier: dict[str, Any], exact: bool
) -> None:
    """A class with the four methods, one written against vLLM's base, and vLLM's own example,
    which keeps no bytes and says that it has loaded them: what it "loads" is never used."""
    mine = prompt(1)
    with Engine(tmp_path / "log", environment(1)) as engine:
        engine.start(
            **options(model, own_shm_directory, tmp_path, secondary_tiers=[tier | {"name": "own"}])
        )
        one = Served(engine)
        one.run(mine)
        control = one.run(mine)
        one.empty_host()
        one.forget_device()
        before = one.settle()
        again = one.run(mine)
        after = one.settle()
        hits = after["tier_hits"]["own"] - before["tier_hits"]["own"]
        if exact:
            assert again["cached"] == CHUNKS * BLOCK_TOKENS
            assert hits == CHUNKS
            assert same(again, control)
        else:
            assert again["cached"] == 0
            assert hits == 0
            assert after["corrupt"]["own"] >= 1
            assert again["tokens"] == control["tokens"]
