"""Savepoints as Spark data against plain Parquet files with the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import Asked, WrongAnswer
from benchmarks.spark_base import SparkBenchmark


class _Files(SparkBenchmark):
    """A savepoint of one value state, and the same rows as Parquet."""

    rows = 4_000_000
    baseline = "Parquet"

    def setup(self) -> None:
        from savepoint import SavepointWriter
        from statebackend import ValueStateDescriptor

        super().setup()
        self.rows = 400_000 if self.quick else self.rows
        self.savepoint, self.parquet = str(self.folder / "savepoint"), str(self.folder / "parquet")
        table = pa.table({"key": np.arange(self.rows), "value": np.random.default_rng(3).integers(0, 1 << 40, self.rows)})
        with SavepointWriter(self.savepoint, job_name="bench", parallelism=8) as writer:
            writer.keyed("count", ValueStateDescriptor("total", int), table, key_type=int)
        self.state().repartitionById(8, "key_group").write.parquet(self.parquet)

    def state(self) -> Any:
        return self.spark.read.format("holdfast").option("operator", "count").option("state", "total").load(self.savepoint)

    def require_rows(self, frame: Any) -> None:
        found = frame.selectExpr("count(*) as n", "count(distinct key) as keys").first()
        if (found["n"], found["keys"]) != (self.rows, self.rows):
            raise WrongAnswer(f"{found} instead of {self.rows} rows")


class SparkRead(_Files):
    """Read four million entries of a savepoint into nothing: `read.format("holdfast")` against Spark's own reader on
    Parquet files with the same columns, rows and number of files."""

    name = "spark-read"
    asked = {"holdfast": Asked(0.4)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"Parquet": lambda _seed: self._read(self.spark.read.parquet(self.parquet)),
                "holdfast": lambda _seed: self._read(self.state())}

    def _read(self, frame: Any) -> float:
        began = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        seconds = time.perf_counter() - began
        self.require_rows(frame)
        return self.rows / seconds


class SparkWrite(_Files):
    """Write four million entries, read from Parquet and routed by key group, as a savepoint: `write.format("holdfast")`
    against Parquet to Parquet."""

    name = "spark-write"
    asked = {"holdfast": Asked(0.25)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"Parquet": self._parquet, "holdfast": self._holdfast}

    def _parquet(self, _seed: int) -> float:
        target, began = str(self.fresh("out")), time.perf_counter()
        self.spark.read.parquet(self.parquet).write.parquet(target)
        seconds = time.perf_counter() - began
        self.require_rows(self.spark.read.parquet(target))
        return self.rows / seconds

    def _holdfast(self, _seed: int) -> float:
        from spark_integration import by_key_group

        target, began = str(self.fresh("out")), time.perf_counter()
        rows = by_key_group(self.spark.read.parquet(self.parquet).select("key", "value"), "key", parallelism=8)
        rows.write.format("holdfast").option("operator", "count").option("state", "total").option(
            "like", self.savepoint).mode("append").save(target)
        seconds = time.perf_counter() - began
        self.require_rows(self.spark.read.format("holdfast").option("operator", "count").option(
            "state", "total").load(target))
        return self.rows / seconds
