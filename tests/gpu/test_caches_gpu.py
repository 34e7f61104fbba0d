"""Caches on the GPU: the CPU's bytes, torch's fp8, graphs, no allocation and no wait, long prefills, forks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import Cache, contiguous, held, kv, make, paged, tokens
from helpers import int32, same_bits
from test_graphs import capture
from torch import Tensor

from splitkv import DecodeAttention, DecodeProblem, PagedKVCache, decode_attention
from splitkv.backends.cpu_append import to_storage

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [F32, F16, BF16, E4M3, E5M2]
both = pytest.mark.parametrize("kind", ["contiguous", "paged 16", "paged 7 HND"])


def on_gpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


def twins(kind: str, batch: int, capacity: int, **options: Any) -> tuple[Cache, Cache]:
    """The same cache on the CPU and on the GPU."""
    to = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
    return make(kind, batch, capacity, device="cpu", **options), make(kind, batch, capacity, device="cuda", **to)


def assert_alike(got: Cache, want: Cache) -> None:
    for name in ("seq_lens", "dropped"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    for row in range(want.batch):
        for a, b in zip(held(got, row), held(want, row), strict=True):
            assert same_bits(a.cpu(), b), row


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("given", [F32, BF16], ids=str)
def test_the_same_bytes_as_on_the_cpu(given: torch.dtype, stored: torch.dtype) -> None:
    """One token, a few, and enough for many blocks a row; scaled by a number and by one for each head."""
    for kind in ("contiguous", "paged 7 HND"):
        for scales in ({}, dict(k_scale=0.3, v_scale=torch.tensor([0.7, 1.3]))):
            cpu, gpu = twins(kind, 3, 1500, dtype=stored, **scales)
            for step, n in enumerate((1, 5, 1400, 1, 200)):
                k, v = kv(3, n, seed=step, dtype=given)
                lens = int32([n, n // 2, 1])
                cpu.append(k, v, lens=lens)
                gpu.append(*on_gpu(k, v), lens=lens.cuda())
            assert cpu.dropped.any()
            assert_alike(gpu, cpu)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_is_torchs_on_this_gpu(dtype: torch.dtype) -> None:
    """CASE-16: every 16-bit value of both kinds, against torch's conversion of the clamped value on the GPU."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    largest = torch.finfo(dtype).max
    for given in (F16, BF16):
        x = bits.view(given).view(1, -1, 2, 16)
        cache = contiguous(1, x.shape[1], dtype=dtype, device="cuda")
        cache.append(x, x)
        numbers = ~x.isnan()[0]
        want = x.float().clamp(-largest, largest).to(dtype)[0]
        for stored in (cache.k_cache[0], cache.v_cache[0]):
            assert torch.equal(stored.view(torch.uint8)[numbers], want.view(torch.uint8)[numbers])
            assert (stored.view(torch.uint8)[~numbers] == 0x7F).all()


@both
def test_long_prefill_equals_one_token_at_a_time(kind: str) -> None:
    """Many blocks of a row read its length while it must not move; fifty times, as a race may be rare."""
    k, v = on_gpu(*kv(4, 600, dtype=BF16))
    slow = make(kind, 4, 30_000, dtype=BF16, device="cuda")
    for i in range(600):
        slow.append(k[:, i], v[:, i])
    want = [part.clone() for row in range(4) for part in held(slow, row)]
    fast = make(kind, 4, 30_000, dtype=BF16, device="cuda")
    for _ in range(50):
        fast.append(k, v)
    assert fast.seq_lens.tolist() == [30_000] * 4 and not fast.dropped.any()
    got = [part for row in range(4) for part in held(fast, row)]
    for whole, part in zip(got, want, strict=True):
        assert all(same_bits(whole[i : i + 600], part) for i in range(0, 30_000, 600))


@both
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_a_graph_appends_and_attends_at_every_replay(kind: str, dtype: torch.dtype) -> None:
    """One graph from the first token to past the end: eager's bytes, no allocation; then tokens are dropped."""
    steps = 70
    graphed, eager = (make(kind, 3, 64, dtype=dtype, device="cuda", k_scale=0.5) for _ in range(2))
    k, v = on_gpu(*kv(3, steps, dtype=BF16))
    q = tokens(3, heads=8, dtype=BF16).cuda()
    new_k, new_v, active = torch.zeros_like(k[:, 0]), torch.zeros_like(v[:, 0]), int32([1, 0, 1], "cuda")
    problem = DecodeProblem(
        3, 8, 2, 16, capacity=graphed.capacity, kv_dtype="bf16" if dtype == BF16 else "fp8_e4m3",
        page_size=graphed.page_size if isinstance(graphed, PagedKVCache) else None,
    )  # fmt: skip
    attention, out = DecodeAttention(problem, device="cuda"), torch.empty_like(q)

    def step() -> None:
        graphed.append(new_k, new_v, lens=active)
        attention.run(q, **graphed.arguments(), out=out)

    graph = capture(step)
    graphed.reset()  # what the warm-up wrote
    for i in range(steps):
        new_k.copy_(k[:, i])
        new_v.copy_(v[:, i])
        active[1] = i % 3 > 0
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
        eager.append(k[:, i], v[:, i], lens=active)
        assert torch.equal(out, decode_attention(q, **eager.arguments())), i
    assert_alike(graphed, _moved(eager))
    assert graphed.dropped.tolist() == [max(steps - graphed.capacity, 0), 0, max(steps - graphed.capacity, 0)]


def _moved(cache: Cache) -> Any:
    """The cache with its tensors on the CPU, for assert_alike."""
    for name in ("seq_lens", "dropped", "k_cache", "v_cache", "block_table"):
        if getattr(cache, name) is not None:
            setattr(cache, name, getattr(cache, name).cpu())
    return cache


def test_speculation_in_a_graph() -> None:
    """Four draft tokens, attention of four queries, and back to what the device accepted, without the host."""
    cache = make("paged 16", 2, 256, dtype=BF16, device="cuda")
    plain = contiguous(2, 256, dtype=BF16, device="cuda")
    k, v = on_gpu(*kv(2, 4, dtype=BF16))
    q = tokens(2, 4, heads=4, dtype=BF16).cuda()
    kept, out = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.empty_like(q)

    def step() -> None:
        cache.append(k, v)
        out.copy_(decode_attention(q, **cache.arguments()))
        cache.truncate(None, kept)

    graph = capture(step)
    cache.reset()
    want = [0, 0]
    for i in range(40):
        accepted = [i % 5, (i * 3) % 5]
        k.copy_(tokens(2, 4, seed=2 * i).to(BF16))
        v.copy_(tokens(2, 4, seed=2 * i + 1).to(BF16))
        want = [length + more for length, more in zip(want, accepted, strict=True)]
        kept.copy_(int32(want))
        graph.replay()
        plain.append(k, v)
        assert torch.equal(out, decode_attention(q, **plain.arguments())), i
        plain.truncate(None, kept)
        assert cache.seq_lens.tolist() == plain.seq_lens.tolist() == want


@both
def test_append_allocates_nothing_and_waits_for_nothing(kind: str) -> None:
    cache = make(kind, 2, 1500, dtype=E4M3, device="cuda", k_scale=0.5)
    calls = [(*on_gpu(*kv(2, n, dtype=BF16)), int32([1, 0], "cuda"), int32([n, 1], "cuda")) for n in (1, 700)]
    for call in calls:
        cache.append(*call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            cache.append(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert cache.seq_lens.tolist() == [4, 1402]


def test_the_host_deals_out_pages_without_waiting() -> None:
    """reserve and free while the GPU is busy: their uploads must not be overwritten before they are read."""
    cache = paged(4, 64, 4, dtype=BF16, device="cuda")

    def deal() -> None:
        torch.cuda._sleep(1_000_000_000)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for turn in range(20):
                for row in reversed(cache.rows_in_use):
                    cache.free(row)
                rows = [cache.allocate(4 * (8 + turn)) for _ in range(4)]
                for row in rows[turn % 4 :]:
                    cache.reserve(row, 200)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    deal()  # here torch allocates the pinned memory that it keeps
    torch.cuda.synchronize()
    deal()
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    for row in range(4):
        pages, bounds = cache._state(row)
        assert cache.block_table[row].tolist() == pages + [-1] * (64 - len(pages))
        assert cache._bounds[row].tolist() == list(bounds)
    assert sorted(page for page in cache.block_table.flatten().tolist() if page >= 0) == sorted(
        set(range(256)) - set(cache._pool._free)
    )


@pytest.mark.parametrize("page_size", [1, 16, 64, 528])
@pytest.mark.parametrize("dtype", [F32, BF16, E4M3], ids=str)
def test_paged_attention_equals_contiguous_on_the_gpu(dtype: torch.dtype, page_size: int) -> None:
    lens = int32([4000, 0, 1, 528], "cuda")
    k, v = on_gpu(*kv(4, 4000, dtype=F32 if dtype == F32 else BF16))
    q = tokens(4, heads=8, dtype=F32 if dtype == F32 else BF16).cuda()
    caches = [make(kind, 4, 4100, dtype=dtype, device="cuda") for kind in ("contiguous", f"paged {page_size}")]
    for cache in caches:
        cache.append(k, v, lens=lens)
    want, got = (decode_attention(q, **cache.arguments(), return_lse=True) for cache in caches)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_a_fork_goes_on_as_a_copy_would_on_the_gpu() -> None:
    cache = paged(2, 40, 16, dtype=BF16, device="cuda")
    cache.reserve(0, 300)
    k, v = on_gpu(*kv(1, 300, dtype=BF16))
    cache.append(k, v, [0])
    fork = cache.fork(0)
    assert fork == 1 and cache.free_pages == 80 - 19
    more = {row: on_gpu(*kv(1, 50, seed=row + 1, dtype=BF16)) for row in (0, 1)}
    for row in (0, 1):
        cache.reserve(row, 350)
        cache.append(*more[row], [row])
    for row in (0, 1):
        for got, *parts in zip(held(cache, row), (k, v), more[row], strict=True):
            assert same_bits(got, torch.cat(parts, 1)[0])


def test_offsets_past_2_31_on_the_gpu() -> None:
    """CASE-01: the last pages of a pool of more than 2**31 elements."""
    cache = PagedKVCache(
        131_080, 16, 8, 128, max_batch=2, max_pages_per_row=131_076, dtype=E4M3, device="cuda", layout="HND"
    )
    assert cache.k_cache.numel() > 2**31
    cache.reserve(0, 131_075 * 16)
    k, v = on_gpu(*kv(2, 40, heads=8, dim=128))
    cache.reserve(1, 40)
    cache.seq_lens[0] = 131_075 * 16 - 40
    cache.append(k, v)
    pages = cache.block_table[0, 131_072:131_075].long()
    want = to_storage(k[0], 1.0, E4M3)
    assert same_bits(cache.k_cache[pages].flatten(0, 1)[8:], want)
    assert same_bits(held(cache, 1)[1], to_storage(v[1], 1.0, E4M3))


@both
def test_hostile_lengths_write_nothing_on_the_gpu(kind: str) -> None:
    """CASE-15: any length on the device; the pool's other bytes stay."""
    cpu, gpu = twins(kind, 6, 64, dtype=F32)
    lens = int32([-1, 2**31 - 1, -(2**31), 65, 3, 63])
    for n in (1, 9):
        for cache in (cpu, gpu):
            cache.seq_lens.copy_(lens)
        k, v = kv(6, n)
        cpu.append(k, v)
        gpu.append(*on_gpu(k, v))
        assert torch.equal(gpu.seq_lens.cpu(), cpu.seq_lens) and torch.equal(gpu.dropped.cpu(), cpu.dropped)
        for a, b in ((gpu.k_cache, cpu.k_cache), (gpu.v_cache, cpu.v_cache)):
            assert same_bits(a.cpu(), b)


def test_row_numbers_outside_the_cache_disturb_no_row() -> None:
    """Blocks of rows that are none run beside row 0's, and must not set its length back."""
    cache = contiguous(64, 500, dtype=BF16, device="cuda")
    rows = int32([0, *[-1, 64, 2**31 - 1] * 21], "cuda")
    k, v = on_gpu(*kv(64, 1, dtype=BF16))
    for _ in range(500):
        cache.append(k, v, rows)
    assert cache.seq_lens.tolist() == [500] + [0] * 63 and not cache.dropped.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_cache_on_another_device_than_the_current_one() -> None:
    """CASE-09."""
    cache = make("paged 16", 2, 64, dtype=BF16, device="cuda:1")
    k, v = (part.to("cuda:1") for part in kv(2, 20, dtype=BF16))
    before = torch.cuda.memory_allocated(0)
    with torch.cuda.device(0):
        cache.append(k, v)
        fork_source = cache.seq_lens.tolist()
    assert fork_source == [20, 20] and torch.cuda.memory_allocated(0) == before
    assert same_bits(held(cache, 1)[0], k[1])
