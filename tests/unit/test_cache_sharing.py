"""PagedKVCache: forks, shared prefixes, pages that run out and come back. No row may change what another one reads."""

from __future__ import annotations

import pytest
import torch
from caching import assert_holds, kv, paged, tokens
from helpers import int32, same_bits
from torch import Tensor

from splitkv import PagedKVCache, decode_attention

F32, E4M3 = torch.float32, torch.float8_e4m3fn


def filled(length: int, page_size: int, *, batch: int = 3, **options: object) -> tuple[PagedKVCache, Tensor, Tensor]:
    """A cache whose row 0 holds `length` tokens, and those."""
    cache = paged(batch, -(-60 // page_size), page_size, **options)
    cache.reserve(0, length)
    k, v = kv(1, length)
    cache.append(k, v, [0])
    return cache, k[0], v[0]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("first", ["source", "fork"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_fork_goes_on_as_a_copy_would(length: int, first: str, layout: str) -> None:
    """Byte for byte, whichever writes first; the last partly filled page is copied, and only when written."""
    cache, k, v = filled(length, 16, layout=layout)
    pages = cache.free_pages
    fork = cache.fork(0)
    assert fork == 1 and cache.free_pages == pages, "a fork takes no page"
    order = (0, fork) if first == "source" else (fork, 0)
    more = {row: kv(1, 20, seed=row + 1) for row in order}
    for row in order:
        cache.reserve(row, length + 20)
        cache.append(*more[row], [row])
    for row in order:
        assert_holds(cache, row, torch.cat([k, more[row][0][0]]), torch.cat([v, more[row][1][0]]))
    copies = paged(2, 4, 16)
    for row in order:
        copies.reserve(row, 60)
        copies.append(k[None], v[None], [row])
        copies.append(*more[row], [row])
    q = tokens(2, heads=4)
    want = decode_attention(q, **copies.arguments())
    got = decode_attention(torch.cat([q, q[:1]]), **cache.arguments())
    assert same_bits(got[:2], want)
    whole = length // 16
    table = cache.block_table.tolist()
    assert table[0][:whole] == table[fork][:whole], "whole pages stay shared"
    assert not set(table[0][whole:3]) & set(table[fork][whole:3]) - {-1}


def test_forks_of_forks_and_freed_sources() -> None:
    cache, k, v = filled(21, 8, batch=4, dtype=E4M3)
    k, v = (part.clamp(-448, 448).to(E4M3) for part in (k, v))
    a = cache.fork(0)
    b = cache.fork(a)
    cache.free(0)
    c = cache.fork(b)
    more = {row: kv(1, 3, seed=row + 1) for row in (a, b, c)}
    for row in (b, a, c):
        cache.reserve(row, 24)
        cache.append(*more[row], [row])
    assert c == 0, "the freed row is the next one"
    for row in (a, b, c):
        assert_holds(cache, row, *(torch.cat([x, m[0].to(E4M3)]) for x, m in zip((k, v), more[row], strict=True)))
    assert cache.free_pages == cache.num_pages - (2 + 3)
    for row in (a, b, c):
        cache.free(row)
    assert cache.free_pages == cache.num_pages and (cache.block_table == -1).all() and not cache.seq_lens.any()


def test_a_prefix_is_stored_once() -> None:
    cache, k, v = filled(20, 8)
    before = cache.free_pages
    cache.share_prefix(0, 2, 12)
    assert cache.free_pages == before and cache.seq_lens.tolist() == [20, 0, 12]
    assert_holds(cache, 2, k[:12], v[:12])
    cache.reserve(2, 13)
    more = kv(1, 1, seed=1)
    cache.append(*more, [2])
    assert_holds(cache, 2, torch.cat([k[:12], more[0][0]]), torch.cat([v[:12], more[1][0]]))
    assert_holds(cache, 0, k, v)
    for call, message in (
        (lambda: cache.share_prefix(0, 1, 21), "tokens: expected at most the 20 tokens of row 0, got 21"),
        (lambda: cache.share_prefix(1, 2, 0), "src: expected a row in use, got 1"),
        (lambda: cache.share_prefix(0, 2, 1), "dst: expected a free row, got 2"),
        (lambda: cache.fork(1), "src: expected a row in use, got 1"),
        (lambda: cache.fork(9), "src: expected 0..2, got 9"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("length", [0, 3, 8, 9])
def test_lengths_set_back_by_the_device_overwrite_no_shared_prefix(length: int) -> None:
    """A graph or the caller may set seq_lens to anything: tokens over what others read are dropped."""
    cache, k, v = filled(20, 8)
    fork = cache.fork(0)
    for row in (0, fork):
        cache.reserve(row, 40)
    cache.truncate(None, int32([length, length, 0]))
    cache.append(*kv(2, 2, seed=1), [0, fork])
    assert cache.seq_lens.tolist()[:2] == [length, length] and cache.dropped.tolist()[:2] == [2, 2]
    cache.seq_lens.fill_(20)
    assert_holds(cache, 0, k, v)
    assert_holds(cache, fork, k, v)


def test_going_back_into_a_shared_prefix_and_on() -> None:
    cache, k, v = filled(20, 8)
    fork = cache.fork(0)
    cache.truncate(0, 11)
    cache.append(*kv(1, 1, seed=1), [0])
    assert cache.dropped[0] == 1 and cache.seq_lens[0] == 11, "it has to reserve first"
    cache.reserve(0, 15)
    more = kv(1, 4, seed=1)
    cache.append(*more, [0])
    assert_holds(cache, 0, torch.cat([k[:11], more[0][0]]), torch.cat([v[:11], more[1][0]]))
    assert_holds(cache, fork, k, v)


def test_full_says_how_many_pages_and_changes_nothing() -> None:
    cache, k, v = filled(20, 8, num_pages=5)
    fork = cache.fork(0)
    cache.reserve(2, 16)

    def state() -> tuple[object, ...]:
        bounds = cache._bounds.tolist()
        return cache.block_table.tolist(), bounds, cache.seq_lens.tolist(), cache.free_pages, cache.rows_in_use

    before = state()
    for call, message in (
        (lambda: cache.reserve(fork, 21), "1 pages wanted for row 1 to hold 21 tokens, 0 of 5 free"),
        (lambda: cache.reserve(0, 33), "2 pages wanted for row 0 to hold 33 tokens, 0 of 5 free"),
        (lambda: cache.fork(0), "cache full: 1 row wanted, 0 of 3 free"),
        (lambda: cache.allocate(1), "cache full: 1 row wanted, 0 of 3 free"),
    ):
        with pytest.raises(MemoryError, match=message):
            call()
        assert state() == before
    with pytest.raises(ValueError, match=r"tokens: expected at most 64 \(the capacity of a row\), got 65"):
        cache.reserve(0, 65)
    assert state() == before
    cache.free(2)
    cache.reserve(fork, 21)
    more = kv(1, 1, seed=1)
    cache.append(*more, [fork])
    assert_holds(cache, fork, torch.cat([k, more[0][0]]), torch.cat([v, more[1][0]]))
    assert_holds(cache, 0, k, v)


def test_free_twice_is_an_error_and_reuse_is_clean() -> None:
    cache, k, v = filled(20, 8, num_pages=3)
    cache.dropped[0] = 4
    cache.free(0)
    for call in (cache.free, lambda row: cache.truncate(row, 0), cache.fork):
        with pytest.raises(ValueError, match=r"(row|src): expected a row in use, got 0, which is free"):
            call(0)
    assert cache.free_pages == 3 and not cache.dropped.any() and cache.reserved(0) == 0
    row = cache.allocate(24)
    assert row == 0 and cache.reserved(row) == 24
    cache.append(*kv(1, 1, seed=3), [1])
    assert cache.dropped.tolist() == [0, 1, 0], "a row with no page gets nothing"
    cache.append(k[None, :5], v[None, :5], [row])
    assert_holds(cache, row, k[:5], v[:5])
    cache.free(row)
    cache.seq_lens.fill_(7)
    cache.reserve(1, 4)
    assert cache.seq_lens[1] == 0 and not cache.dropped.any(), "whatever happened to it while it was free"


def test_reserving_again_changes_nothing() -> None:
    cache, k, v = filled(20, 8)
    before = cache.block_table.clone(), cache._bounds.clone(), cache.free_pages
    for asked in (0, 7, 24, 20):
        cache.reserve(0, asked)
    assert torch.equal(cache.block_table, before[0]) and torch.equal(cache._bounds, before[1])
    assert cache.free_pages == before[2]
    cache.append(*kv(1, 5, seed=1), [0], [5])
    assert cache.seq_lens[0] == 24 and cache.dropped[0] == 1
