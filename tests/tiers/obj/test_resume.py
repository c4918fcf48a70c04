# SPDX-License-Identifier: Apache-2.0
"""A body that was cut: the next try brings the rest, of the same object, or the whole."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvtier._core.layout import crc32c
from kvtier.testing.contract import Arena, chunk, context, make_env
from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj.bulk import TRIES
from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.tier import ObjTier
from kvtier.types import Outcome
from tests.tiers.obj.memory_store import MemoryStore, error, etag
from tests.tiers.obj.rig import options
from tests.tiers.obj.scripted import Peer, answer, playing
from tests.tiers.obj.servers import moto
from tests.tiers.obj.test_bulk import PAYLOAD, Bench, bench

pytestmark = pytest.mark.asyncio

OTHER = bytes(255 - byte for byte in PAYLOAD)
NAME = "/bucket/a/b"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_module, "PAUSE_SECONDS", 0.001)


class Cutting:
    """A store that ends its answers early.

    Parameters
    ----------
    *cuts : int
        Bytes of each answer that it sends, one after the other; then whole ones.
    stalls : bool
        It sends nothing more instead of hanging up.
    """

    def __init__(self, *cuts: int, stalls: bool = False, data: bytes = PAYLOAD) -> None:
        self.store = MemoryStore()
        self.store.objects[NAME] = data, {}
        self.cuts = list(cuts)
        self.stalls = stalls
        self.ranges: list[str | None] = []
        """What each request asked for."""
        self.sent_bytes = 0
        """Of bodies."""
        self.between: Callable[[], object] = lambda: None
        """Called after each answer that was cut."""

    async def __call__(self, peer: Peer) -> None:
        while True:
            line, headers, body = await peer.request()
            method, path, _ = line.split(" ")
            self.ranges.append(headers.get("range"))
            assert ("range" in headers) == ("if-match" in headers)
            other = self.store.refuse(method, path, headers)
            whole = self.store.right(method, path, headers, body) if other is None else other
            cut = self.cuts.pop(0) if self.cuts else len(whole)
            self.sent_bytes += max(0, cut - whole.index(b"\r\n\r\n") - 4)
            await peer.send(whole[:cut])
            if cut < len(whole):
                self.between()
                if self.stalls:
                    await peer.gone()
                return


def head_bytes(data: bytes) -> int:
    return len(answer(200, data, [("ETag", etag(data))])) - len(data)


async def get(made: Bench, length: int, deadline: float = 5.0) -> bytes:
    into = memoryview(bytearray(length))
    await made.bulk.request("GET", "a/b", time.monotonic() + deadline, into=into)
    return bytes(into)


async def test_cut_at_any_byte() -> None:
    """Each byte of the body travels once."""
    data = PAYLOAD[:300]
    head = head_bytes(data)
    store = Cutting(data=data)
    async with bench(store) as made:
        for cut in range(1, head + len(data)):
            store.cuts, store.ranges, store.sent_bytes = [cut], [], 0
            assert await get(made, len(data)) == data
            there = max(0, cut - head)
            assert store.ranges == [None, f"bytes={there}-" if there else None]
            assert store.sent_bytes == len(data)
        assert made.errors == {Kind.RESET: head + len(data) - 1}


@pytest.mark.parametrize("stalls", [False, True])
async def test_cut_again_and_again(stalls: bool) -> None:
    head = head_bytes(PAYLOAD)
    store = Cutting(head + 10_000, 9_000, 9_000, stalls=stalls)
    async with bench(store) as made:
        assert await get(made, len(PAYLOAD)) == PAYLOAD
        assert len(store.ranges) == TRIES
        starts = [int(one[6:-1]) for one in store.ranges[1:]]
        assert 10_000 == starts[0] < starts[1] < starts[2]
        assert store.sent_bytes == len(PAYLOAD)
        assert made.errors == {Kind.STALLED_BODY if stalls else Kind.RESET: 3}


async def test_a_byte_now_and_then() -> None:
    """One comes after the time that a byte may take, as one every ten seconds does: the load ends
    after so many tries, and each had asked for the rest."""
    whole = answer(200, PAYLOAD, [("ETag", etag(PAYLOAD))])
    ranges: list[str | None] = []

    async def play(peer: Peer) -> None:
        _, headers, _ = await peer.request()
        ranges.append(headers.get("range"))
        start = int((ranges[-1] or "bytes=0-")[6:-1])
        stands = f"bytes {start}-{len(PAYLOAD) - 1}/{len(PAYLOAD)}"
        told = [("ETag", etag(PAYLOAD)), ("Content-Range", stands)]
        rest = answer(206, PAYLOAD[start:], told) if start else whole
        cut = len(rest) - len(PAYLOAD[start:]) + 1
        await peer.send(rest[:cut], rest[cut : cut + 1], pause=0.5)

    async with bench(play, stall_seconds=0.1) as made:
        started = time.monotonic()
        with pytest.raises(StoreError) as caught:
            await get(made, len(PAYLOAD))
        assert caught.value.kind is Kind.STALLED_BODY
        assert time.monotonic() - started < 2.0
        assert ranges == [None, "bytes=1-", "bytes=2-", "bytes=3-"]


def rest(
    start: int = 100, *, data: bytes = PAYLOAD, range_: str | None = None, tag: str | None = None
) -> bytes:
    stands = range_ or f"bytes {start}-{len(data) - 1}/{len(data)}"
    told = [("ETag", etag(PAYLOAD) if tag is None else tag)]
    return answer(206, data[start:], [*told, ("Content-Range", stands)])


def without(response: bytes, header: bytes) -> bytes:
    head, _, body = response.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(header)]
    return b"\r\n".join([*lines, b"", b""]) + body


WHOLE = len(PAYLOAD)
# What comes in place of the rest from byte 100 on, and how often the store is asked in all.
ANSWERS: dict[str, tuple[bytes, int]] = {
    "the rest": (rest(), 2),
    "the whole": (answer(200, PAYLOAD, [("ETag", etag(PAYLOAD))]), 2),
    "another whole": (answer(200, OTHER, [("ETag", etag(OTHER))]), 2),
    "another object": (error(412, "PreconditionFailed"), 3),
    "no such range": (error(416, "InvalidRange"), 3),
    "a byte before": (rest(99), 3),
    "a byte behind": (rest(101), 3),
    "from the start": (rest(0), 3),
    "less than the rest": (rest(data=PAYLOAD[:-1]), 3),
    "of a longer one": (rest(range_=f"bytes 100-{WHOLE - 1}/{WHOLE + 1}"), 3),
    "of unknown length": (rest(range_=f"bytes 100-{WHOLE - 1}/*"), 3),
    "a range that says otherwise": (rest(range_=f"bytes 101-{WHOLE}/{WHOLE + 1}"), 3),
    "no range said": (without(rest(), b"Content-Range"), 3),
    "the rest of another": (rest(data=OTHER, tag=etag(OTHER)), 3),
    "no tag": (without(rest(), b"ETag"), 3),
    "encoded": (rest().replace(b"ETag", b"Content-Encoding: gzip\r\nETag", 1), 3),
    "several parts": (
        answer(206, b"--x\r\n", [("Content-Type", "multipart/byteranges; boundary=x")]),
        3,
    ),
    "too busy": (error(503, "SlowDown"), 3),
}


@pytest.mark.fault("C26")
@pytest.mark.parametrize("name", ANSWERS)
async def test_what_is_not_the_rest_is_not_taken_for_it(name: str) -> None:
    second, requests = ANSWERS[name]
    store = Cutting(head_bytes(PAYLOAD) + 100)
    answers = [None, second]
    store.store.refuse = lambda method, path, headers: answers.pop(0) if answers else None
    async with bench(store) as made:
        right = OTHER if name == "another whole" else PAYLOAD
        assert await get(made, WHOLE) == right
        busy = name == "too busy"
        third = [None if not busy else "bytes=100-"] * (requests == 3)
        assert store.ranges == [None, "bytes=100-", *third]
        kinds = {Kind.SLOW_DOWN if busy else Kind.CHANGED: 1} if requests == 3 else {}
        assert made.errors == {Kind.RESET: 1, **kinds}


async def test_an_object_that_is_gone_meanwhile_is_missing() -> None:
    store = Cutting(head_bytes(PAYLOAD) + 100)
    store.between = store.store.objects.clear
    async with bench(store) as made:
        with pytest.raises(StoreError) as caught:
            await get(made, WHOLE)
        assert caught.value.kind is Kind.MISSING
        assert len(store.ranges) == 2


async def test_another_object_meanwhile_is_loaded_as_a_whole() -> None:
    store = Cutting(head_bytes(PAYLOAD) + 100)
    store.between = lambda: store.store.objects.update({NAME: (OTHER, {})})
    async with bench(store) as made:
        assert await get(made, WHOLE) == OTHER
        assert store.ranges == [None, "bytes=100-", None]


@pytest.mark.parametrize("tag", [None, 'W/"weak"', "bare"])
async def test_without_a_tag_the_whole_comes_again(tag: str | None) -> None:
    """Nothing says whether the rest would be of the same object."""
    whole = answer(200, PAYLOAD, [] if tag is None else [("ETag", tag)])
    store = Cutting(len(whole) - WHOLE + 100)
    store.store.refuse = lambda method, path, headers: whole
    async with bench(store) as made:
        assert await get(made, WHOLE) == PAYLOAD
        assert store.ranges == [None, None]


async def test_a_cut_body_of_a_real_store(tmp_path: Path) -> None:
    """Behind a proxy that ends the answers of moto's server early, at random."""
    size = 1 << 20
    rng = random.Random(5)
    sent: list[int] = []  # bytes of each body

    with moto(tmp_path) as server:
        where = urlsplit(server.url)

        async def relay(peer: Peer) -> None:
            while True:
                line, headers, body = await peer.request()
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                headers["connection"] = "close"
                lines = [line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
                writer.write("\r\n".join(lines).encode() + body)
                response = await reader.read(-1)
                writer.close()
                await writer.wait_closed()
                head, _, data = response.partition(b"\r\n\r\n")
                if not line.startswith("GET") or len(data) < 1000:
                    await peer.send(response)
                    return
                cut = len(data) if len(sent) % 3 == 2 else rng.randrange(1, len(data))
                sent.append(cut)
                await peer.send(head + b"\r\n\r\n" + data[:cut])
                return

        async with playing(relay) as port:
            tier = ObjTier(
                "obj",
                options(port, create_bucket=True),
                make_env(sizes=[size], definitions=METRICS),
            )
            await tier.open()
            arena = Arena(1, size)
            try:
                for number in range(4):
                    key, payload = chunk(number, 0, size)
                    slot = arena.slot(0, key, size, payload)
                    assert await tier.store([slot], context()) == [Outcome.DONE]
                    slot = arena.slot(0, key, size)
                    assert await tier.load([slot], context()) == [Outcome.DONE]
                    assert bytes(slot.view) == payload
                    assert crc32c(slot.view) == slot.crc
                assert len(sent) == 12
                assert sum(sent) == 4 * size
            finally:
                await tier.aclose(time.monotonic() + 5)
