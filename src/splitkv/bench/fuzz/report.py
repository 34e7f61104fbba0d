"""What `splitkv bench fuzz` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..render import plain


def fuzz_report(result: Mapping[str, Any], out: Console) -> None:
    """Dtypes with their worst errors, refusals by message, failures with the command that shows them again."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("q", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    for name in ("cases", "worst out\nof bound", "worst row\nof bound", "worst lse\nof bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        worst = (row[f"worst_{name}_over_bound"] for name in ("out", "row", "lse"))
        shares = ("" if share is None else f"{share:.0%}" for share in worst)
        table.add_row(row["q_dtype"], row["kv_dtype"], str(row["cases"]), *shares)
    out.print(table)
    for message, count in result["refusals"].items():
        plain(out, f"refused {count}: {message}")
    for failure in result["failures"]:
        for text in failure["failures"]:
            plain(out, f"FAILED case {failure['index']}: {text}")
        plain(out, f"  again:   {failure['repro']}")
        if failure.get("shrunk"):
            plain(out, f"  shrunk:  {failure['shrunk']}")
    if result["not_run"]:
        plain(out, f"{result['not_run']} cases were not run")
    plain(
        out,
        f"backend {result['backend_used']}, seed {result['seed']}: {result['computed']} of {result['cases']} cases "
        f"computed, {result['refused']} refused, {result['second_layouts_equal']} asked again in another layout, "
        f"{result['failing']} failing; {result['wall_s']:.0f} s",
    )
