"""`splitkv bench attention` and `splitkv report` as a user meets them."""

import json
from pathlib import Path

import pytest
from commandline import flat, run, script

from splitkv.bench.report import ATTENTION

SMALL = "^table: 1, 14/2, 64, 512"


@pytest.fixture(scope="module")
def result_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest case of the table, run on this machine's CPU."""
    out = tmp_path_factory.mktemp("results") / "attention.json"
    words = ("bench", "attention", "--device", "cpu", "--cases", SMALL, "--out", str(out))
    done = script(*words)
    assert done.returncode == 0, done.stderr
    assert "1, 14/2, 64, 512, bf16" in done.stdout and f"wrote {out}" in done.stdout
    return out


def test_a_run_writes_the_file_that_its_command_re_creates(result_file: Path) -> None:
    record = json.loads(result_file.read_text())
    assert record["schema"] == ATTENTION and record["failed_rows"] == 0
    assert record["command"].startswith("splitkv bench attention --device cpu --cases '^table: 1, 14/2, 64, 512'")
    (row,) = record["rows"]
    assert set(row["us"]) == {"splitkv", "sdpa"} and row["err"]["splitkv"] < 3e-3
    assert row["floor_us"] > 0 and row["threads"] == record["threads"] and record["goal"] == "1.25 x floor"


def test_the_list_names_cases_and_contenders_and_runs_nothing() -> None:
    code, out, _ = run("bench", "attention", "--device", "cpu", "--list", "--cases", "^table")
    lines = out.splitlines()
    assert code == 0 and "table: 1, 16/4, 256, 4096, bf16" in lines
    assert [line.split(":")[0] for line in lines[-3:]] == ["splitkv", "sdpa", "llama.cpp"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "attention", "--device", "cpu", "--cases", "("), "cases: expected a regular expression"),
        (("bench", "attention", "--device", "cpu", "--cases", "none such"), "cases: expected a pattern that some"),
        (("bench", "attention", "--device", "cpu", "--with", "fa9"), "with: expected some of splitkv, sdpa"),
        (("bench", "attention", "--device", "tpu"), "device: expected cuda or cpu"),
        (("bench", "attention", "--limit-s", "0"), "--limit-s"),
        (("report",), "Missing argument 'results'"),
        (("report", "none.json"), "results: expected a result file, got none.json"),
    ],
)
def test_bad_usage_is_exit_2_with_the_argument(words: tuple[str, ...], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in flat(err) and "Traceback" not in err


@pytest.mark.parametrize("words", [("bench", "attention"), ("report",)])
def test_help_has_an_example(words: tuple[str, ...]) -> None:
    code, out, _ = run(*words, "--help")
    assert code == 0 and f"Example: splitkv {' '.join(words)}" in out


def test_report_of_a_run(result_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report.html"
    done = script("report", str(result_file), "--out", str(out), "--plots", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["written"][0] == str(out) and said["records"]["attention"]["timed"] == 1
    assert "1, 14/2, 64, 512, bf16" in out.read_text() and (tmp_path / "attention-cases.png").exists()


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path) -> None:
    prelude = "import sys; sys.modules['matplotlib'] = None"
    done = script("report", "any.json", "--out", str(tmp_path / "r.html"), prelude=prelude)
    assert done.returncode == 1
    assert done.stderr == "failed: splitkv report needs matplotlib: pip install 'splitkv[report]'\n"
    assert not (tmp_path / "r.html").exists()
