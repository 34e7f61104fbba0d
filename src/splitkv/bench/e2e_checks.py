"""Checks of `splitkv bench e2e`: splitting changes no token, or float64 says why; what a KV dtype does to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

import splitkv

from ..models.decoder import Decoder
from ..models.state import DecodeState
from .parity import difference_of, float64_attention


class ExactAttention:
    """Attention in float64 over what the cache holds, called as DecodeAttention is. Rows of equal length."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, *, window: int | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """q's dtype. Raises ValueError for options that it does not know and that would change the result."""
        odd = {name: value for name, value in options.items() if value not in (None, 1.0)}
        if odd:
            raise ValueError(f"options: expected none but window, and scales of 1, got {odd}")
        keys = int(seq_lens[0])
        held = slice(0 if window is None else max(keys - window, 0), keys)
        return float64_attention(q, k_cache[:, held], v_cache[:, held]).to(q.dtype)


def exact_state(state: DecodeState) -> DecodeState:
    """The same memory, attended to in float64."""
    return state.with_attention(cast(splitkv.DecodeAttention, ExactAttention()))


@dataclass(frozen=True)
class Runs:
    """Tokens [steps, batch] of a run with splitting and of one without, from the same depth and first tokens."""

    first: Tensor
    split: Tensor
    unsplit: Tensor

    @property
    def flips(self) -> list[tuple[int, int]]:
        """(row, step) of the first difference in each row that has one."""
        different = (self.split != self.unsplit).cpu()
        return [(row, int(steps.nonzero()[0])) for row, steps in enumerate(different.T) if bool(steps.any())]


@torch.no_grad()
def audit_flips(
    decoder: Decoder, split: DecodeState, unsplit: DecodeState, runs: Runs, begin: Callable[[], None]
) -> list[dict[str, Any]]:
    """One entry for each row whose tokens differ: the logits of both ways and of attention in float64 at that step.

    begin: puts rows back to their depth. `margin`: by how much float64 prefers its choice of the two tokens. A flip is
    `explained` if the two ways' own errors, the largest of any logit, reach over the margin.
    """
    flips = runs.flips
    if not flips:
        return []
    states = {"split": split, "unsplit": unsplit, "float64": exact_state(split)}
    logits = {name: _logits_at(decoder, state, runs, flips, begin) for name, state in states.items()}
    entries = []
    for number, (row, step) in enumerate(flips):
        ours, theirs, exact = (logits[name][number] for name in states)
        pair = int(runs.split[step, row]), int(runs.unsplit[step, row])
        margin = abs(float(exact[pair[0]] - exact[pair[1]]))
        errors = [float((found - exact).abs().max()) for found in (ours, theirs)]
        entries.append(
            {
                "row": row,
                "step": step,
                "split_token": pair[0],
                "unsplit_token": pair[1],
                "float64_token": int(exact.argmax()),
                "margin": margin,
                "split_error": errors[0],
                "unsplit_error": errors[1],
                "explained": margin <= sum(errors),
            }
        )
    return entries


def _logits_at(
    decoder: Decoder, state: DecodeState, runs: Runs, flips: list[tuple[int, int]], begin: Callable[[], None]
) -> list[Tensor]:
    """Logits [vocab_size] of each flip's row at its step, decoding the split run's tokens up to there."""
    begin()
    wanted: dict[int, Tensor] = {}
    tokens = runs.first
    for step in range(1 + max(step for _, step in flips)):
        logits = decoder.decode(tokens, state)
        for number, (row, flipped) in enumerate(flips):
            if flipped == step:
                wanted[number] = logits[row].double()
        tokens = runs.split[step]
    return [wanted[number] for number in range(len(flips))]


def logits_difference(logits: Tensor, reference: Tensor) -> dict[str, Any]:
    """How logits [batch, vocab_size] over one KV dtype differ from those over f32 keys and values.

    max_abs, relative and cosine over all; `same_token`: whether every row's likeliest is the same; `margin`: the least
    distance between the two likeliest of a row of the reference.
    """
    best = reference.topk(2, dim=-1).values
    return {
        **difference_of(logits, reference),
        "same_token": bool((logits.argmax(-1) == reference.argmax(-1)).all()),
        "margin": float((best[:, 0] - best[:, 1]).min()),
    }
