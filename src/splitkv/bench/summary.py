"""What the rows of a result file say when put together: best peers, goals met, and how straight a line is.

Plain numbers out of plain dictionaries; needs neither torch nor a plotting library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, UNSPLIT = "splitkv", "splitkv-unsplit"
"""Contenders that are ours; the second of `bench e2e`, with attention in one split."""
ROUGH_FACTOR = 4.0
"""A peer whose error is more than this many times ours answers another question: it is shown, and marked."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """A contender's time in one row; rough: its error is over four times ours."""

    name: str
    us: float
    rough: bool


@dataclass(frozen=True)
class Line:
    """Least squares over points: y = intercept + slope x, and the share of the variance that it explains."""

    slope: float
    intercept: float
    r2: float


def peers(row: Row) -> list[Peer]:
    """Every contender but ours that has a time, fastest first."""
    ours = row["err"].get(OURS)
    found = []
    for name, us in row["us"].items():
        if name != OURS:
            error = row["err"].get(name)
            rough = ours is not None and error is not None and error > ROUGH_FACTOR * ours
            found.append(Peer(name, us, rough))
    return sorted(found, key=lambda peer: peer.us)


def best_peer(row: Row, accurate: bool = False) -> Peer | None:
    """The fastest contender but ours; accurate: the fastest whose error is like ours."""
    return next((peer for peer in peers(row) if not (accurate and peer.rough)), None)


def speedup(row: Row, accurate: bool = False) -> float | None:
    """The best peer's time over ours; None where one is missing."""
    ours, peer = row["us"].get(OURS), best_peer(row, accurate)
    return peer.us / ours if ours and peer else None


def goal_us(row: Row) -> float:
    """The row's goal: 1.01 x floor + 3 us unless it names another."""
    return float(row.get("goal_us", 1.01 * row["floor_us"] + 3))


def goal_met(row: Row) -> bool:
    """Whether ours is at or below the goal and ahead of every peer."""
    ours, peer = row["us"].get(OURS), best_peer(row)
    return ours is not None and ours <= goal_us(row) and (peer is None or ours <= peer.us)


def bandwidth_share(row: Row, name: str = OURS) -> float | None:
    """Floor over time: the share of the measured read bandwidth."""
    us = row["us"].get(name)
    return row["floor_us"] / us if us else None


def fit_line(points: Iterable[tuple[float, float]]) -> Line | None:
    """None with fewer than three points or no spread in x."""
    points = list(points)
    n = len(points)
    if n < 3:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    sxx = sum((x - mean_x) ** 2 for x, _ in points)
    syy = sum((y - mean_y) ** 2 for _, y in points)
    sxy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    if sxx == 0:
        return None
    slope = sxy / sxx
    return Line(slope, mean_y - slope * mean_x, 1.0 if syy == 0 else sxy**2 / (sxx * syy))


@dataclass(frozen=True)
class Cost:
    """What grows in a group of rows: its label on an axis, and its value in a row."""

    label: str
    value: Callable[[Row], float]


COSTS = {
    "cost-length": Cost("keys per row", lambda row: row["seq_len"]),
    "cost-batch": Cost("rows", lambda row: row["batch"]),
    "cost-heads": Cost("KV heads", lambda row: row["num_kv_heads"]),
}


def cost_line(group: str, rows: Sequence[Row]) -> Line | None:
    """The straight line through ours against what grows in a group of COSTS."""
    value = COSTS[group].value
    return fit_line((value(row), row["us"][OURS]) for row in rows if OURS in row["us"])


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their group, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get("group", "rungs"), []).append(row)
    return found
