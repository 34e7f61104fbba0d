"""`splitkv bench`: what takes longer than a check and shorter than a release. cli.py mounts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .attention_command import EXAMPLE, attention
from .commands import Commit, Dirty, Json, Out, deliver, fail, usage
from .e2e_command import EXAMPLE as E2E_EXAMPLE
from .e2e_command import e2e
from .ranks_command import EXAMPLE as RANKS_EXAMPLE
from .ranks_command import ranks
from .record import command_line, provenance, require_writable
from .tune_command import EXAMPLE as TUNE_EXAMPLE
from .tune_command import tune

if TYPE_CHECKING:
    from .fuzz.cases import Case
    from .fuzz.run import FuzzOptions

bench_app = typer.Typer(
    name="bench",
    help="Longer runs with result files.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@bench_app.callback()
def _root() -> None:
    """Longer runs with result files."""


@bench_app.command(epilog="Example: splitkv bench fuzz --backend cpu --cases 20000 --out results/mine/fuzz.json")
def fuzz(
    backend: Annotated[str, typer.Option(help="auto, or the name of a backend.")] = "auto",
    cases: Annotated[int | None, typer.Option(help="Cases. Default: 100000 on a GPU, 20000 on a CPU.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Case i follows from the seed and i alone.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    shapes: Annotated[
        int | None,
        typer.Option(help="Compiled shapes to draw from; 0: every case its own. Default: 300 on a GPU, 0 on a CPU."),
    ] = None,
    limit_s: Annotated[float | None, typer.Option(min=1, help="Begin no case after this many seconds.")] = None,
    only: Annotated[int | None, typer.Option(min=0, help="Run this one case of the run.")] = None,
    case: Annotated[str | None, typer.Option(help="Run this case, as JSON (what a failure prints).")] = None,
    shrink: Annotated[bool, typer.Option("--shrink", help="With --only or --case: look for a smaller one.")] = False,
    out: Out = None,
    json: Json = False,
    commit: Commit = None,
    dirty: Dirty = None,
) -> None:
    """Hold random problems over the whole argument space against float64.

    Every buffer lies between guard bands, everything that is not a valid key is poison, and most cases are asked
    again in another memory layout for the same bytes. Exit code 1 if any case fails, which prints the command that
    shows it again, or if the time did not suffice for all.
    """
    with usage():
        from .fuzz.run import fuzz_options

        options = fuzz_options(backend, cases, seed, jobs, shapes, limit_s)
        source = provenance(commit, dirty)
        if out is not None:
            require_writable(out)
        if only is not None and case is not None:
            raise ValueError("only: expected --only or --case, got both")
        if shrink and only is None and case is None:
            raise ValueError("shrink: expected --only or --case with it, got neither")
    if only is not None or case is not None:
        with usage():
            from .fuzz.cases import Case

            one = options.draw(only) if case is None and only is not None else Case.from_json(case or "")
        _run_one(one, options, shrink)
        return
    from .fuzz.report import fuzz_report
    from .fuzz.run import run_fuzz
    from .render import console, progress_bar

    command = command_line("bench fuzz", {**options.as_command(), "out": out})
    with progress_bar("fuzz") as progress:
        result = run_fuzz(options, source, command=command, progress=progress)
    deliver(result, out, json, lambda result: fuzz_report(result, console()))
    if not result["passed"]:
        raise typer.Exit(1)


def _run_one(case: Case, options: FuzzOptions, shrink: bool) -> None:
    """Run one case and say what it gave."""
    from .fuzz.checks import check
    from .fuzz.run import shrunk

    finding = check(case, options.backend, options.device, with_reference=True)
    typer.echo(case.to_json())
    for name, ratio in finding.ratios.items():
        typer.echo(f"{name}: largest error is {ratio:.3g} of its bound")
    for refusal in filter(None, (finding.refusal, finding.twin_refusal)):
        typer.echo(f"refused: {refusal}")
    if not finding.failures:
        return
    for text in finding.failures:
        typer.echo(f"FAILED {text}")
    if shrink:
        typer.echo(f"shrunk: {shrunk(case, finding.failures, options).to_json()}")
    raise fail(f"{len(finding.failures)} checks of this case")


bench_app.command(epilog=EXAMPLE)(attention)
bench_app.command(epilog=E2E_EXAMPLE)(e2e)
bench_app.command(epilog=RANKS_EXAMPLE)(ranks)
bench_app.command(epilog=TUNE_EXAMPLE)(tune)
