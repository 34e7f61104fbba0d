"""Cases about writing a cache and reading it back: 16, 21, 26, 31."""

from __future__ import annotations

import math
from typing import Any

import faults
import faults_in_python as around
import pytest
import torch
from planting import caught
from torch import Tensor

from splitkv import ContiguousKVCache, PagedKVCache, decode_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, DIM = 2, 16


def one_row(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    if kind == "contiguous":
        return ContiguousKVCache(1, 64, HEADS, DIM, dtype=dtype, device="cpu", **options)
    cache = PagedKVCache(4, 16, HEADS, DIM, max_batch=1, max_pages_per_row=4, dtype=dtype, device="cpu", **options)
    cache.allocate(64)
    return cache


# ---- case 16: written and read in one format ---------------------------------------------------------------


def check_format(kind: str, dtype: torch.dtype) -> None:
    """One key, so out is its value. Past the largest number the format saturates; NaN stays."""
    largest = torch.finfo(dtype).max
    given = torch.tensor(
        [1.0, 1.5, 3.0, largest, largest + 52, 1e6, math.inf, -math.inf, -1e6, 0, -1.5, 2**-6] + [1.0] * 4
    )
    kept = given.clamp(-largest, largest)
    tokens = given.expand(1, HEADS, DIM).contiguous()
    cache = one_row(kind, dtype)
    cache.append(torch.zeros_like(tokens), tokens)
    q = torch.ones(1, HEADS, DIM)
    assert torch.equal(decode_attention(q, **cache.arguments()), kept.expand(1, HEADS, DIM))
    cache.append(torch.zeros_like(tokens), torch.full_like(tokens, math.nan))
    assert bool(decode_attention(q, **cache.arguments()).isnan().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_case_16_append_and_decode_agree_on_the_format(kind: str, dtype: torch.dtype) -> None:
    check_format(kind, dtype)


def test_case_16_scales_are_those_of_the_writer() -> None:
    """k / k_scale is stored, and read back times k_scale; per head and different, so that a swap shows."""
    scales = torch.tensor([0.25, 2.0]), torch.tensor([0.5, 4.0])
    cache = one_row("paged", E4M3, k_scale=scales[0], v_scale=scales[1])
    values = torch.tensor([1.0, 3.0, 14.0, 100.0] * 4).expand(1, HEADS, DIM).contiguous()
    cache.append(values, values)
    out = decode_attention(torch.ones(1, HEADS, DIM), **cache.arguments())
    assert torch.equal(out, (values / scales[1][:, None]).to(E4M3).float() * scales[1][:, None])  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["the other format", "no saturation"])
def test_case_16_catches_a_writer_of_its_own_mind(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    around.write_wrongly(fault, monkeypatch)
    with caught():
        check_format("contiguous", E4M3)


# ---- case 26: pages reserved ahead -------------------------------------------------------------------------


def check_pages_ahead(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    k, v = torch.randn(2, 1, length, HEADS, DIM, generator=generator).unbind()
    q = torch.randn(1, HEADS, DIM, generator=generator)
    caches = [one_row(kind, torch.float32) for kind in ("contiguous", "paged")]
    for cache in caches:
        cache.k_cache.fill_(math.nan)
        cache.v_cache.fill_(math.nan)
        cache.append(k, v)
    contiguous, paged = (decode_attention(q, **cache.arguments()) for cache in caches)
    assert torch.equal(contiguous, paged)  # type: ignore[arg-type]
    assert torch.equal(contiguous, decode_attention(q, k, v, length))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48, 64])
def test_case_26_pages_reserved_ahead_are_not_read(length: int) -> None:
    check_pages_ahead(length)


def test_case_26_catches_lengths_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    around.LENGTHS_FROM_THE_TABLE.plant("cpu", monkeypatch)
    with caught():
        check_pages_ahead(32)


# ---- case 31: pages that held something else ---------------------------------------------------------------


def check_reused_pages(page_size: int, dtype: torch.dtype, steps: int = 100) -> None:
    """Two rows that come and go over few pages, beside a row of padding, in a pool of f32 state and in one of zeros:
    the same bits at every step, though nobody clears a page."""
    generator = torch.Generator().manual_seed(0)
    pools = []
    for dirty in (True, False):
        cache = PagedKVCache(6, page_size, HEADS, DIM, max_batch=3, max_pages_per_row=2, dtype=dtype, device="cpu")
        for tensor in (cache.k_cache, cache.v_cache):
            state = torch.full((tensor.numel() * tensor.element_size() // 4,), 0, dtype=torch.int32)
            if dirty:
                state[::3], state[1::3], state[2::3] = 0x7FC07F80, 0x7F7FFF80, -0x00800040  # NaN, Inf and their halves
            tensor.copy_(state.view(torch.uint8).view(dtype).view(tensor.shape))
        pools.append(cache)
    for step in range(steps):
        for row in (0, 1):
            length = int(pools[0].seq_lens[row])
            if row in pools[0].rows_in_use and (length + 1 > 2 * page_size or (step + row) % 23 == 22):
                for cache in pools:
                    cache.free(row)
                length = 0
            for cache in pools:
                cache.reserve(row, length + 1)
        k, v = torch.randn(2, 3, HEADS, DIM, generator=generator).unbind()
        q = torch.randn(3, 2 * HEADS, DIM, generator=generator)
        results: list[Tensor] = []
        for cache in pools:
            cache.append(k, v, rows=[0, 1, 2], lens=torch.tensor([1, 1, 1]))  # row 2 has no page: padding
            results.append(decode_attention(q, **cache.arguments()))  # type: ignore[arg-type]
        assert torch.isfinite(results[0]).all() and torch.equal(*results), step
        assert not results[0][2].any() and int(pools[0].seq_lens[2]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("page_size", [16, 784])
def test_case_31_pages_are_reused_as_they_are(page_size: int, dtype: torch.dtype) -> None:
    check_reused_pages(page_size, dtype)


def test_case_31_catches_hidden_values_times_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    faults.VALUES_PAST_THE_END_TIMES_0.plant("cpu", monkeypatch, tmp_path)
    with caught():
        check_reused_pages(16, torch.float16, steps=5)
