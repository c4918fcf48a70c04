# SPDX-License-Identifier: Apache-2.0
"""What a driver needs from an engine: the scheduler-facing calls of kvtier, as protocols.

Owns no state. A driver plays a model server; today there is one, the stand-in of
`kvtier.bench.drivers.standin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.engine.engine import EngineStats
from kvtier.types import Lookup, RequestContext

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint32]


class ReservationLike(Protocol):
    """Slots for the absent ones of the keys asked for."""

    keys: list[bytes]
    slots: Slots


class EngineLike(Protocol):
    """`kvtier.engine.engine.Engine`, or a fake of it. No call waits."""

    def on_new_request(self, context: RequestContext, /) -> None: ...
    def lookup_batch(
        self, keys: Sequence[bytes], context: RequestContext, /
    ) -> tuple[int, Lookup]: ...
    def reserve(self, keys: Sequence[bytes], context: RequestContext, /) -> ReservationLike: ...
    def source(self, key: bytes, context: RequestContext, /) -> str: ...
    def commit(self, keys: Sequence[bytes], context: RequestContext, /) -> list[bytes]: ...
    def pin(
        self, keys: Sequence[bytes], context: RequestContext, /
    ) -> tuple[Slots, Generations]: ...
    def unpin(self, slots: Slots, generations: Generations, context: RequestContext, /) -> None: ...
    def finish_request(self, context: RequestContext, /) -> None: ...
    def end_step(self) -> None: ...
    def poll(self) -> None: ...
    def on_message(self, wake: Callable[[], None] | None, /) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self, deadline_seconds: float, /) -> None: ...


class RegionLike(Protocol):
    """Host memory, as far as a copy needs it."""

    def slot_view(self, slot: int, length: int, /) -> memoryview: ...
    def slot_address(self, slot: int, /) -> int: ...
