# SPDX-License-Identifier: Apache-2.0
"""How long the stand-in accelerator takes for a scheduler step: a roofline of two public numbers.

Owns no state; pure functions of frozen structs. The constants come from a named model and a named
accelerator. One factor, `scale`, makes the model thinner: each token carries 1/scale of the bytes
and of the arithmetic, so `scale` times as many tokens pass a second while every bandwidth (bytes
a second) stays that of the real machine. So the ratio of recomputing to loading stays real.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError


class CostSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A real model on a real accelerator, before scaling."""

    model: str
    hardware: str
    parameters: float
    """Weights that take part in a token's forward pass."""
    layers: int
    hidden_size: int
    kv_bytes_per_token: int
    weight_bytes: float
    flops_per_second: float
    """Achievable, not peak."""
    memory_bytes_per_second: float
    """Achievable, of the accelerator's own memory."""
    note: str = ""


DEFAULT_SOURCE = CostSource(
    model="Llama-3.1-8B, 16-bit (config.json: 32 layers, 8 KV heads of 128, hidden size 4096)",
    hardware="NVIDIA L4 (data sheet: 121 dense 16-bit TFLOPS, 300 GB/s)",
    parameters=8.03e9,
    layers=32,
    hidden_size=4096,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    weight_bytes=16.06e9,
    flops_per_second=0.4 * 121e12,
    memory_bytes_per_second=0.8 * 300e9,
    note="assumed: 40 % of the peak arithmetic and 80 % of the peak bandwidth are reached",
)


class Prefill(msgspec.Struct, frozen=True):
    """Tokens of one prompt that one step computes."""

    tokens: int
    context: int
    """Tokens before them."""


class Decode(msgspec.Struct, frozen=True):
    """Tokens that one request decodes in one step."""

    tokens: int
    context: int


class CostModel(msgspec.Struct, frozen=True):
    """Seconds of a step.

    Parameters
    ----------
    source : CostSource
    scale : float
        How many times thinner the stand-in is (bytes and arithmetic of a token).
    prefill_speedup : float
        Makes the arithmetic that much cheaper; for asking "what if recomputing cost nothing?".
    """

    source: CostSource
    scale: float
    prefill_speedup: float = 1.0

    def arithmetic_seconds(self, tokens: int, context: int) -> float:
        """Real machine: forward pass of `tokens` that follow `context` tokens.

        Two operations a weight and token, and for attention 4 * layers * hidden size for each pair
        of a token and one that it looks at (scores, and the weighted sum of values).
        """
        source = self.source
        pairs = tokens * context + tokens * (tokens + 1) / 2
        operations = 2 * source.parameters * tokens
        operations += 4 * source.layers * source.hidden_size * pairs
        return operations / source.flops_per_second

    def step_seconds(self, prefills: list[Prefill], decodes: list[Decode]) -> float:
        """Scaled time of one step: the larger of arithmetic and memory traffic.

        The weights are read once for each decoded token of the longest decode (a step may stand for
        several of the model server's steps), and at least once; each decoded token reads its
        context's KV.
        """
        if not prefills and not decodes:
            return 0.0
        source = self.source
        prefill = sum(self.arithmetic_seconds(item.tokens, item.context) for item in prefills)
        decode = sum(self.arithmetic_seconds(item.tokens, item.context) for item in decodes)
        passes = max([1, *(item.tokens for item in decodes)])
        kv_tokens = sum(item.tokens * item.context for item in decodes)
        traffic = passes * source.weight_bytes + kv_tokens * source.kv_bytes_per_token
        arithmetic = prefill / self.prefill_speedup + decode
        return max(arithmetic, traffic / source.memory_bytes_per_second) / self.scale

    def prefill_tokens_per_second(self, context: int = 0, tokens: int = 1024) -> float:
        """Scaled prefill speed at `context`, for the report."""
        return tokens / self.step_seconds([Prefill(tokens, context)], [])

    def decode_tokens_per_second(self, context: int = 0) -> float:
        """Scaled decode speed of a single request at `context`."""
        return 1 / self.step_seconds([], [Decode(1, context)])


def load_source(path: Path) -> CostSource:
    """A calibration file: a JSON object with the fields of `CostSource`.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a field is missing, unknown or not positive.
    """
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"calibration file {path}: {exc}") from exc
    try:
        source = msgspec.convert(raw, CostSource)
    except msgspec.ValidationError as exc:
        fields = ", ".join(CostSource.__struct_fields__)
        raise ConfigError(f"calibration file {path}: {exc}; its fields are {fields}") from exc
    for name in CostSource.__struct_fields__:
        value = getattr(source, name)
        if isinstance(value, int | float) and not value > 0:
            raise ConfigError(f"calibration file {path}: {name} must be above 0, got {value}")
    return source


def calibrate(
    source: CostSource,
    prefill_tokens_per_second: float | None,
    decode_tokens_per_second: float | None,
) -> CostSource:
    """`source` with speeds measured on a real machine instead of its own.

    Parameters
    ----------
    prefill_tokens_per_second : float, optional
        Long prompts with little context, real machine, unscaled.
    decode_tokens_per_second : float, optional
        A single request with little context, real machine, unscaled.
    """
    if prefill_tokens_per_second is not None:
        source = msgspec.structs.replace(
            source,
            flops_per_second=2 * source.parameters * prefill_tokens_per_second,
            note=f"{source.note}; prefill set to {prefill_tokens_per_second:g} tokens/s by hand",
        )
    if decode_tokens_per_second is not None:
        source = msgspec.structs.replace(
            source,
            memory_bytes_per_second=source.weight_bytes * decode_tokens_per_second,
            note=f"{source.note}; decode set to {decode_tokens_per_second:g} tokens/s by hand",
        )
    return source
