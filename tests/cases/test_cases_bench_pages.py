"""Case 11 for `splitkv bench attention`: its paged cases read private pages in no order that helps."""

from __future__ import annotations

from typing import Any

import pytest
import test_cases_tools as tools
import torch
from planting import caught

from splitkv.bench import attention_data as data
from splitkv.bench.timing import Rotation

RAGGED = (100, 257, 640, 33)


def check_pages(lens: tuple[int, ...]) -> None:
    """No page is in two rows or twice in one, and most are not followed by their neighbour."""
    case = data.AttentionCase("pages", len(RAGGED), 4, 2, 64, 640, "bf16", page_size=16, lens=lens)
    pages = data._pages(case, "cpu", torch.Generator().manual_seed(0))
    counts = [-(-length // 16) for length in case.row_lens]
    used = torch.cat([pages.block_table[row, :count] for row, count in enumerate(counts)])
    assert len(used.unique()) == len(used) == sum(counts), "rows share pages"
    neighbours = int((used.diff() == 1).sum())
    assert neighbours < len(used) // 4, f"{neighbours} of {len(used)} pages follow the one before"


@pytest.mark.parametrize("lens", [(), RAGGED], ids=["equal", "ragged"])
def test_case_11_pages_are_private_and_shuffled(lens: tuple[int, ...]) -> None:
    check_pages(lens)


@pytest.mark.parametrize("fault", ["shared", "ascending"])
def test_case_11_catches_pages_of_a_best_case(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = data._pages

    def best_case(case: Any, *others: object) -> object:
        pages = right(case, *others)
        if fault == "shared":
            pages.block_table[1:] = pages.block_table[:1]
        else:
            pages.block_table[:] = torch.arange(pages.block_table.numel()).view_as(pages.block_table)
        return pages

    monkeypatch.setattr(data, "_pages", best_case)
    with caught():
        check_pages(())


def test_case_11_sets_of_a_rotation_share_no_byte() -> None:
    case = data.AttentionCase("pages", 4, 4, 2, 64, 640, "bf16", page_size=16)
    arena = data.KVArena(case.set_keys * 3 * 2 * 64, case.set_keys * 3 * 2 * 64, "bf16", "cpu", 0)
    tensors = data.CaseTensors(case, Rotation(3, 3 * case.set_keys * case.key_bytes, cold=True), arena)
    assert tools.distinct_bytes([tensors.pool(i) for i in range(3)]) == 3 * case.set_keys * case.key_bytes
