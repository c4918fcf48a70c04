# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of ``vllm serve`` instances, some of which prefill and some of which decode.

Every request goes to two instances at the same time: to a prefill instance, which computes the
prompt and one token, and to a decode instance, which takes the prompt's KV from the first as its
chunks are written, and answers. Both get the same name for the transfer in ``kv_transfer_params``,
in vLLM's own words, so that any orchestrator that knows vLLM's p2p tier can stand in its place.
Where the prefill fails, the decode instance computes the prompt itself. Needs aiohttp, which vLLM
brings along.

One host, from a checkout of kvtier (an instance's peer tier listens on port 5710 unless it is told
otherwise)::

    for i in 0 1; do
      vllm serve MODEL --port 810$i --kv-transfer-config '{
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
          "spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm.spec",
          "cpu_bytes_to_use": "8GiB",
          "secondary_tiers": [{"type": "p2p", "port": 571'$i'}]}}' &
    done
    python examples/prefill_decode_proxy.py --prefill http://127.0.0.1:8100 \\
        --decode http://127.0.0.1:8101 --port 8000

On several hosts each tier has ``"host"``, the address of its host, and a ``"token"``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

log = logging.getLogger("proxy")

PEER_PORT = 5710
OWN_HEADERS = {
    *("host", "connection", "keep-alive", "upgrade", "transfer-encoding"),
    *("content-length", "content-encoding"),
}
"""Of one connection, or of a body as it comes over it."""
PIECE_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20


class Prefill(NamedTuple):
    """A prefill instance."""

    url: str
    peer_host: str
    peer_port: int


def prefill(text: str) -> Prefill:
    """``http://host:port``, or that and ``,peer-host:peer-port``."""
    url, _, peer = text.partition(",")
    place = urlsplit(f"//{peer}" if peer else url)
    if not place.hostname:
        raise ValueError(text)
    port = place.port if peer and place.port else PEER_PORT
    return Prefill(url.rstrip("/"), place.hostname, port)


class Proxy:
    """The handlers.

    Parameters
    ----------
    prefills : sequence of Prefill
    decodes : sequence of str
        URLs.
    sequential : bool
        A decode instance hears of a request when its prefill has ended.
    """

    def __init__(
        self, prefills: Sequence[Prefill], decodes: Sequence[str], sequential: bool
    ) -> None:
        self._prefills = itertools.cycle(prefills)
        self._decodes = itertools.cycle(decodes)
        self._sequential = sequential
        self._client: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """What aiohttp serves."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._connections)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_get("/{path:.*}", self.ask)
        return app

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        # Answers take as long as they take; the client's end is this end's too.
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            self._client = client
            yield

    async def ask(self, request: web.Request) -> web.StreamResponse:
        """Models, health and the like: whatever a decode instance says."""
        assert self._client is not None
        url = next(self._decodes) + request.path_qs
        try:
            async with self._client.get(url, headers=_headers(request)) as answer:
                body = await answer.read()
                return web.Response(body=body, status=answer.status, headers=_headers(answer))
        except aiohttp.ClientError as exc:
            raise web.HTTPBadGateway(text=f"{url}: {exc}") from exc

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One completion, over both instances."""
        try:
            asked = await request.json()
            params = dict(asked.get("kv_transfer_params") or {})
        except (ValueError, TypeError, AttributeError) as exc:
            raise web.HTTPBadRequest(text=f"the body is no request in JSON: {exc}") from exc
        there, decode = next(self._prefills), next(self._decodes)
        name = {"kv_request_id": uuid.uuid4().hex}
        source = name | {"remote_host": there.peer_host, "remote_port": there.peer_port}
        first = _prompt_only(asked) | {"kv_transfer_params": params | {"remote_decoder": name}}
        rest = asked | {"kv_transfer_params": params | {"remote_prefiller": source}}
        headers = _headers(request)
        url = decode + request.path
        tasks = [
            asyncio.create_task(
                self._prefill(there.url + request.path, first, headers), name="prefill"
            )
        ]
        answers: list[aiohttp.ClientResponse] = []
        try:
            (computing,) = tasks
            if self._sequential and not await computing:
                rest = asked
            piece = self._begin(url, rest, headers, answers)
            tasks.append(answering := asyncio.create_task(piece, name="answer"))
            await asyncio.wait({computing, answering}, return_when=asyncio.FIRST_COMPLETED)
            if rest is not asked and not answering.done() and not computing.result():
                # Nobody computes what it waits for.
                answering.cancel()
                piece = self._begin(url, asked, headers, answers)
                tasks.append(answering := asyncio.create_task(piece, name="answer"))
            begun = await answering
            return await _pass_on(request, answers[-1], begun)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for answer in answers:
                answer.close()

    async def _prefill(self, url: str, body: Any, headers: dict[str, str]) -> bool:
        """Whether the prompt has been computed. What is wrong with a request the decode instance
        says as well."""
        assert self._client is not None
        try:
            async with self._client.post(url, json=body, headers=headers) as answer:
                text = await answer.text()
        except aiohttp.ClientError as exc:
            log.warning("prefill at %s failed: %s", url, exc)
            return False
        if answer.status != 200:
            log.warning("prefill at %s failed: %d %.300s", url, answer.status, text)
        return answer.status == 200

    async def _begin(
        self,
        url: str,
        body: Any,
        headers: dict[str, str],
        answers: list[aiohttp.ClientResponse],
    ) -> bytes:
        """The first piece of an answer, which goes to `answers`: until then it can be begun
        anew."""
        assert self._client is not None
        try:
            answer = await self._client.post(url, json=body, headers=headers)
            answers.append(answer)
            return await answer.content.read(PIECE_BYTES)
        except aiohttp.ClientError as exc:
            raise web.HTTPBadGateway(text=f"{url}: {exc}") from exc


async def _pass_on(
    request: web.Request, answer: aiohttp.ClientResponse, piece: bytes
) -> web.StreamResponse:
    """Everything to the client, as it comes."""
    response = web.StreamResponse(status=answer.status, headers=_headers(answer))
    await response.prepare(request)
    while piece:
        await response.write(piece)
        piece = await answer.content.read(PIECE_BYTES)
    await response.write_eof()
    return response


def _prompt_only(asked: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill instance: one token, at once."""
    first = {
        key: value
        for key, value in asked.items()
        if key not in ("stream_options", "min_tokens", "n", "best_of", "use_beam_search")
    }
    first |= {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    return first


def _headers(message: web.Request | aiohttp.ClientResponse) -> dict[str, str]:
    """Those that concern the other end."""
    return {name: one for name, one in message.headers.items() if name.lower() not in OWN_HEADERS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prefill",
        type=prefill,
        action="append",
        required=True,
        metavar="URL[,PEER_HOST:PEER_PORT]",
        help="a prefill instance, and where its peer tier listens (by default on the URL's host, "
        f"port {PEER_PORT}); again for each further one",
    )
    parser.add_argument(
        "--decode",
        action="append",
        required=True,
        metavar="URL",
        help="a decode instance; again for each further one",
    )
    parser.add_argument(
        "--sequential",
        action="store_true",
        help="wait for the prefill before the decode instance hears of a request",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    decodes = [url.rstrip("/") for url in given.decode]
    proxy = Proxy(given.prefill, decodes, given.sequential)
    # A client that has gone ends its requests.
    web.run_app(proxy.app(), host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
