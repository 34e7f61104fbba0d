"""The figures of `splitkv report`. Each function takes rows of result files and returns a matplotlib figure.

One look for all: ours in one strong colour, the floor black, the goal dashed, every peer its own quiet colour
wherever it appears. A hollow marker is a peer whose error is over four times ours, as where it rounds q to fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .summary import COSTS, OURS, Row, bandwidth_share, best_peer, cost_line, goal_us, peers, speedup

BLUE, GREEN, RED, INK, GREY = "#0b62d6", "#1a8a4a", "#c8382e", "#1d232b", "#8a94a0"
QUIET = ("#e08a1e", "#8d5fc4", "#3aa6a0", "#b5607c", "#7d8c2f", "#a0522d", "#5b7fa6", "#c49a2b", "#6b6b6b")
PANEL, LEGEND_INCHES = (4.6, 3.4), 1.5
"""Inches of one panel, and across of one entry of a legend."""
LEAST_EXCESS_US = 0.1
"""What is nearer to the floor than this is drawn at this, as the axis is logarithmic."""
LONGEST_BAR = 1.5
"""Of the bar that nine tenths of a figure's bars do not exceed."""
NARROW = 40
"""A logarithmic axis of less than this ratio also names 2 and 5."""
BOUND_LINES: dict[str, Any] = {
    "floor": {"color": INK, "lw": 1.2, "zorder": 2},
    "goal": {"color": INK, "lw": 1.0, "ls": (0, (4, 3)), "zorder": 2},
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "splitkv",
}

Colours = dict[str, str]
Value = Callable[[Row, str], float | None]
"""What a row says of a contender."""
Draw = TypeVar("Draw", bound=Callable[..., Figure])


def styled(draw: Draw) -> Draw:
    """Draw a figure in STYLE, whatever the process has set."""

    @wraps(draw)
    def inside(*arguments: Any, **options: Any) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return cast(Draw, inside)


def colours_of(rows: Iterable[Row]) -> Colours:
    """One colour per contender, the same in every figure of a report."""
    names = dict.fromkeys(name for row in rows for name in row["us"] if name != OURS)
    return {OURS: BLUE, **{name: QUIET[n % len(QUIET)] for n, name in enumerate(sorted(names))}}


def keys_text(keys: float) -> str:
    """Tokens as people say them: 512, 4k, 20k, 262k."""
    return f"{keys:.0f}" if keys < 1000 else f"{keys / 1000:.2g}k" if keys < 99_500 else f"{keys / 1000:.0f}k"


def us_text(us: float) -> str:
    """Microseconds, milliseconds from 1,000 on, with as many digits as are worth reading."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}" if us < 10_000 else f"{us / 1000:.0f} ms"


def panels(count: int, columns: int = 3, size: tuple[float, float] = PANEL) -> tuple[Figure, list[Any]]:
    """A figure of `count` axes in rows of up to `columns`."""
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def log_keys(axes: Any, keys: Sequence[float]) -> None:
    """A logarithmic axis that names the lengths measured, as far as there is room."""
    axes.set_xscale("log", base=2)
    shown: list[float] = []
    for value in sorted(set(keys)):
        if not shown or value >= 1.45 * shown[-1]:
            shown.append(value)
    axes.set_xticks(shown, [keys_text(value) for value in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlabel("keys per row")


def log_time(axes: Any, label: str) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < NARROW * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


def _points(rows: Sequence[Row], value: Callable[[Row], float | None]) -> tuple[list[float], list[float]]:
    pairs = sorted((row["seq_len"], found) for row in rows if (found := value(row)) is not None)
    return [x for x, _ in pairs], [y for _, y in pairs]


def _contenders(rows: Sequence[Row]) -> list[str]:
    """Peers in alphabetical order, then ours, so that ours is drawn on top."""
    names = {name for row in rows for name in row["us"]}
    return [*sorted(names - {OURS}), *({OURS} & names)]


def _curves(
    ax: Any, rows: Sequence[Row], colours: Colours, value: Callable[[Row, str], float | None]
) -> dict[str, Any]:
    """One line per contender through value(row, name), ours strong and on top. Returns the lines by name."""
    lines = {}
    for name in _contenders(rows):
        style: dict[str, Any] = {"lw": 1.2, "ms": 4.5, "zorder": 3}
        if name == OURS:
            style = {"lw": 2.4, "ms": 6, "zorder": 5}
        rough = any(peer.rough for row in rows for peer in peers(row) if peer.name == name)
        style |= {"color": colours[name], "markerfacecolor": "white" if rough else colours[name]}
        lines[name] = ax.plot(*_points(rows, partial(_named, value, name)), marker="o", **style)[0]
    return lines


def _named(value: Value, name: str, row: Row) -> float | None:
    return value(row, name)


def _time(row: Row, name: str) -> float | None:
    return row["us"].get(name)


def _excess(row: Row, name: str) -> float | None:
    us = row["us"].get(name)
    return None if us is None else max(us - row["floor_us"], LEAST_EXCESS_US)


def _percent(row: Row, name: str) -> float | None:
    share = bandwidth_share(row, name)
    return None if share is None else 100 * share


@styled
def time_against_length(series: dict[str, list[Row]], colours: Colours) -> Figure:
    """One panel per series (its key is the title): µs of every contender against length, floor and goal."""
    return _log_panels(series, colours, _time, {"floor": _floor, "goal": goal_us}, "µs per call")


@styled
def excess_against_length(series: dict[str, list[Row]], colours: Colours) -> Figure:
    """One panel per series: µs above the floor, where contenders that all read at full speed still differ."""
    return _log_panels(series, colours, _excess, {"goal": _goal_excess}, "µs above the floor")


def _floor(row: Row) -> float:
    return float(row["floor_us"])


def _goal_excess(row: Row) -> float:
    return goal_us(row) - _floor(row)


def _log_panels(
    series: dict[str, list[Row]], colours: Colours, value: Value, bounds: dict[str, Callable[[Row], float]], label: str
) -> Figure:
    figure, axes = panels(len(series))
    labelled: dict[str, Any] = {}
    for (title, rows), ax in zip(series.items(), axes, strict=True):
        for name, bound in bounds.items():
            labelled[name] = ax.plot(*_points(rows, bound), **BOUND_LINES[name])[0]
        labelled = {**_curves(ax, rows, colours, value), **labelled}
        _length_panel(ax, rows, title)
        log_time(ax, label)
    _legend(figure, labelled)
    return figure


@styled
def share_against_length(series: dict[str, list[Row]], colours: Colours) -> Figure:
    """One panel per series: the share of the read bandwidth, ours and every peer's."""
    figure, axes = panels(len(series))
    labelled: dict[str, Any] = {}
    for (title, rows), ax in zip(series.items(), axes, strict=True):
        labelled |= _curves(ax, rows, colours, _percent)
        ax.axhline(100, color=INK, lw=1.2)
        _length_panel(ax, rows, title)
        ax.set_ylim(0, 108)
        ax.set_ylabel("% of read bandwidth")
    _legend(figure, labelled)
    return figure


def _length_panel(ax: Any, rows: Sequence[Row], title: str) -> None:
    log_keys(ax, [row["seq_len"] for row in rows])
    ax.set_title(title, loc="left")


def _legend(figure: Figure, labelled: dict[str, Any]) -> None:
    """One legend over all panels: ours, floor and goal first, the peers in alphabetical order."""
    first = [name for name in (OURS, "floor", "goal") if name in labelled]
    names = [*first, *sorted(set(labelled) - set(first))]
    columns = max(1, min(len(names), int(figure.get_figwidth() / LEGEND_INCHES)))
    figure.legend([labelled[name] for name in names], names, loc="outside upper center", ncols=columns)


@styled
def bars(rows: Sequence[Row], colours: Colours) -> Figure:
    """Every case one line: the share of bandwidth of ours (bar), of its best peer (dot) and of the goal (tick)."""
    figure, (ax,) = panels(1, size=(9.5, 1.3 + 0.27 * len(rows)))
    drawn = list(reversed(rows))
    for y, row in enumerate(drawn):
        share, peer = bandwidth_share(row), best_peer(row)
        if share is not None:
            ax.barh(y, 100 * share, color=BLUE, height=0.62, zorder=2)
            _number(ax, 100 * share, y)
        ax.plot(100 * row["floor_us"] / goal_us(row), y, "|", color=INK, ms=11, mew=1.6, zorder=4, label="goal")
        if peer is not None:
            colour = colours[peer.name]
            style: dict[str, Any] = {"color": colour, "markerfacecolor": "white" if peer.rough else colour, "ms": 6}
            ax.plot(100 * row["floor_us"] / peer.us, y, "o", label=peer.name, zorder=5, **style)
    _case_axis(ax, drawn)
    ax.set_xlim(0, 105)
    ax.axvline(100, color=INK, lw=1.2)
    ax.set_xlabel("% of the read bandwidth measured in the same run (bar: splitkv; dot: the best other)")
    labelled = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    if labelled:
        _legend(figure, labelled)
    return figure


def _number(ax: Any, percent: float, y: int) -> None:
    """The number at the foot of its bar, or beside a bar too short to hold it."""
    short = percent < 6
    x, colour = (percent + 1, INK) if short else (1, "white")
    ax.text(x, y, f"{percent:.0f} %", va="center", color=colour, size=8, zorder=4)


@styled
def speedup_bars(rows: Sequence[Row]) -> Figure:
    """Every case with a peer one line: the best peer's time over ours, 1 being equal. On a linear axis a lone bar that
    would shorten all others is cut, and an arrow says so."""
    found = [(row, gain, best_peer(row)) for row in rows if (gain := speedup(row)) is not None]
    drawn = list(reversed(found))
    gains = [gain for _, gain, _ in drawn]
    logarithmic = max(gains) > 20 * min(gains)
    most = max(gains) if logarithmic else min(max(gains), LONGEST_BAR * sorted(gains)[len(gains) * 9 // 10])
    figure, (ax,) = panels(1, size=(9.5, 1.3 + 0.27 * len(drawn)))
    for y, (_, gain, peer) in enumerate(drawn):
        ax.barh(y, min(gain, most) - 1, left=1, color=GREEN if gain >= 1 else RED, height=0.62, zorder=2)
        rough = " (error over 4 times ours)" if peer and peer.rough else ""
        digits = f"{gain:.2f}" if gain < 10 else f"{gain:.0f}"
        text = f"{'→ ' * (gain > most)}{digits}x  {peer.name if peer else ''}{rough}"
        ax.annotate(text, (max(min(gain, most), 1), y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _case_axis(ax, [row for row, _, _ in drawn])
    if logarithmic:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    else:
        ax.set_xlim(min(0.9, *gains) - 0.02, max(1.1, most) * 1.22)
    ax.axvline(1, color=INK, lw=1.2)
    ax.set_xlabel("time of the best other contender over time of splitkv")
    return figure


def _case_axis(ax: Any, rows: Sequence[Row]) -> None:
    ax.set_yticks(range(len(rows)), [row["case"] for row in rows])
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")


@styled
def costs(found: dict[str, list[Row]]) -> Figure:
    """Ours against length, rows, heads with straight lines through them, and against unused capacity."""
    figure, axes = panels(len(found), columns=2)
    for (group, rows), ax in zip(found.items(), axes, strict=True):
        timed = [row for row in rows if OURS in row["us"]]
        if group in COSTS:
            label, value = COSTS[group].label, COSTS[group].value
            x = [value(row) for row in timed]
            line = cost_line(group, rows)
            if line is not None:
                ends = [0, max(x)]
                text = f"{line.intercept:.1f} µs + {_slope_text(line.slope, label)}"
                ax.plot(ends, [line.intercept + line.slope * end for end in ends], color=GREY, lw=1.2, label=text)
                ax.set_title(f"R² = {line.r2:.5f}", loc="right", fontweight="normal")
            ax.plot(x, [row["us"][OURS] for row in timed], "o", color=BLUE, ms=6, label=OURS)
            ax.plot(x, [row["floor_us"] for row in timed], color=INK, lw=1.2, label="floor")
            ax.set_xlabel(label)
            ax.set_ylim(bottom=0)
            ax.set_xlim(left=0)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: keys_text(value)))
            ax.legend(loc="lower right")
        else:
            names = [keys_text(row["capacity"]) for row in timed]
            drawn = ax.bar(names, [row["us"][OURS] for row in timed], color=BLUE, width=0.55)
            ax.bar_label(drawn, [us_text(row["us"][OURS]) for row in timed], padding=2)
            ax.margins(y=0.15)
            ax.set_xlabel(f"capacity of the graph's cache, in keys ({keys_text(timed[0]['seq_len'])} of them valid)")
        ax.set_ylabel("µs per call")
        ax.set_title(f"against {group.removeprefix('cost-')}", loc="left")
    return figure


def _slope_text(slope: float, label: str) -> str:
    return f"{1000 * slope:.3g} µs per 1,000 keys" if label.startswith("keys") else f"{slope:.3g} µs each"
