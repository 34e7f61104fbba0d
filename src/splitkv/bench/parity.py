"""Is it right? Errors against float64, the difference from a baseline, and the rules that withhold a speed.

The measuring stick is the formula itself in float64, chunk by chunk with plain PyTorch operations on whatever
device holds the cache, because 262,144 keys take the CPU oracle (`splitkv.reference_attention`) many seconds.
It shares no code with the kernels, and `rungs` holds it against that oracle on the first keys of every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_KEYS = 16_384
"""Keys widened to float64 at once: 128 MiB of K for 4 heads of 256."""
F32_MAX_ABS = 1e-5
"""f32 KV against float64 at unit-normal V (contract.md, Numbers)."""
PLAIN_FACTOR = 2.0
"""16-bit KV: at most this many times the error of plain PyTorch in the same dtype, plus one rounding."""
BASELINE_FACTOR = 1.05
"""No worse than the baseline, beyond rounding."""
F32_SLACK = 1e-6
"""Relative error that a different order of f32 sums may cost: eight units in the last place."""
STICK_TOLERANCE = 1e-12
"""Relative difference allowed between this file's float64 and the oracle's."""

RULES = (
    f"f32: max abs error against float64 <= {F32_MAX_ABS:g}",
    f"f16, bf16: error <= {PLAIN_FACTOR:g} x PyTorch SDPA's in the same dtype + one rounding of the output",
    f"all: error <= {BASELINE_FACTOR:g} x the baseline's + one rounding of the output (f32: + {F32_SLACK:g})",
    "error is ||out - ref|| / ||ref|| with ref in float64 over the stored values",
    "one rounding of the output is ||round(ref) - ref|| / ||ref||",
)


def float64_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v in float64 over every key given.

    q: [batch, num_q_heads, head_dim]. k, v: [batch, keys, num_kv_heads, head_dim or v_head_dim], any float
    dtype, on q's device. Returns [batch, num_q_heads, v_head_dim] in float64 there. Two passes: the logits of
    all keys, then their softmax, so there is no running maximum to get wrong.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    grouped = q.double().view(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim) * head_dim**-0.5
    logits = torch.cat([grouped @ keys.double().permute(0, 2, 3, 1) for keys in k.split(CHUNK_KEYS, dim=1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)
    out = torch.zeros(*grouped.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
    for share, values in zip(weights.split(CHUNK_KEYS, dim=-1), v.split(CHUNK_KEYS, dim=1), strict=True):
        out += share @ values.double().permute(0, 2, 1, 3)
    return out.flatten(1, 2)


@dataclass(frozen=True)
class Error:
    """relative: ||out - ref|| / ||ref||. max_abs: largest |out - ref|. Both NaN if out holds a NaN."""

    relative: float
    max_abs: float


def error_of(out: Tensor, ref: Tensor) -> Error:
    """Error of a result against the float64 reference of the same shape."""
    difference = out.double() - ref
    return Error(float(difference.norm() / ref.norm()), float(difference.abs().max()))


def rounding_of(ref: Tensor, dtype: torch.dtype) -> float:
    """Relative error that storing the exact result in `dtype` costs: what no kernel can avoid."""
    return error_of(ref.to(dtype), ref).relative


def difference_of(out: Tensor, baseline: Tensor) -> dict[str, float]:
    """max_abs, relative (||out - baseline|| / ||baseline||) and cosine between two results."""
    a, b = out.double().flatten(), baseline.double().flatten()
    error = error_of(a, b)
    return {
        "max_abs": error.max_abs,
        "relative": error.relative,
        "cosine": float(a @ b / (a.norm() * b.norm())),
    }


def judge(kv_dtype: str, ours: Error, baseline: Error, plain: Error, rounding: float) -> list[str]:
    """Why our result is not good enough to have its speed printed; empty if it is. NaN never is."""
    failures = []
    if kv_dtype == "f32":
        if not ours.max_abs <= F32_MAX_ABS:
            failures.append(f"max abs error {ours.max_abs:.2g} against float64 is over {F32_MAX_ABS:g}")
    else:
        limit = PLAIN_FACTOR * plain.relative + rounding
        if not ours.relative <= limit:
            failures.append(f"error {ours.relative:.2g} against float64 is over {limit:.2g} (2 x PyTorch + a rounding)")
    limit = BASELINE_FACTOR * baseline.relative + (F32_SLACK if kv_dtype == "f32" else rounding)
    if not ours.relative <= limit:
        failures.append(
            f"error {ours.relative:.2g} against float64 is worse than the baseline's {baseline.relative:.2g}"
        )
    return failures
