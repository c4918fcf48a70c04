# SPDX-License-Identifier: Apache-2.0
"""kvtier's own HTTP endpoint: ``/metrics`` for Prometheus, ``/healthz`` for people and probes.

``HttpEndpoint`` runs on the loop that opens it; ``HttpThread`` gives it a loop in a thread of its
own, for processes that have none. Both own one listening socket and the tasks of its connections.
Connections, request size and time are bounded, so that a stuck client costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from kvtier.errors import ConfigError, InternalError

logger = logging.getLogger(__name__)

State = Literal["up", "degraded", "down"]

MAX_CONNECTIONS = 16
MAX_REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
            408: "Request Timeout", 500: "Internal Server Error",
            503: "Service Unavailable"}  # fmt: skip


class TierHealth(msgspec.Struct, frozen=True):
    """How one tier is."""

    tier: str
    state: State
    cause: str = ""
    """Why it is not up."""


def summary(tiers: Sequence[TierHealth]) -> tuple[State, str]:
    """State of the whole, and one line that says it.

    A tier that is down makes the whole degraded, not down: chunks are recomputed and the model
    server goes on. It is down when host memory is, or nothing is known of any tier.
    """
    if not tiers:
        return "down", "down: no tier is open"
    state: State = "up"
    if any(one.state != "up" for one in tiers):
        state = "degraded"
    if any(one.state == "down" and one.tier == "host" for one in tiers):
        state = "down"
    words = [
        f"{one.tier} {one.state}" + (f" ({one.cause})" if one.cause else "")
        for one in tiers
        if one.state != "up"
    ]
    return state, f"{state}: {', '.join(words) or f'{len(tiers)} tiers'}"


class HttpEndpoint:
    """Serves ``GET`` and ``HEAD`` of the two pages on the running loop.

    Parameters
    ----------
    metrics : callable
        Text of ``/metrics``; called on the loop at each scrape.
    health : callable
        State of each tier, host memory among them.
    host : str
    port : int
        0 takes a free one.
    """

    def __init__(
        self,
        metrics: Callable[[], bytes],
        health: Callable[[], Sequence[TierHealth]],
        host: str,
        port: int,
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Port that is listened on, after ``open``."""
        if self._server is None:
            raise InternalError("the endpoint is not open")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def open(self) -> None:
        """Listen.

        Raises
        ------
        ConfigError
            If the address is in use, not of this machine, or not allowed.
        """
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=MAX_REQUEST_BYTES
            )
        except OSError as exc:
            address = f"{self._host}:{self._port}"
            if exc.errno == errno.EADDRINUSE:
                text = f"{address} is in use by another process; set another metrics.port"
            elif exc.errno == errno.EACCES:
                text = f"{address} is not allowed; set a metrics.port of 1024 or more"
            else:
                text = f"{address} cannot be listened on ({exc}); set metrics.host to an address " \
                       f"of this machine"  # fmt: skip
            raise ConfigError(f"metrics.port: {text}") from exc

    async def aclose(self) -> None:
        """Stop listening and cut what is open. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise InternalError("a connection without a task")
        task.set_name("kvtier-http")
        self._tasks.add(task)
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                status, kind, body, head = 503, "text/plain", b"too many connections\n", False
            else:
                status, kind, body, head = await self._answer(reader)
            lines = [
                f"HTTP/1.1 {status} {_REASONS[status]}",
                f"Content-Type: {kind}; charset=utf-8",
                f"Content-Length: {len(body)}",
                "Connection: close",
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + (b"" if head else body))
            async with asyncio.timeout(REQUEST_SECONDS):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            logger.debug("a client of the metrics endpoint left early")
        except asyncio.CancelledError:
            # Only `aclose` cancels: the connection ends here, and the stream layer would report a
            # cancelled handler as an error.
            writer.transport.abort()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str, bytes, bool]:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return 408, "text/plain", b"no request within its time\n", False
        except asyncio.LimitOverrunError:
            return 400, "text/plain", b"the request is too long\n", False
        words = request.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, "text/plain", b"no HTTP/1 request\n", False
        head = words[0] == b"HEAD"
        if not head and words[0] != b"GET":
            return 405, "text/plain", b"GET or HEAD\n", False
        try:
            return (*self._page(words[1].split(b"?", 1)[0]), head)
        except Exception:
            # endpoint must outlive a bug in them, and says that there is one.
            logger.exception("a page of the metrics endpoint failed")
            return 500, "text/plain", b"an error; see the log\n", head

    def _page(self, path: bytes) -> tuple[int, str, bytes]:
        if path == b"/metrics":
            return 200, "text/plain; version=0.0.4", self._metrics()
        if path == b"/healthz":
            tiers = list(self._health())
            state, line = summary(tiers)
            body = b"\n".join([line.encode(), *(msgspec.json.encode(one) for one in tiers), b""])
            return 503 if state == "down" else 200, "text/plain", body
        return 404, "text/plain", b"/metrics or /healthz\n"


class HttpThread:
    """An ``HttpEndpoint`` on a loop in a thread of its own."""

    def __init__(self, endpoint: HttpEndpoint) -> None:
        self._endpoint = endpoint
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def open(self, timeout_seconds: float = 5.0) -> int:
        """Start, and give the port. Blocks for at most `timeout_seconds`.

        Raises
        ------
        ConfigError
            See ``HttpEndpoint.open``; nothing is left then.
        """
        if self._thread is not None:
            raise InternalError("the endpoint is open already")
        ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(ready)), name="kvtier-http", daemon=True
        )
        self._thread.start()
        try:
            return ready.result(timeout_seconds)
        except TimeoutError as exc:
            raise ConfigError(
                f"metrics.host: the endpoint did not open within {timeout_seconds:g} s; "
                f"give an address instead of a name"
            ) from exc
        except ConfigError:
            self.close()
            raise

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Stop the thread. Idempotent.

        Raises
        ------
        InternalError
            If the thread does not end in time.
        """
        thread = self._thread
        if thread is None:
            return
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(timeout_seconds)
        if thread.is_alive():
            raise InternalError(f"the metrics endpoint did not end within {timeout_seconds:g} s")
        self._thread = None

    async def _main(self, ready: concurrent.futures.Future[int]) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            await self._endpoint.open()
        except BaseException as exc:  # noqa: BLE001 - it is raised in `open`, by the future
            ready.set_exception(exc)
            return
        try:
            ready.set_result(self._endpoint.port)
            await self._stop.wait()
        finally:
            await self._endpoint.aclose()
