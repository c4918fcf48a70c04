# SPDX-License-Identifier: Apache-2.0
"""No native call of ours blocks with the GIL held: a heartbeat thread sees the longest one."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.faults import wait_until
from tests.engine.rig import keys, rig

LIMIT_SECONDS = 0.1
TRIES = 8
MIN_BEATS = 50
CHUNK_BYTES = 32 << 20


class Heartbeat:
    """A thread that wants to run every millisecond, and the longest time that it could not."""

    def __init__(self) -> None:
        self.beats = 0
        self.longest = 0.0
        self.paused = False  # what runs now is the test's own
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat")

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            # The beat that ends or begins in a pause does not count either.
            paused = self.paused
            time.sleep(0.001)
            now = time.monotonic()
            if not paused and not self.paused:
                self.beats += 1
                self.longest = max(self.longest, now - last)
            last = now


def least_longest_gap(work: Callable[[Heartbeat], None]) -> float:
    """Longest gap of the best of `TRIES`: a call that blocks does so in each of them, a machine
    that is busy with other things does not."""
    longest = []
    # The collector holds the GIL too, for as long as all the modules of this process take it.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(TRIES):
            with Heartbeat() as heart:
                work(heart)
            assert heart.beats > MIN_BEATS
            longest.append(heart.longest)
            # Pauses of a busy machine are longer than the limit; they do not come in every try.
            if longest[-1] < LIMIT_SECONDS:
                break
    finally:
        gc.unfreeze()
    return min(longest)


def regions_come_and_go(folder: Path, heart: Heartbeat) -> None:
    """Start, checksums, writes, reads and end of an engine with large chunks."""
    tiers = [{"type": "fs", "root_dir": str(folder)}]
    body = bytes(CHUNK_BYTES)
    with rig(slots=12, tiers=tiers, chunk=CHUNK_BYTES) as one:
        context = one.context()
        reservation = one.engine.reserve(keys(*range(8)), context)
        heart.paused = True  # this copy holds it
        for slot in reservation.slots.tolist():
            one.region.slot_view(slot, CHUNK_BYTES)[:] = body
        heart.paused = False
        one.engine.commit(reservation.keys, context)
        one.engine.finish_request(context)
        one.settle()
        one.engine._index.drop(keys(*range(8)))
        assert one.ask(keys(*range(4)), context)[0] == 4
        one.engine.finish_request(context)
        one.settle()
    del one, context, reservation
    gc.collect()  # the region is unmapped here


@pytest.mark.fault("H08")
def test_no_native_call_of_ours_blocks_with_the_gil_held(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(TRIES))
    gap = least_longest_gap(lambda heart: regions_come_and_go(next(folders), heart))
    assert gap < LIMIT_SECONDS


def test_one_call_with_the_gil_held_is_seen() -> None:
    """A PyDLL keeps the GIL over its calls: a single one of them is enough."""
    sleep = ctypes.PyDLL(None).usleep

    def work(heart: Heartbeat) -> None:
        sleep(round(1.5e6 * LIMIT_SECONDS))
        wait_until(lambda: heart.beats > MIN_BEATS)

    assert least_longest_gap(work) > LIMIT_SECONDS
