"""The command line of `splitkv bench ranks`, and what it prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .commands import Commit, Dirty, Json, Out, deliver, measured, usage
from .record import command_line, provenance, require_writable

EXAMPLE = "Example: splitkv bench ranks --ranks 2 --lengths 262144 --dtypes bf16,f32 --out results/h200/ranks.json"
DEFAULTS = {"cuda": {"lengths": "262144", "dtypes": "bf16,f32"}, "cpu": {"lengths": "20000", "dtypes": "f32"}}


def ranks(
    count: Annotated[int, typer.Option("--ranks", min=1, max=64, help="Processes, each with a device of its own.")] = 2,
    device: Annotated[
        str | None, typer.Option(help="cuda (NCCL) or cpu (gloo). Default: cuda where there is one.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Contexts in tokens. Default: 262144; 20000 on a CPU.")] = None,
    heads: Annotated[str, typer.Option(help="Query/KV heads, such as 16/4,8/2.")] = "16/4",
    dtypes: Annotated[str | None, typer.Option(help="KV dtypes: some of f32,f16,bf16. Default: bf16,f32; f32.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of the random keys and values.")] = 0,
    out: Out = None,
    json: Json = False,
    commit: Commit = None,
    dirty: Dirty = None,
) -> None:
    """Time one row whose keys are spread over several devices of one host, beside one device alone.

    Every rank checks the merged answer against float64 and against one device's before anything is timed, and the
    answers of all ranks must be the same bytes. Exit code 1 if a row has no speed.
    """
    with usage():
        import torch

        from .cases import resolve_device, rung_options

        chosen = resolve_device(device)
        usual = DEFAULTS[chosen]
        options = rung_options(
            chosen, lengths or usual["lengths"], heads, dtypes or usual["dtypes"], None, seed, head_dim
        )
        if chosen == "cuda" and count > torch.cuda.device_count():
            raise ValueError(f"ranks: expected at most {torch.cuda.device_count()}, one per CUDA device, got {count}")
        source = provenance(commit, dirty)
        if out is not None:
            require_writable(out)
    from .ranks import run_ranks

    command = command_line("bench ranks", {"ranks": count, **options.as_command(), "out": out})
    result = measured("ranks", lambda progress: run_ranks(options, count, source, command=command, progress=progress))
    deliver(result, out, json, show)
    if result["failed_rungs"] or not result["rows"]:
        raise typer.Exit(1)


def show(result: Mapping[str, Any]) -> None:
    """One table, and why a row has no speed."""
    from rich import box
    from rich.table import Table

    from .ranks import ONE, PART, contender
    from .render import console, plain, us_text

    out, ours = console(), contender(result["ranks"])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("case (batch, heads, head_dim, keys, KV)")
    for name in (
        "one device\nus",
        "its part\nus",
        f"{result['ranks']} ranks\nus",
        "speed\n-up",
        "error\none",
        "error\nranks",
    ):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = [us_text(row["us"][name]) if name in row["us"] else "FAILED" for name in (ONE, PART, ours)]
        speedup = f"{row['speedup']:.2f}" if row["speedup"] else ""
        table.add_row(row["case"], *times, speedup, *(f"{row['err'][name]:.1e}" for name in (ONE, ours)))
    out.print(table)
    for row in result["rows"]:
        for reason in (*row["parity_failures"], *filter(None, [row["timing_rejected"]])):
            plain(out, f"FAILED {row['case']}: {reason}")
    for skip in result["skipped"]:
        plain(out, f"skipped {skip['case']}: {skip['reason']}")
    where = result.get("gpu") or f"{result['cpu']}, {result['threads_per_rank']} threads a rank"
    plain(out, f"{where}, {result['backend']}; reads {result['read_bandwidth_tb_s'] * 1e3:.1f} GB/s")
