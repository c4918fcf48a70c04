# SPDX-License-Identifier: Apache-2.0
"""A session that ends is made anew: what belonged to it does not touch the next one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from kvtier.errors import PeerLostError
from kvtier.testing.contract import make_env
from kvtier.tiers.p2p import client as client_module
from kvtier.tiers.p2p.client import PeerClient
from kvtier.tiers.p2p.metrics import METRICS
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.tiers.p2p.tcp_link import TcpLink
from kvtier.tiers.p2p.tier import P2pTier
from kvtier.types import Outcome
from tests.tiers.p2p.proxy import HERE, Proxy
from tests.tiers.p2p.rig import SIZE, Host, free_port, instance, until
from tests.tiers.p2p.test_tier import key, until_answered

pytestmark = pytest.mark.asyncio


@pytest.mark.fault("P02", "P19")
async def test_an_owner_that_starts_anew_within_a_handshake_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof comes to one that has never said a challenge."""
    port = free_port()
    hear = PeerClient._hear
    first = True
    async with instance(peers=(f"127.0.0.1:{port}",)) as reader:
        came, gone = asyncio.Event(), asyncio.Event()

        async def _hear(self: PeerClient, socket: Any) -> Any:
            nonlocal first
            message = await hear(self, socket)
            if first:
                first = False
                came.set()
                await gone.wait()
            return message

        monkeypatch.setattr(PeerClient, "_hear", _hear)
        async with instance(port=port):
            ask = asyncio.create_task(reader.ask([key(1)]), name="ask")
            await came.wait()
        host = Host()
        there = host.put(1)
        async with instance(host, port=port) as owner:
            gone.set()
            with pytest.raises(PeerLostError, match=r"it has started anew"):
                await ask
            started = time.monotonic()
            await until_answered(reader, there)
            assert time.monotonic() - started < 3.0
            assert owner.told()["kvtier_peer_refused_total", "handshake"] == 1


async def test_a_session_fails_once_whoever_finds_out() -> None:
    """Many reads break with their session: the peer is dialled again at once."""
    async with instance() as reader:
        port = free_port()
        host = Host()
        keys = [host.put(number) for number in range(12)]
        async with instance(host, port=port):
            more = {"peer": f"127.0.0.1:{port}"}
            assert await reader.ask(keys, reader.context(**more)) == "+" * 12
            client = next(iter(reader.tier._clients.values()))
            hangs = asyncio.Event()

            async def read(*_: Any) -> None:
                """Until the link is closed, as in the middle of a transfer."""
                await hangs.wait()
                raise ConnectionAbortedError("the link was closed")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TcpLink, "read", read)
                loads = [
                    asyncio.create_task(reader.load([one], reader.context(**more)), name="load")
                    for one in keys
                ]
                await until(lambda: host.pinned == len(keys))
                client._fail_later(client._socket, "silent")
                await until(lambda: not client.is_up)
                # The next one stands already when the last of the old ones ends.
                assert await reader.ask(keys, reader.context(**more)) == "+" * 12
                hangs.set()
                ended = await asyncio.gather(*loads, return_exceptions=True)
                assert all(isinstance(one, PeerLostError) for one in ended)
            assert client.is_up
            assert client._failures == 0
            assert reader.told()["kvtier_peer_failures_total", "session"] == 1
            assert await reader.load(keys, reader.context(**more)) == [Outcome.DONE] * 12


async def test_a_heartbeat_of_an_earlier_session_does_not_disturb_the_next_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hear = PeerClient._hear

    async def _hear(self: PeerClient, socket: Any) -> Any:
        message = await hear(self, socket)
        await asyncio.sleep(0.3)
        return message

    async with instance() as owner:
        there = owner.host.put(1)
        async with instance(peers=(owner.address,), heartbeat_seconds=0.2) as reader:
            assert await reader.ask([there]) == "+"
            client = next(iter(reader.tier._clients.values()))
            monkeypatch.setattr(PeerClient, "_hear", _hear)
            await client._end(PeerLostError("over"))
            assert await reader.ask([there]) == "+"
            assert "kvtier_peer_failures_total" not in {name for name, *_ in reader.told()}


async def test_a_lease_of_an_earlier_session_does_not_end_one_of_the_next() -> None:
    port = free_port()
    async with instance(peers=(f"127.0.0.1:{port}",)) as reader:
        leases = []
        for _ in range(2):
            host = Host()
            there = host.put(1)
            async with instance(host, port=port) as owner:
                await until_answered(reader, there)
                client = next(iter(reader.tier._clients.values()))
                leases.append(await client.lend([there], 5.0, time.monotonic() + 5))
                client.give_back(leases[0])
                await asyncio.sleep(0.1)
                assert owner.host.pinned == len(leases) - 1
            await until(lambda client=client: not client.is_up)
        # An owner that starts anew counts from the beginning.
        assert leases[0].number == leases[1].number


async def test_a_peer_that_stays_away_is_dialled_beside_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that takes connections and says nothing costs its deadline once."""
    monkeypatch.setattr(client_module, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(client_module, "MAX_AGAIN_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with instance() as owner:
            there = owner.host.put(1)
            peers = (f"127.0.0.1:{silent.getsockname()[1]}", owner.address)
            async with instance(peers=peers, connect_seconds=1.0) as reader:
                started = time.monotonic()
                assert await reader.ask([there]) == "+"
                assert time.monotonic() - started > 0.9
                for _ in range(5):
                    await asyncio.sleep(0.1)
                    started = time.monotonic()
                    assert await reader.ask([there]) == "+"
                    assert time.monotonic() - started < 0.7


@pytest.mark.fault("P03", "H03")
async def test_a_host_that_is_gone_is_known_for_all_its_instances() -> None:
    """Eight of them, as ranks of one server, and then nothing passes to that host any more: each
    session finds out by itself, and no request waits for it."""
    async with contextlib.AsyncExitStack() as stack:
        owners = []
        for _ in range(8):
            data_port = free_port()
            one = await stack.enter_async_context(
                instance(data_port=data_port, heartbeat_seconds=0.1)
            )
            owners.append((one, data_port))
        ports = [int(one.address.rpartition(":")[2]) for one, _ in owners]
        with Proxy([*ports, *(data_port for _, data_port in owners)]) as proxy:
            async with instance(heartbeat_seconds=0.1, connect_seconds=1.0) as reader:
                there = [one.host.put(i) for i, (one, _) in enumerate(owners)]
                for port, name in zip(ports, there, strict=True):
                    assert await reader.ask([name], reader.context(peer=f"{HERE}:{port}")) == "+"
                proxy.hold()
                clients = list(reader.tier._clients.values())
                await until(lambda: not any(client.is_up for client in clients), 2.0)
                began_at = time.monotonic()
                for port, name in zip(ports, there, strict=True):
                    with pytest.raises(PeerLostError):
                        await reader.ask([name], reader.context(peer=f"{HERE}:{port}"))
                assert time.monotonic() - began_at < 8 * 0.4
                proxy.let()
                for port, name in zip(ports, there, strict=True):
                    async with asyncio.timeout(10):
                        while True:
                            with contextlib.suppress(PeerLostError):
                                ctx = reader.context(peer=f"{HERE}:{port}")
                                if await reader.load([name], ctx) == [Outcome.DONE]:
                                    break
                            await asyncio.sleep(0.05)


@pytest.mark.fault("R10")
async def test_each_replica_has_ports_of_its_own() -> None:
    """Equally configured instances on one host; data goes where each one's session says."""
    async with contextlib.AsyncExitStack() as stack:
        port, data_port = free_ports(4), free_ports(4)
        owners = []
        for replica in range(4):
            host = Host()
            env = make_env(sizes=[SIZE], definitions=METRICS, num_slots=64)
            env = replace(env, host=host, replica=replica)
            tier = P2pTier("p2p", P2pOptions(port=port, data_port=data_port), env)
            await tier.open()
            stack.push_async_callback(tier.aclose, time.monotonic() + 5)
            assert tier.own_address == f"127.0.0.1:{port + replica}"
            owners.append((tier, host))
        async with instance() as reader:
            for number, (tier, host) in enumerate(owners):
                there = host.put(number)
                ctx = reader.context(peer=tier.own_address)
                assert await reader.ask([there, key(100)], ctx) == "+-"
                assert await reader.load([there], ctx) == [Outcome.DONE]


def free_ports(count: int) -> int:
    """The first of as many neighbouring ports that nobody listens on."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                one = stack.enter_context(socket.socket())
                one.bind(("127.0.0.1", port))
            return first


async def test_a_reader_that_ends_says_so() -> None:
    """Its leases end with it, long before it would count as silent."""
    async with instance(heartbeat_seconds=60.0) as owner:
        keys = [owner.host.put(number) for number in range(4)]
        async with instance(peers=(owner.address,)) as reader:
            await reader.ask(keys)
            client = next(iter(reader.tier._clients.values()))
            await client.lend(keys, 30.0, time.monotonic() + 5)
            assert owner.tier._sharing.pinned_bytes == 4 * SIZE
        await until(lambda: owner.host.pinned == 0)
        assert owner.tier._sharing.pinned_bytes == 0
