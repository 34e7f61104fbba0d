"""What the cache tests share: tokens, both caches of one shape, and what a row holds."""

from __future__ import annotations

from typing import Any

import torch
from helpers import BITS, NAN, same_bits
from torch import Tensor

from splitkv import ContiguousKVCache, PagedKVCache

HEADS, DIM = 2, 16
Cache = ContiguousKVCache | PagedKVCache


def tokens(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, dim: int = DIM, heads: int = HEADS
) -> Tensor:
    """[*shape, heads, dim], unit-normal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, heads, dim, generator=generator).to(dtype)


def kv(*shape: int, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    return tokens(*shape, seed=2 * seed, **options), tokens(*shape, seed=2 * seed + 1, **options)


def contiguous(batch: int, capacity: int, **options: Any) -> ContiguousKVCache:
    return poisoned(ContiguousKVCache(batch, capacity, HEADS, DIM, **{"dtype": torch.float32} | options))


def paged(
    batch: int, pages_per_row: int, page_size: int, *, num_pages: int | None = None, **options: Any
) -> PagedKVCache:
    """With room for every row unless num_pages says otherwise. Nothing is reserved."""
    return poisoned(
        PagedKVCache(
            batch * pages_per_row if num_pages is None else num_pages,
            page_size,
            HEADS,
            DIM,
            max_batch=batch,
            max_pages_per_row=pages_per_row,
            **{"dtype": torch.float32} | options,
        )
    )


def poisoned(cache: Any) -> Any:
    """The cache with every byte a NaN, so that what is not written shows."""
    for tensor in (cache.k_cache, cache.v_cache):
        tensor.copy_(torch.full((), NAN, device=tensor.device).to(tensor.dtype))
    return cache


def held(cache: Cache, row: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """(K, V) of the row's tokens in order, each [length, heads, dim]."""
    length = int(cache.seq_lens[row]) if length is None else length
    if isinstance(cache, ContiguousKVCache):
        return cache.k_cache[row, :length], cache.v_cache[row, :length]
    pages = cache.block_table[row, : -(-length // cache.page_size)].long()
    bits = [pool.view(BITS[pool.element_size()])[pages] for pool in (cache.k_cache, cache.v_cache)]
    k, v = (part.flatten(0, 1)[:length].view(cache.dtype) for part in bits)
    return k, v


def make(kind: str, batch: int, capacity: int, **options: Any) -> Cache:
    """A cache of that kind whose rows all have room for `capacity` tokens."""
    if kind == "contiguous":
        return contiguous(batch, capacity, **options)
    _, size, *layout = kind.split()
    cache = paged(batch, -(-capacity // int(size)), int(size), layout=layout[0] if layout else "NHD", **options)
    for row in range(batch):
        cache.reserve(row, capacity)
    return cache


def assert_holds(cache: Cache, row: int, k: Tensor, v: Tensor) -> None:
    assert cache.seq_lens[row] == len(k)
    for got, want in zip(held(cache, row), (k, v), strict=True):
        assert same_bits(got, want), f"row {row}"
