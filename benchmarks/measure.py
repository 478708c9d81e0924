"""How a figure is made: contenders interleaved, a fresh seed each round, results checked, ratios within a round.

Rules that each caught a wrong figure once: never replay a key sequence; age the baseline like the candidate; a stall is
the gap between completions; check the contents in every benchmark; the ratio of a round beats the ratio of medians.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


@dataclass(frozen=True)
class Growth:
    """The input that a benchmark's cost is watched over: an attribute of the benchmark, and the sizes it takes in turn."""

    of: str
    sizes: tuple[int, ...]
    rounds: int = 2
    warm: bool = True
    """One more round at each size is not counted, so that state is there when it is measured."""
    quick_share: float = 0.1

    def sizes_for(self, *, quick: bool) -> tuple[int, ...]:
        return tuple(max(1, round(size * self.quick_share)) for size in self.sizes) if quick else self.sizes


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """The k of cost ~ size^k: the least-squares slope of log(cost) over log(size); None where there is no line."""
    if len(set(sizes)) < 2 or any(value <= 0 for value in (*sizes, *costs)):
        return None
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    return statistics.linear_regression(x, y).slope


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
    worst_counts: bool = False
    """Whether the worst round is the ratio, and not the median: for limits that no single round may break."""
    growth: Growth | None = None
    """How the full run also measures it at other sizes; the attribute that it names is set before `setup`."""

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
    worst_counts: bool = False

    @property
    def median(self) -> float | None:
        return statistics.median(self.figures) if self.figures else None

    @property
    def typical(self) -> float:
        """The median of the ratios, also where the worst round counts: what a guard against noise can hold to."""
        return statistics.median(self.ratios) if self.ratios else 0.0

    @property
    def ratio(self) -> float | None:
        if not self.ratios:
            return None
        return min(self.ratios) if self.worst_counts else statistics.median(self.ratios)

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


def run_benchmark(benchmark: Benchmark, progress: Progress = lambda _line: None,
                  series: dict[str, Series] | None = None) -> dict[str, Series]:
    """Interleave the contenders until every ratio is stable or the rounds are used up.

    A caller that gives `series` finds in it what was measured until an interruption.
    """
    series = {} if series is None else series
    fewest, most = benchmark.rounds if not benchmark.quick else (3, 5)
    with prepared(benchmark):
        contenders = benchmark.contenders()
        series.update((name, Series(name, worst_counts=benchmark.worst_counts)) for name in contenders)
        for number in range(most):
            one_round(benchmark, contenders, series, number, progress)
            alive = [one for one in series.values() if one.failure is None]
            if not alive or (number + 1 >= fewest and all(one.stable for one in alive)):
                break
    return series


@contextmanager
def prepared(benchmark: Benchmark) -> Iterator[None]:
    """A benchmark that is set up, and torn down whatever happens."""
    try:
        benchmark.setup()
        yield
    except BaseException:
        with suppress(Exception):  # a set-up cut short may have left nothing to remove; the first error is the one to see
            benchmark.teardown()
        raise
    benchmark.teardown()


def one_round(benchmark: Benchmark, contenders: dict[str, Callable[[int], float]], series: dict[str, Series],
              number: int, progress: Progress) -> None:
    """Every contender once, beginning with another one than the round before."""
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
        except Exception as error:  # the others still have their figures, and the run goes on
            series[name].failure = f"failed: {type(error).__name__}: {error}"
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
