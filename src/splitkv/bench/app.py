"""The sub-commands of `splitkv bench`. Each lives in a file of its own; here they get their names."""

from __future__ import annotations

import typer

from .attention_command import EXAMPLE as ATTENTION_EXAMPLE
from .attention_command import attention

bench_app = typer.Typer(
    name="bench",
    help="Measure and stress: attention against other libraries.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
bench_app.command(epilog=ATTENTION_EXAMPLE)(attention)
