"""Backends: each offers `launch`, which takes checked tensors and a plan. Imported when first used.

A backend may offer `prepare` too: the same arguments, and back comes a `PreparedLaunch` for every later call that
differs in addresses and in a uniform length alone (docs/adding-a-backend.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

LAUNCHERS = {"cpu": "cpu", "triton": "triton_launch", "rowwise": "rowwise"}
"""Backend name to the module in this package that launches it."""

TENSORS = (
    "q", "k_cache", "v_cache", "seq_lens", "block_table", "out", "lse", "workspace",
    "starts", "mask", "sinks", "k_scale", "v_scale",
)  # fmt: skip
"""Order of the addresses that a prepared launch takes. 0 stands for what is absent or is a number."""


class PreparedLaunch(Protocol):
    """One call of a backend with everything fixed but the addresses of its tensors and a uniform length.

    variant: equal for launches that run the same compiled code, so that one of them compiles it for all.
    """

    @property
    def variant(self) -> Hashable: ...

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        """Launch on the current stream of the tensors' device; the first call may compile.

        addresses: one per name in TENSORS, each a multiple of 16 where the prepared tensor's was. uniform_len: the
        length of every row where seq_lens was an int.
        """


@cache
def launcher(name: str) -> Callable[..., None]:
    """The `launch` function of a backend."""
    return _module(name).launch


@cache
def preparer(name: str) -> Callable[..., PreparedLaunch | None]:
    """The `prepare` function of a backend; one that prepares nothing where it has none."""
    return getattr(_module(name), "prepare", _prepare_nothing)


def _prepare_nothing(**_: Any) -> None:
    return None


def _module(name: str) -> ModuleType:
    return import_module(f"{__name__}.{LAUNCHERS[name]}")
