"""Latent attention's step on a GPU beside attention itself: one launch before it, one behind.

Before: W_k^T of every head's query, rotary positions, the latent's norm, and latent and key into the cache. Behind:
W_v of every head's output. A block keeps its part of W_k or W_v in registers for all rows, loaded before it waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..backends.triton_append import FP8_FORMATS, NO_FP8, to_storage
from ..cache.contiguous import ContiguousKVCache
from .config import Latent
from .launching import dependent_launch, take_turn

TILE = 8192
"""Elements of W_k or W_v that a block of four warps holds: 64 in each thread."""


@triton.jit
def turned(first, second, cos, sin, pair, mask):
    """Both halves of rotated columns, in f32: x cos - y sin, and y cos + x sin."""
    x, y = tl.load(first + pair, mask=mask, other=0).to(tl.float32), tl.load(second + pair, mask=mask, other=0)
    y = y.to(tl.float32)
    c, s = tl.load(cos + pair, mask=mask, other=0), tl.load(sin + pair, mask=mask, other=0)
    return x * c - y * s, y * c + x * s


@triton.jit
def absorb_kernel(
    queries, latents, kv_b, norm, cos, sin, positions, q, k_cache, seq_lens, dropped, rows, q_stride, latent_stride,
    k_stride_b, k_stride_t, eps, capacity, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    RANK: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, blocks of the latent's columns). The first block of a head turns its query; of the first head, the
    token's key too, and stores it."""
    head = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (n < NOPE)[:, None] & (r < RANK)[None, :]
    w_k = tl.load(kv_b + (head * (NOPE + V) + n)[:, None] * RANK + r[None, :], mask=mask, other=0)
    pair = tl.arange(0, BLOCK_PAIRS)
    pairs: tl.constexpr = ROPE // 2
    if PDL:  # attention is not told to begin early: it may read lengths at once
        gdc_wait()
    for row in range(rows):
        given = queries + tl.cast(row, tl.int64) * q_stride + head * (NOPE + ROPE)
        made = q + (tl.cast(row, tl.int64) * HEADS + head) * (RANK + ROPE)
        nope = tl.load(given + n, mask=n < NOPE, other=0).to(tl.float32)
        absorbed = tl.sum(w_k.to(tl.float32) * nope[:, None], 0)
        tl.store(made + r, absorbed.to(q.dtype.element_ty), mask=r < RANK)
        if tl.program_id(1) == 0:
            first, second = turned(given + NOPE, given + NOPE + pairs, cos + row * pairs, sin + row * pairs, pair,
                                   pair < pairs)  # fmt: skip
            tl.store(made + RANK + pair, first.to(q.dtype.element_ty), mask=pair < pairs)
            tl.store(made + RANK + pairs + pair, second.to(q.dtype.element_ty), mask=pair < pairs)
    if head + tl.program_id(1) == 0:
        every = tl.arange(0, BLOCK_RANK)
        for row in range(rows):
            given = latents + tl.cast(row, tl.int64) * latent_stride
            position = tl.load(positions + row)
            place = k_cache + tl.cast(row, tl.int64) * k_stride_b + position.to(tl.int64) * k_stride_t
            stored = position < capacity
            latent = tl.load(given + every, mask=every < RANK, other=0).to(tl.float32)
            latent *= 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
            latent *= tl.load(norm + every, mask=every < RANK, other=0).to(tl.float32)
            latent = to_storage(latent.to(latents.dtype.element_ty), 1.0, False, MANTISSA, BIAS, LARGEST,
                                k_cache.dtype.element_ty)  # fmt: skip
            tl.store(place + every, latent, mask=stored & (every < RANK))
            first, second = turned(given + RANK, given + RANK + pairs, cos + row * pairs, sin + row * pairs, pair,
                                   pair < pairs)  # fmt: skip
            first = to_storage(first.to(latents.dtype.element_ty), 1.0, False, MANTISSA, BIAS, LARGEST,
                               k_cache.dtype.element_ty)  # fmt: skip
            second = to_storage(second.to(latents.dtype.element_ty), 1.0, False, MANTISSA, BIAS, LARGEST,
                                k_cache.dtype.element_ty)  # fmt: skip
            tl.store(place + RANK + pair, first, mask=stored & (pair < pairs))
            tl.store(place + RANK + pairs + pair, second, mask=stored & (pair < pairs))
            tl.store(seq_lens + row, tl.minimum(position + 1, capacity))
            tl.store(dropped + row, tl.load(dropped + row) + 1, mask=position >= capacity)


@triton.jit
def values_kernel(
    attended, kv_b, out, rows, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, blocks of the value's columns). out = W_v attended."""
    head = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_RANK)
    mask = (v < V)[:, None] & (r < RANK)[None, :]
    w_v = tl.load(kv_b + (head * (NOPE + V) + NOPE + v)[:, None] * RANK + r[None, :], mask=mask, other=0)
    take_turn(PDL)
    for row in range(rows):
        at = tl.cast(row, tl.int64) * HEADS + head
        given = tl.load(attended + at * RANK + r, mask=r < RANK, other=0).to(tl.float32)
        made = tl.sum(w_v.to(tl.float32) * given[None, :], 1)
        tl.store(out + at * V + v, made.to(out.dtype.element_ty), mask=v < V)


def absorb(
    queries: Tensor,
    latents: Tensor,
    kv_b: Tensor,
    norm: tuple[Tensor, float],
    rotation: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: ContiguousKVCache,
    sizes: Latent,
) -> Tensor:
    """q [batch, heads, rank + rope_dim], to attend to latents with; the token's own latent and key are stored.

    queries: [batch, heads * (nope_dim + rope_dim)], latents: [batch, rank + rope_dim], rows at any stride. kv_b:
    [heads, nope_dim + v_dim, rank], contiguous. norm: weight and eps of the latent's RMS norm. rotation: cos, sin of
    step_kernels.begin. positions: [batch] int32, what each row of the cache holds, behind which the token is stored; a
    row that is full drops its token and counts it, as KVCache.append does.
    """
    batch, heads = queries.shape[0], kv_b.shape[0]
    q = torch.empty((batch, heads, sizes.rank + sizes.rope_dim), dtype=queries.dtype, device=queries.device)
    k_cache = cache.k_cache
    mantissa, bias, largest = FP8_FORMATS.get(k_cache.dtype, NO_FP8)
    block_n, block_rank = (triton.next_power_of_2(size) for size in (sizes.nope_dim, sizes.rank))
    block_r = max(min(TILE // block_n, block_rank), 1)
    pdl, options = dependent_launch(q)
    absorb_kernel[(heads, triton.cdiv(sizes.rank, block_r))](
        queries=queries,
        latents=latents,
        kv_b=kv_b,
        norm=norm[0],
        cos=rotation[0],
        sin=rotation[1],
        positions=positions,
        q=q,
        k_cache=k_cache.view(torch.uint8) if mantissa else k_cache,
        seq_lens=cache.seq_lens,
        dropped=cache.dropped,
        rows=batch,
        q_stride=queries.stride(0),
        latent_stride=latents.stride(0),
        k_stride_b=k_cache.stride(0),
        k_stride_t=k_cache.stride(1),
        eps=norm[1],
        capacity=cache.capacity,
        HEADS=heads,
        NOPE=sizes.nope_dim,
        ROPE=sizes.rope_dim,
        RANK=sizes.rank,
        V=sizes.v_dim,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        BLOCK_RANK=block_rank,
        BLOCK_PAIRS=triton.next_power_of_2(sizes.rope_dim // 2),
        MANTISSA=mantissa,
        BIAS=bias,
        LARGEST=largest,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    return q


def values(attended: Tensor, kv_b: Tensor, sizes: Latent) -> Tensor:
    """[batch, heads * v_dim]: W_v of each head times attended [batch, heads, rank], contiguous. kv_b: as in absorb."""
    batch, heads = attended.shape[:2]
    out = torch.empty((batch, heads * sizes.v_dim), dtype=attended.dtype, device=attended.device)
    block_rank = triton.next_power_of_2(sizes.rank)
    block_v = max(min(TILE // block_rank, triton.next_power_of_2(sizes.v_dim)), 1)
    pdl, options = dependent_launch(out)
    values_kernel[(heads, triton.cdiv(sizes.v_dim, block_v))](
        attended=attended,
        kv_b=kv_b,
        out=out,
        rows=batch,
        HEADS=heads,
        NOPE=sizes.nope_dim,
        RANK=sizes.rank,
        V=sizes.v_dim,
        BLOCK_V=block_v,
        BLOCK_RANK=block_rank,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    return out
