"""The GPU append kernel in the interpreter: the same bytes as append in torch, and nothing beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from caching import kv, tokens
from helpers import Guarded, int32, same_bits

from splitkv.backends import cpu_append, triton_append

F32, F16 = torch.float32, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORED = [F32, F16, E4M3, E5M2]
APPENDS = (cpu_append.append, triton_append.append)
HUGE, LEAST = 2**31 - 1, -(2**31)


def arguments_of(k_cache: Tensor, v_cache: Tensor, held: list[int], **rest: Any) -> dict[str, Any]:
    """What an append function takes besides k and v."""
    absent = dict.fromkeys(("rows", "lens", "block_table", "bounds"))
    scales = dict(k_scale=1.0, v_scale=1.0)
    dropped = torch.zeros(len(held), dtype=torch.int64)
    return dict(k_cache=k_cache, v_cache=v_cache, seq_lens=int32(held), dropped=dropped) | absent | scales | rest


def run_both(
    k: Tensor, v: Tensor, shape: tuple[int, ...], dtype: torch.dtype, held: list[int], **rest: Any
) -> dict[str, Any]:
    """Append by both functions; every byte they leave must be the same, and the guard bands intact. The arguments."""
    results = []
    for append in APPENDS:
        guards = [Guarded((*shape, *part.shape[2:]), dtype) for part in (k, v)]
        arguments = arguments_of(guards[0].tensor, guards[1].tensor, held, **rest)
        append(k=k, v=v, **arguments)
        assert all(guard.intact() for guard in guards)
        results.append((arguments, guards))
    (want, wanted_guards), (got, got_guards) = results
    for name in ("seq_lens", "dropped"):
        assert torch.equal(got[name], want[name]), name
    for a, b in zip(got_guards, wanted_guards, strict=True):
        assert same_bits(a.bytes, b.bytes)
    return got


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("given", [F32, F16], ids=str)
@pytest.mark.parametrize("n", [1, 3, 300])
def test_every_storage_type(n: int, given: torch.dtype, stored: torch.dtype) -> None:
    """300 tokens are more than one block's; a row then gets its length in a launch of its own."""
    k, v = (part.to(given) for part in kv(2, n, seed=n))
    target = run_both(k, v[..., :8], (2, n + 5), stored, [4, 1])
    assert target["seq_lens"].tolist() == [n + 4, n + 1]
    assert target["dropped"].tolist() == [0, 0]
    scaled = run_both(k, v, (2, n + 5), stored, [4, 1], k_scale=0.3, v_scale=torch.tensor([0.7, 1.3]))
    assert scaled["seq_lens"].tolist() == [n + 4, n + 1]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_is_torchs_for_every_f16_and_where_it_rounds(dtype: torch.dtype) -> None:
    """All f16 values, and f32 values beside every tie between neighbours. CASE-16: saturates, keeps NaN."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16).float()
    codes = torch.arange(0, 256, dtype=torch.uint8).view(dtype).float()
    values = codes[torch.isfinite(codes)].sort().values
    ties = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, side)) for side in (-math.inf, math.inf)]
    extremes = torch.tensor([500.0, 1000.0, 6e4, 1e30, -1e30, math.inf, -math.inf, 1e-30, -1e-45, 0.0, -0.0])
    x = torch.cat([halves, values, ties, *beside, extremes])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).view(1, -1, 1, 64)
    target = run_both(x, x, (1, x.shape[1]), dtype, [0])
    largest = torch.finfo(dtype).max
    want = x.clamp(-largest, largest).to(dtype)
    got = target["k_cache"]
    numbers = ~x.isnan()
    assert torch.equal(got.view(torch.uint8)[numbers], want.view(torch.uint8)[numbers])
    assert (got.view(torch.uint8)[~numbers] == 0x7F).all() and numbers.logical_not().any()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("n", [1, 20])
def test_pages(n: int, page_size: int) -> None:
    k, v = kv(3, n)
    columns = -(-40 // page_size)
    order = torch.randperm(3 * columns, generator=torch.Generator().manual_seed(1)).int().view(3, columns)
    bounds = int32([[0, 40], [5, 21], [0, 40]])
    target = run_both(k, v, (3 * columns, page_size), F32, [19, 7, 39], block_table=order, bounds=bounds)
    assert target["dropped"].tolist() == [0, max(n - 14, 0), n - 1]


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_lengths_and_pages_of_any_value_write_nothing_outside(layout: str) -> None:
    """CASE-15: hostile lengths, page ids, bounds and row numbers; other rows get what they should."""
    held = [HUGE, LEAST, -1, 8, 9, 3, 6, 0]
    rest: dict[str, Any] = {}
    shape = (8, 8)
    if layout == "paged":
        table = torch.arange(32, dtype=torch.int32).view(8, 4)
        table[5, 1], table[6, 3], table[7] = -1, 99, HUGE
        bounds = [[0, 8], [LEAST, HUGE], [-5, 8], [0, 8], [0, HUGE], [0, 8], [0, 8], [0, HUGE]]
        shape, rest = (32, 2), dict(block_table=table, bounds=int32(bounds))
    k, v = kv(8, 3)
    target = run_both(k, v, shape, F32, held, **rest)
    after = target["seq_lens"].tolist()
    assert after == [HUGE, LEAST, -1, 8, 9, 6, 8, 3]
    assert target["dropped"].tolist() == [3, 3, 3, 3, 3, 0, 1, 0]
    rows = torch.tensor([5, -1, 99, LEAST, 7])
    target = run_both(k[:5], v[:5], shape, F32, held, **rest | {"rows": rows, "lens": int32([2, 3, 3, 3, -4])})
    assert target["seq_lens"].tolist() == [*held[:5], 5, 6, 0]
    assert not target["dropped"].any()


def test_rows_and_ragged_lens() -> None:
    k, v = kv(3, 4)
    rows, lens = torch.tensor([4, 0, 2]), torch.tensor([4, 0, 9])
    target = run_both(k, v, (5, 16), F16, [1, 1, 1, 1, 1], rows=rows, lens=lens)
    assert target["seq_lens"].tolist() == [1, 1, 5, 1, 5]
    cache = target["k_cache"]
    assert torch.equal(cache[4, 1:5], k[0].half()) and torch.equal(cache[2, 1:5], k[2].half())


@pytest.mark.parametrize("stored", [F32, E4M3], ids=str)
def test_strides_of_what_is_given_and_of_the_pool(stored: torch.dtype) -> None:
    """CASE-04: K and V from one fused projection, heads before tokens; a pool with K and V interleaved per page."""
    fused = tokens(2, 5, heads=6)
    k, v = fused[:, :, 0:4:2], fused[:, :, 1:5:2]
    strided = k.transpose(1, 2).contiguous().transpose(1, 2), v
    table = int32([[3, 1], [0, 2]])
    dense = run_both(k.contiguous(), v.contiguous(), (4, 4), stored, [2, 3], block_table=table)
    for append in APPENDS:
        for pool in (torch.zeros(4, 2, 4, 2, 16), torch.zeros(4, 2, 2, 4, 16).transpose(2, 3)):
            pool = pool.to(stored)
            append(k=strided[0], v=strided[1], **arguments_of(pool[:, 0], pool[:, 1], [2, 3], block_table=table))
            for row in range(2):
                for position in range(2 + row, 7 + row):
                    page, offset = table[row, position // 4], position % 4
                    for i, name in enumerate(("k_cache", "v_cache")):
                        assert same_bits(pool[page, i, offset], dense[name][page, offset]), (row, position, name)


@pytest.mark.parametrize("dtype", [F32, E5M2], ids=str)
def test_wide_heads_and_latent_sizes(dtype: torch.dtype) -> None:
    """Head sizes that are no powers of two, up to those of latent attention, and more heads than a tile has rows."""
    for dims, heads in (((576, 512), 1), ((80, 16), 3), ((192, 128), 40)):
        k, v = tokens(1, 2, dim=dims[0], heads=heads), tokens(1, 2, dim=dims[1], heads=heads, seed=1)
        target = run_both(k, v, (1, 4), dtype, [1], k_scale=2.0)
        assert target["seq_lens"].tolist() == [3]


@pytest.mark.parametrize("append", APPENDS, ids=["torch", "triton"])
def test_offsets_are_64_bit(append: Any, check_overflow: None) -> None:
    """CASE-01: the page whose offset is 2**31, of a pool of which only that page is ever touched."""
    k, v = kv(1, 2, heads=8, dim=128)
    pool = torch.empty(65538, 2, 16, 8, 128, dtype=E4M3)
    pool[65535:65537] = 0
    append(k=k, v=v, **arguments_of(pool[:, 0], pool[:, 1], [15], block_table=int32([[65535, 65536]])))
    for i, part in enumerate((k, v)):
        assert same_bits(pool[65535, i, 15], cpu_append.to_storage(part[0, 0], 1.0, E4M3))
        assert same_bits(pool[65536, i, 0], cpu_append.to_storage(part[0, 1], 1.0, E4M3))


@pytest.mark.parametrize("append", APPENDS, ids=["torch", "triton"])
def test_offsets_of_rows_are_64_bit(append: Any, check_overflow: None) -> None:
    """CASE-01: a row that begins at 2**31, of a cache of which only a few bytes are ever touched."""
    k, v = kv(3, 1, dim=64)
    caches = [torch.empty(3, 2**23, 2, 64, dtype=E5M2) for _ in range(2)]
    append(k=k, v=v, **arguments_of(*caches, [0, 5, 2**23 - 1]))
    for cache, part in zip(caches, (k, v), strict=True):
        assert same_bits(cache[2, -1], cpu_append.to_storage(part[2, 0], 1.0, E5M2))
        assert same_bits(cache[1, 5], cpu_append.to_storage(part[1, 0], 1.0, E5M2))
