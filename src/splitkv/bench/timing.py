"""Timings that can be believed: rotating sets, interleaved contenders, medians, and rules that say no.

The first half is arithmetic on numbers and needs no device. The second half takes the samples: on a GPU by
replaying CUDA graphs between events, on a CPU with a clock round each call. Either way
- every call reads the next KV set of a rotation that is far larger than the cache;
- all contenders are measured in one process, in turns, and on a GPU each turn begins with a rest: a contender that
  draws much power makes the GPU lower its clock for tens of milliseconds, at the cost of whoever comes next;
- warm-up, compilation and capture happen before the first sample;
- a median that implies more bandwidth than the memory has, a first sample that still pays for a warm-up, or (on
  a GPU, which nobody shares) a wide spread is rejected and measured again, and after three tries refused.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..problem import MIB

ROTATION_BYTES = {"cuda": 2048 * MIB, "cpu": 512 * MIB}
"""Least distinct K and V bytes that a rotation reads before it comes round. After 512 MiB the L2 cache of an H200 still
held a little of what came first (docs/lab-notes.md, "Keys and values leave")."""
COLD_MULTIPLE = 4
"""A rotation of fewer than this many times the cache is labelled cache-resident."""
MIN_CALLS_PER_GRAPH, MAX_CALLS_PER_GRAPH, GRAPH_US = 20, 200, 1000.0
"""Calls per graph: at least 20, and as many as make it last 1 ms, which spreads its launch (10 us) thin."""
LEAD_IN_US = 2000.0
"""Shorter graphs are replayed once unmeasured before each sample, which hides the launch of the second."""
FIRST_SAMPLE_LIMIT = 3.0
"""A first sample this many times the slowest of the rest paid for a warm-up: no neighbour is so punctual."""
ATTEMPTS = 3

PEAK_SLACK = {"cuda": 1.05, "cpu": 2.0}
"""Implied over measured read bandwidth that is still believed. A CPU shares its memory: two virtual cores were seen to
read 43 GB/s in one minute and 75 in the next."""
SPREAD_LIMIT = {"cuda": 0.10, "cpu": 0.50}
"""(p80 - p20) / median: beyond it a GPU timing is rejected, and a CPU timing is labelled noisy."""
BUDGET_S = {"cuda": 0.4, "cpu": 0.6}
"""Seconds of samples that each contender is given, where one sample a turn is not already more."""
ROUNDS, SLOW_ROUNDS = {"cuda": 3, "cpu": 5}, 3
MAX_REPLAYS, MAX_CALLS = 10, 100
"""Turns of every contender, and the most samples of a fast one per turn."""
REST_S = 0.05
"""Before every turn on a GPU. Without it the clock of an H200 was seen at 1,455 to 1,981 MHz in one row's turns, and
16 rows of 8,192 fp8 keys took 78 us, not 70; with it at 1,914 MHz and more."""
SLOW_CALL_S = 1.0
"""With a contender slower than this per call on a CPU, three rounds must do."""


class TimingRejected(RuntimeError):
    """A timing that must not be reported, with the reason; `reasons` has it by contender, where there are some."""

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


@dataclass(frozen=True)
class Rotation:
    """sets: distinct KV sets in turn. footprint_bytes: theirs. cold: none survives in the cache."""

    sets: int
    footprint_bytes: int
    cold: bool

    @property
    def label(self) -> str:
        return "cold" if self.cold else "cache-resident"


def plan_rotation(set_bytes: int, arena_bytes: int, cache_bytes: int, device: str) -> Rotation | None:
    """How many sets of `set_bytes` to rotate over, given room for `arena_bytes`; None if not even one fits.

    Two at least (a set never follows itself), and enough for the device's ROTATION_BYTES and for four times the cache,
    where there is room for them.
    """
    target = max(ROTATION_BYTES[device], COLD_MULTIPLE * cache_bytes)
    sets = min(max(2, -(-target // set_bytes)), arena_bytes // set_bytes)
    if sets < 1:
        return None
    footprint = sets * set_bytes
    return Rotation(sets, footprint, footprint >= COLD_MULTIPLE * cache_bytes)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median, the 20th and 80th percentile of `samples` samples, each the mean of
    `calls_per_sample` calls."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    calls_per_sample: int

    @property
    def spread(self) -> float:
        return (self.p80_us - self.p20_us) / self.median_us


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest order statistics; `fraction` in 0..1."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(samples_us: Sequence[float], calls_per_sample: int = 1) -> Timing:
    """Median and percentiles of per-call times in microseconds."""
    if not samples_us or min(samples_us) <= 0:
        raise TimingRejected(f"expected positive samples, got {list(samples_us)[:3]}")
    return Timing(
        statistics.median(samples_us),
        percentile(samples_us, 0.2),
        percentile(samples_us, 0.8),
        len(samples_us),
        calls_per_sample,
    )


def implied_gb_s(kv_bytes: int, us: float) -> float:
    """Gigabytes (10**9) per second that reading `kv_bytes` in `us` microseconds means."""
    return kv_bytes / us / 1e3


def rejection(
    samples_us: Sequence[float], kv_bytes: int, bandwidth_bytes_s: float, device: str, cold: bool
) -> str | None:
    """Why these per-call samples of a call that reads `kv_bytes` must not be reported, or None."""
    timing = summarise(samples_us)
    if len(samples_us) > 2 and samples_us[0] > FIRST_SAMPLE_LIMIT * max(samples_us[1:]):
        first, median = samples_us[0], timing.median_us
        return f"the first sample ({first:.1f} us) paid for a warm-up: the median is {median:.1f} us"
    implied, peak = kv_bytes / timing.median_us * 1e6, bandwidth_bytes_s * PEAK_SLACK[device]
    if cold and implied > peak:
        return (
            f"{timing.median_us:.1f} us implies {implied / 1e9:.1f} GB/s, more than the memory gives "
            f"({bandwidth_bytes_s / 1e9:.1f} GB/s measured, {PEAK_SLACK[device]}x allowed)"
        )
    if device == "cuda" and timing.spread > SPREAD_LIMIT[device]:
        return f"p20 to p80 spans {timing.spread:.0%} of the median, more than {SPREAD_LIMIT[device]:.0%}"
    return None


def noisy(timing: Timing, device: str) -> bool:
    """Whether a timing that is reported must carry the label noisy."""
    return timing.spread > SPREAD_LIMIT[device]


def graph_calls(call_us: float, sets: int) -> int:
    """Calls to capture into one graph: at least 20, about 1 ms of them, and every set of the rotation."""
    wanted = min(max(MIN_CALLS_PER_GRAPH, math.ceil(GRAPH_US / call_us)), MAX_CALLS_PER_GRAPH)
    return -(-wanted // sets) * sets


def repeats(budget_s: float, contenders: int, rounds: int, sample_s: float, most: int) -> int:
    """Samples that one contender takes per turn: its share of the budget, at least one, at most `most`."""
    share_s = budget_s / contenders / rounds
    return min(max(1, int(share_s / max(sample_s, 1e-9))), most)


# ---- taking samples ----------------------------------------------------------------------------------------

Call = Callable[[int], Any]
"""One call of a contender on KV set i; what it returns is ignored."""


def measure(
    contenders: Mapping[str, Call],
    rotation: Rotation,
    *,
    device: str,
    kv_bytes: int,
    bandwidth_bytes_s: float,
    budget_s: float | None = None,
) -> dict[str, Timing]:
    """Time every contender, each of which reads `kv_bytes` per call at least. All are warmed up here.

    Raises TimingRejected, naming the contender, when three measurements in a row fail `rejection`.
    """
    sample = _cuda_sampler(contenders, rotation.sets) if device == "cuda" else _cpu_sampler(contenders, rotation.sets)
    reasons: dict[str, str] = {}
    for _ in range(ATTEMPTS):
        samples = sample(BUDGET_S[device] * len(contenders) if budget_s is None else budget_s)
        reasons = {}
        for name, (samples_us, _) in samples.items():
            reason = rejection(samples_us, kv_bytes, bandwidth_bytes_s, device, rotation.cold)
            if reason:
                reasons[name] = reason
        if not reasons:
            return {name: summarise(samples_us, calls) for name, (samples_us, calls) in samples.items()}
    raise TimingRejected("; ".join(f"{name}: {reason}" for name, reason in reasons.items()), reasons)


Sampler = Callable[[float], dict[str, tuple[list[float], int]]]
"""budget in seconds -> per contender (microseconds per call of each sample, calls per sample)."""


def _cpu_sampler(contenders: Mapping[str, Call], sets: int) -> Sampler:
    """Clock single calls. Each takes the next set, so no contender finds what the last left in the cache."""
    turn = 0
    estimate_s: dict[str, float] = {}

    def timed(call: Call) -> float:
        nonlocal turn
        start = time.perf_counter()
        call(turn % sets)
        elapsed = time.perf_counter() - start
        turn += 1
        return elapsed

    for name, call in contenders.items():
        estimate_s[name] = timed(call)
        if estimate_s[name] < SLOW_CALL_S:  # the first call started threads and touched pages
            estimate_s[name] = timed(call)

    def sample(budget_s: float) -> dict[str, tuple[list[float], int]]:
        rounds = SLOW_ROUNDS if max(estimate_s.values()) > SLOW_CALL_S else ROUNDS["cpu"]
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, call in contenders.items():
                for _ in range(repeats(budget_s, len(contenders), ROUNDS["cpu"], estimate_s[name], MAX_CALLS)):
                    samples[name].append(timed(call) * 1e6)
        return {name: (values, 1) for name, values in samples.items()}

    return sample


def _cuda_sampler(contenders: Mapping[str, Call], sets: int) -> Sampler:
    """Capture one graph per contender; a sample is one replay between two events, divided by its calls."""
    import torch

    def elapsed_us(work: Callable[[], Any], lead_in: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if lead_in:
            work()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    graphs: dict[str, tuple[Any, int, float]] = {}
    for name, call in contenders.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up: compiles, and fills whatever the contender allocates lazily
            for i in range(3):
                call(i % sets)
            call_us = min(elapsed_us(partial(call, i % sets), lead_in=False) for i in range(3))
        torch.cuda.current_stream().wait_stream(side)
        calls = graph_calls(call_us, sets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for n in range(calls):
                call(n % sets)
        graph.replay()
        graphs[name] = (graph, calls, elapsed_us(graph.replay, lead_in=False))

    def sample(budget_s: float) -> dict[str, tuple[list[float], int]]:
        lead_in = {name: graph_us < LEAD_IN_US for name, (_, _, graph_us) in graphs.items()}
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS["cuda"]):
            for name, (graph, calls, graph_us) in graphs.items():
                time.sleep(REST_S)
                graph.replay()
                for _ in range(repeats(budget_s, len(graphs), ROUNDS["cuda"], graph_us / 1e6, MAX_REPLAYS)):
                    samples[name].append(elapsed_us(graph.replay, lead_in[name]) / calls)
        return {name: (values, graphs[name][1]) for name, values in samples.items()}

    return sample


METHOD = {
    "cuda": "CUDA-graph replays of at least 20 calls between events, each call on the next KV set of a "
    "rotation of at least 2 GiB; contenders in turns in one process, each after a rest; medians, p20 and p80",
    "cpu": "perf_counter round single calls, each on the next KV set of a rotation of at least 512 MiB where "
    "memory allows; contenders in turns in one process; medians, p20 and p80",
}
