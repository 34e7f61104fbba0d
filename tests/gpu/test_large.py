"""CASE-01, CASE-30: offsets past 2**31 elements and bytes, keys found wherever they are."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, int32

from splitkv import decode_attention

GIB = 1 << 30


def needs_memory(gib: float) -> None:
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.parametrize(
    ("num_pages", "page_size", "kv_heads", "head_dim", "homes"),
    [(65_540, 16, 8, 128, (5, 65_535, 65_536)), (1_340, 784, 4, 256, (3, 1_336, 1_337, 1_338))],
    ids=["pages of 16", "pages of 784"],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=["fp8", "bf16"])
def test_placement_twins(
    dtype: torch.dtype, num_pages: int, page_size: int, kv_heads: int, head_dim: int, homes: tuple[int, ...]
) -> None:
    """The same tokens on low and high pages of a pool with K and V interleaved per page."""
    needs_memory(12)
    pool = torch.zeros(num_pages, 2, page_size, kv_heads, head_dim, dtype=dtype, device="cuda")
    tokens = torch.randn(2, page_size, kv_heads, head_dim, device="cuda")
    if dtype == torch.uint8:
        pool, tokens = pool.view(torch.float8_e4m3fn), tokens.to(torch.float8_e4m3fn)
    for home in homes:
        pool[home] = tokens.to(pool.dtype)
    q = torch.randn(1, 4 * kv_heads, head_dim, device="cuda").to(torch.bfloat16)
    results = [
        decode_attention(q, pool[:, 0], pool[:, 1], page_size, block_table=int32([[home]], "cuda"), return_lse=True)
        for home in homes
    ]
    dense = decode_attention(q, *tokens.to(pool.dtype).unsqueeze(1), page_size, return_lse=True)
    for result in results:
        assert_same(result, dense)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [32_767, 32_769, 65_536, 65_537, 131_072, 262_143, 262_144])
def test_needles_are_found(length: int) -> None:
    q = torch.randn(1, 1, 64, device="cuda").expand(1, 8, 64).contiguous()
    for at in {0, 32_767, 32_768, 65_536, length - 1}:
        if at >= length:
            continue
        k = torch.zeros(1, 262_144, 2, 64, device="cuda")
        v = torch.zeros_like(k)
        k[0, at] = 24 * 8 * q[0, 0] / q[0, 0].norm() ** 2
        v[0, at] = 1
        for policy in ("auto", "16", "off"):
            out = decode_attention(q, k, v, length, policy=policy)
            weight = torch.tensor(24.0, dtype=torch.float64).exp()
            assert (out.double() - weight / (weight + length - 1)).abs().max() < 1e-5  # type: ignore[union-attr]


def test_a_contiguous_cache_past_two_to_the_31_elements() -> None:
    needs_memory(14)
    rows, capacity = 9, 262_144
    k = torch.zeros(rows, capacity, 4, 256, dtype=torch.bfloat16, device="cuda")
    assert k.numel() > 2**31
    last = torch.randn(1, 1000, 4, 256, device="cuda").to(torch.bfloat16)
    k[-1:, :1000] = last
    q = torch.randn(rows, 16, 256, device="cuda").to(torch.bfloat16)
    got = decode_attention(q, k, k, int32([1] * 8 + [1000], "cuda"))
    assert torch.equal(got[-1:], decode_attention(q[-1:], last, last, 1000))


def test_heads_stored_one_after_the_other_past_two_to_the_31() -> None:
    """The third head lies 2**31 elements from the first, though no stride is that large."""
    needs_memory(6)
    q, k, v = (torch.randn(1, *shape, 64, device="cuda").to(torch.bfloat16) for shape in ((6,), (1000, 3), (1000, 3)))
    want = decode_attention(q, k, v, 1000, return_lse=True)
    memory = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    views = [memory[first:].as_strided(k.shape, (0, 64, 2**30, 1)) for first in (0, 2**18)]
    for view, cache in zip(views, (k, v), strict=True):
        view.copy_(cache)
    assert_same(decode_attention(q, *views, 1000, return_lse=True), want)  # type: ignore[arg-type]
