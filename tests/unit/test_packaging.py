"""The wheel builds offline, is small and pure Python, holds what it needs and no more, and runs installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (".py", ".c", ".h", ".cu", ".cuh", ".json", ".typed")


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing left over in the checkout can get in."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    left_over = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", copy / "src", ignore=left_over)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist")
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_wheel_is_small_and_the_same_for_every_machine(wheel: Path) -> None:
    assert wheel.name == "splitkv-0.1.0-py3-none-any.whl"
    assert wheel.stat().st_size < 1_000_000


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.startswith("splitkv-0.1.0.dist-info/")}
    package = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "splitkv").rglob("*") if path.suffix in SHIPPED
    }
    assert names - metadata == package
    assert {"splitkv/py.typed", "splitkv/backends/cpu_kernel.c", "splitkv/backends/cuda_split.cu"} <= package
    assert "splitkv-0.1.0.dist-info/licenses/LICENSE" in metadata


def test_wheel_installs_and_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ("--no-deps", "--no-index", "--target", site)
    run(sys.executable, "-m", "pip", "install", *options, wheel, cwd=tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import torch, splitkv
q, k, v = torch.randn(1, 8, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64)
out = splitkv.decode_attention(q, k, v, 100, backend="cpu")
expected = splitkv.reference_attention(q, k, v, 100)
assert (out - expected).abs().max() < 1e-5
print(splitkv.__file__)
"""
    # -I: neither the current folder nor PYTHONPATH may lend it the checkout.
    printed = run(sys.executable, "-I", "-c", program, cwd=tmp_path)
    assert Path(printed.strip()) == site / "splitkv" / "__init__.py"
