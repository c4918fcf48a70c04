# SPDX-License-Identifier: Apache-2.0
"""kvtier: a tiering engine for the KV cache of model servers.

``kvtier.open`` is the library's way in; a model server uses ``kvtier.engine.engine.Engine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.errors import ClosedError, ConfigError, InternalError, KVTierError, TierLostError
from kvtier.types import Geometry, GroupGeometry, Lookup, Outcome, Peer, make_geometry, make_key

if TYPE_CHECKING:
    from kvtier.engine.aio import Cache, open
    from kvtier.tiers.adapter import JobMetadata, JobResult, LookupResult, SecondaryTierManager

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "ClosedError",
    "ConfigError",
    "Geometry",
    "GroupGeometry",
    "InternalError",
    "JobMetadata",
    "JobResult",
    "KVTierError",
    "Lookup",
    "LookupResult",
    "Outcome",
    "Peer",
    "SecondaryTierManager",
    "TierLostError",
    "make_geometry",
    "make_key",
    "open",
]

_LAZY = {
    "Cache": "kvtier.engine.aio",
    "open": "kvtier.engine.aio",
    "JobMetadata": "kvtier.tiers.adapter",
    "JobResult": "kvtier.tiers.adapter",
    "LookupResult": "kvtier.tiers.adapter",
    "SecondaryTierManager": "kvtier.tiers.adapter",
}


def __getattr__(name: str) -> Any:
    # lazy: the child process and the tools import parts of kvtier without the engine.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
