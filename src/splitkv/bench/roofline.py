"""The machine's own read bandwidth: the line under every speed that we print.

On a GPU, a Triton kernel reads 4 GiB once and writes one number per block. On a CPU, PyTorch reduces 1 GiB
with every thread. Both count the bytes read and nothing else. The best variant's median counts: a floor that
is too low would flatter us.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from . import machine

GIB = 1 << 30
CUDA_BYTES = 4 * GIB
CPU_BYTES = 1 * GIB
CACHE_MULTIPLE = 8
"""The swept buffer is at least this many times the last-level cache, or the sweep would measure the cache."""
CUDA_SAMPLES, CPU_SAMPLES = 15, 5

# (int32 per block, warps): 16 to 32 KiB per block, all of it in flight at once, several blocks per SM.
CUDA_VARIANTS = ((4096, 4), (8192, 8), (8192, 4), (16384, 8))


@dataclass(frozen=True)
class Bandwidth:
    """bytes_per_s: the best variant's median. swept_bytes: read by each of `samples` sweeps."""

    bytes_per_s: float
    variant: str
    swept_bytes: int
    samples: int

    @property
    def tb_s(self) -> float:
        return self.bytes_per_s / 1e12


def read_bandwidth(device: str, swept_bytes: int | None = None) -> Bandwidth:
    """Bytes per second that the current CUDA device ("cuda") or this machine's cores ("cpu") read from
    memory.

    `swept_bytes` (default 4 GiB, 1 GiB on a CPU) is cut to a quarter of the free memory. RuntimeError if a
    GPU sweep did not read what it was given.
    """
    wanted = swept_bytes or (CUDA_BYTES if device == "cuda" else CPU_BYTES)
    if swept_bytes is None:
        wanted = max(wanted, CACHE_MULTIPLE * machine.cache_bytes(device))
    size = min(wanted, machine.memory_bytes(device)[0] // 4) // (1 << 20) * (1 << 20)
    return _cuda_bandwidth(size) if device == "cuda" else _cpu_bandwidth(size)


def _best(times_s: dict[str, list[float]], size: int) -> Bandwidth:
    medians = {name: statistics.median(samples) for name, samples in times_s.items()}
    variant = min(medians, key=lambda name: medians[name])
    return Bandwidth(size / medians[variant], variant, size, len(times_s[variant]))


def _cpu_bandwidth(size: int) -> Bandwidth:
    import torch

    from ..cache.allocation import empty

    # Small integers stored as float32: no sweep meets a NaN or a denormal, which some adders slow down for.
    data = empty((size // 4,), torch.float32, "cpu").copy_(torch.randint(1, 100, (size // 4,), dtype=torch.int32))
    half, words = data.numel() // 2, data.view(torch.int64)
    variants: dict[str, Callable[[], Any]] = {
        "torch.sum float32": data.sum,
        "torch.sum int64": words.sum,
        "torch.dot float32": lambda: torch.dot(data[:half], data[half:]),
    }
    times_s: dict[str, list[float]] = {name: [] for name in variants}
    for sweep in variants.values():
        sweep()
    for _ in range(CPU_SAMPLES):
        for name, sweep in variants.items():
            start = time.perf_counter()
            sweep()
            times_s[name].append(time.perf_counter() - start)
    return _best(times_s, size)


def _cuda_bandwidth(size: int) -> Bandwidth:
    import torch

    from .read_kernel import launch_read_sweep

    data = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_()
    expected = int(data.sum(dtype=torch.int64)) % (1 << 32)
    times_s: dict[str, list[float]] = {}
    for block, warps in CUDA_VARIANTS:
        sums = torch.zeros(-(-data.numel() // block), dtype=torch.int32, device="cuda")
        launch_read_sweep(data, sums, block=block, num_warps=warps)
        if int(sums.sum(dtype=torch.int64)) % (1 << 32) != expected:
            raise RuntimeError(f"the read sweep with {block} values per block did not read all of its {size} bytes")
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(CUDA_SAMPLES + 2)]
        for mark in marks:  # back to back, so that no sample contains a launch
            mark.record()
            launch_read_sweep(data, sums, block=block, num_warps=warps)
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
        times_s[f"triton {block} x int32, {warps} warps"] = spans[1:]
    return _best(times_s, size)
