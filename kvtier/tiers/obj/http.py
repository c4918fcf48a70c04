# SPDX-License-Identifier: Apache-2.0
"""One keep-alive HTTP/1.1 connection whose bodies are host memory itself.

Why not a general client: it copies each body two or three times and spends a millisecond of Python
a request. Here the socket reads into the slot and is written from it; a well-kept parser (llhttp,
in httptools) reads the heads and every body that is not a chunk.

Runs on the service's loop. Owns one transport. Invariants: one request at a time; after ``request``
has returned or raised, nothing touches its memory any more (a connection that may still do so has
been aborted, and all its system calls are made by this loop's thread); a response that is not
framed as asked never gets into that memory as a whole.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import cast

import httptools
import msgspec

from kvtier.tiers.obj.errors import Kind, StoreError

SCRATCH_BYTES = 8192
"""Read at a time while a head is expected; what follows it in that read is copied once."""

MAX_HEAD_BYTES = 64 << 10
"""Of a head, and of all that comes before it: the parser itself knows no limit."""

ERROR_BYTES = 1000
"""Of a success that is not what was asked for."""

MAX_BODY_BYTES = 64 << 10
"""Of a response that is no chunk: an error and its explanation."""


class Response(msgspec.Struct):
    """What came back."""

    status: int
    headers: Mapping[bytes, bytes]
    """Names in lower case."""
    body: bytes
    """Unless it went into the memory given for it."""
    placed: bool
    """The body went there, all of it, and nothing else did."""


class Landing(msgspec.Struct):
    """Where a body goes, and how much of it is there: what one try of a request has brought, the
    next one need not bring again."""

    view: memoryview
    filled: int = 0
    etag: bytes = b""
    """Of the object whose bytes these are; empty if there is no telling."""

    @property
    def is_full(self) -> bool:
        return self.filled == len(self.view)

    @property
    def resume(self) -> list[tuple[str, str]]:
        """Headers that ask for the rest of that very object; none where it has to be the whole."""
        if not self.filled or not _STRONG_ETAG.fullmatch(self.etag):
            return []
        return [("if-match", self.etag.decode()), ("range", f"bytes={self.filled}-")]

    def takes(self, status: int, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the body of an answer is the object as it was stored, or the rest of it that was
        asked for, as far as the head tells. The whole is taken from its start."""
        length, etag = len(self.view), headers.get(b"etag", b"")
        if status == 206:
            stands = b"bytes %d-%d/%d" % (self.filled, length - 1, length)
            if not self.resume or headers.get(b"content-range") != stands or etag != self.etag:
                return False
            length -= self.filled
        if (
            status not in (200, 206)
            or headers.get(b"content-encoding", b"identity") != b"identity"
            or headers.get(b"content-length") != b"%d" % length
        ):
            return False
        if status == 200:
            self.filled, self.etag = 0, etag
        return True


_STRONG_ETAG = re.compile(rb'"[!#-~]{1,256}"')


class Connection(asyncio.BufferedProtocol):
    """See the head of this module. Made by ``connect``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._waiter: asyncio.Future[Response] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._parser: httptools.HttpResponseParser | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._progress = (0, -1)
        self._spoke = False  # without having been asked: SMTP, SSH, not HTTP
        self.requests = 0
        """Answered on this connection."""
        self.idle_since = 0.0
        self._clear()

    def _clear(self) -> None:
        """Nothing is under way."""
        self._into: Landing | None = None
        self._direct = False
        self._bodiless = False
        self._received = 0
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self._keep = False
        self._in_body = False

    # What the loop calls.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._lost.done():
            self._lost.set_result(None)
        if self._waiter is not None:
            cause = "connection closed" if exc is None else str(exc) or type(exc).__name__
            self._fail(StoreError(Kind.RESET, f"{cause} {self._stage}"))

    def eof_received(self) -> bool:
        # A body without a length ends here.
        unframed = b"content-length" not in self._headers and not self._is_chunked
        if self._waiter is not None and self._in_body and unframed:
            self._keep = False
            self._done()
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._direct:
            assert self._into is not None
            return self._into.view[self._into.filled :]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._waiter is None:
            # Bytes that nobody asked for: whatever comes next would be taken for an answer.
            self._spoke = True
            self.abort()
            return
        if self._direct:
            assert self._into is not None
            self._into.filled += nbytes
            if self._into.is_full:
                self._done()
            return
        assert self._parser is not None
        try:
            self._parser.feed_data(self._scratch[:nbytes])
        except StoreError as exc:
            self._fail(exc)
        except httptools.HttpParserError as exc:
            inner = exc.__context__
            self._fail(
                inner if isinstance(inner, StoreError) else StoreError(Kind.PROTOCOL, str(exc))
            )
        except httptools.HttpParserUpgrade:
            self._fail(StoreError(Kind.PROTOCOL, "it goes over to another protocol"))
        else:
            if not self._in_body and self._received > MAX_HEAD_BYTES:
                self._fail(StoreError(Kind.PROTOCOL, f"a head of over {MAX_HEAD_BYTES} bytes"))

    # What the parser calls.
    def on_message_begin(self) -> None:
        if self._waiter is None:
            # Behind the answer, in the same read: more than was asked for.
            self._keep = False
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._waiter is None:
            return
        assert self._parser is not None
        self._status = self._parser.get_status_code()
        if self._status < 200:
            return  # "continue" and the like: the answer itself follows
        self._keep = self._parser.should_keep_alive()
        self._in_body = True
        if self._bodiless:
            self._done()
        elif self._into is not None:
            self._direct = self._into.takes(self._status, self._headers)

    @property
    def _is_chunked(self) -> bool:
        return b"transfer-encoding" in self._headers

    def on_body(self, data: bytes) -> None:
        if self._waiter is None or self._status < 200:
            return
        if self._direct:
            # It came in one read with the head.
            assert self._into is not None
            end = self._into.filled + len(data)
            self._into.view[self._into.filled : end] = data
            self._into.filled = end
            if self._into.is_full:
                self._done()
        elif self._into is not None and self._status in (200, 206):
            # Of another length, or encoded: nobody wants it. Its end is not waited for; that it is
            # an error may stand at its beginning.
            self._body += data[:ERROR_BYTES]
            self._keep = False
            self._done()
        elif len(self._body) + len(data) > MAX_BODY_BYTES:
            self._keep = False
            self._done()
        else:
            self._body += data

    def on_message_complete(self) -> None:
        if self._status >= 200 and self._waiter is not None:
            self._done()

    # What the pool and the tier call.
    @property
    def was_answering(self) -> bool:
        """Whether the last request got any byte back."""
        return self._received > 0

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent on it."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._waiter is None
        )

    def abort(self) -> None:
        """Let go at once; what was under way fails."""
        if self._transport is not None:
            self._transport.abort()
        self._settle()

    async def closed(self) -> None:
        """Abort, and wait until the socket is gone."""
        self.abort()
        if self._transport is not None:
            await asyncio.shield(self._lost)

    async def request(
        self,
        head: bytes,
        body: memoryview | None = None,
        into: Landing | None = None,
        *,
        bodiless: bool = False,
        stall_seconds: float,
    ) -> Response:
        """Send a request and take its answer.

        Parameters
        ----------
        head : bytes
            Request line and headers, with the empty line behind them.
        body : memoryview, optional
            Sent from where it is.
        into : Landing, optional
            Gets the body of a success of exactly this length, sent as it is, or the rest of it.
        bodiless : bool
            It is a HEAD: its answer has a length and no body.
        stall_seconds : float
            Without a byte in either direction for so long, the connection is given up.

        Raises
        ------
        StoreError
            RESET, STALLED_HEAD, STALLED_BODY or PROTOCOL; the connection has been aborted.

        On cancellation the connection is aborted.
        """
        if self._spoke:
            raise StoreError(Kind.PROTOCOL, "it spoke before it was asked")
        if not self.is_usable:
            raise StoreError(Kind.RESET, "connection closed before the request")
        transport = self._transport
        assert transport is not None
        self._clear()
        self._into, self._bodiless = into, bodiless
        self._parser = httptools.HttpResponseParser(self)
        waiter: asyncio.Future[Response] = self._loop.create_future()
        self._waiter = waiter
        self._progress = (0, -1)
        self._stall_seconds = stall_seconds
        self._watch = self._loop.call_later(stall_seconds / 2, self._look)
        try:
            transport.write(head)
            if body is not None:
                transport.write(body)
            response = await waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._settle()
        self.requests += 1
        if not self._keep or transport.get_write_buffer_size():
            # An answer before the request was sent as a whole: the rest must not leave either.
            self.abort()
        return response

    def _look(self) -> None:
        """Every half of the time: has anything moved?"""
        if self._waiter is None or self._transport is None:
            return
        now = (self._received, self._transport.get_write_buffer_size())
        if now == self._progress:
            kind = Kind.STALLED_BODY if self._in_body else Kind.STALLED_HEAD
            self._fail(StoreError(kind, f"no byte for {self._stall_seconds:g} s {self._stage}"))
            self.abort()
            return
        self._progress = now
        self._watch = self._loop.call_later(self._stall_seconds, self._look)

    @property
    def _stage(self) -> str:
        if self._in_body:
            return "in the body"
        return "in the head" if self._received else "before the answer"

    def _done(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            placed = self._direct and self._into is not None and self._into.is_full
            waiter.set_result(Response(self._status, self._headers, bytes(self._body), placed))
        self._direct = False

    def _fail(self, error: StoreError) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _settle(self) -> None:
        """The request is over: its memory is nobody's business any more."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.cancel()
        self._into, self._parser, self._direct = None, None, False


async def connect(host: str, port: int, context: ssl.SSLContext | None) -> Connection:
    """A connection to the store.

    Raises
    ------
    OSError, ssl.SSLError
    """
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(
        Connection,
        host,
        port,
        ssl=context,
        server_hostname=host if context is not None else None,
    )
    return protocol
