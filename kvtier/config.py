# SPDX-License-Identifier: Apache-2.0
"""Configuration of kvtier: one set of frozen structs, from a YAML file, a mapping, or vLLM's JSON.

Owns no state and runs on any thread; reading a file blocks, so it is done at start. A key that
nobody reads, a value out of range and a name used twice are errors, never defaults. The keys of a
tier's own stay undecoded in ``TierConfig.options``, secrets as the ``${VARIABLE}`` they were
written as, until the tier's option struct decodes them (``decode_options``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from kvtier._yaml import load_yaml
from kvtier.errors import ConfigError
from kvtier.options import (
    Bytes,
    Count,
    CountOrZero,
    Directory,
    Port,
    Ratio,
    Seconds,
    SecondsOrZero,
    Secret,
    decode_options,
    format_bytes,
    is_bytes,
    is_reference,
    join,
    looks_secret,
    parse_bytes,
    unknown_key,
)

__all__ = [
    "BreakerConfig",
    "Bytes",
    "Config",
    "EventsConfig",
    "MetricsConfig",
    "Secret",
    "TierConfig",
    "VLLMConfig",
    "decode_options",
    "describe",
    "format_bytes",
    "load",
    "parse",
    "parse_bytes",
    "parse_extra_config",
]

logger = logging.getLogger(__name__)

HOST = "host"
"""Name of the host memory tier, in metrics and events; no configured tier may take it."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Word = Annotated[str, msgspec.Meta(min_length=1)]


class TierConfig(msgspec.Struct, frozen=True):
    """One secondary tier: the keys that every tier has, and `options` for its own."""

    type: Word
    """Registered type, or the name of a class in `module_path`."""
    name: Name = ""
    """Label in metrics, events and logs. The type by default, with -2 and so on for the next."""
    module_path: Word | None = None
    """Python module of an out-of-tree tier."""
    max_inflight_bytes: Bytes = 256 * 2**20
    """Bytes on their way to or from the tier; at the bound, stores wait or are dropped."""
    backpressure: Literal["defer", "drop"] = "defer"
    """At the bound: put the store off (and offer it again), or drop it."""
    timeout_seconds: Seconds = 30.0
    """Deadline of every call of the tier."""
    store_timeout_seconds: Seconds | None = None
    """Deadline of a store; `timeout_seconds` if None."""
    load_timeout_seconds: Seconds | None = None
    """Deadline of a load; `timeout_seconds` if None."""
    store_threshold: Count = 1
    """Store a chunk when it has been offered this many times."""
    min_prefix_tokens: CountOrZero = 0
    """Store only chunks that end at least this far into their prompt."""
    groups: tuple[CountOrZero, ...] | None = None
    """KV cache groups that the tier holds; None is all."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """What requests' tier filters and events call it. None is vLLM's None: it is not known, every
    filter lets the tier pass, and events leave it out."""
    enable_kv_events: bool = False
    """Whether vLLM's own event stream tells of this tier. kvtier's stream always does."""
    options: dict[str, Any] = {}
    """The tier's own keys, undecoded."""

    @property
    def store_seconds(self) -> float:
        """Deadline of a store, seconds."""
        return self.store_timeout_seconds or self.timeout_seconds

    @property
    def load_seconds(self) -> float:
        """Deadline of a load, seconds."""
        return self.load_timeout_seconds or self.timeout_seconds


class BreakerConfig(msgspec.Struct, frozen=True):
    """When a tier that fails is left alone."""

    failures: Count = 5
    """Failures in a row that open the breaker."""
    open_seconds: Seconds = 10.0
    """Time until one call is let through as a probe."""


class MetricsConfig(msgspec.Struct, frozen=True):
    """kvtier's own HTTP endpoint: ``/metrics`` and ``/healthz``."""

    port: Port | None = None
    """None opens no endpoint. Each instance on a host needs a port of its own; data-parallel rank
    n of a vLLM takes this one plus n."""
    host: Word = "127.0.0.1"


class EventsConfig(msgspec.Struct, frozen=True):
    """kvtier's own event stream over ZMQ."""

    endpoint: Word | None = None
    """Address to bind, such as ``tcp://127.0.0.1:5557``; None publishes nothing. Each
    instance needs one of its own; data-parallel rank n of a vLLM takes its ports plus n."""
    replay_endpoint: Word | None = None
    """Address at which missed messages can be asked for."""
    topic: Word = "kvtier"
    buffer_messages: Count = 10_000
    """Messages kept for replay, and bound of what waits to be sent."""


class Config(msgspec.Struct, frozen=True):
    """Everything that can be set."""

    capacity_bytes: Bytes
    """Host memory for chunks, over all ranks."""
    policy: Literal["lru", "arc"] = "lru"
    """Eviction policy of host memory."""
    directory: Directory = "/dev/shm"
    """Where the region's file lives; memory, not a disk."""
    tiers: tuple[TierConfig, ...] = ()
    """Secondary tiers, in the order in which they are asked."""
    isolation: Literal["thread", "process"] = "thread"
    """Where the tiers run. Inside vLLM the default is process."""
    promotion_slots: CountOrZero = 64
    """Free slots kept ahead for loads from tiers."""
    hold_bytes: Bytes | None = None
    """Bound of chunks held for waiting requests; `max_hold_ratio` of the capacity if None."""
    max_hold_ratio: Ratio = 0.5
    lookup_timeout_seconds: Seconds = 1.0
    """A lookup in the tiers without an answer by then is a miss."""
    flush_on_shutdown_seconds: SecondsOrZero = 0.0
    """Time to save, at shutdown, what only host memory holds; 0 saves nothing."""
    on_reset: Literal["new_epoch", "keep"] = "new_epoch"
    """What a cache reset does to the tiers: nothing from before it is found again, or all is."""
    verify_host: Literal["off", "sampled", "always"] = "off"
    """Check chunks in host memory against their CRC-32C before they are loaded."""
    breaker: BreakerConfig = BreakerConfig()
    metrics: MetricsConfig = MetricsConfig()
    events: EventsConfig = EventsConfig()
    model_fingerprint: Word | None = None
    """Which weights these are, where revision or files do not tell; see ``kvtier.namespace``."""
    namespace: dict[str, str] = {}
    """Further namespace fields: bytes are shared only between instances that agree in them."""

    @property
    def max_hold_bytes(self) -> int:
        """Bound of held and lent bytes together."""
        return self.hold_bytes or max(1, int(self.capacity_bytes * self.max_hold_ratio))


class VLLMConfig(Config, frozen=True):
    """The same with what is vLLM's to decide: which of the chunks that it offers are taken."""

    store_threshold: CountOrZero = 0
    """Take a chunk into host memory when it has been offered this many times; tiers get what host
    memory gets."""
    max_tracker_size: Count = 64_000
    """Chunks whose offers are counted for it."""


ConfigT = TypeVar("ConfigT", bound=Config)

COMMON_KEYS = frozenset(TierConfig.__struct_fields__) - {"options"}
"""Keys that every tier has."""

VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
    }
)
"""Keys of ``kv_connector_extra_config`` that vLLM itself reads; they are passed over."""

VLLM_WITHOUT_MEANING: Mapping[str, str] = {
    "cache_policy_module_path": "kvtier has eviction policies of its own; set eviction_policy to "
    "lru or arc",
}
"""Keys of ``kv_connector_extra_config`` that have nothing to set here, and why."""

VLLM_EXAMPLE_KEY = "custom_param"
"""Of the tier ``example`` in vLLM's own documentation, where it shows what a key may be called."""

VLLM_NAMES: Mapping[str, str] = {
    "cpu_bytes_to_use": "capacity_bytes",
    "eviction_policy": "policy",
    "secondary_tiers": "tiers",
}
"""vLLM's names of keys that kvtier has too."""

VLLM_TIER_NAMES: Mapping[str, Mapping[str, str]] = {
    "fs": {"n_read_threads": "read_threads", "n_write_threads": "write_threads"},
    "obj": {"io_threads": "concurrency"},
}
"""The same inside a tier, by its type."""

VLLM_TIER_WITHOUT_MEANING: Mapping[str, Mapping[str, str]] = {
    "p2p": {
        "backends": "NIXL moves no bytes here; transport says what does",
        "num_threads": "NIXL moves no bytes here, and the transports need no threads",
        "unbound_store_timeout_s": "chunks are not parked for a peer, they stay in host memory as "
        "all others do; prefill_wait_seconds is how long a peer waits",
    },
}
"""Keys inside a tier that have nothing to set here, and why."""

VLLM_HOST, VLLM_PORT = "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT"
"""Environment variables of vLLM: where a peer tier listens that does not say it."""


def load(path: str | Path) -> Config:
    """Configuration from a YAML (or JSON) file.

    Raises
    ------
    ConfigError
        If the file cannot be read, is no YAML (the message has the line), or does not fit.
    """
    return parse(load_yaml(Path(path)), source=str(path))


def parse(data: object, *, source: str = "<dict>") -> Config:
    """Configuration from a mapping.

    Parameters
    ----------
    data : Mapping
        As the YAML file has it.
    source : str
        Where it came from, for the errors.

    Raises
    ------
    ConfigError
    """
    try:
        return _parse(data, Config)
    except ConfigError as exc:
        raise exc if source == "<dict>" else ConfigError(f"{source}: {exc}") from exc


def parse_extra_config(extra: Mapping[str, Any]) -> VLLMConfig:
    """Configuration from vLLM's ``kv_connector_extra_config``.

    vLLM's own keys are passed over, its names for what kvtier has too keep their meaning, and
    ``isolation`` is process unless set. One warning names all secrets that stand there in clear:
    vLLM logs this JSON. One more is given if ``backpressure`` is the mapping of a detector, as vLLM
    has it: that is left out.

    Raises
    ------
    ConfigError
    """
    in_file = _from_file(extra)
    data = dict(in_file)
    for key, value in extra.items():
        if key in VLLM_KEYS or key == "kvtier_config":
            continue
        if key in VLLM_WITHOUT_MEANING:
            logger.warning("%s is passed over: %s", key, VLLM_WITHOUT_MEANING[key])
            continue
        name = VLLM_NAMES.get(key, key)
        if name in data:
            raise ConfigError(f"{key}: is the same as {name}, which is set too; keep one of them")
        data[name] = value
    _without_policy_class(extra, data)
    backpressure = data.pop("backpressure", None)
    if isinstance(data.get("tiers"), list | tuple):
        typed = "secondary_tiers" if "secondary_tiers" in extra else "tiers"
        tiers = _without_detectors(data["tiers"], backpressure)
        data["tiers"] = [_tier_names(tier, f"{typed}[{i}]") for i, tier in enumerate(tiers)]
    data.setdefault("isolation", "process")
    logged = {key: value for key, value in data.items() if key not in in_file}
    literal = list(_literal_secrets(logged, ""))
    if literal:
        logger.warning(
            "secrets stand in kv_connector_extra_config in clear, and vLLM logs it: %s; "
            "write them as ${VARIABLE}",
            ", ".join(literal),
        )
    try:
        return _parse(data, VLLMConfig)
    except ConfigError as exc:
        # The error names the key that the person typed.
        text = str(exc)
        for typed, name in VLLM_NAMES.items():
            missing = name not in data
            if (typed in extra or missing) and text.startswith((f"{name}:", f"{name}[")):
                text = typed + text.removeprefix(name)
        raise ConfigError(f"kv_connector_extra_config: {text}") from exc


def _from_file(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the YAML file of ``kvtier_config`` says; it and the JSON may not say the same twice."""
    path = extra.get("kvtier_config")
    if path is None:
        return {}
    if not isinstance(path, str):
        raise ConfigError(f"kv_connector_extra_config: kvtier_config: is a file, got {path!r:.80}")
    try:
        data = load_yaml(Path(path))
    except ConfigError as exc:
        raise ConfigError(f"kvtier_config: {exc}") from exc
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"kvtier_config: {path}: the configuration is a mapping of keys to values"
        )
    return dict(data)


def _tier_names(tier: object, path: str) -> object:
    """A tier of a type that vLLM has too, with kvtier's names for what vLLM's calls otherwise."""
    if not isinstance(tier, Mapping) or tier.get("module_path"):
        return tier
    kind = tier.get("type")
    if not isinstance(kind, str):
        return tier
    names = VLLM_TIER_NAMES.get(kind, {})
    given = dict(tier)
    if kind == "p2p":
        _side_channel(given)
    if kind == "obj":
        given = _obj_store(given, path)
    if kind == "example" and given.pop(VLLM_EXAMPLE_KEY, None) is not None:
        logger.warning("%s.%s is passed over: it does nothing in vLLM", path, VLLM_EXAMPLE_KEY)
    for key, why in VLLM_TIER_WITHOUT_MEANING.get(kind, {}).items():
        if given.pop(key, None) is not None:
            logger.warning("%s.%s is passed over: %s", path, key, why)
    result: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(key, key)
        if name in result or (name != key and name in given):
            raise ConfigError(
                f"kv_connector_extra_config: {path}.{key}: is the same as {name}, which is set "
                "too; keep one of them"
            )
        result[name] = value
    return result


def _side_channel(tier: dict[str, Any]) -> None:
    """Where vLLM's environment variables have a peer tier listen, if its keys do not say it."""
    host, port = os.environ.get(VLLM_HOST), os.environ.get(VLLM_PORT)
    if host and tier.get("host") is None:
        tier["host"] = host
    if port and tier.get("port") is None:
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"{VLLM_PORT}: {port!r:.80} is no port; export a number up to 65535")
        tier["port"] = int(port)


def _obj_store(tier: dict[str, Any], path: str) -> dict[str, Any]:
    """A tier of type ``obj`` with the keys of vLLM's ``store_config`` beside the others. An empty
    text is vLLM's word for a default, and http its default scheme."""
    nested = tier.pop("store_config", {})
    if not isinstance(nested, Mapping):
        raise ConfigError(
            f"kv_connector_extra_config: {path}.store_config: is a mapping of keys to values, "
            f"got {type(nested).__name__}"
        )
    for key in nested:
        if key in tier:
            raise ConfigError(
                f"kv_connector_extra_config: {path}.store_config.{key}: stands beside store_config "
                "too; keep one of them"
            )
    result = {**tier, **nested}
    for key in ("access_key", "secret_key", "session_token", "region", "ca_bundle"):
        if result.get(key) == "":
            del result[key]
    endpoint = result.get("endpoint_override")
    if isinstance(endpoint, str) and "://" not in endpoint:
        result.setdefault("scheme", "http")
    return result


def _without_detectors(tiers: list[Any] | tuple[Any, ...], default: object) -> list[Any]:
    """Tiers with the default of ``backpressure``; vLLM's detectors, which are mappings, go."""
    left_out = isinstance(default, Mapping)
    kept = []
    for tier in tiers:
        if isinstance(tier, Mapping):
            tier = dict(tier)
            if isinstance(tier.get("backpressure"), Mapping):
                left_out = True
                del tier["backpressure"]
            elif default is not None and not isinstance(default, Mapping):
                tier.setdefault("backpressure", default)
        kept.append(tier)
    if left_out:
        logger.warning(
            "backpressure: kvtier bounds the stores of each tier itself (max_inflight_bytes), and "
            "leaves vLLM's detector out; write defer or drop"
        )
    return kept


def _without_policy_class(extra: Mapping[str, Any], data: dict[str, Any]) -> None:
    """The name of a class in ``cache_policy_module_path`` goes with the module; lru stays."""
    if "cache_policy_module_path" in extra and data.get("policy") not in ("lru", "arc"):
        data.pop("policy", None)


def describe(config: Config) -> str:
    """The effective configuration as YAML, with secrets masked; ``load`` reads it."""
    data = _plain(config)
    for tier in data["tiers"]:
        options = tier.pop("options")
        tier.update(_masked(options))
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return text


def _parse(data: object, kind: type[ConfigT]) -> ConfigT:
    if not isinstance(data, Mapping):
        raise ConfigError(f"the configuration is a mapping of keys to values, got {data!r:.80}")
    known = kind.__struct_fields__
    for key in data:
        if key not in known:
            raise unknown_key("", key, known)
    tiers = data.get("tiers", ())
    if not isinstance(tiers, list | tuple):
        raise ConfigError(f"tiers: is a list, each entry with its type, got {tiers!r:.80}")
    config = decode_options(kind, {key: data[key] for key in data if key != "tiers"}, "")
    return msgspec.structs.replace(config, tiers=_tiers(tiers))


def _tiers(entries: list[Any] | tuple[Any, ...]) -> tuple[TierConfig, ...]:
    decoded = [_tier(entry, f"tiers[{index}]") for index, entry in enumerate(entries)]
    taken = {HOST: HOST}
    for index, tier in enumerate(decoded):
        if tier.name:
            if tier.name in taken:
                raise ConfigError(
                    f"tiers[{index}].name: {tier.name!r} is the name of {taken[tier.name]} already;"
                    f" give each tier a name of its own"
                )
            taken[tier.name] = f"tiers[{index}]"
    named = []
    for index, tier in enumerate(decoded):
        if not tier.name:
            name, number = tier.type, 1
            while name in taken:
                number += 1
                name = f"{tier.type}-{number}"
            taken[name] = f"tiers[{index}]"
            tier = msgspec.structs.replace(tier, name=name)
        named.append(tier)
    return tuple(named)


def _tier(entry: object, path: str) -> TierConfig:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: is a mapping with a type, got {entry!r:.80}")
    common: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in entry.items():
        if not isinstance(key, str):
            raise unknown_key(path, key, COMMON_KEYS)
        (common if key in COMMON_KEYS else options)[key] = value
    tier = decode_options(TierConfig, common, path)
    return msgspec.structs.replace(tier, options=options)


def _plain(value: object) -> Any:
    if isinstance(value, msgspec.Struct):
        plain = {}
        for field in msgspec.structs.fields(value):
            item = getattr(value, field.name)
            plain[field.name] = (
                format_bytes(item) if is_bytes(field.type) and item is not None else _plain(item)
            )
        return plain
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _masked(options: Any) -> Any:
    if isinstance(options, Mapping):
        return {
            key: "***" if looks_secret(str(key)) and not is_reference(item) else _masked(item)
            for key, item in options.items()
        }
    if isinstance(options, list):
        return [_masked(item) for item in options]
    return options


def _literal_secrets(data: Any, path: str) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            where = join(path, str(key))
            if isinstance(value, str) and looks_secret(str(key)) and not is_reference(value):
                yield where
            else:
                yield from _literal_secrets(value, where)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _literal_secrets(value, f"{path}[{index}]")
