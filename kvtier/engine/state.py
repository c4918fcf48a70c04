# SPDX-License-Identifier: Apache-2.0
"""What the planner's parts share: the index, the tiers, the messages to send, the job numbers.

Owner's thread. One ``State`` an engine; requests, loads and stores each keep what is theirs alone.
Invariant: messages in ``out`` are in the order in which they were decided.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from kvtier._core.index import Index
from kvtier._core.slots import SlotTable
from kvtier.config import Config, TierConfig
from kvtier.engine.contents import Contents
from kvtier.engine.requests import Request
from kvtier.obs.events import Operation
from kvtier.obs.metrics import Recorder, Registry
from kvtier.runtime import messages as m
from kvtier.tiers.base import Takes
from kvtier.tiers.registry import check_options, tier_class
from kvtier.types import Geometry, Peer, TierMatch

log = logging.getLogger(__name__)

Emit = Callable[[Operation, Sequence[bytes], str | None, str | None], None]
"""``emit(operation, keys, source, destination)``."""


class TierState:
    """What the owner knows of one tier."""

    __slots__ = (
        "backlog",
        "bound_bytes",
        "cause",
        "config",
        "contents",
        "handed_over",
        "hosts",
        "inflight_bytes",
        "locality",
        "medium",
        "name",
        "readable",
        "refused",
        "retries",
        "serves",
        "takes",
        "writable",
    )

    def __init__(
        self,
        config: TierConfig,
        medium: str,
        locality: str | None,
        bound_bytes: int,
        capacity: int,
        takes: Takes,
        hosts: float,
        serves: Callable[[Peer | None], bool],
    ) -> None:
        self.config = config
        self.takes = takes
        """Which chunks are copied there."""
        self.hosts = hosts
        """Part of host memory that chunks of others may have there."""
        self.serves = serves
        """Whether a request with this peer has anything to ask it."""
        self.name = config.name
        self.medium = medium
        self.locality = locality
        self.cause = ""
        self.contents = Contents()
        self.readable = False
        self.writable = False
        self.inflight_bytes = 0
        self.bound_bytes = bound_bytes
        self.backlog: deque[bytes] = deque(maxlen=capacity)
        """Chunks put off at the bound; offered again as it allows."""
        self.handed_over = 0
        """Chunks put off that the service has, unpinned, because the owner has no more steps."""
        self.refused: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """Chunks the tier did not take: how often, and when it is asked again (then they are in
        the backlog as well). Bounded like the backlog."""
        self.retries: list[tuple[float, bytes]] = []
        """Heap of when they are due."""

    def admits(self, key: bytes, group: int, request: Request | None) -> bool:
        """Whether the tier wants this chunk, of that KV cache group, at all."""
        if self.takes is not Takes.ALL:
            return False
        groups = self.config.groups
        if groups is not None and group not in groups:
            return False
        if self.config.min_prefix_tokens and request is not None:
            position = request.context.positions.get(key)
            return position is None or position >= self.config.min_prefix_tokens
        return True

    def allowed(self, matches: Sequence[TierMatch] | None) -> bool:
        """Whether a request with this filter may load from it."""
        return matches is None or any(
            (match.medium is None or match.medium == self.medium)
            and (match.locality is None or self.locality in (None, match.locality))
            for match in matches
        )


def tier_states(config: Config, geometry: Geometry, registry: Registry) -> list[TierState]:
    """One record a configured tier, in order; their metrics are declared.

    Raises
    ------
    ConfigError
        With the path of the option that is wrong.
    """
    states = []
    # What is on its way to tiers is pinned: all tiers together may pin half the host's memory.
    region_bytes = geometry.num_slots * geometry.slot_bytes
    most = region_bytes // (2 * max(1, len(config.tiers)))
    for position, tier_config in enumerate(config.tiers):
        options = check_options(tier_config, f"tiers[{position}]")
        for group in tier_config.groups or ():
            if group >= len(geometry.groups):
                log.warning(
                    "tiers[%d].groups: %d is no KV cache group, there are %d; the tier %s gets "
                    "nothing of it",
                    position,
                    group,
                    len(geometry.groups),
                    tier_config.name,
                )
        kind = tier_class(tier_config)
        registry.declare(kind.metric_definitions())
        states.append(
            TierState(
                tier_config,
                kind.medium,
                tier_config.locality or kind.locality,
                min(tier_config.max_inflight_bytes, most),
                geometry.num_slots,
                kind.takes(options),
                kind.hosts(options),
                functools.partial(kind.serves, options),
            )
        )
    return states


class State:
    """Shared by ``Planner``, ``Loads`` and ``Stores``.

    Parameters
    ----------
    index : Index
    slots : SlotTable
    geometry : Geometry
    config : Config
    tiers : sequence of TierState
    recorder : Recorder
    emit : callable
        Takes events.
    """

    __slots__ = (
        "config",
        "emit",
        "geometry",
        "index",
        "job",
        "out",
        "payload_bytes",
        "recorder",
        "slots",
        "tiers",
        "turnover",
    )

    def __init__(
        self,
        index: Index,
        slots: SlotTable,
        geometry: Geometry,
        config: Config,
        tiers: Sequence[TierState],
        recorder: Recorder,
        emit: Emit,
    ) -> None:
        self.index = index
        self.slots = slots
        self.geometry = geometry
        self.config = config
        self.tiers = list(tiers)
        self.recorder = recorder
        self.emit = emit
        self.payload_bytes = geometry.payload_bytes
        self.out: list[m.ToService] = []
        """Messages for the service, not sent yet."""
        self.job = 0
        self.turnover = 0
        """Chunks stored, loaded and evicted so far: how far the order of eviction has moved on."""

    def next_job(self) -> int:
        """A number that no job has had."""
        self.job += 1
        return self.job

    def evicted(self, keys: Sequence[bytes], unsaved: Sequence[bytes] = ()) -> None:
        """Chunks have left host memory for others."""
        if not keys:
            return
        self.recorder.add("kvtier_evicted_total", len(keys))
        self.turnover += len(keys)
        if unsaved:
            self.recorder.add("kvtier_evicted_unsaved_total", len(unsaved))
        self.emit("removed", keys, "host", None)
