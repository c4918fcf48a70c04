# SPDX-License-Identifier: Apache-2.0
"""From a tier's configuration to its class and its decoded options.

Knows the tiers that ship with kvtier by name and imports them when they are asked for; finds others
through ``module_path``. Owns no state.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvtier.config import COMMON_KEYS, TierConfig
from kvtier.errors import ConfigError
from kvtier.options import decode_options, nearest
from kvtier.tiers.adapter import adapted_class, check_class, is_secondary_tier_manager
from kvtier.tiers.base import Tier, TierEnv

BUILT_IN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "example": ("kvtier.tiers.example", "ExampleTier"),
        "fs": ("kvtier.tiers.fs.tier", "FsTier"),
        "obj": ("kvtier.tiers.obj.tier", "ObjTier"),
        "p2p": ("kvtier.tiers.p2p.tier", "P2pTier"),
    }
)


def load_class(config: TierConfig) -> type[Any]:
    """The class that a tier's ``type`` and ``module_path`` name.

    Raises
    ------
    ConfigError
        If there is no such type, module or class, or the class is no tier.
    """
    if config.module_path is None:
        if config.type not in BUILT_IN:
            near = nearest(config.type, BUILT_IN)
            hint = f"; did you mean {near}?" if near else "."
            raise ConfigError(
                f"tier {config.name}: there is no type {config.type!r} (known: "
                f"{', '.join(sorted(BUILT_IN))}){hint} A class of your own needs module_path."
            )
        module_path, name = BUILT_IN[config.type]
    else:
        module_path, name = config.module_path, config.type
    try:
        module = importlib.import_module(module_path)
    except Exception as exc:
        # Whatever a module of other people does while it loads.
        raise ConfigError(
            f"tier {config.name}: cannot import module_path {module_path!r}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        near = nearest(name, [word for word, it in vars(module).items() if isinstance(it, type)])
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"tier {config.name}: {module_path} has no class {name!r}{hint}")
    if not issubclass(kind, Tier) and not is_secondary_tier_manager(kind):
        raise ConfigError(
            f"tier {config.name}: {module_path}.{name} is neither a kvtier Tier nor has it the "
            f"methods lookup, submit_store, submit_load and get_finished_jobs"
        )
    if issubclass(kind, Tier):
        _check_native(kind, config.name)
    return kind


def _check_native(kind: type[Tier], name: str) -> None:
    """What a tier of kvtier's own interface lacks is named before one is made."""
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"tier {name}: {kind.__name__} does not define {missing}")
    options_type = getattr(kind, "options_type", None)
    if not (isinstance(options_type, type) and issubclass(options_type, msgspec.Struct)):
        raise ConfigError(
            f"tier {name}: {kind.__name__}.options_type is to be a msgspec.Struct with the tier's "
            f"keys in the configuration, got {options_type!r:.80}"
        )


def tier_class(config: TierConfig) -> type[Tier]:
    """Like ``load_class``; the adapter's class where the class is no kvtier Tier."""
    kind = load_class(config)
    return kind if issubclass(kind, Tier) else adapted_class(kind)


def is_adapted(config: TierConfig) -> bool:
    """Whether the tier is a four-method class, which runs in the scheduler's process."""
    return not issubclass(load_class(config), Tier)


def wants_rows(tiers: Iterable[TierConfig]) -> bool:
    """Whether one of the tiers gets the region as rows, one for each chunk: a four-method class."""
    return any(is_adapted(tier) for tier in tiers)


def check_options(config: TierConfig, path: str) -> Any:
    """A tier's options, for their errors; None for a four-method class, which takes them itself.

    Raises
    ------
    ConfigError
        With the path of the wrong key.
    """
    kind = load_class(config)
    if not issubclass(kind, Tier):
        check_class(kind, config, path)
        return None
    return decode_options(kind.options_type, config.options, path, also_known=COMMON_KEYS)


def make_tier(config: TierConfig, env: TierEnv) -> Tier:
    """The tier, not opened yet."""
    kind = load_class(config)
    if not issubclass(kind, Tier):
        tier: Tier = adapted_class(kind)(config.name, config, env)
    else:
        options: Any = decode_options(kind.options_type, config.options, f"tier {config.name}")
        tier = kind(config.name, options, env)
    if config.locality is not None:
        tier.locality = config.locality
    return tier
