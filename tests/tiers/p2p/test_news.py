# SPDX-License-Identifier: Apache-2.0
"""Whoever waits for a peer's chunks is told when they come, and when they will not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtier.errors import PeerLostError
from tests.tiers.p2p.rig import Host, Instance, instance, until

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


class Waiter:
    """A request that waits for chunks of a prefill."""

    def __init__(self, reader: Instance, peer: str) -> None:
        self.heard = 0
        self.reader = reader
        plain = reader.context(peer=peer, request="r", wait=20.0)
        self.context: Any = msgspec.structs.replace(plain, news=self.hear)

    def hear(self) -> None:
        self.heard += 1

    async def ask(self, keys: list[bytes]) -> str:
        return await self.reader.ask(keys, self.context)


async def test_chunks_that_come_and_a_request_that_ends() -> None:
    host = Host()
    keys = [host.put(number) for number in range(3)]
    later = {key: host.slots.pop(key) for key in keys[1:]}
    async with instance(host) as owner, instance() as reader:
        owner.tier.serve("r", ended=False)
        waiter = Waiter(reader, owner.address)
        assert await waiter.ask(keys) == "+??"
        assert waiter.heard == 0
        host.slots[keys[1]] = later[keys[1]]
        await until(lambda: waiter.heard == 1)
        assert await waiter.ask(keys[1:]) == "+?"
        owner.tier.serve("r", ended=True)
        await until(lambda: waiter.heard == 2)
        assert await waiter.ask(keys[2:]) == "-"


async def test_a_peer_that_ends_and_a_link_that_breaks() -> None:
    """Messages may go on when bytes do not."""
    host = Host()
    key = host.put(1)
    async with instance() as reader:
        async with instance(host) as owner:
            waiter = Waiter(reader, owner.address)
            assert await waiter.ask([b"\x01" * 36, key]) == "?+"
            for client in reader.tier._clients.values():
                link: Any = client._link
                link.abort()
            await until(lambda: waiter.heard == 1)
            with pytest.raises(PeerLostError, match="data connection broke"):
                await waiter.ask([b"\x01" * 36])
            # A session is made anew at once.
            assert await waiter.ask([b"\x01" * 36]) == "?"
        await until(lambda: waiter.heard == 2)
        with pytest.raises(PeerLostError, match="ended the session"):
            await waiter.ask([b"\x01" * 36])
