"""Rules on the source text itself: short files, no assert as an input check, few environment variables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from splitkv.plan import CPU_TILE_KEYS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "splitkv"
PYTHON = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("src", "tests", "tools", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".c", ".h", ".cu", ".cuh")
)
MOST_LINES = 450
ENVIRONMENT = {"SPLITKV_POLICY", "SPLITKV_GQA_PACK", "SPLITKV_BACKEND", "SPLITKV_CHECK"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_no_assert_statement(path: Path) -> None:
    """`python -O` removes asserts, and an assert does not say what was expected: input checks raise."""
    asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not asserts, f"assert statements at lines {asserts}"


def test_at_most_four_environment_variables() -> None:
    text = "\n".join(path.read_text() for path in PYTHON)
    assert set(re.findall(r"""["'](SPLITKV_[A-Z_]+)["']""", text)) <= ENVIRONMENT


RESULTS = sorted((ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=relative)
def test_results_name_no_folder_of_the_machine_that_made_them(path: Path) -> None:
    assert not re.findall(r"/(?:root|tmp|work|home)/[^\s\"]*", path.read_text())


def test_constants_that_the_plan_shares_with_the_c_kernel() -> None:
    header = (PACKAGE / "backends" / "cpu_scores.h").read_text()
    assert re.findall(r"^#define TILE_KEYS (\d+)", header, re.MULTILINE) == [str(CPU_TILE_KEYS)]
