"""Rotary positions: the frequencies that a model's config asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from splitkv import UnsupportedError

from ..cache.models import Fields

_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary positions. frequencies: radians per token of each pair of columns; scale: of cosine and sine.

    all_columns: YaRN's factor for the whole logit (its mscale_all_dim), squared into the softmax scale by those models
    that say so; else 1.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    all_columns: float = 1.0


def positive(fields: Fields, name: str, default: float | None = None) -> float:
    """A number above 0; ValueError with file and field otherwise."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise fields.error(name, "a number above 0")
    return float(value)


def rope_parameters(fields: Fields) -> dict[str, Any]:
    """The config's rope_parameters, or what older configs call rope_theta and rope_scaling."""
    given = fields.get("rope_parameters")
    if given is None:
        scaling = fields.get("rope_scaling", {})
        scaling = scaling if isinstance(scaling, dict) else {"rope_type": scaling}
        given = {"rope_theta": fields.get("rope_theta")} | scaling
    if not isinstance(given, dict):
        raise fields.error("rope_parameters", "an object")
    return given


def read_rope(given: dict[str, Any], fields: Fields, head_dim: int, share: float = 1.0, inside: str = "") -> Rope:
    """Frequencies in float32, as models are trained: at 262,144 tokens one ulp more or less is 0.01 radian.

    given: rope parameters; inside: their name under rope_parameters, for errors. share: of the head's columns that
    turn, where the config does not say.
    """
    rope = Fields(given, fields.source, f"{fields.prefix}rope_parameters.{inside}")
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in _TYPES:
        raise UnsupportedError(
            f"{rope.source}: {rope.prefix}rope_type: expected one of {', '.join(_TYPES)}, got {name!r}"
        )
    where = rope if rope.get("partial_rotary_factor") is not None else fields
    columns = int(head_dim * min(positive(where, "partial_rotary_factor", share), 2.0))
    if columns < 2 or columns % 2 or columns > head_dim:
        raise where.error("partial_rotary_factor", f"a share of the {head_dim} columns that is an even number")
    theta = positive(rope, "rope_theta", 10_000.0)
    plain = (1.0 / theta ** (torch.arange(0, columns, 2, device="cpu").float() / columns)).tolist()
    if name == "default":
        return Rope(tuple(plain))
    factor = positive(rope, "factor")
    if name == "linear":
        return Rope(tuple(f / factor for f in plain))
    stated = rope.get("original_max_position_embeddings") is not None
    longest = (
        positive(rope, "original_max_position_embeddings") if stated else fields.integer("max_position_embeddings")
    )
    if name == "llama3":
        return Rope(_llama3(rope, plain, factor, longest))
    return _yarn(rope, plain, factor, theta, columns, longest)


def _llama3(rope: Fields, plain: list[float], factor: float, longest: float) -> tuple[float, ...]:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    scaled = []
    for frequency in plain:
        turns = longest * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(keep * frequency + (1 - keep) * frequency / factor)
    return tuple(scaled)


def _yarn(rope: Fields, plain: list[float], factor: float, theta: float, columns: int, longest: float) -> Rope:
    """YaRN: frequencies blended by their number of turns in the original context, and a scale on the logits."""

    def pair_of(turns: float) -> float:
        return columns * math.log(longest / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def weighted(name: str) -> float:
        """1 + 0.1 m log(factor), m being this field; 1 where it is 0 or missing."""
        weight = 0.0 if rope.get(name, 0.0) == 0 else positive(rope, name)
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    first, last = pair_of(positive(rope, "beta_fast", 32.0)), pair_of(positive(rope, "beta_slow", 1.0))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, columns - 1)
    scaled = []
    for i, frequency in enumerate(plain):
        keep = 1 - min(max((i - first) / ((last - first) or 0.001), 0.0), 1.0)
        scaled.append(keep * frequency + (1 - keep) * frequency / factor)
    scale = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = weighted("mscale") / weighted("mscale_all_dim")
    return Rope(tuple(scaled), positive(rope, "attention_factor", scale), weighted("mscale_all_dim"))
