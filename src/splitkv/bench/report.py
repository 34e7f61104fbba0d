"""`splitkv report`: result files in, one self-contained HTML page and PNG plots out.

Everything on the page is computed from the files' rows; nothing is measured and nothing is fetched: the figures are
PNGs inside the page, the style is in its head.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attention_cases import COST
from .record import write_whole
from .summary import (
    COSTS,
    OURS,
    Row,
    bandwidth_share,
    best_peer,
    cost_line,
    goal_met,
    goal_us,
    groups,
    speedup,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENTION, RUNGS, E2E = "splitkv.attention.v1", "splitkv.rungs.v1", "splitkv.e2e.v1"
DPI = 130
LEAST_LENGTHS = 2
"""Lengths that a series needs before a line through them says anything."""


@dataclass(frozen=True)
class Record:
    """A result file: its name without the suffix, and its object."""

    name: str
    data: Mapping[str, Any]

    @property
    def rows(self) -> list[Row]:
        return list(self.data["rows"])


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its PNG without the suffix, and the sentence under it."""

    name: str
    caption: str
    figure: Figure


class NothingToDraw(ValueError):
    """A result file of ours of a kind that has no figures."""


def load_all(paths: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """(the records that can be drawn, what is said of other result files of ours among them). Raises ValueError as load
    does, also where none can be drawn."""
    records, left_out = [], []
    for path in paths:
        try:
            records.append(load(path))
        except NothingToDraw as reason:
            left_out.append(str(reason))
    if left_out and not records:
        raise ValueError(left_out[0])
    return records, left_out


def load(path: Path) -> Record:
    """Read a result file. Raises ValueError naming the file, what was expected and what came."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"results: expected a result file, got {path} ({error})") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in (ATTENTION, RUNGS, E2E):
        kind = NothingToDraw if isinstance(schema, str) and schema.startswith("splitkv.") else ValueError
        raise kind(f"results: expected schema {ATTENTION}, {RUNGS} or {E2E} in {path}, got {schema!r}")
    if not data.get("rows"):
        raise ValueError(f"results: expected rows in {path}, got none")
    return Record(path.stem, data)


def write_report(records: Sequence[Record], out: Path, plots_folder: Path | None = None) -> list[Path]:
    """Draw the records, write the page, and the PNGs where a folder is given. Returns what was written.

    Raises ValueError if two records have the same name.
    """
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        raise ValueError(f"results: expected files of different names, got {', '.join(names)}")
    drawn = {record.name: [(plot, _png(plot.figure)) for plot in plots_of(record)] for record in records}
    written = []
    if plots_folder is not None:
        for name, images in drawn.items():
            for plot, png in images:
                path = plots_folder / f"{name}-{plot.name}.png"
                write_whole(path, png)
                written.append(path)
    write_whole(out, page(records, drawn).encode())
    return [out, *written]


def plots_of(record: Record) -> list[Plot]:
    """The figures that a record has rows for."""
    from . import e2e_report, plots

    if record.data["schema"] == E2E:
        return [Plot(*found) for found in e2e_report.figures(record.data)]
    rows = [row for row in record.rows if row["us"]]
    if not rows:
        return []
    colours = plots.colours_of(rows)
    by_group = groups(rows)
    cost = {group: found for group, found in by_group.items() if group.startswith(COST)}
    compared = [row for group, found in by_group.items() if group not in cost for row in found]
    found = []
    series = series_of(compared)
    if series:
        text = "Microseconds per call against keys per row; floor: bytes of K and V over the measured read bandwidth."
        found.append(Plot("time", text, plots.time_against_length(series, colours)))
        text = "Microseconds above the floor: launch, ramp, merge and what is lost of the bandwidth."
        found.append(Plot("excess", text, plots.excess_against_length(series, colours)))
        text = "Share of the read bandwidth that was measured in the same run."
        found.append(Plot("bandwidth", text, plots.share_against_length(series, colours)))
    if record.data["schema"] == ATTENTION and compared:
        text = "Every case: share of the read bandwidth, ours and the best other contender's."
        found.append(Plot("cases", text, plots.bars(compared, colours)))
    if any(speedup(row) is not None for row in compared):
        text = "Every case: how much longer the best other contender takes."
        found.append(Plot("speedup", text, plots.speedup_bars(compared)))
    if cost:
        text = "How time grows with one thing at a time; the straight lines are least squares."
        found.append(Plot("cost", text, plots.costs(cost)))
    return found


def series_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of batch 1 and one query on a contiguous cache that differ in length alone, where there are enough."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["batch"] == 1 and row["q_len"] == 1 and row["page_size"] is None:
            size = _size(row)
            found.setdefault(f"{row['num_q_heads']}/{row['num_kv_heads']} × {size}, {row['kv_dtype']}", []).append(row)
    return {title: part for title, part in found.items() if len({row["seq_len"] for row in part}) >= LEAST_LENGTHS}


def _size(row: Row) -> str:
    same = row["head_dim"] == row["v_head_dim"]
    return f"{row['head_dim']}" if same else f"{row['head_dim']}/{row['v_head_dim']}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


# ---- the page ----------------------------------------------------------------------------------------------

Drawn = Mapping[str, Sequence[tuple[Plot, bytes]]]

CSS = """
:root { --ink: #1d232b; --soft: #5c6773; --line: #e3e7ec; --ours: #0b62d6; --good: #1a8a4a; --bad: #c8382e; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 0 auto; max-width: 1180px; padding: 32px 24px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 21px; margin: 48px 0 8px; } h3 { margin: 28px 0 8px; }
p, figcaption { color: var(--soft); margin: 4px 0 12px; } code { background: #f3f5f8; padding: 1px 5px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px; min-width: 130px; }
.card b { display: block; font-size: 22px; color: var(--ours); } .card span { color: var(--soft); font-size: 13px; }
figure { margin: 20px 0; } img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { padding: 5px 9px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
td.ours { color: var(--ours); font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
tr.group td { background: #f7f9fb; font-weight: 600; text-align: left; }
""".strip()


def page(records: Sequence[Record], drawn: Drawn) -> str:
    """The HTML of the report."""
    sections = "\n".join(_section(record, drawn[record.name]) for record in records)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>splitkv: measured</title><style>{CSS}</style></head><body>\n"
        "<h1>splitkv: measured</h1>\n<p>Decoding over long caches, from the result files named below.</p>\n"
        f"{sections}\n</body></html>\n"
    )


def _section(record: Record, drawn: Sequence[tuple[Plot, bytes]]) -> str:
    data = record.data
    figures = "\n".join(
        f'<figure><img alt="{escape(plot.caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot, png in drawn
    )
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    dirty = ", with uncommitted changes" if data["dirty"] is True else ""
    return "\n".join(
        [
            f"<h2>{escape(record.name)}</h2>",
            f"<p>{escape(data.get('gpu') or data['cpu'])}, {escape(data['date'])}, commit "
            f"<code>{escape(str(data['commit'])[:12])}</code>{dirty}; {escape(versions)}</p>",
            f"<p>made by <code>{escape(data['command'])}</code></p>",
            *_contents(record, figures),
        ]
    )


def _contents(record: Record, figures: str) -> list[str]:
    """Cards, figures, the table of all rows, notes."""
    if record.data["schema"] == E2E:
        from . import e2e_report

        cards, notes = e2e_report.cards(record.data), e2e_report.notes(record.data)
        table = _table_of(e2e_report.HEAD, e2e_report.table(record.data))
    else:
        cards, notes, table = _cards(record), _notes(record), _table(record.rows)
    boxes = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in cards
    )
    listed = "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in notes) + "</ul>" if notes else ""
    return [f'<div class="cards">{boxes}</div>', figures, "<h3>Every row</h3>", table, listed]


def _cards(record: Record) -> list[tuple[str, str]]:
    """(value, what it is)."""
    total = totals([record])["records"][record.name]
    shares = [share for row in record.rows if (share := bandwidth_share(row)) is not None]
    cards = [(f"{record.data['read_bandwidth_tb_s']:.3g} TB/s", "read bandwidth, same run")]
    cards.append((f"{total['timed']} of {total['rows']}", "rows right and timed"))
    if shares:
        cards.append((f"{max(shares):.0%}", "best share of bandwidth"))
    if total["compared"]:
        cards.append((f"{total['ahead']} of {total['compared']}", "rows ahead of every other contender"))
    if record.data["schema"] == ATTENTION:
        cards.append((f"{total['at_goal']} of {total['goals']}", f"rows at the goal: {record.data['goal']}"))
    return cards


def _table(rows: Sequence[Row]) -> str:
    head = ("case", "floor µs", "goal µs", "splitkv µs", "of bandwidth", "error", "best other", "µs", "speed-up")
    return _table_of(head, {group: [_cells(row) for row in members] for group, members in groups(rows).items()})


def _table_of(head: Sequence[str], found: Mapping[str, Sequence[Sequence[tuple[str, str]]]]) -> str:
    """Lines of (class, text) by group, under a head."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head)]
    for group, members in found.items():
        lines.append(f'<td colspan="{len(head)}">{escape(group)}</td>')
        lines += ["".join(f'<td class="{kind}">{escape(text)}</td>' for kind, text in cells) for cells in members]
    shown = [f"<tr{' class=group' if 'colspan' in line else ''}>{line}</tr>" for line in lines]
    return f'<div class="wide"><table>{"".join(shown)}</table></div>'


def _cells(row: Row) -> list[tuple[str, str]]:
    """(class, text)."""
    ours, peer, gain, share = row["us"].get(OURS), best_peer(row), speedup(row), bandwidth_share(row)
    met = ours is not None and ours <= goal_us(row)
    error = row["err"].get(OURS)
    return [
        ("", row["case"]),
        ("", f"{row['floor_us']:.1f}"),
        ("good" if met else "", f"{goal_us(row):.1f}"),
        ("ours", f"{ours:.1f}" if ours is not None else "failed"),
        ("", f"{share:.0%}" if share is not None else ""),
        ("", f"{error:.1e}" if error is not None else ""),
        ("", f"{peer.name}{' *' if peer.rough else ''}" if peer else ""),
        ("", f"{peer.us:,.1f}" if peer else ""),
        ("good" if gain and gain >= 1 else "bad", f"{gain:.2f}×" if gain else ""),
    ]


def totals(records: Sequence[Record]) -> dict[str, Any]:
    """{"records": {name: rows in all, timed, ahead of every other contender, at the goal, and the cost lines}}.

    Of end-to-end files: rows in all, timed, compared with unsplit attention, and those with the same tokens.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.data["schema"] == E2E:
            from . import e2e_report

            found[record.name] = e2e_report.totals(record.data)
            continue
        compared = [row for row in record.rows if not row.get("group", "").startswith(COST)]
        gains = [gain for row in compared if (gain := speedup(row)) is not None]
        found[record.name] = {
            "rows": len(record.rows),
            "timed": sum(OURS in row["us"] for row in record.rows),
            "ahead": sum(gain >= 1 for gain in gains),
            "compared": len(gains),
            "at_goal": sum(map(goal_met, compared)),
            "goals": len(compared),
            "cost": cost_texts(record),
        }
    return {"records": found}


def cost_texts(record: Record) -> list[str]:
    """One line per cost group: the straight line through ours, or the spread where nothing should change."""
    lines = []
    for group, rows in groups(record.rows).items():
        timed = [row for row in rows if OURS in row["us"]]
        if group in COSTS:
            found = cost_line(group, timed)
            if found is not None:
                line = f"{found.intercept:.2f} µs + {found.slope:.3g} µs for each of the {COSTS[group].label}"
                lines.append(f"{group}: {line}, R² = {found.r2:.5f}")
        elif group.startswith(COST) and timed:
            times = [row["us"][OURS] for row in timed]
            ends = f"{min(row['capacity'] for row in timed)} and {max(row['capacity'] for row in timed)} keys"
            lines.append(f"{group}: {max(times) - min(times):.2f} µs between capacities of {ends}")
    return lines


def _notes(record: Record) -> list[str]:
    rows = record.rows
    lines = []
    if any(peer.rough for row in rows if (peer := best_peer(row))):
        lines.append("* its error is over four times ours, as where it rounds the query or the probabilities to fp8")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row.get("not_run", {}).items():
            reasons.setdefault(f"{name}: {reason}", []).append(row["case"])
    lines += cost_texts(record)
    lines += [f"not run in {len(cases)} rows: {reason}" for reason, cases in sorted(reasons.items())]
    lines += [f"skipped {skip['case']}: {skip['reason']}" for skip in record.data.get("skipped", [])]
    return lines
