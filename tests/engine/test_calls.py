# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's calls may cost: memory for their own keys, and never a wait.

Memory is what Python allocates while a call runs (numpy's arrays included), at its peak. A wait is
a voluntary context switch of the calling thread: the system counts those, however busy the machine
is, and a call that sleeps, meets a lock or asks a socket that has nothing makes one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import signal
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.engine import planner as planner_module
from kvtier.engine import supervisor as supervisor_module
from kvtier.runtime import messages as m
from kvtier.runtime import process as process_module
from kvtier.types import Lookup
from tests.engine.rig import Rig, key, keys
from tests.engine.test_expiry import Clocked, clocked, found
from tests.runtime.test_process import Gates, gates, overloads, running, wait_for

__all__ = ["gates"]

FEW, MANY = 300, 30_000
"""Chunks in host memory beside those that are asked for."""
WAITING = 1000
"""Requests that wait, of 20 keys each."""
COUNTS = (1, 8, 64, 512)
BYTES, BYTES_PER_KEY = 3_000, 200
"""A call may allocate so much: the record of a request or a job, a key's place in message and
answer."""
MORE_BYTES, MORE_BYTES_PER_KEY = 1_000, 100
"""So much more in a larger memory, which lends a find slots for more of its keys at once."""
SPARE = 5_000
"""Slots for the calls; with fewer, a build with checks walks over all after each change."""


class World:
    """An engine without a service, with room for the calls, and what else it has to do."""

    def __init__(self, one: Clocked, present: int, waiting: int) -> None:
        self.one = one
        self.engine = one.engine
        self._next = 1_000_000
        index = one.engine._index
        for first in range(0, present, 1000):
            names = keys(*range(first, min(first + 1000, present)))
            index.commit(index.reserve(names).keys)
            index.mark_saved(names)
        self.waiting = []
        for _ in range(waiting):
            context = one.context()
            answer = self.engine.lookup_batch(self.fresh(20), context)
            assert answer == (0, Lookup.RETRY)
            self.waiting.append(context)
        self.settle()

    def fresh(self, n: int) -> list[bytes]:
        """Keys that nobody has seen."""
        first, self._next = self._next, self._next + n
        return keys(*range(first, first + n))

    def stored(self, n: int) -> list[bytes]:
        """Chunks of which no tier is to be told."""
        names = self.fresh(n)
        index = self.engine._index
        assert index.commit(index.reserve(names).keys) == names
        index.mark_saved(names)
        return names

    def settle(self) -> None:
        """A step, and stores end."""
        self.one.step()
        for message in self.one.notes.sent:
            if isinstance(message, m.Cascade):
                slots, generations = m.numbers(message.slots), m.words(message.generations)
                for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                    self.engine.cache.slots.unpin_service(slot, generation)
                ends = bytes(len(message.keys))
                self.one.notes.answers.append(m.Stored(message.job, 0, ends, final=True))
        self.one.step()

    def forget(self, names: list[bytes]) -> None:
        """Room for the next."""
        self.settle()
        self.engine._index.drop(names)
        self.one.notes.sent = [one for one in self.one.notes.sent if isinstance(one, m.Find)]


Call = Callable[[], object]


@contextlib.contextmanager
def a_lookup_of_one(world: World, n: int) -> Iterator[Call]:
    """Each of n keys by itself: half of them are there."""
    names = world.stored(n - n // 2) + world.fresh(n // 2)
    context = world.one.context()
    lookup = world.engine.lookup
    yield lambda: [None for name in names if lookup(name, context) is None]
    world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def a_batch_that_is_there(world: World, n: int) -> Iterator[Call]:
    names, context = world.stored(n), world.one.context()
    yield lambda: world.engine.lookup_batch(names, context)
    world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def a_batch_that_is_not(world: World, n: int) -> Iterator[Call]:
    names, context = world.fresh(n), world.one.context()
    yield lambda: world.engine.lookup_batch(names, context)
    world.engine.finish_request(context)
    world.forget([])


@contextlib.contextmanager
def a_batch_once_more(world: World, n: int) -> Iterator[Call]:
    names, context = world.stored(n) + world.fresh(1), world.one.context()
    world.engine.lookup_batch(names, context)
    world.one.step()
    yield lambda: world.engine.lookup_batch(names, context)
    world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def a_reserve(world: World, n: int) -> Iterator[Call]:
    names, context = world.fresh(n), world.one.context()
    yield lambda: world.engine.reserve(names, context)
    world.engine.abort(names, context)
    world.engine.finish_request(context)


@contextlib.contextmanager
def a_commit(world: World, n: int) -> Iterator[Call]:
    names, context = world.fresh(n), world.one.context()
    world.engine.reserve(names, context)
    yield lambda: world.engine.commit(names, context)
    world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def an_abort(world: World, n: int) -> Iterator[Call]:
    names, context = world.fresh(n), world.one.context()
    world.engine.reserve(names, context)
    yield lambda: world.engine.abort(names, context)
    world.engine.finish_request(context)


@contextlib.contextmanager
def a_pin_and_unpin(world: World, n: int) -> Iterator[Call]:
    names, context = world.stored(n), world.one.context()

    def call() -> None:
        slots, generations = world.engine.pin(names, context)
        world.engine.unpin(slots, generations, context)

    yield call
    world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def a_touch(world: World, n: int) -> Iterator[Call]:
    names, context = world.stored(n), world.one.context()
    yield lambda: world.engine.touch(names, context)
    world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def a_finish(world: World, n: int) -> Iterator[Call]:
    """Of a request that has used n chunks and waits for as many."""
    names, context = world.stored(n), world.one.context()
    world.engine.lookup_batch(names + world.fresh(n), context)
    world.engine.touch(names, context)
    world.one.step()
    yield lambda: world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def an_end_of_step(world: World, n: int) -> Iterator[Call]:
    """In which n keys were asked for, and n stored."""
    reader, writer, names = world.one.context(), world.one.context(), world.fresh(n)
    world.engine.lookup_batch(world.fresh(n), reader)
    world.engine.reserve(names, writer)
    world.engine.commit(names, writer)
    yield world.engine.end_step
    for context in (reader, writer):
        world.engine.finish_request(context)
    world.forget(names)


@contextlib.contextmanager
def a_poll(world: World, n: int) -> Iterator[Call]:
    """That brings news of n keys."""
    context = world.one.context()
    world.engine.lookup_batch(world.fresh(n), context)
    world.one.step()
    (find,) = (one for one in world.one.notes.finds() if one.request_id == context.request_id)
    world.one.notes.answers.append(
        found(find.job, absent=list(range(n)), unused=find.slots, final=True)
    )
    yield world.engine.poll
    world.engine.end_step()
    world.engine.finish_request(context)
    world.forget([])


@contextlib.contextmanager
def a_step_without_work(world: World, n: int) -> Iterator[Call]:
    world.one.step()

    def call() -> None:
        world.engine.poll()
        world.engine.end_step()

    yield call


CALLS = [
    a_lookup_of_one,
    a_batch_that_is_there,
    a_batch_that_is_not,
    a_batch_once_more,
    a_reserve,
    a_commit,
    an_abort,
    a_pin_and_unpin,
    a_touch,
    a_finish,
    an_end_of_step,
    a_poll,
    a_step_without_work,
]


def peak_bytes(call: Call) -> int:
    """What a call has allocated at its peak, beyond what there was."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def costs(present: int, waiting: int) -> dict[tuple[str, int], int]:
    """Peak of each call by its number of keys; of three of each kind the smallest: a table that
    happens to be full grows, once in a while."""
    result = {}
    with clocked(slots=present + SPARE + waiting * 4, chunk=4096) as one:
        world = World(one, present, waiting)
        gc.collect()
        gc.disable()
        try:
            for kind in CALLS:
                for n in COUNTS:
                    peaks = []
                    for _ in range(3):
                        with kind(world, n) as call:
                            peaks.append(peak_bytes(call))
                    result[kind.__name__, n] = min(peaks)
        finally:
            gc.enable()
        for context in world.waiting:
            one.engine.finish_request(context)
        world.settle()
        for find in one.notes.finds():
            if find.job in one.engine._planner.loads.finds:
                one.notes.answers.append(found(find.job, unused=find.slots, final=True))
        one.until(lambda: one.engine.idle)
    return result


def test_calls_allocate_what_their_own_keys_need() -> None:
    alone = costs(FEW, 0)
    for (name, n), peak in alone.items():
        assert peak <= BYTES + BYTES_PER_KEY * n, f"{name} of {n} keys: {peak} bytes"
    # The measure sees what there is.
    assert alone["a_reserve", 512] > 512 * 16
    for present, waiting in ((MANY, 0), (FEW, WAITING), (MANY, WAITING)):
        for (name, n), peak in costs(present, waiting).items():
            more = peak - alone[name, n]
            where = f"with {present} chunks and {waiting} requests beside it"
            assert more <= MORE_BYTES + MORE_BYTES_PER_KEY * n, (
                f"{name} of {n} keys: {more} bytes more {where}"
            )


class Watched:
    """An engine, with the waits of each call and the processor's time that it took."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.waits: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)

        def call(*arguments: Any) -> Any:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                seconds = time.thread_time() - began
                waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
                self.waits[name] = self.waits.get(name, 0) + waits
                self.seconds.setdefault(name, []).append(seconds)

        return call


def every_call(engine: Any, one: Rig, number: int) -> None:
    """As the steps of a scheduler make them."""
    stored, absent = key(10 * number), keys(10 * number + 1, 10 * number + 2)
    writer, reader = one.context(), one.context()
    engine.on_new_request(writer)
    reservation = engine.reserve([stored], writer)
    one.write(reservation)
    assert engine.commit([stored], writer) == [stored]
    assert engine.lookup(stored, reader) is Lookup.HIT
    assert engine.lookup_batch([stored, *absent], reader)[0] == 1
    slots, generations = engine.pin([stored], reader)
    engine.unpin(slots, generations, reader)
    engine.touch([stored], reader)
    engine.holds(absent[0])
    engine.source(stored, reader)
    engine.abort(engine.reserve(absent[:1], writer).keys, writer)
    engine.end_step()
    engine.poll()
    engine.lookup_batch([stored, *absent], reader)
    engine.make_room(1)
    engine.has_pending_work()
    engine.end_step()
    engine.finish_request(reader)
    engine.finish_request(writer)
    if number % ROUNDS == ROUNDS - 1:  # nothing goes to the service before it has taken that
        slots, generations = engine.reset()
        engine.release(slots, generations)
    engine.end_step()


ROUNDS = 64


def rounds(one: Rig, start: int) -> Watched:
    watched = Watched(one.engine)
    for number in range(start, start + ROUNDS):
        every_call(watched, one, number)
    return watched


@contextlib.contextmanager
def at_work(one: Rig, pid: int) -> Iterator[None]:
    yield


@contextlib.contextmanager
def stopped(one: Rig, pid: int) -> Iterator[None]:
    """The service. A call that waits for it would do so for ever: it goes on after a while."""
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(20.0, os.kill, (pid, signal.SIGCONT))
    goes_on.start()
    try:
        yield
    finally:
        goes_on.cancel()
        os.kill(pid, signal.SIGCONT)
        goes_on.join()


@contextlib.contextmanager
def full(one: Rig, pid: int) -> Iterator[None]:
    """Its queue, too."""
    with stopped(one, pid):
        number = 1_000_000
        while overloads(one) < 3:
            assert number < 3_000_000, "there is no end to what it takes"
            context = one.context()
            one.engine.lookup_batch(keys(*range(number, number + 500)), context)
            one.engine.end_step()
            one.engine.finish_request(context)
            number += 500
        before = overloads(one)
        yield
        assert overloads(one) > before


@contextlib.contextmanager
def dead(one: Rig, pid: int) -> Iterator[None]:
    """And its pins not all cleared up."""
    carrier = one.engine._supervisor.carrier
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not carrier.alive)
    time.sleep(supervisor_module.ALIVE_SECONDS)  # it is asked no more often than that
    yield
    assert not one.engine._supervisor.up


@contextlib.contextmanager
def locked(one: Rig, pid: int) -> Iterator[None]:
    """The region: by another thread here, which publishes transfers, and on its file, by a process
    that wants it for itself."""
    taken, over = threading.Event(), threading.Event()
    mapped = one.region._mapped
    assert mapped is not None

    def holds() -> None:
        with mapped.lock:
            taken.set()
            over.wait(20.0)

    thread = threading.Thread(target=holds, name="publisher")
    thread.start()
    other = os.open(one.region.path, os.O_RDWR)
    try:
        assert taken.wait(20.0)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        assert thread.is_alive()
    finally:
        os.close(other)
        over.set()
        thread.join()


@pytest.mark.fault("K08")
@pytest.mark.parametrize("state", [at_work, stopped, full, dead, locked])
def test_no_call_waits(
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[[Rig, int], contextlib.AbstractContextManager[None]],
) -> None:
    """Whatever becomes of the service, its queue and the region's locks."""
    monkeypatch.setattr(process_module, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(planner_module, "SILENCE_SECONDS", 60.0)  # it would be asked no more
    monkeypatch.setattr(supervisor_module, "RESTART_SECONDS", 60.0)  # a start has a thread
    more: dict[str, Any] = {"slots": 1024, "lookup_timeout_seconds": 30.0, "on_reset": "keep"}
    with running(gates.folder, **more) as (one, carrier):
        normal = rounds(one, 0)
        one.settle()
        with state(one, carrier.pid):
            watched = rounds(one, ROUNDS)
        assert set(watched.waits) == set(normal.waits)
        assert {name: waits for name, waits in watched.waits.items() if waits} == {}
        for name, seconds in watched.seconds.items():
            usual = statistics.median(normal.seconds[name])
            if len(seconds) < ROUNDS:
                continue  # a reset: one figure says nothing
            assert statistics.median(seconds) <= 5 * usual + 100e-6, name
        if state is not dead:
            one.until(lambda: one.engine.idle)


def test_a_wait_is_seen() -> None:
    class Waits:
        def sleep(self) -> None:
            time.sleep(1e-6)

        def work(self) -> None:
            sum(range(1000))

    watched = Watched(Waits())
    watched.sleep()
    watched.work()
    assert watched.waits == {"sleep": 1, "work": 0}
