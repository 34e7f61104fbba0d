"""What `splitkv report` shows of a file of `bench e2e`: steps against depth beside their floor, and kernels by time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from .plots import BLUE, GREY, INK, QUIET, keys_text, log_keys, log_time, panels, styled
from .summary import OURS, UNSPLIT

LLAMACPP = "llama.cpp"
Row = Mapping[str, Any]
Cell = tuple[str, str]
"""CSS class and text."""

HEAD = (
    "depth",
    "KV",
    "batch",
    "ms",
    "p20",
    "p80",
    "floor ms",
    "of floor",
    "tokens/s",
    "unsplit ms",
    "llama.cpp ms",
    "tokens",
    "context",
)
DRAWN_KERNELS, NAME_LENGTH = 12, 52
LEAST_DEPTHS = 2


def figures(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Figure]]:
    """(name, caption, figure) of each figure that there are rows for."""
    series = _series([row for row in data["rows"] if row["ms_per_token"]])
    if series:
        text = "Milliseconds of a step that gives every row one token, against the depth at which it starts."
        yield (
            "steps",
            f"{text} Lines: measured, marks; the bytes of a step over the read bandwidth, thin.",
            steps(series),
        )
    if data["profiles"]:
        text = "Where a step's time goes: what each kernel adds to it, by the profiler; the step is timed without it."
        yield "kernels", text, kernels(data["profiles"])


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by geometry and batch, where there are depths enough for a line."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['geometry']}, batch {row['batch']}", []).append(row)
    return {title: part for title, part in found.items() if len({row["depth"] for row in part}) >= LEAST_DEPTHS}


@styled
def steps(series: Mapping[str, Sequence[Row]]) -> Figure:
    """One panel per geometry and batch: a colour per KV dtype, its floor thin and dashed, unsplit attention dotted,
    llama.cpp dash-dotted."""
    figure, axes = panels(len(series))
    dtypes = list(dict.fromkeys(row["kv_dtype"] for rows in series.values() for row in rows))
    colours = {kv_dtype: (BLUE, *QUIET)[n % (len(QUIET) + 1)] for n, kv_dtype in enumerate(dtypes)}
    labelled: dict[str, Any] = {}
    for (title, rows), ax in zip(series.items(), axes, strict=True):
        for kv_dtype, colour in colours.items():
            for contender, style in ((OURS, {"lw": 2.2, "marker": "o", "ms": 5}), (UNSPLIT, {"lw": 1.2, "ls": ":"})):
                part = [row for row in rows if (row["kv_dtype"], row["contender"]) == (kv_dtype, contender)]
                depths = [row["depth"] for row in part]
                line = ax.plot(depths, [row["ms_per_token"] for row in part], color=colour, **style)[0]
                if contender == OURS and part:
                    labelled[f"{kv_dtype} KV"] = line
                    floors = [row["floor_ms"] for row in part]
                    labelled["floor"] = ax.plot(depths, floors, color=colour, lw=1.0, ls=(0, (4, 3)))[0]
                elif part:
                    labelled["in one split"] = line
            beside = [(k[3], ms) for k, ms in _llamacpp(rows).items() if k[1] == kv_dtype]
            if beside:
                labelled["llama.cpp"] = ax.plot(*zip(*beside, strict=True), color=colour, lw=1.4, ls="-.")[0]
        log_keys(ax, [row["depth"] for row in rows])
        log_time(ax, "ms per step")
        ax.set_title(title, loc="left")
    figure.legend(labelled.values(), labelled, loc="outside upper center", ncols=len(labelled))
    return figure


@styled
def kernels(profiles: Sequence[Row]) -> Figure:
    """One panel per profile: its longest kernels, then all others and what of the step no kernel fills."""
    lines = min(DRAWN_KERNELS, max(len(profile["kernels"]) for profile in profiles)) + 2
    figure, axes = panels(len(profiles), columns=1, size=(9.5, 1.0 + 0.24 * lines))
    for profile, ax in zip(profiles, axes, strict=True):
        shown = [(k["name"][:NAME_LENGTH], k["added_us"], BLUE) for k in profile["kernels"][:DRAWN_KERNELS]]
        others = profile["busy_us"] - sum(us for _, us, _ in shown)
        shown += [("other kernels", others, GREY), ("no kernel", max(profile["step_us"] - profile["busy_us"], 0), INK)]
        for y, (_, us, colour) in enumerate(reversed(shown)):
            ax.barh(y, us, color=colour, height=0.62, zorder=2)
            ax.annotate(f"{us:.0f}", (us, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_yticks(range(len(shown)), [name for name, _, _ in reversed(shown)])
        ax.grid(visible=False, axis="y")
        ax.margins(x=0.12)
        ax.set_xlabel("µs per step")
        where = f"{profile['geometry']}, {profile['kv_dtype']} KV, batch {profile['batch']}"
        ax.set_title(f"{where}, at {keys_text(profile['depth'])}: a step of {profile['step_us']:.0f} µs", loc="left")
    return figure


# ---- the page ----------------------------------------------------------------------------------------------


def cards(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(value, what it is)."""
    total = totals(data)
    found = [(f"{data['read_bandwidth_tb_s']:.3g} TB/s", "read bandwidth, same run")]
    found.append((f"{total['timed']} of {total['rows']}", "rows right and timed"))
    shares = [row["percent_of_floor"] for row in _ours(data) if row["percent_of_floor"]]
    if shares:
        found.append((f"{min(shares):.0f} to {max(shares):.0f} %", "of the floor's speed"))
    found.append((f"{total['identical']} of {total['compared']}", "depths with the same tokens in one split"))
    return found


def totals(data: Mapping[str, Any]) -> dict[str, Any]:
    """Our rows in all, those with a speed, those compared with unsplit attention, and those with the same tokens."""
    ours, rows = _ours(data), [row for row in data["rows"] if row["contender"] in (OURS, UNSPLIT)]
    timed = sum(row["passed"] for row in rows)
    identical = sum(row["tokens_identical"] for row in ours)
    return {"rows": len(rows), "timed": timed, "compared": len(ours), "identical": identical}


def _ours(data: Mapping[str, Any]) -> list[Row]:
    return [row for row in data["rows"] if row["contender"] == OURS]


def table(data: Mapping[str, Any]) -> dict[str, list[list[Cell]]]:
    """Cells of one line for each depth, KV dtype and batch, by geometry."""
    keys = ("geometry", "kv_dtype", "batch", "depth")
    unsplit = {tuple(row[k] for k in keys): row for row in data["rows"] if row["contender"] == UNSPLIT}
    same_weights = _llamacpp(data["rows"])
    found: dict[str, list[list[Cell]]] = {}
    for row in _ours(data):
        other = unsplit.get(tuple(row[k] for k in keys), {})
        share, speed = row["percent_of_floor"], row["tokens_s"]
        cells = [("", f"{row['depth']:,}"), ("", row["kv_dtype"]), ("", f"{row['batch']}")]
        cells += [("ours", _ms(row["ms_per_token"]) or "failed")]
        cells += [("", _ms(row[name])) for name in ("ms_p20", "ms_p80", "floor_ms")]
        cells += [("", f"{share:.0f} %" if share else ""), ("", f"{speed:,.1f}" if speed else "")]
        beside = same_weights.get((row["geometry"], row["kv_dtype"], row["batch"], row["depth"]))
        cells += [("", _ms(other.get("ms_per_token"))), ("", _ms(beside))]
        cells += [
            ("good", "same") if row["tokens_identical"] else ("bad", f"{len(row['flips'])} of {row['batch']} flip")
        ]
        found.setdefault(row["geometry"], []).append([*cells, ("", row["cache"])])
    return found


def _llamacpp(rows: Sequence[Row]) -> dict[tuple[Any, ...], float]:
    """llama.cpp's ms on our weights, by geometry, KV dtype, batch and depth; its q8_0 stands beside our fp8."""
    ours = {(row["geometry"], row.get("weights")) for row in rows if row["contender"] == OURS}
    found = {}
    for row in rows:
        if row["contender"] == LLAMACPP and row["passed"] and (row["geometry"], row.get("weights")) in ours:
            kv_dtype = "fp8_e4m3" if row["kv_dtype"] == "q8_0" else row["kv_dtype"]
            found[row["geometry"], kv_dtype, row["batch"], row["depth"]] = row["ms_per_token"]
    return found


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f}"


def notes(data: Mapping[str, Any]) -> list[str]:
    """What a KV dtype does to the logits, every flip, and what was not measured."""
    return [*_parity(data), *(text for _, text in _flips(data)), *_not_measured(data)]


def digest(data: Mapping[str, Any]) -> list[str]:
    """As notes, with the flips counted."""
    verdicts = [explained for explained, _ in _flips(data)]
    counted = f"flips examined in float64: {len(verdicts)}, explained by 16-bit arithmetic: {sum(verdicts)}"
    return [*_parity(data), *([counted] if verdicts else []), *_not_measured(data)]


def _parity(data: Mapping[str, Any]) -> list[str]:
    lines = ["prefilled: all of the context is a prompt; filled: a prompt, then random keys and values"]
    for name in dict.fromkeys(entry["kv_dtype"] for entry in data["kv_parity"]):
        errors = [entry["relative"] for entry in data["kv_parity"] if entry["kv_dtype"] == name]
        lines.append(f"logits over {name} against f32 keys and values: relative difference up to {max(errors):.1e}")
    return lines


def _flips(data: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """(whether it is explained, in words) of each flip that was examined."""
    for row in _ours(data):
        for flip in filter(lambda flip: flip["explained"] is not None, row["flips"]):
            where = f"{row['geometry']}, {row['kv_dtype']}, batch {row['batch']}, depth {row['depth']}"
            verdict = "explained" if flip["explained"] else "NOT EXPLAINED"
            yield (
                flip["explained"],
                f"flip in {where}: row {flip['row']}, step {flip['step']}, margin {flip['margin']:.2g} in float64, "
                f"errors {flip['split_rms']:.2g} and {flip['unsplit_rms']:.2g}: {verdict}",
            )


def _not_measured(data: Mapping[str, Any]) -> list[str]:
    lines = []
    for entry in data["not_measured"]:
        where = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in ("geometry", "reason"))
        lines.append(f"not measured: {entry['geometry']}{', ' + where if where else ''}: {entry['reason']}")
    return lines
