"""Many cases in many processes, and the result file that says what they covered and what they found."""

from __future__ import annotations

import faulthandler
import functools
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

import splitkv

from .. import machine, record
from ..progress import Progress
from .cases import Case
from .checks import Finding, Started, check, compare_with_reference, finish, start
from .draw import draw_case
from .shrink import shrink

SCHEMA = "splitkv.fuzz.v1"
TASK_CASES = 200
"""Cases that a process takes at a time on a CPU; on a GPU it takes all cases of one shape."""
GPU_BATCH = 24
"""Cases launched between two waits for the GPU."""
SHAPES = 300
"""Shapes that a GPU run draws from: each costs seconds of compilation (draw.py)."""
REFERENCE_EVERY = 50
"""One case in so many is also held against splitkv.reference_attention."""
MOST_FAILURES = 20
"""Failures that a result file tells in full."""
SHRINK_S, SHRUNK = 20.0, 3
"""Seconds that shrinking one failure of a run may take, and how many are: `--only INDEX --shrink` takes its time."""
PATIENCE_S = 300.0


@dataclass(frozen=True)
class FuzzOptions:
    """What to run. shapes: of the pool; 0 gives every case its own. limit_s: begin no case after this many seconds."""

    backend: str
    device: str
    cases: int
    seed: int
    jobs: int
    shapes: int
    limit_s: float | None = None

    def as_command(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "cases": self.cases,
            "seed": self.seed,
            "jobs": self.jobs,
            "shapes": self.shapes,
            "limit_s": self.limit_s,
        }

    def draw(self, index: int) -> Case:
        return draw_case(self.seed, index, self.shapes or None)

    def repro(self, index: int) -> str:
        options = {"backend": self.backend, "seed": self.seed, "shapes": self.shapes, "only": index, "shrink": True}
        return record.command_line("bench fuzz", options)


def fuzz_options(
    backend: str = "auto",
    cases: int | None = None,
    seed: int = 0,
    jobs: int | None = None,
    shapes: int | None = None,
    limit_s: float | None = None,
) -> FuzzOptions:
    """The options with their defaults for this machine. Raises ValueError naming the option."""
    names = ("auto", *splitkv.attention.LAUNCHERS)
    if backend not in names:
        raise ValueError(f"backend: expected one of {', '.join(names)}, got {backend!r}")
    if cases is not None and cases < 1:
        raise ValueError(f"cases: expected at least 1, got {cases}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs: expected at least 1, got {jobs}")
    if shapes is not None and shapes < 0:
        raise ValueError(f"shapes: expected at least 0, got {shapes}")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    gpu = torch.cuda.is_available() and not interpreted
    if backend not in ("auto", "cpu") and not gpu and not interpreted:
        raise ValueError(f"backend: {backend} expects a CUDA GPU, and PyTorch sees none")
    device = "cuda" if gpu and backend != "cpu" else "cpu"
    return FuzzOptions(
        backend=backend,
        device=device,
        cases=cases or (100_000 if device == "cuda" else 20_000),
        seed=seed,
        jobs=jobs or machine.usable_cores(),
        shapes=(SHAPES if device == "cuda" else 0) if shapes is None else shapes,
        limit_s=limit_s,
    )


# ---- counting ----------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What some cases covered and gave; tallies add up."""

    cases: int = 0
    computed: int = 0
    twins: int = 0
    referenced: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    twin_refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[tuple[str, str]] = field(default_factory=Counter)
    worst: dict[tuple[str, str, str], tuple[float, int]] = field(default_factory=dict)
    failing: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    not_run: int = 0

    def count(self, index: int, case: Case, finding: Finding) -> None:
        self.cases += 1
        if finding.refusal is not None:
            self.refusals[finding.refusal] += 1
        elif finding.ratios:
            self.computed += 1
            self.dtypes[case.q_dtype, case.kv_dtype] += 1
            self.features.update(case.features())
        if finding.twin_refusal is not None:
            self.twin_refusals[finding.twin_refusal] += 1
        self.twins += finding.twin_checked
        for name, ratio in finding.ratios.items():
            self._worst((case.q_dtype, case.kv_dtype, name), (ratio, index))
        if finding.failures:
            self.fail(index, finding.failures, case.to_json())

    def fail(self, index: int, failures: list[str], case: str | None = None) -> None:
        self.failing += 1
        if len(self.failures) < MOST_FAILURES:
            self.failures.append({"index": index, "failures": failures, "case": case})

    def _worst(self, key: tuple[str, str, str], value: tuple[float, int]) -> None:
        self.worst[key] = max(self.worst.get(key, value), value)

    def add(self, other: Tally) -> None:
        for name in ("cases", "computed", "twins", "referenced", "failing", "not_run"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("refusals", "twin_refusals", "features", "dtypes"):
            getattr(self, name).update(getattr(other, name))
        for key, value in other.worst.items():
            self._worst(key, value)
        self.failures = sorted(self.failures + other.failures, key=lambda one: one["index"])[:MOST_FAILURES]


# ---- one process -------------------------------------------------------------------------------------------

_lost: list[str] = []
"""Why this process cannot use its GPU any more: an error in a kernel is final."""


def run_task(options: FuzzOptions, deadline: float, indices: range) -> Tally:
    """Run these cases in this process, as far as the deadline (of time.monotonic, which processes share) allows."""
    tally = Tally()
    step = GPU_BATCH if options.device == "cuda" else 1
    for begin in range(0, len(indices), step):
        batch = indices[begin : begin + step]
        if _lost or time.monotonic() > deadline:
            tally.not_run += len(batch)
            continue
        try:
            _run_batch(options, batch, tally)
        except RuntimeError as error:  # of the GPU, so no case of the batch is known to be the one
            _lost.append(str(error))
            tally.not_run += len(batch) - 1
            tally.fail(batch[0], [f"one of cases {list(batch)}: {str(error).splitlines()[0]}"])
    return tally


def _run_batch(options: FuzzOptions, batch: Iterable[int], tally: Tally) -> None:
    started: list[tuple[int, Started]] = []
    for index in batch:
        _now_at(index)
        started.append((index, start(options.draw(index), options.backend, options.device)))
    if options.device == "cuda":
        torch.cuda.synchronize()
    for index, one in started:
        finding = finish(one)
        if index % REFERENCE_EVERY == 0 and one.truth is not None:
            finding.failures += compare_with_reference(one)
            tally.referenced += 1
        tally.count(index, one.case, finding)


_current: Any = None
"""Shared by all processes: the case that each is at, which is what is left of one that crashed."""
_slot = 0


def _start_process(current: Any, taken: Any) -> None:
    global _current, _slot
    faulthandler.enable()
    torch.set_num_threads(1)
    with taken.get_lock():
        _current, _slot = current, taken.value
        taken.value += 1


def _now_at(index: int) -> None:
    if _current is not None:
        _current[_slot] = index


# ---- a run -------------------------------------------------------------------------------------------------


def tasks(options: FuzzOptions) -> list[range]:
    """Indices by task: all of one shape together, so that no kernel is compiled by two processes."""
    if options.shapes:
        return [range(shape, options.cases, options.shapes) for shape in range(min(options.shapes, options.cases))]
    return [range(i, min(i + TASK_CASES, options.cases)) for i in range(0, options.cases, TASK_CASES)]


def run_fuzz(
    options: FuzzOptions,
    source: Mapping[str, Any],
    *,
    command: str,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Run all cases and return the result file's object; `passed` says that none failed and some were computed."""
    begin = time.monotonic()
    result = record.new_record(SCHEMA, command, source, options.device)
    tally = Tally()
    deadline = math.inf if options.limit_s is None else begin + options.limit_s
    for part in (_in_process if options.jobs == 1 else _in_processes)(options, deadline):
        tally.add(part)
        failing = f", {tally.failing} failing" if tally.failing else ""
        progress(tally.cases, options.cases, f"{tally.computed} computed{failing}")
    for failure in tally.failures:
        failure["repro"] = options.repro(failure["index"])
    for failure in tally.failures[:SHRUNK]:
        if failure["case"] is not None and not _lost:
            failure["shrunk"] = shrunk(
                Case.from_json(failure["case"]), failure["failures"], options, SHRINK_S
            ).to_json()
    return result | {
        "backend": options.backend,
        "backend_used": machine.default_backend(options.device)[0] if options.backend == "auto" else options.backend,
        "read_bandwidth_tb_s": None,
        "seed": options.seed,
        "jobs": options.jobs,
        "shapes": options.shapes or None,
        "cases": tally.cases,
        "computed": tally.computed,
        "second_layouts_equal": tally.twins,
        "held_against_reference_attention": tally.referenced,
        "refused": sum(tally.refusals.values()),
        "refusals": dict(tally.refusals.most_common()),
        "second_layout_refusals": dict(tally.twin_refusals.most_common()),
        "features": dict(sorted(tally.features.items())),
        "failing": tally.failing,
        "not_run": options.cases - tally.cases,
        "failures": tally.failures,
        "passed": not tally.failing and tally.cases == options.cases and tally.computed > 0,
        "wall_s": time.monotonic() - begin,
        "rows": _rows(tally),
    }


def shrunk(case: Case, failures: list[str], options: FuzzOptions, seconds: float = PATIENCE_S) -> Case:
    """The smallest case found in that time that fails as this one does."""
    with_reference = any(text.startswith("oracle") for text in failures)

    def failures_of(smaller: Case) -> list[str]:
        try:
            return check(smaller, options.backend, options.device, with_reference).failures
        except (RuntimeError, ValueError, IndexError):  # a step of the shrinker that makes no sense for this case
            return []

    return shrink(case, failures, failures_of, seconds)


def _rows(tally: Tally) -> list[dict[str, Any]]:
    """Per pair of dtypes: cases, and the largest error as a share of its bound with the case that had it."""
    rows = []
    for (q_dtype, kv_dtype), cases in sorted(tally.dtypes.items()):
        row: dict[str, Any] = {"q_dtype": q_dtype, "kv_dtype": kv_dtype, "cases": cases}
        for name in ("out", "row", "lse"):
            ratio, index = tally.worst.get((q_dtype, kv_dtype, name), (None, None))
            row |= {f"worst_{name}_over_bound": ratio, f"worst_{name}_case": index}
        rows.append(row)
    return rows


def _in_process(options: FuzzOptions, deadline: float) -> Iterator[Tally]:
    return map(functools.partial(run_task, options, deadline), tasks(options))


def _in_processes(options: FuzzOptions, deadline: float) -> Iterator[Tally]:
    context = multiprocessing.get_context("spawn")
    current: Any = context.Array("q", [-1] * options.jobs)
    pool = ProcessPoolExecutor(
        options.jobs, context, initializer=_start_process, initargs=(current, context.Value("i", 0))
    )
    with pool:
        waiting = [pool.submit(run_task, options, deadline, indices) for indices in tasks(options)]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BrokenProcessPool:
            died = Tally()
            at = sorted(index for index in current[:] if index >= 0)
            for index in at:
                died.fail(index, [f"a process died at one of cases {at}"], options.draw(index).to_json())
            yield died
