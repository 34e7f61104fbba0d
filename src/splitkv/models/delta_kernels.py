"""One token of a gated delta-net layer on a GPU: two launches, and both states are updated where they lie.

fla-core's kernel for this writes the new state to a new tensor, which would have to be copied back at every step. Here
a block reads its part of the state once and writes it once; the gates are computed on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import DeltaNet

CONV_BLOCK = 256
STATE_ELEMENTS = 2048
"""Elements of the state that a block of four warps holds: 16 in each thread."""


@triton.jit
def conv_kernel(x, held, weight, out, x_stride, channels, KERNEL: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu of the causal convolution at the newest token, whose input x joins the inputs held."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    mine = held + row * channels * (KERNEL - 1) + c * (KERNEL - 1)
    new = tl.load(x + row * x_stride + c, mask=inside, other=0)
    total = new.to(tl.float32) * tl.load(weight + c * KERNEL + KERNEL - 1, mask=inside, other=0).to(tl.float32)
    for i in tl.static_range(KERNEL - 1):
        old = tl.load(mine + i, mask=inside, other=0)
        total += old.to(tl.float32) * tl.load(weight + c * KERNEL + i, mask=inside, other=0).to(tl.float32)
        if i > 0:
            tl.store(mine + i - 1, old, mask=inside)
    tl.store(mine + KERNEL - 2, new, mask=inside)
    tl.store(out + row * channels + c, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def state_kernel(
    mixed, a, b, rate, dt_bias, memory, out, channels, gate_stride, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = S^T q, for BLOCK_V columns of one head's S."""
    blocks: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = i < KEY_DIM, j < VALUE_DIM

    keys = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
    inputs = mixed + row * channels
    q = tl.load(inputs + keys, mask=is_key, other=0).to(tl.float32)
    k = tl.load(inputs + KEY_HEADS * KEY_DIM + keys, mask=is_key, other=0).to(tl.float32)
    v = tl.load(inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j, mask=is_value, other=0).to(tl.float32)
    q *= scale / tl.sqrt(tl.sum(q * q) + eps)
    k *= 1.0 / tl.sqrt(tl.sum(k * k) + eps)

    step = tl.load(a + row * gate_stride + head).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = tl.exp(tl.load(rate + head) * step)
    beta = tl.sigmoid(tl.load(b + row * gate_stride + head).to(tl.float32))

    places = memory + (row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(places, mask=is_state, other=0) * decay
    wanted = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * wanted[None, :]
    tl.store(places, state, mask=is_state)
    attended = tl.sum(state * q[:, None], 0)
    tl.store(out + (row * VALUE_HEADS + head) * VALUE_DIM + j, attended.to(out.dtype.element_ty), mask=is_value)


def step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Tensor,
    memory: Tensor,
    *,
    weight: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    sizes: DeltaNet,
    eps: float,
) -> Tensor:
    """One token of every row: [batch, value heads, value_dim] in qkv's dtype; `conv` and `memory` are updated.

    qkv: [batch, channels]. a, b: [batch, value heads], equal row strides. conv: [batch, channels, kernel - 1].
    memory: [batch, value heads, key_dim, value_dim] f32. weight: [channels, kernel], of the convolution. rate,
    dt_bias: [value heads] f32. eps: under the root of q's and k's lengths. All contiguous, but for rows of the first
    three.
    """
    batch, channels = qkv.shape
    mixed = torch.empty((batch, channels), dtype=qkv.dtype, device=qkv.device)
    out = torch.empty((batch, sizes.num_value_heads, sizes.value_dim), dtype=qkv.dtype, device=qkv.device)
    block_k = triton.next_power_of_2(sizes.key_dim)
    block_v = min(max(STATE_ELEMENTS // block_k, 1), triton.next_power_of_2(sizes.value_dim))
    conv_kernel[(triton.cdiv(channels, CONV_BLOCK), batch)](
        x=qkv,
        held=conv,
        weight=weight,
        out=mixed,
        x_stride=qkv.stride(0),
        channels=channels,
        KERNEL=sizes.kernel,
        BLOCK=CONV_BLOCK,
        num_warps=2,
    )
    state_kernel[(sizes.num_value_heads * triton.cdiv(sizes.value_dim, block_v), batch)](
        mixed=mixed,
        a=a,
        b=b,
        rate=rate,
        dt_bias=dt_bias,
        memory=memory,
        out=out,
        channels=channels,
        gate_stride=a.stride(0),
        scale=sizes.key_dim**-0.5,
        eps=eps,
        KEY_HEADS=sizes.num_key_heads,
        VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )
    return out
