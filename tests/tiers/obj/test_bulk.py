# SPDX-License-Identifier: Apache-2.0
"""The bulk path against a store that does each wrong thing on cue: kinds, retries, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import botocore.loaders
import pytest

from kvtier.options import Secret
from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj.bulk import TRIES, Bulk
from kvtier.tiers.obj.control import Control
from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.sign import Credentials
from tests.tiers.obj.memory_store import error
from tests.tiers.obj.scripted import Peer, Play, answer, playing

pytestmark = pytest.mark.asyncio

PAYLOAD = bytes(range(256)) * 200


class Bench:
    """A bulk path beside a scripted store."""

    def __init__(self, bulk: Bulk, control: Control, errors: Counter[Kind]) -> None:
        self.bulk = bulk
        self.control = control
        self.errors = errors

    async def get(self, seconds: float = 5.0) -> bytes:
        into = memoryview(bytearray(len(PAYLOAD)))
        async with asyncio.timeout(seconds):
            await self.bulk.request("GET", "a/b", time.monotonic() + seconds, into=into)
        return bytes(into)


@contextlib.asynccontextmanager
async def bench(play: Play, **options: Any) -> AsyncIterator[Bench]:
    async with playing(play) as port:
        settings = {
            "bucket": "bucket",
            "endpoint_override": f"http://127.0.0.1:{port}",
            "access_key": Secret("AKID"),
            "secret_key": Secret("secret"),
            "stall_seconds": 0.1,
        }
        errors: Counter[Kind] = Counter()
        made = ObjOptions(**(settings | options))
        control = Control(made)
        await control.open()
        bulk = Bulk(made, control, lambda kind: errors.update([kind]))
        try:
            yield Bench(bulk, control, errors)
        finally:
            await bulk.aclose()
            await control.aclose()
            assert bulk.connections == 0
            assert bulk.limit.taken == 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_module, "PAUSE_SECONDS", 0.005)


class Store:
    """Plays answers, one a request over all connections, and then whole chunks."""

    def __init__(self, *answers: bytes | Callable[[Peer], Any]) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0

    async def __call__(self, peer: Peer) -> None:
        self.connections += 1
        while True:
            self.seen.append(await peer.request())
            one = self.answers.pop(0) if self.answers else answer(200, PAYLOAD)
            if callable(one):
                if not await one(peer):
                    return
            else:
                await peer.send(one)


async def closes(peer: Peer) -> bool:
    return False


async def hangs(peer: Peer) -> bool:
    await peer.gone()
    return False


async def half(peer: Peer) -> bool:
    await peer.send(answer(200, PAYLOAD)[:-100])
    return False


async def stalls(peer: Peer) -> bool:
    await peer.send(answer(200, PAYLOAD)[:-100])
    await peer.gone()
    return False


PASSING = {
    "slow down": (error(503, "SlowDown"), Kind.SLOW_DOWN),
    "503": (answer(503), Kind.SLOW_DOWN),
    "429": (answer(429), Kind.SLOW_DOWN),
    "500": (error(500, "InternalError"), Kind.SERVER),
    "502": (answer(502, b"<html>bad gateway</html>"), Kind.SERVER),
    "504": (answer(504), Kind.SERVER),
    "closed": (closes, Kind.RESET),
    "half a body": (half, Kind.RESET),
    "stalled head": (hangs, Kind.STALLED_HEAD),
    "stalled body": (stalls, Kind.STALLED_BODY),
    "conflict": (error(409, "ConditionalRequestConflict"), Kind.CONFLICT),
    "no http": (b"what?\r\n\r\n", Kind.PROTOCOL),
}


@pytest.mark.parametrize("name", PASSING)
async def test_what_passes_is_tried_again(name: str) -> None:
    bad, kind = PASSING[name]
    store = Store(bad, bad)
    async with bench(store) as made:
        assert await made.get() == PAYLOAD
        assert made.errors == {kind: 2}
        assert len(store.seen) == 3


@pytest.mark.parametrize("name", PASSING)
async def test_tries_are_bounded(name: str) -> None:
    bad, kind = PASSING[name]
    store = Store(*[bad] * 50)
    async with bench(store) as made:
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert caught.value.kind is kind
        assert made.errors == {kind: TRIES}
        assert len(store.seen) == TRIES


LASTING = {
    "missing": (error(404, "NoSuchKey"), Kind.MISSING),
    "404": (answer(404), Kind.MISSING),
    "no bucket": (error(404, "NoSuchBucket"), Kind.NO_BUCKET),
    "forbidden": (error(403, "AccessDenied"), Kind.FORBIDDEN),
    "401": (answer(401), Kind.FORBIDDEN),
    "signature": (error(403, "SignatureDoesNotMatch"), Kind.FORBIDDEN),
    "skewed": (error(403, "RequestTimeTooSkewed"), Kind.SKEWED),
    "quota": (error(403, "QuotaExceeded"), Kind.FULL),
    "507": (answer(507), Kind.FULL),
    "exists": (error(412, "PreconditionFailed"), Kind.EXISTS),
    "301": (
        error(301, "PermanentRedirect", ("x-amz-bucket-region", "eu-west-3")),
        Kind.REGION,
    ),
    "307": (
        error(307, "TemporaryRedirect", ("Location", "http://other/")),
        Kind.REGION,
    ),
    "400 region": (
        error(400, "AuthorizationHeaderMalformed", extra="<Region>eu-west-3</Region>"),
        Kind.REGION,
    ),
    "400 head": (answer(400, b"", [("x-amz-bucket-region", "eu-west-3")]), Kind.REGION),
    "400": (error(400, "InvalidArgument"), Kind.REFUSED),
    "no store": (answer(301, b"", [("Location", "https://store/")]), Kind.REFUSED),
    "501": (error(501, "NotImplemented"), Kind.UNSUPPORTED),
}


@pytest.mark.fault("O13")
@pytest.mark.parametrize("name", LASTING)
async def test_what_lasts_is_said_at_once(name: str) -> None:
    bad, kind = LASTING[name]
    store = Store(*[bad] * 5)
    async with bench(store) as made:
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert caught.value.kind is kind
        assert len(store.seen) == 1
        if "eu-west-3" in repr(bad):
            assert "eu-west-3" in str(caught.value)
        # The connection is whole, and used again.
        store.answers.clear()
        assert await made.get() == PAYLOAD
        assert store.connections == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        # What MinIO and nginx say to http where they speak https.
        (
            answer(400, b"Client sent an HTTP request to an HTTPS server.\n"),
            "refused: 400 Client sent an HTTP request to an HTTPS server.",
        ),
        (
            answer(400, b"<html>\r\n<h1>400 The plain HTTP request</h1><hr>nginx</html>"),
            "refused: 400 400 The plain HTTP request nginx",
        ),
        (
            answer(302, b"", [("Location", "https://store/login")]),
            "refused: 302; it sends on to https://store/login",
        ),
        (error(400, "InvalidArgument"), "refused: 400 InvalidArgument so"),
        (answer(400, b"<Code>A</Code>x"), "refused: 400 A"),
        (answer(400, b"a\x1b[31mb\x00\nc\xff"), "refused: 400 a [31mb c\ufffd"),
        (answer(400, b"<" * 60000), "refused: 400 " + "<" * 200),
    ],
    ids=["minio", "nginx", "redirect", "xml", "code", "control", "long"],
)
async def test_what_the_store_says_is_passed_on_in_one_line(bad: bytes, said: str) -> None:
    async with bench(Store(bad)) as made:
        started = time.process_time()
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert str(caught.value) == said
        assert time.process_time() - started < 2.0


@pytest.mark.parametrize("declared", [b"<?xml version='1.0' encoding='UTF-8'?>\n", b""])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
async def test_an_error_with_status_200_is_one(method: str, declared: bytes) -> None:
    bad = answer(200, declared + b"<Error><Code>InternalError</Code></Error>")
    async with bench(Store(bad)) as made:
        view = memoryview(bytearray(len(PAYLOAD)))
        response = await made.bulk.request(
            method,
            "a/b",
            time.monotonic() + 5,
            body=view if method == "PUT" else None,
            into=view if method == "GET" else None,
        )
        assert response.placed == (method == "GET")
        assert made.errors == {Kind.SERVER: 1}


async def test_a_stale_connection_costs_no_try() -> None:
    """The store closed it while it was idle."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(200, PAYLOAD))
        # Read, and then hung up on, as it happens when both sides are quick.
        await peer.request()

    async with bench(play) as made:
        for _ in range(4):
            assert await made.get() == PAYLOAD
        assert made.errors == {}


async def test_a_connection_that_was_idle_for_long_is_not_used() -> None:
    """The server is about to close it, or a box between has forgotten it."""
    store = Store()
    async with bench(store) as made:
        assert await made.get() == PAYLOAD
        (connection,) = made.bulk._idle
        connection.idle_since -= bulk_module.IDLE_SECONDS
        assert await made.get() == PAYLOAD
        assert store.connections == 2
        assert made.bulk.connections == 1


@pytest.mark.fault("H14")
async def test_the_deadline_holds_whatever_the_store_does() -> None:
    async def trickles(peer: Peer) -> bool:
        whole = answer(200, PAYLOAD)
        for i in range(len(whole)):
            await peer.send(whole[i : i + 1])
            await asyncio.sleep(0.05)
        return True

    store = Store(*[trickles] * 10)
    async with bench(store) as made:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await made.get(0.5)
        assert 0.4 < time.monotonic() - started < 2.0


async def test_no_try_starts_that_cannot_end() -> None:
    bad = error(503, "SlowDown", ("Retry-After", "30"))
    store = Store(*[bad] * 5)
    async with bench(store) as made:
        started = time.monotonic()
        with pytest.raises(StoreError) as caught:
            await made.get(5.0)
        assert caught.value.kind is Kind.SLOW_DOWN
        assert caught.value.retry_after == 30.0
        assert time.monotonic() - started < 2.0
        assert len(store.seen) == 1


@pytest.mark.fault("O13")
@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (301, [("x-amz-bucket-region", "eu-west-3")], Kind.REGION),
        (400, [("x-amz-bucket-region", "eu-west-3")], Kind.REGION),
        (400, [], Kind.REFUSED),
        (403, [], Kind.FORBIDDEN),
        (404, [], Kind.MISSING),
        (429, [], Kind.SLOW_DOWN),
        (500, [], Kind.SERVER),
        (503, [], Kind.SLOW_DOWN),
    ],
)
async def test_a_head_has_only_its_status(
    status: int, headers: list[tuple[str, str]], kind: Kind
) -> None:
    store = Store(*[answer(status, b"", headers)] * TRIES)
    async with bench(store) as made:
        with pytest.raises(StoreError) as caught:
            await made.bulk.request("HEAD", "a", time.monotonic() + 5)
        assert caught.value.kind is kind
        assert len(store.seen) == (TRIES if kind.retried else 1)


async def test_a_404_is_an_answer_to_a_question() -> None:
    """A load of nothing but questions finds its limit, whatever they are answered."""
    async with bench(Store(*[answer(404)] * 2000)) as made:

        async def ask() -> None:
            with pytest.raises(StoreError):
                await made.bulk.request("HEAD", "a/b", time.monotonic() + 5)

        before = made.bulk.limit.places
        for _ in range(4):
            await asyncio.gather(*(ask() for _ in range(100)))
        assert made.bulk.limit.places > before


async def test_pauses_double_and_no_two_are_alike() -> None:
    failed = StoreError(Kind.SERVER, "so")
    for tries in range(1, 9):
        pauses = {Bulk._pause(tries, failed) for _ in range(50)}
        most = min(bulk_module.PAUSE_SECONDS * 2 ** (tries - 1), bulk_module.MAX_PAUSE_SECONDS)
        assert len(pauses) == 50
        assert most / 2 <= min(pauses) < max(pauses) <= most
    assert Bulk._pause(1, StoreError(Kind.SLOW_DOWN, "so", 3.0)) == 3.0


@pytest.mark.parametrize("code", ["SlowDown", "503", "429"])
async def test_slow_down_halves_the_requests_under_way(code: str) -> None:
    bad = error(503, code) if code == "SlowDown" else answer(int(code))
    async with bench(Store(bad)) as made:
        before = made.bulk.limit.places
        assert await made.get() == PAYLOAD
        assert made.bulk.limit.places == before // 2


@pytest.mark.fault("O12")
async def test_expired_credentials_are_renewed_once_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty requests meet the end of a token, and one asks for the next."""
    renewals = 0

    async def play(peer: Peer) -> None:
        while True:
            _, headers, _ = await peer.request()
            is_new = "new-token" in headers.get("x-amz-security-token", "")
            await peer.send(answer(200, PAYLOAD) if is_new else error(400, "ExpiredToken"))

    async with bench(play) as made:

        async def opened(self: Control) -> None:
            nonlocal renewals
            renewals += 1
            await asyncio.sleep(0.01)
            self._current = Credentials("AKID", "secret", "new-token")

        monkeypatch.setattr(Control, "_open", opened)
        assert await asyncio.gather(*(made.get() for _ in range(20))) == [PAYLOAD] * 20
        assert renewals == 1
        assert made.errors[Kind.EXPIRED] <= 20


async def test_credentials_that_stay_expired_end_the_request() -> None:
    store = Store(*[error(400, "ExpiredToken")] * 10)
    async with bench(store) as made:
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert caught.value.kind is Kind.EXPIRED
        assert len(store.seen) == 1
        # The store's word, and that there are no others.
        assert made.errors == {Kind.EXPIRED: 2}


@pytest.mark.parametrize("signed", ["auto", "never", "always"])
async def test_what_is_sent(signed: str) -> None:
    store = Store(answer(200))
    async with bench(store, sign_payload=signed) as made:
        await made.bulk.request(
            "PUT",
            "pre fix/ä+b",
            time.monotonic() + 5,
            headers=[("x-amz-meta-kvtier", "1-00-2-3")],
            body=memoryview(PAYLOAD),
        )
    ((line, headers, body),) = store.seen
    assert line == "PUT /bucket/pre%20fix/%C3%A4%2Bb HTTP/1.1"
    assert body == PAYLOAD
    assert headers["x-amz-meta-kvtier"] == "1-00-2-3"
    assert (headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD") == (signed == "never")
    assert "AKID" in headers["authorization"]


async def test_nobody_listens() -> None:
    async with bench(Store()) as made:
        made.bulk._port = 1
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert caught.value.kind is Kind.CONNECT
        assert made.errors == {Kind.CONNECT: TRIES}


async def test_a_host_that_no_dns_knows() -> None:
    async with bench(Store()) as made:
        made.bulk._host = "host.invalid"
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert caught.value.kind is Kind.DNS


async def test_cancelled_requests_leave_no_connection() -> None:
    store = Store(*[hangs] * 100)
    async with bench(store, stall_seconds=30) as made:
        tasks = [asyncio.create_task(made.get(), name="get") for _ in range(20)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert made.bulk.connections == 0
        assert made.bulk.limit.taken == 0
        store.answers.clear()
        assert await made.get() == PAYLOAD


@pytest.mark.fault("C27")
async def test_connects_that_are_given_up_cross_no_connections() -> None:
    """Descriptors go from the connections of one store to those of the other all the time."""
    other = PAYLOAD[::-1]

    def play_of(payload: bytes) -> Play:
        async def play(peer: Peer) -> None:
            for _ in range(2):  # then a new connection has to be made
                await peer.request()
                await peer.send(answer(200, payload))

        return play

    chance = random.Random(27)
    got = 0
    async with bench(play_of(PAYLOAD)) as first, bench(play_of(other)) as second:
        for _ in range(40):
            tasks = {
                asyncio.create_task(one.get(), name="get"): payload
                for one, payload in ((first, PAYLOAD), (second, other))
                for _ in range(6)
            }
            for task in chance.sample(list(tasks), 8):
                await asyncio.sleep(chance.random() * 0.0005)
                task.cancel()
            await asyncio.wait(tasks)
            for task, payload in tasks.items():
                if not task.cancelled():
                    assert task.result() == payload
                    got += 1
    assert got >= 40 * 4


async def test_connections_are_used_again() -> None:
    store = Store()
    async with bench(store) as made:
        for _ in range(3):
            assert await asyncio.gather(*(made.get() for _ in range(5))) == [PAYLOAD] * 5
        assert store.connections == 5
        assert made.bulk.connections == 5


@pytest.mark.fault("L16")
async def test_answers_that_nobody_reads_hold_no_connection() -> None:
    """More of them than there are connections, each given up as its head has come."""

    def refuse(response: Any) -> None:
        raise StoreError(Kind.CORRUPT, "not wanted")

    store = Store()
    async with bench(store, concurrency=4) as made:
        into = memoryview(bytearray(len(PAYLOAD)))
        shorter = memoryview(bytearray(10))
        for number in range(20):
            with pytest.raises(StoreError):
                await made.bulk.request(
                    "GET",
                    "a",
                    time.monotonic() + 5,
                    into=into if number % 2 else shorter,
                    check=refuse,
                )
            assert made.bulk.connections <= 4
        assert await made.get() == PAYLOAD


@pytest.mark.fault("O01")
@pytest.mark.parametrize(
    ("endpoint", "more", "connects_to", "host", "path"),
    [
        ("127.0.0.1:{port}", {"scheme": "http"}, "127.0.0.1", "127.0.0.1:{port}", "/bucket/a/b"),
        ("http://127.0.0.1:{port}/", {}, "127.0.0.1", "127.0.0.1:{port}", "/bucket/a/b"),
        ("http://localhost:{port}", {}, "localhost", "localhost:{port}", "/bucket/a/b"),
        ("http://[::1]:{port}", {}, "::1", "[::1]:{port}", "/bucket/a/b"),
        (
            "http://store.example:{port}",
            {"addressing": "virtual"},
            "bucket.store.example",
            "bucket.store.example:{port}",
            "/a/b",
        ),
        (
            "http://store.example",
            {"addressing": "path"},
            "store.example",
            "store.example",
            "/bucket/a/b",
        ),
        (
            None,
            {"region": "eu-west-3"},
            "bucket.s3.eu-west-3.amazonaws.com",
            "bucket.s3.eu-west-3.amazonaws.com",
            "/a/b",
        ),
        (
            None,
            {"region": "eu-west-3", "addressing": "path"},
            "s3.eu-west-3.amazonaws.com",
            "s3.eu-west-3.amazonaws.com",
            "/bucket/a/b",
        ),
        (
            None,
            {"region": "eu-west-3", "bucket": "with.dots"},
            "s3.eu-west-3.amazonaws.com",
            "s3.eu-west-3.amazonaws.com",
            "/with.dots/a/b",
        ),
    ],
)
async def test_where_requests_go(
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str | None,
    more: dict[str, Any],
    connects_to: str,
    host: str,
    path: str,
) -> None:
    store = Store()
    asked: list[tuple[str, int]] = []
    real = bulk_module.connect

    async with playing(store) as port:

        async def local(name: str, number: int, context: Any) -> Any:
            asked.append((name, number))
            return await real("127.0.0.1", port, None)

        monkeypatch.setattr(bulk_module, "connect", local)
        made = ObjOptions(
            **{
                "bucket": "bucket",
                "endpoint_override": endpoint and endpoint.format(port=port),
                "access_key": Secret("AKID"),
                "secret_key": Secret("secret"),
                **more,
            }
        )
        control = Control(made)
        await control.open()
        bulk = Bulk(made, control, lambda kind: None)
        try:
            into = memoryview(bytearray(len(PAYLOAD)))
            await bulk.request("GET", "a/b", time.monotonic() + 5, into=into)
        finally:
            await bulk.aclose()
            await control.aclose()
        default = 443 if endpoint is None else 80
        given = endpoint is not None and "{port}" in endpoint
        assert asked == [(connects_to, port if given else default)]
        ((line, headers, _),) = store.seen
        assert line == f"GET {path} HTTP/1.1"
        assert headers["host"] == host.format(port=port)


@pytest.mark.fault("O12")
async def test_renewed_credentials_do_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """botocore reads its descriptions of S3 once: what is renewed costs milliseconds."""
    reads: list[str] = []
    real = botocore.loaders.Loader.load_data_with_path

    def load(self: Any, name: str) -> Any:
        reads.append(name)
        return real(self, name)

    store = Store(*[error(400, "ExpiredToken")] * 3)
    async with bench(store) as made:
        monkeypatch.setattr(botocore.loaders.Loader, "load_data_with_path", load)
        with pytest.raises(StoreError) as caught:
            await made.get()
        assert caught.value.kind is Kind.EXPIRED
        assert [name for name in reads if "s3" in name] == []
