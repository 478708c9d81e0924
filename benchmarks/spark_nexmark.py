"""NEXMark queries as streams over our state, each checked against plain SQL over the same events at rest."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.measure import WrongAnswer
from benchmarks.nexmark.events import write_events
from benchmarks.nexmark.queries import QUERIES, differences, expected, run_query
from benchmarks.spark_base import SparkBenchmark, plain


class SparkNexmark(SparkBenchmark):
    """NEXMark queries 3, 4, 7, 8 and 11 as streams with state in RocksDB, 50,000 events a batch: events a second, each
    result compared with that of plain Spark SQL over the same events. Query 3 is the yardstick for the others."""

    name = "spark-nexmark"
    unit = "events/s"
    baseline = "q3"
    events, batches = 500_000, 10
    rounds = (1, 3)

    def setup(self) -> None:
        super().setup()
        if self.quick:
            self.events, self.batches = 40_000, 4

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {name: self._contender(name) for name in QUERIES}

    def _contender(self, name: str) -> Callable[[int], float]:
        def run(seed: int) -> float:
            folder = self.folder / f"events-{seed}"
            if not folder.exists():
                write_events(folder, self.events, self.batches, seed)
            found, progress = run_query(self.spark, name, folder, self.fresh(name))
            wanted, missing, extra = differences(found, expected(self.spark, name, folder))
            if missing or extra or not wanted:
                raise WrongAnswer(f"of {wanted} rows {missing} are missing, and {extra} are too many")
            batches = [plain(one) for one in progress][:self.batches]
            return float(self.events / (sum(one["durationMs"]["triggerExecution"] for one in batches) / 1000))

        return run
