"""How a figure is made: contenders interleaved, a fresh seed each round, results checked, ratios within a round.

Rules that each caught a wrong figure once: never replay a key sequence; age the baseline like the candidate; a stall is
the gap between completions; check the contents in every benchmark; the ratio of a round beats the ratio of medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MIN_ROUNDS, MAX_ROUNDS, STABLE_SPREAD = 5, 11, 0.10


class WrongAnswer(Exception):
    """A contender computed something else than it should: there is no figure."""


class CannotRun(Exception):
    """A contender is not available here; the reason is reported in place of a figure."""


@dataclass(frozen=True)
class Asked:
    """What was asked of a contender: a floor that must hold, a target that is aimed at; both as ratio to the baseline."""

    floor: float
    target: float | None = None


class Benchmark(ABC):
    """One comparison. The class's docstring is the statement of the work; `figure`s are in `unit`.

    A contender is a function of the round's seed that does the work, checks its result and returns the figure.
    """

    name: str
    unit: str = "rows/s"
    baseline: str
    higher_is_better: bool = True
    asked: Mapping[str, Asked] = {}
    guarded: tuple[str, ...] = ()
    """Contenders whose ratio the regression guard watches."""
    memory_gib: float = 1.0
    disk_gib: float = 0.5
    needs: tuple[str, ...] = ()
    """Extras: "spark", "peers"; a benchmark that needs one is left out unless asked for."""
    rounds: tuple[int, int] = (MIN_ROUNDS, MAX_ROUNDS)

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick

    @abstractmethod
    def contenders(self) -> dict[str, Callable[[int], float]]: ...

    def setup(self) -> None:
        """Make the data; not timed."""

    def teardown(self) -> None:
        """Remove what setup made."""

    @classmethod
    def statement(cls) -> str:
        return " ".join((cls.__doc__ or "").split())


@dataclass
class Series:
    """The figures of one contender."""

    name: str
    figures: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.figures) if self.figures else None

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> float | None:
        """Half the interquartile range of the ratios, relative to their median."""
        if len(self.ratios) < 3 or not self.ratio:
            return None
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return (high - low) / 2 / self.ratio

    @property
    def stable(self) -> bool:
        return self.spread is not None and self.spread <= STABLE_SPREAD


Progress = Callable[[str], None]


def run_benchmark(benchmark: Benchmark, progress: Progress = lambda _line: None) -> dict[str, Series]:
    """Interleave the contenders until every ratio is stable or the rounds are used up."""
    benchmark.setup()
    try:
        contenders = benchmark.contenders()
        series = {name: Series(name) for name in contenders}
        fewest, most = benchmark.rounds if not benchmark.quick else (3, 5)
        for number in range(most):
            _one_round(benchmark, contenders, series, number, progress)
            alive = [one for one in series.values() if one.failure is None]
            if number + 1 >= fewest and all(one.stable for one in alive):
                break
        return series
    finally:
        benchmark.teardown()


def _one_round(benchmark: Benchmark, contenders: dict[str, Callable[[int], float]], series: dict[str, Series],
               number: int, progress: Progress) -> None:
    names = [name for name in contenders if series[name].failure is None]
    turned = names[number % len(names):] + names[:number % len(names)] if names else []
    figures: dict[str, float] = {}
    for name in turned:
        progress(f"{benchmark.name}: round {number + 1}, {name}")
        gc.collect()
        try:
            figures[name] = contenders[name](1_000 + number)
        except CannotRun as error:
            series[name].failure = str(error)
        except WrongAnswer as error:
            series[name].failure = f"WRONG ANSWER: {error}"
    base = figures.get(benchmark.baseline)
    for name, figure in figures.items():
        series[name].figures.append(figure)
        if base:
            series[name].ratios.append(figure / base if benchmark.higher_is_better else base / figure)


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
