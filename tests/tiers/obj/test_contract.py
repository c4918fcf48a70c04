# SPDX-License-Identifier: Apache-2.0
"""What every tier must do, against real S3 servers; aiobotocore is the oracle of the bytes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.obs.events import Event
from kvtier.testing.contract import Arena, TierContract, chunk, context, make_env
from kvtier.tiers.base import Tier, TierEnv
from kvtier.tiers.obj import room as room_module
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.room import Room, Usage
from kvtier.tiers.obj.tier import ObjTier
from kvtier.types import Outcome, Presence
from tests.tiers.obj.servers import Server, tier_options


def client_of(tier: ObjTier) -> Any:
    """aiobotocore's, with which the tier lists."""
    assert tier._control is not None
    return tier._control._client


class TestObjContract(TierContract):
    @pytest.fixture(autouse=True)
    def _bucket(self, server: Server, bucket: str) -> None:
        self.options = tier_options(server, bucket)

    def definitions(self) -> Sequence[Any]:
        return METRICS

    def make_tier(self, env: TierEnv, tmp_path: Path) -> ObjTier:
        return ObjTier("obj", self.options, env)

    async def raw_get(self, tier: Tier, key: bytes) -> bytes | None:
        assert isinstance(tier, ObjTier)
        client = client_of(tier)
        try:
            found = await client.get_object(Bucket=tier.options.bucket, Key=tier.name_of(key))
        except client.exceptions.NoSuchKey:
            return None
        async with found["Body"] as stream:
            body: bytes = await stream.read()
        # What stands in the metadata belongs to the object as well.
        return body + found["Metadata"]["kvtier"].encode()

    async def raw_put(self, tier: Tier, key: bytes, data: bytes) -> None:
        assert isinstance(tier, ObjTier)
        match = re.search(rb"1-[0-9a-f]+-[0-9]+-[0-9a-f]{7}.\Z", data, re.DOTALL)
        metadata = {"kvtier": match[0].decode("latin-1")} if match else {}
        await client_of(tier).put_object(
            Bucket=tier.options.bucket,
            Key=tier.name_of(key),
            Body=data[: match.start()] if match else data,
            Metadata=metadata,
        )


@pytest.mark.asyncio
async def test_the_oldest_go_when_the_limit_is_reached(server: Server, bucket: str) -> None:
    """Of all namespaces below the prefix; what others put there stays."""
    size, deleted = 100_000, []
    tier = ObjTier(
        "obj",
        tier_options(server, bucket, capacity_bytes=10 * size, low_watermark=0.5),
        make_env(sizes=[size], definitions=METRICS),
    )
    await tier.open()
    try:
        arena = Arena(32, 102_400)
        chunks = [chunk(number, 0, size) for number in range(12)]
        slots = [arena.slot(i, key, size, data) for i, (key, data) in enumerate(chunks)]
        assert set(await tier.store(slots, context())) == {Outcome.DONE}
        client = client_of(tier)
        await client.put_object(Bucket=bucket, Key="kvtier/foreign", Body=bytes(9 * size))
        assert tier._control is not None
        room = Room(
            tier._control,
            "kvtier/",
            10 * size,
            0.5,
            lambda objects: deleted.extend(objects),
            lambda usage: None,
            lambda kind: None,
        )
        assert await room.look() == Usage(5 * size, 5, 7)
        assert len(deleted) == 7
        assert {one.size for one in deleted} == {size}
        assert await room.look() == Usage(5 * size, 5, 0)
        left = await client.list_objects_v2(Bucket=bucket)
        names = {one["Key"] for one in left["Contents"]}
        assert len(names) == 5 + 2  # with the foreign one and namespace.json
        assert not names & {one.name for one in deleted}
    finally:
        await tier.aclose(time.monotonic() + 5)


@pytest.mark.asyncio
async def test_a_full_bucket_is_emptied_while_it_is_written(
    server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "LEAST_SECONDS", 0.01)
    size = 100_000
    events: list[Event] = []
    tier = ObjTier(
        "obj",
        tier_options(server, bucket, capacity_bytes=10 * size, low_watermark=0.5),
        make_env(sizes=[size], definitions=METRICS, events=events),
    )
    await tier.open()
    try:
        arena = Arena(1, 102_400)
        chunks = [chunk(number, 0, size) for number in range(30)]
        for key, data in chunks:
            await tier.store([arena.slot(0, key, size, data)], context())
        until = time.monotonic() + 20
        keys = [key for key, _ in chunks]
        while (await tier.exists(keys, context())).count(Presence.PRESENT) > 10:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        gone = {event.key for event in events if event.operation == "removed"}
        assert len(gone) >= 20
        assert gone < set(keys)
    finally:
        await tier.aclose(time.monotonic() + 5)
