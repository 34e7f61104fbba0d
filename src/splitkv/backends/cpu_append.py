"""Append on the CPU, in torch: the same rule as triton_append.py, which says what is written and what is not."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FEW_ROWS = 4
"""Up to this many, a copy per row is quicker than one scattered write: with one 25 us for 118, with four 38 for 105."""


def append(
    *,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    dropped: Tensor,
    rows: Tensor | None,
    lens: Tensor | None,
    block_table: Tensor | None,
    bounds: Tensor | None,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Arguments as in triton_append.append."""
    batch, page_size = seq_lens.shape[0], k_cache.shape[1]
    given, n = k.shape[:2]
    if given <= FEW_ROWS and rows is None and lens is None and block_table is None and bounds is None:
        starts = seq_lens.tolist()
        if all(0 <= start <= page_size - n for start in starts):  # a decode step: every token has its place
            for tensor, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
                for tokens, held, start in zip(to_storage(tensor, scale, cache.dtype), cache, starts, strict=True):
                    held[start : start + n] = tokens
            seq_lens += n
            return
    row = torch.arange(given) if rows is None else rows.long()
    is_row = (row >= 0) & (row < batch)
    source = is_row.nonzero().flatten()
    row = row[source]
    start = seq_lens[row].long()
    wanted = torch.full_like(row, n) if lens is None else lens[source].long().clamp(0, n)
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    first, end = (torch.zeros_like(row), torch.full_like(row, capacity)) if bounds is None else bounds[row].long().T
    first, end = first.clamp(min=0), end.clamp(max=capacity)
    count = torch.where((start >= first) & (start <= end), torch.minimum(wanted, end - start), 0)

    i, token = (torch.arange(n) < count[:, None]).nonzero(as_tuple=True)
    outer, position = row[i], start[i] + token
    i = source[i]
    if block_table is not None:
        outer = block_table[outer, position // page_size].long()
        inside = (outer >= 0) & (outer < k_cache.shape[0])
        i, token, outer, position = i[inside], token[inside], outer[inside], position[inside] % page_size
    for tensor, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        cache[outer, position] = to_storage(tensor[i, token], scale, cache.dtype)
    seq_lens[row] += count.int()
    dropped[row] += wanted - count


def to_storage(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x [..., num_kv_heads, dim] / scale in `dtype`; fp8 holds its largest value for what is above, 0x7F for NaN."""
    if isinstance(scale, Tensor):
        x = x.float() / scale[:, None]
    elif scale != 1.0:
        x = x.float() / torch.tensor(scale, dtype=torch.float32)
    if dtype in FP8:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
        x = torch.where(x.isnan(), torch.nan, x)  # one NaN, whatever its sign was
    return x.to(dtype)
