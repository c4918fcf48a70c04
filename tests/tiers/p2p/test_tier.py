# SPDX-License-Identifier: Apache-2.0
"""The peer tier between instances of one process: pull, waiting, choosing, refusals, failures."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from typing import Any

import pytest
import zmq

from kvtier.errors import ClosedError, ConfigError, PeerLostError
from kvtier.options import Secret
from kvtier.testing.contract import chunk
from kvtier.tiers.p2p import client as client_module
from kvtier.tiers.p2p import sharing as sharing_module
from kvtier.tiers.p2p import tier as tier_module
from kvtier.tiers.p2p import ucx as ucx_module
from kvtier.tiers.p2p import wire
from kvtier.tiers.p2p.client import PeerClient
from kvtier.tiers.p2p.transport import LeaseEndedError, Target
from kvtier.types import Outcome
from tests.tiers.p2p.rig import SIZE, Host, free_port, instance, until

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("transport")]


def key(number: int) -> bytes:
    return chunk(number, 0, SIZE)[0]


@pytest.mark.parametrize("isolated", [False, True])
async def test_chunks_come_from_the_peer(isolated: bool) -> None:
    more: dict[str, Any] = {}
    if isolated:
        more = {
            "token": Secret("hush"),
            "curve_secret_key": Secret(zmq.curve_keypair()[1].decode()),
        }
    async with instance(**more) as owner, instance(peers=(owner.address,), **more) as reader:
        keys = [owner.host.put(number) for number in range(20)]
        assert await reader.ask([*keys[:9], key(99), *keys[9:]]) == "+" * 9 + "-" * 12
        assert await reader.load(keys) == [Outcome.DONE] * 20
        assert await reader.ask([key(99), *keys], reader.context(windowed=True)) == "-" + "+" * 20
        assert await reader.load([key(99), keys[3]]) == [Outcome.MISSING, Outcome.DONE]
        await until(lambda: owner.host.pinned == 0)


async def test_without_a_peer_nothing_is_asked() -> None:
    async with instance() as reader:
        assert not reader.tier.serves(reader.tier.options, None)
        assert await reader.ask([key(1)]) == "-"
        assert await reader.load([key(1)]) == [Outcome.MISSING]


async def test_the_requests_peer_goes_before_all_others() -> None:
    async with instance() as one, instance() as other:
        mine, theirs = one.host.put(1), other.host.put(2)
        async with instance(peers=(one.address,)) as reader:
            ctx = reader.context(peer=other.address)
            assert await reader.ask([theirs, mine], ctx) == "+-"
            assert await reader.load([theirs], ctx) == [Outcome.DONE]
            assert await reader.ask([mine]) == "+"


async def test_different_chunks_of_one_request_from_different_peers() -> None:
    async with instance() as one, instance() as other:
        keys = [(one if number % 3 else other).host.put(number) for number in range(12)]
        async with instance(peers=(one.address, other.address)) as reader:
            assert await reader.ask(keys) == "+" * 12
            assert await reader.load(keys) == [Outcome.DONE] * 12


async def test_a_peer_that_is_this_instance_is_passed_over() -> None:
    async with instance() as other:
        port = free_port()
        there = other.host.put(1)
        async with instance(port=port, peers=(f"127.0.0.1:{port}", other.address)) as reader:
            reader.host.put(2)
            assert await reader.ask([there]) == "+"
            assert await reader.ask([key(2)]) == "-"
            with pytest.raises(PeerLostError, match=r"its own peer"):
                await reader.ask([there], reader.context(peer=f"127.0.0.1:{port}"))
            assert "kvtier_peer_failures_total" not in {name for name, *_ in reader.told()}


async def test_chunks_that_are_being_written_are_awaited() -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        first = owner.host.put(1)
        owner.host.writing.update([key(2), key(3)])
        keys = [first, key(2), key(3)]
        assert await reader.ask(keys) == "+??"
        owner.host.put(2)
        await until_asked(reader, keys[1:], "+?")
        owner.host.writing.clear()
        await until_asked(reader, keys[2:], "-")
        assert await reader.load(keys[:2]) == [Outcome.DONE] * 2


async def until_asked(reader: Any, keys: list[bytes], wanted: str, **more: Any) -> None:
    """Ask as the service does, again and again, until this is the answer."""
    async with asyncio.timeout(5):
        while await reader.ask(keys, reader.context(**more)) != wanted:
            await asyncio.sleep(0.005)


async def test_a_prefill_that_is_to_come_is_awaited_from_before_its_start_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing_module, "GRACE_SECONDS", 0.1)
    async with instance() as owner, instance() as reader:
        keys = [key(number) for number in range(40)]
        more = {"peer": owner.address, "request": "r1", "wait": 10.0}
        assert await reader.ask(keys, reader.context(**more)) == "?" * 40
        owner.tier.serve("r1", ended=False)
        for number in range(20):
            owner.host.put(number)
        await until_asked(reader, keys, "+" * 20 + "?" * 20, **more)
        assert await reader.load(keys[:20], reader.context(**more)) == [Outcome.DONE] * 20
        owner.host.writing.add(key(20))
        owner.tier.serve("r1", ended=True)
        # What is just being written comes all the same, and what is behind it does not.
        await until_asked(reader, keys[20:], "?" + "-" * 19, **more)
        owner.host.put(20)
        await until_asked(reader, keys[20:], "+" + "-" * 19, **more)
        await until(lambda: owner.tier._sharing.watches == 0)


async def test_nobody_waits_for_a_request_that_has_ended() -> None:
    async with instance() as owner, instance() as reader:
        owner.tier.serve("r1", ended=True)
        more = {"peer": owner.address, "request": "r1", "wait": 30.0}
        started = time.monotonic()
        await until_asked(reader, [key(1)], "-", **more)
        assert time.monotonic() - started < 3.0


async def test_the_wait_has_an_end() -> None:
    async with instance() as owner, instance() as reader:
        more = {"peer": owner.address, "request": "nobody's", "wait": 0.3}
        assert await reader.ask([key(1)], reader.context(**more)) == "?"
        await until_asked(reader, [key(1)], "-", **more)


async def test_questions_of_one_request_about_other_keys_do_not_disturb_each_other() -> None:
    async with instance() as owner, instance() as reader:
        more = {"peer": owner.address, "request": "r", "wait": 10.0}
        one, other = [key(n) for n in range(5)], [key(n) for n in range(10, 15)]
        for _ in range(5):
            assert await reader.ask(one, reader.context(**more)) == "?" * 5
            assert await reader.ask(other, reader.context(**more)) == "?" * 5
        assert owner.tier._sharing.watches == 2
        for number in range(15):
            owner.host.put(number)
        await until_asked(reader, one, "+" * 5, **more)
        await until_asked(reader, other, "+" * 5, **more)


async def test_many_keys_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        monkeypatch.setattr(wire, "MAX_KEYS", 7)
        keys = [owner.host.put(number) for number in range(20, 50)]
        assert await reader.ask([*keys, key(9), key(8)]) == "+" * len(keys) + "--"
        owner.host.writing.add(key(9))
        assert (await reader.ask([*keys, key(9)]))[-2:] == "+?"
        owner.host.put(9)
        await until_asked(reader, [*keys, key(9)], "+" * (len(keys) + 1))


# Leases.
async def test_a_lease_pins_until_it_is_given_back() -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(4)]
        await reader.ask(keys)
        client = next(iter(reader.tier._clients.values()))
        lease = await client.lend([*keys, key(77)], 5.0, time.monotonic() + 5)
        assert owner.host.pinned == 4
        assert list(lease.outcomes) == [0, 0, 0, 0, Outcome.MISSING]
        client.give_back(lease)
        await until(lambda: owner.host.pinned == 0)


async def test_a_lease_ends_by_itself(transport: str) -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(4)]
        await reader.ask(keys)
        client = next(iter(reader.tier._clients.values()))
        lease = await client.lend(keys, 0.2, time.monotonic() + 5)
        await until(lambda: owner.host.pinned == 0)
        slot = reader.into.slot(0, keys[0], SIZE)
        target = Target(lease.slots[0], slot.view, slot.address)
        if transport == "tcp":  # by the other one the owner does nothing, and so refuses nothing
            with pytest.raises(LeaseEndedError):
                await lease.link.read(lease.number, 0, [target])
            assert bytes(slot.view) == bytes(SIZE)
        assert owner.told()["kvtier_peer_refused_total", "lease"] == 1


async def test_what_is_pinned_for_peers_is_bounded() -> None:
    async with instance(max_lease_bytes=4 * SIZE) as owner:
        keys = [owner.host.put(number) for number in range(8)]
        async with instance(peers=(owner.address,)) as reader:
            await reader.ask(keys)
            client = next(iter(reader.tier._clients.values()))
            lease = await client.lend(keys, 5.0, time.monotonic() + 5)
            assert list(lease.outcomes) == [Outcome.DONE] * 4 + [Outcome.DROPPED] * 4
            assert owner.host.pinned == 4
            # The rest has to wait, and does.
            started = time.monotonic()
            assert await reader.load(keys, reader.context(0.3)) == [Outcome.DROPPED] * 8
            assert time.monotonic() - started < 2.0
            load = asyncio.create_task(reader.load(keys), name="load")
            await asyncio.sleep(0.05)
            client.give_back(lease)
            assert await load == [Outcome.DONE] * 8


async def test_a_timer_that_is_early_does_not_make_a_peer_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its deadline cuts a question for a lease of one that has no room, just before it is over."""
    lend = PeerClient.lend
    answered = 0

    async def early(self: PeerClient, keys: Any, seconds: float, deadline: float) -> Any:
        nonlocal answered
        if answered:
            while time.monotonic() < deadline - 0.0008:
                pass
            raise PeerLostError("no answer in time")
        answered += 1
        return await lend(self, keys, seconds, deadline)

    async with instance(max_lease_bytes=SIZE) as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(2)]
        await reader.ask(keys)
        client = next(iter(reader.tier._clients.values()))
        lease = await client.lend(keys[:1], 5.0, time.monotonic() + 5)
        monkeypatch.setattr(PeerClient, "lend", early)
        assert await reader.load(keys, reader.context(0.3)) == [Outcome.DROPPED] * 2
        client.give_back(lease)


@pytest.mark.fault("C26")
async def test_bytes_that_are_not_what_was_leased_are_found_out() -> None:
    """A slot that was reused while it was leased, as after a lease that was too late."""
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        good, bad = owner.host.put(1), owner.host.put(2)
        slot = owner.host.slots[bad]
        slot.view[100:200] = bytes(100)
        assert await reader.ask([good, bad]) == "++"
        assert await reader.load([good, bad]) == [Outcome.DONE, Outcome.CORRUPT]


# Refusals.
DIFFERENT = {
    "model": ({"model": "a"}, {"model": "b"}, "namespaces differ in model: the owner has 'b'"),
    "seed": (
        {"hash_seed": "random:1"},
        {"hash_seed": "random:2"},
        "differ in hash_seed: the owner has 'random:2'",
    ),
    "field": (
        {"model": "a"},
        {"model": "a", "x": "1"},
        "differ in x: the owner has '1'",
    ),
    "field of the reader's": (
        {"model": "a", "x": "1"},
        {"model": "a"},
        "differ in x: the owner has 'none', the reader '1'",
    ),
}


@pytest.mark.fault("U01")
@pytest.mark.parametrize("name", DIFFERENT)
async def test_another_namespace_is_refused_by_the_field(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs, said = DIFFERENT[name]
    async with instance(fields=theirs) as owner:
        there = owner.host.put(1)
        async with instance(fields=mine, peers=(owner.address,)) as reader:
            with pytest.raises(PeerLostError, match=said):
                await reader.ask([there])
            assert await reader.ask([there]) == "-"  # it is not asked again for a while
        assert owner.told()["kvtier_peer_refused_total", "namespace"] == 1
    # Both sides say so.
    assert len([one for one in caplog.records if said in one.getMessage()]) == 2


@pytest.mark.fault("P14")
@pytest.mark.parametrize(
    ("mine", "theirs"), [("one", "other"), (None, "other"), ("one", None), ("one", "one ")]
)
async def test_another_token_is_refused(mine: str | None, theirs: str | None) -> None:
    def token(text: str | None) -> Secret | None:
        return None if text is None else Secret(text)

    async with instance(token=token(theirs)) as owner:
        there = owner.host.put(1)
        async with instance(token=token(mine), peers=(owner.address,)) as reader:
            with pytest.raises(PeerLostError, match=r"token is another one"):
                await reader.ask([there])


async def test_another_key_is_not_let_in() -> None:
    def key_option() -> Secret:
        return Secret(zmq.curve_keypair()[1].decode())

    async with instance(curve_secret_key=key_option()) as owner:
        there = owner.host.put(1)
        for more in ({"curve_secret_key": key_option()}, {}):
            async with instance(peers=(owner.address,), connect_seconds=0.3, **more) as reader:
                said = r"no answer within 0.3 s.* curve_secret_key is another one"
                with pytest.raises(PeerLostError, match=said):
                    await reader.ask([there])


async def test_no_transport_in_common_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with instance() as owner:
        there = owner.host.put(1)
        async with instance(peers=(owner.address,)) as reader:
            monkeypatch.setattr(type(reader.tier._transports[0]), "name", "other")
            with pytest.raises(PeerLostError, match=r"in common: the owner has (tcp|ucx)"):
                await reader.ask([there])


# Failures.
async def test_a_peer_that_is_not_there_costs_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "AGAIN_SECONDS", 60.0)
    monkeypatch.setattr(client_module, "MAX_AGAIN_SECONDS", 60.0)
    port = free_port()
    async with instance(peers=(f"127.0.0.1:{port}",), connect_seconds=0.3) as reader:
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"no answer within 0.3 s"):
            await reader.ask([key(1)])
        assert 0.2 < time.monotonic() - started < 1.5
        started = time.monotonic()
        for _ in range(100):
            assert await reader.ask([key(1)]) == "-"
            with pytest.raises(PeerLostError):
                await reader.ask([key(1)], reader.context(peer=f"127.0.0.1:{port}"))
        assert time.monotonic() - started < 10  # a deadline each would be 60
        assert reader.told()["kvtier_peer_failures_total", "connect"] == 1


@pytest.mark.fault("K08", "P02")
async def test_a_peer_that_starts_anew_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "AGAIN_SECONDS", 0.05)
    port = free_port()
    async with instance(peers=(f"127.0.0.1:{port}",)) as reader:
        for number in range(3):
            async with instance(port=port) as owner:
                there = owner.host.put(number)
                await until_answered(reader, there)
                assert await reader.load([there]) == [Outcome.DONE]
            await until(lambda: not next(iter(reader.tier._clients.values())).is_up)


async def until_answered(reader: Any, there: bytes) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                if await reader.ask([there]) == "+":
                    return
            except PeerLostError:
                pass  # not yet
            await asyncio.sleep(0.02)


async def test_one_peers_failure_is_not_the_others() -> None:
    async with instance() as one:
        there = one.host.put(1)
        peers = (f"127.0.0.1:{free_port()}", one.address)
        async with instance(peers=peers, connect_seconds=0.3) as reader:
            assert await reader.ask([there]) == "+"
            assert await reader.load([there]) == [Outcome.DONE]


async def test_an_owner_that_closes_ends_what_is_awaited() -> None:
    async with instance() as reader:
        async with instance() as owner:
            more = {"peer": owner.address, "request": "r", "wait": 30.0}
            assert await reader.ask([key(1)], reader.context(**more)) == "?"
        with pytest.raises(PeerLostError, match=r"ended the session|silent|broke"):
            await until_asked(reader, [key(1)], "-", **more)


async def test_a_silent_session_ends_with_all_it_has() -> None:
    async with instance(heartbeat_seconds=0.1) as owner:
        keys = [owner.host.put(number) for number in range(4)]
        async with instance(peers=(owner.address,), heartbeat_seconds=60.0) as reader:
            await reader.ask(keys)
            client = next(iter(reader.tier._clients.values()))
            await client.lend(keys, 60.0, time.monotonic() + 5)
            assert owner.host.pinned == 4
            await until(lambda: owner.host.pinned == 0)
            assert owner.tier._server.sessions == 0
            assert owner.told()["kvtier_peer_refused_total", "silent"] == 1
            # It is told so when it comes back, and starts anew.
            await until_answered(reader, keys[0])


async def test_cancelled_calls_leave_nothing() -> None:
    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        keys = [owner.host.put(number) for number in range(40)]
        await reader.ask(keys)
        owner.host.delay_seconds = 0.001
        for turn in range(40):
            slots = [reader.into.slot(i, one, SIZE) for i, one in enumerate(keys)]
            task = asyncio.create_task(reader.tier.load(slots, reader.context()), name="load")
            await asyncio.sleep(0.0005 * turn)
            task.cancel()
            await asyncio.wait({task})
            before = [bytes(slot.view) for slot in slots]
            await asyncio.sleep(0.002)
            assert [bytes(slot.view) for slot in slots] == before
        await until_answered(reader, keys[0])
        await until(lambda: owner.host.pinned == 0)
        assert owner.tier._sharing.leases == 0


async def test_a_closed_tier_says_so() -> None:
    async with instance() as one:
        await one.tier.aclose(time.monotonic() + 1)
        await one.tier.aclose(time.monotonic() + 1)
        with pytest.raises(ClosedError):
            await one.tier.exists([key(1)], one.context())
        with pytest.raises(ClosedError):
            await one.tier.load([one.into.slot(0, key(1), SIZE)], one.context())


async def test_an_address_that_is_taken_or_none_is_said() -> None:
    async with instance() as one:
        port = int(one.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"listen on .*:{port}: another process listens"):
            async with instance(port=port):
                pytest.fail("it opened")
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7"):
        async with instance(host="198.51.100.7"):
            pytest.fail("it opened")


async def test_ipv6() -> None:
    async with instance(host="::1") as owner:
        there = owner.host.put(1)
        assert owner.address.startswith("[::1]:")
        async with instance(host="::1", peers=(owner.address,)) as reader:
            assert await reader.ask([there]) == "+"
            assert await reader.load([there]) == [Outcome.DONE]


async def test_peers_by_name() -> None:
    async with instance() as owner:
        there = owner.host.put(1)
        port = owner.address.rpartition(":")[2]
        async with instance(dns=f"localhost:{port}") as reader:
            assert reader.tier.serves(reader.tier.options, None)
            await until_answered(reader, there)
            assert await reader.load([there]) == [Outcome.DONE]


async def test_a_name_of_many_peers_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a headless service: pods come and go, and the one that asks is among them."""
    monkeypatch.setattr(tier_module, "RESOLVE_SECONDS", 0.05)
    port = free_port()
    pods = ["127.0.0.9", "127.0.0.2", "127.0.0.3"]
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host != "pods.serving.svc":
            return look_up(host, *rest, **more)
        return [one for pod in pods for one in look_up(pod, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    more: dict[str, Any] = {"port": port, "dns": f"pods.serving.svc:{port}"}
    async with instance(host="127.0.0.9", **more) as reader:
        async with instance(host="127.0.0.2", **more) as one:
            async with instance(host="127.0.0.3", **more) as other:
                mine, theirs = one.host.put(1), other.host.put(2)
                keys = [mine, theirs]
                async with asyncio.timeout(5):
                    while await reader.ask(keys) != "++":
                        await asyncio.sleep(0.02)
                assert await reader.load(keys) == [Outcome.DONE] * 2
            pods.remove("127.0.0.3")
            await until(lambda: len(reader.tier._found) == 2)
            assert await reader.ask([mine]) == "+"
        pods.append("127.0.0.4")
        async with instance(host="127.0.0.4", **more) as young:
            await until_answered(reader, young.host.put(3))


@pytest.mark.fault("P14")
async def test_an_open_instance_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with instance(host="0.0.0.0"):
        assert "whoever reaches 0.0.0.0 may read the KV cache: set token" in caplog.text
    caplog.clear()
    async with instance(host="0.0.0.0", token=Secret("x")), instance():
        assert "whoever" not in caplog.text


async def test_metrics() -> None:
    host = Host()
    async with instance(host) as owner, instance(peers=(owner.address,)) as reader:
        keys = [host.put(number) for number in range(5)]
        await reader.ask(keys)
        await reader.load(keys)
        owner.tier._sample()
        reader.tier._sample()
        told = owner.told()
        assert told["kvtier_peer_served_bytes_total",] == 5 * SIZE
        assert told["kvtier_peer_sessions", "owner"] == 1
        assert reader.told()["kvtier_peer_sessions", "reader"] == 1


async def test_an_unknown_name_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_module, "RESOLVE_SECONDS", 0.01)
    names = {"peers": ("nobody.invalid:1",), "dns": "nothing.invalid"}
    async with instance(**names, push=False) as reader:
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"host 'nobody.invalid' is unknown: Name or"):
            await reader.ask([key(1)])
        assert time.monotonic() - started < 1.0
        said = "dns: host 'nothing.invalid' is unknown: Name or"
        for _ in range(3):
            await until(lambda: ("kvtier_peer_failures_total", "dns") in reader.told())
        assert caplog.text.count(said) == 1


async def test_name_servers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One name cannot be looked up: other peers are asked as before, and the tier closes."""
    look = socket.getaddrinfo
    answer = threading.Event()

    def getaddrinfo(host: str, *args: Any, **named: Any) -> Any:
        if host.endswith(".invalid"):
            answer.wait(30)
        return look(host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        async with instance() as owner:
            there = owner.host.put(1)
            async with instance(
                peers=(owner.address,), dns="nothing.invalid", push=False
            ) as reader:
                slow = reader.context(0.3, peer="nobody.invalid:1")
                for _ in range(3):
                    with pytest.raises(PeerLostError, match=r"nobody.invalid:1: no"):
                        await reader.ask([there], slow)
                named = [one for one in threading.enumerate() if one.name == "kvtier-name"]
                assert len(named) == 2
                assert await reader.load([there]) == [Outcome.DONE]
                started = time.monotonic()
        assert time.monotonic() - started < 2.0
    finally:
        answer.set()


async def test_without_a_file_descriptor_left_it_is_the_peer_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not the tier, whose other sessions stand."""

    def open_(*args: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def make_socket(*args: Any) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    async with instance() as owner, instance(peers=(owner.address,)) as reader:
        there = owner.host.put(1)
        assert await reader.ask([there]) == "+"
        monkeypatch.setattr(ucx_module, "open", open_, raising=False)
        monkeypatch.setattr(client_module, "make_socket", make_socket)
        with pytest.raises(PeerLostError, match=r"Too many open files"):
            await reader.ask([there], reader.context(peer="127.0.0.1:9"))
        assert await reader.load([there]) == [Outcome.DONE]
