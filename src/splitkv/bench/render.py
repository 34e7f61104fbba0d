"""What the commands print: tables of 100 columns, units beside every number, nothing decided here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..plan import DecodePlan
from ..problem import DecodeProblem
from .fitting import Fit, limit, notes
from .planning import PlanRequest, why_invariant
from .progress import Progress as Report
from .record import UNKNOWN
from .rungs import OURS

PIPE_WIDTH = 100
"""Columns of a table that goes into a file or a pipe."""
BUSY_SHARE = 0.1
"""Share of the cores that other processes may take before a CPU's times are called too long."""
_STATUS_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "absent": "dim"}


def console() -> Console:
    """Standard output: as wide as the terminal, or 100 columns where there is none."""
    out = Console(highlight=False, soft_wrap=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(width=PIPE_WIDTH, highlight=False)


def plain(out: Console, text: str) -> None:
    """A line as it is: no markup, no wrapping, so that what it quotes can be copied."""
    out.print(Text(text), soft_wrap=True)


def bytes_text(count: int) -> str:
    """1073741824 -> "1.07 GB" (decimal units); below 1000 exact."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return ""


def us_text(us: float) -> str:
    """Microseconds with enough digits to compare and no more."""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


@contextmanager
def progress_bar(label: str) -> Iterator[Report]:
    """A bar on standard error while it is a terminal, and silence otherwise."""
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=f"{label}: {text}")


# ---- rungs -------------------------------------------------------------------------------------------------


def rungs_report(result: Mapping[str, Any], out: Console) -> None:
    """Route lines, one table, why any rung has no speed, and how to read it."""
    for kv_dtype, line in result["routes"].items():
        plain(out, f"route {kv_dtype}: {line}")
    out.print(_rungs_table(result))
    for row in result["rows"]:
        for reason in (*row["parity_failures"], *filter(None, [row["timing_rejected"]])):
            plain(out, f"FAILED {row['case']}: {reason}")
        if row["noisy"]:
            plain(out, f"noisy  {row['case']}: {_spreads(row)}")
        if row["cache"] != "cold":
            plain(out, f"warm   {row['case']}: {row['sets']} sets of keys, {row['cache']}")
    for skip in result["skipped"]:
        plain(out, f"skipped {skip['case']}: {skip['reason']}")
    where = result.get("gpu") or f"{result['cpu']}, {result['threads']} threads"
    dirty = {True: ", dirty", False: ""}.get(result["dirty"], ", dirty or clean: unknown")
    source = "commit unknown" if result["commit"] == UNKNOWN else f"commit {result['commit'][:12]}{dirty}"
    read = f"reads {result['read_bandwidth_tb_s'] * 1e3:.1f} GB/s, measured in this run"
    plain(out, f"{where}; {read}; torch {result['versions']['torch']}; {source}")
    others = result["other_processes_cores"]
    if "cpu" in result and others and others > BUSY_SHARE * result["cores"]:
        plain(out, f"other processes kept {others:.1f} of the cores busy meanwhile, so every time is too long")
    rows = result["rows"]
    good = len(rows) - result["failed_rungs"]
    plain(out, f"{good} of {len(rows)} rungs passed: error against float64 within the rules, timing accepted")


def _spreads(row: Mapping[str, Any]) -> str:
    spans = (f"{n} {us_text(row['us_p20'][n])} to {us_text(row['us_p80'][n])} us" for n in row["noisy"])
    return f"{', '.join(spans)} (p20 to p80), so take the median with care"


def _rungs_table(result: Mapping[str, Any]) -> Table:
    baseline = result["baseline"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("heads", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    names = (
        "keys",
        f"error\n{OURS}",
        f"error\n{baseline}",
        "max\ndiff",
        "floor\nus",
        f"{OURS}\nus",
        f"{baseline}\nus",
    )
    for name in (*names, "speed\n-up", "\nGB/s", "of read\nspeed"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in result["rows"]:
        heads, kv_dtype = f"{row['num_q_heads']}/{row['num_kv_heads']}", row["kv_dtype"]
        if previous not in (None, (heads, kv_dtype)):
            table.add_section()
        previous = (heads, kv_dtype)
        errors = (row["err"][OURS], row["err"][baseline], row["against_baseline"]["max_abs"])
        cells = [
            heads,
            kv_dtype,
            str(row["seq_len"]),
            *(f"{error:.1e}" for error in errors),
            us_text(row["floor_us"]),
        ]
        table.add_row(*cells, *_speed_cells(row, baseline), style=None if row["passed"] else "red")
    return table


def _speed_cells(row: Mapping[str, Any], baseline: str) -> list[str]:
    if not row["passed"]:
        return ["FAILED", "", "", "", ""]
    us = row["us"]
    return [
        us_text(us[OURS]),
        us_text(us[baseline]),
        f"{row['speedup']:.1f}x",
        f"{row['gb_s'][OURS]:.1f}",
        f"{row['bandwidth_share'][OURS]:.1%}",
    ]


# ---- plan --------------------------------------------------------------------------------------------------


def plan_report(request: PlanRequest, plans: list[DecodePlan], out: Console) -> None:
    """One plan in its own words, or all of them side by side."""
    problem, device = request.problem, request.device
    plain(out, f"{_problem_text(problem)}, on {device.name}")
    if request.policy is not None:
        plain(out, plans[0].explain())
        return
    floor = f"at least {us_text(plans[0].floor_us)} us at {device.bandwidth_bytes_s / 1e12:.3g} TB/s"
    source = "measured" if device.measured else "datasheet"
    plain(out, f"reads {bytes_text(problem.kv_bytes())} of keys and values: {floor} ({source})")
    out.print(_plans_table(plans, "core" if device.is_cpu else "SM"))
    if "SPLITKV_POLICY" in os.environ:
        plain(
            out,
            f"SPLITKV_POLICY={os.environ['SPLITKV_POLICY']} is set and overrides the policy of every call",
        )


def _problem_text(problem: DecodeProblem) -> str:
    sizes = f"{problem.head_dim}"
    if problem.v_head_dim != problem.head_dim:
        sizes += f" (V {problem.v_head_dim})"
    tokens = f"{problem.q_len} query token{'s' if problem.q_len > 1 else ''} in {problem.q_dtype}"
    layout = f"pages of {problem.page_size}" if problem.page_size else "contiguous"
    heads = f"{problem.num_q_heads}/{problem.num_kv_heads} heads of {sizes}"
    return f"{problem.batch} x {heads}, {tokens}, {problem.capacity} keys in {problem.kv_dtype}, {layout}"


def _plans_table(plans: list[DecodePlan], unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("splits", "split\nlength", "grid", f"blocks\nper {unit}", "workspace"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("batch-\ninvariant")
    table.add_column("because a row is cut by")
    for plan in plans:
        grid = "x".join(map(str, plan.grid))
        cells = (plan.policy.label, str(plan.num_splits), str(plan.split_len), grid, f"{plan.waves:.2f}")
        invariant = Text("yes", "green") if plan.batch_invariant else Text("no", "yellow")
        reason = why_invariant(plan).removeprefix("cut by ")
        table.add_row(*cells, bytes_text(plan.workspace_bytes), invariant, reason)
    return table


# ---- fit ---------------------------------------------------------------------------------------------------


def gib_text(count: int) -> str:
    """Bytes in GiB, to a hundredth: memory is sold and freed in binary units."""
    return f"{count / (1 << 30):,.2f} GiB"


def fit_report(fit: Fit, out: Console) -> None:
    """The terms, the verdict with its arithmetic, and the longest context in each KV dtype."""
    plan, model, memory = fit.plan, fit.plan.model, fit.memory
    rows = f"{plan.batch} row{'s' if plan.batch > 1 else ''}"
    plain(out, f"{model.name}, {model.parameters / 1e9:.3g}B parameters, from {fit.path}")
    plain(out, f"{rows} of {plan.context} prompt tokens, {plan.generated} generated, and the one being computed")
    out.print(_terms_table(fit))
    plain(out, plan.arithmetic)
    known = "" if memory.total_bytes is None else f" of {gib_text(memory.total_bytes)}"
    plain(out, f"memory: {gib_text(memory.free_bytes)}{known}, {memory.source}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("KV dtype", no_wrap=True)
    for name in ("KV bytes\nper token", "longest prompt\nthat fits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("held by")
    for kv_dtype, tokens in plan.largest_contexts().items():
        longest = "none" if tokens is None else f"{tokens:,}"
        table.add_row(kv_dtype, f"{model.kv_bytes_per_token(kv_dtype):,}", longest, limit(plan, tokens))
    out.print(table)
    for line in notes(fit):
        plain(out, f"note: {line}")
    verdict = f"fits with {plan.kv_dtype} KV" if plan.fits else f"refused: {plan.refusal}"
    plain(out, f"{verdict}; needs {gib_text(plan.need_bytes)} of {gib_text(plan.available_bytes)}")


def _terms_table(fit: Fit) -> Table:
    plan = fit.plan
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("memory for", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for name, count in plan.terms.items():
        label = f"KV cache in {plan.kv_dtype}" if name == "kv_cache" else name.replace("_", " ")
        table.add_row(label, f"{count:,}", gib_text(count))
    table.add_section()
    table.add_row("needed", f"{plan.need_bytes:,}", gib_text(plan.need_bytes))
    available = "available (free - 16 GiB)" if plan.unified else "available"
    table.add_row(available, f"{plan.available_bytes:,}", gib_text(plan.available_bytes))
    return table


# ---- doctor ------------------------------------------------------------------------------------------------


def doctor_report(report: Mapping[str, Any], out: Console) -> None:
    """One line a check, then the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report["checks"]:
        table.add_row(Text(check["status"], _STATUS_STYLE[check["status"]]), check["name"], Text(check["detail"]))
    out.print(table)
    verdict = "works" if report["passed"] else "does not work"
    plain(out, f"backend {report['backend']} {verdict} on {report['device']}; chosen because {report['why']}")
