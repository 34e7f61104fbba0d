"""PagedKVCache: rows take pages from one pool, and may share them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..checks import as_integer
from ..device_checks import capturing
from .pages import PagePool
from .storage import KVCache, size

LAYOUTS = ("NHD", "HND")
NO_PAGE = -1


class PagedKVCache(KVCache):
    """A pool of [num_pages, page_size, num_kv_heads, head_dim], for `decode_attention(q, **cache.arguments())`.

    max_batch: rows; max_pages_per_row: columns of block_table [max_batch, max_pages_per_row] int32, -1 where a row has
    no page. layout: how the pool lies in memory, "NHD" as its shape says or "HND", heads before tokens; k_cache and
    v_cache are views of the same shape either way. Other arguments as of ContiguousKVCache.

    Which row has which page is decided on the host, by `reserve`, `fork`, `share_prefix` and `free`, which wait for the
    GPU only where they say so. `append` writes to what is reserved, so graphs that hold it replay without the host: a
    token's place is behind the row's last, on a page that the row has reserved and that no other row reads.
    The host's methods raise RuntimeError in the capture of a graph, MemoryError where pages or rows run out (with how
    many were wanted and free), and leave everything as it was when they raise. All use must be in one stream's order.
    """

    block_table: Tensor
    _bounds: Tensor

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_batch: int,
        max_pages_per_row: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layout: str = "NHD",
        k_scale: Tensor | float = 1.0,
        v_scale: Tensor | float = 1.0,
        check: bool = False,
    ) -> None:
        self.num_pages, self.page_size = size("num_pages", num_pages), size("page_size", page_size)
        columns = size("max_pages_per_row", max_pages_per_row)
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected {' or '.join(LAYOUTS)}, got {layout!r}")
        super().__init__(
            size("max_batch", max_batch),
            columns * self.page_size,
            num_kv_heads,
            head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=device,
            k_scale=k_scale,
            v_scale=v_scale,
            check=check,
        )
        self.layout = layout
        self.block_table = torch.full((self.batch, columns), NO_PAGE, dtype=torch.int32, device=self.device)
        self._bounds = torch.zeros(self.batch, 2, dtype=torch.int32, device=self.device)
        self._pool = PagePool(self.num_pages, self.page_size, self.batch, columns)
        self.k_cache, self.v_cache = self._allocate(self.num_pages, self.page_size, heads_first=layout == "HND")

    def allocate(self, tokens: int = 0) -> int:
        """Take the first free row into use, with room for `tokens` tokens. Raises MemoryError."""
        row = self._pool.unused_row()
        self.reserve(row, tokens)
        return row

    def reserve(self, row: int, tokens: int) -> None:
        """Pages for `tokens` tokens in all (not: more) in this row; takes the row into use if it is free.

        Pages stay with the row until it is freed; asking for what it has does nothing. After `fork` or `share_prefix`
        this is also where a shared, partly filled last page is copied, so both rows reserve before they go on. Raises
        TypeError, ValueError (more than a row's capacity), MemoryError, RuntimeError.
        """
        row, tokens = self._row(row), as_integer("tokens", tokens, "an int")
        self._refuse_capture("reserve")
        before, begins = self._state(row), row not in self._pool.rows
        copy = self._pool.reserve(row, tokens)
        if begins:
            self._begin(row, 0)
        if copy is not None:
            for cache in (self.k_cache, self.v_cache):
                cache[copy.target, : copy.tokens] = cache[copy.source, : copy.tokens]
        self._publish(row, before)

    def fork(self, src: int) -> int:
        """A free row that holds the same tokens on the same pages; waits for the GPU to read src's length.

        A partly filled last page stays src's to write; the new row copies it when it reserves more. Returns the new
        row. Raises ValueError (src is free), MemoryError (no free row), RuntimeError.
        """
        src = self._row(src, "src")
        self._refuse_capture("fork")
        self._pool.row(src, "src")
        row = self._pool.unused_row()
        self._share(src, row, int(self.seq_lens[src]))
        return row

    def share_prefix(self, src: int, dst: int, tokens: int) -> None:
        """Let the free row dst begin with src's first `tokens` tokens, on the same pages; waits for the GPU.

        Raises ValueError (src is free or shorter, dst is in use), RuntimeError.
        """
        src, dst = self._row(src, "src"), self._row(dst, "dst")
        tokens = as_integer("tokens", tokens, "an int")
        self._refuse_capture("share_prefix")
        self._pool.row(src, "src")
        held = int(self.seq_lens[src])
        if tokens > held:
            raise ValueError(f"tokens: expected at most the {held} tokens of row {src}, got {tokens}")
        self._share(src, dst, tokens)

    def free(self, row: int) -> None:
        """Give back the row's pages, each when no other row has it. Raises ValueError (it is free), RuntimeError."""
        row = self._row(row)
        self._refuse_capture("free")
        before = self._state(row)
        self._pool.free(row)
        self._begin(row, 0)
        self._publish(row, before)

    def truncate(self, row: int | None, length: int | Tensor) -> None:
        """As of ContiguousKVCache. Reserved pages stay, unless others read what the row would write next: then it gives
        those up and has to reserve again. A tensor, which is all that a capture takes, gives nothing up: what would be
        written where others read is then dropped, so go back into a shared prefix with ints."""
        if not isinstance(length, Tensor):
            self._refuse_capture("truncate")
            if row is not None:
                self._pool.row(self._row(row))
        super().truncate(row, length)
        if isinstance(length, Tensor):
            return
        for number in self.rows_in_use if row is None else (row,):
            before = self._state(number)
            self._pool.truncate(number, length)
            self._publish(number, before)

    def reset(self, rows: Iterable[int] | None = None) -> None:
        super().reset(self.rows_in_use if rows is None else rows)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"block_table": self.block_table}

    @property
    def free_pages(self) -> int:
        """Pages in no row."""
        return self._pool.free_pages

    @property
    def rows_in_use(self) -> list[int]:
        return sorted(self._pool.rows)

    def reserved(self, row: int) -> int:
        """Tokens that the row's pages hold; 0 for a free row."""
        return len(self._state(self._row(row))[0]) * self.page_size

    def _share(self, src: int, dst: int, tokens: int) -> None:
        before = self._state(src), self._state(dst)
        self._pool.share(src, dst, tokens)
        self._publish(src, before[0])
        self._publish(dst, before[1])
        self._begin(dst, tokens)

    def _begin(self, row: int, length: int) -> None:
        self.seq_lens[row].fill_(length)
        self.dropped[row].zero_()

    def _state(self, number: int) -> tuple[list[int], tuple[int, int]]:
        """(pages, first and end of the positions it may write) of a row as the device should have them."""
        row = self._pool.rows.get(number)
        if row is None:
            return [], (0, 0)
        return list(row.pages), (row.writable_from, len(row.pages) * self.page_size)

    def _publish(self, row: int, before: tuple[list[int], tuple[int, int]]) -> None:
        """Bring the device up to date with a row that was `before`."""
        (old, old_bounds), (pages, bounds) = before, self._state(row)
        same = next((i for i, pair in enumerate(zip(old, pages, strict=False)) if pair[0] != pair[1]), len(old))
        same = min(same, len(pages))
        if len(pages) > same:
            self._upload(self.block_table[row, same : len(pages)], pages[same:])
        if len(old) > len(pages):
            self.block_table[row, len(pages) : len(old)].fill_(NO_PAGE)
        if bounds != old_bounds:
            self._upload(self._bounds[row], list(bounds))

    def _upload(self, target: Tensor, values: list[int]) -> None:
        """Without waiting: torch keeps the pinned copy until the GPU has read it."""
        on_gpu = self.device.type == "cuda"
        target.copy_(torch.tensor(values, dtype=torch.int32, pin_memory=on_gpu), non_blocking=on_gpu)

    def _refuse_capture(self, what: str) -> None:
        if capturing(self.device):
            raise RuntimeError(f"{what}: expected no capture of a CUDA graph: pages are dealt out by the host")
