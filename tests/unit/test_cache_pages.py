"""PagePool: which row has which page, against a model in which every row's tokens are a list."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitkv.cache.pages import PageCopy, PagePool

MAX_ROWS, PAGES_PER_ROW, NUM_PAGES = 4, 5, 11


def test_pages_are_taken_in_order_and_come_back_once() -> None:
    pool = PagePool(6, 4, 3, 6)
    assert pool.reserve(0, 9) is None and pool.rows[0].pages == [0, 1, 2]
    assert pool.reserve(0, 5) is None and pool.rows[0].pages == [0, 1, 2], "asking for less changes nothing"
    pool.reserve(1, 4)
    pool.free(0)
    assert pool.free_pages == 5
    with pytest.raises(ValueError, match="row: expected a row in use, got 0"):
        pool.free(0)
    assert pool.free_pages == 5


def test_a_full_pool_says_what_was_wanted_and_changes_nothing() -> None:
    pool = PagePool(3, 4, 3, 6)
    pool.reserve(0, 8)
    before = copy.deepcopy(vars(pool))
    with pytest.raises(MemoryError, match=r"2 pages wanted for row 1 to hold 5 tokens, 1 of 3 free"):
        pool.reserve(1, 5)
    with pytest.raises(ValueError, match="tokens: expected at most 24 .* got 25"):
        pool.reserve(0, 25)
    with pytest.raises(ValueError, match="dst: expected a free row, got 0"):
        pool.share(0, 0, 4)
    assert vars(pool) == before


def test_the_last_partly_filled_page_is_copied_only_when_written() -> None:
    pool = PagePool(8, 4, 3, 4)
    pool.reserve(0, 12)
    pool.share(0, 1, 6)
    assert pool.rows[1].pages == [0, 1] and pool.free_pages == 5
    assert pool.reserve(1, 6) is None, "nothing beyond what it holds: nothing to write"
    assert pool.reserve(1, 7) == PageCopy(1, 3, 2)
    assert pool.rows[1].pages == [0, 3] and pool.rows[1].writable_from == 4 and pool.references[:4] == [2, 1, 1, 1]


def test_whoever_is_last_keeps_the_page() -> None:
    pool = PagePool(3, 4, 3, 2)
    pool.reserve(0, 6)
    pool.share(0, 1, 6)
    pool.free(0)
    assert pool.reserve(1, 8) is None and pool.rows[1].pages == [0, 1] and pool.rows[1].writable_from == 4


def test_no_copy_between_whole_pages() -> None:
    pool = PagePool(4, 4, 2, 4)
    pool.reserve(0, 8)
    pool.share(0, 1, 8)
    assert pool.reserve(1, 9) is None and pool.rows[1].pages == [0, 1, 2] and pool.rows[1].writable_from == 8


def test_going_back_into_a_shared_prefix_gives_the_pages_up() -> None:
    pool = PagePool(8, 4, 2, 4)
    pool.reserve(0, 16)
    pool.share(0, 1, 6)
    pool.truncate(0, 7)
    assert pool.rows[0].pages == [0, 1, 2, 3], "6 and 7 are its own to write"
    pool.truncate(0, 5)
    assert pool.rows[0].pages == [0, 1] and pool.free_pages == 6
    assert pool.reserve(0, 6) == PageCopy(1, pool.rows[0].pages[1], 1)
    pool.free(1)
    pool.truncate(0, 2)
    assert pool.rows[0].writable_from == 0 and len(pool.rows[0].pages) == 2


class PoolMachine(RuleBasedStateMachine):
    """Rows write numbered tokens to pages, exactly where the pool lets them; each must read back its own list."""

    @rule(page_size=st.integers(1, 5))
    @precondition(lambda self: not hasattr(self, "pool"))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES, page_size, MAX_ROWS, PAGES_PER_ROW)
        self.memory = [[-1] * page_size for _ in range(NUM_PAGES)]
        self.want: dict[int, list[int]] = {}
        self.count = 0

    @rule(row=st.integers(0, MAX_ROWS - 1), tokens=st.integers(0, 5 * PAGES_PER_ROW + 2))
    @precondition(lambda self: hasattr(self, "pool"))
    def reserve(self, row: int, tokens: int) -> None:
        before = copy.deepcopy(vars(self.pool))
        try:
            made = self.pool.reserve(row, tokens)
        except (ValueError, MemoryError):
            assert vars(self.pool) == before
            return
        self.want.setdefault(row, [])
        if made:
            self.memory[made.target] = self.memory[made.source][: made.tokens] + [-1] * (self.page_size - made.tokens)
        if tokens > len(self.want[row]):
            assert self.pool.rows[row].writable_from <= len(self.want[row]), "it can go on"
            assert len(self.pool.rows[row].pages) * self.page_size >= tokens

    @rule(data=st.data(), tokens=st.integers(1, 8))
    @precondition(lambda self: getattr(self, "want", None))
    def write(self, data: st.DataObject, tokens: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.want)))
        row = self.pool.rows[number]
        for _ in range(tokens):
            position = len(self.want[number])
            if not row.writable_from <= position < len(row.pages) * self.page_size:
                break
            self.count += 1
            self.memory[row.pages[position // self.page_size]][position % self.page_size] = self.count
            self.want[number].append(self.count)

    @rule(data=st.data(), dst=st.integers(0, MAX_ROWS - 1))
    @precondition(lambda self: getattr(self, "want", None))
    def share(self, data: st.DataObject, dst: int) -> None:
        src = data.draw(st.sampled_from(sorted(self.want)))
        tokens = data.draw(st.integers(0, len(self.want[src])))
        if dst in self.want:
            with pytest.raises(ValueError, match="dst"):
                self.pool.share(src, dst, tokens)
            return
        self.pool.share(src, dst, tokens)
        self.want[dst] = self.want[src][:tokens]

    @rule(data=st.data())
    @precondition(lambda self: getattr(self, "want", None))
    def truncate(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.want)))
        length = data.draw(st.integers(0, len(self.want[number])))
        self.pool.truncate(number, length)
        del self.want[number][length:]

    @rule(row=st.integers(0, MAX_ROWS - 1))
    @precondition(lambda self: hasattr(self, "pool"))
    def free(self, row: int) -> None:
        if row not in self.want:
            with pytest.raises(ValueError, match="row"):
                self.pool.free(row)
            return
        self.pool.free(row)
        del self.want[row]

    @invariant()
    def rows_read_their_own_tokens(self) -> None:
        for number, want in getattr(self, "want", {}).items():
            pages = self.pool.rows[number].pages
            got = [self.memory[pages[i // self.page_size]][i % self.page_size] for i in range(len(want))]
            assert got == want, f"row {number}"

    @invariant()
    def every_page_is_counted(self) -> None:
        if hasattr(self, "pool"):
            listed = [page for row in self.pool.rows.values() for page in row.pages]
            assert self.pool.references == [listed.count(page) for page in range(NUM_PAGES)]
            free = self.pool._free
            assert len(set(free)) == len(free) and set(free) == set(range(NUM_PAGES)) - set(listed)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_sequence_keeps_every_rows_tokens = PoolMachine.TestCase
