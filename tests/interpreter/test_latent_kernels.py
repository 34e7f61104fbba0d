"""Latent attention's step kernels, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from splitkv.models.config import Latent
from splitkv.models.latent_kernels import absorb, values
from splitkv.models.state import LatentKVCache

CAPACITY = 6
LENGTHS = [0, 3, CAPACITY]  # the last is full
SIZES = {
    "published": (2, Latent(None, 512, 64, 128, 128)),
    "small": (3, Latent(None, 48, 16, 24, 40)),
}  # fmt: skip


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_before_and_behind_attention(name: str, rows: int, dtype: torch.dtype) -> None:
    heads, sizes = SIZES[name]
    draw = torch.Generator().manual_seed(5)
    wide, kept = heads * (sizes.nope_dim + sizes.rope_dim), sizes.rank + sizes.rope_dim
    projected = torch.randn(rows, wide + kept + 3, generator=draw).to(dtype)
    queries, latents = projected[:, :wide], projected[:, wide : wide + kept]
    kv_b = torch.randn(heads, sizes.nope_dim + sizes.v_dim, sizes.rank, generator=draw).mul_(0.1).to(dtype)
    weight = torch.randn(sizes.rank, generator=draw).to(dtype)
    angles = torch.randn(rows, 1, sizes.rope_dim // 2, generator=draw)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor(LENGTHS[:rows], dtype=torch.int32)
    cache = LatentKVCache(rows, CAPACITY, 1, kept, v_head_dim=sizes.rank, dtype=dtype, device="cpu")
    cache.k_cache.fill_(7.0)
    cache.seq_lens.copy_(positions)

    q = absorb(queries, latents, kv_b, (weight, 0.1), (cos, sin), positions, cache, sizes)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    each = queries.double().unflatten(-1, (heads, -1))
    absorbed = torch.einsum("bhn,hnr->bhr", each[..., : sizes.nope_dim], kv_b[:, : sizes.nope_dim].double())
    expected = torch.cat([absorbed, turned(each[..., sizes.nope_dim :], cos.double(), sin.double())], -1)
    assert (q - expected).abs().max() < tolerance * expected.abs().max()

    latent, key = latents.double().split((sizes.rank, sizes.rope_dim), -1)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 0.1) * weight
    stored = torch.cat([latent, turned(key[:, None], cos.double(), sin.double())[:, 0]], -1)
    for row, position in enumerate(LENGTHS[:rows]):
        others = [t for t in range(CAPACITY) if t != position]
        assert (cache.k_cache[row, others] == 7.0).all()
        if position < CAPACITY:
            assert (cache.k_cache[row, position, 0] - stored[row]).abs().max() < tolerance * stored.abs().max()
    assert cache.seq_lens.tolist() == [min(n + 1, CAPACITY) for n in LENGTHS[:rows]]
    assert cache.dropped.tolist() == [int(n == CAPACITY) for n in LENGTHS[:rows]]

    attended = q[..., : sizes.rank].contiguous()
    expected = torch.einsum("bhr,hvr->bhv", attended.double(), kv_b[:, sizes.nope_dim :].double()).flatten(-2)
    assert (values(attended, kv_b, sizes) - expected).abs().max() < tolerance * expected.abs().max()
