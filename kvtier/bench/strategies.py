# SPDX-License-Identifier: Apache-2.0
"""The strategies that are compared, and how each opens kvtier. Owns no state.

The only module of the generator that knows kvtier's configuration and opens its engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from kvtier.bench.drivers import EngineLike, RegionLike
from kvtier.bench.results import EngineCounts
from kvtier.bench.settings import RealEngine
from kvtier.config import parse
from kvtier.engine.engine import EngineStats, open_engine
from kvtier.types import Geometry, Outcome

NAMESPACE = {"model": "kvtier-bench", "kv_dtype": "derived-bytes"}

STRATEGIES = ("none", "host", "host+fs")
STOCK = "stock"
"""vLLM's own tiering manager and file tier; only in vLLM."""
SERVER = "server"
"""What a server is configured to do, which nobody here knows."""

BY_ENGINE = {
    "standin": STRATEGIES,
    "vllm": (*STRATEGIES, STOCK),
    "openai": (SERVER,),
}


class Opener(Protocol):
    """Opens kvtier for one run; tests put a fake in its place."""

    def __call__(
        self, strategy: str, geometry: Geometry, tier_directory: Path | None
    ) -> tuple[EngineLike, RegionLike]: ...


class KVTierOpener:
    """The real one.

    Parameters
    ----------
    policy, isolation : str
    lookup_timeout_seconds : float
        All as in kvtier's configuration.
    """

    def __init__(self, policy: str, isolation: str, lookup_timeout_seconds: float) -> None:
        self._policy = policy
        self._isolation = isolation
        self._lookup_timeout_seconds = lookup_timeout_seconds

    def config(
        self, strategy: str, geometry: Geometry, tier_directory: Path | None
    ) -> dict[str, Any]:
        """kvtier's configuration of `strategy`, as a mapping."""
        config: dict[str, Any] = {
            "capacity_bytes": geometry.num_slots * geometry.slot_bytes,
            "policy": self._policy,
            "isolation": self._isolation,
            "lookup_timeout_seconds": self._lookup_timeout_seconds,
        }
        if strategy == "host+fs":
            # A directory of its own: what was never stored there is known to be absent.
            config["tiers"] = [
                {"type": "fs", "name": "fs", "root_dir": str(tier_directory), "private": True}
            ]
        return config

    def __call__(
        self, strategy: str, geometry: Geometry, tier_directory: Path | None
    ) -> tuple[EngineLike, RegionLike]:
        engine, region = open_engine(
            parse(self.config(strategy, geometry, tier_directory), source=f"strategy {strategy}"),
            geometry,
            NAMESPACE,
        )
        return engine, region


def connector_config(
    strategy: str, real: RealEngine, host_bytes: int, tier_directory: str | None
) -> dict[str, Any] | None:
    """``kv_transfer_config`` of vLLM for `strategy`; None for none."""
    if strategy == "none":
        return None
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": host_bytes,
        "blocks_per_chunk": real.blocks_per_chunk,
    }
    if strategy == STOCK:
        extra |= {
            "spec_name": "StockSpec",
            "spec_module_path": "kvtier.bench.drivers.stock",
            "eviction_policy": real.policy,
            "secondary_tiers": [{"type": "fs", "root_dir": tier_directory}],
        }
    else:
        extra |= {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm.spec",
            "policy": real.policy,
            "isolation": real.isolation,
            "lookup_timeout_seconds": real.lookup_timeout_seconds,
            "flush_on_shutdown_seconds": 0,
        }
    if strategy == "host+fs":
        extra["tiers"] = [{"type": "fs", "name": "fs", "root_dir": tier_directory, "private": True}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _is_failure(cause: str) -> bool:
    """Whether something broke; a cancelled job of a request that has ended is no failure."""
    name = cause.upper()
    return name not in Outcome.__members__ or Outcome[name].failed


def engine_counts(stats: EngineStats) -> EngineCounts:
    """kvtier's counters, as far as the report shows them."""
    return EngineCounts(
        promoted_bytes=stats.loaded_bytes,
        stored_bytes=stats.stored_bytes,
        evicted=stats.evicted,
        evicted_unsaved=stats.evicted_unsaved,
        failures={cause: n for cause, n in stats.failures.items() if _is_failure(cause)},
    )
