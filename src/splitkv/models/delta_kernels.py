"""One token of a gated delta-net layer on a GPU, from its projection to the input of its output product: one launch,
and both states are updated where they lie.

fla-core's kernel for this writes the new state to a new tensor, which would have to be copied back at every step. Here
a block has one head: it reads its state once and writes it once, and convolution, gates and norm are done on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .config import DeltaNet
from .launching import dependent_launch


@triton.jit
def convolved(x, held, weight, c, inside, position, channels, writes, KERNEL: tl.constexpr):
    """silu of the causal convolution of channels c at the newest token, whose input x joins the inputs held.

    Inputs are held by position modulo KERNEL: the newest takes the place of one that nobody reads any more, so blocks
    that share channels need not wait for each other.
    """
    new = tl.load(x + c, mask=inside, other=0)
    total = new.to(tl.float32) * tl.load(weight + c * KERNEL + KERNEL - 1, mask=inside, other=0).to(tl.float32)
    for back in tl.static_range(1, KERNEL):
        slot = (position + KERNEL - back) % KERNEL
        old = tl.load(held + slot * channels + c, mask=inside, other=0).to(tl.float32)
        total += old * tl.load(weight + c * KERNEL + KERNEL - 1 - back, mask=inside, other=0).to(tl.float32)
    tl.store(held + position % KERNEL * channels + c, new, mask=inside & writes)
    return total * tl.sigmoid(total)


@triton.jit
def delta_kernel(
    projected, positions, held, weight, rate, dt_bias, memory, norm, out, stride, channels, scale, unit_eps, norm_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (value heads, rows). S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = norm(S^T q) silu(z)."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    is_key, is_value = i < KEY_DIM, j < VALUE_DIM
    places = memory + (row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(places, mask=is_state, other=0)
    if PDL:  # the state was written by the step before
        gdc_wait()

    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    inputs = projected + row * stride
    position = tl.load(positions + row)
    held += row * KERNEL * channels
    keys = head // group * KEY_DIM + i
    first = head % group == 0
    q = convolved(inputs, held, weight, keys, is_key, position, channels, first, KERNEL)
    k = convolved(inputs, held, weight, KEY_HEADS * KEY_DIM + keys, is_key, position, channels, first, KERNEL)
    v = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = convolved(inputs, held, weight, v, is_value, position, channels, True, KERNEL)
    q *= scale / tl.sqrt(tl.sum(q * q) + unit_eps)
    k *= 1.0 / tl.sqrt(tl.sum(k * k) + unit_eps)

    gates = inputs + channels + values + head
    step = tl.load(gates + VALUE_HEADS).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    state *= tl.exp(tl.load(rate + head) * step)
    beta = tl.sigmoid(tl.load(gates).to(tl.float32))
    wanted = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * wanted[None, :]
    tl.store(places, state, mask=is_state)

    attended = tl.sum(state * q[:, None], 0)
    attended *= 1.0 / tl.sqrt(tl.sum(attended * attended) / VALUE_DIM + norm_eps)
    attended *= tl.load(norm + j, mask=is_value, other=0).to(tl.float32)
    z = tl.load(inputs + channels + head * VALUE_DIM + j, mask=is_value, other=0).to(tl.float32)
    attended *= z * tl.sigmoid(z)
    tl.store(out + row * values + head * VALUE_DIM + j, attended.to(out.dtype.element_ty), mask=is_value)


def step(
    projected: Tensor,
    positions: Tensor,
    conv: Tensor,
    memory: Tensor,
    *,
    weight: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    sizes: DeltaNet,
    unit_eps: float,
    norm_eps: float,
) -> Tensor:
    """One token of every row: [batch, value heads * value_dim] in projected's dtype; `conv`, `memory` are updated.

    projected: [batch, channels | value heads * value_dim | value heads | value heads]: q, k and v before their
    convolution, z, b and a. positions: [batch] int32, tokens held before. conv: [batch, kernel, channels], the input at
    position p in p % kernel. memory: [batch, value heads, key_dim, value_dim] f32. weight: [channels, kernel]. rate,
    dt_bias: [value heads] f32. norm: [value_dim]. unit_eps: under the root of q's and k's lengths. All contiguous.
    """
    batch, channels = projected.shape[0], sizes.channels
    out = projected.new_empty((batch, sizes.num_value_heads * sizes.value_dim))
    block_k, block_v = triton.next_power_of_2(sizes.key_dim), triton.next_power_of_2(sizes.value_dim)
    pdl, options = dependent_launch(out)
    delta_kernel[(sizes.num_value_heads, batch)](
        projected=projected,
        positions=positions,
        held=conv,
        weight=weight,
        rate=rate,
        dt_bias=dt_bias,
        memory=memory,
        norm=norm,
        out=out,
        stride=projected.stride(0),
        channels=channels,
        scale=sizes.key_dim**-0.5,
        unit_eps=unit_eps,
        norm_eps=norm_eps,
        KEY_HEADS=sizes.num_key_heads,
        VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        KERNEL=sizes.kernel,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        PDL=pdl,
        num_warps=max(4, min(16, block_k * block_v // 2048)),
        **options,
    )
    return out
