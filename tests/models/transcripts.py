"""Runs the command line in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from splitkv.bench.generating import app

SRC = Path(__file__).resolve().parents[2] / "src"
PROGRAM = "from splitkv.cli import main; main()"


def command(*words: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """`splitkv words...`; `prelude` is Python that runs first."""
    env = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{PROGRAM}", *words], env=env, capture_output=True, text=True, timeout=900
    )


def run(*words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `splitkv words...`, in this process."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "100"}, prog_name="splitkv")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.replace("│", " ").split())
