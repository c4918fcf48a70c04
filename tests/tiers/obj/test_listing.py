# SPDX-License-Identifier: Apache-2.0
"""The rare calls, through aiobotocore: listings, the limit that is kept with them, their errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
from botocore import exceptions

from kvtier.obs.metrics import Sample
from kvtier.testing.contract import chunk
from kvtier.tiers.obj import control as control_module
from kvtier.tiers.obj import room as room_module
from kvtier.tiers.obj.control import Control, Listed
from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.room import Room, Usage
from tests.tiers.obj.memory_store import MemoryStore
from tests.tiers.obj.rig import SIZE, bench
from tests.tiers.obj.scripted import answer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("quick")]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.ReadTimeoutError(endpoint_url="x"), Kind.STALLED_HEAD),
        (exceptions.ConnectionClosedError(endpoint_url="x"), Kind.RESET),
        (exceptions.ConnectTimeoutError(endpoint_url="x"), Kind.CONNECT),
        (exceptions.NoCredentialsError(), Kind.REFUSED),
    ],
)
async def test_errors_of_the_rare_calls_have_their_kind(error: Exception, kind: Kind) -> None:
    with pytest.raises(StoreError) as caught, control_module._errors():
        raise error
    assert caught.value.kind is kind


def listing(*entries: str) -> bytes:
    """The answer to a question for all names."""
    contents = "".join(f"<Contents>{entry}</Contents>" for entry in entries)
    page = (
        "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
        f"{contents}</ListBucketResult>"
    )
    return answer(200, page.encode(), [("Content-Type", "application/xml")])


async def test_the_limit_is_kept_again_after_a_listing_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "LEAST_SECONDS", 0.001)
    monkeypatch.setattr(room_module, "LIST_SECONDS", 0.001)
    key = f"<Key>kvtier/x/00/{bytes(32).hex()}_0.kv</Key>"
    date = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    size = f"<Size>{SIZE}</Size>"
    bad = [
        listing(key + size),
        listing(key + size + "<LastModified>yesterday</LastModified>"),
        listing(key + date),
        listing(key + date + "<Size>many</Size>"),
        listing(size + date),
        answer(200, b"<html><body>sign in</body></html>", [("Content-Type", "text/html")]),
    ]
    left = [*bad, listing(key + size + date)]
    store = MemoryStore()
    store.refuse = lambda method, path, headers: (
        (left.pop(0) if len(left) > 1 else left[0]) if "list-type" in path else None
    )
    async with bench(store, capacity_bytes=1 << 20) as made:
        samples: list[Sample] = []
        async with asyncio.timeout(5):
            while not any(one.name == "kvtier_tier_used_bytes" for one in samples):
                await asyncio.sleep(0.01)
                samples += made.tier.env.recorder.take()
        failed = sum(one.value for one in samples if one.labels == ("obj", "protocol"))
        assert failed == len(bad)


class Listing:
    """A control client of a bucket with such objects, a few a page, by name and not by age."""

    def __init__(self, objects: list[Listed]) -> None:
        self.objects = objects

    async def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        there = [
            one
            for one in sorted(self.objects, key=lambda one: one.name)
            if one.name.startswith(prefix)
        ]
        for start in range(0, len(there), 3):
            yield there[start : start + 3]

    async def delete(self, names: Sequence[str]) -> None:
        self.objects = [one for one in self.objects if one.name not in names]


async def test_the_oldest_are_deleted_and_no_more_than_has_to_go() -> None:
    """Ten chunks of an age each, one minute apart, and three of the same; names say nothing."""
    ages = [7, 2, 9, 4, 1, 8, 3, 10, 6, 5, 5, 5]
    chunks = [
        Listed(f"kvtier/x/00/{number:064x}_0.kv", SIZE, 1e9 - 60.0 * age)
        for number, age in enumerate(ages)
    ]
    foreign = Listed("kvtier/x/namespace.json", SIZE, 0.0)
    control = Listing([*chunks, foreign, Listed("other/a", 100 * SIZE, 0.0)])
    deleted: list[Listed] = []
    room = Room(
        cast(Control, control),
        "kvtier/",
        11 * SIZE,
        6 / 11,
        deleted.extend,
        lambda usage: None,
        lambda kind: None,
    )
    assert await room.look() == Usage(6 * SIZE, 6, 6)
    gone = sorted((1e9 - one.modified) / 60 for one in deleted)
    assert gone == [5, 6, 7, 8, 9, 10]
    assert foreign in control.objects
    assert len(control.objects) == 6 + 2
    assert await room.look() == Usage(6 * SIZE, 6, 0)


async def test_warm_up() -> None:
    store = MemoryStore()
    async with bench(store) as made:
        await made.put(*range(5))
        keys = [made.tier.name_of(chunk(n, 0, SIZE)[0]) for n in range(5)]

    page = listing(
        *(
            f"<Key>{key}</Key><Size>{SIZE}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            for key in [*keys, "kvtier/namespace.json"]
        )
    )
    store.refuse = lambda method, path, headers: page if "list-type" in path else None
    async with bench(store, warm_up=True) as made:
        for _ in range(200):
            if made.tier._known.holds(chunk(4, 0, SIZE)[0]):
                break
            await asyncio.sleep(0.01)
        store.requests.clear()
        assert await made.ask(*range(5)) == "+++++"
        assert store.requests["HEAD"] == 0
