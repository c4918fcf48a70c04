# SPDX-License-Identifier: Apache-2.0
"""What stands in ``kv_connector_extra_config`` is read or refused, in workers and scheduler alike.

No engine runs: vLLM makes the spec first of all in both places, from the same object.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.types import GroupGeometry, make_geometry

pytestmark = pytest.mark.vllm

VLLM_OWN = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier.vllm.spec",
    "blocks_per_chunk": 2,
    "offload_prompt_only": False,
    "self_describing_kv_events": False,
}


def make_spec(**extra: Any) -> Any:
    """The object that each process of vLLM makes."""
    # lazy: vLLM takes seconds, and only these tests need it.
    from kvtier.vllm.spec import KVTierOffloadingSpec

    config: Any = SimpleNamespace(
        extra_config=VLLM_OWN | extra,
        enable_kv_cache_events=False,
        groups=[],
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        engine_id="e",
    )
    return KVTierOffloadingSpec(config)


def test_every_key_that_has_an_effect_is_read() -> None:
    settings = make_spec(
        cpu_bytes_to_use="1.5GiB",
        eviction_policy="arc",
        directory="/dev/shm/mine",
        model_fingerprint="w1",
        namespace={"site": "a"},
    ).settings
    assert settings.capacity_bytes == 3 * 2**29
    assert settings.policy == "arc"
    assert settings.directory == "/dev/shm/mine"
    assert settings.model_fingerprint == "w1"
    assert settings.namespace == {"site": "a"}


def test_a_key_that_keeps_its_default_changes_nothing() -> None:
    spec = make_spec(
        cpu_bytes_to_use=1 << 30, secondary_tiers=[], verify_host="off", isolation="process"
    )
    assert spec.settings.capacity_bytes == 1 << 30


@pytest.mark.fault("U03")
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "cpu_bytes_to_use: is missing"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use: 0"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use: True"),
        ({"cpu_bytes_to_use": "100G"}, "did you mean 100GiB?"),
        ({"cpu_bytes_to_use": 1, "eviction_polcy": "lru"}, "unknown key 'eviction_polcy'"),
        ({"cpu_bytes_to_use": 1, "shm_directory": "/x"}, "did you mean 'directory'?"),
        ({"cpu_bytes_to_use": 1, "eviction_policy": "fifo"}, "eviction_policy: "),
        (
            {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs", "root": "/x"}]},
            "secondary_tiers[0].root: unknown key 'root'; did you mean 'root_dir'?",
        ),
        ({"cpu_bytes_to_use": 1, "isolation": "fork"}, "isolation: "),
        ({"kvtier_config": "/no/such.yaml"}, "/no/such.yaml: there is no such file"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_refused_in_one_line(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(**extra)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_manager_gets_the_policy_and_the_directory(
    own_shm_directory: Path, policy: str
) -> None:
    from kvtier.host.region import Region  # lazy: as above
    from kvtier.vllm.spec import region_name

    geometry = make_geometry([GroupGeometry(16, 1, 4096)], 8 * 4096)
    directory = str(own_shm_directory)
    with Region.create(region_name("e"), geometry, {}, 1, directory=directory) as region:
        region.sign(0)
        spec = make_spec(cpu_bytes_to_use=8 * 4096, eviction_policy=policy, directory=directory)
        manager = spec.get_manager()
        assert manager.engine.cache.index.policy == policy
        manager.shutdown()


def test_the_operators_fingerprint_comes_first() -> None:
    from kvtier.vllm.identity import model_fingerprint  # lazy: as above

    hf_config = SimpleNamespace(_commit_hash=None)
    model = SimpleNamespace(model="some/model", hf_config=hf_config, revision="r1")
    vllm_config: Any = SimpleNamespace(model_config=model)
    assert model_fingerprint(vllm_config, "mine") == "operator:mine"
    assert model_fingerprint(vllm_config, None) == "revision:r1"
