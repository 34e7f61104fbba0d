"""Products of one row by the GPU's kernels, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers import Guarded

from splitkv.models.product_kernels import Tile, product

TILES = [None, Tile(2, 64), Tile(8, 32, stages=3)]
CASES = ["plain", "bias", "norm", "factor", "add", "paired", "norm and paired", "factor, bias and add"]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "columns"), [(24, 96), (7, 100), (1, 1), (5, 1040)])
@pytest.mark.parametrize("name", CASES)
def test_product(name: str, size: int, columns: int, dtype: torch.dtype, tile: Tile | None) -> None:
    draw = torch.Generator().manual_seed(size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    x, weight = random(1, columns), random(size * (2 if "paired" in name else 1), columns)
    bias = random(size) if "bias" in name else None
    norm = (1 + random(columns).float(), 1e-6) if "norm" in name else None
    factor = random(1, columns) if "factor" in name else None
    out = Guarded((1, size), dtype)
    out.tensor.copy_(before := random(1, size))

    exact = x.double()
    if norm is not None:
        exact = exact * (exact.square().mean(-1, keepdim=True) + norm[1]).rsqrt() * norm[0].double()
    if factor is not None:
        exact = exact * factor.double()
    exact = exact @ weight.double().T
    if bias is not None:
        exact += bias.double()
    if "paired" in name:
        gate, up = exact.chunk(2, -1)
        exact = gate * gate.sigmoid() * up
    if "add" in name:
        exact += before.double()

    options = {"bias": bias, "norm": norm, "factor": factor, "add": "add" in name, "paired": "paired" in name}
    assert product(x, weight, out.tensor, **options, tile=tile) is out.tensor
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert (out.tensor - exact).abs().max() < tolerance * exact.abs().max() and out.intact()
