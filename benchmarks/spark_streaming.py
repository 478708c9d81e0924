"""State inside Structured Streaming against Spark's own: the same query, data, partitions and sink, batch by batch."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Asked, Benchmark, CannotRun, WrongAnswer
from checkpoint import KeyedProcessFunction
from statebackend import ValueStateDescriptor

SKIPPED = 2
"""Batches at the start that are not counted: workers start, state is empty."""


class CountAndSum(KeyedProcessFunction):
    """What every per-record contender does with a row: two counters per key, one row out."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.total = ctx.state(ValueStateDescriptor("total", int, default=0))

    def process(self, row: Any, ctx: Any) -> Any:
        count, total = self.count.value() + 1, self.total.value() + row["v"]
        self.count.update(count)
        self.total.update(total)
        yield {"k": ctx.key, "n": count, "s": total}


class _Streaming(Benchmark):
    unit = "rows/s"
    needs = ("spark",)
    keys = 100_000
    rows = 200_000
    batches = 7
    rounds = (3, 5)
    memory_gib = 4.0
    disk_gib = 2.0

    def setup(self) -> None:
        try:
            from spark_integration import spark_session
        except ImportError as error:
            raise CannotRun(f"pyspark is not installed: {error}") from error
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        if self.quick:
            self.batches = 4
        config: dict[str, Any] = {
            "spark__sql__streaming__stateStore__providerClass":
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            "spark__sql__streaming__stateStore__rocksdb__changelogCheckpointing__enabled": True,
            "spark__sql__shuffle__partitions": 2, "spark__sql__streaming__noDataMicroBatches__enabled": False}
        self.spark = spark_session("local[2]", **config)
        self.spark.sparkContext.setLogLevel("ERROR")
        self.number = 0

    def teardown(self) -> None:
        self.spark.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _data(self, seed: int) -> Path:
        """One Parquet file per micro-batch."""
        folder, random = self.folder / f"data-{seed}", np.random.default_rng(seed)
        if not folder.exists():
            folder.mkdir()
            for number in range(self.batches):
                table = pa.table({"k": random.integers(0, self.keys, self.rows), "v": random.integers(0, 100, self.rows)})
                pq.write_table(table, folder / f"{number:03d}.parquet")
        return folder

    def _run(self, seed: int, transform: Callable[[Any, str], Any], mode: str, check: Callable[[str, str], int]) -> float:
        """Rows a second over the batches that count, after the state was found to hold every row."""
        self.number += 1
        state, location = str(self.folder / f"state-{self.number}"), str(self.folder / f"spark-{self.number}")
        source = (self.spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1)
                  .parquet(str(self._data(seed))))
        query = (transform(source, state).writeStream.format("noop").outputMode(mode)
                 .option("checkpointLocation", location).trigger(availableNow=True).start())
        query.awaitTermination()
        times = [progress["durationMs"]["triggerExecution"] for progress in map(_plain, query.recentProgress)
                 if progress["numInputRows"]]
        counted = check(state, location)
        if counted != self.rows * self.batches:
            raise WrongAnswer(f"the state counts {counted} rows instead of {self.rows * self.batches}")
        shutil.rmtree(state, ignore_errors=True)
        return float(self.rows / (statistics.mean(times[SKIPPED:]) / 1000))

    def _ours(self, backend: str) -> Callable[[int], float]:
        from spark_integration import stateful

        return lambda seed: self._run(seed, lambda source, state: stateful(
            source, key="k", function=CountAndSum(), output="k long, n long, s long", uid="count", checkpoint=state,
            parallelism=2, backend=backend), "append", lambda state, _location: _our_total(state, "count"))


def _plain(progress: Any) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(progress.json) if hasattr(progress, "json") else progress
    return found


def _our_total(checkpoint: str, state: str) -> int:
    from spark_integration import open_epoch

    with open_epoch(checkpoint) as opened:
        uid = opened.operators()[0].uid
        names = [info.name for info in opened.states(uid)]
        chosen = state if state in names else next(name for name in names if "n" in name)
        return int(sum(opened.read(uid, chosen).read_all().column("value").to_pylist()))


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
        return {"transformWithState": self._spark, "holdfast memory": self._ours("filesystem"),
                "holdfast rocksdb": self._ours("rocksdb")}

    def _spark(self, seed: int) -> float:
        return self._run(seed, lambda source, _state: source.groupBy("k").transformWithState(
            _processor(), "k long, n long, s long", "update", "none"), "update", self._spark_total)

    def _spark_total(self, _state: str, location: str) -> int:
        frame = (self.spark.read.format("statestore").option("stateVarName", "count").load(location)
                 .selectExpr("sum(value.value) as total"))
        return int(frame.first()["total"])


class SparkPerRecordSmall(SparkPerRecord):
    """The same per-record function with 20,000 rows a batch."""

    name = "spark-per-record-20k"
    rows = 20_000
    batches = 8
    asked = {"holdfast memory": Asked(5, 8), "holdfast rocksdb": Asked(5, 8)}


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
                backend="rocksdb"), "append", lambda state, _location: _our_total(state, "n"))

        def built_in(seed: int) -> float:
            return self._run(seed, lambda source, _state: source.groupBy("k").agg(
                {"*": "count", "v": "sum"}), "update", self._built_in_total)
        return {"Spark SQL": built_in, "holdfast": ours}

    def _built_in_total(self, _state: str, location: str) -> int:
        frame = self.spark.read.format("statestore").load(location).selectExpr("sum(value.count) as total")
        return int(frame.first()["total"])


class SparkAggregateMillion(SparkAggregate):
    """The declared count and sum over a million keys, 200,000 rows a batch."""

    name = "spark-aggregate-1m"
    keys = 1_000_000
    batches = 9
    asked = {"holdfast": Asked(1.6, 3.0)}


class SparkTiny(SparkAggregate):
    """A batch of a hundred rows: the fixed cost of a batch, as batches a second."""

    name = "spark-tiny-batches"
    keys, rows, batches = 1_000, 100, 25
    asked = {"holdfast": Asked(1.0)}


def _processor() -> Any:
    """Spark's processor with the same work; defined late, because its base class needs pyspark."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class CountAndSumProcessor(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("count", "value long")
            self.total = handle.getValueState("total", "value long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            count = self.count.get()[0] if self.count.exists() else 0
            total = self.total.get()[0] if self.total.exists() else 0
            results = []
            for row in rows:
                count, total = count + 1, total + row.v
                results.append(Row(k=key[0], n=count, s=total))
            self.count.update((count,))
            self.total.update((total,))
            return iter(results)

        def close(self) -> None:
            return None

    return CountAndSumProcessor()
