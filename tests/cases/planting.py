"""How a fault is planted: a backend's sources are copied, a few words changed, and the copy answers instead.

An edit is (file, old, new). Old text that is not there exactly once is an error: the sources moved on, and the fault
must follow them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers
import pytest

import splitkv.attention
import splitkv.backends
from splitkv import plan
from splitkv.backends import cpu
from splitkv.backends.cpu_build import BASE_FLAGS, HEADERS, SOURCE, Library

Edit = tuple[str, str, str]
FOLDER = Path(splitkv.backends.__file__).parent
C_FILES = (SOURCE.name, *HEADERS)
TRITON_FILES = ("triton_tile.py", "triton_split.py", "triton_merge.py", "triton_launch.py", "rowwise.py")
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
        (folder / name).write_text(text.replace("from ..", "from splitkv.") if name.endswith(".py") else text)


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
    for module in (splitkv.attention, helpers):
        monkeypatch.setattr(module, "launcher", lambda name: launch)


def change_launches(change: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch gets the arguments that `change` makes of the right ones."""
    right = splitkv.attention.launcher
    changed = lambda name: lambda **arguments: right(name)(**change(arguments))  # noqa: E731
    for module in (splitkv.attention, helpers):
        monkeypatch.setattr(module, "launcher", changed)


def change_plans(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, changed: Any) -> None:
    """Replace a function that plans are made with, and forget the plans made with it before and after."""
    monkeypatch.setattr(module, name, changed)
    monkeypatch.setattr(plan, "_plan", plan._plan.__wrapped__)


def caught() -> Any:
    """The check inside must fail: an assertion, or an error that it waited for and that did not come."""
    return pytest.raises((AssertionError, pytest.fail.Exception))
