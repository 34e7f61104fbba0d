"""Tiny models with random weights, one per kind of attention, and greedy decoding that shows its logits.

Weights are drawn ten times wider than models are trained from, so that what attention returns decides the tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import sdpa_mask

VOCAB = 256
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)


def _config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**COMMON | changes)


ZOO: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("LlamaConfig", num_key_value_heads=1),
    "qwen2": lambda: _config("Qwen2Config", num_attention_heads=14, num_key_value_heads=2, head_dim=16),
    "qwen3": lambda: _config("Qwen3Config", head_dim=32),
    "mistral-window": lambda: _config("MistralConfig", sliding_window=7),
    "gemma2": lambda: _config(
        "Gemma2Config", head_dim=16, sliding_window=7, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        head_dim=16,
        num_hidden_layers=3,
        sliding_window=7,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt-oss": lambda: _config(
        "GptOssConfig",
        head_dim=16,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3.5": lambda: _config(
        "Qwen3_5TextConfig",
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
    ),
    "deepseek-v2": lambda: _config(
        "DeepseekV2Config",
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
}


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of the zoo in eval mode, by transformers' eager attention until told otherwise."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(ZOO[name](), dtype=dtype, attn_implementation="eager")
    return model.eval()


def prompt(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, implementation: str, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(new tokens [batch, n], the logits they were chosen from [batch, n, vocab])."""
    model.set_attn_implementation(implementation)
    result = model.generate(
        ids, return_dict_in_generate=True, output_logits=True, **{"max_new_tokens": 24, "do_sample": False} | options
    )
    return result.sequences[:, ids.shape[1] :], torch.stack(result.logits, 1)


def float64_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention written out, in the tensors' own dtype; a query that sees nothing gets 0. The mask is bool."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.masked_fill(~attention_mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.view(1, -1, 1, 1).exp()
    return (weights @ value / total.clamp_min(torch.finfo(total.dtype).tiny)).transpose(1, 2).contiguous(), None


def bool_mask(**arguments: Any) -> Tensor:
    return sdpa_mask(**arguments | {"allow_is_causal_skip": False})


def exactly(model: Any, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Logits [batch, tokens, vocab] of the same weights in float64, without a cache.

    Attention is the function above; transformers computes norms and rotations in float32 whatever the model's dtype.
    """
    transformers.AttentionInterface.register("float64", float64_attention)
    transformers.AttentionMaskInterface.register("float64", bool_mask)
    options = dict(attn_implementation="float64", experts_implementation="eager")
    exact = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float64, **options).eval()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = exact(ids, attention_mask=attention_mask, use_cache=False).logits
    assert logits.dtype == torch.float64 and logits.isfinite().all()
    return logits


def audit_flip(model: Any, ids: Tensor, got: Tensor, want: Tensor, attention_mask: Tensor | None = None) -> float:
    """By how much float64 prefers one token over the other where greedy choices first part; the largest over rows.

    ids: the prompts [batch, n]. got, want: new tokens [batch, m] of two runs. 0.0 where they are the same. A margin
    above the noise of the runs' dtype means that one of them is wrong.
    """
    worst = 0.0
    for row in range(ids.shape[0]):
        parts = (got[row] != want[row]).nonzero()
        if len(parts):
            step = int(parts[0])
            tokens = torch.cat((ids[row], want[row, :step]))[None]
            seen = None
            if attention_mask is not None:
                seen = torch.cat((attention_mask[row], attention_mask.new_ones(step)))[None]
            logits = exactly(model, tokens, seen)[0, -1]
            worst = max(worst, abs(float(logits[want[row, step]] - logits[got[row, step]])))
    return worst
