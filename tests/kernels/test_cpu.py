"""The CPU backend against the float64 oracle, and its bytes against themselves: however keys are stored, rows
arranged and work scheduled, `torch.equal`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitkv.backends import cpu
from splitkv.checks import check_inputs
from splitkv.plan import DecodePlan, plan_decode
from splitkv.problem import DeviceSpec
from splitkv.reference import reference_attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KV_DTYPES = [F32, F16, BF16, E4M3, E5M2]
NAN = math.nan
CANARY = 173


@pytest.fixture(params=["native", "fallback"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fallback":
        monkeypatch.setattr(cpu, "_library", lambda: "switched off by the test")
    else:
        assert cpu.cpu_status()[0] == "native", cpu.cpu_status()
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decode(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor | int, *, policy: Any = "auto", schedule: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of one launch with a NaN-filled workspace between canaries; schedule: (max_run, target_units)."""
    inputs = check_inputs(q, k, v, lens, **options)
    plan = plan_decode(inputs.problem, DeviceSpec.cpu(), policy)
    if schedule:
        every_split = inputs.problem.batch * plan.max_splits
        plan = replace(plan, max_run=schedule[0], target_units=schedule[1], max_units=every_split)
    out = torch.full((*inputs.q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype)
    lse = torch.full(inputs.q.shape[:-1], NAN)
    launch(inputs, plan, out, lse)
    return (out, lse) if q.ndim == 4 else (out[:, 0], lse[:, 0])


def launch(inputs: Any, plan: DecodePlan, out: Tensor, lse: Tensor | None) -> None:
    guarded = torch.full((plan.workspace_bytes + 512,), CANARY, dtype=torch.uint8)
    workspace = guarded[256:-256]
    workspace.view(F32).fill_(NAN)
    cpu.launch(**inputs.launch_arguments(), out=out, lse=lse, workspace=workspace if plan.splits else None, plan=plan)
    assert (guarded[:256] == CANARY).all() and (guarded[-256:] == CANARY).all()


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(
    lens: tuple[int, ...] = (300, 0, 41),
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    q_len: int = 1,
    q_dtype: torch.dtype = F32,
    kv_dtype: torch.dtype = F32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k_cache, v_cache, seq_lens; the capacity is a little over the longest row."""
    capacity = max(lens) + 3
    q = random(len(lens), q_len, heads[0], dims[0], dtype=q_dtype, seed=seed)
    k = random(len(lens), capacity, heads[1], dims[0], dtype=kv_dtype, seed=seed + 1)
    v = random(len(lens), capacity, heads[1], dims[1], dtype=kv_dtype, seed=seed + 2)
    return q, k, v, torch.tensor(lens, dtype=torch.int32)


def assert_right(case: tuple[Tensor, ...], policy: Any = "auto", lse_error: float = 1e-5, **options: Any) -> None:
    """1e-5 of the oracle, plus the rounding of a 16-bit output."""
    out, lse = decode(*case, policy=policy, **options)
    expected, expected_lse = reference_attention(*case, return_lse=True, **options)
    rounding = {F32: 2e-6, F16: 2**-10, BF16: 2**-7}[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=rounding, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, atol=lse_error, rtol=1e-6, equal_nan=True)


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# ---- against the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 48), (96, 128), (256, 256)], ids=str)
def test_dtypes_and_head_sizes(
    backend: str, dims: tuple[int, int], q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    assert_right(problem((523, 0, 38), dims=dims, q_dtype=q_dtype, kv_dtype=kv_dtype), policy="4")


@pytest.mark.parametrize("dims", [(192, 128), (576, 512), (240, 224), (32, 256)], ids=str)
def test_unequal_and_large_head_sizes(backend: str, dims: tuple[int, int]) -> None:
    assert_right(problem((530,), heads=(5, 1), dims=dims))
    assert_right(problem((130,), heads=(5, 1), dims=dims, q_dtype=BF16, kv_dtype=BF16))


@pytest.mark.parametrize("ratio", [*range(1, 17), 64])
def test_every_ratio_of_heads(ratio: int) -> None:
    q, k, v, lens = case = problem((290,), heads=(2 * ratio, 2))
    assert_right(case, policy="5")
    out, _ = decode(q, k, torch.arange(1.0, 3.0)[:, None].expand_as(v).contiguous(), lens)
    assert torch.allclose(out[0, 0, :, 0], torch.arange(2 * ratio) // ratio + 1.0, atol=1e-6)


@pytest.mark.parametrize("q_len", range(1, 17))
def test_queries_see_keys_up_to_their_own(backend: str, q_len: int) -> None:
    assert_right(problem((300, 64, q_len, max(q_len - 1, 0)), heads=(6, 2), q_len=q_len), policy="4", window=70)


@pytest.mark.parametrize("kv_dtype", [F32, BF16, E4M3], ids=str)
def test_all_options_together(backend: str, kv_dtype: torch.dtype) -> None:
    case = problem((900, 33, 0, 450), q_len=3, kv_dtype=kv_dtype)
    options = dict(
        window=700,
        softcap=5.0,
        sinks=random(4),
        starts=torch.tensor([250, 0, 0, 449], dtype=torch.int32),
        mask=random(4, 3, 903) > -0.5,
        k_scale=torch.tensor([0.25, 1.5]),
        v_scale=0.5,
        softmax_scale=0.3,
    )
    assert_right(case, policy="8", **options)


@pytest.mark.parametrize("dtype", [torch.bool, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 2, 303), (1, 4, 1, 303), (3, 1, 2, 303), (303,), (2, 1)], ids=str)
def test_masks_of_every_shape(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = random(*shape)
    mask = mask > -1.0 if dtype == torch.bool else torch.where(mask > -1.0, mask, -math.inf).to(dtype)
    assert_right(problem(q_len=2), mask=mask)
    transposed = mask.t().contiguous().t() if mask.ndim == 2 else mask.transpose(-1, 0).contiguous().transpose(-1, 0)
    assert_same(decode(*problem(q_len=2), mask=mask), decode(*problem(q_len=2), mask=transposed))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_combination(data: st.DataObject) -> None:
    draw = data.draw
    ratio, num_kv_heads, q_len = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 16))
    lens = tuple(draw(st.lists(st.integers(0, 400), min_size=1, max_size=4)))
    case = problem(
        lens,
        heads=(ratio * num_kv_heads, num_kv_heads),
        dims=(16 * draw(st.integers(1, 9)), 16 * draw(st.integers(1, 9))),
        q_len=q_len,
        q_dtype=draw(st.sampled_from([F32, F16, BF16])),
        kv_dtype=draw(st.sampled_from(KV_DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )
    options: dict[str, Any] = {
        "window": draw(st.none() | st.integers(1, 300)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        "sinks": draw(st.none() | st.just(random(ratio * num_kv_heads, seed=7))),
    }
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, 450), min_size=len(lens), max_size=len(lens)))
        options["starts"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["mask"] = random(q_len, max(lens) + 3, seed=9) > -0.8
    policy, run = draw(st.sampled_from(["auto", "1", "7", "length(64,17)"])), draw(st.sampled_from([1, 4, 16]))
    assert_right(case, policy, lse_error=2e-5, **options)
    assert_same(decode(*case, policy=policy, **options), decode(*case, policy=policy, schedule=(run, 1), **options))


def every_code(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a dtype, 256 to a row."""
    bits = torch.arange(256**dtype.itemsize).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return bits.view(dtype).view(-1, 1, 1, 256)


@pytest.mark.parametrize("dtype", [F16, BF16, E4M3, E5M2], ids=str)
def test_every_code_is_decoded_exactly(dtype: torch.dtype) -> None:
    v = every_code(dtype)
    out, _ = decode(torch.zeros(len(v), 1, 16), torch.zeros(len(v), 1, 1, 16).to(dtype), v, 1)
    torch.testing.assert_close(out, v[:, 0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_query_code_is_read_and_every_output_rounded_to_nearest(dtype: torch.dtype) -> None:
    codes = every_code(dtype).flatten()
    q = torch.zeros(len(codes), 1, 16, dtype=dtype)
    q[:, 0, 0] = codes
    k = torch.zeros(len(codes), 1, 1, 16)
    k[..., 0] = 1.0
    near = torch.cat([codes.float() * (1 + step * 2.0**-12) for step in range(-8, 9)] + [random(2**16)])
    values = near[: near.numel() // 256 * 256].view(-1, 1, 1, 256)
    out, _ = decode(torch.zeros(len(values), 1, 16, dtype=dtype), torch.zeros(len(values), 1, 1, 16), values, 1)
    torch.testing.assert_close(out, values[:, 0].to(dtype), rtol=0, atol=0, equal_nan=True)
    normal = (codes.abs() < 1e37) & (codes.abs() > 1e-36)  # as f32, in base 2 as well
    _, lse = decode(q[normal], k[normal], k[normal], 1, softmax_scale=1.0)
    torch.testing.assert_close(lse[:, 0], codes[normal].float(), rtol=3e-7, atol=0)


def test_weights_of_two_keys_to_the_last_digit() -> None:
    """A key with base-2 logit x beside one with 0: 2^x / (1 + 2^x). A scale of ln 2 makes the logit exact."""
    x = torch.cat([torch.linspace(-126, 0, 4001), torch.tensor([-200.0, -1e30])])
    q = torch.zeros(len(x), 1, 16)
    q[:, 0, 0] = x
    k, v = torch.zeros(len(x), 2, 1, 16), torch.zeros(len(x), 2, 1, 16)
    k[:, 0, 0, 0] = v[:, 0] = 1.0
    out, lse = decode(q, k, v, 2, softmax_scale=math.log(2.0))
    weight = torch.exp2(x.double())
    torch.testing.assert_close(out[:-2, 0, 0].double(), (weight / (1 + weight))[:-2], rtol=4e-7, atol=0)
    assert (out[-2:] == 0).all() and (lse[-2:] == 0).all() and out[-3, 0, 0] == 0.5


@pytest.mark.parametrize("k_scale, v_scale", [(0.25, torch.tensor([2.0, 0.5])), (torch.tensor([0.25, 1.5]), 3.0)])
def test_scales(backend: str, k_scale: Any, v_scale: Any) -> None:
    q, k, v, lens = case = problem((300, 41), kv_dtype=E4M3)
    assert_right(case, k_scale=k_scale, v_scale=v_scale, policy="3")
    (out, lse), (_, other) = decode(*case, v_scale=v_scale), decode(*case)
    assert torch.equal(lse, other) and torch.equal(decode(*case, v_scale=v_scale * 2)[0], out * 2)
    assert_same(decode(*case), decode(*case, k_scale=1.0, v_scale=torch.ones(2)))


def test_sinks(backend: str) -> None:
    """Counted once, however many splits see no key, and safe where it outweighs every key or none."""
    q, k, v, lens = problem((2048,))
    q = torch.zeros_like(q)
    plain, _ = decode(q, k, v, lens, window=64)
    for policy in ("1", "8", "length(64,32)"):
        out, lse = decode(q, k, v, lens, window=64, sinks=torch.full((4,), math.log(64.0)), policy=policy)
        assert torch.allclose(out, plain / 2, atol=1e-6) and torch.allclose(lse, torch.tensor(128.0).log())
    out, lse = decode(q, k, v, lens, sinks=torch.tensor([200.0, -200.0, 30.0, -math.inf]))
    assert (out[..., 0, :] == 0).all()
    assert torch.allclose(lse[0, 0], torch.tensor([200.0, math.log(2048.0), 30.0, math.log(2048.0)]))
    assert_same(decode(q, k, v, lens), decode(q, k, v, lens, sinks=torch.full((4,), -math.inf)))


def test_softcap_order_and_accuracy(backend: str) -> None:
    """Small logits keep their digits, large ones stop at the cap, and hidden ones do not come back."""
    k = torch.zeros(1, 600, 1, 64)
    k[0, :3, 0, 0] = torch.tensor([40.0, -40.0, 1e-3])
    k[0, 3:, 0, 0] = 40.0
    q = torch.zeros(1, 1, 64)
    q[..., 0] = 8.0
    for cap in (1e-3, 5.0, 50.0):
        assert_right((q, k, random(1, 600, 1, 64), torch.tensor([3])), softcap=cap, policy="4")
    assert_same(decode(q, k, k, 3), decode(q, k, k, 3, softcap=None))


def test_long_row(backend: str) -> None:
    q, k, v, lens = problem((262_144,), heads=(2, 1), dims=(16, 16))
    assert_right((q, k, v, lens), lse_error=1e-4)
    _, lse = decode(torch.zeros_like(q), k, v, lens)
    assert torch.allclose(lse, torch.tensor(262_144.0).log(), atol=1e-5)
    needle = torch.zeros_like(v)
    needle[0, 131_072] = 1.0
    keys = torch.zeros_like(k)
    keys[0, 131_072] = 40 * q[0, 0, 0] / q[0, 0, 0].norm()
    assert decode(q[:, :, :1], keys, needle, lens, softmax_scale=1.0)[0].min() > 0.99


def test_empty_rows(backend: str) -> None:
    q, k, v, _ = problem((20, 20, 20, 20))
    starts = torch.tensor([0, 30, 0, 5], dtype=torch.int32)
    for sinks in (None, torch.ones(4)):
        out, lse = decode(q, k, v, torch.tensor([0, 20, -5, 20]), starts=starts, sinks=sinks)
        assert (out[:3] == 0).all() and (lse[:3] == -math.inf).all() and lse[3].isfinite().all()
        out, lse = decode(q, k, v, 20, mask=torch.zeros(23, dtype=torch.bool), sinks=sinks)
        assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = decode(q, k[:, :0], v[:, :0], 0)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_nan_of_a_valid_key_reaches_the_rows_that_see_it(backend: str) -> None:
    q, k, v, lens = problem((100,), q_len=2)
    for tensor in (k, v):
        spoilt = tensor.clone()
        spoilt[0, 99, 1] = NAN  # the last key: query 0 does not see it
        out, _ = decode(q, spoilt if tensor is k else k, spoilt if tensor is v else v, lens)
        assert out[0, 1, 2:].isnan().all() and out[0, 0].isfinite().all() and out[0, 1, :2].isfinite().all()


# ---- one answer: storage -----------------------------------------------------------------------------------


def in_pages(x: Tensor, page_size: int, fill: float) -> tuple[Tensor, Tensor]:
    """(pages, block_table): the rows of x on shuffled pages, with unused pages, tails and columns filled."""
    batch, capacity = x.shape[:2]
    used = -(-capacity // page_size)
    table = torch.randperm(batch * used + 3, generator=torch.Generator().manual_seed(3))[: batch * used]
    table = table.view(batch, used).int()
    pages = torch.full((batch * used + 3, page_size, *x.shape[2:]), fill).to(x.dtype)
    padded = torch.full((batch, used * page_size, *x.shape[2:]), fill).to(x.dtype)
    padded.view(torch.uint8)[:, :capacity] = x.contiguous().view(torch.uint8)
    pages.view(torch.uint8)[table.long()] = padded.unflatten(1, (used, page_size)).view(torch.uint8)
    return pages, torch.cat([table, torch.full((batch, 2), 2**31 - 1, dtype=torch.int32)], dim=1)


@pytest.mark.parametrize("kv_dtype", [F32, BF16, E4M3], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 784])
def test_pages_do_not_show(backend: str, page_size: int, kv_dtype: torch.dtype) -> None:
    q, k, v, lens = problem((300, 0, 41, 16), kv_dtype=kv_dtype, q_len=2)
    plain = decode(q, k, v, lens)
    k_pages, table = in_pages(k, page_size, NAN)
    v_pages, _ = in_pages(v, page_size, NAN)
    assert_same(plain, decode(q, k_pages, v_pages, lens, block_table=table))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in other storage, NaN in every byte that is not theirs."""
    batch, capacity, heads, dim = x.shape

    def holes(*shape: int) -> Tensor:
        return torch.full(shape, NAN).to(x.dtype)

    if layout == "heads first":
        view = holes(batch, heads, capacity, dim).transpose(1, 2)
    elif layout == "k and v interleaved":
        view = holes(batch, 2, capacity, heads, dim)[:, 1]
    elif layout == "layers in one pool":
        view = holes(batch, 5, 2, capacity, heads, dim)[:, 3, 0]
    elif layout == "odd offsets and gaps":
        view = holes(batch, capacity, heads, dim + 3).flatten()[1:].as_strided(
            x.shape, (capacity * heads * (dim + 3), heads * (dim + 3), dim + 3, 1)
        ) if batch == 1 else holes(batch, capacity, heads, dim + 3)[..., 3:]  # fmt: skip
    view.view(torch.uint8).copy_(x.view(torch.uint8)) if x.element_size() == 1 else view.copy_(x)
    return view


@pytest.mark.parametrize("kv_dtype", [F32, F16, BF16, E4M3], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "k and v interleaved", "layers in one pool", "odd offsets and gaps"])
def test_strides_do_not_show(backend: str, layout: str, kv_dtype: torch.dtype) -> None:
    q, k, v, lens = problem((129, 5, 48), kv_dtype=kv_dtype)
    plain = decode(q, k, v, lens)
    assert_same(plain, decode(q, laid_out(k, layout), v, lens))
    assert_same(plain, decode(q, k, laid_out(v, layout), lens))
    spread = torch.full((3, 1, 4, 2, 64), NAN)
    spread[:, :, :, 0] = q
    assert_same(plain, decode(spread[:, :, :, 0], k, v, lens))


@pytest.mark.parametrize("kv_dtype", [F32, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("fill", [NAN, math.inf, 448.0], ids=str)
def test_what_lies_beyond_the_keys_does_not_show(backend: str, fill: float, kv_dtype: torch.dtype) -> None:
    lens, starts = torch.tensor([100, 0, 33]), torch.tensor([7, 0, 0], dtype=torch.int32)
    q, k, v, _ = problem((130, 130, 130), kv_dtype=kv_dtype, q_len=2)
    options: dict[str, Any] = dict(starts=starts, window=60)
    plain = decode(q, k, v, lens, **options)
    for k_fill, v_fill in ((fill, 0.0), (0.0, fill), (fill, fill)):
        poisoned = []
        for tensor, value in ((k, k_fill), (v, v_fill)):
            tensor = tensor.clone()
            bad = torch.full(tensor.shape[2:], value).to(kv_dtype)
            for row, length in enumerate(lens.tolist()):
                first = max(length - 1 - 60, int(starts[row]), 0)
                tensor[row, length:], tensor[row, :first] = bad, bad
            poisoned.append(tensor)
        assert_same(plain, decode(q, *poisoned, lens, **options))


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31)])
def test_pages_that_do_not_exist_are_absent(backend: str, bad: int) -> None:
    q, k, v, _ = problem((128, 128))
    k, v = k[:, :128].reshape(16, 16, 2, 64)[:8], v[:, :128].reshape(16, 16, 2, 64)[:8]
    table = torch.tensor([[5, bad, 2, 7], [1, 0, bad, bad]], dtype=torch.int32)
    lens = torch.tensor([60, 30])
    out, lse = decode(q, k, v, lens, block_table=table)
    seen = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    seen[0, ..., 16:32] = False
    expected = decode(q, k, v, lens, block_table=table.clamp(0, 7), mask=seen)
    assert_same((out, lse), expected)
    torch.testing.assert_close(out.double(), reference_attention(q, k, v, lens, block_table=table), atol=1e-5, rtol=0)


def test_offsets_past_four_gigabytes() -> None:
    """Untouched memory costs nothing, so the pool is far larger than what is written."""
    q, k, _, _ = problem((32,), dims=(128, 128), kv_dtype=BF16)
    pool = torch.empty(3 * 2**30, dtype=BF16).view(-1, 16, 2, 128)
    near, far = (
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([[len(pool) - 1, 2**20 // 2]], dtype=torch.int32),
    )
    for table in (near, far):
        pool[table[0].long()] = k[:, :32].reshape(2, 16, 2, 128)
    assert_same(*(decode(q, pool, pool, 32, block_table=table) for table in (near, far)))


# ---- one answer: rows and schedules ------------------------------------------------------------------------


def row_of(case: tuple[Tensor, ...], index: int, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = decode(*case, **options)
    return out[index], lse[index]


def test_other_rows_and_the_capacity_do_not_show() -> None:
    q, k, v, _ = problem((5000,) * 5, dims=(64, 32), kv_dtype=BF16, q_dtype=BF16)
    lens = torch.tensor([5000, 2011, 0, 1, 300])
    alone = row_of((q[1:2], k[1:2, :2011], v[1:2, :2011], lens[1:2]), 0)
    assert_same(alone, row_of((q, k, v, lens), 1))
    order = torch.tensor([4, 2, 1, 0, 3])
    assert_same(alone, row_of((q[order], k[order], v[order], lens[order]), 2))
    many = torch.ones(40, dtype=torch.long)
    assert_same(alone, row_of((q[many], k[many], v[many], lens[many]), 39))
    assert_same(alone, row_of((q[1:2], k[1:2], v[1:2], 2011), 0))


@pytest.mark.parametrize("policy", ["auto", "pinned(53)", "length(300,16)"])
def test_schedules_and_threads_do_not_show(policy: str, threads: None) -> None:
    case = problem((5000, 700, 0, 64), dims=(32, 48), q_len=2)
    plain = decode(*case, policy=policy)
    for schedule in ((1, 1), (4, 1), (16, 1), (16, 9), (16, 33)):
        assert_same(plain, decode(*case, policy=policy, schedule=schedule))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert_same(plain, decode(*case, policy=policy))


def test_runs_are_joined_like_single_splits(backend: str) -> None:
    """21 splits: units of 16 and 5, of 4 and 1, or of one each; the last node of each level is short."""
    case = problem((21 * 64 - 7,), dims=(16, 16))
    results = [decode(*case, policy="length(21,64)", schedule=(run, 1)) for run in (1, 4, 16)]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_calls_from_several_threads() -> None:
    cases = [problem((2000,), seed=seed) for seed in range(6)]
    expected = [decode(*case) for case in cases]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for one, other in zip(expected, pool.map(lambda case: decode(*case), cases), strict=True):
                assert_same(one, other)


def test_strided_outputs_and_no_lse(backend: str) -> None:
    q, k, v, lens = problem((200, 50), q_len=2, q_dtype=BF16, kv_dtype=BF16)
    out, lse = decode(q, k, v, lens)
    wide = torch.full((2, 2, 3, 4, 64), NAN, dtype=BF16)
    inputs = check_inputs(q, k, v, lens)
    launch(inputs, plan_decode(inputs.problem, DeviceSpec.cpu()), wide[:, :, 1], None)
    assert torch.equal(wide[:, :, 1], out) and wide[:, :, ::2].isnan().all()
    scattered = torch.full((4, 2, 2, 2), NAN)[..., 0].permute(1, 2, 0)
    launch(inputs, plan_decode(inputs.problem, DeviceSpec.cpu()), wide[:, :, 1], scattered)
    assert torch.equal(scattered, lse)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    q, k, v, lens = problem((3000,))
    inputs = check_inputs(q, k, v, lens)
    plan = replace(plan_decode(inputs.problem, DeviceSpec.cpu(), "8"), max_units=3, max_run=1)
    with pytest.raises(ValueError, match=r"workspace: .* 3 partial"):
        launch(inputs, plan, torch.empty(1, 1, 4, 64), None)


def test_fallback_agrees_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem((20_000, 3), dims=(64, 64), q_len=2)
    native = decode(*case, window=15_000)
    monkeypatch.setattr(cpu, "_library", lambda: "switched off by the test")
    for a, b in zip(native, decode(*case, window=15_000), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_one_openmp_in_the_process() -> None:
    """The kernel and torch share one pool of threads, or two pools would fight for the cores."""
    decode(*problem())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps here")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes
