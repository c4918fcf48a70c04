# SPDX-License-Identifier: Apache-2.0
"""Accelerator blocks beside tiers that do not answer: the stand-in server over the real engine.

A block is free as soon as its host copy has ended, whatever the tiers do. A request whose chunks
are on their way holds none, and is told that they are there only when their bytes are verified.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.accelerator import PagedBuffer
from kvtier.bench.clock import RealClock
from kvtier.bench.copies import CopyStream
from kvtier.bench.costs import CostModel
from kvtier.bench.drivers.standin import Limits, StandIn, State
from kvtier.bench.pattern import Comparer, Pattern
from kvtier.bench.workload import MultiTurn, Request, Source, block_hash
from kvtier.config import parse
from kvtier.engine.engine import Engine, open_engine
from kvtier.errors import TierLostError
from kvtier.testing.faults import wait_until
from kvtier.types import Lookup, RequestContext, make_key
from tests.bench.held import MODULE
from tests.bench.helpers import SHAPE, SOURCE

BLOCKS = 24
CHUNKS_X = 5
PROMPT_X = CHUNKS_X * SHAPE.chunk_tokens + 8
LIMITS = Limits(step_tokens=64, decode_tokens=4, stuck_seconds=10.0)
COSTS = CostModel(SOURCE, scale=1000.0)
"""Steps of a few hundred microseconds: the tests are about blocks, not about time."""


@pytest.fixture(autouse=True)
def _logged_frames_go(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tracebacks in the log hold frames, and these views of the region."""
    yield
    caplog.get_records("call").clear()


class Watched:
    """The engine, with every answer to the watched request noted."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self.answers: list[tuple[int, Lookup]] = []
        self.by_key: dict[bytes, list[Lookup]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def lookup_batch(self, keys: Sequence[bytes], context: RequestContext) -> tuple[int, Lookup]:
        answer = self._engine.lookup_batch(keys, context)
        if context.request_id == self._request_id:
            self.answers.append(answer)
            for key in keys:
                # One by one as model servers ask too: neither way may tell of bytes too early.
                self.by_key.setdefault(key, []).append(self._engine.lookup(key, context))
        return answer


class Server:
    """One engine, and stand-in servers over it, one after the other, each with an accelerator that
    knows nothing."""

    def __init__(self, engine: Engine, region: Any) -> None:
        self.engine = engine
        self.buffer = PagedBuffer(SHAPE, BLOCKS)
        self.pattern = Pattern(SHAPE)
        self.stream = CopyStream(self.buffer, self.pattern, region)

    def standin(
        self, source: Source, on_step: Callable[[StandIn, float], None] | None = None, **more: Any
    ) -> StandIn:
        return StandIn(
            self.buffer,
            self.pattern,
            COSTS,
            LIMITS,
            source,
            RealClock(),
            more.get("engine", self.engine),
            self.stream,
            on_step,
        )

    def settle(self) -> None:
        def settled() -> bool:
            self.engine.poll()
            self.engine.end_step()
            return self.engine.idle

        wait_until(settled)

    def check_bytes(self, server: StandIn) -> None:
        """Every block that was loaded, and every one that the accelerator says it holds."""
        counters = self.stream.counters
        assert counters.differing_blocks == 0
        assert counters.verified_bytes == counters.load_bytes
        comparer = Comparer(self.pattern)
        held = server.pool._by_hash
        assert held
        for name, block in held.items():
            assert comparer.compare(self.buffer.block(block), name) is None


@contextlib.contextmanager
def serving(slots: int, tiers: list[dict[str, Any]], **config: Any) -> Iterator[Server]:
    """A server; the engine is closed at the end if the test has not done it."""
    geometry = SHAPE.geometry(slots * SHAPE.chunk_bytes)
    settings = {"capacity_bytes": slots * SHAPE.chunk_bytes, "promotion_slots": 2, "tiers": tiers}
    engine, region = open_engine(parse(settings | config), geometry, {"model": "blocks"})
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        server = Server(engine, region)
        server.stream.open()
        stack.callback(server.stream.close)
        yield server


def held(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "type": "HeldTier", "module_path": MODULE, "name": "held", "folder": str(folder), **more
    }  # fmt: skip


def hung_files(folder: Path, gate: Path, **more: Any) -> dict[str, Any]:
    return {
        "type": "HungFiles",
        "module_path": MODULE,
        "name": "files",
        "root_dir": str(folder),
        "gate": str(gate),
        "write_threads": 2,
        "direct": "off",
        **more,
    }


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A fifo that system calls hang at; they go on when the test is over."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    yield path
    with contextlib.suppress(OSError):  # nobody is there: its process has been killed
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, b"x" * 4096)
        finally:
            os.close(fd)
    # Those of the service that were left behind in this process.
    wait_until(lambda: not any(one.name.startswith("kvtier-") for one in threading.enumerate()))


@pytest.mark.fault("H27")
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(
    ("slots", "timeout_seconds"), [(80, 60.0), (16, 0.1)], ids=["under-way", "timed-out"]
)
def test_blocks_are_free_while_no_store_ever_ends(
    tmp_path: Path, gate: Path, isolation: str, slots: int, timeout_seconds: float
) -> None:
    """Also where the stores that hang have pinned all of host memory, or have been given up."""
    root, folder = tmp_path / "files", tmp_path / "held"
    tiers = [
        hung_files(root, gate, timeout_seconds=timeout_seconds),
        held(folder, timeout_seconds=timeout_seconds),
    ]
    (folder / "store.held").touch()
    source = MultiTurn(12, SHAPE, 150, 64, 1, 8, max_in_flight=6)
    distinct = 12 * (source.final_tokens() // SHAPE.block_tokens)
    assert distinct >= 4 * BLOCKS
    with serving(slots, tiers, isolation=isolation) as server:
        standin = server.standin(source)
        before = standin.pool.num_free
        assert before == BLOCKS
        standin.run()
        assert len(standin.finished) == source.total
        for item in standin.finished:
            parts = item.accelerator_tokens + item.loaded_tokens + item.computed_tokens
            assert parts == item.prompt_tokens
        assert sum(item.loaded_tokens for item in standin.finished) > 0
        server.check_bytes(standin)
        # Not one store has ended, and those that began still hold their pins.
        assert (folder / "store.here").exists()
        wait_until(lambda: server.engine.cache.slots.totals()["service_pins"] > 0)
        assert not list(root.rglob("*.kv"))
        assert {path.name for path in folder.iterdir()} == {"store.held", "store.here"}
        assert not any(server.engine.stats().stored_bytes.values())
        # And every block of the accelerator is free.
        assert standin.pool.num_free == before
        standin.pool.check()
        server.engine.check()
        started = time.monotonic()
        with pytest.raises(TierLostError):
            server.engine.close(0.5)
        assert time.monotonic() - started < 10
        assert not list(root.rglob("*.kv"))


class Queue:
    """Requests that the test hands in while the server runs."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.due: list[Request] = []

    def take(self, now: float) -> list[Request]:
        taken, self.due = self.due, []
        return taken

    def done(self, request: Request, now: float) -> None:
        return None

    def next_start(self) -> float | None:
        return None


def prompt(name: str, tokens: int = PROMPT_X) -> Request:
    """A request whose blocks are its own."""
    # A second request of the same prompt has the same blocks: what follows "#" is not in them.
    blocks = tokens // SHAPE.block_tokens
    hashes = tuple(block_hash(0, name.partition("#")[0], i) for i in range(blocks))
    return Request(name, 0.0, tokens, 4, hashes)


def chunk_keys(request: Request) -> list[bytes]:
    per_chunk = SHAPE.blocks_per_chunk
    return [make_key(name) for name in request.block_hashes[per_chunk - 1 :: per_chunk]]


@contextlib.contextmanager
def promoting(tmp_path: Path, isolation: str) -> Iterator[tuple[Server, Path]]:
    """A server whose tier alone holds the chunks of prompt ``x``."""
    folder = tmp_path / "held"
    with serving(
        32,
        [held(folder)],
        isolation=isolation,
        on_reset="keep",
        lookup_timeout_seconds=30.0,
    ) as server:
        first = Queue(1)
        first.due.append(prompt("x#1"))
        server.standin(first).run()
        server.settle()
        server.engine.reset()
        server.settle()
        wanted = {key.hex() for key in chunk_keys(prompt("x"))}
        assert wanted <= {path.name for path in folder.iterdir()}
        assert not any(server.engine.holds(key) for key in chunk_keys(prompt("x")))
        yield server, folder


OTHERS = 12


@pytest.mark.fault("C01", "C15")
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("point", ["exists", "load"])
def test_a_pending_promotion_holds_no_block(tmp_path: Path, isolation: str, point: str) -> None:
    """Before anybody knows whether the chunks exist, and when all their bytes are in host memory
    but not compared: the request waits without a block, the others run."""
    with promoting(tmp_path, isolation) as (server, folder):
        mine = [key.hex() for key in chunk_keys(prompt("x"))]
        (folder / f"{point}.held").write_text("\n".join(mine))
        source = Queue(1 + OTHERS)
        watched = Watched(server.engine, "x#2")
        pending_answers: list[tuple[int, Lookup]] = []
        phase = ["before"]
        steps = [0]
        free = BLOCKS

        def on_step(standin: StandIn, _seconds: float) -> None:
            if phase[0] == "before":
                assert standin.pool.num_free == free
                source.due.append(prompt("x#2"))
                phase[0] = "alone"
                return
            if phase[0] == "after":
                return
            waiting = [live for live in standin._waiting if live.request.request_id == "x#2"]
            if not watched.answers:
                return
            assert [live.state for live in waiting] == [State.WAITING]
            assert waiting[0].blocks == []
            if phase[0] == "alone":
                assert standin.pool.num_free == free
                steps[0] += (folder / f"{point}.here").exists()
                if steps[0] >= 5:
                    source.due.extend(prompt(f"other{i}") for i in range(OTHERS))
                    phase[0] = "others"
            elif (
                len(standin.finished) == OTHERS
                # The last one's blocks come back in the step after, with what it stores or not.
                and not standin._offers
                and not server.stream.outstanding
            ):
                # All that came later have run to their end, several times the accelerator's size.
                assert standin.pool.num_free == free
                pending_answers.extend(watched.answers)
                (folder / f"{point}.held").unlink()
                phase[0] = "after"

        standin = server.standin(source, on_step, engine=watched)
        standin.run()
        assert phase[0] == "after"
        assert OTHERS * (PROMPT_X // SHAPE.block_tokens) >= 4 * BLOCKS
        by_name = {item.request_id: item for item in standin.finished}
        assert [item.request_id for item in standin.finished][-1] == "x#2"
        # As long as the gate was shut: nothing is ready, and the answer is "ask again".
        assert len(pending_answers) > 5
        assert {ready for ready, _ in pending_answers} == {0}
        assert {answer for _, answer in pending_answers} == {Lookup.RETRY}
        for answers in watched.by_key.values():
            assert set(answers[: len(pending_answers)]) == {Lookup.RETRY}
        # Then all of it is loaded, and exact.
        assert watched.answers[-1] == (CHUNKS_X, Lookup.MISS)
        assert by_name["x#2"].loaded_tokens == CHUNKS_X * SHAPE.chunk_tokens
        assert by_name["x#2"].sources == {"held": CHUNKS_X}
        server.check_bytes(standin)
        assert server.stream.counters.load_bytes >= CHUNKS_X * SHAPE.chunk_bytes
        assert standin.pool.num_free == free
        server.settle()
        server.engine.check()


@pytest.mark.fault("C15", "C26")
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_chunk_with_a_wrong_checksum_is_recomputed(
    tmp_path: Path, isolation: str, bad: int
) -> None:
    """It is never called ready, not even once; what stands before it is used."""
    with promoting(tmp_path, isolation) as (server, folder):
        key = chunk_keys(prompt("x"))[bad]
        path = folder / key.hex()
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        source = Queue(1)
        source.due.append(prompt("x#2"))
        watched = Watched(server.engine, "x#2")
        standin = server.standin(source, engine=watched)
        standin.run()
        assert Lookup.HIT not in watched.by_key[key]
        assert watched.by_key[key][-1] is Lookup.MISS
        assert {ready for ready, _ in watched.answers} <= set(range(bad + 1))
        assert watched.answers[-1] == (bad, Lookup.MISS)
        (only,) = standin.finished
        assert only.loaded_tokens == bad * SHAPE.chunk_tokens
        assert only.computed_tokens == PROMPT_X - only.loaded_tokens
        server.check_bytes(standin)
        assert standin.pool.num_free == BLOCKS
        # The chunk is in host memory again, from the accelerator.
        assert server.engine.holds(key)
        server.settle()
        server.engine.check()
        again = Queue(1)
        again.due.append(prompt("x#3"))
        last = server.standin(again)
        last.run()
        assert last.finished[0].loaded_tokens == CHUNKS_X * SHAPE.chunk_tokens
        server.check_bytes(last)
