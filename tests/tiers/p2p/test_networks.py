# SPDX-License-Identifier: Apache-2.0
"""Instances on hosts of their own, and what happens on the way between them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiers.p2p.conftest import UCX
from tests.tiers.p2p.far import FarNetwork
from tests.tiers.p2p.networks import Host, Network
from tests.tiers.p2p.peers import (
    BACK_SECONDS,
    CHUNKS,
    LOAD_SECONDS,
    Peer,
    check_calls,
    checked,
    comes,
    healed,
    nothing_more,
    quiet,
    reach,
    running,
    side_by_side,
)

pytestmark = pytest.mark.needs("netns")

ALL = range(CHUNKS)
PORT = 5710


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


def instance(folder: Path, place: Host, name: str, **options: object) -> Peer:
    """An instance on the host `place`, reached at its address."""
    options = {"port": PORT, "host": "0.0.0.0", "advertise_host": place.address, **options}
    return Peer(folder, name, command=place.command, **options)  # type: ignore[arg-type]


def settle(owner: Peer, reader: Peer, *survivors: Peer) -> None:
    """All is well again: nothing is held, everything comes, no scheduler has waited."""
    quiet(owner, BACK_SECONDS)
    healed(reader, ALL)
    quiet(owner, BACK_SECONDS)
    quiet(reader, BACK_SECONDS)
    check_calls(*survivors)


@pytest.mark.fault("P04", "P10", "P11", "P12")
@pytest.mark.parametrize("transport", ["tcp", UCX])
@pytest.mark.parametrize("version", [4, 6])
def test_two_hosts(
    tmp_path: Path,
    network: Network,
    version: int,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each listens on all its addresses, one of which is the same on both and leads nowhere; each
    loads what the other has."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # no way around the network
    for host in network.hosts:
        # As a container engine's bridge.
        host.ip("link", "add", "docker0", "type", "veth", "peer", "name", "container")
        host.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.ip("link", "set", "docker0", "up")
    peers = []
    for i, host in enumerate(network.hosts):
        other = network.hosts[1 - i]
        mine, theirs = host.address, other.address
        if version == 6:
            mine, theirs = host.address6, other.address6
        peers.append(
            instance(
                tmp_path,
                host,
                f"p{i}",
                host="0.0.0.0" if version == 4 else "::",
                advertise_host=mine,
                transport=transport,
                numbers=range(i * CHUNKS, (i + 1) * CHUNKS),
                peers=[f"{theirs}:{PORT}" if version == 4 else f"[{theirs.upper()}]:{PORT}"],
            )
        )
    with running(*peers):
        for one, other in (peers, reversed(peers)):
            half = CHUNKS // 2
            comes(one, other.numbers[:half])
            # Under the address that it says it has, which requests name.
            comes(one, other.numbers[half:], peer=[other.address, "", 0.0])
            assert f"peers find this instance at {one.address}" in one.log
        for one in peers:
            quiet(one, BACK_SECONDS)
            assert one.close() == {"error": "", "left": []}


def pull(network: Network) -> None:
    network.pull()


def lose(network: Network) -> None:
    network.lose()


def lose_the_owners(network: Network) -> None:
    network.lose(network.hosts[:1])


def lose_the_readers(network: Network) -> None:
    network.lose(network.hosts[1:])


CUTS = [pull, lose, lose_the_owners, lose_the_readers]


@pytest.mark.fault("H03", "L14", "P21")
def test_a_link_that_is_cut_in_the_middle_of_a_load(tmp_path: Path) -> None:
    side_by_side(lambda cut: cut_in_the_middle(tmp_path / cut.__name__, cut), CUTS)


def cut_in_the_middle(folder: Path, cut: Callable[[Network], None]) -> None:
    folder.mkdir()
    with Network() as network:
        owner = instance(folder, network.hosts[0], "owner", numbers=ALL)
        reader = instance(folder, network.hosts[1], "reader", peers=[owner.address])
        with running(owner, reader):
            settle(owner, reader)
            before = checked(owner, reader)
            for step in ("owner-in-read", "owner-before-Have"):
                reader.do("forget")
                owner.arm(step, "stop")
                _, load = reach(owner, step, reader, numbers=list(ALL))
                cut(network)
                owner.signal(signal.SIGCONT)
                reader.loaded(load)
                quiet(owner, BACK_SECONDS)
                # Who comes later does not wait for what is known to be gone.
                assert reader.load(ALL)["seconds"] < 0.8
                network.plug()
                network.find()
                owner.do("rest")
                settle(owner, reader, owner, reader)
            nothing_more(before, owner, reader)
            for one in (reader, owner):
                assert one.close() == {"error": "", "left": []}


def test_a_link_that_is_cut_for_a_moment_costs_nothing(tmp_path: Path, network: Network) -> None:
    owner = instance(tmp_path, network.hosts[0], "owner", numbers=ALL, heartbeat_seconds=1.0)
    reader = instance(
        tmp_path, network.hosts[1], "reader", peers=[owner.address], heartbeat_seconds=1.0
    )
    with running(owner, reader):
        settle(owner, reader)
        reader.do("forget")
        owner.arm("owner-in-read", "stop")
        _, load = reach(owner, "owner-in-read", reader, numbers=list(ALL))
        network.lose()
        owner.signal(signal.SIGCONT)
        time.sleep(0.4)
        network.find()
        assert reader.loaded(load)["ready"] == CHUNKS
        settle(owner, reader)


@pytest.mark.fault("H03", "L14", "P02", "P19", "K08")
@pytest.mark.parametrize("side", ["owner", "reader"])
def test_a_host_that_dies_without_a_word(tmp_path: Path, network: Network, side: str) -> None:
    """No FIN, no RST; it comes back at the same address."""
    owner = instance(tmp_path, network.hosts[0], "owner", numbers=ALL)
    reader = instance(tmp_path, network.hosts[1], "reader", peers=[owner.address])
    victim, survivor = (owner, reader) if side == "owner" else (reader, owner)
    step = "owner-in-read" if side == "owner" else "reader-before-read"
    with running(owner, reader):
        settle(owner, reader)
        before = checked(survivor)
        reader.do("forget")
        victim.arm(step, "stop")
        _, load = reach(victim, step, reader, numbers=list(ALL))
        network.lose()
        victim.kill()
        if victim is owner:
            reader.loaded(load)
        else:
            assert owner.audit()["pins"]
            quiet(owner, BACK_SECONDS)
        network.find()
        victim.start()
        settle(owner, reader, survivor)
        nothing_more(before, survivor)


@pytest.mark.fault("H03", "P11")
def test_an_address_that_leads_nowhere(tmp_path: Path, network: Network) -> None:
    """It costs one deadline; the others are asked all the same."""
    owner = instance(tmp_path, network.hosts[0], "owner", numbers=ALL)
    reader = instance(tmp_path, network.hosts[1], "reader", peers=["10.77.0.9:5710", owner.address])
    with running(owner, reader):
        healed(reader, ALL)
        for _ in range(3):
            assert reader.load(ALL)["seconds"] < 1.5
        assert "10.77.0.9:5710: no answer within 0.5 s" in reader.log


@pytest.mark.needs("tbf")
def test_a_slow_link(tmp_path: Path, network: Network) -> None:
    """A load of 2 MiB over 4 Mbit/s is not done in its time."""
    owner = instance(tmp_path, network.hosts[0], "owner", numbers=ALL)
    reader = instance(tmp_path, network.hosts[1], "reader", peers=[owner.address])
    with running(owner, reader):
        settle(owner, reader)
        network.hosts[0].tc(
            *("add", "dev", network.hosts[0].device, "root", "tbf"),
            *("rate", "4mbit", "burst", "32kb", "latency", "2s"),
        )
        said = reader.load(ALL)
        assert said["ready"] < CHUNKS
        assert said["seconds"] < LOAD_SECONDS + 1.0
        quiet(owner, BACK_SECONDS)
        network.hosts[0].tc("del", "dev", network.hosts[0].device, "root")
        settle(owner, reader, owner, reader)


@pytest.mark.needs("tun")
def test_a_far_link_that_loses_packets(tmp_path: Path) -> None:
    """A load is slower, and exact; nobody takes the peer for dead."""
    with FarNetwork(delay_seconds=0.02, jitter_seconds=0.005, loss=0.01) as network:
        owner = instance(tmp_path, network.hosts[0], "owner", numbers=ALL)
        reader = instance(tmp_path, network.hosts[1], "reader", peers=[owner.address])
        with running(owner, reader):
            settle(owner, reader)
            network.is_bad = True
            for _ in range(3):
                healed(reader, ALL)
            assert network.lost > 0
            settle(owner, reader, owner, reader)
