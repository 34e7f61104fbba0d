"""What the numbers mean: scales, logarithms, stored formats, joins of parts. Cases 03, 06, 16, 24, 25."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, assert_parity, assert_same, int32, make_inputs, page_order, same_bits, to_pages
from interpreting import INTERPRETED
from torch import Tensor

import splitkv
from splitkv import SplitPolicy, reference_attention

Decode = Any  # conftest.Decode
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def oracle(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


# ---- case 03: scales on every path -------------------------------------------------------------------------

SCALES = {
    "numbers": (0.25, 0.5),
    "0-d": (torch.tensor(0.25), torch.tensor(0.5)),
    "per head": (torch.tensor([0.25, 1.0]), torch.tensor([0.5, 2.0])),
}


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_case_03_scales_on_every_path(decode: Decode, paged: bool, form: str) -> None:
    k_scale, v_scale = SCALES[form]
    capacity, dim, policies = (40, 16, ("4",)) if decode.interpreted else (1000, 64, ("1", "8"))
    lens = int32([37, capacity])
    q, k, v = make_inputs(2, 2, 2, dim, capacity, dtype=torch.float16)
    k, v = (k / 0.25).to(E4M3), (v / 0.5).to(E4M3)
    options: dict[str, Any] = {}
    if paged:
        table, num_pages = page_order(2, capacity, 16)
        k, v = (to_pages(cache, table, num_pages, 16) for cache in (k, v))
        options["block_table"] = table
    want = oracle(q, k, v, lens, k_scale=k_scale, v_scale=v_scale, **options)
    for policy in policies:
        options["policy"] = policy
        scaled = decode(q, k, v, lens, k_scale=k_scale, v_scale=v_scale, return_lse=True, **options)
        assert_parity(scaled, want, tolerance=4 * TOLERANCE[torch.float16])  # V of up to four times unit-normal
        assert torch.equal(decode(q, k, v, lens, k_scale=k_scale, v_scale=v_scale, **options), scaled[0])
        only_k = decode(q, k, v, lens, k_scale=k_scale, return_lse=True, **options)
        assert torch.equal(only_k[1], scaled[1]), "lse moved with v_scale"
        double = decode(q, k, v, lens, k_scale=k_scale, v_scale=2 * v_scale, **options)
        assert torch.equal(double, 2 * scaled[0]), "out is not linear in v_scale"
        none = decode(q, k, v, lens, return_lse=True, **options)
        assert_same(decode(q, k, v, lens, k_scale=1.0, v_scale=torch.ones(2), return_lse=True, **options), none)
        assert not torch.equal(none[1], scaled[1]), "lse did not move with k_scale"


# ---- case 06: natural logarithms ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["1", "4"])
def test_case_06_lse_is_a_natural_logarithm(decode: Decode, policy: str) -> None:
    q = torch.zeros(1, 1, 16)
    k, v = torch.randn(2, 1, 4000, 1, 16, generator=torch.Generator().manual_seed(0)).unbind()
    v[:, :3000], v[:, 3000:] = 1, 0
    parts = [decode(q, k[:, part], v[:, part], n, policy=policy, return_lse=True)
             for part, n in ((slice(0, 3000), 3000), (slice(3000, 4000), 1000))]  # fmt: skip
    for (_, lse), n in zip(parts, (3000, 1000), strict=True):
        assert lse.dtype == torch.float32 and lse.shape == (1, 1)
        assert abs(float(lse) - math.log(n)) < 1e-5 * math.log(n)
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    out, lse = splitkv.merge_states(outs, lses)
    weights = lses.double().softmax(0)
    assert (out - 0.75).abs().max() < 1e-5 and abs(float(lse) - math.log(4000)) < 1e-4
    assert ((outs.double() * weights[..., None]).sum(0) - 0.75).abs().max() < 1e-5, "a plain merge in natural logs"
    assert "natural log" in (splitkv.decode_attention.__doc__ or "") and "sinks included" in (
        splitkv.decode_attention.__doc__ or ""
    )


# ---- case 16: stored formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57_344.0)], ids=["e4m3", "e5m2"])
def test_case_16_fp8_is_read_as_it_was_written(decode: Decode, dtype: torch.dtype, largest: float) -> None:
    """One key, so out is its value; bytes read in the other format would give 0.5, 1, 4 and NaN."""
    values = torch.tensor([1.0, 1.5, 3.0, largest, -1.0, -1.5, 0.0, 2**-6] * 2)
    stored = values.to(dtype).expand(1, 1, 1, 16).contiguous()
    q = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0)).half()
    out = decode(q, stored, stored, 1)
    assert torch.equal(out, values.half().expand(1, 2, 16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fnuz])
def test_case_16_bytes_without_a_format_are_refused(decode: Decode, dtype: torch.dtype) -> None:
    q, k, _ = make_inputs(1, 2, 1, 16, 8)
    stored = torch.zeros(k.shape, dtype=torch.uint8).view(dtype)
    with pytest.raises(TypeError, match=rf"k_cache: expected dtype .*float8_e4m3fn.*got {dtype}"):
        decode(q, stored, stored, 8)


def test_case_16_two_formats_in_one_cache_are_refused(decode: Decode) -> None:
    q, k, v = make_inputs(1, 2, 1, 16, 8)
    with pytest.raises(TypeError, match="v_cache: expected k_cache's dtype .*e4m3.*got .*e5m2"):
        decode(q, k.to(E4M3), v.to(E5M2), 8)


# ---- case 24: parts of nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_24_merges_of_nothing(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)

    def merged(*parts: tuple[Any, float]) -> tuple[Tensor, Tensor]:
        outs = torch.stack([torch.full_like(x, out) if isinstance(out, float) else out for out, _ in parts])
        return splitkv.merge_states(outs, torch.tensor([lse for _, lse in parts])[:, None].expand(-1, 3).contiguous())

    for held in (0.0, nan, inf):
        out, lse = merged((held, -inf), (held, -inf))
        assert not out.any() and bool((lse == -inf).all())
        out, lse = merged((held, -inf), (x, 1.5))
        assert same_bits(out, x) and bool((lse == 1.5).all())
        out, lse = merged((held, -inf), (x, 0.5), (held, -inf), (-x, 0.5), (held, -inf))
        assert not out.float().any() and bool(((lse - 0.5 - math.log(2)).abs() < 1e-6).all())
    for far in (1e4, -1e4, 8e4, -8e4):
        out, lse = merged((x, far), (x, far))
        assert (out.float() - x.float()).abs().max() < 1e-6 and bool(((lse - far).abs() < 1).all())
        out, lse = merged((x, far), (held, -inf), (2 * x, far - 200.0))
        assert same_bits(out, x) and bool((lse == far).all())
    parts = [(torch.roll(x, i, 0) * i, 0.3 * i) for i in range(4)]
    orders = [merged(*order) for order in itertools.permutations(parts)]
    for out, lse in orders:
        assert (out.float() - orders[0][0].float()).abs().max() <= TOLERANCE[dtype]
        assert (lse - orders[0][1]).abs().max() < 1e-6


@pytest.mark.parametrize("policy", ["1", "4", "16"])
@pytest.mark.parametrize("logit", [0.0, 1e4, -1e4])
def test_case_24_splits_that_a_mask_empties(decode: Decode, policy: str, logit: float) -> None:
    """Parts of nothing meet parts of nothing, parts of something, and logits of 1e4, on the way up the tree."""
    q, k, v = make_inputs(1, 2, 1, 16, 64)
    q[:, :, 0] = 1
    if logit:  # whose rounding in f32 is coarser than what else the product would add
        k[:] = 0
        k[..., 0] = 4 * logit
    for seen in ([], [63], [20, 21, 40]):
        mask = torch.zeros(1, 2, 1, 64, dtype=torch.bool)
        mask[:, 1, :, seen] = True
        additive = torch.zeros(1, 2, 1, 64).masked_fill(~mask, -math.inf)
        for given in (mask, additive) if seen else (mask,):
            got = decode(q, k, v, int32([60]), mask=given, policy=policy, return_lse=True)
            assert_parity(got, oracle(q, k, v, int32([60]), mask=given))


# ---- case 25: wide reductions ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [4, 64, 128] if INTERPRETED else [2, 4, 8, 16, 32, 64, 100, 128, 129, 256])
def test_case_25_reductions_of_every_width(decode_here: Decode, num_splits: int) -> None:
    """One Triton release lost the scalar base of an address where 128 parts of 128 columns were joined."""
    dims, length = ((16,), 8 * num_splits) if INTERPRETED else ((64, 128, 256), 20_548)
    policy = SplitPolicy.pinned(num_splits)
    length = 20_480 if num_splits == 256 else length  # or there would be 254
    for dim in dims:
        q, k, v = make_inputs(1, 2, 1, dim, length)
        plan = splitkv.plan_decode(
            splitkv.DecodeProblem(1, 2, 1, dim, capacity=length, q_dtype="f32", kv_dtype="f32"),
            splitkv.DeviceSpec.cpu(),
            policy,
        )
        assert plan.num_splits == num_splits
        assert_parity(decode_here(q, k, v, length, policy=policy, return_lse=True), oracle(q, k, v, length))
