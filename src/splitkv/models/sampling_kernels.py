"""The largest logit of each row on a GPU, in two launches over all multiprocessors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends.launching import on_device
from .launching import dependent_launch, take_turn

BLOCK = 2048


@triton.jit
def largest(values, places):
    """(largest value, the lowest of its places). A NaN counts as larger than all, as for torch."""
    values = tl.where(values != values, float("inf"), values)
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, places, 2147483647), 0)


@triton.jit
def blocks_kernel(logits, tops, places, stride, size, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (blocks, rows). The largest of each block of logits."""
    take_turn(PDL)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + i, mask=i < size, other=float("-inf"))
    top, place = largest(values, tl.where(i < size, i, 2147483647))
    tl.store(tops + row * blocks + tl.program_id(0), top)
    tl.store(places + row * blocks + tl.program_id(0), place)


@triton.jit
def rows_kernel(tops, places, out, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (rows,). The largest of a row's blocks."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(tops + row * blocks + i, mask=i < blocks, other=float("-inf"))
    _, place = largest(values, tl.load(places + row * blocks + i, mask=i < blocks, other=2147483647))
    tl.store(out + row, place.to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """[batch] int64: where each row of logits [batch, size], f32, is largest, the first of equals."""
    batch, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    tops = logits.new_empty((batch, blocks))
    places = logits.new_empty((batch, blocks), dtype=torch.int32)
    out = logits.new_empty(batch, dtype=torch.int64)
    pdl, options = dependent_launch(logits)
    with on_device(logits):
        blocks_kernel[(blocks, batch)](
            logits=logits,
            tops=tops,
            places=places,
            stride=logits.stride(0),
            size=size,
            blocks=blocks,
            BLOCK=BLOCK,
            PDL=pdl,
            num_warps=4,
            **options,
        )
        rows_kernel[(batch,)](
            tops=tops,
            places=places,
            out=out,
            blocks=blocks,
            BLOCK=triton.next_power_of_2(blocks),
            PDL=pdl,
            num_warps=4,
            **options,
        )
    return out
