# SPDX-License-Identifier: Apache-2.0
"""What a secondary tier is: the interface that the service drives, and the slots it hands out.

Everything here runs on the service's loop, never on the scheduler's thread.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from kvtier.types import Geometry, Outcome, Presence, key_group

if TYPE_CHECKING:
    from kvtier.obs.events import Event
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
    peer: str | None = None
    windowed: bool = False
    """The keys belong to a windowed group: only a suffix may exist."""

    def remaining(self, clock: Callable[[], float] = time.monotonic) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self.deadline - clock())


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
    locality: str = "LOCAL"
    """"LOCAL" or "REMOTE"."""
    options_type: ClassVar[OptionsType]
    """Frozen struct with the tier's own configuration keys."""

    def __init__(self, name: str, options: Any, env: TierEnv) -> None:
        self.name = name
        self.options = options
        self.env = env

    @classmethod
    def metric_definitions(cls) -> Sequence[MetricDef]:
        """Metrics of this tier's own; they appear with the others, labelled ``tier``."""
        return ()

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

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Chunks proven corrupt: quarantine or remove them, so that they are not found again."""
        # Tiers whose data cannot go bad (memory of this process) have nothing to do.
        return None
