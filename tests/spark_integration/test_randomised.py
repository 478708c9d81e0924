"""Random data, batch cuts, faults and rescalings on a real session: state and output are what plain Spark computes.

A seed decides everything, so that a failure can be played again: `HOLDFAST_SPARK_SEED=7 pytest ...`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.dataflow.functions import KeyedProcessFunction
from spark_integration import register, stateful
from statebackend import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]
SCHEMA = "user string, id bigint, amount bigint"
OUTPUT = "user string, id bigint, n bigint, total bigint"


class Ledger(KeyedProcessFunction):
    """Running count and sum per user, and all ids seen; fails once at each of the ids given."""

    def __init__(self, folder: Path, faults: dict[int, str]) -> None:
        self.folder, self.faults = str(folder), faults

    def open(self, ctx: Any) -> None:
        self.count = ctx.state(ValueStateDescriptor("count", int, default=0))
        self.sums = ctx.state(MapStateDescriptor("sums", str, int))
        self.ids = ctx.state(ListStateDescriptor("ids", int))

    def process(self, record: Any, ctx: Any) -> Any:
        n, total = self.count.value() + 1, (self.sums.get("all") or 0) + record["amount"]
        self.count.update(n)
        self.sums.put("all", total)
        self.ids.add(record["id"])
        self.fail(record["id"])
        yield {"user": ctx.key, "id": record["id"], "n": n, "total": total}

    def fail(self, number: int) -> None:
        kind, marker = self.faults.get(number), Path(self.folder, f"failed-{number}")
        if kind is None or marker.exists():
            return
        marker.touch()
        if kind == "exit":
            os._exit(9)
        raise RuntimeError("made to fail")


class SinkFailed(Exception):
    """The sink fails after it has written: Spark's commit is missing, ours is there."""


def seeds() -> list[Any]:
    if chosen := os.environ.get("HOLDFAST_SPARK_SEED"):
        return [int(chosen)]
    return [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]


def add_batches(source: Any, dice: random.Random, ids: int, count: int) -> int:
    """More input, cut at random; the number of ids so far."""
    for _ in range(count):
        size = dice.choice([1, 5, 40, 200])
        source.add(user=[f"user-{int(dice.paretovariate(0.6)) % 40}" for _ in range(size)],
                   id=list(range(ids, ids + size)), amount=[dice.randrange(-100, 100) for _ in range(size)])
        ids += size
    return ids


@pytest.mark.parametrize("seed", seeds())
def test_state_and_output_are_what_plain_spark_computes(seed: int, spark: Any, feed: Callable[..., Any],
                                                        tmp_path: Path) -> None:
    dice = random.Random(seed)
    source, rows, ids = feed(SCHEMA), {}, 0
    backend = dice.choice(["rocksdb", "filesystem"])
    for _ in range(3):
        first = ids
        ids = add_batches(source, dice, ids, dice.randrange(1, 4))
        faults = {dice.randrange(first, ids): dice.choice(["raise", "exit"]) for _ in range(dice.randrange(3))}
        fail_at = {dice.randrange(8)} if dice.random() < 0.6 else set()

        def sink(df: Any, batch: int, failing: set[int] = fail_at) -> None:
            rows[batch] = [tuple(row) for row in df.collect()]
            if batch in failing:
                failing.remove(batch)
                raise SinkFailed

        while True:
            out = stateful(source.stream(), key="user", function=Ledger(tmp_path, faults), output=OUTPUT, uid="ledger",
                           checkpoint=str(tmp_path / "state"), parallelism=dice.randrange(1, 5), backend=backend,
                           order_by="id", retain=dice.choice([2, 100]))
            query = out.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "ck")).trigger(
                availableNow=True).start()
            try:
                query.awaitTermination()
                break
            except Exception as error:
                if "SinkFailed" not in str(error):
                    raise

    plain = spark.read.schema(SCHEMA).parquet(str(tmp_path / "in"))
    plain.createOrReplaceTempView("plain")
    expected = spark.sql("select user, id, count(*) over w n, sum(amount) over w total from plain "
                         "window w as (partition by user order by id rows unbounded preceding)")
    assert sorted(row for batch in rows.values() for row in batch) == sorted(tuple(row) for row in expected.collect())

    register(spark)

    def stored(state: str, columns: str) -> list[tuple[Any, ...]]:
        frame = spark.read.format("holdfast").option("operator", "ledger").option("state", state).load(
            str(tmp_path / "state"))
        return sorted(tuple(row) for row in frame.selectExpr("key", columns).collect())

    def computed(query: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in spark.sql(query).collect())

    assert stored("count", "value") == computed("select user, count(*) from plain group by user")
    assert stored("sums", "map_value") == computed("select user, sum(amount) from plain group by user")
    assert stored("ids", "value") == computed("select user, id from plain")
