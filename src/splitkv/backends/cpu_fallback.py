"""What cpu.py answers with where no C compiler works: the kernel's splits and merge tree in vectorised torch.

Slow (K and V are widened to f32 in memory) but held to the same tests. It loops over rows and over chunks of
keys, never over keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..policy import SplitRule

FAN_OUT = 4
CHUNK_KEYS = 8192
"""About how many keys of a row are widened at once: 64 MiB of K and V for 4 KV heads of 256."""


class _Part(NamedTuple):
    """Sums over some keys, in base 2: [splits, num_kv_heads, query rows] and [..., v_head_dim] for acc."""

    maximum: Tensor
    total: Tensor
    acc: Tensor


def attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor | int,
    block_table: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    out: Tensor,
    lse: Tensor | None,
    softmax_scale: float,
    window: int,
    softcap: float,
    rule: SplitRule,
) -> None:
    """Fill out and lse. Arguments as of `cpu.launch`."""
    batch, q_len, num_q_heads, _ = q.shape
    num_kv_heads, page_size = k.shape[2], max(k.shape[1], 1)
    table = torch.arange(batch)[:, None] if block_table is None else block_table
    capacity = table.shape[1] * k.shape[1]
    lengths = torch.as_tensor(seq_lens).expand(batch).clamp(0, capacity).tolist()
    k_scale, v_scale = (torch.as_tensor(x, dtype=torch.float32).expand(num_kv_heads) for x in (k_scale, v_scale))
    scale = softmax_scale * k_scale[:, None, None]

    for b in range(batch):
        length = lengths[b]
        start = 0 if starts is None else max(int(starts[b]), 0)
        ends = length - q_len + 1 + torch.arange(q_len)
        begins = (ends - window).clamp(min=start) if window else torch.full_like(ends, start)
        first = max(int(begins[0]), 0)
        split_len, num_splits = rule.split(max(length - first, 0))
        rows = _group(q[b].transpose(0, 1).float(), num_kv_heads)  # [num_kv_heads, group * q_len, head_dim]
        per_chunk = max(CHUNK_KEYS // split_len, 1)
        parts = []
        for split in range(0, num_splits, per_chunk):
            positions = first + split * split_len + torch.arange(min(per_chunk, num_splits - split) * split_len)
            inside = positions < length
            page = table[b].long()[torch.where(inside, positions // page_size, 0)]
            present = inside & (page >= 0) & (page < k.shape[0])
            keys, values = (_gather(x, page, positions % page_size, present) for x in (k, v))

            logits = torch.einsum("hrd,nhd->hrn", rows, keys) * scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            visible = (present & (positions >= begins[:, None]) & (positions < ends[:, None]))[None]
            if mask is not None:
                bias = mask[b][..., torch.where(inside, positions, 0)]  # [num_q_heads, q_len, keys]
                visible = visible & (bias if bias.dtype == torch.bool else bias != -math.inf)
                logits = logits + (0.0 if bias.dtype == torch.bool else _group(bias.float(), num_kv_heads))
            hidden = ~_group(visible.expand(num_q_heads, -1, -1), num_kv_heads)
            scores = (logits * math.log2(math.e)).masked_fill(hidden, -math.inf)
            parts.append(_leaves(scores.unflatten(-1, (-1, split_len)), values.unflatten(0, (-1, split_len))))

        if parts:
            root = _root(_Part(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))))
        else:
            root = _empty(1, num_kv_heads, rows.shape[1], v.shape[3])
        result, log_sum = _finish(root, sinks, v_scale, q_len)
        out[b].copy_(result.flatten(0, 1).unflatten(0, (num_q_heads, q_len)).transpose(0, 1))
        if lse is not None:
            lse[b].copy_(log_sum.view(num_q_heads, q_len).t())


def _group(x: Tensor, num_kv_heads: int) -> Tensor:
    """[num_q_heads, q_len, n] -> [num_kv_heads, group * q_len, n]: the query rows that share a KV head."""
    return x.unflatten(0, (num_kv_heads, -1)).flatten(1, 2)


def _gather(pages: Tensor, page: Tensor, slot: Tensor, present: Tensor) -> Tensor:
    """f32 [keys, num_kv_heads, dim], zeros for absent keys."""
    found = torch.zeros(len(page), *pages.shape[2:])
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages  # fp8 has no indexing of its own
    found[present] = raw[page[present], slot[present]].view(pages.dtype).float()
    return found


def _leaves(scores: Tensor, values: Tensor) -> _Part:
    """scores [num_kv_heads, rows, splits, keys], values [splits, keys, num_kv_heads, v_head_dim]."""
    scores = scores.permute(2, 0, 1, 3)
    maximum = scores.amax(-1)
    weights = torch.exp2(scores - _finite_or_zero(maximum)[..., None])
    return _Part(maximum, weights.sum(-1), _weighted_values(weights, values))


def _weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    if values.isfinite().all():
        return torch.einsum("shrn,snhv->shrv", weights, values)
    # A NaN or Inf counts for the query rows that see its key, and for them only: one row at a time.
    unseen = (weights == 0).permute(0, 3, 1, 2)  # [splits, keys, num_kv_heads, rows]
    rows = (
        torch.einsum("shn,snhv->shv", weights[:, :, r], values.masked_fill(unseen[..., r, None], 0.0))
        for r in range(weights.shape[2])
    )
    return torch.stack(list(rows), dim=2)


def _root(parts: _Part) -> _Part:
    """Join neighbours four by four, level by level; places without a part are neutral."""
    while (count := len(parts.total)) > 1:
        missing = _empty(-count % FAN_OUT, *parts.acc.shape[1:])
        children = [torch.cat(pair).unflatten(0, (-1, FAN_OUT)) for pair in zip(parts, missing, strict=True)]
        parts = _Part(*(x[:, 0] for x in children))
        for i in range(1, FAN_OUT):
            parts = _join(parts, _Part(*(x[:, i] for x in children)))
    return parts


def _join(a: _Part, b: _Part) -> _Part:
    maximum = torch.maximum(a.maximum, b.maximum)
    weight_a, weight_b = (torch.exp2(x.maximum - _finite_or_zero(maximum)) for x in (a, b))
    acc = a.acc * weight_a[..., None] + b.acc * weight_b[..., None]
    return _Part(maximum, a.total * weight_a + b.total * weight_b, acc)


def _finish(root: _Part, sinks: Tensor | None, v_scale: Tensor, q_len: int) -> tuple[Tensor, Tensor]:
    """Normalised [num_kv_heads, rows, v_head_dim] and natural-log sums [num_kv_heads, rows]; the sink joins once."""
    maximum, total, acc = (x[0] for x in root)
    empty = total == 0
    if sinks is not None:
        sink = _group((sinks * math.log2(math.e))[:, None, None].expand(-1, q_len, 1), maximum.shape[0])[..., 0]
        top = torch.maximum(maximum, sink)
        base = _finite_or_zero(top)
        weight = torch.exp2(maximum - base)
        maximum, total, acc = top, total * weight + torch.exp2(sink - base), acc * weight[..., None]
    out = acc / total[..., None] * v_scale[:, None, None]
    log_sum = (maximum.double() + total.double().log2()) * math.log(2.0)
    return out.masked_fill(empty[..., None], 0.0), log_sum.masked_fill(empty, -math.inf).float()


def _empty(count: int, num_kv_heads: int, rows: int, dim: int) -> _Part:
    shape = (count, num_kv_heads, rows)
    return _Part(torch.full(shape, -math.inf), torch.zeros(shape), torch.zeros(*shape, dim))


def _finite_or_zero(maximum: Tensor) -> Tensor:
    """A maximum that may be subtracted: -inf - -inf would be NaN."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)
