"""How the tests of this folder call the command line."""

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from splitkv.cli import application

SRC = Path(__file__).resolve().parents[2] / "src"
PLAN = ("plan", "--heads", "16/4", "--head-dim", "256", "--context", "262144")


def run(*words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `splitkv words...`, in this process."""
    result = CliRunner().invoke(application(), list(words), env={"COLUMNS": "100"}, prog_name="splitkv")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def flat(text: str) -> str:
    """A message without the frame around it and its line breaks."""
    return " ".join(text.replace("│", " ").split())


def script(*words: str, prelude: str = "", columns: str = "100") -> subprocess.CompletedProcess[str]:
    """The console script in a process of its own."""
    program = f"{prelude}\nfrom splitkv.cli import main\nmain()"
    env = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "COLUMNS": columns}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
