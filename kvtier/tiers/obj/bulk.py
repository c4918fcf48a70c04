# SPDX-License-Identifier: Apache-2.0
"""The bulk path: objects to and from host memory over pooled connections, with bounded retries.

Runs on the service's loop. Owns the connections, the limit of requests under way and the signer.
Invariants: a connection is idle in the pool or used by one request; when a call has returned or
raised, nothing touches its memory any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from kvtier.errors import ConfigError
from kvtier.tiers.obj.control import Control
from kvtier.tiers.obj.errors import Kind, StoreError, error_of
from kvtier.tiers.obj.http import Connection, Landing, Response, connect
from kvtier.tiers.obj.limit import Limit, Rank
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.sign import EMPTY_SHA256, UNSIGNED, Credentials, Signer, quoted

TRIES = 4
"""Of one request, the first included; and as many as the deadline allows, if these are fewer."""
PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 2.0
"""Before the second try, doubled with each further one, and a random part of it."""
IDLE_SECONDS = 4.0
"""A connection that was idle for longer is not used: servers close theirs after five and more."""

_IS_ERROR = re.compile(rb"\s*(<\?xml[^>]{0,100}>\s*)?<Error[\s>]")
"""A store that has begun its answer with 200 before it failed, or a gateway before one."""

Headers = Sequence[tuple[str, str]]


class Bulk:
    """Sends requests. See the head of this module.

    Parameters
    ----------
    options : ObjOptions
    control : Control
        Opened: gives endpoint, region and credentials.
    on_error : callable
        Takes the kind of each try that failed.
    clock : callable
        Monotonic seconds, those of the deadlines.

    Raises
    ------
    ConfigError
        `ca_bundle` cannot be read.
    """

    def __init__(
        self,
        options: ObjOptions,
        control: Control,
        on_error: Callable[[Kind], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = Limit(options.concurrency, clock)
        self._options = options
        self._control = control
        self._on_error = on_error
        self._clock = clock
        self._signer = Signer(control.region)
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._closing = False
        self._succeeded: Counter[str] = Counter()
        url = urlsplit(control.endpoint_url)
        assert url.hostname is not None
        is_tls = url.scheme == "https"
        self._host, self._port = url.hostname, url.port or (443 if is_tls else 80)
        self._base = quoted(url.path.rstrip("/"))
        name = f"[{self._host}]" if ":" in self._host else self._host
        if _is_virtual(options, self._host):
            self._host = name = f"{options.bucket}.{self._host}"
        else:
            self._base += f"/{options.bucket}"
        usual = url.port in (None, 443 if is_tls else 80)
        self._host_header = name if usual else f"{name}:{url.port}"
        self._tls = _trust(control.ca_bundle) if is_tls else None
        self._signs_payload = options.sign_payload == "always" or (
            options.sign_payload == "auto" and not is_tls
        )

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._idle) + len(self._used)

    def take_succeeded(self) -> Mapping[str, int]:
        """Requests that ended well since the last call of this, by method."""
        taken, self._succeeded = self._succeeded, Counter()
        return taken

    async def request(
        self,
        method: str,
        name: str,
        deadline: float,
        *,
        headers: Headers = (),
        body: memoryview | None = None,
        into: memoryview | None = None,
        check: Callable[[Response], None] | None = None,
    ) -> Response:
        """Carry out one request, and again where that makes sense.

        No try begins that could not end before `deadline`; to end one that is under way then is the
        caller's affair, who has one timer for many requests.

        Parameters
        ----------
        method : str
        name : str
            Of the object.
        deadline : float
            Absolute, on the clock.
        headers : sequence of (str, str)
            Names in lower case.
        body : memoryview, optional
            To be sent, from where it is.
        into : memoryview, optional
            Gets the body of a success, if it has this length. Where a body was cut, the next try
            asks for the rest of the same object only.
        check : callable, optional
            Looks at a success, and raises StoreError if it is none.

        Raises
        ------
        StoreError
            Of the last try.

        On cancellation its connection is closed.
        """
        refused: Credentials | None = None
        tries = 0
        landing = None if into is None else Landing(into)
        while True:
            tries += 1
            credentials: Credentials | None = None
            try:
                credentials = await self._control.credentials(refused)
                reply = await self._try(method, name, headers, body, landing, check, credentials)
                self._succeeded[method] += 1
                return reply
            except StoreError as exc:
                self._on_error(exc.kind)
                if exc.kind is Kind.EXPIRED and credentials is not None and refused is None:
                    refused = credentials
                    continue
                pause = self._pause(tries, exc)
                if not exc.kind.retried or tries >= TRIES or self._clock() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)

    @staticmethod
    def _pause(tries: int, error: StoreError) -> float:
        most: float = min(PAUSE_SECONDS * 2 ** (tries - 1), MAX_PAUSE_SECONDS)
        return max(error.retry_after, random.uniform(0.5, 1.0) * most)

    async def _try(
        self,
        method: str,
        name: str,
        headers: Headers,
        body: memoryview | None,
        into: Landing | None,
        check: Callable[[Response], None] | None,
        credentials: Credentials,
    ) -> Response:
        # A body makes the difference: namespace.json and a deletion go first, too.
        rank = Rank.STORE if body is not None else Rank.LOAD if into is not None else Rank.QUESTION
        await self.limit.take(rank)
        moved = 0
        try:
            started = self._clock()
            resume = [] if into is None else into.resume
            there = into.filled if into is not None and resume else 0
            head = self._head(method, name, [*headers, *resume], body, credentials)
            try:
                response = await self._exchange(head, body, into, bodiless=method == "HEAD")
                if into is not None and _is_no_rest(response, asked=bool(resume)):
                    into.filled = 0
                    raise StoreError(Kind.CHANGED, f"{response.status} in place of the rest")
                if not 200 <= response.status < 300 or _IS_ERROR.match(response.body):
                    told = error_of(response.status, response.headers, response.body)
                    is_mute = method == "HEAD" and told.kind is Kind.REFUSED
                    if is_mute and response.status == 400 and credentials.token:
                        # All that Amazon says of a token that has ended where no body may say it.
                        raise StoreError(Kind.EXPIRED, f"{told.message} without a reason")
                    raise told
                if check is not None:
                    check(response)
            except StoreError as exc:
                if exc.kind.slows:
                    self.limit.slow_down(started)
                elif not exc.kind.retried:
                    moved = 1  # it is an answer
                raise
            moved = 1 + (into.filled - there if into is not None else body.nbytes if body else 0)
        finally:
            self.limit.give(rank, moved)
        return response

    def _head(
        self,
        method: str,
        name: str,
        headers: Headers,
        body: memoryview | None,
        credentials: Credentials,
    ) -> bytes:
        """Request line and headers, signed."""
        payload = EMPTY_SHA256
        if body is not None:
            payload = hashlib.sha256(body).hexdigest() if self._signs_payload else UNSIGNED
        path = f"{self._base}/{quoted(name)}"
        mine = [("host", self._host_header), *headers]
        added = self._signer.headers(method, path, "", mine, payload, credentials)
        lines = "".join([f"{key}: {value}\r\n" for key, value in (*mine, *added)])
        if body is not None or method == "PUT":
            lines += f"content-length: {body.nbytes if body is not None else 0}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()

    async def _exchange(
        self, head: bytes, body: memoryview | None, into: Landing | None, *, bodiless: bool
    ) -> Response:
        """One request on some connection; a second one at once where the first was stale."""
        while True:
            connection = await self._connection()
            used_before = connection.requests > 0
            try:
                response = await connection.request(
                    head,
                    body,
                    into,
                    bodiless=bodiless,
                    stall_seconds=self._options.stall_seconds,
                )
            except StoreError as exc:
                # The server closed it while it was idle: that is no failure of the store's.
                if exc.kind is Kind.RESET and used_before and not connection.was_answering:
                    continue
                raise
            finally:
                self._give_back(connection)
            return response

    async def _connection(self) -> Connection:
        oldest = self._clock() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since >= oldest:
                self._used.add(connection)
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(self._options.connect_seconds):
                connection = await connect(self._host, self._port, self._tls)
        except TimeoutError as exc:
            seconds = self._options.connect_seconds
            raise StoreError(
                Kind.CONNECT, f"{self._host}:{self._port} did not accept within {seconds:g} s"
            ) from exc
        except ssl.SSLError as exc:
            raise StoreError(Kind.TLS, f"{self._host}: {exc}") from exc
        except socket.gaierror as exc:
            raise StoreError(Kind.DNS, f"{self._host}: {exc.strerror}") from exc
        except OSError as exc:
            text = exc.strerror or str(exc) or type(exc).__name__
            raise StoreError(Kind.CONNECT, f"{self._host}:{self._port}: {text}") from exc
        self._used.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._used.discard(connection)
        if connection.is_usable and not self._closing:
            connection.idle_since = self._clock()
            self._idle.append(connection)
        else:
            connection.abort()

    async def aclose(self) -> None:
        """Close every connection; requests under way fail. Idempotent."""
        self._closing = True
        connections = [*self._idle, *self._used]
        self._idle.clear()
        for connection in connections:
            await connection.closed()
        self._used.clear()


def _is_no_rest(response: Response, *, asked: bool) -> bool:
    """Whether the rest of an object is not to be had, though the whole may be: another one stands
    there by now (412), or the store answers with another range than it was asked for."""
    if asked and response.status in (412, 416):
        return True
    return response.status == 206 and not response.placed


def _is_virtual(options: ObjOptions, host: str) -> bool:
    if options.addressing != "auto":
        return options.addressing == "virtual"
    # A dot in the name would not fit the certificate.
    return host.endswith(".amazonaws.com") and "." not in options.bucket


def _trust(ca_bundle: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(
            f"obj: ca_bundle {ca_bundle!r} is no file of certificates: {exc.strerror or exc}"
        ) from exc
