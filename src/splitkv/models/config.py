"""What the decoder must know of a model, from a config.json or a GGUF file's metadata. No weights are read.

Anything that would change the result and is not built here is refused by file and field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitkv import UnsupportedError

from ..cache.gguf_header import GgufHeader
from ..cache.models import GGUF_ARCHITECTURES, Fields, gguf_config, head_size, layer_types

KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_QWEN35_ROTARY_SHARE = 0.25
"""Of a Qwen3.5 head, where its config leaves partial_rotary_factor to transformers' default."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta-net layer. kernel: tokens that its convolution sees."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Columns of q, k and v together, which the convolution runs over."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class Rope:
    """Rotary positions. frequencies: radians per token of each pair of columns; scale: of cosine and sine."""

    frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only text model of one of KINDS.

    layer_types: full_attention, sliding_attention or linear_attention per layer. window: of the sliding ones.
    delta: of the linear ones. tied: the output matrix is the embedding. qkv_bias, output_bias: attention's.
    source: the file, for errors.
    """

    kind: str
    source: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    window: int | None
    delta: DeltaNet | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    max_context: int | None

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head before they are rotated."""
        return self.kind in ("qwen3", "qwen3_5")

    @property
    def gated(self) -> bool:
        """The query projection also makes a gate of attention's output."""
        return self.kind == "qwen3_5"

    @property
    def norm_offset(self) -> float:
        """Added to the norms' stored weights."""
        return 1.0 if self.kind == "qwen3_5" else 0.0

    @staticmethod
    def from_config(config: dict[str, Any], source: str) -> DecoderConfig:
        """From a config.json's contents; `source` names it in errors (ValueError, UnsupportedError)."""
        inner = config.get("text_config")
        fields = (
            Fields({**config, **inner}, source, "text_config.") if isinstance(inner, dict) else Fields(config, source)
        )
        kind = fields.text("model_type").removesuffix("_text")
        if kind not in KINDS:
            raise UnsupportedError(str(fields.error("model_type", f"one of {', '.join(KINDS)} to generate with")))
        if fields.get("quantization_config") is not None:
            raise UnsupportedError(
                str(fields.error("quantization_config", "none: f32, f16 or bf16 weights, or a GGUF"))
            )
        for name, only in (("hidden_act", "silu"), ("mlp_bias", False), ("attn_output_gate", True)):
            if fields.get(name, only) != only:
                raise UnsupportedError(str(fields.error(name, repr(only))))
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of {heads} query heads")
        kinds = tuple(layer_types(kind, fields))
        head_dim = head_size(fields)
        bias = fields.get("attention_bias", False) is True
        return DecoderConfig(
            kind=kind,
            source=source,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            layer_types=kinds,
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=_positive(fields, "rms_norm_eps", 1e-6),
            rope=_rope(kind, fields, head_dim),
            window=fields.integer("sliding_window") if "sliding_attention" in kinds else None,
            delta=_delta_net(fields) if "linear_attention" in kinds else None,
            tied=fields.get("tie_word_embeddings", False) is True,
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2",
            max_context=fields.integer("max_position_embeddings") if fields.get("max_position_embeddings") else None,
        )

    @staticmethod
    def from_gguf(header: GgufHeader, file: Path) -> DecoderConfig:
        """From a GGUF file's metadata."""
        whole = Fields(header.metadata, str(file))
        arch = whole.text("general.architecture")
        kind = GGUF_ARCHITECTURES.get(arch)
        if kind not in KINDS:
            names = ", ".join(name for name, known in GGUF_ARCHITECTURES.items() if known in KINDS)
            raise UnsupportedError(str(whole.error("general.architecture", f"one of {names} to generate with")))
        own = {
            key.removeprefix(f"{arch}."): value for key, value in header.metadata.items() if key.startswith(f"{arch}.")
        }
        fields = Fields(own, str(file), f"{arch}.")
        config = gguf_config(kind, fields)
        embedding = header.tensors.get("token_embd.weight")
        if embedding is None:
            raise whole.error("token_embd.weight", "this tensor")
        config |= {
            "model_type": kind,
            "vocab_size": embedding.shape[0],
            "hidden_size": fields.integer("embedding_length"),
            "intermediate_size": fields.integer("feed_forward_length"),
            "rms_norm_eps": _positive(fields, "attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in header.tensors,
            "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
            "rope_parameters": _gguf_rope(fields, config["head_dim"]),
        }
        return DecoderConfig.from_config(config, str(file))


def _positive(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise fields.error(name, "a number above 0")
    return float(value)


def _delta_net(fields: Fields) -> DeltaNet:
    sizes = DeltaNet(
        fields.integer("linear_num_key_heads"),
        fields.integer("linear_num_value_heads"),
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_value_head_dim"),
        fields.integer("linear_conv_kernel_dim", least=2),
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of {sizes.num_key_heads} key heads")
    return sizes


# ---- rotary positions --------------------------------------------------------------------------------------


def _gguf_rope(fields: Fields, head_dim: int) -> dict[str, Any]:
    """GGUF's names for what config.json calls rope_parameters."""
    kind = fields.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    rope["rope_theta"] = _positive(fields, "rope.freq_base", 10_000.0)
    rope["partial_rotary_factor"] = fields.integer("rope.dimension_count", head_dim) / head_dim
    if kind != "none":
        rope["factor"] = _positive(fields, "rope.scaling.factor")
        rope["original_max_position_embeddings"] = fields.get("rope.scaling.original_context_length")
        rope["attention_factor"] = fields.get("rope.scaling.attn_factor")
    return rope


def _rope(kind: str, fields: Fields, head_dim: int) -> Rope:
    """Frequencies in float32, as models are trained: at 262,144 tokens one ulp more or less is 0.01 radian."""
    given = fields.get("rope_parameters")
    if given is None:
        scaling = fields.get("rope_scaling", {})
        given = {"rope_theta": fields.get("rope_theta")} | (
            scaling if isinstance(scaling, dict) else {"rope_type": scaling}
        )
    if not isinstance(given, dict):
        raise fields.error("rope_parameters", "an object")
    rope = Fields(given, fields.source, f"{fields.prefix}rope_parameters.")
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in _ROPE_TYPES:
        raise UnsupportedError(
            f"{rope.source}: {rope.prefix}rope_type: expected one of {', '.join(_ROPE_TYPES)}, got {name!r}"
        )
    where = rope if rope.get("partial_rotary_factor") is not None else fields
    share = _positive(where, "partial_rotary_factor", _QWEN35_ROTARY_SHARE if kind == "qwen3_5" else 1.0)
    columns = int(head_dim * min(share, 2.0))
    if columns < 2 or columns % 2 or columns > head_dim:
        raise where.error("partial_rotary_factor", f"a share of the {head_dim} columns that is an even number")
    theta = _positive(rope, "rope_theta", 10_000.0)
    plain = (1.0 / theta ** (torch.arange(0, columns, 2, device="cpu").float() / columns)).tolist()
    if name == "default":
        return Rope(tuple(plain))
    factor = _positive(rope, "factor")
    if name == "linear":
        return Rope(tuple(f / factor for f in plain))
    stated = rope.get("original_max_position_embeddings") is not None
    longest = (
        _positive(rope, "original_max_position_embeddings") if stated else fields.integer("max_position_embeddings")
    )
    if name == "llama3":
        return Rope(_llama3(rope, plain, factor, longest))
    return _yarn(rope, plain, factor, theta, columns, longest)


def _llama3(rope: Fields, plain: list[float], factor: float, longest: float) -> tuple[float, ...]:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    scaled = []
    for frequency in plain:
        turns = longest * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(keep * frequency + (1 - keep) * frequency / factor)
    return tuple(scaled)


def _yarn(rope: Fields, plain: list[float], factor: float, theta: float, columns: int, longest: float) -> Rope:
    """YaRN: frequencies blended by their number of turns in the original context, and a scale on the logits."""
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            raise UnsupportedError(str(rope.error(name, "none")))

    def pair_of(turns: float) -> float:
        return columns * math.log(longest / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(_positive(rope, "beta_fast", 32.0)), pair_of(_positive(rope, "beta_slow", 1.0))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, columns - 1)
    scaled = []
    for i, frequency in enumerate(plain):
        keep = 1 - min(max((i - first) / ((last - first) or 0.001), 0.0), 1.0)
        scaled.append(keep * frequency + (1 - keep) * frequency / factor)
    scale = _positive(rope, "attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return Rope(tuple(scaled), scale)
