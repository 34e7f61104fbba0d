"""Both caches: what append stores and where, what is dropped, truncation and growth, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from caching import DIM, HEADS, assert_holds, contiguous, kv, make, paged, tokens
from helpers import INF, NAN, int32, same_bits
from torch import Tensor

from splitkv import PagedKVCache, decode_attention, reference_attention
from splitkv.backends.cpu_append import to_storage

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [F32, F16, BF16, E4M3, E5M2]
KINDS = ["contiguous", "paged 1", "paged 7", "paged 16 HND"]
both = pytest.mark.parametrize("kind", KINDS)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_equals_one_token_at_a_time(kind: str, dtype: torch.dtype) -> None:
    """Byte for byte, whatever the type and the cut."""
    k, v = kv(3, 40)
    scales = dict(k_scale=0.7, v_scale=torch.tensor([0.3, 2.0])) if dtype in (E4M3, E5M2) else {}
    at_once, one_by_one, in_parts = (make(kind, 3, 40, dtype=dtype, **scales) for _ in range(3))
    at_once.append(k, v)
    for i in range(40):
        one_by_one.append(k[:, i], v[:, i])
    for part in (slice(0, 1), slice(1, 17), slice(17, 40)):
        in_parts.append(k[:, part], v[:, part])
    for row in range(3):
        want = [to_storage(part[row], scales.get(f"{name}_scale", 1.0), dtype) for name, part in (("k", k), ("v", v))]
        for cache in (at_once, one_by_one, in_parts):
            assert_holds(cache, row, *want)


@both
def test_rows_of_different_lengths(kind: str) -> None:
    """lens says how many tokens of each row are real; rows says whose they are. Int, list and tensor alike."""
    k, v = kv(2, 6)
    for rows, lens in (([3, 1], [6, 2]), (torch.tensor([3, 1]), int32([6, 2])), (range(3, 0, -2), iter([6, 2]))):
        cache = make(kind, 4, 8)
        cache.append(k, v, rows, lens)
        cache.append(k[:, 5], v[:, 5], rows, [0, 1])
        assert cache.seq_lens.tolist() == [0, 3, 0, 6]
        assert_holds(cache, 3, k[0], v[0])
        assert_holds(cache, 1, torch.cat([k[1, :2], k[1, 5:]]), torch.cat([v[1, :2], v[1, 5:]]))


@both
@pytest.mark.parametrize("given", [F32, F16, BF16], ids=str)
def test_converts_as_torch_does(kind: str, given: torch.dtype) -> None:
    k, v = kv(1, 5, dtype=given)
    k[0, 0, 0, :3] = torch.tensor([INF, -INF, NAN])
    for dtype in (F32, F16, BF16):
        cache = make(kind, 1, 5, dtype=dtype)
        cache.append(k, v)
        assert_holds(cache, 0, k[0].to(dtype), v[0].to(dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_case_16_fp8_reads_back_what_was_written(dtype: torch.dtype) -> None:
    """CASE-16: exact values return; above the largest value, Inf too, is the largest; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    given = torch.tensor([1.0, 1.5, 3.0, 448.0, 500.0, 1000.0, 1e30, INF, -INF, -70000.0] + 6 * [0.0])
    cache = contiguous(1, 4, dtype=dtype)
    values = given.expand(1, 1, HEADS, DIM)
    cache.append(torch.zeros_like(values), values)
    out = decode_attention(torch.zeros(1, HEADS, DIM), **cache.arguments())
    exact = given.clamp(-largest, largest).to(dtype).float()
    assert torch.equal(out[0], exact.expand(HEADS, DIM)) and exact[:4].tolist() == [1.0, 1.5, 3.0, 448.0]
    assert exact[5:10].abs().tolist() == ([448.0] * 5 if dtype == E4M3 else [1024.0, *[57344.0] * 4])
    cache.append(*2 * [torch.tensor([NAN, -NAN]).repeat(DIM // 2).expand(1, HEADS, DIM)])
    assert (cache.v_cache[0, 1].view(torch.uint8) == 0x7F).all()


@both
@pytest.mark.parametrize("scale", ["number", "0-d", "per head"])
@pytest.mark.parametrize("dtype", [E4M3, BF16], ids=str)
def test_case_03_scales_are_applied_once_each_way(kind: str, dtype: torch.dtype, scale: str) -> None:
    """CASE-03: attention over the cache is close to that over the values given, and float64 over those stored."""
    make_scale: dict[str, Callable[..., Any]] = {
        "number": lambda a, b: a,
        "0-d": lambda a, b: torch.tensor(a),
        "per head": lambda a, b: torch.tensor([a, b]),
    }
    k_scale, v_scale = make_scale[scale](0.25, 1.0), make_scale[scale](0.5, 0.125)
    cache = make(kind, 2, 300, dtype=dtype, k_scale=k_scale, v_scale=v_scale)
    k, v = kv(2, 300)
    cache.append(k, v, lens=[37, 300])
    q = tokens(2, heads=8)
    out = decode_attention(q, **cache.arguments())
    assert (out - reference_attention(q, **cache.arguments())).abs().max() < 1e-5
    plain = reference_attention(q, k, v, int32([37, 300]))
    assert (out - plain).abs().max() < (0.1 if dtype == E4M3 else 0.02)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100, 528])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_attention_equals_contiguous(dtype: torch.dtype, page_size: int) -> None:
    """Byte for byte, with pages in any order and rows of different lengths; CASE-26: pages to spare are ignored."""
    lens, columns = [700, 0, 1, 528], 700 // page_size + 2
    k, v = kv(4, 700)
    plain = contiguous(4, 700, dtype=dtype, k_scale=0.5, v_scale=2.0)
    plain.append(k, v, lens=lens)
    q = tokens(4, 3, heads=6, dtype=F16)
    want = decode_attention(q, **plain.arguments(), return_lse=True)
    for layout in ("NHD", "HND"):
        cache = paged(4, columns, page_size, dtype=dtype, layout=layout, k_scale=0.5, v_scale=2.0)
        for step in range(0, 700 + page_size, 176):
            for row in (2, 0, 3, 1):
                cache.reserve(row, min(step + page_size, columns * page_size))
        for row in range(4):
            cache.reserve(row, 700)
        cache.append(k, v, lens=lens)
        assert cache.k_cache.is_contiguous() == (layout == "NHD" or page_size == 1)
        for got, expected in zip(decode_attention(q, **cache.arguments(), return_lse=True), want, strict=True):
            assert same_bits(got, expected)


@both
def test_case_31_leftover_bits_and_rows_that_come_and_go(kind: str) -> None:
    """CASE-31, CASE-20, CASE-28: a pool full of other people's bits; 60 steps of rows that end and begin again."""
    poisoned, zeroed = make(kind, 3, 48, dtype=BF16), make(kind, 3, 48, dtype=BF16)
    for name in ("k_cache", "v_cache"):
        bits = torch.tensor([0x7FC0, 0x7F80, -128, 0x7F7F], dtype=torch.int16)
        getattr(poisoned, name).view(torch.int16).copy_(bits.repeat(DIM // 4))
        getattr(zeroed, name).zero_()
    for step in range(60):
        k, v = kv(3, 1, seed=step)
        active = [1, step % 7 > 2, step % 5 > 0]
        answers = []
        for cache in (poisoned, zeroed):
            if step and step % 20 == 0:
                cache.free(step // 20 % 3)
                if isinstance(cache, PagedKVCache):
                    cache.reserve(step // 20 % 3, 30)
            cache.append(k, v, lens=int32(active))
            answers.append(decode_attention(tokens(3, heads=4, seed=99), **cache.arguments()))
        assert same_bits(*answers) and answers[0].isfinite().all(), step


@both
def test_tokens_without_a_place_are_dropped_and_counted(kind: str) -> None:
    cache = make(kind, 2, 7 if kind != "paged 16 HND" else 16)
    end = cache.capacity
    k, v = kv(2, end - 1)
    cache.append(k, v)
    more = kv(2, 3, seed=1)
    cache.append(*more, lens=[3, 1])
    assert cache.seq_lens.tolist() == [end, end] and cache.dropped.tolist() == [2, 0]
    assert_holds(cache, 0, torch.cat([k[0], more[0][0, :1]]), torch.cat([v[0], more[1][0, :1]]))
    cache.append(more[0][:, 0], more[1][:, 0])
    assert cache.seq_lens.tolist() == [end, end] and cache.dropped.tolist() == [3, 1]


@both
@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1, 49])
def test_lengths_outside_the_cache_write_nothing(kind: str, length: int) -> None:
    """CASE-15: the row stays as it is; the others go on."""
    cache = make(kind, 3, 48)
    cache.append(*kv(3, 4))
    cache.seq_lens[1] = length
    before = cache.k_cache.clone()
    k, v = kv(3, 2, seed=1)
    cache.append(k, v)
    assert cache.seq_lens.tolist() == [6, length, 6] and cache.dropped.tolist() == [0, 2, 0]
    assert (cache.k_cache.view(torch.int32) != before.view(torch.int32)).sum() == 2 * 2 * HEADS * DIM


@both
@pytest.mark.parametrize("how", ["check=True", "SPLITKV_CHECK"])
def test_check_refuses_what_would_be_dropped(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "SPLITKV_CHECK":
        monkeypatch.setenv("SPLITKV_CHECK", "1")
    cache = make(kind, 2, 6, check=how == "check=True")
    end = cache.capacity
    cache.append(*kv(2, end - 2))
    before, k, v = cache.k_cache.clone(), *kv(2, 3, seed=1)

    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            cache.append(k, v, *arguments)
        assert same_bits(cache.k_cache, before) and cache.seq_lens.tolist() == [end - 2, end - 2]
        assert not cache.dropped.any()

    refused(rf"3 more tokens in row 0, whose places are 0 to {end - 1}, got a length of {end - 2}")
    refused("3 more tokens in row 1", None, [2, 3])
    refused("rows: expected 0..1, got 7", torch.tensor([0, 7]), [1, 1])
    refused("rows: expected all different", torch.tensor([1, 1]), [1, 1])
    refused("lens: expected 0..3", None, int32([1, 4]))
    cache.append(k, v, lens=[2, 0])


@both
def test_truncate_reset_and_free(kind: str) -> None:
    cache = make(kind, 3, 20)
    k, v = kv(3, 20)
    cache.append(k, v, lens=[20, 9, 5])
    cache.truncate(1, 12)
    cache.truncate(0, 17)
    assert cache.seq_lens.tolist() == [17, 9, 5]
    address = cache.seq_lens.data_ptr()
    cache.truncate(None, int32([18, 3, -4]))
    assert cache.seq_lens.tolist() == [17, 3, 0] and cache.seq_lens.data_ptr() == address
    cache.append(k[1:, 19], v[1:, 19], [1, 2])
    assert_holds(cache, 1, torch.cat([k[1, :3], k[1, 19:]]), torch.cat([v[1, :3], v[1, 19:]]))
    cache.truncate(None, 4)
    assert cache.seq_lens.tolist() == [4, 4, 1]
    cache.reset([0])
    cache.free(1)
    assert cache.seq_lens.tolist() == [0, 0, 1]
    cache.reset()
    assert cache.seq_lens.tolist() == [0, 0, 0]


def test_grow_keeps_everything_and_says_so() -> None:
    cache = contiguous(2, 6, v_head_dim=32)
    k, v = tokens(2, 6), tokens(2, 6, dim=32, seed=1)
    cache.append(k, v, lens=[6, 4])
    lens, old = cache.seq_lens, cache.k_cache
    cache.grow(6)
    assert cache.generation == 0 and cache.k_cache is old
    cache.grow(9)
    assert cache.generation == 1 and cache.capacity == 9 and cache.seq_lens is lens
    cache.append(k[:, :3], v[:, :3], lens=[3, 1])
    assert_holds(cache, 0, torch.cat([k[0], k[0, :3]]), torch.cat([v[0], v[0, :3]]))
    assert cache.bytes == 2 * 9 * HEADS * (16 + 32) * 4
    with pytest.raises(ValueError, match=r"capacity: expected at least 9 .* got 8"):
        cache.grow(8)


def test_a_growth_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = contiguous(1, 6)
    cache.append(*kv(1, 6))
    before, empty = (cache.k_cache, cache.v_cache, cache.capacity, cache.generation), torch.empty
    made = []

    def second_one_fails(*shape: Any, **options: Any) -> Tensor:
        if made:
            raise torch.OutOfMemoryError("no memory")
        made.append(empty(*shape, **options))
        return made[0]

    monkeypatch.setattr(torch, "empty", second_one_fails)
    with pytest.raises(torch.OutOfMemoryError):
        cache.grow(60)
    assert before == (cache.k_cache, cache.v_cache, cache.capacity, cache.generation)


def test_speculation_writes_several_tokens_and_drops_some() -> None:
    """Draft tokens attend over themselves and what came before, then all but the accepted ones are forgotten."""
    drafted, plain = contiguous(1, 64), contiguous(1, 64)
    k, v = kv(1, 32)
    for cache in (drafted, plain):
        cache.append(k[:, :20], v[:, :20])
    wrong = kv(1, 4, seed=5)
    drafted.append(torch.cat([k[:, 20:22], wrong[0]], 1), torch.cat([v[:, 20:22], wrong[1]], 1))
    drafted.truncate(0, 22)
    plain.append(k[:, 20:22], v[:, 20:22])
    for cache in (drafted, plain):
        cache.append(k[:, 22:24], v[:, 22:24])
    q = tokens(1, 2, heads=4)
    assert same_bits(*(decode_attention(q, **cache.arguments()) for cache in (drafted, plain)))


def test_appended_tensors_keep_no_gradients() -> None:
    cache = contiguous(1, 4)
    k, v = (part.requires_grad_() for part in kv(1, 2))
    cache.append(k, v)
    assert not cache.k_cache.requires_grad and not cache.v_cache.requires_grad
    assert_holds(cache, 0, k[0].detach(), v[0].detach())
