"""How a fault is planted: a backend's sources are copied, a few words changed, and the copy answers instead.

An edit is (file, old, new). Old text that is not there exactly once is an error: the sources moved on, and the fault
must follow them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers
import pytest

import splitkv.backends
from splitkv import plan
from splitkv.backends import cpu
from splitkv.backends.cpu_build import BASE_FLAGS, HEADERS, SOURCE, Library

Edit = tuple[str, str, str]
FOLDER = Path(splitkv.backends.__file__).parent
C_FILES = (SOURCE.name, *HEADERS)
TRITON_FILES = ("triton_tile.py", "triton_split.py", "triton_merge.py", "triton_launch.py")
RELATIVE_IMPORT = re.compile(r"^from (\.+)(\w*) import", re.MULTILINE)
QUICK_TO_COMPILE = "-O0"


@dataclass(frozen=True)
class Fault:
    """c, triton: edits of the two backends' sources. patch: instead, what is changed in Python, for any backend."""

    c: tuple[Edit, ...] = ()
    triton: tuple[Edit, ...] = ()
    patch: Callable[[pytest.MonkeyPatch], None] | None = None

    def plant(self, backend: str, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
        if self.patch:
            self.patch(monkeypatch)
        elif folder is None:
            raise ValueError("folder: expected one for the copy of the sources, got None")
        elif backend == "cpu":
            use_c_copy(self.c, monkeypatch, folder)
        else:
            use_triton_copy(self.triton, monkeypatch, folder)


def copy_edited(names: Iterable[str], edits: tuple[Edit, ...], folder: Path) -> None:
    texts = {name: (FOLDER / name).read_text() for name in names}
    for name, old, new in edits:
        if texts[name].count(old) != 1:
            raise LookupError(f"{name}: expected this text once, found it {texts[name].count(old)} times: {old}")
        texts[name] = texts[name].replace(old, new)
    for name, text in texts.items():
        (folder / name).write_text(RELATIVE_IMPORT.sub(_absolute, text) if name.endswith(".py") else text)


def _absolute(match: re.Match[str]) -> str:
    """A copy imports other copies from its own package, and everything else from ours."""
    dots, module = match.groups()
    if dots == "." and f"{module}.py" in TRITON_FILES:
        return match[0]
    package = "splitkv.backends" if dots == "." else "splitkv"
    return f"from {package}{'.' * bool(module)}{module} import"


def use_c_copy(edits: tuple[Edit, ...], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    copy_edited(C_FILES, edits, folder)
    library, compiler = folder / "faulty.so", shlex.split(os.environ.get("CC", "")) or ["cc"]
    command = [*compiler, *BASE_FLAGS, QUICK_TO_COMPILE, "-o", str(library), str(folder / SOURCE.name), "-lm"]
    subprocess.run(command, check=True)
    loaded = Library(ctypes.CDLL(str(library)), library, compiler[0], ())
    monkeypatch.setattr(cpu, "_library", lambda: loaded)


def use_triton_copy(edits: tuple[Edit, ...], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    package = folder / f"faulty_{folder.name}"
    package.mkdir()
    copy_edited(TRITON_FILES, edits, package)
    monkeypatch.syspath_prepend(str(folder))
    use_launcher(importlib.import_module(f"{package.name}.triton_launch").launch, monkeypatch)


def use_launcher(launch: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launcher(lambda name: launch, monkeypatch)


def replace_launcher(launcher: Callable[[str], Callable[..., None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In every module that has imported it; launches that were prepared before, or could be, are not used."""
    right = helpers.launcher
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("splitkv", "helpers"):
            continue
        if getattr(module, "launcher", None) is right:
            monkeypatch.setattr(module, "launcher", launcher)
        if hasattr(module, "preparer"):
            monkeypatch.setattr(module, "preparer", lambda backend: lambda **arguments: None)
        if hasattr(module, "_CALLS"):
            monkeypatch.setattr(module, "_CALLS", type(module._CALLS)())


def change_launches(change: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch gets the arguments that `change` makes of the right ones."""
    right = helpers.launcher
    replace_launcher(lambda name: lambda **arguments: right(name)(**change(arguments)), monkeypatch)


def change_plans(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, changed: Any) -> None:
    """Replace a function that plans are made with, and forget the plans made with it before and after."""
    monkeypatch.setattr(module, name, changed)
    monkeypatch.setattr(plan, "_plan", plan._plan.__wrapped__)


def caught() -> Any:
    """The check inside must fail: an assertion, or an error that it waited for and that did not come."""
    return pytest.raises((AssertionError, pytest.fail.Exception))
