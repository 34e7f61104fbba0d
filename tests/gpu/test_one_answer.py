"""One answer: a row's bytes do not depend on anything but the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same, int32, make_inputs, page_order, to_pages

from splitkv import decode_attention

LENGTH, CAPACITY = 20_011, 20_480
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16": (torch.float16, torch.float16),
    "f32": (torch.float32, torch.float32),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
Row = tuple[torch.Tensor, torch.Tensor]


def run(*tensors: Any, **options: Any) -> Row:
    return decode_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


def inputs(
    name: str, batch: int = 1, heads: tuple[int, int] = (24, 4), head_dim: int = 256
) -> tuple[torch.Tensor, ...]:
    dtype, kv_dtype = DTYPES[name]
    return make_inputs(batch, *heads, head_dim, CAPACITY, dtype=dtype, kv_dtype=kv_dtype, device="cuda")


def row_of(result: Row, row: int) -> Row:
    return result[0][row : row + 1], result[1][row : row + 1]


@pytest.mark.parametrize("policy", ["auto", "5"])
@pytest.mark.parametrize("name", DTYPES)
def test_neighbours_and_place(name: str, policy: str) -> None:
    q, k, v = inputs(name, 16)
    alone = run(q[:1], k[:1], v[:1], int32([LENGTH], "cuda"), policy=policy)
    lens = [LENGTH, 0, 1, 300, LENGTH, 4096, 128, 129, 77, 20_480, 1000, 5000, 64, 65, 19_999, 2]
    whole = run(q, k, v, int32(lens, "cuda"), policy=policy)
    assert_same(row_of(whole, 0), alone, "batch 16")
    for batch in (2, 3, 8):
        assert_same(row_of(run(q[:batch], k[:batch], v[:batch], int32(lens[:batch], "cuda"), policy=policy), 0), alone)
    lens[3] += 100
    assert_same(row_of(run(q, k, v, int32(lens, "cuda"), policy=policy), 0), alone, "another neighbour")
    lens[3] -= 100
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    shuffled = run(q[order], k[order], v[order], int32(lens, "cuda")[order], policy=policy)
    assert_same(shuffled, (whole[0][order], whole[1][order]), "row order")


WIDE_TILES = [("fp8", (32, 8), 128), ("fp8", (32, 2), 128)]
"""Of 64 keys a warp, beside one tile of eight query vectors and beside two."""
BY_HEADS = [("bf16", heads, dim) for heads, dim in (((24, 4), 256), ((32, 8), 128), ((14, 2), 64), ((8, 1), 128))]


@pytest.mark.parametrize(("name", "heads", "head_dim"), BY_HEADS + WIDE_TILES, ids=str)
def test_ninety_six_rows(name: str, heads: tuple[int, int], head_dim: int) -> None:
    q, k, v = inputs(name, 1, heads, head_dim)
    alone = run(q, k, v, LENGTH)
    for batch in (32, 96):
        lens = [(i * 997) % 3000 for i in range(batch)]
        lens[17] = LENGTH
        rows = [tensor.expand(batch, *tensor.shape[1:]) for tensor in (q, k, v)]
        assert_same(row_of(run(*rows, int32(lens, "cuda")), 17), alone, f"{batch} rows")
        full = run(*rows, LENGTH)
        for row in (0, batch - 1):
            assert_same(row_of(full, row), alone, f"{batch} full rows")


@pytest.mark.parametrize(("name", "heads", "head_dim"), [(name, (24, 4), 256) for name in DTYPES] + WIDE_TILES, ids=str)
def test_pages_capacity_strides_and_scratch(name: str, heads: tuple[int, int], head_dim: int) -> None:
    q, k, v = inputs(name, 1, heads, head_dim)
    want = run(q, k, v, LENGTH)
    assert_same(run(q, k[:, :LENGTH], v[:, :LENGTH], LENGTH), want, "capacity")
    roomy = [torch.cat([cache, torch.full_like(cache, float("nan"))], 1) for cache in (k, v)]
    assert_same(run(q, *roomy, LENGTH), want, "twice the capacity")
    pool = torch.stack([k, v], 2)  # K and V interleaved token by token
    assert_same(run(q, pool[:, :, 0], pool[:, :, 1], LENGTH), want, "interleaved")
    heads_first = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (k, v)]
    assert_same(run(q, *heads_first, LENGTH), want, "heads first")
    for page_size in (16, 64, 784):
        for seed in (0, 1):
            table, pages = page_order(1, CAPACITY, page_size, seed=seed)
            paged = [to_pages(cache, table, pages, page_size) for cache in (k, v)]
            assert_same(run(q, *paged, LENGTH, block_table=table.cuda()), want, f"pages of {page_size}")
            wide = torch.full((1, table.shape[1] + 1000), 2**30, dtype=torch.int32)
            wide[:, : table.shape[1]] = table
            assert_same(run(q, *paged, int32([LENGTH], "cuda"), block_table=wide.cuda()), want, "a wider table")
    for _ in range(5):
        assert_same(run(q, k, v, LENGTH), want, "again")


@pytest.mark.parametrize("geometry", [((24, 4), 256), ((32, 8), 128), ((4, 4), 128)], ids=str)
def test_alignment_and_odd_strides(geometry: tuple[tuple[int, int], int]) -> None:
    """CASE-12: caches that start at an odd element, or whose heads are an odd number of elements apart."""
    q, k, v = inputs("bf16", 1, *geometry)
    want = run(q, k, v, LENGTH)
    for first, gap in ((1, 0), (0, 5), (8, 8)):
        views = []
        for cache in (k, v):
            *outer, dim = cache.shape
            rows = torch.full((outer[1] * outer[2] * (dim + gap) + first,), torch.nan, dtype=k.dtype, device="cuda")
            views.append(rows[first:].view(*outer, dim + gap)[..., :dim].copy_(cache))
        assert_same(run(q, *views, LENGTH), want, f"{first} elements late, {gap} between heads")
    late = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    assert_same(run(late, k, v, LENGTH), want, "q one element late")


def test_a_long_row_beside_many_short_ones() -> None:
    q, k, v = make_inputs(1, 16, 4, 256, 262_144, dtype=torch.bfloat16, device="cuda")
    alone = run(q, k, v, 262_144)
    short = run(q, k, v, 1000)
    rows = [tensor.expand(128, *tensor.shape[1:]) for tensor in (q, k, v)]
    lens = int32([1000] * 100 + [262_144] + [1000] * 27, "cuda")
    got = run(*rows, lens)
    assert_same(row_of(got, 100), alone)
    assert_same(row_of(got, 0), short)
    assert_same(row_of(got, 127), short)
