"""README.md does what it says: its commands run as printed, its Python runs, its links and file tree exist.

Every fenced `bash` block and `python` block counts. A comment on the line above a block says what keeps it
from running here: `<!-- slow -->` (each command is only asked for --help) or `<!-- gpu -->` (needs a device).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_RUN = {"slow", "gpu"}


class Block(NamedTuple):
    language: str
    text: str
    marks: set[str]
    line: int


def fenced_blocks() -> list[Block]:
    block = r"^(?:<!-- (?P<marks>[a-z ]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$"
    return [
        Block(m["language"], m["text"], set((m["marks"] or "").split()), README[: m.start()].count("\n") + 1)
        for m in re.finditer(block, README, re.M | re.S)
    ]


BLOCKS = fenced_blocks()
# (command, whether it is run in full), comments and blank lines dropped.
COMMANDS = [
    (command, not block.marks & NOT_RUN)
    for block in BLOCKS
    if block.language == "bash"
    for command in (line.split("  #")[0].strip() for line in block.text.splitlines())
    if command and not command.startswith("#")
]
PYTHON = [
    pytest.param(block, marks=[pytest.mark.gpu] if "gpu" in block.marks else [], id=f"line{block.line}")
    for block in BLOCKS
    if block.language == "python"
]


def run_as_a_user(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """From a folder of its own, with this Python's environment first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("command", "in_full"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command(command: str, in_full: bool, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "make":  # running them here would start this test again
        targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
    elif words[:2] == ["pip", "install"]:
        for extras in re.findall(r"\[(.*?)\]", command):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    elif words[0] == "splitkv":
        result = run_as_a_user(words if in_full else [*words[:2], "--help"], tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.strip()
    elif words[:2] == [".venv/bin/python", "-m"]:
        assert words[2] == "pytest"
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-"))
    else:
        pytest.fail(f"README has a command that this test cannot check: {command}")


@pytest.mark.parametrize("block", PYTHON)
def test_python_block(block: Block, tmp_path: Path) -> None:
    result = run_as_a_user([sys.executable, "-c", block.text], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_has_what_a_newcomer_needs_first() -> None:
    commands = [command for command, _ in COMMANDS]
    assert commands[:2] == ["make rungs", "make test"]
    assert len(PYTHON) >= 2


def test_links_exist() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert not [link for link in links if not (ROOT / link).exists()]


def tree_paths() -> list[str]:
    """Paths named in the file tree: two spaces of indent a level, a folder ends in a slash."""
    (tree,) = (block.text for block in BLOCKS if block.language == "text" and "src/splitkv/\n" in block.text)
    folders: list[str] = []
    paths = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def test_file_tree_is_the_real_one() -> None:
    named = tree_paths()
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing, f"README's file tree names {missing}"
    package = ROOT / "src" / "splitkv"
    sources = [path for path in package.rglob("*") if path.suffix in (".py", ".c", ".h", ".cu", ".cuh")]
    files = {str(path.relative_to(ROOT)) for path in sources if path.name != "__init__.py"}
    assert not sorted(files - set(named)), f"README's file tree lacks {sorted(files - set(named))}"
