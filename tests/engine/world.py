# SPDX-License-Identifier: Apache-2.0
"""The world of the engine's model: an engine, what a scheduler does with it, and what must be true.

It knows what bytes each key has in each epoch, and what it has pinned and reserved itself; the rest
it asks the engine and its service for and compares. Every payload that is loaded is compared whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest import mock

from kvtier.engine import supervisor as supervisor_module
from kvtier.runtime import messages as m
from kvtier.runtime.thread import ThreadCarrier
from kvtier.testing.faults import Script
from kvtier.types import (
    GroupGeometry,
    Lookup,
    Outcome,
    RequestContext,
    key_group,
    key_hash,
    make_key,
)
from tests.engine.filed import FiledFaults
from tests.engine.rig import CHUNK, Rig, key, payload, rig, scripted

PREFIXES = 8
LENGTH = 4
SLOTS = 12
FAILURES = (
    Outcome.EXISTS,
    Outcome.MISSING,
    Outcome.DROPPED,
    Outcome.CANCELLED,
    Outcome.TIMEOUT,
    Outcome.CORRUPT,
    Outcome.FULL,
    Outcome.IO,
    Outcome.LOST,
    Outcome.INTERNAL,
)
AUDIT_EVERY = 10
"""Checks, from one question to the service to the next."""
ENDING_JOBS = 16
"""Jobs whose last message is out while calls of theirs that were given up still end."""
AUDIT_SECONDS = 0.25
CRC_THREADS = 2
"""A service starts them when it first needs them."""


def prefix(number: int, length: int = LENGTH) -> list[bytes]:
    """Keys of a prompt; odd prompts share their first half with the even one before them."""
    shared = length // 2 if number % 2 else 0
    return [
        key(1000 * (number - 1 if i < shared and number % 2 else number) + i) for i in range(length)
    ]


def bytes_of(name: bytes, epoch: int, length: int = CHUNK) -> bytes:
    """What key `name` holds in `epoch`: other weights, other bytes."""
    return payload(name + epoch.to_bytes(4, "big"), length)


class Write:
    """Slots that a worker fills."""

    def __init__(self, context: RequestContext, reservation: Any, epoch: int) -> None:
        self.context = context
        self.keys: list[bytes] = reservation.keys
        self.slots = reservation.slots
        self.generations = reservation.generations
        self.epoch = epoch
        self.first = 0
        """Number of its first transfer, where workers copy."""
        self.chunks: list[tuple[str, int, int]] = []
        """Key, slot and generation in the order of these numbers."""
        self.told = False
        """Whether the workers were told to end it, and how."""
        self.good = True

    @property
    def last(self) -> int:
        """Number of its last transfer."""
        return self.first + len(self.keys) - 1


class Read:
    """Slots that a worker reads."""

    def __init__(
        self, context: RequestContext, names: list[bytes], slots: Any, generations: Any, epoch: int
    ) -> None:
        self.context = context
        self.keys = names
        self.slots = slots
        self.generations = generations
        self.epoch = epoch


class ScriptFaults:
    """Faults of a tier in this process."""

    def __init__(self, name: str) -> None:
        self.script = Script(name)

    def tier(self) -> dict[str, Any]:
        return scripted(self.script)

    def fault(self, operation: str, kind: str, outcome: Outcome, keys: Sequence[bytes]) -> None:
        script = self.script
        match kind:
            case "outcome":
                script.outcomes[operation].append(outcome)
            case "always":
                script.always[operation] = outcome
            case "raise":
                script.raises[operation] = OSError(5, "eio")
            case "bug":
                script.raises[operation] = ZeroDivisionError()
            case "hang":
                script.gates[operation].close()
            case "stubborn":
                script.stubborn.add(operation)
                script.gates[operation].close()
            case "damage":
                script.damage = b"\xff\x00\xff"
            case "slow":
                script.seconds_per_byte = 0.002 / CHUNK
            case "pending":
                script.pending.update(keys)

    def heal(self) -> None:
        script = self.script
        for operation, gate in script.gates.items():
            script.outcomes[operation].clear()
            gate.open()
        script.always.clear()
        script.raises.clear()
        script.stubborn.clear()
        script.pending.clear()
        script.damage = None
        script.seconds_per_byte = 0.0


class World:
    """An engine over two scripted tiers, and what must be true of it."""

    sizes: ClassVar[tuple[int, ...]] = (1,)
    """Bytes of a chunk by group, in ``CHUNK``; a prompt has chunks of one group after the other."""

    def __init__(self, **config: Any) -> None:
        self.faults = self.make_faults()
        tiers = [
            {
                **faults.tier(),
                "namespaced": True,
                "timeout_seconds": 0.15,
                "max_inflight_bytes": 3 * max(self.sizes) * CHUNK,
            }
            for faults in self.faults
        ]
        self._settings: dict[str, Any] = {
            "slots": SLOTS,
            "groups": self.make_groups(),
            "tiers": tiers,
            "lookup_timeout_seconds": 0.04,
            "breaker": {"failures": 3, "open_seconds": 0.02},
        } | config
        self._new_epochs = config.get("on_reset", "new_epoch") == "new_epoch"
        self._epochs = 0
        self.open: dict[str, tuple[RequestContext, list[bytes]]] = {}
        self.writes: list[Write] = []
        self.orphans: list[Write] = []
        self.reads: list[Read] = []
        self.loaded_chunks = 0
        self.promoted_chunks = 0
        self.audits = 0
        """Questions to the service that it has answered."""
        self.pin_audits = 0
        """Of these, those in which every pin was compared."""
        self._checks = 0
        self._start()

    def make_faults(self) -> Sequence[ScriptFaults | FiledFaults]:
        return [ScriptFaults("first"), ScriptFaults("second")]

    def make_groups(self) -> Sequence[GroupGeometry]:
        return [GroupGeometry(16, 1, size * CHUNK) for size in self.sizes]

    def make_rig(self) -> contextlib.AbstractContextManager[Rig]:
        return rig(**self._settings)

    def _start(self) -> None:
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(mock.patch.object(supervisor_module, "RESTART_SECONDS", 0.005))
        self._exit.enter_context(mock.patch.object(supervisor_module, "MAX_RESTART_SECONDS", 0.02))
        self.one: Rig = self._exit.enter_context(self.make_rig())
        self.engine = self.one.engine
        # A new start has the configuration's own namespace again, whatever resets there were.
        self.epoch = 0
        self.one.sync()
        assert self.engine.resources is not None
        self.base = self.engine.resources

    def names(self, number: int) -> list[bytes]:
        """Keys of a prompt."""
        return [
            make_key(key_hash(name), i % len(self.sizes)) for i, name in enumerate(prefix(number))
        ]

    def _view(self, name: bytes, slot: int) -> memoryview:
        return self.one.region.slot_view(slot, self.sizes[key_group(name)] * CHUNK)

    def _slots_of(self, one: Write | Read) -> list[int]:
        """Every slot of its chunks, not the first ones alone."""
        widths = self.engine.geometry.widths
        return [
            slot + i
            for name, slot in zip(one.keys, one.slots.tolist(), strict=True)
            for i in range(widths[key_group(name)])
        ]

    # What a scheduler does.

    def reserve(self, number: int, length: int) -> None:
        context = self.one.context()
        reservation = self.engine.reserve(self.names(number)[:length], context)
        write = Write(context, reservation, self.epoch)
        mine = self._slots_of(write)
        assert len(set(mine)) == len(mine)
        busy = {s for one in (*self.writes, *self.orphans) for s in self._slots_of(one)}
        busy |= {slot for read in self.reads for slot in self._slots_of(read)}
        assert not busy.intersection(mine), "a slot in use was given away"
        if write.keys:
            self.writes.append(write)
        else:
            self.engine.finish_request(context)

    def _fill(self, write: Write) -> None:
        for name, slot in zip(write.keys, write.slots.tolist(), strict=True):
            view = self._view(name, slot)
            view[:] = bytes_of(name, write.epoch, len(view))

    def end_write(self, good: bool) -> None:
        if not self.writes:
            return
        write = self.writes.pop(0)
        if good:
            self._fill(write)
            assert self.engine.commit(write.keys, write.context) == write.keys
            assert self.engine.commit(write.keys, write.context) == []
        else:
            assert self.engine.abort(write.keys, write.context) == len(write.keys)
            assert self.engine.abort(write.keys, write.context) == 0
        self.engine.finish_request(write.context)

    def end_orphan(self) -> None:
        """A worker that wrote during a reset has ended; until then it may still write."""
        if not self.orphans:
            return
        write = self.orphans.pop(0)
        for name, slot in zip(write.keys, write.slots.tolist(), strict=True):
            view = self._view(name, slot)
            view[:] = b"\xee" * len(view)
        assert self.engine.release(write.slots, write.generations) == len(write.keys)
        assert self.engine.release(write.slots, write.generations) == 0
        self.engine.finish_request(write.context)

    def ask(self, number: int, length: int) -> None:
        context = self.one.context()
        self.open[context.request_id] = (context, self.names(number)[:length])
        self.look(0)

    def _pick(self, which: int) -> tuple[RequestContext, list[bytes]] | None:
        if not self.open:
            return None
        return list(self.open.values())[which % len(self.open)]

    def look(self, which: int) -> None:
        """A waiting request asks again; what it may have is pinned and read later."""
        picked = self._pick(which)
        if picked is None:
            return
        context, names = picked
        ready, answer = self.engine.lookup_batch(names, context)
        if answer is not Lookup.MISS:
            return
        for name in names[:ready]:
            assert self.engine.lookup(name, context) is Lookup.HIT
        if ready:
            slots, generations = self.engine.pin(names[:ready], context)
            self.reads.append(Read(context, names[:ready], slots, generations, self.epoch))
        # Still open: preempted, it asks again and may get more, or less.

    def end_read(self, finish_first: bool) -> None:
        if not self.reads:
            return
        read = self.reads.pop(0)
        sources = [self.engine.source(name, read.context) for name in read.keys]
        if finish_first:  # the request ends while its copy runs
            self.open.pop(read.context.request_id, None)
            self.engine.finish_request(read.context)
        self.promoted_chunks += len(sources) - sources.count("host")
        self.compare(read)
        self.loaded_chunks += len(read.keys)
        self.engine.unpin(read.slots, read.generations, read.context)

    def compare(self, read: Read) -> None:
        """Every byte of it."""
        for name, slot in zip(read.keys, read.slots.tolist(), strict=True):
            found = bytes(self._view(name, slot))
            right = bytes_of(name, read.epoch, len(found))
            assert found == right, f"wrong bytes for {name.hex()}"

    def finish(self, which: int) -> None:
        picked = self._pick(which)
        if picked is not None:
            self.engine.finish_request(self.open.pop(picked[0].request_id)[0])

    def reset(self) -> None:
        slots, generations = self.engine.reset()
        expected = {
            (slot, generation)
            for write in self.writes
            for slot, generation in zip(
                write.slots.tolist(), write.generations.tolist(), strict=True
            )
        }
        got = set(zip(slots.tolist(), generations.tolist(), strict=True))
        late = {
            (slot, generation)
            for write in self.orphans
            for slot, generation in zip(
                write.slots.tolist(), write.generations.tolist(), strict=True
            )
        }
        assert expected <= got <= expected | late
        self.orphans += self.writes
        self.writes = []
        if self._new_epochs:
            self._epochs += 1
            self.epoch = self._epochs

    def step(self) -> None:
        started = time.perf_counter()
        self.one.step()
        assert time.perf_counter() - started < 2.0

    def rest(self, seconds: float) -> None:
        """Nothing but steps, until all answers are there or the time has passed."""
        end = time.monotonic() + seconds
        while not self.engine.idle and time.monotonic() < end:
            self.step()
            time.sleep(0.001)

    # What goes wrong.

    def fault(self, which: int, operation: str, kind: str, outcome: Outcome) -> None:
        self.faults[which].fault(operation, kind, outcome, self.names(which)[:2])

    def heal(self, which: int) -> None:
        self.faults[which].heal()

    def crash(self) -> None:
        """The service ends all by itself."""
        for i in range(len(self.faults)):
            self.heal(i)  # a thread cannot be killed out of a call that hangs
        carrier = self.engine._supervisor.carrier
        assert isinstance(carrier, ThreadCarrier)
        service, loop = carrier._service, carrier._loop
        if service is not None and loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(service.deliver, None)

    # What must be true.

    def check(self) -> None:
        engine = self.engine
        engine.check()
        index, planner = engine._index, engine._planner
        parts = (
            index.num_free + index.num_writing + index.num_ready + index.num_lent
        ) + index.num_orphans
        assert parts == index.capacity
        assert index.available == engine.geometry.num_slots
        totals = engine.cache.slots.totals()
        pinned = sum(len(read.keys) for read in self.reads)
        assert totals["owner_pins"] == pinned + planner.loads.held
        assert index.num_writing == sum(len(write.keys) for write in self.writes)
        assert planner.loads.taken_slots <= planner.loads.hold_limit
        for tier in engine._tiers:
            assert len(tier.backlog) <= engine.geometry.num_slots
            assert len(tier.refused) <= engine.geometry.num_slots
            assert tier.inflight_bytes <= 3 * max(self.sizes) * CHUNK
        assert len(planner.requests) <= len(self.open) + len(self.writes) + len(self.orphans) + len(
            self.reads
        )

    def watch(self) -> None:
        """``check``, and now and then ask the service too, whatever it is doing."""
        self.check()
        self._checks += 1
        if self._checks % AUDIT_EVERY == 0:
            self.audit()

    def audit(self) -> None:
        """Compare what the service says it holds with the slots' words, and with the start."""
        engine = self.engine
        self.step()  # nothing is left to be sent
        planner = engine._planner
        jobs = len(planner.loads.finds) + len(planner.stores.cascades) + len(planner.verifier.jobs)
        # What had been put off the service pins by itself, at any time.
        by_itself = any(record.handed_over for record in planner.stores.cascades.values())
        before = engine.cache.slots.totals()["service_pins"]
        engine.audit()
        end = time.monotonic() + AUDIT_SECONDS
        while engine.resources is None and engine._supervisor.up and time.monotonic() < end:
            engine.poll()  # hands no pins over
            time.sleep(0.0005)
        got = engine.resources
        if got is None:
            return  # dead, stopped, or waiting for a tier that hangs in a reset
        end = time.monotonic() + AUDIT_SECONDS
        while (after := engine.cache.slots.totals()["service_pins"]) > got.pins:
            # The short pin of a flag or a checksum, met in the middle, is gone in a moment.
            if time.monotonic() >= end:
                break
            time.sleep(0.0005)
        self.audits += 1
        # What grows is a leak, and at the end there is none at all.
        assert got.jobs <= jobs + ENDING_JOBS, f"{got}, the owner knows {jobs}"
        assert got.threads <= self.base.threads + CRC_THREADS, got
        assert got.fds <= self.base.fds, got
        if not by_itself:
            self.pin_audits += 1
            assert before >= got.pins >= after, f"{got}, {before} pins before it and {after} after"

    def _everything_is_back(self) -> bool:
        # At one moment: a chunk that was refused may go out again at the next.
        engine = self.engine
        index, planner = engine._index, engine._planner
        totals = engine.cache.slots.totals()
        return (
            engine._supervisor.up  # one that is just starting again included
            and engine.idle
            and not (
                planner.requests
                or planner.loads.finds
                or planner.stores.cascades
                or planner.state.out
            )
            and (planner.loads.held, planner.loads.lent, index.num_orphans) == (0, 0, 0)
            and (totals["owner_pins"], totals["service_pins"], totals["writing"]) == (0, 0, 0)
            and index.num_free + index.num_ready == index.capacity
        )

    def end_all(self) -> None:
        """Everything comes back."""
        for i in range(len(self.faults)):
            self.heal(i)
        while self.writes:
            self.end_write(good=True)
        while self.orphans:
            self.end_orphan()
        while self.reads:
            self.end_read(finish_first=False)
        while self.open:
            self.finish(0)
        self.one.until(self._everything_is_back)
        self.check()

        asked_at = 0.0
        self.engine.resources = None  # that of the start, or of the last time

        def quiet() -> bool:
            nonlocal asked_at
            got = self.engine.resources
            if got is not None and self.is_clean(got):
                return True
            if got is not None or time.monotonic() > asked_at + 1.0:
                # Again; a service that is just ending takes the question with it.
                asked_at = time.monotonic()
                self.engine.audit()
            return False

        try:
            self.one.until(quiet)
        except AssertionError as exc:
            raise AssertionError(f"{self.engine.resources}, at first {self.base}") from exc

    def is_clean(self, got: m.Resources) -> bool:
        """Whether the service holds no more than at its start."""
        return (
            (got.jobs, got.pins) == (0, 0)
            and got.tasks <= self.base.tasks
            and got.fds <= self.base.fds
            and got.threads <= self.base.threads + CRC_THREADS
        )

    def reopen(self) -> None:
        """The model server ends and starts again, over the same media."""
        try:
            self.end_all()
        finally:
            self._exit.close()
        self._start()

    def close(self) -> None:
        """Everything comes back, and the engine ends."""
        try:
            self.end_all()
        finally:
            self._exit.close()


class SizedWorld(World):
    """The same with three size classes: a prompt has chunks of all of them."""

    sizes = (4, 1, 2)
