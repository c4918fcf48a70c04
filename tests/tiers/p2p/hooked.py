# SPDX-License-Identifier: Apache-2.0
"""A peer tier whose process stops or dies when it comes to a certain step of the protocol.

The steps are armed by files in a folder, so that it does not matter in which process the tier runs
or since when: a file with the name of a step and ``stop`` or ``kill`` in it. Whoever comes to the
step takes the file, leaves ``STEP.taken`` with its process id, and sends itself the signal. The
hooks stay in their process for good: for processes that do nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

from kvtier.errors import PeerLostError
from kvtier.tiers.p2p import tier as tier_module
from kvtier.tiers.p2p import wire
from kvtier.tiers.p2p.client import PeerClient
from kvtier.tiers.p2p.guests import Guests
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.tiers.p2p.server import Server
from kvtier.tiers.p2p.tcp import _Served
from kvtier.tiers.p2p.tcp_link import Channel, TcpLink
from kvtier.tiers.p2p.tier import P2pTier
from kvtier.tiers.p2p.ucx import UcxLink
from kvtier.tiers.p2p.ucx_loop import UcxLoop

READER_STEPS = (
    "reader-before-Hello",
    "reader-before-Proof",
    "reader-after-Ask",
    "reader-after-Lend",
    "reader-before-read",
    "reader-in-read",
    "reader-before-Return",
)
OWNER_STEPS = (
    "owner-before-Challenge",
    "owner-before-Welcome",
    "owner-before-Have",
    "owner-before-Lent",
    "owner-after-Lent",
    "owner-in-read",
    "owner-at-Return",
)
GIVER_STEPS = (
    "reader-before-Push",
    "reader-after-Push",
    "owner-before-Challenge",
    "owner-before-Welcome",
    "owner-before-Lent",
    "owner-after-Lent",
    "owner-in-read",
    "owner-at-Return",
)
"""Of a push, at the instance that has too much."""
TAKER_STEPS = (
    "owner-at-Push",
    "reader-before-Hello",
    "reader-before-Proof",
    "reader-after-Lend",
    "reader-in-read",
    "reader-before-Return",
    "taker-before-commit",
    "owner-before-Taken",
    "owner-after-Taken",
)
"""Of a push, at the one that has room."""
FORGET = "forget-session"
"""The reader gives its sessions up, and makes new ones."""
STATE = "state"
"""What the tier has, in a file of this name in the folder."""
SAMPLE_SECONDS = 0.05
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


class HookedOptions(P2pOptions, frozen=True, kw_only=True):
    """With the folder of the steps."""

    folder: str


class Steps:
    """What is armed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, name: str) -> str | None:
        """What is armed for this step, once."""
        path = self._folder / name
        try:
            action = path.read_text()
        except FileNotFoundError:
            return None
        (self._folder / f"{name}.part").write_text(str(os.getpid()))
        (self._folder / f"{name}.part").rename(self._folder / f"{name}.taken")
        path.unlink()
        return action

    def at(self, name: str) -> None:
        """The step is here."""
        action = self.take(name)
        if action is not None:
            # To this very thread, which goes no step further; the others stop with it.
            signal.pthread_kill(threading.get_ident(), SIGNALS[action])


def install(steps: Steps) -> None:
    """Put the hooks in. They take the place of methods of this process for good."""
    ready, post = PeerClient._ready, PeerClient._post
    take, send = Server._take, Server._send
    read, readable, writable = TcpLink.read, Channel._on_readable, _Served._on_writable
    get, turn = UcxLink.read, UcxLoop._turn
    gets = 0  # under way
    commit, reclaim = Guests.commit, Guests.reclaim

    async def _ready(self: PeerClient, deadline: float) -> None:
        if steps.take(FORGET) is not None:
            await self._end(PeerLostError("forgotten"))
        await ready(self, deadline)

    def _post(self: PeerClient, message: wire.ToOwner) -> bool:
        name = type(message).__name__
        steps.at(f"reader-before-{name}")
        sent = post(self, message)
        steps.at(f"reader-after-{name}")
        return sent

    def _take(self: Server, socket: Any, identity: bytes, message: wire.ToOwner) -> None:
        steps.at(f"owner-at-{type(message).__name__}")
        take(self, socket, identity, message)

    def _send(self: Server, socket: Any, identity: bytes, message: wire.ToReader) -> bool:
        name = type(message).__name__
        steps.at(f"owner-before-{name}")
        sent = send(self, socket, identity, message)
        steps.at(f"owner-after-{name}")
        return sent

    async def _read(self: TcpLink, lease: int, first: int, targets: Any) -> None:
        steps.at("reader-before-read")
        await read(self, lease, first, targets)

    async def _get(self: UcxLink, lease: int, first: int, targets: Any) -> None:
        nonlocal gets
        steps.at("reader-before-read")
        gets += 1
        try:
            await get(self, lease, first, targets)
        finally:
            gets -= 1

    def _turn(self: UcxLoop) -> None:
        turn(self)
        if gets:
            steps.at("reader-in-read")

    def _on_readable(self: Channel) -> None:
        readable(self)
        if self._body is not None:
            steps.at("reader-in-read")

    def _on_writable(self: _Served) -> None:
        writable(self)
        if any(answer.lease is not None for answer in self._answers):
            steps.at("owner-in-read")

    def _commit(self: Guests, items: Any) -> None:
        if items:
            steps.at("taker-before-commit")
        commit(self, items)

    def _reclaim(self: Guests, count: int) -> None:
        steps.at("taker-at-reclaim")
        reclaim(self, count)

    for kind, name, hook in (
        (PeerClient, "_ready", _ready),
        (PeerClient, "_post", _post),
        (Server, "_take", _take),
        (Server, "_send", _send),
        (TcpLink, "read", _read),
        (UcxLink, "read", _get),
        (UcxLoop, "_turn", _turn),
        (Channel, "_on_readable", _on_readable),
        (_Served, "_on_writable", _on_writable),
        (Guests, "commit", _commit),
        (Guests, "reclaim", _reclaim),
    ):
        setattr(kind, name, hook)


class HookedTier(P2pTier):
    """See the head of this module."""

    options_type = HookedOptions
    options: HookedOptions
    _installed: ClassVar[bool] = False

    async def _open(self) -> None:
        if not HookedTier._installed:
            HookedTier._installed = True
            install(Steps(Path(self.options.folder)))
            tier_module.SAMPLE_SECONDS = SAMPLE_SECONDS
        await super()._open()

    def _sample(self) -> None:
        super()._sample()
        state = {
            "tasks": sorted(task.get_name() for task in asyncio.all_tasks()),
            "clients": {str(one): client.is_up for one, client in self._clients.items()},
            "in_use": 0
            if self._guests is None
            else len({*self._guests._filling, *self._guests._readers, *self._guests._leaving}),
        }
        path = Path(self.options.folder)
        (path / f"{STATE}.part").write_text(json.dumps(state))
        (path / f"{STATE}.part").rename(path / STATE)
