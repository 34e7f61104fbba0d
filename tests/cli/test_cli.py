"""The command line as a user meets it first: help, version, refusals, exit codes."""

import pytest
import torch
from commandline import PLAN, flat, run, script


@pytest.mark.parametrize("words", [(), ("rungs",), ("plan",), ("doctor",)])
def test_help_has_an_example(words: tuple[str, ...]) -> None:
    code, out, _ = run(*words, "--help")
    assert code == 0 and "Usage: splitkv" in out
    assert not words or f"Example: splitkv {words[0]}" in out


def test_version() -> None:
    done = script("--version")
    assert done.returncode == 0 and done.stdout.startswith("splitkv ")


def test_without_typer_one_line_says_what_to_install() -> None:
    done = script("doctor", prelude="import sys; sys.modules['typer'] = None")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "splitkv's commands need typer and rich: pip install 'splitkv[cli]'\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rungs", "--lengths", "4096,x"), "lengths: expected numbers of tokens in 1..262144"),
        (("rungs", "--lengths", "262145"), "got '262145'"),
        (("rungs", "--lengths", "0"), "got '0'"),
        (
            ("rungs", "--heads", "25/4"),
            "heads: expected QUERY/KV heads with an integer ratio, such as 16/4, got '25/4'",
        ),
        (
            ("rungs", "--dtypes", "f32,fp8"),
            "dtypes: expected some of f32, f16, bf16, joined by commas, got 'f32,fp8'",
        ),
        (("rungs", "--device", "tpu"), "device: expected cuda or cpu, got 'tpu'"),
        (("rungs", "--commit", "main"), "commit: expected 7 to 40 hexadecimal digits, or COMMIT:TREE, got 'main'"),
        (("rungs", "--out", f"{__file__}/rungs.json"), "out: expected a file in a writable folder"),
        (("rungs", "--seed", "-1"), "--seed"),
        ((*PLAN, "--device", "tpu"), "device: expected current or one of h200"),
        ((*PLAN, "--device", "h200", "--policy", "best"), "policy: expected auto, waves"),
        ((*PLAN, "--device", "h200", "--kv-dtype", "int8"), "dtype: expected one of f32"),
        ((*PLAN, "--device", "h200", "--page-size", "0"), "page_size: expected at least 1"),
        ((*PLAN[:-1], "300000", "--device", "h200"), "context: expected 0..262144 tokens, got 300000"),
        (("plan",), "--heads"),
        (("doctor", "--fast"), "--fast"),
        (("fly",), "fly"),
    ],
)
def test_bad_usage_is_exit_2_with_the_argument_and_no_traceback(words: tuple[str, ...], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in flat(err) and "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    code, _, err = run("rungs", "--device", "cuda")
    assert code == 2 and "expected a CUDA GPU" in err
