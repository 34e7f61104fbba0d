"""A run of `splitkv bench tune` on a CPU, with times of the test's making: what wins, and what must not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from splitkv import tuning
from splitkv.bench import attention, tune, tune_ranges
from splitkv.bench.attention_cases import AttentionCase
from splitkv.bench.roofline import Bandwidth
from splitkv.bench.timing import Timing, TimingRejected
from splitkv.bench.tune_ranges import RANGES, TuneRange, differences, label, select_ranges, variations
from splitkv.problem import DecodeProblem, DeviceSpec
from splitkv.tuning import DEFAULTS, Range, Schedule, Table

DEFAULT = DEFAULTS["cpu"]
CASE = AttentionCase("tune", 40, 8, 2, 16, 1000, "f16")
RAGGED = replace(CASE, batch=35, seq_len=700, lens=(700, 5, 300, *(64,) * 32), page_size=16)
SMALL = TuneRange("f16", (16, 64), (1, 8), (33, 64), (0, 8192), (CASE, RAGGED))
Times = Callable[[str, str], float]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "read_bandwidth", lambda device, size: Bandwidth(1e12, "assumed", 1, 1))
    monkeypatch.setattr(attention, "memory_budget", lambda device: 32 << 20)
    values = {"units_per_sm": (1, 4), "max_run": (1, 4)}
    monkeypatch.setitem(tune_ranges.TRIED, "cpu", values)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A run whose times come from a function of (case, schedule's label)."""

    def start(times: Times, ranges: tuple[TuneRange, ...] = (SMALL,), limit_s: float = 100.0) -> dict[str, Any]:
        def measure(calls: Mapping[str, Any], rotation: Any, *, kv_bytes: int, **_: Any) -> dict[str, Timing]:
            case = "ragged" if kv_bytes == RAGGED.read_bytes else "full"
            found = {name: times(case, name) for name in calls}
            refused = {name: "too wide a spread" for name, us in found.items() if us < 0}
            if refused:
                raise TimingRejected("refused", refused)
            return {name: Timing(us, us, us, 5, 20) for name, us in found.items()}

        monkeypatch.setattr(attention, "measure", measure)
        options = tune.TuneOptions("cpu", ranges, limit_s=limit_s)
        return tune.run_tune(options, {"commit": "unknown", "dirty": "unknown"}, command="test")

    return start


def times_of(faster: Mapping[str, float], default: float = 100.0) -> Times:
    """Times by label: of the default, and in parts of it."""
    return lambda case, name: default * faster.get(name, 1.0)


def test_the_best_of_each_field_meet_the_default_again_and_the_winner_gets_the_entry(run: Any) -> None:
    both = "units_per_sm 4, max_run 4"
    result = run(times_of({"units_per_sm 4": 0.95, "max_run 4": 0.97, "units_per_sm 1": 1.2, both: 0.9}))
    (row,), (entry,) = result["rows"], result["entries"]
    assert row["schedule"] == both and row["failures"] == []
    assert set(row["us"][CASE.name]) == {"default", "units_per_sm 4", "max_run 4", both}
    assert entry["faster"] == pytest.approx(0.1)
    assert entry["us"] == {case.name: {"default": 100.0, "tuned": 90.0} for case in (CASE, RAGGED)}
    table = Table.parse("mine", json.loads(json.dumps(result | {"compute_capability": "0.0"})))
    assert table.entries == (
        (Range("cpu", 2, (16, 64), (1, 8), (33, 64), (0, 8192)), replace(DEFAULT, units_per_sm=4, max_run=4)),
    )
    assert result["failed_rows"] == 0 and result["schema"] == tuning.SCHEMA
    assert {"commit", "dirty", "command", "date", "versions", "read_bandwidth_tb_s", "timing_method"} <= result.keys()


@pytest.mark.parametrize(
    ("times", "why"),
    [
        (times_of({"units_per_sm 4": 0.98}), "within noise"),
        (times_of({}), "nothing faster"),
        (lambda case, name: 100 if name == "default" else 80 if case == "full" else 102, "slower in one case"),
        (lambda case, name: 100 if name == "default" else -1 if case == "full" else 50, "one case without a time"),
        (lambda case, name: -1 if name == "default" else 50, "the default without a time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_win_gets_no_entry(times: Times, why: str, run: Any) -> None:
    result = run(times)
    assert result["entries"] == [] and result["rows"][0]["schedule"] is None, why
    assert result["failed_rows"] == 0


def test_luck_in_the_first_round_is_not_enough(run: Any) -> None:
    """A schedule that is 20 % faster in the first round, and as fast as the default in the second."""
    seen: dict[tuple[str, str], int] = {}

    def times(case: str, name: str) -> float:
        seen[case, name] = seen.get((case, name), 0) + 1
        return 80.0 if name == "max_run 4" and seen[case, name] == 1 else 100.0

    result = run(times)
    assert seen["full", "max_run 4"] == 2
    assert result["entries"] == []


def test_other_bytes_cost_the_range_its_entry_and_the_run_its_success(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tune.make_ours

    def wrong(tensors: Any, schedule: Schedule) -> Any:
        call = real(tensors, schedule)

        def changed(i: int, **options: Any) -> Any:
            result = call(i, **options)
            if schedule.max_run == 4 and options:
                result[1][0, 0] += 1e-3
            return result

        return changed

    monkeypatch.setattr(tune, "make_ours", wrong)
    result = run(times_of({"units_per_sm 4": 0.5, "max_run 4": 0.4}))
    (row,) = result["rows"]
    assert f"{CASE.name}: max_run 4 gives other bytes than the default" in row["failures"]
    assert "max_run 4" not in row["first_us"][CASE.name] and "units_per_sm 4" in row["first_us"][CASE.name]
    assert result["entries"] == [] and result["failed_rows"] == 1


def test_a_default_that_is_wrong_times_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.parity, "PLAIN_FACTOR", -1.0)
    result = run(times_of({"units_per_sm 4": 0.5}))
    assert result["failed_rows"] == 1 and result["entries"] == []
    assert "against float64 is over" in result["rows"][0]["failures"][0]
    assert result["rows"][0]["first_us"] == {CASE.name: {}, RAGGED.name: {}}


def test_a_schedule_that_cannot_run_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune.make_ours

    def refuse(tensors: Any, schedule: Schedule) -> Any:
        def raises(i: int, **options: Any) -> Any:
            raise RuntimeError("CUDA: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

        return raises if schedule.max_run == 4 else real(tensors, schedule)

    monkeypatch.setattr(tune, "make_ours", refuse)
    result = run(times_of({"units_per_sm 4": 0.5}))
    assert result["rows"][0]["not_run"][f"{CASE.name}: max_run 4"].startswith("CUDA: CUDA_ERROR")
    assert len(result["entries"]) == 1


def test_real_times_and_schedules_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short row is one launch under every schedule: nothing to time, and no entry."""
    lone = replace(SMALL, batch=(1, 1), cases=(replace(CASE, batch=1, seq_len=64),))
    options = tune.TuneOptions("cpu", (lone,))
    result = tune.run_tune(options, {}, command="test")
    times = result["rows"][0]["first_us"][lone.cases[0].name]
    assert times["default"] > 0 and len(set(times.values())) == 1
    assert result["entries"] == []


def test_ranges_past_the_limit_and_too_large_are_skipped(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(times_of({}), limit_s=0.0)
    assert result["rows"] == [] and result["skipped"][0]["reason"] == "the run had taken 0 s"
    monkeypatch.setattr(attention, "memory_budget", lambda device: 1)
    result = run(times_of({}))
    assert result["rows"][0]["not_run"] == {case.name: "one KV set is more than fits" for case in (CASE, RAGGED)}
    assert result["entries"] == []


# ------------------------------------------------------------------------------------------- the ranges


@pytest.mark.parametrize("entry", RANGES, ids=lambda entry: entry.name)
def test_a_range_covers_its_own_cases_and_no_other_does(entry: TuneRange) -> None:
    h200 = DeviceSpec.named("h200")
    for case in entry.cases:
        problem: DecodeProblem = case.problem
        backend = tuning_backend(problem, h200)
        covering = [
            other for other in RANGES if other.covered(backend).covers(problem, problem.rows_per_kv_head, backend)
        ]
        assert covering == [entry]


def tuning_backend(problem: DecodeProblem, device: DeviceSpec) -> str:
    from splitkv.plan import plan_decode

    return plan_decode(problem, device).backend


def test_the_pattern_selects_by_name() -> None:
    assert select_ranges(None) == RANGES
    assert {entry.kv_dtype for entry in select_ranges("^fp8")} == {"fp8_e4m3"}
    for pattern, words in (("(", "expected a regular expression"), ("nothing such", "that some range matches")):
        with pytest.raises(ValueError, match=f"ranges: .*{words}"):
            select_ranges(pattern)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_variations_differ_in_one_field_and_are_never_the_default(backend: str) -> None:
    default = DEFAULTS[backend]
    tried = list(variations(default, backend))
    assert len(set(tried)) == len(tried) > 5 and default not in tried
    assert all(len(differences(schedule, default)) == 1 for schedule in tried)
    assert label(default, default) == "default" and label(tried[0], default) != "default"
