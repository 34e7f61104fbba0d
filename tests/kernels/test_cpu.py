"""The CPU backend against the float64 oracle, natively and in its torch fallback."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpu_case import (
    BACKENDS,
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    KV_DTYPES,
    NAN,
    assert_right,
    assert_same,
    decode,
    problem,
    random,
    use_backend,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitkv.backends import cpu


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_backend(request.param, monkeypatch)


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
    assert_right(problem((200, 50)), softcap=3000.0, lse_error=5e-6)  # 1 - 2 / (e^2x + 1) alone would be off by 1e-4
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


def test_fallback_agrees_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem((20_000, 3), dims=(64, 64), q_len=2)
    native = decode(*case, window=15_000)
    monkeypatch.setattr(cpu, "_library", lambda: "switched off by the test")
    for a, b in zip(native, decode(*case, window=15_000), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
