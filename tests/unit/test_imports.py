"""Imports point one way, and `import splitkv` is quick, quiet and needs only torch.

problem <- tuning, policy <- plan <- checks <- prepared -> backends, then attention, decode_loop and ops on top.
reference imports nothing of ours; bench, integrations, models and the command line use the public names and the modules
without torch.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = SRC / "splitkv"

PURE = {"problem", "tiles", "tuning", "policy", "plan", "whole_file"}
PUBLIC = {"splitkv", *PURE}  # "splitkv" stands for the package itself, that is its public names
CORE = {*PURE, "checks", "reference", "ops", "attention", "decode_loop", "backends", "cache"}

# What a module, or any module of a package, may import of ours besides its own siblings.
# One that is not listed is held to the strictest useful rule: the pure modules alone.
ALLOWED: dict[str, set[str]] = {
    "splitkv": CORE,
    "problem": set(),
    "tiles": {"problem"},
    "tuning": {"problem"},
    "policy": {"problem", "tiles"},
    "plan": {"problem", "tiles", "tuning", "policy"},
    "reference": set(),
    "whole_file": set(),
    "checks": PURE,
    "device_checks": {*PURE, "checks"},
    "backends": PURE,
    "scratch": {"problem"},
    "prepared": {*PURE, "checks", "device_checks", "backends", "scratch"},
    "attention": {*PURE, "checks", "device_checks", "backends", "prepared"},
    "decode_loop": {*PURE, "checks", "device_checks", "prepared", "attention"},
    "ranks": {*PURE, "checks", "attention", "decode_loop", "backends"},
    "ops": {*PURE, "checks", "attention"},  # attention reaches the operator as torch.ops.splitkv
    "cache": {*PURE, "checks", "device_checks", "backends"},
    "models": {*PUBLIC, "cache", "backends"},
    "integrations": PUBLIC,
    "bench": {*PUBLIC, "cache", "models", "integrations", "ranks"},
    "cli": {*PUBLIC, "bench", "models", "integrations", "doctor"},
    "doctor": {"splitkv", *CORE},
}
# At import; a function may still look at the current device.
NO_TORCH = ("problem", "tiles", "tuning", "policy", "plan", "whole_file", "cache.memory", "cache.models")


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_names(name: str, nodes: list[ast.stmt]) -> set[str]:
    """Dotted names that the module imports: `from .a import b` is a.b if that is a module, else a."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.Module(nodes, [])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def parse(name: str) -> list[ast.stmt]:
    return ast.parse(MODULES[name].read_text(), str(MODULES[name])).body


def part(name: str) -> str:
    """splitkv.backends.cpu -> backends; splitkv.policy -> policy; splitkv -> splitkv."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else pieces[0]


def is_ours(name: str) -> bool:
    return name == "splitkv" or name.startswith("splitkv.")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    own = part(name)
    allowed = {own, *ALLOWED.get(own, PURE)}
    if own == "splitkv":
        allowed.discard("splitkv")
    imported = imported_names(name, parse(name))
    wrong = sorted(other for other in imported if is_ours(other) and part(other) not in allowed)
    assert not wrong, f"{name} may import {sorted(allowed)} of ours, and imports {wrong}"
    foreign = sorted(other for other in imported if other.split(".")[0] in ("tests", "tools", "examples"))
    assert not foreign, f"{name} imports {foreign}"


def test_no_import_cycle() -> None:
    graph = {
        name: {other for other in imported_names(name, parse(name)) if other in MODULES and other != name}
        for name in MODULES
        if name != "splitkv"
    }
    for others in graph.values():
        others.discard("splitkv")  # users of the public names come after it by ALLOWED
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the cycle


@pytest.mark.parametrize("name", NO_TORCH)
def test_pure_modules_need_no_torch(name: str) -> None:
    at_import = [node for node in parse(f"splitkv.{name}") if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    third_party = {other.split(".")[0] for other in imported_names(f"splitkv.{name}", at_import)}
    assert third_party <= {*sys.stdlib_module_names, "splitkv"}


# The lines of a fresh interpreter's program, so that nothing this process did can help or hinder.
BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)
sys.meta_path.insert(0, Block())
"""
REFUSE_GPU_QUERIES = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("the GPU was asked for something at import")
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties",
             "get_device_capability"):
    setattr(torch.cuda, name, refuse)
"""


def run_python(program: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_needs_only_torch_and_asks_no_gpu() -> None:
    optional = ("triton", "typer", "rich", "matplotlib", "transformers", "vllm", "gguf")
    # torch first: it may look for Triton on its own account.
    run_python(REFUSE_GPU_QUERIES + BLOCK.format(blocked=optional) + "import splitkv\n")


def test_import_is_quick() -> None:
    program = """
import time, numpy, torch
start = time.perf_counter()
import splitkv
print(time.perf_counter() - start)
"""
    # The best of up to three: another process on the machine can only make it slower.
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 1.0:
        seconds.append(float(run_python(program)))
    assert min(seconds) < 1.0, f"import splitkv took {seconds} s beyond torch"
