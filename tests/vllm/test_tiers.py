# SPDX-License-Identifier: Apache-2.0
"""Tiers beside a real vLLM engine: other people's, and such as never end what they were given.

The source of every reload is proven by counters: the accelerator's cache is reset, host memory is
empty, and so many chunks came from the tier. What a reload brings is told by test_families.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.namespace import decode_json, difference
from tests.vllm.engine import Engine, Processes, series
from tests.vllm.test_slice import (
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    FULL_BLOCKS,
    HOST_BYTES,
    environment,
    prompt,
    same,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = FULL_BLOCKS
CHUNK_BYTES = 256 << 10
FILLERS = HOST_BYTES // CHUNK_BYTES // CHUNKS + 2
"""Prompts that push everything else out of host memory."""


class Served:
    """An engine with a file tier; one process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, tokens: list[int]) -> dict[str, Any]:
        (answer,) = self.engine.call("generate", prompts=[tokens])
        return answer

    def fill(self, tokens: list[int]) -> None:
        """A prompt whose answer nobody wants; its steps are enough for its stores."""
        self.engine.call("generate", prompts=[tokens], max_tokens=4)

    def state(self) -> dict[str, Any]:
        return self.engine.call("manager")

    def settle(self) -> dict[str, Any]:
        """The manager's state when the tiers have done what they were given."""
        return self.engine.call("settle")

    def forget_device(self) -> None:
        assert self.engine.call("reset")

    def empty_host(self) -> None:
        """Host memory is full of other prompts, all of which the files have."""
        for seed in range(900, 900 + FILLERS):
            self.fill(prompt(seed))
        self.settle()


def options(model: Path, shm: Path, files: Path, **more: Any) -> dict[str, Any]:
    """Arguments of ``Engine.start``."""
    tier = {"type": "fs", "root_dir": str(files), "capacity_bytes": "1GiB"}
    extra = {
        "cpu_bytes_to_use": HOST_BYTES,
        "directory": str(shm),
        "secondary_tiers": [tier],
        "flush_on_shutdown_seconds": 20,
    }
    return {"model": str(model), "blocks": DEVICE_BLOCKS, "extra": extra | more}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("full")


VLLM_MANAGERS = {"module_path": "tests.tiers.vllm_managers", "color": "red"}


@pytest.mark.fault("C15")
@pytest.mark.parametrize(
    ("tier", "loads", "corrupt"),
    [
        ({"type": "DictionaryTier", "module_path": "examples.own_tier"}, "done", 0),
        (VLLM_MANAGERS | {"type": "VllmDictionary"}, "done", 0),
        (
            {
                "type": "ExampleSecondaryTierManager",
                "module_path": "vllm.v1.kv_offload.tiering.example.manager",
            },
            "corrupt",
            CHUNKS,
        ),
        (VLLM_MANAGERS | {"type": "Breaking", "size": CHUNKS}, "io", 0),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_tiers_of_other_people(
    model: Path,
    own_shm_directory: Path,
    tmp_path: Path,
    processes: Processes,
    tier: dict[str, Any],
    loads: str,
    corrupt: int,
) -> None:
    """A class with the four methods, one written against vLLM's base, vLLM's own example, which
    keeps no bytes and says that it has loaded them (what it "loads" is never used), and one that
    fails. vLLM's endpoint tells of each what it tells of kvtier's own tiers."""
    mine = prompt(1)
    with processes.lend() as engine:
        engine.start(
            **options(
                model,
                own_shm_directory,
                tmp_path,
                secondary_tiers=[tier | {"name": "own"}],
                on_reset="keep",
            ),
            disable_log_stats=False,
        )
        one = Served(engine)

        def told() -> dict[tuple[str, str], float]:
            """What the endpoint says of the tier, zeros left out."""
            one.settle()
            one.fill(prompt(51, 100))  # a step that takes what came after the last one
            return {
                (name.removeprefix("kvtier_"), labels): value
                for (name, tier, labels), value in series(engine.call("metrics")).items()
                if tier == "own" and value
            }

        one.run(mine)
        found = told()
        assert found["tier_up", ""] == 1
        assert found["chunks_total", "store done"] == CHUNKS
        assert found["transfer_bytes_total", "store"] == CHUNKS * CHUNK_BYTES
        assert found["transfer_seconds_count", "store"] > 0
        control = one.run(mine)
        one.fill(prompt(2))
        more = "io" if loads == "io" else "done"  # twice what the last of them takes
        found = told()
        assert found["chunks_total", f"store {more}"] == (2 * CHUNKS if more == "done" else CHUNKS)
        assert ("transfer_seconds_count", "load") not in found

        assert engine.call("reset", connector=True)
        again = one.run(mine)
        found = told()
        good = loads == "done"
        assert again["cached"] == (CHUNKS * BLOCK_TOKENS if good else 0)
        assert again["tokens"] == control["tokens"]
        assert not good or same(again, control)
        assert found["chunks_total", f"load {loads}"] == CHUNKS
        assert found.get(("lookup_chunks_total", "hit"), 0) == (CHUNKS if good else 0)
        assert found.get(("corrupt_chunks_total", ""), 0) == corrupt
        moved = CHUNKS * CHUNK_BYTES if good else 0
        assert found.get(("transfer_bytes_total", "load"), 0) == moved
        assert found["transfer_seconds_count", "load"] > 0
        # Such a class lives beside the scheduler; see below for all others.
        assert {"kvtier-own", "kvtier-service"} <= set(engine.call("threads"))


def test_a_slow_copy_costs_a_step_nothing(
    model: Path, own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """A request answers token by token while the blocks of others are copied, in both directions.
    Its steps go on during a copy of two seconds, and take no longer than without one."""
    with processes.lend() as engine:
        arguments = options(model, own_shm_directory, tmp_path / "files", secondary_tiers=[])
        engine.start(**(arguments | {"blocks": 64}))

        def drive(name: str, **arguments: Any) -> Any:
            return engine.call("drive", name=name, **arguments)

        drive("answer", request="first", prompt=prompt(1))
        assert engine.call("reset")
        drive("add", request="talk", prompt=prompt(9, 64), max_tokens=3000)
        drive("step", steps=4)
        alone = [seconds for seconds, _ in drive("timed", span=0.5)]
        engine.call("rpc", name="kvt_slow_copies", arguments=[2.0])
        for request, seed, cached in (("again", 1, CHUNKS * BLOCK_TOKENS), ("new", 2, 0)):
            drive("add", request=request, prompt=prompt(seed), max_tokens=1)
            steps: list[tuple[float, int]] = []
            deadline = time.monotonic() + 60
            # A store begins with the step after the one that has computed its blocks.
            while request not in drive("state")["finished"] or steps[-1][1] or len(steps) < 8:
                assert time.monotonic() < deadline, steps[-3:]
                steps += drive("timed", span=0.5)
            assert drive("state")["finished"][request]["cached"] == cached
            beside = [seconds for seconds, jobs in steps if jobs]
            assert len(beside) >= 4, steps
            assert statistics.median(beside) < statistics.median(alone) + 0.25
        assert "talk" not in drive("state")["finished"]
        drive("abort", request="talk")
        drive("drain")


@pytest.mark.fault("K10")
def test_what_a_request_says_of_its_tiers_and_a_host_smaller_than_one_request(
    model: Path, own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """``kv_load_tiers`` and ``max_offload_tokens`` mean what they mean in vLLM. Host memory has
    eight slots: of a prompt of twenty chunks the first are kept, and the engine serves on."""
    slots = 8
    with processes.lend() as engine:
        engine.start(
            **options(
                model, own_shm_directory, tmp_path / "files", cpu_bytes_to_use=slots * (256 << 10)
            )
        )
        one = Served(engine)

        def run(name: str, seed: int, chunks: int, **transfer: Any) -> int:
            """Chunks that a request has got from somewhere."""
            answer = engine.call(
                "drive",
                name="answer",
                request=name,
                prompt=prompt(seed, chunks * BLOCK_TOKENS + 8),
                transfer=transfer or None,
            )
            one.settle()
            assert len(answer["tokens"]) == 4
            return int(answer["cached"] // BLOCK_TOKENS)

        def hits() -> int:
            return int(one.state()["tier_hits"].get("fs", 0))

        # Of five chunks the first two are stored.
        assert run("limited", 1, 5, max_offload_tokens=2 * BLOCK_TOKENS + 1) == 0
        one.forget_device()
        assert run("limited again", 1, 5, max_offload_tokens=0) == 2
        assert hits() == 0
        assert one.state()["ready"] == 2

        # Larger than host memory: what fits is stored, in order, and comes back.
        assert run("large", 2, CHUNKS) == 0
        one.forget_device()
        kept = run("large again", 2, CHUNKS)
        assert 1 <= kept <= slots
        assert one.state()["failed"] == 0

        # Now the first prompt is in the files alone.
        before = hits()
        one.forget_device()
        assert run("none", 1, 5, kv_load_tiers=[], max_offload_tokens=0) == 0
        one.forget_device()
        assert run("host", 1, 5, kv_load_tiers=[{"medium": "CPU"}], max_offload_tokens=0) == 0
        assert hits() == before
        one.forget_device()
        files = [{"medium": "storage", "locality": "local"}]
        assert run("files", 1, 5, kv_load_tiers=files, max_offload_tokens=0) == 2
        assert hits() == before + 2


@pytest.mark.fault("V02", "V04")
def test_what_the_device_has_is_not_read_again(
    model: Path, own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """The device has lost a prompt's last blocks and host memory all of it: the gap comes from the
    files, and nothing else. A preemption that takes the device's part plans anew, for all. No
    thread of the tiers is in the scheduler's process."""
    mine = prompt(1)
    with processes.lend() as engine:
        engine.start(**options(model, own_shm_directory, tmp_path / "files"))
        one = Served(engine)
        one.run(mine)
        control = one.run(mine)
        engine.call("note_requests")

        def drive(name: str, **arguments: Any) -> Any:
            return engine.call("drive", name=name, **arguments)

        drive("answer", request="again", prompt=mine, max_tokens=8)
        (keys,) = engine.call("chunks")
        assert len(keys) == CHUNKS
        drive("answer", request="other", prompt=prompt(2, 12 * BLOCK_TOKENS))
        one.settle()
        assert engine.call("drop", keys=keys) == CHUNKS
        before = one.state()
        assert before["tier_hits"].get("fs", 0) == 0

        drive("add", request="mine", prompt=mine, max_tokens=8)
        while not (found := drive("state")["found"].get("mine")):
            drive("step")
        ((there, gap),) = found
        assert there + gap == CHUNKS * BLOCK_TOKENS
        assert min(there, gap) >= 4 * BLOCK_TOKENS
        lost = gap // BLOCK_TOKENS
        assert one.settle()["tier_hits"]["fs"] == lost
        (rank,) = engine.call("rpc", name="kvt_state")
        assert rank["loaded_chunks"] == lost

        drive("step", steps=4)
        assert drive("state")["finished"].get("mine") is None
        assert drive("reset", running=True, connector=False)
        drive("drain")
        state = drive("state")
        assert [list(one) for one in state["found"]["mine"][1:]] == [[0, CHUNKS * BLOCK_TOKENS]]
        assert one.settle()["tier_hits"]["fs"] == CHUNKS  # what was read once is in host memory
        (rank,) = engine.call("rpc", name="kvt_state")
        assert rank["loaded_chunks"] == lost + CHUNKS
        assert state["finished"]["mine"]["tokens"] == control["tokens"]
        tiers = ("kvtier-fs", "kvtier-service", "kvtier-crc")
        assert not [name for name in engine.call("threads") if name.startswith(tiers)]


class Gated:
    """An engine driven step by step, whose one tier has gates.

    Parameters
    ----------
    engine : Engine
    folder : Path
        Of the gates' files.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    def drive(self, method: str, **arguments: Any) -> Any:
        return self.engine.call("drive", name=method, **arguments)

    def close_gate(self, operation: str) -> None:
        (self.folder / f"came-{operation}").unlink(missing_ok=True)
        (self.folder / f"close-{operation}").touch()

    def open_gate(self, operation: str) -> None:
        (self.folder / f"close-{operation}").unlink()

    def step_to(self, operation: str) -> None:
        """Step until a call waits at a gate."""
        self.drive("step_until", file=str(self.folder / f"came-{operation}"))

    def run(self, request: str, tokens: list[int]) -> dict[str, Any]:
        """One answer, and all steps that vLLM's loop makes for it and after it."""
        self.drive("add", request=request, prompt=tokens)
        self.drive("drain")
        return self.drive("state")["finished"][request]

    def nothing_in_use(self) -> dict[str, Any]:
        """Accounts at a quiet point."""
        left = self.drive("close_accounts")
        for account in ("writes", "loads", "held", "lent", "finds", "cascades", "requests"):
            assert left[account] == 0, (account, left)
        assert left["service"]["jobs"] == 0
        assert left["blocks"] == {}
        return left


def gated(folder: Path, **more: Any) -> dict[str, Any]:
    """Configuration of the gated tier."""
    folder.mkdir(exist_ok=True)
    return {
        "type": "GatedTier",
        "module_path": "tests.vllm.scripted",
        "name": "gated",
        "script": "gated",
        "folder": str(folder),
    } | more


@pytest.mark.fault("H25")
def test_a_tier_that_never_stores_costs_no_block_and_no_step(
    model: Path, own_shm_directory: Path, tmp_path: Path
) -> None:
    """The store of the one tier there is hangs for good; vLLM's accelerator is none the wiser."""
    with Engine(tmp_path / "log", environment(1)) as engine:
        tiers = [gated(tmp_path / "gates", timeout_seconds=600)]
        engine.start(
            **options(
                model,
                own_shm_directory,
                tmp_path,
                secondary_tiers=tiers,
                flush_on_shutdown_seconds=1,
            )
        )
        one = Gated(engine, tmp_path / "gates")
        one.close_gate("store")
        free = one.drive("state")["free_blocks"]
        assert free == DEVICE_BLOCKS - 1  # vLLM keeps block 0 for itself
        for seed in range(10):  # seven times what the accelerator holds
            assert one.run(f"r{seed}", prompt(seed))["cached"] == 0
            state = one.drive("state")
            assert state["free_blocks"] == free
            assert state["blocks"] == {}
        assert (tmp_path / "gates" / "came-store").exists()
        assert state["cascades"] > 0
        # The service is busy and the engine is idle: not one step.
        assert one.drive("idle_for", span=1.0) == {"schedules": 0, "service_idle": False}
        # Several at once, more than fit side by side.
        for seed in range(20, 26):
            one.drive("add", request=f"r{seed}", prompt=prompt(seed))
        one.drive("drain")
        state = one.drive("state")
        assert len(state["finished"]) == 16
        assert state["free_blocks"] == free
        # The gate stays closed: the engine ends all the same.
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < 25.0


@pytest.mark.fault("H05")
def test_a_promotion_under_way_holds_no_block_and_is_no_hit(
    model: Path, own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    mine = prompt(1)
    with processes.lend() as engine:
        tiers = [gated(tmp_path / "gates", timeout_seconds=600)]
        arguments = options(
            model,
            own_shm_directory,
            tmp_path,
            secondary_tiers=tiers,
            lookup_timeout_seconds=600,
        )
        engine.start(**arguments)
        one = Gated(engine, tmp_path / "gates")
        one.run("cold", mine)
        control = one.run("control", mine)
        for seed in range(900, 906):
            one.run(f"filler{seed}", prompt(seed))
            one.nothing_in_use()
        assert engine.call("reset")
        free = one.drive("state")["free_blocks"]
        before = engine.call("manager")["tier_hits"]["gated"]
        one.close_gate("load")
        one.drive("add", request="mine", prompt=mine)
        one.step_to("load")
        ended = len(one.drive("state")["finished"])
        for seed in range(20, 23):  # others run meanwhile
            one.drive("add", request=f"other{seed}", prompt=prompt(seed))
        one.drive("step_until", ended=ended + 3)
        state = one.drive("state")
        assert "mine" not in state["finished"]
        assert state["blocks"] == {"mine": 0}
        assert state["free_blocks"] == free
        # The first chunk to come is asked again; a miss behind it only ends vLLM's walk.
        assert set(state["answers"]["mine"]) == {"RETRY", "MISS"}
        assert engine.call("manager")["tier_hits"]["gated"] == before
        one.open_gate("load")
        one.drive("drain")
        state = one.drive("state")
        assert "HIT" in state["answers"]["mine"]
        assert state["finished"]["mine"]["cached"] == CHUNKS * BLOCK_TOKENS
        assert state["finished"]["mine"]["tokens"] == control["tokens"]
        assert state["finished"]["mine"]["logprobs"] == pytest.approx(control["logprobs"], abs=5e-5)
        one.nothing_in_use()
        assert engine.call("manager")["tier_hits"]["gated"] == before + CHUNKS


def other_weights(content: bytes) -> bytes:
    """A checkpoint's file with other signs in its last page."""
    changed = bytearray(content)
    changed[-4095::2] = bytes(one ^ 0x80 for one in changed[-4095::2])
    return bytes(changed)


def alike(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two answers of the driver are the same to four digits."""
    return left["tokens"] == right["tokens"] and all(
        abs(one - other) < 5e-5
        for one, other in zip(left["logprobs"], right["logprobs"], strict=True)
    )


@pytest.mark.fault("C23", "C24")
def test_a_reset_in_the_middle_of_everything(
    model: Path, own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """Copies from the accelerator, cascades and a promotion are under way when the weights become
    others: none leaks, and nothing from before the reset is found in any tier, nor in the next
    start. What the first weights have left there is found by them alone, and exactly."""
    old, pending, running = prompt(1), prompt(2), prompt(3)
    files = {"type": "fs", "root_dir": str(tmp_path / "files"), "capacity_bytes": "1GiB"}
    model = Path(shutil.copytree(model, tmp_path / "model"))
    (weights,) = model.glob("*.safetensors")
    first_weights = weights.read_bytes()
    with processes.lend() as engine:
        tiers = [gated(tmp_path / "gates", timeout_seconds=600), files]
        arguments = options(
            model,
            own_shm_directory,
            tmp_path,
            secondary_tiers=tiers,
            lookup_timeout_seconds=600,
        )
        engine.start(**arguments)
        one = Gated(engine, tmp_path / "gates")
        cold = one.run("old", old)
        control = one.run("control", old)
        one.run("pending", pending)
        for seed in range(900, 906):
            one.run(f"filler{seed}", prompt(seed))
            one.nothing_in_use()
        assert engine.call("reset")
        one.close_gate("load")
        one.close_gate("store")
        one.drive("add", request="waits", prompt=pending)
        one.step_to("load")
        one.drive("add", request="stored", prompt=prompt(4))  # its cascades will hang
        one.step_to("store")
        one.drive("add", request="running", prompt=running, max_tokens=200)
        one.drive("step_until", writes=True)
        state = one.drive("state")
        assert state["finds"] > 0
        assert state["cascades"] > 0
        assert state["writes"] > 0
        weights.write_bytes(other_weights(first_weights))
        engine.call("rpc", name="reload_weights")
        assert one.drive("reset", running=True)
        one.open_gate("load")
        one.open_gate("store")
        one.drive("drain")
        finished = one.drive("state")["finished"]
        assert finished["waits"]["cached"] == 0
        assert len(finished["running"]["tokens"]) == 200
        one.nothing_in_use()
        before = engine.call("manager")["tier_hits"]
        updated = {}
        for name, tokens in (("old2", old), ("stored2", prompt(4)), ("filler2", prompt(905))):
            updated[name] = one.run(name, tokens)
            assert updated[name]["cached"] == 0
            one.nothing_in_use()
        assert engine.call("manager")["tier_hits"] == before
        assert not alike(updated["old2"], cold)
        # What was written after it is found.
        assert engine.call("reset")
        assert one.run("old3", old)["cached"] == CHUNKS * BLOCK_TOKENS
        one.nothing_in_use()

        def start_again() -> dict[str, Any]:
            engine.call("stop")
            engine.start(**arguments)
            return one.run("old", old)

        # With the weights of the update from the start: an answer that no chunk has a part in.
        again = start_again()
        assert again["cached"] == 0
        assert engine.call("settle")["tier_hits"]["fs"] == 0
        assert alike(again, updated["old2"])
        # With the first ones: theirs from before the reset, and none of those written after it.
        weights.write_bytes(first_weights)
        again = start_again()
        assert again["cached"] == CHUNKS * BLOCK_TOKENS
        assert engine.call("settle")["tier_hits"]["fs"] == CHUNKS
        assert alike(again, control)
        fields = [
            decode_json(path.read_bytes()) for path in (tmp_path / "files").glob("*/namespace.json")
        ]
        (home,) = [
            one
            for one in fields
            if {frozenset(difference(one, other)) for other in fields if other != one}
            == {frozenset({"epoch"}), frozenset({"model_fingerprint"})}
        ]
        assert "epoch" not in home


def test_the_last_cascade_of_a_burst_needs_no_step(
    model: Path, own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    files = tmp_path / "files"
    with processes.lend() as engine:
        engine.start(**options(model, own_shm_directory, files))
        one = Gated(engine, tmp_path)

        def burst(seeds: range) -> None:
            for seed in seeds:
                # It ends with its prefill, and its stores come with the last steps of all.
                one.drive("add", request=f"r{seed}", prompt=prompt(seed), max_tokens=1)
            one.drive("drain")  # to the last step that vLLM's loop makes

        def wait_for(chunks: int) -> None:
            deadline = time.monotonic() + 20.0
            while len(list(files.rglob("*.kv"))) < chunks:
                assert time.monotonic() < deadline, "the last chunks are not written"
                time.sleep(0.05)
            assert one.drive("idle_for", span=0.2)["schedules"] == 0

        # As much as may be on its way to a tier at once: half of host memory.
        assert 2 * CHUNKS * (256 << 10) == HOST_BYTES // 2
        burst(range(2))
        wait_for(2 * CHUNKS)
        # What is beyond that the tiers' process gets as the last request ends, and sends by itself.
        burst(range(2, 5))
        wait_for(5 * CHUNKS)
