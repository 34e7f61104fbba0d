"""`splitkv rungs`: what it prints and writes, and above all when it keeps a speed to itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import run

import splitkv
from splitkv.bench import cases, machine, parity, rungs, timing
from splitkv.bench.roofline import Bandwidth, read_bandwidth

SHA = "0123456789abcdef0123456789abcdef01234567"
TINY = ("rungs", "--device", "cpu", "--lengths", "37,300", "--heads", "4/2", "--dtypes", "f32,bf16")
ROW_FIELDS = {
    *("case", "batch", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "seq_len", "kv_dtype"),
    *("page_size", "q_len", "floor_us", "us", "err"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rungs that take milliseconds: small rotations, short samples, and a memory faster than any cache."""
    monkeypatch.setitem(timing.ROTATION_BYTES, "cpu", 4 << 20)
    monkeypatch.setitem(timing.BUDGET_S, "cpu", 0.002)
    monkeypatch.setattr(machine, "cache_bytes", lambda device: 1 << 20)
    believe(monkeypatch, 1e15)


def believe(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    sweep = Bandwidth(bytes_per_s, "assumed", 1 << 20, 1)
    monkeypatch.setattr(rungs, "read_bandwidth", lambda device: sweep)


def break_ours(monkeypatch: pytest.MonkeyPatch, damage: Callable[[torch.Tensor], Any]) -> None:
    """Let DecodeAttention.run damage its result on the way out."""
    right = splitkv.DecodeAttention.run

    def wrong(self: Any, *arguments: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        right(self, *arguments, out=out, **options)
        damage(out)
        return out

    monkeypatch.setattr(splitkv.DecodeAttention, "run", wrong)


def test_rungs_prints_a_table_and_writes_the_record(small: None, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rungs.json"
    code, out, err = run(*TINY, "--out", str(path))
    assert (code, err) == (0, "")
    for word in (
        "route f32: backend cpu",
        "route bf16: ",
        "policy auto (declared)",
        "4/2",
        "300",
        "4 of 4 rungs passed",
    ):
        assert word in out
    record = json.loads(path.read_text())
    assert record["schema"] == "splitkv.rungs.v1" and record["selection"] == "custom"
    assert record["command"] == (
        "splitkv rungs --device cpu --lengths 37,300 --heads 4/2 --dtypes f32,bf16 --head-dim 256 --seed 0 "
        f"--out {path}"
    )
    for field in (
        "commit",
        "cpu",
        "versions",
        "host",
        "memory_free_bytes",
        "timing_method",
        "parity_rules",
    ):
        assert record[field], field
    assert record["dirty"] in (True, False)
    assert (record["baseline"], record["failed_rungs"], record["skipped"]) == ("sdpa", 0, [])
    assert [(row["kv_dtype"], row["seq_len"]) for row in record["rows"]] == [
        *(("f32", 37), ("f32", 300)),
        *(("bf16", 37), ("bf16", 300)),
    ]
    for row in record["rows"]:
        check_row(row, record)


def check_row(row: dict[str, Any], record: dict[str, Any]) -> None:
    assert row.keys() >= ROW_FIELDS
    problem = cases.Rung(row["seq_len"], 4, 2, row["kv_dtype"]).problem
    assert row["kv_bytes"] == problem.kv_bytes() == row["distinct_bytes"] // row["sets"]
    assert row["capacity"] == row["seq_len"] and row["cache"] == "cold" and row["sets"] >= 2
    assert row["floor_us"] == pytest.approx(row["kv_bytes"] / record["read_bandwidth_tb_s"] / 1e6, rel=1e-4)
    ours, baseline = row["us"]["splitkv"], row["us"]["sdpa"]
    assert row["speedup"] == pytest.approx(baseline / ours, rel=1e-4)
    assert row["gb_s"]["splitkv"] == pytest.approx(row["kv_bytes"] / ours / 1e3, rel=1e-4)
    assert row["us_p20"]["splitkv"] <= ours <= row["us_p80"]["splitkv"]
    assert row["err"]["splitkv"] < (1e-6 if row["kv_dtype"] == "f32" else 5e-3)
    assert row["against_baseline"]["cosine"] > 0.9999 and row["parity_failures"] == [] and row["passed"] is True


def test_json_goes_to_standard_output_alone(small: None) -> None:
    code, out, err = run(*TINY, "--json", "--commit", SHA) if no_git() else run(*TINY, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert len(record["rows"]) == 4
    if no_git():
        assert (record["commit"], record["dirty"], record["commit_source"]) == (SHA, "unknown", "option")


def no_git() -> bool:
    return rungs.record.provenance()["commit_source"] != "git"


def test_the_same_seed_gives_the_same_errors_and_another_seed_others(small: None) -> None:
    words = ("rungs", "--device", "cpu", "--lengths", "300", "--heads", "4/2", "--dtypes", "f32", "--json")
    errors = [json.loads(run(*words, "--seed", seed)[1])["rows"][0]["err"] for seed in ("5", "5", "6")]
    assert errors[0] == errors[1] != errors[2]


DAMAGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "one head zeroed": lambda out: out[:, 0].zero_(),
    "two heads swapped": lambda out: out.copy_(out[:, [1, 0, 2, 3]].clone()),
    "a scale lost": lambda out: out.mul_(1.02),
    "nan": lambda out: out[0, 0, :1].fill_(torch.nan),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_result_has_no_speed_and_exit_code_1(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    break_ours(monkeypatch, DAMAGES[damage])
    path = tmp_path / "rungs.json"
    code, out, _ = run(*TINY, "--out", str(path))
    assert code == 1 and "0 of 4 rungs passed" in out and out.count("FAILED 1, 4/2, 256, ") >= 4
    for row in json.loads(path.read_text())["rows"]:
        assert row["passed"] is False and row["parity_failures"]
        assert row["us"] == row["gb_s"] == row["bandwidth_share"] == {} and row["speedup"] is None
    table = [line for line in out.splitlines() if line.strip().startswith("4/2")]
    assert len(table) == 4 and all(line.split()[-1] == "FAILED" for line in table)


def test_a_result_that_changes_from_call_to_call_has_no_speed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1_000_000))
    break_ours(monkeypatch, lambda out: out.mul_(1 + 1e-6 * (next(calls) > 0)))
    code, out, _ = run(*TINY)
    assert code == 1 and "a second call on the same tensors gave other bytes" in out


def test_an_impossible_bandwidth_has_no_speed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, 1e3)
    code, out, _ = run(*TINY, "--json")
    assert code == 1
    for row in json.loads(out)["rows"]:
        assert "more than the memory gives" in row["timing_rejected"]
        assert row["us"] == {} and row["passed"] is False and row["parity_failures"] == []


def test_a_stick_that_is_not_the_oracle_stops_the_run(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = parity.float64_attention
    monkeypatch.setattr(parity, "float64_attention", lambda q, k, v: right(q, k, v) * (1 + 1e-9))
    code, out, err = run(*TINY)
    assert (code, out) == (1, "") and "differs from reference_attention" in err


def test_rungs_that_do_not_fit_are_skipped_and_named(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rungs, "memory_budget", lambda device: 700_000)  # one set of 300 keys in bf16 is 614,400
    code, out, _ = run(*TINY)
    assert code == 0 and "skipped 1, 4/2, 256, 300, f32" in out and "3 of 3 rungs passed" in out
    assert "warm   1, 4/2, 256, 300, bf16: 1 sets of keys, cache-resident" in out
    monkeypatch.setattr(rungs, "memory_budget", lambda device: 1000)
    code, out, _ = run(*TINY)
    assert code == 1 and "0 of 0 rungs passed" in out


def test_the_quick_set_says_how_to_run_the_full_one(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "QUICK_LENGTHS", (64, 128))
    monkeypatch.setattr(cases, "QUICK_HEADS", ((4, 2),))
    code, out, _ = run("rungs", "--device", "cpu")
    assert code == 0 and "6 of 6 rungs passed" in out, out
    assert out.rstrip().endswith("this was the quick set; all 54 rungs: splitkv rungs --full")


def test_sets_and_defaults() -> None:
    full, quick = (cases.rung_options("cpu", full=choice) for choice in (True, None))
    assert (full.selection, len(list(full.rungs()))) == ("full", 54)
    assert (quick.selection, len(list(quick.rungs()))) == ("quick", 9)
    assert max(quick.lengths) == 262_144 and set(quick.dtypes) == {"f32", "f16", "bf16"}
    assert cases.rung_options("cpu", heads="8/2").selection == "custom"


def test_sets_of_an_arena_are_disjoint_and_reproducible() -> None:
    rung, rotation = cases.Rung(100, 4, 2, "f16"), timing.Rotation(3, 3 * 204_800, cold=True)
    arena, again = (cases.Arena(rotation.footprint_bytes, "f16", "cpu", seed=3) for _ in range(2))
    sets = arena.sets(rung, rotation)
    assert [tuple(k.shape) for k, _ in sets] == [(1, 100, 2, 256)] * 3 and all(k.is_contiguous() for k, _ in sets)
    assert len({k.data_ptr() for k, _ in sets} | {v.data_ptr() for _, v in sets}) == 6
    assert torch.equal(arena.k, again.k) and not torch.equal(arena.k, arena.v)
    assert arena.k.float().std() == pytest.approx(1, abs=0.02) and arena.k.float().mean() == pytest.approx(0, abs=0.02)
    assert not torch.equal(sets[0][0], sets[1][0])


def test_the_cpu_sweep_reports_what_it_read() -> None:
    sweep = read_bandwidth("cpu", 16 << 20)
    assert sweep.swept_bytes == 16 << 20 and 1e8 < sweep.bytes_per_s < 1e13 and sweep.variant.startswith("torch.")
