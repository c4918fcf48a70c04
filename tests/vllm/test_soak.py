# SPDX-License-Identifier: Apache-2.0
"""Sixty-four conversations in an engine far too small for them, over tiers that fail.

Exact tokens cannot be asked for: the last digits of a token's KV depend, without kvtier too, on
what was computed in the same prefill and batch, so where two tokens are nearly as likely either may
come. Each answer is therefore judged by the cold run of its prompt, alone, in an engine without
kvtier: up to the first token that differs its probabilities are the cold run's, and that token is
as likely there as the cold run's own choice; both within `TOLERANCE`. A damaged or foreign block is
far outside, which the last part shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine, Processes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SEED = 20
SPAN = float(os.environ.get("KVTIER_SOAK_SECONDS", "30"))
BOUND = 30.0
CONVERSATIONS = 64
TOLERANCE = 0.3
SMALL = {"blocks": 13, "max_model_len": 1024, "max_num_seqs": 6, "max_num_batched_tokens": 2048}
"""Two long prompts fill the accelerator."""


SLACK = {"tasks": 0, "threads": 8, "fds": 0}
"""The service's pools start their threads when there is work for them."""


def judge(cold: Engine, answers: list[dict[str, Any]]) -> list[float]:
    """How far each answer is from the cold run of its prompt, in logarithms of probability."""
    return cold.call("judge", answers=answers)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What the service holds more of than at the start."""
    return {
        what: after[what] - before[what]
        for what in SLACK
        if after[what] > before[what] + SLACK[what]
    }


@pytest.mark.fault("C02", "C15", "C22", "C26", "K09", "L07", "L09")
def test_conversations_over_failing_tiers(
    checkpoint: Callable[[str], Path],
    own_shm_directory: Path,
    tmp_path: Path,
    processes: Processes,
) -> None:
    model = str(checkpoint("full"))
    faulty = {
        "type": "FaultyTier",
        "module_path": "tests.vllm.scripted",
        "name": "faulty",
        "script": "faulty",
        "seed": SEED,
    }
    files = {"type": "fs", "root_dir": str(tmp_path / "files"), "capacity_bytes": "24MiB"}
    extra = {
        "cpu_bytes_to_use": 32 * (256 << 10),
        "directory": str(own_shm_directory),
        "secondary_tiers": [faulty, files],
        "breaker": {"failures": 30, "open_seconds": 0.5},
    }
    with processes.lend() as engine:
        engine.start(model=model, extra=extra, **SMALL)
        free = engine.call("drive", name="state")["free_blocks"]
        engine.call("drive", name="add", request="first", prompt=list(range(3, 303)))
        before = engine.call("drive", name="close_accounts")
        found = engine.call(
            "soak",
            SPAN + 2 * BOUND,
            seed=SEED,
            span=SPAN,
            conversations=CONVERSATIONS,
            at_once=10,
            bound=BOUND,
        )
        after = engine.call("drive", name="close_accounts")
        manager = engine.call("manager")
        answers = found.pop("answers")
        print(found, manager, after["service"], before["service"], len(answers))

        # Everything happened that this is about.
        assert found["conversations"] == CONVERSATIONS
        assert found["preemptions"] > 0
        assert found["aborted"] > 0
        assert found["longest"] < BOUND
        assert manager["tier_hits"]["faulty"] > 0
        assert manager["tier_hits"]["fs"] > 0
        assert manager["corrupt"]["faulty"] > 0
        assert manager["failures"]["io"] > 0
        assert any(len(one["tokens"]) < one["max_tokens"] for one in answers)

        # Nothing is left of it.
        for account in ("writes", "loads", "held", "lent", "finds", "cascades", "requests"):
            assert after[account] == 0, account
        assert manager["writing"] == manager["orphans"] == manager["failed"] == 0
        assert manager["free"] + manager["ready"] == manager["capacity"]
        assert after["free_blocks"] == free
        assert after["service"]["jobs"] == 0
        assert after["fds"] <= before["fds"]
        deadline = time.monotonic() + 15.0
        while (more := grown(before["service"], after["service"])) and time.monotonic() < deadline:
            time.sleep(0.5)  # a walk of the file tier's own
            after = engine.call("drive", name="close_accounts")
        assert not more, (more, engine.call("drive", name="service_fds"))

        # The same questions again with every byte in host memory damaged.
        damaged = engine.call("damaged", answers=answers[-20:])

    with processes.lend() as cold:
        cold.start(model=model, **SMALL)
        far = judge(cold, answers)
        print("farthest:", sorted(far)[-5:], "differ:", sum(one > 0.05 for one in far))
        assert max(far) < TOLERANCE
        assert max(judge(cold, damaged)) > 2 * TOLERANCE
