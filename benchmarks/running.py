"""A run of the suite: room is checked before it starts, results are written after every benchmark, Ctrl-C keeps them."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report, results
from benchmarks.growth import run_growth
from benchmarks.measure import Benchmark, Progress, Series, run_benchmark
from statebackend.errors import Unavailable

QUICK_SHARE = 0.25
"""What a quick run needs of the memory and the disk of a full one."""


def require_room(picked: list[type[Benchmark]], *, quick: bool) -> None:
    """Say before the start that a size will not fit, not in the middle."""
    share = QUICK_SHARE if quick else 1.0
    folder = tempfile.gettempdir()
    for one in picked:
        for what, needed, free in (("disk", one.disk_gib * share, free_disk_gib(folder)),
                                   ("memory", one.memory_gib * share, free_memory_gib())):
            if free is not None and free < needed:
                raise Unavailable(f"{one.name} needs {needed:.2g} GiB of {what}, {free:.2g} GiB are free",
                                  path=folder if what == "disk" else None,
                                  hint="make room" + (", or set TMPDIR to a larger disk" if what == "disk" else "")
                                  + ("" if quick else ", or --quick"))


def free_disk_gib(folder: str) -> float:
    return shutil.disk_usage(folder).free / 2**30


def free_memory_gib() -> float | None:
    """What the system says can still be used; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")), None)


def run_all(picked: list[type[Benchmark]], *, quick: bool, growth: bool, out: Path, show: bool) -> dict[str, Any]:
    """Run benchmarks one after the other; the results so far are in `out` after each."""
    console, started, entries, complete = Console(stderr=True), time.time(), list[dict[str, Any]](), True
    command = "holdfast bench " + " ".join(sys.argv[2:])

    def keep(*, whole: bool) -> None:
        results.write(out / "results.json", command, started, entries, quick=quick, complete=whole)
    for position, kind in enumerate(picked, 1):
        series: dict[str, Series] = {}
        begun = time.monotonic()
        try:
            with _Shown(console, f"[{position}/{len(picked)}]") as progress:
                entries.append(_one(kind, series, progress, quick=quick, growth=growth, begun=begun))
        except KeyboardInterrupt:
            complete = False
            if any(one.figures for one in series.values()):
                entries.append(results.entry(kind(quick=quick), series, seconds=time.monotonic() - begun, partial=True))
            console.print("interrupted: the results so far are kept and marked as partial")
            break
        keep(whole=position == len(picked))
        if show:
            report.print_table(entries[-1], Console())
    keep(whole=complete)
    document = results.read(out / "results.json")
    (out / "report.html").write_text(report.html_page(document))
    (out / "report.md").write_text(report.markdown(document))
    console.print(f"results: {out / 'results.json'}, {out / 'report.html'}")
    return document


def _one(kind: type[Benchmark], series: dict[str, Series], progress: Progress, *, quick: bool, growth: bool,
         begun: float) -> dict[str, Any]:
    benchmark, grown = kind(quick=quick), None
    try:
        run_benchmark(benchmark, progress, series)
        grown = run_growth(kind, quick=quick, progress=progress) if growth else None
    except Exception as error:  # one benchmark that can't be set up is reported, and does not end an unattended run
        failed = series.setdefault(benchmark.baseline, Series(benchmark.baseline))
        failed.failure = failed.failure or f"failed: {type(error).__name__}: {error}"
    return results.entry(benchmark, series, growth=grown, seconds=time.monotonic() - begun)


class _Shown:
    """Progress on a terminal as one line that changes, elsewhere as a line for each step."""

    def __init__(self, console: Console, place: str) -> None:
        self._console, self._place = console, place
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self._show

    def __exit__(self, *_exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _show(self, line: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._place} {line}")
        else:
            self._console.print(f"{self._place} {line}", markup=False, highlight=False)
