"""State inside Structured Streaming against Spark's own: the same query, data, partitions and sink, batch by batch.

Names that end in -cpu run the same work and count rows per second of CPU (driver, JVM and Python workers together):
the figure to go by on a machine that has other work to do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Asked
from benchmarks.spark_base import (
    SKIPPED,
    SparkBenchmark,
    batch_ms,
    cpu_seconds,
    our_total,
    random_batches,
    require_total,
)
from benchmarks.spark_files import SparkRead, SparkWrite
from benchmarks.spark_functions import OUTPUT, CountAndSum, in_pandas, processor
from benchmarks.spark_nexmark import SparkNexmark
from benchmarks.spark_state import SparkRescale, SparkStateGrowth

__all__ = ["SparkNexmark", "SparkRead", "SparkRescale", "SparkStateGrowth", "SparkWrite"]


class _Streaming(SparkBenchmark):
    keys, rows, batches = 100_000, 200_000, 7
    by_cpu = False

    def setup(self) -> None:
        super().setup()
        if self.quick:
            self.batches = min(self.batches, SKIPPED + 2)

    def _data(self, seed: int) -> Path:
        folder = self.folder / f"data-{seed}"
        return folder if folder.exists() else random_batches(folder, seed, self.keys, self.rows, self.batches)

    def _run(self, seed: int, transform: Callable[[Any, str], Any], mode: str, total: Callable[[Path, Path], int]) -> float:
        """Rows a second (of time, or of CPU) after the state was found to hold every row."""
        state, location = self.fresh("state"), self.fresh("spark")
        source, began = self.source(self._data(seed)), cpu_seconds()
        progress = self.finish(transform(source, str(state)), mode, location)
        used = cpu_seconds() - began
        require_total(total(state, location), self.rows * self.batches)
        return self.rows * self.batches / used if self.by_cpu else self.rows / (batch_ms(progress) / 1000)

    def ours(self, backend: str) -> Callable[[int], float]:
        from spark_integration import stateful

        return lambda seed: self._run(seed, lambda source, state: stateful(
            source, key="k", function=CountAndSum(), output=OUTPUT, uid="count", checkpoint=state, parallelism=2,
            backend=backend), "append", lambda state, _location: our_total(state, _first_field))

    def transform_with_state(self, seed: int) -> float:
        return self._run(seed, lambda source, _state: source.groupBy("k").transformWithState(
            processor(), OUTPUT, "update", "none"), "update",
            lambda _state, location: self.spark_total(location, "value.n", stateVarName="totals"))

    def in_pandas(self, seed: int) -> float:
        return self._run(seed, lambda source, _state: source.groupBy("k").applyInPandasWithState(
            in_pandas, OUTPUT, "n long, s long", "update", "NoTimeout"), "update",
            lambda _state, location: self.spark_total(location, "value.groupState.n"))


def _first_field(column: Any) -> int:
    return sum(value["f0"] if isinstance(value, dict) else value[0] for value in column.to_pylist())


class SparkPerRecord(_Streaming):
    """The same per-record Python function (count and sum per key, one row out per row in) in our state and in Spark's
    transformWithState (Row) with RocksDB: 100,000 keys, 200,000 rows a batch, two partitions, update rows to a noop
    sink."""

    name = "spark-per-record"
    baseline = "transformWithState"
    asked = {"holdfast memory": Asked(15, 25), "holdfast rocksdb": Asked(12, 20)}
    batches = 4
    rounds = (1, 2)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"transformWithState": self.transform_with_state, "holdfast memory": self.ours("filesystem"),
                "holdfast rocksdb": self.ours("rocksdb")}


class SparkPerRecordCpu(SparkPerRecord):
    """The same per-record function at 100,000 keys and 200,000 rows a batch, by CPU time."""

    name, unit, by_cpu = "spark-per-record-cpu", "rows/CPU s", True


class SparkPerRecordSmall(SparkPerRecord):
    """The same per-record function with 20,000 rows a batch; applyInPandasWithState for comparison."""

    name = "spark-per-record-20k"
    rows, batches = 20_000, 8
    asked = {"holdfast memory": Asked(5, 8), "holdfast rocksdb": Asked(5, 8)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {**super().contenders(), "applyInPandasWithState": self.in_pandas}


class SparkHotKeys(SparkPerRecord):
    """The same per-record function on 1,000 hot keys, 200,000 rows a batch, against the fastest of Spark's Python state
    APIs there."""

    name = "spark-hot-keys"
    baseline = "applyInPandasWithState"
    keys, batches = 1_000, 6
    asked = {"holdfast memory": Asked(1, 3), "holdfast rocksdb": Asked(1, 3)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {**super().contenders(), "applyInPandasWithState": self.in_pandas}


class SparkAggregate(_Streaming):
    """Count and sum per key, declared and not coded: our aggregate with RocksDB and durable epochs against Spark's
    built-in aggregation on the JVM with RocksDB and changelog checkpointing; 100,000 keys, 200,000 rows a batch."""

    name = "spark-aggregate-100k"
    baseline = "Spark SQL"
    asked = {"holdfast": Asked(1.3, 2.0)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        from spark_integration import aggregate

        def ours(seed: int) -> float:
            return self._run(seed, lambda source, state: aggregate(
                source, key="k", aggs={"n": "count", "s": ("sum", "v")}, uid="count", checkpoint=state, parallelism=2,
                backend="rocksdb"), "append",
                lambda state, _location: our_total(state, lambda column: sum(row["n"] for row in column.to_pylist())))

        def built_in(seed: int) -> float:
            return self._run(seed, lambda source, _state: source.groupBy("k").agg({"*": "count", "v": "sum"}), "update",
                             lambda _state, location: self.spark_total(location, "value.count"))
        return {"Spark SQL": built_in, "holdfast": ours}


class SparkAggregateCpu(SparkAggregate):
    """The declared count and sum at 100,000 keys, 200,000 rows a batch, by CPU time."""

    name, unit, by_cpu = "spark-aggregate-100k-cpu", "rows/CPU s", True


class SparkAggregateMillion(SparkAggregate):
    """The declared count and sum over a million keys, 200,000 rows a batch."""

    name = "spark-aggregate-1m"
    keys, batches = 1_000_000, 9
    asked = {"holdfast": Asked(1.6, 3.0)}


class SparkAggregateMillionCpu(SparkAggregateMillion):
    """The declared count and sum over a million keys, 200,000 rows a batch, by CPU time."""

    name, unit, by_cpu = "spark-aggregate-1m-cpu", "rows/CPU s", True


class SparkTiny(SparkAggregate):
    """Batches of a hundred rows, 1,000 keys: the fixed cost of a batch (median)."""

    name = "spark-tiny-batches"
    keys, rows, batches = 1_000, 100, 25
    asked = {"holdfast": Asked(1.0)}

    def setup(self) -> None:
        super().setup()
        self.batches = 12 if self.quick else 25


class SparkTinyCpu(SparkTiny):
    """Batches of a hundred rows by CPU time."""

    name, unit, by_cpu = "spark-tiny-batches-cpu", "rows/CPU s", True
