"""`splitkv bench fuzz`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import script
from typer.testing import CliRunner

import splitkv
from splitkv.bench.app import bench_app
from splitkv.bench.fuzz.draw import draw_case

FEW = ("--backend", "cpu", "--cases", "12", "--jobs", "1")


def fuzz(*words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `splitkv bench fuzz words...`, in this process."""
    result = CliRunner().invoke(bench_app, ["fuzz", *words], env={"COLUMNS": "100"}, prog_name="splitkv bench")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def too_large(**options: Any) -> torch.Tensor:
    """A kernel whose answer is a little too large."""
    out = right(**options)
    for part in out if isinstance(out, tuple) else (out,):
        part.mul_(1.05)
    return out  # type: ignore[return-value]


right = splitkv.decode_attention


def test_the_script_has_the_command_and_its_help_an_example() -> None:
    done = script("bench", "fuzz", "--help")
    assert done.returncode == 0 and "Example: splitkv bench fuzz" in done.stdout


def test_a_run_prints_a_table_and_writes_the_record(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fuzz.json"
    code, out, err = fuzz(*FEW, "--seed", "4", "--out", str(path))
    assert (code, err) == (0, "")
    assert "backend cpu, seed 4: 12 of 12 cases computed, 0 refused" in out and "0 failing" in out
    result = json.loads(path.read_text())
    assert result["schema"] == "splitkv.fuzz.v1" and result["passed"]
    assert result["command"] == (
        f"splitkv bench fuzz --backend cpu --cases 12 --seed 4 --jobs 1 --shapes 0 --out {path}"
    )
    assert {"commit", "dirty", "cpu", "versions", "read_bandwidth_tb_s", "rows", "wall_s"} <= result.keys()
    assert sum(row["cases"] for row in result["rows"]) == result["computed"] == 12


def test_json_alone_on_standard_output() -> None:
    code, out, _ = fuzz(*FEW, "--json")
    assert code == 0 and json.loads(out)["cases"] == 12


def test_a_failure_is_exit_1_and_its_command_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode_attention", too_large)
    code, out, _ = fuzz(*FEW)
    assert code == 1 and "FAILED case 0" in out and "shrunk:" in out
    repro = next(line for line in out.splitlines() if line.strip().startswith("again:"))
    words = repro.split("splitkv bench fuzz ")[1].split()
    code, out, err = fuzz(*words)
    assert code == 1 and "FAILED" in out and "failed: " in err
    shrunk = next(line for line in out.splitlines() if line.startswith("shrunk: "))
    code, out, _ = fuzz("--backend", "cpu", "--case", shrunk.removeprefix("shrunk: "))
    assert code == 1 and "FAILED" in out


def test_one_case_of_a_run() -> None:
    code, out, _ = fuzz("--backend", "cpu", "--seed", "2", "--only", "17")
    assert code == 0 and out.splitlines()[0] == draw_case(2, 17).to_json()
    assert "out: largest error is" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "tpu"), "backend: expected one of auto, cpu, cuda, triton, rowwise, got 'tpu'"),
        (("--cases", "0"), "cases: expected at least 1, got 0"),
        (("--case", "{}"), "case: expected the JSON object that a failure prints"),
        (("--case", "{}", "--only", "1"), "only: expected --only or --case, got both"),
        (("--shrink",), "shrink: expected --only or --case with it, got neither"),
        (("--out", f"{__file__}/fuzz.json"), "out: expected a file in a writable folder"),
        (("--seed", "-1"), "--seed"),
    ],
)
def test_bad_usage_is_exit_2(words: tuple[str, ...], message: str) -> None:
    code, out, err = fuzz(*words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split()) and "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_backend_is_refused_without_one() -> None:
    code, _, err = fuzz("--backend", "triton")
    assert code == 2 and "expects a CUDA GPU" in err
