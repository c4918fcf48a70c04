# SPDX-License-Identifier: Apache-2.0
"""Plain aiobotocore beside the bulk path, on one store: the same requests, each reads the other's
objects. With the bucket in the path and in the host's name, over TLS with an authority of one's
own."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from kvtier.testing.contract import Arena, chunk, context, make_env
from kvtier.tiers.obj.metrics import METRICS
from kvtier.tiers.obj.tier import ObjTier
from kvtier.types import Outcome
from tests.tiers.obj.memory_store import MemoryStore
from tests.tiers.obj.rig import options
from tests.tiers.obj.scripted import certificate, playing

SIZE = 65536


class Named(MemoryStore):
    """A store whose buckets are in the path, or in the host's name; notes where requests go."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[str, str], set[tuple[str, str]]] = {}
        """Path and host by client and method."""
        self.client = ""

    def right(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        path = path.partition("?")[0]  # aiobotocore's x-id
        self.lines.setdefault((self.client, method), set()).add((path, headers["host"]))
        bucket = headers["host"].partition(".")[0]
        full = f"/{bucket}{path}" if bucket == "bucket" else path
        return super().right(method, full, headers, body)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # whose names Python looks up
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("addressing", ["path", "virtual"])
async def test_the_same_bytes_at_the_same_place(
    addressing: str, tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def known(host: Any, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if str(host).endswith("store.test") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    server, ca = None, None
    if tls:
        # For the one name that is to be connected to.
        name = "store.test" if addressing == "path" else "*.store.test"
        files = certificate(tmp_path, f"DNS:{name}")
        server, ca = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str(files[0])
        server.load_cert_chain(*files)
    store = Named()
    async with playing(store, server) as port:
        url = f"{'https' if tls else 'http'}://store.test:{port}"
        made = options(port, endpoint_override=url, addressing=addressing, ca_bundle=ca)
        tier = ObjTier("obj", made, make_env(sizes=[SIZE], definitions=METRICS))
        await tier.open()
        store.lines.clear()
        config = AioConfig(
            s3={"addressing_style": addressing},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        plain = AioSession().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=url,
            verify=ca,
            aws_access_key_id="AKID",
            aws_secret_access_key="hush-hush",
            config=config,
        )
        arena = Arena(2, SIZE)
        try:
            async with plain as client:
                key, payload = chunk(1, 0, SIZE)
                where = {"Bucket": "bucket", "Key": tier.name_of(key)}
                store.client = "tier"
                stored = arena.slot(0, key, SIZE, payload)
                assert await tier.store([stored], context()) == [Outcome.DONE]
                store.client = "plain"
                found = await client.get_object(**where)
                assert await found["Body"].read() == payload
                meta = found["Metadata"]
                assert meta["kvtier"] == f"1-{key.hex()}-{SIZE}-{stored.crc:08x}"
                await client.delete_object(**where)
                assert not [path for path in store.objects if path.endswith(".kv")]
                await client.put_object(**where, Body=payload, Metadata=meta)
                await client.head_object(**where)
                store.client = "tier"
                tier.forget_presence()
                loaded = arena.slot(1, key, SIZE)
                await tier.exists([key], context())
                assert await tier.load([loaded], context()) == [Outcome.DONE]
                assert bytes(loaded.view) == payload
                assert loaded.crc == stored.crc
                await tier.forget([key])
        finally:
            await tier.aclose(time.monotonic() + 5)
        name = tier.name_of(key)
        where_to = (
            (f"/{name}", f"bucket.store.test:{port}")
            if addressing == "virtual"
            else (f"/bucket/{name}", f"store.test:{port}")
        )
        assert store.lines == {
            (client, method): {where_to}
            for client in ("tier", "plain")
            for method in ("PUT", "GET", "HEAD", "DELETE")
        }
