"""Writes a transformers model as a GGUF file, with llama.cpp's changes to names and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny import tokenizer

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe",
    "qwen3_5_moe_text": "qwen35moe", "deepseek_v2": "deepseek2", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
NAMES = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
} | {
    f"mlp.{group}.{part}_proj": f"ffn_{part}_{short}"
    for group, short in (("experts", "exps"), ("shared_expert", "shexp"), ("shared_experts", "shexp"))
    for part in ("gate", "up", "down")
}  # fmt: skip
BETWEEN = ("qwen3_5_text", "qwen3_5_moe_text", "gemma2", "gemma3_text")


def gguf_name(name: str, kind: str) -> str:
    """llama.cpp's name of a checkpoint's tensor."""
    name = name.removeprefix("model.")
    if name in NAMES:
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    leaf, dot, end = (rest, "", "") if rest in NAMES else rest.rpartition(".")
    stem = (
        NAMES.get(leaf) or {"post_attention_layernorm": "post_attention_norm" if kind in BETWEEN else "ffn_norm"}[leaf]
    )
    return f"blk.{layer}.{stem}{dot}{end}"


def tiled(w: torch.Tensor, key_heads: int, width: int) -> torch.Tensor:
    """Value heads from grouped by key head to tiled over key heads."""
    return w.unflatten(0, (key_heads, -1, width)).transpose(0, 1).reshape(w.shape)


def converted(name: str, w: torch.Tensor, config: Any) -> torch.Tensor:
    """A checkpoint's tensor as llama.cpp's converters store it."""
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(w.shape)
    if config.model_type in BETWEEN and name.endswith("norm.weight") and "linear_attn" not in name:
        return w + 1
    if name.endswith("shared_expert_gate.weight"):
        return w[0]
    if "linear_attn" not in name or name.endswith("norm.weight"):
        return w
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    values = config.linear_num_value_heads * width
    if name.endswith("A_log"):
        return tiled(-w.exp(), keys, 1)
    if name.endswith("out_proj.weight"):
        return tiled(w.T, keys, width).T
    if "in_proj_qkv" in name or "conv1d" in name:
        w = w.squeeze(1) if "conv1d" in name else w
        return torch.cat([w[:-values], tiled(w[-values:], keys, width)])
    return tiled(w, keys, width if "in_proj_z" in name else 1)


def stored(model: Any, split_kv: bool) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors as llama.cpp has them: gate and up of all experts, and W_k and W_v, each for itself."""
    found = {}
    for name, w in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), w.chunk(2, 1), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = w
        elif name.endswith("kv_b_proj.weight") and split_kv:
            config = model.config
            k, v = w.unflatten(0, (config.num_attention_heads, -1)).split(
                (config.qk_nope_head_dim, config.v_head_dim), 1
            )
            found[name.replace("kv_b", "k_b")], found[name.replace("kv_b", "v_b")] = k.mT, v
        else:
            found[name] = w
    return found


def family_metadata(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """What only some architectures have."""
    found: dict[str, Any] = {}
    if "qwen3_5" in config.model_type:
        found |= {
            "rope.dimension_sections": [*rope["mrope_section"], 0], "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }  # fmt: skip
    if hasattr(config, "num_experts_per_tok"):
        found |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    if config.model_type == "qwen3_5_moe_text":
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "deepseek_v2":
        latent, turned, head = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
        found |= {
            "attention.head_count_kv": 1, "attention.key_length": latent + turned, "attention.value_length": latent,
            "attention.key_length_mla": head + turned, "attention.value_length_mla": config.v_head_dim,
            "attention.kv_lora_rank": latent, "attention.q_lora_rank": config.q_lora_rank,
            "rope.dimension_count": turned, "leading_dense_block_count": config.first_k_dense_replace,
            "expert_shared_count": config.n_shared_experts, "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }  # fmt: skip
    if "gemma" in config.model_type:
        found["attention.sliding_window"] = config.sliding_window
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name) is not None:
                found[name] = getattr(config, name)
    if config.model_type == "gemma3_text":
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    return found


def write_gguf(model: Any, file: Path, quantise: str | None = None, split_kv: bool = True, **changes: Any) -> Path:
    """The model with the tests' tokenizer. quantise: GGML type of the matrices. changes: metadata that differs.

    split_kv: W_k and W_v of latent attention apart, as llama.cpp has had them since it attends to latents.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    metadata: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": getattr(config, "intermediate_size", 0),
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    metadata |= family_metadata(config, rope)
    writer = gguf.GGUFWriter(file, arch)
    for key, value in (metadata | changes).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array, str: writer.add_string}
        add[type(value)](f"{arch}.{key}", value)
    vocabulary = sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])
    words = [*(word for word, _ in vocabulary), "ĠĠ"]
    words += [f"<unused{i}>" for i in range(len(words), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<") and len(word) > 1 else 1 for word in words])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    for name, weight in stored(model, split_kv).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = converted(name, weight, config).contiguous()
        kind = gguf.GGMLQuantizationType[quantise] if quantise and w.ndim > 1 and "conv1d" not in name else None
        if kind is gguf.GGMLQuantizationType.BF16:
            writer.add_tensor(
                gguf_name(name, config.model_type), w.bfloat16().view(torch.uint8).numpy(), raw_dtype=kind
            )
        elif kind is not None:
            writer.add_tensor(gguf_name(name, config.model_type), gguf.quants.quantize(w.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, config.model_type), w.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
