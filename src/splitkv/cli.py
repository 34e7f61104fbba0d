"""The console script `splitkv`. Its commands live in bench/commands.py, bench/app.py and bench/generating.py; this file
only says what is missing."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

HINT = "splitkv's commands need typer and rich: pip install 'splitkv[cli]'"


def main() -> None:
    """Run the command line; exit code 2 with a one-line hint if the extra `cli` is not installed."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print(HINT, file=sys.stderr)
        raise SystemExit(2) from None
    application()(prog_name="splitkv")


@cache
def application() -> Typer:
    """The app with every command."""
    from .bench.app import bench_app
    from .bench.commands import app
    from .bench.generating import generate  # noqa: F401  # adds its command to the app
    from .bench.report_command import EXAMPLE, report

    app.add_typer(bench_app)
    app.command(epilog=EXAMPLE)(report)
    return app


if __name__ == "__main__":
    main()
