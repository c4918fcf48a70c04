# SPDX-License-Identifier: Apache-2.0
"""The namespace: everything that must agree before two instances may share bytes, and its digest.

No part of kvtier builds storage names on its own; all go through ``namespace_digest`` and
``directory_name``. Fields are readable text, collected where the model is known (in vLLM, the
worker) and only read elsewhere. Owns no state; ``model_fingerprint`` reads files and blocks.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError
from kvtier.types import Geometry

DIGEST_TAG = b"kvtier-namespace-1"
"""First bytes of what is hashed; a new way to hash gets a new tag."""

FORMAT_VERSION = "1"
"""Version of the canonical layout, the field ``format_version``."""

FIELDS: Mapping[str, str] = {
    "model": "name of the model",
    "model_fingerprint": "which weights: an operator's word, a revision, or a digest of the files",
    "kv_dtype": "element type of the KV cache, resolved, never auto",
    "quantization": "quantisation of weights and KV scales",
    "rope": "position encoding",
    "max_model_len": "length the position encoding is set up for, where it depends on it",
    "groups": "KV cache groups: tokens a block, blocks a chunk, bytes a chunk, window",
    "tile_format": "inner order of a head tile",
    "format_version": "version of the canonical layout",
    "portable": "true if the bytes do not depend on the parallelism, else false",
    "topology": "parallel sizes that the bytes belong to, where they are not portable",
    "tokens_per_hash": "tokens that one content hash goes on by, where it is not the block",
    "hash_algorithm": "algorithm of the content hashes",
    "hash_seed": "seed of the content hashes (a digest), or the process it is random for",
    "epoch": "random word since the last cache reset; absent before the first",
}
"""The fields kvtier sets. A library user may add others."""

_UNRESOLVED = frozenset({"", "auto", "none", "default", "unknown"})
_PAGE_BYTES = 4096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


class Identity(msgspec.Struct, frozen=True):
    """Contents of ``namespace.json``."""

    format: str
    digest: str
    fields: dict[str, str]


def namespace_digest(fields: Mapping[str, str]) -> bytes:
    """SHA-256 over the tag and, sorted by name, each field's name and value.

    Name and value are UTF-8, each after its length as four bytes, big-endian, so that no two
    different sets of fields give the same input.

    Raises
    ------
    ConfigError
        If a name or value is no text, or a field whose name ends in ``dtype`` is unresolved.
    """
    hashed = hashlib.sha256(DIGEST_TAG)
    encoded = {name: (_utf8(name, name), _utf8(name, value)) for name, value in fields.items()}
    for name, value in sorted(fields.items()):
        for text in encoded[name]:
            hashed.update(len(text).to_bytes(4, "big"))
            hashed.update(text)
        if name.endswith("dtype") and value.strip().lower() in _UNRESOLVED:
            raise ConfigError(
                f"namespace field {name}: {value!r} is not resolved; "
                f"give the type itself, such as bfloat16 or fp8_e4m3"
            )
    return hashed.digest()


def library_namespace(
    geometry: Geometry,
    *,
    model: str,
    fingerprint: str,
    kv_dtype: str,
    tile_format: str,
    hash_algorithm: str,
    hash_seed: str = "none",
    quantization: str = "none",
    rope: str = "none",
    topology: str | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Fields of an engine that uses kvtier as a library.

    Parameters
    ----------
    geometry : Geometry
        Payload sizes, tokens and windows are taken from it; slot count and stride are no condition
        for sharing.
    fingerprint : str
        Which weights, see ``model_fingerprint``. A display name is not enough.
    kv_dtype : str
        Resolved type.
    tile_format : str
        Word for the inner order of a head tile. Equal words must mean equal bytes.
    hash_seed : str
        See ``hash_seed``; "none" for unseeded hashes.
    topology : str
        Parallel sizes, such as "tp=2,pp=1"; None only if the canonical page does not depend on
        them.
    extra : Mapping
        Further fields, such as the ``namespace`` of the configuration. What changes the KV of the
        same tokens *within* one engine (a LoRA adapter, a salt, an image) belongs into the content
        hash of the keys instead.

    Raises
    ------
    ConfigError
        If a value is empty or unresolved, or `extra` redefines a field.
    """
    fields = {
        "model": model,
        "model_fingerprint": fingerprint,
        "kv_dtype": kv_dtype,
        "quantization": quantization,
        "rope": rope,
        "groups": describe_groups(geometry),
        "tile_format": tile_format,
        "format_version": FORMAT_VERSION,
        "portable": "true" if topology is None else "false",
        "hash_algorithm": hash_algorithm,
        "hash_seed": hash_seed,
    }
    if topology is not None:
        fields["topology"] = topology
    for name, value in fields.items():
        if not value:
            raise ConfigError(f"namespace field {name}: is empty; give {FIELDS[name]}")
    fields = merged(fields, extra or {})
    namespace_digest(fields)  # checks every field
    return fields


def merged(fields: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """`fields` with a person's further fields.

    Raises
    ------
    ConfigError
        If `extra` redefines a field: sharing more than is right could not be seen later.
    """
    for name in extra:
        if name in fields or name in FIELDS:
            raise ConfigError(
                f"namespace.{name}: is a field that kvtier sets itself; choose another name"
            )
    return {**fields, **extra}


def describe_groups(geometry: Geometry) -> str:
    """One readable line for all groups; equal lines mean chunks of equal shape."""
    return " ".join(
        f"{index}:{group.block_tokens}tok*{group.blocks_per_chunk}={group.payload_bytes}B"
        + (f",window={group.window_chunks}" if group.window_chunks is not None else "")
        for index, group in enumerate(geometry.groups)
    )


def with_epoch(fields: Mapping[str, str], epoch: str | None) -> dict[str, str]:
    """`fields` in another epoch; None is the time before the first reset."""
    rest = {name: value for name, value in fields.items() if name != "epoch"}
    return rest if epoch is None else {**rest, "epoch": epoch}


def new_epoch() -> str:
    """A random word that no other reset of any instance has drawn."""
    return secrets.token_hex(16)


def difference(mine: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the fields in which two namespaces differ, sorted."""
    return sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))


def explain(mine: Mapping[str, str], other: Mapping[str, str]) -> str:
    """One line that says why two namespaces do not share; '' if they do."""
    return "; ".join(
        f"{name}: {mine.get(name, '(absent)')!r} here, {other.get(name, '(absent)')!r} there"
        for name in difference(mine, other)
    )


def directory_name(fields: Mapping[str, str]) -> str:
    """Name of the directory (or key prefix) for the chunks of a namespace.

    The model's name is there for people; the digest alone tells namespaces apart.
    """
    model = re.sub(r"[^A-Za-z0-9.-]+", "_", fields.get("model", ""))[-64:].strip("._-")
    return f"{model or 'model'}-{namespace_digest(fields).hex()[:12]}"


def encode_json(fields: Mapping[str, str]) -> bytes:
    """Contents of ``namespace.json``, written beside the data for people and for a check."""
    identity = Identity(
        format=DIGEST_TAG.decode(),
        digest=namespace_digest(fields).hex(),
        fields=dict(sorted(fields.items())),
    )
    return msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n"


def decode_json(content: bytes) -> dict[str, str]:
    """Fields that ``namespace.json`` holds.

    Raises
    ------
    ConfigError
        If it is no such file, of another version, or its digest is not that of its fields.
    """
    try:
        identity = msgspec.json.decode(content, type=Identity)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"namespace.json: is damaged: {exc}") from exc
    if identity.format != DIGEST_TAG.decode():
        raise ConfigError(
            f"namespace.json: has the format {identity.format!r}, this is {DIGEST_TAG.decode()!r}"
        )
    if namespace_digest(identity.fields).hex() != identity.digest:
        raise ConfigError("namespace.json: its digest is not that of its fields")
    return identity.fields


def hash_seed(
    algorithm: str,
    instance: str,
    *,
    unset_is_random: bool = True,
    environ: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> tuple[str, bool]:
    """Value of the ``hash_seed`` field, and whether the seed is random.

    Engines seed their content hashes with PYTHONHASHSEED. Where the seed is random, every process
    has keys of its own and nothing it leaves in a tier is ever found again; then the field names
    the instance, so that it is seen why.

    Parameters
    ----------
    algorithm : str
        ``builtin`` for Python's own ``hash``, which also depends on the interpreter and on its
        ``-R``, ``-E`` and ``-I``; any other word for an algorithm that reads only the variable.
    instance : str
        Word for this run of the engine, the same in all of its processes.
    unset_is_random : bool
        Whether the engine draws a seed when the variable is not set (vLLM does for hashes that are
        not cryptographic, and takes a constant for the others).
    environ, arguments
        Environment and command line of the interpreter; those of this process by default.
    """
    variables = os.environ if environ is None else environ
    seed = variables.get("PYTHONHASHSEED")
    if algorithm == "builtin":
        options = _interpreter_options(sys.orig_argv if arguments is None else arguments)
        random = seed in (None, "", "random") or bool(options & {"R", "E", "I"})
    else:
        random = seed is None and unset_is_random
    if random:
        return f"random:{instance}", True
    if seed is None:
        return "constant", False
    digest = hashlib.sha256(seed.encode()).hexdigest()[:16]
    if algorithm == "builtin":
        version = sys.version_info
        digest += f":{sys.hash_info.algorithm}:{version.major}.{version.minor}"
    return digest, False


def model_fingerprint(directory: str | Path, *, pages_per_file: int = 64) -> str:
    """SHA-256 over config.json and, of each weight file, its name, size and sampled pages.

    Pages of 4 KiB are taken at equal distances, the first and the last among them. Equal files
    give equal values wherever they lie; files that differ only between the sampled pages do too,
    so an operator who patches single tensors in place names the result (``fingerprint``).

    Raises
    ------
    ConfigError
        If there is no config.json or no weight file, or one cannot be read.
    """
    if pages_per_file < 2:
        raise ConfigError(f"pages_per_file: {pages_per_file} is not at least 2")
    root = Path(directory)
    hashed = hashlib.sha256(b"kvtier-model-1")
    try:
        _frame(hashed, "config.json", (root / "config.json").read_bytes())
        weights = sorted(path for path in root.iterdir() if path.suffix in _WEIGHTS)
        if not weights:
            raise ConfigError(
                f"{root}: has no weight file ({', '.join(_WEIGHTS)}); "
                f"give the fingerprint of the model yourself"
            )
        for path in weights:
            _frame(hashed, path.name, _sampled(path, pages_per_file))
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename or root}: cannot be read for the model's fingerprint: {exc.strerror}"
        ) from exc
    return hashed.hexdigest()


def _sampled(path: Path, pages: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _PAGE_BYTES)
        if size <= pages * _PAGE_BYTES:
            offsets, length = [0], size
        else:
            offsets, length = [last * index // (pages - 1) for index in range(pages)], _PAGE_BYTES
        content = b"".join(os.pread(file.fileno(), length, offset) for offset in offsets)
    if len(content) != length * len(offsets):
        raise ConfigError(f"{path}: changed while its fingerprint was taken")
    return size.to_bytes(8, "big") + content


def _frame(hashed: hashlib._Hash, name: str, content: bytes) -> None:
    for part in (name.encode(), content):
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)


def _utf8(name: object, text: object) -> bytes:
    if not isinstance(text, str) or not isinstance(name, str):
        raise ConfigError(f"namespace field {name!r}: is text, got {text!r}")
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"namespace field {name!r}: is no valid text: {text!r}") from exc


def _interpreter_options(arguments: Sequence[str]) -> set[str]:
    """One-letter options that the interpreter itself was given."""
    found: set[str] = set()
    skip = False
    for argument in arguments[1:]:
        if skip:
            skip = False
            continue
        if not argument.startswith("-") or argument in ("-", "--"):
            break
        if argument.startswith("--"):
            continue
        for position, letter in enumerate(argument[1:], 1):
            if letter in "cm":
                return found
            if letter in "WX":
                skip = position == len(argument) - 1
                break
            found.add(letter)
    return found
