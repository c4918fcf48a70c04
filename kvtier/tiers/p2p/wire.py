# SPDX-License-Identifier: Apache-2.0
"""What instances say to each other: msgspec structs in MessagePack, one to a ZeroMQ message.

``Hello`` and ``Challenge`` have the same form in every version, so that versions can refuse each
other. Nothing here is executable: a frame that is no such struct, or has a field out of bounds, is
a ``ValueError`` of ``decode``. Chunks travel in none of these.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvtier.types import MAX_KEY_BYTES

VERSION = 1
MAX_KEYS = 4096
"""In one message."""
MAX_FRAME_BYTES = 1 << 20
"""Of a message: keys of the greatest length, with room."""
MAX_NAMESPACE_FIELDS = 256
NONCE_BYTES = 16

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Where = Annotated[str, msgspec.Meta(max_length=320)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
RequestId = Annotated[str, msgspec.Meta(max_length=512)]
Offer = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
States = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]
Slots = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_KEYS)]
Crcs = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_KEYS)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=3_600_000)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Reader to owner: I would like a session."""

    version: Number
    instance: Nonce
    """Random, from the start of the service."""
    nonce: Nonce


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Owner to reader: prove that you have the token, as I do."""

    version: Number
    instance: Nonce
    nonce: Nonce
    mac: Mac


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Reader to owner."""

    mac: Mac
    namespace: Annotated[dict[Name, Text], msgspec.Meta(max_length=MAX_NAMESPACE_FIELDS)]
    transports: Annotated[list[Name], msgspec.Meta(max_length=8)]
    """That it could use, the best one first."""
    boot: Annotated[bytes, msgspec.Meta(max_length=64)]
    """Boot id of its host: on one host there are shorter ways."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Owner to reader: the session stands."""

    transport: Name
    offer: Offer
    """For ``Transport.connect``."""
    room: Number
    """Chunks that may be pushed here now."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Owner to reader: no. There is no session, or no longer."""

    field: Name
    """What differs: a field of the namespace, version, token, transport, or session."""
    owner: Text
    reader: Text


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Reader to owner: which of these do you have?"""

    job: Number
    keys: Keys
    windowed: bool
    request: RequestId
    """For which the owner may be writing them; empty: it is not asked to."""
    watch_ms: Milliseconds
    """For so long, tell what becomes of those that are on their way."""


class Have(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Owner to reader: a ``Presence`` for each key."""

    job: Number
    states: States


class News(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Owner to reader: what has become of keys that were on their way."""

    job: Number
    positions: Slots
    """As int64."""
    states: States


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Reader to owner: nobody waits for the rest of that ``Ask`` any more."""

    job: Number


class Lend(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Reader to owner: keep these where they are while I read them."""

    job: Number
    keys: Keys
    milliseconds: Milliseconds


class Lent(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Owner to reader: a lease of those of the keys that are there."""

    job: Number
    lease: Number
    outcomes: States
    """Of each key: DONE, MISSING or DROPPED (too much is lent already)."""
    slots: Slots
    """Of those that are leased, in order, as int64."""
    crcs: Crcs
    """CRC-32C of each of them, as uint32."""


class Return(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Reader to owner: the lease is not needed any more."""

    lease: Number


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Reader to owner: are you there?"""

    number: Number


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Owner to reader."""

    number: Number
    room: Number
    """Chunks that may be pushed here now."""


class Push(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Reader to owner, the other way round: come and get these, if you have room."""

    job: Number
    address: Where
    """Where the owner is to ask for them."""
    keys: Keys


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Owner to reader: an ``Outcome`` for each key pushed."""

    job: Number
    outcomes: States


class Doubt(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Reader to owner: these came with other bytes than their checksums say."""

    keys: Keys


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Either: the session ends."""


ToOwner = Hello | Proof | Ask | Unwatch | Lend | Return | Push | Doubt | Ping | Bye
ToReader = Challenge | Welcome | Refused | Have | News | Lent | Taken | Pong | Bye

_encoder = msgspec.msgpack.Encoder()
owner_decoder = msgspec.msgpack.Decoder(ToOwner)
reader_decoder = msgspec.msgpack.Decoder(ToReader)


def encode(message: ToOwner | ToReader) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def packed(positions: Sequence[int]) -> bytes:
    """Numbers as a field."""
    return np.array(positions, dtype="<i8").tobytes()


def positions(field: bytes) -> list[int]:
    """Numbers that a field has.

    Raises
    ------
    ValueError
        It is none.
    """
    numbers: list[int] = np.frombuffer(field, dtype="<i8").tolist()
    return numbers


def packed_crcs(numbers: Sequence[int | None]) -> bytes:
    """Checksums as a field."""
    return np.array(numbers, dtype="<u4").tobytes()


def crcs(field: bytes) -> list[int]:
    """Checksums that a field has. ValueError as for ``positions``."""
    numbers: list[int] = np.frombuffer(field, dtype="<u4").tolist()
    return numbers


def mac(token: bytes, side: bytes, hello: Hello, challenge_nonce: bytes, instance: bytes) -> bytes:
    """Proof that `side` (``owner`` or ``reader``) has the token, for this handshake alone.

    Parameters
    ----------
    token : bytes
        Empty where none is set.
    side : bytes
    hello : Hello
    challenge_nonce, instance : bytes
        The owner's.
    """
    parts = (hello.instance, hello.nonce, instance, challenge_nonce)
    said = b"kvtier-p2p %d " % hello.version + side + b"".join(parts)
    return hmac.new(token, said, hashlib.sha256).digest()
