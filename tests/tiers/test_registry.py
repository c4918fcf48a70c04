# SPDX-License-Identifier: Apache-2.0
"""From configuration to a tier: what a person gets wrong is named before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.own_native_tier import CompressedTier
from examples.own_tier import DictionaryTier
from kvtier.config import TierConfig, parse
from kvtier.errors import ConfigError
from kvtier.testing.contract import make_env
from kvtier.tiers.adapter import AdaptedTier
from kvtier.tiers.example import ExampleTier
from kvtier.tiers.registry import check_options, is_adapted, load_class, make_tier, tier_class
from tests.engine.rig import rig

OWN = {"type": "DictionaryTier", "module_path": "examples.own_tier"}

BROKEN = {"module_path": "tests.tiers.broken_classes"}


def config(**tier: Any) -> TierConfig:
    return parse({"capacity_bytes": "1GiB", "tiers": [{"type": "example"}, tier]}).tiers[1]


def refused(**tier: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_options(config(**tier), "tiers[1]")
    return str(caught.value)


def test_the_classes() -> None:
    assert load_class(config(type="example")) is ExampleTier
    assert load_class(config(**OWN)) is DictionaryTier
    native = config(type="CompressedTier", module_path="examples.own_native_tier")
    native_class = tier_class(native)
    assert native_class is CompressedTier
    assert not is_adapted(native)
    assert is_adapted(config(**OWN))
    kind = tier_class(config(**OWN))
    assert issubclass(kind, AdaptedTier)
    assert kind.medium == "CPU"
    tier = make_tier(config(**OWN, locality="REMOTE"), make_env())
    assert isinstance(tier, AdaptedTier)
    assert (tier.adapted, tier.locality) == (DictionaryTier, "REMOTE")
    # As in vLLM: no class names one by itself, an object store's neither.
    kinds = [tier_class(config(type=name)) for name in ("example", "fs", "obj")]
    assert {kind.locality for kind in [*kinds, native_class, kind]} == {None}


@pytest.mark.fault("U02")
@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"type": "exmaple"}, ["no type 'exmaple'", "did you mean example?", "module_path"]),
        ({"type": "zzz"}, ["no type 'zzz'", "known: example, fs", "module_path"]),
        (OWN | {"type": "DictionaryTeir"}, ["no class", "did you mean DictionaryTier?"]),
        (OWN | {"type": "chunks"}, ["examples.own_tier has no class 'chunks'"]),
        (OWN | {"type": "Any"}, ["neither a kvtier Tier nor"]),
        (OWN | {"module_path": "examples.nowhere"}, ["cannot import", "examples.nowhere"]),
        (OWN | {"module_path": ".relative"}, ["cannot import", ".relative"]),
        (OWN | {"module_path": "tests.tiers.broken_module"}, ["ZeroDivisionError"]),
        (BROKEN | {"type": "WithoutOptions"}, ["options_type is to be a msgspec.Struct", "None"]),
        (BROKEN | {"type": "WrongOptions"}, ["options_type is to be a msgspec.Struct", "dict"]),
        (BROKEN | {"type": "HalfATier"}, ["does not define aclose, load"]),
        ({"type": "example", "capacty_bytes": 5}, ["tiers[1].capacty_bytes", "'capacity_bytes'"]),
        (
            {"type": "example", "timeout_second": 5},
            ["tiers[1].timeout_second", "'timeout_seconds'"],
        ),
        ({"type": "example", "capacity_bytes": "5XB"}, ["tiers[1].capacity_bytes", "5XB"]),
        ({"type": "example", "backpressure": {}}, ["backpressure", "defer", "drop"]),
        (OWN | {"capacity_chunk": 5}, ["tiers[1].capacity_chunk", "'capacity_chunks'"]),
        (OWN | {"capacity_chunks": 0}, ["tiers[1].capacity_chunks", "at least 1"]),
        (OWN | {"store_treshold": 2}, ["tiers[1].store_treshold", "'store_threshold'"]),
    ],
)
def test_what_is_wrong_is_named(tier: dict[str, Any], words: list[str]) -> None:
    message = refused(**tier)
    for word in words:
        assert word in message


def test_a_wrong_option_stops_the_start() -> None:
    tiers = [{"type": "example"}, OWN | {"xyz": 1}]
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.xyz: unknown key"), rig(tiers=tiers):
        pass


def test_right_options_pass() -> None:
    check_options(config(type="example", capacity_bytes="5GB"), "tiers[1]")
    check_options(config(**OWN, capacity_chunks=5), "tiers[1]")


def test_tiers_load_without_torch_and_vllm() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "import kvtier.tiers.adapter, kvtier.tiers.registry, kvtier.tiers.example\n"
        "import kvtier.tiers.fs, kvtier.tiers.base\n"
        "import examples.own_tier, examples.own_native_tier\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
