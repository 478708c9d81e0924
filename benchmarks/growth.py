"""How a benchmark's cost grows with its input: the same contenders at several sizes, and the exponent of the line."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measure import Benchmark, Progress, Series, exponent, one_round, prepared

_SINGULAR = {"entries/s": "entry", "rows/s": "row", "events/s": "event", "timers/s": "timer"}


def cost_name(benchmark: Benchmark) -> str:
    """What the exponent is of: seconds per row for a rate, the figure itself for a cost."""
    return f"seconds per {_SINGULAR.get(benchmark.unit, benchmark.unit)}" if benchmark.higher_is_better else benchmark.unit


def is_limit(name: str) -> bool:
    """Baselines that are a constant have no growth."""
    return name.startswith("limit of ") or name.endswith(" entries/s")


def run_growth(kind: type[Benchmark], *, quick: bool, progress: Progress = lambda _line: None) -> dict[str, Any] | None:
    """The medians of every contender at each size and the exponent of its cost; None where no growth is declared."""
    if kind.growth is None:
        return None
    growth, sizes = kind.growth, kind.growth.sizes_for(quick=quick)
    curves: dict[str, list[float | None]] = {}
    for size in sizes:
        for name, figure in _at(kind, size, progress).items():
            curves.setdefault(name, []).append(figure)
    sample = kind(quick=quick)
    return {"of": growth.of, "sizes": list(sizes), "cost": cost_name(sample),
            "contenders": [_curve(sample, name, sizes, figures) for name, figures in curves.items()]}


def _at(kind: type[Benchmark], size: int, progress: Progress) -> dict[str, float | None]:
    assert kind.growth is not None
    benchmark, of = kind(quick=False), kind.growth.of
    setattr(benchmark, of, size)
    with prepared(benchmark):
        contenders = {name: run for name, run in benchmark.contenders().items() if not is_limit(name)}
        series = {name: Series(name) for name in contenders}
        skipped = int(kind.growth.warm)
        for number in range(kind.growth.rounds + skipped):
            one_round(benchmark, contenders, series, number, lambda line: progress(f"{line}, {size:,} {of}"))
    counted = {name: one.figures[skipped:] for name, one in series.items()}
    return {name: statistics.median(figures) if figures else None for name, figures in counted.items()}


def _curve(sample: Benchmark, name: str, sizes: tuple[int, ...], figures: list[float | None]) -> dict[str, Any]:
    points = [(size, 1 / figure if sample.higher_is_better else figure) for size, figure in zip(sizes, figures) if figure]
    slope = exponent([size for size, _ in points], [cost for _, cost in points])
    return {"name": name, "figures": figures, "exponent": slope}
