"""Write the tables of measured figures in README.md and docs/ from results/*/*.json, or check them.

`python tools/results_tables.py` rewrites what stands between the markers; `--check` exits 1 where that would change
anything. No figure is written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from splitkv.bench import e2e_report
from splitkv.bench.summary import OURS, best_peer, goal_met, groups, speedup

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
H200, CPU = "h200", "cpu-zen5-2core"
CPUS = {
    CPU: "Two cores of an AMD EPYC (Zen 5)",
    "cpu-xeon-2core": "Two cores of an Intel Xeon (Emerald Rapids)",
    "cpu-xeon-16core": "Sixteen cores of an Intel Xeon, the H200's host",
}
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
HEADER = (
    "| heads, head_dim | KV | keys | floor µs | splitkv µs | of bandwidth | unsplit µs | error | PyTorch's error |",
    "|---|---|---|---|---|---|---|---|---|",
)


ATTENTION_HEADER = (
    "| case (batch, heads, head_dim, keys, KV) | floor µs | goal µs | splitkv µs | met | best other | its µs | "
    "speed-up | error | its error |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
GROUPS = {
    "table": "The cases with a goal of their own",
    "dtypes": "Other KV dtypes",
    "ragged": "Rows of different lengths, 1k to 64k, pages of 16",
    "pages": "Pages of 16 and 64 keys",
    "queries": "Four queries per row",
    "192/128": "K of 192, V of 128",
    "cost-length": "Cost: length",
    "cost-batch": "Cost: rows",
    "cost-heads": "Cost: KV heads",
    "cost-capacity": "Cost: capacity, 4,096 keys valid",
}
PLOTS = {
    "time": "µs per call against keys per row",
    "excess": "µs above the floor against keys per row",
    "bandwidth": "share of the read bandwidth against keys per row",
    "cases": "share of the read bandwidth, every case",
    "speedup": "time of the best other contender over ours, every case",
    "cost": "how time grows",
}
"""The figures that docs/performance.md shows where `splitkv report --plots docs/plots` has drawn them."""


def rows_of(name: str, folder: str = H200) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    record = json.loads((RESULTS / folder / f"{name}.json").read_text())
    return record, record["rows"]


def line(row: dict[str, Any]) -> str:
    ours, unsplit = row["us"].get("splitkv"), row["us"].get("rowwise")
    cells = (
        f"{row['num_q_heads']}/{row['num_kv_heads']}, {row['head_dim']}",
        row["kv_dtype"],
        f"{row['seq_len']:,}",
        f"{row['floor_us']:.1f}",
        f"{ours:.1f}" if ours else "too noisy",
        f"{row['floor_us'] / ours:.0%}" if ours else "",
        f"{unsplit:,.0f}" if unsplit else "",
        f"{row['err']['splitkv']:.1e}",
        f"{row['err']['sdpa']:.1e}",
    )
    return f"| {' | '.join(cells)} |"


def source(record: dict[str, Any], name: str, folder: str = H200) -> str:
    dirty = ", uncommitted changes in it" if record["dirty"] else ""
    file, machine = f"results/{folder}/{name}.json", record.get("gpu") or record["cpu"]
    return (
        f"{machine}, read bandwidth {record['read_bandwidth_tb_s']:.3g} TB/s in the same run; commit "
        f"`{record['commit'][:12]}`{dirty}; [{file}](LINK/{file}); made by `{record['command']}`."
    )


def readme() -> str:
    """One geometry, the two dtypes at the ends."""
    record, rows = rows_of("rungs")
    chosen = [row for row in rows if row["num_q_heads"] == 16 and row["kv_dtype"] in ("f32", "bf16")]
    return "\n".join([*HEADER, *map(line, chosen), "", source(record, "rungs").replace("LINK/", "")])


def results_page() -> str:
    parts = []
    for name in ("rungs", "rungs-d128", "rungs-d64"):
        record, rows = rows_of(name)
        parts += [f"## {name}", "", source(record, name).replace("LINK", ".."), "", *HEADER, *map(line, rows), ""]
    return "\n".join(parts).rstrip()


def attention_line(row: dict[str, Any]) -> str:
    """ours, and the fastest contender besides; * marks one whose error is over four times ours."""
    ours, peer, gain = row["us"].get(OURS), best_peer(row), speedup(row)
    cells = [row["case"], f"{row['floor_us']:.1f}", f"{row['goal_us']:.1f}"]
    cells += [f"{ours:.1f}" if ours is not None else "failed", "yes" if goal_met(row) else "**no**"]
    cells += [f"{peer.name}{'*' if peer.rough else ''}" if peer else "none", f"{peer.us:,.1f}" if peer else ""]
    cells += [f"{gain:.2f}" if gain is not None else "", f"{row['err'][OURS]:.1e}" if OURS in row["err"] else ""]
    cells += [f"{row['err'][peer.name]:.1e}" if peer else ""]
    return f"| {' | '.join(cells)} |"


def attention_tables() -> list[str]:
    record, rows = rows_of("attention")
    versions = [f"{name} {version}" for name, version in record["contender_versions"].items() if version]
    parts = [f"{source(record, 'attention').replace('LINK', '..')} Contenders: {', '.join(versions)}.", ""]
    for group, members in groups(rows).items():
        lines = [attention_line(dict(row)) for row in members]
        parts += [f"### {GROUPS.get(group, group)}", "", *ATTENTION_HEADER, *lines, ""]
    return parts


def performance_page() -> str:
    """The tables, then the figures that are there."""
    parts = attention_tables()
    for name in ("attention", "rungs"):
        for plot, caption in PLOTS.items():
            if (ROOT / "docs" / "plots" / f"{name}-{plot}.png").exists():
                parts += [f"![{name}: {caption}](plots/{name}-{plot}.png)", ""]
    return "\n".join(parts).rstrip()


E2E_FILES = {
    (H200, "e2e"): "Qwen3.5-9B, KV dtypes and batches",
    (H200, "e2e-llamacpp"): "Beside llama.cpp, on the same weights",
    (H200, "e2e-others"): "Other geometries",
    (CPU, "e2e-smollm2"): "SmolLM2's own weights on two cores",
    (CPU, "e2e-0.8b"): "Qwen3.5-0.8B on two cores",
}
"""Result files of whole decode steps, by folder and name, and what they show."""


def e2e_page() -> str:
    """Every depth of whole decode steps, file by file."""
    parts: list[str] = []
    for (folder, name), title in E2E_FILES.items():
        record, _ = rows_of(name, folder)
        parts += [f"### {title}", "", source(record, name, folder).replace("LINK", ".."), ""]
        for geometry, lines in e2e_report.table(record).items():
            head = f"| {' | '.join(e2e_report.HEAD)} |"
            parts += [f"**{geometry}**", "", head, "|---" * len(e2e_report.HEAD) + "|"]
            parts += [f"| {' | '.join(text for _, text in cells)} |" for cells in lines] + [""]
        parts += [f"- {note}" for note in e2e_report.digest(record)] + [""]
        for plot in ("steps", "kernels"):
            if folder == H200 and (ROOT / "docs" / "plots" / f"{name}-{plot}.png").exists():
                parts += [f"![{title}: {plot}](plots/{name}-{plot}.png)", ""]
    return "\n".join(parts).rstrip()


def cpu_page() -> str:
    """Share of the read bandwidth, and how much faster than PyTorch, by length; and by the number of threads."""
    parts: list[str] = []
    for folder, machine in CPUS.items():
        record, rows = rows_of("attention", folder)
        shares: dict[tuple[str, str], dict[int, str]] = {}
        scaling: dict[tuple[str, str], dict[int, str]] = {}
        for row in rows:
            ours, torch_us = row["us"].get(OURS), row["us"].get("sdpa")
            if not ours:
                continue
            case = f"{row['num_q_heads']}/{row['num_kv_heads']}, {row['head_dim']}", row["kv_dtype"]
            share = f"{row['floor_us'] / ours:.0%}"
            if row["group"] == "cpu":
                faster = f", {torch_us / ours:.0f}x" if torch_us else ""
                shares.setdefault(case, {})[row["seq_len"]] = share + faster
            else:
                scaling.setdefault(case, {})[row["threads"]] = f"{row['kv_bytes'] / ours / 1e3:.0f}, {share}"
        parts += [f"### {machine}", "", source(record, "attention", folder).replace("LINK", ".."), ""]
        parts += ["Share of the floor, and times as fast as PyTorch:", "", *cpu_table(shares, "{:,} keys"), ""]
        parts += ["32,768 keys by cores, GB/s and share of the floor with as many:", "", *cpu_table(scaling, "{}"), ""]
    return "\n".join(parts).rstrip()


def cpu_table(table: dict[tuple[str, str], dict[int, str]], column: str) -> list[str]:
    columns = sorted({value for cells in table.values() for value in cells})
    head = ["heads, head_dim", "KV", *(column.format(value) for value in columns)]
    lines = [[*case, *(cells.get(value, "too noisy") for value in columns)] for case, cells in table.items()]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def ranks_page() -> str:
    record, rows = rows_of("e2e-x2")
    lines = [
        "| case (batch, heads, head_dim, keys, KV) | one GPU µs | its part µs | two µs | speed-up | error, one | two |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one, part, two = (f"{row['us'][name]:.1f}" for name in (OURS, "part", f"{OURS} x2"))
        speedup_text = f"{row['speedup']:.2f}"
        errors = [f"{row['err'][name]:.1e}" for name in (OURS, f"{OURS} x2")]
        lines.append(f"| {' | '.join([row['case'], one, part, two, speedup_text, *errors])} |")
    return "\n".join([source(record, "e2e-x2").replace("LINK", ".."), "", *lines])


PLACES = {
    ROOT / "README.md": ("rungs", readme),
    ROOT / "docs" / "results.md": ("all", results_page),
    ROOT / "docs" / "performance.md": ("attention", performance_page),
    ROOT / "docs" / "e2e.md": ("e2e", e2e_page),
    ROOT / "docs" / "cpu.md": ("cpu", cpu_page),
    ROOT / "docs" / "ranks.md": ("ranks", ranks_page),
}


def main() -> None:
    stale = []
    for path, (name, render) in PLACES.items():
        text = path.read_text()
        head, _, rest = text.partition(BEGIN.format(name))
        _, _, tail = rest.partition(END)
        wanted = f"{head}{BEGIN.format(name)}\n{render()}\n{END}{tail}"
        if wanted != text and "--check" in sys.argv:
            stale.append(path.name)
        elif wanted != text:
            path.write_text(wanted)
    if stale:
        raise SystemExit(f"not what results/ says: {', '.join(stale)}; run python tools/results_tables.py")


if __name__ == "__main__":
    main()
