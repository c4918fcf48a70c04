# SPDX-License-Identifier: Apache-2.0
"""What the planner remembers of one request, from its first lookup to its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.types import Lookup, RequestContext

ASKED, GONE, LOADED = 1, 2, 3
"""Of a key that was not in host memory: nobody knows yet; a tier has it; not to be had; it came."""


class Request:
    """State of one request. Plain data; the planner changes it."""

    __slots__ = (
        "answer",
        "answer_until",
        "asked",
        "context",
        "counted",
        "counted_absent",
        "ended",
        "finds",
        "fresh",
        "held",
        "hits",
        "hold_until",
        "load_until",
        "number",
        "sources",
        "states",
        "status",
        "tiers",
        "used",
        "verified",
        "wait_until",
        "window_left",
    )

    def __init__(self, context: RequestContext, tiers: list[int], number: int) -> None:
        self.context = context
        self.number = number
        """Rises from request to request: the older one is served first."""
        self.tiers = tiers
        """Tiers it may load from, in order."""
        self.status: dict[bytes, int] = {}
        """Every key that was once not in host memory."""
        self.fresh: list[bytes] = []
        """Keys to ask the tiers about at the end of this step."""
        self.hits: list[bytes] = []
        """Keys answered HIT since the end of the last step."""
        self.held: dict[bytes, tuple[int, int]] = {}
        """Pinned until the request loads them, ends, or `hold_until`: slot and generation."""
        self.asked: Sequence[bytes] | None = None
        """Keys of the last batch of which some will come; None when there was news since."""
        self.states = b""
        """Their states in host memory then."""
        self.answer = (0, Lookup.RETRY)
        """What was said of them; the same as long as the states are."""
        self.answer_until = 0.0
        """Until then it may be said again without a look: everything it calls ready is held."""
        self.hold_until = 0.0
        self.wait_until: float | None = None
        """When its lookups become misses, unless there is news before. None: it never waited."""
        self.load_until = 0.0
        """When they do so in any case."""
        self.used: Collection[bytes] = ()
        """Keys it loaded or stored, in first-use order."""
        self.counted: set[bytes] = set()
        """Keys whose hit or miss in host memory is in the metrics already."""
        self.counted_absent = 0
        """Size of `status` when it was counted last."""
        self.verified: set[bytes] = set()
        """Keys whose bytes in host memory have been compared with their checksum for it."""
        self.ended = False
        """Finished: news of its finds only bring slots and chunks back."""
        self.finds: set[int] = set()
        self.sources: dict[bytes, int] = {}
        """Tier each promoted key came from."""
        self.window_left: dict[int, int] = {}
        """Keys of each windowed group that may still be asked in this step."""

    def use(self, keys: Sequence[bytes]) -> None:
        """Note keys that it loads or stores; their first use counts."""
        if not self.used:
            self.used = tuple(keys)  # mostly all that there is
            return
        if not isinstance(self.used, dict):
            self.used = dict.fromkeys(self.used)
        self.used.update(dict.fromkeys(keys))

    def news(self) -> None:
        """Something has changed for it: its next lookup looks again."""
        self.asked = None
        self.answer_until = 0.0

    def forget(self) -> None:
        """A reset: nothing of what it knows of chunks is true any more."""
        self.news()
        self.status.clear()
        self.counted_absent = 0
        self.fresh.clear()
        self.hits.clear()
        self.finds.clear()
        self.used = ()
        self.sources.clear()
        self.verified.clear()
