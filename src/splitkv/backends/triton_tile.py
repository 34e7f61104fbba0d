"""The parts that every Triton kernel here is made of: bounds, schedule, one tile of attention, joins, finish.

Whatever decides bytes is written once, in this file. Logits are kept in the log2 domain: exp2 is one
instruction. A *part* is (acc, m, l): the unnormalised output, the running maximum and the sum, all f32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_bounds(lens, start, capacity, window, Q_LEN: tl.constexpr):
    """[lo, hi): the keys that any query of a row may see, and hi - lo. Works on scalars and vectors."""
    hi = tl.minimum(tl.maximum(lens, 0), capacity).to(tl.int32)
    lo = tl.maximum(start, 0)
    lo = tl.maximum(lo, tl.where(window > 0, hi - (Q_LEN - 1) - window, 0))
    lo = tl.minimum(lo, hi)  # or sums with a start near 2**31 would overflow
    return lo, hi, hi - lo


@triton.jit
def split_length(span, target, min_len, quantum):
    """policy.SplitRule.split, on the device."""
    wanted = tl.cdiv(tl.cdiv(span, target), quantum) * quantum
    return tl.maximum(wanted, min_len)


@triton.jit
def run_length(split_len, run_keys, MAX_RUN: tl.constexpr):
    """Splits that one block joins by itself: the fewest of 1, 4, 16 that hold run_keys keys."""
    run = tl.where(split_len < run_keys, 4, 1)
    if MAX_RUN > 4:
        run = tl.where(split_len * 4 < run_keys, 16, run)
    return run


@triton.jit
def load_bounds(seq_lens, uniform_len, starts, rows, valid, capacity, window, HAS_LENS: tl.constexpr,
                HAS_STARTS: tl.constexpr, Q_LEN: tl.constexpr):  # fmt: skip
    """row_bounds of `rows`; rows outside `valid` are empty."""
    if HAS_LENS:
        lens = tl.load(seq_lens + rows, mask=valid, other=0)
    else:
        lens = tl.where(valid, uniform_len, 0)
    start = tl.where(valid, 0, 0)
    if HAS_STARTS:
        start = tl.load(starts + rows, mask=valid, other=0)
    return row_bounds(lens, start, capacity, window, Q_LEN)


@triton.jit
def keys_per_run(seq_lens, uniform_len, starts, batch, capacity, window, target_units, HAS_LENS: tl.constexpr,
                 HAS_STARTS: tl.constexpr, Q_LEN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Least keys per unit, so that the whole batch makes about target_units units: the load, read on the device."""
    total = tl.zeros((), tl.int64)
    for base in range(0, batch, ROWS):
        rows = base + tl.arange(0, ROWS)
        _, _, span = load_bounds(seq_lens, uniform_len, starts, rows, rows < batch, capacity, window, HAS_LENS,
                                 HAS_STARTS, Q_LEN)  # fmt: skip
        total += tl.sum(span.to(tl.int64))
    return tl.cdiv(total, target_units).to(tl.int32)


@triton.jit
def units_of(span, run_keys, target, min_len, quantum, MAX_RUN: tl.constexpr):
    """(split_len, run, units) of rows: a unit is a run of splits; every row has at least one."""
    split_len = split_length(span, target, min_len, quantum)
    run = run_length(split_len, run_keys, MAX_RUN)
    return split_len, run, tl.maximum(tl.cdiv(tl.cdiv(span, split_len), run), 1)


@triton.jit
def tanh(x):
    """tanh in f32: an odd polynomial near 0, where the quotient form would cancel."""
    x2 = x * x
    small = x * (1.0 + x2 * (-0.33333334 + x2 * (0.13333334 + x2 * (-0.053968254 + x2 * 0.021869488))))
    e = tl.exp2(tl.minimum(tl.abs(x), 15.0) * (2.0 * LOG2E))
    large = 1.0 - 2.0 / (e + 1.0)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def join(acc_a, m_a, l_a, acc_b, m_b, l_b):
    """One part from two over disjoint keys; b comes after a. A part with nothing in it changes no bit."""
    m = tl.maximum(m_a, m_b)
    base = tl.where(m == float("-inf"), 0.0, m)
    w_a = tl.exp2(m_a - base)
    w_b = tl.exp2(m_b - base)
    acc = tl.fma(acc_b, tl.broadcast_to(w_b[:, None], acc_b.shape), acc_a * w_a[:, None])
    return acc, m, tl.fma(l_b, w_b, l_a * w_a)


@triton.jit
def close_split(acc, m, sums, BLOCK_M: tl.constexpr, TILE_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The part (acc, m, l) of BLOCK_M query vectors from what attend_tile kept; see there for the second half."""
    l = tl.sum(sums, 1)
    if TILE_M > BLOCK_M:
        acc = tl.sum(tl.reshape(acc, (2, BLOCK_M, BLOCK_DV)), 0)
        m = tl.max(tl.reshape(m, (2, BLOCK_M)), 0)
        l = tl.max(tl.reshape(l, (2, BLOCK_M)), 0)
    return acc, m, l


@triton.jit
def finish(acc, m, l, sink, v_scale, HAS_SINKS: tl.constexpr):
    """(out, lse) of a whole row: the sink enters the denominator here, once. Nothing visible: 0 and -inf."""
    empty = l == 0.0
    if HAS_SINKS:
        top = tl.maximum(m, sink * LOG2E)
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(m - base)
        acc = acc * weight[:, None]
        l = tl.fma(l, weight, tl.exp2(sink * LOG2E - base))
        m = top
    lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
    out = acc / tl.where(empty, 1.0, l)[:, None] * v_scale
    return tl.where(empty[:, None], 0.0, out) + 0.0, lse  # + 0.0: -0 and 0 are one answer


@triton.jit
def scores_f32(q, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """q . k in plain f32 multiply-adds, one query vector at a time: Triton's f32 dot re-reads K from shared memory
    for every one of them (2.8 to 5 times the memory's time on an H200)."""
    rows = tl.arange(0, BLOCK_M)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(BLOCK_M):
        q_i = tl.sum(tl.where((rows == i)[:, None], q, 0.0), 0)
        s = tl.where((rows == i)[:, None], tl.sum(k * q_i[None, :], 1)[None, :], s)
    return s


@triton.jit
def accumulate_f32(acc, p, v, BLOCK_M: tl.constexpr):
    """acc + p . v, as scores_f32."""
    rows = tl.arange(0, BLOCK_M)
    for i in tl.static_range(BLOCK_M):
        p_i = tl.sum(tl.where((rows == i)[:, None], p, 0.0), 0)
        acc = tl.where((rows == i)[:, None], acc + tl.sum(p_i[:, None] * v, 0)[None, :], acc)
    return acc


@triton.jit
def load_queries(
    q, row, head, query, valid, q_stride_b, q_stride_i, q_stride_h, mask_stride_b, mask_stride_i, mask_stride_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """(q [rows, BLOCK_D], rest [rows, REST_D], offsets of their rows in the mask, -1 outside `valid`) of query vectors.

    Head sizes such as 576 are held as 512 columns and 64; with no rest, q stands in for it. row: int64.
    """
    head, query = tl.cast(head, tl.int64), query.to(tl.int64)
    rows = q + row * q_stride_b + query * q_stride_i + head * q_stride_h
    d = tl.arange(0, BLOCK_D)
    first = tl.load(rows[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
    rest = first
    if REST_D > 0:
        d = BLOCK_D + tl.arange(0, REST_D)
        rest = tl.load(rows[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
    mask_row = row * mask_stride_b + head * mask_stride_h + query * mask_stride_i
    return first, rest, tl.where(valid, mask_row, -1)


@triton.jit
def load_scales(scale, v_scale, k_scales, v_scales, kv_head, k_scale_stride, v_scale_stride,
                HAS_K_SCALES: tl.constexpr, HAS_V_SCALES: tl.constexpr):  # fmt: skip
    """(scale of the logits, v_scale) of a KV head."""
    if HAS_K_SCALES:
        scale *= tl.load(k_scales + kv_head * k_scale_stride)
    if HAS_V_SCALES:
        v_scale = tl.load(v_scales + kv_head * v_scale_stride)
    return scale, v_scale


@triton.jit
def attend_tile(
    acc, m, sums, q, q_rest, n0, n_end, causal_end, row, kv_head,
    k_cache, v_cache, block_table, mask, mask_row,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride, mask_stride_n,
    num_pages, scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE_M: tl.constexpr, BLOCK_N: tl.constexpr, V_IN_K: tl.constexpr, Q_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Keys [n0, min(n0 + BLOCK_N, n_end)) of a row, added to (acc, m, sums) by online softmax.

    q [TILE_M, BLOCK_D] and q_rest [TILE_M, REST_D] as load_queries gives them. Tensor cores take 16 rows: where a block
    has at most 8 query vectors, each stands in q twice (TILE_M is 2 x BLOCK_M), the first copy's row of p . v takes p
    rounded to 16 bits and the second's what the rounding lost. Their sum has p nearly exact, at no cost.
    sums [TILE_M, BLOCK_N] keeps each column's own sum of p, so that no tile waits for one across warps. close_split
    makes a part of it all, once per split. V_IN_K: V is the first columns of K in the same memory, so it is not read
    again; the arithmetic is the same.
    causal_end [TILE_M]: first key that each query may not see. Keys that do not exist (past n_end, or on a page
    outside the pool) are never loaded, so their bytes may be anything.
    """
    n = n0 + tl.arange(0, BLOCK_N)
    exists = n < n_end
    if PAGE_SIZE > 0:
        page = tl.load(block_table + row * table_stride + n // PAGE_SIZE, mask=exists, other=-1)
        exists = exists & (page >= 0) & (page < num_pages)
        block, slot = page.to(tl.int64), n % PAGE_SIZE
    else:
        block, slot = tl.zeros_like(n).to(tl.int64) + row, n
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    head = tl.cast(kv_head, tl.int64)  # 64 heads of 262,144 keys x 256, stored head by head, pass 2**31
    k_rows = k_cache + (block * k_stride_b + slot.to(tl.int64) * k_stride_t + head * k_stride_h)
    v_rows = v_cache + (block * v_stride_b + slot.to(tl.int64) * v_stride_t + head * v_stride_h)
    k_mask = exists[:, None]
    if D < BLOCK_D:
        k_mask = k_mask & (d < D)[None, :]
    v_mask = exists[:, None]
    if DV < BLOCK_DV:
        v_mask = v_mask & (dv < DV)[None, :]

    k = tl.load(k_rows[:, None] + d[None, :], mask=k_mask, other=0.0).to(COMPUTE)
    if tl.float32 == COMPUTE:
        s = scores_f32(q, k, BLOCK_M, BLOCK_N)
    else:
        s = tl.dot(q, tl.trans(k))
    if REST_D > 0:
        d = BLOCK_D + tl.arange(0, REST_D)
        k_rest = tl.load(k_rows[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
        if tl.float32 == COMPUTE:
            s += scores_f32(q_rest, k_rest, BLOCK_M, BLOCK_N)
        else:
            s = tl.dot(q_rest, tl.trans(k_rest), s)
    s *= scale
    if HAS_SOFTCAP:
        s = softcap * tanh(s / softcap)
    if MASK == "additive":
        bias = tl.load(mask + mask_row[:, None] + n.to(tl.int64)[None, :] * mask_stride_n,
                       mask=exists[None, :] & (mask_row >= 0)[:, None], other=0.0)  # fmt: skip
        s += bias.to(tl.float32)
    s *= LOG2E
    visible = exists[None, :]
    if Q_LEN > 1:
        visible = visible & (n[None, :] < causal_end[:, None])
        visible = visible & ((window <= 0) | (n[None, :] >= causal_end[:, None] - window))
    if MASK == "bool":
        allowed = tl.load(mask + mask_row[:, None] + n.to(tl.int64)[None, :] * mask_stride_n,
                          mask=exists[None, :] & (mask_row >= 0)[:, None], other=0)  # fmt: skip
        visible = visible & (allowed != 0)
    s = tl.where(visible, s, float("-inf"))

    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    sums = tl.fma(sums, tl.broadcast_to(alpha[:, None], sums.shape), p)
    acc = acc * alpha[:, None]
    if V_IN_K:
        v = k
    else:
        v = tl.load(v_rows[:, None] + dv[None, :], mask=v_mask, other=0.0).to(COMPUTE)
    if tl.float32 == COMPUTE:
        acc = accumulate_f32(acc, p, v, BLOCK_M)
    else:
        rounded = p.to(COMPUTE)
        if TILE_M > BLOCK_M:
            lost = (p - rounded.to(tl.float32)).to(COMPUTE)
            rounded = tl.where((tl.arange(0, TILE_M) < BLOCK_M)[:, None], rounded, lost)
        acc = tl.dot(rounded, v, acc)
    return acc, m_new, sums
