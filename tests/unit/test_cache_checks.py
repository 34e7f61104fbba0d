"""What the caches refuse, with the argument, what was expected and what came, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import contiguous, kv, make
from helpers import int32, same_bits

from splitkv import ContiguousKVCache, PagedKVCache, UnsupportedError


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(k=None), TypeError, "k: expected a torch.Tensor, got NoneType"),
        (dict(k=torch.zeros(2, 3, 2, 16, dtype=torch.float64)), TypeError, "k: expected dtype float32.* torch.float64"),
        (dict(v=torch.zeros(2, 3, 2, 16).half()), TypeError, "v: expected k's dtype torch.float32, got torch.float16"),
        (dict(k=torch.zeros(2, 3, 3, 16)), ValueError, r"k: expected \[rows, n, 2, 16\].* got shape \(2, 3, 3, 16\)"),
        (dict(v=torch.zeros(2, 3, 2, 32)), ValueError, r"v: expected \[rows, n, 2, 16\]"),
        (dict(v=torch.zeros(2, 4, 2, 16)), ValueError, r"v: expected k's \(2, 3\) rows and tokens, got \(2, 4\)"),
        (dict(k=torch.zeros(2, 3, 2, 32)[..., ::2]), ValueError, r"k: expected the last dimension contiguous"),
        (dict.fromkeys("kv", torch.zeros(2, 0, 2, 16)), ValueError, "k: expected at least 1 token"),
        (dict.fromkeys("kv", torch.zeros(1, 3, 2, 16)), ValueError, "k: expected 2 rows, got 1"),
        (dict.fromkeys("kv", torch.zeros(3, 3, 2, 16)) | dict(rows=[0, 1, 2]), ValueError, "k: expected up to 2 rows"),
        (dict(rows=1), TypeError, "rows: expected ints or a torch.Tensor, got int"),
        (dict(rows=[0, 2]), ValueError, r"rows: expected ints in 0..1, got 2"),
        (dict(rows=[0, -1]), ValueError, r"rows: expected at least 0, got -1"),
        (dict(rows=[1, 1]), ValueError, r"rows: expected all different, got \[1, 1\]"),
        (dict(rows=[1]), ValueError, r"rows: expected 2 ints, one for each of k's rows, got 1"),
        (dict(rows=torch.zeros(2)), TypeError, "rows: expected dtype int32, int64, got torch.float32"),
        (dict(rows=int32([0])), ValueError, r"rows: expected shape \(2,\).* got \(1,\)"),
        (dict(lens=[1, 4]), ValueError, r"lens: expected ints in 0..3, got 4"),
        (dict(lens=[1, 1.5]), TypeError, "lens: expected ints or a torch.Tensor, got float"),
        (dict(lens=torch.zeros(2, dtype=torch.int32, device="meta")), ValueError, "lens on meta, seq_lens on cpu"),
        (dict(k=torch.zeros(2, 3, 2, 16, device="meta")), ValueError, "k on meta, v on cpu"),
    ],
)
def test_append_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    for cache in (contiguous(2, 8), make("paged 16", 2, 16)):
        k, v = kv(2, 3)
        before = cache.k_cache.clone()
        with pytest.raises(error, match=message):
            cache.append(**dict(k=k, v=v) | change)
        assert same_bits(cache.k_cache, before) and not cache.seq_lens.any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(batch=0), ValueError, "batch: expected 1..2147483647, got 0"),
        (dict(capacity=2**31), ValueError, "capacity: expected 1..2147483647"),
        (dict(capacity=4.0), TypeError, "capacity: expected an int, got float"),
        (dict(num_kv_heads=True), TypeError, "num_kv_heads: expected an int, got bool"),
        (dict(head_dim=24), UnsupportedError, "supported head_dim is a multiple of 16"),
        (dict(v_head_dim=272), UnsupportedError, "v_cache: supported head_dim"),
        (dict(dtype=torch.float64), TypeError, "dtype: expected float32.* got torch.float64"),
        (dict(dtype=torch.uint8), TypeError, "dtype: expected float32"),
        (dict(k_scale=0.0), ValueError, "k_scale: expected a scale above 0, got 0.0"),
        (dict(v_scale=torch.ones(3)), ValueError, r"v_scale: expected a scalar or shape \(2,\)"),
        (dict(v_scale=torch.ones(2, device="meta")), ValueError, "v_scale on meta, seq_lens on cpu"),
        (dict(check=1), TypeError, "check: expected a bool, got int"),
    ],
)
def test_contiguous_cache_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(batch=1, capacity=8, num_kv_heads=2, head_dim=16, device="cpu") | change
    with pytest.raises(error, match=message):
        ContiguousKVCache(**arguments)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda cache: cache.truncate(0, -1), "length: expected at least 0, got -1"),
        (lambda cache: cache.truncate(5, 1), "row: expected 0..1, got 5"),
        (lambda cache: cache.truncate(0, int32([1, 1])), "length: expected an int, or with row None int32"),
        (lambda cache: cache.truncate(None, int32([1])), r"length: expected .* of shape \(2,\), got torch.int32"),
        (lambda cache: cache.free(-1), "row: expected 0..1, got -1"),
        (lambda cache: cache.reset([2]), "row: expected 0..1, got 2"),
    ],
)
def test_rows_and_lengths_are_checked(call: Any, message: str) -> None:
    for cache in (make("contiguous", 2, 16), make("paged 16", 2, 16)):
        cache.append(*kv(2, 3))
        with pytest.raises(ValueError, match=message):
            call(cache)
        assert cache.seq_lens.tolist() == [3, 3]


def test_what_the_host_does_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay the copy of the moment. Tensors for rows, lens and truncate are what a capture takes."""
    plain, cache = contiguous(2, 8), make("paged 7", 3, 14)
    for module in ("contiguous", "paged", "storage"):
        monkeypatch.setattr(f"splitkv.cache.{module}.capturing", lambda device: True)
    k, v = kv(2, 1)
    with pytest.raises(RuntimeError, match="grow: expected no capture"):
        plain.grow(10)
    with pytest.raises(RuntimeError, match="lens: expected a tensor on cpu"):
        plain.append(k, v, lens=[1, 1])
    plain.append(k, v, lens=int32([1, 1]))
    for call in (
        lambda: cache.reserve(0, 14),
        lambda: cache.fork(0),
        lambda: cache.free(0),
        lambda: cache.share_prefix(0, 1, 0),
        lambda: cache.truncate(0, 0),
    ):
        with pytest.raises(RuntimeError, match="expected no capture"):
            call()
    cache.append(k, v, torch.tensor([2, 0]))
    cache.truncate(None, int32([1, 0, 0]))
    assert cache.seq_lens.tolist() == [1, 0, 0] and cache.rows_in_use == [0, 1, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_pages=0), "num_pages: expected 1..2147483647, got 0"),
        (dict(page_size=0), "page_size: expected 1"),
        (dict(max_batch=0), "max_batch: expected 1"),
        (dict(max_pages_per_row=0), "max_pages_per_row: expected 1"),
        (dict(max_pages_per_row=2**30), "capacity: expected 1..2147483647, got 17179869184"),
        (dict(layout="nhd"), "layout: expected NHD or HND, got 'nhd'"),
    ],
)
def test_paged_cache_refuses(change: dict[str, Any], message: str) -> None:
    arguments = dict(num_pages=4, page_size=16, num_kv_heads=2, head_dim=16, max_batch=1, max_pages_per_row=4)
    with pytest.raises(ValueError, match=message):
        PagedKVCache(**arguments | change, device="cpu")
