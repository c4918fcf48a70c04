# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages of a real vLLM engine, of three layers and one: a reload is exact.

The stages tell each other what they hold of a block while vLLM starts them; everything else about
their areas is in ``test_layouts``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.host import region
from tests.vllm.engine import Engine
from tests.vllm.test_slice import BLOCK_TOKENS, FULL_BLOCKS, environment, prompt, same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYER_BYTES = BLOCK_TOKENS * 4 * 32 * 2 * 2
"""One block of one layer: four heads of 32, K and V, two bytes each."""


@pytest.mark.fault("R07")
def test_stages_reload_what_each_of_them_has_written(
    checkpoint: Callable[[str], Path], shm_directory: Path, tmp_path: Path
) -> None:
    """Two batches are under way at a time, and steps that bring a stage no job are among them.

    Scheduling ahead of the last step's tokens is not: vLLM's CPU platform turns it off, whatever it
    is told (``check_and_update_config`` of ``vllm/platforms/cpu.py``).
    """
    divided = {"VLLM_PP_LAYER_PARTITION": "3,1"}
    with Engine(tmp_path / "log", environment(2) | divided) as engine:

        def run(*seeds: int) -> list[dict[str, Any]]:
            return list(engine.call("generate", prompts=[prompt(seed) for seed in seeds]))

        def states() -> list[dict[str, Any]]:
            return list(engine.call("rpc", name="kvt_state"))

        def reload_is_as(controls: list[list[dict[str, Any]]]) -> list[bool]:
            """Load both prompts into an empty device cache; whether a control has the same answer,
            for each of the two."""
            assert engine.call("reset")
            engine.call("rpc", name="kvt_wipe")
            answers = enumerate(run(1, 2))
            return [
                any(same(answer, control[place]) for control in controls)
                for place, answer in answers
            ]

        started = engine.start(
            model=str(checkpoint("full")),
            pipeline_parallel_size=2,
            blocks=64,
            extra={"cpu_bytes_to_use": 64 << 20, "directory": str(shm_directory)},
        )
        assert not started["async_scheduling"]
        engine.call("rpc", name="kvt_pipeline")
        engine.call("rpc", name="kvt_steps")
        assert [state["rank"] for state in states()] == [0, 1]
        for state in states():
            assert state["payload_bytes"] == [4 * LAYER_BYTES]
            assert not state["portable"]
        # Two requests at a time, so that a stage has one while the other stage has the other.
        assert [answer["cached"] for answer in run(1, 2)] == [0, 0]
        written = [
            set(digests) for digests in engine.call("rpc", name="kvt_digests", arguments=[0])
        ]
        # The last digits of an answer depend on whether its batch has tokens of the other one too;
        # two requests of one call are not always scheduled together.
        controls = [[*run(1), *run(2)], run(1, 2)]
        while len(controls) < 12 and all(map(same, controls[0], controls[-1])):
            controls.append(run(1, 2))
        for control in controls:
            assert [answer["cached"] for answer in control] == [FULL_BLOCKS * BLOCK_TOKENS] * 2
        assert [state["loaded_chunks"] for state in states()] == [0, 0]
        run(3)  # the last stores go out with the next step

        assert reload_is_as(controls) == [True, True]
        for rank, state in enumerate(states()):
            assert state["loaded_chunks"] == 2 * FULL_BLOCKS
            assert state["failed_chunks"] == 0
            digests = engine.call("rpc", name="kvt_digests", arguments=[0])[rank]
            assert len(written[rank].intersection(digests)) >= 2 * FULL_BLOCKS
        for busy, empty in engine.call("rpc", name="kvt_steps"):
            assert min(busy, empty) > 0
        engine.call("rpc", name="kvt_flip_everywhere", arguments=[0])
        assert reload_is_as(controls) == [False, False]
    region.sweep(str(shm_directory))  # see test_slice
    assert list(shm_directory.iterdir()) == []
