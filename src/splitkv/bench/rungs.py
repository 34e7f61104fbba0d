"""`splitkv rungs`: the ladder of contexts, each rung checked against float64 before its speed may be told.

The contenders are ours and a baseline: on a GPU our own unsplit kernel, one block per query head ("rowwise");
on a CPU, where that does not exist, PyTorch's scaled_dot_product_attention with enable_gqa ("sdpa").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

import splitkv

from . import machine, parity, record
from .cases import Arena, Rung, RungOptions, arena_bytes, memory_budget
from .progress import Progress
from .roofline import Bandwidth, read_bandwidth
from .timing import (
    METHOD,
    Call,
    Rotation,
    Timing,
    TimingRejected,
    implied_gb_s,
    measure,
    noisy,
    plan_rotation,
)

SCHEMA = "splitkv.rungs.v1"
OURS, SDPA = "splitkv", "sdpa"
BASELINES = {"cuda": "rowwise", "cpu": SDPA}
CONTENDERS = {
    OURS: "splitkv.DecodeAttention.run, with its plan, workspace and merge",
    "rowwise": 'splitkv backend="rowwise": unsplit, one block per query head',
    SDPA: "torch scaled_dot_product_attention(enable_gqa=True), checked on the same tensors and timed on the "
    "same memory as head-major caches, the layout it is fastest on",
}
STICK_KEYS = 4096
"""Keys on which this run's float64 is held against the oracle, once per dtype."""


def run_rungs(
    options: RungOptions,
    source: Mapping[str, Any],
    *,
    command: str,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Run every rung and return the result file's object; its `failed_rungs` counts those without a speed.

    source: from `record.provenance`. Rungs whose keys do not fit the memory are listed under `skipped`.
    Raises RuntimeError if the float64 used here disagrees with `splitkv.reference_attention`.
    """
    device, rungs = options.device, list(options.rungs())
    result = record.new_record(SCHEMA, command, source, device)
    neighbours = machine.Neighbours()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []

    def report(text: str) -> None:
        progress(len(rows) + len(skipped), len(rungs), text)

    report("measuring the read bandwidth")
    before = read_bandwidth(device)
    for kv_dtype in options.dtypes:
        group = [rung for rung in rungs if rung.kv_dtype == kv_dtype]
        _release_memory()
        cache, budget = machine.cache_bytes(device), memory_budget(device)
        size = arena_bytes(group, budget, cache, device)
        report(f"{kv_dtype}: filling {size / 1e9:.1f} GB with random keys and values")
        arena = Arena(size, kv_dtype, device, options.seed)
        for rung in group:
            report(rung.case)
            rotation = plan_rotation(rung.set_bytes, arena.size_bytes, cache, device)
            if rotation is None:
                needed, allowed = rung.set_bytes / 1e9, budget / 1e9
                why = f"one KV set takes {needed:.2f} GB and only {allowed:.2f} GB may be used"
                skipped.append({"case": rung.case, "reason": why})
                continue
            if not any(row["kv_dtype"] == kv_dtype for row in rows):
                _check_stick(rung, rotation, arena)
            rows.append(_run_rung(rung, rotation, arena, before))
        del arena
    report("measuring the read bandwidth again")
    _release_memory()
    bandwidth = max(before, read_bandwidth(device), key=lambda sweep: sweep.bytes_per_s)
    return result | {
        "baseline": BASELINES[device],
        "contenders": {name: CONTENDERS[name] for name in (OURS, BASELINES[device])},
        "selection": options.selection,
        "seed": options.seed,
        "timing_method": METHOD[device],
        "parity_rules": list(parity.RULES),
        "routes": routes(options),
        "read_bandwidth_tb_s": bandwidth.tb_s,
        "read_bandwidth_method": f"{bandwidth.variant}, {bandwidth.swept_bytes} bytes, better of two sweeps",
        "other_processes_cores": neighbours.cores(),
        "failed_rungs": sum(not row["passed"] for row in rows),
        "skipped": skipped,
        "rows": [_with_speed(row, bandwidth) for row in rows],
    }


def routes(options: RungOptions) -> dict[str, str]:
    """Per KV dtype, one line that says which way its longest rung goes through the library."""
    lines = {}
    for kv_dtype in options.dtypes:
        num_q_heads, num_kv_heads = options.heads[0]
        rung = Rung(max(options.lengths), num_q_heads, num_kv_heads, kv_dtype, options.head_dim)
        plan = splitkv.DecodeAttention(rung.problem, device=options.device).plan
        named_backend, named = machine.default_backend(options.device)
        backend = named_backend if named else plan.backend
        lines[kv_dtype] = (
            f"backend {backend}{' (environment)' if named else ''}, "
            f"{plan.num_splits} splits of {plan.split_len} keys at {rung.seq_len}, "
            f"{plan.device.sm_count} {'cores' if plan.device.is_cpu else 'SMs'}, "
            f"policy {plan.policy.label} ({'environment' if plan.from_environment else 'declared'})"
        )
    return lines


# ---- one rung ----------------------------------------------------------------------------------------------


class _Contenders:
    """The calls of one rung, each on set i of its rotation and each into an output of its own."""

    def __init__(self, rung: Rung, rotation: Rotation, arena: Arena) -> None:
        self.q = arena.query(rung)
        self.sets = arena.sets(rung, rotation)
        self.head_major = arena.sets(rung, rotation, head_major=True)
        self.seq_lens = torch.full((1,), rung.seq_len, dtype=torch.int32, device=arena.device)
        self.attention = splitkv.DecodeAttention(rung.problem, device=arena.device)
        self.outs = {name: torch.empty_like(self.q) for name in (OURS, "rowwise")}
        self.baseline = BASELINES[arena.device]

    def ours(self, i: int) -> Tensor:
        return self._run(OURS, "auto", i)

    def rowwise(self, i: int) -> Tensor:
        return self._run("rowwise", "rowwise", i)

    def _run(self, name: str, backend: str, i: int) -> Tensor:
        k, v = self.sets[i]
        out = self.outs[name]
        self.attention.run(self.q, k, v, self.seq_lens, backend=backend, out=out)
        return out

    def sdpa(self, i: int) -> Tensor:
        """On the very tensors that ours reads."""
        k, v = self.sets[i]
        return self._sdpa(k.transpose(1, 2), v.transpose(1, 2))

    def sdpa_head_major(self, i: int) -> Tensor:
        """On the same memory in the layout that PyTorch is fastest on: other numbers, the same work."""
        return self._sdpa(*self.head_major[i])

    def _sdpa(self, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(self.q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)

    def timed(self) -> dict[str, Call]:
        """Ours and the baseline by name."""
        return {
            OURS: self.ours,
            self.baseline: self.sdpa_head_major if self.baseline == SDPA else self.rowwise,
        }


def _run_rung(rung: Rung, rotation: Rotation, arena: Arena, bandwidth: Bandwidth) -> dict[str, Any]:
    """One row without floor and bandwidth shares. Where parity fails, nothing is timed and `us` is empty."""
    contenders = _Contenders(rung, rotation, arena)
    row = _row(rung, rotation, contenders.attention.plan)
    ours = contenders.ours(0).clone()
    failures = _check_parity(rung, contenders, ours, row)
    timings: dict[str, Timing] = {}
    if not failures:
        try:
            timings = measure(
                contenders.timed(),
                rotation,
                device=arena.device,
                kv_bytes=rung.set_bytes,
                bandwidth_bytes_s=bandwidth.bytes_per_s,
            )
        except TimingRejected as reason:
            row["timing_rejected"] = str(reason)
        if not torch.equal(contenders.ours(0), ours):
            failures.append("a second call on the same tensors gave other bytes")
            timings = {}
    row |= {"parity_failures": failures, "passed": not failures and bool(timings)}
    row["us"] = {name: timing.median_us for name, timing in timings.items()}
    row["us_p20"] = {name: timing.p20_us for name, timing in timings.items()}
    row["us_p80"] = {name: timing.p80_us for name, timing in timings.items()}
    row["samples"] = {name: timing.samples for name, timing in timings.items()}
    row["calls_per_sample"] = {name: timing.calls_per_sample for name, timing in timings.items()}
    row["noisy"] = [name for name, timing in timings.items() if noisy(timing, arena.device)]
    return row


def _row(rung: Rung, rotation: Rotation, plan: splitkv.DecodePlan) -> dict[str, Any]:
    problem = rung.problem
    return {
        "case": rung.case,
        "batch": problem.batch,
        "num_q_heads": problem.num_q_heads,
        "num_kv_heads": problem.num_kv_heads,
        "head_dim": problem.head_dim,
        "v_head_dim": problem.v_head_dim,
        "seq_len": rung.seq_len,
        "capacity": problem.capacity,
        "q_dtype": problem.q_dtype,
        "kv_dtype": problem.kv_dtype,
        "page_size": None,
        "q_len": problem.q_len,
        "policy": plan.policy.label,
        "policy_from_environment": plan.from_environment,
        "num_splits": plan.num_splits,
        "split_len": plan.split_len,
        "workspace_bytes": plan.workspace_bytes,
        "kv_bytes": rung.set_bytes,
        "sets": rotation.sets,
        "distinct_bytes": rotation.footprint_bytes,
        "cache": rotation.label,
        "timing_rejected": None,
    }


def _check_parity(rung: Rung, contenders: _Contenders, ours: Tensor, row: dict[str, Any]) -> list[str]:
    """Errors of every contender on set 0, written to the row; returns why no speed may be told, if so."""
    exact = parity.float64_attention(contenders.q, *contenders.sets[0])
    plain = contenders.sdpa(0)
    results = {OURS: ours, SDPA: plain}
    if contenders.baseline != SDPA:
        results[contenders.baseline] = contenders.rowwise(0)
    errors = {name: parity.error_of(out, exact) for name, out in results.items()}
    row["err"] = {name: error.relative for name, error in errors.items()}
    row["max_abs_err"] = {name: error.max_abs for name, error in errors.items()}
    row["rounding"] = parity.rounding_of(exact, ours.dtype)
    row["against_baseline"] = parity.difference_of(ours, results[contenders.baseline])
    return parity.judge(rung.kv_dtype, errors[OURS], errors[contenders.baseline], errors[SDPA], row["rounding"])


def _with_speed(row: dict[str, Any], bandwidth: Bandwidth) -> dict[str, Any]:
    """The row with its floor, and for each timed contender GB/s and the share of the read bandwidth."""
    gb_s = {name: implied_gb_s(row["kv_bytes"], us) for name, us in row["us"].items()}
    speeds: dict[str, Any] = {"floor_us": row["kv_bytes"] / bandwidth.bytes_per_s * 1e6, "gb_s": gb_s}
    speeds["bandwidth_share"] = {name: value * 1e9 / bandwidth.bytes_per_s for name, value in gb_s.items()}
    baseline = next((us for name, us in row["us"].items() if name != OURS), None)
    speeds["speedup"] = baseline / row["us"][OURS] if baseline else None
    return row | speeds


def _check_stick(rung: Rung, rotation: Rotation, arena: Arena) -> None:
    """Hold this run's float64 against the oracle on the first keys of one set. Raises RuntimeError."""
    (k, v), q = arena.sets(rung, rotation)[0], arena.query(rung)
    keys = min(rung.seq_len, STICK_KEYS)
    k, v = k[:, :keys], v[:, :keys]
    oracle = cast(Tensor, splitkv.reference_attention(q, k, v, keys))
    difference = parity.error_of(parity.float64_attention(q, k, v).cpu(), oracle).relative
    if not difference <= parity.STICK_TOLERANCE:
        raise RuntimeError(
            f"the float64 of this run differs from reference_attention by {difference:.2g} at {keys} keys"
        )


def _release_memory() -> None:
    """Hand the allocator's cached blocks back, so that free memory reads true."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
