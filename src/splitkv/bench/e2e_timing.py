"""Timing decode steps: runs that start at the same depth again and again, and what the GPU did in them, by kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.loop import DecodeLoop

STEPS = {"cuda": 20, "cpu": 4}
"""Steps of one sample."""
LEAD_IN = 1
"""Steps before the first that is timed: they hide the launch of the first graph."""
MOST_SAMPLES = {"cuda": 5, "cpu": 3}
PROFILED_STEPS = 5
TOP_KERNELS = 25
NAME_LENGTH = 120

METHOD = {
    "cuda": f"events round {STEPS['cuda']} replays of one captured step, after {LEAD_IN} more; "
    f"up to {MOST_SAMPLES['cuda']} such samples from the same depth; medians, p20 and p80 of their means",
    "cpu": f"perf_counter round {STEPS['cpu']} steps, after {LEAD_IN} more; "
    f"up to {MOST_SAMPLES['cpu']} such samples from the same depth; medians, p20 and p80 of their means",
}


def run_length(device: str) -> int:
    """Tokens that one run adds to every row."""
    return LEAD_IN + STEPS[device]


@torch.no_grad()
def first_run(loop: DecodeLoop, begin: Callable[[], None]) -> tuple[Tensor, float]:
    """Tokens [steps, batch] int64 on the device of one run, and the mean microseconds of its steps, in which they are
    also copied away: a launch more per step than in `step_times`. begin: puts rows back to their depth."""
    begin()
    steps = run_length(loop.decoder.device.type)
    tokens = torch.empty((steps, *loop.tokens.shape), dtype=loop.tokens.dtype, device=loop.tokens.device)
    left = iter(tokens)

    def step() -> None:
        loop.step()
        next(left).copy_(loop.tokens)

    return tokens, _sample(loop, step)


def step_times(
    loop: DecodeLoop, begin: Callable[[], None], budget_s: float, least: int, expect_us: float
) -> list[float]:
    """Mean microseconds per step of each sample: `least` samples, and more while they fit into the budget.

    expect_us: of a step, from `first_run`. Empty where `least` is 0 and not one fits.
    """
    device = loop.decoder.device.type
    fitting = int(budget_s / (run_length(device) * expect_us / 1e6))
    samples = []
    for _ in range(min(max(fitting, least), MOST_SAMPLES[device])):
        begin()
        samples.append(_sample(loop, loop.step))
    return samples


def _sample(loop: DecodeLoop, step: Callable[[], None]) -> float:
    steps = STEPS[loop.decoder.device.type]
    for _ in range(LEAD_IN):
        step()
    if loop.decoder.device.type == "cpu":
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start_s) / steps * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps * 1e3


@dataclass(frozen=True)
class Span:
    """When a kernel ran, in microseconds."""

    name: str
    start_us: float
    end_us: float


def profile_steps(loop: DecodeLoop, begin: Callable[[], None]) -> dict[str, Any]:
    """Where a step's time goes, by `kernel_times` of its kernels (on a CPU, of torch's operations)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = loop.decoder.device.type == "cuda"
    begin()
    loop.step()
    loop.finish()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            loop.step()
        loop.finish()
    # On a GPU the host's calls are listed as well; on a CPU, an operation's own parts lie within it.
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = (e for e in profiler.events() if e.device_type == wanted and (on_gpu or e.cpu_parent is None))
    return kernel_times([Span(e.name, e.time_range.start, e.time_range.end) for e in events], PROFILED_STEPS)


def kernel_times(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Microseconds per step by kernel, the TOP_KERNELS of most `added_us` first.

    `us`: from start to end. `added_us`: of that, only what no kernel before it was running in; a kernel that is
    launched early and waits for the one before it has a long `us`, and adds what it does after that has ended.
    `busy_us`: all added together, the time in which any kernel ran. `other_us`: added by kernels that are not listed.
    """
    found: dict[str, list[float]] = {}
    reached = -math.inf
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        added = max(span.end_us - max(span.start_us, reached), 0.0)
        reached = max(reached, span.end_us)
        sums = found.setdefault(span.name[:NAME_LENGTH], [0.0, 0.0, 0.0])
        for i, value in enumerate((added, span.end_us - span.start_us, 1)):
            sums[i] += value / steps
    entries: list[dict[str, Any]] = [
        {"name": name, "added_us": added, "us": us, "launches": count} for name, (added, us, count) in found.items()
    ]
    entries.sort(key=lambda entry: -entry["added_us"])
    return {
        "steps": steps,
        "busy_us": sum(entry["added_us"] for entry in entries),
        "other_us": sum(entry["added_us"] for entry in entries[TOP_KERNELS:]),
        "launches": sum(entry["launches"] for entry in entries),
        "kernels": entries[:TOP_KERNELS],
    }
