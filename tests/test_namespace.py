# SPDX-License-Identifier: Apache-2.0
"""Namespace: what differs is kept apart, what is equal is found again, by any process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import namespace as ns
from kvtier.errors import ConfigError
from kvtier.types import Geometry, GroupGeometry

GEOMETRY = Geometry(
    groups=(
        GroupGeometry(block_tokens=16, blocks_per_chunk=4, block_bytes=8192),
        GroupGeometry(block_tokens=16, blocks_per_chunk=4, block_bytes=4096, window_chunks=2),
    ),
    num_slots=100,
    slot_bytes=32768,
)


def fields(**changes: str) -> dict[str, str]:
    base = {
        "model": "org/model-8B",
        "fingerprint": "abc",
        "kv_dtype": "bfloat16",
        "tile_format": "token-major",
        "hash_algorithm": "sha256",
    }
    return ns.library_namespace(GEOMETRY, **{**base, **changes})  # type: ignore[arg-type]


def test_the_digest_is_what_the_page_says() -> None:
    hashed = hashlib.sha256(b"kvtier-namespace-1")
    for text in (b"a", "é".encode(), b"b", b""):
        hashed.update(len(text).to_bytes(4, "big") + text)
    assert ns.namespace_digest({"b": "", "a": "é"}) == hashed.digest()


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
namespaces = st.dictionaries(text, text, max_size=4)


@given(namespaces, namespaces)
def test_digests_are_equal_only_for_equal_fields(
    one: dict[str, str], other: dict[str, str]
) -> None:
    def digest(fields: dict[str, str]) -> bytes:
        return ns.namespace_digest({f"n{name}": value for name, value in fields.items()})

    assert (digest(one) == digest(other)) == (one == other)
    assert digest(one) == digest(dict(reversed(one.items())))


def test_lengths_keep_names_and_values_apart() -> None:
    assert ns.namespace_digest({"ab": "c"}) != ns.namespace_digest({"a": "bc"})
    assert ns.namespace_digest({"a": "b", "c": "d"}) != ns.namespace_digest({"a": "bcd"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("tile_format", "head-major", marks=pytest.mark.fault("C05")),
        pytest.param("kv_dtype", "float16", marks=pytest.mark.fault("C06")),
        pytest.param("fingerprint", "abd", marks=[pytest.mark.fault("C07"),
                                                  pytest.mark.fault("C10")]),
        pytest.param("kv_dtype", "fp8_e4m3", marks=pytest.mark.fault("C11")),
        pytest.param("hash_seed", "random:engine-1", marks=pytest.mark.fault("U01")),
        ("model", "org/model-9B"),
        ("quantization", "awq"),
        ("rope", "theta=1e6"),
        ("hash_algorithm", "xxhash"),
    ],
)  # fmt: skip
def test_what_differs_is_kept_apart(name: str, value: str) -> None:
    one, other = fields(), fields(**{name: value})
    assert ns.namespace_digest(one) != ns.namespace_digest(other)
    assert ns.directory_name(one) != ns.directory_name(other)
    field = "model_fingerprint" if name == "fingerprint" else name
    assert ns.difference(one, other) == [field]
    assert repr(value) in ns.explain(one, other)


def test_geometry_counts_by_payload_and_not_by_slots() -> None:
    def of(geometry: Geometry) -> bytes:
        return ns.namespace_digest(
            ns.library_namespace(
                geometry, model="m", fingerprint="f", kv_dtype="float16", tile_format="t",
                hash_algorithm="sha256",
            )
        )  # fmt: skip

    first, second = GEOMETRY.groups
    same = Geometry(groups=GEOMETRY.groups, num_slots=7, slot_bytes=65536)
    assert of(same) == of(GEOMETRY)
    for other in (
        (second, first),
        (first,),
        (first, GroupGeometry(16, 4, 4096)),
        (first, GroupGeometry(16, 4, 4096, window_chunks=3)),
        (first, GroupGeometry(16, 2, 8192, window_chunks=2)),
        (first, GroupGeometry(32, 4, 4096, window_chunks=2)),
    ):
        assert of(Geometry(groups=other, num_slots=100, slot_bytes=32768)) != of(GEOMETRY)


@pytest.mark.fault("C06")
@pytest.mark.parametrize("value", ["auto", "AUTO", " auto ", "", "none", "default"])
def test_an_unresolved_dtype_is_refused_everywhere(value: str) -> None:
    for act in (
        lambda: fields(kv_dtype=value),
        lambda: ns.namespace_digest({"kv_dtype": value}),
        lambda: ns.namespace_digest({"cache_dtype": value}),
        lambda: ns.encode_json({"kv_dtype": value}),
    ):
        with pytest.raises(ConfigError, match="dtype"):
            act()


def test_wrong_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="fingerprint: is empty"):
        fields(fingerprint="")
    with pytest.raises(ConfigError, match=r"namespace\.model: is a field"):
        ns.merged(fields(), {"model": "other"})
    with pytest.raises(ConfigError, match=r"namespace\.epoch: is a field"):
        ns.merged(fields(), {"epoch": "1"})
    with pytest.raises(ConfigError, match="is text"):
        ns.namespace_digest({"a": 5})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="no valid text"):
        ns.namespace_digest({"a": "\ud800"})
    assert ns.merged({"a": "1"}, {"site": "x"}) == {"a": "1", "site": "x"}


@pytest.mark.fault("C24")
def test_an_epoch_is_a_namespace_of_its_own() -> None:
    one, two = ns.with_epoch(fields(), ns.new_epoch()), ns.with_epoch(fields(), ns.new_epoch())
    digests = {ns.namespace_digest(each) for each in (fields(), one, two)}
    assert len(digests) == 3
    assert ns.with_epoch(one, None) == fields()
    assert ns.difference(one, fields()) == ["epoch"]


def test_every_field_is_explained() -> None:
    optional = {"max_model_len", "tokens_per_hash"}
    assert set(ns.with_epoch(fields(topology="tp=2"), "x")) == set(ns.FIELDS) - optional


@pytest.mark.fault("C09")
def test_bytes_that_are_not_portable_are_kept_apart_by_topology() -> None:
    one, two, portable = fields(topology="tp=1"), fields(topology="tp=2"), fields()
    assert len({ns.namespace_digest(each) for each in (one, two, portable)}) == 3
    assert ns.difference(one, two) == ["topology"]
    assert ns.difference(one, portable) == ["portable", "topology"]


def test_directory_names_are_safe() -> None:
    for model in ("../../etc/passwd", "a/b c", "", "模型", ".hidden", "x" * 300):
        name = ns.directory_name({"model": model})
        assert "/" not in name
        assert name[0] not in ".-"
        assert len(name) <= 64 + 13
        assert name.endswith("-" + ns.namespace_digest({"model": model}).hex()[:12])


def test_json_is_read_back_and_checked() -> None:
    content = ns.encode_json(fields())
    assert b'"kv_dtype": "bfloat16"' in content
    assert ns.decode_json(content) == fields()
    for damaged, words in (
        (content.replace(b"bfloat16", b"float16"), "digest"),
        (content.replace(b"namespace-1", b"namespace-2"), "format"),
        (content[:-10], "damaged"),
        (b"\xff", "damaged"),
        (b"[]", "damaged"),
    ):
        with pytest.raises(ConfigError, match=words):
            ns.decode_json(damaged)


@pytest.mark.fault("U01")
@pytest.mark.parametrize(
    ("algorithm", "environ", "arguments", "random"),
    [
        ("sha256", {}, [], True),
        ("sha256", {"PYTHONHASHSEED": "random"}, [], False),
        ("builtin", {"PYTHONHASHSEED": "random"}, [], True),
        ("builtin", {"PYTHONHASHSEED": ""}, [], True),
        ("sha256", {"PYTHONHASHSEED": "0"}, [], False),
        ("sha256", {"PYTHONHASHSEED": "0"}, ["-R"], False),
        ("builtin", {"PYTHONHASHSEED": "0"}, [], False),
        ("builtin", {"PYTHONHASHSEED": "0"}, ["-R"], True),
        ("builtin", {"PYTHONHASHSEED": "0"}, ["-bE"], True),
        ("builtin", {"PYTHONHASHSEED": "0"}, ["-Wignore", "x.py", "-R"], False),
        ("builtin", {"PYTHONHASHSEED": "0"}, ["-W", "ignore", "-X", "dev", "-m", "mod"], False),
        ("builtin", {"PYTHONHASHSEED": "0"}, ["-c", "-R"], False),
        ("builtin", {}, [], True),
    ],
)
def test_a_random_hash_seed_is_seen(
    algorithm: str, environ: dict[str, str], arguments: list[str], random: bool
) -> None:
    def seed(instance: str) -> tuple[str, bool]:
        return ns.hash_seed(algorithm, instance, environ=environ, arguments=["python", *arguments])

    assert seed("a")[1] is random
    assert (seed("a")[0] == seed("b")[0]) is not random


@pytest.mark.fault("U01")
def test_a_constant_is_no_random_seed() -> None:
    assert ns.hash_seed("sha256", "a", unset_is_random=False, environ={}) == ("constant", False)
    assert ns.hash_seed("builtin", "a", unset_is_random=False, environ={})[1]


PROBE = """
from kvtier.namespace import hash_seed
print(hash("kvtier"), *hash_seed("builtin", "me"), *hash_seed("sha256", "me"))
"""


@pytest.mark.fault("U01")
@pytest.mark.parametrize("options", [[], ["-R"]])
@pytest.mark.parametrize("seed", ["0", "7", None])
def test_seed_detection_agrees_with_the_interpreter(options: list[str], seed: str | None) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        environ["PYTHONHASHSEED"] = seed
    lines = [
        subprocess.run(
            [sys.executable, *options, "-c", PROBE],
            env=environ, capture_output=True, text=True, check=True, timeout=60,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    hashes_differ = lines[0][0] != lines[1][0]
    assert (lines[0][2] == "True") is hashes_differ
    assert (lines[0][4] == "True") is (seed is None)


def model(root: Path, *, config: bytes = b"{}", weights: bytes = b"w" * 10000) -> Path:
    root.mkdir()
    (root / "config.json").write_bytes(config)
    (root / "model-1.safetensors").write_bytes(weights)
    return root


@pytest.mark.fault("C07")
@pytest.mark.fault("C10")
def test_a_fingerprint_is_of_the_files_and_not_of_their_place(tmp_path: Path) -> None:
    first = ns.model_fingerprint(model(tmp_path / "a"))
    assert ns.model_fingerprint(model(tmp_path / "b")) == first
    (tmp_path / "b" / "README.md").write_text("ignored")
    assert ns.model_fingerprint(tmp_path / "b") == first
    link = tmp_path / "link"
    link.mkdir()
    for file in (tmp_path / "a").iterdir():
        (link / file.name).symlink_to(file)
    assert ns.model_fingerprint(link) == first
    different = [
        ns.model_fingerprint(model(tmp_path / "c", config=b"{ }")),
        ns.model_fingerprint(model(tmp_path / "d", weights=b"w" * 9999 + b"v")),
        ns.model_fingerprint(model(tmp_path / "e", weights=b"w" * 10001)),
    ]
    (tmp_path / "b" / "model-2.safetensors").write_bytes(b"")
    different.append(ns.model_fingerprint(tmp_path / "b"))
    assert len({first, *different}) == 5


def test_large_files_are_sampled_with_size_first_and_last_page(tmp_path: Path) -> None:
    base = bytes(2**20)
    first = ns.model_fingerprint(model(tmp_path / "a", weights=base), pages_per_file=4)
    for name, changed in (
        ("first", b"x" + base[1:]),
        ("last", base[:-1] + b"x"),
        ("size", base + b"\0"),
    ):
        other = model(tmp_path / name, weights=changed)
        assert ns.model_fingerprint(other, pages_per_file=4) != first
    between = base[:10000] + b"x" + base[10001:]
    assert ns.model_fingerprint(model(tmp_path / "m", weights=between), pages_per_file=4) == first


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ns.model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weight file"):
        ns.model_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match="at least 2"):
        ns.model_fingerprint(tmp_path, pages_per_file=1)
