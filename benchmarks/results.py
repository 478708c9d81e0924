"""Results as JSON: figures with the machine, versions and settings they were made on; and the comparison of two runs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measure import Benchmark, Series
from statebackend.errors import CorruptData, IncompatibleState, NotFound

RESULTS_VERSION = 2
_PACKAGES = ("holdfast", "pyarrow", "numpy", "rocksdict", "pyspark", "msgspec", "duckdb", "fastapi")


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory / 2**20, 1), "system": platform.platform(),
            "python": sys.version.split()[0]}


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def entry(benchmark: Benchmark, series: dict[str, Series], *, growth: dict[str, Any] | None = None,
          seconds: float | None = None, partial: bool = False) -> dict[str, Any]:
    """One benchmark's results; `partial` says that it was interrupted."""
    return {
        "name": benchmark.name, "statement": benchmark.statement(), "unit": benchmark.unit,
        "baseline": benchmark.baseline, "higher_is_better": benchmark.higher_is_better,
        "contenders": [_contender(benchmark, one) for one in series.values()],
        "growth": growth, "seconds": seconds, "partial": partial,
    }


def _contender(benchmark: Benchmark, one: Series) -> dict[str, Any]:
    asked = benchmark.asked.get(one.name)
    return {"name": one.name, "median": one.median, "ratio": one.ratio, "spread": one.spread, "stable": one.stable,
            "rounds": len(one.figures), "figures": one.figures, "ratios": one.ratios, "failure": one.failure,
            "guarded": one.name in benchmark.guarded,
            "asked_floor": asked.floor if asked else None, "asked_target": asked.target if asked else None}


def write(path: Path, command: str, started: float, entries: Iterable[dict[str, Any]], *, quick: bool,
          complete: bool) -> None:
    """Write a results file; a partial one is marked."""
    document = {"format": "holdfast-benchmarks", "version": RESULTS_VERSION, "command": command, "started": started,
                "quick": quick, "complete": complete, "machine": machine(), "versions": versions(),
                "benchmarks": list(entries)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def read(path: Path) -> dict[str, Any]:
    """Read a results file or the one in a folder."""
    path = path / "results.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFound("there is no results file", path=str(path), hint="`holdfast bench run --out DIR` writes one")
    try:
        document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise CorruptData(f"the results file can't be read: {error}", path=str(path)) from error
    if document.get("format") != "holdfast-benchmarks" or document.get("version") != RESULTS_VERSION:
        raise IncompatibleState("this is a results file of another version", path=str(path), expected=RESULTS_VERSION,
                                found=document.get("version"), hint="run the suite again with this release")
    return document


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one document: of a benchmark that is in more than one, the newest figures."""
    ordered = sorted(documents, key=lambda one: float(one["started"]))
    benchmarks = {one["name"]: one for document in ordered for one in document["benchmarks"]}
    return {**ordered[-1], "command": "; ".join(dict.fromkeys(document["command"] for document in ordered)),
            "quick": any(document["quick"] for document in ordered),
            "complete": all(document["complete"] for document in ordered), "benchmarks": list(benchmarks.values())}


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """What got faster or slower beyond noise: ratios of two runs, contender by contender."""
    old = {(one["name"], contender["name"]): contender for one in before["benchmarks"] for contender in one["contenders"]}
    rows = []
    for one in after["benchmarks"]:
        for contender in one["contenders"]:
            known = old.get((one["name"], contender["name"]))
            if known is None or not known["ratio"] or not contender["ratio"] or contender["name"] == one["baseline"]:
                continue
            change = contender["ratio"] / known["ratio"]
            noise = max(0.05, 2 * ((known["spread"] or 0) + (contender["spread"] or 0)))
            verdict = "faster" if change > 1 + noise else "slower" if change < 1 - noise else "same"
            rows.append({"benchmark": one["name"], "contender": contender["name"], "before": known["ratio"],
                         "after": contender["ratio"], "change": change, "noise": noise, "verdict": verdict})
    return rows


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
