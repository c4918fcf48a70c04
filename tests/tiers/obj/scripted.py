# SPDX-License-Identifier: Apache-2.0
"""A store that does on cue what a real one does once a year: one function plays one connection."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Play = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The store's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        """Request line, headers by lower-case name, body."""
        first = await self.reader.readexactly(1)
        if not first.isalpha():
            # A client that speaks TLS: what a server of HTTP says then.
            await self.send(answer(400))
            raise ConnectionError("no HTTP")
        head = (first + await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in rest)}
        if headers.get("expect") == "100-continue":
            await self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return line, headers, body

    async def send(self, *parts: bytes, pause: float = 0.002) -> None:
        """Each part in a segment of its own."""
        for i, part in enumerate(parts):
            if i:
                await asyncio.sleep(pause)
            self.writer.write(part)
            await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the other side has let go."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


def answer(
    status: int = 200,
    body: bytes = b"",
    headers: Sequence[tuple[str, str]] = (),
    *,
    length: int | None = None,
    framed: bool = True,
) -> bytes:
    """A response; `length` lies about its body."""
    lines = [f"HTTP/1.1 {status} {'OK' if status < 400 else 'No'}"]
    if framed:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def playing(play: Play, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on loopback; its port. What a play raises is raised at the end of the block."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client is allowed to let go at any time.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await play(Peer(reader, writer))
            finally:
                writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(serve(reader, writer), name="play"))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
    for end in ends:
        if isinstance(end, Exception):
            raise end


@contextlib.contextmanager
def playing_in_thread(play: Play) -> Iterator[int]:
    """The same for tests without a loop: the server has a thread of its own."""
    ports: list[int] = []
    started, ended = threading.Event(), threading.Event()

    async def main() -> None:
        async with playing(play) as port:
            ports.append(port)
            started.set()
            while not ended.is_set():
                await asyncio.sleep(0.005)

    with ThreadPoolExecutor(1, thread_name_prefix="store") as pool:
        served = pool.submit(asyncio.run, main())
        try:
            while not started.wait(0.1):
                if served.done():
                    served.result()
            yield ports[0]
        finally:
            ended.set()
        served.result()


def certificate(folder: Path, name: str = "IP:127.0.0.1,DNS:localhost") -> tuple[Path, Path]:
    """A certificate that signs itself, which is an authority of its own, and its key."""
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=store", "-addext", f"subjectAltName={name}"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
