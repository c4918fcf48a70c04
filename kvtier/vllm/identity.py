# SPDX-License-Identifier: Apache-2.0
"""The namespace fields: everything that must agree before two instances share bytes.

Runs in the worker, the only place where vLLM's whole configuration is known. Values are the
resolved ones (never "auto"). Reads the checkpoint's files, changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvtier.vllm.pages import WorkerPages

FORMAT_VERSION = 1
"""Version of the canonical format."""

SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 64
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
CRYPTO_HASHES = frozenset({"sha256", "sha256_cbor"})


def fingerprint_directory(directory: Path) -> str:
    """SHA-256 over config.json and, of each weight file, name, size and evenly spread pages.

    Raises
    ------
    FileNotFoundError
        If there is no config.json.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.iterdir()):
        if path.suffix not in WEIGHT_SUFFIXES:
            continue
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}:{size}\0".encode())
            last = max(0, size - SAMPLE_BYTES)
            for sample in range(SAMPLES_PER_FILE):
                file.seek(last * sample // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def model_fingerprint(vllm_config: VllmConfig, given: str | None) -> str:
    """What tells two sets of weights under one name apart.

    The operator's word `given`, else the repository's revision, else the weight files.
    """
    if given is not None:
        return f"operator:{given}"
    model = vllm_config.model_config
    # A local directory has no revision, whatever was typed.
    directory = Path(model.model)
    if directory.is_dir():
        return f"files:{fingerprint_directory(directory)}"
    resolved = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if resolved:
        return f"revision:{resolved}"
    return "unknown"


def hash_seed(vllm_config: VllmConfig) -> tuple[str, str, bool]:
    """Algorithm and seed of the block hashes, and whether other processes share them."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return algorithm, f"env:{seed}", True
    if algorithm in CRYPTO_HASHES:
        # vLLM derives these from a constant, also when nobody sets a seed.
        return algorithm, "default", True
    return algorithm, "random", False


def tile_format(layer: Any, layout: str | None) -> str:
    """Inner order of a head tile: layout family, backend class, packing variant, and the dimensions
    of the layer's cache (K and V of a head are side by side in four, and halves of a page in five;
    vLLM keeps both orders in its canonical page)."""
    backend = getattr(layer, "attn_backend", None)
    name = f"{backend.__module__}.{backend.__qualname__}" if backend is not None else "state"
    variant = getattr(layer, "isa", None)
    cache = getattr(layer, "kv_cache", ())
    return f"{layout or 'none'}/{name}/{variant or '-'}/{getattr(cache, 'ndim', len(cache))}d"


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def namespace_fields(
    config: OffloadingConfig,
    vllm_config: VllmConfig,
    pages: WorkerPages,
    engine_id: str,
    *,
    fingerprint: str | None,
) -> dict[str, str]:
    """Readable namespace fields, equal on all ranks.

    Parameters
    ----------
    config : OffloadingConfig
    vllm_config : VllmConfig
    pages : WorkerPages
        Groups and portability.
    engine_id : str
        Enters only where the block hashes mean nothing to other processes.
    fingerprint : str, optional
        ``model_fingerprint`` of the configuration.
    """
    model = vllm_config.model_config
    parallel = config.parallel
    algorithm, seed, shared = hash_seed(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    tiles = {
        name: tile_format(layers.get(name), config.kv_cache_layout)
        for group in config.groups
        for name in group.layer_names
    }
    text_config = model.hf_text_config
    fields = {
        "format_version": str(FORMAT_VERSION),
        "model": config.model.name,
        "model_fingerprint": model_fingerprint(vllm_config, fingerprint),
        "kv_dtype": config.model.dtype,
        "quantization": str(model.quantization or "none"),
        "rope": _canonical_json(
            {
                "parameters": getattr(text_config, "rope_parameters", None)
                or getattr(text_config, "rope_scaling", None),
                "theta": getattr(text_config, "rope_theta", None),
                "partial": getattr(text_config, "partial_rotary_factor", None),
            }
        ),
        "max_model_len": str(model.max_model_len),
        "groups": _canonical_json(
            [
                {
                    "block_tokens": group.block_tokens,
                    "blocks_per_chunk": group.blocks_per_chunk,
                    "block_bytes": group.block_bytes,
                    "pages": [[page.layer, page.size_bytes] for page in group.pages],
                }
                for group in pages.groups
            ]
        ),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "tile_format": _canonical_json(sorted(set(tiles.values()))),
        "portable": str(pages.portable).lower(),
        "hash_algorithm": algorithm,
        "hash_seed": seed if shared else f"{seed}:{engine_id}",
    }
    if not pages.portable:
        fields["topology"] = (
            f"tp={parallel.tp_size},pp={parallel.pp_size},pcp={parallel.pcp_size},"
            f"dcp={parallel.dcp_size},world={parallel.world_size}"
        )
        if parallel.dcp_size * parallel.pcp_size > 1:
            # Which tokens of a block a rank holds, where its page is kept as it is.
            interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
            fields["topology"] += f",interleave={interleave}"
    return fields
