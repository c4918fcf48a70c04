# SPDX-License-Identifier: Apache-2.0
"""Windowed, latent and recurrent models reload from host memory exactly, as the full one does.

The accelerator's blocks are overwritten before the reload: what is found there afterwards came from
host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.host import region
from tests.vllm.engine import Engine
from tests.vllm.test_slice import environment, prompt, same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT_TOKENS = 2600


class Case(msgspec.Struct, frozen=True):
    """One engine and what it must show."""

    family: str
    tp: int
    blocks_per_chunk: int
    device_blocks: int
    cached: int
    """Prompt tokens that come from a cache."""
    chunks: int
    """Chunks that a reload moves, on each rank."""
    windows: tuple[int | None, ...]
    blocks: int
    """Accelerator blocks that these chunks fill; of a windowed group only those in the window."""
    portable: bool = True
    device_cache: bool = True
    """Whether vLLM keeps a prefix cache of its own (not for latent attention on the CPU)."""

    def at(self, block_tokens: int) -> Case:
        """The same where vLLM chose blocks of so many tokens; only `linear` has more than one."""
        if self.family != "linear":
            return self
        full = PROMPT_TOKENS // block_tokens
        return msgspec.structs.replace(
            self, cached=full * block_tokens, chunks=full + 3, blocks=full + 3
        )

    def __str__(self) -> str:
        return f"{self.family}-tp{self.tp}-bpc{self.blocks_per_chunk}"


CASES = [
    # 20 blocks of full attention, 2 of each of the five windowed groups.
    Case("swa", 1, 1, 256, 2560, 30, (2, 2, 2, 2, 2, None), 30),
    Case("swa", 1, 4, 256, 2560, 10, (1, 1, 1, 1, 1, None), 30),
    # Blocks of 16 tokens.
    Case("mla", 1, 1, 256, 2592, 162, (None,), 162, device_cache=False),
    Case("mla", 2, 1, 256, 2592, 162, (None,), 162, device_cache=False),
    # 6 blocks of 384 tokens, and one state for each of three layers. vLLM makes a block as large as
    # a state, in steps that differ from processor to processor: see `at`.
    Case("linear", 1, 1, 24, 2304, 9, (1, 1, 1, None), 9, portable=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reload_is_exact_and_damage_shows(
    case: Case, checkpoint: Callable[[str], Path], shm_directory: Path, tmp_path: Path
) -> None:
    with Engine(tmp_path / "log", environment(case.tp)) as engine:
        started = engine.start(
            model=str(checkpoint(case.family)),
            tp=case.tp,
            blocks=case.device_blocks,
            extra={
                "cpu_bytes_to_use": 64 << 20,
                "blocks_per_chunk": case.blocks_per_chunk,
                "directory": str(shm_directory),
            },
        )
        check(case.at(started["block_size"]), engine)
    if case.tp > 1:
        region.sweep(str(shm_directory))  # see test_slice
    assert list(shm_directory.iterdir()) == []


def check(case: Case, engine: Engine) -> None:
    def run(tokens: list[int]) -> dict[str, Any]:
        (answer,) = engine.call("generate", prompts=[tokens])
        return answer

    def ranks(name: str, *arguments: Any) -> list[Any]:
        return engine.call("rpc", name=name, arguments=list(arguments))

    def reload() -> dict[str, Any]:
        assert engine.call("reset")
        ranks("kvt_wipe")
        return run(tokens)

    tokens = prompt(1, PROMPT_TOKENS)
    for state in ranks("kvt_state"):
        assert tuple(state["windows"]) == case.windows
        assert state["portable"] == case.portable
    assert run(tokens)["cached"] == 0
    written = [set(digests) for digests in ranks("kvt_digests", 0)]
    # Without a prefix cache of vLLM's own this is a reload already, and only bytes can judge it.
    control = run(tokens)
    assert control["cached"] == case.cached
    before = [state["loaded_chunks"] for state in ranks("kvt_state")]
    assert before == [0 if case.device_cache else case.chunks] * case.tp

    run(prompt(2, PROMPT_TOKENS))  # the last stores go out with the next step
    again = reload()
    assert again["cached"] == case.cached
    assert same(again, control)
    states = ranks("kvt_state")
    assert [state["loaded_chunks"] - before[0] for state in states] == [case.chunks] * case.tp
    assert [state["failed_chunks"] for state in states] == [0] * case.tp
    for rank, digests in enumerate(ranks("kvt_digests", 0)):
        assert len(written[rank].intersection(digests)) >= case.blocks

    ranks("kvt_flip_everywhere", 0)
    damaged = reload()
    assert damaged["cached"] == case.cached
    assert not same(damaged, control)
    ranks("kvt_flip_everywhere", 0)
    assert same(reload(), control)
