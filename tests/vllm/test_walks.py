# SPDX-License-Identifier: Apache-2.0
"""The manager answers for a whole prompt at its first question, and never with an old answer.

Over a region without workers: what they would publish is published here.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtier.config import parse
from kvtier.types import GroupGeometry, make_geometry, make_key

pytestmark = pytest.mark.vllm

TOKENS = 16
SECONDS = 30.0


def key(number: int, group: int = 0) -> bytes:
    return make_key(number.to_bytes(32, "big"), group)


class Rig:
    """A manager and its region; `windows` has one entry a group, `options` are the manager's."""

    def __init__(
        self,
        directory: str,
        slots: int,
        windows: Sequence[int | None],
        tiers: list[dict[str, Any]],
        **options: Any,
    ) -> None:
        # lazy: vLLM takes seconds, and only these tests need it.
        from kvtier.host.region import Region
        from kvtier.vllm.manager import KVTierManager

        groups = [
            GroupGeometry(
                block_tokens=TOKENS, blocks_per_chunk=1, block_bytes=4096, window_chunks=window
            )
            for window in windows
        ]
        self.region = Region.create(
            "walks", make_geometry(groups, slots * 4096), {}, 1, directory=directory
        )
        self.region.sign(0)
        self.region.populate(lambda _: None)
        config = {
            "capacity_bytes": slots * 4096,
            "isolation": "thread",
            "tiers": tiers,
            "flush_on_shutdown_seconds": 0,
        }
        region = Region.attach("walks", directory=directory)
        self.manager = KVTierManager(region, parse(config), **options)

    def close(self) -> None:
        self.manager.shutdown()
        self.region.close()

    def context(self, keys: Sequence[bytes], name: str = "r", **params: Any) -> Any:
        """A request whose chunks have these keys, each group's in order."""
        from vllm.v1.kv_offload.base import ReqContext  # lazy: as above

        context = ReqContext(req_id=name, kv_transfer_params=params or None)
        ends: dict[int, int] = {}
        for one in keys:
            ends[one[-1]] = ends.get(one[-1], 0) + TOKENS
            context.set_offload_key_position(one, ends[one[-1]])
        return context

    def store(self, keys: Sequence[bytes]) -> list[bytes]:
        """A store from end to end, as vLLM does it; the keys that went for it."""
        context = self.context(keys, "writer")
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        for offset in range(len(output.keys_to_store)):
            self.region.publish(0, output.store_spec.first_transfer + offset)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        self.manager.on_request_finished(context)
        return output.evicted_keys

    def walk(self, keys: Sequence[bytes], context: Any) -> list[str]:
        """What vLLM hears of a prompt: it asks up to the first miss."""
        answers = []
        for one in keys:
            answers.append(self.manager.lookup(one, context).name)
            if answers[-1] == "MISS":
                break
        return answers

    def until(self, wanted: list[str], keys: Sequence[bytes], context: Any) -> None:
        """Steps until that is what it hears."""
        deadline = time.monotonic() + SECONDS
        while (heard := self.walk(keys, context)) != wanted:
            assert time.monotonic() < deadline, heard
            self.manager.on_schedule_end(None)
            time.sleep(0.001)


@contextlib.contextmanager
def rig(
    slots: int = 8,
    windows: Sequence[int | None] = (None,),
    tiered: bool = False,
    **options: Any,
) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="kvt-test-", dir="/dev/shm") as directory:
        # Others may write there: of no chunk is it known without asking.
        tiers = [{"type": "fs", "root_dir": f"{directory}/files"}] if tiered else []
        made = Rig(directory, slots, windows, tiers, **options)
        try:
            yield made
        finally:
            made.close()


KEYS = [key(number) for number in range(4)]


def asked(made: Rig, keys: Sequence[bytes]) -> set[bytes]:
    """Those of `keys` that the tiers were asked for, for request "r"."""
    chunks = made.manager.engine._planner.requests["r"].chunks
    return {one for one in keys if chunks.status(one)}


def test_an_evicted_chunk_is_no_hit_in_the_same_step() -> None:
    with rig(slots=4) as made:
        made.store(KEYS)
        context = made.context(KEYS)
        assert made.walk(KEYS, context) == ["HIT"] * 4
        (gone,) = made.manager.prepare_store([key(9)], made.context([])).evicted_keys
        assert made.manager.lookup(gone, context).name == "MISS"


def test_answers_end_with_their_step_and_with_a_reset() -> None:
    with rig(slots=4) as made:
        context = made.context(KEYS)
        assert made.walk(KEYS, context) == ["MISS"]
        made.store(KEYS)
        assert made.walk(KEYS, context) == ["HIT"] * 4
        made.manager.reset_cache()
        assert made.walk(KEYS, context) == ["MISS"]
        made.store(KEYS)
        assert made.walk(KEYS, context) == ["HIT"] * 4
        # Behind the manager's back; it has no reason to look again before the step ends.
        made.manager.engine.cache.index.drop(KEYS[2:])
        made.manager.on_schedule_end(None)
        assert made.walk(KEYS, context) == ["HIT", "HIT", "MISS"]


def test_each_request_hears_of_its_own_chunks() -> None:
    with rig() as made:
        made.store(KEYS[:2])
        one, other = made.context(KEYS), made.context([key(7), *KEYS], "other")
        assert made.walk(KEYS, one) == ["HIT", "HIT", "MISS"]
        assert made.walk([key(7)], other) == ["MISS"]
        # Its first chunk is on the accelerator: vLLM asks from the second one on.
        assert made.walk(KEYS, other) == ["HIT", "HIT", "MISS"]
        assert made.walk(KEYS, one) == ["HIT", "HIT", "MISS"]


def test_a_waiting_prompt_is_two_questions() -> None:
    with rig(tiered=True) as made:
        made.store(KEYS[:2])
        context = made.context(KEYS)
        assert made.walk(KEYS, context) == ["RETRY", "MISS"]
        # All of it has been asked for nevertheless.
        assert asked(made, KEYS) == set(KEYS[2:])
        made.until(["HIT", "HIT", "MISS"], KEYS, context)
        made.manager.on_request_finished(context)


def test_a_waiting_prompt_that_has_grown_is_walked_to_its_new_end() -> None:
    with rig(tiered=True) as made:
        context = made.context(KEYS[:2])
        assert made.walk(KEYS[:2], context) == ["RETRY", "MISS"]
        assert asked(made, KEYS) == set(KEYS[:2])
        context.set_offload_key_position(KEYS[2], 3 * TOKENS)
        made.manager.forget()  # as a later step would; the tiers have not been asked yet
        assert made.walk(KEYS[:3], context) == ["RETRY", "MISS"]
        assert asked(made, KEYS) == set(KEYS[:3])
        made.manager.on_request_finished(context)


def test_a_limited_load_asks_no_tier_for_more() -> None:
    with rig(tiered=True) as made:
        context = made.context(KEYS, max_load_tokens=2 * TOKENS)
        assert made.walk(KEYS[:2], context) == ["RETRY", "RETRY"]
        assert asked(made, KEYS) == set(KEYS[:2])
        made.manager.on_request_finished(context)


def test_groups_are_walked_apart() -> None:
    with rig(windows=(None, 2), tiered=True) as made:
        windowed = [key(number, 1) for number in range(4)]
        made.store([*KEYS[:2], windowed[0], windowed[3]])
        context = made.context([*KEYS, *windowed])
        # The end of a partial block: it has a position, and is no chunk of the walk.
        context.set_offload_key_position(key(5), 4 * TOKENS + 8)
        # What is ready is said: a miss in another group may leave vLLM with just that.
        assert made.walk(KEYS, context) == ["HIT", "HIT", "RETRY", "MISS"]
        # A window is walked from its end, and by vLLM as often as other groups make it shorter.
        for _ in range(2):
            assert made.walk(windowed[::-1], context) == ["HIT", "RETRY", "RETRY", "HIT"]
        assert asked(made, [*KEYS, *windowed]) == {*KEYS[2:], *windowed[1:3]}
        made.manager.on_request_finished(context)
