"""Which rungs there are, what a run of them asks for, and the memory it rotates over."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..problem import DTYPE_BYTES, MAX_CONTEXT, DecodeProblem
from . import machine
from .timing import Rotation, plan_rotation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LENGTHS = (4096, 8192, 20_000, 60_000, 148_000, 262_144)
HEADS = ((16, 4), (24, 4), (8, 2))
DTYPES = ("f32", "f16", "bf16")
HEAD_DIM = 256
QUICK_LENGTHS, QUICK_HEADS = (4096, 20_000, 262_144), ((16, 4),)
"""Shortest, middle and longest context of one geometry: about two minutes on two cores."""

MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.45}
"""Share of the free memory that the KV sets may take. A CPU's memory is also everybody else's."""
_FILL_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Rung:
    """One row: a decode step of batch 1 at one length, geometry and KV dtype (which is also q's)."""

    seq_len: int
    num_q_heads: int
    num_kv_heads: int
    kv_dtype: str
    head_dim: int = HEAD_DIM

    @property
    def case(self) -> str:
        return f"1, {self.num_q_heads}/{self.num_kv_heads}, {self.head_dim}, {self.seq_len}, {self.kv_dtype}"

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(
            batch=1,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            capacity=self.seq_len,
            q_dtype=self.kv_dtype,
            kv_dtype=self.kv_dtype,
        )

    @property
    def set_bytes(self) -> int:
        """K and V bytes that one call reads."""
        return self.problem.kv_bytes()


@dataclass(frozen=True)
class RungOptions:
    """What to run. selection: "full", "quick" or "custom", for the record. Made by `rung_options`."""

    device: str
    lengths: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    selection: str
    seed: int = 0
    head_dim: int = HEAD_DIM

    def rungs(self) -> Iterator[Rung]:
        """Grouped by dtype, so that each group shares one allocation."""
        for kv_dtype in self.dtypes:
            for num_q_heads, num_kv_heads in self.heads:
                for seq_len in self.lengths:
                    yield Rung(seq_len, num_q_heads, num_kv_heads, kv_dtype, self.head_dim)

    def as_command(self) -> dict[str, object]:
        """The options of the command that repeats exactly this, whatever device or defaults it runs under."""
        heads = [f"{q}/{kv}" for q, kv in self.heads]
        options = {"device": self.device, "lengths": self.lengths, "heads": heads, "dtypes": self.dtypes}
        return {**options, "head-dim": self.head_dim, "seed": self.seed}


def rung_options(
    device: str | None = None,
    lengths: str | None = None,
    heads: str | None = None,
    dtypes: str | None = None,
    full: bool | None = None,
    seed: int = 0,
    head_dim: int = HEAD_DIM,
) -> RungOptions:
    """Options from their text forms; what is not given comes from the full or the quick set.

    device: "cuda" or "cpu" (default: cuda where there is one). full (default: on a GPU) chooses the set.
    Raises ValueError naming the option, what was expected and what came.
    """
    chosen = resolve_device(device)
    whole = chosen == "cuda" if full is None else full
    custom = lengths is not None or heads is not None or dtypes is not None or head_dim != HEAD_DIM
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"head-dim: expected a multiple of 16 from 16 to 256, got {head_dim}")
    return RungOptions(
        device=chosen,
        lengths=parse_lengths(lengths) if lengths is not None else (LENGTHS if whole else QUICK_LENGTHS),
        heads=parse_heads_list(heads) if heads is not None else (HEADS if whole else QUICK_HEADS),
        dtypes=parse_dtypes(dtypes) if dtypes is not None else DTYPES,
        selection="custom" if custom else "full" if whole else "quick",
        seed=seed,
        head_dim=head_dim,
    )


def resolve_device(device: str | None) -> str:
    """ "cuda" or "cpu": the one asked for if it is there, else what this machine has."""
    import torch

    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"device: expected cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA GPU that PyTorch can use for cuda, got none (try --device cpu)")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "4096,20000" -> (4096, 20000); each in 1..262144."""
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MAX_CONTEXT for word in words):
        raise ValueError(f"lengths: expected numbers of tokens in 1..{MAX_CONTEXT}, joined by commas, got {text!r}")
    return tuple(int(word) for word in words)


def parse_heads(text: str, name: str = "heads") -> tuple[int, int]:
    """ "16/4" -> (16, 4): query heads and KV heads, their ratio an integer."""
    parts = text.strip().split("/")
    if len(parts) == 2 and all(part.isdecimal() and int(part) > 0 for part in parts):
        num_q_heads, num_kv_heads = map(int, parts)
        if num_q_heads % num_kv_heads == 0:
            return num_q_heads, num_kv_heads
    raise ValueError(f"{name}: expected QUERY/KV heads with an integer ratio, such as 16/4, got {text!r}")


def parse_heads_list(text: str) -> tuple[tuple[int, int], ...]:
    """ "16/4,8/2" -> ((16, 4), (8, 2))."""
    return tuple(parse_heads(word) for word in text.split(","))


def parse_dtypes(text: str) -> tuple[str, ...]:
    """ "f16,bf16" -> ("f16", "bf16")."""
    words = tuple(word.strip() for word in text.split(","))
    if not all(word in DTYPES for word in words):
        raise ValueError(f"dtypes: expected some of {', '.join(DTYPES)}, joined by commas, got {text!r}")
    return words


# ---- memory ------------------------------------------------------------------------------------------------


def memory_budget(device: str) -> int:
    """Bytes that the KV sets of a run may take, from what is free now."""
    return int(machine.memory_bytes(device)[0] * MEMORY_SHARE[device])


def arena_bytes(rungs: Sequence[Rung], budget_bytes: int, cache_bytes: int, device: str) -> int:
    """Bytes for the largest rotation that any of these rungs wants and the budget holds; 0 if none fits."""
    rotations = [plan_rotation(rung.set_bytes, budget_bytes, cache_bytes, device) for rung in rungs]
    return max((rotation.footprint_bytes for rotation in rotations if rotation), default=0)


class Arena:
    """One allocation for K and one for V, random, from which every rung cuts its own disjoint sets.

    A set is a contiguous [1, seq_len, num_kv_heads, head_dim] view whose capacity is its length. Values are
    standard normal, a function of the seed and the position alone.
    """

    def __init__(self, size_bytes: int, kv_dtype: str, device: str, seed: int) -> None:
        dtype, self.device, self.seed = torch_dtype(kv_dtype), device, seed
        elements = size_bytes // (2 * DTYPE_BYTES[kv_dtype])
        self.k = random_values(elements, dtype, device, f"k {seed}")
        self.v = random_values(elements, dtype, device, f"v {seed}")

    @property
    def size_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def query(self, rung: Rung) -> Tensor:
        """[1, num_q_heads, head_dim], standard normal."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        q = torch.randn(1, rung.num_q_heads, rung.head_dim, generator=generator)
        return q.to(self.device, self.k.dtype)

    def sets(self, rung: Rung, rotation: Rotation, head_major: bool = False) -> list[tuple[Tensor, Tensor]]:
        """(k, v) of each set; head_major: the same memory as [1, num_kv_heads, seq_len, head_dim]."""
        elements = rung.num_kv_heads * rung.seq_len * rung.head_dim
        shape = (1, rung.num_kv_heads, rung.seq_len, rung.head_dim)
        if not head_major:
            shape = (1, rung.seq_len, rung.num_kv_heads, rung.head_dim)
        starts = range(0, rotation.sets * elements, elements)
        return [(self.k[i : i + elements].view(shape), self.v[i : i + elements].view(shape)) for i in starts]


def torch_dtype(name: str) -> torch.dtype:
    """The PyTorch dtype of f32, f16, bf16, fp8_e4m3 or fp8_e5m2."""
    import torch

    named = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    return {**named, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]


def random_values(elements: int, dtype: torch.dtype, device: str, seed: str) -> Tensor:
    """Standard normal values in blocks, each from a generator of its own, so that threads share the work.

    PyTorch's CPU generator takes only the low 32 bits of a seed, so seed and block are mixed into those.
    """
    import torch

    from ..cache.allocation import empty

    out = empty((elements,), dtype, device)

    def fill(block: int) -> None:
        part = out[block * _FILL_ELEMENTS : (block + 1) * _FILL_ELEMENTS]
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {block}".encode()))
        part.copy_(torch.randn(part.numel(), generator=generator, device=device))

    with ThreadPoolExecutor(machine.usable_cores() if device == "cpu" else 1) as pool:
        list(pool.map(fill, range(math.ceil(elements / _FILL_ELEMENTS))))
    return out
