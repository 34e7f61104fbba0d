"""Failures that others had, by their number, where the right answer is known without a reference.

With q = 0 every visible key weighs the same: out is the mean of their values, lse the logarithm of their number.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

Decode = Any  # conftest.Decode
HEADS, KV_HEADS, DIM = 4, 2, 16


def zero_q(batch: int = 1, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return torch.zeros(batch, heads, dim)


def caches(keys: int, batch: int = 1, kv_heads: int = KV_HEADS, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    return tuple(torch.randn(batch, keys, kv_heads, dim, generator=generator) for _ in range(2))  # type: ignore[return-value]


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mean_of(values: torch.Tensor) -> torch.Tensor:
    """[rows of keys, kv_heads, dim] -> what every query head of its group gets."""
    return values.double().mean(0).repeat_interleave(HEADS // KV_HEADS, 0)


def assert_close(got: torch.Tensor, want: Any, tolerance: float = 1e-5) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - torch.as_tensor(want, dtype=torch.float64)).abs().max() <= tolerance


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("which", ["K", "V", "both"])
def test_case_02_poison_past_the_end(decode: Decode, which: str, paged: bool) -> None:
    """0 x NaN is NaN: what lies past a row's length must not be multiplied by its weight of 0."""
    q = torch.randn(4, HEADS, 16)
    k, v = caches(128, batch=4)
    ends, want = [32, 61, 96, 13], None
    for fill in (0.0, math.nan, math.inf, 6e4):
        keys, values = k.clone(), v.clone()
        for row, end in enumerate(ends):
            if which != "V":
                keys[row, end:] = fill
            if which != "K":
                values[row, end:] = fill
        options = {}
        if paged:
            keys, values = keys.view(32, 16, KV_HEADS, DIM), values.view(32, 16, KV_HEADS, DIM)
            options["block_table"] = torch.arange(32, dtype=torch.int32).view(4, 8)
        got = decode(q, keys, values, lens(*ends), return_lse=True, policy="3", **options)
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), fill


@pytest.mark.parametrize("window", [1, 16, 17, 96, 400])
@pytest.mark.parametrize("length", [95, 96, 97, 300])
def test_case_08_the_window_counts_the_current_key(decode: Decode, window: int, length: int) -> None:
    k, _ = caches(300)
    for marked in (length - window - 1, length - window, length - 1):
        if marked < 0:
            continue
        v = torch.zeros_like(k)
        v[:, marked] = 1
        seen = marked >= length - window
        for policy in ("auto", "5"):
            out = decode(zero_q(), k, v, length, window=window, policy=policy)
            assert_close(out, 1 / min(window, length) if seen else 0.0)


@pytest.mark.parametrize("past", [-1, 0, 1, 904, 258_048])
def test_case_08_long_rows_and_windows(decode_here: Decode, past: int) -> None:
    """Windows of 4,096 in rows from one key shorter to 262,144; in the interpreter a sixteenth of it."""
    window, length = (256, 256 + past // 16) if decode_here.interpreted else (4096, 4096 + past)
    k = torch.zeros(1, length, 1, DIM)
    for marked in {max(length - window - 1, 0), max(length - window, 0), length - 1}:
        v = torch.zeros_like(k)
        v[:, marked] = 1
        out = decode_here(zero_q(heads=1), k, v, length, window=window)
        assert_close(out, 1 / min(window, length) if marked >= length - window else 0.0)


@pytest.mark.parametrize("splits", [1, 2, 8, 16])
def test_case_10_a_sink_counts_once(decode: Decode, splits: int) -> None:
    k, v = caches(512)
    sinks = torch.full((HEADS,), math.log(64))
    options: dict[str, Any] = dict(window=64, policy=str(splits))
    out, lse = decode(zero_q(), k, v, 512, sinks=sinks, return_lse=True, **options)
    assert_close(out[0], 0.5 * mean_of(v[0, -64:]))
    assert_close(lse, math.log(128))
    without = decode(zero_q(), k, v, 512, return_lse=True, **options)
    never = decode(zero_q(), k, v, 512, sinks=torch.full((HEADS,), -math.inf), return_lse=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(never, without, strict=True))
    out, lse = decode(zero_q(), k, v, 0, sinks=sinks, return_lse=True, **options)
    assert not out.any() and bool((lse == -math.inf).all())
    capped = decode(zero_q(), k, v, 512, sinks=torch.full((HEADS,), 30.0), softcap=5.0, **options)
    assert_close(capped[0], mean_of(v[0, -64:]) * 64 / (64 + math.exp(30.0)))  # the cap never applies to a sink


@pytest.mark.parametrize("splits", [4, 16, 64])
def test_case_14_splits_that_see_nothing(decode: Decode, splits: int) -> None:
    """Their parts must not be read from a workspace that nobody wrote."""
    k, v = caches(1024, batch=4)
    rows = lens(1, 0, 5, 1024)
    size = 4 * HEADS * splits * (DIM + 2) * 4
    results = []
    for byte in (0xFF, 0x7F, 0):
        workspace = torch.full((size,), byte, dtype=torch.uint8)
        results.append(decode(zero_q(4), k, v, rows, policy=str(min(splits, 16)), workspace=workspace, window=128))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    for row, length in enumerate(rows.tolist()):
        want = mean_of(v[row, max(length - 128, 0) : length]) if length else 0.0
        assert_close(results[0][row], want)


@pytest.mark.parametrize("policy", ["2", "4"])
def test_case_14_splits_that_no_query_sees_whole(decode: Decode, policy: str) -> None:
    """Three causal queries in rows of 1, 3 and 2 keys, and rows one key longer than whole tiles."""
    lengths = lens(1, 3, 2, 65, 129)
    k, v = caches(129, batch=5)
    q = torch.zeros(5, 3, HEADS, DIM)
    results = []
    for byte in (0xFF, 0x7F, 0):
        workspace = torch.full((5 * 3 * HEADS * 4 * (DIM + 2) * 4,), byte, dtype=torch.uint8)
        results.append(decode(q, k, v, lengths, policy=policy, workspace=workspace))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    for row, length in enumerate(lengths.tolist()):
        for query, end in enumerate(range(length - 2, length + 1)):
            assert_close(results[0][row, query], mean_of(v[row, :end]) if end > 0 else 0.0)


LENGTHS = [*range(1, 19), 31, 32, 33, 47, 48, 49, *range(62, 67), 95, 96, 97, 127, 128, 129, 255, 256, 257, 300]


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_case_17_lengths_that_end_inside_a_tile(decode: Decode, paged: bool) -> None:
    check_lengths(decode, LENGTHS if decode.interpreted else [*range(1, 301)], paged)


def check_lengths(decode: Decode, lengths: list[int], paged: bool) -> None:
    """Padding lanes in the denominator show as a ratio of tile to length."""
    batch = len(lengths)
    k, v = caches(304)
    options = {}
    keys, values = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    if paged:
        keys, values = k.view(19, 16, KV_HEADS, DIM), v.view(19, 16, KV_HEADS, DIM)
        options["block_table"] = torch.arange(19, dtype=torch.int32).expand(batch, 19).contiguous()
    out, lse = decode(zero_q(batch), 1e3 * keys, values, lens(*lengths), return_lse=True, **options)
    for row, length in enumerate(lengths):
        assert_close(out[row], mean_of(v[0, :length]))
        assert_close(lse[row], math.log(length))


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("size", [512, 1024, 2048, 262_143])
def test_case_17_lengths_that_end_beside_a_split(decode_here: Decode, size: int, beyond: int) -> None:
    """In the interpreter a window leaves the last 100 keys, which end at the same places."""
    length, window = size + beyond, 100 if decode_here.interpreted else 0
    k, v = caches(length, kv_heads=1)
    out, lse = decode_here(zero_q(heads=1), 1e3 * k, v, length, window=window, return_lse=True)
    assert_close(out[0], v[0, -window:].double().mean(0))
    assert_close(lse, math.log(window or length), 1e-4)


@pytest.mark.parametrize("policy", ["1", "4"])
def test_case_18_the_cap_comes_before_the_mask(decode: Decode, policy: str) -> None:
    """tanh turns a masked -inf into -cap, a finite score."""
    logits = torch.tensor([40.0, -40.0, 0.0] + [40.0] * 100)
    q = torch.zeros(1, 1, 64)
    q[..., 0] = 1.0
    k = torch.zeros(1, 103, 1, 64)
    k[0, :, 0, 0] = logits * 8  # the scale is 1/8
    v = torch.zeros(1, 103, 1, 64)
    v[0, :3, 0, :3] = torch.eye(3)
    v[0, 3:] = 1e3
    hidden = {"by the length": (3, None), "by a mask": (103, torch.arange(103) < 3)}
    for cap in (5.0, 50.0, 1e-3):
        capped = cap * torch.tanh(logits[:3].double() / cap)
        for length, mask in hidden.values():
            out, lse = decode(q, k, v, length, mask=mask, softcap=cap, policy=policy, return_lse=True)
            assert_close(out[0, 0, :3], capped.softmax(0))
            assert_close(lse, capped.logsumexp(0))
    off = decode(q, k, v, 3, policy=policy)
    assert torch.equal(decode(q, k, v, 3, softcap=0.0, policy=policy), off)
    assert not torch.equal(decode(q, k, v, 3, softcap=50.0, policy=policy), off)


@pytest.mark.parametrize("policy", ["auto", "1", "8"])
def test_case_20_rows_of_nothing(decode: Decode, policy: str) -> None:
    k, v = caches(300, batch=4)
    q = torch.randn(4, HEADS, DIM)
    written = torch.full_like(q, math.nan)
    out, lse = decode(q, k, v, lens(7, 0, 300, 0), policy=policy, return_lse=True, out=written)
    assert not out[[1, 3]].any() and bool((lse[[1, 3]] == -math.inf).all())
    kept = decode(q[[0, 2]], k[[0, 2]], v[[0, 2]], lens(7, 300), policy=policy, return_lse=True)
    assert torch.equal(out[[0, 2]], kept[0]) and torch.equal(lse[[0, 2]], kept[1])
    assert not decode(q, k, v, lens(0, 0, 0, 0), policy=policy).any()
    empty_pool = torch.empty(0, 16, KV_HEADS, DIM)
    no_pages = torch.empty(4, 0, dtype=torch.int32)
    assert not decode(q, empty_pool, empty_pool, lens(0, 0, 0, 0), block_table=no_pages, policy=policy).any()


@pytest.mark.parametrize("length", [16, 32, 48, 256, 33])
def test_case_26_a_page_allocated_ahead_is_not_read(decode: Decode, length: int) -> None:
    """seq_lens is the only authority on length, also where it is a whole number of pages."""
    pages = -(-length // 16)
    k, v = caches(16 * (pages + 1))
    k, v = (cache.view(pages + 1, 16, KV_HEADS, DIM).clone() for cache in (k, v))
    k[pages], v[pages] = math.nan, math.nan
    table = torch.arange(pages + 1, dtype=torch.int32).unsqueeze(0)
    ahead = decode(zero_q(), k, v, lens(length), block_table=table)
    assert_close(ahead[0], mean_of(v.flatten(0, 1)[:length]))
    assert torch.equal(ahead, decode(zero_q(), k, v, lens(length), block_table=table[:, :pages].contiguous()))


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (6, 1), (8, 1), (4, 2), (5, 5)], ids=str)
def test_case_27_per_rank_head_counts(decode: Decode, heads: tuple[int, int]) -> None:
    num_q_heads, num_kv_heads = heads
    _, v = caches(33, kv_heads=num_kv_heads)
    v[:] = torch.arange(1.0, num_kv_heads + 1)[:, None]
    out, lse = decode(torch.randn(1, num_q_heads, DIM), torch.randn_like(v), v, 33, return_lse=True)
    assert out.shape == (1, num_q_heads, DIM) and lse.shape == (1, num_q_heads)
    assert_close(out[0, :, 0], torch.arange(num_q_heads) // (num_q_heads // num_kv_heads) + 1)


@pytest.mark.parametrize(("batch", "length"), [(256, 33), (1, 262_144)])
def test_case_27_per_rank_head_counts_at_size(decode_here: Decode, batch: int, length: int) -> None:
    """Six query heads on one KV head; in the interpreter fewer rows, and a window of the long one."""
    batch, window = (min(batch, 5), 100) if decode_here.interpreted else (batch, 0)
    k, v = caches(length, kv_heads=1)
    keys, values = (cache.expand(batch, -1, -1, -1) for cache in (k, v))
    out, lse = decode_here(zero_q(batch, heads=6), keys, values, length, window=window, return_lse=True)
    assert_close(out, v[0, -window:].double().mean(0).expand(batch, 6, DIM))
    assert_close(lse, math.log(min(window or length, length)), 1e-4)


@pytest.mark.parametrize("heads", [(7, 2), (2, 4), (4, 0), (0, 1)], ids=str)
def test_case_27_head_counts_that_do_not_divide(decode: Decode, heads: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"{heads[1]} KV heads, got {heads[0]} query heads"):
        decode(zero_q(heads=heads[0]), *caches(8, kv_heads=heads[1]), 8)


def test_case_31_recurrent_state_left_in_the_pages(decode: Decode) -> None:
    """Hybrid models hand pages from f32 state to KV: its halves are NaN and Inf in 16 bits and in fp8."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (*decode.dtypes_16, torch.float8_e4m3fn):
        state = torch.randint(-(2**31), 2**31, (6 * 16 * KV_HEADS * DIM // 4 * dtype.itemsize,), generator=generator)
        state[::3], state[1::3] = 0x7FC07F80, 0x7F7FFF80 - 2**32
        dirty = state.to(torch.int32).view(torch.uint8).view(dtype).view(6, 16, KV_HEADS, DIM).clone()
        clean = torch.zeros_like(dirty)
        q_dtype = torch.float16 if dtype.itemsize == 1 else dtype
        tokens = torch.randn(13, KV_HEADS, DIM, generator=generator).to(dtype)
        q = torch.randn(2, HEADS, DIM, generator=generator).to(q_dtype)
        table = torch.tensor([[4, 2], [5, 5]], dtype=torch.int32)
        for pool in (dirty, clean):
            pool[4, :13] = tokens
        results = [decode(q, pool, pool, lens(13, 0), block_table=table) for pool in (dirty, clean)]
        assert torch.equal(*results) and torch.isfinite(results[0]).all()
