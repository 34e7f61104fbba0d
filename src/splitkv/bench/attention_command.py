"""The command line of `splitkv bench attention`, and the table that it prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .commands import Commit, Dirty, Json, Out, deliver, fail, measured, usage
from .record import command_line, provenance, require_writable, to_json

EXAMPLE = 'Example: splitkv bench attention --cases "table|ragged" --with splitkv,sdpa-cudnn,fa3 --out attention.json'


def attention(
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    cases: Annotated[
        str | None, typer.Option(help='Regular expression that "group: case" must match, such as "table|pages".')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One case in three of each group.")] = False,
    contenders: Annotated[
        str | None, typer.Option("--with", help="Contenders by name, such as splitkv,fa3. Default: all installed.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the cases and contenders, run nothing.")] = False,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Compile what the contenders need, and stop.")
    ] = False,
    limit_s: Annotated[float | None, typer.Option(min=1, help="Begin no case after this many seconds.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of the random keys and values.")] = 0,
    out: Out = None,
    json: Json = False,
    commit: Commit = None,
    dirty: Dirty = None,
) -> None:
    """Time decode attention against every library that is installed.

    Every contender is held against float64 first; those that pass are timed in turns as CUDA graphs (on a CPU by
    the clock), with workspace and merge inside, beside the floor: the bytes of K and V over the read bandwidth
    measured in the same run, on a CPU in the same turns. Exit code 1 if splitkv has no speed in some row.
    """
    with usage():
        from .attention_cases import select_cases
        from .cases import resolve_device
        from .peers import choose_contenders

        chosen = resolve_device(device)
        picked, running = select_cases(cases, quick, chosen), choose_contenders(chosen, contenders)
        source = provenance(commit, dirty)
        if out is not None:
            require_writable(out)
    if listing:
        typer.echo("\n".join([f"{case.group}: {case.name}" for case in picked]))
        typer.echo("\n".join(f"{contender.name}: {contender.what}" for contender in running))
        return
    from .attention import AttentionOptions, build_peers, run_attention

    asked: dict[str, Any] = {"device": chosen, "cases": cases, "quick": quick, "with": contenders}
    command = command_line("bench attention", {**asked, "limit_s": limit_s, "seed": seed, "out": out})
    options = AttentionOptions(chosen, picked, running, seed, limit_s)
    if build_only:
        builds = build_peers(options)
        sys.stdout.write(to_json(builds))
        if builds["failed"] or builds["error"]:
            raise fail("some modules did not compile")
        return
    result = measured("attention", lambda progress: run_attention(options, source, command=command, progress=progress))
    deliver(result, out, json, show)
    if result["failed_rows"] or not result["rows"]:
        raise typer.Exit(1)


def show(result: Mapping[str, Any]) -> None:
    """One table of every row, then why a contender did not run, each reason once."""
    from rich import box
    from rich.table import Table

    from .render import console, plain
    from .summary import OURS, best_peer, goal_met, speedup

    out = console()
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("case (batch, heads, head_dim, keys, KV)", overflow="fold")
    for name in ("\nfloor", "\nsplitkv", "at\ngoal", "\nbest peer", "\npeer", "speed\n-up", "\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in result["rows"]:
        if previous not in (None, row["group"]):
            table.add_section()
        previous = row["group"]
        ours, peer, gain = row["us"].get(OURS), best_peer(row), speedup(row)
        cells = [row["case"], _time_text(row["floor_us"]), _time_text(ours) if ours else "FAILED"]
        cells += ["yes" if goal_met(row) else "no", peer.name if peer else "", _time_text(peer.us) if peer else ""]
        cells += [
            (f"{gain:.2f}" if gain < 10 else f"{gain:.0f}") if gain else "",
            f"{row['err'].get(OURS, float('nan')):.1e}",
        ]
        table.add_row(*cells, style="red" if ours is None else "green" if goal_met(row) else None)
    out.print(table)
    for row in result["rows"]:
        if not row["passed"]:
            plain(out, f"FAILED {row['case']}: {row['not_run'][OURS]}")
    for line in sorted({f"{name}: {reason}" for row in result["rows"] for name, reason in row["not_run"].items()}):
        plain(out, f"not run {line}")
    for skip in result["skipped"]:
        plain(out, f"skipped {skip['case']}: {skip['reason']}")
    where = result.get("gpu") or f"{result['cpu']}, {result['threads']} threads"
    read = f"reads {result['read_bandwidth_tb_s'] * 1e3:.1f} GB/s, measured in this run"
    plain(out, f"times in us; {where}; {read}; goal {result['goal']}; {result['wall_s']:.0f} s")


def _time_text(us: float) -> str:
    """Microseconds, and milliseconds where a CPU takes that long."""
    from .render import us_text

    return us_text(us) if us < 10_000 else f"{us / 1000:,.0f} ms"
