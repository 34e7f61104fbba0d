"""Backend "triton", second kernel: join the parts of each row's units along the upper levels of the tree."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_tile import finish, join, keys_per_run, load_bounds, units_of


@triton.jit
def join_fours(acc, m, l, N: tl.constexpr, BLOCK_DV: tl.constexpr):
    """N parts to N / 4: neighbours join left to right. acc [N, BLOCK_DV]; m, l [N]."""
    even, odd = tl.split(tl.permute(tl.reshape(acc, (N // 4, 2, 2, BLOCK_DV)), (0, 3, 1, 2)))
    acc0, acc2 = tl.split(even)
    acc1, acc3 = tl.split(odd)
    even, odd = tl.split(tl.reshape(m, (N // 4, 2, 2)))
    m0, m2 = tl.split(even)
    m1, m3 = tl.split(odd)
    even, odd = tl.split(tl.reshape(l, (N // 4, 2, 2)))
    l0, l2 = tl.split(even)
    l1, l3 = tl.split(odd)
    acc0, m0, l0 = join(acc0, m0, l0, acc1, m1, l1)
    acc0, m0, l0 = join(acc0, m0, l0, acc2, m2, l2)
    return join(acc0, m0, l0, acc3, m3, l3)


@triton.jit(do_not_specialize=["uniform_len", "batch", "capacity", "window", "target", "min_len",
                               "quantum", "target_units", "max_splits"])  # fmt: skip
def merge_kernel(
    seq_lens, starts, sinks, v_scales, out, lse, partial_out, partial_ml,
    out_stride_b, out_stride_i, out_stride_h, lse_stride_b, lse_stride_i, lse_stride_h, v_scale_stride,
    uniform_len, batch, capacity, window, v_scale, target, min_len, quantum, target_units, max_splits,
    NUM_Q_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_LEN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr, MAX_RUN: tl.constexpr, BATCH_BLOCK: tl.constexpr, HAS_LENS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_V_SCALES: tl.constexpr, HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows x query heads x queries, blocks of BLOCK_DV columns)."""
    vector = tl.program_id(0)
    row = vector // (NUM_Q_HEADS * Q_LEN)
    head = vector % (NUM_Q_HEADS * Q_LEN) // Q_LEN
    query = vector % Q_LEN
    run_keys = 0
    first = row * max_splits
    if MAX_RUN > 1:
        run_keys = keys_per_run(seq_lens, uniform_len, starts, batch, capacity, window, target_units, HAS_LENS,
                                HAS_STARTS, Q_LEN, BATCH_BLOCK)  # fmt: skip
        first = 0
        for base in range(0, row, BATCH_BLOCK):
            rows = base + tl.arange(0, BATCH_BLOCK)
            _, _, spans = load_bounds(seq_lens, uniform_len, starts, rows, rows < row, capacity, window, HAS_LENS,
                                      HAS_STARTS, Q_LEN)  # fmt: skip
            _, _, counts = units_of(spans, run_keys, target, min_len, quantum, MAX_RUN)
            first += tl.sum(tl.where(rows < row, counts, 0))
    _, _, span = load_bounds(seq_lens, uniform_len, starts, row, True, capacity, window, HAS_LENS, HAS_STARTS, Q_LEN)
    split_len, _, units = units_of(span, run_keys, target, min_len, quantum, MAX_RUN)
    if MAX_RUN == 1:
        units = tl.cdiv(span, split_len)
    if PDL:  # even with nothing to do: the next kernel waits for this one, and must not overtake the split kernel
        gdc_wait()
    if units <= 1:
        return

    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    root = tl.zeros([1, BLOCK_DV], tl.float32)
    root_m = tl.full([1], float("-inf"), tl.float32)
    root_l = tl.zeros([1], tl.float32)
    stride = NUM_Q_HEADS * Q_LEN
    for base in range(0, units, PARTS):
        part = base + tl.arange(0, PARTS)
        valid = part < units
        at = (first + part).to(tl.int64) * stride + head * Q_LEN + query
        m = tl.load(partial_ml + at * 2, mask=valid, other=float("-inf"))
        l = tl.load(partial_ml + at * 2 + 1, mask=valid, other=0.0)
        acc = tl.load(partial_out + at[:, None] * DV + dv[None, :], mask=valid[:, None] & (dv < DV)[None, :],
                      other=0.0)  # fmt: skip
        acc, m, l = join_fours(acc, m, l, PARTS, BLOCK_DV)
        if PARTS >= 16:
            acc, m, l = join_fours(acc, m, l, PARTS // 4, BLOCK_DV)
        if PARTS >= 64:
            acc, m, l = join_fours(acc, m, l, PARTS // 16, BLOCK_DV)
        root, root_m, root_l = join(root, root_m, root_l, acc, m, l)

    if PDL:
        gdc_launch_dependents()
    sink = tl.full([1], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.zeros([1], tl.float32) + tl.load(sinks + head)
    if HAS_V_SCALES:
        v_scale = tl.load(v_scales + head // GROUP * v_scale_stride)
    result, result_lse = finish(root, root_m, root_l, sink, v_scale, HAS_SINKS)
    row64 = tl.cast(row, tl.int64)
    out_row = out + row64 * out_stride_b + query.to(tl.int64) * out_stride_i + head.to(tl.int64) * out_stride_h
    tl.store(out_row + dv[None, :], result.to(out.dtype.element_ty), mask=(dv < DV)[None, :])
    if HAS_LSE:
        lse_at = (
            lse
            + row64 * lse_stride_b
            + query.to(tl.int64) * lse_stride_i
            + head.to(tl.int64) * lse_stride_h
            + tl.arange(0, 1)
        )
        tl.store(lse_at, result_lse, mask=tl.program_id(1) + tl.arange(0, 1) == 0)
