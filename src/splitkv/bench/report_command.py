"""The command line of `splitkv report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .commands import Json, fail, usage

SCHEMA = "splitkv.report.v1"
EXAMPLE = "Example: splitkv report results/h200/attention.json results/h200/rungs.json --out report.html"


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files of bench attention, bench e2e or rungs.")],
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="Also write every figure as a PNG into this folder.")] = None,
    json: Json = False,
) -> None:
    """Draw result files: one self-contained HTML page, and PNG plots.

    Time against length with floor, goal and peers, the share of the read bandwidth, the speed-up over the best
    peer, and how time grows with length, batch, heads and capacity. Needs the extra `report`.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise fail("splitkv report needs matplotlib: pip install 'splitkv[report]'") from None
    with usage():
        from .record import require_writable, to_json
        from .report import load_all, totals, write_report

        records, left_out = load_all(results)
        require_writable(out)
        written = write_report(records, out, plots)
    for reason in left_out:
        typer.echo(f"left out: {reason}", err=True)
    if json:
        sys.stdout.write(to_json({"schema": SCHEMA, "written": [str(path) for path in written], **totals(records)}))
    else:
        typer.echo("\n".join(f"wrote {path}" for path in written))
