"""CASE-21: append under torch.compile. What is written must neither be lost, nor reordered, nor copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import DIM, HEADS, assert_holds, kv, make, paged, tokens
from helpers import int32, same_bits
from torch import Tensor

from splitkv import decode_attention


@pytest.mark.parametrize("kind", ["contiguous", "paged 7", "paged 16 HND"])
@pytest.mark.parametrize("per_head", [False, True])
def test_case_21_a_compiled_step_reads_what_it_wrote(kind: str, per_head: bool) -> None:
    """Two layers on one cache: each attends to what the one before it appended, and appends what it saw."""
    scale = torch.tensor([0.5, 2.0]) if per_head else 0.5
    compiled, eager = (make(kind, 2, 48, k_scale=scale, v_scale=2.0) for _ in range(2))
    addresses = compiled.k_cache.data_ptr(), compiled.seq_lens.data_ptr()

    def step(cache: Any, q: Tensor, lens: Tensor) -> Tensor:
        for _ in range(2):
            cache.append(q[:, :HEADS], q[:, HEADS:], lens=lens)
            q = q + decode_attention(q, **cache.arguments())
        return q

    fast = torch.compile(step, backend="aot_eager", fullgraph=True)
    for i in range(4):
        q, lens = tokens(2, heads=2 * HEADS, seed=i), int32([1, i % 2])
        assert same_bits(fast(compiled, q, lens), step(eager, q, lens)), i
    assert compiled.seq_lens.tolist() == eager.seq_lens.tolist() == [8, 4]
    assert same_bits(compiled.k_cache, eager.k_cache) and same_bits(compiled.v_cache, eager.v_cache)
    assert addresses == (compiled.k_cache.data_ptr(), compiled.seq_lens.data_ptr())


def test_compiled_append_of_what_has_gradients() -> None:
    """A model whose weights want gradients, run without no_grad: the cache keeps none."""
    cache = make("contiguous", 1, 8)
    k, v = (part.requires_grad_() for part in kv(1, 2))
    torch.compile(lambda a, b: cache.append(a * 2, b), backend="aot_eager", fullgraph=True)(k, v)
    assert not cache.k_cache.requires_grad
    assert_holds(cache, 0, k[0].detach() * 2, v[0].detach())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_opcheck(layout: str) -> None:
    cache = paged(2, 3, 4, layout=layout)
    cache.reserve(0, 9)
    cache.k_cache.zero_()  # opcheck compares what it finds, and NaN equals nothing
    cache.v_cache.zero_()
    k, v = kv(2, 3)
    torch.library.opcheck(
        torch.ops.splitkv.append.default,
        (k, v, cache.k_cache, cache.v_cache, cache.seq_lens, cache.dropped, int32([1, 0]), int32([2, 3]),
         cache.block_table, cache._bounds, torch.ones(HEADS), None, 1.0, 0.5),
    )  # fmt: skip
    assert cache.k_cache.shape[-1] == DIM
