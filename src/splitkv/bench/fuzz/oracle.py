"""What a case must give: float64 over the stored values, all rows at once, on the CPU or a GPU.

Written apart from the kernels and from `splitkv.reference_attention`, which goes query by query and would take most of
a run; `run` holds this file against it on a sample of every run's cases. Beside the answer stand the bounds:

- element by element, what rounding p and out to their dtypes can cost at most, and the contract's f32 tolerance;
- per row, twice the error that rounding every p once costs on average, and one rounding of out. That is below what
  plain PyTorch in the same dtype, which also rounds the logits, gets with the contract's factor of two (a test).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...tiles import compute_dtype
from .cases import Case
from .tensors import DTYPES, Values

F32_MAX_ABS = 1e-5
"""out at unit-normal V, and lse relative, where arithmetic is in f32 (contract.md, Numbers)."""
LOGITS_AT_EASE = 16.0
"""Logits and softcaps up to here cost no more than the above; larger ones carry a proportionally larger rounding."""
F32_TYPICAL = 0.2
"""Of the largest f32 error, what a row may have on average."""
PLAIN_FACTOR = 2.0
F16_STEP = 2.0**-25
"""Half of f16's smallest step: what underflow costs."""


@dataclass(frozen=True)
class Truth:
    """out [rows, queries, heads, v_head_dim] and lse [rows, queries, heads] in float64 on the CPU, the most that each
    element may be off, and the most that each row's error may be in norm."""

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor
    row_bound: Tensor


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to a float dtype given by name."""
    return torch.finfo(DTYPES[dtype]).eps / 2


def visible_keys(case: Case, keys: int) -> Tensor:
    """bool [rows, 1, queries, keys]: what lengths, causality, window, starts and missing pages leave."""
    capacity = case.base.capacity
    position = torch.arange(keys)
    end = torch.tensor([min(max(length, 0), capacity) for length in case.lengths])[:, None, None, None]
    end = end - case.queries + 1 + torch.arange(case.queries)[:, None]
    visible = position < end
    if case.window:
        visible &= position >= end - case.window
    if case.starts is not None:
        visible &= position >= torch.tensor(case.starts)[:, None, None, None]
    for row, column, _ in case.absent:
        page_size = case.base.page_size or 1
        visible[row, :, :, column * page_size : (column + 1) * page_size] = False
    return visible


def solve(case: Case, values: Values, device: str = "cpu") -> Truth:
    """The truth about a case, computed on `device`."""
    rows, keys = case.base.batch, values.k.shape[1]
    grouped = (rows, case.num_kv_heads, case.group_size * case.queries)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(device).double()

    q = wide(values.q).transpose(1, 2).reshape(*grouped, case.head_dim)
    k, v = (wide(x).transpose(1, 2) for x in (values.k, values.v))  # [rows or 1, kv_heads, keys, dim]
    k_scale, v_scale = (_per_head(scale, case.num_kv_heads, device) for scale in (values.k_scale, values.v_scale))
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    logits = (q @ k.transpose(2, 3) * (scale * k_scale)).view(rows, case.num_q_heads, case.queries, keys)
    size = logits.abs()
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    visible = visible_keys(case, keys).to(device).expand_as(logits)
    if values.mask is not None and values.mask.dtype == torch.bool:
        visible = visible & values.mask.to(device)
    elif values.mask is not None:
        bias = wide(values.mask)
        visible = visible & (bias != -torch.inf)
        logits, size = logits + bias, size + bias.abs()
    logits = logits.masked_fill(~visible, -torch.inf)
    size = size.masked_fill(~visible, 0.0).amax(-1)

    columns = [logits]
    if values.sinks is not None:
        columns.append(wide(values.sinks)[None, :, None, None].expand(*logits.shape[:3], 1))
    lse = torch.cat(columns, -1).logsumexp(-1)
    empty = ~visible.any(-1)
    lse = lse.masked_fill(empty, -torch.inf)
    weights = torch.exp(logits - lse.masked_fill(empty, 0.0)[..., None])
    out = (weights.view(*grouped, keys) @ v * v_scale).view(*logits.shape[:3], case.v_head_dim)

    strain = (size / LOGITS_AT_EASE).clamp_min(max((case.softcap or 0.0) / LOGITS_AT_EASE, 1.0))
    in_f32 = F32_MAX_ABS * (v_scale.abs().expand(*grouped, 1).reshape(strain.shape) * strain)[..., None]
    rounded = out.to(DTYPES[case.q_dtype]).double() - out
    bound = unit_roundoff(case.q_dtype) * out.abs() + in_f32
    variance = torch.zeros_like(out)
    if case.q_dtype == "f16":
        bound += F16_STEP
    if compute_dtype(case.q_dtype, case.kv_dtype) != "f32":
        rounding = unit_roundoff(case.q_dtype)  # of p, where products are in 16 bits
        most = weights.view(*grouped, keys) @ v.abs() * v_scale.abs()
        bound += rounding * most.view_as(out)
        variance = rounding**2 / 3 * (weights.view(*grouped, keys) ** 2 @ v**2 * v_scale**2).view_as(out)
    in_f32 = F32_TYPICAL * in_f32.expand_as(out)
    row_bound = PLAIN_FACTOR * variance.sum((1, 2, 3)).sqrt() + _norm(rounded) + _norm(in_f32)
    lse_bound = F32_MAX_ABS * lse.abs().masked_fill(empty, 0.0).clamp_min(1.0) * strain
    results = (out.masked_fill(empty[..., None], 0.0), lse, bound, lse_bound)
    out, lse, bound, lse_bound = (x.transpose(1, 2).cpu() for x in results)
    return Truth(out, lse, bound, lse_bound, row_bound.cpu())


def _per_head(scale: Tensor | float | None, heads: int, device: str) -> Tensor:
    """float64 [heads, 1, 1]."""
    value = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).double().reshape(-1)
    return value.expand(heads)[:, None, None].to(device)


def _norm(x: Tensor) -> Tensor:
    """Of each row."""
    return x.flatten(1).norm(dim=1)
