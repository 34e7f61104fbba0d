"""Products of a few rows with a weight matrix on a GPU, for a decode step: the weights are read once, and that is all
the time there is to lose.

What stands before and after a product in a decoder is done on the way: the norm or a factor on its input, and on its
output the bias, the sum with the residual stream, or silu(gate) * up. An output is summed by one block, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launching import dependent_launch

MOST_ROWS = 16
"""Of the input: one tile of the tensor cores."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the weights that a block reads at a time. stages: tiles on their way at once, through shared
    memory; 1: one tile ahead, in registers. prefetch: have the L2 cache fetch all the block's weights before the
    input is there."""

    rows: int
    columns: int
    num_warps: int = 4
    stages: int = 1
    prefetch: bool = False


def tile_for(rows: int, size: int, columns: int, paired: bool) -> Tile:
    """For `rows` of the input, and weights of [size, columns], or twice as many where paired."""
    if rows == 1:
        return Tile(rows=2 if paired else 4, columns=1024)
    return Tile(rows=32, columns=128 if paired else 256, stages=4)


@triton.jit
def load_tile(rows, is_row, k, columns):
    """First to leave the L1 cache, which so keeps the input for all blocks of a multiprocessor."""
    mask = is_row[:, None] & (k < columns)[None, :]
    return tl.load(rows[:, None] + k[None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def prefetch_rows(weight, first, size, columns, BLOCK_N: tl.constexpr, LINES: tl.constexpr):
    """Rows first .. first + BLOCK_N into the L2 cache, LINES cache lines of 128 bytes at a time."""
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    count = tl.minimum(size - first, BLOCK_N) * columns
    start = weight + first.to(tl.int64) * columns
    for done in range(0, count, LINES * line):
        at = done + tl.arange(0, LINES) * line
        at = tl.where(at < count, at, 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [start + at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def vector_kernel(
    x, weight, bias, factor, out, size, columns, eps,
    NORM: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK_N outputs,). Of one row x: each output is a sum over one row of the weights, in f32."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = n < size
    rows = weight + n.to(tl.int64) * columns
    rows2 = rows
    if PAIRED:
        rows2 += tl.cast(size, tl.int64) * columns
    if PDL:  # the next kernel may begin to read its own weights
        gdc_launch_dependents()
    if PREFETCH:
        prefetch_rows(weight, first, size, columns, BLOCK_N, 128)
        if PAIRED:
            prefetch_rows(weight + tl.cast(size, tl.int64) * columns, first, size, columns, BLOCK_N, 128)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total2 = total
    squares = tl.zeros([BLOCK_K], tl.float32)
    if STAGES == 1:
        tile = load_tile(rows, is_row, k, columns)
        tile2 = tile
        if PAIRED:
            tile2 = load_tile(rows2, is_row, k, columns)
        if PDL:  # what came before was about the weights alone
            gdc_wait()
        for start in range(0, columns, BLOCK_K):
            at = start + k
            values = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
            if NORM:
                squares += values * values
            if FACTOR:
                by = tl.load(factor + at, mask=at < columns, other=0)
                values *= by.to(tl.float32)
            after = load_tile(rows, is_row, at + BLOCK_K, columns)
            after2 = after
            if PAIRED:
                after2 = load_tile(rows2, is_row, at + BLOCK_K, columns)
                total2 += tile2.to(tl.float32) * values[None, :]
            total += tile.to(tl.float32) * values[None, :]
            tile, tile2 = after, after2
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
            at = start + k
            tile = load_tile(rows, is_row, at, columns)
            values = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
            if NORM:
                squares += values * values
            if FACTOR:
                by = tl.load(factor + at, mask=at < columns, other=0)
                values *= by.to(tl.float32)
            if PAIRED:
                total2 += load_tile(rows2, is_row, at, columns).to(tl.float32) * values[None, :]
            total += tile.to(tl.float32) * values[None, :]
    result = tl.sum(total, 1)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / columns + eps)
        result *= scale
    if BIAS:
        result += tl.load(bias + n, mask=is_row, other=0).to(tl.float32)
    if PAIRED:
        result = result * tl.sigmoid(result) * (tl.sum(total2, 1) * scale)
    places = out + n
    if ADD:
        result += tl.load(places, mask=is_row, other=0).to(tl.float32)
    tl.store(places, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["count"])
def rows_kernel(
    x, weight, bias, out, size, columns, count, x_stride, out_stride,
    BIAS: tl.constexpr, ADD: tl.constexpr, PAIRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK_N outputs,). The same for up to BLOCK_M rows at once, on tensor cores."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_row = n < size
    rows = weight + n.to(tl.int64) * columns
    rows2 = rows
    if PAIRED:
        rows2 += tl.cast(size, tl.int64) * columns
    if PDL:
        gdc_launch_dependents()
    if PREFETCH:
        prefetch_rows(weight, first, size, columns, BLOCK_N, 128)
        if PAIRED:
            prefetch_rows(weight + tl.cast(size, tl.int64) * columns, first, size, columns, BLOCK_N, 128)
    if PDL:
        gdc_wait()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total2 = total
    for start in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
        at = start + k
        inside = (m < count)[:, None] & (at < columns)[None, :]
        values = tl.load(x + m.to(tl.int64)[:, None] * x_stride + at[None, :], mask=inside, other=0)
        total = tl.dot(values, tl.trans(load_tile(rows, is_row, at, columns)), total)
        if PAIRED:
            total2 = tl.dot(values, tl.trans(load_tile(rows2, is_row, at, columns)), total2)
    if BIAS:
        total += tl.load(bias + n, mask=is_row, other=0).to(tl.float32)[None, :]
    if PAIRED:
        total = total * tl.sigmoid(total) * total2
    places = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    mask = (m < count)[:, None] & is_row[None, :]
    if ADD:
        total += tl.load(places, mask=mask, other=0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=mask)


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    factor: Tensor | None = None,
    add: bool = False,
    paired: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """out = x @ weight.T + bias, and `out`.

    x: [rows, columns], rows up to MOST_ROWS. weight: [size, columns], contiguous. out: [rows, size], any float dtype.
    norm: weights of the RMS norm of x, and its eps; only one row. factor: as x, multiplies it; only one row.
    add: to what out holds. paired: weight is [2 * size, columns], and out = silu(its first half) * its second.
    More than one row: 16-bit x and weight.
    """
    rows, columns = x.shape
    size = out.shape[1]
    tile = tile or tile_for(rows, size, columns, paired)
    given: dict[str, Any] = dict(x=x, weight=weight, bias=weight if bias is None else bias, out=out)
    given |= dict(size=size, columns=columns)
    flags: dict[str, Any] = dict(BIAS=bias is not None, ADD=add, PAIRED=paired)
    kernel = rows_kernel
    if rows == 1:
        kernel = vector_kernel
        if norm is not None:
            factor = norm[0]
        given |= dict(factor=weight if factor is None else factor, eps=norm[1] if norm else 0.0)
        flags |= dict(NORM=norm is not None, FACTOR=factor is not None)
    else:
        given |= dict(count=rows, x_stride=x.stride(0), out_stride=out.stride(0))
        flags["BLOCK_M"] = MOST_ROWS
    pdl, options = dependent_launch(x)
    blocks = dict(BLOCK_N=tile.rows, BLOCK_K=tile.columns, STAGES=tile.stages, PREFETCH=pdl and tile.prefetch, PDL=pdl)
    kernel[(triton.cdiv(size, tile.rows),)](**given, **flags, **blocks, num_warps=tile.num_warps, **options)
    return out
