# SPDX-License-Identifier: Apache-2.0
"""The object tier beside a store that does what the test says: presence, errors, headers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import Any

import pytest

from kvtier.errors import TierLostError
from kvtier.options import Secret
from kvtier.testing.contract import chunk, context
from kvtier.tiers.base import TierContext
from kvtier.tiers.obj.bulk import TRIES
from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.tier import FIRST_QUESTIONS
from kvtier.types import Outcome
from tests.tiers.obj.memory_store import MemoryStore, error
from tests.tiers.obj.rig import SIZE, bench
from tests.tiers.obj.scripted import answer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("quick")]


async def test_what_was_written_is_known_without_a_question() -> None:
    async with bench() as made:
        assert await made.put(*range(20)) == [Outcome.DONE] * 20
        assert await made.ask(*range(20), 99) == "+" * 20 + "-"
        assert made.store.requests["HEAD"] == 1


@pytest.mark.fault("O17")
async def test_questions_stop_at_the_first_that_is_not_there() -> None:
    async with bench() as made:
        assert await made.ask(*range(100, 2100)) == "-" * 2000
        assert made.store.requests["HEAD"] <= FIRST_QUESTIONS
        await made.put(*range(50))
        made.tier.forget_presence()
        made.store.requests.clear()
        # Nothing behind the gap is of use, though it is there.
        assert await made.ask(*range(10), 500, *range(10, 50)) == "+" * 10 + "-" * 41
        assert made.store.requests["HEAD"] <= 2 * 11
        made.tier.forget_presence()
        made.store.requests.clear()
        assert await made.ask(*range(10), 501, *range(10, 50), windowed=True) == (
            "+" * 10 + "-" + "+" * 40
        )
        assert made.store.requests["HEAD"] == 51


@pytest.mark.fault("O17")
async def test_a_request_asks_no_more_than_its_budget() -> None:
    async with bench(presence_requests=30) as made:
        await made.put(*range(50))
        made.tier.forget_presence()
        made.store.requests.clear()
        assert await made.ask(*range(50), request="a") == "+" * 30 + "-" * 20
        assert made.store.requests["HEAD"] == 30
        made.tier.forget_presence()
        assert await made.ask(*range(50), request="a") == "-" * 50
        assert await made.ask(*range(50), request="b") == "+" * 30 + "-" * 20


async def test_what_was_not_asked_costs_no_budget() -> None:
    async with bench(presence_requests=30) as made:
        await made.put(*range(20))
        made.tier.forget_presence()
        # It ends with the first wave: the prompt's beginning is not there yet.
        assert await made.ask(*range(100, 150), request="a") == "-" * 50
        assert await made.ask(*range(20), request="a") == "+" * 20


async def test_absence_is_short_lived() -> None:
    async with bench(absent_seconds=0.1) as made:
        assert await made.ask(1) == "-"
        key, payload = chunk(1, 0, SIZE)
        crc = made.arena.slot(0, key, SIZE, payload).crc
        made.store.objects[made.path(1)] = (
            payload,
            {"x-amz-meta-kvtier": f"1-{key.hex()}-{SIZE}-{crc:08x}"},
        )
        assert await made.ask(1) == "-"
        assert made.store.requests["HEAD"] == 1
        await asyncio.sleep(0.12)
        assert await made.ask(1) == "+"
        assert await made.get(1) == (Outcome.DONE, True)


@pytest.mark.fault("O09")
async def test_an_object_that_the_store_has_deleted_is_forgotten() -> None:
    """Lifecycle rules tell nobody: one failed load clears the verdict."""
    async with bench() as made:
        await made.put(1, 2)
        made.tier.forget_presence()
        assert await made.ask(1, 2) == "++"
        made.store.objects.clear()
        # An answer to a question is used once, what was written until it proves wrong.
        assert await made.ask(1) == "+"
        assert await made.ask(1) == "-"
        await made.put(3)
        made.store.objects.clear()
        assert await made.ask(3) == "+"
        assert (await made.get(3))[0] is Outcome.MISSING
        assert await made.ask(3) == "-"
        assert await made.put(3) == [Outcome.DONE]
        assert await made.get(3) == (Outcome.DONE, True)


@pytest.mark.fault("C29")
async def test_a_write_that_the_store_has_lost() -> None:
    """It said 200 and keeps nothing, or a part; or it said no, and nobody takes that for a yes."""
    async with bench() as made:
        made.store.refuse = lambda method, path, headers: answer(200) if method == "PUT" else None
        assert await made.put(1) == [Outcome.DONE]
        made.store.refuse = lambda method, path, headers: None
        assert await made.ask(1) == "+"
        assert (await made.get(1))[0] is Outcome.MISSING
        assert await made.ask(1) == "-"
        assert await made.put(1) == [Outcome.DONE]
        path = made.path(1)
        data, meta = made.store.objects[path]
        made.store.objects[path] = data[:-1], meta
        assert (await made.get(1))[0] is Outcome.CORRUPT
        assert await made.put(1) == [Outcome.EXISTS]
        await made.tier.forget([chunk(1, 0, SIZE)[0]])
        assert await made.put(1) == [Outcome.DONE]
        assert await made.get(1) == (Outcome.DONE, True)
        made.store.refuse = lambda method, path, headers: (
            error(400, "InvalidArgument") if method == "PUT" else None
        )
        assert await made.put(2) == [Outcome.IO]
        assert await made.ask(2) == "-"


@pytest.mark.fault("O10")
async def test_errors_are_outcomes_of_their_chunks() -> None:
    async with bench() as made:
        await made.put(1)
        bad = made.path(2)
        made.store.refuse = lambda method, path, headers: (
            answer(500) if path == bad and method == "PUT" else None
        )
        outcomes = await made.put(1, 2, 3)
        assert outcomes == [Outcome.EXISTS, Outcome.IO, Outcome.DONE]
        made.store.refuse = lambda method, path, headers: answer(500)
        assert (await made.get(1))[0] is Outcome.IO
        assert await made.put(1) == [Outcome.IO]
        with pytest.raises(TierLostError):
            await made.ask(77)


async def test_a_question_that_fails_ends_the_others() -> None:
    """One is still being tried again then."""
    async with bench() as made:
        broken = made.path(1)
        made.store.refuse = lambda method, path, headers: answer(500 if path == broken else 403)
        with pytest.raises(TierLostError, match="forbidden"):
            await made.ask(1, 2, 3, 4)


async def test_questions_that_fail_together_are_all_heard() -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: unheard.append(told))
    async with bench() as made:
        made.store.delay_seconds = 5.0
        keys = [chunk(number, 0, SIZE)[0] for number in range(FIRST_QUESTIONS)]
        with pytest.raises(TimeoutError):
            await made.tier.exists(keys, TierContext(time.monotonic() + 0.1))
        gc.collect()
    assert unheard == []


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        (lambda data, meta: (data[:-1], meta), Outcome.CORRUPT),
        (lambda data, meta: (data + b"x", meta), Outcome.CORRUPT),
        (lambda data, meta: (b"", meta), Outcome.CORRUPT),
        (lambda data, meta: (data, {}), Outcome.CORRUPT),
        (lambda data, meta: (data, {"x-amz-meta-kvtier": "2-00-1-00000000"}), Outcome.CORRUPT),
        (
            lambda data, meta: (data, {k: v.replace("-4096-", "-4095-") for k, v in meta.items()}),
            Outcome.CORRUPT,
        ),
        (
            lambda data, meta: (data, {k: "1-ab" + v[4:] for k, v in meta.items()}),
            Outcome.CORRUPT,
        ),
    ],
    ids=["short", "long", "empty", "no metadata", "other version", "other length", "other key"],
)
async def test_what_is_not_the_chunk_is_not_loaded(damage: Any, outcome: Outcome) -> None:
    async with bench() as made:
        await made.put(1)
        path = made.path(1)
        made.store.objects[path] = damage(*made.store.objects[path])
        assert (await made.get(1))[0] is outcome
        await made.tier.forget([chunk(1, 0, SIZE)[0]])
        assert await made.ask(1) == "-"
        assert await made.put(1) == [Outcome.DONE]
        assert await made.get(1) == (Outcome.DONE, True)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", bytes(SIZE)], ids=["empty", "a page", "a page of this length"]
)
async def test_an_answer_that_is_not_the_objects_deletes_nothing(body: bytes) -> None:
    async with bench() as made:
        await made.put(1)
        said = answer(200, body)
        for head in (None, error(404, "NoSuchKey"), answer(403)):
            made.store.refuse = lambda method, path, headers, head=head: (
                said if method == "GET" else head
            )
            assert (await made.get(1))[0] is Outcome.IO
        made.store.refuse = lambda method, path, headers: said
        # Nothing says that it is whole: as after damage.
        assert (await made.get(1))[0] is Outcome.CORRUPT
        made.store.refuse = lambda method, path, headers: None
        assert await made.get(1) == (Outcome.DONE, True)


@pytest.mark.fault("H14")
@pytest.mark.parametrize("call", ["store", "load"])
async def test_a_call_ends_at_its_deadline_with_what_it_has(call: str) -> None:
    async with bench(stall_seconds=30.0) as made:
        if call == "load":
            await made.put(1, 2)
        slow = made.path(2)
        slots = []
        for number in (1, 2):
            key, payload = chunk(number, 0, SIZE)
            slots.append(made.arena.slot(number, key, SIZE, payload if call == "store" else None))
        made.store.delays[slow] = 60.0
        started = time.monotonic()
        outcomes = await getattr(made.tier, call)(slots, context(0.3))
        assert outcomes == [Outcome.DONE, Outcome.TIMEOUT]
        assert 0.25 < time.monotonic() - started < 2.0


async def test_questions_go_before_chunks_and_loads_before_stores() -> None:
    async with bench(concurrency=1) as made:
        await made.put(1)
        order: list[str] = []
        made.store.refuse = lambda method, path, headers: order.append(method)
        await asyncio.gather(made.put(2, 3, 4), made.get(1), made.ask(5))
        assert order == ["PUT", "HEAD", "GET", "PUT", "PUT"]


async def test_missing_behind_a_403() -> None:
    """Without permission to list, S3 says 403 of what is not there; then nothing is permitted."""
    store = MemoryStore()
    locked = False

    def refuse(method: str, path: str, headers: dict[str, str]) -> bytes | None:
        if locked or (method in ("GET", "HEAD") and path not in store.objects):
            return answer(403) if method == "HEAD" else error(403, "AccessDenied")
        return None

    store.refuse = refuse
    async with bench(store) as made:
        await made.put(1)
        assert (await made.get(2))[0] is Outcome.MISSING
        assert await made.ask(1, 2) == "+-"
        locked = True
        made.tier._readable_until = 0.0
        made.tier.forget_presence()
        assert (await made.get(1))[0] is Outcome.DENIED
        with pytest.raises(TierLostError):
            await made.ask(1)


async def test_a_rule_of_the_bucket_that_deletes_the_proof_with_the_rest() -> None:
    """Without permission to list, nothing but ``namespace.json`` tells a miss from a ban."""
    store = MemoryStore()
    store.refuse = lambda method, path, headers: (
        answer(403) if method in ("GET", "HEAD") and path not in store.objects else None
    )
    async with bench(store) as made:
        await made.put(1)
        (proof,) = (path for path in store.objects if path.endswith("namespace.json"))
        content = store.objects[proof]
        store.objects.clear()
        assert await made.ask(2) == "-"
        assert (await made.get(1))[0] is Outcome.MISSING
        assert store.objects == {proof: content}
        # Where nothing is permitted any more, it is not written at each question.
        store.refuse = lambda method, path, headers: answer(403)
        made.tier._readable_until = made.tier._rewrite_at = 0.0
        store.requests.clear()
        for number in range(10, 15):
            with pytest.raises(TierLostError, match="forbidden"):
                await made.ask(number)
        assert store.requests["PUT"] == 1


async def test_a_403_where_listing_is_permitted_is_no_miss() -> None:
    async with bench() as made:
        await made.put(1)
        made.store.refuse = lambda method, path, headers: answer(403)
        made.tier.forget_presence()
        assert (await made.get(1))[0] is Outcome.DENIED


@pytest.mark.fault("O07")
async def test_waiting_in_line_is_no_error() -> None:
    store = MemoryStore()
    async with bench(store, concurrency=16) as made:
        store.delay_seconds = 0.02
        assert await made.put(*range(64)) == [Outcome.DONE] * 64
        results = await asyncio.gather(
            *(
                made.tier.load([made.arena.slot(n, chunk(n, 0, SIZE)[0], SIZE)], context(30.0))
                for n in range(64)
                for _ in range(4)
            )
        )
        assert results == [[Outcome.DONE]] * 256
        assert store.most_under_way <= 16


@pytest.mark.fault("O06")
async def test_a_store_that_asks_for_less_gets_less() -> None:
    """503 SlowDown for a while, from many workers: fewer requests, then all is well."""
    store = MemoryStore()
    async with bench(store) as made:
        await made.put(*range(64))
        limit = made.tier._bulk.limit
        before = limit.places
        seen = []
        until = time.monotonic() + 1.0

        def refuse(method: str, path: str, headers: dict[str, str]) -> bytes | None:
            seen.append(limit.places)
            return error(503, "SlowDown") if time.monotonic() < until else None

        made.store.refuse = refuse
        outcomes = []
        while time.monotonic() < until:
            outcomes += await asyncio.gather(*(made.get(n) for n in range(64)))
        assert {outcome for outcome, _ in outcomes} <= {Outcome.DROPPED, Outcome.DONE}
        assert min(seen) <= before // 4
        assert await made.get(1) == (Outcome.DONE, True)


@pytest.mark.fault("O03")
@pytest.mark.parametrize("knows", [True, False])
async def test_no_header_on_the_wire_that_the_store_does_not_take(knows: bool) -> None:
    """Many stores refuse the checksums that botocore adds since 2025, and chunked bodies."""
    store = MemoryStore()
    seen: list[tuple[str, dict[str, str]]] = []

    def watch(method: str, path: str, headers: dict[str, str]) -> bytes | None:
        seen.append((method, headers))
        wrong = headers.get("x-amz-checksum-crc32c") == "AAAAAA=="
        return error(400, "BadDigest") if knows and wrong else None

    store.refuse = watch
    async with bench(store) as made:
        seen.clear()
        await made.put(1)
        await made.get(1)
        await made.ask(2)
        assert made.tier._control is not None
        with contextlib.suppress(StoreError):  # this store does not know deletion of many
            await made.tier._control.delete(["a", "b"])
    methods = [method for method, _ in seen]
    assert methods[:3] == ["PUT", "GET", "HEAD"]
    assert "POST" in methods
    for method, headers in seen:
        assert ("x-amz-checksum-crc32c" in headers) == (knows and method == "PUT")
        # Others delete many only with this one.
        assert ("content-md5" in headers) == (method == "POST")
        assert "aws-chunked" not in headers.get("content-encoding", "")
        assert "x-amz-trailer" not in headers
        assert "transfer-encoding" not in headers


async def test_what_the_options_say_stands_in_each_put() -> None:
    store = MemoryStore()
    seen: list[tuple[str, dict[str, str]]] = []
    store.refuse = lambda method, path, headers: seen.append((method, headers))
    said = {"sse": "aws:kms", "storage_class": "STANDARD_IA", "session_token": Secret("a-token")}
    async with bench(store, **said) as made:
        seen.clear()
        await made.put(1)
        await made.get(1)
    (put, headers), (get, others) = seen
    assert (put, get) == ("PUT", "GET")
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert "x-amz-storage-class" not in others
    for one in (headers, others):
        assert one["x-amz-security-token"] == "a-token"
        assert "x-amz-security-token" in one["authorization"]
    assert "x-amz-storage-class" in headers["authorization"]


@pytest.mark.fault("O18")
async def test_each_cause_is_counted() -> None:
    causes = {
        "forbidden": (error(403, "AccessDenied"), Outcome.DENIED),
        "missing": (error(404, "NoSuchKey"), Outcome.MISSING),
        "no_bucket": (error(404, "NoSuchBucket"), Outcome.LOST),
        "region": (error(301, "PermanentRedirect"), Outcome.DENIED),
        "skewed": (error(403, "RequestTimeTooSkewed"), Outcome.DENIED),
        "expired": (error(400, "ExpiredToken"), Outcome.DENIED),
        "slow_down": (error(503, "SlowDown"), Outcome.DROPPED),
        "server": (error(500, "InternalError"), Outcome.IO),
        "reset": (b"", Outcome.IO),
        "protocol": (b"what?\r\n\r\n", Outcome.IO),
        "refused": (error(400, "InvalidArgument"), Outcome.IO),
        "corrupt": (answer(200, bytes(SIZE)), Outcome.CORRUPT),
        "stalled_body": (answer(200, bytes(SIZE - 1), length=SIZE), Outcome.TIMEOUT),
    }
    async with bench(stall_seconds=0.05) as made:
        await made.put(1)
        recorder = made.tier.env.recorder
        for cause, (bad, outcome) in causes.items():
            recorder.take()
            made.store.refuse = lambda method, path, headers, bad=bad: bad
            assert (await made.get(1))[0] is outcome
            counted = {
                sample.labels: sample.value
                for sample in recorder.take()
                if sample.name == "kvtier_obj_errors_total"
            }
            assert set(counted) == {("obj", cause)}
            retried = cause in ("slow_down", "server", "reset", "protocol", "stalled_body")
            told = TRIES if retried else 2 if cause == "expired" else 1
            assert counted["obj", cause] == told
            made.tier._bulk.limit.places = 8


async def test_requests_and_their_limit_are_shown() -> None:
    """What is not there, or not permitted, is an error by its cause."""
    async with bench(concurrency=3) as made:
        recorder = made.tier.env.recorder
        values = {one.name: one.value for one in recorder.take() if len(one.labels) == 1}
        assert values["kvtier_obj_concurrency"] == 3
        assert values["kvtier_obj_connections"] == 1
        await made.put(*range(6))
        await made.get(1)
        await made.ask(77)
        made.store.refuse = lambda method, path, headers: error(403, "AccessDenied")
        await made.get(1)
        made.store.refuse = lambda method, path, headers: None
        await made.tier.forget([chunk(1, 0, SIZE)[0]])
        samples = recorder.take()
    ended = {one.labels[1]: one.value for one in samples if one.name == "kvtier_obj_requests_total"}
    assert ended == {"PUT": 6, "GET": 1, "DELETE": 1}
    assert ("kvtier_obj_connections", 3) in {(one.name, one.value) for one in samples}


async def test_what_all_questions_met_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them fail in the same turn of the loop: nothing is left for the log to find."""

    async def fails(*arguments: object, **more: object) -> None:
        raise StoreError(Kind.RESET, "so")

    left: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, found: left.append(found))
    async with bench() as made:
        monkeypatch.setattr(made.tier._bulk, "request", fails)
        with contextlib.suppress(TierLostError):
            await made.ask(*range(FIRST_QUESTIONS))
            pytest.fail("they were answered")
        gc.collect()
    assert left == []


async def test_a_question_that_fails_before_the_first_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as made:
        first = made.path(0).removeprefix("/bucket/")

        async def fails(method: str, name: str, *rest: object) -> None:
            if name == first:
                await asyncio.sleep(60)
            raise StoreError(Kind.RESET, "so")

        monkeypatch.setattr(made.tier._bulk, "request", fails)
        with pytest.raises(TierLostError):
            await made.ask(*range(FIRST_QUESTIONS))
