"""Backends: each offers `launch`, which takes checked tensors and a plan. Imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

LAUNCHERS = {"cpu": "cpu", "triton": "triton_launch", "rowwise": "rowwise"}
"""Backend name to the module in this package that launches it."""


@cache
def launcher(name: str) -> Callable[..., None]:
    """The `launch` function of a backend."""
    return import_module(f"{__name__}.{LAUNCHERS[name]}").launch
