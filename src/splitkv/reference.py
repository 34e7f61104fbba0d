"""What decode attention means, twice: once obviously, once in the kernel's own order. Runs on the CPU only.

reference_attention      the float64 oracle: one query at a time, gather the keys it may see, take one softmax
merge_states_reference   the float64 combination of normalised parts computed over disjoint keys
twin_attention           the float32 twin of the kernel: splits, tiles, online softmax, a fixed merge tree

The oracle says what is right. The twin shows that the kernel's order of arithmetic is good enough to be
right, and its drop_rescale mutant that the comparison would notice if it were not. Both read one _Problem:
the checked arguments, which know the keys that a query may see and load no others.

Source: scaled dot-product attention (Vaswani et al. 2017), online softmax (Milakov and Gimelshein 2018), the
split and merge of decode attention (Flash-Decoding, Dao et al. 2023). Nothing of ours is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LOG2_E, _LN_2 = math.log2(math.e), math.log(2.0)
_INF = math.inf
_KEYS_PER_LOAD = 2048  # keys widened to float64 at once: 16 MiB for 4 KV heads of 256


# ---- the oracle --------------------------------------------------------------------------------------------


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    *,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    starts: Tensor | int | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    policy: Any = None,
    backend: Any = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Any = None,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Decode attention in float64 on the CPU: slow, obvious, and the measuring stick for everything else.

    Tensors may live on any device and have any strides. "float" is f64, f32, f16 or bf16.
        q            [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim], float
        k_cache      [batch, capacity, num_kv_heads, head_dim], or with block_table
                     [num_pages, page_size, num_kv_heads, head_dim]; float, float8_e4m3fn or float8_e5m2
        v_cache      as k_cache, with a dtype, strides and last dimension (v_head_dim) of its own
        seq_lens     [batch] int32/int64, or one int for all: valid keys, the queries' own included; a length
                     below 0 counts as 0, one above the capacity as the capacity
        block_table  [batch, max_pages] int32/int64, which makes the capacity max_pages * page_size; keys on a
                     page id outside [0, num_pages) are absent, entries past a row's length are not looked at
        sinks        [num_q_heads] float: a logit added once to the denominator, never capped
        starts       [batch] int32/int64, or one int for all: first visible key
        mask         broadcastable to [batch, num_q_heads, q_len, capacity]: bool (True = visible), or float
                     to add to the logits, where -inf hides the key
        k_scale, v_scale  a number, 0-d or [num_kv_heads]: factors of the decoded K and V

    Query i sees the keys from max(starts, end - window) up to end = seq_len - q_len + 1 + i, exclusive. Keys
    outside that range are never read, so they may hold NaN or Inf. ``window`` counts the current key too. The
    order is scale (default head_dim ** -0.5), softcap * tanh(logit / softcap), mask, softmax. A window or
    softcap of None or 0 is off.

    Returns float64 CPU tensors: out, in q's shape with v_head_dim; with return_lse also lse, out's shape less
    the last dimension, natural log, sinks included; with return_scores also scores, lse's shape and capacity:
    the logits after scale and softcap, before mask and sinks, -inf for keys out of range or absent. A query
    that sees no key gives out 0 and lse -inf, whatever its sink. ``out``, if given, gets a copy in its own
    dtype. ``policy``, ``backend`` and ``workspace`` are ignored: they never change what is right.

    Raises TypeError for dtypes and ValueError for shapes and ranges, naming the argument.
    """
    problem = _check(
        torch.float64, q, k_cache, v_cache, seq_lens,
        block_table=block_table, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks,
        starts=starts, mask=mask, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    batch, q_len, num_q_heads, _ = problem.q.shape
    result = torch.zeros(batch, q_len, num_q_heads, problem.v_head_dim, dtype=torch.float64)
    lse = torch.full((batch, q_len, num_q_heads), -_INF, dtype=torch.float64)
    scores = torch.full((*lse.shape, problem.capacity * return_scores), -_INF, dtype=torch.float64)
    for row in range(batch):
        for query in range(q_len):
            positions = problem.present_keys(row, *problem.visible_range(row, query))
            logits = _logits(problem, row, query, positions)
            if return_scores:
                scores[row, query, :, positions] = logits
            result[row, query], lse[row, query] = _softmax_times_v(problem, row, query, positions, logits)

    returned = [result] + [lse] * return_lse + [scores] * return_scores
    if q.dim() == 3:
        returned = [tensor.squeeze(1) for tensor in returned]
    if out is not None:
        _require(out.shape == returned[0].shape, "out", tuple(returned[0].shape), tuple(out.shape))
        out.copy_(returned[0])
    return returned[0] if len(returned) == 1 else tuple(returned)


def _logits(problem: _Problem, row: int, query: int, positions: Tensor) -> Tensor:
    """Natural-scale logits [num_q_heads, keys] after scale and softcap, before the mask."""
    q = torch.unflatten(problem.q[row, query], 0, problem.heads)
    parts = []
    for chunk in torch.split(positions, _KEYS_PER_LOAD):
        k = problem.load(problem.k_pages, row, chunk) * problem.k_scale[:, None]
        parts.append(torch.einsum("hgd,nhd->hgn", q, k))
    logits = torch.cat(parts, dim=-1).flatten(0, 1) * problem.softmax_scale
    return _cap(logits, problem.softcap)


def _softmax_times_v(
    problem: _Problem, row: int, query: int, positions: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """out [num_q_heads, v_head_dim] and lse [num_q_heads]; the sink is one more column of the softmax."""
    if problem.mask is not None:
        logits = _apply_mask(logits, problem.mask[row, :, query][:, positions])
    lse = torch.cat([logits, problem.sinks[:, None]], dim=-1).logsumexp(dim=-1)
    weights = torch.exp(logits - lse[:, None])

    seen = (logits != -_INF).any(dim=0)  # V of a key that the mask hides from every head is not read either
    weights, positions = torch.unflatten(weights[:, seen], 0, problem.heads), positions[seen]
    out = torch.zeros(*problem.heads, problem.v_head_dim, dtype=torch.float64)
    chunks = (torch.split(x, _KEYS_PER_LOAD, dim=-1) for x in (weights, positions))
    for weight, chunk in zip(*chunks, strict=True):
        v = problem.load(problem.v_pages, row, chunk) * problem.v_scale[:, None]
        out += torch.einsum("hgn,nhv->hgv", weight, v)

    empty = (logits == -_INF).all(dim=-1)  # true as well when there are no keys at all
    return out.flatten(0, 1).masked_fill(empty[:, None], 0.0), lse.masked_fill(empty, -_INF)


def merge_states_reference(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine normalised parts computed over disjoint keys, in float64 on the CPU.

    outs [n, ..., v_head_dim] and lses [n, ...] (natural log) have any float dtype and device. Returns
    (out [..., v_head_dim], lse [...]) in float64. A part whose lse is -inf is selected away, even if its out
    is NaN; where all are, the result is (0, -inf). Raises ValueError if the shapes disagree or n is 0.
    """
    _require(outs.dim() >= 2 and outs.shape[0] > 0, "outs", "[n >= 1, ..., v_head_dim]", tuple(outs.shape))
    _require(lses.shape == outs.shape[:-1], "lses", tuple(outs.shape[:-1]), tuple(lses.shape))
    outs, lses = outs.detach().to("cpu", torch.float64), lses.detach().to("cpu", torch.float64)
    largest = lses.amax(dim=0)
    weights = torch.exp(lses - _finite_or_zero(largest))
    total = weights.sum(dim=0).clamp_min(1.0)  # the largest part alone weighs 1, so this only replaces 0
    summed = (outs.masked_fill((lses == -_INF)[..., None], 0.0) * weights[..., None]).sum(dim=0)
    return summed / total[..., None], largest + torch.log(total)


# ---- the twin: the kernel's order --------------------------------------------------------------------------


class _Part(NamedTuple):
    """Unnormalised attention over some keys: the maximum in log2, and sum and accumulator relative to it."""

    m: Tensor  # [num_kv_heads, rows]; -inf where nothing was visible
    total: Tensor  # [num_kv_heads, rows]; sum of exp2(score - m)
    acc: Tensor  # [num_kv_heads, rows, v_head_dim]


def twin_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    *,
    split_len: int | Callable[[int], int],
    block_n: int = 32,
    fan_out: int = 4,
    return_lse: bool = False,
    drop_rescale: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same attention in float32, in the order of the GPU kernel: splits, tiles, then a fixed merge tree.

    The tensors, the errors and the ``options`` are those of :func:`reference_attention`; the options are
    block_table, softmax_scale, window, softcap, sinks, starts, mask, k_scale and v_scale. Besides:
        split_len     keys per split, or a function that gives it from a row's span
        block_n       keys per tile of the online softmax inside a split
        fan_out       children per node of the merge tree, at least 2
        drop_rescale  the mutant: merge parts without rescaling them to a common maximum; wrong on purpose

    A row's span runs from the first key that its earliest query may see to its length; split i covers
    [i * split_len, (i + 1) * split_len) of it. k_scale multiplies the logits, v_scale the finished output.

    Returns float32 CPU tensors: out, and with return_lse also lse (natural log), shaped as in the oracle.
    """
    _require(block_n >= 1, "block_n", "at least 1", block_n)
    _require(fan_out >= 2, "fan_out", "at least 2", fan_out)
    problem = _check(torch.float32, q, k_cache, v_cache, seq_lens, **options)
    batch, q_len, num_q_heads, _ = problem.q.shape
    out = torch.empty(batch, q_len, num_q_heads, problem.v_head_dim, dtype=torch.float32)
    lse = torch.empty(batch, q_len, num_q_heads, dtype=torch.float32)
    sinks_log2 = _pack_rows(problem, problem.sinks[:, None].expand(num_q_heads, q_len)) * _LOG2_E
    for row in range(batch):
        first, end = problem.visible_range(row, query=0)[0], problem.lengths[row]
        step = split_len(max(end - first, 1)) if callable(split_len) else split_len
        _require(step >= 1, "split_len", "at least 1", step)
        splits = range(first, end, step)
        leaves = [_attend_split(problem, row, begin, min(begin + step, end), block_n) for begin in splits]
        root = _merge_tree(leaves or [empty_part(problem)], fan_out, rescale=not drop_rescale)
        packed_out, packed_lse = finish_part(root, sinks_log2, problem.v_scale)
        out[row], lse[row] = _unpack_rows(packed_out, q_len), _unpack_rows(packed_lse, q_len)
    if q.dim() == 3:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


def _attend_split(problem: _Problem, row: int, begin: int, end: int, block_n: int) -> _Part:
    """One leaf: online softmax over [begin, end), tile by tile, for all heads and queries at once."""
    q = _pack_rows(problem, problem.q[row].transpose(0, 1))
    logit_scale = (problem.softmax_scale * problem.k_scale)[:, None, None]
    m, total, acc = empty_part(problem)
    ranges = torch.tensor([problem.visible_range(row, query) for query in range(problem.q.shape[1])])
    ranges = ranges.repeat_interleave(problem.heads[1], dim=0)
    for tile in range(begin, end, block_n):
        positions = problem.present_keys(row, tile, min(tile + block_n, end))
        if len(positions) == 0:
            continue
        k, v = (problem.load(pages, row, positions) for pages in (problem.k_pages, problem.v_pages))
        logits = _cap(torch.einsum("hmd,nhd->hmn", q, k) * logit_scale, problem.softcap)
        if problem.mask is not None:
            logits = _apply_mask(logits, _pack_rows(problem, problem.mask[row][:, :, positions]))
        hidden = (positions < ranges[:, :1]) | (positions >= ranges[:, 1:])
        scores = (logits * _LOG2_E).masked_fill(hidden, -_INF)

        m_new = torch.maximum(m, scores.amax(dim=-1))
        m_safe = _finite_or_zero(m_new)
        alpha = torch.exp2(m - m_safe)
        p = torch.exp2(scores - m_safe[..., None])
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + torch.einsum("hmn,nhv->hmv", p, v)
        m = m_new
    return _Part(m, total, acc)


def _merge_tree(parts: list[_Part], fan_out: int, rescale: bool) -> _Part:
    """Up to one root. Node j of a level is the left fold of the nodes fan_out * j ... of the level below."""
    while len(parts) > 1:
        groups = [parts[begin : begin + fan_out] for begin in range(0, len(parts), fan_out)]
        parts = [reduce(lambda a, b: merge_parts(a, b, rescale), group) for group in groups]
    return parts[0]


def empty_part(problem: _Problem) -> _Part:
    """The neutral element: no key seen."""
    num_kv_heads, group_size = problem.heads
    acc = problem.q.new_zeros(num_kv_heads, problem.q.shape[1] * group_size, problem.v_head_dim)
    return _Part(acc.new_full(acc.shape[:2], -_INF), acc.new_zeros(acc.shape[:2]), acc)


def merge_parts(a: _Part, b: _Part, rescale: bool = True) -> _Part:
    """Bring both parts to the larger maximum and add. An empty part is selected away, whatever it holds."""
    m = torch.maximum(a.m, b.m)
    weight_a = torch.exp2(a.m - _finite_or_zero(m)) if rescale else torch.ones_like(m)
    weight_b = torch.exp2(b.m - _finite_or_zero(m)) if rescale else torch.ones_like(m)
    total = a.total * weight_a + b.total * weight_b
    acc = a.acc * weight_a[..., None] + b.acc * weight_b[..., None]

    a_empty, b_empty = a.m == -_INF, b.m == -_INF
    total = torch.where(a_empty, b.total, torch.where(b_empty, a.total, total))
    acc = torch.where(a_empty[..., None], b.acc, torch.where(b_empty[..., None], a.acc, acc))
    return _Part(m, total, acc)


def finish_part(root: _Part, sinks_log2: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse): add the sink once, normalise, back to natural log; (0, -inf) where no key is visible."""
    m = torch.maximum(root.m, sinks_log2)
    m_safe = _finite_or_zero(m)
    weight = torch.exp2(root.m - m_safe)
    total = root.total * weight + torch.exp2(sinks_log2 - m_safe)
    out = root.acc * weight[..., None] / total[..., None] * v_scale[:, None, None]
    lse = (m + torch.log2(total)) * _LN_2
    empty = root.m == -_INF
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -_INF)


def _pack_rows(problem: _Problem, x: Tensor) -> Tensor:
    """[num_q_heads, q_len, ...] -> [num_kv_heads, q_len * group_size, ...]: the rows that share a KV head."""
    return torch.unflatten(x, 0, problem.heads).transpose(1, 2).flatten(1, 2)


def _unpack_rows(x: Tensor, q_len: int) -> Tensor:
    """[num_kv_heads, q_len * group_size, ...] -> [q_len, num_q_heads, ...]."""
    return torch.unflatten(x, 1, (q_len, -1)).transpose(0, 1).flatten(1, 2)


# ---- what both share ---------------------------------------------------------------------------------------


def _finite_or_zero(m: Tensor) -> Tensor:
    """A maximum that may be subtracted: -inf - -inf would be NaN."""
    return m.masked_fill(m == -_INF, 0.0)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _apply_mask(logits: Tensor, mask: Tensor) -> Tensor:
    """Hidden keys become -inf by selection, so a NaN logit of a hidden key goes no further."""
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -_INF)
    return (logits + mask.to(logits.dtype)).masked_fill(mask == -_INF, -_INF)


@dataclass(frozen=True)
class _Problem:
    """The checked arguments. A contiguous cache is read as a paged one: one page of capacity keys per row."""

    q: Tensor  # [batch, q_len, num_q_heads, head_dim], in the dtype of the arithmetic like sinks and scales
    k_pages: Tensor  # [num_pages, page_size, num_kv_heads, head_dim], as stored
    v_pages: Tensor
    table: Tensor  # [batch, max_pages] int64
    capacity: int
    lengths: list[int]  # within [0, capacity]
    starts: list[int]
    window: int | None
    softcap: float | None
    softmax_scale: float
    sinks: Tensor  # [num_q_heads]; -inf for none
    mask: Tensor | None  # [batch, num_q_heads, q_len, capacity]
    k_scale: Tensor  # [num_kv_heads]
    v_scale: Tensor

    @property
    def heads(self) -> tuple[int, int]:
        """(num_kv_heads, group_size): query head h belongs to KV head h // group_size."""
        return self.k_pages.shape[2], self.q.shape[2] // self.k_pages.shape[2]

    @property
    def v_head_dim(self) -> int:
        return self.v_pages.shape[3]

    def visible_range(self, row: int, query: int) -> tuple[int, int]:
        """[first, end): the keys that causality, window and starts leave to a query; none if end <= first."""
        end = self.lengths[row] - self.q.shape[1] + 1 + query
        first = max(self.starts[row], 0)
        return (max(first, end - self.window) if self.window else first), end

    def present_keys(self, row: int, first: int, end: int) -> Tensor:
        """The positions in [first, end) whose page exists."""
        positions = torch.arange(first, max(first, end))
        page = self.table[row, positions // max(self.k_pages.shape[1], 1)]
        return positions[(page >= 0) & (page < self.k_pages.shape[0])]

    def load(self, pages: Tensor, row: int, positions: Tensor) -> Tensor:
        """Decoded values [keys, num_kv_heads, dim] at present positions, in the dtype of the arithmetic."""
        page_size = max(pages.shape[1], 1)
        return pages[self.table[row, positions // page_size], positions % page_size].to(self.q.dtype)


_WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_STORED = (*_WIDE, torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGER = (torch.int32, torch.int64)


def _check(
    dtype: torch.dtype,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    *,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    starts: Tensor | int | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> _Problem:
    q = q.unsqueeze(1) if isinstance(q, Tensor) and q.dim() == 3 else q
    _require_tensor("q", q, _WIDE, None, None, None, None)
    batch, q_len, num_q_heads, head_dim = q.shape
    _require_tensor("k_cache", k_cache, _STORED, None, None, None, head_dim)
    _require_tensor("v_cache", v_cache, _STORED, *k_cache.shape[:3], None)
    num_kv_heads = k_cache.shape[2]
    grouped = num_kv_heads > 0 and num_q_heads > 0 and num_q_heads % num_kv_heads == 0
    _require(grouped, "q", f"num_q_heads that is a multiple of num_kv_heads {num_kv_heads}", num_q_heads)
    if block_table is None:
        _require(k_cache.shape[0] == batch, "k_cache", f"the batch of q, {batch}", k_cache.shape[0])
        block_table = torch.arange(batch)[:, None]
    _require_tensor("block_table", block_table, _INTEGER, batch, None)
    capacity = block_table.shape[1] * k_cache.shape[1]
    _require(window is None or window >= 0, "window", "a count of keys, or None", window)
    _require(softcap is None or softcap >= 0, "softcap", "a positive number, or None", softcap)
    if mask is not None:
        full = (batch, num_q_heads, q_len, capacity)
        shape = [m if m == 1 else n for m, n in zip(mask.shape[::-1], full[::-1], strict=False)][::-1]
        _require_tensor("mask", mask, (torch.bool, *_WIDE), *shape)
        mask = mask.detach().cpu().expand(full)
    return _Problem(
        q=q.detach().to("cpu", dtype),
        k_pages=k_cache.detach().cpu(),
        v_pages=v_cache.detach().cpu(),
        table=block_table.to("cpu", torch.int64),
        capacity=capacity,
        lengths=[min(max(length, 0), capacity) for length in _per_row("seq_lens", seq_lens, batch)],
        starts=_per_row("starts", 0 if starts is None else starts, batch),
        window=window,
        softcap=softcap,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
        sinks=_per_head("sinks", -_INF if sinks is None else sinks, num_q_heads, dtype),
        mask=mask,
        k_scale=_per_head("k_scale", 1.0 if k_scale is None else k_scale, num_kv_heads, dtype),
        v_scale=_per_head("v_scale", 1.0 if v_scale is None else v_scale, num_kv_heads, dtype),
    )


def _per_row(name: str, value: Tensor | int, batch: int) -> list[int]:
    if isinstance(value, int):
        return [value] * batch
    _require_tensor(name, value, _INTEGER, batch)
    return [int(number) for number in value.tolist()]


def _per_head(name: str, value: Tensor | float, heads: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(value, dtype=dtype, device="cpu").detach()
    _require(tensor.shape in ((), (heads,)), name, f"a scalar or [{heads}]", tuple(tensor.shape))
    return tensor.expand(heads)


def _require_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> None:
    """None in the shape stands for any size."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a tensor of {', '.join(map(str, dtypes))}, got {came}")
    fits = value.dim() == len(shape) and all(n in (None, m) for m, n in zip(value.shape, shape, strict=True))
    _require(fits, name, f"shape {['any' if n is None else n for n in shape]}", list(value.shape))


def _require(holds: bool, name: str, expected: object, came: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {came}")
