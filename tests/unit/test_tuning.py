"""Schedules and tables: they change no rule and no tile, the right table is found, and a broken one costs a warning."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import CASES, CPU, H200, Case, check_schedule, problem, ragged

from splitkv import DecodeAttention, tuning
from splitkv.plan import _plan, plan_decode
from splitkv.problem import KNOWN_DEVICES, DecodeProblem, DeviceSpec
from splitkv.tiles import cuda_shared, triton_stages
from splitkv.tuning import ALLOWED, DEFAULTS, SCHEMA, Range, Schedule, Table, lookup, table_for, table_name

SCHEDULES = st.builds(Schedule, **{name: st.sampled_from(values) for name, values in ALLOWED.items()})
MOST_SPLITS = 32_768  # of one example: several times what any schedule takes at once
WHOLE = dict(head_dim=[16, 256], rows=[1, 64], batch=[1, 65_535], capacity=[0, 262_144])


def entry(schedule: Schedule, **changes: Any) -> dict[str, Any]:
    fields = dict(backend="cuda", kv_bytes=2) | WHOLE | changes
    return {"range": fields, "schedule": asdict(schedule), "faster": 0.1}


def table(*entries: dict[str, Any], capability: str = "9.0", **changes: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, "compute_capability": capability, "entries": list(entries)} | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the package's tables, and no memory of others."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (_plan, table_for, tuning.read_tables):
        cached.cache_clear()


def write(folder: Path, name: str, data: Any) -> None:
    (folder / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))
    forget()


# --------------------------------------------------------------------------- a schedule changes no byte


@given(CASES, SCHEDULES)
def test_no_schedule_changes_what_fixes_the_bytes(case: Case, schedule: Schedule) -> None:
    """The rule, the tile and the split lengths; and the tile's own stages are its own."""
    policy, asked, device = case
    usual, other = case.plan, plan_decode(asked, device, policy, schedule=schedule)
    for name in ("rule", "tile", "backend", "num_splits", "split_len", "max_splits", "rows_per_block", "policy"):
        assert getattr(usual, name) == getattr(other, name), name


@given(CASES, SCHEDULES, st.data())
def test_every_schedule_covers_every_split_once(case: Case, schedule: Schedule, data: st.DataObject) -> None:
    spans = data.draw(ragged(case.asked.capacity))[: MOST_SPLITS // max(case.most_splits, 1)]
    plan = plan_decode(replace(case.asked, batch=len(spans)), case.device, case.policy, schedule=schedule)
    check_schedule(plan, spans)
    assert plan.max_run <= max(schedule.max_run, 1)
    if plan.backend == "cuda":
        heads = plan.grid[0]
        assert heads * plan.blocks_at_once <= max(schedule.blocks_per_sm * plan.device.sm_count, heads)


@given(CASES, SCHEDULES)
def test_stages_fit_the_shared_memory(case: Case, schedule: Schedule) -> None:
    plan = plan_decode(case.asked, case.device, case.policy, schedule=schedule)
    assert plan.num_stages >= 2
    if plan.backend == "cuda":
        options = plan.blocks_per_sm, schedule.more_stages
        _, size = cuda_shared(plan.problem, plan.rows_per_block, plan.device, *options)
        assert size <= plan.device.shared_memory_bytes
        share = (plan.device.shared_memory_bytes + 1024) // plan.blocks_per_sm - 1024
        assert size <= share + 16 or plan.num_stages == 2
        fewer, as_many = (cuda_shared(plan.problem, plan.rows_per_block, plan.device, 2, more)[0] for more in (-1, 0))
        assert (fewer, as_many) == (max(as_many - 1, 2), plan.tile.num_stages)
    else:
        same = triton_stages(plan.tile, plan.problem, plan.device, 0)
        assert same == plan.tile.num_stages
        if schedule.more_stages < 0:
            assert plan.num_stages <= max(same, 3)


def test_more_stages_of_a_triton_tile() -> None:
    """Six tiles of 32 KiB fit and no seventh; pages take a stage of their own for all tiles but one (tile_config)."""
    wide = problem(num_q_heads=128)
    assert plan_decode(wide, H200).backend == "triton"
    for page_size, stages in ((None, {-4: 2, -1: 2, 0: 3, 1: 4, 4: 6}), (16, {-4: 3, -1: 3, 0: 5, 1: 7, 4: 11})):
        for more, wanted in stages.items():
            plan = plan_decode(replace(wide, page_size=page_size), H200, schedule=Schedule(16, 4, more_stages=more))
            assert (plan.tile.block_n, plan.num_stages) == (32, wanted), (page_size, more)
    f32 = problem(q_dtype="f32", kv_dtype="f32")
    assert plan_decode(f32, H200, backend="triton", schedule=Schedule(16, 4, more_stages=3)).num_stages == 7


# ------------------------------------------------------------------------------------ which table and entry


def test_without_a_table_the_default_is_taken(folder: Path) -> None:
    for backend, device in (("cuda", H200), ("triton", H200), ("cpu", CPU)):
        assert lookup(problem(), 4, device, backend) == (DEFAULTS[backend], "default")
    assert plan_decode(problem(batch=200), H200).schedule_source == "default"
    assert "(default)" in plan_decode(problem(batch=200), H200).explain()


def test_the_plan_takes_the_entry_that_covers_it(folder: Path) -> None:
    few, many = Schedule(8, 4, blocks_per_sm=1), Schedule(2, 4, max_run=4)
    write(folder, "h200", table(entry(few, batch=[1, 100]), entry(many, batch=[101, 300])))
    for batch, schedule, source in ((1, few, "h200"), (100, few, "h200"), (101, many, "h200"), (301, None, "")):
        plan = plan_decode(problem(batch=batch), H200)
        assert plan.schedule == (schedule or DEFAULTS["cuda"])
        assert plan.schedule_source == (f"tuned for {source}" if source else "default")
        assert f"({plan.schedule_source})" in plan.explain()
    assert plan_decode(problem(batch=101), H200).max_run == 4
    assert plan_decode(problem(), H200).grid == (4, 33, 1)  # one block per SM
    assert plan_decode(problem(kv_dtype="fp8"), H200).schedule_source == "default"
    assert plan_decode(problem(), H200, backend="triton").schedule_source == "default"
    assert plan_decode(problem(), CPU).schedule_source == "default"
    assert plan_decode(problem(), H200, schedule=many).schedule_source == "as given"


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("head_dim", dict(head_dim=128), dict(head_dim=256)),
        ("head_dim", dict(head_dim=128), dict(head_dim=128, v_head_dim=256)),
        ("rows", dict(num_q_heads=16), dict(num_q_heads=32)),
        ("batch", dict(batch=8), dict(batch=9)),
        ("capacity", dict(capacity=4096), dict(capacity=4097)),
    ],
)
def test_every_interval_is_held_to(name: str, inside: dict[str, int], outside: dict[str, int]) -> None:
    ends = dict(head_dim=(65, 128), rows=(1, 4), batch=(1, 8), capacity=(0, 4096))
    whole = {key: tuple(value) for key, value in WHOLE.items()} | {name: ends[name]}
    covered = Range("cuda", 2, **whole)  # type: ignore[arg-type]
    for changes, covers in ((inside, True), (outside, False)):
        asked = problem(**(dict(head_dim=128) | changes))
        assert covered.covers(asked, asked.rows_per_kv_head, "cuda") is covers
        assert not covered.covers(asked, asked.rows_per_kv_head, "triton")
        assert not covered.covers(replace(asked, kv_dtype="f32"), asked.rows_per_kv_head, "cuda")


def test_an_unknown_gpu_takes_the_table_nearest_in_capability(folder: Path) -> None:
    for units, (name, capability) in enumerate((("a100", "8.0"), ("h200", "9.0"), ("rtx5090", "12.0")), 1):
        write(folder, name, table(entry(Schedule(units, 4)), capability=capability))
    own = DeviceSpec.named("h200")
    wanted = {
        (8, 0): "a100", (8, 6): "h200", (8, 9): "h200", (9, 0): "h200", (10, 0): "h200", (12, 1): "rtx5090",
        (20, 0): "rtx5090",
    }  # fmt: skip
    wanted[8, 4] = "a100"
    for capability, name in wanted.items():
        device = replace(own, name="Some GPU", capability=capability)
        assert plan_decode(problem(), device).schedule_source == f"tuned for {name}", capability
    assert plan_decode(problem(), DeviceSpec.named("a100")).schedule_source == "tuned for a100"


def test_a_gpu_takes_its_own_table_before_a_nearer_name(folder: Path) -> None:
    for units, name in enumerate(("h100", "h200"), 1):
        write(folder, name, table(entry(Schedule(units, 4))))
    for name, units in (("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 1), ("h200", 2), ("NVIDIA GH100X", 1)):
        assert plan_decode(problem(), replace(H200, name=name)).schedule.units_per_sm == units, name
    assert table_name(replace(H200, name="NVIDIA L40S")) == "nvidial40s"
    assert {table_name(device) for device in KNOWN_DEVICES.values()} == set(KNOWN_DEVICES)


def test_what_a_schedule_leaves_out_is_the_default(folder: Path) -> None:
    write(folder, "h200", table(entry(Schedule(7, 4)) | {"schedule": {"max_run": 4}}))
    assert plan_decode(problem(), H200).schedule == replace(DEFAULTS["cuda"], max_run=4)


def test_tables_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "h200", table(entry(Schedule(7, 4))))
    reads: list[Path] = []
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *args: reads.append(path) or real(path, *args))
    for batch, name in itertools.product((1, 2, 3), ("h200", "other")):
        assert plan_decode(problem(batch=batch), replace(H200, name=name)).schedule.units_per_sm == 7
    assert reads == [folder / "h200.json"]


# --------------------------------------------------------------------------------------------- broken tables

GOOD = table(entry(Schedule(7, 4)))


def scheduled(**changes: Any) -> dict[str, Any]:
    return table(entry(Schedule(7, 4)) | {"schedule": asdict(Schedule(7, 4)) | changes})


def ranged(**changes: Any) -> dict[str, Any]:
    return table(entry(Schedule(7, 4), **changes))


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "Expecting property name"),
    "another kind of file": (
        GOOD | {"schema": "splitkv.rungs.v1"},
        f"schema: expected {SCHEMA}, got 'splitkv.rungs.v1'",
    ),
    "a list": ([], f"schema: expected {SCHEMA}, got 'list'"),
    "no capability": (GOOD | {"compute_capability": None}, 'compute_capability: expected such as "9.0", got None'),
    "no entries": (GOOD | {"entries": {}}, "entries: expected a list, got dict"),
    "an entry that is none": (GOOD | {"entries": [3]}, "entries[0]: expected an object with range and schedule, got 3"),
    "an unknown field": (scheduled(speed=3), "entries[0]: schedule: expected some of units_per_sm"),
    "units of text": (scheduled(units_per_sm="7"), "units_per_sm: expected one of 1, 2"),
    "no such run": (scheduled(max_run=8), "max_run: expected one of 1, 4, 16, got 8"),
    "true": (scheduled(max_run=True), "max_run: expected one of 1, 4, 16, got True"),
    "no such backend": (ranged(backend="rocm"), "backend: expected one of cuda, triton, cpu, got 'rocm'"),
    "a list for a backend": (ranged(backend=[]), "backend: expected one of cuda, triton, cpu, got ()"),
    "three bytes": (ranged(kv_bytes=3), "kv_bytes: expected 1, 2 or 4, got 3"),
    "ends the wrong way round": (
        ranged(batch=[8, 1]),
        "batch: expected two integers, the second not below the first, got",
    ),
    "one end": (ranged(rows=[8]), "rows: expected two integers"),
    "ends of text": (ranged(rows=["a", "b"]), "rows: expected two integers"),
    "no such interval": (ranged(speed=[1, 2]), "range: expected backend, kv_bytes, head_dim"),
    "no ends": (ranged(rows=None), "rows: expected two integers"),
    "nested without end": ("[" * 100_000, "recursion"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_table_is_warned_of_and_left_out(kind: str, folder: Path) -> None:
    data, words = BROKEN[kind]
    write(folder, "h200", data)
    with pytest.warns(UserWarning) as caught:
        plan = plan_decode(problem(), H200)
    (warning,) = caught
    assert words in str(warning.message) and "h200.json" in str(warning.message)
    assert (plan.schedule, plan.schedule_source) == (DEFAULTS["cuda"], "default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert plan_decode(problem(batch=2), H200).schedule_source == "default"


def test_a_table_that_cannot_be_read_is_warned_of(folder: Path) -> None:
    (folder / "h200.json").mkdir()
    write(folder, "other", GOOD)
    with pytest.warns(UserWarning, match="h200.json: .*Is a directory"):
        assert plan_decode(problem(), H200).schedule_source == "tuned for other"
    (folder / "other.json").write_bytes(b"\xff\xfe\x00")
    forget()
    with pytest.warns(UserWarning):
        assert plan_decode(problem(), H200).schedule_source == "default"


def test_the_schedule_of_a_decode_attention_is_given_or_refused() -> None:
    asked = DecodeProblem(40, 8, 2, 16, capacity=4096, q_dtype="f16", kv_dtype="f16")
    chosen = DecodeAttention(asked, device="cpu", schedule=Schedule(1, 4, max_run=4))
    assert chosen.plan.max_run == 4 and DecodeAttention(asked, device="cpu").plan.max_run == 16
    with pytest.raises(TypeError, match="schedule: expected a Schedule, got dict"):
        DecodeAttention(asked, device="cpu", schedule={"max_run": 4})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- shipped tables


def test_shipped_tables_are_sound_and_say_where_they_are_from() -> None:
    for path in sorted(tuning.FOLDER.glob("*.json")):
        data = json.loads(path.read_text())
        found = Table.parse(path.stem, data)
        assert path.stem == data["name"] and found.entries
        assert {"commit", "dirty", "gpu", "versions", "date", "command"} <= data.keys()
        for (covered, schedule), raw in zip(found.entries, data["entries"], strict=True):
            assert schedule != DEFAULTS[covered.backend]
            assert raw["faster"] > tuning.MARGIN
            assert all(us["tuned"] <= 1.01 * us["default"] for us in raw["us"].values())
