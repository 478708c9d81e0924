"""`holdfast bench`: list, run, report, chart, compare, peers and guard."""

from __future__ import annotations

import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from api.cli import output as cli_output
from api.cli.output import Format, Output
from statebackend.errors import InvalidRequest

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure Holdfast on this machine.")
FLOORS = Path(__file__).resolve().parent / "floors.toml"


class Shown(StrEnum):
    """What a run prints: a table as it goes, or its results when it is done."""

    TABLE = "table"
    JSON = "json"


@app.command("list")
def list_benchmarks(output: Output = None) -> None:
    """Name every benchmark with the work it states.

    Example: holdfast bench list
    """
    from benchmarks.registry import all_benchmarks

    rows = [{"name": name, "baseline": one.baseline, "unit": one.unit, "needs": list(one.needs),
             "statement": one.statement()} for name, one in sorted(all_benchmarks().items())]
    if cli_output.chosen(output) is not Format.TABLE:
        cli_output.emit_rows(rows, output, name="name")
        return
    for row in rows:
        needs = f" (needs {', '.join(row['needs'])})" if row["needs"] else ""  # type: ignore[arg-type]
        typer.echo(f"{row['name']}{needs}\n    {row['statement']}\n")


@app.command()
def run(names: Annotated[list[str] | None, typer.Argument(help="Benchmarks; a name may end with *")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes and fewer rounds")] = False,
        peers: Annotated[bool, typer.Option("--peers", help="Also those that need Spark or peers' environments")] = False,
        growth: Annotated[bool, typer.Option("--growth/--no-growth", help="Also measure how the cost grows")] = True,
        out: Annotated[Path, typer.Option("--out", help="Folder for the results and reports")] = Path("bench-out"),
        output: Annotated[Shown, typer.Option("-o", "--output", help="table or json")] = Shown.TABLE) -> None:
    """Run benchmarks and write the results.

    Example: holdfast bench run 'memory-*' --quick
    """
    from benchmarks.registry import all_benchmarks, chosen
    from benchmarks.running import require_room, run_all

    picked = list(all_benchmarks().values()) if peers and not names else chosen(names or [])
    require_room(picked, quick=quick)
    document = run_all(picked, quick=quick, growth=growth, out=out, show=output is Shown.TABLE)
    if output is Shown.JSON:
        sys.stdout.write((out / "results.json").read_text())
    if not document["complete"]:
        raise typer.Exit(130)


@app.command("report")
def make_report(found: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Results files or their folders")],
                markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the page of docs/ here")] = None,
                page: Annotated[Path | None, typer.Option("--html", help="Write the page with charts here")] = None) -> None:
    """Make the reports of one run, or of several taken together: what was asked, what was reached, where it is lost.

    Example: holdfast bench report bench-out --markdown docs/benchmarks.md
    """
    from benchmarks import report, results

    document = results.merged([results.read(one) for one in found])
    if markdown is None and page is None:
        typer.echo(report.documentation(document))
    for path, text in ((markdown, report.documentation), (page, report.html_page)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(document))
            typer.echo(f"written: {path}", err=True)


@app.command()
def chart(found: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Results files or their folders")],
          out: Annotated[Path, typer.Option("--out", help="A .png or an .svg file")]) -> None:
    """Draw the main chart: throughput as a multiple of the bare structure below it.

    Example: holdfast bench chart bench-out --out docs/images/benchmarks.png
    """
    from benchmarks import charts, results

    picture = charts.main_chart(results.merged([results.read(one) for one in found]))
    typer.echo(f"written: {charts.save(picture, out)}", err=True)


@app.command()
def compare(before: Path, after: Path, output: Output = None) -> None:
    """Tell what got faster or slower between two results files, beyond noise; exit code 1 if something got slower.

    Example: holdfast bench compare old/ new/
    """
    from benchmarks import results

    rows = results.compare(results.read(before), results.read(after))
    if cli_output.chosen(output) is not Format.TABLE:
        cli_output.emit_rows(rows, output, name="benchmark")
    for row in rows if cli_output.chosen(output) is Format.TABLE else ():
        typer.echo(f"{row['verdict']:7} {row['benchmark']} {row['contender']}: {row['before']:.3g}x -> {row['after']:.3g}x "
                   f"({(row['change'] - 1) * 100:+.0f} %, noise {row['noise'] * 100:.0f} %)")
    if any(row["verdict"] == "slower" for row in rows):
        raise typer.Exit(1)


@app.command()
def peers(names: Annotated[list[str] | None, typer.Argument(help="Peers to install; all if none")] = None) -> None:
    """Create the environments of the peers, each of its own, below .venv-peers (or $HOLDFAST_PEERS).

    Example: holdfast bench peers bytewax
    """
    from benchmarks import peers as environments
    from benchmarks.measure import CannotRun

    for name in names or environments.PACKAGES:
        if name not in environments.PACKAGES:
            raise InvalidRequest(f"there is no peer {name!r}", hint=f"use {', '.join(environments.PACKAGES)}")
        try:
            typer.echo(f"{name}: {environments.install(name)}")
        except CannotRun as error:
            typer.echo(f"{name}: {error}", err=True)


@app.command()
def guard(tries: Annotated[int, typer.Option(help="Repeat a benchmark this often before it fails")] = 3) -> None:
    """Run the quick ratios against bare limits and fail when one falls below its floor in floors.toml.

    Example: holdfast bench guard
    """
    from benchmarks.measure import run_benchmark
    from benchmarks.registry import all_benchmarks

    floors: dict[str, dict[str, float]] = tomllib.loads(FLOORS.read_text())
    known, failed = all_benchmarks(), []
    for name, wanted in floors.items():
        if name not in known:
            raise InvalidRequest("floors.toml names a benchmark that does not exist", benchmark=name)
        for attempt in range(1, tries + 1):
            series = run_benchmark(known[name](quick=True))
            low = [contender for contender, floor in wanted.items() if series[contender].typical < floor]
            text = ", ".join(f"{contender} {series[contender].typical:.3g}x (floor {floor:.3g}x)"
                             for contender, floor in wanted.items())
            typer.echo(f"{'ok  ' if not low else 'LOW '} {name}: {text}" + (f", try {attempt}" if attempt > 1 else ""))
            if not low:
                break
        else:
            failed.append(name)
    typer.echo(f"{len(floors) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)
