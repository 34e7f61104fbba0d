"""The memory of `splitkv bench attention`: one arena per KV dtype, cut into the sets of each case.

A case of equal lengths has one memory and three views of it: contiguous rows, the same keys as shuffled pages, and
(other numbers, the same bytes) head-major rows. Shuffling pages within a row changes the order of keys and nothing
else, so one float64 reference serves both of the first. A ragged case has pages alone, shuffled over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from . import parity
from .attention_cases import AttentionCase
from .cases import random_values, torch_dtype
from .timing import Rotation

ROWS, HEAD_MAJOR = "rows", "head-major"
"""Which numbers a contender reads out of the same memory: those of `rows` and `pool`, or those of `head_major`."""


def arena_elements(case: AttentionCase, rotation: Rotation) -> tuple[int, int]:
    """(K elements, V elements) that the rotation of this case needs."""
    keys = (rotation.sets * case.set_keys + case.spare_keys) * case.num_kv_heads
    return keys * case.head_dim, keys * case.v_dim


class KVArena:
    """Random K and V of one dtype, flat; every case cuts its sets from the start of them."""

    def __init__(self, k_elements: int, v_elements: int, kv_dtype: str, device: str, seed: int) -> None:
        self.device, self.seed = device, seed
        self.k = random_values(k_elements, torch_dtype(kv_dtype), device, f"k {seed}")
        self.v = random_values(v_elements, torch_dtype(kv_dtype), device, f"v {seed}")


@dataclass(frozen=True)
class Pages:
    """block_table: [batch, max_pages] int32. indptr, indices, last_page_len: the same as one list per row, int32."""

    block_table: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class CaseTensors:
    """Everything that a contender is given for one case; `sets` KV sets, addressed by their number."""

    def __init__(self, case: AttentionCase, rotation: Rotation, arena: KVArena) -> None:
        self.case, self.sets, self.device, self._arena = case, rotation.sets, arena.device, arena
        generator = torch.Generator().manual_seed(arena.seed)
        q = torch.randn(case.batch, case.q_len, case.num_q_heads, case.head_dim, generator=generator)
        self.q4 = q.to(arena.device, torch_dtype(case.q_dtype))
        """[batch, q_len, num_q_heads, head_dim]"""
        self.q = self.q4.squeeze(1) if case.q_len == 1 else self.q4
        self.out_shape = (*self.q.shape[:-1], case.v_dim)
        self.seq_lens = torch.tensor(case.row_lens, dtype=torch.int32, device=arena.device)
        self.pages = _pages(case, arena.device, generator)
        self.causal = None if case.lens else causal_mask(case.q_len, case.seq_len, arena.device)

    def _flat(self, i: int, spare: bool) -> tuple[Tensor, Tensor]:
        """K and V of set i as [keys x heads, head_dim]."""
        case = self.case
        first = i * case.set_keys * case.num_kv_heads
        last = first + (case.set_keys + (case.spare_keys if spare else 0)) * case.num_kv_heads
        k = self._arena.k[first * case.head_dim : last * case.head_dim].view(-1, case.head_dim)
        v = self._arena.v[first * case.v_dim : last * case.v_dim].view(-1, case.v_dim)
        return k, v

    def memory(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of set i as flat memory, the whole of what it occupies."""
        k, v = self._flat(i, spare=False)
        return k.flatten(), v.flatten()

    def rows(self, i: int) -> tuple[Tensor, Tensor]:
        """Set i as [batch, row_keys, num_kv_heads, head_dim or v_head_dim]. Not for ragged cases."""
        shape = (self.case.batch, self.case.row_keys, self.case.num_kv_heads, -1)
        k, v = self._flat(i, spare=True)
        return k.view(shape), v.view(shape)

    def valid_rows(self, i: int) -> tuple[Tensor, Tensor]:
        """`rows` without what lies behind the length."""
        k, v = self.rows(i)
        return k[:, : self.case.seq_len], v[:, : self.case.seq_len]

    def pool(self, i: int) -> tuple[Tensor, Tensor]:
        """Set i as [num_pages, page, num_kv_heads, head_dim or v_head_dim], to be read through `pages`."""
        shape = (-1, self.case.pool_page, self.case.num_kv_heads)
        k, v = self._flat(i, spare=False)
        return k.view(*shape, self.case.head_dim), v.view(*shape, self.case.v_dim)

    def head_major(self, i: int) -> tuple[Tensor, Tensor]:
        """The memory of set i as contiguous [batch, num_kv_heads, seq_len, head_dim or v_head_dim]."""
        case = self.case
        k, v = self._flat(i, spare=False)
        vectors = case.batch * case.num_kv_heads * case.seq_len
        shape = (case.batch, case.num_kv_heads, case.seq_len, -1)
        return k[:vectors].view(shape), v[:vectors].view(shape)

    def row(self, b: int, layout: str = ROWS) -> tuple[Tensor, Tensor]:
        """Keys and values of row b of set 0 in order, [1, len, num_kv_heads, ...], fp8 decoded to q's dtype."""
        case, length = self.case, self.case.row_lens[b]
        if layout == HEAD_MAJOR:
            k, v = (part[b : b + 1].transpose(1, 2) for part in self.head_major(0))
        elif case.lens:
            ids = self.pages.block_table[b, : ceil(length / case.pool_page)].long()
            k, v = (pool[ids].flatten(0, 1)[None, :length] for pool in self.pool(0))
        else:
            k, v = (part[b : b + 1] for part in self.valid_rows(0))
        return (k.to(self.q.dtype), v.to(self.q.dtype)) if case.kv_dtype.startswith("fp8") else (k, v)

    def exact(self, layout: str = ROWS) -> Tensor:
        """float64 attention over set 0, row by row, in the shape of the contenders' outputs."""
        out = []
        for b, length in enumerate(self.case.row_lens):
            k, v = self.row(b, layout)
            ends = range(length - self.case.q_len + 1, length + 1)
            queries = [parity.float64_attention(self.q4[b : b + 1, n], k[:, :e], v[:, :e]) for n, e in enumerate(ends)]
            out.append(torch.stack(queries, dim=1))
        return torch.cat(out).reshape(self.out_shape)

    def plain(self) -> Tensor:
        """PyTorch's scaled_dot_product_attention in q's dtype on the same values, row by row."""
        attend = torch.nn.functional.scaled_dot_product_attention
        out = []
        for b, length in enumerate(self.case.row_lens):
            q, k, v = (part.transpose(1, 2) for part in (self.q4[b : b + 1], *self.row(b)))
            mask = causal_mask(self.case.q_len, length, self.device)
            out.append(attend(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2))
        return torch.cat(out).reshape(self.out_shape)


def causal_mask(q_len: int, seq_len: int, device: str) -> Tensor | None:
    """[q_len, seq_len] bool, True where query i of the last q_len keys may look; None for a single query."""
    if q_len == 1:
        return None
    return torch.ones(q_len, seq_len, dtype=torch.bool, device=device).tril(seq_len - q_len)


def _pages(case: AttentionCase, device: str, generator: torch.Generator) -> Pages:
    page = case.pool_page
    counts = [ceil(length / page) for length in case.row_lens]
    if case.lens:
        order = torch.randperm(sum(counts), generator=generator)
        ids = list(order.split(counts))
    else:
        per_row = case.set_keys // case.batch // page
        ids = [b * per_row + _shuffled(count, generator) for b, count in enumerate(counts)]
    table = torch.zeros(case.batch, ceil(case.row_keys / page), dtype=torch.int32)
    for b, row in enumerate(ids):
        table[b, : len(row)] = row
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(length - 1) % page + 1 for length in case.row_lens], dtype=torch.int32)
    indices = torch.cat(ids).to(torch.int32)
    return Pages(*(part.to(device) for part in (table, indptr, indices, last)))


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    """A permutation that leaves the last two pages, where the queries' own keys lie, in their place."""
    free = max(count - 2, 0)
    return torch.cat([torch.randperm(free, generator=generator), torch.arange(free, count)])
