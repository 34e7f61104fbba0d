"""Writes a transformers model as a GGUF file, with llama.cpp's changes to names and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny import tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
NAMES = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip


def gguf_name(name: str, kind: str) -> str:
    """llama.cpp's name of a checkpoint's tensor."""
    name = name.removeprefix("model.")
    if name in NAMES:
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    leaf, dot, end = (rest, "", "") if rest in NAMES else rest.rpartition(".")
    stem = NAMES.get(leaf) or {"post_attention_layernorm": "post_attention_norm" if "3_5" in kind else "ffn_norm"}[leaf]
    return f"blk.{layer}.{stem}{dot}{end}"


def tiled(w: torch.Tensor, key_heads: int, width: int) -> torch.Tensor:
    """Value heads from grouped by key head to tiled over key heads."""
    return w.unflatten(0, (key_heads, -1, width)).transpose(0, 1).reshape(w.shape)


def converted(name: str, w: torch.Tensor, config: Any) -> torch.Tensor:
    """A checkpoint's tensor as llama.cpp's converters store it."""
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(w.shape)
    if config.model_type != "qwen3_5_text":
        return w
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return w + 1
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


def write_gguf(model: Any, file: Path, quantise: str | None = None, **changes: Any) -> Path:
    """The model with the tests' tokenizer. quantise: GGML type of the matrices. changes: metadata that differs."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    rope = config.rope_parameters
    metadata: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    if arch == "qwen35":
        metadata |= {
            "rope.dimension_sections": [*rope["mrope_section"], 0], "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }  # fmt: skip
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
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = converted(name, weight, config).contiguous()
        kind = gguf.GGMLQuantizationType[quantise] if quantise and w.ndim == 2 and "conv1d" not in name else None
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
