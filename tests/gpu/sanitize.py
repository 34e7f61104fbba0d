"""A handful of small calls for `compute-sanitizer --tool memcheck|racecheck python tests/gpu/sanitize.py`."""

from __future__ import annotations

import os

os.environ.setdefault(
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "1"
)  # each tensor its own allocation, so that memcheck sees its end

import torch

import splitkv


def check(name: str, batch: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, **options: object) -> None:
    generator = torch.Generator().manual_seed(0)
    capacity, page_size, backend = 1200, options.pop("page_size", None), options.pop("backend", "auto")
    kv_dtype = options.pop("kv_dtype", dtype)
    q = torch.randn(batch, heads[0], head_dim, generator=generator).to(dtype)
    lens = torch.tensor([(i * 379) % (capacity + 1) for i in range(1, batch + 1)], dtype=torch.int32)
    shape = (batch, capacity, heads[1], head_dim)
    if page_size:
        pages = -(-capacity // page_size)
        shape = (batch * pages, page_size, heads[1], head_dim)
        options["block_table"] = torch.randperm(batch * pages, generator=generator).view(batch, -1).to(torch.int32)
    k, v = (torch.randn(shape, generator=generator).to(kv_dtype) for _ in range(2))
    want = splitkv.reference_attention(q, k, v, lens, **options)
    on_gpu = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    got = splitkv.decode_attention(q.cuda(), k.cuda(), v.cuda(), lens.cuda(), backend=backend, **on_gpu)
    error = (got.double().cpu() - want).abs().max().item()
    print(f"{name}: {error:.1e}")
    if not error < 2e-2:
        raise SystemExit(f"{name}: wrong by {error}")


check("bf16", 1, (16, 4), 256, torch.bfloat16)
check("f32", 2, (8, 2), 64, torch.float32)
check("f32, 256", 1, (24, 4), 256, torch.float32)
check("triton f32", 2, (16, 1), 64, torch.float32)
check("f16 paged", 3, (14, 2), 64, torch.float16, page_size=16)
check("bf16 loaded", 96, (8, 8), 128, torch.bfloat16)
check("f32 loaded, paged", 80, (4, 4), 32, torch.float32, page_size=64)
check("bf16 window, softcap", 2, (8, 2), 128, torch.bfloat16, window=300, softcap=20.0)
check("f32 six heads a group", 2, (12, 2), 48, torch.float32, starts=torch.tensor([3, 700], dtype=torch.int32))
check("f16 sinks, mask", 2, (8, 2), 64, torch.float16, sinks=torch.zeros(8), mask=torch.arange(1200) % 3 > 0)
check("triton bf16", 1, (16, 4), 256, torch.bfloat16, backend="triton")
check("triton bf16 loaded, paged", 96, (8, 8), 128, torch.bfloat16, page_size=16, backend="triton")
check("bf16, sixteen heads a group", 2, (16, 1), 128, torch.bfloat16, page_size=528)
check("fp8 loaded, paged", 40, (32, 8), 128, torch.bfloat16, page_size=16, kv_dtype=torch.float8_e4m3fn)
check("fp8, sixteen heads, odd pages", 3, (32, 2), 128, torch.bfloat16, page_size=24, kv_dtype=torch.float8_e4m3fn)
print("ok")
