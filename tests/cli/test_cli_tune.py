"""`splitkv bench tune` as a user meets it; the run itself is tests/unit/test_tune_run.py's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from splitkv.bench import tune
from splitkv.bench.app import bench_app
from splitkv.bench.tune_ranges import RANGES
from splitkv.problem import DeviceSpec

CASE = "16, 32/8, 128, 8192, bf16"
RESULT: dict[str, Any] = {
    "gpu": "A GPU",
    "entries": [{}],
    "rows": [
        {
            "range": "one",
            "backend": "cuda",
            "schedule": "units_per_sm 8",
            "failures": [],
            "not_run": {f"{CASE}: more_stages 1": "no room"},
            "first_us": {},
            "us": {CASE: {"default": 130.0, "units_per_sm 8": 121.0}},
        }
    ],
    "skipped": [{"range": "two", "reason": "the run had taken 1 s"}],
    "margin": 0.03,
    "wall_s": 5.0,
    "failed_rows": 0,
}


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(bench_app, ["tune", *words], env={"COLUMNS": "100"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run on a GPU would give, and which options it had."""
    result = dict(RESULT)

    def run_tune(options: tune.TuneOptions, source: Any, *, command: str, progress: Any) -> dict[str, Any]:
        seen["options"], seen["command"] = options, command
        return result

    seen: dict[str, Any] = {"result": result}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(DeviceSpec, "current", staticmethod(lambda index=None: DeviceSpec.named("h200")))
    monkeypatch.setattr(tune, "run_tune", run_tune)
    return seen


def test_the_table_is_written_and_shown(measured: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    code, printed, _ = run("--out", str(out), "--ranges", "batch 9-32", "--limit-s", "60")
    assert code == 0
    assert json.loads(out.read_text())["rows"] == RESULT["rows"]
    for words in (CASE, "130.0", "121.0", "units_per_sm 8", "no room", "skipped two", "1 of 1 ranges", f"wrote {out}"):
        assert words in printed
    options = measured["options"]
    assert (options.device, options.limit_s, options.seed) == ("cuda", 60.0, 0)
    assert options.ranges == tuple(entry for entry in RANGES if "batch 9-32" in entry.name)
    assert measured["command"] == f"splitkv bench tune --ranges 'batch 9-32' --limit-s 60.0 --seed 0 --out {out}"


def test_the_default_place_is_where_launches_look(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitkv.tuning.FOLDER", tmp_path / "tuned")
    assert run("--json")[0] == 0
    assert json.loads((tmp_path / "tuned" / "h200.json").read_text())["rows"] == RESULT["rows"]


@pytest.mark.parametrize(
    "changes",
    [{"failed_rows": 1, "rows": [RESULT["rows"][0] | {"failures": ["max_run 4 gives other bytes"]}]}, {"rows": []}],
)
def test_a_run_that_fails_writes_nothing(changes: dict[str, Any], measured: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    measured["result"].update(changes)
    code, printed, errors = run("--out", str(out))
    assert code == 1 and not out.exists()
    assert "no table was written" in errors
    assert all(f"FAILED {text}" in printed for row in changes["rows"] for text in row["failures"])


def test_the_list_names_ranges_and_cases() -> None:
    code, printed, _ = run("--list", "--ranges", "^f32")
    assert code == 0 and all(line.startswith("f32, head_dim ") for line in printed.splitlines())
    assert "1, 16/4, 256, 262144, f32" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranges", "("), "ranges: expected a regular expression"),
        (("--ranges", "none such"), "ranges: expected a pattern that some range matches"),
        (("--limit-s", "0"), "--limit-s"),
        ((), "device: expected a CUDA GPU that PyTorch can use, got none"),
    ],
)
def test_bad_usage_is_exit_2_with_the_argument(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed, errors = run(*words)
    assert (code, printed) == (2, "") and message in errors


def test_help_has_an_example() -> None:
    code, printed, _ = run("--help")
    assert code == 0 and "Example: splitkv bench tune" in printed
