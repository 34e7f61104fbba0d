"""Plans: properties of rules, schedules and workspaces over all shapes, and what a plan says of itself."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import splitkv.plan as plan_module
from splitkv.plan import CPU_TILE_KEYS, DecodePlan, plan_decode, workspace_bytes
from splitkv.policy import SplitPolicy, workspace_slots
from splitkv.problem import DTYPE_BYTES, KNOWN_DEVICES, DecodeProblem, DeviceSpec
from splitkv.tiles import compute_dtype

H200 = DeviceSpec.named("h200")
CPU = DeviceSpec("cpu", 2, (0, 0), 0, 0, 0.0)
LONGEST = 262_144


@pytest.fixture(autouse=True)
def no_policy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLITKV_POLICY", raising=False)


def problem(**changes: Any) -> DecodeProblem:
    fields: dict[str, Any] = dict(batch=1, num_q_heads=16, num_kv_heads=4, head_dim=256)
    return DecodeProblem(**(fields | changes))


GEOMETRIES = [(16, 16), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256), (576, 512)]
POLICIES = st.one_of(
    st.sampled_from([SplitPolicy.auto(), SplitPolicy.auto(), SplitPolicy.waves()]),
    st.builds(SplitPolicy.capacity, st.none() | st.integers(0, LONGEST)),
    st.builds(SplitPolicy.length, st.integers(1, 4096), st.integers(1, 4096)),
    st.builds(SplitPolicy.legacy, st.integers(0, 2000)),
    st.builds(SplitPolicy.pinned, st.integers(1, 4096)),
)
DEVICES = st.sampled_from([*KNOWN_DEVICES.values(), CPU])


@st.composite
def problems(draw: st.DrawFn) -> DecodeProblem:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32, 128]))
    head_dim, v_head_dim = draw(st.sampled_from(GEOMETRIES))
    return DecodeProblem(
        batch=draw(st.integers(1, 1024)),
        num_q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_len=draw(st.sampled_from([1, 1, 2, 5, 16])),
        capacity=draw(st.integers(0, LONGEST) | st.sampled_from([1, 127, 128, 129, 257, 4096, LONGEST])),
        q_dtype=draw(st.sampled_from(["f32", "f16", "bf16"])),
        kv_dtype=draw(st.sampled_from(["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2"])),
        page_size=draw(st.sampled_from([None, 1, 16, 784])),
    )


class Case(NamedTuple):
    policy: SplitPolicy
    asked: DecodeProblem
    device: DeviceSpec

    @property
    def plan(self) -> DecodePlan:
        return plan_decode(self.asked, self.device, self.policy)

    @property
    def most_splits(self) -> int:
        return self.policy.rule(self.asked, self.device).max_splits(self.asked.capacity)


CASES = st.builds(Case, POLICIES, problems(), DEVICES)


# ------------------------------------------------------------------------------------------------- rules


@given(CASES, st.data())
def test_splits_are_never_empty_and_cover_the_row(case: Case, data: st.DataObject) -> None:
    policy, asked, device = case
    rule = policy.rule(asked, device)
    for span in (0, *data.draw(st.lists(st.integers(0, asked.capacity), max_size=20)), asked.capacity):
        chunk, n = rule.split(span)
        assert chunk >= rule.min_len >= 1
        assert chunk % rule.quantum == 0
        assert (n - 1) * chunk < span <= n * chunk or (n, span) == (0, 0)
        assert n <= min(rule.target, rule.max_splits(asked.capacity))
        if span or policy.kind != "length":
            assert policy.split(span, asked, device) == (chunk, n)


@given(problems(), problems(), DEVICES)
def test_auto_follows_the_kv_geometry_and_ends_splits_with_tiles(
    asked: DecodeProblem, other: DecodeProblem, device: DeviceSpec
) -> None:
    rule = SplitPolicy.auto().rule(asked, device)
    assert (16 <= rule.target <= 256) and rule.min_len % rule.quantum == 0
    plan = plan_decode(asked, device)
    if plan.backend != "cuda":  # whose warps take splits apart as they come: test_cuda_plan.py
        assert rule.quantum % plan.tile.block_n == 0
    assert SplitPolicy.auto().rule(replace(asked, q_len=other.q_len), device) == rule


@given(CASES)
def test_each_policy_keeps_its_own_bound(case: Case) -> None:
    given_bound = case.policy.params[0] if case.policy.params else 0
    bounds = {"auto": 256, "waves": 16, "capacity": 64, "length": given_bound, "pinned": given_bound}
    bounds["legacy"] = max(case.device.sm_count // (case.asked.num_q_heads * case.asked.batch), 1)
    assert case.most_splits <= bounds[case.policy.kind]


@given(CASES, problems(), DEVICES)
def test_one_answer_whatever_the_batch_capacity_pages_and_sms(
    case: Case, other: DecodeProblem, elsewhere: DeviceSpec
) -> None:
    policy, asked, device = case
    same = replace(asked, page_size=other.page_size)
    if policy.batch_invariant:
        same = replace(same, batch=other.batch)
    if policy.kind in ("auto", "waves", "length", "pinned"):
        same = replace(same, capacity=other.capacity)
    if policy.kind in ("auto", "capacity", "length", "pinned"):
        device = elsewhere
    assert policy.rule(same, device) == case.policy.rule(asked, case.device)


# -------------------------------------------------------------------------------------------- schedules


@dataclasses.dataclass
class Unit:
    """What one block of the split kernel does: an aligned run of a row's splits, and where its part goes."""

    row: int
    first_split: int
    end_split: int
    slot: int


def assign_work(plan: DecodePlan, spans: Sequence[int]) -> list[Unit]:
    """What the kernels compute on the device from the rows' own lengths (triton_tile.py, cuda_common.cuh)."""
    splits = [plan.rule.split(span) for span in spans]
    total = sum(spans)
    rounded_up = plan.backend != "cuda"
    run_keys = max((total + (plan.target_units - 1) * rounded_up) // plan.target_units, plan.least_run_keys)
    alike = plan.backend == "cuda" and plan.max_run > 1 and len(set(spans)) == 1
    if alike and busiest(plan, spans, plan.max_run) <= busiest(plan, spans, 1):
        run_keys = 2**31
    units: list[Unit] = []
    for row, (split_len, num_splits) in enumerate(splits):
        if plan.max_run == 1:
            run = 1
        else:
            runs = [run for run in (1, 4, 16) if run <= plan.max_run]
            run = next((run for run in runs if split_len * run >= run_keys), plan.max_run)
        # A grid of (splits, heads, rows) has a slot for every split that a row may have; one of units has only those.
        base = row * plan.max_splits if plan.max_run == 1 and plan.backend != "cuda" else len(units)
        for unit in range(max(1, -(-num_splits // run))):
            units.append(Unit(row, unit * run, min((unit + 1) * run, num_splits), base + unit))
    return units


def busiest(plan: DecodePlan, spans: Sequence[int], run: int) -> int:
    """Keys of the block that has most, of rows that are all alike."""
    split_len, num_splits = plan.rule.split(spans[0])
    units = len(spans) * max(1, -(-num_splits // run))
    return -(-units // plan.blocks_at_once) * min(split_len * run, spans[0])


def check_schedule(plan: DecodePlan, spans: Sequence[int]) -> int:
    """Every split of every row in exactly one unit, every unit in a slot and a block of its own."""
    units = assign_work(plan, spans)
    done = [0] * len(spans)
    for unit in units:
        assert unit.first_split == done[unit.row]  # in order, nothing skipped, nothing twice
        done[unit.row] = unit.end_split
    assert done == [plan.rule.split(span)[1] for span in spans]
    slots = [unit.slot for unit in units]
    assert len(set(slots)) == len(slots)
    assert max(slots) < plan.max_units
    grid_units, _, grid_rows = plan.grid
    if plan.backend == "cuda":  # blocks take units until there are none
        assert slots == list(range(len(units)))
        assert 1 <= plan.blocks_at_once <= plan.max_units
        assert plan.max_run in (1, 4, 16)
    elif plan.max_run > 1:
        assert slots == list(range(len(units)))
        assert (grid_units, grid_rows) == (plan.max_units, 1)
        assert plan.max_run in (4, 16)
    else:
        assert (grid_units, grid_rows) == (plan.max_splits, plan.problem.batch)
    return len(units)


def packing(on: bool) -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {"SPLITKV_GQA_PACK": str(int(on))})


@st.composite
def ragged(draw: st.DrawFn, capacity: int) -> list[int]:
    """Spans of up to 1,024 rows, in stretches of like rows: a few long among many short, all full, empty …"""
    lengths = st.integers(0, capacity) | st.sampled_from([0, min(1, capacity), min(65, capacity), capacity])
    stretch = st.tuples(st.integers(1, 300), lengths, st.integers(0, 3))
    stretches = draw(st.lists(stretch, min_size=1, max_size=6))
    spans = [max(length - step * i, 0) for count, length, step in stretches for i in range(count)]
    return spans[:1024]


@given(CASES, st.booleans(), st.data())
def test_the_schedule_fits_and_covers(case: Case, pack: bool, data: st.DataObject) -> None:
    spans = data.draw(ragged(case.asked.capacity))
    asked = replace(case.asked, batch=len(spans))
    with packing(pack):
        check_schedule(plan_decode(asked, case.device, case.policy), spans)


@given(problems(), DEVICES, st.data())
def test_the_schedule_of_loaded_auto_fits_and_covers(
    asked: DecodeProblem, device: DeviceSpec, data: st.DataObject
) -> None:
    """The same where blocks join runs of splits."""
    asked = replace(asked, capacity=max(asked.capacity, 20_000))
    spans = data.draw(ragged(asked.capacity))
    plan = plan_decode(replace(asked, batch=len(spans)), device)
    assume(plan.max_run > 1)
    check_schedule(plan, spans)


def test_one_long_row_among_many_short_ones_is_still_cut() -> None:
    spans = [300] * 255 + [LONGEST]
    plan = plan_decode(problem(batch=256), H200)
    assert plan.max_run > 1
    units = assign_work(plan, spans)
    assert sum(unit.row == 255 for unit in units) >= 16
    assert check_schedule(plan, spans) <= plan.max_units


def test_all_rows_empty() -> None:
    for batch in (1, 1024):
        plan = plan_decode(problem(batch=batch), H200)
        assert check_schedule(plan, [0] * batch) == batch  # one block each, to write the zeros


@given(CASES)
def test_runs_need_tiles_that_end_where_splits_end(case: Case) -> None:
    plan = case.plan
    if plan.max_run > 1 and plan.backend != "cuda":
        assert case.asked.batch * plan.max_splits > plan.target_units
        assert case.policy.kind == "auto"
        assert plan.rule.quantum % (CPU_TILE_KEYS if plan.device.is_cpu else plan.tile.block_n) == 0
        assert plan.rule.min_len % plan.rule.quantum == 0


# -------------------------------------------------------------------------------------------- workspace


@given(CASES)
def test_workspace_is_exact_and_within_the_slots(case: Case) -> None:
    policy, asked, device = case
    plan = case.plan
    slot_bytes = (asked.v_head_dim + 2) * 4
    exact = plan.max_units * asked.num_q_heads * asked.q_len * slot_bytes
    assert plan.workspace_bytes == (exact if case.most_splits > 1 else 0)
    assert plan.splits == (case.most_splits > 1)
    assert plan.max_units <= asked.batch * max(case.most_splits, 1)
    assert plan.workspace_bytes <= workspace_slots(asked, device, policy) * slot_bytes
    assert workspace_bytes(asked, device, policy) == plan.workspace_bytes


@pytest.mark.parametrize(
    ("changes", "policy", "slots"),
    [
        ({"batch": 9, "q_dtype": "f32"}, "length", 9 * 256 * 16),
        ({"batch": 9}, "length", (64 * 132 // 4 + 34 + 9 * 256 // 16) * 16),  # joined in blocks, in runs of 16
        ({"batch": 9, "num_q_heads": 24}, "waves", 9 * 11 * 24),
        ({"capacity": 64}, "auto", 0),
        ({"capacity": 0}, "auto", 0),
        ({}, "off", 0),
        ({"q_len": 3}, "7", 7 * 16 * 3),
        ({"batch": 6, "num_q_heads": 8}, SplitPolicy.legacy(), 6 * 2 * 8),
    ],
)
def test_workspace_of_known_plans(changes: dict[str, Any], policy: str | SplitPolicy, slots: int) -> None:
    assert workspace_bytes(problem(**changes), H200, policy) == slots * 258 * 4


CASE_32 = [(64, 4, 256, 256), (24, 4, 256, 256), (16, 1, 512, 512), (1, 1, 64, 64), (3, 1, 128, 128)]
CASE_32 += [(128, 1, 576, 512), (128, 128, 128, 128)]


@pytest.mark.parametrize("device", [*KNOWN_DEVICES.values(), CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("heads", CASE_32, ids=str)
def test_case_32_workspace_is_monotone_in_batch(heads: tuple[int, int, int, int], device: DeviceSpec) -> None:
    """Across the switch to runs too. Not for legacy and capacity: their rules cut less as the batch grows."""
    for policy in (SplitPolicy.auto(), SplitPolicy.waves(), SplitPolicy.length(), SplitPolicy.pinned(16)):
        for capacity in (4096, LONGEST):
            sizes = [
                workspace_bytes(DecodeProblem(batch, *heads, capacity=capacity), device, policy)
                for batch in (*range(1, 48), *range(48, 300, 17), 511, 512, 1024)
            ]
            assert sizes == sorted(sizes)


@given(CASES, st.integers(1, 1024))
def test_workspace_grows_with_batch_and_capacity(case: Case, batch: int) -> None:
    policy, asked, device = case
    assume(policy.kind not in ("legacy", "capacity"))
    sizes = [workspace_bytes(replace(asked, batch=n), device, policy) for n in sorted((asked.batch, batch))]
    assert sizes == sorted(sizes)
    assert case.plan.workspace_bytes <= workspace_bytes(replace(asked, capacity=LONGEST), device, policy)


@given(CASES, st.integers(1, 1024))
def test_slots_cover_every_launch_of_up_to_that_many_rows(case: Case, batch: int) -> None:
    """An engine sizes once for its largest batch (at least 32), then launches any up to it."""
    policy, asked, device = case
    slots = workspace_slots(asked, device, policy)
    launched = replace(asked, batch=min(batch, max(asked.batch, 32)))
    assert workspace_bytes(launched, device, policy) <= slots * (asked.v_head_dim + 2) * 4
    assert workspace_slots(launched, device, policy) <= slots


# ------------------------------------------------------------------------------------------------- tiles


@given(CASES, CASES, st.integers(1, 500))
def test_tile_depends_on_geometry_and_architecture_alone(case: Case, other: Case, sm_count: int) -> None:
    """All of it that fixes bytes; the stages, which do not, may follow the pages too."""
    asked = replace(case.asked, batch=other.asked.batch, capacity=other.asked.capacity)
    device = replace(case.device, sm_count=sm_count)
    tile = case.plan.tile
    assert plan_decode(asked, device, other.policy).tile == tile
    paged = plan_decode(replace(asked, page_size=other.asked.page_size), device, other.policy).tile
    assert replace(paged, num_stages=tile.num_stages, v_in_k_stages=tile.v_in_k_stages) == tile


@given(problems(), DEVICES, st.booleans())
def test_blocks_hold_all_queries_of_a_kv_head(asked: DecodeProblem, device: DeviceSpec, pack: bool) -> None:
    with packing(pack):
        plan = plan_decode(asked, device)
    rows = asked.rows_per_kv_head if pack else asked.q_len
    assert 1 <= plan.rows_per_block <= min(plan.tile.block_m, rows)
    assert plan.row_blocks * plan.rows_per_block >= asked.rows_per_kv_head
    assert (plan.row_blocks - 1) * plan.rows_per_block < asked.rows_per_kv_head
    assert plan.grid[0 if plan.backend == "cuda" else 1] == asked.num_kv_heads * plan.row_blocks
    if not pack and asked.q_len <= plan.tile.block_m:
        assert (plan.rows_per_block, plan.row_blocks) == (asked.q_len, asked.group_size)
    for size in (plan.tile.block_m, plan.tile.block_n):
        assert size & (size - 1) == 0
    assert plan.tile.num_warps in (1, 2, 4, 8)


@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=lambda device: device.name)
@pytest.mark.parametrize("kv_dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), GEOMETRIES[:-1])  # the Triton kernels take up to 256
def test_tiles_in_flight_fit_in_shared_memory(
    head_dim: int, v_head_dim: int, kv_dtype: str, device: DeviceSpec
) -> None:
    """CASE-22: no launch may ask for more than 99, 163 or 227 KiB, whatever the context."""
    padded = sum(1 << (d - 1).bit_length() for d in (head_dim, v_head_dim))
    for q_dtype, page_size in itertools.product(("f32", "bf16", "f16"), (None, 16)):
        dims = dict(head_dim=head_dim, v_head_dim=v_head_dim)
        asked = problem(**dims, q_dtype=q_dtype, kv_dtype=kv_dtype, page_size=page_size)
        tile = plan_decode(asked, device, backend="triton").tile
        in_flight = tile.num_stages if page_size is None else (tile.num_stages + 1) // 2
        assert 1 <= in_flight <= 4
        assert in_flight * tile.block_n * padded * DTYPE_BYTES[kv_dtype] <= device.shared_memory_bytes


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "compute"),
    [
        *(("f32", kv_dtype, "f32") for kv_dtype in DTYPE_BYTES),
        *((q_dtype, "f32", "f32") for q_dtype in ("f16", "bf16")),
        ("f16", "f16", "f16"),
        ("bf16", "bf16", "bf16"),
        ("f16", "bf16", "f32"),
        ("bf16", "f16", "f16"),  # as over fp8: a query's elements from 6e-5 to 65504
        ("f16", "fp8_e4m3", "f16"),
        ("f16", "fp8_e5m2", "f16"),
    ],
)
def test_products_lose_no_bit_of_an_operand(q_dtype: str, kv_dtype: str, compute: str) -> None:
    assert compute_dtype(q_dtype, kv_dtype) == compute


# ----------------------------------------------------------------------------------------- plans as values


def test_plans_are_deterministic_and_hashable() -> None:
    plan = plan_decode(problem(), H200)
    plan_module._plan.cache_clear()
    again = plan_decode(problem(), H200, SplitPolicy.auto())
    assert again is not plan
    assert again == plan
    assert hash(again) == hash(plan)
    assert {plan: 1}[again] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_units = 3  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["auto", "waves", "capacity", "length", "legacy", "5"])
def test_capacity_0_plans_one_split(policy: str) -> None:
    plan = plan_decode(problem(capacity=0, batch=3), H200, policy)
    assert (plan.num_splits, plan.max_splits, plan.workspace_bytes) == (1, 1, 0)
    assert plan.grid == (4, plan.max_units, 1)
    triton = plan_decode(problem(capacity=0, batch=3), H200, policy, backend="triton")
    assert (triton.max_splits, triton.grid) == (1, (1, 4, 3))


def test_the_environment_overrides_and_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = plan_decode(problem(), H200, "waves")
    monkeypatch.setenv("SPLITKV_POLICY", "off")
    plan = plan_decode(problem(), H200, "waves")
    assert (plan.policy, plan.from_environment, plan.workspace_bytes) == (SplitPolicy.pinned(1), True, 0)
    assert workspace_bytes(problem(), H200, "waves") == 0  # launch and sizing resolve alike
    monkeypatch.delenv("SPLITKV_POLICY")
    assert plan_decode(problem(), H200, "waves") == declared
    assert not declared.from_environment


@pytest.mark.parametrize("policy", ["auto", "waves", "length", "7", "legacy", "capacity"])
def test_batch_invariance_is_said(policy: str) -> None:
    plan = plan_decode(problem(), H200, policy)
    invariant = policy not in ("legacy", "capacity")
    assert plan.batch_invariant is invariant
    said = "yes:" if invariant else f"no: {policy} reads the batch"
    assert f"batch-invariant {said}" in plan.explain()


def test_floor() -> None:
    plan = plan_decode(problem(), H200)
    assert plan.floor_us == pytest.approx(4 * 262_144 * 1024 / 4.4e6)  # 244; measured: 243.5
    assert plan.waves == pytest.approx(plan.num_splits * 4 / 132)
    unknown = plan_decode(problem(), CPU).floor_us
    assert unknown != unknown
