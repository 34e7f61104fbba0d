"""The command line of `splitkv bench tune`, and what it prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .commands import Commit, Dirty, Json, deliver, fail, measured, usage
from .record import command_line, provenance, require_writable

EXAMPLE = 'Example: splitkv bench tune --ranges "bf16, head_dim 65-128" --out h200.json'


def tune(
    ranges: Annotated[
        str | None, typer.Option(help="Regular expression that a range's name must match. Default: all.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the ranges and their cases, run nothing.")] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="Begin no range after this many seconds.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of the random keys and values.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where the table goes. Default: where launches look for it, in the package.")
    ] = None,
    json: Json = False,
    commit: Commit = None,
    dirty: Dirty = None,
) -> None:
    """Find the fastest schedules on this GPU and write them as a table for launches.

    A schedule says how the work is dealt out to blocks and changes no byte of an answer: each one is first held to the
    very bytes of the default, which is held against float64. Only schedules that beat the default by more than noise
    are written. Exit code 1 if some schedule gave other bytes.
    """
    with usage():
        from ..problem import DeviceSpec
        from ..tuning import FOLDER, table_name
        from .cases import resolve_device
        from .tune_ranges import select_ranges

        picked = select_ranges(ranges)
        source = provenance(commit, dirty)
        if listing:
            typer.echo("\n".join(f"{entry.name}: {'; '.join(case.name for case in entry.cases)}" for entry in picked))
            return
        if resolve_device(None) != "cuda":
            raise ValueError("device: expected a CUDA GPU that PyTorch can use, got none")
        path = out or FOLDER / f"{table_name(DeviceSpec.current())}.json"
        require_writable(path)
    from .tune import TuneOptions, run_tune

    command = command_line("bench tune", {"ranges": ranges, "limit_s": limit_s, "seed": seed, "out": out})
    options = TuneOptions("cuda", picked, seed, limit_s)
    result = measured("tune", lambda progress: run_tune(options, source, command=command, progress=progress))
    failed = bool(result["failed_rows"] or not result["rows"])
    deliver(result, None if failed else path, json, show)
    if failed:
        raise fail("no table was written")


def show(result: Mapping[str, Any]) -> None:
    """Each range's winner and its times beside the default's, then what failed."""
    from rich import box
    from rich.table import Table

    from .render import console, plain, us_text

    out = console()
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("case", overflow="fold")
    for name in ("backend", "default", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("schedule", overflow="fold")
    for row in result["rows"]:
        times = row["us"] or row["first_us"]
        for case, us in times.items():
            best = min(us, key=us.__getitem__, default=None)
            cells = [us_text(us[name]) if name in us else "" for name in ("default", best or "default")]
            table.add_row(case, row["backend"], *cells, row["schedule"] or "default")
    out.print(table)
    for row in result["rows"]:
        for failure in row["failures"]:
            plain(out, f"FAILED {failure}")
        for name, reason in row["not_run"].items():
            plain(out, f"not run {name}: {reason}")
    for skip in result["skipped"]:
        plain(out, f"skipped {skip['range']}: {skip['reason']}")
    found = f"{len(result['entries'])} of {len(result['rows'])} ranges are faster by more than {result['margin']:.0%}"
    plain(out, f"times in us; {result.get('gpu') or result['cpu']}; {found}; {result['wall_s']:.0f} s")
