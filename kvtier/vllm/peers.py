# SPDX-License-Identifier: Apache-2.0
"""What a request's ``kv_transfer_params`` say of other instances, in vLLM's own words.

Runs on the scheduler's thread. Owns what has been warned of. Invariant: nothing here raises,
whatever an orchestrator has written; a request whose words make no sense goes on without a peer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.config import TierConfig
from kvtier.tiers.p2p.addresses import Address, address
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.tiers.registry import check_options
from kvtier.types import Peer

logger = logging.getLogger("vllm.kvtier.peers")

PREFILLER = "remote_prefiller"
"""Pull from an instance that is computing the prompt for this request, and wait for it."""
SOURCE = "remote_kv_source"
"""Pull what an instance has."""
DECODER = "remote_decoder"
"""Another instance waits for the chunks of this request."""

ROLES = (PREFILLER, SOURCE, DECODER)

STRANGE = ("remote_", "do_remote_")
"""How the words of other connectors begin."""

MAX_ID_LENGTH = 512
"""Of ``kv_request_id``, as in the messages between instances."""

MAX_WARNINGS = 64


class PeerParams:
    """Reads the three roles of vLLM's p2p tier.

    Parameters
    ----------
    tiers : sequence of TierConfig
        Of the first of type ``p2p``, ``prefill_wait_seconds`` counts.
    """

    def __init__(self, tiers: Sequence[TierConfig]) -> None:
        self._options: P2pOptions | None = None
        for tier in tiers:
            if tier.type == "p2p" and tier.module_path is None:
                self._options = check_options(tier, f"tier {tier.name}")
                break
        self._told: set[tuple[str, str]] = set()  # roles, and what was wrong with them

    def read(self, params: Mapping[str, Any] | None) -> tuple[Peer | None, str]:
        """The peer to pull from, and what a peer calls the request that waits for this one's
        chunks; None and an empty text where there is none."""
        if not params:
            return None, ""
        roles = {role: params[role] for role in ROLES if params.get(role) is not None}
        strange = {
            key
            for key in params
            if isinstance(key, str) and key.startswith(STRANGE) and key not in ROLES
        }
        if strange and self._options is not None:
            # Of another connector, or misspelt: without a word the prompt would be computed twice.
            given = ", ".join(sorted(strange))
            self._warn(given, f"the words for peers are {', '.join(ROLES)}")
        if not roles:
            return None, ""
        if self._options is None:
            self._warn(", ".join(roles), "no tier of type p2p is configured")
            return None, ""
        peer, serves = None, ""
        for role, given in roles.items():
            try:
                if role == DECODER:
                    serves = _request(given)
                elif PREFILLER in roles and role == SOURCE:
                    raise ValueError(f"stands beside {PREFILLER}; a request has one source")
                else:
                    wait_seconds = self._options.prefill_wait_seconds if role == PREFILLER else 0.0
                    peer = Peer(_address(given), _request(given), wait_seconds)
            except ValueError as exc:
                self._warn(role, str(exc))
        return peer, serves

    def _warn(self, role: str, what: str) -> None:
        """Once for each kind of mistake: an orchestrator makes it with every request."""
        kind = role, what.partition(",")[0]
        if kind not in self._told and len(self._told) < MAX_WARNINGS:
            self._told.add(kind)
            logger.warning(
                "kv_transfer_params.%s is passed over, for this and every such request: %s",
                role,
                what,
            )


def _request(given: object) -> str:
    """The orchestrator's name of the transfer."""
    if not isinstance(given, Mapping):
        raise ValueError(f"it is a mapping, got {given!r:.80}")
    name = given.get("kv_request_id")
    # Half a surrogate pair, which JSON lets pass, cannot be sent.
    if (
        isinstance(name, str)
        and 0 < len(name) <= MAX_ID_LENGTH
        and not any("\ud800" <= one <= "\udfff" for one in name)
    ):
        return name
    raise ValueError(
        f"kv_request_id is a text of 1 to {MAX_ID_LENGTH} characters, got {name!r:.80}"
    )


def _address(given: object) -> str:
    """Where the other instance listens."""
    if not isinstance(given, Mapping):
        raise ValueError(f"it is a mapping, got {given!r:.80}")
    host, port = given.get("remote_host"), given.get("remote_port")
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port[:6])
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ValueError(f"remote_port is a number from 1 to 65535, got {port!r:.80}")
    if isinstance(host, str):
        host = host.strip("[]")
        try:
            there = address(host, port)
        except ValueError as exc:
            raise ValueError(f"remote_host, {exc}") from None
        if there == Address(host, port):
            return str(there)
    raise ValueError(f"remote_host is a name or an IP address without a port, got {host!r:.80}")
