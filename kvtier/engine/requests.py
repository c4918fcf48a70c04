# SPDX-License-Identifier: Apache-2.0
"""What the planner remembers of one request, from its first lookup to its end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvtier._core.chunks import RequestChunks
from kvtier._core.index import Index
from kvtier.types import Lookup, RequestContext

USED_KEYS = 4096
"""Keys that a request may use before they are looked through for the first time."""


class Request:
    """State of one request. Plain data; the planner changes it."""

    __slots__ = (
        "answer",
        "answer_until",
        "answered",
        "chunks",
        "context",
        "ended",
        "finds",
        "hits",
        "hold_until",
        "load_until",
        "more_used",
        "number",
        "sources",
        "tiers",
        "used",
        "verified",
        "wait_until",
        "window_left",
    )

    def __init__(
        self, context: RequestContext, tiers: list[int], number: int, index: Index
    ) -> None:
        self.context = context
        self.number = number
        """Rises from request to request: the older one is served first."""
        self.tiers = tiers
        """Tiers it may load from, in order."""
        self.chunks = RequestChunks(index)
        """What is known of every key that it asked for."""
        self.hits: list[bytes] = []
        """Keys answered HIT one by one since the end of the last step."""
        self.answered = False
        """Whether `answer` was said of the batch asked last, some of which will come, and there was
        no news since."""
        self.answer = (0, Lookup.RETRY)
        """The same as long as the states in host memory are."""
        self.answer_until = 0.0
        """Until then it may be said again without a look: everything it calls ready is held."""
        self.hold_until = 0.0
        self.wait_until: float | None = None
        """When its lookups become misses, unless there is news before. None: it never waited."""
        self.load_until = 0.0
        """When they do so in any case."""
        self.used: list[Sequence[bytes]] = []
        """Keys it loaded, stored or touched, call by call."""
        self.more_used = USED_KEYS
        """So many more keys until those that stand twice are looked for."""
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
        self.used.append(tuple(keys))
        self.more_used -= len(keys)
        if self.more_used < 0:
            # A request that uses the same keys again and again stays as small as they are.
            unique = tuple(dict.fromkeys(chain.from_iterable(self.used)))
            self.used = [unique]
            self.more_used = len(unique) + USED_KEYS

    def news(self) -> None:
        """Something has changed for it: its next lookup looks again."""
        self.answered = False
        self.answer_until = 0.0

    def forget(self) -> None:
        """A reset: nothing of what it knows of chunks is true any more."""
        self.news()
        self.chunks.clear()
        self.hits.clear()
        self.finds.clear()
        self.used = []
        self.more_used = USED_KEYS
        self.sources.clear()
        self.verified.clear()
