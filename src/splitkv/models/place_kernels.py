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
def turned(heads, is_head, d, weight, cos, sin, pairs, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rows of heads [heads, D], normalised and rotated, in f32. A column's partner is loaded once more, from L1."""
    mask = is_head[:, None] & (d < D)[None, :]
    x = tl.load(heads[:, None] + d[None, :], mask=mask, other=0).to(tl.float32)
    rotated = d < 2 * pairs
    other = tl.where(d < pairs, d + pairs, d - pairs)
    partner = tl.load(heads[:, None] + other[None, :], mask=mask & rotated[None, :], other=0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(weight + d, mask=d < D, other=0).to(tl.float32)[None, :]
        partner *= scale * tl.load(weight + other, mask=rotated, other=0).to(tl.float32)[None, :]
    pair = tl.where(d < pairs, d, d - pairs)
    c = tl.load(cos + pair, mask=rotated, other=1.0)
    s = tl.load(sin + pair, mask=rotated, other=0.0)
    s = tl.where(d < pairs, -s, s)
    return x * c[None, :] + partner * s[None, :]


@triton.jit
def place_kernel(
    projected, q_weight, k_weight, cos, sin, positions, q, gate, k_cache, v_cache, seq_lens, dropped, stride, pairs,
    eps, capacity, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, rows). The block of a KV head has its query heads too."""
    if PDL:  # attention is not told to begin early: it may read lengths at once
        gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    heads_q: tl.constexpr = NUM_KV_HEADS * GROUP
    wide: tl.constexpr = 2 * D if GATED else D
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_GROUP)
    position = tl.load(positions + row)
    cos += row * pairs
    sin += row * pairs

    mine = head * GROUP + i
    is_head = i < GROUP
    mask = is_head[:, None] & (d < D)[None, :]
    from_q = projected + row * stride + mine * wide
    to_q = (row * heads_q + mine)[:, None] * D + d[None, :]
    values = turned(from_q, is_head, d, q_weight, cos, sin, pairs, eps, D, NORM)
    tl.store(q + to_q, values.to(q.dtype.element_ty), mask=mask)
    if GATED:
        values = tl.load(from_q[:, None] + D + d[None, :], mask=mask, other=0).to(tl.float32)
        tl.store(gate + to_q, tl.sigmoid(values).to(gate.dtype.element_ty), mask=mask)

    has_place = position < capacity
    alone = tl.arange(0, 1)
    mask = has_place & (d < D)[None, :] & (alone == 0)[:, None]
    from_k = projected + row * stride + heads_q * wide + head * D
    values = turned(from_k + alone, alone == 0, d, k_weight, cos, sin, pairs, eps, D, NORM)
    values = to_storage(values.to(projected.dtype.element_ty), 1.0, False, MANTISSA, BIAS, LARGEST,
                        k_cache.dtype.element_ty)  # fmt: skip
    to_k = k_cache + row * k_stride_b + position.to(tl.int64) * k_stride_t + head * k_stride_h
    tl.store(to_k + d[None, :] + alone[:, None], values, mask=mask)
    from_v = from_k + NUM_KV_HEADS * D
    values = tl.load(from_v + d[None, :] + alone[:, None], mask=mask, other=0)
    values = to_storage(values, 1.0, False, MANTISSA, BIAS, LARGEST, v_cache.dtype.element_ty)
    to_v = v_cache + row * v_stride_b + position.to(tl.int64) * v_stride_t + head * v_stride_h
    tl.store(to_v + d[None, :] + alone[:, None], values, mask=mask)
    if head == 0:  # nobody reads these in this launch
        tl.store(seq_lens + row, tl.minimum(position + 1, capacity))
        tl.store(dropped + row, tl.load(dropped + row) + 1, mask=position >= capacity)


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
