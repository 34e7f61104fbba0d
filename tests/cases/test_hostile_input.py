"""Values that no caller should send, and memory that holds the worst: no access outside the cache, no other answer.

Arguments of the wrong type or shape are in tests/unit/test_checks.py, page ids in case 15, poison in case 02.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Guarded, assert_parity, assert_same, int32, make_inputs, page_order, to_pages
from torch import Tensor

from splitkv import reference_attention

Decode = Any  # conftest.Decode
FAR = [2**31, 2**32 + 5, 2**40, 2**63 - 1]


def oracle(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("q_len", [None, 3])
def test_lengths_out_of_range_count_as_the_nearest(decode: Decode, q_len: int | None, paged: bool) -> None:
    """64-bit lengths that would wrap to something else in 32, and negative ones."""
    lens = torch.tensor([*FAR, -1, -(2**31) - 7, -(2**63), 5])
    batch = len(lens)
    q, k, v = make_inputs(batch, 2, 1, 16, 32, q_len=q_len)
    options: dict[str, Any] = {}
    if paged:
        table, num_pages = page_order(batch, 32, 16)
        k, v = (to_pages(cache, table, num_pages, 16) for cache in (k, v))
        options["block_table"] = table
    got = decode(q, k, v, lens, policy="3", return_lse=True, **options)
    inside = int32([32] * 4 + [0] * 3 + [5])
    assert_same(got, decode(q, k, v, inside, policy="3", return_lse=True, **options))
    assert_parity(got, oracle(q, k, v, inside, **options))


@pytest.mark.parametrize("window", [0, 4, 2**40])
def test_starts_out_of_range(decode: Decode, window: int) -> None:
    """Before the row, behind its end, and at both ends of 32 bits; what lies before a start is never read."""
    starts = [-1, -(2**31), 2**31 - 1, 20, 19, 7]
    q, k, v = make_inputs(6, 2, 1, 16, 32)
    lens = int32([20] * 6)
    clean = decode(q, k, v, lens, starts=int32(starts), window=window, policy="3", return_lse=True)
    assert_parity(clean, oracle(q, k, v, lens, starts=int32(starts), window=window))
    for row, start in enumerate(starts):
        for cache in (k, v):
            cache[row, : max(min(start, 32), 0)] = math.nan
    assert_same(decode(q, k, v, lens, starts=int32(starts), window=window, policy="3", return_lse=True), clean)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 6e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_the_mask_hides_may_hold_anything(decode: Decode, dtype: torch.dtype, fill: float) -> None:
    """Hidden from every head by a bool mask, in the middle of tiles that are read."""
    q, k, v = make_inputs(1, 2, 1, 16, 40, dtype=dtype)
    mask = torch.arange(40) % 5 > 1
    want = decode(q, k, v, 37, mask=mask, policy="3", return_lse=True)
    assert_parity(want, oracle(q, k, v, 37, mask=mask))
    k[:, ~mask] = fill
    k[:, 37:] = fill
    assert_same(decode(q, k, v, 37, mask=mask, policy="3", return_lse=True), want)


def zero_strided(shape: tuple[int, ...], dim: int, seed: int) -> Tensor:
    """A cache whose dimension `dim` repeats one slice by a stride of 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:dim], 1, *shape[dim + 1 :], generator=generator).expand(shape)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["rows", "tokens", "heads"])
def test_strides_of_zero(decode: Decode, dim: int) -> None:
    q, _, _ = make_inputs(3, 4, 2, 16, 1)
    k, v = (zero_strided((3, 40, 2, 16), dim, seed) for seed in (1, 2))
    got = decode(q[:1].expand(3, -1, -1), k, v, int32([40, 7, 0]), policy="3", return_lse=True)
    assert_parity(got, oracle(q[:1].expand(3, -1, -1), k, v, int32([40, 7, 0])))
    assert_same(got, decode(q[:1].repeat(3, 1, 1), k.contiguous(), v.contiguous(), int32([40, 7, 0]), policy="3",
                            return_lse=True))  # fmt: skip


def test_rows_that_share_one_line_of_the_table(decode: Decode) -> None:
    q, k, v = make_inputs(3, 2, 1, 16, 48)
    table, num_pages = page_order(1, 48, 16)
    pools = [to_pages(cache[:1], table, num_pages, 16) for cache in (k, v)]
    lens = int32([48, 5, 33])
    got = decode(q, *pools, lens, block_table=table.expand(3, -1), policy="3", return_lse=True)
    assert_same(got, decode(q, *pools, lens, block_table=table.repeat(3, 1), policy="3", return_lse=True))


def test_an_out_of_stride_zero_is_refused(decode: Decode) -> None:
    q, k, v = make_inputs(2, 2, 1, 16, 8)
    with pytest.raises(ValueError, match=r"out: expected no stride of 0, got strides \(0, 16, 1\)"):
        decode(q, k, v, 8, out=torch.empty(1, 2, 16).expand(2, 2, 16))


def test_nothing_beside_the_results_is_written(decode_here: Decode) -> None:
    """Hostile lengths and page ids, every output and the scratch between guard bands."""
    q, k, v = make_inputs(4, 2, 1, 16, 48)
    table, num_pages = page_order(4, 48, 16)
    k, v = (to_pages(cache, table, num_pages, 16) for cache in (k, v))
    table[0, 1], table[1, 0], table[2, 2] = -1, 2**31 - 1, -(2**31)
    out, scratch = Guarded((4, 2, 16), torch.float32), Guarded((1 << 14,), torch.uint8)
    lens = torch.tensor([2**40, 17, 48, -3])
    before = [tensor.clone() for tensor in (q, k, v, table)]
    result = decode_here(q, k, v, lens, block_table=table, policy="4", out=out.tensor, workspace=scratch.tensor)
    assert out.intact() and scratch.intact() and torch.isfinite(result).all() and not result[3].any()
    for tensor, copy in zip((q, k, v, table), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())
