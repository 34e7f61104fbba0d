"""What `splitkv bench tune` tunes for: ranges of problems, the cases that stand for them, and the schedules tried.

Ranges are in the order of their weight, as a run may end before the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from ..problem import DTYPE_BYTES, MAX_CONTEXT
from ..tuning import Interval, Range, Schedule
from .attention_cases import AttentionCase, ragged_lens

ONE, FEW, SOME, MANY = (1, 1), (2, 8), (9, 32), (33, 65_535)
"""Rows of a batch."""
SHORT, LONG, ANY = (0, 8192), (8193, MAX_CONTEXT), (0, MAX_CONTEXT)
"""Most keys per row."""
DIMS = {64: (16, 64), 128: (65, 128), 256: (129, 256)}
GROUP, WIDE, WIDER = (1, 8), (9, 16), (17, 64)
"""Query vectors that read the same keys: one tile of eight columns of the tensor cores, two, and more."""
HALF, FULL = (1, 4), (5, 8)
"""GROUP in two, where they differ."""

TRIED: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "blocks_per_sm": (1, 3),
        "more_stages": (-2, -1, 1),
        "units_per_sm": (4, 16, 32),
        "loaded_splits_per_sm": (2, 8, 16),
        "max_run": (1, 4),
        "least_run_kib": (0, 96, 384),
    },
    "triton": {"more_stages": (-1, 1), "units_per_sm": (4, 8, 32), "loaded_splits_per_sm": (4, 64), "max_run": (1, 4)},
    "cpu": {"units_per_sm": (4, 32)},
}
"""Values tried of each field, one at a time, by backend."""


@dataclass(frozen=True)
class TuneRange:
    """A range of problems and the cases timed for it; the backend is the one that its GPU takes for them."""

    kv_dtype: str
    head_dim: Interval
    rows: Interval
    batch: Interval
    capacity: Interval
    cases: tuple[AttentionCase, ...]

    @property
    def name(self) -> str:
        """Such as "bf16, head_dim 65-128, 1-8 vectors, batch 1-1, 0-8192 keys"."""
        parts = {"head_dim": self.head_dim, "vectors": self.rows, "batch": self.batch, "keys": self.capacity}
        ends = {name: f"{low}-{high}" for name, (low, high) in parts.items()}
        kv = self.kv_dtype.split("_")[0]
        return (
            f"{kv}, head_dim {ends['head_dim']}, {ends['vectors']} vectors, batch {ends['batch']}, {ends['keys']} keys"
        )

    def covered(self, backend: str) -> Range:
        return Range(backend, DTYPE_BYTES[self.kv_dtype], self.head_dim, self.rows, self.batch, self.capacity)


def _range(
    kv_dtype: str, dim: int, rows: Interval, batch: Interval, capacity: Interval, *shapes: tuple[int, str, int]
) -> TuneRange:
    """shapes: (batch, heads, keys); keys 0 for rows of different lengths."""
    cases = []
    for count, heads, keys in shapes:
        q_heads, kv_heads = map(int, heads.split("/"))
        case = AttentionCase("tune", count, q_heads, kv_heads, dim, keys, kv_dtype)
        if keys == 0:
            lens = ragged_lens(count)
            case = replace(case, seq_len=max(lens), lens=lens, page_size=16)
        cases.append(case)
    return TuneRange(kv_dtype, DIMS[dim], rows, batch, capacity, tuple(cases))


RANGES = (
    _range("bf16", 128, GROUP, SOME, ANY, (16, "32/8", 8192), (32, "32/8", 0)),
    _range("bf16", 128, HALF, MANY, ANY, (64, "32/8", 4096)),
    _range("bf16", 128, FULL, MANY, ANY, (64, "8/1", 8192), (64, "8/1", 0)),
    _range("bf16", 128, GROUP, ONE, SHORT, (1, "32/8", 4096)),
    _range("bf16", 128, GROUP, ONE, LONG, (1, "32/8", 32_768), (1, "32/8", 131_072)),
    _range("bf16", 128, GROUP, FEW, ANY, (4, "32/8", 16_384), (8, "32/8", 0)),
    _range("bf16", 256, GROUP, ONE, SHORT, (1, "16/4", 4096)),
    _range("bf16", 256, GROUP, ONE, LONG, (1, "16/4", 20_000), (1, "8/2", 262_144)),
    _range("bf16", 256, GROUP, SOME, ANY, (16, "16/4", 8192)),
    _range("bf16", 256, GROUP, MANY, ANY, (64, "16/4", 4096)),
    _range("bf16", 64, GROUP, ONE, SHORT, (1, "14/2", 512), (1, "14/2", 4096)),
    _range("bf16", 64, GROUP, ONE, LONG, (1, "14/2", 32_768)),
    _range("bf16", 64, GROUP, MANY, ANY, (64, "14/2", 8192)),
    _range("fp8_e4m3", 256, GROUP, ONE, SHORT, (1, "16/4", 4096)),
    _range("fp8_e4m3", 256, GROUP, ONE, LONG, (1, "16/4", 20_000), (1, "16/4", 262_144)),
    _range("fp8_e4m3", 128, GROUP, ONE, LONG, (1, "32/8", 32_768), (1, "32/8", 131_072)),
    _range("fp8_e4m3", 128, GROUP, SOME, ANY, (16, "32/8", 8192), (32, "32/8", 0)),
    _range("fp8_e4m3", 256, GROUP, SOME, ANY, (16, "16/4", 8192)),
    _range("fp8_e4m3", 128, GROUP, MANY, ANY, (64, "32/8", 4096)),
    _range("bf16", 128, WIDE, ONE, LONG, (1, "32/2", 32_768)),
    _range("bf16", 128, WIDE, MANY, ANY, (64, "32/2", 8192)),
    _range("f32", 256, GROUP, ONE, LONG, (1, "16/4", 20_000), (1, "16/4", 262_144)),
    _range("f32", 128, GROUP, SOME, ANY, (16, "32/8", 4096)),
    _range("bf16", 256, WIDER, ONE, LONG, (1, "64/2", 32_768)),
    _range("bf16", 256, WIDER, SOME, ANY, (16, "64/2", 8192)),
)


def select_ranges(pattern: str | None = None, ranges: Sequence[TuneRange] = RANGES) -> tuple[TuneRange, ...]:
    """The ranges whose name matches a regular expression, found anywhere. Raises ValueError where none does."""
    if pattern is None:
        return tuple(ranges)
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"ranges: expected a regular expression, got {pattern!r} ({error})") from None
    chosen = tuple(entry for entry in ranges if found.search(entry.name))
    if not chosen:
        raise ValueError(f"ranges: expected a pattern that some range matches, got {pattern!r}")
    return chosen


def variations(default: Schedule, backend: str) -> Iterator[Schedule]:
    """The default with one field changed, over every value tried."""
    for name, values in TRIED[backend].items():
        for value in values:
            if value != getattr(default, name):
                yield replace(default, **{name: value})


def differences(schedule: Schedule, default: Schedule) -> dict[str, int]:
    """The fields in which a schedule differs from the default."""
    return {
        field.name: getattr(schedule, field.name)
        for field in fields(Schedule)
        if getattr(schedule, field.name) != getattr(default, field.name)
    }


def label(schedule: Schedule, default: Schedule) -> str:
    """Such as "units_per_sm 8, max_run 4"; "default" for the default."""
    return ", ".join(f"{name} {value}" for name, value in differences(schedule, default).items()) or "default"
