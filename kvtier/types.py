# SPDX-License-Identifier: Apache-2.0
"""Words that every part of kvtier shares: keys, lookups, outcomes, geometry.

Owns no state. Importable without torch and vLLM.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

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
    """Shape of a region: numbered slots of one size, and how many of them a chunk takes.

    A chunk of a group takes ``widths[group]`` neighbouring slots and is named by the first one, so
    an address follows from a number alone: ``number * slot_bytes``. Where that is 1 for all groups
    there is nothing else to know. Otherwise the region is cut into slabs of `slab_slots` slots,
    each of which holds chunks of one width at a time, side by side from its start.
    """

    groups: tuple[GroupGeometry, ...]
    num_slots: int
    slot_bytes: int
    """Distance between two slots, a multiple of 4096."""
    slab_slots: int = 1
    """Slots of a slab, at least the largest width; 1: every chunk fits one slot."""

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Chunk bytes by group."""
        return tuple(group.payload_bytes for group in self.groups)

    @property
    def widths(self) -> tuple[int, ...]:
        """Slots that a chunk takes, by group. Groups of equal width are one size class."""
        return tuple(-(-payload // self.slot_bytes) for payload in self.payload_bytes)

    @property
    def size_groups(self) -> tuple[int, ...]:
        """The first group of each size class."""
        return tuple(self.widths.index(width) for width in sorted(set(self.widths)))

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab; no chunk crosses the end of one."""
        return self.slab_slots * self.slot_bytes

    @property
    def num_slabs(self) -> int:
        """Slabs of the region."""
        return self.num_slots // self.slab_slots

    def slots_in(self, size: int) -> int:
        """Slots of the whole slabs in the first `size` bytes."""
        return size // self.slab_bytes * self.slab_slots

    @property
    def stride_bytes(self) -> tuple[int, ...]:
        """Distance between two chunks in a slab, by group."""
        return tuple(width * self.slot_bytes for width in self.widths)

    @property
    def chunk_bytes(self) -> tuple[float, ...]:
        """Memory that a chunk costs, by group: its stride and its share of the end of a slab that
        is too short for one more."""
        return tuple(self.slab_bytes / (self.slab_slots // width) for width in self.widths)

    def area(self, group: int, base: int) -> tuple[int, int, int, int]:
        """Where chunks of `group` may lie, with slot 0 at `base`: that address, the bytes of a
        slab, the number of slabs, and the bytes between two chunks."""
        return base, self.slab_bytes, self.num_slabs, self.stride_bytes[group]

    @property
    def padding_ratio(self) -> tuple[float, ...]:
        """By group: the part of its memory that its chunks leave unused."""
        return tuple(
            1 - payload / cost
            for payload, cost in zip(self.payload_bytes, self.chunk_bytes, strict=True)
        )


PAGE_BYTES = 4096

MAX_PADDING = 0.15
"""Part of a group's memory that may be padding before another division is looked for."""

METADATA_BYTES = 160
"""What a slot costs besides its payload, at most."""

_PARTS = 16
"""Slots of a chunk, and widest chunks of a slab, that are tried at most."""

_SLABS_A_CLASS = 4
"""A slab of several widest chunks is chosen only if a region has so many for each size class."""


def make_geometry(
    groups: Sequence[GroupGeometry], capacity_bytes: int, *, one_size: bool = False
) -> Geometry:
    """Geometry of a region of `capacity_bytes` for chunks of `groups`.

    One slot a chunk where that wastes no more than ``MAX_PADDING`` of any group's memory. Otherwise
    the division with the fewest size classes that does not; among several the one that loses least
    to padding, metadata and slabs in use by one class only.

    Parameters
    ----------
    groups : sequence of GroupGeometry
    capacity_bytes : int
    one_size : bool
        One slot a chunk in any case.

    Raises
    ------
    ValueError
        If not even one slot fits, or too many do; the message names the bound.
    """
    groups = tuple(groups)
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
            f"host memory of {capacity_bytes} bytes would be {num_slots} chunks: there may be "
            f"{MAX_SLOTS}, give at most {MAX_SLOTS * slot_bytes} bytes, or larger chunks"
        )
    plain = Geometry(groups, num_slots, slot_bytes)
    if one_size or max(plain.padding_ratio) <= MAX_PADDING:
        return plain
    return min((plain, *_divisions(groups, capacity_bytes)), key=_losses(capacity_bytes))


def _divisions(groups: tuple[GroupGeometry, ...], capacity_bytes: int) -> Iterator[Geometry]:
    """Ways to cut a region into slabs."""
    payloads = {group.payload_bytes for group in groups}
    sizes = {-(-p // (parts * PAGE_BYTES)) for p in payloads for parts in range(1, _PARTS + 1)}
    for slot_bytes in sorted((pages * PAGE_BYTES for pages in sizes), reverse=True):
        widths = {-(-payload // slot_bytes) for payload in payloads}
        for chunks in range(1, _PARTS + 1):
            slab_slots = chunks * max(widths)
            num_slabs = capacity_bytes // (slab_slots * slot_bytes)
            least = 1 if chunks == 1 else _SLABS_A_CLASS * len(widths)
            if slab_slots > 1 and least <= num_slabs <= MAX_SLOTS // slab_slots:
                yield Geometry(groups, num_slabs * slab_slots, slot_bytes, slab_slots)


def _losses(capacity_bytes: int) -> Callable[[Geometry], tuple[int, float]]:
    """What to compare divisions of `capacity_bytes` by."""

    def losses(geometry: Geometry) -> tuple[int, float]:
        padding = max(geometry.padding_ratio)
        classes = len(set(geometry.widths))
        # A share of the region each: padding, metadata, and a slab of each class with room in it.
        lost = padding + METADATA_BYTES / geometry.slot_bytes
        if geometry.slab_slots > 1:
            lost += classes * geometry.slab_bytes / capacity_bytes
        return (classes if padding <= MAX_PADDING else len(geometry.groups) + 1), lost

    return losses


class TierMatch(msgspec.Struct, frozen=True):
    """One alternative of a request's tier filter; None matches everything, and a tier whose
    locality nobody has named matches every locality."""

    medium: str | None = None
    locality: str | None = None


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """The instance that a request is to pull from, and what for."""

    address: str
    """``host:port`` where its peer tier listens."""
    request: str = ""
    """What both sides call the request."""
    wait_seconds: float = 0.0
    """How long to wait for chunks that it is still to write for the request (a prefill instance);
    0: only what it has, or is just writing, is of interest."""


class RequestContext(msgspec.Struct):
    """What the engine knows of one request while it lives."""

    request_id: str
    load_tiers: tuple[TierMatch, ...] | None = None
    """Tiers this request may load from; None allows all, () only host memory."""
    peer: Peer | None = None
    """The instance to pull from."""
    serves: str = ""
    """What a peer calls the request whose chunks this one writes; empty: nobody waits for them."""
    positions: dict[bytes, int] = {}
    """End position in tokens of each key, where the caller knows it."""
