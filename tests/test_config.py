# SPDX-License-Identifier: Apache-2.0
"""Configuration: what is accepted, and how the rest is refused: path, value and advice."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtier import config as cfg
from kvtier.config import Config, TierConfig, describe, load, parse, parse_extra_config
from kvtier.errors import ConfigError
from kvtier.options import (
    UNITS,
    Bytes,
    Count,
    Secret,
    decode_options,
    expand,
    format_bytes,
    nearest,
    parse_bytes,
)
from kvtier.tiers.fs.options import FsOptions
from kvtier.tiers.obj.options import ObjOptions

MINIMAL = {"capacity_bytes": "1GiB"}
FULL: dict[str, Any] = {
    **MINIMAL,
    "tiers": [{"type": "fs", "root_dir": "/srv/kv"}, {"type": "obj", "bucket": "kv"}],
    "breaker": {},
    "metrics": {},
    "events": {},
}


class Options(msgspec.Struct, frozen=True):
    """Stands for a tier's own options."""

    root_dir: str
    capacity_bytes: Bytes | None = None
    block_bytes: Bytes = 4096
    access_key: Secret | None = None
    threads: Count = 4
    mode: Literal["fast", "safe"] = "fast"
    direct: bool = False
    ratio: float = 0.5
    peers: tuple[str, ...] = ()
    buckets: dict[str, Bytes] = {}

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and self.capacity_bytes < self.block_bytes:
            raise ValueError("capacity_bytes is less than one block")


def refused(data: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (1, 1),
        (2**63 - 1, 2**63 - 1),
        (1e9, 10**9),
        ("100GiB", 100 * 2**30),
        ("5GB", 5 * 10**9),
        ("512 KiB", 512 * 1024),
        ("1.5GiB", 3 * 2**29),
        ("7", 7),
        ("7B", 7),
        (" 2 kB ", 2000),
    ],
)
def test_sizes(text: object, number: int) -> None:
    assert parse_bytes(text, "x") == number
    assert parse({"capacity_bytes": text}).capacity_bytes == number


@pytest.mark.fault("U02")
@pytest.mark.parametrize(
    "value",
    [0, -1, "0", "0GiB", "-5GB", "", " ", "GiB", "5 giraffes", "5Gb", "5G", "5gib", "1.0000001KiB",
     "1e9", "0x10", "٣GiB", "9" * 40, "9999999PiB", 2**63, 10**400, 1.5, math.nan, math.inf,
     -math.inf, True, None, [], {}, b"5"],
)  # fmt: skip
def test_sizes_refused(value: object) -> None:
    for data, path in (
        ({"capacity_bytes": value}, "capacity_bytes"),
        ({**MINIMAL, "tiers": [{"type": "a"}, {"type": "fs", "max_inflight_bytes": value}]},
         "tiers[1].max_inflight_bytes"),
    ):  # fmt: skip
        message = refused(data)
        assert message.startswith(f"{path}: ")
        assert "GiB" in message or "did you mean 5GB?" in message, "says what to type"


def test_ambiguous_units_get_the_right_hint() -> None:
    assert "did you mean 5GiB?" in refused({"capacity_bytes": "5G"})
    assert "did you mean 5GiB?" in refused({"capacity_bytes": "5gib"})
    assert "did you mean 5GB?" in refused({"capacity_bytes": "5Gb"})


@given(st.integers(1, 2**63 - 1))
def test_format_bytes_is_read_back(number: int) -> None:
    assert parse_bytes(format_bytes(number), "x") == number


@given(st.integers(1, 8000), st.sampled_from(sorted(UNITS)))
def test_units_multiply(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}", "x") == number * UNITS[unit]


def structs_with_paths() -> list[tuple[str, type[msgspec.Struct], list[str | int]]]:
    return [
        ("", Config, []),
        ("tiers[0]", TierConfig, ["tiers", 0]),
        ("breaker", cfg.BreakerConfig, ["breaker"]),
        ("metrics", cfg.MetricsConfig, ["metrics"]),
        ("events", cfg.EventsConfig, ["events"]),
    ]


def every_option() -> list[tuple[str, str, list[str | int]]]:
    return [
        (path, name, steps)
        for path, struct, steps in structs_with_paths()
        for name in struct.__struct_fields__
        if not (struct is TierConfig and name == "options")
    ]


def with_key(steps: list[str | int], key: str, value: object) -> Any:
    data = json.loads(json.dumps(FULL))
    place = data
    for step in steps:
        place = place[step]
    place[key] = value
    return data


def typos(name: str) -> list[str]:
    middle = len(name) // 2
    return [
        name[:middle] + name[middle + 1 :],
        name[:middle] + "x" + name[middle:],
        name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :],
        name.upper(),
        name.replace("_", "-") + ("s" if "_" not in name else ""),
    ]


def test_the_loop_over_options_sees_all_of_them() -> None:
    names = {(path, name) for path, name, _ in every_option()}
    assert len(names) > 35
    assert ("breaker", "open_seconds") in names


@pytest.mark.fault("U02")
@pytest.mark.parametrize(("path", "name", "steps"), every_option())
def test_every_misspelt_option_is_refused_with_its_name(
    path: str, name: str, steps: list[str | int]
) -> None:
    for typo in typos(name):
        if typo == name:
            continue
        data = with_key(steps, typo, 1)
        if path == "tiers[0]":
            # The tier's own struct finds it; the common keys are offered too.
            tier = parse(data).tiers[0]
            with pytest.raises(ConfigError) as caught:
                decode_options(Options, tier.options, path, also_known=cfg.COMMON_KEYS)
            message = str(caught.value)
        else:
            message = refused(data)
        where = f"{path}.{typo}" if path else typo
        assert message.startswith(f"{where}: unknown key"), message
        assert f"did you mean {name!r}?" in message


@pytest.mark.fault("U02")
@pytest.mark.parametrize(
    ("path", "name", "steps"), [option for option in every_option() if option[1] != "tiers"]
)
@pytest.mark.parametrize("value", ["", "  ", math.nan, -1, object()], ids=repr)
def test_every_option_refuses_wrong_values(
    path: str, name: str, steps: list[str | int], value: object
) -> None:
    data = with_key([], "breaker", {})
    place = data
    for step in steps:
        place = place[step]
    place[name] = value
    message = refused(data)
    assert (f"{path}.{name}" if path else name) in message
    assert any(word in message for word in ("is not", "is empty", "keys are")), message


@pytest.mark.parametrize(("path", "name", "steps"), every_option())
def test_every_option_takes_its_default(path: str, name: str, steps: list[str | int]) -> None:
    default = parse(FULL)
    plain = msgspec.to_builtins(default)
    place = plain
    for step in steps:
        place = place[step]
    value = place[name]
    if name == "tiers":
        value = FULL["tiers"]
    assert parse(with_key(steps, name, value)) == default


def test_values_out_of_range_say_what_fits() -> None:
    assert "at least 1" in refused({**MINIMAL, "breaker": {"failures": 0}})
    assert "above 0" in refused({**MINIMAL, "lookup_timeout_seconds": 0})
    assert "at most 65535" in refused({**MINIMAL, "metrics": {"port": 70000}})
    assert "did you mean arc?" in refused({**MINIMAL, "policy": "acr"})
    assert "true or false" in _option_error({"root_dir": "/a", "direct": "yes"})
    assert "breaker: 5 is not a mapping" in refused({**MINIMAL, "breaker": 5})
    assert "tiers: is a list" in refused({**MINIMAL, "tiers": {"type": "fs"}})
    assert "tiers[0]: is a mapping" in refused({**MINIMAL, "tiers": ["fs"]})
    assert "tiers[0].type: is missing" in refused({**MINIMAL, "tiers": [{"root_dir": "/x"}]})
    assert "capacity_bytes: is missing" in refused({})
    assert "mapping" in refused([1])
    assert "keys are text" in refused({**MINIMAL, "namespace": {1: "a"}})
    assert "keys are text" in refused({**MINIMAL, 1: 2})
    assert "keys are text" in refused({**MINIMAL, "tiers": [{"type": "fs", 1: 2}]})


@pytest.mark.fault("U02")
@pytest.mark.parametrize("bad", ["/a\0b", "/\udc80"], ids=repr)
def test_text_that_no_file_or_message_can_have_is_refused(bad: str) -> None:
    """It failed later: in the tier's self-test, which kept trying, or in a message to a process."""
    for data in ({"directory": bad}, {"namespace": {"a": bad}}, {"events": {"topic": bad}}):
        assert "has a character that no file or message can" in refused({**MINIMAL, **data})
    assert "no file or message" in _option_error({"root_dir": bad})


def test_a_home_directory_is_written_out() -> None:
    """Nobody expands it: a directory of that very name was made."""
    with pytest.raises(ConfigError, match=r"root_dir: '~/kv': ~ is not expanded; write the whole"):
        decode_options(FsOptions, {"root_dir": "~/kv"}, "tiers[0]")
    assert "directory: '~': ~ is not expanded" in refused({**MINIMAL, "directory": "~"})
    assert parse({**MINIMAL, "model_fingerprint": "~1"}).model_fingerprint == "~1"


def _option_error(data: object) -> str:
    with pytest.raises(ConfigError) as caught:
        decode_options(Options, data, "tiers[3]")
    return str(caught.value)


def test_tier_options_are_decoded_by_the_tier() -> None:
    options = decode_options(
        Options,
        {
            "root_dir": "/a",
            "capacity_bytes": "1TiB",
            "peers": ["a:1", "b:2"],
            "buckets": {"hot": "5GB"},
        },
        "tiers[0]",
    )
    assert options == Options("/a", 2**40, peers=("a:1", "b:2"), buckets={"hot": 5 * 10**9})


def test_tier_option_errors() -> None:
    assert "tiers[3].root_dir: is missing" in _option_error({})
    assert "tiers[3].buckets.hot: '5 gb'" in _option_error(
        {"root_dir": "/a", "buckets": {"hot": "5 gb"}}
    )
    assert "tiers[3].peers[1]: 5 is not text" in _option_error(
        {"root_dir": "/a", "peers": ["a", 5]}
    )
    assert "tiers[3].peers: 'a' is not a list" in _option_error({"root_dir": "/a", "peers": "a"})
    assert "tiers[3]: capacity_bytes is less than one block" in _option_error(
        {"root_dir": "/a", "capacity_bytes": 1}
    )
    assert "expanded in secrets only" in _option_error({"root_dir": "${HOME}/kv"})
    assert "tiers[3].threads: True is not a whole number" in _option_error(
        {"root_dir": "/a", "threads": True}
    )


def test_names_are_made_unique_and_never_twice() -> None:
    tiers = parse(
        {**MINIMAL, "tiers": [{"type": "fs"}, {"type": "fs", "name": "fs-2"}, {"type": "fs"},
                              {"type": "host"}]}
    ).tiers  # fmt: skip
    assert [tier.name for tier in tiers] == ["fs", "fs-2", "fs-3", "host-2"]
    message = refused(
        {**MINIMAL, "tiers": [{"type": "a", "name": "x"}, {"type": "b", "name": "x"}]}
    )
    assert "tiers[1].name: 'x' is the name of tiers[0] already" in message
    assert "name of host" in refused({**MINIMAL, "tiers": [{"type": "a", "name": "host"}]})
    assert "matching" in refused({**MINIMAL, "tiers": [{"type": "a", "name": "a/b"}]})


def test_secrets_are_expanded_where_they_are_used_and_never_shown() -> None:
    data = {"root_dir": "/a", "access_key": "${KEY_OF_TEST}"}
    environ = {"KEY_OF_TEST": "hunter2"}
    options = decode_options(Options, data, "t", environ=environ)
    assert options.access_key is not None
    assert options.access_key.reveal() == "hunter2"
    for text in (repr(options), str(options.access_key), f"{options.access_key}", f"{options}"):
        assert "hunter2" not in text
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(options)
    with pytest.raises(TypeError):
        options.access_key.__reduce__()


@pytest.mark.fault("U02")
def test_unset_variables_are_named() -> None:
    with pytest.raises(ConfigError, match=r"t\.access_key: .*KEY_OF_TEST is not set"):
        decode_options(Options, {"root_dir": "/a", "access_key": "${KEY_OF_TEST}"}, "t", environ={})
    with pytest.raises(ConfigError, match="KEY_OF_TEST is not set"):
        expand("${KEY_OF_TEST}", "t", {"KEY_OF_TEST": ""})
    assert expand("a${X:-b}c", "t", {}) == "abc"
    assert expand("a${X:-b}c", "t", {"X": "1"}) == "a1c"
    assert expand("$X", "t", {}) == "$X"
    for text in ("${X", "${1X}", "${}", "a${X Y}"):
        with pytest.raises(ConfigError, match=r"\$\{NAME"):
            expand(text, "t", {"X": "1"})


@pytest.mark.parametrize("value", [5, "", None, ["hunter2"], {"a": "hunter2"}])
def test_a_wrong_secret_is_not_shown(value: object) -> None:
    class Needs(msgspec.Struct, frozen=True):
        access_key: Secret

    with pytest.raises(ConfigError) as caught:
        decode_options(Needs, {"access_key": value}, "t")
    assert "hunter2" not in str(caught.value)
    assert "${VARIABLE}" in str(caught.value)


def test_literal_secrets_in_the_json_give_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "cpu_bytes_to_use": 2**30,
        "secondary_tiers": [
            {"type": "obj", "secret_key": "hunter2", "auth": {"session_token": "hunter3"}},
            {"type": "p2p", "token": "${P2P_TOKEN}", "min_prefix_tokens": 4},
        ],
    }
    with caplog.at_level(logging.WARNING):
        parse_extra_config(extra)
    (record,) = caplog.records
    message = record.getMessage()
    assert "tiers[0].secret_key" in message
    assert "tiers[0].auth.session_token" in message
    assert "tiers[1]" not in message
    assert "hunter" not in message


def test_secrets_in_a_file_give_no_warning_that_vllm_logs_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: [{type: obj, bucket: kv-cache, access_key: a, secret_key: hunter2}]")
    parse_extra_config({"capacity_bytes": 1, "kvtier_config": str(file)})
    assert caplog.text == ""


@pytest.mark.parametrize("nested", [True, False])
def test_an_object_store_as_vllm_writes_it(nested: bool) -> None:
    """An empty text is a default there, and http what an endpoint without scheme speaks."""
    keys = {
        "bucket": "kvcache",
        "endpoint_override": "minio:9000",
        "access_key": "${KEY}",
        "secret_key": "${SECRET}",
        "session_token": "",
        "region": "",
        "ca_bundle": "",
    }
    tier = {"type": "obj", "io_threads": 16, **({"store_config": keys} if nested else keys)}
    config = parse_extra_config({"capacity_bytes": 1, "secondary_tiers": [tier]})
    options = decode_options(
        ObjOptions, config.tiers[0].options, "t", environ={"KEY": "k", "SECRET": "s"}
    )
    assert options == ObjOptions(
        bucket="kvcache",
        endpoint_override="minio:9000",
        scheme="http",
        access_key=Secret("k"),
        secret_key=Secret("s"),
        concurrency=16,
    )
    assert options.endpoint_url == "http://minio:9000"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bucket": "a"}, "store_config.bucket: stands beside store_config too"),
        ({"store_config": "kv"}, "store_config: is a mapping of keys to values, got str"),
        ({"concurrency": 3, "io_threads": 4}, "io_threads: is the same as concurrency"),
    ],
)
def test_an_object_store_that_says_two_things(more: dict[str, Any], message: str) -> None:
    tier = {"type": "obj", "store_config": {"bucket": "kvcache"}, **more}
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_extra_config({"capacity_bytes": 1, "secondary_tiers": [tier]})


def test_describe_is_the_effective_configuration_without_secrets(tmp_path: Path) -> None:
    config = parse(
        {**FULL, "tiers": [{"type": "obj", "bucket": "b", "secret_key": "hunter2",
                            "nested": [{"password": "hunter3"}], "token": "${TOKEN}"}]}
    )  # fmt: skip
    text = describe(config)
    assert "hunter" not in text
    assert "${TOKEN}" in text
    data = yaml.safe_load(text)
    assert data["capacity_bytes"] == "1GiB"
    assert data["lookup_timeout_seconds"] == 1.0
    plain = parse({**FULL, "verify_host": "off", "namespace": {"site": "a"}})
    file = tmp_path / "effective.yaml"
    file.write_text(describe(plain))
    assert load(file) == plain


def test_vllm_names_keep_their_meaning(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_extra_config(
        {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm.spec",
            "block_size": 64,
            "offload_prompt_only": False,
            "cpu_bytes_to_use": 10737418240,
            "eviction_policy": "arc",
            "backpressure": "drop",
            "secondary_tiers": [
                {"type": "fs", "root_dir": "/x"},
                {"type": "Mine", "module_path": "my.module", "backpressure": "defer", "custom": 67},
            ],
        }
    )
    assert config.capacity_bytes == 10 * 2**30
    assert config.policy == "arc"
    assert config.isolation == "process"
    assert config.tiers[0].options == {"root_dir": "/x"}
    assert config.tiers[0].backpressure == "drop"
    assert config.tiers[1].backpressure == "defer"
    assert config.tiers[1].options == {"custom": 67}
    assert parse_extra_config({"capacity_bytes": 1, "isolation": "thread"}).isolation == "thread"
    assert caplog.records == []


DETECTOR = {"backpressure_cls": "EMABackpressureDetector"}


@pytest.mark.parametrize(
    ("top", "inside", "effective"),
    [
        ({"backpressure": DETECTOR}, {}, "defer"),
        ({"backpressure": DETECTOR}, {"backpressure": "drop"}, "drop"),
        ({"backpressure": DETECTOR}, {"backpressure": DETECTOR}, "defer"),
        ({}, {"backpressure": DETECTOR}, "defer"),
    ],
)
def test_vllm_detectors_are_left_out_with_one_warning(
    top: dict[str, Any],
    inside: dict[str, Any],
    effective: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers = [{"type": "a", **inside}, {"type": "b", **inside}]
    config = parse_extra_config({"capacity_bytes": 1, "secondary_tiers": tiers, **top})
    assert [tier.backpressure for tier in config.tiers] == [effective] * 2
    (record,) = caplog.records
    assert "leaves vLLM's detector out; write defer or drop" in record.getMessage()


@pytest.mark.parametrize(
    ("extra", "policy", "words"),
    [
        ({"cache_policy_module_path": "mine.policies"}, "lru", "eviction policies of its own"),
        (
            {"cache_policy_module_path": "mine.policies", "eviction_policy": "MyPolicy"},
            "lru",
            "eviction policies of its own",
        ),
        (
            {"cache_policy_module_path": "mine.policies", "eviction_policy": "arc"},
            "arc",
            "eviction policies of its own",
        ),
    ],
)
def test_what_means_nothing_here_is_passed_over_with_the_reason(
    extra: dict[str, Any], policy: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_extra_config({"cpu_bytes_to_use": 1} | extra).policy == policy
    (record,) = caplog.records
    assert f"{next(iter(extra))} is passed over: " in record.getMessage()
    assert words in record.getMessage()


def test_a_threshold_at_the_top_is_that_of_host_memory_and_of_no_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [{"type": "a"}, {"type": "b", "store_threshold": 2}]
    extra = {"cpu_bytes_to_use": 1, "store_threshold": 3, "secondary_tiers": tiers}
    config = parse_extra_config(extra)
    assert [tier.store_threshold for tier in config.tiers] == [1, 2]
    assert (config.store_threshold, config.max_tracker_size) == (3, 64_000)
    file = tmp_path / "kvtier.yaml"
    file.write_text("capacity_bytes: 1\nstore_threshold: 2\nmax_tracker_size: 9\n")
    config = parse_extra_config({"kvtier_config": str(file)})
    assert (config.store_threshold, config.max_tracker_size) == (2, 9)
    assert caplog.records == []
    # Whoever decides what is stored has no use for them.
    assert "unknown key 'store_threshold'" in refused({**MINIMAL, "store_threshold": 2})


def test_a_detector_in_a_file_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"capacity_bytes": 1, "tiers": [{"type": "a", "backpressure": DETECTOR}]})
    assert "tiers[0].backpressure: " in str(caught.value)
    assert "defer" in str(caught.value)
    assert "drop" in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"cpu_bytes_to_use": 1, "capacity_bytes": 1}, "is the same as"),
        ({"cpu_bytes_to_use": "5G"}, "extra_config: cpu_bytes_to_use: '5G'"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": ""}]}, ": secondary_tiers[0].type"),
        ({"cpu_bytes_to_use": 1, "store_threshold": -1}, "store_threshold: -1 is not a whole"),
        ({"cpu_bytes_to_use": 1, "store_threshold": True}, "store_threshold: True is not a whole"),
        ({"cpu_bytes_to_use": 1, "max_tracker_size": 0}, "max_tracker_size: 0 is not a whole"),
        ({"cpu_byte_to_use": 1}, "unknown key 'cpu_byte_to_use'"),
        ({}, "extra_config: cpu_bytes_to_use: is missing"),
    ],
)
def test_vllm_json_errors(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config(extra)
    assert words in str(caught.value)


def test_yaml_is_read_as_people_mean_it(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "capacity_bytes: 1e9\nverify_host: off\nnamespace: {site: on, rack: '010'}\n"
        "metrics: {port: 9100}\n"
    )
    config = load(file)
    assert config.capacity_bytes == 10**9
    assert config.verify_host == "off"
    assert config.namespace == {"site": "on", "rack": "010"}
    assert yaml.safe_load("a: off") == {"a": False}, "PyYAML's own loader is untouched"
    file.write_text('{"capacity_bytes": "1GiB", "tiers": []}')
    assert load(file) == parse(MINIMAL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("capacity_bytes: 1GiB\npolicy: [lru\n", "kvtier.yaml:3: "),
        ("capacity_bytes: 1GiB\n\tpolicy: lru\n", "kvtier.yaml:2: "),
        ("capacity_bytes: 1\npolicy: lru\ncapacity_bytes: 2\n", "kvtier.yaml:3: the key 'capac"),
        ("capacity_bytes: !!python/object:os.system 1\n", "kvtier.yaml:1: "),
        ("", "is empty"),
        ("- 1\n", "mapping"),
        ("capacity_bytes: 1GiB\npolcy: lru\n", "did you mean 'policy'?"),
        ("capacity_bytes: 010\n1: 2\n", "keys are text"),
        ("capacity_bytes: 1:30\n", "capacity_bytes: '1:30' is not a size"),
        ("a: " + "[" * 5000, "is no YAML"),
        ("a: " + "9" * 5000, "is no YAML"),
        ("a: \x00", "is no YAML"),
    ],
)
def test_yaml_errors_have_the_file_and_the_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: there is no such file"):
        load(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="no file can have this name"):
            load(name)
    (tmp_path / "latin").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(tmp_path / "latin")


@pytest.mark.fault("U03")
def test_capacities_around_one_chunk() -> None:
    from kvtier.types import GroupGeometry, make_geometry

    group = GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=5000)
    for capacity in (1, 8191):
        config = parse({"capacity_bytes": capacity})
        with pytest.raises(ValueError, match="8192"):
            make_geometry([group], config.capacity_bytes)
    assert make_geometry([group], parse({"capacity_bytes": 8192}).capacity_bytes).num_slots == 1
    config = parse({"capacity_bytes": 10**18})
    with pytest.raises(ValueError, match="give at most 17592186036224 bytes"):
        make_geometry([group], config.capacity_bytes)
    assert make_geometry([group], 17592186036224).num_slots == 2**31 - 1


def test_derived_values() -> None:
    config = parse({"capacity_bytes": 1000})
    assert config.max_hold_bytes == 500
    assert parse({"capacity_bytes": 1000, "hold_bytes": 7}).max_hold_bytes == 7
    tier = TierConfig(type="fs", timeout_seconds=9, load_timeout_seconds=2)
    assert (tier.load_seconds, tier.store_seconds) == (2, 9)
    assert nearest("zzz", ["policy"]) is None


@pytest.mark.parametrize("tiers", ["secondary_tiers", "tiers"])
def test_vllm_names_of_the_file_tier(tiers: str) -> None:
    extra = {"type": "fs", "root_dir": "/d", "n_read_threads": 3, "n_write_threads": 4}
    (tier,) = parse_extra_config({"capacity_bytes": "1GiB", tiers: [extra]}).tiers
    assert tier.options == {"root_dir": "/d", "read_threads": 3, "write_threads": 4}


@pytest.mark.parametrize("swapped", [False, True])
def test_vllm_name_beside_the_own_one_is_an_error(swapped: bool) -> None:
    names = ("read_threads", "n_read_threads")
    both = dict.fromkeys(names[::-1] if swapped else names, 3)
    extra = {"capacity_bytes": "1GiB", "secondary_tiers": [{"type": "fs", **both}]}
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.n_read_threads: .*read_threads"):
        parse_extra_config(extra)


def test_vllm_names_stay_with_other_types() -> None:
    extra = {"type": "other", "n_read_threads": 3}
    (tier,) = parse_extra_config({"capacity_bytes": "1GiB", "tiers": [extra]}).tiers
    assert tier.options == {"n_read_threads": 3}


def test_what_vllms_peer_tier_has_and_means_nothing_here_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = {"backends": ["UCX"], "num_threads": 4, "unbound_store_timeout_s": 180}
    tier = {"type": "p2p", "host": "10.0.0.7", "port": 5711, **theirs}
    (found,) = parse_extra_config({"cpu_bytes_to_use": 1, "secondary_tiers": [tier]}).tiers
    assert found.options == {"host": "10.0.0.7", "port": 5711}
    words = [record.getMessage().partition(" is passed over: ") for record in caplog.records]
    assert [first for first, _, _ in words] == [f"secondary_tiers[0].{key}" for key in theirs]
    assert all(why for _, _, why in words)


def test_vllms_variables_say_where_a_peer_tier_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**keys: Any) -> dict[str, Any]:
        tiers = [{"type": "p2p", **keys}, {"type": "fs", "root_dir": "/d"}]
        found = parse_extra_config({"cpu_bytes_to_use": 1, "secondary_tiers": tiers}).tiers
        assert found[1].options == {"root_dir": "/d"}
        return found[0].options

    monkeypatch.delenv("VLLM_P2P_SIDE_CHANNEL_HOST", raising=False)
    monkeypatch.delenv("VLLM_P2P_SIDE_CHANNEL_PORT", raising=False)
    assert options() == {}
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "fd00::7")
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_PORT", "5720")
    assert options() == {"host": "fd00::7", "port": 5720}
    assert options(host="10.0.0.7") == {"host": "10.0.0.7", "port": 5720}
    assert options(port=5711) == {"host": "fd00::7", "port": 5711}
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_PORT", "70000")
    with pytest.raises(ConfigError, match="VLLM_P2P_SIDE_CHANNEL_PORT: '70000' is no port"):
        options()
    assert options(port=5711)["port"] == 5711
    # A file that says where means it.
    (tier,) = parse({"capacity_bytes": 1, "tiers": [{"type": "p2p"}]}).tiers
    assert tier.options == {}
