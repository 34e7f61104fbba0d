"""A GGUF file's metadata under the names of a config.json.

llama.cpp leaves some of a model to its code; what is needed of that is said here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitkv import UnsupportedError

from ..cache.gguf_header import GgufHeader
from ..cache.models import GGUF_ARCHITECTURES, Fields, gguf_config
from .rope import positive

_SQUEEZED_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B models, known by their layers as in llama.cpp: their logits are scaled by hidden_size / heads."""
_SOFTMAX_GATING = 1


def gguf_architecture(header: GgufHeader, file: Path) -> tuple[str | None, Fields]:
    """The model_type of a file, None for one that has none here, and its metadata."""
    whole = Fields(header.metadata, str(file))
    return GGUF_ARCHITECTURES.get(whole.text("general.architecture")), whole


def gguf_as_config(kind: str, header: GgufHeader, file: Path) -> dict[str, Any]:
    """What config.json would say. ValueError naming file and field."""
    arch = header.metadata["general.architecture"]
    own = {key.removeprefix(f"{arch}."): value for key, value in header.metadata.items() if key.startswith(f"{arch}.")}
    fields = Fields(own, str(file), f"{arch}.")
    config = gguf_config(kind, fields)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise Fields(header.metadata, str(file)).error("token_embd.weight", "this tensor")
    config |= {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "rms_norm_eps": positive(fields, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
    }
    if kind != "qwen3_5_moe":
        config["intermediate_size"] = fields.integer("feed_forward_length")
    if kind in ("qwen3_moe", "qwen3_5_moe", "deepseek_v2"):
        config |= _experts(kind, fields)
    head_dim = config["qk_rope_head_dim"] if kind == "deepseek_v2" else config["head_dim"]
    config["rope_parameters"] = _rope(fields, head_dim)
    if kind == "deepseek_v2":
        config["q_lora_rank"] = fields.get("attention.q_lora_rank")
        multiplier = fields.get("rope.scaling.yarn_log_multiplier")
        if multiplier:  # the files of this architecture hold a tenth of the config's mscale_all_dim, and no mscale
            weight = positive(fields, "rope.scaling.yarn_log_multiplier") * 10
            config["rope_parameters"] |= {"mscale": weight, "mscale_all_dim": weight}
    if kind in _SQUEEZED_LAYERS:
        config |= _gemma(kind, fields, config)
    return config


def _experts(kind: str, fields: Fields) -> dict[str, Any]:
    count = fields.integer("expert_count")
    config: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": kind != "deepseek_v2",
    }
    if kind == "qwen3_5_moe":
        shared = fields.integer("expert_shared_feed_forward_length", config["moe_intermediate_size"])
        return config | {"shared_expert_intermediate_size": shared}
    if kind == "deepseek_v2":
        if fields.get("expert_gating_func", _SOFTMAX_GATING) != _SOFTMAX_GATING:
            raise UnsupportedError(str(fields.error("expert_gating_func", f"{_SOFTMAX_GATING} (softmax)")))
        config |= {
            "n_routed_experts": count,
            "n_shared_experts": fields.integer("expert_shared_count", 0, least=0),
            "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, least=0),
            "routed_scaling_factor": fields.get("expert_weights_scale"),
            "norm_topk_prob": fields.get("expert_weights_norm", False),
        }
        groups = fields.integer("expert_group_count", 1)
        if groups > 1:
            used = fields.integer("expert_group_used_count")
            config |= {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": used}
    return config


def _rope(fields: Fields, head_dim: int) -> dict[str, Any]:
    """GGUF's names for what config.json calls rope_parameters."""
    kind = fields.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    rope["rope_theta"] = positive(fields, "rope.freq_base", 10_000.0)
    rope["partial_rotary_factor"] = fields.integer("rope.dimension_count", head_dim) / head_dim
    if kind != "none":
        rope["factor"] = positive(fields, "rope.scaling.factor")
        rope["original_max_position_embeddings"] = fields.get("rope.scaling.original_context_length")
        rope["attention_factor"] = fields.get("rope.scaling.attn_factor")
        for name in ("beta_fast", "beta_slow"):
            rope[name] = fields.get(f"rope.scaling.yarn_{name}")
    return rope


def _gemma(kind: str, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    squeezed = config["num_hidden_layers"] == _SQUEEZED_LAYERS[kind]
    heads = config["num_attention_heads"]
    found: dict[str, Any] = {
        "query_pre_attn_scalar": config["hidden_size"] // heads if squeezed else config["head_dim"],
    }
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(name) is not None:
            found[name] = fields.get(name)
    if kind == "gemma3":
        local = {"rope_theta": positive(fields, "rope.freq_base_swa", 10_000.0)}
        found["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return found
