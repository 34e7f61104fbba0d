"""`splitkv bench ranks`: two processes beside one, and no speed where the answer is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitkv.bench import machine, ranks, timing
from splitkv.bench.app import bench_app
from splitkv.bench.roofline import Bandwidth

TINY = ("ranks", "--device", "cpu", "--lengths", "300", "--heads", "4/2", "--head-dim", "64")


def bench(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(bench_app, list(words), env={"COLUMNS": "100"}, prog_name="splitkv bench")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of samples, and a memory faster than any cache."""
    monkeypatch.setitem(timing.ROTATION_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(machine, "cache_bytes", lambda device: 1 << 16)
    monkeypatch.setattr(ranks, "read_bandwidth", lambda device: Bandwidth(1e15, "assumed", 1 << 20, 1))


@pytest.fixture
def in_process(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank, in this process, where a test can break something."""

    def one_rank(work: ranks.Work) -> dict[str, Any]:
        ranks._run_rank(0, work, str(tmp_path))
        (tmp_path / "store").unlink(missing_ok=True)
        return json.loads((tmp_path / "row.json").read_text())

    monkeypatch.setattr(ranks, "_spawn", one_rank)


def test_two_processes_and_the_record(small: None, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    code, out, err = bench(*TINY, "--dtypes", "bf16", "--out", str(path))
    assert (code, err) == (0, "")
    assert "2 ranks" in out and "gloo" in out and f"wrote {path}" in out.replace("\n", "")
    record = json.loads(path.read_text())
    assert (record["schema"], record["ranks"], record["backend"], record["failed_rungs"]) == (
        "splitkv.ranks.v1", 2, "gloo", 0,
    )  # fmt: skip
    for row in record["rows"]:
        assert set(row["us"]) == {"splitkv", "part", "splitkv x2"} and row["passed"] and row["part_len"] == 150
        assert row["speedup"] == pytest.approx(row["us"]["splitkv"] / row["us"]["splitkv x2"], rel=1e-4)
        assert 0 < row["err"]["splitkv x2"] < 1e-2
        assert row["floor_us"] == pytest.approx(row["kv_bytes"] / 1e15 * 1e6)
    words = shlex.split(record["command"])
    assert words[:4] == ["splitkv", "bench", "ranks", "--ranks"] and words[-2:] == ["--out", str(path)]


def test_a_wrong_answer_gets_no_speed(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = bench(*TINY, "--ranks", "1", "--json")
    assert code == 0 and set(json.loads(out)["rows"][0]["us"]) == {"splitkv", "part", "splitkv x1"}
    right = ranks.RankAttention.run

    def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
        return right(self, *arguments, **options).mul_(1.01)

    monkeypatch.setattr(ranks.RankAttention, "run", wrong)
    code, out, _ = bench(*TINY, "--ranks", "1")
    assert code == 1 and "FAILED 1, 4/2, 64, 300, f32: max abs error" in " ".join(out.split())
    record = json.loads(bench(*TINY, "--ranks", "1", "--json")[1])
    assert record["failed_rungs"] == 1 and record["rows"][0]["us"] == {} and record["rows"][0]["speedup"] is None


def test_a_timing_that_cannot_be_is_refused(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "read_bandwidth", lambda device: Bandwidth(1e3, "assumed", 1 << 20, 1))
    code, out, _ = bench(*TINY, "--ranks", "1")
    assert code == 1 and "more than the memory gives" in " ".join(out.split())


def test_a_rank_that_fails_is_exit_1(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: ranks.Work) -> dict[str, Any]:
        raise RuntimeError("-- Process 1 terminated: out of memory")

    monkeypatch.setattr(ranks, "_spawn", fails)
    code, out, err = bench(*TINY)
    assert (code, out) == (1, "") and err == "failed: -- Process 1 terminated: out of memory\n"


def test_what_does_not_fit_is_skipped(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "memory_budget", lambda device: 1000)
    code, out, _ = bench(*TINY)
    assert code == 1 and "skipped 1, 4/2, 64, 300, f32: one KV set takes" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "0"), "greater than or equal to 1"),
        (("--dtypes", "int8"), "dtypes: expected some of f32"),
        (("--device", "tpu"), "device: expected cuda or cpu, got 'tpu'"),
        (("--lengths", "many"), "lengths: expected numbers of tokens"),
    ],
)
def test_bad_usage_is_exit_2(words: tuple[str, ...], message: str) -> None:
    code, out, err = bench(*TINY, *words)
    assert (code, out) == (2, "") and message in " ".join(err.replace("│", " ").split())


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code, _, err = bench("ranks", "--device", "cuda")
    assert code == 2 and "ranks: expected at most 1, one per CUDA device, got 2" in " ".join(
        err.replace("│", " ").split()
    )


def test_help_has_an_example() -> None:
    code, out, _ = bench("ranks", "--help")
    assert code == 0 and "Example: splitkv bench ranks" in out
