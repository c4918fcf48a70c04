# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoint: right pages, bounded clients, and nothing left after it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from kvtier.errors import ConfigError, InternalError
from kvtier.obs import http as endpoint_module
from kvtier.obs.http import HttpEndpoint, HttpThread, TierHealth, summary
from kvtier.obs.metrics import Recorder, Registry


class Pages:
    """What the endpoint shows."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.tiers: Sequence[TierHealth] = (TierHealth("host", "up"), TierHealth("fs", "up"))
        self.broken = False

    def metrics(self) -> bytes:
        if self.broken:
            raise ZeroDivisionError
        return self.registry.render()

    def health(self) -> Sequence[TierHealth]:
        return self.tiers


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest_asyncio.fixture
async def endpoint(pages: Pages) -> AsyncIterator[HttpEndpoint]:
    made = HttpEndpoint(pages.metrics, pages.health, "127.0.0.1", 0)
    await made.open()
    yield made
    await made.aclose()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "kvtier-http" not in names


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.asyncio
async def test_metrics(endpoint: HttpEndpoint, pages: Pages) -> None:
    recorder = Recorder()
    recorder.add("kvtier_evicted_total", 3)
    pages.registry.apply(recorder.take())
    for path in ("/metrics", "/metrics?x=1"):
        status, body = await ask(endpoint.port, get(path))
        assert status == 200
        assert b"kvtier_evicted_total 3.0\n" in body
        assert body == pages.registry.render()


@pytest.mark.fault("U08")
@pytest.mark.asyncio
async def test_health_names_the_tier_and_the_cause(endpoint: HttpEndpoint, pages: Pages) -> None:
    status, body = await ask(endpoint.port, get("/healthz"))
    assert (status, body.splitlines()[0]) == (200, b"up: 2 tiers")
    pages.tiers = (TierHealth("host", "up"), TierHealth("fs", "down", "EACCES on /srv/kv"))
    status, body = await ask(endpoint.port, get("/healthz"))
    first, *lines = body.splitlines()
    assert (status, first) == (200, b"degraded: fs down (EACCES on /srv/kv)")
    assert [json.loads(line) for line in lines] == [
        {"tier": "host", "state": "up", "cause": ""},
        {"tier": "fs", "state": "down", "cause": "EACCES on /srv/kv"},
    ]
    pages.tiers = (TierHealth("host", "down", "closed"),)
    assert (await ask(endpoint.port, get("/healthz")))[0] == 503


def test_summary_of_nothing_is_not_up() -> None:
    assert summary([]) == ("down", "down: no tier is open")
    assert summary([TierHealth("fs", "degraded", "slow")])[0] == "degraded"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/"), 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /metrics SPDY/9\r\n\r\n", 400),
        (b"\xff\x00 /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 400),
    ],
)
async def test_other_requests(endpoint: HttpEndpoint, request_bytes: bytes, status: int) -> None:
    try:
        assert (await ask(endpoint.port, request_bytes))[0] == status
    except ConnectionResetError:
        # Unread bytes of a request that is too long make the kernel reset the connection.
        assert len(request_bytes) > endpoint_module.MAX_REQUEST_BYTES
    assert (await ask(endpoint.port, get("/metrics")))[0] == 200


@pytest.mark.asyncio
async def test_head_has_no_body(endpoint: HttpEndpoint) -> None:
    assert await ask(endpoint.port, b"HEAD /metrics HTTP/1.0\r\n\r\n") == (200, b"")


@pytest.mark.asyncio
async def test_a_bug_in_a_page_is_an_answer(
    endpoint: HttpEndpoint, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    pages.broken = True
    assert (await ask(endpoint.port, get("/metrics")))[0] == 500
    assert "ZeroDivisionError" in caplog.text
    pages.broken = False
    assert (await ask(endpoint.port, get("/metrics")))[0] == 200


@pytest.mark.asyncio
async def test_stuck_clients_are_bounded_in_number_and_time(
    endpoint: HttpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = []
    for _ in range(endpoint_module.MAX_CONNECTIONS):
        _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET /metr")
        writers.append(writer)
    assert (await ask(endpoint.port, b""))[0] == 503
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    monkeypatch.setattr(endpoint_module, "REQUEST_SECONDS", 0.05)
    assert (await ask(endpoint.port, b"GET /metr"))[0] == 408


@pytest.mark.asyncio
async def test_closing_cuts_open_connections(pages: Pages) -> None:
    made = HttpEndpoint(pages.metrics, pages.health, "127.0.0.1", 0)
    with pytest.raises(InternalError):
        _ = made.port
    await made.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    writer.write(b"GET /metr")
    # Connections are accepted in order: when the second is answered, the first is being served.
    assert (await ask(made.port, get("/healthz")))[0] == 200
    assert made._tasks
    async with asyncio.timeout(5):
        await made.aclose()
        await made.aclose()
        # Cut by a reset is as good as by an end of file.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


def test_an_address_in_use_is_named(pages: Pages) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        thread = HttpThread(HttpEndpoint(pages.metrics, pages.health, "127.0.0.1", port))
        with pytest.raises(ConfigError, match=rf"metrics\.port: 127\.0\.0\.1:{port} is in use"):
            thread.open()
    assert thread.open() == port, "the same object opens when the port is free"
    thread.close()
    elsewhere = HttpThread(HttpEndpoint(pages.metrics, pages.health, "203.0.113.7", 9100))
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7:9100 cannot be listened on"):
        elsewhere.open()


def test_the_thread_serves_and_leaves_nothing(pages: Pages) -> None:
    def snapshot() -> tuple[set[str], int]:
        return set(os.listdir("/proc/self/fd")), threading.active_count()

    before = snapshot()
    for _ in range(3):
        thread = HttpThread(HttpEndpoint(pages.metrics, pages.health, "127.0.0.1", 0))
        port = thread.open()
        with pytest.raises(InternalError, match="open already"):
            thread.open()
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("GET", "/healthz")
        assert client.getresponse().read().startswith(b"up: 2 tiers")
        client.close()
        thread.close()
        thread.close()
        assert snapshot() == before
