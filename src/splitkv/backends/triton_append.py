"""Append on the GPU: one launch writes the K and V of all rows where their lengths, on the device, say.

A token is stored only at a place its row may write: from the row's first writable position to its end, on a page
inside the pool. Whatever the lengths and the table hold, nothing else is written. Conversion to fp8 is written out in
integers: it is torch's bit for bit on every GPU (older ones go through f16, which rounds twice) and in the interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import on_device, steps

TILE_ELEMENTS = 2048
"""Elements of K (or V) that a block of four warps moves at once: 16 in each thread."""
TILES_ALONE = 8
"""A row of at most this many tiles is one block's, which then moves the length on as well: one launch for decode."""

FP8_FORMATS = {torch.float8_e4m3fn: (3, 7, 448.0), torch.float8_e5m2: (2, 15, 57344.0)}
"""Mantissa bits, exponent bias, largest value."""
NO_FP8 = (0, 0, 0.0)


@triton.jit
def row_span(i, rows, seq_lens, lens, bounds, n, batch, capacity,
             HAS_ROWS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_BOUNDS: tl.constexpr):  # fmt: skip
    """(row, whether it is one, its length, tokens to append, how many of them have a place) of the i-th row given."""
    row = i
    if HAS_ROWS:
        row = tl.load(rows + i).to(tl.int64)
    is_row = (row >= 0) & (row < batch)
    row = tl.where(is_row, row, 0)
    start = tl.load(seq_lens + row).to(tl.int64)
    wanted = tl.cast(n, tl.int64)
    if HAS_LENS:
        wanted = tl.minimum(tl.maximum(tl.load(lens + i).to(tl.int64), 0), wanted)
    first = tl.cast(0, tl.int64)
    end = tl.cast(capacity, tl.int64)
    if HAS_BOUNDS:
        first = tl.maximum(tl.load(bounds + row * 2).to(tl.int64), first)
        end = tl.minimum(tl.load(bounds + row * 2 + 1).to(tl.int64), end)
    fits = is_row & (start >= first) & (start <= end)
    count = tl.where(fits, tl.minimum(wanted, end - start), 0)
    return row, is_row, start, wanted, count


@triton.jit
def advance_row(seq_lens, dropped, row, is_row, start, wanted, count):
    tl.store(seq_lens + row, (start + count).to(tl.int32), mask=is_row & (count > 0))
    lost = is_row & (wanted > count)
    tl.store(dropped + row, tl.load(dropped + row, mask=lost, other=0) + wanted - count, mask=lost)


@triton.jit
def fp8_code(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The fp8 byte of f32 x, to nearest even: the largest value for what is above it, Inf too; 0x7F for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    held = tl.minimum(size.to(tl.float32, bitcast=True), LARGEST)
    kept = held.to(tl.int32, bitcast=True)
    # Normal: round the mantissa at its last kept bit, by integer addition, and move the exponent's bias.
    shift: tl.constexpr = 23 - MANTISSA
    odd = (kept >> shift) & 1
    normal = ((kept + ((1 << (shift - 1)) - 1) + odd) >> shift) - ((127 - BIAS) << MANTISSA)
    # Subnormal: a float whose last bit counts fp8's smallest step, so that the addition rounds to it.
    counter: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    counter_bits: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    subnormal = (held + counter).to(tl.int32, bitcast=True) - counter_bits
    code = tl.where(kept < ((128 - BIAS) << 23), subnormal, normal) | sign
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def to_storage(x, scale, SCALED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
               STORED: tl.constexpr):  # fmt: skip
    if SCALED:
        x = tl.div_rn(x.to(tl.float32), scale)
    if MANTISSA > 0:
        return fp8_code(x.to(tl.float32), MANTISSA, BIAS, LARGEST)
    else:
        return x.to(STORED)


@triton.jit(do_not_specialize=["n", "batch", "capacity", "num_pages", "blocks", "pairs_per_block"])
def append_kernel(
    k, v, k_cache, v_cache, seq_lens, dropped, rows, lens, bounds, block_table, k_scales, v_scales,
    k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    k_cache_stride_b, k_cache_stride_t, k_cache_stride_h, v_cache_stride_b, v_cache_stride_t, v_cache_stride_h,
    table_stride, k_scale, v_scale, n, batch, capacity, num_pages, blocks, pairs_per_block,
    NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALONE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_LENS: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, HAS_K_SCALES: tl.constexpr,
    HAS_V_SCALES: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid: (rows given x blocks). A block stores `pairs_per_block` (token, KV head) pairs of one row."""
    i = (tl.program_id(0) // blocks).to(tl.int64)
    row, is_row, start, wanted, count = row_span(i, rows, seq_lens, lens, bounds, n, batch, capacity, HAS_ROWS,
                                                 HAS_LENS, HAS_BOUNDS)  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    begin = (tl.program_id(0) % blocks).to(tl.int64) * pairs_per_block
    end = tl.minimum(begin + pairs_per_block, count * NUM_KV_HEADS)
    for first in range(begin, end, TILE):
        pair = first + tl.arange(0, TILE)
        token = pair // NUM_KV_HEADS
        head = pair % NUM_KV_HEADS
        valid = pair < end
        position = start + token
        outer = row + tl.zeros_like(position)
        if PAGE_SIZE > 0:
            outer = tl.load(block_table + row * table_stride + position // PAGE_SIZE, mask=valid, other=-1).to(tl.int64)
            valid = valid & (outer >= 0) & (outer < num_pages)
            position = position % PAGE_SIZE
        scale = k_scale
        if HAS_K_SCALES:
            scale = tl.load(k_scales + head)[:, None]
        from_k = k + i * k_stride_b + token * k_stride_n + head * k_stride_h
        to_k = k_cache + outer * k_cache_stride_b + position * k_cache_stride_t + head * k_cache_stride_h
        mask = valid[:, None] & (d < D)[None, :]
        x = tl.load(from_k[:, None] + d[None, :], mask=mask, other=0.0)
        x = to_storage(x, scale, K_SCALED, MANTISSA, BIAS, LARGEST, k_cache.dtype.element_ty)
        tl.store(to_k[:, None] + d[None, :], x, mask=mask)
        scale = v_scale
        if HAS_V_SCALES:
            scale = tl.load(v_scales + head)[:, None]
        from_v = v + i * v_stride_b + token * v_stride_n + head * v_stride_h
        to_v = v_cache + outer * v_cache_stride_b + position * v_cache_stride_t + head * v_cache_stride_h
        mask = valid[:, None] & (dv < DV)[None, :]
        x = tl.load(from_v[:, None] + dv[None, :], mask=mask, other=0.0)
        x = to_storage(x, scale, V_SCALED, MANTISSA, BIAS, LARGEST, v_cache.dtype.element_ty)
        tl.store(to_v[:, None] + dv[None, :], x, mask=mask)
    if ALONE:
        tl.debug_barrier()  # every warp has read the length before one warp moves it on
        advance_row(seq_lens, dropped, row, is_row, start, wanted, count)


@triton.jit(do_not_specialize=["n", "batch", "capacity"])
def advance_kernel(seq_lens, dropped, rows, lens, bounds, n, batch, capacity,
                   HAS_ROWS: tl.constexpr, HAS_LENS: tl.constexpr, HAS_BOUNDS: tl.constexpr):  # fmt: skip
    """Grid: (rows given). After a long append: its many blocks all read the old lengths."""
    row, is_row, start, wanted, count = row_span(tl.program_id(0).to(tl.int64), rows, seq_lens, lens, bounds, n, batch,
                                                 capacity, HAS_ROWS, HAS_LENS, HAS_BOUNDS)  # fmt: skip
    tl.debug_barrier()
    advance_row(seq_lens, dropped, row, is_row, start, wanted, count)


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
    """Store k, v [rows, n, num_kv_heads, dim] behind what their rows hold, and move seq_lens on.

    k_cache, v_cache as in contract.md; rows and lens one per row of k (None: all rows in order; all n tokens);
    bounds [batch, 2]: first and end of the positions that a row may write; scales a float or one f32 per KV head,
    contiguous. dropped counts tokens without a place. Allocates nothing and waits for nothing.
    """
    given, n, num_kv_heads, head_dim = k.shape
    v_head_dim = v.shape[-1]
    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim)
    pairs = n * num_kv_heads
    tile = min(max(TILE_ELEMENTS // max(block_d, block_dv), 1), triton.next_power_of_2(pairs))
    alone = pairs <= TILES_ALONE * tile
    blocks = 1 if alone else triton.cdiv(pairs, tile)
    mantissa, bias, largest = FP8_FORMATS.get(k_cache.dtype, NO_FP8)
    if mantissa:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_steps, v_steps, k_cache_steps, v_cache_steps = (steps(tensor, 3) for tensor in (k, v, k_cache, v_cache))
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    spans = dict(
        seq_lens=seq_lens,
        dropped=dropped,
        rows=seq_lens if rows is None else rows,
        lens=seq_lens if lens is None else lens,
        bounds=seq_lens if bounds is None else bounds,
        n=n,
        batch=seq_lens.shape[0],
        capacity=capacity,
        HAS_ROWS=rows is not None,
        HAS_LENS=lens is not None,
        HAS_BOUNDS=bounds is not None,
    )
    with on_device(k):
        append_kernel[(given * blocks,)](
            **spans,
            k=k,
            v=v,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=seq_lens if block_table is None else block_table,
            k_scales=k_scale if isinstance(k_scale, Tensor) else seq_lens,
            v_scales=v_scale if isinstance(v_scale, Tensor) else seq_lens,
            k_stride_b=k_steps[0],
            k_stride_n=k_steps[1],
            k_stride_h=k_steps[2],
            v_stride_b=v_steps[0],
            v_stride_n=v_steps[1],
            v_stride_h=v_steps[2],
            k_cache_stride_b=k_cache_steps[0],
            k_cache_stride_t=k_cache_steps[1],
            k_cache_stride_h=k_cache_steps[2],
            v_cache_stride_b=v_cache_steps[0],
            v_cache_stride_t=v_cache_steps[1],
            v_cache_stride_h=v_cache_steps[2],
            table_stride=steps(block_table, 1)[0],
            k_scale=1.0 if isinstance(k_scale, Tensor) else k_scale,
            v_scale=1.0 if isinstance(v_scale, Tensor) else v_scale,
            num_pages=k_cache.shape[0],
            blocks=blocks,
            pairs_per_block=pairs if alone else tile,
            NUM_KV_HEADS=num_kv_heads,
            D=head_dim,
            DV=v_head_dim,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            TILE=tile,
            PAGE_SIZE=0 if block_table is None else k_cache.shape[1],
            ALONE=alone,
            K_SCALED=isinstance(k_scale, Tensor) or k_scale != 1.0,
            V_SCALED=isinstance(v_scale, Tensor) or v_scale != 1.0,
            HAS_K_SCALES=isinstance(k_scale, Tensor),
            HAS_V_SCALES=isinstance(v_scale, Tensor),
            MANTISSA=mantissa,
            BIAS=bias,
            LARGEST=largest,
            num_warps=4,
        )
        if not alone:
            advance_kernel[(given,)](**spans, num_warps=1)
