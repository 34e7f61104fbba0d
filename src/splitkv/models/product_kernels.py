"""Products of one row with a weight matrix on a GPU, for a decode step: the weights are read once, and that is all the
time there is to lose.

What stands before and after a product in a decoder is done on the way: the norm or a factor on its input, and on its
output the bias, the sum with the residual stream, or silu(gate) * up. An output is summed by one block, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .launching import dependent_launch, take_turn


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the weights that a block reads at a time. stages: tiles on their way at once, through shared
    memory; 1: one tile ahead, in registers."""

    rows: int
    columns: int
    num_warps: int = 4
    stages: int = 1


# The quickest of fourteen on an H200 in bf16. A whole step of Qwen3.5-9B takes 4.5 ms with them at 4,096 tokens, 5.0 ms
# with 4 x 1024 (pairs: 2 x 1024) everywhere, 5.5 ms where a block first has the L2 cache fetch all its weights.
PAIRED = Tile(rows=4, columns=512, stages=4)
FEW_OUTPUTS = Tile(rows=4, columns=1024)
MANY_OUTPUTS = Tile(rows=8, columns=512, stages=4)
MANY = 8192
MEASURED = {(12_352, 4096): Tile(rows=16, columns=512, num_warps=8, stages=3)}
"""(size, columns) of weights that another tile than the rule's is quicker for."""


def tile_for(size: int, columns: int, paired: bool) -> Tile:
    """For weights of [size, columns], or twice as many rows where paired."""
    if paired:
        return PAIRED
    return MEASURED.get((size, columns), MANY_OUTPUTS if size > MANY else FEW_OUTPUTS)


@triton.jit
def load_tile(rows, is_row, k, columns):
    """First to leave the L1 cache, which so keeps the input for all blocks of a multiprocessor."""
    mask = is_row[:, None] & (k < columns)[None, :]
    return tl.load(rows[:, None] + k[None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_input(x, factor, at, columns, squares, NORM: tl.constexpr, FACTOR: tl.constexpr):
    """(columns `at` of x * factor in f32, squares with those of x added)."""
    values = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
    if NORM:
        squares += values * values
    if FACTOR:
        values *= tl.load(factor + at, mask=at < columns, other=0).to(tl.float32)
    return values, squares


@triton.jit
def vector_kernel(
    x, weight, bias, factor, out, size, columns, eps,
    NORM: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK_N outputs,). Of one row x: each output is a sum over one row of the weights, in f32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = n < size
    rows = weight + n.to(tl.int64) * columns
    rows2 = rows
    if PAIRED:
        rows2 += tl.cast(size, tl.int64) * columns
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total2 = total
    squares = tl.zeros([BLOCK_K], tl.float32)
    if STAGES == 1:
        tile = load_tile(rows, is_row, k, columns)
        tile2 = tile
        if PAIRED:
            tile2 = load_tile(rows2, is_row, k, columns)
        take_turn(PDL)  # what came before was about the weights alone
        for start in range(0, columns, BLOCK_K):
            at = start + k
            values, squares = load_input(x, factor, at, columns, squares, NORM, FACTOR)
            after = load_tile(rows, is_row, at + BLOCK_K, columns)
            after2 = after
            if PAIRED:
                after2 = load_tile(rows2, is_row, at + BLOCK_K, columns)
                total2 += tile2.to(tl.float32) * values[None, :]
            total += tile.to(tl.float32) * values[None, :]
            tile, tile2 = after, after2
    else:
        take_turn(PDL)
        for start in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
            at = start + k
            tile = load_tile(rows, is_row, at, columns)
            values, squares = load_input(x, factor, at, columns, squares, NORM, FACTOR)
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

    x: [1, columns]. weight: [size, columns], contiguous. out: [1, size], any float dtype. factor: [1, columns],
    multiplies x. norm: weights of the RMS norm of x, and its eps, instead of a factor. add: to what out holds. paired:
    weight is [2 * size, columns], and out = silu(its first half) * its second.
    """
    columns, size = x.shape[1], out.shape[1]
    tile = tile or tile_for(size, columns, paired)
    if norm is not None:
        factor = norm[0]
    pdl, options = dependent_launch(x)
    vector_kernel[(triton.cdiv(size, tile.rows),)](
        x=x,
        weight=weight,
        bias=weight if bias is None else bias,
        factor=weight if factor is None else factor,
        out=out,
        size=size,
        columns=columns,
        eps=0.0 if norm is None else norm[1],
        NORM=norm is not None,
        FACTOR=factor is not None,
        BIAS=bias is not None,
        ADD=add,
        PAIRED=paired,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.num_warps,
        **options,
    )
    return out
