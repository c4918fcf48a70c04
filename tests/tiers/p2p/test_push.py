# SPDX-License-Identifier: Apache-2.0
"""Chunks pushed to peers that have room: taken, found again, given up when the room is wanted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtier.testing.contract import chunk
from kvtier.tiers.p2p.guests import Guests
from kvtier.types import Outcome
from tests.tiers.p2p.rig import SIZE, Host, Instance, free_port, instance, until

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("transport")]


def key(number: int) -> bytes:
    return chunk(number, 0, SIZE)[0]


async def push(giver: Instance, *numbers: int) -> list[Outcome]:
    """Push chunks of the giver's host memory, as a cascade does."""
    for number in numbers:
        if key(number) not in giver.host.slots:
            giver.host.put(number)
    items = [giver.host.pin(key(number)) for number in numbers]
    try:
        return await giver.tier.store([item for item in items if item], giver.context())
    finally:
        giver.host.unpin([item for item in items if item])


async def test_pushed_chunks_are_taken_and_found_by_all() -> None:
    async with instance() as taker, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 10)
        assert await push(giver, 1, 2, 3) == [Outcome.DONE] * 3
        assert await push(giver, 2, 4) == [Outcome.EXISTS, Outcome.DONE]
        for number in (1, 2, 3, 4):
            giver.host.reuse(key(number), bytes(SIZE))
        keys = [key(number) for number in (1, 2, 3, 4)]
        # By the one that pushed them, by a third, and by the one that has them.
        assert await giver.ask(keys) == "++++"
        assert await giver.load(keys) == [Outcome.DONE] * 4
        async with instance(peers=(taker.address,)) as third:
            assert await third.ask(keys) == "++++"
            assert await third.load(keys) == [Outcome.DONE] * 4
        assert await taker.ask([*keys, key(5)]) == "++++-"
        assert await taker.load(keys) == [Outcome.DONE] * 4
        assert taker.tier._guests.chunks == 4


async def test_without_room_nothing_is_pushed() -> None:
    async with instance() as taker, instance(peers=(taker.address,)) as giver:
        assert await push(giver, 1, 2) == [Outcome.DROPPED] * 2
        taker.host.lend(taker.tier, 1)
        await until_room(giver, 1)
        assert await push(giver, 1, 2) == [Outcome.DONE, Outcome.DROPPED]


async def until_room(giver: Instance, room: int) -> None:
    """Until the heartbeat has told it."""
    client = next(iter(giver.tier._clients.values()))
    await until(lambda: client.room == room)


async def test_the_oldest_go_for_new_ones() -> None:
    async with instance() as taker, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 3)
        assert await push(giver, 1, 2, 3) == [Outcome.DONE] * 3
        assert await taker.load([key(1)]) == [Outcome.DONE]  # used again
        assert await push(giver, 4) == [Outcome.DONE]
        assert await taker.ask([key(n) for n in (1, 2, 3, 4)], taker.context(windowed=True)) == (
            "+-++"
        )


async def test_the_room_goes_to_the_peer_that_has_most() -> None:
    async with instance() as one, instance() as other:
        one.host.lend(one.tier, 2)
        other.host.lend(other.tier, 8)
        peers = (f"127.0.0.1:{free_port()}", one.address, other.address)
        async with instance(peers=peers, connect_seconds=0.3) as giver:
            assert await push(giver, 1, 2) == [Outcome.DONE] * 2
            assert (one.tier._guests.chunks, other.tier._guests.chunks) == (0, 2)


async def test_slots_go_back_when_they_are_wanted() -> None:
    async with instance() as taker, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 8)
        assert await push(giver, 1, 2, 3, 4) == [Outcome.DONE] * 4
        taker.tier.reclaim(5)
        assert len(taker.host.lent) == 3
        assert taker.tier._guests.chunks == 3
        taker.tier.reclaim(100)
        assert not taker.host.lent
        assert await taker.ask([key(4)]) == "-"
        # Whatever comes goes back at once, until all that was wanted has.
        taker.host.lend(taker.tier, 4)
        assert not taker.host.lent
        assert await push(giver, 5) == [Outcome.DROPPED]


async def test_a_chunk_that_is_read_goes_back_when_it_has_been() -> None:
    async with instance() as taker, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 2)
        assert await push(giver, 1) == [Outcome.DONE]
        guests = taker.tier._guests
        item = guests.pin(key(1))
        guests.reclaim(2)
        assert len(taker.host.lent) == 1
        guests.unpin([item])
        assert not taker.host.lent


async def test_bytes_that_changed_under_way_are_not_taken() -> None:
    async with instance() as taker, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 4)
        giver.host.put(1, crc=12345)
        assert await push(giver, 1, 2) == [Outcome.DROPPED, Outcome.DONE]
        assert taker.tier._guests.slots == 4
        assert await taker.ask([key(1), key(2)], taker.context(windowed=True)) == "-+"


async def test_who_pushes_is_to_be_found_where_it_says() -> None:
    """A peer cannot have this instance ask somebody else."""
    async with instance() as taker, instance() as victim, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 4)
        there = victim.host.put(1)
        client = giver.tier._client(giver.tier._static[0])
        outcomes = await client.push(victim.address, [there], giver.context().deadline)
        assert outcomes == [Outcome.DROPPED]
        assert taker.tier._guests.chunks == 0
        assert victim.host.pinned == 0
        for nonsense in ("", "nobody", "0.0.0.0:1", "[::1", "a b:1", "x" * 300):
            outcomes = await client.push(nonsense, [there], giver.context(20.0).deadline)
            assert outcomes == [Outcome.DROPPED]


async def test_own_loads_go_first() -> None:
    async with instance() as taker, instance() as third, instance(peers=(taker.address,)) as giver:
        taker.host.lend(taker.tier, 4)
        there = third.host.put(9)
        third.host.delay_seconds = 0.3
        ctx = taker.context(peer=third.address)
        assert await taker.ask([there], ctx) == "+"
        load = asyncio.create_task(taker.load([there], ctx), name="load")
        await asyncio.sleep(0.05)
        pushed = asyncio.create_task(push(giver, 1), name="push")
        done, _ = await asyncio.wait({load, pushed}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {load}
        assert await load == [Outcome.DONE]
        assert await pushed == [Outcome.DONE]


async def test_a_giver_that_goes_away_leaves_nothing_half_taken() -> None:
    async with instance() as taker:
        taker.host.lend(taker.tier, 8)
        async with instance(peers=(taker.address,)) as giver:
            giver.host.delay_seconds = 0.2
            pushed = asyncio.create_task(push(giver, 1, 2, 3), name="push")
            await asyncio.sleep(0.1)
        await asyncio.gather(pushed, return_exceptions=True)
        await until(lambda: not taker.tier._taker.is_busy)
        assert taker.tier._guests.chunks == 0
        assert taker.tier._guests.slots == 8


async def test_options_that_say_no() -> None:
    async with instance(push=False, peers=("127.0.0.1:1",)) as one:
        assert type(one.tier).takes(one.tier.options).value == "none"
    async with instance(peers=("127.0.0.1:1",)) as one:
        assert type(one.tier).takes(one.tier.options).value == "pressed"
    async with instance(guest_ratio=0.0) as one:
        assert type(one.tier).takes(one.tier.options).value == "none"
        assert type(one.tier).hosts(one.tier.options) == 0.0


async def test_guests_by_themselves() -> None:
    host = Host()
    gone: list[Any] = []
    guests = Guests(host, gone.append)
    host.lent = {0, 1, 2}
    guests.add([(0, 1), (1, 1), (2, 1)])
    items = guests.reserve([key(n) for n in range(5)])
    assert [item.key for item in items] == [key(n) for n in range(3)]
    assert guests.reserve([key(0), key(9)]) == []
    assert guests.is_coming(key(0))
    guests.commit(items[:2])
    guests.abort(items[2:])
    assert (guests.chunks, guests.slots, guests.room) == (2, 3, 3)
    pinned = guests.pin(key(0))
    guests.pin(key(0))
    guests.forget([key(0), key(1), key(77)])
    assert key(0) in guests  # it is being read
    assert key(1) not in guests
    guests.close()
    assert host.lent == {0}
    guests.unpin([pinned])
    assert host.lent == {0}
    guests.unpin([pinned])
    assert not host.lent
    assert [slot.key for slot in gone] == [key(1)]
