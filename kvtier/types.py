# SPDX-License-Identifier: Apache-2.0
"""Words that every part of kvtier shares: keys, lookups, outcomes, geometry.

Owns no state. Importable without torch and vLLM.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from kvtier._core.slots import MAX_SLOTS

MAX_KEY_BYTES = 40
"""Longest key: a 36-byte content hash and the group index."""

GROUP_BYTES = 4
"""The group index stands at the end of each key, big-endian, as in vLLM's ``OffloadKey``."""


def make_key(content_hash: bytes, group: int = 0) -> bytes:
    """Key of one chunk: its content hash followed by the index of its KV cache group.

    Parameters
    ----------
    content_hash : bytes
        1 to 36 bytes that name the tokens up to the end of the chunk.
    group : int
        KV cache group, 0 to 2**32 - 1.

    Raises
    ------
    ValueError
        If the hash is empty or longer than 36 bytes.
    """
    if not 1 <= len(content_hash) <= MAX_KEY_BYTES - GROUP_BYTES:
        raise ValueError(
            f"a content hash has 1 to {MAX_KEY_BYTES - GROUP_BYTES} bytes, got {len(content_hash)}"
        )
    return content_hash + group.to_bytes(GROUP_BYTES, "big")


def key_group(key: bytes) -> int:
    """KV cache group that `key` belongs to."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def key_hash(key: bytes) -> bytes:
    """Content hash part of `key`."""
    return key[:-GROUP_BYTES]


class Lookup(enum.IntEnum):
    """Answer to "is this chunk there?" on the scheduler's thread."""

    MISS = 0
    """In no tier, or not obtainable in time: recompute it."""
    HIT = 1
    """In host memory and verified: it can be loaded now."""
    HIT_PENDING = 2
    """It exists, and bytes are on their way into host memory."""
    RETRY = 3
    """Nobody knows yet; ask again in a later step."""


class Presence(enum.IntEnum):
    """Answer of one tier to "do you have this chunk?"."""

    ABSENT = 0
    PRESENT = 1
    PENDING = 2
    """Being written there; worth waiting for, up to the deadline."""


class Outcome(enum.IntEnum):
    """How one chunk of a job ended; also the ``cause`` label of the failure metrics."""

    DONE = 0
    EXISTS = 1
    """Store: the tier has it already."""
    MISSING = 2
    """Load: the tier does not have it. A miss, not a failure."""
    DROPPED = 3
    """Store: not admitted (bound, capacity, open breaker, filter)."""
    CANCELLED = 4
    TIMEOUT = 5
    CORRUPT = 6
    """Bytes or metadata differ from what was stored."""
    FULL = 7
    """ENOSPC, EDQUOT, capacity without a victim."""
    READ_ONLY = 8
    """EROFS."""
    DENIED = 9
    """EACCES, EPERM, 403."""
    NO_HANDLES = 10
    """EMFILE, ENFILE."""
    STALE = 11
    """ESTALE."""
    IO = 12
    """EIO and every other error of the medium."""
    LOST = 13
    """The tier, its peer or the service is gone."""
    INTERNAL = 14
    """A bug, in kvtier or in an out-of-tree tier."""

    @property
    def ok(self) -> bool:
        """Whether the chunk is now where it should be."""
        return self <= Outcome.EXISTS

    @property
    def failed(self) -> bool:
        """Whether something broke (a miss, a drop and a cancellation did not)."""
        return self >= Outcome.TIMEOUT


class PageGeometry(msgspec.Struct, frozen=True):
    """One layer's page inside a block of a chunk, in the canonical layout."""

    layer: str
    offset_bytes: int
    """Start of the page, relative to the start of its block inside the chunk."""
    size_bytes: int


class GroupGeometry(msgspec.Struct, frozen=True):
    """One KV cache group: what a chunk of it holds.

    A chunk is block-major: block 0 with the pages of all its layers, then block 1, and so on.
    """

    block_tokens: int
    """Tokens that one block covers, over all ranks."""
    blocks_per_chunk: int
    block_bytes: int
    """Canonical bytes of one block: the sum over its pages."""
    pages: tuple[PageGeometry, ...] = ()
    window_chunks: int | None = None
    """Chunks that a sliding window or a recurrent state needs; None is full attention."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.block_bytes * self.blocks_per_chunk


class Geometry(msgspec.Struct, frozen=True):
    """Shape of a region: slots of one size for the chunks of all groups."""

    groups: tuple[GroupGeometry, ...]
    num_slots: int
    slot_bytes: int
    """Distance between two slots, a multiple of 4096, at least the largest payload."""

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Chunk bytes by group."""
        return tuple(group.payload_bytes for group in self.groups)


PAGE_BYTES = 4096


def make_geometry(groups: Sequence[GroupGeometry], capacity_bytes: int) -> Geometry:
    """Geometry of a region of `capacity_bytes` for chunks of `groups`.

    Raises
    ------
    ValueError
        If not even one slot fits, or more than a region can have; the message names the bound.
    """
    largest = max(group.payload_bytes for group in groups)
    slot_bytes = -(-largest // PAGE_BYTES) * PAGE_BYTES
    num_slots = capacity_bytes // slot_bytes
    if num_slots < 1:
        raise ValueError(
            f"host memory of {capacity_bytes} bytes holds no chunk: "
            f"one takes {slot_bytes} bytes, give at least that much"
        )
    if num_slots > MAX_SLOTS:
        raise ValueError(
            f"host memory of {capacity_bytes} bytes holds {num_slots} chunks of {slot_bytes}, and "
            f"a region has at most {MAX_SLOTS}: give at most {MAX_SLOTS * slot_bytes} bytes"
        )
    return Geometry(groups=tuple(groups), num_slots=num_slots, slot_bytes=slot_bytes)


class TierMatch(msgspec.Struct, frozen=True):
    """One alternative of a request's tier filter; None matches everything."""

    medium: str | None = None
    locality: str | None = None


class RequestContext(msgspec.Struct):
    """What the engine knows of one request while it lives."""

    request_id: str
    load_tiers: tuple[TierMatch, ...] | None = None
    """Tiers this request may load from; None allows all, () only host memory."""
    peer: str | None = None
    """``host:port`` of the instance to pull from."""
    positions: dict[bytes, int] = {}
    """End position in tokens of each key, where the caller knows it."""
