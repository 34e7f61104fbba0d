"""Appends with hostile lengths, tables and rows for `compute-sanitizer --tool memcheck|initcheck python
tests/gpu/sanitize_caches.py`."""

from __future__ import annotations

import os

# Each tensor its own allocation, so that memcheck sees its end.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import splitkv

HEADS, DIM = 3, 80
HOSTILE = [-1, 2**31 - 1, -(2**31), 100, 99, 0]


def check(name: str, cache: splitkv.ContiguousKVCache | splitkv.PagedKVCache, n: int, added: list[int]) -> None:
    hostile = torch.tensor(HOSTILE, dtype=torch.int32, device="cuda")
    cache.seq_lens.copy_(hostile)
    k, v = (torch.randn(6, n, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows = torch.tensor([5, 4, 3, 2, 1, 0], dtype=torch.int64, device="cuda")
    cache.append(k, v, rows)
    got = (cache.seq_lens - hostile).tolist()
    cache.append(k, v, rows * 1_000_003 - 7)  # no row at all
    print(f"{name}: {got}")
    if got != added or (cache.seq_lens - hostile).tolist() != added:
        raise SystemExit(f"{name}: expected {added} tokens more, got {got}")


for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
    for n in (1, 700):
        plain = splitkv.ContiguousKVCache(6, 100, HEADS, DIM, dtype=dtype, v_scale=0.5)
        check(f"contiguous {dtype} {n}", plain, n, [0, 0, 0, 0, 1, min(n, 100)])
        paged = splitkv.PagedKVCache(60, 10, HEADS, DIM, max_batch=6, max_pages_per_row=10, dtype=dtype, layout="HND")
        for row in range(6):
            paged.reserve(row, 100)
        paged.block_table[4, 9] = 60
        paged.block_table[5, 0] = -1
        check(f"paged {dtype} {n}", paged, n, [0, 0, 0, 0, 1, min(n, 100)])
print("ok")
