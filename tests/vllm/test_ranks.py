# SPDX-License-Identifier: Apache-2.0
"""One rank and two share a directory of files, in both directions, byte for byte.

Two real engines run side by side. Tokens are no measure: one rank and two answer differently
without any cache. What a reader has in its accelerator is compared with what the writer had there,
head by head, from vLLM's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.host import region
from tests.vllm.engine import Engine, Processes
from tests.vllm.test_identity import ADVICE
from tests.vllm.test_slice import environment, prompt
from tests.vllm.test_tiers import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANKS = (1, 2)


class Case(msgspec.Struct, frozen=True):
    """A family of models."""

    family: str
    device_blocks: int
    block_tokens: int
    chunks: int
    """Whole blocks of the prompt."""
    chunk_bytes: int
    heads: int
    """Of K and V, over all ranks; latent rows are one head that every rank has."""
    slow: bool = False
    """Whether the second of two ranks is slow to start."""


CASES = [
    Case("full", 28, 128, 20, 256 << 10, 4, slow=True),
    Case("mla", 256, 16, 162, 3 * 16 * 576 * 2, 1),
]


class Side(Served):
    """One of the engines."""

    def __init__(self, engine: Engine, tp: int, case: Case) -> None:
        super().__init__(engine)
        self.tp = tp
        self.case = case

    def ranks(self, name: str, *arguments: Any) -> list[Any]:
        return self.engine.call("rpc", name=name, arguments=list(arguments))

    def rows(self) -> set[tuple[str, ...]]:
        """Of each accelerator block, digests of all its heads in order."""
        by_rank = self.ranks("kvt_heads")
        whole = set()
        for parts in zip(*by_rank, strict=True):
            if self.case.heads == 1:  # every rank has it all
                whole.add(tuple({head for heads in parts for head in heads}))
            else:
                whole.add(tuple(head for heads in parts for head in heads))
        return whole

    def counts(self, files: Path) -> dict[str, Any]:
        """What has been done since the start, when all of it has ended."""
        state = self.settle()
        ranks = self.ranks("kvt_state")
        assert len({rank["finished"] for rank in ranks}) == 1  # every number, on every rank
        return {
            "operations": {
                name: count for name, count in state["operations"].items() if name[:3] == "fs "
            },
            "stored_bytes": state["stored_bytes"]["fs"],
            "loaded_bytes": state["loaded_bytes"]["fs"],
            "hits": state["tier_hits"]["fs"],
            "copied_bytes": sum(rank["stored_bytes"] for rank in ranks),
            "loaded_chunks": [rank["loaded_chunks"] for rank in ranks],
            "failed": state["failed"] + sum(rank["failed_chunks"] for rank in ranks),
            "files": len(list(files.rglob("*.kv"))),
        }


@pytest.mark.fault("C09", "H10", "H12", "K12", "P07", "R03", "R11")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_one_rank_and_two_share_both_ways(
    case: Case,
    checkpoint: Callable[[str], Path],
    own_shm_directory: Path,
    tmp_path: Path,
    processes: Processes,
) -> None:
    files = tmp_path / "files"
    extra = {
        "cpu_bytes_to_use": 64 << 20,
        "directory": str(own_shm_directory),
        "secondary_tiers": [{"type": "fs", "root_dir": str(files), "capacity_bytes": "1GiB"}],
    }
    one_process = environment(1)
    with (
        processes.lend() as first,
        Engine(tmp_path / "two", environment(2) | one_process) as second,
    ):
        sides = []
        for engine, tp in zip((first, second), RANKS, strict=True):
            slow = {"spec_name": "SlowSpec", "spec_module_path": "tests.vllm.slow"}
            engine.start(
                model=str(checkpoint(case.family)),
                tp=tp,
                blocks=case.device_blocks,
                extra=extra | (slow if case.slow and tp > 1 else {}),
            )
            assert engine.text().count(ADVICE) == 1  # by one rank of all
            side = Side(engine, tp, case)
            states = side.ranks("kvt_state")
            assert [state["rank"] for state in states] == list(range(tp))
            assert all(state["portable"] for state in states)
            assert all(state["payload_bytes"] == [case.chunk_bytes] for state in states)
            sides.append(side)
        one, two = sides
        there, wrote = share(one, two, prompt(1), files)
        back, wrote_two = share(two, one, prompt(2), files)
        # As many files, operations and bytes, whichever writes; latent rows are written once.
        assert wrote == wrote_two
        assert there == back
        assert len(list(files.glob("*/namespace.json"))) == 1
    region.sweep(str(own_shm_directory))  # see test_slice


def share(
    writer: Side, reader: Side, tokens: list[int], files: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One engine writes, the other reads; what each of them has done, the reader first."""
    case = writer.case
    before, old = writer.counts(files), writer.rows()
    assert writer.run(tokens)["cached"] == 0
    written = writer.rows() - old
    wrote = changes(before, writer.counts(files))
    # The whole blocks, and the tail with the answer.
    assert len(written) == case.chunks + 1
    assert all(len(row) == case.heads for row in written)
    assert wrote["operations"] == {"fs store done": case.chunks}
    assert wrote["files"] == case.chunks
    assert wrote["stored_bytes"] == wrote["copied_bytes"] == case.chunks * case.chunk_bytes
    assert wrote["failed"] == wrote["hits"] == 0

    reader.forget_device()
    reader.ranks("kvt_wipe")
    before = reader.counts(files)
    assert reader.rows().isdisjoint(written)
    answer = reader.run(tokens)
    assert answer["cached"] == case.chunks * case.block_tokens
    read = changes(before, reader.counts(files))
    assert read["hits"] == case.chunks
    assert read["operations"] == {"fs load done": case.chunks}
    assert read["loaded_bytes"] == case.chunks * case.chunk_bytes
    assert read.pop("loaded_chunks") == [case.chunks] * reader.tp
    assert read["files"] == read["stored_bytes"] == read["copied_bytes"] == read["failed"] == 0
    # Each head's K and V of every whole block are the writer's; the tail was computed again.
    assert len(reader.rows() & written) == case.chunks
    wrote.pop("loaded_chunks")
    return read, wrote


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What has been added."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        old = before[name]
        if isinstance(value, dict):
            new = {key: count - old.get(key, 0) for key, count in value.items()}
            found[name] = {key: count for key, count in new.items() if count}
        elif isinstance(value, list):
            found[name] = [now - then for now, then in zip(value, old, strict=True)]
        else:
            found[name] = value - old
    return found
