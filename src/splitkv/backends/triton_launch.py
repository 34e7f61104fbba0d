"""Launcher of backend "triton": from checked tensors and a plan to the two kernels. Allocates and decides nothing."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan import DecodePlan
from ..problem import Q_DTYPES
from ..tiles import TileConfig, column_blocks
from .launching import on_device, steps
from .triton_merge import merge_kernel
from .triton_prepared import KernelCall, TritonLaunch
from .triton_split import split_kernel

TRITON_DTYPES = dict(zip(Q_DTYPES, (tl.float32, tl.float16, tl.bfloat16), strict=True))
INTERPRETED = not isinstance(split_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when the kernels were defined: they then run on CPU tensors."""

MAX_PARTS = 64
MERGE_COLUMNS = 64
MAX_BATCH_BLOCK = 1024


def launch(*, q: Tensor, **arguments: Any) -> None:
    """Split, then merge where the plan splits, on the current stream of q's device.

    Shapes as in contract.md with q, out [batch, q_len, num_q_heads, dim] and lse one dimension less; mask
    expanded to [batch, num_q_heads, q_len, capacity]; window 0 and softcap 0.0 mean none; k_scale and v_scale
    a float or one float32 per KV head; workspace holds plan.workspace_bytes.
    """
    with on_device(q):
        for call in kernel_calls(q=q, **arguments):
            call.kernel[call.grid](**call.arguments, **call.options)


def prepare(**arguments: Any) -> TritonLaunch | None:
    """`launch` with all but addresses and a uniform length fixed (backends.PreparedLaunch); None in the interpreter."""
    return None if INTERPRETED else TritonLaunch(kernel_calls(**arguments), arguments)


def kernel_calls(
    *, q: Tensor, lse: Tensor | None, workspace: Tensor | None, plan: DecodePlan, **arguments: Any
) -> list[KernelCall]:
    """The launches of one call, in order."""
    problem, tile, rule = plan.problem, plan.tile, plan.rule
    rows = row_arguments(q=q, lse=lse, plan=plan, **arguments)
    rows |= dict(
        batch=problem.batch,
        target=rule.target,
        min_len=rule.min_len,
        quantum=rule.quantum,
        target_units=plan.target_units,
        max_splits=plan.max_splits,
        MAX_RUN=plan.max_run,
        BATCH_BLOCK=1 if plan.max_run == 1 else min(triton.next_power_of_2(problem.batch), MAX_BATCH_BLOCK),
        PDL=plan.splits and plan.device.capability >= (9, 0) and not INTERPRETED,
        partial_out=q,
        partial_ml=q,
    )
    if plan.splits:
        floats = workspace.view(torch.uint8)[: plan.workspace_bytes].view(torch.float32)  # type: ignore[union-attr]
        acc_size = plan.max_units * problem.num_q_heads * problem.q_len * problem.v_head_dim
        rows |= dict(partial_out=floats[:acc_size], partial_ml=floats[acc_size:])
    dependent = {"launch_pdl": True} if rows["PDL"] else {}
    split = KernelCall(
        split_kernel,
        plan.grid,
        rows
        | tile_arguments(q=q, plan=plan, **arguments)
        | dict(
            NUM_KV_HEADS=problem.num_kv_heads,
            ROWS_PER_BLOCK=plan.rows_per_block,
            ROW_BLOCKS=plan.row_blocks,
            SPLITS=plan.splits,
        ),
        dependent | compile_options(tile),
    )
    if not plan.splits:
        return [split]
    columns = min(MERGE_COLUMNS, triton.next_power_of_2(problem.v_head_dim))
    merge = KernelCall(
        merge_kernel,
        (problem.batch * problem.num_q_heads * problem.q_len, triton.cdiv(problem.v_head_dim, columns), 1),
        rows | dict(NUM_Q_HEADS=problem.num_q_heads, BLOCK_DV=columns, PARTS=merge_parts(plan)),
        dependent | dict(num_warps=4, enable_fp_fusion=False),
    )
    return [split, merge]


def row_arguments(
    *,
    q: Tensor,
    seq_lens: Tensor | int,
    window: int,
    sinks: Tensor | None,
    starts: Tensor | None,
    v_scale: Tensor | float,
    out: Tensor,
    lse: Tensor | None,
    plan: DecodePlan,
    **_: Any,
) -> dict[str, Any]:
    """What every kernel takes: a row's bounds and where its answer goes. Absent tensors are stood in for by q."""
    problem = plan.problem
    out_steps, lse_steps = steps(out, 3), steps(lse, 3)
    return dict(
        seq_lens=seq_lens if isinstance(seq_lens, Tensor) else q,
        uniform_len=0 if isinstance(seq_lens, Tensor) else seq_lens,
        starts=q if starts is None else starts,
        sinks=q if sinks is None else sinks,
        v_scales=v_scale if isinstance(v_scale, Tensor) else q,
        v_scale=1.0 if isinstance(v_scale, Tensor) else v_scale,
        v_scale_stride=v_scale.stride(0) if isinstance(v_scale, Tensor) else 0,
        out=out,
        lse=out if lse is None else lse,
        out_stride_b=out_steps[0],
        out_stride_i=out_steps[1],
        out_stride_h=out_steps[2],
        lse_stride_b=lse_steps[0],
        lse_stride_i=lse_steps[1],
        lse_stride_h=lse_steps[2],
        capacity=problem.capacity,
        window=window,
        GROUP=problem.group_size,
        Q_LEN=problem.q_len,
        DV=problem.v_head_dim,
        HAS_LENS=isinstance(seq_lens, Tensor),
        HAS_STARTS=starts is not None,
        HAS_SINKS=sinks is not None,
        HAS_V_SCALES=isinstance(v_scale, Tensor),
        HAS_LSE=lse is not None,
    )


def tile_arguments(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    softmax_scale: float,
    softcap: float,
    mask: Tensor | None,
    k_scale: Tensor | float,
    plan: DecodePlan,
    **_: Any,
) -> dict[str, Any]:
    """What the kernels that read the cache take besides."""
    problem, tile = plan.problem, plan.tile
    q_steps, k_steps, v_steps, mask_steps = steps(q, 3), steps(k_cache, 3), steps(v_cache, 3), steps(mask, 4)
    block_d, rest_d = column_blocks(problem.head_dim)
    v_in_k = rest_d > 0 and k_cache.data_ptr() == v_cache.data_ptr() and k_steps == v_steps
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.int8)  # Triton has no pointer to bool to load bytes from
    return dict(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=q if block_table is None else block_table,
        mask=q if mask is None else mask,
        k_scales=k_scale if isinstance(k_scale, Tensor) else q,
        q_stride_b=q_steps[0],
        q_stride_i=q_steps[1],
        q_stride_h=q_steps[2],
        k_stride_b=k_steps[0],
        k_stride_t=k_steps[1],
        k_stride_h=k_steps[2],
        v_stride_b=v_steps[0],
        v_stride_t=v_steps[1],
        v_stride_h=v_steps[2],
        table_stride=steps(block_table, 1)[0],
        mask_stride_b=mask_steps[0],
        mask_stride_h=mask_steps[1],
        mask_stride_i=mask_steps[2],
        mask_stride_n=mask_steps[3],
        k_scale_stride=k_scale.stride(0) if isinstance(k_scale, Tensor) else 0,
        num_pages=k_cache.shape[0],
        scale=softmax_scale if isinstance(k_scale, Tensor) else softmax_scale * k_scale,
        softcap=softcap,
        D=problem.head_dim,
        BLOCK_D=block_d,
        REST_D=rest_d,
        V_IN_K=v_in_k,
        BLOCK_DV=triton.next_power_of_2(problem.v_head_dim),
        BLOCK_M=tile.block_m,
        TILE_M=tile.tile_m,
        BLOCK_N=tile.block_n,
        PAGE_SIZE=problem.page_size or 0,
        HAS_K_SCALES=isinstance(k_scale, Tensor),
        HAS_SOFTCAP=softcap > 0.0,
        MASK="none" if mask is None else "bool" if mask.dtype == torch.int8 else "additive",
        COMPUTE=TRITON_DTYPES[tile.compute],
        NUM_STAGES=plan.num_stages + (tile.v_in_k_stages if v_in_k else 0),
    )


def compile_options(tile: TileConfig) -> dict[str, Any]:
    """No fused multiply-adds but those written out: then every variant of a kernel rounds alike. Blocks of one warp,
    or of eight, may have every register: left alone, ptxas aims at more blocks per SM and spills."""
    options: dict[str, Any] = dict(num_warps=tile.num_warps, enable_fp_fusion=False)
    return options | ({"maxnreg": 255} if tile.num_warps != 4 else {})


def merge_parts(plan: DecodePlan) -> int:
    """Parts the merge joins at once: 4, 16 or 64, whichever holds a row's units."""
    return 4 if plan.max_splits <= 4 else 16 if plan.max_splits <= 16 else MAX_PARTS
