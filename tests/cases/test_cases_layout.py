"""Where a key lies: offsets, strides, heads, alignment, page tables. Cases 01, 04, 05, 12, 15, 23, 30."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_parity, assert_same, int32, launch_plan, make_inputs, page_order, reschedule, to_pages
from torch import Tensor

from splitkv import DeviceSpec, plan_decode, reference_attention
from splitkv.checks import check_inputs

Decode = Any  # conftest.Decode
E4M3 = torch.float8_e4m3fn


def oracle(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("shape", "homes"),
    [((65_538, 2, 16, 8, 128), (5, 65_535, 65_536)), ((1_339, 2, 784, 4, 256), (5, 1_336, 1_337, 1_338))],
    ids=["pages of 16", "pages of 784"],
)
def test_case_01_page_offsets_past_two_to_the_31(
    decode_here: Decode, shape: tuple[int, ...], homes: tuple[int, ...]
) -> None:
    """The same keys on low and on high pages of a pool with K and V interleaved. Nothing else of it is touched."""
    below = 2**31  # what a wrapped offset reaches is ours, and zero
    memory = torch.empty(below + math.prod(shape), dtype=torch.uint8)
    pool = memory[below:].view(E4M3).view(shape)
    page_size, kv_heads, dim = shape[2:]
    length = min(page_size, 40 if decode_here.interpreted else 784)
    tokens = torch.randn(2, page_size, kv_heads, dim, generator=torch.Generator().manual_seed(0)).to(E4M3)
    if length < page_size:  # the end of the page is what overflows first
        tokens = tokens.roll(length, 1)
    for home in homes:
        pool[home].copy_(tokens)
    q = torch.randn(1, 2 * kv_heads, dim, generator=torch.Generator().manual_seed(1)).half()
    start = int32([page_size - length])
    k, v = pool[:, 0], pool[:, 1]
    results = [
        decode_here(q, k, v, page_size, block_table=int32([[home]]), starts=start, return_lse=True) for home in homes
    ]
    assert_parity(results[0], oracle(q, k, v, page_size, block_table=int32([[homes[0]]]), starts=start))
    for home, result in zip(homes, results, strict=True):
        assert_same(result, results[0], home)


def layouts(pages: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same K (or V) as views of larger pools, NaN in every element that is not its own."""
    num_pages, page_size, heads, dim = pages.shape
    nan = lambda *shape: torch.full(shape, math.nan).to(dtype)  # noqa: E731
    views = {
        "interleaved": nan(num_pages, 2, page_size, heads, dim)[:, 1],
        "apart": nan(2, num_pages, page_size, heads, dim)[1],
        "layers": nan(num_pages, 6, 2, page_size, heads, dim)[:, 3, 1],
        "heads first": nan(num_pages, heads, page_size, dim).transpose(1, 2),
    }
    for view in views.values():
        (view.view(torch.uint8) if dtype.itemsize == 1 else view).copy_(
            pages.view(torch.uint8) if dtype.itemsize == 1 else pages
        )
    return views


@pytest.mark.parametrize("name", ["f16", "fp8"])
def test_case_04_strided_pools(decode: Decode, name: str) -> None:
    dtype = {"f16": torch.float16, "fp8": E4M3}[name]
    lens = int32([5, 48, 129])
    q, k, v = make_inputs(3, 2, 2, 64, 144, dtype=torch.float16, kv_dtype=dtype)
    table, num_pages = page_order(3, 144, 16)
    k, v = (to_pages(cache, table, num_pages, 16) for cache in (k, v))
    want = decode(q, k, v, lens, block_table=table, return_lse=True, policy="2")
    assert_parity(want, oracle(q, k, v, lens, block_table=table))
    k_views, v_views = layouts(k, dtype), layouts(v, dtype)
    pairs = [(a, a) for a in k_views] + [("interleaved", "heads first"), ("heads first", "layers")]
    for k_layout, v_layout in pairs:
        views = k_views[k_layout], v_views[v_layout]
        got = decode(q, *views, lens, block_table=table, return_lse=True, policy="2")
        assert_same(got, want, (k_layout, v_layout))


def test_case_04_a_last_dimension_with_gaps_is_refused(decode: Decode) -> None:
    q, k, v = make_inputs(1, 2, 1, 16, 8)
    gaps = torch.zeros(1, 8, 1, 32)[..., ::2]
    with pytest.raises(ValueError, match=r"k_cache: .*contiguous.*\(256, 32, 32, 2\)"):
        decode(q, gaps, v, 8)
    with pytest.raises(ValueError, match=r"v_cache: .*contiguous.*\(256, 32, 32, 2\)"):
        decode(q, k, gaps, 8)


RATIOS = [1, 2, 3, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64]


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_case_05_query_heads_find_their_kv_head(decode: Decode, kv_heads: int) -> None:
    """tests/interpreter and tests/gpu go through the ratios on Triton."""
    for ratio in RATIOS if decode.backend == "cpu" else (12 // kv_heads,):
        check_pairing(decode, ratio, kv_heads, *((256, 300) if decode.backend == "cpu" else (16, 24)))


def check_pairing(decode: Decode, ratio: int, kv_heads: int, dim: int, length: int) -> None:
    """V of KV head j is j + 1 throughout, so out of query head h is h // ratio + 1 whatever the weights."""
    q, k, v = make_inputs(1, ratio * kv_heads, kv_heads, dim, length)
    v[:] = torch.arange(1.0, kv_heads + 1)[:, None]
    want = (torch.arange(ratio * kv_heads) // ratio + 1).double()[:, None].expand(-1, dim)
    table, num_pages = page_order(1, length, 16)
    pools = [to_pages(cache, table, num_pages, 16) for cache in (k, v)]
    for policy in ("1", "5"):
        for out in (
            decode(q, k, v, length, policy=policy),
            decode(q, *pools, length, block_table=table, policy=policy),
        ):
            assert (out[0].double() - want).abs().max() < 1e-5, (ratio, kv_heads, policy)


@pytest.mark.parametrize("dim", [46, 63, 65, 72, 100, 120])
def test_case_12_head_sizes_that_no_vector_fits(decode: Decode, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"k_cache: supported head_dim is a multiple of 16 .*got {dim}"):
        decode(*make_inputs(1, 2, 1, dim, 8), 8)
    with pytest.raises(ValueError, match=rf"v_cache: supported head_dim is a multiple of 16 .*got {dim}"):
        decode(*make_inputs(1, 2, 1, 64, 8, v_head_dim=dim), 8)


def late(tensor: Tensor, elements: int, odd: int = 0) -> Tensor:
    """A copy that starts `elements` after an aligned address, its rows (or pages) `odd` elements further apart."""
    stride = (tensor.stride(0) + odd, *tensor.stride()[1:])
    memory = torch.full((elements + tensor.shape[0] * stride[0],), 3.0).to(tensor.dtype)
    return memory.as_strided(tensor.shape, stride, elements).copy_(tensor)


@pytest.mark.parametrize("name", ["f32", "f16", "fp8"])
@pytest.mark.parametrize("which", ["q", "k", "v", "odd rows", "out"])
def test_case_12_addresses_that_no_vector_fits(decode: Decode, which: str, name: str) -> None:
    """The aligned answer, or a refusal that names the tensor."""
    dtype, kv_dtype = {
        "f32": (torch.float32,) * 2,
        "f16": (torch.float16,) * 2,
        "fp8": (torch.float16, E4M3),
    }[name]
    q, k, v = make_inputs(2, 2, 1, 80, 40, dtype=dtype, kv_dtype=kv_dtype)
    lens = int32([40, 33])
    want = decode(q, k, v, lens, policy="3")
    for by in (1, 3, 7):
        tensors = {"q": q, "k": k, "v": v}
        if which in tensors:
            tensors[which] = late(tensors[which], by)
        out = late(torch.zeros_like(q), by) if which == "out" else None
        if which == "odd rows":
            tensors |= {"k": late(k, 0, by), "v": late(v, 0, by)}
        try:
            got = decode(*tensors.values(), lens, policy="3", out=out)
        except ValueError as refusal:
            assert name == "f32" and "strides of 16 elements" in str(refusal), refusal
            assert str(refusal).startswith(("k_cache", "q:") if which in ("q", "k", "odd rows") else "v_cache")
            continue
        assert torch.equal(got, want), by


@pytest.mark.parametrize("by", [1, 3, 7])
def test_case_12_a_workspace_that_no_vector_fits(decode: Decode, by: int) -> None:
    memory = torch.empty(4096, dtype=torch.float32)
    with pytest.raises(ValueError, match="workspace: expected a 16-byte aligned address"):
        decode(*make_inputs(1, 2, 1, 16, 40), 40, policy="3", workspace=memory[by:])


BAD_IDS = (-1, 64, 2**30, 2**31 - 1, -(2**31))


def hostile_pool() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, K and V of 64 pages of 16 with as many pages of ours on either side, and a table of 8 columns."""
    q, k, v = make_inputs(3, 2, 1, 16, 128)
    table, _ = page_order(3, 128, 16)
    pools = []
    for cache in (k, v):
        memory = torch.full((192, 16, 1, 16), 9.0)
        memory[64:128] = to_pages(cache, table, 64, 16, fill=7.0)
        pools.append(memory[64:128])
    return q, *pools, table


def test_case_15_ids_that_no_row_needs(decode: Decode) -> None:
    q, k, v, table = hostile_pool()
    lens = [20, 128, 1]
    want = decode(q, k, v, int32(lens), block_table=table, return_lse=True, policy="3")
    for bad in BAD_IDS:
        stale = table.clone()
        for row, length in enumerate(lens):
            stale[row, -(-length // 16) :] = bad
        got = decode(q, k, v, int32(lens), block_table=stale, return_lse=True, policy="3")
        assert_same(got, want, bad)


def test_case_15_ids_that_a_row_needs_and_the_pool_has_not(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Such keys are absent, other rows do not notice, and SPLITKV_CHECK=1 names row, column, id and limit."""
    q, k, v, table = hostile_pool()
    lens = int32([20, 128, 1])
    for bad in BAD_IDS:
        wrong = table.clone()
        wrong[1, 3] = bad
        with monkeypatch.context() as patch:
            patch.delenv("SPLITKV_CHECK", raising=False)
            got = decode(q, k, v, lens, block_table=wrong, return_lse=True, policy="3")
        hidden = torch.ones(3, 1, 1, 128, dtype=torch.bool)
        hidden[1, ..., 48:64] = False
        assert_parity(got, oracle(q, k, v, lens, block_table=table, mask=hidden))
        with monkeypatch.context() as patch:
            patch.setenv("SPLITKV_CHECK", "1")
            with pytest.raises(ValueError, match=rf"block_table: .*0\.\.63, got {bad} in row 1, column 3"):
                decode(q, k, v, lens, block_table=wrong)


def test_case_15_lengths_past_the_table(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, table = hostile_pool()
    want = decode(q, k, v, int32([20, 128, 0]), block_table=table, return_lse=True)
    got = decode(q, k, v, torch.tensor([20, 129, -5]), block_table=table, return_lse=True)
    assert_same(got, want)
    monkeypatch.setenv("SPLITKV_CHECK", "1")
    with pytest.raises(ValueError, match=r"seq_lens: expected 0\.\.128 \(the capacity\), got 129 in row 1"):
        decode(q, k, v, int32([20, 129, 1]), block_table=table)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_case_23_every_variant_by_itself(decode_here: Decode, page_size: int) -> None:
    for length in (65,) if decode_here.interpreted else (65, 4096, 50_000):
        check_variants(decode_here, length, page_size)


def check_variants(decode: Decode, length: int, page_size: int) -> None:
    """One row under every policy and schedule that any load could have chosen: each is right alone."""
    q, k, v = make_inputs(1, 4, 1, 256, length, dtype=torch.float16)
    table, num_pages = page_order(1, length, page_size)
    pools = [to_pages(cache, table, num_pages, page_size) for cache in (k, v)]
    want = oracle(q, k, v, length)
    problem = check_inputs(q, *pools, length, block_table=table).problem
    for policy in ("off",) if decode.backend == "rowwise" else ("off", "length(64,16)", "auto"):
        plan = plan_decode(problem, DeviceSpec.cpu(), policy)
        runs = (1, 4, 16) if plan.splits and not plan.rule.quantum % plan.tile.block_n else (1,)
        for run in runs:
            scheduled = reschedule(plan, run, 1)
            assert_parity(launch_plan(scheduled, q, *pools, length, block_table=table, backend=decode.backend), want)


@pytest.mark.parametrize("length", [32_767, 32_768, 32_769, 65_535, 65_536, 65_537, 131_072, 262_143, 262_144])
def test_case_30_a_needle_anywhere(decode_here: Decode, length: int) -> None:
    """One key of logit 24 among zeros weighs nearly all. In the interpreter a window leaves 300 of the keys."""
    interpreted = decode_here.interpreted
    window = 300 if interpreted else 0
    q = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(1, 2, 16).contiguous()
    places = (length - 1,) if interpreted else (0, 32_767, 32_768, 65_536, length - 1)
    for at in {at for at in places if at < length}:
        k, v = torch.zeros(1, length, 1, 16), torch.zeros(1, length, 1, 16)
        k[0, at] = 24 * 4 * q[0, 0] / q[0, 0].square().sum()
        v[0, at] = 1
        weight, others = math.exp(24.0), (window or length) - 1
        for policy in ("auto",) if interpreted else ("auto", "1", "16"):
            out, lse = decode_here(q, k, v, length, policy=policy, window=window, return_lse=True)
            assert (out.double() - weight / (weight + others)).abs().max() < 1e-5, (at, policy)
            assert (lse.double() - math.log(weight + others)).abs().max() < 1e-4, (at, policy)


def test_case_30_rows_of_q_and_out_past_two_to_the_31(decode_here: Decode) -> None:
    """The second row lies 2**31 elements after the first; 4 GiB each, all but untouched."""
    q, k, v = make_inputs(2, 2, 1, 16, 40, dtype=torch.float16)
    far_q, out = (torch.empty(2**31 + 128, dtype=q.dtype).as_strided(q.shape, (2**31 + 64, 16, 1)) for _ in range(2))
    far_q.copy_(q)
    assert torch.equal(decode_here(far_q, k, v, 40, policy="3", out=out), decode_here(q, k, v, 40, policy="3"))
