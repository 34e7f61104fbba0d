"""Products of a few rows on the CPU against float64, and that a row's bytes are its own."""

from __future__ import annotations

import pytest
import torch

from splitkv.backends import cpu
from splitkv.backends.cpu_product import PRODUCT_DTYPES, PRODUCT_ROWS, product

if cpu.native_functions() is None:
    pytest.skip("no C compiler", allow_module_level=True)

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1, 1), (3, 7), (5, 16), (64, 100), (33, 1000), (960, 576), (257, 2049)]


def inputs(rows: int, outs: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outs * 10_000 + columns)
    shapes = (rows, columns), (outs, columns), (outs,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "columns"), SHAPES)
@pytest.mark.parametrize("rows", range(1, PRODUCT_ROWS + 1))
def test_against_float64(rows: int, outs: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(rows, outs, columns, dtype)
    exact = x.double() @ weight.double().T
    for got, want in ((product(x, weight), exact), (product(x, weight, bias), exact + bias.double())):
        assert got is not None and got.dtype == dtype and got.shape == (rows, outs)
        assert (got.double() - want).abs().max() <= ROUNDING[dtype] * columns**0.5 * 4


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES, ids=str)
def test_neither_other_rows_nor_threads_nor_strides_show(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(PRODUCT_ROWS, 1025, 1000, dtype)
    together = product(x, weight, bias)
    spread = torch.full((PRODUCT_ROWS, 3000), torch.nan, dtype=dtype)
    spread[:, 1000:2000] = x
    threads = torch.get_num_threads()
    try:
        for number in (1, threads + 1):
            torch.set_num_threads(number)
            for row in range(PRODUCT_ROWS):
                assert torch.equal(product(x[row : row + 1], weight, bias), together[row : row + 1])
            assert torch.equal(product(spread[:, 1000:2000], weight, bias), together)
    finally:
        torch.set_num_threads(threads)


def test_nan_and_infinity_stay_in_their_columns() -> None:
    x, weight, _ = inputs(2, 40, 100, torch.float32)
    weight[3, 99], weight[7, 0] = torch.nan, torch.inf
    got = product(x, weight)
    assert got[:, 3].isnan().all() and got[:, 7].isinf().all()
    rest = [o for o in range(40) if o not in (3, 7)]
    assert got[:, rest].isfinite().all()


def test_what_it_does_not_take_is_left_to_torch() -> None:
    x, weight, bias = inputs(1, 40, 100, torch.float32)
    assert product(x.expand(PRODUCT_ROWS + 1, -1).contiguous(), weight) is None
    assert product(x[:0], weight) is None
    assert product(x.double(), weight.double()) is None
    assert product(x, weight.half()) is None
    assert product(x, weight.T.contiguous().T) is None
    assert product(x, weight, bias.half()) is None
    assert product(torch.randn(100, 1).T[:, ::2], weight[:, :50].contiguous()) is None
    assert product(x[:, :99], weight) is None
    assert product(x, weight, bias[:39]) is None
    assert product(x, weight.to("meta")) is None
