# SPDX-License-Identifier: Apache-2.0
"""Reloads from an object store in the real engine: at once, by another one, and after a restart."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.fs.naming import chunk_path
from tests.tiers.obj.memory_store import MemoryStore
from tests.tiers.obj.scripted import playing_in_thread
from tests.vllm.engine import Engine, Processes
from tests.vllm.test_families import Case, Served, same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CASES = [
    Case("full", 1, tokens=1024, device_blocks=16, max_model_len=1280),
    Case("full", 4, tokens=1024, device_blocks=16, max_model_len=1280),
    Case("swa", 1, tokens=1024, device_blocks=80, max_model_len=1280),
    Case("mla", 1, tokens=512, device_blocks=48, max_model_len=640),
    Case("linear", 1, tokens=2560, device_blocks=24, max_model_len=3456, portable=False),
]


@pytest.fixture(scope="module")
def pair(processes: Processes) -> Iterator[tuple[Engine, Engine]]:
    with processes.lend() as first, processes.lend() as second:
        yield first, second


class Counted(MemoryStore):
    """Notes which chunks it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: defaultdict[int, list[str]] = defaultdict(list)
        """Names that were asked for, by group."""
        self.refuse = self._note

    def _note(self, method: str, path: str, headers: dict[str, str]) -> None:
        match = re.search(r"[0-9a-f]{2}/[0-9a-f]+_([0-9]+)\.kv$", path)
        if method == "HEAD" and match is not None:
            self.heads[int(match[1])].append(match[0])


def tier(port: int) -> dict[str, Any]:
    """As vLLM writes it: keys in ``store_config``, and an endpoint without scheme."""
    return {
        "type": "obj",
        "store_config": {
            "bucket": "bucket",
            "endpoint_override": f"127.0.0.1:{port}",
            "access_key": "AKID",
            "secret_key": "hush-hush",
            "region": "",
        },
        "io_threads": 16,
    }


@pytest.mark.fault("C26")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reloads_are_exact(
    case: Case,
    pair: tuple[Engine, Engine],
    checkpoint: Callable[[str], Path],
    shm_directory: Path,
    own_shm_directory: Path,
    tmp_path: Path,
) -> None:
    """Counters say that all bytes came from the store; of a group with a window nothing is asked
    for that lies before it. A bit that differs in an object is seen, and its chunk recomputed."""
    store = Counted()
    with playing_in_thread(store) as port:
        model = checkpoint(case.family)
        one, other = (
            Served(case, model, shm, tmp_path, tier(port))
            for shm in (shm_directory, own_shm_directory)
        )
        one.start(pair[0], device_cache=True)
        try:
            cold = one.run()
            assert cold["cached"] == 0
            control = one.run()
            one.call("settle")
            keys = one.call("chunks")
            assert control["cached"] == one.cached
            assert same(one.reload(files=True), control)
            # Another instance, beside the first one, that has never heard of these chunks.
            other.start(pair[1], device_cache=False)
            (full,) = (group for group, window in enumerate(one.windows) if window is None)
            names = [chunk_path(bytes.fromhex(key))[: -len("_0.kv")] for key in keys[full]]
            assert len(names) == one.cached // one.chunk_tokens
            store.heads.clear()
            assert same(other.reload(files=True), control)
            for group, window in enumerate(other.windows):
                wanted = names if window is None else names[-window - 1 :]
                assert sorted(store.heads[group]) == sorted(f"{name}_{group}.kv" for name in wanted)
            one.stop()
            one.start(pair[0], device_cache=False)
            assert same(one.reload(files=True), control)
            one.keys = keys
            for group in one.kinds():
                name = chunk_path(bytes.fromhex(one.needed(group)))
                (path,) = (path for path in store.objects if path.endswith(name))
                data, meta = stored = store.objects[path]
                store.objects[path] = data[:-1] + bytes([data[-1] ^ 1]), meta
                one.empty_host()
                answer, source = one.recompute()
                assert source.corrupt == 1
                assert same(answer, cold)
                one.call("settle")
                assert store.objects[path] == stored
        finally:
            one.stop()
            other.stop()
