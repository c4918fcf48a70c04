# SPDX-License-Identifier: Apache-2.0
"""What stands in ``kv_connector_extra_config`` is read or refused, in workers and scheduler alike.

No engine runs: vLLM makes the spec first of all in both places, from the same object.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import socket
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.config import VLLM_KEYS, VLLM_NAMES, VLLM_WITHOUT_MEANING, VLLMConfig
from kvtier.errors import ConfigError
from kvtier.types import GroupGeometry, make_geometry
from tests.vllm.serve import ROOT, free_ports

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
        parallel=SimpleNamespace(data_parallel_index=0),
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
        (
            {"kvtier_config": "/no/such.yaml"},
            "kvtier_config: /no/such.yaml: there is no such file",
        ),
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


def test_the_tier_service_tells_what_vllm_would(
    own_shm_directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for two instances that do not find each other needs more than warnings."""
    from kvtier.host.region import Region  # lazy: as above
    from kvtier.vllm.spec import region_name

    for name, level in (("kvtier", logging.NOTSET), ("vllm", logging.INFO)):
        one = logging.getLogger(name)
        monkeypatch.setattr(one, "level", one.level)  # as it was, at the end
        one.setLevel(level)
    geometry = make_geometry([GroupGeometry(16, 1, 4096)], 8 * 4096)
    tier = {"type": "p2p", "port": free_ports(1), "transport": "tcp"}
    options = {"cpu_bytes_to_use": 8 * 4096, "directory": str(own_shm_directory)}
    with Region.create(region_name("e"), geometry, {}, 1, directory=own_shm_directory) as region:
        region.sign(0)
        manager = make_spec(**options, secondary_tiers=[tier]).get_manager()
        manager.shutdown()
    assert f"peers find this instance at 127.0.0.1:{tier['port']}" in capfd.readouterr().err


@pytest.mark.fault("R10", "M13")
def test_each_data_parallel_rank_has_endpoints_of_its_own(
    own_shm_directory: Path, tmp_path: Path
) -> None:
    """Of the same configuration, as vLLM hands it out."""
    from kvtier.host.region import Region  # lazy: as above
    from kvtier.vllm.spec import region_name

    port = free_ports(3)
    directory = str(own_shm_directory)
    options = {
        "cpu_bytes_to_use": 8 * 4096,
        "directory": directory,
        "metrics": {"port": port},
        "events": {"endpoint": f"ipc://{tmp_path}/events"},
    }
    geometry = make_geometry([GroupGeometry(16, 1, 4096)], 8 * 4096)
    with contextlib.ExitStack() as stack:

        def open_replica(index: int) -> None:
            name = region_name(f"e_dp{index}")
            region = stack.enter_context(Region.create(name, geometry, {}, 1, directory=directory))
            region.sign(0)
            spec = make_spec(**options)
            spec.region_name = name
            spec.config.parallel.data_parallel_index = index
            stack.callback(spec.get_manager().shutdown)

        for index in range(3):
            open_replica(index)
            sockets = {path.name for path in tmp_path.iterdir() if path.is_socket()}
            assert sockets == {"events", *(f"events.dp{one}" for one in range(1, index + 1))}
            with socket.create_connection(("127.0.0.1", port + index), timeout=10):
                pass
        options["metrics"] = {"port": 65535}
        with pytest.raises(ConfigError, match="replica 3 would take port 65538"):
            open_replica(3)


@pytest.mark.fault("H24", "R09")
def test_a_rank_on_another_host_is_refused_before_anything_is_promoted(
    own_shm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories stand for the shared memory of two hosts, each with one of two ranks: what
    comes from a tier would reach one of them only. No manager is made on either side. An
    engine of two hosts would show no more: its core calls ``get_manager``, which ends its start."""
    from kvtier.host.region import Region  # lazy: as above
    from kvtier.vllm import spec

    monkeypatch.setattr(spec, "START_SECONDS", 0.2)
    geometry = make_geometry([GroupGeometry(16, 1, 4096)], 8 * 4096)
    hosts = [own_shm_directory / name for name in ("one", "two")]
    for host in hosts:
        host.mkdir()
    with contextlib.ExitStack() as stack:
        for rank, host in enumerate(hosts):
            region = stack.enter_context(
                Region.create(spec.region_name("e"), geometry, {}, 2, directory=str(host))
            )
            region.sign(rank)
        for rank, host in enumerate(hosts):
            mine = make_spec(cpu_bytes_to_use=8 * 4096, directory=str(host))
            with pytest.raises(ConfigError) as caught:
                mine.get_manager()
            assert f"after 0.2 s: ranks {1 - rank} of 2 have not signed" in str(caught.value)
            assert "or run on another host" in str(caught.value)
            assert "\n" not in str(caught.value)
        # And where no rank of the manager's host is there at all.
        stray = make_spec(cpu_bytes_to_use=8 * 4096, directory=str(own_shm_directory))
        with pytest.raises(ConfigError, match="a rank on another host cannot share"):
            stray.get_manager()
    for host in hosts:
        host.rmdir()


def test_the_operators_fingerprint_comes_first() -> None:
    from kvtier.vllm.identity import model_fingerprint  # lazy: as above

    hf_config = SimpleNamespace(_commit_hash=None)
    model = SimpleNamespace(model="some/model", hf_config=hf_config, revision="r1")
    vllm_config: Any = SimpleNamespace(model_config=model)
    assert model_fingerprint(vllm_config, "mine") == "operator:mine"
    assert model_fingerprint(vllm_config, None) == "revision:r1"


@pytest.mark.fault("U06")
def test_every_override_has_the_signature_of_the_running_vllm() -> None:
    # lazy: as above
    from vllm.v1.kv_offload import base

    from kvtier.vllm.manager import KVTierManager
    from kvtier.vllm.spec import KVTierOffloadingSpec
    from kvtier.vllm.worker import TransferWorker

    seen = 0
    for ours, theirs in (
        (KVTierManager, base.OffloadingManager),
        (TransferWorker, base.OffloadingWorker),
        (KVTierOffloadingSpec, base.OffloadingSpec),
    ):
        for name, method in vars(theirs).items():
            if name.startswith("_") or not callable(getattr(theirs, name)):
                continue
            mine = getattr(ours, name)
            wanted = list(inspect.signature(getattr(theirs, name)).parameters.values())
            got = list(inspect.signature(mine).parameters.values())
            assert [(p.name, p.kind) for p in got] == [(p.name, p.kind) for p in wanted], name
            seen += mine is not method
    assert seen >= 20
    # What vLLM's manager may be asked and kvtier does not answer itself: nothing.
    left = {
        name
        for name, method in vars(base.OffloadingManager).items()
        if callable(method) and not name.startswith("_") and getattr(KVTierManager, name) is method
    }
    assert left == set()


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("0.32.0", True),
        ("0.32.3+cpu", True),
        ("0.33.0", False),
        ("0.31.9", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_another_vllm_is_refused_with_the_range(version: str, good: bool) -> None:
    from kvtier.vllm import check_version  # lazy: as above

    if good:
        check_version(version)
        return
    with pytest.raises(ConfigError, match=r"vllm>=0\.32,<0\.33") as caught:
        check_version(version)
    assert version in str(caught.value)


def test_the_plugin_makes_the_name_enough() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # lazy: as above

    import kvtier.vllm
    from kvtier.vllm.spec import KVTierOffloadingSpec

    with pytest.raises(ValueError, match="Unsupported spec type"):
        OffloadingSpecFactory.get_spec_cls({"spec_name": "KVTierOffloadingSpec"})
    try:
        kvtier.vllm.register()
        kvtier.vllm.register()  # vLLM may load its plugins twice
        found = OffloadingSpecFactory.get_spec_cls({"spec_name": "KVTierOffloadingSpec"})
        assert found is KVTierOffloadingSpec
    finally:
        OffloadingSpecFactory._registry.pop("KVTierOffloadingSpec", None)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"kvtier": "kvtier.vllm:register"}


PUBLIC_EXAMPLES: dict[str, dict[str, Any]] = {
    "host": {"block_size": 64, "cpu_bytes_to_use": 1000000000},
    "fs": {
        "cpu_bytes_to_use": 10737418240,
        "block_size": 16,
        "eviction_policy": "lru",
        "secondary_tiers": [
            {
                "type": "fs",
                "root_dir": "/mnt/kv_cache",
                "n_read_threads": 32,
                "n_write_threads": 16,
            }
        ],
    },
    "example": {
        "cpu_bytes_to_use": 10737418240,
        "block_size": 16,
        "eviction_policy": "lru",
        "secondary_tiers": [{"type": "example", "custom_param": 67}],
    },
    "p2p": {
        "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "p2p", "host": "10.0.0.7", "port": 5710}],
    },
    "timeout": {
        "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "p2p", "unbound_store_timeout_s": 180}],
    },
    "policy": {
        "cpu_bytes_to_use": 10737418240,
        "eviction_policy": "MyCachePolicy",
        "cache_policy_module_path": "my_package.my_module",
    },
}
"""Of vLLM's guide to offloading and of its ``TieringOffloadingSpec``, without the spec's name."""


@pytest.mark.parametrize("name", PUBLIC_EXAMPLES)
def test_the_public_examples_parse(name: str, caplog: pytest.LogCaptureFixture) -> None:
    extra = PUBLIC_EXAMPLES[name]
    settings = make_spec(**extra).settings
    assert settings.capacity_bytes == extra["cpu_bytes_to_use"]
    tiers = extra.get("secondary_tiers", [])
    assert [tier.type for tier in settings.tiers] == [tier["type"] for tier in tiers]
    assert settings.isolation == "process"
    if name == "fs":
        options = {"root_dir": "/mnt/kv_cache", "read_threads": 32, "write_threads": 16}
        assert settings.tiers[0].options == options
    warned = [one for one in caplog.messages if "is passed over" in one]
    assert len(warned) == (name in ("example", "policy", "timeout"))


def shown_commands() -> list[Any]:
    """Values of ``--kv-transfer-config`` in README and pages, and of the program in vllm.md."""
    found = []
    made: list[Any] = []
    for page in ("README.md", "docs/vllm.md", "docs/configuration.md"):
        text = (ROOT / page).read_text()
        for words in re.findall(r"--kv-transfer-config '(.*?)'", text, re.S):
            found.append(pytest.param(json.loads(words), id=f"{page}-{len(found)}"))
        for program in re.findall(r"```python\nfrom vllm import LLM\n(.*?)```", text, re.S):
            exec(program, {"LLM": lambda *args, **options: made.append(options)})
            found.append(pytest.param(made[-1]["kv_transfer_config"], id=f"{page}-{len(found)}"))
    assert len(found) == 4
    return found


@pytest.mark.parametrize("shown", shown_commands())
@pytest.mark.usefixtures("in_process")
def test_what_the_pages_show_is_taken_as_it_stands(
    shown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import KVTransferConfig  # lazy: as above

    config = KVTransferConfig(**shown)
    assert config.is_kv_producer
    assert config.is_kv_consumer
    assert config.kv_load_failure_policy == "recompute"
    settings = make_spec(**config.kv_connector_extra_config).settings
    assert settings.capacity_bytes == 100 << 30
    assert [tier.type for tier in settings.tiers] in ([], ["fs"])
    assert caplog.messages == []


def test_every_key_of_the_installed_vllm_is_known() -> None:
    import vllm  # lazy: as above

    root = Path(vllm.__file__).parent
    places = [
        *(root / "v1/kv_offload").glob("*.py"),
        *(root / "v1/kv_offload/cpu").glob("*.py"),
        *(root / "v1/kv_offload/tiering").glob("*.py"),
        *(root / "distributed/kv_transfer/kv_connector/v1/offloading").glob("*.py"),
    ]
    asked = re.compile(r'extra_config\.get\(\s*"(\w+)"')
    keys = {key for place in places for key in asked.findall(place.read_text())}
    assert {"cpu_bytes_to_use", "store_threshold", "backpressure", "canonical_layout"} < keys
    known = {*VLLM_KEYS, *VLLM_NAMES, *VLLM_WITHOUT_MEANING, *VLLMConfig.__struct_fields__}
    assert keys - known == {"backpressure"}  # the default of all tiers


def test_a_file_and_the_json_add_up_and_may_not_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.yaml"
    path.write_text("capacity_bytes: 1GiB\ntiers:\n- {type: fs, root_dir: /mnt/kv}\n")
    settings = make_spec(kvtier_config=str(path), eviction_policy="arc").settings
    assert settings.capacity_bytes == 1 << 30
    assert settings.policy == "arc"
    assert settings.tiers[0].options == {"root_dir": "/mnt/kv"}
    with pytest.raises(ConfigError, match="is the same as capacity_bytes, which is set too"):
        make_spec(kvtier_config=str(path), cpu_bytes_to_use=1 << 30)


def test_metric_definitions_are_those_of_the_configured_tiers() -> None:
    from kvtier.vllm.spec import KVTierOffloadingSpec  # lazy: as above

    plain = KVTierOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1 << 30})
    tiers = [{"type": "fs", "root_dir": "/mnt/kv"}]
    more = KVTierOffloadingSpec.build_metric_definitions(
        {"cpu_bytes_to_use": 1 << 30, "secondary_tiers": tiers}
    )
    assert "kvtier_host_fill_ratio" in plain
    assert set(plain) < set(more)
    assert all(name.startswith("kvtier_fs_") for name in set(more) - set(plain))


@pytest.mark.usefixtures("in_process")
def test_the_tensors_of_a_second_engine_do_not_replace_those_of_the_first() -> None:
    """vLLM has one connector for a whole process: with its engine core in the program's own
    process, a second engine gives its tensors to the connector of the first, which then read and
    wrote the wrong ones."""
    # lazy: vLLM takes seconds, and only these tests need it.
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tests.vllm.ranks import ranks

    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    with ranks({"a": spec}) as made:
        made.wipe(1)
        key = made.key(0, 1)
        made.store([key], [[1]])
        (connector,) = made._connectors
        theirs = {name: torch.zeros_like(cache) for name, cache in made.caches[0].items()}
        with (
            set_current_vllm_config(made.configs[0]),
            pytest.raises(ConfigError, match="one connector for a whole process"),
        ):
            connector.register_kv_caches(theirs)
        made.wipe(0)
        made.load([key], [[2]])
        assert (made.block(0, "a", 2) == 1).all()
        assert not any(cache.any() for cache in theirs.values())
