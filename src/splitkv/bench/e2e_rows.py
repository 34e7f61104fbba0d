"""The rows of one geometry, KV dtype and batch: a state filled once, two captured steps over it, and each depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import splitkv

from ..models.decoder import Decoder
from ..models.loop import DecodeLoop
from ..models.state import DecodeState
from . import machine
from .e2e_checks import Runs, attended_by, audit_flips, logits_difference
from .e2e_model import Prompt, fill, first_tokens, rewind
from .e2e_timing import first_run, profile_steps, run_length, step_times
from .roofline import Bandwidth
from .summary import OURS, UNSPLIT
from .timing import COLD_MULTIPLE, noisy, rejection, summarise

CONTENDERS = {
    OURS: "the decoder of splitkv.models, attention split by policy auto",
    UNSPLIT: "the same step, attention in one split per row and KV head, policy pinned(1)",
}
POLICIES = {OURS: "auto", UNSPLIT: "pinned(1)"}
BUDGET_S = {"cuda": {OURS: 0.8, UNSPLIT: 0.4}, "cpu": {OURS: 3.0, UNSPLIT: 1.0}}
"""Seconds of samples of one contender and row."""
LEAST_SAMPLES = {OURS: 3, UNSPLIT: 0}
"""Unsplit attention may take so long that the run for its tokens must do."""
ATTEMPTS = 2
REFERENCE = "f32"
"""KV dtype that the others' logits are compared with."""


@dataclass(frozen=True)
class Model:
    """A geometry with its weights (in `weights`, a dtype's name), its prompt, and by depth the logits of one step over
    f32 keys and values."""

    name: str
    weights: str
    decoder: Decoder
    prompt: Prompt
    references: dict[int, Tensor]

    def state(self, kv_dtype: str, batch: int, depth: int) -> DecodeState:
        """Rows with room for a run from `depth`."""
        capacity = depth + run_length(self.decoder.device.type)
        return DecodeState(
            self.decoder.config, batch, capacity, kv_dtype, self.decoder.dtype, self.decoder.device
        )  # fmt: skip

    def first(self, batch: int) -> Tensor:
        """[batch] tokens that every run begins with."""
        return first_tokens(batch, self.decoder.config.vocab_size, self.decoder.device)


def reference_logits(model: Model, batch: int, depths: Sequence[int], seed: int) -> dict[int, Tensor]:
    """Logits [batch, vocab_size] of one step from each of the depths (ascending), over f32 keys and values."""
    state = model.state(REFERENCE, batch, max(depths))
    fill(state, model.prompt, seed)
    found = {}
    for depth in reversed(depths):
        rewind(state, model.prompt, depth)
        found[depth] = model.decoder.decode(model.first(batch), state)
    return found


class Combination:
    """Rows of one KV dtype and batch, filled up to `depth`, and a captured step for each contender.

    Measure the deepest rows first: each run overwrites the keys behind its depth.
    """

    def __init__(self, model: Model, kv_dtype: str, batch: int, depth: int, seed: int) -> None:
        self.model, self.where = model, {"geometry": model.name, "kv_dtype": kv_dtype, "batch": batch}
        split = model.state(kv_dtype, batch, depth)
        attention = splitkv.DecodeAttention(split.problem, POLICIES[UNSPLIT], model.decoder.device)
        states = {OURS: split, UNSPLIT: attended_by(split, attention)}
        self.loops = {name: DecodeLoop(model.decoder, state) for name, state in states.items()}
        self.first = model.first(batch)
        fill(split, model.prompt, seed)  # after the captures, whose warm-up writes to the caches

    @torch.no_grad()
    def _begin(self, loop: DecodeLoop, depth: int) -> None:
        rewind(loop.state, self.model.prompt, depth)
        loop.tokens.copy_(self.first)

    def profile(self, depth: int) -> dict[str, Any]:
        """Where our step's time goes, by kernel."""
        loop = self.loops[OURS]
        return {**self.where, "depth": depth, **profile_steps(loop, partial(self._begin, loop, depth))}

    def measure(self, depth: int, bandwidth: Bandwidth) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The row of each contender, and what this KV dtype does to the logits, if there is something to compare."""
        decoder, prompt = self.model.decoder, self.model.prompt
        states = {name: loop.state for name, loop in self.loops.items()}
        where = {**self.where, "depth": depth}
        rewind(states[OURS], prompt, depth)
        logits = decoder.decode(self.first, states[OURS])
        finite = bool(logits.isfinite().all())
        parity = []
        reference = self.model.references.get(depth)
        if reference is not None and where["kv_dtype"] != REFERENCE and reference.shape == logits.shape:
            compared = {"against": REFERENCE, "cache": prompt.label(depth)}
            parity.append(where | compared | logits_difference(logits, reference))

        begins = {name: partial(self._begin, loop, depth) for name, loop in self.loops.items()}
        runs = {name: first_run(loop, begins[name]) for name, loop in self.loops.items()}
        both = Runs(self.first, runs[OURS][0], runs[UNSPLIT][0])
        flips = audit_flips(self.loops[OURS], self.loops[UNSPLIT], both, partial(rewind, states[OURS], prompt, depth))
        explained = all(flip["explained"] is not False for flip in flips)
        rows = []
        for name, loop in self.loops.items():
            tokens, expect_us = runs[name]
            row = {**where, "weights": self.model.weights, "contender": name, "policy": POLICIES[name]}
            row |= {"num_splits": loop.state.attention.plan.num_splits, "cache": prompt.label(depth)}
            row |= _timed(loop, begins[name], name, depth, expect_us, bandwidth)
            repeated = torch.equal(loop.tokens, tokens[-1]) if row["samples"] else None
            row |= {"repeats_tokens": repeated, "distinct_tokens": int(tokens.unique().numel())}
            row |= {"logits_finite": finite, "tokens_identical": not flips, "flips": flips}
            row["passed"] = finite and explained and repeated is not False and row["ms_per_token"] is not None
            rows.append(row)
        return rows, parity


def _timed(
    loop: DecodeLoop, begin: Callable[[], None], name: str, depth: int, expect_us: float, bandwidth: Bandwidth
) -> dict[str, Any]:
    """The times of a row, and beside them the bytes of a step and the floor that they make."""
    decoder, batch = loop.decoder, loop.state.batch
    device, config = decoder.device.type, decoder.config
    begin()
    read = {
        "weights": decoder.bytes_of_step(loop.tokens, loop.state),
        "embedding_rows": 0 if config.tied else batch * config.hidden_size * decoder.dtype.itemsize,
        "kv_and_states": loop.state.bytes_per_step(depth + run_length(device) // 2),
    }
    bytes_read = sum(read.values())
    floor_ms = bytes_read / bandwidth.bytes_per_s * 1e3
    cold = bytes_read >= COLD_MULTIPLE * machine.cache_bytes(device)
    for _ in range(ATTEMPTS):
        samples = step_times(loop, begin, BUDGET_S[device][name], LEAST_SAMPLES[name], expect_us)
        timing = summarise(samples or [expect_us])
        reason = rejection(samples or [expect_us], bytes_read, bandwidth.bytes_per_s, device, cold)
        if reason is None:
            break
    ms = timing.median_us / 1e3
    return {
        "ms_per_token": ms if reason is None else None,
        "ms_p20": timing.p20_us / 1e3,
        "ms_p80": timing.p80_us / 1e3,
        "samples": len(samples),
        "steps_per_sample": run_length(device) - 1,
        "noisy": noisy(timing, device),
        "timing_rejected": reason,
        "tokens_s": batch * 1e3 / ms if reason is None else None,
        "floor_ms": floor_ms,
        "percent_of_floor": 100 * floor_ms / ms if reason is None else None,
        "bytes_per_step": read,
    }
