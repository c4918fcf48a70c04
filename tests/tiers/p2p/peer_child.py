# SPDX-License-Identifier: Apache-2.0
"""An instance with a peer tier in a process of its own, told what to do over its standard input.

The first line is its settings (``peers.py`` writes them); each other one is a command, whose answer
is a line with the same ``id``. The main thread is the scheduler's: it makes steps, measures how
long each call of the engine takes, and compares every byte that it loads with what belongs to the
key. Ends with its standard input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import random
import select
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from kvtier.engine import supervisor
from kvtier.engine.engine import open_engine
from kvtier.errors import ClosedError, TierLostError
from kvtier.testing import leaks
from kvtier.types import Lookup, Peer, RequestContext
from tests.engine.rig import key, prepare

T = TypeVar("T")

CHUNK = 64 << 10
AUDIT_SECONDS = 1.0
"""A service that is dead does not answer."""


def payload(name: bytes) -> bytes:
    """Bytes that belong to this key alone."""
    return random.Random(name).randbytes(CHUNK)


class Instance:
    """The engine, and what it was told to do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config, geometry = prepare(
            slots=settings["slots"],
            tiers=[settings["tier"]],
            chunk=CHUNK,
            isolation=settings["isolation"],
            on_reset="keep",
            promotion_slots=settings["slots"] // 32,
            **settings["config"],
        )
        self.engine, self.region = open_engine(config, geometry, settings["namespace"])
        self.number = 0
        self.loads: dict[int, tuple[list[bytes], RequestContext, float]] = {}
        self.audits: dict[int, float] = {}
        self.prefills: dict[str, RequestContext] = {}
        self.slowest: tuple[float, str] = (0.0, "")

    def timed(self, method: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """A call of the engine, as the scheduler makes it."""
        begin = time.monotonic()
        try:
            return method(*arguments, **more)
        finally:
            self.slowest = max(self.slowest, (time.monotonic() - begin, method.__name__))

    def context(self, **more: Any) -> RequestContext:
        self.number += 1
        return RequestContext(f"r{os.getpid()}-{self.number}", **more)

    def store(self, numbers: list[int], request: str = "") -> int:
        context = self.prefills.get(request) or self.context()
        names = [key(number) for number in numbers]
        reservation = self.timed(self.engine.reserve, names, context)
        for name, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
            self.region.slot_view(slot, CHUNK)[:] = payload(name)
        self.timed(self.engine.commit, reservation.keys, context)
        if not request:
            self.timed(self.engine.finish_request, context)
        return len(reservation.keys)

    def command(self, do: str, number: int, more: dict[str, Any]) -> None:
        match do:
            case "store":
                say(number, stored=self.store(more["numbers"], more.get("request", "")))
            case "load":
                peer = more.get("peer")
                context = self.context(peer=None if peer is None else Peer(*peer))
                names = [key(one) for one in more["numbers"]]
                self.loads[number] = names, context, time.monotonic()
            case "begin":
                context = self.prefills[more["request"]] = self.context(serves=more["request"])
                self.timed(self.engine.on_new_request, context)
                say(number)
            case "end":
                context = self.prefills.pop(more["request"])
                self.timed(self.engine.finish_request, context)
                say(number)
            case "forget":
                self.timed(self.engine.reset)
                say(number)
            case "rest":
                # After a stop, which no call can be blamed for.
                self.slowest = (0.0, "")
                say(number)
            case "fork":
                say(number, code=self.fork())
            case "system":
                # As foreign code does, in a thread of its own while the loop runs.
                with ThreadPoolExecutor(1) as pool:
                    say(number, code=max(pool.map(ctypes.CDLL(None).system, [b"true"] * 20)))
            case "fail":
                raise RuntimeError("as told")
            case "audit":
                self.timed(self.engine.audit)
                self.audits[number] = time.monotonic() + AUDIT_SECONDS
            case _:
                raise ValueError(do)

    def fork(self) -> int:
        """Exit code of a child that tries the engine, cleans up, and ends; 0 if it was refused."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
            pid = os.fork()
        if not pid:
            code = 1
            try:
                self.engine.lookup_batch([key(0)], self.context())
            except ClosedError:
                self.engine.close()
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @property
    def is_busy(self) -> bool:
        return bool(self.loads or self.audits or self.prefills)

    def step(self) -> None:
        for number, (names, context, began_at) in list(self.loads.items()):
            ready, answer = self.timed(self.engine.lookup_batch, names, context)
            if answer is not Lookup.MISS:
                continue
            del self.loads[number]
            seconds = time.monotonic() - began_at
            wrong = self.compare(names[:ready], context)
            self.timed(self.engine.finish_request, context)
            say(number, ready=ready, wrong=wrong, seconds=seconds)
        self.timed(self.engine.end_step)
        for number, until in list(self.audits.items()):
            resources = self.engine.resources
            if resources is None and time.monotonic() < until:
                continue
            del self.audits[number]
            say(number, **self.account())

    def compare(self, names: list[bytes], context: RequestContext) -> int:
        """How many of these chunks have bytes that are not theirs."""
        slots, generations = self.timed(self.engine.pin, names, context)
        wrong = 0
        for name, slot in zip(names, slots.tolist(), strict=True):
            wrong += bytes(self.region.slot_view(slot, CHUNK)) != payload(name)
        self.timed(self.engine.unpin, slots, generations, context)
        return wrong

    def account(self) -> dict[str, Any]:
        """What is held, here and in the service."""
        engine, resources = self.engine, self.engine.resources
        engine.check()
        engine.publish_metrics()
        said: dict[str, Any] = {
            "up": resources is not None,
            "idle": engine.idle,
            "own_fds": len(os.listdir("/proc/self/fd")),
            "slowest": self.slowest,
        }
        for field in ("tasks", "threads", "fds", "jobs", "pins"):
            said[field] = getattr(resources, field, None)
        for name in ("leases", "leased_bytes", "awaited", "served_bytes_total"):
            said[name] = engine.registry.value(f"kvtier_peer_{name}", ("p2p",)) or 0.0
        for side in ("owner", "reader"):
            said[side] = engine.registry.value("kvtier_peer_sessions", ("p2p", side)) or 0.0
        said["lent"] = engine._planner.guests.slots
        for name in ("kvtier_peer_guest_slots", "kvtier_tier_chunks"):
            said[name.removeprefix("kvtier_")] = engine.registry.value(name, ("p2p",)) or 0.0
        pushed = engine.registry.value("kvtier_chunks_total", ("p2p", "store", "done"))
        said["pushed"] = pushed or 0.0
        for kind in ("corrupt_chunks_total", "breaker_opened_total"):
            said[kind] = engine.registry.value(f"kvtier_{kind}", ("p2p",)) or 0.0
        return said


def say(number: int, **what: Any) -> None:
    line = json.dumps({"id": number, **what}) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def main() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    buffer = b""
    while b"\n" not in buffer:
        buffer += os.read(0, 1 << 16)
    first, buffer = buffer.split(b"\n", 1)
    settings = json.loads(first)
    # Services die here more often than in the field, where each one is waited for longer.
    supervisor.STABLE_SECONDS = 0.0
    # The first loop of a process opens a pipe for signals that libuv keeps for good.
    uvloop.new_event_loop().close()
    before = leaks.take()
    one = Instance(settings)
    try:
        one.store(settings["numbers"])
        say(0)
        while True:
            readable, _, _ = select.select([0], [], [], 0.001 if one.is_busy else 0.02)
            if readable:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    more = json.loads(line)
                    one.command(more.pop("do"), more.pop("id"), more)
            one.step()
    finally:
        error = ""
        try:
            one.engine.close()
        except TierLostError as exc:
            error = str(exc)
    del one
    say(-1, error=error, left=leaks.wait_clean(before, allow=is_anothers))


def is_anothers(leak: str) -> bool:
    """Dead files may be those of neighbours that were killed; its own, while it is held, shows as a
    descriptor and a mapping too."""
    return leak.startswith("region file")


if __name__ == "__main__":
    main()
