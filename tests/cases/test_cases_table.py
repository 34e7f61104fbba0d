"""docs/cases.md, the tests and the faults name each other."""

from __future__ import annotations

import re
from pathlib import Path

import faults
import faults_in_python

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d\d) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "cases.md").read_text())
NUMBERS = [f"{number:02}" for number in range(1, 33)]


def defined(pattern: str) -> set[str]:
    files = [*ROOT.glob("tests/cases/test_*.py"), ROOT / "tests" / "gpu" / "test_cases_gpu.py"]
    return {
        number for path in files for number in re.findall(rf"^def test_case_(\d\d)_{pattern}", path.read_text(), re.M)
    }


def test_every_case_has_a_test_and_one_that_sees_it_fail() -> None:
    assert sorted(defined("(?!catches)")) == NUMBERS
    assert sorted(defined("catches")) == NUMBERS


def test_the_table_has_every_case_and_names_what_is_there() -> None:
    assert [number for number, *_ in ROWS] == NUMBERS
    for number, _, tests, fault in ROWS:
        for name in re.findall(r"`([^`]+)`", tests):
            text = (ROOT / name).read_text()
            ours = name.startswith("tests/cases/test_c") or name.endswith("test_cases_gpu.py")
            assert not ours or f"def test_case_{number}_" in text, f"case {number}: not in {name}"
        for name in re.findall(r"`([^`]+)`", fault):
            assert hasattr(faults, name) or hasattr(faults_in_python, name), f"case {number}: no fault {name}"


def test_every_fault_is_planted_somewhere() -> None:
    users = [*ROOT.glob("tests/cases/test_*.py"), ROOT / "tests" / "gpu" / "test_cases_gpu.py"]
    text = "".join(path.read_text() for path in users)
    for module in (faults, faults_in_python):
        for name, value in vars(module).items():
            if isinstance(value, faults.Fault):
                assert re.search(rf"\.{name}\b", text), f"{name} is planted nowhere"
