# SPDX-License-Identifier: Apache-2.0
"""What a secondary tier is: the interface that the service drives, and the slots it hands out.

Everything here runs on the service's loop, never on the scheduler's thread.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import msgspec

from kvtier.obs.events import Event, Operation
from kvtier.types import Geometry, Outcome, Peer, Presence, key_group

if TYPE_CHECKING:
    from kvtier.obs.metrics import MetricDef, Recorder


class Slot:
    """One chunk in host memory, as a tier sees it: for reading (store) or for writing (load).

    The service holds a pin, or the loan of a WRITING slot, until the tier's coroutine has returned
    *and* every thread or transfer it started has ended; a tier must not touch `view` after that.
    """

    __slots__ = ("address", "crc", "generation", "key", "length", "slot", "verified", "view")

    def __init__(
        self,
        key: bytes,
        slot: int,
        generation: int,
        length: int,
        view: memoryview,
        address: int,
        crc: int | None = None,
    ) -> None:
        self.key = key
        self.slot = slot
        self.generation = generation
        self.length = length
        """Payload bytes; `view` has exactly this length."""
        self.view = view
        """Writable bytes of the region itself, starting at a multiple of 4096."""
        self.address = address
        """Address of ``view[0]`` in this process."""
        self.crc = crc
        """CRC-32C of the payload. Set before ``store``; ``load`` sets it to the stored value."""
        self.verified = False
        """Set by ``load`` when it has compared the payload with `crc` itself."""

    @property
    def group(self) -> int:
        """KV cache group of the chunk."""
        return key_group(self.key)


class TierContext(msgspec.Struct, frozen=True):
    """What goes with one call."""

    deadline: float
    """Absolute, on ``TierEnv.clock``. The call has returned by then or is cancelled."""
    request_id: str = ""
    peer: Peer | None = None
    """The instance that the request says to ask."""
    windowed: bool = False
    """The keys belong to a windowed group: only a suffix may exist."""
    loads: bool = False
    """Of ``exists``: `Tier.first_load_bytes` of what is there will be loaded at once."""
    news: Callable[[], None] | None = None
    """Of ``exists``: for a tier that `tells_news` to call when it knows more of a key that it has
    called PENDING. From the loop, as often as it likes."""

    def remaining(self, clock: Callable[[], float] = time.monotonic) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self.deadline - clock())


class Takes(enum.Enum):
    """Which chunks a tier is given."""

    ALL = "all"
    """Each one as it comes."""
    PRESSED = "pressed"
    """Those that host memory would soon drop, while no other tier has them."""
    NONE = "none"


class HostMemory(Protocol):
    """Host memory, for a tier that gives chunks of it to others."""

    address: int
    """Of slot 0 in this process."""
    length_bytes: int
    """Of all slots."""

    def presence(self, keys: Sequence[bytes]) -> bytes:
        """A ``Presence`` for each key: PRESENT where it is READY, PENDING while it is written."""

    def pin(self, key: bytes) -> Slot | None:
        """The chunk, pinned for the service, if it is READY. ``unpin`` gives the pin back."""

    def unpin(self, items: Sequence[Slot]) -> None:
        """Nothing reads these any more."""

    def slot(self, key: bytes, slot: int, generation: int, crc: int | None = None) -> Slot:
        """The slot of that number, for a chunk."""

    async def take_crcs(self, items: Sequence[Slot]) -> None:
        """Give each item its CRC, from the slot record or from the bytes."""

    async def verify(self, items: Sequence[Slot]) -> list[bool]:
        """Whether the bytes of each item are what its CRC says they are."""

    def give_back(self, slots: Sequence[int]) -> None:
        """Slots of ``Tier.host`` that nothing touches any more go back to their owner."""


@dataclass(frozen=True)
class TierEnv:
    """What the service gives a tier at construction."""

    geometry: Geometry
    namespace: Mapping[str, str]
    """Readable namespace fields, to be written beside the data."""
    namespace_digest: bytes
    """32 bytes; only chunks of equal digests may be shared."""
    recorder: Recorder
    emit: Callable[[Event], None]
    clock: Callable[[], float] = time.monotonic
    host: HostMemory | None = None
    """None outside a service."""
    replica: int = 0
    """Number of this instance among equally configured ones on this host: added to ports."""
    region_view: memoryview | None = None
    """The region as rows, shape (slots, slot bytes); None outside the scheduler's process."""
    offloading_spec: Any = None
    """vLLM's spec object, for classes that were written for vLLM."""


OptionsType: TypeAlias = type[msgspec.Struct]
"""Inside a tier's class the word ``type`` is its name in the configuration."""


class Tier(abc.ABC):
    """A secondary tier.

    Constructors only assign; files, sockets, threads and tasks appear in ``open`` and go in
    ``aclose``. Every call has a deadline in its context. A cancelled call returns only when nothing
    touches the slots any more: what cannot be cancelled (a thread's system call) is awaited.
    """

    type: ClassVar[str]
    """Name in the configuration."""
    medium: ClassVar[str] = "STORAGE"
    """"CPU" or "STORAGE", as in vLLM's events and tier filters."""
    locality: str | None = None
    """"LOCAL" or "REMOTE"; None where nobody has said: every filter lets it pass, as in vLLM."""
    first_load_bytes: ClassVar[int | None] = None
    """Most that a request's first load asks for, where what comes first should not wait for the
    rest; None: as much as any other."""
    stores_at_once: ClassVar[int] = 1
    """Calls of ``store`` (8 MiB each) that one cascade may have under way: more where a store waits
    for an answer rather than for a disk."""
    tells_news: ClassVar[bool] = False
    """Whether it calls ``TierContext.news``. Others are asked again and again for a key that they
    have called PENDING."""
    waits_for_peers: ClassVar[bool] = False
    """Whether its calls wait for others, each of which may hang alone: that a call does not end in
    time says nothing of the tier then."""
    options_type: ClassVar[OptionsType]
    """Frozen struct with the tier's own configuration keys."""

    def __init__(self, name: str, options: Any, env: TierEnv) -> None:
        self.name = name
        self.options = options
        self.env = env

    @classmethod
    def takes(cls, options: Any) -> Takes:
        """Which chunks are copied here."""
        return Takes.ALL

    @classmethod
    def hosts(cls, options: Any) -> float:
        """Part of host memory that chunks of other instances may have here while it is free."""
        return 0.0

    @classmethod
    def serves(cls, options: Any, peer: Peer | None) -> bool:
        """Whether a request with this peer has anything to ask a tier with these options."""
        return True

    @classmethod
    def metric_definitions(cls) -> Sequence[MetricDef]:
        """Metrics of this tier's own; they appear with the others, labelled ``tier``."""
        return ()

    def tell(self, operation: Operation, key: bytes, length: int) -> None:
        """Emit an event of a chunk that is now here, or no longer, of `length` payload bytes."""
        came = operation == "stored"
        self.env.emit(
            Event(
                operation=operation,
                key=key,
                group=key_group(key),
                source="" if came else self.name,
                destination=self.name if came else "",
                locality=self.locality,
                medium=self.medium,
                bytes=length,
            )
        )

    @abc.abstractmethod
    async def open(self) -> None:
        """Get ready and prove it: a write, a read and a delete, within seconds.

        Raises
        ------
        ConfigError
            Something the operator has to change; the message says what.
        TierLostError
            The medium does not answer; the service calls this again later.
        """

    @abc.abstractmethod
    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        """Presence of each key, in order. May stop asking after the first ABSENT of a prefix and
        report the rest as ABSENT, unless ``ctx.windowed``."""

    @abc.abstractmethod
    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Copy chunks out of host memory; one outcome each. Never partly visible: a chunk that is
        found later is whole."""

    @abc.abstractmethod
    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        """Copy chunks into host memory; one outcome each. Sets ``crc`` of each item it loaded."""

    @abc.abstractmethod
    async def aclose(self, deadline: float) -> None:
        """Drain until `deadline`, then abort. Idempotent. Nothing of the tier is left after it."""

    async def contents(self) -> Sequence[bytes] | None:
        """Every key that may be found here, once that is known, if only this instance writes here:
        then a key that was never stored is not asked for. None: others may write here too.

        Called when the tier is open, and again when much has been stored; may wait as long as it
        has to. It returns what is there as it returns, without a wait after it has looked: what is
        stored in that wait would be taken for absent. Keys too many cost a question each, a key
        that lacks is not found. One that raises is asked for everything.
        """
        return None

    def host(self, slots: Sequence[tuple[int, int]]) -> None:
        """Slots, each with its generation, for chunks of others; only where ``hosts`` says so."""
        return None

    def reclaim(self, count: int) -> None:
        """So many of these slots are wanted back."""
        return None

    def serve(self, request: str, ended: bool) -> None:
        """A request whose chunks a peer waits for, under this name, has begun or has ended."""
        # Of interest to a tier that serves peers.
        return None

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Chunks proven corrupt: quarantine or remove them, so that they are not found again."""
        # Tiers whose data cannot go bad (memory of this process) have nothing to do.
        return None
