# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write them, and options that do not fit together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.options import decode_options
from kvtier.tiers.p2p.addresses import Address, address
from kvtier.tiers.p2p.options import P2pOptions

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.7", "10.0.0.7", 5710),
        ("10.0.0.7:80", "10.0.0.7", 80),
        ("node-3.cluster_a.local:5711", "node-3.cluster_a.local", 5711),
        ("fd00::7", "fd00::7", 5710),
        ("[fd00::7]", "fd00::7", 5710),
        ("[fd00::7]:99", "fd00::7", 99),
        ("fe80::1%eth0", "fe80::1%eth0", 5710),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert address(text) == Address(host, port)
    assert address(str(address(text))) == address(text)


@pytest.mark.fault("P04")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write it like 10.0.0.7:5710"),
        (":5710", "write it like"),
        ("a b", "write it like"),
        ("host:0", "write it like"),
        ("host:65536", "write it like"),
        ("host:port", "write it like"),
        ("http://host:80", "write it like"),
        ("-host", "write it like"),
        ("[fd00::7", "write it like"),
        ("0.0.0.0:5710", "names none; write the one that others dial"),
        ("[::]:5710", "names none"),
        ("::", "names none"),
    ],
)
def test_what_is_no_address(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        address(text)


WRONG = {
    "port": ({"port": 0}, "port"),
    "peers": ({"peers": ["10.0.0.7", "0.0.0.0"]}, "names none"),
    "one peer": ({"peers": "10.0.0.7"}, "peers"),
    "host with a port": ({"host": "10.0.0.7:80"}, "write it without, and set port"),
    "host in brackets": ({"host": "[fd00::7]"}, "write it without brackets, as fd00::7$"),
    "one port for both": ({"data_port": 5710}, "both 5710; give data_port another"),
    "host": ({"host": "a b"}, "host: 'a b' is no address"),
    "advertised everywhere": ({"advertise_host": "0.0.0.0"}, "advertise_host: .* names none"),
    "dns": ({"dns": "a b"}, "no address"),
    "key": ({"curve_secret_key": "short"}, "40 characters of Z85"),
    "transport": ({"transport": "rdma"}, "transport"),
    "ratio": ({"guest_ratio": 1.5}, "guest_ratio"),
    "misspelt": ({"advertize_host": "x"}, "advertise_host"),
    "nowhere to come to": (
        {"host": "0.0.0.0", "peers": ["10.0.0.7"]},
        "set advertise_host to this host's address, or push: false",
    ),
    "nowhere to come to, by name": ({"host": "::", "dns": "peers"}, "set advertise_host"),
    "on loopback": (
        {"peers": ["127.0.0.1:5711", "10.0.0.7"]},
        r"host '127\.0\.0\.1' cannot be reached by peers on other hosts; set host",
    ),
    "on loopback, by name": ({"host": "::1", "dns": "peers"}, "set host to this host's address"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_said(name: str) -> None:
    options, said = WRONG[name]
    with pytest.raises(ConfigError, match=said) as caught:
        decode_options(P2pOptions, options, "tier p2p")
    assert "\n" not in str(caught.value)


def test_what_fits() -> None:
    for options in (
        {},
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "peers": ["10.0.0.7"], "push": False},
        {"host": "0.0.0.0", "peers": ["10.0.0.7"], "advertise_host": "10.0.0.8"},
        {"host": "fd00::7", "peers": ["[fd00::8]:5711"]},
        {"peers": ["127.0.0.1:5711", "[::1]:5711", "localhost:5712", "this-host:5713"]},
        {"peers": ["10.0.0.7"], "push": False},
        {"dns": "localhost:5711"},
    ):
        assert isinstance(decode_options(P2pOptions, options, "tier p2p"), P2pOptions)


WITHOUT_UCX = """
import asyncio, sys
sys.modules["kvtier._core.ucx"] = None
from kvtier.errors import ConfigError
from tests.tiers.p2p.rig import instance

async def main():
    async with instance(transport="auto") as made:
        print([transport.name for transport in made.tier._transports])
    try:
        async with instance(transport="ucx"):
            print("it opened")
    except ConfigError as exc:
        print(exc)

asyncio.run(main())
"""


def test_a_build_without_ucx_goes_over_tcp_or_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_UCX],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, advice = done.stdout.splitlines()
    assert names == "['tcp']"
    assert "install libucx-cu12 and build it again, or set transport: tcp" in advice
