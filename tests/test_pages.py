# SPDX-License-Identifier: Apache-2.0
"""Example configurations and pages say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier._yaml import load_yaml, parse_yaml
from kvtier.config import COMMON_KEYS, VLLM_KEYS, VLLM_NAMES, Config, TierConfig, load, parse
from kvtier.obs.metrics import METRICS
from kvtier.options import UNITS, decode_options
from kvtier.tiers import registry
from kvtier.tiers.example import ExampleOptions
from kvtier.tiers.fs import FsOptions
from kvtier.tiers.fs.metrics import METRICS as FS_METRICS
from kvtier.tiers.obj.metrics import METRICS as OBJ_METRICS
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.p2p.metrics import METRICS as P2P_METRICS
from kvtier.tiers.p2p.options import P2pOptions
from tests import pages

CONFIGS = sorted((pages.ROOT / "configs").glob("*.yaml"))
DEFAULT = pages.ROOT / "configs" / "default.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_fits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TOKEN", "a-token")
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


def shown(heading: str) -> dict[str, Any]:
    """The tier in the comment below a heading of the default file."""
    comment = DEFAULT.read_text().partition(f"# {heading}")[2].partition("\n\n")[0]
    lines = comment.splitlines()[2:]
    (tier,) = parse_yaml("\n".join(line[1:] for line in lines), "default.yaml")
    assert isinstance(tier, dict)
    return tier


def test_the_default_file_shows_every_key_of_a_tier_with_its_default() -> None:
    tier = shown("Keys that every tier has")
    assert set(tier) == COMMON_KEYS
    config = parse({"capacity_bytes": 1, "tiers": [tier]})
    assert config.tiers == (TierConfig(type="fs", name="fs"),)


@pytest.mark.parametrize(
    ("heading", "kind", "required"),
    [
        ("Keys of a file tier", FsOptions, {"root_dir"}),
        ("Keys of an object tier", ObjOptions, {"bucket"}),
        ("Keys of a peer tier", P2pOptions, set()),
        ("Keys of the example tier", ExampleOptions, set()),
    ],
)
def test_the_default_file_shows_every_key_of_a_type_with_its_default(
    heading: str, kind: type[msgspec.Struct], required: set[str]
) -> None:
    tier = shown(heading)
    del tier["type"]
    assert set(tier) == set(kind.__struct_fields__)
    needed = {name: tier[name] for name in required}
    assert decode_options(kind, tier, "tier") == decode_options(kind, needed, "tier")


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
    names = {definition.name for definition in (*METRICS, *FS_METRICS, *OBJ_METRICS, *P2P_METRICS)}
    asked = set(re.findall(r"kvtier_[a-z_]+", pages.metrics_page()))
    assert {name.removesuffix("_bucket") for name in asked} == names


def test_the_page_of_configuration_knows_every_name() -> None:
    text = (pages.ROOT / "docs" / "configuration.md").read_text()
    for word in [*UNITS, *VLLM_KEYS, *VLLM_NAMES]:
        assert f"`{word}`" in text, word


def test_the_page_of_the_peer_tier_has_every_cause_of_a_refusal() -> None:
    source = (pages.ROOT / "kvtier" / "tiers" / "p2p" / "server.py").read_text()
    causes = set(re.findall(r'(?:_count\(|_refuse\(socket, identity, )"(\w+)"', source))
    page = (pages.ROOT / "docs" / "peer-tier.md").read_text()
    (row,) = [line for line in page.splitlines() if "`kvtier_peer_refused_total{cause}`" in line]
    assert set(re.findall(r"`(\w+)`", row)) == causes > {"token", "silent", "frames"}
    for metric in P2P_METRICS:
        assert f"`{metric.name}" in page


def test_the_page_of_the_peer_tier_shows_what_can_be_started() -> None:
    page = (pages.ROOT / "docs" / "peer-tier.md").read_text()
    (block,) = re.findall(r"\n\n((?:    .*\n)+)", page.partition("## Starting it")[0])
    (tier,) = parse_yaml(block, "docs/peer-tier.md")["tiers"]
    assert tier.pop("type") == "p2p"
    assert tier.pop("token") == "${KVTIER_TOKEN}"
    assert decode_options(P2pOptions, tier, "tiers[0]").peers
    (words,) = re.findall(r"--kv-transfer-config '(.*?)'", page, re.S)
    extra = json.loads(words)["kv_connector_extra_config"]
    assert (pages.ROOT / "configs" / Path(extra["kvtier_config"]).name).exists()
