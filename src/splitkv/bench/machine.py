"""What this computer is: processor, caches, memory, GPU, driver and versions, as far as it tells."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import splitkv

from ..problem import MIB

DEFAULT_CACHE_BYTES = 32 * MIB
"""Last-level cache assumed where the system names none."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux' setting: "madvise" and "always" let a program have huge pages, "never" does not."""
UNKNOWN_PAGES = "unknown"
_SMAPS = Path("/proc/self/smaps_rollup")
_TRIAL_BYTES = 16 * MIB
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(driver: str | None = None) -> dict[str, str | None]:
    """Versions that a measurement depends on; None where a thing is not there."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "numpy": package_version("numpy"),
        "splitkv": splitkv.__version__,
        "driver": driver,
        "cuda": torch.version.cuda,
    }


def cpu_name() -> str:
    """Processor model, as the system prints it."""
    try:
        models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        models = []
    return models[0].strip() if models else platform.processor() or platform.machine()


def last_level_cache_bytes() -> int:
    """Size of the largest data cache that the system reports."""
    sizes = [DEFAULT_CACHE_BYTES]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}
    for path in _CACHES.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * units[match[2]])
    return max(sizes[1:] or sizes)


def host_memory_bytes() -> tuple[int, int]:
    """(available, total) bytes of main memory."""
    try:
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
        return int(fields["MemAvailable"]) * 1024, int(fields["MemTotal"]) * 1024
    except (OSError, KeyError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total // 2, total


def memory_pages() -> str:
    """The pages in which caches and weights come on a CPU, found out by trying, and the system's setting:
    "2 MiB (madvise)", "4 KiB (never)"; without a setting on systems that have none."""
    import torch

    from ..cache.allocation import HUGE_PAGE_BYTES, empty

    before = huge_page_bytes()
    trial = empty((_TRIAL_BYTES,), torch.uint8, "cpu").fill_(1)
    after = huge_page_bytes()
    if before is None or after is None:
        pages = UNKNOWN_PAGES
    elif after - before > trial.nbytes // 2:
        pages = f"{HUGE_PAGE_BYTES // MIB} MiB"
    else:
        pages = f"{mmap.PAGESIZE >> 10} KiB"
    try:
        setting = re.search(r"\[(\w+)\]", HUGE_PAGES.read_text())
    except OSError:
        setting = None
    return f"{pages} ({setting[1]})" if setting else pages


def huge_page_bytes() -> int | None:
    """Of this process's memory, what lies in huge pages; None where the system does not say."""
    try:
        found = re.search(r"^AnonHugePages:\s+(\d+) kB$", _SMAPS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def memory_bytes(device: str) -> tuple[int, int]:
    """(free, total) bytes of the memory that `device` ("cpu" or "cuda") allocates from."""
    if device == "cpu":
        return host_memory_bytes()
    import torch

    return torch.cuda.mem_get_info()


def cache_bytes(device: str) -> int:
    """Bytes of the cache in front of that memory: L2 of the GPU, last level of the CPU."""
    if device == "cpu":
        return last_level_cache_bytes()
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def nvidia_smi() -> dict[str, Any]:
    """driver and clocks (MHz) of the current CUDA device; empty where nvidia-smi says nothing."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    select = ["-i", f"GPU-{uuid}"] if uuid else []
    command = ["nvidia-smi", *select, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    text = output_of(command)
    if not text:
        return {}
    driver, *clocks = (value.strip() for value in text.splitlines()[0].split(","))
    names = ("sm", "memory", "sm_max", "memory_max")
    return {
        "driver": driver,
        "clocks_mhz": {n: int(c) for n, c in zip(names, clocks, strict=False) if c.isdigit()},
    }


def describe(device: str) -> dict[str, Any]:
    """The fields of a result file that say where it was measured; `gpu` or `cpu` names the device."""
    free, total = memory_bytes(device)
    facts: dict[str, Any] = {"host": platform.node(), "platform": platform.platform(), "device": device}
    driver = None
    if device == "cpu":
        import torch

        facts["cpu"] = cpu_name()
        facts |= {"cores": usable_cores(), "threads": torch.get_num_threads(), "compute_capability": None}
        facts |= {"sm_count": None, "clocks_mhz": None, "memory_pages": memory_pages()}
    else:
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        smi = nvidia_smi()
        driver = smi.get("driver")
        facts["gpu"] = properties.name
        facts |= {"compute_capability": f"{properties.major}.{properties.minor}"}
        facts |= {"sm_count": properties.multi_processor_count, "clocks_mhz": smi.get("clocks_mhz")}
    facts |= {"cache_bytes": cache_bytes(device), "memory_free_bytes": free, "memory_total_bytes": total}
    return facts | {"versions": versions(driver)}


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Neighbours:
    """Measures how many cores' worth of time other processes (and a VM's host) take while it exists."""

    def __init__(self) -> None:
        self._start = self._reading()

    @staticmethod
    def _reading() -> tuple[float, float, float] | None:
        """(wall, whole machine's busy, our own and our children's that ended) seconds; None without /proc/stat."""
        try:
            user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        except (OSError, ValueError):
            return None
        busy_s = (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s, sum(os.times()[:4])

    def cores(self) -> float | None:
        """Mean number of cores that others kept busy since the start; None where the system does not say."""
        end = self._reading()
        if self._start is None or end is None:
            return None
        wall_s, busy_s, own_s = (b - a for a, b in zip(self._start, end, strict=True))
        return max(busy_s - own_s, 0.0) / max(wall_s, 1e-9)


def default_backend(device: str) -> tuple[str, bool]:
    """(name, from_environment): what backend="auto" takes for a few 16-bit queries on "cuda" or "cpu"."""
    named = os.environ.get("SPLITKV_BACKEND", "auto").strip().lower()
    if named != "auto":
        return named, True
    if device == "cpu":
        return "cpu", False
    import splitkv

    problem = splitkv.DecodeProblem(1, 16, 4, 256, q_dtype="bf16", kv_dtype="bf16")
    return splitkv.DecodeAttention(problem, device="cuda").plan.backend, False


def output_of(command: list[str], cwd: Path | None = None) -> str | None:
    """What a command prints, trimmed; None if it is not installed, fails, or takes over 20 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def python_summary() -> str:
    """Python as it runs here: version, implementation, system and processor family."""
    kind = f"{platform.python_implementation()}, {sys.platform}, {platform.machine()}"
    return f"{platform.python_version()} ({kind})"
