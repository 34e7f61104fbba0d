"""A model's memory geometry from a Hugging Face config.json or a GGUF file's header. No weights are read.

`read_model(path)` for either kind of file, `model_from_config(dict)` for a config already loaded. Every
ValueError names the file and the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..problem import MIB
from .gguf_header import read_gguf_header
from .memory import AttentionLayers, ModelGeometry

# Bits per weight. The *_k_m are mixes of block types: these are llama.cpp's figures for Llama 2 7B, within a
# few per cent for others; a GGUF file's own tensors are exact.
WEIGHT_BITS = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "fp8": 8.0,
    "q8_0": 8.5, "q6_k": 6.5625, "q5_k_m": 5.68, "q4_k_m": 4.84, "q4_0": 4.5,
}  # fmt: skip
_CONFIG_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_MOST_CONFIG_BYTES = 16 * MIB
_MOST_LAYERS = 10_000

# GGUF architecture -> the model_type with the same layers.
GGUF_ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe", "gemma2": "gemma2", "gemma3": "gemma3", "deepseek2": "deepseek_v2",
}  # fmt: skip
MODEL_TYPES = sorted({*GGUF_ARCHITECTURES.values(), "mistral"})
# What published configs leave to transformers' class defaults.
CONFIG_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "tie_word_embeddings": True, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "tie_word_embeddings": True, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    },
}  # fmt: skip


class Fields:
    """Named values from one file; a value that is missing or wrong is a ValueError with file and field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix

    def error(self, name: str, expected: str) -> ValueError:
        got = f"got {self.values[name]!r}" if name in self.values else "and it is missing"
        return ValueError(f"{self.source}: {self.prefix}{name}: expected {expected}, {got}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def text(self, name: str) -> str:
        if not isinstance(self.get(name), str):
            raise self.error(name, "a text")
        return str(self.values[name])


def read_model(
    path: str | Path,
    *,
    weights_bytes: int | None = None,
    weights_dtype: str | None = None,
    expanded: bool = False,
) -> ModelGeometry:
    """The model of a config.json, of a folder that holds one, or of a .gguf file.

    weights_bytes: size of the loaded weights; weights_dtype: or their format, one of WEIGHT_BITS. Default:
    a GGUF file's own tensors, else the config's dtype. expanded: latent attention keeps K and V of every head.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"model: expected a config.json, a folder with one, or a .gguf file, and {file} is not there")
    try:
        with file.open("rb") as stream:
            is_gguf = file.suffix == ".gguf" or stream.read(4) == b"GGUF"
    except OSError as error:
        raise ValueError(f"{file}: expected a file that can be read: {error}") from None
    return (_read_gguf if is_gguf else _read_config)(file, weights_bytes, weights_dtype, expanded)


def _read_config(file: Path, weights_bytes: int | None, weights_dtype: str | None, expanded: bool) -> ModelGeometry:
    size = file.stat().st_size
    if size > _MOST_CONFIG_BYTES:
        raise ValueError(f"{file}: expected a config.json of at most {_MOST_CONFIG_BYTES} bytes, got {size}")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected JSON (config.json) or GGUF, and it is neither: {error}") from None
    return model_from_config(
        config, weights_bytes=weights_bytes, weights_dtype=weights_dtype, expanded=expanded, source=str(file)
    )


def model_from_config(
    config: Mapping[str, Any],
    *,
    weights_bytes: int | None = None,
    weights_dtype: str | None = None,
    expanded: bool = False,
    source: str = "config",
) -> ModelGeometry:
    """The model of a config.json's contents; arguments as in `read_model`, `source` names it in errors."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: expected a JSON object, got {type(config).__name__}")
    whole = Fields(config, source)
    inner = config.get("text_config")
    fields = Fields({**config, **inner}, source, "text_config.") if isinstance(inner, Mapping) else whole
    kind = fields.text("model_type").removesuffix("_text")
    if kind not in MODEL_TYPES:
        raise fields.error("model_type", f"one of {', '.join(MODEL_TYPES)}")
    fields.values = {**CONFIG_DEFAULTS.get(kind, {}), **fields.values}
    parameters = _parameters(kind, fields)
    notes = ("the vision part's weights are not counted",) if "vision_config" in config else ()
    if weights_bytes is None:
        weights_bytes = _weights_bytes(parameters, weights_dtype or _config_dtype(whole, fields))
    return replace(_geometry(kind, fields, expanded), weights_bytes=weights_bytes, parameters=parameters, notes=notes)


def _weights_bytes(parameters: int, weights_dtype: str) -> int:
    name = weights_dtype.strip().lower()
    if name not in WEIGHT_BITS:
        raise ValueError(f"weights_dtype: expected one of {', '.join(WEIGHT_BITS)}, got {weights_dtype!r}")
    return math.ceil(parameters * WEIGHT_BITS[name] / 8)


def _config_dtype(whole: Fields, fields: Fields) -> str:
    """The format that the weights are published in; bf16 where the config does not say."""
    quantised = whole.get("quantization_config")
    if quantised is not None:
        if isinstance(quantised, Mapping) and quantised.get("quant_method") == "fp8":
            return "fp8"
        raise ValueError(
            f"{whole.source}: quantization_config: expected fp8 or none; for another, give the size of the weights "
            "(weights_bytes, --weights) or their format (weights_dtype, --weights-dtype)"
        )
    name = "torch_dtype" if "torch_dtype" in fields.values else "dtype"
    text = fields.get(name, "bfloat16")
    if not isinstance(text, str) or text not in _CONFIG_DTYPES:
        raise fields.error(name, f"one of {', '.join(_CONFIG_DTYPES)}")
    return _CONFIG_DTYPES[text]


# ---- layers ------------------------------------------------------------------------------------------------


def head_size(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def layer_types(kind: str, fields: Fields) -> list[str]:
    """full_attention, sliding_attention or linear_attention for every layer."""
    layers = fields.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.error("num_hidden_layers", f"at most {_MOST_LAYERS}")
    named = fields.get("layer_types")
    if named is not None:
        if not isinstance(named, list) or len(named) != layers:
            raise fields.error("layer_types", f"a list of {layers} names")
        if not set(named) <= {"full_attention", "sliding_attention", "linear_attention"}:
            raise fields.error("layer_types", "full_attention, sliding_attention and linear_attention")
        return named
    if kind in ("qwen3_5", "qwen3_5_moe"):
        every = fields.integer("full_attention_interval", 4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if kind in ("gemma2", "gemma3"):
        every = fields.integer("sliding_window_pattern")
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        windowed = fields.get("use_sliding_window", False) is True and fields.get("sliding_window") is not None
        first = fields.integer("max_window_layers", 28, least=0) if windowed else layers
        return ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    windowed = kind == "mistral" and fields.get("sliding_window") is not None
    return ["sliding_attention" if windowed else "full_attention"] * layers


def _geometry(kind: str, fields: Fields, expanded: bool) -> ModelGeometry:
    """All but the weights."""
    heads = fields.integer("num_attention_heads")
    kinds = layer_types(kind, fields)
    count = {name: kinds.count(name) for name in kinds}
    groups = []
    if kind == "deepseek_v2":
        latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
        head_dim = fields.integer("qk_nope_head_dim") + rope
        if expanded:
            groups = [AttentionLayers(len(kinds), heads, head_dim, fields.integer("v_head_dim"))]
        else:
            groups = [AttentionLayers(len(kinds), 1, latent + rope, latent, v_in_k=True)]
    else:
        kv_heads, head_dim = fields.integer("num_key_value_heads", heads), head_size(fields)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of {heads} query heads")
        v_head_dim = fields.integer("v_head_dim", head_dim)
        for name in ("full_attention", "sliding_attention"):
            if name in count:
                window = fields.integer("sliding_window") if name == "sliding_attention" else None
                groups.append(AttentionLayers(count[name], kv_heads, head_dim, v_head_dim, window))
    state = count["linear_attention"] * _state_bytes(fields) if "linear_attention" in count else 0
    longest = fields.integer("max_position_embeddings") if fields.get("max_position_embeddings") else None
    return ModelGeometry(kind, 0, heads, tuple(groups), state_bytes=state, max_context=longest)


def _linear_sizes(fields: Fields) -> tuple[int, int, int, int]:
    """(value heads, value head size, key columns, channels of the convolution) of a gated delta-net layer."""
    heads, dim = fields.integer("linear_num_value_heads"), fields.integer("linear_value_head_dim")
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    return heads, dim, keys, 2 * keys + heads * dim


def _state_bytes(fields: Fields) -> int:
    """Of one layer and row: the recurrent state in f32, and the convolution's last inputs as activations."""
    heads, dim, _, channels = _linear_sizes(fields)
    activation = 4 if fields.get("dtype", fields.get("torch_dtype")) == "float32" else 2
    recurrent = heads * dim * fields.integer("linear_key_head_dim") * 4
    return recurrent + channels * fields.integer("linear_conv_kernel_dim") * activation


# ---- parameters --------------------------------------------------------------------------------------------


def _parameters(kind: str, fields: Fields) -> int:
    """Parameters of the text model, without multi-token-prediction heads."""
    hidden = fields.integer("hidden_size")
    tied = fields.get("tie_word_embeddings", False) is True
    total = fields.integer("vocab_size") * hidden * (1 if tied else 2) + hidden
    norms = (4 if kind in ("gemma2", "gemma3") else 2) * hidden
    for i, layer in enumerate(layer_types(kind, fields)):
        total += norms + _feed_forward_parameters(kind, fields, i)
        if layer == "linear_attention":
            total += _linear_parameters(fields)
        else:
            total += _latent_parameters(fields) if kind == "deepseek_v2" else _attention_parameters(kind, fields)
    return total


def _attention_parameters(kind: str, fields: Fields) -> int:
    hidden, dim = fields.integer("hidden_size"), head_size(fields)
    q = fields.integer("num_attention_heads") * dim
    kv = fields.integer("num_key_value_heads", q // dim) * dim
    gate = q if kind.startswith("qwen3_5") else 0  # q_proj also makes the output's gate
    bias = fields.get("attention_bias", False) is True
    qk_norms = 2 * dim if kind.startswith("qwen3") or kind == "gemma3" else 0
    biases = (q + 2 * kv if bias or kind == "qwen2" else 0) + (hidden if bias else 0)
    return hidden * (2 * q + gate + 2 * kv) + biases + qk_norms


def _linear_parameters(fields: Fields) -> int:
    hidden = fields.integer("hidden_size")
    heads, dim, _, channels = _linear_sizes(fields)
    values = heads * dim
    projections = hidden * (channels + 2 * values + 2 * heads)  # qkv, z and out, b and a
    return projections + channels * fields.integer("linear_conv_kernel_dim") + 2 * heads + dim


def _latent_parameters(fields: Fields) -> int:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    nope, v = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    rank = fields.integer("q_lora_rank") if fields.get("q_lora_rank") is not None else None
    columns = heads * (nope + rope)
    query = hidden * columns if rank is None else hidden * rank + rank + rank * columns
    return query + hidden * (latent + rope) + latent + latent * heads * (nope + v) + heads * v * hidden


def num_experts(kind: str, fields: Fields) -> int:
    """Experts that the router chooses from; transformers 5.17 saves Qwen3's under another name than the published."""
    names = {"deepseek_v2": "n_routed_experts"}
    if kind == "qwen3_moe" and "num_local_experts" in fields.values:
        return fields.integer("num_local_experts")
    return fields.integer(names.get(kind, "num_experts"))


def has_experts(kind: str, fields: Fields, layer: int) -> bool:
    """Whether this layer's feed-forward is a mixture of experts."""
    if kind == "deepseek_v2":
        return layer >= fields.integer("first_k_dense_replace", 0, least=0)
    if kind == "qwen3_moe":
        plain = fields.get("mlp_only_layers", [])
        if not isinstance(plain, list):
            raise fields.error("mlp_only_layers", "a list of layers")
        return layer not in plain and (layer + 1) % fields.integer("decoder_sparse_step", 1) == 0
    return kind == "qwen3_5_moe"


def _feed_forward_parameters(kind: str, fields: Fields, layer: int) -> int:
    hidden = fields.integer("hidden_size")
    if not has_experts(kind, fields, layer):
        return 3 * hidden * fields.integer("intermediate_size")
    experts, width = num_experts(kind, fields), fields.integer("moe_intermediate_size")
    total = hidden * experts + 3 * hidden * width * experts
    if kind == "deepseek_v2":
        total += 3 * hidden * width * fields.integer("n_shared_experts", 0, least=0)
    if kind == "qwen3_5_moe":
        total += 3 * hidden * fields.integer("shared_expert_intermediate_size") + hidden
    return total


# ---- GGUF --------------------------------------------------------------------------------------------------


def _read_gguf(file: Path, weights_bytes: int | None, weights_dtype: str | None, expanded: bool) -> ModelGeometry:
    values, parameters, stored = _gguf_contents(file)
    whole = Fields(values, str(file))
    shards = whole.integer("split.count", 1, least=0)
    if shards > 1:
        for other in other_shards(file, shards):
            _, more, size = _gguf_contents(other)
            parameters, stored = parameters + more, stored + size
    arch = whole.text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise whole.error("general.architecture", f"one of {', '.join(GGUF_ARCHITECTURES)}")
    kind = GGUF_ARCHITECTURES[arch]
    own = {name.removeprefix(f"{arch}."): value for name, value in values.items() if name.startswith(f"{arch}.")}
    config = gguf_config(kind, Fields(own, str(file), f"{arch}."))
    fields = Fields({**CONFIG_DEFAULTS.get(kind, {}), **config}, str(file))
    if weights_bytes is None:
        weights_bytes = stored if weights_dtype is None else _weights_bytes(parameters, weights_dtype)
    return replace(_geometry(kind, fields, expanded), weights_bytes=weights_bytes, parameters=parameters)


def _gguf_contents(file: Path) -> tuple[dict[str, Any], int, int]:
    """(metadata, parameters, bytes) of a GGUF file."""
    header = read_gguf_header(file)
    tensors = header.tensors.values()
    return header.metadata, sum(t.elements for t in tensors), sum(t.nbytes for t in tensors)


def other_shards(file: Path, shards: int) -> list[Path]:
    """The other files of a model in several, `name-00001-of-00003.gguf` being the first."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file.name)
    if match is None or match[2] != "00001" or int(match[3]) != shards:
        raise ValueError(
            f"{file}: split.count: expected the first of {shards} files, named like name-00001-of-{shards:05d}.gguf"
        )
    return [file.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(2, shards + 1)]


def gguf_config(kind: str, fields: Fields) -> dict[str, Any]:
    """The config.json fields that `_geometry` reads, from GGUF's names for them."""
    layers = fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, least=0)
    heads = _same_in_all(fields, "attention.head_count")
    config: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads}
    config["max_position_embeddings"] = fields.integer("context_length") if fields.get("context_length") else None
    if kind == "deepseek_v2":
        rope = fields.integer("rope.dimension_count")
        mla = "_mla" if fields.get("attention.key_length_mla") is not None else ""
        key, value = fields.integer(f"attention.key_length{mla}"), fields.integer(f"attention.value_length{mla}")
        config |= {"kv_lora_rank": fields.integer("attention.kv_lora_rank"), "qk_rope_head_dim": rope}
        return config | {"qk_nope_head_dim": key - rope, "v_head_dim": value}
    kv_heads = _same_in_all(fields, "attention.head_count_kv", heads)
    named = fields.get("attention.key_length") is not None
    key = fields.integer("attention.key_length") if named else fields.integer("embedding_length") // heads
    config |= {"num_key_value_heads": kv_heads, "head_dim": key}
    config["v_head_dim"] = fields.integer("attention.value_length", key)
    if kind.startswith("qwen3_5"):
        values = fields.integer("ssm.time_step_rank")
        config |= {
            "full_attention_interval": fields.integer("full_attention_interval", 4),
            "linear_num_key_heads": fields.integer("ssm.group_count"),
            "linear_key_head_dim": fields.integer("ssm.state_size"),
            "linear_num_value_heads": values,
            "linear_value_head_dim": fields.integer("ssm.inner_size") // values,
            "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        }
    if kind.startswith("gemma"):
        config["sliding_window"] = fields.integer("attention.sliding_window")
        pattern = fields.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        elif pattern is not None:
            config["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern")
    return config


def _same_in_all(fields: Fields, name: str, default: int | None = None) -> int:
    """One number, or one for each layer that is the same wherever it is not 0 (a layer without a cache)."""
    value = fields.get(name, default)
    if isinstance(value, list):
        different = set(value) - {0}
        if len(different) != 1:
            raise fields.error(name, "the same number in every layer")
        return Fields({name: different.pop()}, fields.source, fields.prefix).integer(name)
    return fields.integer(name, default)
