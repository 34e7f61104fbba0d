"""What the decoder must know of a model, from a config.json. No weights are read.

Anything that would change the result and is not built here is refused by file and field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkv import UnsupportedError

from ..cache.gguf_header import GgufHeader
from ..cache.models import CONFIG_DEFAULTS, GGUF_ARCHITECTURES, Fields, has_experts, head_size, layer_types, num_experts
from .gguf_config import gguf_architecture, gguf_as_config
from .rope import Rope, positive, read_rope, rope_parameters

KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "deepseek_v2", "gemma2", "gemma3",
)  # fmt: skip
_QWEN35 = ("qwen3_5", "qwen3_5_moe")
_GEMMA = ("gemma2", "gemma3")
_QWEN35_ROTARY_SHARE = 0.25
"""Of a Qwen3.5 head, where its config leaves partial_rotary_factor to transformers' default."""
_LATENT_EPS = 1e-6
"""transformers' DeepSeek-V2 gives the norms of latents its class's default, not the config's rms_norm_eps."""


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
class Latent:
    """Sizes of latent attention. Each token keeps one latent of `rank` columns and one rotated key of `rope_dim`.

    q_rank: columns that the query is squeezed through, None if it is not. nope_dim, v_dim: unrotated columns of a
    head's key, and columns of its value, both made from the latent. eps: of the norms of latents.
    """

    q_rank: int | None
    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    eps: float = _LATENT_EPS


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` experts of `width` columns, of which the router chooses `chosen` for each token.

    shared: experts of the same width that every token passes as well. gated: a sigmoid of the token scales them.
    renormalise: the chosen probabilities are divided by their sum. scale: of the chosen ones' weights. groups: only
    the best `chosen_groups` of this many groups of neighbours are chosen from. layers: those with experts; the others
    have a plain feed-forward.
    """

    count: int
    chosen: int
    width: int
    shared: int
    gated: bool
    renormalise: bool
    scale: float
    groups: int
    chosen_groups: int
    layers: frozenset[int]

    def expected_read(self, rows: int) -> float:
        """Different experts that a step of `rows` tokens reads: exact for one, else expected of even routing."""
        return self.shared + self.count * (1 - (1 - self.chosen / self.count) ** rows)


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only text model of one of KINDS.

    layer_types: full_attention, sliding_attention or linear_attention per layer. window: of the sliding ones;
    local_rope: theirs, where it is another. delta: of the linear ones. latent: of attention on latents. experts: of
    the feed-forwards that have them. tied: the output matrix is the embedding. qkv_bias, output_bias: attention's.
    attention_softcap, logits_softcap: c, where logits become c tanh(logits / c). source: the file, for errors.
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
    softmax_scale: float
    local_rope: Rope | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head before they are rotated."""
        return self.kind in ("qwen3", "qwen3_moe", "gemma3", *_QWEN35)

    @property
    def gated(self) -> bool:
        """The query projection also makes a gate of attention's output."""
        return self.kind in _QWEN35

    @property
    def norm_offset(self) -> float:
        """Added to the norms' stored weights."""
        return 1.0 if self.kind in (*_QWEN35, *_GEMMA) else 0.0

    @property
    def sandwiched(self) -> bool:
        """Attention and feed-forward are normalised before they are added, too."""
        return self.kind in _GEMMA

    @property
    def gelu(self) -> bool:
        """The feed-forward's gate is gelu by tanh; else silu."""
        return self.kind in _GEMMA

    @property
    def embedding_scale(self) -> float:
        """Embeddings are multiplied by it, in their own type."""
        return math.sqrt(self.hidden_size) if self.kind in _GEMMA else 1.0

    @property
    def cache_heads(self) -> tuple[int, int, int]:
        """(num_kv_heads, head_dim, v_head_dim) of the cache. Latents are one head, whose V is the first part of K."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim, self.head_dim
        return 1, self.latent.rank + self.latent.rope_dim, self.latent.rank

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None where its feed-forward is plain."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @staticmethod
    def from_config(config: dict[str, Any], source: str) -> DecoderConfig:
        """From a config.json's contents; `source` names it in errors (ValueError, UnsupportedError)."""
        inner = config.get("text_config")
        prefix = "text_config." if isinstance(inner, dict) else ""
        fields = Fields({**config, **inner} if isinstance(inner, dict) else config, source, prefix)
        kind = fields.text("model_type").removesuffix("_text")
        if kind not in KINDS:
            raise _unsupported(fields, "model_type", f"one of {', '.join(KINDS)} to generate with")
        fields.values = {**CONFIG_DEFAULTS.get(kind, {}), **fields.values}
        _check_options(kind, fields)
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of {heads} query heads")
        kinds = tuple(layer_types(kind, fields))
        latent = _latent(fields) if kind == "deepseek_v2" else None
        head_dim = head_size(fields) if latent is None else latent.nope_dim + latent.rope_dim
        rope, local_rope = _ropes(kind, fields, head_dim if latent is None else latent.rope_dim)
        bias = fields.get("attention_bias", False) is True
        scale = positive(fields, "query_pre_attn_scalar", head_dim) if kind in _GEMMA else head_dim
        return DecoderConfig(
            kind=kind,
            source=source,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=0 if kind == "qwen3_5_moe" else fields.integer("intermediate_size"),
            layer_types=kinds,
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=positive(fields, "rms_norm_eps", 1e-6),
            rope=rope,
            window=fields.integer("sliding_window") if "sliding_attention" in kinds else None,
            delta=_delta_net(fields) if "linear_attention" in kinds else None,
            tied=fields.get("tie_word_embeddings", False) is True,
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2",
            max_context=fields.integer("max_position_embeddings") if fields.get("max_position_embeddings") else None,
            softmax_scale=scale**-0.5 * (1.0 if latent is None else rope.all_columns**2),
            local_rope=local_rope,
            latent=latent,
            experts=_experts(kind, fields, len(kinds)),
            attention_softcap=_softcap(kind, fields, "attn_logit_softcapping"),
            logits_softcap=_softcap(kind, fields, "final_logit_softcapping"),
        )

    @staticmethod
    def from_gguf(header: GgufHeader, file: Path) -> DecoderConfig:
        """From a GGUF file's metadata."""
        kind, whole = gguf_architecture(header, file)
        if kind not in KINDS:
            names = ", ".join(name for name, known in GGUF_ARCHITECTURES.items() if known in KINDS)
            raise _unsupported(whole, "general.architecture", f"one of {names} to generate with")
        return DecoderConfig.from_config(gguf_as_config(kind, header, file), str(file))


def _unsupported(fields: Fields, name: str, expected: str) -> UnsupportedError:
    return UnsupportedError(str(fields.error(name, expected)))


def _check_options(kind: str, fields: Fields) -> None:
    """Refuse what would change the result and is built one way only."""
    if fields.get("quantization_config") is not None:
        raise _unsupported(fields, "quantization_config", "none: f32, f16 or bf16 weights, or a GGUF")
    only: dict[str, Any] = {"mlp_bias": False, "attn_output_gate": True}
    if kind in _GEMMA:
        only |= {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
    else:
        only |= {"hidden_act": "silu"}
    if kind == "deepseek_v2":
        only |= {"attention_bias": False, "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1}
    for name, value in only.items():
        if fields.get(name, value) != value:
            raise _unsupported(fields, name, repr(value))


def _softcap(kind: str, fields: Fields, name: str) -> float | None:
    """Gemma 2's, and Gemma 3's of the logits; transformers' Gemma 3 has the field for attention and leaves it out."""
    if kind not in _GEMMA or fields.get(name) is None or (kind == "gemma3" and name.startswith("attn")):
        return None
    return positive(fields, name)


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


def _latent(fields: Fields) -> Latent:
    return Latent(
        fields.integer("q_lora_rank") if fields.get("q_lora_rank") is not None else None,
        fields.integer("kv_lora_rank"),
        fields.integer("qk_rope_head_dim"),
        fields.integer("qk_nope_head_dim"),
        fields.integer("v_head_dim"),
    )


def _ropes(kind: str, fields: Fields, head_dim: int) -> tuple[Rope, Rope | None]:
    """Of full attention, and of sliding layers where that is another."""
    given = rope_parameters(fields)
    if kind != "gemma3":
        return read_rope(given, fields, head_dim, _QWEN35_ROTARY_SHARE if kind in _QWEN35 else 1.0), None
    parts: dict[str, dict[str, Any]] = {}
    for name, old, theta in (
        ("full_attention", given, fields.get("rope_theta", 1e6)),
        ("sliding_attention", {}, fields.get("rope_local_base_freq", 1e4)),
    ):
        part = given.get(name) or {} if "full_attention" in given or "sliding_attention" in given else old
        if not isinstance(part, Mapping):
            raise fields.error("rope_parameters", f"an object, with {name} an object")
        parts[name] = {**part, "rope_theta": theta if part.get("rope_theta") is None else part["rope_theta"]}
    full, sliding = (read_rope(part, fields, head_dim, inside=f"{name}.") for name, part in parts.items())
    return full, sliding


def _experts(kind: str, fields: Fields, layers: int) -> Experts | None:
    if kind not in ("qwen3_moe", "qwen3_5_moe", "deepseek_v2"):
        return None
    with_experts = frozenset(i for i in range(layers) if has_experts(kind, fields, i))
    if not with_experts:
        return None
    count, width = num_experts(kind, fields), fields.integer("moe_intermediate_size")
    chosen = fields.integer("num_experts_per_tok")
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"at most {count} experts")
    shared, groups, chosen_groups, scale = 0, 1, 1, 1.0
    if kind == "qwen3_5_moe":
        columns = fields.integer("shared_expert_intermediate_size")
        if columns % width:
            raise _unsupported(fields, "shared_expert_intermediate_size", f"a multiple of {width} (the other experts')")
        shared = columns // width
    if kind == "deepseek_v2":
        shared = fields.integer("n_shared_experts", 0, least=0)
        scale = positive(fields, "routed_scaling_factor", 1.0)
        method = fields.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise _unsupported(fields, "topk_method", "greedy or group_limited_greedy")
        if method == "group_limited_greedy":
            groups, chosen_groups = fields.integer("n_group"), fields.integer("topk_group")
            if count % groups:
                raise fields.error("n_group", f"a divisor of {count} experts")
            if chosen_groups > groups or chosen > count // groups * chosen_groups:
                raise fields.error("topk_group", f"up to {groups} groups, with {chosen} experts in them")
    renormalise = kind == "qwen3_5_moe" or fields.get("norm_topk_prob", False) is True
    return Experts(
        count, chosen, width, shared, kind == "qwen3_5_moe", renormalise and kind != "deepseek_v2", scale, groups,
        chosen_groups, with_experts,
    )  # fmt: skip
