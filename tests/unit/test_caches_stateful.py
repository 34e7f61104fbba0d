"""Any sequence of calls on a PagedKVCache leaves every row with exactly its own tokens, by a model of plain lists."""

from __future__ import annotations

import pytest
import torch
from caching import DIM, HEADS, held, paged
from helpers import int32
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

ROWS, COLUMNS, NUM_PAGES = 4, 4, 10
row_numbers = st.integers(0, ROWS - 1)


class CacheMachine(RuleBasedStateMachine):
    """Every token is a number, stored in all its elements; V holds its negative. `want` is the model: a row's tokens.
    `room` is what reserve promised: so many tokens find a place, until the row goes back into what others read."""

    @initialize(page_size=st.integers(1, 5), layout=st.sampled_from(["NHD", "HND"]))
    def start(self, page_size: int, layout: str) -> None:
        self.cache = paged(ROWS, COLUMNS, page_size, num_pages=NUM_PAGES, layout=layout)
        self.want: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}
        self.count = 0

    def in_use(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.want)))

    @rule(row=row_numbers, tokens=st.integers(0, 22))
    def reserve(self, row: int, tokens: int) -> None:
        try:
            self.cache.reserve(row, tokens)
        except (ValueError, MemoryError):
            return
        held_now = len(self.want.setdefault(row, []))
        self.room[row] = max(self.room.get(row, 0), tokens if tokens > held_now else 0)

    @rule(counts=st.lists(st.integers(0, 6), min_size=ROWS, max_size=ROWS), order=st.permutations(range(ROWS)))
    def append(self, counts: list[int], order: list[int]) -> None:
        """Ragged, all rows at once in any order, whether or not they have room."""
        n = max(*counts, 1)
        numbers = torch.arange(self.count, self.count + ROWS * n).view(ROWS, n)
        self.count += ROWS * n
        k = numbers[:, :, None, None].expand(ROWS, n, HEADS, DIM).float()
        lens, dropped = self.cache.seq_lens.clone(), self.cache.dropped.clone()
        self.cache.append(k, -k, order, int32(counts))
        for i, row in enumerate(order):
            taken = int(self.cache.seq_lens[row] - lens[row])
            promised = self.room.get(row, 0) - len(self.want.get(row, []))
            assert min(counts[i], max(promised, 0)) <= taken <= counts[i], row
            assert self.cache.dropped[row] == dropped[row] + counts[i] - taken, row
            if taken:
                self.want[row] += numbers[i, :taken].tolist()

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src = self.in_use(data)
        if len(self.want) == ROWS:
            with pytest.raises(MemoryError, match="1 row wanted, 0 of 4 free"):
                self.cache.fork(src)
            return
        row = self.cache.fork(src)
        assert row not in self.want
        self.want[row], self.room[row] = self.want[src].copy(), 0

    @precondition(lambda self: self.want)
    @rule(data=st.data(), dst=row_numbers)
    def share_prefix(self, data: st.DataObject, dst: int) -> None:
        src = self.in_use(data)
        tokens = data.draw(st.integers(0, len(self.want[src]) + 1))
        if dst in self.want or tokens > len(self.want[src]):
            with pytest.raises(ValueError, match=r"dst|tokens"):
                self.cache.share_prefix(src, dst, tokens)
            return
        self.cache.share_prefix(src, dst, tokens)
        self.want[dst], self.room[dst] = self.want[src][:tokens], 0

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = self.in_use(data)
        length = data.draw(st.integers(0, len(self.want[row])))
        shared = any(set(self.want[row]) & set(other) for number, other in self.want.items() if number != row)
        self.cache.truncate(row, length)
        del self.want[row][length:]
        if shared:
            self.room[row] = 0

    @rule(row=row_numbers)
    def free(self, row: int) -> None:
        if row not in self.want:
            with pytest.raises(ValueError, match="expected a row in use"):
                self.cache.free(row)
            return
        self.cache.free(row)
        del self.want[row], self.room[row]

    @invariant()
    def rows_hold_their_own(self) -> None:
        for row in range(ROWS):
            want = self.want.get(row, [])
            assert self.cache.seq_lens[row] == len(want)
            expected = torch.tensor(want, dtype=torch.float32)[:, None, None].expand(len(want), HEADS, DIM)
            k, v = held(self.cache, row)
            assert torch.equal(k, expected) and torch.equal(v, -expected), row

    @invariant()
    def device_and_host_agree(self) -> None:
        table = self.cache.block_table
        pages = {page for page in table.flatten().tolist() if page >= 0}
        assert self.cache.free_pages == NUM_PAGES - len(pages)
        assert sorted(self.want) == self.cache.rows_in_use
        for row in range(ROWS):
            assert int((table[row] >= 0).sum()) * self.cache.page_size == self.cache.reserved(row)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_any_sequence_of_calls = CacheMachine.TestCase
