"""What the Spark benchmarks share: a session, data as one file per micro-batch, a query run to its end, and CPU time."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Benchmark, CannotRun, WrongAnswer

SKIPPED = 2
"""Batches at the start that are not counted: workers start, state is empty."""
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_TICKS = os.sysconf("SC_CLK_TCK")


class SparkBenchmark(Benchmark):
    """A session on two cores with two shuffle partitions, RocksDB state with changelog checkpointing, and a folder."""

    needs = ("spark",)
    memory_gib = 4.0
    disk_gib = 2.0
    rounds = (3, 5)

    def setup(self) -> None:
        try:
            from spark_integration import register, spark_session
        except ImportError as error:
            raise CannotRun(f"pyspark is not installed: {error}") from error
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        config: dict[str, Any] = {
            "spark__sql__streaming__stateStore__providerClass": PROVIDER, "spark__driver__memory": "3g",
            "spark__sql__streaming__stateStore__rocksdb__changelogCheckpointing__enabled": True,
            "spark__sql__shuffle__partitions": 2, "spark__sql__streaming__noDataMicroBatches__enabled": False,
            "spark__sql__streaming__numRecentProgressUpdates": 1000, "spark__local__dir": self.folder / "local",
            "spark__ui__showConsoleProgress": False}
        self.spark = spark_session("local[2]", **config)
        self.spark.sparkContext.setLogLevel("OFF")
        register(self.spark)
        self.number = 0

    def teardown(self) -> None:
        self.spark.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self, what: str) -> Path:
        """A folder that nobody has used."""
        self.number += 1
        return self.folder / f"{what}-{self.number}"

    def source(self, folder: Path) -> Any:
        return self.spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1).parquet(str(folder))

    def finish(self, frame: Any, mode: str, location: Path) -> list[dict[str, Any]]:
        """Run a stream over all its files into nothing; the progress of each batch that had rows."""
        query = (frame.writeStream.format("noop").outputMode(mode).option("checkpointLocation", str(location))
                 .trigger(availableNow=True).start())
        query.awaitTermination()
        return [progress for progress in map(plain, query.recentProgress) if progress["numInputRows"]]

    def spark_total(self, location: Path, column: str, **options: str) -> int:
        """The sum of a counter over Spark's own state."""
        reader = self.spark.read.format("statestore").options(**options)
        return int(reader.load(str(location)).selectExpr(f"sum({column}) as total").first()["total"])


def plain(progress: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(progress.json) if hasattr(progress, "json") else progress
    return found


def batch_ms(progress: list[dict[str, Any]], skipped: int = SKIPPED) -> float:
    """The median time of the batches that count."""
    return float(statistics.median(one["durationMs"]["triggerExecution"] for one in progress[skipped:]))


def write_batch(folder: Path, number: int, keys: Any, values: Any) -> None:
    """One micro-batch of a file stream."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:04d}.parquet"
    pq.write_table(pa.table({"k": keys, "v": values}), path)
    os.utime(path, (1_600_000_000 + number,) * 2)  # file streams order by time of change


def random_batches(folder: Path, seed: int, keys: int, rows: int, batches: int, first: int = 0) -> Path:
    random = np.random.default_rng(seed)
    for number in range(batches):
        write_batch(folder, first + number, random.integers(0, keys, rows), random.integers(0, 100, rows))
    return folder


def require_total(found: int, wanted: int) -> None:
    if found != wanted:
        raise WrongAnswer(f"the state counts {found} rows instead of {wanted}")


def our_total(checkpoint: Path, total: Callable[[Any], int]) -> int:
    """The sum over all keys of the only state of the only operator in the newest epoch."""
    from spark_integration import open_epoch

    with open_epoch(str(checkpoint)) as opened:
        uid = opened.operators()[0].uid
        name = next(info.name for info in opened.states(uid) if info.kind != "timer")
        return total(opened.read(uid, name).read_all().column("value"))


def cpu_seconds() -> float:
    """CPU time of this process and all its descendants, those that have ended included."""
    parents, times = dict[int, int](), dict[int, int]()
    for pid, fields in _processes():
        parents[pid] = int(fields[1])
        times[pid] = sum(map(int, fields[11:15]))
    return sum(ticks for pid, ticks in times.items() if _descends(pid, parents)) / _TICKS


def _processes() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield int(name), Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue


def _descends(pid: int, parents: dict[int, int]) -> bool:
    own = os.getpid()
    while pid not in (0, 1, own):
        pid = parents.get(pid, 0)
    return pid == own
