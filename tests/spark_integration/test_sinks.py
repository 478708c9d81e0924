"""Spark's own sinks, with no hook of ours in them: files and tables hold every row exactly once, through restarts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from checkpoint.storage.store import FileStore
from spark_integration import stateful
from spark_integration.epoch_store import EpochStore
from statebackend import ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
OUTPUT = "user string, n bigint"


class FailingOnce(KeyedProcessFunction):
    """Counts per user; the worker that meets the amount 77 for the first time dies."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))

    def process(self, record: Any, ctx: Any) -> Any:
        self.count.update(self.count.value() + 1)
        if record["amount"] == 77 and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os._exit(9)
        yield {"user": ctx.key, "n": self.count.value()}


class Sink:
    """A sink under test: how a writer starts on it, and what a reader finds in it."""

    def __init__(self, spark: Any, kind: str, folder: Path) -> None:
        self._spark, self._kind, self._path = spark, kind, str(folder / "out")
        self._table = f"counts_{folder.name.replace('-', '_')}"

    def start(self, writer: Any) -> Any:
        if self._kind == "table":
            return writer.toTable(self._table, format="parquet")
        return writer.format(self._kind).option("path", self._path).start()

    def rows(self) -> Counter[tuple[str, int]]:
        frame = self._spark.table(self._table) if self._kind == "table" else self._spark.read.schema(OUTPUT).format(
            self._kind).load(self._path)
        return Counter((row.user, row.n) for row in frame.collect())


def every_count(users: list[str]) -> Counter[tuple[str, int]]:
    return Counter((user, n) for user, count in Counter(users).items() for n in range(1, count + 1))


@pytest.mark.parametrize("kind", ["parquet", "json", "table"])
def test_a_sink_of_spark_holds_every_row_once(kind: str, spark: Any, feed: Callable[..., Any], tmp_path: Path) -> None:
    """A worker dies in batch 1; Spark's commit of batch 2 is lost, though the sink has it; a restart has 3 ranges."""
    source, sink, seen = feed("user string, amount bigint"), Sink(spark, kind, tmp_path), []

    def add(batch: int) -> None:
        users = [f"user-{(n * 7 + batch) % 11}" for n in range(30)]
        source.add(user=users, amount=[77 if batch == 1 and n == 20 else n for n in range(30)])
        seen.extend(users)

    def run(parallelism: int) -> None:
        out = stateful(source.stream(), key="user", function=FailingOnce(tmp_path / "failed"), output=OUTPUT,
                       uid="count", checkpoint=str(tmp_path / "state"), parallelism=parallelism)
        sink.start(out.writeStream.option("checkpointLocation", str(tmp_path / "ck")).trigger(
            availableNow=True)).awaitTermination()

    for batch in range(3):
        add(batch)
    run(2)
    assert (tmp_path / "failed").exists()
    assert sink.rows() == every_count(seen)
    (tmp_path / "ck" / "commits" / "2").unlink()
    (tmp_path / "ck" / "commits" / ".2.crc").unlink(missing_ok=True)
    add(3)
    run(3)
    assert sink.rows() == every_count(seen)
    chain = EpochStore(FileStore.at(str(tmp_path / "state")), "count").chain()
    assert [epoch.epoch for epoch in chain] == [3, 2, 1, 0]
