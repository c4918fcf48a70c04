# SPDX-License-Identifier: Apache-2.0
"""What two prompts of a real vLLM engine do not share: nothing with other salts, no partial chunk.

One engine with four blocks a chunk and a file tier whose files outlive a reset, so that host memory
alone can be emptied. Salts also keep a control apart, which is answered from the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine, Processes
from tests.vllm.test_slice import (
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    FULL_BLOCKS,
    prompt,
    same,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS_PER_CHUNK = 4
CHUNK_TOKENS = BLOCKS_PER_CHUNK * BLOCK_TOKENS
CHUNKS = FULL_BLOCKS // BLOCKS_PER_CHUNK
HOST_BYTES = 64 << 20


class Served:
    """The engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, tokens: list[int], salt: str | None = None) -> dict[str, Any]:
        """One greedy answer."""
        (answer,) = self.engine.call("generate", prompts=[tokens], salt=salt)
        return answer

    def forget_device(self) -> None:
        """Host memory and files stay."""
        assert self.engine.call("reset")

    def forget_host(self) -> None:
        """What it holds is in the files then, and nowhere else."""
        self.engine.call("settle")
        assert self.engine.call("reset", connector=True)
        state = self.engine.call("settle")
        assert state["ready"] == 0

    def moved(self) -> tuple[int, int]:
        """Chunks that have come from the files, and chunks loaded from host memory."""
        state = self.engine.call("settle")
        (rank,) = self.engine.call("rpc", name="kvt_state")
        return state["tier_hits"]["fs"], rank["loaded_chunks"]


@pytest.fixture(scope="module")
def served(
    checkpoint: Callable[[str], Path],
    shm_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    processes: Processes,
) -> Iterator[Served]:
    with processes.lend() as engine:
        files = tmp_path_factory.mktemp("files")
        engine.start(
            model=str(checkpoint("full")),
            blocks=DEVICE_BLOCKS,
            extra={
                "cpu_bytes_to_use": HOST_BYTES,
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "directory": str(shm_directory),
                "on_reset": "keep",
                "secondary_tiers": [
                    {"type": "fs", "root_dir": str(files), "capacity_bytes": "1GiB"}
                ],
            },
        )
        yield Served(engine)


@pytest.mark.fault("C13")
def test_another_salt_finds_nothing_in_host_memory_or_files(served: Served) -> None:
    mine = prompt(1)
    cold = served.run(mine, "a")
    assert cold["cached"] == 0
    served.forget_device()
    files, host = served.moved()
    for salt in ("b", None):
        answer = served.run(mine, salt)
        assert answer["cached"] == 0
        assert same(answer, cold)
        served.forget_device()
    assert served.moved() == (files, host)
    # With its own salt it is all there.
    assert served.run(mine, "a")["cached"] == CHUNKS * CHUNK_TOKENS
    assert served.moved() == (files, host + CHUNKS)

    served.forget_device()
    served.forget_host()
    answer = served.run(mine, "c")
    assert answer["cached"] == 0
    assert same(answer, cold)
    assert served.moved() == (files, host + CHUNKS)
    served.forget_device()
    assert served.run(mine, "a")["cached"] == CHUNKS * CHUNK_TOKENS
    assert served.moved() == (files + CHUNKS, host + 2 * CHUNKS)
    served.forget_device()


@pytest.mark.fault("C13")
@pytest.mark.usefixtures("in_process")
def test_another_adapter_with_the_same_salt_finds_nothing() -> None:
    """Keys as vLLM makes them of its requests, in kvtier's manager."""
    # lazy: only here is vLLM needed in this process
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.request import Request

    from tests.vllm.ranks import Parallel  # lazy: as above
    from tests.vllm.test_layouts import BLOCKS_PER_CHUNK as PER_CHUNK
    from tests.vllm.test_layouts import CHUNKS, LAYOUTS, instance

    tokens = 16 * PER_CHUNK
    init_none_hash(sha256)

    def keys(adapter: LoRARequest | None) -> list[bytes]:
        request = Request(
            request_id="r",
            prompt_token_ids=prompt(1, CHUNKS * tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=adapter,
            cache_salt="one",
            block_hasher=get_request_block_hasher(tokens, sha256),
        )
        return [make_offload_key(one, 0) for one in request.block_hashes]

    first = LoRARequest("first", 1, "/adapters/1")
    with instance(LAYOUTS[0], Parallel()) as engine:
        engine.keys = keys(first)
        engine.write()
        context = ReqContext(req_id="other")

        def answers(adapter: LoRARequest | None) -> set[str]:
            found = keys(adapter)
            assert len(found) == CHUNKS
            return {engine.made.manager.lookup(one, context).name for one in found}

        assert answers(first) == {"HIT"}
        others = [
            LoRARequest("second", 2, "/adapters/2"),
            LoRARequest("first", 1, "/adapters/3"),  # the name points elsewhere now
            None,
        ]
        for other in others:
            assert answers(other) == {"MISS"}


@pytest.mark.fault("C20")
@pytest.mark.parametrize("source", ["host", "files"])
@pytest.mark.parametrize(
    ("whole", "blocks"), [(0, 1), (0, 2), (0, 3), (2, 1), (2, 3), (0, BLOCKS_PER_CHUNK)]
)
def test_a_part_of_a_chunk_is_not_shared(
    served: Served, source: str, whole: int, blocks: int
) -> None:
    """The tail is another one after `whole` chunks and so many blocks of the next."""
    base = prompt(1000 + 10 * whole + blocks)
    shared = whole * CHUNK_TOKENS + blocks * BLOCK_TOKENS
    other = base[:shared] + prompt(2000 + 10 * whole + blocks)[shared:]
    cached = (whole + blocks // BLOCKS_PER_CHUNK) * CHUNK_TOKENS
    # The control's prefix, as long as what may be shared, has never left the accelerator.
    control_salt = f"control of {source}"
    served.forget_device()
    if cached:
        served.run(other[: cached + 1], control_salt)
    control = served.run(other, control_salt)
    assert control["cached"] == cached

    served.run(base, source)
    served.forget_device()
    if source == "files":
        served.forget_host()
    files, host = served.moved()
    answer = served.run(other, source)
    assert answer["cached"] == cached
    assert same(answer, control)
    chunks = cached // CHUNK_TOKENS
    assert served.moved() == (files + (chunks if source == "files" else 0), host + chunks)
    # The comparison can fail: the other tail has another answer.
    served.forget_device()
    assert not same(served.run(base, source), control)
