# SPDX-License-Identifier: Apache-2.0
"""A small S3 in memory whose every answer a test may replace."""

from __future__ import annotations

import asyncio
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from urllib.parse import unquote

from tests.tiers.obj.scripted import Peer, answer, playing

Refuse = Callable[[str, str, dict[str, str]], bytes | None]


def error(status: int, code: str, *headers: tuple[str, str], extra: str = "") -> bytes:
    """An S3 error with its XML."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>so</Message>{extra}</Error>"
    return answer(status, body.encode(), headers)


def etag(data: bytes) -> str:
    """As a store makes them: of the bytes, in quotes."""
    return f'"{zlib.crc32(data):08x}-{len(data)}"'


class MemoryStore:
    """Objects by path, with their metadata; the play of a scripted server."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.refuse: Refuse = lambda method, path, headers: None
        """Gives another answer than the right one; ``b""`` hangs up."""
        self.hangs_up = False
        """After another answer than the right one."""
        self.delay_seconds = 0.0
        self.delays: dict[str, float] = {}
        """Of single paths."""
        self.buckets = {"bucket"}
        self.requests: Counter[str] = Counter()
        self.under_way = 0
        self.most_under_way = 0

    async def __call__(self, peer: Peer) -> None:
        while True:
            line, headers, body = await peer.request()
            method, path, _ = line.split(" ")
            self.requests[method] += 1
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                await asyncio.sleep(self.delays.get(path, self.delay_seconds))
                other = self.refuse(method, path, headers)
                if other == b"":
                    return
                if other is None:
                    await peer.send(self.right(method, path, headers, body))
                else:
                    await peer.send(other)
                    if self.hangs_up:
                        return
            finally:
                self.under_way -= 1

    def right(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        name = unquote(path.partition("?")[0])
        bucket, _, key = name[1:].partition("/")
        if method == "PUT" and not key:
            self.buckets.add(bucket)
            return answer(200)
        if bucket not in self.buckets:
            return error(404, "NoSuchBucket")
        if method == "PUT":
            if headers.get("if-none-match") == "*" and name in self.objects:
                return error(412, "PreconditionFailed")
            meta = {k: v for k, v in headers.items() if k.startswith("x-amz-meta-")}
            self.objects[name] = body, meta
            return answer(200)
        if method == "DELETE":
            self.objects.pop(name, None)
            return answer(204, framed=False)
        found = self.objects.get(name)
        if found is None:
            return answer(404) if method == "HEAD" else error(404, "NoSuchKey")
        data, meta = found
        told = [*meta.items(), ("ETag", etag(data))]
        if headers.get("if-match", etag(data)) != etag(data):
            return error(412, "PreconditionFailed")
        if method == "HEAD":
            return answer(200, b"", told, length=len(data))
        if "range" not in headers:
            return answer(200, data, told)
        start = int(headers["range"].removeprefix("bytes=").removesuffix("-"))
        if start >= len(data):
            return error(416, "InvalidRange")
        stands = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return answer(206, data[start:], [*told, ("Content-Range", stands)])


DAMAGED = 0.1
"""Of the faults of a load; the object stays so."""


class Unreliable(MemoryStore):
    """Each thing that a store does now and then, at random, to a part of the requests."""

    def __init__(self, seed: int, part: float) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._part = part
        self.faults: Counter[str] = Counter()
        self.refuse = self._fault
        self.hangs_up = True

    def _fault(self, method: str, path: str, headers: dict[str, str]) -> bytes | None:
        if not path.endswith(".kv") or self._random.random() >= self._part:
            return None
        data, meta = self.objects.get(unquote(path), (b"", {}))
        other = bytearray(data)
        if other:
            other[self._random.randrange(len(other))] ^= 1 << self._random.randrange(8)
        faults = {
            "slow down": error(503, "SlowDown"),
            "server": error(500, "InternalError"),
            "gateway": answer(502, b"<html>"),
            "conflict": error(409, "ConditionalRequestConflict"),
            "forbidden": answer(403),
            "hangs up": b"",
            "garbage": b"\x00\x01\r\n\r\n",
        }
        if method == "GET" and data:
            if self._random.random() < DAMAGED:
                self.objects[unquote(path)] = data[:-1], meta
                self.faults["object cut"] += 1
                return None
            right = self.right(method, path, headers, b"")
            told = [*meta.items(), ("ETag", etag(data))]
            flipped = answer(200, bytes(other), told)
            faults |= {
                "flipped": flipped,
                "flipped and cut": flipped[: self._random.randrange(1, len(flipped))],
                "other object": error(412, "PreconditionFailed"),
                "no such range": error(416, "InvalidRange"),
                "other range": answer(206, data, [*told, ("Content-Range", "bytes 1-2/3")]),
                "short": answer(200, data[:-1], list(meta.items())),
                "long": answer(200, data + b"x", list(meta.items())),
                "cut": right[: self._random.randrange(1, len(right))],
                "gzip": answer(200, data, [*meta.items(), ("Content-Encoding", "gzip")]),
                "no metadata": answer(200, data),
            }
        name = self._random.choice(sorted(faults))
        self.faults[name] += 1
        return faults[name]


async def _main(seed: int, part: float) -> None:
    store = Unreliable(seed, part)
    async with playing(store) as port:
        print(port, flush=True)
        # Ends with whoever started it.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
