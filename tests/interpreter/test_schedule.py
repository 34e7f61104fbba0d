"""One answer: whichever blocks compute which splits, and whatever is beside a row, its bytes are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

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
    to_pages,
)

from splitkv import DecodeProblem, DeviceSpec, SplitPolicy, decode_attention, plan_decode, reference_attention
from splitkv.backends.triton_launch import merge_parts
from splitkv.plan import DecodePlan, _max_units
from splitkv.policy import SplitRule
from splitkv.tiles import TileConfig

F32, F16 = torch.float32, torch.float16
NAMES = {F32: "f32", F16: "f16"}
both_dtypes = pytest.mark.parametrize("dtype", [F32, F16], ids=NAMES.get)
TILE = 16


def reschedule(
    plan: DecodePlan, *, max_run: int, target_units: int, rule: SplitRule | None = None, tile: TileConfig | None = None
) -> DecodePlan:
    """The plan under another schedule: other blocks compute the same splits, which must not change a bit.

    Splits end where tiles end: the tile has TILE keys and the rule's splits are multiples of it.
    """
    rule = SplitRule(plan.rule.target, TILE, TILE) if rule is None else rule
    tile = replace(plan.tile, block_n=TILE) if tile is None else tile
    max_splits = max(rule.max_splits(plan.problem.capacity), 1)
    return replace(
        plan,
        rule=rule,
        tile=tile,
        max_splits=max_splits,
        max_run=max_run,
        target_units=target_units,
        max_units=_max_units(plan.problem.batch, max_splits, max_run, target_units),
    )


def plan_of(
    batch: int, capacity: int, dtype: torch.dtype, rule: SplitRule, max_run: int, target_units: int, **problem: Any
) -> DecodePlan:
    shape = dict(num_q_heads=2, num_kv_heads=1, head_dim=16) | problem
    asked = DecodeProblem(batch, **shape, capacity=capacity, q_dtype=NAMES[dtype], kv_dtype=NAMES[dtype])
    plan = plan_decode(asked, DeviceSpec.named("h200"), SplitPolicy.pinned(rule.target))
    return reschedule(plan, max_run=max_run, target_units=target_units, rule=rule)


def rows_of(tensors: tuple[Tensor, ...], rows: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(tensor[list(rows)] for tensor in tensors)
