# SPDX-License-Identifier: Apache-2.0
"""The object tier inside the engine, beside the file tier: who serves what, what if it fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.rig import keys, rig
from tests.tiers.obj.memory_store import MemoryStore
from tests.tiers.obj.scripted import answer, playing_in_thread
from tests.tiers.obj.test_credentials import Source, alone, use


def obj(port: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "obj",
        "bucket": "bucket",
        "endpoint_override": f"http://127.0.0.1:{port}",
        "access_key": "AKID",
        "secret_key": "hush-hush",
        "absent_seconds": 0.01,
        **more,
    }


def fs(tmp_path: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(tmp_path / "root"), "min_free_bytes": 1}


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_chunks_of_one_request_from_two_tiers(tmp_path: Path, isolation: str) -> None:
    store = MemoryStore()
    with playing_in_thread(store) as port:
        for tier, names in ((fs(tmp_path), keys(0, 1, 2)), (obj(port), keys(3, 4, 5))):
            with rig(slots=16, tiers=[tier], isolation=isolation) as one:
                assert len(one.store(names)) == 3
                one.settle()
        tiers = [fs(tmp_path), obj(port)]
        with rig(slots=16, tiers=tiers, isolation=isolation) as one:
            context = one.context()
            assert one.load(keys(*range(7)), context) == 6
            one.settle()
            assert one.value("kvtier_lookup_chunks_total", "fs", "hit") == 3
            assert one.value("kvtier_lookup_chunks_total", "obj", "hit") == 3


@pytest.mark.fault("O10")
def test_a_store_that_fails_costs_nothing_but_itself(tmp_path: Path) -> None:
    """Requests go on with the other tier; the breaker opens, and closes when the store is back."""
    store = MemoryStore()
    breaker = {"failures": 2, "open_seconds": 0.3}
    with playing_in_thread(store) as port:
        tiers = [fs(tmp_path), obj(port)]
        with rig(slots=8, tiers=tiers, breaker=breaker) as one:
            one.store(keys(*range(4)))
            one.settle()
            assert sum(path.endswith(".kv") for path in store.objects) == 4
            store.refuse = lambda method, path, headers: answer(500)
            for number in range(10, 14):
                one.store(keys(number))
                one.settle()
            one.until(lambda: one.value("kvtier_tier_up", "obj") == 0)
            assert one.value("kvtier_breaker_opened_total", "obj") >= 1
            assert one.value("kvtier_chunks_total", "obj", "store", "io") >= 2
            # Evicted from host memory, and still there in the files.
            for number in range(20, 28):
                one.store(keys(number))
                one.settle()
            assert one.load(keys(*range(4))) == 4
            store.refuse = lambda method, path, headers: None
            one.until(lambda: one.value("kvtier_tier_up", "obj") == 1)
            one.store(keys(30))
            one.until(lambda: any("1e_0.kv" in path for path in store.objects))
            assert one.value("kvtier_breaker_state", "obj") == 0


@pytest.mark.fault("C26")
def test_one_bit_of_an_object() -> None:
    """Length, key and head are right: the checksum over host memory sees it, and it is deleted."""
    store = MemoryStore()
    with playing_in_thread(store) as port:
        with rig(slots=8, tiers=[obj(port)]) as one:
            one.store(keys(1, 2, 3))
            one.settle()
        (path,) = (name for name in store.objects if name.endswith("02_0.kv"))
        data, meta = store.objects[path]
        store.objects[path] = data[:-1] + bytes([data[-1] ^ 1]), meta
        with rig(slots=8, tiers=[obj(port)]) as one:
            assert one.load(keys(1, 2, 3)) == 1
            one.settle()
            assert one.value("kvtier_corrupt_chunks_total", "obj") == 1
            one.until(lambda: path not in store.objects)
            one.store(keys(2))
            one.until(lambda: store.objects.get(path, (b"", {}))[0] == data)


def filled(tmp_path: Path, port: int) -> None:
    """Chunks 0 to 5 in the files, 6 and 7 in the store."""
    for tier, names in ((fs(tmp_path), keys(*range(6))), (obj(port), keys(6, 7))):
        with rig(slots=16, tiers=[tier]) as one:
            assert one.store(names) == names
            one.settle()


def test_a_slow_store_does_not_delay_what_the_files_have(tmp_path: Path) -> None:
    """Nor where slots for it come while the store is being asked: there are two ahead."""
    store = MemoryStore()
    with playing_in_thread(store) as port:
        filled(tmp_path, port)
        tiers = [fs(tmp_path), obj(port)]
        with rig(slots=16, tiers=tiers, promotion_slots=2, lookup_timeout_seconds=5.0) as one:
            # Host memory is full of what is saved: room is made when the store is being asked.
            one.store(keys(*range(50, 66)))
            one.settle()
            store.delay_seconds = 1.0
            started = time.monotonic()
            assert one.load(keys(*range(3))) == 3
            assert time.monotonic() - started < 0.7
            context = one.context()
            started = time.monotonic()
            one.engine.lookup_batch(keys(*range(8)), context)
            one.engine.end_step()
            one.until(lambda: one.value("kvtier_lookup_chunks_total", "fs", "hit") == 6)
            assert time.monotonic() - started < 0.7
            # And what only the store has is not left out for it.
            assert one.load(keys(*range(8)), context) == 8
            assert time.monotonic() - started > 1.0


def test_nobody_waits_longer_than_the_lookup_timeout(tmp_path: Path) -> None:
    """For a store that takes requests and says nothing; when it answers again it is used again."""
    store = MemoryStore()
    timeout = 0.6
    with playing_in_thread(store) as port:
        filled(tmp_path, port)
        tiers = [fs(tmp_path), obj(port)]
        breaker = {"failures": 2, "open_seconds": 0.3}
        with rig(slots=16, tiers=tiers, breaker=breaker, lookup_timeout_seconds=timeout) as one:
            store.delay_seconds = 60.0
            waited = []
            deadline = time.monotonic() + 10
            while one.value("kvtier_breaker_opened_total", "obj") < 1 or len(waited) < 8:
                assert time.monotonic() < deadline
                context = one.context()
                names = keys(*range(8), 100 + len(waited))
                started = time.monotonic()
                ready, _ = one.ask(names, context)
                waited.append(time.monotonic() - started)
                assert ready == 6
                one.check(names[:ready], context)
                one.engine.finish_request(context)
                one.engine.end_step()
            assert max(waited) < timeout + 0.3
            # After the first failure they wait for little, and with the breaker open not at all.
            assert sorted(waited)[len(waited) // 2] < timeout / 2
            store.delay_seconds = 0.0
            deadline = time.monotonic() + 10
            while one.load(keys(*range(8))) != 8:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert one.value("kvtier_breaker_state", "obj") == 0
            assert one.value("kvtier_lookup_chunks_total", "obj", "hit") == 2


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_source_of_credentials_that_hangs_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """The engine starts, and serves from its files; the store is used when the source answers."""
    source, store = Source(), MemoryStore()
    signed: set[str] = set()
    store.refuse = lambda method, path, headers: signed.add(headers["x-amz-security-token"])
    source.mood = "hangs"
    with playing_in_thread(source) as source_port, playing_in_thread(store) as port:
        alone(monkeypatch, tmp_path)
        use("container", f"http://127.0.0.1:{source_port}", monkeypatch, tmp_path)
        from_role = obj(port)
        del from_role["access_key"], from_role["secret_key"]
        started = time.monotonic()
        with rig(slots=8, tiers=[fs(tmp_path), from_role], isolation=isolation) as one:
            one.store(keys(1, 2))
            one.settle()
            assert time.monotonic() - started < 8.0
            assert one.value("kvtier_tier_up", "obj") == 0
            assert one.value("kvtier_tier_up", "fs") == 1
            assert one.load(keys(1, 2)) == 2
            source.mood = "well"
            one.until(lambda: one.value("kvtier_tier_up", "obj") == 1, 20.0)
            one.store(keys(3))
            one.until(lambda: any("03_0.kv" in path for path in store.objects))
    assert signed == {"token-1"}
