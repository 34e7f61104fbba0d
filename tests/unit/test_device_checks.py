"""What is refused for the device's sake: SPLITKV_CHECK=1 on lengths and page ids (CASE-15), captures, huge grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitkv import DecodeAttention, DecodeProblem, UnsupportedError, decode_attention
from splitkv.attention import MAX_GRID_ROWS

TABLE = torch.tensor([[0, 1, 9], [3, 2, 9]], dtype=torch.int32)  # 9 is outside, and needed by no row


def call(lens: list[int], table: torch.Tensor = TABLE, **options: Any) -> Any:
    q, pages = torch.randn(2, 4, 16), torch.randn(4, 8, 2, 16)
    return decode_attention(q, pages, pages, torch.tensor(lens, dtype=torch.int32), block_table=table, **options)


def with_page(row: int, column: int, page: int) -> torch.Tensor:
    table = TABLE.clone()
    table[row, column] = page
    return table


@pytest.mark.parametrize(
    ("lens", "table", "options", "words"),
    [
        ([25, 3], TABLE, {}, "seq_lens: expected 0..24 (the capacity), got 25 in row 0"),
        ([3, -1], TABLE, {}, "seq_lens: expected 0..24 (the capacity), got -1 in row 1"),
        ([17, 3], TABLE, {}, "block_table: expected page ids in 0..3, got 9 in row 0, column 2"),
        ([8, 9], with_page(1, 1, -1), {}, "block_table: expected page ids in 0..3, got -1 in row 1, column 1"),
        ([8, 16], with_page(1, 1, 4), {"window": 8}, "got 4 in row 1, column 1"),
    ],
)
def test_faults_are_named(
    lens: list[int], table: torch.Tensor, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.isfinite(call(lens, table, **options)).all()  # by default such keys are absent, and nothing else
    monkeypatch.setenv("SPLITKV_CHECK", "1")
    with pytest.raises(ValueError) as caught:
        call(lens, table, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("lens", "table", "options"),
    [
        ([16, 0], TABLE, {}),
        ([16, 16], with_page(1, 0, 7), {"window": 8}),
        ([16, 16], with_page(0, 0, 7), {"starts": torch.tensor([8, 0], dtype=torch.int32)}),
    ],
    ids=["entries past a row's length", "pages before the window", "pages before the start"],
)
def test_what_no_row_needs_is_no_fault(
    lens: list[int], table: torch.Tensor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = call_seeded(lens, table, **options)
    monkeypatch.setenv("SPLITKV_CHECK", "on")
    assert torch.equal(call_seeded(lens, table, **options), want)


def call_seeded(lens: list[int], table: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return call(lens, table, **options)  # type: ignore[no-any-return]


def test_a_capture_before_the_first_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = torch.randn(1, 2, 16), torch.randn(1, 40, 1, 16)
    attention = DecodeAttention(DecodeProblem(1, 2, 1, 16, capacity=40, q_dtype="f32", kv_dtype="f32"), device="cpu")
    monkeypatch.setattr("splitkv.decode_loop.capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="run: expected a first call before the capture"):
        attention.run(q, cache, cache, 40)
    monkeypatch.setattr("splitkv.decode_loop.capturing", lambda device: False)
    first = attention.run(q, cache, cache, 40)
    monkeypatch.setattr("splitkv.decode_loop.capturing", lambda device: True)
    assert torch.equal(attention.run(q, cache, cache, 40), first)  # type: ignore[arg-type]


def test_more_rows_than_a_grid_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = MAX_GRID_ROWS + 1
    q, cache = torch.zeros(1, 1, 16).expand(rows, 1, 16), torch.zeros(1, 1, 1, 16).expand(rows, 1, 1, 16)
    with pytest.raises(UnsupportedError, match=f"supports up to {MAX_GRID_ROWS} rows, got {rows}"):
        decode_attention(q, cache, cache, 1, backend="triton")
