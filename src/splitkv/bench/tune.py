"""`splitkv bench tune`: the schedule that is fastest on this GPU for each range of problems, as a table for launches.

Per case of a range: the default schedule is held against float64, every other one must give its very bytes, and all are
timed in turns (timing.py). The best of one field each, and all of them together, meet the default in a second round of
their own, which alone decides: so luck in the first costs nothing. A range gets an entry where its winner is faster
than the default by more than noise over its cases, and slower in none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import splitkv

from .. import tuning
from ..plan import DecodePlan
from ..problem import DecodeProblem
from ..tuning import DEFAULTS, MARGIN, Schedule
from . import record
from .attention import Judge, rotation_of, timings_of
from .attention_cases import AttentionCase
from .attention_data import CaseTensors, KVArena, arena_elements
from .peers_torch import CONTENDERS, make_ours
from .progress import Progress
from .roofline import GIB, Bandwidth, read_bandwidth
from .timing import METHOD, Call, Rotation
from .tune_ranges import TuneRange, differences, label, variations

SWEEP_BYTES = GIB
FIRST_S, SECOND_S = 0.04, 0.15
"""Seconds of samples per schedule and case, in the first round and in the one that decides."""
PROMISING, SLOWER = 0.99, 1.01
"""A field's value goes to the second round below this ratio to the default; a winner is above that one in no case."""
FINALISTS = 2
COMPILERS = 8


@dataclass(frozen=True)
class TuneOptions:
    """What to run. limit_s: no range is begun after this many seconds. Made by the command."""

    device: str
    ranges: tuple[TuneRange, ...]
    seed: int = 0
    limit_s: float = 100.0


def run_tune(
    options: TuneOptions,
    source: Mapping[str, Any],
    *,
    command: str,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Tune every range and return the table's object. source: from `record.provenance`.

    `entries` is what launches read; `rows` is what was measured, one row per range; `failed_rows` counts ranges where
    the default was wrong or a schedule gave other bytes.
    """
    start = time.monotonic()
    result = record.new_record(tuning.SCHEMA, command, source, options.device)
    progress(0, len(options.ranges), "measuring the read bandwidth")
    bandwidth = read_bandwidth(options.device, SWEEP_BYTES)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for number, entry in enumerate(options.ranges):
        progress(number, len(options.ranges), entry.name)
        if time.monotonic() - start > options.limit_s:
            skipped.append({"range": entry.name, "reason": f"the run had taken {options.limit_s:g} s"})
            continue
        try:
            rows.append(_tune_range(entry, options, bandwidth))
        except torch.OutOfMemoryError as failure:
            skipped.append({"range": entry.name, "reason": str(failure).splitlines()[0]})
    return result | {
        "name": tuning.table_name(splitkv.DeviceSpec.current()) if options.device == "cuda" else "cpu",
        "seed": options.seed,
        "timing_method": METHOD[options.device],
        "margin": MARGIN,
        "read_bandwidth_tb_s": bandwidth.tb_s,
        "wall_s": time.monotonic() - start,
        "failed_rows": sum(bool(row["failures"]) for row in rows),
        "skipped": skipped,
        "entries": [row["entry"] for row in rows if row["entry"] is not None],
        "rows": [{name: value for name, value in row.items() if name != "entry"} for row in rows],
    }


def _tune_range(entry: TuneRange, options: TuneOptions, bandwidth: Bandwidth) -> dict[str, Any]:
    """One row, and the table's entry where one schedule won."""
    if options.device == "cuda":  # hand back the last range's tensors, so that free memory reads true
        torch.cuda.empty_cache()
    backend = _plan(entry.cases[0].problem, options.device).backend
    default = DEFAULTS[backend]
    row: dict[str, Any] = {
        "range": entry.name,
        "backend": backend,
        "entry": None,
        "schedule": None,
        "failures": [],
    }
    bench = _Bench(entry, default, options, bandwidth)
    first = bench.round([default, *variations(default, backend)], FIRST_S)
    finalists = _finalists(bench.ratios(first), default)
    second = bench.round([default, *finalists], SECOND_S) if finalists else {}
    ratios = bench.ratios(second)
    row |= {"failures": bench.failures, "not_run": bench.not_run}
    row |= {"first_us": bench.labelled(first), "us": bench.labelled(second)}
    winner = min(ratios, key=lambda schedule: _mean(ratios[schedule]), default=default)
    won = winner != default and not bench.failures
    if won and _mean(ratios[winner]) < 1 - MARGIN and max(ratios[winner]) <= SLOWER:
        row["schedule"] = label(winner, default)
        us = {name: {"default": times[default], "tuned": times[winner]} for name, times in second.items()}
        row["entry"] = {
            "range": asdict(entry.covered(backend)),
            "schedule": asdict(winner),
            "faster": 1 - _mean(ratios[winner]),
            "us": us,
        }
    return row


def _finalists(ratios: Mapping[Schedule, Sequence[float]], default: Schedule) -> list[Schedule]:
    """The schedules worth a second round: the best by one field each, and every field's best value at once."""
    promising = sorted((s for s in ratios if _mean(ratios[s]) < PROMISING), key=lambda s: _mean(ratios[s]))
    best: dict[str, int] = {}
    for schedule in promising:
        for name, value in differences(schedule, default).items():
            best.setdefault(name, value)
    together = [replace(default, **best)] if best else []
    return list(dict.fromkeys([*promising[:FINALISTS], *together]))


def _mean(ratios: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


Times = dict[str, dict[Schedule, float]]
"""Microseconds by case and schedule."""


class _Bench:
    """The tensors of a range's cases, and which schedules give the right bytes on them."""

    def __init__(self, entry: TuneRange, default: Schedule, options: TuneOptions, bandwidth: Bandwidth) -> None:
        self.default, self.device, self._bandwidth = default, options.device, bandwidth
        self.failures: list[str] = []
        self.not_run: dict[str, str] = {}
        rotations = {case: rotation_of(case, options.device) for case in entry.cases}
        fitting = {case: rotation for case, rotation in rotations.items() if rotation is not None}
        for case in rotations.keys() - fitting.keys():
            self.not_run[case.name] = "one KV set is more than fits"
        sizes = [arena_elements(case, rotation) for case, rotation in fitting.items()]
        k, v = (max((size[part] for size in sizes), default=0) for part in (0, 1))
        arena = KVArena(k, v, entry.kv_dtype, options.device, options.seed)
        self._cases = [(CaseTensors(case, rotation, arena), rotation) for case, rotation in fitting.items()]
        self._right: dict[str, tuple[Tensor, Tensor] | None] = {}

    def round(self, schedules: Sequence[Schedule], sample_s: float) -> Times:
        """Times of the schedules that give the default's bytes, which must be right."""
        return {
            tensors.case.name: self._round(tensors, rotation, schedules, sample_s) for tensors, rotation in self._cases
        }

    def _round(
        self, tensors: CaseTensors, rotation: Rotation, schedules: Sequence[Schedule], sample_s: float
    ) -> dict[Schedule, float]:
        launches = {schedule: self._launch(tensors.case.problem, schedule) for schedule in schedules}
        first = {
            launch: schedule for schedule, launch in reversed(launches.items())
        }  # the others would launch the same
        calls = {
            schedule: make_ours(tensors, schedule) for schedule in schedules if first[launches[schedule]] == schedule
        }
        same = self._same_bytes(tensors, self._outputs(tensors.case, calls))
        named = {label(schedule, self.default): calls[schedule] for schedule in same}
        refused: dict[str, str] = {}
        timings = timings_of(named, refused, tensors.case, rotation, self.device, self._bandwidth, sample_s)
        self.not_run |= {f"{tensors.case.name}: {name}": reason for name, reason in refused.items()}
        times = {schedule: label(first[launch], self.default) for schedule, launch in launches.items()}
        return {schedule: timings[name].median_us for schedule, name in times.items() if name in timings}

    def _launch(self, problem: DecodeProblem, schedule: Schedule) -> Hashable:
        plan = _plan(problem, self.device, schedule)
        units = plan.target_units if plan.max_run > 1 else None  # nothing else asks for them
        least = plan.least_run_keys if plan.max_run > 1 else None
        return plan.max_run, units, least, plan.grid, plan.num_stages

    def _outputs(self, case: AttentionCase, calls: Mapping[Schedule, Call]) -> dict[Schedule, tuple[Tensor, Tensor]]:
        """(out, lse) of set 0 by schedule. CUDA kernels that are new compile side by side; what cannot run is named."""

        def run(schedule: Schedule) -> tuple[Tensor, Tensor] | None:
            call: Any = calls[schedule]
            try:
                out, lse = call(0, return_lse=True)
                return out.clone(), lse
            except Exception as failure:  # more registers or shared memory than there are: of the driver's or Triton's
                self.not_run[f"{case.name}: {label(schedule, self.default)}"] = str(failure).splitlines()[0]
                return None

        side_by_side = _plan(case.problem, self.device).backend == "cuda"
        with ThreadPoolExecutor(COMPILERS if side_by_side else 1) as pool:
            found = dict(zip(calls, pool.map(run, calls), strict=True))
        return {schedule: outputs for schedule, outputs in found.items() if outputs is not None}

    def _same_bytes(self, tensors: CaseTensors, outputs: Mapping[Schedule, tuple[Tensor, Tensor]]) -> list[Schedule]:
        """The schedules whose bytes are the default's; none where the default's are wrong. Others are failures."""
        case, wanted = tensors.case, outputs.get(self.default)
        if case.name not in self._right:
            refusal = "the default does not run"
            if wanted is not None:
                judge = Judge(tensors)
                refusal = judge.refusal(CONTENDERS[0], judge.error(CONTENDERS[0], wanted[0])) or ""
            self.failures += [f"{case.name}: {refusal}"] if refusal else []
            self._right[case.name] = None if refusal else wanted
        right = self._right[case.name]
        if right is None:
            return []
        same = [schedule for schedule, pair in outputs.items() if all(map(torch.equal, pair, right))]
        for schedule in outputs.keys() - same:
            self.failures.append(f"{case.name}: {label(schedule, self.default)} gives other bytes than the default")
        return same

    def ratios(self, times: Times) -> dict[Schedule, list[float]]:
        """Time over the default's, case by case, of each other schedule that was timed in every case."""
        cases = list(times.values())
        if not cases or not all(self.default in case for case in cases):
            return {}
        everywhere = [schedule for schedule in cases[0] if all(schedule in case for case in cases)]
        return {s: [case[s] / case[self.default] for case in cases] for s in everywhere if s != self.default}

    def labelled(self, times: Times) -> dict[str, dict[str, float]]:
        return {name: {label(s, self.default): us for s, us in case.items()} for name, case in times.items()}


def _plan(problem: DecodeProblem, device: str, schedule: Schedule | None = None) -> DecodePlan:
    return splitkv.DecodeAttention(problem, device=device, schedule=schedule).plan
