# SPDX-License-Identifier: Apache-2.0
"""Leases that are asked for together with the question what there is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvtier.tiers.base import TierContext
from kvtier.tiers.p2p import reader as reader_module
from kvtier.tiers.p2p.client import PeerClient
from kvtier.types import Outcome
from tests.tiers.p2p.rig import SIZE, Instance, instance, until

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("transport")]

FIRST = (1 << 20) // SIZE
"""Chunks of a first load."""


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of each lease that was asked for."""
    calls: list[int] = []
    lend = PeerClient.lend

    async def counted(self: PeerClient, keys: Sequence[bytes], *more: Any) -> Any:
        calls.append(len(keys))
        return await lend(self, keys, *more)

    monkeypatch.setattr(PeerClient, "lend", counted)
    return calls


def loading(reader: Instance, **more: Any) -> TierContext:
    return msgspec.structs.replace(reader.context(**more), loads=True)


async def test_the_first_load_has_its_lease_already(lent: list[int]) -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(FIRST + 4)]
        assert await reader.ask(keys, loading(reader)) == "+" * (FIRST + 4)
        assert await reader.load(keys[:FIRST]) == [Outcome.DONE] * FIRST
        assert lent == [FIRST]
        assert await reader.load(keys[FIRST:]) == [Outcome.DONE] * 4
        assert lent == [FIRST, 4]
        await until(lambda: owner.host.pinned == 0)


async def test_a_load_of_fewer_chunks_takes_it_too(lent: list[int]) -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(8)]
        await reader.ask(keys, loading(reader))
        assert await reader.load(keys[:3]) == [Outcome.DONE] * 3
        assert lent == [8]
        await until(lambda: owner.host.pinned == 0)


@pytest.mark.parametrize("what", ["others", "gone"])
async def test_a_lease_of_other_chunks_is_given_back(lent: list[int], what: str) -> None:
    """The load is for others, or some were not there any more: it makes its own lease."""
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(4)]
        if what == "gone":
            absent = owner.host.slots.pop(keys[2])
            await reader.ask(keys, loading(reader))
            owner.host.slots[keys[2]] = absent
        else:
            await reader.ask(keys, loading(reader))
            del keys[1]
        assert await reader.load(keys) == [Outcome.DONE] * len(keys)
        assert lent == [4, len(keys)]
        await until(lambda: owner.host.pinned == 0)


async def test_a_lease_of_a_session_that_has_ended_is_not_used(lent: list[int]) -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(4)]
        await reader.ask(keys, loading(reader))
        await until(lambda: owner.host.pinned == 4)
        (client,) = reader.tier._clients.values()
        assert client._link is not None
        await client.fail(client._link, "as told")
        assert await reader.load(keys) == [Outcome.DONE] * 4
        assert lent == [4, 4]
        await until(lambda: owner.host.pinned == 0)


async def test_a_lease_that_nobody_comes_for_goes_back(
    monkeypatch: pytest.MonkeyPatch, lent: list[int]
) -> None:
    monkeypatch.setattr(reader_module, "AHEAD_SECONDS", 0.1)
    async with instance(lease_seconds=30.0) as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(4)]
        await reader.ask(keys, loading(reader))
        await until(lambda: owner.host.pinned == 4)
        await until(lambda: owner.host.pinned == 0)
        assert lent == [4]
        # Nor one that comes when nobody waits for it any more.
        owner.host.delay_seconds = 1.0
        await reader.ask(keys, loading(reader))
        await until(lambda: owner.host.pinned == 4)
        await until(lambda: owner.host.pinned == 0)
        assert owner.told().get(("kvtier_peer_refused_total", "lease")) is None


async def test_a_load_that_is_given_up_gives_it_back(lent: list[int]) -> None:
    async with instance(lease_seconds=30.0) as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(4)]
        owner.host.delay_seconds = 0.5
        await reader.ask(keys, loading(reader))
        load = asyncio.create_task(reader.load(keys), name="load")
        await until(lambda: owner.host.pinned == 4)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await until(lambda: owner.host.pinned == 0)
        assert lent == [4]


async def test_where_several_could_have_them_none_is_asked_ahead(lent: list[int]) -> None:
    async with instance() as one, instance() as other:
        keys = [(one if number % 2 else other).host.put(number) for number in range(4)]
        async with instance(peers=(one.address, other.address)) as reader:
            assert await reader.ask(keys, loading(reader)) == "++++"
            assert await reader.ask(keys, loading(reader, windowed=True)) == "++++"
            assert lent == []
