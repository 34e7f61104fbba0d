"""From attention's projection to its input on a GPU, in one launch: norms of q and k, rotary positions, the gate, and k
and v into their cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..backends.triton_append import FP8_FORMATS, NO_FP8, to_storage
from ..cache.contiguous import ContiguousKVCache
from .launching import dependent_launch


@triton.jit
def with_partners(x, mask, d, pairs):
    """(x at columns d, x at the columns that those are rotated with). Volatile, as in delta_kernel."""
    partner = tl.where(d < pairs, d + pairs, d - pairs)
    own = tl.load(x + d, mask=mask, other=0, volatile=True)
    return own, tl.load(x + partner, mask=mask & (d < 2 * pairs), other=0, volatile=True)


@triton.jit
def turned(x, weights, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rows of heads [heads, D], normalised and rotated, in f32. x, weights: with their partners."""
    own, partner = x[0].to(tl.float32), x[1].to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        own *= scale * weights[0].to(tl.float32)
        partner *= scale * weights[1].to(tl.float32)
    return own * cos + partner * sin


@triton.jit
def place_kernel(
    projected, q_weight, k_weight, cos, sin, positions, q, gate, k_cache, v_cache, seq_lens, dropped, stride, pairs,
    eps, capacity, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, rows). The block of a KV head has its query heads too."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    heads_q: tl.constexpr = NUM_KV_HEADS * GROUP
    wide: tl.constexpr = 2 * D if GATED else D
    d = tl.arange(0, BLOCK_D)[None, :]
    i = tl.arange(0, BLOCK_GROUP)[:, None]
    alone = tl.arange(0, 1)[:, None]
    is_column = d < D
    is_rotated = d < 2 * pairs
    pair = row * pairs + tl.where(d < pairs, d, d - pairs)
    mine = head * GROUP + i
    mask = (i < GROUP) & is_column
    from_q = projected + row * stride + mine * wide
    from_k = projected + row * stride + heads_q * wide + (head + alone) * D
    to_q = (row * heads_q + mine) * D + d

    # Before the wait: weights, and what only this kernel's launch of the step before has written (launching.py).
    if NORM:
        q_weights = with_partners(q_weight + alone, is_column, d, pairs)
        k_weights = with_partners(k_weight + alone, is_column, d, pairs)
    else:
        q_weights = (1.0, 1.0)
        k_weights = (1.0, 1.0)
    lost = tl.load(dropped + row, cache_modifier=".cg")
    if PDL:  # attention is not told to begin early: it may read lengths at once
        gdc_wait()
    # One trip to the L2 cache: no address here depends on what another load brings, and no store is between them.
    position = tl.load(positions + row, volatile=True)
    c = tl.load(cos + pair, mask=is_rotated, other=1.0, volatile=True)
    s = tl.load(sin + pair, mask=is_rotated, other=0.0, volatile=True)
    s = tl.where(d < pairs, -s, s)
    heads = with_partners(from_q, mask, d, pairs)
    key = with_partners(from_k, is_column, d, pairs)
    value = tl.load(from_k + NUM_KV_HEADS * D + d, mask=is_column, other=0, volatile=True)
    if GATED:
        gates = tl.load(from_q + D + d, mask=mask, other=0, volatile=True).to(tl.float32)
        tl.store(gate + to_q, tl.sigmoid(gates).to(gate.dtype.element_ty), mask=mask)

    heads = turned(heads, q_weights, c, s, eps, D, NORM)
    tl.store(q + to_q, heads.to(q.dtype.element_ty), mask=mask)
    key = turned(key, k_weights, c, s, eps, D, NORM).to(projected.dtype.element_ty)
    key = to_storage(key, 1.0, False, MANTISSA, BIAS, LARGEST, k_cache.dtype.element_ty)
    value = to_storage(value, 1.0, False, MANTISSA, BIAS, LARGEST, v_cache.dtype.element_ty)
    has_place = position < capacity
    at = position.to(tl.int64)
    tl.store(k_cache + row * k_stride_b + at * k_stride_t + head * k_stride_h + d, key, mask=is_column & has_place)
    tl.store(v_cache + row * v_stride_b + at * v_stride_t + head * v_stride_h + d, value, mask=is_column & has_place)
    if head == 0:  # nobody reads these in this launch
        tl.store(seq_lens + row, tl.minimum(position + 1, capacity))
        tl.store(dropped + row, lost + 1, mask=position >= capacity)


def place(
    projected: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    rotation: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: ContiguousKVCache,
    num_q_heads: int,
    gated: bool,
) -> tuple[Tensor, Tensor | None]:
    """q and sigmoid of the gate, each [batch, num_q_heads, head_dim]; k and v are stored behind what `cache` holds.

    projected: [batch, q | k | v], where gated a head's q is followed by its gate. norms: weights of q's and k's RMS
    norms, and their eps. rotation: cos, sin of step_kernels.begin. positions: [batch] int32, what each row of the
    cache holds; a row that is full drops its token and counts it, as KVCache.append does.
    """
    batch, kv_heads, dim = projected.shape[0], cache.num_kv_heads, cache.head_dim
    q = torch.empty((batch, num_q_heads, dim), dtype=projected.dtype, device=projected.device)
    gate = torch.empty_like(q) if gated else None
    k_cache, v_cache = cache.k_cache, cache.v_cache
    mantissa, bias, largest = FP8_FORMATS.get(k_cache.dtype, NO_FP8)
    if mantissa:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    pdl, options = dependent_launch(q)
    place_kernel[(kv_heads, batch)](
        projected=projected,
        q_weight=projected if norms is None else norms[0],
        k_weight=projected if norms is None else norms[1],
        cos=rotation[0],
        sin=rotation[1],
        positions=positions,
        q=q,
        gate=q if gate is None else gate,
        k_cache=k_cache,
        v_cache=v_cache,
        seq_lens=cache.seq_lens,
        dropped=cache.dropped,
        stride=projected.stride(0),
        pairs=rotation[0].shape[-1],
        eps=0.0 if norms is None else norms[2],
        capacity=cache.capacity,
        k_stride_b=k_cache.stride(0),
        k_stride_t=k_cache.stride(1),
        k_stride_h=k_cache.stride(2),
        v_stride_b=v_cache.stride(0),
        v_stride_t=v_cache.stride(1),
        v_stride_h=v_cache.stride(2),
        NUM_KV_HEADS=kv_heads,
        GROUP=num_q_heads // kv_heads,
        BLOCK_GROUP=triton.next_power_of_2(num_q_heads // kv_heads),
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        NORM=norms is not None,
        GATED=gated,
        MANTISSA=mantissa,
        BIAS=bias,
        LARGEST=largest,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    return q, gate
