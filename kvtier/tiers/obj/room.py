# SPDX-License-Identifier: Apache-2.0
"""The object tier's limit: what the bucket holds below the prefix, and the oldest of it deleted.

Runs on the service's loop, as one task of the tier. A listing has a thousand objects a page and no
order by age, so it is gone through twice: once to learn from when on objects fit, once to delete
what is older. Memory is one counter for each minute of their ages, however many there are. Many
instances may do this at a time; what another one has deleted is gone, which is no error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from kvtier.tiers.obj.control import Control, Listed
from kvtier.tiers.obj.errors import Kind, StoreError

logger = logging.getLogger(__name__)

LIST_SECONDS = 600.0
"""From one look to the next; sooner when this instance has stored a part of the limit."""
LEAST_SECONDS = 5.0
PART = 0.02
"""So much of the limit, stored here since the last look, calls for another one."""


class Usage(msgspec.Struct, frozen=True):
    """What a look has found, after deletion."""

    stored_bytes: int
    chunks: int
    deleted: int


class Room:
    """Keeps the limit.

    Parameters
    ----------
    control : Control
    prefix : str
        Of all namespaces.
    capacity_bytes : int
    low_watermark : float
    on_deleted : callable
        Takes the chunks that were deleted.
    on_usage : callable
        Takes each `Usage`.
    on_error : callable
        Takes the kind of a failure; the next look tries again.
    """

    def __init__(
        self,
        control: Control,
        prefix: str,
        capacity_bytes: int,
        low_watermark: float,
        on_deleted: Callable[[Sequence[Listed]], None],
        on_usage: Callable[[Usage], None],
        on_error: Callable[[Kind], None],
    ) -> None:
        self._control = control
        self._prefix = prefix
        self._capacity_bytes = capacity_bytes
        self._low_bytes = int(low_watermark * capacity_bytes)
        self._on_deleted = on_deleted
        self._on_usage = on_usage
        self._on_error = on_error
        self._stored_bytes = 0
        self._wake = asyncio.Event()

    def stored(self, length: int) -> None:
        """This instance has stored so many bytes more."""
        self._stored_bytes += length
        if self._stored_bytes > PART * self._capacity_bytes:
            self._wake.set()

    async def keep(self) -> None:
        """Look again and again; ends by cancellation only."""
        while True:
            self._stored_bytes = 0
            self._wake.clear()
            try:
                self._on_usage(await self.look())
            except StoreError as exc:
                self._on_error(exc.kind)
                logger.warning("obj: the limit of %s is not kept: %s", self._prefix, exc)
            await asyncio.sleep(LEAST_SECONDS)
            try:
                async with asyncio.timeout(LIST_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def look(self) -> Usage:
        """Add up what is there, and delete the oldest if it is too much.

        Raises
        ------
        StoreError
        """
        by_minute: defaultdict[int, int] = defaultdict(int)
        stored_bytes = chunks = 0
        async for page in self._control.list(self._prefix):
            for one in page:
                if one.key is not None:
                    by_minute[int(one.modified // 60)] += one.size
                    stored_bytes += one.size
                    chunks += 1
        if stored_bytes <= self._capacity_bytes:
            return Usage(stored_bytes, chunks, 0)
        excess_bytes = stored_bytes - self._low_bytes
        first_kept = 0
        for minute in sorted(by_minute):
            first_kept = minute
            if by_minute[minute] >= excess_bytes:
                break
            excess_bytes -= by_minute[minute]
        # Of the last minute only as much as has to go.
        deleted = 0
        async for page in self._control.list(self._prefix):
            old: list[Listed] = []
            for one in page:
                minute = int(one.modified // 60)
                if one.key is None or minute > first_kept:
                    continue
                if minute == first_kept:
                    if excess_bytes <= 0:
                        continue
                    excess_bytes -= one.size
                old.append(one)
            if old:
                await self._control.delete([one.name for one in old])
                self._on_deleted(old)
                deleted += len(old)
                stored_bytes -= sum(one.size for one in old)
        return Usage(stored_bytes, chunks - deleted, deleted)
