# SPDX-License-Identifier: Apache-2.0
"""Four small model families whose answers change when their KV does.

Writes a checkpoint of random weights with a standard deviation of 0.2. The usual dummy weights are
so small that a model answers the same over damaged KV, which would make every reload test pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    # One group of full attention, four layers, four KV heads.
    "full": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    # Five layers with a window of 256 tokens and one with full attention: several groups.
    "swa": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 256,
        "sliding_window_pattern": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
        "pad_token_id": 0,
    },
    # Latent attention: the rows are the same on every rank.
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "hidden_act": "silu",
    },
    # Three layers with recurrent state and one with full attention.
    "linear": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "hidden_act": "silu",
    },
}


EMBEDDING_SCALE = {"swa": 0.15}
"""Gemma multiplies embeddings by 16 and uses them for the output too: at full size the answer is
the last token again, with probability 1, whatever the KV holds."""


def write_config(family: str, directory: Path, changes: dict[str, Any] | None = None) -> None:
    """Write ``config.json`` of `family` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = COMMON | FAMILIES[family] | (changes or {})
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def build(
    family: str, directory: Path, seed: int = 1, changes: dict[str, Any] | None = None
) -> None:
    """Write a whole checkpoint of `family` into `directory` (takes seconds, needs torch); `changes`
    replace fields of its configuration."""
    # lazy: torch and transformers take seconds to import, and only the builder needs them.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(family, directory, changes)
    config = AutoConfig.from_pretrained(directory)
    config.initializer_range = 0.2
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if family in EMBEDDING_SCALE:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE[family])
    model.save_pretrained(directory)
    # transformers writes the configuration in its newest form; vLLM is given the plain one.
    write_config(family, directory, changes)


if __name__ == "__main__":
    import sys

    build(sys.argv[1], Path(sys.argv[2]), changes=json.loads((sys.argv[3:] or ["{}"])[0]))
