"""Tiny models of every family that splitkv generates with, made and saved by transformers, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from splitkv.models.config import KINDS

VOCAB = 300
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 0, "pad_token_id": None,
    "bos_token_id": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
QWEN35_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
DEEPSEEK_ROPE = {**YARN, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
}  # fmt: skip
QWEN35 = {
    "rope_parameters": QWEN35_ROPE, "head_dim": 32, "num_key_value_heads": 1, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
    "qwen3": {"rope_parameters": YARN, "head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35 | {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48,
    },
    "deepseek_v2": {
        "rope_parameters": DEEPSEEK_ROPE, "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.75,
    },
    "gemma2": {
        "sliding_window": 40, "query_pre_attn_scalar": 24, "layer_types": ALTERNATING, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3": {"sliding_window": 40, "rope_parameters": GEMMA3_ROPE, "layer_types": ALTERNATING},
}  # fmt: skip
if set(FAMILIES) != set(KINDS):
    raise RuntimeError(f"a family has no tiny model: {set(KINDS) ^ set(FAMILIES)}")


def make(family: str, **changes: Any) -> Any:
    """A transformers model in f32 with eager attention, whose every weight is random and matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}.get(family, family)
    config = AutoConfig.for_model(name, **{**SIZES, **FAMILIES[family], **changes})
    generator = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the others do not know float64
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.2, generator=generator)
            offset = family.startswith(("qwen3_5", "gemma")) and "linear_attn" not in name
            if name.endswith("norm.weight") and not offset:
                weight.add_(1.0)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The model's safetensors and config.json, and the tokenizer."""
    model.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


def save_state(model: Any, folder: Path) -> Path:
    """The same of a model that transformers read from a GGUF file, which it will not save."""
    from safetensors.torch import save_file

    folder.mkdir()
    model.config.save_pretrained(folder)
    state = {name: weight.clone().contiguous() for name, weight in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return folder


def tokenizer() -> Any:
    """Byte-level, without merges: 256 bytes after eight special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<end>", "<begin>", "<user>", "<bot>", "<a>", "<b>", "<c>", "<d>"]
    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in specials])
    return made


def save_tokenizer(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<bot>"
    config = {"chat_template": template, "eos_token": {"content": "<end>"}, "bos_token": "<begin>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
