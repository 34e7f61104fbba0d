"""Products of a few rows by the GPU's kernels, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers import Guarded

from splitkv.models.product_kernels import MOST_ROWS, Tile, product

TILES = [None, Tile(2, 64), Tile(8, 32, stages=3)]
FEW_TILES = [None, Tile(16, 32, stages=2)]
CASES = ["plain", "bias", "norm", "factor", "add", "paired", "norm and paired", "factor, bias and add"]


def case(name: str, rows: int, size: int, columns: int, dtype: torch.dtype, tile: Tile | None) -> None:
    draw = torch.Generator().manual_seed(size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    x, weight = random(rows, columns), random(size * (2 if "paired" in name else 1), columns)
    bias = random(size) if "bias" in name else None
    norm = (1 + random(columns).float(), 1e-6) if "norm" in name else None
    factor = random(rows, columns) if "factor" in name else None
    out = Guarded((rows, size), dtype)
    out.tensor.copy_(before := random(rows, size))

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


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "columns"), [(24, 96), (7, 100), (1, 1), (5, 1040)])
@pytest.mark.parametrize("name", CASES)
def test_one_row(name: str, size: int, columns: int, dtype: torch.dtype, tile: Tile | None) -> None:
    case(name, 1, size, columns, dtype, tile)


@pytest.mark.parametrize("tile", FEW_TILES, ids=str)
@pytest.mark.parametrize(("size", "columns"), [(48, 96), (7, 300)])
@pytest.mark.parametrize("rows", [2, MOST_ROWS])
@pytest.mark.parametrize("name", ["plain", "bias", "add", "paired"])
def test_a_few_rows(name: str, rows: int, size: int, columns: int, tile: Tile | None) -> None:
    case(name, rows, size, columns, torch.float16, tile)
