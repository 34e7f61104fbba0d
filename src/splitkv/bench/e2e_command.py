"""The command line of `splitkv bench e2e`, and the tables that it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .commands import Commit, Dirty, Json, Out, deliver, measured, usage
from .record import command_line, provenance, require_writable

EXAMPLE = (
    "Example: splitkv bench e2e --geometry qwen3.5-9b --kv-dtypes bf16,fp8 --batches 1,4,16 --profile --out e2e.json"
)
_DEFAULTS: dict[str, dict[str, str]] = {
    "cuda": {"depths": "4096,20000,60000,148000,262080", "kv_dtypes": "bf16,f16,fp8", "batches": "1,4,16"},
    "cpu": {"depths": "512,4096", "kv_dtypes": "f32,f16", "batches": "1"},
}
_PREFILL = {"cuda": 20_000, "cpu": 512}


def e2e(
    geometry: Annotated[
        list[str] | None,
        typer.Option(
            help="Published model, such as qwen3.5-9b, a config.json, or a GGUF file. May be repeated. [qwen3.5-9b]"
        ),
    ] = None,
    depths: Annotated[str | None, typer.Option(help="Tokens held when the timed steps begin. [4096 to 262080]")] = None,
    kv_dtypes: Annotated[str | None, typer.Option(help="Some of f32,f16,bf16,fp8. [bf16,f16,fp8; CPU f32,f16]")] = None,
    batches: Annotated[str | None, typer.Option(help="Rows decoded together. [1,4,16; CPU 1]")] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=1, help="Longest depth that is really prefilled; random keys after it. [20000; CPU 512]"),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also time every kernel of a step, least and greatest depth.")
    ] = False,
    peers: Annotated[
        str | None, typer.Option("--with", help="Peers on the same weights at batch 1: llama.cpp, transformers.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the geometries, run nothing.")] = False,
    limit_s: Annotated[float | None, typer.Option(min=1, help="Begin no row after this many seconds.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of weights, prompt and random keys.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    out: Out = None,
    json: Json = False,
    commit: Commit = None,
    dirty: Dirty = None,
) -> None:
    """Time whole decode steps of published models with random weights, beside the floor of their bytes.

    On a GPU a step is one captured graph. Every depth is timed with attention split and in one split; both must give
    the same tokens, or float64 shows why they differ. Exit code 1 if a row fails or there is none.
    """
    with usage():
        from ..models.geometries import GEOMETRIES
        from .e2e_source import SMOLLM2, check_source

        options, asked = _options(geometry, depths, kv_dtypes, batches, prefill, seed, profile, limit_s, device, peers)
        source = provenance(commit, dirty)
        if out is not None:
            require_writable(out)
        for name in options.geometries:
            check_source(name)
    if listing:
        typer.echo("\n".join([*GEOMETRIES, SMOLLM2]))
        return
    from .e2e import run_e2e

    command = command_line("bench e2e", {**asked, "out": out})
    result = measured("e2e", lambda progress: run_e2e(options, source, command=command, progress=progress))
    deliver(result, out, json, show)
    if result["failed_rows"] or not result["rows"]:
        raise typer.Exit(1)


def _options(
    geometry: list[str] | None, depths: str | None, kv_dtypes: str | None, batches: str | None, prefill: int | None,
    seed: int, profile: bool, limit_s: float | None, device: str | None, peers: str | None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The run's options, and the same as a command line has them. ValueError names the option."""
    import os

    from ..policy import POLICY_VARIABLE
    from ..problem import MAX_CONTEXT, dtype_name
    from .cases import resolve_device
    from .e2e import E2eOptions
    from .e2e_peers import choose_peers
    from .e2e_timing import run_length

    if POLICY_VARIABLE in os.environ:
        raise ValueError(f"{POLICY_VARIABLE}: expected unset, as this command compares two policies")
    place = resolve_device(device)
    default = _DEFAULTS[place]
    names = [name.strip() for text in geometry or ["qwen3.5-9b"] for name in text.split(",")]
    lengths = _numbers(depths or default["depths"], "depths", MAX_CONTEXT - run_length(place))
    rows = _numbers(batches or default["batches"], "batches", 1024)
    stored = tuple(
        dict.fromkeys(dtype_name(n.strip(), "kv_dtypes") for n in (kv_dtypes or default["kv_dtypes"]).split(","))
    )
    longest = min(prefill or _PREFILL[place], max(lengths))
    options = E2eOptions(
        place, tuple(dict.fromkeys(names)), lengths, stored, rows, longest, seed, profile, limit_s, choose_peers(peers)
    )  # fmt: skip
    asked: dict[str, Any] = {"geometry": options.geometries, "depths": lengths, "kv_dtypes": stored, "batches": rows}
    asked |= {
        "prefill": longest,
        "profile": profile,
        "limit_s": limit_s,
        "seed": seed,
        "device": place,
        "with": options.peers or None,
    }
    return options, asked


def _numbers(text: str, name: str, most: int) -> tuple[int, ...]:
    """Ascending whole numbers in 1..most, each once."""
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise ValueError(f"{name}: expected numbers in 1..{most}, joined by commas, got {text!r}")
    return tuple(sorted({int(word) for word in words}))


# ---- tables ------------------------------------------------------------------------------------------------


def show(result: Mapping[str, Any]) -> None:
    """A row for every depth, KV dtype and batch; then profiles, differences, and what was left out."""
    from .render import console, plain
    from .summary import OURS

    out = console()
    for name in result["geometries"]:
        rows = [row for row in result["rows"] if row["geometry"] == name]
        out.print(_times(name, rows))
        if "peers" in result["geometries"][name]:
            out.print(_beside(name, rows))
    for profile in result["profiles"]:
        out.print(_kernels(profile))
    for entry in result["kv_parity"]:
        where = f"{entry['geometry']}, {entry['kv_dtype']} KV, batch {entry['batch']}, depth {entry['depth']}"
        same = "same token" if entry["same_token"] else f"another token at a margin of {entry['margin']:.2g}"
        plain(out, f"logits against f32 KV, {where}: relative {entry['relative']:.1e}, {same}")
    for row in result["rows"]:
        if not row["passed"]:
            plain(out, f"FAILED {row['geometry']}, {row['kv_dtype']}, batch {row['batch']}, depth {row['depth']}, "
                  f"{row['contender']}: {_why(row)}")  # fmt: skip
        elif row["flips"] and row["contender"] == OURS:
            plain(out, f"flips {row['geometry']}, {row['kv_dtype']}, batch {row['batch']}, depth {row['depth']}: "
                  f"{len(row['flips'])}, each within what 16-bit arithmetic leaves open (see the JSON)")  # fmt: skip
    for entry in result["not_measured"]:
        where = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in ("geometry", "reason"))
        plain(out, f"not measured: {entry['geometry']}{', ' + where if where else ''}: {entry['reason']}")
    where = result.get("gpu") or f"{result['cpu']}, {result['threads']} threads"
    read = f"reads {result['read_bandwidth_tb_s'] * 1e3:.1f} GB/s, measured in this run"
    plain(out, f"{where}; {read}; seed {result['seed']}; {result['wall_s']:.0f} s")


def _why(row: Mapping[str, Any]) -> str:
    """What a row failed."""
    if "timing_rejected" not in row:
        return "its logits are not those of our decoder"
    if row["timing_rejected"]:
        return str(row["timing_rejected"])
    if row["repeats_tokens"] is False:
        return "a second run gave other tokens"
    if any(flip["explained"] is False for flip in row["flips"]):
        return "split and unsplit attention gave different tokens, by more than their errors against float64"
    return "logits that are not finite"


def _times(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    from .summary import OURS, UNSPLIT

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=name, title_justify="left")
    table.add_column("KV", no_wrap=True)
    for column in ("batch", "depth", "ms", "p20", "p80", "floor", "of floor", "tokens/s", "unsplit", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    unsplit = {(r["kv_dtype"], r["batch"], r["depth"]): r["ms_per_token"] for r in rows if r["contender"] == UNSPLIT}
    for row in rows:
        if row["contender"] == OURS:
            mark, share, speed = "*" if row["cache"] == "prefilled" else "", row["percent_of_floor"], row["tokens_s"]
            cells = [row["kv_dtype"].split("_")[0], f"{row['batch']}", f"{row['depth']}{mark}"]
            cells += [_ms(row[time]) for time in ("ms_per_token", "ms_p20", "ms_p80", "floor_ms")]
            cells += [f"{share:.0f}%" if share else "", f"{speed:,.1f}" if speed else ""]
            cells += [_ms(unsplit.get((row["kv_dtype"], row["batch"], row["depth"])))]
            cells += ["same" if row["tokens_identical"] else f"{len(row['flips'])} flip{'s'[: len(row['flips']) - 1]}"]
            table.add_row(*cells, style=None if row["passed"] else "red")
    table.caption = "ms of a step that gives every row one token; floor: its bytes over the read bandwidth; * prefilled"
    return table


def _beside(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Other programs' times, each over ours at the same depth and KV dtype; q8_0 over our fp8."""
    from rich import box
    from rich.table import Table

    from .e2e_rows import CONTENDERS, OURS

    ours = {(r["kv_dtype"], r["depth"]): r["ms_per_token"] for r in rows if r["contender"] == OURS and r["batch"] == 1}
    title = f"{name}: other programs, batch 1"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for column in ("program", "weights", "KV"):
        table.add_column(column, no_wrap=True)
    for column in ("depth", "ms", "floor", "times ours"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row["contender"] not in CONTENDERS:
            kv_dtype, ms = row["kv_dtype"], row["ms_per_token"]
            own = ours.get(("fp8_e4m3" if kv_dtype == "q8_0" else kv_dtype, row["depth"]))
            cells = [row["contender"], row["weights"], kv_dtype, f"{row['depth']}", _ms(ms), _ms(row["floor_ms"])]
            table.add_row(*cells, f"{ms / own:.2f}" if own else "", style=None if row["passed"] else "red")
    return table


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _kernels(profile: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    where = f"{profile['geometry']}, {profile['kv_dtype']} KV, batch {profile['batch']}, depth {profile['depth']}"
    busy = f"{profile['busy_us']:,.0f} us of it in {profile['launches']:.0f} kernels"
    title = f"{where}: a step of {profile['step_us']:,.0f} us, {busy}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for name in ("adds us", "share", "runs us", "launches"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, min_width=40)
    for kernel in profile["kernels"]:
        added = kernel["added_us"]
        cells = (
            f"{added:.1f}",
            f"{added / profile['busy_us']:.1%}",
            f"{kernel['us']:.1f}",
            f"{kernel['launches']:.0f}",
        )
        table.add_row(*cells, kernel["name"])
    return table
