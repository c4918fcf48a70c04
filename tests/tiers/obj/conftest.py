# SPDX-License-Identifier: Apache-2.0
"""The servers that the object tier is tried against, and a bucket for each test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import botocore.session
import pytest

from kvtier.tiers.obj import bulk as bulk_module
from kvtier.tiers.obj import tier as tier_module
from tests.tiers.obj import servers
from tests.tiers.obj.servers import Server

GIVEN = os.environ.get("KVTIER_TEST_S3", "")
"""URL of a server to use in place of those that are started here."""
STARTED = ("moto", pytest.param("swift", marks=pytest.mark.needs("swift")))


@pytest.fixture(scope="module", params=("given",) if GIVEN else STARTED)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "given":
        yield Server("given", GIVEN, None, None)
        return
    with getattr(servers, request.param)(tmp_path_factory.mktemp(request.param)) as started:
        yield started


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name of its own for each test; a bucket of that name is deleted where it would stay."""
    # The machine of the tests runs the servers, too, and other things.
    monkeypatch.setattr(tier_module, "OPEN_SECONDS", 30.0)
    name = f"kvtier-test-{secrets.token_hex(8)}"
    yield name
    if server.kind == "given":
        remove(server, name)


def remove(server: Server, bucket: str) -> None:
    """Delete a bucket with all that is in it, if it is there."""
    client = botocore.session.get_session().create_client("s3", endpoint_url=server.url)
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        for page in pages:
            for one in page.get("Contents", ()):
                client.delete_object(Bucket=bucket, Key=one["Key"])
        client.delete_bucket(Bucket=bucket)
    except client.exceptions.NoSuchBucket:
        return
    finally:
        client.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are short."""
    monkeypatch.setattr(bulk_module, "PAUSE_SECONDS", 0.005)


@pytest.fixture(autouse=True)
def _nobody_elses_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own setting is no business of the tests."""
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
