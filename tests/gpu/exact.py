"""float64 on the GPU for whole batches, and the plain same-dtype PyTorch run that errors are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16_384


def gather(cache: Tensor, row: int, length: int, block_table: Tensor | None) -> Tensor:
    """A row's keys (or values) in order, [length, heads, dim], whatever the layout."""
    if block_table is None:
        return cache[row, :length]
    page_size = cache.shape[1]
    pages = block_table[row, : -(-length // page_size)].long()
    return cache[pages].flatten(0, 1)[:length]


def attend(q: Tensor, keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of one row in `dtype`: q [heads, dim], keys and values [length, kv_heads, dim]."""
    heads, dim = q.shape
    kv_heads = keys.shape[1]
    if not keys.shape[0]:
        return q.new_zeros(heads, values.shape[-1], dtype=dtype), q.new_full((heads,), -torch.inf, dtype=dtype)
    grouped = q.to(dtype).view(kv_heads, heads // kv_heads, dim)
    logits = torch.cat([grouped @ part.to(dtype).permute(1, 2, 0) for part in keys.split(CHUNK)], -1) * dim**-0.5
    weights = logits.softmax(-1)
    parts = zip(weights.split(CHUNK, -1), values.split(CHUNK), strict=True)
    out = sum(share @ part.to(dtype).permute(1, 0, 2) for share, part in parts)
    return out.flatten(0, 1), logits.logsumexp(-1).flatten()  # type: ignore[union-attr]


def exact(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lens: list[int],
    block_table: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out [batch, heads, dim], lse [batch, heads]) of one query per row in `dtype`, by the formula."""
    rows = [
        attend(q[row], gather(k_cache, row, n, block_table), gather(v_cache, row, n, block_table), dtype)
        for row, n in enumerate(lens)
    ]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def relative(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||."""
    return float((out.double() - ref).norm() / ref.norm())
