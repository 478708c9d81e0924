"""`holdfast config show`: every setting, its value, and where it comes from."""

from __future__ import annotations

import typer

from api.cli import settings
from api.cli.output import Output, emit_rows

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)


@app.callback()
def group() -> None:
    """Show the settings in force and where each comes from."""


@app.command()
def show(output: Output = None) -> None:
    """Print every setting with its value and origin: flag, then environment, then file, then default.

    \b
    Examples:
      holdfast config show
      HOLDFAST_BACKEND=rocksdb holdfast config show -o json
    """
    rows = [{"name": item.name, "value": item.value, "origin": item.origin, "help": item.help}
            for item in settings.resolve()]
    emit_rows(rows, output, name="name", columns=["name", "value", "origin", "help"])
