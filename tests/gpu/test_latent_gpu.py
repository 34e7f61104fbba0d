"""On the GPU, absorbed MLA: head_dim 576 over one KV head, V the first 512 columns of K, in its memory or apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import exact, relative
from helpers import assert_parity, assert_same, int32, make_inputs, page_order, to_pages

from splitkv import decode_attention, reference_attention

V_DIM = 512
FP8 = torch.float8_e4m3fn
DTYPES = {
    "f32": (torch.float32, torch.float32),
    "f16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, FP8),
}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_attention(*tensors, return_lse=True, backend="triton", **options)  # type: ignore[return-value]


def latent(name: str, batch: int, heads: int, capacity: int, q_len: int | None = None) -> Tensors:
    """q, K and the V that is a view of K's first columns."""
    dtype, kv_dtype = DTYPES[name]
    q, k, _ = make_inputs(batch, heads, 1, 576, capacity, q_len=q_len, dtype=dtype, kv_dtype=kv_dtype, device="cuda")
    return q, k, k[..., :V_DIM]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", DTYPES)
def test_parity_and_one_answer(name: str, heads: int) -> None:
    lens = [4097, 0, 1, 129, 4160, 2000]
    q, k, v = latent(name, len(lens), heads, 4160)
    got = run(q, k, v, int32(lens, "cuda"))
    want = exact(q, k.float(), v.float(), lens)
    fp8 = {"tolerance": 1e-2, "lse_tolerance": 1e-3} if name == "fp8" else {}
    assert_parity(got, want, **fp8)
    assert relative(got[0], want[0]) < {"f32": 1e-5, "f16": 1e-3}.get(name, 3e-3)
    apart = v.clone()
    assert_same(run(q, k, apart, int32(lens, "cuda")), got, "V apart")
    for row in (0, 3):  # alone, as batch 1 has another schedule
        alone = run(q[row : row + 1], k[row : row + 1], v[row : row + 1], lens[row])
        assert_same(alone, (got[0][row : row + 1], got[1][row : row + 1]), f"row {row} alone")
    table, pages = page_order(len(lens), 4160, 64)
    pool = to_pages(k, table, pages, 64)
    for values in (pool[..., :V_DIM], pool[..., :V_DIM].clone()):
        assert_same(run(q, pool, values, int32(lens, "cuda"), block_table=table.cuda()), got, "pages of 64")
    for _ in range(3):
        assert_same(run(q, k, v, int32(lens, "cuda")), got, "again")


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_loaded_batch_has_the_bytes_of_a_row_alone(name: str) -> None:
    q, k, v = latent(name, 1, 16, 20_000)
    alone = run(q, k, v, 20_000)
    rows = [tensor.expand(64, *tensor.shape[1:]) for tensor in (q, k)]
    for values in (rows[1][..., :V_DIM], v.clone().expand(64, *v.shape[1:])):
        got = run(*rows, values, int32([20_000] * 63 + [77], "cuda"))
        for row in (0, 62):
            assert_same((got[0][row : row + 1], got[1][row : row + 1]), alone, row)


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("heads, q_len", [(16, 4), (16, 2), (5, 3)])
def test_causal_queries(heads: int, q_len: int, name: str) -> None:
    q, k, v = latent(name, 2, heads, 700, q_len)
    lens = int32([700, 2], "cuda")
    sinks = torch.linspace(-1, 1, heads, device="cuda")
    want = reference_attention(q, k.float(), v.float(), lens, return_lse=True, sinks=sinks, window=500)
    got = run(q, k, v, lens, sinks=sinks, window=500)
    tolerance = {"fp8": {"tolerance": 1e-2, "lse_tolerance": 1e-3}}.get(name, {})
    assert_parity(got, want, **tolerance)  # type: ignore[arg-type]
    assert_same(run(q, k, v.clone(), lens, sinks=sinks, window=500), got)


def test_the_longest_context() -> None:
    q, k, v = latent("bf16", 1, 16, 262_144)
    want = exact(q, k, v, [262_144])
    got = run(q, k, v, 262_144)
    assert_parity(got, want, lse_tolerance=1e-4)
    assert relative(got[0], want[0]) < 3e-3


def test_a_captured_graph_serves_every_length() -> None:
    q, k, v = latent("bf16", 2, 16, 8192)
    lens = int32([64, 3], "cuda")
    run(q, k, v, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v, lens)
    lens.copy_(int32([8192, 777], "cuda"))
    graph.replay()
    assert_same(captured, run(q, k, v, lens))
