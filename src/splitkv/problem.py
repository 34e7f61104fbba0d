"""What is asked (`DecodeProblem`) and where it runs (`DeviceSpec`): frozen values, no torch.

A plan is a pure function of these two and of a policy, so it can be computed, printed and tested on any
machine. Numbers here are facts; every decision that follows from them lives in policy.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from operator import index
from typing import Any

DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_DTYPE_ALIASES = {"fp8": "fp8_e4m3", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
Q_DTYPES = ("f32", "f16", "bf16")

MAX_CONTEXT = 262_144
"""Longest context splitkv is built and tested for, in tokens."""


def dtype_name(text: str, field: str = "dtype") -> str:
    """Canonical name of a dtype given by name; `fp8` is short for `fp8_e4m3`. An error names `field`."""
    name = _DTYPE_ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        raise ValueError(f"{field}: expected one of {', '.join(DTYPE_BYTES)} (or fp8), got {text!r}")
    return name


@dataclass(frozen=True)
class DecodeProblem:
    """The shape of one decode-attention call; nothing in it depends on the lengths of the rows.

    batch: rows. num_q_heads, num_kv_heads: their ratio is an integer >= 1. head_dim: of Q and K;
    v_head_dim: of V (0: as head_dim). q_len: query tokens per row. capacity: most keys a row may hold.
    q_dtype, kv_dtype: by name. page_size: keys per page, None for a contiguous cache.
    Raises ValueError naming the field, what was expected and what came.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    q_len: int = 1
    capacity: int = MAX_CONTEXT
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    page_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("q_dtype", "kv_dtype"):
            object.__setattr__(self, name, dtype_name(getattr(self, name), name))
        for name, value in vars(self).copy().items():
            if name in ("q_dtype", "kv_dtype") or (name == "page_size" and value is None):
                continue
            try:
                object.__setattr__(self, name, int(index(value)))
            except TypeError:
                raise ValueError(f"{name}: expected an integer, got {value!r}") from None
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        if self.q_dtype not in Q_DTYPES:
            raise ValueError(f"q_dtype: expected one of {', '.join(Q_DTYPES)}, got {self.q_dtype}")
        for name in ("batch", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "q_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), got {self.num_q_heads}"
            )
        if self.capacity < 0:
            raise ValueError(f"capacity: expected at least 0, got {self.capacity}")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size: expected at least 1 or None, got {self.page_size}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows_per_kv_head(self) -> int:
        """Query vectors that read the same keys: the group's heads times the query tokens."""
        return self.group_size * self.q_len

    @property
    def kv_bytes_per_key(self) -> int:
        """Bytes of K and V that one key of one KV head occupies."""
        return (self.head_dim + self.v_head_dim) * DTYPE_BYTES[self.kv_dtype]

    def kv_bytes(self, seq_len: int | None = None) -> int:
        """K and V bytes that one call must read when every row holds seq_len keys (default: capacity)."""
        keys = self.capacity if seq_len is None else seq_len
        return self.batch * self.num_kv_heads * keys * self.kv_bytes_per_key


@cache
def compiles_cuda() -> bool:
    """Whether this installation can compile CUDA: cuda-bindings and NVRTC, which PyTorch's CUDA builds bring."""
    try:
        from cuda.bindings import nvrtc

        return bool(nvrtc.nvrtcVersion()[0].value == 0)
    except (ImportError, RuntimeError, OSError):
        return False


@dataclass(frozen=True)
class DeviceSpec:
    """A device as the plan sees it.

    sm_count: streaming multiprocessors (cores on a CPU). capability: CUDA compute capability, (0, 0) for a
    CPU. shared_memory_bytes: most that one block may use. bandwidth_bytes_s: memory read bandwidth, the
    datasheet's unless `measured`; 0 where unknown. compiles_cuda: whether backend "cuda" can be compiled for it;
    `current` asks this installation, devices by name are taken to have what it needs.
    """

    name: str
    sm_count: int
    capability: tuple[int, int]
    shared_memory_bytes: int
    l2_bytes: int
    bandwidth_bytes_s: float
    measured: bool = False
    compiles_cuda: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.capability == (0, 0)

    @staticmethod
    def named(name: str) -> DeviceSpec:
        """A known GPU: h200, h100, a100, rtx4090, rtx5090, gb10 or b200 (any case, spaces ignored)."""
        key = name.strip().lower().replace(" ", "").replace("-", "")
        if key not in KNOWN_DEVICES:
            raise ValueError(f"device: expected one of {', '.join(KNOWN_DEVICES)}, got {name!r}")
        return KNOWN_DEVICES[key]

    @staticmethod
    def current(index: int | None = None) -> DeviceSpec:
        """The CUDA device `index` (default: the current one), or this machine's CPU where there is none."""
        import torch

        if not torch.cuda.is_available():
            return DeviceSpec.cpu()
        index = torch.cuda.current_device() if index is None else index
        properties: Any = torch.cuda.get_device_properties(index)
        words = properties.name.lower().replace(" ", "")
        capability = (properties.major, properties.minor)
        spec = DeviceSpec(
            name=properties.name,
            sm_count=properties.multi_processor_count,
            capability=capability,
            shared_memory_bytes=properties.shared_memory_per_block_optin,
            l2_bytes=properties.L2_cache_size,
            bandwidth_bytes_s=0.0,
            compiles_cuda=compiles_cuda(),
        )
        for name, known in KNOWN_DEVICES.items():
            if name in words and (known.sm_count, known.capability) == (spec.sm_count, capability):
                return replace(spec, bandwidth_bytes_s=known.bandwidth_bytes_s, measured=known.measured)
        return spec

    @staticmethod
    def cpu() -> DeviceSpec:
        """This machine's CPU: the cores this process may use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return DeviceSpec("cpu", cores, (0, 0), 0, 0, 0.0)

    def with_bandwidth(self, bytes_per_s: float) -> DeviceSpec:
        """The same device with a bandwidth measured on it."""
        return replace(self, bandwidth_bytes_s=bytes_per_s, measured=True)


KIB, MIB = 1 << 10, 1 << 20

# Bandwidths are the vendors' datasheet figures, except the H200's: a read-only sweep of 4 GiB measured
# 4.35 to 4.47 TB/s on it (datasheet 4.8).
KNOWN_DEVICES = {
    "h200": DeviceSpec("h200", 132, (9, 0), 227 * KIB, 60 * MIB, 4.4e12, measured=True),
    "h100": DeviceSpec("h100", 132, (9, 0), 227 * KIB, 50 * MIB, 3.35e12),
    "a100": DeviceSpec("a100", 108, (8, 0), 163 * KIB, 40 * MIB, 2.039e12),
    "rtx4090": DeviceSpec("rtx4090", 128, (8, 9), 99 * KIB, 72 * MIB, 1.008e12),
    "rtx5090": DeviceSpec("rtx5090", 170, (12, 0), 99 * KIB, 96 * MIB, 1.792e12),
    "gb10": DeviceSpec("gb10", 48, (12, 1), 99 * KIB, 24 * MIB, 0.273e12),
    "b200": DeviceSpec("b200", 148, (10, 0), 227 * KIB, 126 * MIB, 8.0e12),
}
