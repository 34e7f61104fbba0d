"""Which row holds which page: a free list and reference counts on the host, in pure integers, no torch.

A page may be in several rows' lists. A row writes only from `writable_from` on, and every page from there on is
either its own or, for the last tokens of a shared prefix, one that nobody else writes: so no row changes what
another one reads. `PagedKVCache` mirrors this on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    """pages: in order. writable_from: first position this row may write. copy_at: its length when its last page, partly
    filled, is another's to write; that page is copied before this row gets room beyond."""

    pages: list[int] = field(default_factory=list)
    writable_from: int = 0
    copy_at: int | None = None


@dataclass(frozen=True)
class PageCopy:
    """Copy the first `tokens` tokens of page `source` to page `target`."""

    source: int
    target: int
    tokens: int


class PagePool:
    """num_pages pages of page_size tokens, for max_rows rows of at most max_pages_per_row pages.

    Every method either does all it says or raises and changes nothing: ValueError for a wrong request, MemoryError
    where pages or rows run out.
    """

    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_pages_per_row: int) -> None:
        self.page_size = page_size
        self.max_rows = max_rows
        self.capacity = max_pages_per_row * page_size
        self.rows: dict[int, Row] = {}
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the page freed last is taken first

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> list[int]:
        return [row for row in range(self.max_rows) if row not in self.rows]

    def row(self, number: int, name: str = "row") -> Row:
        if number not in self.rows:
            raise ValueError(f"{name}: expected a row in use, got {number}, which is free")
        return self.rows[number]

    def unused_row(self) -> int:
        for number in range(self.max_rows):
            if number not in self.rows:
                return number
        raise MemoryError(f"cache full: 1 row wanted, 0 of {self.max_rows} free")

    def reserve(self, number: int, tokens: int) -> PageCopy | None:
        """Room for `tokens` tokens in all; takes the row into use. Returns the copy that has to be made first."""
        if tokens > self.capacity:
            raise ValueError(f"tokens: expected at most {self.capacity} (the capacity of a row), got {tokens}")
        row = self.rows.get(number) or Row()
        grows = row.copy_at is not None and tokens > row.copy_at
        shared = grows and self.references[row.pages[-1]] > 1
        missing = max(-(-tokens // self.page_size) - len(row.pages), 0)
        wanted = missing + shared
        if wanted > len(self._free):
            raise MemoryError(
                f"cache full: {wanted} pages wanted for row {number} to hold {tokens} tokens, {len(self._free)} of "
                f"{len(self.references)} free"
            )
        self.rows[number] = row
        copy = None
        if grows and row.copy_at is not None:
            row.writable_from = row.copy_at // self.page_size * self.page_size
            if shared:
                copy = PageCopy(row.pages[-1], self._take(), row.copy_at - row.writable_from)
                self.references[copy.source] -= 1
                row.pages[-1] = copy.target
            row.copy_at = None
        row.pages += [self._take() for _ in range(missing)]
        return copy

    def share(self, source: int, target: int, tokens: int) -> None:
        """The free row `target` begins with the first `tokens` tokens of row `source`, on the same pages."""
        origin = self.row(source, "src")
        if target in self.rows:
            raise ValueError(f"dst: expected a free row, got {target}, which is in use")
        pages = origin.pages[: -(-tokens // self.page_size)]
        for page in pages:
            self.references[page] += 1
        origin.writable_from = max(origin.writable_from, tokens)
        self.rows[target] = self._sealed(pages, tokens)

    def truncate(self, number: int, length: int) -> None:
        """The row goes on at `length`. Pages stay reserved, unless it would write where other rows read."""
        row = self.row(number)
        if length >= (row.writable_from if row.copy_at is None else row.copy_at):
            return
        kept = -(-length // self.page_size)
        if all(self.references[page] == 1 for page in row.pages[length // self.page_size :]):
            row.writable_from = length // self.page_size * self.page_size
            row.copy_at = None
            return
        self._release(row.pages[kept:])
        self.rows[number] = self._sealed(row.pages[:kept], length)

    def free(self, number: int) -> None:
        self._release(self.row(number).pages)
        del self.rows[number]

    def _sealed(self, pages: list[int], length: int) -> Row:
        """A row of shared pages, with no place to write until it reserves some."""
        partly = length % self.page_size > 0
        return Row(pages, len(pages) * self.page_size, length if partly else None)

    def _take(self) -> int:
        page = self._free.pop()
        self.references[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                self._free.append(page)
