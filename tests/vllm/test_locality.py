# SPDX-License-Identifier: Apache-2.0
"""A tier's `locality` means what it means to vLLM's own file tier, above all where it is left out.

No engine runs: vLLM's class and kvtier's manager are made from the same keys, store one chunk each
and answer the same filters, read by vLLM's own parser.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.vllm.test_walks import SECONDS, Rig, key

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

FILTERS: list[list[dict[str, str]]] = [
    [dict(one) for one in alternatives]
    for count in range(3)
    for alternatives in itertools.combinations(
        [
            [(name, word) for name, word in (("medium", medium), ("locality", place)) if word]
            for medium in ("", "cpu", "storage")
            for place in ("", "local", "REMOTE")
        ],
        count,
    )
]
"""Every filter of up to two alternatives, the empty one included."""


@pytest.fixture(params=[None, "LOCAL", "REMOTE"], ids=str)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Keys of a file tier in vLLM's JSON."""
    named = {} if request.param is None else {"locality": request.param}
    return {"type": "fs", "root_dir": str(tmp_path), "enable_kv_events": True, **named}


@pytest.fixture
def theirs(tier: dict[str, Any]) -> Iterator[Any]:
    # lazy: vLLM takes seconds, and only these tests need it.
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    spec: Any = SimpleNamespace(
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        config=SimpleNamespace(
            groups=[],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="m", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        ),
    )
    options = {name: value for name, value in tier.items() if name != "type"}
    # Its files are written around the page cache, from whole pages.
    view = memoryview(mmap.mmap(-1, 2 * 4096)).cast("b", (2, 4096))
    made = FileSystemTierManager(spec, view, tier["type"], **options)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def ours(tier: dict[str, Any], own_shm_directory: Path) -> Iterator[Rig]:
    made = Rig(str(own_shm_directory), 4, (None,), [tier], events=True)
    try:
        yield made
    finally:
        made.close()


def told(take: Callable[[], list[Any]]) -> tuple[Any, Any]:
    """Medium and locality of the first event of a tier that is stored to files."""
    deadline = time.monotonic() + SECONDS
    while True:
        for event in take():
            if event.medium.name == "STORAGE":
                return event.medium, event.locality
        assert time.monotonic() < deadline, "no event"
        time.sleep(0.01)


def test_filters_and_events_are_those_of_vllms_own_tier(
    tier: dict[str, Any], theirs: Any, ours: Rig
) -> None:
    # lazy: as above
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        _parse_tier_filter,
    )
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    allowed = {}
    for number, raw in enumerate(FILTERS):
        wanted = _parse_tier_filter(raw)
        allowed[str(raw)] = wanted.allows(theirs.medium, theirs.locality)
        context = ReqContext(req_id=f"r{number}", load_tier_filter=wanted)
        context.set_offload_key_position(key(9), 16)
        # Nowhere so far: RETRY while a tier is asked for it, MISS at once where none may be.
        asked = ours.manager.lookup(key(9), context).name
        assert asked == ("RETRY" if allowed[str(raw)] else "MISS"), raw
        ours.manager.on_request_finished(context)
    assert set(allowed.values()) == {True, False}
    assert allowed[str([{"locality": "local"}])] == (tier.get("locality") != "REMOTE")
    assert allowed[str([{"locality": "REMOTE"}])] == (tier.get("locality") != "LOCAL")

    theirs.submit_store(TransferJob(1, [key(1)], np.array([1]), False, ReqContext("writer")))
    ours.store([key(1)])

    def their_events() -> list[Any]:
        list(theirs.get_finished_jobs())
        return list(theirs.take_events())

    def our_events() -> list[Any]:
        ours.manager.on_schedule_end(None)
        return list(ours.manager.take_events())

    assert told(our_events) == told(their_events)
