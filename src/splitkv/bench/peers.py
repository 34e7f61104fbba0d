"""Every contender of `splitkv bench attention`, and how a run picks among them."""

from __future__ import annotations

from collections.abc import Sequence

from . import peers_fa3, peers_flashinfer, peers_llamacpp, peers_torch
from .contender import OURS, Contender
from .machine import package_version

_FILES = (peers_torch, peers_flashinfer, peers_fa3, peers_llamacpp)
CONTENDERS = {contender.name: contender for file in _FILES for contender in file.CONTENDERS}
"""By name, ours first, in the order of the tables."""


def choose_contenders(device: str, text: str | None = None) -> tuple[Contender, ...]:
    """The contenders named in "a,b,c" (ours is always one of them), or all that a device runs.

    Raises ValueError naming the option, what was expected and what came.
    """
    known = {name: contender for name, contender in CONTENDERS.items() if device in contender.devices}
    if text is None:
        return tuple(known.values())
    names = [word.strip() for word in text.split(",")]
    if not all(name in known for name in names):
        raise ValueError(f"with: expected some of {', '.join(known)}, joined by commas, got {text!r}")
    return tuple(contender for name, contender in known.items() if name == OURS or name in names)


def versions_of(contenders: Sequence[Contender]) -> dict[str, str | None]:
    """Installed version of every distribution that a contender comes from; None where it is not installed."""
    return {package: package_version(package) for contender in contenders for package in contender.packages}
