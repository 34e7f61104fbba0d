"""Write the tables of measured figures in README.md and docs/results.md from results/h200/*.json, or check them.

`python tools/results_tables.py` rewrites what stands between the markers; `--check` exits 1 where that would change
anything. No figure is written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "h200"
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
HEADER = (
    "| heads, head_dim | KV | keys | floor µs | splitkv µs | of bandwidth | unsplit µs | error | PyTorch's error |",
    "|---|---|---|---|---|---|---|---|---|",
)


def rows_of(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    return record, record["rows"]


def line(row: dict[str, Any]) -> str:
    ours = row["us"]["splitkv"]
    cells = (
        f"{row['num_q_heads']}/{row['num_kv_heads']}, {row['head_dim']}",
        row["kv_dtype"],
        f"{row['seq_len']:,}",
        f"{row['floor_us']:.1f}",
        f"{ours:.1f}",
        f"{row['floor_us'] / ours:.0%}",
        f"{row['us']['rowwise']:,.0f}",
        f"{row['err']['splitkv']:.1e}",
        f"{row['err']['sdpa']:.1e}",
    )
    return f"| {' | '.join(cells)} |"


def source(record: dict[str, Any], name: str) -> str:
    dirty = ", uncommitted changes in it" if record["dirty"] else ""
    return (
        f"{record['gpu']}, read bandwidth {record['read_bandwidth_tb_s']:.2f} TB/s in the same run; commit "
        f"`{record['commit'][:12]}`{dirty}; [results/h200/{name}.json](LINK/results/h200/{name}.json); made by "
        f"`{record['command']}`."
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


PLACES = {ROOT / "README.md": ("rungs", readme), ROOT / "docs" / "results.md": ("all", results_page)}


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
        raise SystemExit(f"not what results/h200 says: {', '.join(stale)}; run python tools/results_tables.py")


if __name__ == "__main__":
    main()
