# SPDX-License-Identifier: Apache-2.0
"""Many operations on a store that fails at random: no wrong byte, nothing left, no blocked loop.

``KVTIER_SOAK_OPERATIONS`` says how many; ``make soak`` asks for a hundred thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from kvtier._core.layout import crc32c
from kvtier.options import Secret
from kvtier.testing.contract import Arena, chunk, context, make_env
from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.tier import ObjTier
from kvtier.types import Outcome, Presence

OPERATIONS = int(os.environ.get("KVTIER_SOAK_OPERATIONS", "10000"))
SIZE = 8192
CHUNKS = 400
WORKERS = 32
PART = 0.15
"""Of the requests that fail."""
BLOCKED_SECONDS = 0.05
"""So much longer than a loop that does nothing may the tier's loop be held up, and so much of the
processor's time may it take in one go. By the clock one turn in a thousand is left out: then
somebody else had the processor."""

IDLE_LOOP = """
import asyncio, sys, time
async def main():
    held = []
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    while not ended.done():
        begin = time.monotonic()
        await asyncio.sleep(0.005)
        held.append(time.monotonic() - begin - 0.005)
    print(sorted(held)[len(held) * 999 // 1000])
asyncio.run(main())
"""


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends when its standard input does."""
    child = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)
        assert child.stdout is not None
        child.stdout.close()


def memory_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.fault("C26", "L15", "O06")
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_module, "PAUSE_SECONDS", 0.002)
    seed = int(time.time())
    print(f"seed {seed}")
    rng = random.Random(seed)
    arena = Arena(WORKERS, SIZE)
    done: Counter[str] = Counter()
    outcomes: Counter[Outcome] = Counter()
    chunks = [chunk(number, 0, SIZE) for number in range(CHUNKS)]
    samples: list[int] = []
    held: list[float] = []
    taken: list[float] = []

    with (
        process("-m", "tests.tiers.obj.memory_store", str(seed), str(PART)) as server,
        process("-c", IDLE_LOOP) as idle,
    ):
        assert server.stdout is not None
        options = ObjOptions(
            bucket="bucket",
            endpoint_override=f"http://127.0.0.1:{int(server.stdout.readline())}",
            access_key=Secret("AKID"),
            secret_key=Secret("secret"),
            stall_seconds=2.0,
            absent_seconds=0.05,
        )
        tier = ObjTier("obj", options, make_env(sizes=[SIZE], definitions=METRICS))
        await tier.open()
        # As the service's process does: pytest and botocore are not gone through again and again.
        gc.collect()
        gc.freeze()
        assert tier._bulk is not None

        async def watch() -> None:
            while True:
                begin, used = time.monotonic(), time.thread_time()
                await asyncio.sleep(0.005)
                held.append(time.monotonic() - begin - 0.005)
                taken.append(time.thread_time() - used - 0.005)

        async def work(number: int) -> None:
            while sum(done.values()) < OPERATIONS:
                key, payload = rng.choice(chunks)
                what = rng.choices(
                    ["store", "load", "exists", "forget", "cancel"], [4, 8, 3, 1, 1]
                )[0]
                done[what] += 1
                if what == "store":
                    slot = arena.slot(number, key, SIZE, payload)
                    (outcome,) = await tier.store([slot], context(5.0))
                    outcomes[outcome] += 1
                elif what == "load":
                    slot = arena.slot(number, key, SIZE)
                    (outcome,) = await tier.load([slot], context(5.0))
                    outcomes[outcome] += 1
                    if outcome is Outcome.DONE:
                        # As the service does: the checksum decides.
                        right = crc32c(slot.view) == slot.crc
                        assert right == (bytes(slot.view) == payload)
                        done["corrupt"] += not right
                        if not right:
                            await tier.forget([key])
                elif what == "exists":
                    with contextlib.suppress(Exception):
                        (presence,) = await tier.exists([key], context(5.0))
                        done["present"] += presence is Presence.PRESENT
                elif what == "forget":
                    await tier.forget([key])
                else:
                    slot = arena.slot(number, key, SIZE)
                    task = asyncio.create_task(tier.load([slot], context(5.0)), name="cancelled")
                    await asyncio.sleep(rng.random() * 0.003)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    slot.view[:] = bytes(SIZE)
                    await asyncio.sleep(0.001)
                    assert bytes(slot.view) == bytes(SIZE)
                assert tier._bulk.connections <= options.concurrency
                if sum(done.values()) % 500 == 0:
                    tier.env.recorder.take()
                    samples.append(memory_bytes())

        watcher = asyncio.create_task(watch(), name="watch")
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(work(number), name=f"work-{number}")
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        assert idle.stdin is not None
        idle.stdin.close()
        assert idle.stdout is not None
        idle_held = float(idle.stdout.readline())
        await tier.aclose(time.monotonic() + 10)
        assert tier._bulk.limit.taken == 0
        assert tier._tasks == set()
    worst = sorted(held)[len(held) * 999 // 1000]
    print(f"{dict(done)}, {dict(outcomes)}")
    print(
        f"held up {worst:.3f} s, an idle loop {idle_held:.3f}; of processor time {max(taken):.3f}"
    )
    # Everything happened, and most went well all the same.
    assert min(done[what] for what in ("store", "load", "exists", "forget", "cancel")) > 0
    assert done["corrupt"] > 0
    assert {Outcome.DONE, Outcome.EXISTS, Outcome.MISSING, Outcome.CORRUPT} <= set(outcomes)
    assert sum(outcomes[one] for one in outcomes if not one.failed) > 0.9 * sum(outcomes.values())
    gc.unfreeze()
    later = samples[len(samples) // 2 :]
    assert later[-1] - later[0] < 8 << 20, samples
    assert worst < idle_held + BLOCKED_SECONDS
    assert max(taken) < BLOCKED_SECONDS
