"""What a decode step does between its products, on a GPU: to begin with, the norm, and silu(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import dependent_launch, take_turn

BLOCK = 1024


@triton.jit
def begin_kernel(
    tokens, embedding, frequencies, seq_lens, x, positions, cos, sin, vocab_size, hidden, pairs, rope_scale,
    BLOCK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of `hidden`, rows). Rows of the embedding, and by the first block the position and its rotation."""
    pair = tl.arange(0, BLOCK_PAIRS)
    frequency = tl.load(frequencies + pair, mask=pair < pairs, other=0)
    take_turn(PDL)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_first = tl.program_id(0) == 0
    token = tl.load(tokens + row)
    position = tl.load(seq_lens + row, mask=is_first, other=0)
    known = (token >= 0) & (token < vocab_size)
    values = tl.load(embedding + token * hidden + i, mask=known & (i < hidden), other=0)
    if is_first:
        tl.debug_barrier()  # every warp has read the length before one warp moves it on
        tl.store(seq_lens + row, position + 1)
        tl.store(positions + row, position)
        angle = position.to(tl.float32) * frequency
        tl.store(cos + row * pairs + pair, tl.cos(angle) * rope_scale, mask=pair < pairs)
        tl.store(sin + row * pairs + pair, tl.sin(angle) * rope_scale, mask=pair < pairs)
    tl.store(x + row * hidden + i, values, mask=i < hidden)


@triton.jit
def norm_kernel(x, weight, out, x_stride, hidden, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (rows,). out = x / rms(x) * weight."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + i, mask=i < hidden, other=0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / hidden + eps)
    values *= scale * tl.load(weight + i, mask=i < hidden, other=0).to(tl.float32)
    tl.store(out + row * hidden + i, values.to(out.dtype.element_ty), mask=i < hidden)


@triton.jit
def swiglu_kernel(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (blocks of `size`, rows). out = silu(first half) * second half."""
    take_turn(PDL)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * size + i, mask=i < size, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=i < size, other=0).to(tl.float32)
    tl.store(out + row * size + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < size)


def begin(
    tokens: Tensor, embedding: Tensor, frequencies: Tensor, rope_scale: float, seq_lens: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(x [batch, hidden], positions [batch] int32, (cos, sin) each [batch, 1, pairs] f32) of one more token a row.

    tokens: [batch] int64. embedding: [vocab_size, hidden]. frequencies: [pairs] f32. seq_lens: [batch] int32, tokens
    held before: the positions; moved on by one.
    """
    batch, (vocab_size, hidden), pairs = tokens.shape[0], embedding.shape, frequencies.shape[0]
    x = torch.empty((batch, hidden), dtype=embedding.dtype, device=embedding.device)
    positions = torch.empty_like(seq_lens)
    cos, sin = torch.empty((2, batch, 1, pairs), dtype=torch.float32, device=embedding.device)
    pdl, options = dependent_launch(x)
    begin_kernel[(triton.cdiv(hidden, BLOCK), batch)](
        tokens=tokens,
        embedding=embedding,
        frequencies=frequencies,
        seq_lens=seq_lens,
        x=x,
        positions=positions,
        cos=cos,
        sin=sin,
        vocab_size=vocab_size,
        hidden=hidden,
        pairs=pairs,
        rope_scale=rope_scale,
        BLOCK=BLOCK,
        BLOCK_PAIRS=triton.next_power_of_2(pairs),
        PDL=pdl,
        num_warps=4,
        **options,
    )
    return x, positions, (cos, sin)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight of rows x [rows, hidden], in x's dtype."""
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    pdl, options = dependent_launch(x)
    block = triton.next_power_of_2(hidden)
    norm_kernel[(rows,)](
        x=x,
        weight=weight,
        out=out,
        x_stride=x.stride(0),
        hidden=hidden,
        eps=eps,
        BLOCK=block,
        PDL=pdl,
        num_warps=8 if block >= 4096 else 4,
        **options,
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows [rows, 2 * size], contiguous."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    pdl, options = dependent_launch(out)
    swiglu_kernel[(triton.cdiv(size, BLOCK), rows)](
        gate_up=gate_up, out=out, size=size, BLOCK=BLOCK, PDL=pdl, num_warps=4, **options
    )
    return out
