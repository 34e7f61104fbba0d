"""A mixture of experts for a few tokens on a GPU: four launches, which read the chosen experts' weights and no others.

Which experts those are stays on the device. Programs of the same rows of several tokens run at the same time, so an
expert that two tokens chose is read from memory once and from the cache then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import Experts
from .launching import dependent_launch, take_turn

ROUTER_ROWS, UP_ROWS, DOWN_ROWS = 4, 8, 8
"""Rows of a weight that one program multiplies."""
COLUMNS = 512
"""Columns of them at a time."""
WARPS = 4


@triton.jit
def router_kernel(
    x, weight, logits, norm, eps, x_stride, hidden, ROWS: tl.constexpr, NORM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of experts). logits = weight x in f32. NORM: of x / rms(x) * norm."""
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = (n < ROWS)[:, None] & (k < hidden)[None, :]
        given = tl.load(x + token * x_stride + k, mask=k < hidden, other=0).to(tl.float32)
        if NORM:
            squares += given * given
            given *= tl.load(norm + k, mask=k < hidden, other=0).to(tl.float32)
        total += tl.load(weight + n[:, None] * hidden + k[None, :], mask=mask, other=0).to(tl.float32) * given[None, :]
    product = tl.sum(total, 1)
    if NORM:
        product *= 1.0 / tl.sqrt(tl.sum(squares, 0) / hidden + eps)
    tl.store(logits + token * ROWS + n, product, mask=n < ROWS)


@triton.jit
def choose_kernel(
    logits, ids, weights, scale, COUNT: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,). The experts of a token and their weights, the shared ones last."""
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    rows: tl.constexpr = COUNT + GATED
    e = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    score = tl.load(logits + token * rows + e, mask=e < COUNT, other=-float("inf"))
    score = tl.exp(score - tl.max(score, 0))
    score = score / tl.sum(score, 0)
    left = tl.where(e < COUNT, score, -1.0)
    if CHOSEN_GROUPS < GROUPS:
        group = e // (COUNT // GROUPS)
        others = left
        kept = e < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.argmax(others, 0) // (COUNT // GROUPS)
            kept = kept | (group == best)
            others = tl.where(kept, -1.0, others)
        left = tl.where(kept, left, -1.0)
    found = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(CHOSEN):
        value, best = tl.max(left, 0, return_indices=True)
        best = tl.minimum(best, COUNT - 1)  # NaN may point anywhere
        found = tl.where(slot == i, best, found)
        weight = tl.where(slot == i, value, weight)
        left = tl.where(e == best, -1.0, left)
    if RENORMALISE:
        weight = weight / tl.sum(weight, 0)
    weight *= scale
    if SHARED > 0:
        own = 1.0
        if GATED:
            own = tl.sigmoid(tl.load(logits + token * rows + COUNT))
        found = tl.where(slot < CHOSEN, found, COUNT + slot - CHOSEN)
        weight = tl.where(slot < CHOSEN, weight, own)
    each: tl.constexpr = CHOSEN + SHARED
    tl.store(ids + token * each + slot, found, mask=slot < each)
    tl.store(weights + token * each + slot, weight, mask=slot < each)


@triton.jit
def gate_up_kernel(
    x, weight, ids, made, norm, eps, x_stride, hidden, width, EACH: tl.constexpr, NORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens * EACH, blocks of columns). made = silu(gate x) * (up x) by one expert; NORM as above."""
    take_turn(PDL)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gates = weight + expert * 2 * width * hidden + n[:, None] * hidden
    ups = gates + width * hidden
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = (n < width)[:, None] & (k < hidden)[None, :]
        given = tl.load(x + pair // EACH * x_stride + k, mask=k < hidden, other=0).to(tl.float32)
        if NORM:
            squares += given * given
            given *= tl.load(norm + k, mask=k < hidden, other=0).to(tl.float32)
        gate += tl.load(gates + k[None, :], mask=mask, other=0).to(tl.float32) * given[None, :]
        up += tl.load(ups + k[None, :], mask=mask, other=0).to(tl.float32) * given[None, :]
    opened, product = tl.sum(gate, 1), tl.sum(up, 1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / hidden + eps)
        opened *= scale
        product *= scale
    tl.store(made + pair * width + n, opened * tl.sigmoid(opened) * product, mask=n < width)


@triton.jit
def down_kernel(
    made, weight, ids, weights, out, out_stride, hidden, width, EACH: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of columns). out = the sum over experts of weights * (down made); ADD: out += that sum."""
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(EACH):
        pair = token * EACH + i
        downs = weight + tl.load(ids + pair).to(tl.int64) * hidden * width + n[:, None] * width
        share = tl.load(weights + pair)
        for start in range(0, width, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            mask = (n < hidden)[:, None] & (k < width)[None, :]
            given = share * tl.load(made + pair * width + k, mask=k < width, other=0)
            total += tl.load(downs + k[None, :], mask=mask, other=0).to(tl.float32) * given[None, :]
    product = tl.sum(total, 1)
    place = out + token * out_stride + n
    if ADD:
        product += tl.load(place, mask=n < hidden, other=0).to(tl.float32)
    tl.store(place, product.to(out.dtype.element_ty), mask=n < hidden)


def step(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Experts,
    norm: tuple[Tensor, float] | None = None,
    add: bool = False,
) -> Tensor:
    """[tokens, hidden] in x's dtype: the experts' weighted sum.

    x: [tokens, hidden], rows at any stride. router: [count, hidden], and one row more if experts.gated. gate_up:
    [count + shared, 2 * width, hidden], gate's rows first. down: [count + shared, hidden, width]. Weights contiguous.
    norm: (weight [hidden], eps): x is normalised first. add: the sum is added to x, in place, and x returned.
    """
    tokens, hidden = x.shape
    rows, width = router.shape[0], experts.width
    each = experts.chosen + experts.shared

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    logits, weights, made = scratch(tokens, rows), scratch(tokens, each), scratch(tokens * each, width)
    ids, out = scratch(tokens, each, dtype=torch.int32), x if add else scratch(tokens, hidden, dtype=x.dtype)
    along_hidden, along_width = (min(COLUMNS, triton.next_power_of_2(size)) for size in (hidden, width))
    pdl, options = dependent_launch(x)
    weight, eps = (x, 0.0) if norm is None else norm
    of_x = dict(x=x, x_stride=x.stride(0), hidden=hidden, norm=weight, eps=eps, NORM=norm is not None)
    of_x |= dict(BLOCK_K=along_hidden, PDL=pdl, num_warps=WARPS, **options)
    router_kernel[(tokens, triton.cdiv(rows, ROUTER_ROWS))](
        weight=router, logits=logits, ROWS=rows, BLOCK_N=ROUTER_ROWS, **of_x
    )
    choose_kernel[(tokens,)](
        logits=logits,
        ids=ids,
        weights=weights,
        scale=experts.scale,
        COUNT=experts.count,
        CHOSEN=experts.chosen,
        SHARED=experts.shared,
        GATED=experts.gated,
        GROUPS=experts.groups,
        CHOSEN_GROUPS=experts.chosen_groups,
        RENORMALISE=experts.renormalise,
        BLOCK=triton.next_power_of_2(experts.count),
        SLOTS=triton.next_power_of_2(each),
        PDL=pdl,
        num_warps=1,
        **options,
    )
    gate_up_kernel[(tokens * each, triton.cdiv(width, UP_ROWS))](
        weight=gate_up, ids=ids, made=made, width=width, EACH=each, BLOCK_N=UP_ROWS, **of_x
    )
    down_kernel[(tokens, triton.cdiv(hidden, DOWN_ROWS))](
        made=made,
        weight=down,
        ids=ids,
        weights=weights,
        out=out,
        out_stride=out.stride(0),
        hidden=hidden,
        width=width,
        EACH=each,
        ADD=add,
        BLOCK_N=DOWN_ROWS,
        BLOCK_K=along_width,
        PDL=pdl,
        num_warps=WARPS,
        **options,
    )
    return out
