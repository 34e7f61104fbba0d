"""The cases of `splitkv bench attention`, and how a run picks among them.

The group `table` is the table of goals, row for row; the others vary one thing each. Cases of the `cost-` groups
show how time grows, so only splitkv is timed in them. The groups `cpu` and `cpu-threads` are for CPUs alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from ..problem import DTYPE_BYTES, MIB, DecodeProblem
from .machine import usable_cores

PAGE_OF_PEERS = 16
"""Keys per page for a contender that only reads pages, in a case whose own cache is contiguous."""
ROW_MULTIPLE = 64
"""Rows of a contiguous cache hold a multiple of this many keys, so that the same memory is also whole pages."""
RAGGED_SHORTEST, RAGGED_LONGEST = 1024, 65_536
CPU_SET_BYTES = 288 * MIB
"""Largest KV set of a case that a CPU runs, where one call takes a tenth of a second already."""
COST = "cost-"
CPU, CPU_THREADS = "cpu", "cpu-threads"
CPU_HEADS = (("16/4", 256), ("32/8", 128), ("14/2", 64))
CPU_DTYPES = ("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2")
THREADS, THREADS_KEYS = (1, 2, 4, 8, 16, 32, 64), 32_768
"""Numbers of threads, and the length, that show how a CPU's speed grows with its cores."""


@dataclass(frozen=True)
class AttentionCase:
    """One row of the result. lens: every row's length where they differ; seq_len is the longest.

    page_size: of splitkv's own cache, None for a contiguous one. capacity: keys that a row has room for, 0 for
    its length rounded up. threads: of a CPU, 0 for all that PyTorch takes.
    """

    group: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    seq_len: int
    kv_dtype: str
    v_head_dim: int = 0
    page_size: int | None = None
    q_len: int = 1
    capacity: int = 0
    lens: tuple[int, ...] = ()
    threads: int = 0

    @property
    def name(self) -> str:
        """batch, heads, head_dim, length, KV, and what else is unusual about it."""
        size = f"{self.head_dim}/{self.v_dim}" if self.v_dim != self.head_dim else f"{self.head_dim}"
        length = f"{min(self.lens)}-{max(self.lens)}" if self.lens else f"{self.seq_len}"
        dtype = self.kv_dtype if self.kv_dtype == "fp8_e5m2" else self.kv_dtype.split("_")[0]
        words = [f"{self.batch}", f"{self.num_q_heads}/{self.num_kv_heads}", size, length, dtype]
        words += [f"page {self.page_size}"] if self.page_size else []
        words += [f"{self.q_len} queries"] if self.q_len > 1 else []
        words += [f"capacity {self.capacity}"] if self.capacity else []
        words += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        return ", ".join(words)

    @property
    def v_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def row_lens(self) -> tuple[int, ...]:
        return self.lens or (self.seq_len,) * self.batch

    @property
    def row_keys(self) -> int:
        """Keys that a contiguous row holds."""
        return self.capacity or ceil(self.seq_len / ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def pool_page(self) -> int:
        """Keys per page for contenders that read pages."""
        return self.page_size or PAGE_OF_PEERS

    @property
    def q_dtype(self) -> str:
        return self.kv_dtype if self.kv_dtype in ("f32", "f16", "bf16") else "bf16"

    @property
    def key_bytes(self) -> int:
        """K and V bytes of one key, all KV heads."""
        return self.num_kv_heads * (self.head_dim + self.v_dim) * DTYPE_BYTES[self.kv_dtype]

    @property
    def read_bytes(self) -> int:
        """K and V bytes that one call must read."""
        return sum(self.row_lens) * self.key_bytes

    @property
    def set_keys(self) -> int:
        """Keys that one KV set occupies; a row's spare capacity is not counted, as sets may share it."""
        if self.lens:
            return sum(ceil(n / self.pool_page) for n in self.lens) * self.pool_page
        if self.capacity:
            return ceil(self.seq_len / ROW_MULTIPLE) * ROW_MULTIPLE
        return self.batch * self.row_keys

    @property
    def spare_keys(self) -> int:
        """Keys behind the last set that its rows' capacity reaches into."""
        return self.row_keys - self.set_keys if self.capacity else 0

    @property
    def problem(self) -> DecodeProblem:
        """splitkv's problem for this case."""
        capacity = self.row_keys
        if self.page_size:
            capacity = ceil(self.row_keys / self.page_size) * self.page_size
        return DecodeProblem(
            batch=self.batch,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_dim,
            q_len=self.q_len,
            capacity=capacity,
            q_dtype=self.q_dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
        )

    @property
    def cost_only(self) -> bool:
        return self.group.startswith((COST, CPU_THREADS))


def ragged_lens(batch: int) -> tuple[int, ...]:
    """Lengths drawn log-uniformly from 1k to 64k, the same ones every time."""
    draw = random.Random(batch)
    span = RAGGED_LONGEST / RAGGED_SHORTEST
    return tuple(round(RAGGED_SHORTEST * span ** draw.random()) for _ in range(batch))


def _ragged(batch: int, kv_dtype: str) -> AttentionCase:
    lens = ragged_lens(batch)
    return AttentionCase("ragged", batch, 32, 8, 128, max(lens), kv_dtype, page_size=PAGE_OF_PEERS, lens=lens)


def _cases(group: str, *rows: tuple[int, str, int, int, str]) -> list[AttentionCase]:
    """Rows of (batch, heads, head_dim, length, KV dtype)."""
    cases = []
    for batch, heads, head_dim, seq_len, kv_dtype in rows:
        num_q_heads, num_kv_heads = map(int, heads.split("/"))
        cases.append(AttentionCase(group, batch, num_q_heads, num_kv_heads, head_dim, seq_len, kv_dtype))
    return cases


def all_cases() -> tuple[AttentionCase, ...]:
    """Every case, in the order of the tables."""
    table = _cases(
        "table",
        *((1, "16/4", 256, length, "bf16") for length in (4096, 20_000, 60_000, 148_000, 262_144)),
        *((1, "16/4", 256, length, dtype) for dtype in ("f32", "fp8_e4m3") for length in (20_000, 262_144)),
        *((1, heads, 256, length, "bf16") for heads in ("24/4", "8/2") for length in (20_000, 262_144)),
        *((1, "32/8", 128, length, "bf16") for length in (4096, 32_768, 131_072)),
        (16, "32/8", 128, 8192, "bf16"),
        (64, "32/8", 128, 4096, "bf16"),
        (1, "32/8", 128, 131_072, "fp8_e4m3"),
        (64, "8/1", 128, 8192, "bf16"),
        (1, "14/2", 64, 32_768, "bf16"),
        (1, "14/2", 64, 512, "bf16"),
    )
    dtypes = _cases(
        "dtypes",
        (1, "16/4", 256, 20_000, "f16"),
        (1, "32/8", 128, 32_768, "f16"),
        (64, "32/8", 128, 4096, "f16"),
        (1, "32/8", 128, 32_768, "fp8_e4m3"),
        (16, "32/8", 128, 8192, "fp8_e4m3"),
    )
    ragged = [*(_ragged(batch, "bf16") for batch in (8, 32, 128)), _ragged(32, "fp8_e4m3")]
    paged = [
        AttentionCase("pages", *shape, "bf16", page_size=page_size)
        for page_size in (16, 64)
        for shape in ((1, 16, 4, 256, 20_000), (1, 32, 8, 128, 131_072), (64, 32, 8, 128, 4096))
    ]
    queries = [
        AttentionCase("queries", *shape, "bf16", q_len=4)
        for shape in ((1, 16, 4, 256, 20_000), (1, 32, 8, 128, 32_768), (16, 32, 8, 128, 8192))
    ]
    uneven = [
        AttentionCase("192/128", *shape, "bf16", v_head_dim=128)
        for shape in ((1, 32, 8, 192, 32_768), (1, 32, 8, 192, 131_072), (16, 32, 8, 192, 8192))
    ]
    return (*table, *dtypes, *ragged, *paged, *queries, *uneven, *_cost_cases(), *_cpu_cases())


def _cpu_cases() -> list[AttentionCase]:
    """What a CPU is asked for: every length and dtype with all its cores, and one length with one core and more."""
    grid = [
        (1, heads, head_dim, length, dtype)
        for dtype in CPU_DTYPES
        for heads, head_dim in CPU_HEADS
        for length in (4096, THREADS_KEYS, 262_144)
    ]
    scaled = [
        (1, heads, head_dim, THREADS_KEYS, dtype)
        for dtype in ("f32", "bf16", "fp8_e4m3")
        for heads, head_dim in CPU_HEADS
    ]
    threaded = [replace(case, threads=n) for case in _cases(CPU_THREADS, *scaled) for n in THREADS]
    return _cases(CPU, *grid) + threaded


def _cost_cases() -> list[AttentionCase]:
    """One thing grows, the rest stays: time should grow with the bytes and with nothing else."""
    lengths = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 196_608, 262_144)
    return [
        *(AttentionCase(f"{COST}length", 1, 32, 8, 128, length, "bf16") for length in lengths),
        *(AttentionCase(f"{COST}batch", batch, 32, 8, 128, 8192, "bf16") for batch in (1, 2, 4, 8, 16, 32, 64)),
        *(AttentionCase(f"{COST}heads", 1, 4 * heads, heads, 128, 65_536, "bf16") for heads in (1, 2, 4, 8, 16)),
        *(AttentionCase(f"{COST}capacity", 1, 32, 8, 128, 4096, "bf16", capacity=c) for c in (4096, 32_768, 262_144)),
    ]


def select_cases(
    pattern: str | None = None, quick: bool = False, device: str = "cuda", cases: Sequence[AttentionCase] | None = None
) -> tuple[AttentionCase, ...]:
    """The cases whose "group: name" matches `pattern` (a regular expression, found anywhere).

    quick: one in three of each group, the first always. On a CPU, cases of a GPU's groups over 288 MiB a set are left
    out, and those for more threads than there are cores. Raises ValueError for a pattern that is none, or that no
    case matches.
    """
    chosen = tuple(case for case in (all_cases() if cases is None else cases) if _suits(case, device))
    if quick:
        chosen = tuple(case for n, case in enumerate(chosen) if case == _first(chosen, case.group) or n % 3 == 0)
    if pattern is not None:
        try:
            found = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"cases: expected a regular expression, got {pattern!r} ({error})") from None
        chosen = tuple(case for case in chosen if found.search(f"{case.group}: {case.name}"))
    if not chosen:
        raise ValueError(f"cases: expected a pattern that some case matches on {device}, got {pattern!r}")
    return chosen


def _suits(case: AttentionCase, device: str) -> bool:
    if case.group in (CPU, CPU_THREADS):
        return device == "cpu" and case.threads <= usable_cores()
    return device != "cpu" or case.set_keys * case.key_bytes <= CPU_SET_BYTES


def _first(cases: Sequence[AttentionCase], group: str) -> AttentionCase:
    return next(case for case in cases if case.group == group)
