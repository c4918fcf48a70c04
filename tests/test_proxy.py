# SPDX-License-Identifier: Apache-2.0
"""The example's proxy over instances that only say what they were asked; real ones are in
``tests/vllm/test_proxy.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402  after it is known to be there

from examples.prefill_decode_proxy import Prefill, Proxy, prefill  # noqa: E402

looped = pytest.mark.asyncio(loop_factories=["asyncio"])

CHAT = "/v1/chat/completions"
PROGRAM = Path(__file__).parents[1] / "examples" / "prefill_decode_proxy.py"


class Instance:
    """Notes requests; answers in pieces."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[dict[str, Any]] = []
        self.ended = asyncio.Event()
        """Set: answers may end."""
        self.ended.set()
        self.gone = 0
        """Clients that did not wait for the end."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body | {"path": request.path, "key": request.headers["authorization"]})
        try:
            if not body.get("stream"):
                await self.ended.wait()
                return web.json_response({"from": self.url}, status=self.status)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            # A decode instance that waits has sent its head.
            wanted = "remote_prefiller" in body.get("kv_transfer_params", {})
            if wanted:
                await self.ended.wait()
            for piece in range(3):
                await response.write(b"data: %d\n\n" % piece)
                await asyncio.sleep(0.01)
            return response
        except asyncio.CancelledError:
            self.gone += 1
            raise

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def proxied(
    prefills: list[Instance], decodes: list[Instance], sequential: bool = False
) -> AsyncIterator[Any]:
    """A client's way to post to the proxy in front of these instances."""
    async with contextlib.AsyncExitStack() as stack:
        for one in [*prefills, *decodes]:
            app = web.Application()
            app.router.add_post("/{path:.*}", one.answer)
            app.router.add_get("/v1/models", one.models)
            one.url = await stack.enter_async_context(serving(app))
        proxy = Proxy(
            [Prefill(one.url, "10.0.0.7", 5710 + i) for i, one in enumerate(prefills)],
            [one.url for one in decodes],
            sequential,
        )
        url = await stack.enter_async_context(serving(proxy.app()))
        headers = {"authorization": "Bearer k"}
        yield await stack.enter_async_context(aiohttp.ClientSession(url, headers=headers))


@looped
async def test_both_sides_get_the_same_name_and_the_prefill_one_token() -> None:
    one, other = Instance(), Instance()
    asked = {
        "model": "m",
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 50,
        "n": 2,
        "kv_transfer_params": {"max_offload_tokens": 640},
    }
    async with proxied([one], [other]) as client:
        async with client.post(CHAT, json=asked) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            assert await answer.text() == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
        async with client.get("/v1/models") as answer:
            assert await answer.json() == {"data": []}
    (first,), (rest,) = one.asked, other.asked
    name = first["kv_transfer_params"].pop("remote_decoder")["kv_request_id"]
    assert first.pop("kv_transfer_params") == {"max_offload_tokens": 640}
    assert (first.pop("path"), first.pop("key")) == (CHAT, "Bearer k")
    assert first == {
        "model": "m",
        "messages": [],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
    }
    assert rest["kv_transfer_params"] == {
        "max_offload_tokens": 640,
        "remote_prefiller": {
            "kv_request_id": name,
            "remote_host": "10.0.0.7",
            "remote_port": 5710,
        },
    }
    for key in asked.keys() - {"kv_transfer_params"}:
        assert rest[key] == asked[key]


@looped
async def test_instances_take_turns_and_names_differ() -> None:
    prefills, decodes = [Instance(), Instance()], [Instance(), Instance(), Instance()]
    async with proxied(prefills, decodes) as client:
        for _ in range(6):
            async with client.post("/v1/completions", json={"prompt": "a"}) as answer:
                assert answer.status == 200
    assert [len(one.asked) for one in (*prefills, *decodes)] == [3, 3, 2, 2, 2]
    sources = [
        one["kv_transfer_params"]["remote_prefiller"] for node in decodes for one in node.asked
    ]
    assert len({one["kv_request_id"] for one in sources}) == 6
    # Each decode is sent to the peer of the prefill that has its name.
    for number, node in enumerate(prefills):
        names = {one["kv_transfer_params"]["remote_decoder"]["kv_request_id"] for one in node.asked}
        ports = {one["remote_port"] for one in sources if one["kv_request_id"] in names}
        assert ports == {5710 + number}


@looped
@pytest.mark.parametrize("sequential", [False, True])
async def test_a_prefill_that_fails_costs_a_prefill(sequential: bool) -> None:
    """The decode instance would wait for what nobody computes."""
    one, other = Instance(status=503), Instance()
    other.ended.clear()
    async with (
        proxied([one], [other], sequential) as client,
        asyncio.timeout(10),
        client.post(CHAT, json={"stream": True}) as answer,
    ):
        assert await answer.text() == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert "kv_transfer_params" not in other.asked[-1]
    assert len(other.asked) == (1 if sequential else 2)


@looped
async def test_sequential_waits_for_the_prefill() -> None:
    one, other = Instance(), Instance()
    one.ended.clear()
    async with proxied([one], [other], sequential=True) as client:
        answering = asyncio.create_task(client.post(CHAT, json={}), name="client")
        async with asyncio.timeout(10):
            while not one.asked:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert other.asked == []
            one.ended.set()
            (await answering).close()
    assert len(other.asked) == 1


@looped
async def test_what_the_decode_instance_says_of_an_error_is_the_answer() -> None:
    async with proxied([Instance(400)], [Instance(400)]) as client:
        async with client.post(CHAT, json={}) as answer:
            assert answer.status == 400
            assert "from" in await answer.json()
        async with client.post(CHAT, data=b"[1]") as answer:
            assert answer.status == 400
        async with client.post(CHAT, json={"kv_transfer_params": 7}) as answer:
            assert answer.status == 400


@looped
async def test_an_instance_that_is_not_there() -> None:
    nowhere = "http://127.0.0.1:9"
    dead = Proxy([Prefill(nowhere, "127.0.0.1", 5710)], [nowhere], False)
    async with serving(dead.app()) as url, aiohttp.ClientSession(url) as client:
        for ask in (client.post(CHAT, json={}), client.get("/health")):
            async with ask as answer:
                assert answer.status == 502


@looped
async def test_a_client_that_has_gone_ends_both_requests() -> None:
    """Of the program itself, as it is started."""
    one, other = Instance(), Instance()
    one.ended.clear()
    other.ended.clear()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with proxied([one], [other]), asyncio.timeout(20):
        words = ["--prefill", one.url, "--decode", other.url, "--port", str(port)]
        program = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), *words)
        try:
            headers = {"authorization": "Bearer k"}
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as client:
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectionError):
                        async with client.get("/v1/models"):
                            break
                    await asyncio.sleep(0.05)
                asking = client.post(CHAT, json={"stream": True})
                answering = asyncio.create_task(asking, name="client")
                while not (one.asked and other.asked):
                    await asyncio.sleep(0.01)
                answering.cancel()
                while not one.gone or not other.gone:
                    await asyncio.sleep(0.01)
            program.terminate()
            assert await program.wait() == 0
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()


def test_where_a_prefill_instance_is() -> None:
    assert prefill("http://10.0.0.1:8000/") == ("http://10.0.0.1:8000", "10.0.0.1", 5710)
    assert prefill("https://a.b:8000,10.0.0.7:5720") == ("https://a.b:8000", "10.0.0.7", 5720)
    assert prefill("http://[fd00::1]:80,[fd00::2]:5720")[1:] == ("fd00::2", 5720)
    assert prefill("http://a:8000,b") == ("http://a:8000", "b", 5710)


def test_help_says_how_to_start_it() -> None:
    words = subprocess.run(
        [sys.executable, str(PROGRAM), "--help"], check=True, capture_output=True, text=True
    ).stdout
    for said in ("--prefill URL", "--decode URL", "kv_transfer_params", '"type": "p2p"'):
        assert said in words
    assert json.loads(
        words.partition("--kv-transfer-config '")[2].partition("}]}}'")[0].replace("'$i'", "0")
        + "}]}}"
    )
