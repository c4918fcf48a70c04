# SPDX-License-Identifier: Apache-2.0
"""An object store in memory for benchmarks: ``python -m benchmarks.obj_server GIB [--background]``.

Prints its port, and ends with its standard input. In the background it makes way for others, as the
tier service does. It takes any signature and compares no checksum,
so that it costs little beside the copies: a body goes from the socket into the object's memory, and
from there to the next socket. Memory of objects that had to go is used again, for others of the
same size; those that were asked for least recently go first.

Owns the objects. Runs on one uvloop; as fast as the clients with what they ask for, not as a store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import re
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import cast

import uvloop

from kvtier.runtime.child import NICE, POLICY

SCRATCH_BYTES = 16 << 10
HUGE_BYTES = 2 << 20

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.I)
_RANGE = re.compile(rb"\r\nrange: *bytes=([0-9]+)-([0-9]+)", re.I)
_META = re.compile(rb"\r\nx-amz-meta-kvtier: *([^\r]*)", re.I)
_EXPECT = re.compile(rb"\r\nexpect: *100-continue", re.I)
_NO_KEY = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>"


class Store:
    """Objects by path, each with its metadata."""

    def __init__(self, capacity_bytes: int) -> None:
        self.objects: OrderedDict[bytes, tuple[memoryview, bytes]] = OrderedDict()
        self._left_bytes = capacity_bytes
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)

    def memory(self, size: int) -> memoryview:
        """For a body that is to come."""
        while not self._free[size] and self._left_bytes < size:
            _, (view, _) = self.objects.popitem(last=False)
            self._free[len(view)].append(view)
            if len(view) != size:
                # Of another case, which is over.
                self._left_bytes += len(self._free[len(view)].pop())
        if self._free[size]:
            return self._free[size].pop()
        self._left_bytes -= size
        if size < HUGE_BYTES:
            return memoryview(bytearray(size))
        pages = mmap.mmap(-1, size)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(pages)

    def put(self, path: bytes, view: memoryview, meta: bytes) -> None:
        """The body has come."""
        self.delete(path)
        self.objects[path] = view, meta

    def get(self, path: bytes) -> tuple[memoryview, bytes] | None:
        found = self.objects.get(path)
        if found is not None:
            self.objects.move_to_end(path)
        return found

    def delete(self, path: bytes) -> None:
        found = self.objects.pop(path, None)
        if found is not None:
            self._free[len(found[0])].append(found[0])


class Peer(asyncio.BufferedProtocol):
    """One connection of a client."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._filled = 0
        self._head = b""
        self._body: memoryview | None = None
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return self._body[self._received :]
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._received += nbytes
        else:
            self._filled += nbytes
            data = self._scratch[: self._filled].tobytes()
            head, end, rest = data.partition(b"\r\n\r\n")
            if not end:
                return
            self._filled = 0
            length = _LENGTH.search(head)
            self._head, self._body = head, self._store.memory(int(length[1]) if length else 0)
            self._received = len(rest)
            self._body[: len(rest)] = rest
            if _EXPECT.search(head) and not rest:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._received == len(self._body):
            body, self._body = self._body, None
            self._answer(self._head, body)

    def _answer(self, head: bytes, body: memoryview) -> None:
        method, target, _ = head.split(b" ", 2)
        path = target.partition(b"?")[0]
        if method == b"PUT":
            meta = _META.search(head)
            self._store.put(path, body, meta[1] if meta else b"")
            self._send(b"200 OK", b'etag: "0"\r\n', 0)
        elif method == b"DELETE":
            self._store.delete(path)
            self._transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        else:
            self._get(path, head, method == b"HEAD")

    def _get(self, path: bytes, head: bytes, is_head: bool) -> None:
        found = self._store.get(path)
        if found is None:
            self._send(b"404 Not Found", b"", len(_NO_KEY), None if is_head else _NO_KEY)
            return
        view, meta = found
        headers = b'etag: "0"\r\naccept-ranges: bytes\r\n'
        if meta:
            headers += b"x-amz-meta-kvtier: " + meta + b"\r\n"
        part = _RANGE.search(head)
        if part is None:
            self._send(b"200 OK", headers, len(view), None if is_head else view)
            return
        first, last = int(part[1]), min(int(part[2]), len(view) - 1)
        headers += b"content-range: bytes %d-%d/%d\r\n" % (first, last, len(view))
        self._send(b"206 Partial Content", headers, last + 1 - first, view[first : last + 1])

    def _send(
        self, status: bytes, headers: bytes, length: int, body: bytes | memoryview | None = None
    ) -> None:
        head = b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n" % (status, headers, length)
        self._transport.write(head)
        if body:
            self._transport.write(body)


async def serve(capacity_bytes: int) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    store = Store(capacity_bytes)
    server = await loop.create_server(lambda: Peer(store), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextlib.contextmanager
def served(gib: float, *, background: bool = False) -> Iterator[str]:
    """The server in a process of its own; its host and port."""
    command = [sys.executable, "-m", "benchmarks.obj_server", str(gib)]
    command += ["--background"] * background
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        try:
            yield f"127.0.0.1:{int(one.stdout.readline())}"
        finally:
            one.stdin.close()
            one.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("gib", type=float, help="of memory, at most")
    parser.add_argument("--background", action="store_true")
    arguments = parser.parse_args()
    if arguments.background:
        os.nice(NICE)
        os.sched_setscheduler(0, POLICY, os.sched_param(0))
    uvloop.run(serve(int(arguments.gib * (1 << 30))))


if __name__ == "__main__":
    main()
