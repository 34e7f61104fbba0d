"""What a contender of `splitkv bench attention` is. The contenders themselves are in the peers_*.py files.

A contender says why it cannot run a case (`unable`), or makes a call that computes set i into a tensor of q's shape.
Whatever a library wants prepared (a plan, page lists, a quantised query) is prepared outside the call, as its users
do it once per step for all layers; whatever it does per layer is inside.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from .attention_cases import AttentionCase
from .attention_data import ROWS, CaseTensors
from .summary import OURS as OURS
from .timing import Call

Unable = Callable[[AttentionCase], str | None]
"""Why a contender does not run a case, or None."""
Make = Callable[[CaseTensors], Call]
"""The contender's call for one case: set number in, output out. May raise whatever its library raises."""


@dataclass(frozen=True)
class Contender:
    """packages: the distributions it comes from. devices: where it runs. quantises: with an fp8 cache it rounds the
    query or the probabilities to fp8 too, so its error is of another kind. half_sums: with an f16 cache it sums in f16,
    and so is its error. layout: which numbers it reads."""

    name: str
    what: str
    unable: Unable
    make: Make
    packages: tuple[str, ...] = ("torch",)
    devices: tuple[str, ...] = ("cuda",)
    quantises: bool = False
    half_sums: bool = False
    layout: str = ROWS


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def first_reason(*reasons: tuple[bool, str]) -> str | None:
    """The text of the first pair whose condition holds."""
    return next((text for holds, text in reasons if holds), None)
