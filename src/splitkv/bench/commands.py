"""The command line of the measuring tools: options in, one call, a table or JSON out.

Exit codes: 0 done, 1 a check failed, 2 bad usage. JSON goes to standard output alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import splitkv

from ..problem import MAX_CONTEXT
from .record import command_line, provenance, require_writable, to_json, write_record

if TYPE_CHECKING:
    from .render import Report

app = typer.Typer(
    name="splitkv",
    help="Decode attention for long contexts: check this machine, plan a launch, prove and time the kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Out = Annotated[Path | None, typer.Option(help="Also write the result to this JSON file.")]
Commit = Annotated[str | None, typer.Option(help="Source commit, or COMMIT:TREE, where git does not know it.")]
Dirty = Annotated[
    bool | None, typer.Option("--dirty/--clean", help="Whether that source was changed. Default: unknown.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"splitkv {splitkv.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@contextmanager
def usage() -> Iterator[None]:
    """Turn a ValueError about what was asked for into exit code 2 with its text."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def deliver(result: dict[str, Any], out: Path | None, json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Write a result to `out` where that is given, and print it: as JSON, or by `show` and where it went."""
    if out is not None:
        write_record(out, result)
    if json:
        sys.stdout.write(to_json(result))
        return
    from .render import console, plain

    show(result)
    if out is not None:
        plain(console(), f"wrote {out}")


def measured(label: str, run: Callable[[Report], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns, called with the report of a progress bar. A RuntimeError ends the command, in one line."""
    from .render import progress_bar

    try:
        with progress_bar(label) as progress:
            return run(progress)
    except RuntimeError as error:
        raise fail(str(error)) from error


def fail(message: str) -> typer.Exit:
    """Exit code 1, with one line on standard error."""
    typer.echo(f"failed: {message}", err=True)
    return typer.Exit(1)


@app.command(epilog="Example: splitkv rungs --full --out results/h200/rungs.json")
def rungs(
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Contexts in tokens, such as 4096,262144.")] = None,
    heads: Annotated[str | None, typer.Option(help="Query/KV heads, such as 16/4,8/2.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="KV dtypes: some of f32,f16,bf16.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 256,
    full: Annotated[
        bool | None,
        typer.Option("--full/--quick", help="All 54 rungs, or 9 of them. Default: full on a GPU."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of the random keys and values.")] = 0,
    out: Out = None,
    json: Json = False,
    commit: Commit = None,
    dirty: Dirty = None,
) -> None:
    """Prove and time decode attention at every context, on a GPU or a CPU.

    Each rung is checked against float64 and against a baseline, and only then timed: microseconds of both,
    GB/s and the share of this machine's own read bandwidth. A rung that fails its check gets no speed, and
    exit code 1.
    """
    with usage():
        from .cases import rung_options

        options = rung_options(device, lengths, heads, dtypes, full, seed, head_dim)
        source = provenance(commit, dirty)
        if out is not None:
            require_writable(out)
    from .render import console, plain, rungs_report
    from .rungs import run_rungs

    command = command_line("rungs", {**options.as_command(), "out": out})
    result = measured("rungs", lambda progress: run_rungs(options, source, command=command, progress=progress))
    deliver(result, out, json, lambda result: rungs_report(result, console()))
    if not json and options.selection == "quick":
        plain(console(), "this was the quick set; all 54 rungs: splitkv rungs --full")
    if result["failed_rungs"] or not result["rows"]:
        raise typer.Exit(1)


@app.command(epilog="Example: splitkv plan --heads 16/4 --head-dim 256 --context 262144 --device h200 --compare")
def plan(
    heads: Annotated[str, typer.Option(help="Query/KV heads, such as 16/4.")],
    head_dim: Annotated[int, typer.Option(help="Head size of Q and K.")],
    context: Annotated[int, typer.Option(help=f"Keys per row, up to {MAX_CONTEXT}.")],
    device: Annotated[str, typer.Option(help="h200, h100, a100, rtx4090, rtx5090, gb10, b200 or current.")] = "current",
    v_head_dim: Annotated[int, typer.Option(help="Head size of V. Default: that of K.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    q_len: Annotated[int, typer.Option(help="Query tokens per row.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="f32, f16, bf16, fp8_e4m3 or fp8_e5m2.")] = "bf16",
    q_dtype: Annotated[str | None, typer.Option(help="f32, f16 or bf16. Default: the KV dtype, bf16 for fp8.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Keys per page. Default: a contiguous cache.")] = None,
    policy: Annotated[str, typer.Option(help="auto, waves, capacity, length, legacy, off, or a number.")] = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Every policy, side by side.")] = False,
    json: Json = False,
) -> None:
    """Show how a call would be split and launched on a device, without one.

    Splits, split length, grid, blocks per SM, workspace, the bytes that must be read and the least time that
    takes, whether a row's bytes ignore the batch, and why.
    """
    asked: dict[str, Any] = {"v_head_dim": v_head_dim, "batch": batch, "q_len": q_len, "kv_dtype": kv_dtype}
    asked |= {"q_dtype": q_dtype, "page_size": page_size, "policy": policy, "compare": compare}
    with usage():
        from .planning import make_plans, plan_record, plan_request

        request = plan_request(heads, head_dim, context, device, **asked)
        plans = make_plans(request)
    if json:
        options = {
            "heads": heads,
            "head_dim": head_dim,
            "context": context,
            "device": device,
            **asked,
            "json": True,
        }
        given = {name: value for name, value in options.items() if value or name == "context"}
        sys.stdout.write(to_json(plan_record(request, plans, command_line("plan", given))))
        return
    from .render import console, plan_report

    plan_report(request, plans, console())


@app.command(epilog="Example: splitkv fit --model Qwen3.5-9B/config.json --context 262144 --free 48GiB")
def fit(
    model: Annotated[str, typer.Option(help="A config.json, a folder with one, or a .gguf file.")],
    context: Annotated[int, typer.Option(help=f"Prompt tokens; with the generated up to {MAX_CONTEXT}.")],
    generated: Annotated[int, typer.Option(help="Tokens to generate.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows of that length.")] = 1,
    free: Annotated[
        str | None,
        typer.Option(help="Free memory, such as 23300MiB. Default: the GPU's now, or this machine's."),
    ] = None,
    total: Annotated[str | None, typer.Option(help="Memory of the empty device. Default: as found, or --free.")] = None,
    unified: Annotated[
        bool, typer.Option("--unified", help="GPU and CPU share memory: leave 16 GiB of it to the system.")
    ] = False,
    kv_dtypes: Annotated[str | None, typer.Option(help="KV dtypes to try, in order. Default: f32,f16.")] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="Format of the weights, such as bf16 or q4_k_m. Default: the file's.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Or their size, such as 5.4GB.")] = None,
    workspace: Annotated[str | None, typer.Option(help="Attention scratch. Default: what splitkv takes.")] = None,
    expanded: Annotated[
        bool, typer.Option("--expanded", help="Latent attention (DeepSeek): cache K and V of every head.")
    ] = False,
    whole_windows: Annotated[
        bool, typer.Option("--whole-windows", help="Windowed layers cache all tokens, as splitkv's own caches do.")
    ] = False,
    json: Json = False,
) -> None:
    """Say whether a model fits at a context, before anything is loaded or allocated.

    Weights, KV cache, recurrent state, workspace and 512 MiB against the free memory: f32 KV if it fits,
    else f16, else a refusal (exit code 1), and the longest context that fits in each KV dtype.
    """
    asked: dict[str, Any] = {"generated": generated, "batch": batch, "free": free, "total": total}
    asked |= {"unified": unified, "kv_dtypes": kv_dtypes, "weights_dtype": weights_dtype, "weights": weights}
    asked |= {"workspace": workspace, "expanded": expanded, "whole_windows": whole_windows}
    with usage():
        from .fitting import fit_record, make_fit

        answer = make_fit(model, context, **asked)
    if json:
        options = {"model": model, "context": context, **asked, "json": True}
        sys.stdout.write(to_json(fit_record(answer, command_line("fit", options))))
    else:
        from .render import console, fit_report

        fit_report(answer, console())
    if not answer.plan.fits:
        raise typer.Exit(1)


@app.command(epilog="Example: splitkv doctor --json")
def doctor(json: Json = False) -> None:
    """Say what of this machine works: software, GPU, memory, compiler, and a tiny decode on every backend.

    Exit code 1 if the backend that would be chosen here does not give the right answer.
    """
    from .doctor import examine

    report = examine()
    if json:
        sys.stdout.write(to_json(report))
    else:
        from .render import console, doctor_report

        doctor_report(report, console())
    if not report["passed"]:
        raise typer.Exit(1)
