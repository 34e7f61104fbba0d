"""Schedules: what a plan may choose freely because no byte of an answer depends on it, and tables of measured ones.

`splitkv bench tune` times schedules on a GPU and writes those that win to backends/tuned/<gpu>.json. A plan takes the
entry that covers its problem from the table of its GPU, or of the GPU nearest in capability, else the default. Tables
are read once; nothing is searched or timed at a call. No torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from .problem import DTYPE_BYTES, KNOWN_DEVICES, DecodeProblem, DeviceSpec

SCHEMA = "splitkv.tuned.v1"
FOLDER = Path(__file__).parent / "backends" / "tuned"
MARGIN = 0.03
"""A schedule must be this much faster than the default to be used: two runs of one schedule differ by up to 3 %."""


@dataclass(frozen=True)
class Schedule:
    """How the work of a launch is dealt out to blocks. Raises ValueError naming the field.

    units_per_sm: units that a loaded launch makes per SM. loaded_splits_per_sm: splits per SM above which a launch is
    loaded, and blocks join splits themselves. max_run: most splits that one block joins by itself: 1, 4 or 16, or
    fewer where the kernel has no registers for them. least_run_kib: K and V that a block reads, at least, before it
    writes a part, where max_run and rows allow (backend cuda). blocks_per_sm: blocks that share an SM and its
    memory, where units are more than SMs (backend cuda). more_stages: tiles in flight beyond the tile's own number, as
    far as memory allows.
    """

    units_per_sm: int
    loaded_splits_per_sm: int
    max_run: int = 16
    least_run_kib: int = 0
    blocks_per_sm: int = 2
    more_stages: int = 0

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if type(value := getattr(self, name)) is not int or value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")


ALLOWED: dict[str, tuple[int, ...]] = {
    "units_per_sm": tuple(range(1, 65)),
    "loaded_splits_per_sm": tuple(range(1, 65)),
    "max_run": (1, 4, 16),
    "least_run_kib": (0, 48, 96, 192, 384, 768),
    "blocks_per_sm": (1, 2, 3, 4),
    "more_stages": tuple(range(-4, 5)),
}
DEFAULTS = {"cuda": Schedule(64, 4, least_run_kib=192), "triton": Schedule(16, 16), "cpu": Schedule(8, 4)}
"""triton: enough units that uneven rows even out, few enough that starts stay cheap. cuda, whose blocks take equal
shares of consecutive units: 32 units each, so that shares are equal; units under 192 KiB cost more to write and merge
than uneven shares do. cpu: eight units a thread, which takes the next when it has done one."""

Interval = tuple[int, int]
"""Least and greatest, both included."""


@dataclass(frozen=True)
class Range:
    """Problems that are alike to a schedule.

    kv_bytes: size of a stored element. head_dim: of K or V, the larger. rows: query vectors per KV head that read the
    keys together. capacity: most keys per row.
    """

    backend: str
    kv_bytes: int
    head_dim: Interval
    rows: Interval
    batch: Interval
    capacity: Interval

    def __post_init__(self) -> None:
        if self.backend not in DEFAULTS:
            raise ValueError(f"backend: expected one of {', '.join(DEFAULTS)}, got {self.backend!r}")
        if type(self.kv_bytes) is not int or self.kv_bytes not in (1, 2, 4):
            raise ValueError(f"kv_bytes: expected 1, 2 or 4, got {self.kv_bytes!r}")
        for name in INTERVALS:
            value = getattr(self, name)
            whole = isinstance(value, tuple) and len(value) == 2 and all(type(end) is int for end in value)
            if not whole or not 0 <= value[0] <= value[1]:
                raise ValueError(f"{name}: expected two integers, the second not below the first, got {value!r}")

    def covers(self, problem: DecodeProblem, rows: int, backend: str) -> bool:
        values = {
            "head_dim": max(problem.head_dim, problem.v_head_dim),
            "rows": rows,
            "batch": problem.batch,
            "capacity": problem.capacity,
        }
        alike = (backend, DTYPE_BYTES[problem.kv_dtype]) == (self.backend, self.kv_bytes)
        return alike and all(low <= values[name] <= high for name, (low, high) in self.intervals().items())

    def intervals(self) -> dict[str, Interval]:
        return {name: getattr(self, name) for name in INTERVALS}


INTERVALS = ("head_dim", "rows", "batch", "capacity")


@dataclass(frozen=True)
class Table:
    """The schedules that won on one GPU. name: of its file."""

    name: str
    capability: tuple[int, int]
    entries: tuple[tuple[Range, Schedule], ...]

    @staticmethod
    def parse(name: str, data: Any) -> Table:
        """The table of a file's JSON. Fields that a schedule leaves out are the default's. ValueError says what is
        wrong with it and where."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"schema: expected {SCHEMA}, got {found!r}")
        major, dot, minor = str(data.get("compute_capability")).partition(".")
        if not (dot and major.isdecimal() and minor.isdecimal()):
            raise ValueError(f'compute_capability: expected such as "9.0", got {data.get("compute_capability")!r}')
        if not isinstance(data.get("entries"), list):
            raise ValueError(f"entries: expected a list, got {type(data.get('entries')).__name__}")
        entries = []
        for number, entry in enumerate(data["entries"]):
            try:
                entries.append(_entry(entry))
            except ValueError as error:
                raise ValueError(f"entries[{number}]: {error}") from None
        return Table(name, (int(major), int(minor)), tuple(entries))


def _entry(entry: Any) -> tuple[Range, Schedule]:
    if not isinstance(entry, Mapping) or not all(
        isinstance(entry.get(part), Mapping) for part in ("range", "schedule")
    ):
        raise ValueError(f"expected an object with range and schedule, got {entry!r}")
    names = [field.name for field in fields(Range)]
    if set(entry["range"]) != set(names):
        raise ValueError(f"range: expected {', '.join(names)}, got {', '.join(entry['range'])}")
    if unknown := entry["schedule"].keys() - ALLOWED.keys():
        raise ValueError(f"schedule: expected some of {', '.join(ALLOWED)}, got {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry["range"].items()
    }
    covered = Range(**values)
    return covered, replace(DEFAULTS[covered.backend], **entry["schedule"])


def lookup(problem: DecodeProblem, rows: int, device: DeviceSpec, backend: str) -> tuple[Schedule, str]:
    """(schedule, where it comes from: "default" or "tuned for <gpu>") of a problem on a device.

    rows: query vectors of one KV head that are served together.
    """
    if backend != "cpu" and (table := table_for(device)):
        for covered, schedule in table.entries:
            if covered.covers(problem, rows, backend):
                return schedule, f"tuned for {table.name}"
    return DEFAULTS[backend], "default"


@lru_cache(maxsize=64)
def table_for(device: DeviceSpec) -> Table | None:
    """The device's own table, else that of the nearest capability, else None."""
    tables = read_tables(FOLDER)
    own = [table for table in tables if table.name == table_name(device) and table.capability == device.capability]
    if own or not tables:
        return own[0] if own else None

    def distance(table: Table) -> tuple[int, str]:
        (major, minor), (own_major, own_minor) = table.capability, device.capability
        return abs(10 * major + minor - 10 * own_major - own_minor), table.name

    return min(tables, key=distance)


def table_name(device: DeviceSpec) -> str:
    """The name of a device's table: the known GPU that its name contains, such as h200, else its own name."""
    words = "".join(letter for letter in device.name.lower() if letter.isalnum())
    return max((known for known in KNOWN_DEVICES if known in words), key=len, default=words)


@cache
def read_tables(folder: Path) -> tuple[Table, ...]:
    """Every table of a folder, by name. One that cannot be read or is not understood is warned of and left out."""
    tables = []
    for path in sorted(folder.glob("*.json")):
        try:
            tables.append(Table.parse(path.stem, json.loads(path.read_text())))
        except (OSError, ValueError, RecursionError) as error:
            warnings.warn(f"{path}: {error}; launches take default schedules instead", stacklevel=2)
    return tuple(tables)
