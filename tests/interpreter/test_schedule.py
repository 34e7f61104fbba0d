"""One answer: whichever blocks compute which splits, and whatever is beside a row, its bytes are the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from helpers import (
    NAN,
    Guarded,
    assert_parity,
    assert_same,
    int32,
    launch_plan,
    make_inputs,
    page_order,
    poison_tails,
    reschedule,
    to_pages,
    with_small_splits,
)

from splitkv import DecodeProblem, DeviceSpec, SplitPolicy, decode_attention, plan_decode, reference_attention
from splitkv.backends import triton_launch
from splitkv.backends.triton_tile import row_bounds
from splitkv.plan import DecodePlan
from splitkv.policy import MAX_AUTO_SPLITS

F32, F16 = torch.float32, torch.float16
NAMES = {F32: "f32", F16: "f16"}
both_dtypes = pytest.mark.parametrize("dtype", [F32, F16], ids=NAMES.get)

LENS = [16 * 129 - 7, 0, 16 * 64, 16 * 17, 1, 16 * 5 - 1, 16]
"""129, 0, 64, 17, 1, 5 and 1 splits of 16 keys: three blocks of the merge, one, and none."""


def plan_of(batch: int, capacity: int, dtype: torch.dtype, target: int = 256, **shape: int) -> DecodePlan:
    """One split per block, splits of 16 keys and longer where they would be more than `target`."""
    shape = dict(num_q_heads=1, num_kv_heads=1, head_dim=16) | shape
    problem = DecodeProblem(batch, **shape, capacity=capacity, q_dtype=NAMES[dtype], kv_dtype=NAMES[dtype])
    return reschedule(with_small_splits(plan_decode(problem, DeviceSpec.named("h200"), backend="triton"), target), 1, 1)


def attend(*tensors: Any, backend: str = "triton", **options: Any) -> tuple[Tensor, Tensor]:
    return decode_attention(*tensors, return_lse=True, backend=backend, **options)  # type: ignore[return-value]


def rows_of(tensors: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(tensor[list(rows)] for tensor in tensors)


@cache
def batch_and_answer(dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """(q, k, v) of LENS and its (out, lse), one split per block."""
    q, k, v = make_inputs(len(LENS), 1, 1, 16, max(LENS), dtype=dtype)
    k, v = poison_tails(k, LENS, NAN), poison_tails(v, LENS, NAN)
    answer = launch_plan(plan_of(len(LENS), max(LENS), dtype), q, k, v, int32(LENS))
    assert_parity(answer, reference_attention(q, k, v, int32(LENS), return_lse=True))  # type: ignore[arg-type]
    return (q, k, v), answer


# ---- the schedule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule, dtype",
    [((4, 1), F32), ((4, 9), F16), ((16, 1), F32), ((16, 7), F16), ((16, 60), F32)],
    ids=lambda value: NAMES.get(value, str(value)),
)
def test_the_schedule_changes_no_byte(schedule: tuple[int, int], dtype: torch.dtype) -> None:
    """(max_run, target_units): from as few units as may be to runs of 1, 4 and 16."""
    (q, k, v), want = batch_and_answer(dtype)
    plan = reschedule(plan_of(len(LENS), max(LENS), dtype), *schedule)
    assert_same(launch_plan(plan, q, k, v, int32(LENS)), want)


def test_rows_of_one_launch_have_runs_of_several_lengths() -> None:
    """Splits by length, 16 to 64 keys: one load makes runs of 1, 4 and 16 splits side by side."""
    lens = [64 * 20, 32 * 20, 16 * 20, 0, 5]
    q, k, v = make_inputs(len(lens), 1, 1, 16, max(lens))
    plan = plan_of(len(lens), max(lens), F32, target=20)
    want = launch_plan(plan, q, k, v, int32(lens))
    assert_parity(want, reference_attention(q, k, v, int32(lens), return_lse=True))  # type: ignore[arg-type]
    for target_units in (1, 16, 45, 80):
        other = reschedule(plan, 16, target_units)
        assert_same(launch_plan(other, q, k, v, int32(lens)), want, target_units)


@both_dtypes
def test_a_row_alone_has_the_bytes_it_has_in_a_batch(dtype: torch.dtype) -> None:
    """Alone, with no more capacity than keys: every width of the merge, loaded or not."""
    (q, k, v), want = batch_and_answer(dtype)
    widths = set()
    for row, length in enumerate(LENS):
        capacity = max(length, 1)
        one = q[[row]], k[[row], :capacity], v[[row], :capacity], int32([length])
        for schedule in ((1, 1), (4, 3), (16, 2))[: 3 if length < 1500 else 1]:
            plan = reschedule(plan_of(1, capacity, dtype), *schedule)
            assert_same(launch_plan(plan, *one), rows_of(want, [row]), (length, schedule))  # type: ignore[arg-type]
            widths.add((triton_launch.merge_parts(plan), schedule[0] > 1) if plan.splits else None)
    assert widths >= {None, (16, False), (16, True), (64, False), (64, True)}


def test_the_most_splits_that_auto_makes() -> None:
    """The merge joins its blocks of 64 in a row: up to four of them, that is the tree which runs of splits follow."""
    capacity = 4 * MAX_AUTO_SPLITS
    q, k, v = make_inputs(1, 1, 1, 16, capacity)
    problem = DecodeProblem(1, 1, 1, 16, capacity=capacity, q_dtype="f32", kv_dtype="f32")
    plan = with_small_splits(plan_decode(problem, DeviceSpec.named("h200"), backend="triton"), MAX_AUTO_SPLITS, keys=4)
    want = launch_plan(reschedule(plan, 1, 1), q, k, v, capacity)
    for max_run in (4, 16):
        assert_same(launch_plan(reschedule(plan, max_run, 1), q, k, v, capacity), want, max_run)


def test_the_narrowest_merge() -> None:
    """2, 3 and 4 splits with a capacity of four: parts are joined four at a time."""
    lens = [64, 33, 17, 16]
    q, k, v = make_inputs(4, 4, 2, 16, 200)
    shape = dict(num_q_heads=4, num_kv_heads=2)
    want = launch_plan(plan_of(4, 200, F32, **shape), q, k, v, int32(lens))
    for schedule in ((1, 1), (4, 8), (4, 1)):
        plan = reschedule(plan_of(4, 64, F32, **shape), *schedule)
        assert triton_launch.merge_parts(plan) == 4
        assert_same(launch_plan(plan, q, k[:, :64], v[:, :64], int32(lens)), want, schedule)


@both_dtypes
@pytest.mark.parametrize("rows", [[6, 5, 4, 3, 2, 1], [4, 3, 3, 1]], ids=str)
def test_neighbours_and_order_change_no_byte(rows: list[int], dtype: torch.dtype) -> None:
    tensors, want = batch_and_answer(dtype)
    batch = (*rows_of(tensors, rows), int32([LENS[row] for row in rows]))
    plan = reschedule(plan_of(len(rows), max(LENS), dtype), 4 if dtype == F32 else 16, 5)
    assert_same(launch_plan(plan, *batch), rows_of(want, rows))  # type: ignore[arg-type]


def test_batches_scanned_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one vector of lengths holds: the search for a unit's row goes block by block."""
    lens = [100, 0, 16, 300, 1, 64, 33, 0, 128]
    q, k, v = make_inputs(len(lens), 1, 1, 16, 300)
    plan = plan_of(len(lens), 300, F32)
    want = launch_plan(plan, q, k, v, int32(lens))
    monkeypatch.setattr(triton_launch, "MAX_BATCH_BLOCK", 4)
    for schedule in ((4, 7), (16, 7)):
        assert_same(launch_plan(reschedule(plan, *schedule), q, k, v, int32(lens)), want, schedule)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": dict(window=100),
    "starts": dict(starts=int32([7, 16, 33, 160])),
    "sinks": dict(sinks=torch.tensor([1.0]), softcap=3.0),
    "scales": dict(k_scale=torch.tensor([0.5]), v_scale=torch.tensor([3.0])),
    "mask": dict(mask=torch.arange(160) % 64 > 31),
    "additive mask": dict(mask=torch.linspace(-1, 1, 160)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_under_every_schedule(name: str) -> None:
    lens = int32([160, 16, 122, 160])
    q, k, v = make_inputs(4, 1, 1, 16, 160, q_len=3)
    plan = plan_of(4, 160, F32, q_len=3)
    want = launch_plan(plan, q, k, v, lens, **OPTIONS[name])
    reference = reference_attention(q, k, v, lens, return_lse=True, **OPTIONS[name])
    assert_parity(want, reference, tolerance=3e-5)  # type: ignore[arg-type]
    for schedule in ((4, 1), (16, 1)):
        assert_same(launch_plan(reschedule(plan, *schedule), q, k, v, lens, **OPTIONS[name]), want, schedule)


@both_dtypes
def test_the_workspace_is_exact_and_its_contents_do_not_matter(dtype: torch.dtype) -> None:
    """Every schedule, in a workspace of exactly its plan's bytes between guard bands, over three fills (CASE-32)."""
    lens = [200, 3, 0, 90]
    q, k, v = make_inputs(len(lens), 6, 2, 16, 200, v_head_dim=32, dtype=dtype)
    plan = plan_of(len(lens), 200, dtype, num_q_heads=6, num_kv_heads=2, v_head_dim=32)
    want = launch_plan(plan, q, k, v, int32(lens))
    for schedule in ((1, 1), (4, 8), (16, 4)):
        other = reschedule(plan, *schedule)
        for byte in (0x7F, 0x00):
            space = Guarded((other.workspace_bytes,), torch.uint8, byte=byte)
            out, lse = Guarded(want[0].shape, dtype, byte=byte), Guarded(want[1].shape, F32, byte=byte)
            got = launch_plan(other, q, k, v, int32(lens), out=out.tensor, lse=lse.tensor, workspace=space.tensor)
            assert_same(got, want, (schedule, byte))
            assert space.intact() and out.intact() and lse.intact()


@both_dtypes
@pytest.mark.parametrize("schedule", [(1, 1), (4, 1), (16, 1)], ids=str)
def test_a_row_of_one_split_is_the_unsplit_answer(schedule: tuple[int, int], dtype: torch.dtype) -> None:
    """In a plan that splits: the bytes of one split for all, those of rowwise, and an untouched workspace."""
    lens = [16, 1, 0, 13]
    q, k, v = make_inputs(4, 6, 2, 16, 200, dtype=dtype)
    shape = dict(num_q_heads=6, num_kv_heads=2)
    plan = reschedule(plan_of(4, 200, dtype, **shape), *schedule)
    space = Guarded((plan.workspace_bytes,), torch.uint8)
    got = launch_plan(plan, q, k, v, int32(lens), workspace=space.tensor)
    assert plan.splits and space.untouched()
    unsplit = plan_of(4, 200, dtype, target=1, **shape)
    assert not unsplit.splits
    assert_same(launch_plan(unsplit, q, k, v, int32(lens)), got, "one split for all")
    assert_same(launch_plan(plan, q, k, v, int32(lens), backend="rowwise"), got, "rowwise")


# ---- the public call ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16], ids=NAMES.get)
@pytest.mark.parametrize("policy", ["auto", "waves", SplitPolicy.length(8, 16), SplitPolicy.pinned(5)], ids=str)
def test_one_answer_through_the_public_call(policy: Any, dtype: torch.dtype) -> None:
    """CASE-07: alone, beside others, in another order, in a larger cache, in pages, on other pages."""
    lens = [333, 0, 700, 1]
    q, k, v = make_inputs(4, 2, 1, 16, 700, dtype=dtype)
    want = attend(q, k, v, int32(lens), policy=policy)
    assert_parity(want, reference_attention(q, k, v, int32(lens), return_lse=True))
    assert_same(attend(q, k, v, int32(lens), policy=policy), want, "again")
    for rows in ([0], [3, 2, 1, 0]):
        batch = (*rows_of((q, k, v), rows), int32([lens[row] for row in rows]))
        assert_same(attend(*batch, policy=policy), rows_of(want, rows), rows)  # type: ignore[arg-type]
    one = q[:1], k[:1, :333], v[:1, :333], int32([333])
    assert_same(attend(*one, policy=policy), rows_of(want, [0]), "capacity 333")  # type: ignore[arg-type]
    for page_size, seed in ((16, 1), (100, 2)):
        table, pages = page_order(4, 700, page_size, seed=seed)
        pool = [to_pages(cache, table, pages, page_size) for cache in (k, v)]
        got = attend(q, *pool, int32(lens), block_table=table, policy=policy)
        assert_same(got, want, f"pages of {page_size}, order {seed}")


def test_a_row_of_one_split_is_rowwise_through_the_public_call() -> None:
    for dtype in (F32, F16):
        q, k, v = make_inputs(2, 4, 2, 32, 100, dtype=dtype)
        got = attend(q, k, v, int32([100, 31]))
        assert_same(attend(q, k, v, int32([100, 31]), policy=SplitPolicy.pinned(1)), got)
        assert_same(attend(q, k, v, int32([100, 31]), backend="rowwise"), got)


@triton.jit
def bounds_kernel(lens, starts, los, his, spans, WINDOW: tl.constexpr):
    i = tl.arange(0, 4)
    lo, hi, span = row_bounds(tl.load(lens + i), tl.load(starts + i), 48, WINDOW, 2)
    tl.store(los + i, lo)
    tl.store(his + i, hi)
    tl.store(spans + i, span)


@pytest.mark.parametrize("window", [0, 8])
def test_a_row_begins_at_its_end_at_the_latest(window: int) -> None:
    """Found by the fuzzer on a GPU: from a start near 2**31 the end of the first split overflowed, and the pipeline,
    which counts steps by differences, asked for keys at negative places."""
    lens, starts = int32([48, 9, 5, -3]), int32([3, -7, 2**31 - 1, 2**30])
    los, his, spans = (torch.full((4,), -1, dtype=torch.int32) for _ in range(3))
    bounds_kernel[(1,)](lens, starts, los, his, spans, WINDOW=window)
    assert his.tolist() == [48, 9, 5, 0]
    assert los.tolist() == ([39, 0, 5, 0] if window else [3, 0, 5, 0])
    assert torch.equal(spans, his - los)
