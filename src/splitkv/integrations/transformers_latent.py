"""Latent attention (DeepSeek-V2 and its kin) decoded on the latents, without expanding them.

transformers caches one latent c [kv_lora_rank] and one rotated key r [qk_rope_head_dim] per token and, at every step,
expands all of them to keys and values of every head by `kv_b_proj`, whose rows are W_k and W_v of each head. Since
q·(W_k c) = (W_k^T q)·c and sum p (W_v c) = W_v sum p c, the query and the output can be multiplied instead: attention
then has one KV head, with keys [c, r] and values c.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from splitkv import UnsupportedError

from .transformers_cache import StoredKV

_METHOD = "expand_kv"  # of transformers' latent attention layers: (latents, rotated keys) -> (keys, values)
_PARTS = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_heads")


def absorb_latents(model: nn.Module) -> int:
    """Let a model's latent attention layers decode on the latents; returns how many layers do. Safe to call twice.

    Only `attn_implementation="splitkv"` can run the model afterwards; prefill still expands. The cache keeps what it
    kept: with transformers' caches latents and rotated keys are joined at every step, a copy that SplitKVCache spares.

    Raises TypeError, and UnsupportedError for a model without such layers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    layers = [module for module in model.modules() if hasattr(type(module), _METHOD)]
    if not layers or any(not hasattr(layer, name) for layer in layers for name in _PARTS):
        raise UnsupportedError(
            f"model: supported are models whose attention has {_METHOD} and {', '.join(_PARTS)}, as DeepSeek-V2's, got "
            f"{type(model).__name__}"
        )
    for layer in layers:
        if not isinstance(layer.kv_b_proj, nn.Linear) or layer.kv_b_proj.bias is not None:
            raise UnsupportedError(
                f"model: supported is a kv_b_proj that is a torch.nn.Linear without bias, got {layer.kv_b_proj}"
            )
    for layer in layers:
        setattr(layer, _METHOD, _as_they_are)
    return len(layers)


def is_absorbed(module: Any) -> bool:
    """Whether this layer hands on latents as keys and rotated keys as values."""
    return getattr(module, _METHOD, None) is _as_they_are


def expand(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, by the layer's own method."""
    return getattr(type(module), _METHOD)(module, latents, rotated)


def joined(latents: Tensor, rotated: Tensor) -> StoredKV:
    """[batch, 1, n, rank] and [batch, 1, n, rope] as one cache; copies."""
    k_cache = torch.cat((latents, rotated), dim=-1).transpose(1, 2)
    return StoredKV(k_cache, k_cache[..., : latents.shape[-1]])


def absorbed_query(module: Any, query: Tensor) -> Tensor:
    """[batch, heads, n, nope + rope] to [batch, heads, n, rank + rope]: W_k^T q of each head, then the rotated part."""
    w_k = _per_head(module)[:, : module.qk_nope_head_dim]
    nope, rope = query.split((module.qk_nope_head_dim, query.shape[-1] - module.qk_nope_head_dim), dim=-1)
    return torch.cat((torch.einsum("bhtn,hnr->bhtr", nope, w_k), rope), dim=-1)


def projected(module: Any, out: Tensor) -> Tensor:
    """[batch, n, heads, rank] to [batch, n, heads, v_head_dim]: W_v of each head."""
    w_v = _per_head(module)[:, module.qk_nope_head_dim :]
    return torch.einsum("bthr,hvr->bthv", out, w_v).contiguous()


def _per_head(module: Any) -> Tensor:
    return module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated
