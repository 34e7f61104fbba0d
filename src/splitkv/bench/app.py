"""`splitkv bench`: what takes longer than a check and shorter than a release. cli.py mounts it."""

from __future__ import annotations

import typer

from .attention_command import EXAMPLE, attention

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


bench_app.command(epilog=EXAMPLE)(attention)
