# SPDX-License-Identifier: Apache-2.0
"""Data-parallel replicas of one ``vllm serve``: a region and endpoints for each, shared files."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from kvtier.obs.publisher import decode_message
from tests.vllm.engine import ONE_THREAD
from tests.vllm.serve import Server, command, free_ports
from tests.vllm.test_serve import SMALL
from tests.vllm.test_slice import BLOCK_TOKENS, FILLER_TOKENS, FULL_BLOCKS, HOST_BYTES, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REPLICAS = range(2)
CHUNKS = FULL_BLOCKS


def page(port: int, path: str) -> str:
    """A page of kvtier's own endpoint."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200
        return response.read().decode()
    finally:
        connection.close()


def counts(port: int) -> dict[str, float]:
    """Series of one replica, by name and the values of its labels in order."""
    return {
        " ".join([sample.name, *(sample.labels[key] for key in sorted(sample.labels))]): (
            sample.value
        )
        for family in text_string_to_metric_families(page(port, "/metrics"))
        for sample in family.samples
    }


def wait_for(server: Server, replica: int, port: int, name: str, value: float) -> None:
    """Until a series has a value. An engine looks after its counters in its steps, so small
    requests are made until then."""
    deadline = time.monotonic() + 30
    while (found := counts(port).get(name)) != value:
        assert time.monotonic() < deadline, f"{name}: {found} of {value}"
        server.complete(prompt(77, 100), 1, replica=replica)
        time.sleep(0.2)


class Listener:
    """Keys of the chunks that each endpoint has told to be in host memory."""

    def __init__(self, endpoints: list[str]) -> None:
        self.stored: list[set[bytes]] = [set() for _ in endpoints]
        self._context = zmq.Context()
        self._sockets = []
        for endpoint in endpoints:
            one = self._context.socket(zmq.SUB)
            one.setsockopt(zmq.LINGER, 0)
            one.subscribe(b"")
            one.connect(endpoint)
            self._sockets.append(one)

    def read(self) -> list[int]:
        """How many, for each endpoint."""
        for stored, one in zip(self.stored, self._sockets, strict=True):
            while one.poll(300):
                _, events = decode_message(one.recv_multipart()[2])
                stored.update(
                    event.key
                    for event in events
                    if event.operation == "stored" and event.destination == "host"
                )
        return [len(stored) for stored in self.stored]

    def close(self) -> None:
        for one in self._sockets:
            one.close()
        self._context.term()


@pytest.mark.fault("R10")
def test_two_replicas(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    """vLLM gives both of them the same configuration."""
    words = command(checkpoint("full"), HOST_BYTES, own_shm_directory, tmp_path / "files")
    port = free_ports(len(REPLICAS))
    place = words.index("--kv-transfer-config") + 1
    config = json.loads(words[place])
    endpoint = f"ipc://{tmp_path}/events"
    config["kv_connector_extra_config"] |= {
        "metrics": {"port": port},
        "events": {"endpoint": endpoint},
    }
    words[place] = json.dumps(config)
    more = [*SMALL, *("--data-parallel-size", str(len(REPLICAS))), *("--api-server-count", "1")]
    with Server([*words, *more], tmp_path / "server", ONE_THREAD) as server:
        assert len(list(own_shm_directory.iterdir())) == len(REPLICAS)
        log = server.log.read_text(errors="replace")
        for number in REPLICAS:
            assert f"_dp{number}: {HOST_BYTES // (256 << 10)} slots" in log
        listener = Listener([endpoint, f"{endpoint}.dp1"])
        try:
            check(server, port, listener)
        finally:
            listener.close()
        assert server.terminate(60.0) < 50.0
        assert server.left_alive(5.0) == {}
    assert list(own_shm_directory.iterdir()) == []


def check(server: Server, port: int, listener: Listener) -> None:
    for number in REPLICAS:
        assert json.loads(page(port + number, "/healthz").partition("\n")[2].splitlines()[0])
        server.complete(prompt(70 + number, 100), replica=number)
    # Each has its own prompts; then each has the other's, from the files and exactly.
    controls = []
    for number in REPLICAS:
        assert server.complete(prompt(number), replica=number)[1] == 0
        control, cached = server.complete(prompt(number), replica=number)
        assert cached == CHUNKS * BLOCK_TOKENS
        controls.append(control)
        wait_for(server, number, port + number, "kvtier_chunks_total store done fs", CHUNKS)
    assert listener.read() == [CHUNKS, CHUNKS]
    for number in REPLICAS:
        other = 1 - number
        answer, cached = server.complete(prompt(other), replica=number)
        assert (answer, cached) == (controls[other], CHUNKS * BLOCK_TOKENS)
        wait_for(server, number, port + number, "kvtier_lookup_chunks_total hit fs", CHUNKS)
    # Out of the accelerators and back from the regions, while both are at work.
    for number in REPLICAS:
        server.complete(prompt(80 + number, FILLER_TOKENS), replica=number)
    answers: dict[int, tuple[list[int], int]] = {}
    threads = [
        threading.Thread(
            target=lambda one=number: answers.update(
                {one: server.complete(prompt(one), replica=one)}
            )
        )
        for number in REPLICAS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in REPLICAS:
        assert answers[number] == (controls[number], CHUNKS * BLOCK_TOKENS)
        wait_for(server, number, port + number, "kvtier_lookup_chunks_total hit host", CHUNKS)
    assert listener.read() == [2 * CHUNKS + FILLER_TOKENS // BLOCK_TOKENS] * 2
    assert len(listener.stored[0] & listener.stored[1]) == 2 * CHUNKS
