"""Backend "rowwise": one block per query head reads all of a row's keys, no splits, no merge.

The baseline that splitting is timed against, and a second opinion on it: for a row of one split its bytes are
those of backend "triton", which adds the same tiles in the same order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..plan import DecodePlan
from .launching import on_device
from .triton_launch import INTERPRETED, compile_options, row_arguments, tile_arguments
from .triton_prepared import KernelCall, TritonLaunch
from .triton_tile import attend_tile, close_split, finish, load_bounds, load_queries, load_scales


@triton.jit(do_not_specialize=["uniform_len", "capacity", "num_pages", "window", "mask_stride_b", "mask_stride_h",
                               "mask_stride_i", "mask_stride_n"])  # fmt: skip
def rowwise_kernel(
    q, k_cache, v_cache, seq_lens, block_table, starts, mask, sinks, k_scales, v_scales, out, lse,
    q_stride_b, q_stride_i, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    table_stride, mask_stride_b, mask_stride_h, mask_stride_i, mask_stride_n,
    out_stride_b, out_stride_i, out_stride_h, lse_stride_b, lse_stride_i, lse_stride_h,
    k_scale_stride, v_scale_stride, uniform_len, capacity, num_pages, window, scale, v_scale, softcap,
    GROUP: tl.constexpr, Q_LEN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, TILE_M: tl.constexpr, BLOCK_N: tl.constexpr,
    V_IN_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_LENS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_K_SCALES: tl.constexpr,
    HAS_V_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr, MASK: tl.constexpr,
    COMPUTE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, query heads, blocks of queries)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // GROUP
    lo, hi, _ = load_bounds(seq_lens, uniform_len, starts, row, True, capacity, window, HAS_LENS, HAS_STARTS,
                            Q_LEN)  # fmt: skip
    first_query = tl.program_id(2) * BLOCK_M
    query = first_query + tl.arange(0, TILE_M) % BLOCK_M
    valid = query < Q_LEN
    dv = tl.arange(0, BLOCK_DV)
    q_tile, q_rest, mask_row = load_queries(q, row, head, query, valid, q_stride_b, q_stride_i, q_stride_h,
                                            mask_stride_b, mask_stride_i, mask_stride_h, D, BLOCK_D, REST_D,
                                            COMPUTE)  # fmt: skip
    causal_end = hi - (Q_LEN - 1) + query
    scale, v_scale = load_scales(scale, v_scale, k_scales, v_scales, kv_head, k_scale_stride, v_scale_stride,
                                 HAS_K_SCALES, HAS_V_SCALES)  # fmt: skip
    acc = tl.zeros([TILE_M, BLOCK_DV], tl.float32)
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_M, BLOCK_N], tl.float32)
    for n0 in tl.range(lo, hi, BLOCK_N, num_stages=NUM_STAGES):
        acc, m, sums = attend_tile(
            acc, m, sums, q_tile, q_rest, n0, hi, causal_end, row, kv_head,
            k_cache, v_cache, block_table, mask, mask_row,
            k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride, mask_stride_n,
            num_pages, scale, softcap, window,
            D, DV, BLOCK_D, REST_D, BLOCK_DV, BLOCK_M, TILE_M, BLOCK_N, V_IN_K, Q_LEN, PAGE_SIZE, HAS_SOFTCAP, MASK,
            COMPUTE,
        )  # fmt: skip
    acc, m, l = close_split(acc, m, sums, BLOCK_M, TILE_M, BLOCK_DV)
    query = first_query + tl.arange(0, BLOCK_M)
    valid = query < Q_LEN
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head)
    result, result_lse = finish(acc, m, l, sink, v_scale, HAS_SINKS)
    out_rows = out + row * out_stride_b + query.to(tl.int64) * out_stride_i + head.to(tl.int64) * out_stride_h
    tl.store(out_rows[:, None] + dv[None, :], result.to(out.dtype.element_ty),
             mask=valid[:, None] & (dv < DV)[None, :])  # fmt: skip
    if HAS_LSE:
        tl.store(
            lse + row * lse_stride_b + query.to(tl.int64) * lse_stride_i + head.to(tl.int64) * lse_stride_h,
            result_lse,
            mask=valid,
        )


def launch(*, q: Tensor, **arguments: Any) -> None:
    """As triton_launch.launch; the plan's tile and geometry are used, its splits and the workspace are not."""
    call = kernel_call(q=q, **arguments)
    with on_device(q):
        call.kernel[call.grid](**call.arguments, **call.options)


def prepare(**arguments: Any) -> TritonLaunch | None:
    """As triton_launch.prepare."""
    return None if INTERPRETED else TritonLaunch([kernel_call(**arguments)], arguments)


def kernel_call(*, plan: DecodePlan, **arguments: Any) -> KernelCall:
    """The launch of one call."""
    problem = plan.problem
    return KernelCall(
        rowwise_kernel,
        (problem.batch, problem.num_q_heads, triton.cdiv(problem.q_len, plan.tile.block_m)),
        row_arguments(plan=plan, **arguments) | tile_arguments(plan=plan, **arguments),
        compile_options(plan.tile),
    )
