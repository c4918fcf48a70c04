# SPDX-License-Identifier: Apache-2.0
"""Tells the owner what a tier of this instance alone may hold, as a filter over its keys.

Runs on the service's loop, as a task of the tier's lane. Owns nothing. Invariant: a key that was
stored before the first part of a filter was sent is in the filter, and so is what a hung call may
still store; for what is stored after that the owner adds it itself, when it sends it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

from kvtier._core.keyfilter import KeyFilter
from kvtier.runtime import messages as m
from kvtier.tiers.base import Tier
from kvtier.tiers.tasks import TaskSet

SPARE_KEYS = 1 << 16
"""Room for keys that are stored after a listing; as much as was listed, if that is more."""

PART_BYTES = 64 << 10
SLICE_KEYS = 4096
PAUSE_SECONDS = 0.001
"""Between two parts, so that a large filter does not crowd out answers."""


class Lister:
    """Sends filters of one tier's keys: at first, and when many have come since.

    Parameters
    ----------
    index : int
        Position of the tier in the configuration.
    tier : Tier
    tasks : TaskSet
        Of the lane; ends the listing with it.
    post : callable
        Takes the parts.
    """

    def __init__(
        self, index: int, tier: Tier, tasks: TaskSet, post: Callable[[m.Contents], None]
    ) -> None:
        self._index = index
        self._tier = tier
        self._tasks = tasks
        self._post = post
        self._listing: asyncio.Task[None] | None = None
        self._spare: int | None = None  # None: the tier does not tell
        self._added = 0
        self._hung: dict[asyncio.Future[Any], list[bytes]] = {}

    def start(self) -> None:
        """List the tier, which is open, beside everything else."""
        if self._listing is None or self._listing.done():
            self._added = 0  # now, so that one that fails is not tried again at every store
            self._listing = self._tasks.start(self._list(), f"list-{self._tier.name}")

    def stored(self, chunks: int) -> None:
        """So many more may be there now."""
        self._added += chunks
        if self._spare is not None and self._added > self._spare:
            self.start()

    def hangs(self, keys: list[bytes], call: asyncio.Future[Any]) -> None:
        """A store of these was given up, of which the owner has been told; it may yet end well."""
        self._hung[call] = keys
        call.add_done_callback(self._hung.pop)

    async def _list(self) -> None:
        keys = await self._tier.contents()
        if keys is None:
            self._spare = None
            return
        # No turn of the loop between the list and the message: what was stored in it would be in
        # neither side's books.
        self._added = 0
        keys = [*keys, *chain.from_iterable(self._hung.values())]
        self._spare = max(SPARE_KEYS, len(keys))
        room = len(keys) + self._spare
        self._post(m.Contents(self._index, room, 0, b"", final=False))
        whole = KeyFilter(room)
        for start in range(0, len(keys), SLICE_KEYS):
            whole.add(keys[start : start + SLICE_KEYS])
            await asyncio.sleep(0)
        for offset in range(0, whole.nbytes, PART_BYTES):
            bits = whole.read(offset, min(PART_BYTES, whole.nbytes - offset))
            final = offset + len(bits) == whole.nbytes
            self._post(m.Contents(self._index, room, offset, bits, final))
            if not final:
                await asyncio.sleep(PAUSE_SECONDS)
