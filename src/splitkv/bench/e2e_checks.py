"""Checks of `splitkv bench e2e`: splitting changes no token, or float64 says why; what a KV dtype does to logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import splitkv

from ..models.loop import DecodeLoop
from ..models.state import DecodeState
from .parity import difference_of, float64_attention

NOISE_FACTOR = 2.0
"""A flip is not explained by errors more than this many times plain PyTorch's, plus one rounding of the logits."""
MARGIN_SIGMAS = 6.0
"""Nor over a margin of more than this many times both ways' errors together: seldom for one logit in 10**9."""

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""q [rows, num_q_heads, head_dim], k, v [rows, keys, num_kv_heads, ..], softmax_scale -> q's shape and dtype."""


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """In float64, rounded once."""
    return float64_attention(q.double() * (scale * q.shape[-1] ** 0.5), k, v).to(q.dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """By PyTorch in q's dtype; the query heads of a group stand in for queries, so that keys are not repeated."""
    grouped = q.unflatten(1, (k.shape[2], -1))
    keys, values = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).flatten(1, 2)


class OtherAttention:
    """Called as DecodeAttention is, over what a cache holds for rows of equal length, but computed by `attend`."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, *, window: int | None = None,
        softmax_scale: float | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """q's dtype. Raises ValueError for options that it does not know and that would change the result."""
        odd = {name: value for name, value in options.items() if value not in (None, 1.0)}
        if odd:
            raise ValueError(f"options: expected window, softmax_scale and scales of 1, got {odd}")
        keys = int(seq_lens[0])
        held = slice(0 if window is None else max(keys - window, 0), keys)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return self._attend(q, k_cache[:, held], v_cache[:, held], scale)


def attended_by(state: DecodeState, attention: splitkv.DecodeAttention | OtherAttention) -> DecodeState:
    """The same memory, rows and lengths, attended to by another policy or otherwise."""
    other = copy(state)
    other.attention = cast(splitkv.DecodeAttention, attention)
    return other


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
    split: DecodeLoop, unsplit: DecodeLoop, runs: Runs, begin: Callable[[], None]
) -> list[dict[str, Any]]:  # fmt: skip
    """One entry for each row whose tokens differ; the earliest step at which any does is audited, in all its rows.

    An audit takes the logits of that step, each way of attending having decoded the split run's tokens up to it:
    split, unsplit, plain PyTorch, and float64. begin: puts rows back to their depth. `margin`: by how much float64
    prefers its choice of the two tokens. `*_rms`: root mean square of a way's logits' differences from float64's. A
    flip is `explained` (None: not audited) if both ways' are like those of plain PyTorch (NOISE_FACTOR), and the margin
    is one that they reach over (MARGIN_SIGMAS).
    """
    flips = runs.flips
    if not flips:
        return []
    earliest = min(step for _, step in flips)
    decoder, loops = split.decoder, {"split": split, "unsplit": unsplit}
    for name, attend in (("plain", plain_attention), ("float64", exact_attention)):
        loops[name] = DecodeLoop(decoder, attended_by(split.state, OtherAttention(attend)), graph=False)
    logits = {name: _logits_at(loop, runs, earliest, begin) for name, loop in loops.items()}
    entries = []
    for row, step in flips:
        pair = int(runs.split[step, row]), int(runs.unsplit[step, row])
        entry: dict[str, Any] = {"row": row, "step": step, "split_token": pair[0], "unsplit_token": pair[1]}
        if step > earliest:
            entries.append(entry | {"explained": None})
            continue
        exact = logits["float64"][row]
        rms = {name: float((found[row] - exact).square().mean().sqrt()) for name, found in logits.items()}
        margin = abs(float(exact[pair[0]] - exact[pair[1]]))
        allowed = NOISE_FACTOR * rms["plain"] + torch.finfo(decoder.dtype).eps * float(exact.square().mean().sqrt())
        noise = max(rms["split"], rms["unsplit"]) <= allowed
        reach = MARGIN_SIGMAS * math.hypot(rms["split"], rms["unsplit"])
        entry |= {"float64_token": int(exact.argmax()), "margin": margin, "rms_allowed": allowed}
        entry |= {f"{name}_rms": rms[name] for name in ("split", "unsplit", "plain")}
        entries.append(entry | {"explained": noise and margin <= reach})
    return entries


def _logits_at(loop: DecodeLoop, runs: Runs, last: int, begin: Callable[[], None]) -> Tensor:
    """Logits [batch, vocab_size] of step `last`, after steps that were given the split run's tokens."""
    begin()
    given = [runs.first, *runs.split]
    for tokens in given[:last]:
        loop.tokens.copy_(tokens)
        loop.step()
    return loop.decoder.decode(given[last], loop.state)


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
