# SPDX-License-Identifier: Apache-2.0
"""A tier that tells of many evictions while nobody calls it, as a janitor does.

For each file ``burst.<number>`` in its folder it emits a burst, then makes ``done.<number>``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from kvtier.obs.events import Event
from tests.runtime.gated import GatedTier

BURST_EVENTS = 20_000


class ChattyTier(GatedTier):
    """The gated tier with a janitor."""

    type: ClassVar[str] = "chatty"

    async def open(self) -> None:
        await super().open()
        self._janitor = asyncio.create_task(self._chat(), name="chatty")

    async def _chat(self) -> None:
        burst = 0
        while True:
            await asyncio.sleep(0.01)
            if not self._has(f"burst.{burst}"):
                continue
            for number in range(BURST_EVENTS):
                # Long ones: a burst is more than a socket takes before somebody reads it.
                self.env.emit(Event("removed", number.to_bytes(36, "big"), source="x" * 300))
            Path(self.options.folder, f"done.{burst}").touch()
            burst += 1

    async def aclose(self, deadline: float) -> None:
        self._janitor.cancel()
        await asyncio.wait({self._janitor})
        await super().aclose(deadline)
