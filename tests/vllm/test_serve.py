# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the README's command: answers, metrics, and what is left when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engine import ONE_THREAD, series
from tests.vllm.serve import ROOT, Server, command, readme_command
from tests.vllm.test_identity import ADVICE
from tests.vllm.test_slice import (
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    FILLER_TOKENS,
    FULL_BLOCKS,
    HOST_BYTES,
    prompt,
)
from tests.vllm.test_tiers import CHUNK_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = FULL_BLOCKS
FILLER_CHUNKS = FILLER_TOKENS // BLOCK_TOKENS
SLOTS = HOST_BYTES // CHUNK_BYTES

SMALL = [
    "--skip-tokenizer-init",
    "--enforce-eager",
    *("--max-model-len", "3456"),
    *("--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "8192"),
    *("--num-gpu-blocks-override", str(DEVICE_BLOCKS)),
    "--enable-prompt-tokens-details",
]
"""Options of vLLM for a model of four layers; none of them is about offloading."""

Made = Callable[..., list[str]]


def counted(server: Server, stored_chunks: int) -> dict[tuple[str, str, str], float]:
    """kvtier's series once the file tier has stored so many chunks since the start.

    vLLM asks for them in steps only, so small requests are made until it has.
    """
    deadline = time.monotonic() + 30.0
    while True:
        server.complete(prompt(77, 100), 1)
        found = series(server.get("/metrics"))
        stored = found.get(("kvtier_chunks_total", "fs", "store done"), 0)
        held = found.get(("kvtier_tier_chunks", "fs", ""), 0)
        if stored == held == stored_chunks and found["kvtier_host_slots", "", "writing"] == 0:
            # What came with the last of them may be half a second behind.
            time.sleep(0.6)
            server.complete(prompt(77, 100), 1)
            return series(server.get("/metrics"))
        assert time.monotonic() < deadline, f"{stored}, {held} of {stored_chunks}"
        time.sleep(0.2)


def service(server: Server) -> list[int]:
    """Processes of the tier service."""
    return [pid for pid, line in server.family.items() if "kvtier.runtime.child" in line]


def test_the_readme_has_one_command_with_all_that_vllm_needs() -> None:
    words = readme_command()
    assert words[:3] == ["vllm", "serve", "MODEL"]
    assert '"kv_connector": "OffloadingConnector"' in words[-1]
    assert '"kv_role": "kv_both"' in words[-1]
    assert '"kv_load_failure_policy": "recompute"' in words[-1]
    # So says every page that shows how kvtier is started.
    for page in ("README.md", "docs/vllm.md", "docs/configuration.md", "docs/peer-tier.md"):
        text = (ROOT / page).read_text()
        shown = text.count('"kv_connector": "OffloadingConnector"')
        assert shown == text.count('"kv_load_failure_policy": "recompute"') - text.count(ADVICE) > 0


@pytest.mark.fault("L03", "M02", "M03", "U07")
def test_the_readmes_command(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    words = command(checkpoint("full"), HOST_BYTES, own_shm_directory, tmp_path / "files")
    with Server([*words, *SMALL], tmp_path / "server") as server:
        assert len(service(server)) == 1
        assert ADVICE not in server.log.read_text(errors="replace")
        cold, cached = server.complete(prompt(1))
        assert cached == 0
        control, cached = server.complete(prompt(1))  # from the accelerator
        assert cached == CHUNKS * BLOCK_TOKENS
        found = counted(server, CHUNKS)
        assert found["kvtier_host_capacity_bytes", "", ""] == SLOTS * CHUNK_BYTES
        assert found["kvtier_host_slots", "", "ready"] == CHUNKS
        assert found["kvtier_host_slots", "", "free"] == SLOTS - CHUNKS
        assert found["kvtier_transfer_bytes_total", "fs", "store"] == CHUNKS * CHUNK_BYTES
        assert found["kvtier_lookup_chunks_total", "host", "miss"] == CHUNKS
        assert found.get(("kvtier_lookup_chunks_total", "host", "hit"), 0) == 0
        assert found["kvtier_tier_up", "fs", ""] == found["kvtier_service_up", "", ""] == 1
        assert found["kvtier_tier_capacity_bytes", "fs", ""] == 1 << 30

        for seed in (2, 3):  # pushes the prompt off the accelerator
            server.complete(prompt(seed, FILLER_TOKENS))
        again, cached = server.complete(prompt(1))
        assert (again, cached) == (control, CHUNKS * BLOCK_TOKENS)
        found = counted(server, CHUNKS + 2 * FILLER_CHUNKS)
        assert found["kvtier_lookup_chunks_total", "host", "hit"] == CHUNKS
        assert found["kvtier_lookup_chunks_total", "host", "miss"] == CHUNKS + 2 * FILLER_CHUNKS
        assert found.get(("kvtier_lookup_chunks_total", "fs", "hit"), 0) == 0

        for seed in range(4, 8):  # and out of host memory
            server.complete(prompt(seed, FILLER_TOKENS))
        again, cached = server.complete(prompt(1))
        assert (again, cached) == (control, CHUNKS * BLOCK_TOKENS)
        found = counted(server, CHUNKS + 6 * FILLER_CHUNKS)
        assert found["kvtier_lookup_chunks_total", "fs", "hit"] == CHUNKS
        assert found["kvtier_lookup_chunks_total", "host", "hit"] == CHUNKS
        assert found["kvtier_transfer_bytes_total", "fs", "load"] == CHUNKS * CHUNK_BYTES
        assert found.get(("kvtier_evicted_unsaved_total", "", ""), 0) == 0
        idle = series(server.get("/metrics"))
        for _ in range(10):
            assert series(server.get("/metrics")) == idle
        assert cold  # the cold answer may differ from the others in its last digits

        # One more prompt: saved at the end, though the server ends right after its answer.
        server.complete(prompt(8))
        assert server.terminate(30.0) < 25.0
        assert list(own_shm_directory.iterdir()) == []
        assert server.left_alive(5.0) == {}
    assert len(list((tmp_path / "files").rglob("*.kv"))) == 2 * CHUNKS + 6 * FILLER_CHUNKS


@pytest.mark.fault("L01", "L03", "K03", "M04")
def test_kills_leave_nothing_after_the_next_start_and_sigterm_leaves_nothing(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    """Without ``--shutdown-timeout``: then vLLM kills its engine when it gets SIGTERM."""
    words = command(checkpoint("full"), HOST_BYTES, own_shm_directory, tmp_path / "files")
    place = words.index("--shutdown-timeout")
    del words[place : place + 2]
    with Server([*words, *SMALL], tmp_path / "first", ONE_THREAD) as server:
        assert len(service(server)) == 1
        server.complete(prompt(1))
        control, _ = server.complete(prompt(1))
        counted(server, CHUNKS)
        # All but the tier service, which has a process group of its own and ends by itself; it
        # removes the region if it is the last to let go of it.
        server.kill()
        assert server.left_alive(15.0) == {}
    left = set(own_shm_directory.iterdir())
    with Server([*words, *SMALL], tmp_path / "second", ONE_THREAD) as server:
        (mine,) = own_shm_directory.iterdir()
        assert mine not in left
        assert ("kvtier_chunks_total", "fs", "store done") not in series(server.get("/metrics"))
        again, cached = server.complete(prompt(1))
        assert (again, cached) == (control, CHUNKS * BLOCK_TOKENS)
        server.complete(prompt(2))
        server.terminate(25.0)
        assert "force killing" in server.log.read_text(errors="replace")
        assert list(own_shm_directory.iterdir()) == []
        assert server.left_alive(5.0) == {}
