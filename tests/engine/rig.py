# SPDX-License-Identifier: Apache-2.0
"""What the engine's tests share: an engine over small chunks, and bytes that name their key."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtier.config import Config, parse
from kvtier.engine.engine import Engine, open_engine
from kvtier.host.region import Region
from kvtier.testing.faults import Script
from kvtier.types import (
    Geometry,
    GroupGeometry,
    Lookup,
    RequestContext,
    key_group,
    make_geometry,
    make_key,
)

CHUNK = 8192
SCRIPTED = {"type": "ScriptedTier", "module_path": "kvtier.testing.faults"}


def key(number: int, group: int = 0) -> bytes:
    return make_key(number.to_bytes(32, "big"), group)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(name: bytes, length: int = CHUNK) -> bytes:
    """Bytes that belong to this key alone."""
    return (name * (length // len(name) + 1))[:length]


class Rig:
    """An engine and its region, driven as a scheduler does."""

    def __init__(self, engine: Engine, region: Region) -> None:
        self.engine = engine
        self.region = region
        self.number = 0

    def context(self, **more: Any) -> RequestContext:
        self.number += 1
        return RequestContext(f"r{self.number}", **more)

    def write(self, reservation: Any) -> None:
        for name, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
            length = self.engine.geometry.payload_bytes[key_group(name)]
            self.region.slot_view(slot, length)[:] = payload(name, length)

    def store(self, names: Sequence[bytes], context: RequestContext | None = None) -> list[bytes]:
        """Store chunks as a worker would; returns those that got a slot."""
        context = context or self.context()
        reservation = self.engine.reserve(list(names), context)
        self.write(reservation)
        self.engine.commit(reservation.keys, context)
        self.engine.finish_request(context)
        self.engine.end_step()
        return reservation.keys

    def step(self) -> None:
        self.engine.poll()
        self.engine.end_step()

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Make steps until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not true within {seconds} seconds"
            self.step()
            time.sleep(0.001)

    def settle(self) -> None:
        """Make steps until nothing is under way, then check every invariant."""
        self.until(lambda: self.engine.idle)
        self.step()
        self.engine.check()
        self.sync()

    def sync(self) -> None:
        """Have the service's metrics up to now."""
        if not self.engine.config.tiers:
            return
        asked_at = 0.0

        def answered() -> bool:
            nonlocal asked_at
            if self.engine.resources is not None or not self.engine._supervisor.up:
                return asked_at > 0.0 or not self.engine._supervisor.up
            if time.monotonic() > asked_at + 1.0:
                # Again: a service that has just died took the question with it.
                asked_at = time.monotonic()
                self.engine.audit()
            return False

        self.engine.resources = None
        self.until(answered)

    def ask(
        self, names: Sequence[bytes], context: RequestContext, seconds: float = 10.0
    ) -> tuple[int, int]:
        """Steps until the answer is final: length of the ready prefix, number of steps."""
        deadline = time.monotonic() + seconds
        steps = 0
        while True:
            steps += 1
            ready, answer = self.engine.lookup_batch(list(names), context)
            if answer is Lookup.MISS:
                return ready, steps
            self.engine.end_step()
            assert time.monotonic() < deadline, f"still {answer!r} after {seconds} seconds"
            time.sleep(0.001)

    def load(self, names: Sequence[bytes], context: RequestContext | None = None) -> int:
        """Load a prefix as a worker would, comparing every byte; returns its length."""
        context = context or self.context()
        ready, _ = self.ask(names, context)
        self.check(names[:ready], context)
        self.engine.finish_request(context)
        self.engine.end_step()
        return ready

    def serve_queued(self, waiting: list[tuple[list[bytes], RequestContext]]) -> int:
        """Steps over a queue of requests until each has had its final answer, and loaded what that
        said it could; how many chunks they loaded."""
        used = 0
        while waiting:
            left = []
            for prefix, context in waiting:
                ready, answer = self.engine.lookup_batch(prefix, context)
                if answer is not Lookup.MISS:
                    left.append((prefix, context))
                    continue
                self.check(prefix[:ready], context)
                used += ready
                self.engine.finish_request(context)
            self.engine.end_step()
            waiting = left
            time.sleep(0.001)
        return used

    def check(self, names: Sequence[bytes], context: RequestContext) -> None:
        slots, generations = self.engine.pin(list(names), context)
        try:
            for name, slot in zip(names, slots.tolist(), strict=True):
                length = self.engine.geometry.payload_bytes[key_group(name)]
                assert bytes(self.region.slot_view(slot, length)) == payload(name, length)
        finally:
            self.engine.unpin(slots, generations, context)

    def value(self, name: str, *labels: str) -> float:
        self.sync()
        self.engine.publish_metrics()
        return self.engine.registry.value(name, labels) or 0.0


def prepare(
    *,
    slots: int = 16,
    tiers: Sequence[dict[str, Any]] = (),
    chunk: int = CHUNK,
    groups: Sequence[GroupGeometry] | None = None,
    **config: Any,
) -> tuple[Config, Geometry]:
    """What an engine with `slots` slots is opened with."""
    groups = groups or [GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=chunk)]
    largest = max(group.payload_bytes for group in groups)
    stride = -(-largest // 4096) * 4096
    settings: dict[str, Any] = {
        "capacity_bytes": slots * stride,
        "promotion_slots": 2,
        "tiers": list(tiers),
    }
    return parse(settings | config), make_geometry(groups, slots * stride)


@contextlib.contextmanager
def rig(**settings: Any) -> Iterator[Rig]:
    """An engine, see ``prepare``; at its end everything must have come back."""
    engine, region = open_engine(*prepare(**settings))
    one = Rig(engine, region)
    try:
        yield one
        engine.check()
    finally:
        engine.close()


def scripted(script: Script, **more: Any) -> dict[str, Any]:
    """Configuration of a scripted tier."""
    return {**SCRIPTED, "name": script.name, "script": script.name, **more}
