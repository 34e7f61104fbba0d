"""Backend "triton", first kernel: one block attends to one unit of a row for a whole group of query heads.

Nothing is compiled for a mask's strides: loads of another shape would bring sums of another order (test_layouts.py).
A unit is an aligned run of splits (plan.py). A row with a single unit is finished here; otherwise the block
writes its part to the workspace and triton_merge.py joins the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_tile import (
    attend_tile,
    close_split,
    finish,
    join,
    keys_per_run,
    load_bounds,
    load_queries,
    load_scales,
    units_of,
)


@triton.jit(do_not_specialize=["uniform_len", "batch", "capacity", "num_pages", "window", "target", "min_len",
                               "quantum", "target_units", "max_splits", "mask_stride_b", "mask_stride_h",
                               "mask_stride_i", "mask_stride_n"])  # fmt: skip
def split_kernel(
    q, k_cache, v_cache, seq_lens, block_table, starts, mask, sinks, k_scales, v_scales,
    out, lse, partial_out, partial_ml,
    q_stride_b, q_stride_i, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    table_stride, mask_stride_b, mask_stride_h, mask_stride_i, mask_stride_n,
    out_stride_b, out_stride_i, out_stride_h, lse_stride_b, lse_stride_i, lse_stride_h,
    k_scale_stride, v_scale_stride,
    uniform_len, batch, capacity, num_pages, window, scale, v_scale, softcap,
    target, min_len, quantum, target_units, max_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, TILE_M: tl.constexpr,
    BLOCK_N: tl.constexpr, V_IN_K: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr, ROW_BLOCKS: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_RUN: tl.constexpr,
    BATCH_BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_K_SCALES: tl.constexpr, HAS_V_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr, MASK: tl.constexpr, COMPUTE: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (units, KV heads x row blocks, rows), or (units of all rows, KV heads x row blocks, 1)."""
    if PDL:  # started while the kernel before still ran: wait for what it wrote
        gdc_wait()
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row_block = tl.program_id(1) % ROW_BLOCKS
    if MAX_RUN == 1:
        row = tl.program_id(2)
        unit = tl.program_id(0)
        slot = row * max_splits + unit
        run_keys = 0
    else:
        # Rows' units are numbered one row after the other; find whose unit this block is.
        slot = tl.program_id(0)
        run_keys = keys_per_run(seq_lens, uniform_len, starts, batch, capacity, window, target_units, HAS_LENS,
                                HAS_STARTS, Q_LEN, BATCH_BLOCK)  # fmt: skip
        row = 0
        first = 0
        seen = 0
        for base in range(0, batch, BATCH_BLOCK):
            rows = base + tl.arange(0, BATCH_BLOCK)
            _, _, spans = load_bounds(seq_lens, uniform_len, starts, rows, rows < batch, capacity, window, HAS_LENS,
                                      HAS_STARTS, Q_LEN)  # fmt: skip
            _, _, units = units_of(spans, run_keys, target, min_len, quantum, MAX_RUN)
            units = tl.where(rows < batch, units, 0)
            before = (seen + tl.cumsum(units) <= slot) & (rows < batch)
            row += tl.sum(before.to(tl.int32))
            first += tl.sum(tl.where(before, units, 0))
            seen += tl.sum(units)
        if slot >= seen:
            return
        unit = slot - first
    lo, hi, span = load_bounds(seq_lens, uniform_len, starts, row, True, capacity, window, HAS_LENS, HAS_STARTS,
                               Q_LEN)  # fmt: skip
    split_len, run, num_units = units_of(span, run_keys, target, min_len, quantum, MAX_RUN)
    if MAX_RUN == 1:
        run = 1
        num_units = tl.maximum(tl.cdiv(span, split_len), 1)
        if unit >= num_units:
            return
    n_begin = lo + unit * run * split_len
    n_end = tl.minimum(n_begin + run * split_len, hi)

    # Query vectors of this block, head by head: vector r is query r % Q_LEN of head r // Q_LEN of the group.
    row64 = tl.cast(row, tl.int64)
    vector = tl.arange(0, TILE_M) % BLOCK_M
    r = row_block * ROWS_PER_BLOCK + vector
    r_valid = (vector < ROWS_PER_BLOCK) & (r < GROUP * Q_LEN)
    query = r % Q_LEN
    head = kv_head * GROUP + r // Q_LEN
    q_tile, q_rest, mask_row = load_queries(q, row64, head, query, r_valid, q_stride_b, q_stride_i, q_stride_h,
                                            mask_stride_b, mask_stride_i, mask_stride_h, D, BLOCK_D, REST_D,
                                            COMPUTE)  # fmt: skip
    causal_end = hi - (Q_LEN - 1) + query
    scale, v_scale = load_scales(scale, v_scale, k_scales, v_scales, kv_head, k_scale_stride, v_scale_stride,
                                 HAS_K_SCALES, HAS_V_SCALES)  # fmt: skip

    acc = tl.zeros([TILE_M, BLOCK_DV], tl.float32)
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_M, BLOCK_N], tl.float32)
    if MAX_RUN > 1:
        acc4 = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        m4 = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l4 = tl.zeros([BLOCK_M], tl.float32)
        acc16, m16, l16 = acc4, m4, l4
        splits_done = 0
    for n0 in tl.range(n_begin, n_end, BLOCK_N, num_stages=NUM_STAGES):
        acc, m, sums = attend_tile(
            acc, m, sums, q_tile, q_rest, n0, n_end, causal_end, row64, kv_head,
            k_cache, v_cache, block_table, mask, mask_row,
            k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride, mask_stride_n,
            num_pages, scale, softcap, window,
            D, DV, BLOCK_D, REST_D, BLOCK_DV, BLOCK_M, TILE_M, BLOCK_N, V_IN_K, Q_LEN, PAGE_SIZE, HAS_SOFTCAP, MASK,
            COMPUTE,
        )  # fmt: skip
        # At the end of a split: join it to its three neighbours' part, and every fourth time those upwards.
        if MAX_RUN > 1 and (n0 + BLOCK_N - n_begin) % split_len == 0:
            part_acc, part_m, part_l = close_split(acc, m, sums, BLOCK_M, TILE_M, BLOCK_DV)
            acc4, m4, l4 = join(acc4, m4, l4, part_acc, part_m, part_l)
            acc = tl.zeros([TILE_M, BLOCK_DV], tl.float32)
            m = tl.full([TILE_M], float("-inf"), tl.float32)
            sums = tl.zeros([TILE_M, BLOCK_N], tl.float32)
            if MAX_RUN > 4:
                splits_done += 1
                if splits_done % 4 == 0:
                    acc16, m16, l16 = join(acc16, m16, l16, acc4, m4, l4)
                    acc4 = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                    m4 = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    l4 = tl.zeros([BLOCK_M], tl.float32)
    if PDL:  # not sooner: blocks of the merge that wait would take the place of blocks that read
        gdc_launch_dependents()
    acc, m, l = close_split(acc, m, sums, BLOCK_M, TILE_M, BLOCK_DV)
    if MAX_RUN > 1:
        acc, m, l = join(acc4, m4, l4, acc, m, l)
        if MAX_RUN > 4:
            acc, m, l = join(acc16, m16, l16, acc, m, l)

    dv = tl.arange(0, BLOCK_DV)
    vector = tl.arange(0, BLOCK_M)
    r = row_block * ROWS_PER_BLOCK + vector
    r_valid = (vector < ROWS_PER_BLOCK) & (r < GROUP * Q_LEN)
    query = r % Q_LEN
    head = kv_head * GROUP + r // Q_LEN
    if num_units == 1:
        sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=r_valid, other=float("-inf"))
        result, result_lse = finish(acc, m, l, sink, v_scale, HAS_SINKS)
        out_rows = out + row64 * out_stride_b + query.to(tl.int64) * out_stride_i + head.to(tl.int64) * out_stride_h
        tl.store(out_rows[:, None] + dv[None, :], result.to(out.dtype.element_ty),
                 mask=r_valid[:, None] & (dv < DV)[None, :])  # fmt: skip
        if HAS_LSE:
            tl.store(
                lse + row64 * lse_stride_b + query.to(tl.int64) * lse_stride_i + head.to(tl.int64) * lse_stride_h,
                result_lse,
                mask=r_valid,
            )
    elif SPLITS:
        at = tl.cast(slot, tl.int64) * (NUM_KV_HEADS * GROUP * Q_LEN) + kv_head * GROUP * Q_LEN + r
        tl.store(partial_out + at[:, None] * DV + dv[None, :], acc, mask=r_valid[:, None] & (dv < DV)[None, :])
        tl.store(partial_ml + at * 2, m, mask=r_valid)
        tl.store(partial_ml + at * 2 + 1, l, mask=r_valid)
