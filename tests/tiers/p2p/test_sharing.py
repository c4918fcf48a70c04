# SPDX-License-Identifier: Apache-2.0
"""What an owner tells of chunks that are awaited, over host memory that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.tiers.base import Slot
from kvtier.tiers.p2p import sharing
from kvtier.tiers.p2p.guests import Guests
from kvtier.tiers.p2p.sharing import Sharing
from kvtier.types import Presence, make_key

looped = pytest.mark.asyncio(loop_factories=["asyncio"])


class Host:
    """Chunks that are there."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()

    def presence(self, keys: Sequence[bytes]) -> bytes:
        return bytes(key in self.there for key in keys)

    def pin(self, key: bytes) -> Slot | None:
        raise NotImplementedError

    def unpin(self, items: Sequence[Slot]) -> None:
        raise NotImplementedError

    async def take_crcs(self, items: Sequence[Slot]) -> None:
        raise NotImplementedError


def key(number: int, group: int) -> bytes:
    return make_key(number.to_bytes(32, "big"), group)


@looped
async def test_chunks_that_do_not_come_hold_up_no_other_group() -> None:
    """Of a window or a recurrent state only the last chunks are ever written."""
    host: Any = Host()
    guests: Any = Guests(host, print)  # nobody has brought anything
    shared = Sharing(host, guests, 1 << 20)
    count = 2 * sharing.LOOKED_AT
    keys = dict(enumerate(key(i % count, i // count) for i in range(2 * count)))
    told: list[tuple[int, Presence]] = []
    came = asyncio.Event()

    def tell(positions: list[int], states: list[Presence]) -> None:
        told.extend(zip(positions, states, strict=True))
        came.set()

    shared.serve("r", ended=False)
    shared.watch(b"session", 1, keys, "r", 30.0, tell)
    try:
        host.there |= {key(i, 1) for i in range(count)}
        async with asyncio.timeout(5):
            while len(told) < count:
                came.clear()
                await came.wait()
        assert told == [(count + i, Presence.PRESENT) for i in range(count)]
        assert shared.watches == 1
    finally:
        shared.close()
