# SPDX-License-Identifier: Apache-2.0
"""Example configurations and pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvtier._yaml import load_yaml, parse_yaml
from kvtier.config import COMMON_KEYS, VLLM_KEYS, VLLM_NAMES, Config, TierConfig, load, parse
from kvtier.obs.metrics import METRICS
from kvtier.options import UNITS
from kvtier.tiers import registry
from tests import pages

CONFIGS = sorted((pages.ROOT / "configs").glob("*.yaml"))
DEFAULT = pages.ROOT / "configs" / "default.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_fits(path: Path) -> None:
    config = load(path)
    for index, tier in enumerate(config.tiers):
        registry.check_options(tier, f"tiers[{index}]")


def test_there_are_examples() -> None:
    assert {path.stem for path in CONFIGS} >= {"default", "host-only", "nvme", "shared-directory"}


def test_the_default_file_has_every_key_with_its_default() -> None:
    data = load_yaml(DEFAULT)
    assert parse(data) == parse({"capacity_bytes": data["capacity_bytes"]})

    def keys(kind: type[msgspec.Struct], value: object) -> None:
        assert isinstance(value, dict)
        assert set(value) == set(kind.__struct_fields__)
        for field in msgspec.structs.fields(kind):
            default = field.default
            if isinstance(default, msgspec.Struct):
                keys(type(default), value[field.name])

    keys(Config, data)


def test_the_default_file_shows_every_key_of_a_tier_with_its_default() -> None:
    lines = DEFAULT.read_text().partition("# Keys that every tier has")[2].splitlines()[2:]
    (shown,) = parse_yaml("\n".join(line[1:] for line in lines), "default.yaml")
    assert set(shown) == COMMON_KEYS
    config = parse({"capacity_bytes": 1, "tiers": [shown]})
    assert config.tiers == (TierConfig(type="fs", name="fs"),)


def test_every_key_is_explained() -> None:
    """The line of a key, or one above it, is a comment (or the key before, explained with it)."""
    explained = False
    for line in DEFAULT.read_text().splitlines():
        if not line.strip():
            explained = False
        elif line.lstrip().startswith("#"):
            explained = True
        else:
            assert explained, f"{line!r} is not explained"


def test_the_page_of_metrics_is_current() -> None:
    assert pages.METRICS_PAGE.read_text() == pages.metrics_page(), "run `python -m tests.pages`"


def test_the_page_of_metrics_asks_for_metrics_that_exist() -> None:
    names = {definition.name for definition in METRICS}
    asked = set(re.findall(r"kvtier_[a-z_]+", pages.metrics_page()))
    assert {name.removesuffix("_bucket") for name in asked} == names


def test_the_page_of_configuration_knows_every_name() -> None:
    text = (pages.ROOT / "docs" / "configuration.md").read_text()
    for word in [*UNITS, *VLLM_KEYS, *VLLM_NAMES]:
        assert f"`{word}`" in text, word
