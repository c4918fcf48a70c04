# SPDX-License-Identifier: Apache-2.0
"""Where S3 servers differ: plain aiobotocore reads what the tier writes and the other way round;
the trial finds out what a server can do, and says what is wrong with the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiobotocore.session import get_session

from kvtier.errors import ConfigError
from kvtier.options import Secret
from kvtier.testing.contract import SIZES, Arena, chunk, context, make_env
from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.tier import ObjTier
from kvtier.tiers.obj.trial import Features
from kvtier.types import Outcome, Presence
from tests.engine.rig import keys, rig
from tests.tiers.obj.servers import SWIFT_DOMAIN, SWIFT_PAGE, Server, tier_options

ODD_PREFIX = "kv cache/ü+&é%41=<x>'~"
"""What has to be encoded, and once, in a path, a query and XML."""


@contextlib.asynccontextmanager
async def opened(server: Server, bucket: str, **more: Any) -> AsyncIterator[ObjTier]:
    tier = ObjTier("obj", tier_options(server, bucket, **more), make_env(definitions=METRICS))
    await tier.open()
    try:
        yield tier
    finally:
        await tier.aclose(time.monotonic() + 10)


@contextlib.asynccontextmanager
async def plain(server: Server) -> AsyncIterator[Any]:
    """aiobotocore as anyone would use it."""
    async with get_session().create_client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1" if server.access_key else None,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    ) as client:
        yield client


@pytest.fixture
def arena() -> Arena:
    return Arena(64, -(-max(SIZES) // 4096) * 4096)


CHUNKS = [chunk(group, group, size) for group, size in enumerate(SIZES)]


@pytest.mark.asyncio
@pytest.mark.parametrize("prefix", ["kvtier", ODD_PREFIX])
async def test_aiobotocore_reads_what_the_tier_writes(
    server: Server, bucket: str, arena: Arena, prefix: str
) -> None:
    async with opened(server, bucket, prefix=prefix) as tier, plain(server) as client:
        slots = [arena.slot(i, key, len(data), data) for i, (key, data) in enumerate(CHUNKS)]
        assert set(await tier.store(slots, context())) == {Outcome.DONE}
        for slot, (key, data) in zip(slots, CHUNKS, strict=True):
            assert slot.crc is not None
            found = await client.get_object(Bucket=bucket, Key=tier.name_of(key))
            async with found["Body"] as body:
                assert await body.read() == data
            assert found["Metadata"] == {"kvtier": f"1-{key.hex()}-{len(data)}-{slot.crc:08x}"}
            assert found["ContentType"] == "application/octet-stream"
        listed = await client.list_objects_v2(Bucket=bucket)
        assert {one["Key"]: one["Size"] for one in listed["Contents"]}.items() >= {
            (tier.name_of(key), len(data)) for key, data in CHUNKS
        }


@pytest.mark.asyncio
@pytest.mark.parametrize("prefix", ["kvtier", ODD_PREFIX])
async def test_the_tier_reads_what_aiobotocore_writes(
    server: Server, bucket: str, arena: Arena, prefix: str
) -> None:
    async with opened(server, bucket, prefix=prefix) as tier, plain(server) as client:
        crcs = [arena.slot(0, key, len(data), data).crc or 0 for key, data in CHUNKS]
        for crc, (key, data) in zip(crcs, CHUNKS, strict=True):
            await client.put_object(
                Bucket=bucket,
                Key=tier.name_of(key),
                Body=data,
                Metadata={"kvtier": f"1-{key.hex()}-{len(data)}-{crc:08x}"},
            )
        names = [key for key, _ in CHUNKS]
        assert await tier.exists(names, context()) == [Presence.PRESENT] * len(names)
        slots = [arena.slot(i, key, len(data)) for i, (key, data) in enumerate(CHUNKS)]
        assert set(await tier.load(slots, context())) == {Outcome.DONE}
        assert [bytes(slot.view) for slot in slots] == [data for _, data in CHUNKS]
        assert [slot.crc for slot in slots] == crcs


@pytest.mark.asyncio
async def test_many_are_listed_and_deleted(server: Server, bucket: str, arena: Arena) -> None:
    """Of more than one page, with more than one call; what is not there is no error."""
    async with opened(server, bucket, prefix=ODD_PREFIX) as tier, plain(server) as client:
        control = tier._control
        assert control is not None
        chunks = [chunk(number, 1, SIZES[1]) for number in range(2 * SWIFT_PAGE + 5)]
        slots = [arena.slot(i, key, len(data), data) for i, (key, data) in enumerate(chunks)]
        assert set(await tier.store(slots, context())) == {Outcome.DONE}
        await client.put_object(Bucket=bucket, Key="foreign", Body=b"")

        async def there() -> set[tuple[bytes, int]]:
            return {
                (one.name, one.size)
                async for page in control.list(tier.prefix)
                for one in page
                if one.key is not None
            }

        names = [tier.name_of(key) for key, _ in chunks]
        assert await there() == {(name, SIZES[1]) for name in names}
        calls = []
        control._client.meta.events.register(
            "before-call.s3.DeleteObjects",
            lambda params, **more: calls.append(params["body"].count(b"<Key>")),
        )
        absent = [tier.name_of(chunk(number, 2, 1)[0]) for number in range(150 - len(names))]
        await control.delete([*names[1:], *absent])
        assert calls == [100, 49]
        assert await there() == {(names[0], SIZES[1])}
        listed = await client.list_objects_v2(Bucket=bucket)
        assert listed["KeyCount"] == 1 + 2  # with the foreign one and namespace.json


FEATURES = {
    "moto": Features(conditional=True, checksums=False, hides_missing=False),
    "swift": Features(conditional=False, checksums=False, hides_missing=False),
}


@pytest.mark.asyncio
async def test_what_the_trial_finds(server: Server, bucket: str) -> None:
    async with opened(server, bucket) as tier:
        if server.kind not in FEATURES:
            pytest.skip(f"this server: {tier._features}")
        assert tier._features == FEATURES[server.kind]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "servers", "advice"),
    [
        ({"create_bucket": False}, {"moto", "swift", "given"}, "there is no such bucket: make it"),
        ({"secret_key": "wrong"}, {"swift"}, "not permitted: check access_key and secret_key"),
        (
            {"access_key": "test:nobody", "secret_key": "wrong"},
            {"swift", "given"},
            "not permitted: check access_key and secret_key",
        ),
        ({"region": "eu-north-1"}, {"swift"}, "set region to the bucket's.* region us-east-1"),
        ({"sse": "AES256"}, {"swift"}, "NotImplemented Server-side encryption is not supported"),
        ({"storage_class": "COLD"}, {"swift"}, "InvalidStorageClass"),
    ],
)
async def test_the_trial_says_what_is_wrong(
    server: Server, bucket: str, change: dict[str, Any], servers: set[str], advice: str
) -> None:
    if server.kind not in servers:
        pytest.skip(f"{server.kind} takes everything")
    change = {
        name: Secret(value) if name.endswith("_key") else value for name, value in change.items()
    }
    with pytest.raises(ConfigError, match=advice):
        async with opened(server, bucket, **change):
            pass


def limit_bucket(server: Server, bucket: str, quota_bytes: int) -> None:
    """By the API that Swift has beside S3's."""
    user = {"X-Storage-User": server.access_key, "X-Storage-Pass": server.secret_key}
    with urlopen(Request(f"{server.url}/auth/v1.0", headers=user)) as answer:
        where, token = answer.headers["X-Storage-Url"], answer.headers["X-Auth-Token"]
    change = {"X-Auth-Token": token, "X-Container-Meta-Quota-Bytes": str(quota_bytes)}
    urlopen(Request(f"{where}/{bucket}", method="POST", headers=change)).close()


@pytest.mark.asyncio
async def test_a_quota_that_is_reached(server: Server, bucket: str, arena: Arena) -> None:
    """Chunks are refused as from a full disk, those that are there are loaded, now and after a
    start."""
    if server.kind != "swift":
        pytest.skip("set by Swift's own API")
    key, data = CHUNKS[4]
    new, other = chunk(99, 4, SIZES[4])
    async with opened(server, bucket) as tier:
        assert await tier.store([arena.slot(0, key, len(data), data)], context()) == [Outcome.DONE]
        limit_bucket(server, bucket, 100)
        slot = arena.slot(1, new, len(other), other)
        assert await tier.store([slot], context()) == [Outcome.FULL]
        assert await tier.load([arena.slot(2, key, len(data))], context()) == [Outcome.DONE]
    limit_bucket(server, bucket, 1)
    async with opened(server, bucket) as tier:
        assert await tier.store([arena.slot(3, new, len(other), other)], context()) == [
            Outcome.FULL
        ]
        assert await tier.load([arena.slot(4, key, len(data))], context()) == [Outcome.DONE]


@pytest.mark.asyncio
async def test_instances_that_make_their_bucket_at_the_same_time(
    server: Server, bucket: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(opened(server, bucket)) for _ in range(4)))


@pytest.mark.asyncio
async def test_the_bucket_in_the_name_of_the_host(
    server: Server, bucket: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its domain stands in no DNS, so connections go where the server is."""
    if server.kind != "swift":
        pytest.skip("its names are not known")
    real, hosts = bulk_module.connect, set()

    async def connect(host: str, port: int, tls: Any) -> Any:
        hosts.add(host)
        return await real("127.0.0.1", port, tls)

    key, data = CHUNKS[-1]
    async with opened(server, bucket) as tier:
        assert await tier.store([arena.slot(0, key, len(data), data)], context()) == [Outcome.DONE]
    monkeypatch.setattr(bulk_module, "connect", connect)
    named = server._replace(url=server.url.replace("127.0.0.1", SWIFT_DOMAIN))
    async with opened(named, bucket, addressing="virtual", create_bucket=False) as tier:
        slot = arena.slot(1, key, len(data))
        assert await tier.load([slot], context()) == [Outcome.DONE]
        assert bytes(slot.view) == data
    assert hosts == {f"{bucket}.{SWIFT_DOMAIN}"}


def test_an_engine_finds_what_another_has_stored(server: Server, bucket: str) -> None:
    tier = {"type": "obj", "bucket": bucket, "endpoint_override": server.url, "create_bucket": True}
    if server.access_key and server.secret_key:
        tier |= {"access_key": server.access_key, "secret_key": server.secret_key}
    with rig(slots=16, tiers=[tier]) as one:
        # On a busy machine it is late, and comes up a little later.
        one.until(lambda: one.value("kvtier_tier_up", "obj") == 1, 30.0)
        assert len(one.store(keys(*range(8)))) == 8
        one.settle()
        assert one.value("kvtier_chunks_total", "obj", "store", "done") == 8
    with rig(slots=16, tiers=[tier]) as one:
        one.until(lambda: one.value("kvtier_tier_up", "obj") == 1, 30.0)
        assert one.load(keys(*range(9))) == 8
        one.settle()
        assert one.value("kvtier_lookup_chunks_total", "obj", "hit") == 8
