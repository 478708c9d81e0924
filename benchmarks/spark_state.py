"""What does not depend on the size of the state (a batch), and what does (a restart at another parallelism)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Asked, CannotRun
from benchmarks.spark_base import SparkBenchmark, batch_ms, our_total, random_batches, require_total, write_batch

PRELOAD_ROWS = 200_000


def _count(column: Any) -> int:
    return sum(row["n"] for row in column.to_pylist())


class _Preloaded(SparkBenchmark):
    """A stream whose first batches touch every key once."""

    def preload(self, folder: Path, keys: int) -> int:
        """Files with each key once; how many."""
        begins = range(0, keys, PRELOAD_ROWS)
        for number, begin in enumerate(begins):
            part = np.arange(begin, min(begin + PRELOAD_ROWS, keys))
            write_batch(folder, number, part, part % 100)
        return len(begins)

    def counted(self, folder: Path, state: Path, parallelism: int) -> Any:
        from spark_integration import aggregate

        return aggregate(self.source(folder), key="k", aggs={"n": "count", "s": ("sum", "v")}, uid="count",
                         checkpoint=str(state), parallelism=parallelism, backend="rocksdb")


class SparkStateGrowth(_Preloaded):
    """The same batch (20,000 rows over 100,000 of the keys) on ten times the state: milliseconds a batch of the declared
    count and sum with RocksDB at 100,000 and at 1,000,000 keys."""

    name = "spark-state-growth"
    unit = "ms"
    higher_is_better = False
    baseline = "100,000 keys"
    asked = {"1,000,000 keys": Asked(round(1 / 1.3, 3))}
    batches = 8

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"100,000 keys": lambda seed: self._run(seed, 100_000),
                "1,000,000 keys": lambda seed: self._run(seed, 300_000 if self.quick else 1_000_000)}

    def _run(self, seed: int, keys: int) -> float:
        folder, state = self.fresh("data"), self.fresh("state")
        first = self.preload(folder, keys)
        random_batches(folder, seed, 100_000, 20_000, self.batches, first)
        progress = self.finish(self.counted(folder, state, 2), "append", self.fresh("spark"))
        require_total(our_total(state, _count), keys + 20_000 * self.batches)
        shutil.rmtree(folder)
        return batch_ms(progress, first + 2)


class SparkRescale(_Preloaded):
    """A stopped query of a million keys goes on with three partitions instead of two: seconds to the end of its first
    batch. Spark rewrites its state offline before it starts again; ours starts again."""

    name = "spark-rescale-1m"
    unit = "s"
    higher_is_better = False
    baseline = "Spark: repartition and restart"
    asked = {"holdfast": Asked(2, 5)}
    keys = 1_000_000

    def setup(self) -> None:
        super().setup()
        self.keys = 200_000 if self.quick else self.keys
        self.data, self.stopped, self.ours = self.folder / "data", self.folder / "stopped", self.folder / "ours"
        batches = self.preload(self.data, self.keys)
        self.finish(self._built_in(), "update", self.stopped)
        self.finish(self.counted(self.data, self.ours / "state", 2), "append", self.ours / "spark")
        write_batch(self.data, batches, np.arange(1000), np.arange(1000))

    def _built_in(self) -> Any:
        return self.source(self.data).groupBy("k").agg({"*": "count", "v": "sum"})

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"Spark: repartition and restart": self._spark, "holdfast": self._holdfast}

    def _spark(self, _seed: int) -> float:
        manager = getattr(self.spark, "_streamingCheckpointManager", None)
        if manager is None:
            raise CannotRun("this Spark has no offline repartition")
        location = self.fresh("spark")
        shutil.copytree(self.stopped, location)
        began = time.perf_counter()
        manager.repartition(str(location), 3)
        self.finish(self._built_in(), "update", location)
        seconds = time.perf_counter() - began
        require_total(self.spark_total(location, "value.count"), self.keys + 1000)
        return seconds

    def _holdfast(self, _seed: int) -> float:
        copy = self.fresh("ours")
        shutil.copytree(self.ours, copy)
        began = time.perf_counter()
        self.finish(self.counted(self.data, copy / "state", 3), "append", copy / "spark")
        seconds = time.perf_counter() - began
        require_total(our_total(copy / "state", _count), self.keys + 1000)
        return seconds
