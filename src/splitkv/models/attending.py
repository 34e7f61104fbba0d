"""Attention of a chunk of tokens by torch, and rotary positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Causal attention of the last tokens of a row over all of it, by torch.

    q: [tokens, num_q_heads, head_dim]. k, v: [end, num_kv_heads, head_dim]. scale: of the logits, which softcap c then
    makes c tanh(logits / c). Returns q's shape.
    """
    from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler along, which takes a second

    tokens, end = q.shape[0], k.shape[0]
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    if softcap is not None:
        return _capped_attention(q[0].unflatten(0, (-1, group)), k[0], v[0], window, scale, softcap)
    if q.is_cuda and (q.dtype == torch.float32 or window is not None):
        # Flash attention knows groups but neither f32 nor masks; the kernel that knows those wants equal heads.
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    mask: Any = causal_lower_right(tokens, end) if window is None else _visible(tokens, end, window, q.device)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=group > 1)
    return attended.squeeze(0).transpose(0, 1)


def _visible(tokens: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `end` keys the last `tokens` of them see: [tokens, end]."""
    query, key = torch.arange(end - tokens, end, device=device)[:, None], torch.arange(end, device=device)
    return (key <= query) if window is None else (key <= query) & (key > query - window)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, softcap: float) -> Tensor:
    """chunk_attention where logits are capped, which torch's kernels do not know: one KV head at a time.

    q: [num_kv_heads, group, tokens, head_dim]. k, v: [num_kv_heads, end, head_dim].
    """
    hidden = ~_visible(q.shape[2], k.shape[1], window, q.device)
    heads = []
    for queries, keys, values in zip(q, k, v, strict=True):
        logits = (
            (queries @ keys.mT).float().mul_(scale / softcap).tanh_().mul_(softcap).masked_fill_(hidden, -torch.inf)
        )
        heads.append(logits.softmax(-1).to(values.dtype) @ values)
    return torch.cat(heads).transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first 2 * pairs columns. x: [tokens, heads, head_dim]. cos, sin: [tokens, 1, pairs]."""
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
