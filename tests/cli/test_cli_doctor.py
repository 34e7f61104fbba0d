"""`splitkv doctor`: every line is found out by trying, and the chosen backend decides the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import run, script

import splitkv
from splitkv.bench import doctor, machine


def test_doctor_tries_the_chosen_backend() -> None:
    done = script("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["schema"] == "splitkv.doctor.v1"
    names = {check["name"]: check for check in report["checks"]}
    expected = {
        "python",
        "torch",
        "triton",
        "gpu",
        "cpu",
        "memory",
        "memory pages",
        "c compiler",
        "cpu kernel",
        "decode: cpu",
    }
    assert names.keys() >= expected
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn", "fail", "absent"}
    assert report["passed"] and done.returncode == 0
    assert names[f"decode: {report['backend']}"]["status"] == "ok"


def test_doctor_prints_lines_and_a_verdict() -> None:
    code, out, _ = run("doctor")
    assert code == 0 and "decode: cpu" in out and " works on " in out and "chosen because" in out
    assert max(map(len, out.splitlines()[:-1])) <= 100


@pytest.mark.parametrize("problem", ["wrong", "raises"])
def test_doctor_fails_with_the_chosen_backend(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    def broken(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if problem == "raises":
            raise OSError("libgomp.so.1: cannot open shared object file")
        return torch.zeros_like(q)

    monkeypatch.setattr(splitkv, "decode_attention", broken)
    code, out, _ = run("doctor")
    assert code == 1 and "does not work on" in out
    assert ("libgomp.so.1" if problem == "raises" else "too much in f32, f16, bf16") in " ".join(out.split())


def test_doctor_names_what_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", "cpu")
    report = doctor.examine()
    assert report["backend"] == "cpu" and report["why"] == "SPLITKV_BACKEND says so"
    assert any(check["detail"] == "SPLITKV_BACKEND=cpu" and check["status"] == "warn" for check in report["checks"])


def test_a_backend_that_cannot_run_here_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", "abacus")
    code, out, _ = run("doctor")
    assert code == 1 and "backend abacus does not work" in out


@pytest.mark.parametrize(
    "pages, exists, status, words",
    [
        ("2 MiB (always)", True, "ok", "2 MiB (always) for caches and weights"),
        ("4 KiB (never)", True, "absent", "4 KiB (never); the CPU reads faster with madvise in "),
        ("16 KiB", False, "absent", "16 KiB"),
    ],
)
def test_doctor_says_which_pages_memory_comes_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: str, exists: bool, status: str, words: str
) -> None:
    setting = tmp_path / "enabled"
    if exists:
        setting.touch()
    monkeypatch.setattr(machine, "HUGE_PAGES", setting)
    monkeypatch.setattr(machine, "memory_pages", lambda: pages)
    line = next(check for check in doctor.examine()["checks"] if check["name"] == "memory pages")
    assert line["status"] == status and line["detail"].startswith(words)
    assert (str(setting) in line["detail"]) == ("never" in pages)
