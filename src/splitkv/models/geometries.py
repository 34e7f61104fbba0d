"""Published models by name: what their config.json says of the text decoder. No weights, and no torch.

Sources: the published config.json files as transformers 5.17 reads them, and for Qwen3.5 below 9B training scripts and
parameter counts, as those leave out what equals the class's default. `geometry_config` also reads a config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN35 = {
    "dtype": "bfloat16", "vocab_size": 248_320, "head_dim": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attn_output_gate": True, "full_attention_interval": 4, "max_position_embeddings": 262_144,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip


def _qwen35(layers: int, hidden: int, heads: str, values: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    """heads: query/KV of the attention layers. values: value heads of the delta-net layers."""
    q, kv = map(int, heads.split("/"))
    return {
        "model_type": "qwen3_5_text", **_QWEN35, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": q, "num_key_value_heads": kv, "linear_num_value_heads": values,
        "tie_word_embeddings": tied, **more,
    }  # fmt: skip


GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _qwen35(24, 1024, "8/2", 16, tied=True, intermediate_size=3584),
    "qwen3.5-2b": _qwen35(24, 2048, "8/2", 16, tied=True, intermediate_size=6144),
    "qwen3.5-4b": _qwen35(32, 2560, "16/4", 32, tied=True, intermediate_size=9216),
    "qwen3.5-9b": _qwen35(32, 4096, "16/4", 32, intermediate_size=12_288),
    "qwen3.5-27b": _qwen35(64, 5120, "24/4", 48, intermediate_size=17_408),
    "qwen3.5-35b-a3b": _qwen35(
        40, 2048, "16/2", 32, model_type="qwen3_5_moe_text", num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "dtype": "bfloat16", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768, "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "dtype": "bfloat16", "vocab_size": 102_400, "hidden_size": 2048,
        "intermediate_size": 10_944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6,
        "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 163_840, "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip


def geometry_config(name: str) -> dict[str, Any]:
    """The config.json contents of a name in GEOMETRIES (any case), or of a file or folder of that name.

    Raises ValueError for what is neither, and for a file that is no JSON object.
    """
    if name.lower() in GEOMETRIES:
        return dict(GEOMETRIES[name.lower()])
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"geometry: expected one of {', '.join(GEOMETRIES)}, or a config.json, got {name!r}")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"geometry: expected JSON in {file}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"geometry: expected a JSON object in {file}, got {type(config).__name__}")
    return config
