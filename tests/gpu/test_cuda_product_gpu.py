"""cuda_product.cu against float64: every option, rows and columns of awkward sizes, NaN in what must not be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.models import cuda_product

OPTIONS = ("plain", "norm", "norm_f32", "factor", "bias", "add", "paired", "logits")
SIZES = [(4096, 9000), (12288, 256), (1000, 999), (896, 4864), (2560, 17), (8, 8), (5120, 160)]
BF16, F16 = torch.bfloat16, torch.float16
ROWS = [(1, BF16), (1, F16), (3, BF16), (8, F16), (13, BF16)]


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def guarded(tensor: Tensor) -> Tensor:
    """The same values between NaN, whose memory a product must not touch."""
    room = torch.full((tensor.numel() + 512,), torch.nan, device="cuda", dtype=tensor.dtype)
    inner = room[256:-256].view(tensor.shape)
    inner.copy_(tensor)
    return inner


def exact(x: Tensor, weight: Tensor, before: Tensor, option: str, given: dict[str, Any]) -> Tensor:
    values = x.double()
    if "norm" in given:
        weights, eps = given["norm"]
        values = values * torch.rsqrt((values * values).mean(-1, keepdim=True) + eps) * weights.double()
    if "factor" in given:
        values = values * given["factor"].double()
    result = values.to(x.dtype).double() @ weight.double().T
    if "bias" in given:
        result = result + given["bias"].double()
    if option == "paired":
        gate, up = result.chunk(2, -1)
        result = gate * gate.sigmoid() * up
    return result + before.double() if option == "add" else result


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuda_product is for Hopper and later")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("columns", "size"), SIZES)
def test_products(columns: int, size: int, option: str) -> None:
    for rows, dtype in ROWS:
        x = guarded(made(rows, columns, dtype=dtype))
        weight = guarded(made(2 * size if option == "paired" else size, columns, dtype=dtype, scale=0.05))
        if not cuda_product.takes(x, weight, option == "paired"):
            assert rows * columns > 60_000
            continue
        given: dict[str, Any] = {}
        if option in ("norm", "paired", "logits"):
            given["norm"] = guarded(made(columns, dtype=dtype)), 1e-6
        elif option == "norm_f32":
            given["norm"] = guarded(made(columns, dtype=torch.float32)), 1e-6
        elif option in ("factor", "bias"):
            given[option] = guarded(made(rows, columns, dtype=dtype) if option == "factor" else made(size, dtype=dtype))
        out = guarded(made(rows, size, dtype=torch.float32 if option == "logits" else dtype))
        expected = exact(x, weight, out.clone(), option, given)
        cuda_product.product(x, weight, out, add=option == "add", paired=option == "paired", **given)
        rounding = (expected.to(out.dtype).double() - expected).norm() / expected.norm()
        # A norm in f32 here and in f64 there may round a few inputs to neighbours.
        allowed = 1.2 * rounding + (2e-3 if dtype == torch.bfloat16 else 3e-4) * ("norm" in given) + 1e-5
        assert (out.double() - expected).norm() / expected.norm() < allowed, (rows, dtype)


def test_a_row_is_the_same_whatever_stands_beside() -> None:
    x, weight, norm = made(16, 2560), made(2 * 512, 2560, scale=0.05), (made(2560), 1e-6)
    for rows in range(2, 17):
        if not cuda_product.takes(x[:rows], weight, True):
            continue
        both = cuda_product.product(x[:rows], weight, made(rows, 512), norm=norm, paired=True)
        for row in range(rows):
            alone = cuda_product.product(x[row : row + 1], weight, made(1, 512), norm=norm, paired=True)
            assert torch.equal(both[row : row + 1], alone)


def test_rows_may_lie_apart() -> None:
    wide, weight = made(3, 8192), made(64, 4096, scale=0.05)
    x = wide[:, 2048 : 2048 + 4096]
    out = cuda_product.product(x, weight, made(3, 64))
    assert torch.equal(out, cuda_product.product(x.contiguous(), weight, made(3, 64)))


def test_what_it_does_not_take() -> None:
    weight = made(64, 4096)
    assert cuda_product.takes(made(16, 512), made(64, 512))
    for x in (made(17, 4096), made(1, 4096, dtype=torch.float32), made(1, 4100)[:, 2:4098], made(16, 16384)):
        assert not cuda_product.takes(x, weight)
    assert not cuda_product.takes(made(1, 12), made(64, 12))
