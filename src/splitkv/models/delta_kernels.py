"""One token of a gated delta-net layer on a GPU, from its projection to the input of its output product: one launch,
and both states are updated where they lie.

fla-core's kernel for this writes the new state to a new tensor, which would have to be copied back at every step. Here
a block has one head: it reads its state once and writes it once, and convolution, gates and norm are done on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .config import DeltaNet
from .launching import dependent_launch, take_turn


@triton.jit
def taps(held, weight, c, inside, channels, KERNEL: tl.constexpr):
    """(weights, inputs held) of the convolution of channels c: a tuple each, by tap and by slot. Beside them, where
    nothing is held, the convolution changes nothing."""
    weights = ()
    slots = ()
    for i in tl.static_range(KERNEL):
        tap = tl.load(weight + c * KERNEL + i, mask=inside, other=1 if i == KERNEL - 1 else 0)
        slot = tl.load(held + i * channels + c, mask=inside, other=0, cache_modifier=".cg")
        weights += (tap,)  # type: ignore[assignment]
        slots += (slot,)  # type: ignore[assignment]
    return weights, slots


@triton.jit
def convolved(new, weights, slots, position, KERNEL: tl.constexpr):
    """silu of the causal convolution at the newest token, whose input is `new`. The input of position p is in slot p %
    KERNEL, which is known late: each is chosen among all."""
    total = new.to(tl.float32) * weights[KERNEL - 1].to(tl.float32)
    for back in tl.static_range(1, KERNEL):
        slot = (position + KERNEL - back) % KERNEL
        old = slots[0]
        for i in tl.static_range(1, KERNEL):
            old = tl.where(slot == i, slots[i], old)
        total += old.to(tl.float32) * weights[KERNEL - 1 - back].to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def delta_kernel(
    projected, positions, held, weight, rate, dt_bias, memory, norm, out, stride, channels, scale, unit_eps, norm_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (value heads, rows). S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = norm(S^T q) silu(z).

    The products with the new state come from those with the old one, S_new^T q = exp(g) S^T q + (k . q) wanted, so
    that one pass makes both and the state is updated when the output is on its way.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    is_key, is_value = i < KEY_DIM, j < VALUE_DIM
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    # q and k side by side, and v and z: pairs are enough elements that the compiler keeps one to a thread, and spreads
    # the results over the state's layout, instead of what is loaded for them.
    part = tl.arange(0, 2)[None, :]
    of_qk = part * KEY_HEADS * KEY_DIM + (head // group * KEY_DIM + i)[:, None]
    of_v = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[:, None]
    of_vz = tl.where(part == 0, of_v, channels + head * VALUE_DIM + j[:, None])
    is_qk = is_key[:, None] & (part < 2)
    is_vz = is_value[:, None] & (part < 2)
    is_v = is_vz & (part == 0)
    held += row * KERNEL * channels
    places = memory + (row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    is_state = is_key[:, None] & is_value[None, :]

    # Before the wait: weights, and what only this kernel's launch of the step before has written (launching.py). Past
    # the L1 cache, which may be older.
    weights_qk, slots_qk = taps(held, weight, of_qk, is_qk, channels, KERNEL)
    weights_vz, slots_vz = taps(held, weight, of_vz, is_v, channels, KERNEL)
    bias, log_rate = tl.load(dt_bias + head), tl.load(rate + head)
    norms = tl.load(norm + j, mask=is_value, other=0)
    state = tl.load(places, mask=is_state, other=0, cache_modifier=".cg")
    take_turn(PDL)
    # One trip to the L2 cache: no address here depends on what another load brings. They are volatile, or the assembler
    # moves those that are used last down, behind the arrival of the first.
    inputs = projected + row * stride
    gates = inputs + channels + values + head
    beta = tl.load(gates, volatile=True).to(tl.float32)
    step = tl.load(gates + VALUE_HEADS, volatile=True)
    position = tl.load(positions + row, volatile=True)
    new_qk = tl.load(inputs + of_qk, mask=is_qk, other=0, volatile=True)
    new_vz = tl.load(inputs + of_vz, mask=is_vz, other=0, volatile=True)
    beta = tl.sigmoid(beta)
    step = step.to(tl.float32) + bias
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = tl.exp(log_rate * step)

    mixed = convolved(new_qk, weights_qk, slots_qk, position, KERNEL)
    q, k = tl.split(mixed)
    v, z = tl.split(convolved(new_vz, weights_vz, slots_vz, position, KERNEL))
    from_q, from_k = tl.split(tl.sum(tl.join(state * q[:, None], state * k[:, None]), 0))
    qq, kk = tl.split(tl.sum(mixed * mixed, 0))
    qk = tl.sum(q * k)
    q_scale = scale / tl.sqrt(qq + unit_eps)
    k_scale = 1.0 / tl.sqrt(kk + unit_eps)
    wanted = beta * (v - decay * k_scale * from_k)
    attended = q_scale * (decay * from_q + k_scale * qk * wanted)
    attended *= 1.0 / tl.sqrt(tl.sum(attended * attended) / VALUE_DIM + norm_eps)
    attended *= norms.to(tl.float32) * z
    tl.store(out + row * values + head * VALUE_DIM + j, attended.to(out.dtype.element_ty), mask=is_value)

    tl.store(places, decay * state + (k_scale * k)[:, None] * wanted[None, :], mask=is_state)
    # The newest input takes the place of one that nobody reads any more: blocks that share channels need not wait for
    # each other.
    held += position % KERNEL * channels
    first = head % group == 0
    tl.store(held + of_qk, new_qk, mask=is_qk & first)
    tl.store(held + of_vz, new_vz, mask=is_v)


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
        num_warps=max(4, min(16, block_k * block_v // 4096)),
        **options,
    )
    return out
