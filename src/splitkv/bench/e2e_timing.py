"""Timing decode steps: runs that start at the same depth again and again, and what the GPU did in them, by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def profile_steps(loop: DecodeLoop, begin: Callable[[], None]) -> dict[str, Any]:
    """Where a step's time goes: microseconds and launches per step by kernel (on a CPU, by torch operation).

    `other_us`: kernels beyond the TOP_KERNELS longest. `busy_us`: all of them together; what a step takes beyond
    that is gaps between kernels, or the profiler's own.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = loop.decoder.device.type == "cuda"
    begin()
    loop.step()
    loop.finish()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            loop.step()
        loop.finish()
    entries = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # On a GPU the host's calls are listed as well, some of them with the time of the kernels they launched.
        if us > 0 and (event.device_type == DeviceType.CUDA or not on_gpu):
            entries.append((us / PROFILED_STEPS, event.count / PROFILED_STEPS, event.key[:NAME_LENGTH]))
    entries.sort(reverse=True)
    busy = sum(us for us, _, _ in entries)
    top = entries[:TOP_KERNELS]
    return {
        "steps": PROFILED_STEPS,
        "busy_us": busy,
        "launches_per_step": sum(count for _, count, _ in entries),
        "other_us": busy - sum(us for us, _, _ in top),
        "kernels": [{"name": name, "us_per_step": us, "per_step": count} for us, count, name in top],
    }
