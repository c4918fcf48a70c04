# SPDX-License-Identifier: Apache-2.0
"""Two real engines: one computes prompts, the other takes their chunks from it and goes on.

The first is the prefill instance of most tests, the second the decode instance; either can be
either. Prompts are told apart by their seeds, so that no test finds what another has left. The
control of a prompt is the prefill instance's own answer over its device's cache. Both engines
compute in steps of one chunk where the model lets them, so that a prefix has the same bytes
whoever has computed it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine, Processes
from tests.vllm.serve import free_ports
from tests.vllm.test_families import same
from tests.vllm.test_slice import environment, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HOST_BYTES = 64 << 20
SAMPLES_SECONDS = 5.0
"""Within which the tiers' metrics are up to date."""
CHUNKS = 8
"""Of a prompt of the model "full"."""
STEP_SECONDS = 0.05

_seeds = itertools.count(1)
_names = itertools.count(1)


class Node:
    """An engine with a peer tier."""

    def __init__(self, engine: Engine, shm: Path, port: int) -> None:
        self.engine = engine
        self.shm = shm
        self.port = port

    def start(self, model: Path, tiers: list[dict[str, Any]], **options: Any) -> None:
        started = self.engine.start(
            model=str(model),
            extra={
                "cpu_bytes_to_use": HOST_BYTES,
                "directory": str(self.shm),
                "on_reset": "keep",
                "secondary_tiers": tiers,
            },
            **options,
        )
        self.chunk_tokens: int = started["block_size"]
        (state,) = self.engine.call("rpc", name="kvt_state")
        self.payload_bytes: list[int] = state["payload_bytes"]
        self.windows: list[int | None] = state["windows"]

    def drive(self, name: str, **arguments: Any) -> Any:
        return self.engine.call("drive", name=name, **arguments)

    def answer(
        self, tokens: list[int], transfer: dict[str, Any] | None = None, max_tokens: int = 4
    ) -> dict[str, Any]:
        """One request to its end."""
        return self.drive(
            "answer",
            request=f"r{next(_names)}",
            prompt=tokens,
            transfer=transfer,
            max_tokens=max_tokens,
        )

    def forget(self, host: bool = True) -> None:
        """Nothing is on the accelerator any more, nor in host memory."""
        self.drive("drain")
        self.engine.call("settle")
        assert self.engine.call("reset", connector=host)
        self.engine.call("rpc", name="kvt_wipe")

    def counter(self, name: str) -> dict[str, float]:
        """Series of one metric, by labels."""
        return self.engine.call("counters", name=name)

    def until(self, name: str, labels: str, value: float) -> None:
        """Until a series has a value; the tiers tell theirs twice a second."""
        deadline = time.monotonic() + SAMPLES_SECONDS
        while (found := self.counter(name).get(labels, 0)) != value:
            assert time.monotonic() < deadline, f"{name} {labels}: {found} of {value}"
            time.sleep(0.05)

    @property
    def place(self) -> dict[str, Any]:
        """What a request says of this instance."""
        return {"remote_host": "127.0.0.1", "remote_port": self.port}

    def service(self) -> int:
        """Process of its tier service."""
        return self.engine.call("service")


class Pair:
    """A prefill and a decode instance, running the same model."""

    def __init__(self, prefill: Node, decode: Node, family: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.family = family

    def start(self, model: Path, files: Path) -> None:
        here, there = self.prefill, self.decode
        options: dict[str, Any] = {
            "full": {"blocks": 20, "max_model_len": 1280, "max_num_batched_tokens": 128},
            "linear": {"blocks": 24, "max_model_len": 3456},
        }[self.family]
        peer = {"type": "p2p", "prefill_wait_seconds": 30, "heartbeat_seconds": 0.3}
        # The decode instance knows of the other one from requests alone.
        known = {"port": here.port, "peers": [f"localhost:{there.port}"]}
        other = background(here.start, model, [peer | known], **options)
        fs = {"type": "fs", "root_dir": str(files), "capacity_bytes": "1GiB"}
        there.start(model, [fs, peer | {"port": there.port}], **options)
        other.result(400)
        assert here.payload_bytes == there.payload_bytes

    def stop(self) -> None:
        for node in (self.prefill, self.decode):
            if node.engine.process.poll() is None:
                node.engine.call("stop")
                assert list(node.shm.iterdir()) == []

    def a_prompt(self, tail: int = 6) -> list[int]:
        tokens = CHUNKS * 128 if self.family == "full" else 4 * self.prefill.chunk_tokens
        return prompt(4000 + next(_seeds), tokens + tail)

    @property
    def cached(self) -> int:
        """Tokens of a prompt that its chunks hold."""
        size = self.prefill.chunk_tokens
        return CHUNKS * size if self.family == "full" else 4 * size

    @property
    def moved_bytes(self) -> int:
        """Of the chunks that a request needs of a prompt: all, and of each state the last."""
        count = self.cached // self.prefill.chunk_tokens
        return sum(
            size * (count if window is None else 1)
            for size, window in zip(self.prefill.payload_bytes, self.prefill.windows, strict=True)
        )

    def control(self, tokens: list[int]) -> dict[str, Any]:
        """The answer over the device's own cache; nothing is left of it."""
        assert self.prefill.answer(tokens)["cached"] == 0
        control = self.prefill.answer(tokens)
        assert control["cached"] == self.cached
        self.prefill.forget()
        return control

    def transfer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``kv_transfer_params`` of the prefill's request, and of the decode's."""
        name = {"kv_request_id": f"transfer-{next(_names)}"}
        return {"remote_decoder": name}, {"remote_prefiller": name | self.prefill.place}

    @contextlib.contextmanager
    def counted(self, moved_bytes: int | None = None) -> Iterator[None]:
        """Exactly so many bytes of chunks go from the prefill to the decode instance. Around all
        that do: what is told late would count for the next one."""
        moved_bytes = self.moved_bytes if moved_bytes is None else moved_bytes
        loaded, served = "kvtier_transfer_bytes_total", "kvtier_peer_served_bytes_total"
        before = (
            self.decode.counter(loaded).get("p2p load", 0),
            self.prefill.counter(served).get("p2p", 0),
        )
        yield
        self.decode.engine.call("settle")
        self.decode.until(loaded, "p2p load", before[0] + moved_bytes)
        self.prefill.until(served, "p2p", before[1] + moved_bytes)

    def ask(self, tokens: list[int], transfer: dict[str, Any]) -> str:
        """The decode instance has asked for a prompt, and waits; name of the request."""
        request = f"r{next(_names)}"
        self.decode.drive("add", request=request, prompt=tokens, transfer=transfer)
        self.decode.drive("step", steps=5)
        self.prefill.until("kvtier_peer_awaited", "p2p", len(self.kinds))
        return request

    @property
    def kinds(self) -> set[bool]:
        """Chunks of windowed groups are asked for apart from the others."""
        return {window is None for window in self.prefill.windows}


def background(function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
    """The result of a call that runs on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **named))
        except BaseException as exc:  # noqa: BLE001  told to whoever waits
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, processes: Processes
) -> Iterator[tuple[Engine, Engine]]:
    """The first one does not live to see the end of the module."""
    log = tmp_path_factory.mktemp("engines") / "prefill"
    with Engine(log, environment(1)) as prefill, processes.lend() as decode:
        yield prefill, decode


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest,
    engines: tuple[Engine, Engine],
    checkpoint: Callable[[str], Path],
    shm_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    first = free_ports(2)
    nodes = []
    for number, name in enumerate(("prefill", "decode")):
        shm = shm_directory / name
        shm.mkdir(exist_ok=True)
        nodes.append(Node(engines[number], shm, first + number))
    made = Pair(*nodes, request.param)
    made.start(checkpoint(request.param), tmp_path_factory.mktemp("files"))
    try:
        yield made
    finally:
        made.stop()
        for node in nodes:
            node.shm.rmdir()


both = pytest.mark.parametrize("pair", ["linear", "full"], indirect=True)
full = pytest.mark.parametrize("pair", ["full"], indirect=True)


@both
def test_prefill_then_decode(pair: Pair) -> None:
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    prefill, decode = pair.transfer()
    with pair.counted():
        first = pair.prefill.answer(tokens, prefill, max_tokens=1)
        answer = pair.decode.answer(tokens, decode)
    assert first["cached"] == 0
    assert answer["cached"] == pair.cached
    assert first["tokens"] == answer["tokens"][:1]
    assert same(answer, control)


@both
def test_decode_asks_before_there_is_anything(pair: Pair) -> None:
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    prefill, decode = pair.transfer()
    decode["remote_prefiller"]["remote_host"] = "localhost"
    with pair.counted():
        request = pair.ask(tokens, decode)
        rest = background(pair.decode.drive, "drain")
        pair.prefill.answer(tokens, prefill, max_tokens=1)
        rest.result(60)
    answer = pair.decode.drive("state")["finished"][request]
    assert answer["cached"] == pair.cached
    assert same(answer, control)


@full
def test_damage_on_the_prefill_instance_changes_the_answer(pair: Pair) -> None:
    """Before its service has taken a checksum; so the bytes of the answers above came from it."""
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    prefill, decode = pair.transfer()
    pair.prefill.answer(tokens, prefill, max_tokens=1)
    pair.prefill.engine.call("settle")
    pair.prefill.engine.call("rpc", name="kvt_swap_heads", arguments=[4, 0])
    with pair.counted():
        answer = pair.decode.answer(tokens, decode)
    assert answer["cached"] == control["cached"]
    assert not same(answer, control)


@full
def test_a_static_peer_and_the_source_of_a_request(pair: Pair) -> None:
    """Either takes from the other: one is told of it by its configuration, one by each request."""
    first, second = pair.a_prompt(), pair.a_prompt()
    controls = [pair.control(tokens) for tokens in (first, second)]
    pair.decode.answer(first)
    answer = pair.prefill.answer(first)
    assert answer["cached"] == pair.cached
    assert same(answer, controls[0])
    pair.prefill.answer(second)
    source = {"kv_request_id": "any", "remote_host": "127.0.0.1"}
    with pair.counted():
        answer = pair.decode.answer(
            second, {"remote_kv_source": source | {"remote_port": pair.prefill.port}}
        )
    assert answer["cached"] == pair.cached
    assert same(answer, controls[1])
    # Nobody waits for what the source does not have; nor for long for one that is not there.
    for port in (pair.prefill.port, free_ports(1)):
        third = pair.a_prompt()
        began = time.monotonic()
        answer = pair.decode.answer(third, {"remote_kv_source": source | {"remote_port": port}})
        assert answer["cached"] == 0
        assert time.monotonic() - began < 15
    with pair.counted(0):  # the decode instance has no static peer
        pair.prefill.answer(tokens := pair.a_prompt())
        assert pair.decode.answer(tokens)["cached"] == 0


@full
def test_one_request_from_host_memory_files_and_a_peer(pair: Pair) -> None:
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    decode, size = pair.decode, pair.prefill.payload_bytes[0]
    decode.engine.call("note_requests")
    decode.answer(tokens[: 5 * pair.prefill.chunk_tokens + 6])
    decode.engine.call("settle")
    (keys,) = decode.engine.call("chunks")
    assert len(keys) == 5
    assert decode.engine.call("drop", keys=keys[2:]) == 3
    decode.forget(host=False)
    there, here = pair.transfer()
    pair.prefill.answer(tokens, there, max_tokens=1)

    def counts() -> dict[str, float]:
        return {
            f"{name} {labels}": value
            for name in ("lookup_chunks", "transfer_bytes")
            for labels, value in decode.counter(f"kvtier_{name}_total").items()
        }

    before = counts()
    with pair.counted(3 * size):
        answer = decode.answer(tokens, here)
    assert answer["cached"] == pair.cached
    assert same(answer, control)
    after = {name: value - before.get(name, 0) for name, value in counts().items()}
    assert after["lookup_chunks host hit"] == 2
    assert after["lookup_chunks fs hit"] == after["lookup_chunks p2p hit"] == 3
    assert after["transfer_bytes fs load"] == after["transfer_bytes p2p load"] == 3 * size


@full
def test_what_only_the_prefills_accelerator_has_comes_as_well(pair: Pair) -> None:
    """Its host memory has lost the head of the prompt, the accelerator the tail: what vLLM finds
    there and what it loads would not be stored anew for a request of its own."""
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    node = pair.prefill
    node.engine.call("note_requests")
    node.answer(tokens)
    node.engine.call("settle")
    (keys,) = node.engine.call("chunks")
    # All blocks that are free; then six more, and vLLM gives the last ones of a request away first.
    for blocks in (10, 6):
        node.answer(prompt(4000 + next(_seeds), blocks * 128 - 9), max_tokens=1)
    assert node.engine.call("drop", keys=keys[:2]) == 2
    there, here = pair.transfer()
    first = node.drive("answer", request="lost", prompt=tokens, transfer=there, max_tokens=1)
    assert first["cached"] == pair.cached
    ((on_device, loaded),) = node.drive("state")["found"]["lost"]
    assert 2 * 128 <= on_device < pair.cached == on_device + loaded
    with pair.counted():
        answer = pair.decode.answer(tokens, here)
    assert answer["cached"] == pair.cached
    assert same(answer, control)


@full
def test_the_end_of_a_prefill_is_told_while_its_last_chunks_are_on_their_way(pair: Pair) -> None:
    """vLLM ends a request before the copies of its last step have begun. By then they have their
    slots, so that a peer is told to wait for them, however long they take."""
    tokens = pair.a_prompt(tail=0)
    there, here = pair.transfer()
    node = pair.prefill
    node.engine.call("note_times")
    node.engine.call("rpc", name="kvt_slow_copies", arguments=[1.5])
    try:
        node.drive("add", request="slow", prompt=tokens, transfer=there, max_tokens=1)
        while not (ends := node.engine.call("times")["ends"]):
            node.drive("step")
        assert ends[0]["missing"] == 0
        assert ends[0]["writing"] > 0
        with pair.counted():
            rest = background(node.drive, "drain")
            answer = pair.decode.answer([*tokens, 5, 6], here)
            rest.result(60)
    finally:
        node.engine.call("rpc", name="kvt_slow_copies", arguments=[0])
    assert answer["cached"] == pair.cached


@full
@pytest.mark.timed
def test_decode_takes_each_chunk_while_the_next_one_is_computed(pair: Pair) -> None:
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    there, here = pair.transfer()
    for node in (pair.prefill, pair.decode):
        node.engine.call("note_times")
    pair.prefill.engine.call("rpc", name="kvt_slow_steps", arguments=[STEP_SECONDS])
    try:
        with pair.counted():
            request = pair.ask(tokens, here)
            rest = background(pair.decode.drive, "drain")
            asked = {"prompt": tokens, "transfer": there, "max_tokens": 1}
            pair.prefill.drive("answer", request="slow", **asked)
            rest.result(60)
    finally:
        pair.prefill.engine.call("rpc", name="kvt_slow_steps", arguments=[0])
    assert same(pair.decode.drive("state")["finished"][request], control)
    first, second = (node.engine.call("times") for node in (pair.prefill, pair.decode))
    written, loaded = first["computed"], second["loaded"]
    end = first["answered"]["slow"]
    assert len(written) == len(loaded) == CHUNKS
    assert loaded[0] < written[1]
    assert loaded[-1] < end + 2 * STEP_SECONDS


@full
def test_the_prefills_tier_service_is_killed_while_decode_waits(pair: Pair) -> None:
    service = pair.prefill.service()
    control, answer = killed(pair, lambda: os.kill(service, signal.SIGKILL))
    assert answer["tokens"] == control["tokens"]
    # It starts anew, and the next request is served.
    deadline = time.monotonic() + 20
    node = pair.prefill
    while node.counter("kvtier_service_up")[""] != 1 or node.service() in (0, service):
        assert time.monotonic() < deadline, "the service does not come back"
        time.sleep(0.1)
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    there, here = pair.transfer()
    pair.prefill.answer(tokens, there, max_tokens=1)
    with pair.counted():
        answer = pair.decode.answer(tokens, here)
    assert answer["cached"] == pair.cached
    assert same(answer, control)


@full
def test_the_prefill_instance_is_killed_while_decode_waits(pair: Pair) -> None:
    """The last test: there is one instance less from now on."""

    def kill() -> None:
        service = pair.prefill.service()
        os.kill(service, signal.SIGKILL)
        pair.prefill.engine.kill()
        for left in pair.prefill.shm.iterdir():
            left.unlink()  # as the next start would

    control, answer = killed(pair, kill)
    assert answer["tokens"] == control["tokens"]
    # Whoever names it from now on does not wait for it.
    tokens = pair.a_prompt()
    began = time.monotonic()
    assert pair.decode.answer(tokens, pair.transfer()[1])["cached"] == 0
    assert time.monotonic() - began < 15


def killed(pair: Pair, kill: Callable[[], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Control and answer of a request whose prefill ends after a few of its chunks."""
    tokens = pair.a_prompt()
    control = pair.control(tokens)
    there, here = pair.transfer()
    name, labels = "kvtier_transfer_bytes_total", "p2p load"
    pair.decode.engine.call("settle")
    before = pair.decode.counter(name).get(labels, 0)
    request = pair.ask(tokens, here)
    pair.prefill.drive("add", request=f"p{request}", prompt=tokens, transfer=there, max_tokens=1)
    pair.prefill.engine.call("note_times")
    while (written := len(pair.prefill.engine.call("times")["computed"])) < 3:
        pair.prefill.drive("step")
    assert written < CHUNKS
    pair.decode.until(name, labels, before + written * pair.prefill.payload_bytes[0])
    kill()
    began = time.monotonic()
    pair.decode.drive("drain")
    assert time.monotonic() - began < 15
    answer = pair.decode.drive("state")["finished"][request]
    assert answer["cached"] == written * pair.prefill.chunk_tokens
    return control, answer
