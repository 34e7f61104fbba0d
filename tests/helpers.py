"""What the kernel tests share: inputs, layouts, guard bands, the parity check, and a launch with a chosen plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitkv.backends import launcher
from splitkv.checks import check_inputs
from splitkv.plan import DecodePlan, _max_units
from splitkv.policy import SplitRule

NAN, INF = math.nan, math.inf
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error of out against float64 at unit-normal V, by the dtype of out."""


def make_inputs(
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    *,
    v_head_dim: int | None = None,
    q_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit-normal q, K and V. q_len None gives q without that dimension."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, to: torch.dtype) -> Tensor:
        half = torch.float32 if to.itemsize == 4 else torch.float16  # less memory on the way to 16 and 8 bits
        return torch.randn(shape, generator=generator, device=device, dtype=half).to(to)

    queries = () if q_len is None else (q_len,)
    return (
        normal(batch, *queries, num_q_heads, head_dim, to=dtype),
        normal(batch, capacity, num_kv_heads, head_dim, to=kv_dtype or dtype),
        normal(batch, capacity, num_kv_heads, v_head_dim or head_dim, to=kv_dtype or dtype),
    )


def int32(values: Any, device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def page_order(batch: int, capacity: int, page_size: int, *, spare: int = 2, seed: int = 0) -> tuple[Tensor, int]:
    """(block_table, number of pages): every row's pages shuffled over one pool that has `spare` pages more."""
    per_row = -(-capacity // page_size)
    num_pages = batch * per_row + spare
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    return order[: batch * per_row].reshape(batch, per_row).to(torch.int32), num_pages


def to_pages(cache: Tensor, block_table: Tensor, num_pages: int, page_size: int, fill: float = NAN) -> Tensor:
    """The pool that holds a contiguous cache on the table's pages; everything else in it is `fill`."""
    batch, _, heads, dim = cache.shape
    pool = torch.full((num_pages, page_size, heads, dim), fill, dtype=torch.float32, device=cache.device)
    pool = pool.to(cache.dtype)
    for row in range(batch):
        for page, number in enumerate(block_table[row].tolist()):
            keys = cache[row, page * page_size : (page + 1) * page_size]
            pool[number, : keys.shape[0]] = keys
    return pool


def poison_tails(cache: Tensor, lens: list[int], fill: float) -> Tensor:
    """A copy of a contiguous cache whose rows hold `fill` from their length on."""
    cache = cache.clone()
    for row, length in enumerate(lens):
        cache[row, max(length, 0) :] = fill
    return cache


class Guarded:
    """A tensor in the middle of a larger allocation, so that a write beside it is seen.

    The guard is a whole number of kilobytes, so the tensor is aligned as an allocation of its own would be.
    """

    BAND_BYTES = 4096

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu", byte: int = 0xFF) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.bytes = torch.full((size + 2 * self.BAND_BYTES,), byte, dtype=torch.uint8, device=device)
        self.before = self.bytes.clone()
        self.tensor = self.bytes[self.BAND_BYTES : self.BAND_BYTES + size].view(dtype).view(shape)

    def intact(self) -> bool:
        band = self.BAND_BYTES
        same = self.bytes == self.before
        return bool(same[:band].all() and same[-band:].all())

    def untouched(self) -> bool:
        return torch.equal(self.bytes, self.before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal byte for byte: unlike torch.equal it tells -0 from 0 and accepts NaN."""
    kind = BITS[a.element_size()]
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: object = "") -> None:
    """out and lse are the same bits."""
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert same_bits(a, b), f"{what}: {name} differs, by {(a.double() - b.double()).abs().max().item():.3g}"


def assert_parity(
    got: tuple[Tensor, Tensor],
    want: tuple[Tensor, Tensor],
    *,
    tolerance: float | None = None,
    lse_tolerance: float = 1e-5,
) -> None:
    """out and lse agree with float64; an lse of -inf must be one on both sides. Every test's check of values."""
    out, lse = (tensor.detach().to("cpu", torch.float64) for tensor in got)
    ref, ref_lse = (tensor.detach().to("cpu", torch.float64) for tensor in want)
    tolerance = TOLERANCE[got[0].dtype] if tolerance is None else tolerance
    assert out.shape == ref.shape and lse.shape == ref_lse.shape
    assert torch.isfinite(out).all(), "out is not finite"
    error = (out - ref).abs().max().item()
    assert error <= tolerance, f"out: {error:.3g} from float64, expected at most {tolerance:.3g}"
    empty = ref_lse == -INF
    assert torch.equal(lse == -INF, empty), "lse: -inf in other places than in float64"
    error = ((lse - ref_lse).abs() / ref_lse.abs().clamp_min(1.0)).masked_fill(empty, 0.0).max().item()
    assert error <= lse_tolerance, f"lse: {error:.3g} from float64, expected at most {lse_tolerance:.3g}"


def launch_plan(
    plan: DecodePlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    *,
    backend: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by a plan of the test's choice, on its backend. What is not given is full of 0xFF bytes: NaN."""
    inputs = check_inputs(q, k_cache, v_cache, seq_lens, **options)
    device = q.device
    shape = (*q.shape[:-1], v_cache.shape[-1])
    out = Guarded(shape, q.dtype, device).tensor if out is None else out
    lse = Guarded(shape[:-1], torch.float32, device).tensor if lse is None else lse
    if workspace is None:
        workspace = Guarded((plan.workspace_bytes,), torch.uint8, device).tensor
    launcher(backend or ("cuda" if plan.backend == "cuda" else "triton"))(
        **inputs.launch_arguments(),
        out=out if out.ndim == 4 else out.unsqueeze(1),
        lse=lse if lse.ndim == 3 else lse.unsqueeze(1),
        workspace=workspace,
        plan=plan,
    )
    return out, lse


def reschedule(plan: DecodePlan, max_run: int, target_units: int) -> DecodePlan:
    """The plan under another schedule: other blocks compute the same splits, which must not change a bit."""
    max_units = _max_units(plan.problem.batch, plan.max_splits, max_run, target_units)
    return replace(plan, max_run=max_run, target_units=target_units, max_units=max_units)


def with_small_splits(plan: DecodePlan, target: int, keys: int = 16) -> DecodePlan:
    """The plan with tiles of `keys` keys and up to `target` splits of whole tiles, as runs of splits need."""
    rule = SplitRule(target, keys, keys)
    max_splits = max(rule.max_splits(plan.problem.capacity), 1)
    plan = replace(plan, rule=rule, tile=replace(plan.tile, block_n=keys), max_splits=max_splits)
    return reschedule(plan, plan.max_run, plan.target_units)
