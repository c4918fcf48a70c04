# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of the peer tier."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

import msgspec

from kvtier.options import Bytes, Port, Seconds, Secret
from kvtier.tiers.p2p.addresses import DEFAULT_PORT, EVERYWHERE, LOCAL, LOOPBACK, address

_Z85 = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class P2pOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a tier of type ``p2p``.

    Raises
    ------
    ValueError
        If values do not fit together.
    """

    host: str | None = None
    """Where to listen: an address of this host, or ``0.0.0.0`` for all. None: 127.0.0.1, which
    only instances on this host reach."""
    port: Port = DEFAULT_PORT
    """To listen on; data-parallel replicas add their index."""
    advertise_host: str | None = None
    """What others dial, where it differs from `host`."""
    data_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Of the ``tcp`` transport, plus the index of a replica; 0 takes any that is free."""
    transport: Literal["auto", "ucx", "tcp"] = "auto"
    """How bytes move; auto: UCX where both sides have it, else TCP."""

    peers: tuple[str, ...] = ()
    """``host:port`` of instances to ask where the request names none; one's own is passed over."""
    dns: str | None = None
    """``name:port`` that resolves to any number of peers, such as a headless service."""

    token: Secret | None = None
    """Shared by all instances; proven by both sides, and never sent."""
    curve_secret_key: Secret | None = None
    """Key of CURVE encryption (40 characters of Z85, ``python -m zmq.auth`` or
    ``zmq.curve_keypair()`` make one), the same in all instances."""

    connect_seconds: Seconds = 2.0
    """For a session to be made; a peer that fails costs so much once, then it is left alone for a
    while."""
    heartbeat_seconds: Seconds = 1.0
    """A peer that is silent for three of these is gone."""
    lease_seconds: Seconds = 20.0
    """How long chunks stay pinned for a peer that does not come back."""
    prefill_wait_seconds: Seconds = 60.0
    """How long a request waits for chunks that its prefill instance is still to write."""
    push: bool = True
    """Send chunks to `peers` that have room, when host memory would drop them and no other tier has
    them."""
    guest_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Part of host memory, while it is free, that peers may push to; 0 is none."""
    max_lease_bytes: Bytes | None = None
    """Most that may be pinned for peers; None: a quarter of host memory."""

    def __post_init__(self) -> None:
        for name in ("host", "advertise_host"):
            value = getattr(self, name)
            if value is None or (name == "host" and value in EVERYWHERE):
                continue
            try:
                given = address(value, DEFAULT_PORT)
            except ValueError as exc:
                raise ValueError(f"{name}: {exc}") from None
            if value == f"[{given.host}]":
                raise ValueError(f"{name} {value!r}: write it without brackets, as {given.host}")
            if given.host != value:
                raise ValueError(f"{name} {value!r} has a port; write it without, and set port")
        if self.data_port == self.port:
            raise ValueError(f"data_port and port are both {self.port}; give data_port another")
        for text in (*self.peers, *(() if self.dns is None else (self.dns,))):
            address(text)
        if (
            self.push
            and self.knows_peers
            and self.host in EVERYWHERE
            and self.advertise_host is None
        ):
            raise ValueError(
                f"host {self.host!r} tells peers no address to come to for what is pushed; set "
                f"advertise_host to this host's address, or push: false"
            )
        if self.push and self._is_out_of_reach:
            raise ValueError(
                f"host {self.host or LOOPBACK!r} cannot be reached by peers on other hosts; set "
                f"host to this host's address, or push: false"
            )
        key = self.curve_secret_key
        if key is not None and not _Z85.fullmatch(key.reveal()):
            raise ValueError("curve_secret_key is no key of CURVE: 40 characters of Z85")

    @property
    def knows_peers(self) -> bool:
        """Whether there is anybody to ask for a request that names no peer."""
        return bool(self.peers) or self.dns is not None

    @property
    def _is_out_of_reach(self) -> bool:
        """Whether peers are on other hosts, and none of them comes to where this one listens."""
        if self.advertise_host is not None or (self.host or LOOPBACK) not in LOCAL:
            return False
        hosts = [address(text).host for text in self.peers]
        return any(map(_is_elsewhere, hosts)) or (
            self.dns is not None and address(self.dns).host not in LOCAL
        )


def _is_elsewhere(host: str) -> bool:
    """Whether it is an address beyond this host's loopback; a name may be this host's own."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
