"""`holdfast bench`: list, run, compare and guard."""

from __future__ import annotations

import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from statebackend.errors import InvalidRequest, Unavailable

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure Holdfast on this machine.")
FLOORS = Path(__file__).resolve().parent / "floors.toml"


@app.command("list")
def list_benchmarks(output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table") -> None:
    """Name every benchmark with the work it states.

    Example: holdfast bench list
    """
    from benchmarks.registry import all_benchmarks

    rows = [{"name": name, "baseline": one.baseline, "unit": one.unit, "needs": list(one.needs),
             "statement": one.statement()} for name, one in sorted(all_benchmarks().items())]
    if output == "json":
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for row in rows:
        needs = f" (needs {', '.join(row['needs'])})" if row["needs"] else ""  # type: ignore[arg-type]
        typer.echo(f"{row['name']}{needs}\n    {row['statement']}\n")


@app.command()
def run(names: Annotated[list[str] | None, typer.Argument(help="Benchmarks; a name may end with *")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes and fewer rounds")] = False,
        peers: Annotated[bool, typer.Option("--peers", help="Also those that need Spark or peers' environments")] = False,
        out: Annotated[Path, typer.Option("--out", help="Folder for the results and reports")] = Path("bench-out"),
        output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table") -> None:
    """Run benchmarks and write the results.

    Example: holdfast bench run 'memory-*' --quick
    """
    from benchmarks.registry import all_benchmarks, chosen

    picked = list(all_benchmarks().values()) if peers and not names else chosen(names or [])
    for one in picked:
        _require_room(one)
    document = _run_all(picked, quick=quick, out=out, show=output == "table")
    if output == "json":
        sys.stdout.write((out / "results.json").read_text())
    if not document["complete"]:
        raise typer.Exit(130)


def _run_all(picked: list[Any], *, quick: bool, out: Path, show: bool) -> dict[str, Any]:
    from rich.console import Console

    from benchmarks import report, results
    from benchmarks.measure import run_benchmark

    console, started, entries, complete = Console(stderr=True), time.time(), [], True
    command = "holdfast bench " + " ".join(sys.argv[2:])
    try:
        for position, one in enumerate(picked, 1):
            benchmark = one(quick=quick)
            with console.status("") as status:
                place = f"[{position}/{len(picked)}]"
                series = run_benchmark(benchmark, _shown(status, place))
            entries.append(results.entry(benchmark, series))
            if show:
                report.print_table(entries[-1], Console())
    except KeyboardInterrupt:
        complete = False
        console.print("interrupted: the results so far are kept and marked as partial")
    results.write(out / "results.json", command, started, entries, quick=quick, complete=complete)
    document = results.read(out / "results.json")
    (out / "report.html").write_text(report.html_page(document))
    (out / "report.md").write_text(report.markdown(document))
    console.print(f"results: {out / 'results.json'}, {out / 'report.html'}")
    return document


def _shown(status: Any, place: str) -> Callable[[str], None]:
    return lambda line: status.update(f"{place} {line}")


@app.command()
def compare(before: Path, after: Path) -> None:
    """Tell what got faster or slower between two results files, beyond noise; exit code 1 if something got slower.

    Example: holdfast bench compare old/ new/
    """
    from benchmarks import results

    rows = results.compare(results.read(before), results.read(after))
    for row in rows:
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
            low = {contender: series[contender].ratio or 0.0 for contender, floor in wanted.items()
                   if (series[contender].ratio or 0.0) < floor}
            text = ", ".join(f"{contender} {series[contender].ratio or 0:.3g}x (floor {floor:.3g}x)"
                             for contender, floor in wanted.items())
            typer.echo(f"{'ok  ' if not low else 'LOW '} {name}: {text}" + (f", try {attempt}" if attempt > 1 else ""))
            if not low:
                break
        else:
            failed.append(name)
    typer.echo(f"{len(floors) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)


def _require_room(one: Any) -> None:
    """Say before the start that a size will not fit, not in the middle."""
    free = shutil.disk_usage(".").free / 2**30
    if free < one.disk_gib:
        raise Unavailable(f"{one.name} needs {one.disk_gib} GiB of disk, {free:.1f} GiB are free",
                          hint="make room, or --quick")
    available = next((int(line.split()[1]) / 2**20 for line in Path("/proc/meminfo").read_text().splitlines()
                      if line.startswith("MemAvailable")), None) if Path("/proc/meminfo").exists() else None
    if available is not None and available < one.memory_gib:
        raise Unavailable(f"{one.name} needs {one.memory_gib} GiB of memory, {available:.1f} GiB are free", hint="--quick")
