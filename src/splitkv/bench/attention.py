"""`splitkv bench attention`: ours against everything that is installed, parity first, the floor in the same run.

Each case: every contender computes KV set 0 once, on its own and as a CUDA graph, and is held against float64; those
that pass are timed in turns, each call on the next set of a rotation that no cache holds (timing.py). A contender
that cannot run a case, raises or is wrong gets no speed and a reason under `not_run`; the run goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import splitkv

from . import machine, parity, record
from .attention_cases import AttentionCase
from .attention_data import ROWS, CaseTensors, KVArena, arena_elements
from .cases import memory_budget
from .contender import OURS, Contender
from .failures import DeviceBroken, require_working_device, short_reason
from .peers import versions_of
from .peers_flashinfer import build
from .progress import Progress
from .roofline import Bandwidth, read_bandwidth
from .timing import METHOD, Call, Rotation, Timing, TimingRejected, measure, noisy, plan_rotation

SCHEMA = "splitkv.attention.v1"
SAMPLE_S = {"cuda": 0.1, "cpu": 0.3}
"""Seconds of samples per contender and case."""
GOAL_FACTOR, GOAL_US = {"cuda": 1.01, "cpu": 1.25}, {"cuda": 3.0, "cpu": 0.0}
"""The goal of every case: GOAL_FACTOR x floor + GOAL_US; on a CPU 80 % of the bandwidth."""
PEER_FACTOR = 4.0
"""A peer's error may be this many times plain PyTorch's, plus one rounding, before its speed is withheld."""
PEER_F32_ERROR, QUANTISED_ERROR = 2e-3, 6e-2
"""Relative error allowed to a peer that multiplies f32 in TF32, and to one that rounds q or P to fp8 or sums in f16."""
RULES = (
    f"splitkv: f32 max abs error <= {parity.F32_MAX_ABS:g}, else error <= {parity.PLAIN_FACTOR:g} x PyTorch SDPA's "
    "in q's dtype on the decoded values + one rounding of the output",
    f"peers: f32 <= {PEER_F32_ERROR:g}, else {PEER_FACTOR:g} x PyTorch SDPA's + one rounding; peers that round q or "
    f"the probabilities to fp8 on an fp8 cache, or sum in f16 over an f16 one: {QUANTISED_ERROR:g}",
    "error is ||out - ref|| / ||ref|| with ref in float64 over the stored values",
    "a CUDA graph's replay must give the eager call's error",
)


@dataclass(frozen=True)
class AttentionOptions:
    """What to run. contenders: ours first. limit_s: no case is begun after this many seconds. Made by the command."""

    device: str
    cases: tuple[AttentionCase, ...]
    contenders: tuple[Contender, ...]
    seed: int = 0
    limit_s: float | None = None


def run_attention(
    options: AttentionOptions,
    source: Mapping[str, Any],
    *,
    command: str,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Run every case and return the result file's object; `failed_rows` counts those where ours has no speed.

    source: from `record.provenance`. Cases that do not fit the memory or the time are listed under `skipped`.
    """
    run = _Run(options, time.monotonic(), progress)
    result = record.new_record(SCHEMA, command, source, options.device)
    neighbours = machine.Neighbours()
    run.report("compiling peers")
    builds = build_peers(options)
    run.report("measuring the read bandwidth")
    bandwidth = read_bandwidth(options.device)
    try:
        for kv_dtype in dict.fromkeys(case.kv_dtype for case in options.cases):
            run.dtype_group(kv_dtype, bandwidth)
    except DeviceBroken as error:
        run.skip_rest(str(error))
    order = {(case.group, case.name): n for n, case in enumerate(options.cases)}
    rows = sorted(run.rows, key=lambda row: order[row["group"], row["case"]])
    return result | {
        "contenders": {contender.name: contender.what for contender in options.contenders},
        "contender_versions": versions_of(options.contenders),
        "quantising_contenders": [contender.name for contender in options.contenders if contender.quantises],
        "peer_builds": builds,
        "seed": options.seed,
        "timing_method": METHOD[options.device],
        "parity_rules": list(RULES),
        "goal": _goal_text(options.device),
        "read_bandwidth_tb_s": bandwidth.tb_s,
        "read_bandwidth_method": f"{bandwidth.variant}, {bandwidth.swept_bytes} bytes, median of {bandwidth.samples}",
        "other_processes_cores": neighbours.cores(),
        "wall_s": time.monotonic() - run.start,
        "failed_rows": sum(not row["passed"] for row in rows) + run.failures,
        "skipped": run.skipped,
        "rows": rows,
    }


class _Run:
    """The rows so far, and the loop over the cases of one KV dtype, which share an arena."""

    def __init__(self, options: AttentionOptions, start: float, progress: Progress) -> None:
        self.options, self.start, self._progress = options, start, progress
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []
        self.failures = 0

    def report(self, text: str) -> None:
        self._progress(len(self.rows) + len(self.skipped), len(self.options.cases), text)

    def skip(self, case: AttentionCase, reason: str) -> None:
        self.skipped.append({"case": case.name, "group": case.group, "reason": reason})

    def skip_rest(self, reason: str) -> None:
        """Every case that has neither a row nor a reason yet."""
        done = {(entry["group"], entry["case"]) for entry in (*self.rows, *self.skipped)}
        for case in self.options.cases:
            if (case.group, case.name) not in done:
                self.skip(case, reason)

    def dtype_group(self, kv_dtype: str, bandwidth: Bandwidth) -> None:
        options, device = self.options, self.options.device
        if device == "cuda":  # hand back the last dtype's arena, so that free memory reads true
            torch.cuda.empty_cache()
        rotations: dict[AttentionCase, Rotation] = {}
        for case in options.cases:
            if case.kv_dtype == kv_dtype:
                rotation = rotation_of(case, device)
                if rotation is None:
                    self.skip(case, f"one KV set takes {case.set_keys * case.key_bytes / 1e9:.2f} GB, more than fits")
                else:
                    rotations[case] = rotation
        if not rotations:
            return
        self.report(f"{kv_dtype}: random keys and values")
        sizes = [arena_elements(case, rotation) for case, rotation in rotations.items()]
        arena = KVArena(max(k for k, _ in sizes), max(v for _, v in sizes), kv_dtype, device, options.seed)
        for case, rotation in rotations.items():
            self.report(case.name)
            if options.limit_s is not None and time.monotonic() - self.start > options.limit_s:
                self.skip(case, f"the run had taken {options.limit_s:g} s")
                continue
            try:
                with _threads(case.threads):
                    self.rows.append(_run_case(CaseTensors(case, rotation, arena), rotation, options, bandwidth))
            except DeviceBroken:
                raise
            except Exception as failure:  # too little memory, or a plan refused: the other rows must not go with it
                require_working_device(failure, device)
                self.skip(case, short_reason(failure))
                self.failures += 1


def rotation_of(case: AttentionCase, device: str) -> Rotation | None:
    """How many sets of the case to rotate over, in the memory that is free; None where not one fits."""
    spare_bytes = case.spare_keys * case.key_bytes
    budget = memory_budget(device) - spare_bytes
    return plan_rotation(case.set_keys * case.key_bytes, budget, machine.cache_bytes(device), device)


def build_peers(options: AttentionOptions) -> dict[str, Any]:
    """Compile what FlashInfer will need, and say how long it took and what failed."""
    start = time.monotonic()
    try:
        built, error = build(options.contenders, options.cases), None
    except Exception as failure:  # the library is there and does not even import
        built, error = {}, short_reason(failure)
    failed = {name: reason for name, reason in built.items() if reason}
    return {"modules": len(built), "failed": failed, "seconds": time.monotonic() - start, "error": error}


def _goal_text(device: str) -> str:
    fixed = f" + {GOAL_US[device]:g} us" if GOAL_US[device] else ""
    return f"{GOAL_FACTOR[device]:g} x floor{fixed}"


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """PyTorch's threads, and with them ours, held to `number` meanwhile; 0 leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- one case ----------------------------------------------------------------------------------------------


class Judge:
    """Exact results by layout, and the errors that plain PyTorch and rounding make on them."""

    def __init__(self, tensors: CaseTensors) -> None:
        self._tensors, self._exact = tensors, {ROWS: tensors.exact()}
        self.rounding = parity.rounding_of(self._exact[ROWS], tensors.q.dtype)
        self.plain = parity.error_of(tensors.plain(), self._exact[ROWS])

    def error(self, contender: Contender, out: Tensor) -> parity.Error:
        if contender.layout not in self._exact:
            self._exact[contender.layout] = self._tensors.exact(contender.layout)
        return parity.error_of(out, self._exact[contender.layout])

    def limit(self, contender: Contender) -> float:
        """Relative error allowed; for ours on f32 the absolute one."""
        f32, fp8 = self._tensors.case.kv_dtype == "f32", self._tensors.case.kv_dtype.startswith("fp8")
        if contender.name == OURS:
            return parity.F32_MAX_ABS if f32 else parity.PLAIN_FACTOR * self.plain.relative + self.rounding
        if f32:
            return PEER_F32_ERROR
        coarse = (fp8 and contender.quantises) or (self._tensors.case.kv_dtype == "f16" and contender.half_sums)
        return QUANTISED_ERROR if coarse else PEER_FACTOR * self.plain.relative + self.rounding

    def refusal(self, contender: Contender, error: parity.Error) -> str | None:
        """Why this error costs the contender its speed, or None. NaN does."""
        limit = self.limit(contender)
        absolute = contender.name == OURS and self._tensors.case.kv_dtype == "f32"
        found, kind = (error.max_abs, "max abs") if absolute else (error.relative, "relative")
        return None if found <= limit else f"{kind} error {found:.2g} against float64 is over {limit:.2g}"


def _run_case(
    tensors: CaseTensors, rotation: Rotation, options: AttentionOptions, bandwidth: Bandwidth
) -> dict[str, Any]:
    """One row. `us` holds the contenders that ran, were right and whose timing was believed."""
    case = tensors.case
    judge = Judge(tensors)
    row = _row(case, rotation, bandwidth, options.device)
    not_run: dict[str, str] = {}
    calls: dict[str, Call] = {}
    row["err"], row["max_abs_err"] = {}, {}
    row["err_plain"], row["rounding"] = judge.plain.relative, judge.rounding
    for contender in options.contenders[:1] if case.cost_only else options.contenders:
        reason = contender.unable(case)
        if reason is None:
            try:
                call = contender.make(tensors)
                errors = [judge.error(contender, out) for out in _outputs(call, options.device)]
                worst = max(errors, key=lambda error: (error.relative != error.relative, error.relative))
                row["err"][contender.name], row["max_abs_err"][contender.name] = worst.relative, worst.max_abs
                reason = judge.refusal(contender, worst)
                calls |= {} if reason else {contender.name: call}
            except Exception as failure:  # a peer may raise anything; it must not cost the others their row
                require_working_device(failure, options.device)
                reason = short_reason(failure)
        if reason is not None:
            not_run[contender.name] = reason
    timings = timings_of({**calls, **_reads(tensors)}, not_run, case, rotation, options.device, bandwidth)
    reads = [timings.pop(name).median_us for name in READS if name in timings]
    if reads:
        row["floor_us"] = min(reads) * case.read_bytes / (case.set_keys * case.key_bytes)
    row["goal_us"] = GOAL_FACTOR[options.device] * row["floor_us"] + GOAL_US[options.device]
    row["us"] = {name: timing.median_us for name, timing in timings.items()}
    row["us_p20"] = {name: timing.p20_us for name, timing in timings.items()}
    row["us_p80"] = {name: timing.p80_us for name, timing in timings.items()}
    row["noisy"] = [name for name, timing in timings.items() if noisy(timing, options.device)]
    row["not_run"], row["passed"] = not_run, OURS in timings
    return row


READS = ("read: sum of int64", "read: dot of float32")


def _reads(tensors: CaseTensors) -> dict[str, Call]:
    """On a CPU, whose bandwidth changes with the neighbours', the floor is taken in turns with the contenders: two ways
    to read all keys and values of a set and do next to nothing with them, of which the faster counts."""
    if tensors.device != "cpu":
        return {}
    sets = [tensors.memory(i) for i in range(tensors.sets)]
    return {
        READS[0]: lambda i: [part.view(torch.int64).sum() for part in sets[i]],
        READS[1]: lambda i: [torch.dot(*part.view(torch.float32).chunk(2)) for part in sets[i]],
    }


def _outputs(call: Call, device: str) -> list[Tensor]:
    """What the call computes of set 0: on its own, and on a GPU replayed as a graph."""
    eager = call(0).clone()
    if device == "cpu":
        return [eager]
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = call(0)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return [eager, captured.clone()]


def timings_of(
    calls: dict[str, Call],
    not_run: dict[str, str],
    case: AttentionCase,
    rotation: Rotation,
    device: str,
    bandwidth: Bandwidth,
    sample_s: float | None = None,
) -> dict[str, Timing]:
    """Timings of the contenders, from `sample_s` seconds of samples each (default: SAMPLE_S). One whose timing is
    rejected goes to `not_run`, and the others are timed again."""
    left = dict(calls)
    while left:
        try:
            return measure(
                left,
                rotation,
                device=device,
                kv_bytes=case.read_bytes,
                bandwidth_bytes_s=bandwidth.bytes_per_s,
                budget_s=(SAMPLE_S[device] if sample_s is None else sample_s) * len(left),
            )
        except TimingRejected as rejected:
            not_run |= {name: f"timing rejected: {reason}" for name, reason in rejected.reasons.items()}
            left = {name: call for name, call in left.items() if name not in rejected.reasons}
        except Exception as failure:  # names no contender: none of this row's timings can be trusted
            require_working_device(failure, device)
            not_run |= {name: f"timing failed: {short_reason(failure)}" for name in left}
            left = {}
    return {}


def _row(case: AttentionCase, rotation: Rotation, bandwidth: Bandwidth, device: str) -> dict[str, Any]:
    problem = case.problem
    plan = splitkv.DecodeAttention(problem, device=device).plan
    row: dict[str, Any] = {
        "case": case.name,
        "group": case.group,
        "batch": case.batch,
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "v_head_dim": case.v_dim,
        "seq_len": case.seq_len,
        "capacity": problem.capacity,
        "q_dtype": case.q_dtype,
        "kv_dtype": case.kv_dtype,
        "page_size": case.page_size,
        "peer_page_size": case.pool_page,
        "q_len": case.q_len,
        "num_splits": plan.num_splits,
        "split_len": plan.split_len,
        "workspace_bytes": plan.workspace_bytes,
        "kv_bytes": case.read_bytes,
        "sets": rotation.sets,
        "distinct_bytes": rotation.footprint_bytes,
        "cache": rotation.label,
        "threads": case.threads or (torch.get_num_threads() if device == "cpu" else None),
        "floor_us": case.read_bytes / bandwidth.bytes_per_s * 1e6,
    }
    return row | ({"lens": list(case.lens)} if case.lens else {})
