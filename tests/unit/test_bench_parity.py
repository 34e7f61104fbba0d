"""The measuring stick of `splitkv rungs` and the rules that withhold a speed."""

import math

import pytest
import torch

import splitkv
from splitkv.bench import parity
from splitkv.bench.parity import Error, error_of, float64_attention, judge

GOOD = Error(1e-4, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_the_stick_is_the_oracle(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    monkeypatch.setattr(parity, "CHUNK_KEYS", 32)  # 77 keys: two chunks and a short one
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, 48, generator=generator).to(dtype)
    k = torch.randn(2, 77, kv_heads, 48, generator=generator).to(dtype)
    v = torch.randn(2, 77, kv_heads, 16, generator=generator).to(dtype)
    exact = splitkv.reference_attention(q, k, v, 77)
    assert error_of(float64_attention(q, k, v), exact).relative < parity.STICK_TOLERANCE


def test_the_stick_takes_logits_that_overflow_exp() -> None:
    q, v = torch.ones(1, 1, 16), torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 1, 16)
    k = torch.tensor([0.0, 1000.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 1, 16)
    assert torch.equal(float64_attention(q, k, v), torch.ones(1, 1, 16, dtype=torch.float64))


def test_errors_and_differences() -> None:
    ref = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert error_of(torch.tensor([3.0, 4.5]), ref) == Error(0.1, 0.5)
    same = parity.difference_of(ref.float(), ref.float())
    assert (same["max_abs"], same["relative"]) == (0.0, 0.0) and same["cosine"] == pytest.approx(1.0)
    assert parity.difference_of(ref, -ref)["cosine"] == pytest.approx(-1.0)
    assert parity.rounding_of(ref, torch.bfloat16) == 0.0
    assert 0 < parity.rounding_of(ref / 3, torch.bfloat16) < 2**-8


def test_good_results_pass() -> None:
    assert judge("f32", Error(1e-6, 9e-6), Error(1e-6, 1e-6), GOOD, 0.0) == []
    assert judge("bf16", Error(2e-3, 1.0), Error(2e-3, 1.0), Error(2e-3, 1.0), 1e-3) == []


def test_f32_is_held_to_its_absolute_error() -> None:
    (reason,) = judge("f32", Error(1e-6, 1.1e-5), Error(1e-6, 1e-6), GOOD, 0.0)
    assert reason == "max abs error 1.1e-05 against float64 is over 1e-05"


def test_16_bit_is_held_to_plain_pytorch() -> None:
    (reason,) = judge("f16", Error(3.2e-3, 0.0), Error(3.2e-3, 0.0), Error(1e-3, 0.0), 1e-3)
    assert reason.startswith("error 0.0032 against float64 is over 0.003 ")


def test_worse_than_the_baseline_beyond_rounding_fails() -> None:
    assert judge("f32", Error(2.0e-6, 1e-6), Error(1e-6, 1e-6), GOOD, 0.0) == []
    (reason,) = judge("f32", Error(2.1e-6, 1e-6), Error(1e-6, 1e-6), GOOD, 0.0)
    assert reason == "error 2.1e-06 against float64 is worse than the baseline's 1e-06"


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
def test_nan_never_passes(kv_dtype: str) -> None:
    nan = Error(math.nan, math.nan)
    assert len(judge(kv_dtype, nan, GOOD, GOOD, 1e-3)) == 2
    assert judge(kv_dtype, GOOD, nan, GOOD, 1e-3)
    assert math.isnan(error_of(torch.tensor([math.nan]), torch.ones(1, dtype=torch.float64)).relative)
