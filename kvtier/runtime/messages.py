# SPDX-License-Identifier: Apache-2.0
"""What owner and service say to each other: frozen msgspec structs, never bytes of chunks.

The thread carrier passes the objects, the process carrier their msgpack form; both mean the same.
Times are absolute on ``CLOCK_MONOTONIC``, which all processes of one host share. Numbers that there
is one of for each chunk travel as the memory of an array: lists of a thousand integers would cost
the owner more than all it does with them. Pins and loans travel with the message that names them:

- ``Find`` and ``Lend`` hand WRITING slots to the service, every one of which comes back in exactly
  one ``Found`` (loaded, unused or failed) or ``Returned`` (late, after a hung call has ended).
- ``Cascade`` hands one service pin a chunk to the service, which gives it back in the slot's word
  by itself; ``Stored`` only tells. For chunks put off it hands over none: the service takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.types import Peer

Bytes = bytes

Numbers = bytes
"""Slots or positions, as int64 of this host's byte order."""

Words = bytes
"""Generations or checksums, as uint32 of this host's byte order."""


def packed(numbers: Sequence[int]) -> Numbers:
    """What `numbers` are as a field."""
    return np.array(numbers, dtype=np.int64).tobytes()


def packed_words(words: Sequence[int]) -> Words:
    """What `words` are as a field."""
    return np.array(words, dtype=np.uint32).tobytes()


def numbers(field: Numbers) -> npt.NDArray[np.int64]:
    """A field, read only, without a copy."""
    return np.frombuffer(field, dtype=np.int64)


def words(field: Words) -> npt.NDArray[np.uint32]:
    """A field, read only, without a copy."""
    return np.frombuffer(field, dtype=np.uint32)


class Find(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where are these keys, and load them into the slots lent."""

    job: int
    request_id: str
    keys: list[Bytes]
    windowed: bool
    tiers: list[int]
    """Tiers to ask, in order."""
    slots: Numbers
    generations: Words
    deadline: float
    peer: Peer | None = None


class Lend(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """More slots for a ``Find`` under way."""

    job: int
    slots: Numbers
    generations: Words


class NoMoreSlots(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No further slots come for this ``Find``: load what there is room for and end."""

    job: int


class Cascade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy these pinned chunks to these tiers, all at the same time."""

    job: int
    request_id: str
    keys: list[Bytes]
    slots: Numbers
    generations: Words
    tiers: list[int]
    deadline: float
    portion_bytes: int = 0
    """0: the chunks are pinned. Else they are not, and this is for one tier: the service pins so
    much at a time, whatever is still there, and the deadline is that of each portion's own."""


class Verify(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compare these pinned chunks of host memory with their checksums."""

    job: int
    keys: list[Bytes]
    slots: Numbers
    generations: Words


class Verified(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Positions of the chunks that differ; all pins of the job are back."""

    job: int
    bad: list[int]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody waits for this job any more. It still ends with its last message."""

    job: int


class Serve(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request whose chunks a peer waits for has begun, or has ended."""

    request: str
    ended: bool


class Host(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Slots that a tier may fill with chunks of other instances. Each comes back in a ``Left``."""

    tier: int
    slots: Numbers
    generations: Words


class Reclaim(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """So many of them are wanted back."""

    tier: int
    count: int


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End all jobs and serve another namespace from now on."""

    namespace: dict[str, str]


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drain what is under way until `deadline`, then stop."""

    deadline: float


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The service has opened its tiers: the cause of failure for each, empty when it is up."""

    causes: list[str]
    fatal: list[bool]
    """Whether the cause is something the operator has to change."""
    pid: int


class Found(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """News of a ``Find``; positions are indices into its keys."""

    job: int
    absent: Numbers
    """In no tier that was asked."""
    present: int
    """So many more are in a tier and not loaded yet: each wants a slot, once."""
    loaded: Numbers
    slots: Numbers
    """The slot that holds each loaded chunk."""
    crcs: Words
    tier: int
    """Where the loaded chunks came from."""
    failed: Numbers
    outcomes: Bytes
    """Cause of each failure (``Outcome``), one byte each."""
    unused: Numbers
    """Slots that come back."""
    final: bool


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One tier has ended its part of a ``Cascade``: outcomes in the order of its keys."""

    job: int
    tier: int
    outcomes: Bytes
    """One byte a key (``Outcome``)."""
    final: bool
    """This was the last tier: all pins of the job are back or belong to a hung call."""


class Contents(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A part of the filter over all keys that a tier of this instance alone may hold."""

    tier: int
    room: int
    """Of the filter (``KeyFilter``)."""
    offset: int
    bits: Bytes
    """None in the first part, which starts a filter anew."""
    final: bool


class Returned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Slots of an ended ``Find`` that a hung call had kept."""

    job: int
    slots: Numbers


class Left(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Slots of ``Host`` that come back: nothing touches them any more."""

    slots: Numbers


class Health(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Whether reading from and writing to a tier make sense has changed."""

    tier: int
    readable: bool
    writable: bool
    cause: str


class Samples(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Metrics that the service has gathered, as the recorder drained them (msgpack)."""

    data: Bytes


class Events(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Events of the tiers themselves (evictions there), as msgpack."""

    data: Bytes


class Resources(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the service holds, for leak checks; answer to ``Audit``."""

    number: int
    """Of the question."""
    tasks: int
    threads: int
    fds: int
    jobs: int
    pins: int
    """That it has been handed, or has taken, and has not given back: as many as stand in the slots'
    words, once it has read all that the owner has sent."""


class Audit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask the service for ``Resources``."""

    number: int


class ResetDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The service has ended everything from before the ``Reset``."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The service has drained; nothing of it touches the region any more."""

    error: str


ToService = (
    Find
    | Verify
    | Lend
    | NoMoreSlots
    | Cascade
    | Cancel
    | Serve
    | Host
    | Reclaim
    | Reset
    | Close
    | Audit
)
ToOwner = (
    Ready
    | Found
    | Verified
    | Stored
    | Contents
    | Returned
    | Left
    | Health
    | Samples
    | Events
    | Resources
    | ResetDone
    | Closed
)


def work_of(message: ToOwner) -> int:
    """What handling an answer costs the owner, in chunks that become READY (about 2 us each)."""
    match message:
        case Found():
            told = len(message.absent) + len(message.failed) + len(message.unused)
            return 6 + len(message.loaded) // 8 + told // 64
        case Stored():
            return 6 + len(message.outcomes) // 8
        case Left():
            return 6 + len(message.slots) // 64
        case Contents():
            return 6 + len(message.bits) // 10_000
        case Samples() | Events():
            return 6 + len(message.data) // 100
        case _:
            return 6


encoder = msgspec.msgpack.Encoder()
service_decoder = msgspec.msgpack.Decoder(list[ToService])
owner_decoder = msgspec.msgpack.Decoder(list[ToOwner])
