"""One Spark session for all tests of this folder, and small helpers to feed and run streaming queries."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Functions that tests define are shipped by value, as those of a user's script are.
    from pyspark import cloudpickle

    from spark_integration import spark_session

    folder = tmp_path_factory.mktemp("spark")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = spark_session("local[2,4]", spark__sql__warehouse__dir=folder / "warehouse",
                                spark__local__dir=folder / "local", spark__driver__memory="1g",
                                spark__ui__showConsoleProgress=False)
        session.sparkContext.setLogLevel("OFF")
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None) or ""
        if "tests/spark_integration" in name:
            cloudpickle.register_pickle_by_value(module)
    yield session
    session.stop()


class Feed:
    """A folder that a file stream reads: each `add` is one file, hence one micro-batch."""

    def __init__(self, spark: Any, folder: Path, schema: str) -> None:
        self._spark, self._folder, self._schema = spark, folder, schema
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, **columns: Any) -> None:
        table = pa.table({name: value if isinstance(value, pa.Array) else pa.array(value)
                          for name, value in columns.items()})
        path = self._folder / f"part-{self._count:05d}.parquet"
        hidden = self._folder / f".{path.name}"
        pq.write_table(table, hidden)
        stamp = 1_600_000_000 + self._count  # file streams order by time of change
        os.utime(hidden, (stamp, stamp))
        hidden.rename(path)
        self._count += 1

    def stream(self, spark: Any = None) -> Any:
        return (spark or self._spark).readStream.schema(self._schema).option("maxFilesPerTrigger", "1").parquet(
            str(self._folder))


@pytest.fixture
def feed(spark: Any, tmp_path: Path) -> Callable[..., Feed]:
    def make(schema: str, name: str = "in") -> Feed:
        return Feed(spark, tmp_path / name, schema)

    return make


class Collector:
    """A foreachBatch sink keyed by batch id: running a batch again replaces what it gave."""

    def __init__(self) -> None:
        self.batches: dict[int, list[dict[str, Any]]] = {}

    def __call__(self, df: Any, batch: int) -> None:
        self.batches[batch] = [row.asDict(recursive=True) for row in df.collect()]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]


@pytest.fixture
def run_query(tmp_path: Path) -> Callable[..., Collector]:
    """Run a streaming DataFrame over all input there is; the rows by batch id. Call again to restart it."""

    def run(df: Any, *, checkpoint: str = "spark-checkpoint", into: Collector | None = None,
            sink: Any = None) -> Collector:
        collector = into if into is not None else Collector()
        query = df.writeStream.foreachBatch(sink or collector).option(
            "checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
        return collector

    return run
