# SPDX-License-Identifier: Apache-2.0
"""Addresses of instances: as people write them, as ZeroMQ does, and as hosts have them."""

from __future__ import annotations

import ipaddress
import re

import msgspec

DEFAULT_PORT = 5710
EVERYWHERE = ("0.0.0.0", "::", "*")
"""All addresses of a host, and so none that it could be found at."""
LOOPBACK = "127.0.0.1"
LOCAL = (LOOPBACK, "::1", "localhost")

_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


class Address(msgspec.Struct, frozen=True, order=True):
    """Where an instance listens."""

    host: str
    """Name or IP address, without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """As ZeroMQ writes it."""
        return f"tcp://{self}"


def address(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """``host``, ``host:port``, an IPv6 literal, or ``[literal]:port``.

    Raises
    ------
    ValueError
        It is none, or names no host that could be dialled.
    """
    hint = f"{text!r:.120} is no address of a peer; write it like 10.0.0.7:{default_port}"
    match = re.fullmatch(r"\[([^\]]*)\](?::([0-9]{1,5}))?|([^:\[\]]*)(?::([0-9]{1,5}))?", text)
    if match is not None:
        host, port = match[1] or match[3] or "", match[2] or match[4]
    else:
        host, port = text, None
    number = default_port if port is None else int(port)
    if not 0 < number < 65536:
        raise ValueError(hint)
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if not _NAME.fullmatch(host):
            raise ValueError(hint) from None
    else:
        if literal.is_unspecified:
            raise ValueError(
                f"{text!r} is every address of a host and names none; write the one that others "
                f"dial, like 10.0.0.7:{default_port}"
            )
    return Address(host, number)
