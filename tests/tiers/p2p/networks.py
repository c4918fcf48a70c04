# SPDX-License-Identifier: Apache-2.0
"""Hosts with addresses of their own: network namespaces joined by a cable, which tests cut."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Self

NOWHERE = "02:00:00:00:00:77"
"""A hardware address that nobody has: what is sent there is lost, and nobody is told."""

_numbers = itertools.count()


def ip(*words: str) -> None:
    """Run ``ip``. CalledProcessError with what it says."""
    subprocess.run(["ip", *words], check=True, timeout=30, capture_output=True, text=True)


class Host:
    """One namespace, and its end of the cable."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.device = f"eth{number}"
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number}"
        self.command = ("ip", "netns", "exec", name)

    def ip(self, *words: str) -> None:
        ip("-n", self.name, *words)

    def wait(self) -> None:
        """Until its end of the cable carries: the kernel tells that later, and what starts before
        has no address but the loopback's."""
        end = time.monotonic() + 10
        command = ["ip", "-n", self.name, "link", "show", self.device]
        while (
            "LOWER_UP"
            not in subprocess.run(
                command, check=True, timeout=30, capture_output=True, text=True
            ).stdout
        ):
            assert time.monotonic() < end, f"{self.device} does not come up"
            time.sleep(0.01)

    def tc(self, *words: str) -> None:
        """Change how its end of the cable sends."""
        command = [*self.command, "tc", "qdisc", *words]
        subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)


class Network:
    """Two hosts and the cable between them."""

    def __init__(self) -> None:
        prefix = f"kvtier-{os.getpid()}-{next(_numbers)}"
        self.hosts = [Host(f"{prefix}-{number}", number) for number in (1, 2)]

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for host in self.hosts:
            ip("netns", "add", host.name)
        self._connect()
        for host in self.hosts:
            host.ip("link", "set", "lo", "up")
            host.ip("addr", "add", f"{host.address}/24", "dev", host.device)
            host.ip("addr", "add", f"{host.address6}/64", "dev", host.device, "nodad")
            host.ip("link", "set", host.device, "up")
        for host in self.hosts:
            host.wait()

    def _connect(self) -> None:
        one, two = self.hosts
        one.ip(
            *("link", "add", one.device, "type", "veth"),
            *("peer", "name", two.device, "netns", two.name),
        )

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            # A host that was not made is not there to be taken away.
            subprocess.run(
                ["ip", "netns", "del", host.name], timeout=30, capture_output=True, check=False
            )

    def pull(self) -> None:
        """The cable is out: both hosts see it."""
        for host in self.hosts:
            host.ip("link", "set", host.device, "down")

    def plug(self) -> None:
        """The cable is in again."""
        for host in self.hosts:
            host.ip("link", "set", host.device, "up")

    def lose(self, senders: Sequence[Host] | None = None) -> None:
        """What these send is lost (all: both ways), and no host sees anything of it."""
        for host in self.hosts if senders is None else senders:
            other = self.hosts[host is self.hosts[0]]
            for address in (other.address, other.address6):
                host.ip(
                    *("neigh", "replace", address, "lladdr", NOWHERE),
                    *("dev", host.device, "nud", "permanent"),
                )

    def find(self) -> None:
        """Nothing is lost any more."""
        for host in self.hosts:
            host.ip("neigh", "flush", "dev", host.device, "nud", "permanent")
