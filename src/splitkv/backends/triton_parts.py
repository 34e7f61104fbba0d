"""Attention over disjoint sets of keys, put together in one launch: what `merge_states` does in a dozen.

Every rank of a context split does this once per layer, between the last byte of the exchange and the next product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launching import on_device


@triton.jit(do_not_specialize=["parts", "outs_step", "lses_step"])
def parts_kernel(
    outs, lses, sinks, out, lse, parts, outs_step, lses_step,
    NUM_Q_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: one block per query vector. Parts are added in their order, so every rank computes the same bytes."""
    vector = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    for part in range(parts):
        top = tl.maximum(top, tl.load(lses + part * lses_step + vector))
    empty = top == float("-inf")
    base = tl.where(empty, 0.0, top)  # -inf - -inf would be NaN
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for part in range(parts):
        weight = tl.exp(tl.load(lses + part * lses_step + vector) - base)
        values = tl.load(outs + part * outs_step + vector * DV + columns, mask=columns < DV, other=0.0)
        acc += tl.where(weight > 0.0, values.to(tl.float32), 0.0) * weight
        total += weight
    if HAS_SINKS:
        sink = tl.load(sinks + vector % NUM_Q_HEADS)
        high = tl.where(empty, 0.0, tl.maximum(top, sink))
        acc *= tl.exp(base - high)
        total = total * tl.exp(base - high) + tl.exp(sink - high)
        base = high
    result = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out + vector * DV + columns, result.to(out.dtype.element_ty), mask=columns < DV)
    tl.store(lse + vector, tl.where(empty, float("-inf"), base + tl.log(total)))


def merge_parts(*, outs: Tensor, lses: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """`merge_states` of outs [parts, vectors, v_head_dim] and lses [parts, vectors] into out and lse, in f32.

    Vectors of a part lie one behind the other, and heads vary fastest: sinks [num_q_heads] f32 are one more logit in
    the denominator of each that sees a key. Allocates nothing and waits for nothing.
    """
    parts, vectors, v_head_dim = outs.shape
    with on_device(outs):
        parts_kernel[(vectors,)](
            outs=outs,
            lses=lses,
            sinks=lses if sinks is None else sinks,
            out=out,
            lse=lse,
            parts=parts,
            outs_step=outs.stride(0),
            lses_step=lses.stride(0),
            NUM_Q_HEADS=1 if sinks is None else sinks.shape[0],
            DV=v_head_dim,
            BLOCK_DV=triton.next_power_of_2(v_head_dim),
            HAS_SINKS=sinks is not None,
            num_warps=2,
            enable_fp_fusion=False,
        )
